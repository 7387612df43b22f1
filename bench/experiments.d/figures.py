"""Figures of several rounds: medians, confidence intervals, and tables."""

import statistics
import textwrap

# Student's t, two-sided, for 95 %, by degrees of freedom.
T = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
     2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
     2.052, 2.048, 2.045]


class Figure:
    """The median of the rounds, and half of the 95 % confidence interval of their mean."""

    def __init__(self, values):
        self.values = list(values)
        self.median = statistics.median(self.values)
        self.half = None
        if len(self.values) > 1:
            freedom = len(self.values) - 1
            t = T[freedom - 1] if freedom <= len(T) else 1.96
            self.half = t * statistics.stdev(self.values) / len(self.values) ** 0.5

    def text(self, digits=2, sign=False, unit=""):
        text = f"{self.median:{'+' if sign else ''},.{digits}f}"
        return text + ("" if self.half is None else f" ±{self.half:,.{digits}f}") + unit

    def json(self):
        return {"median": self.median, "confidence_95": self.half, "rounds": self.values}


def each(samples, value):
    """The figure of a value over all rounds."""
    return Figure(value(sample) for sample in samples)


def against(samples, base, value):
    """The figure of the differences from the base of the same round."""
    return Figure(value(sample) - value(other) for sample, other in zip(samples, base))


def ratio(samples, base, value):
    """The figure of the ratios to the base of the same round."""
    return Figure(value(sample) / value(other) if value(other) else float("nan")
                  for sample, other in zip(samples, base))


def points(value):
    """A figure of the paper, as text."""
    return "" if value is None else value if isinstance(value, str) else f"{value:.2f}"


def beside(ours, paper):
    """The ratio of our figure to the paper's, if both have the same sign."""
    if not isinstance(paper, (int, float)) or ours * paper <= 0:
        return ""
    return f"{ours / paper:.2f} ×"


class Report:
    """The results of an experiment: tables, remarks, and whether the aims are met."""

    def __init__(self, number, title):
        self.number, self.title = number, title
        self.lines, self.aims, self.wrong, self.data = [], [], [], {}

    def say(self, text):
        self.lines += textwrap.wrap(text, 98, subsequent_indent="  ") or [""]

    def table(self, head, rows):
        """Adds rows of texts below a head. All columns but the first are right-aligned."""
        widths = [max(len(row[at]) for row in [head, *rows]) for at in range(len(head))]
        for row in [head, *rows]:
            cells = [f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:])]
            self.lines.append("  ".join([f"{row[0]:{widths[0]}}", *cells]).rstrip())

    def aim(self, text, figure, limit, unit="", remark=""):
        """Checks the aim that a figure is at most the limit."""
        met = figure.median <= limit
        sure = not figure.half or abs(figure.median - limit) > figure.half
        doubt = "" if sure else "the difference is within the confidence interval"
        beside = "; ".join(part for part in (f"± {figure.half:.2f}" if figure.half else "", remark, doubt) if part)
        self.aims.append({"aim": text, "met": met, "sure": sure, "limit": limit, "unit": unit, "beside": beside,
                          **figure.json()})
        remarks = "".join(f"; {part}" for part in (remark, doubt) if part)
        self.say(f"{'met' if met else 'NOT MET'}: {text} ({figure.text(unit=unit)}){remarks}")

    def check(self, samples):
        """Reports whether the measurements saw all events."""
        differ = [f"{name}, round {at + 1}: {sample['check']}" for name, rounds in samples.items()
                  for at, sample in enumerate(rounds) if sample["check"]]
        missing = sum(sample["missing"] for rounds in samples.values() for sample in rounds)
        seen = sum(sample["seen"] or 0 for rounds in samples.values() for sample in rounds)
        self.wrong += differ
        if differ:
            for text in differ:
                self.say(f"COUNTS DIFFER: {text}")
        else:
            text = f"{missing:,} were reported as dropped or late" if missing else "none missing"
            self.say(f"counts agree with the tap's: {seen:,} events were seen, {text}")

    def text(self):
        return "\n".join([f"Experiment {self.number}: {self.title}", *(f"  {line}" for line in
                                                                         self.lines)])

    def json(self):
        return {"title": self.title, "aims": self.aims, "wrong": self.wrong, **self.data}
