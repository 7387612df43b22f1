"""Targets of benchmarks: what the option --check prints, and what `bench/record` writes into docs/performance.md."""

import json
import os
import sys

# The scripts that import this file need no compiled copy of it.
sys.dont_write_bytecode = True

# The name of the variable with the path of the file to which each figure is appended, as a line of JSON.
FIGURES = "FATHOM_BENCH_FIGURES"


def at_least(what, figure, target, unit="", beside=""):
    """Checks that a figure is at least the target. The figure is `None` if it was not measured. `beside` has the
    figures from which it was made, or which explain it."""
    return verdict(what, figure, target, unit, beside, True)


def at_most(what, figure, target, unit="", beside=""):
    """Checks that a figure is at most the target; the same otherwise."""
    return verdict(what, figure, target, unit, beside, False)


def verdict(what, figure, target, unit, beside, is_least):
    """Prints a target, the figure and whether the target holds. Returns whether it holds."""
    is_held = holds(figure, target, is_least)
    print(f"{'holds' if is_held else 'FAILS'}: {what}: {shown(figure, unit)} (target: {bound(target, unit, is_least)}"
          f"{'; ' + beside if beside else ''})", flush=True)
    path = os.environ.get(FIGURES)
    if path:
        row = {"what": what, "figure": figure, "target": target, "unit": unit, "beside": beside, "is_least": is_least}
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    return is_held


def holds(figure, target, is_least):
    """Whether a figure reaches a target."""
    return figure is not None and (figure >= target if is_least else figure <= target)


def shown(figure, unit):
    """A figure as text."""
    return "not measured" if figure is None else f"{figure:,.4g}{unit}"


def bound(target, unit, is_least):
    """A target as text."""
    return f"{target:,g}{unit} or {'more' if is_least else 'less'}"


def status(verdicts):
    """The exit status: 1 if a target does not hold. All targets are evaluated."""
    return int(not all(list(verdicts)))
