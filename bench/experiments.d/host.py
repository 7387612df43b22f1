"""Experiments 1 to 3: the cost of tracing and queries on the host itself."""

import re

from figures import Figure, Report, against, beside, each, points, ratio
from queries import MACHINE, copies, counter, paper
from rig import Daemon, Load, Query, Reader, Rig, interval, load_seconds, rounds

# A request takes 2 to 4 ms, so that the depth determines the rate: 32 give about 20,000 events a
# second.
SLOW = 'layers = [{ kind = "delay", time = "2ms", jitter = "2ms" }]'
# The timing of a solid-state disk: the load waits for the disk, as in the paper.
MODELLED = 'model = { kind = "sata-ssd", seed = 1 }'
NO_DISK = ("no disk: the same without the threads of the disk's queues, whose work does not depend on "
           "the queries, and whose noise is in the other figures")
# The longest measurement of throughput: at full rate there are many events.
FULL_SECONDS_MAX = 5


def host(sample):
    """CPU time of the daemon and the reader of its events, as in the paper's figures."""
    return sum(sample["cpu"].values())


def daemon(sample):
    return sample["cpu"]["host"]


def watching(sample):
    """CPU time of the host without the threads of the disk's queues. Their work does not depend on the
    queries, but it is most of the CPU time and of its noise."""
    queues = sum(part for thread, part in sample["threads"].items() if re.match(r"q\d+-", thread))
    return host(sample) - queues


def reader(sample):
    return host(sample) - daemon(sample)


def events_per_second(sample):
    return sample["grown"]["events"] / sample["seconds"]


def requests_per_second(sample):
    return sample["requests_per_second"]


def us_per_event(sample):
    return host(sample) * 1e4 / events_per_second(sample)


def compare(seen, missing, events, rows=1):
    """How the seen events differ from all events; empty if they do not."""
    if seen + missing != events:
        return f"{seen:,} seen and {missing:,} missing of {events:,}"
    return "" if rows > 0 and events > 0 else f"{rows:,} rows of {events:,} events"


def measure(options, script=None, reads=False, disk=SLOW, tap=True, depth=None):
    """Measures a daemon under load, with a query, a reader, or no reader of its events."""
    with Rig() as rig:
        server = Daemon(rig, disk=f"tap = {str(tap).lower()}\n{disk}", vm=MACHINE)
        listener = Query(rig, server, script) if script else Reader(rig, server) if reads else None
        load = Load(rig, server, depth or options.depth, load_seconds(options))
        count = (lambda: {"events": server.events()}) if tap else dict
        sample = interval(options, [server, listener] if listener else [server], [load], count)
        requests = load.requests_per_second()
        if not tap:
            sample["grown"]["events"] = 2 * requests * sample["seconds"]
        events = server.events() if tap else 0
        sample |= {"requests_per_second": requests, "seen": None, "missing": 0, "check": ""}
        if listener:
            seen, rows, missing = listener.finish()
            sample |= {"seen": seen, "rows": rows, "missing": missing,
                       "check": compare(seen, missing, events, rows)}
        return sample


def throughput(options, seconds, script, reads, tap, disk):
    """Measures the requests per second at full rate."""
    with Rig() as rig:
        server = Daemon(rig, disk=f"tap = {str(tap).lower()}\n{disk}", vm=MACHINE)
        listener = Query(rig, server, script) if script else Reader(rig, server) if reads else None
        load = Load(rig, server, options.depth, seconds, warmup_ms=500)
        sample = {"requests_per_second": load.requests_per_second(), "seen": None, "missing": 0,
                  "check": ""}
        if listener:
            events = server.events()
            seen, rows, missing = listener.finish()
            sample |= {"seen": seen, "missing": missing,
                       "check": compare(seen, missing, events, rows)}
        return sample


