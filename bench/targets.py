"""Targets of benchmarks, for the option --check."""

import sys

# The scripts that import this file need no compiled copy of it.
sys.dont_write_bytecode = True


def at_least(what, figure, target, unit=""):
    """Checks that a figure is at least the target. The figure is `None` if it was not measured."""
    return verdict(what, figure, f"{target:,g}{unit} or more", unit,
                   figure is not None and figure >= target)


def at_most(what, figure, target, unit=""):
    """Checks that a figure is at most the target. The figure is `None` if it was not measured."""
    return verdict(what, figure, f"{target:,g}{unit} or less", unit,
                   figure is not None and figure <= target)


def verdict(what, figure, target, unit, holds):
    """Prints a target, the figure and whether the target holds. Returns whether it holds."""
    text = "not measured" if figure is None else f"{figure:,.4g}{unit}"
    print(f"{'holds' if holds else 'FAILS'}: {what}: {text} (target: {target})", flush=True)
    return holds


def status(verdicts):
    """The exit status: 1 if a target does not hold. All targets are evaluated."""
    return int(not all(list(verdicts)))
