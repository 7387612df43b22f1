"""Experiments 4 and 5: the work that moves from the host to a centre, and the savings of filtering at
the host."""

import time

from figures import Report, against, beside, each, points, ratio
from host import NO_DISK, SLOW, compare, host, measure, rate_line, threads, watching
from queries import MACHINE, copies, counter, forwarded, paper, query_5
from rig import Centre, Daemon, Failed, Load, Rig, interval, load_seconds, rounds, wait_until

Q5X8 = copies(paper("05"), 8)
# In these scripts the queries run at the centre, over tuples of the paper.
Q0Q0 = forwarded("Tuples") + counter("Tuples") + "query : select * from Tuples;\n"
Q0Q5X8 = forwarded("Tuples") + counter("Tuples") + copies(query_5("Tuples", True), 8)
QFQ5X8 = (forwarded("Tuples", 'Type = "Q"') + counter("Tuples")
          + copies(query_5("Tuples", False), 8))
# In this script the host counts the events of each second.
SPLIT = counter() + Q5X8


def at_host(sample):
    """CPU time of all processes except the centre."""
    return host(sample) - at_centre(sample)


def watching_at_host(sample):
    return watching(sample) - at_centre(sample)


def at_centre(sample):
    return sample["cpu"].get("centre", 0.0)


def bytes_per_event(sample):
    return sample["grown"]["bytes"] / sample["grown"]["events"]


def kilobytes_per_second(sample):
    return sample["grown"]["bytes"] / sample["seconds"] / 1e3


def sent(daemon):
    """The events that a host's fragments have seen, the bytes sent, and what was dropped."""
    status = daemon.get("/v1/monitor")
    return {"seen": status["events"], "bytes": status["sent_bytes"],
            "events_dropped": status["dropped_events"], "rows_dropped": status["dropped_rows"]}


def all_seen(daemons):
    """Waits until the hosts' fragments have seen all events. Returns the number of events that the
    taps counted, and the sums of the hosts' counts."""
    events = sum(daemon.events() for daemon in daemons)
    counts = {}

    def seen():
        hosts = [sent(daemon) for daemon in daemons]
        counts.update({name: sum(host[name] for host in hosts) for name in hosts[0]})
        return counts["seen"] + counts["events_dropped"] >= events

    try:
        wait_until("the hosts' last events", seen, 30)
    except Failed as failed:
        raise Failed(f"{failed}: {counts} of {events:,} events") from failed
    return events, counts


def linked(options, script, share):
    """Measures a daemon under load that is linked to a centre. For `share` see `finish`."""
    with Rig() as rig:
        centre = Centre(rig, script, "127.0.0.1:0")
        server = Daemon(rig, disk=SLOW, monitor=centre.address, vm=MACHINE)
        server.wait_for_centre()
        load = Load(rig, server, options.depth, load_seconds(options))
        sample = interval(options, [server, centre], [load],
                          lambda: {"events": server.events(), "bytes": sent(server)["bytes"]})
        sample["requests_per_second"] = load.requests_per_second()
        return sample | finish(centre, [server], time.time_ns(), share)


def finish(centre, daemons, end_ns, share=None):
    """Compares the query's count with the counts of the hosts' fragments and of the taps.

    `share` is the share of the events that reach a counter at the centre, as one row each. Without
    a share the hosts count, and the centre adds their counts.
    """
    events, counts = all_seen(daemons)
    results = centre.results()
    results.wait(centre, end_ns)
    # The centre prints the table of hosts twice a second.
    time.sleep(1.1)
    late, dropped = centre.late(), counts["events_dropped"]
    check = compare(counts["seen"], dropped, events, results.rows)
    due = round((events - dropped) * (share or 1))
    lost = late + counts["rows_dropped"] if share else 0
    if not check and results.seen + lost != due:
        check = f"{results.seen:,} counted and {lost:,} lost of {due:,}"
    return {"seen": counts["seen"], "counted": results.seen, "events": events, "rows": results.rows,
            "missing": dropped + counts["rows_dropped"] + late, "check": check}