def rate_line(report, samples, depth):
    """Reports the rate of events of the measurement, and returns it."""
    rate = Figure(events_per_second(sample) for sampled in samples.values() for sample in sampled)
    report.say(f"{rate.median:,.0f} events/s ({depth} requests in flight, 2 to 4 ms each); CPU in "
               "per cent of a core; the paper's core had 2 GHz, and its rate is not given")
    return rate.median


def within(report, text, figure, limit, rate):
    """Checks an aim in points. Also reports the highest rate of events at which it would hold, if the
    cost is proportional to the rate."""
    remark = ""
    if figure.median > 0:
        remark = f"at this cost for an event, up to {rate * limit / figure.median:,.0f} events/s"
    report.aim(text, figure, limit, " points", remark)


def one(options):
    report = Report(1, "overhead of tracing")
    baseline = counter() + paper("00")
    # The script, whether there is a reader, and whether there is a tap.
    ways = {"B0": (None, False, False), "tap": (None, False, True), "B1": (None, True, True),
            "Q0": (baseline, False, True)}
    figures = {"B0": 15.08 - 3, "tap": None, "B1": 15.08, "Q0": 16.41}
    names = {"B0": "B0: no tap", "tap": "a tap, no reader", "B1": "B1: read and dropped",
             "Q0": "Q0: Query 0"}

    def sample(name):
        script, reads, tap = ways[name]
        return measure(options, script, reads, tap=tap)

    samples = rounds(options, ways, sample)
    rate = rate_line(report, samples, options.depth)
    report.table(
        ["", "daemon", "reader", "both", "paper", "over B0", "µs/event"],
        [[names[name], each(samples[name], daemon).text(), each(samples[name], reader).text(),
          each(samples[name], host).text(), points(figures[name]),
          against(samples[name], samples["B0"], host).text(sign=True),
          each(samples[name], us_per_event).text()] for name in ways])
    tracing = against(samples["B1"], samples["B0"], host)
    query = against(samples["Q0"], samples["B1"], host)
    report.table(["points", "ours", "paper", "ours/paper"], [
        ["B1 over B0: tracing", tracing.text(sign=True), "+3.00", beside(tracing.median, 3.0)],
        ["Q0 over B1: Query 0", query.text(sign=True), "+1.32", beside(query.median, 1.32)]])
    threads(report, samples)
    within(report, "tracing and reading costs at most the paper's 3 points", tracing, 3.0, rate)
    within(report, "Query 0 costs at most 1.32 points more", query, 1.32, rate)
    report.check(samples)

    seconds = min(options.seconds, FULL_SECONDS_MAX)
    data = {}
    for title, disk in (("a SATA SSD's timing", MODELLED), ("memory without delays", "")):
        full = rounds(options, ways, lambda name, disk=disk: throughput(
            options, seconds, *ways[name], disk))
        report.say("")
        report.say(f"throughput, {title}: requests/s at depth {options.depth}")
        report.table(["", "requests/s", "to B0", "missing"], [
            [names[name], each(full[name], requests_per_second).text(0),
             ratio(full[name], full["B0"], requests_per_second).text(3, unit=" ×"),
             f"{sum(sample['missing'] for sample in full[name]):,}"] for name in ways])
        for name in ("B1", "Q0"):
            left = ratio(full[name], full["B0"], requests_per_second)
            loss = Figure(100 * (1 - value) for value in left.values)
            report.aim(f"{title}: {name} takes at most 2 % of the throughput", loss, 2.0, " %")
        report.check(full)
        data[title] = full
    report.data = {"samples": samples, "throughput": data}
    return report


def threads(report, samples):
    """Reports the daemon's CPU time by thread."""
    for name, sampled in samples.items():
        found = sorted({thread for sample in sampled for thread in sample["threads"]})
        parts = [(each(sampled, lambda sample, of=thread: sample["threads"].get(of, 0.0)), thread)
                 for thread in found]
        text = ", ".join(f"{thread} {figure.text()}" for figure, thread in parts
                         if figure.median >= 0.05)
        report.say(f"the daemon's threads, {name}: {text or 'nothing'}")


