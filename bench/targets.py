"""Targets of benchmarks: what --check prints and returns."""

import sys

# The scripts beside this file have no endings, and need no compiled copies of it.
sys.dont_write_bytecode = True


def at_least(what, figure, target, unit=""):
    """A figure that is wanted at this or more; `None` where it was not measured."""
    return verdict(what, figure, f"{target:,g}{unit} or more", unit,
                   figure is not None and figure >= target)


def at_most(what, figure, target, unit=""):
    """A figure that is wanted at this or less; `None` where it was not measured."""
    return verdict(what, figure, f"{target:,g}{unit} or less", unit,
                   figure is not None and figure <= target)


def verdict(what, figure, target, unit, holds):
    """Prints one target, the figure and whether it holds; returns the last."""
    text = "not measured" if figure is None else f"{figure:,.4g}{unit}"
    print(f"{'holds' if holds else 'FAILS'}: {what}: {text} (target: {target})", flush=True)
    return holds


def status(verdicts):
    """The exit status: 1 where a target does not hold. All of them are looked at."""
    return int(not all(list(verdicts)))