def four(options):
    report = Report(4, "offloading to a centre")
    ways = {
        "Q0": lambda: measure(options, counter() + paper("00")),
        "Q5x8": lambda: measure(options, counter() + Q5X8),
        "Q0Q0": lambda: linked(options, Q0Q0, 1),
        "Q0Q5x8": lambda: linked(options, Q0Q5X8, 1),
        "split": lambda: linked(options, SPLIT, None),
    }
    names = {"Q0": "Q0, at the host", "Q5x8": "Q5x8, at the host", "Q0Q0": "Q0Q0",
             "Q0Q5x8": "Q0Q5x8", "split": "Q5x8, split automatically"}
    figures = {"Q0": (16.41, None), "Q5x8": (28.0, None), "Q0Q0": ("> 16.41", 4.07),
               "Q0Q5x8": ("as Q0Q0", 16.5), "split": (None, None)}
    samples = rounds(options, ways, lambda name: ways[name]())
    rate_line(report, samples, options.depth)
    rows = []
    for name in ways:
        ours, theirs = each(samples[name], at_centre), figures[name][1]
        linked_way = "centre" in samples[name][0]["cpu"]
        rows.append([
            names[name], each(samples[name], at_host).text(), points(figures[name][0]),
            each(samples[name], watching_at_host).text(),
            ours.text() if linked_way else "", points(theirs),
            beside(ours.median, theirs) if linked_way else "", each(samples[name], host).text(),
            each(samples[name], bytes_per_event).text(1) if linked_way else ""])
    report.table(["", "host", "paper", "no disk", "centre", "paper", "ours/paper", "both",
                  "bytes/event"], rows)
    report.say(NO_DISK)
    threads(report, samples)
    report.say("Q0Q0 and Q0Q5x8 send whole tuples of the paper to the centre, which does all the work: "
               "the queries follow Rstream of [now], which the split does not pass. "
               "Split automatically, the host sends only the data that Query 5 needs")
    moved = against(samples["Q0Q5x8"], samples["Q0Q0"], at_host)
    report.aim("for Q0Q5x8 the host takes at most 0.5 points more than for Q0Q0", moved, 0.5,
               " points")
    total = ratio(samples["Q0Q5x8"], samples["Q5x8"], host)
    report.aim("for Q0Q5x8 host and centre take at most 1.18 times the CPU time of Q5x8 at the host, as "
               "in the paper (33 to 28)", total, 33 / 28, " ×")
    saved = against(samples["split"], samples["Q5x8"], at_host)
    report.aim("split automatically, Q5x8 takes less CPU time of the host than entirely at the host",
               saved, 0.0, " points")
    report.check(samples)
    report.data = {"samples": samples}
    return report


def five(options):
    report = Report(5, "filtering at the host")
    # The script at the centre, and the share of the events that its counter must see there.
    ways = {"Q0Q5'x8": (Q0Q5X8, 1), "QFQ5'x8": (QFQ5X8, 0.5), "split": (SPLIT, None)}
    names = {"Q0Q5'x8": "Q0Q5x8: all forwarded", "QFQ5'x8": "QFQ5'x8: filtered manually",
             "split": "Q5x8: split automatically"}
    samples = rounds(options, ways, lambda name: linked(options, *ways[name]))
    rate_line(report, samples, options.depth)
    base = samples["Q0Q5'x8"]
    report.table(
        ["", "host", "centre", "tuples/event", "kB/s", "bytes/event", "to all", "paper"],
        [[names[name], each(samples[name], at_host).text(), each(samples[name], at_centre).text(),
          each(samples[name], lambda sample: sample["counted"] / sample["events"]).text()
          if name != "split" else "",
          each(samples[name], kilobytes_per_second).text(1),
          each(samples[name], bytes_per_event).text(1),
          ratio(samples[name], base, bytes_per_event).text(unit=" ×"),
          {"Q0Q5'x8": "1", "QFQ5'x8": "0.50"}.get(name, "")] for name in ways])
    rows = []
    for name in ("QFQ5'x8", "split"):
        for side, value, theirs in (("host", at_host, -1.2), ("centre", at_centre, -1.8),
                                    ("host, no disk", watching_at_host, None)):
            change = against(samples[name], base, value)
            theirs = None if name == "split" else theirs
            part = ratio(samples[name], base, value)
            rows.append([f"{names[name]}, {side}", change.text(sign=True),
                         "" if theirs is None else f"{theirs:+.2f}",
                         beside(change.median, theirs), part.text(unit=" ×")])
    report.table(["points over all forwarded", "ours", "paper", "ours/paper", "to all"], rows)
    report.say(NO_DISK)
    report.say("bytes are those that the daemon sends over the link, compressed, with watermarks 100 "
               "times a second; the paper's are the number of tuples times their size")
    for name in ("QFQ5'x8", "split"):
        part = ratio(samples[name], base, bytes_per_event)
        report.aim(f"{names[name]}: at most half of the bytes", part, 0.5, " ×")
        for side, value in (("host", at_host), ("centre", at_centre)):
            change = against(samples[name], base, value)
            report.aim(f"{names[name]}: the {side} takes less CPU time", change, 0.0, " points")
    report.check(samples)
    report.data = {"samples": samples}
    return report