def two(options):
    report = Report(2, "queries of different complexity, over Query 0")
    figures = {"01": -0.03, "05": 1.43, "09": 2.0, "10": 3.53}
    names = [f"{number:02}" for number in range(11)]
    samples = rounds(options, names, lambda name: measure(options, counter() + paper(name)))
    rate = rate_line(report, samples, options.depth)
    rows = []
    for name in names:
        over = against(samples[name], samples["00"], host)
        rows.append([
            f"Query {int(name)}", each(samples[name], daemon).text(),
            each(samples[name], reader).text(), "" if name == "00" else over.text(sign=True),
            f"{figures[name]:+.2f}" if name in figures else "",
            "" if name == "01" else beside(over.median, figures.get(name)),
            "" if name == "00" else against(samples[name], samples["00"], watching).text(sign=True),
            each(samples[name], us_per_event).text(),
            f"{sum(sample['rows'] for sample in samples[name]):,}"])
    report.table(["", "daemon", "query", "over Query 0", "paper", "ours/paper", "no disk",
                  "µs/event", "rows"], rows)
    report.say(NO_DISK)
    report.say("the paper's figures are those in its text")
    if options.settle < 3:
        report.say("windows of 3 s were not full: --settle 4")
    worst = max(names[1:], key=lambda name: against(samples[name], samples["00"], host).median)
    within(report, "no query costs more than the paper's 3.53 points over Query 0 (most: Query "
           f"{int(worst)})", against(samples[worst], samples["00"], host), 3.53, rate)
    report.check(samples)
    report.data = {"samples": samples}
    return report


def three(options):
    report = Report(3, "queries in parallel")
    counts = [1, 2, 4, 8, 16, 100]
    figures = {"Q5x1": 1.43, "Q9x1": 2.0, "Q5x8": 28.0 - 16.41}
    ways = {"Query 0": paper("00")}
    ways |= {f"Q5x{count}": copies(paper("05"), count) for count in counts}
    ways |= {f"Q9x{count}": copies(paper("09"), count) for count in counts}
    ways |= {f"Q9x{count}, different": copies(paper("09"), count, different=True)
             for count in counts if count >= 8}
    # The depth is lower because a hundred copies give a hundred times the rows.
    depth = max(options.depth // 4, 1)
    samples = rounds(options, ways, lambda name: measure(
        options, counter() + ways[name], depth=depth))
    rate_line(report, samples, depth)
    rows, growths = [], {}
    for name in list(ways)[1:]:
        sampled, over = samples[name], against(samples[name], samples["Query 0"], host)
        growths[name] = ratio(sampled, samples[name.split("x")[0] + "x1"], reader)
        rows.append([
            name, each(sampled, daemon).text(), each(sampled, reader).text(), over.text(sign=True),
            points(figures.get(name)), beside(over.median, figures.get(name)),
            against(sampled, samples["Query 0"], watching).text(sign=True),
            growths[name].text(unit=" ×"), f"{sum(sample['rows'] for sample in sampled):,}",
            f"{sum(sample['missing'] for sample in sampled):,}"])
    report.table(["", "daemon", "query", "over Query 0", "paper", "ours/paper", "no disk",
                  "query, to one", "rows", "missing"], rows)
    report.say(NO_DISK)
    report.say("8 copies are the most that STREAM accepts. Copies share equal work, but the results of "
               "each copy are written separately. Different ones have windows of 3 s and some ms, so "
               "they share little")
    for name in ("Q5x8", "Q5x100", "Q9x8", "Q9x100", "Q9x8, different", "Q9x100, different"):
        count = int(name.split("x")[1].split(",")[0])
        report.aim(f"{name}: at most {count} times the cost of one", growths[name], count, " ×")
        lost = each(samples[name], lambda sample: sample["missing"])
        report.aim(f"{name}: no event is missing", lost, 0)
    report.check(samples)
    report.data = {"samples": samples}
    return report
