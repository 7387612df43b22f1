"""Table 1 and Figures 3 and 4 of the paper with two real guests on one modelled hard disk, for
bench/shared-disk --guests."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

from guest import ROOT, Daemon, Guest

# The cases: whether one guest reads, whether the other one writes and to which of its disks, whether guests are
# flushed in idle time, and whether the disks have the layer `schedule`. The disk `spare` is on a device of its
# own: in the case `apart` the guests share the host, but no device.
CASES = {
    "alone": (True, None, False, False),
    "apart": (True, "spare", False, False),
    "writer alone": (False, "writer", False, False),
    "neither": (True, "writer", False, False),
    "flush": (True, "writer", True, False),
    "schedule": (True, "writer", False, True),
    "both": (True, "writer", True, True),
}
# The disks: the guest, the modelled device, and where the disk lies on it.
DISKS = {
    "reader": ("reader", "spindle", "0"),
    "writer": ("writer", "spindle", "50G"),
    "spare": ("writer", "other", "50G"),
}
# The time before a measurement, and the interval of the samples, in seconds.
WARMUP = 5.0
INTERVAL = 0.5
# The loads: the reads between two pauses, the length of a pause, which leaves the device free for about a third
# of the time, the buffered writes, and the age in seconds at which the guest writes them to the disk.
PAGES = "--rw=randwrite --bs=4k --norandommap --rate_iops={}"
LOADS = {
    "often": (800, "3s", PAGES.format(192), 5),
    "seldom": (1300, "5s", PAGES.format(256), 15),
    "short": (50, "200ms", PAGES.format(192), 5),
    "parts": (50, "190ms", "--rw=write --bs=256k --rate=16m", 1),
}
READER = """
fio --name=reader --filename=/dev/vda --size=2g --rw=randread --bs=4k --direct=1 --ioengine=psync \
    --randrepeat=0 --norandommap --thinktime={pause} --thinktime_blocks={reads} --time_based --runtime=3600 \
    > /dev/null 2>&1 &
"""
# Buffered writes of a file.
WRITER_SETUP = """set -e
for disk in vda:/mnt/writer vdb:/mnt/spare; do
    device=/dev/${{disk%:*}} folder=${{disk#*:}}; mkdir -p $folder
    mkfs.ext4 -q -E lazy_itable_init=0,lazy_journal_init=0 $device; mount $device $folder
    dd if=/dev/zero of=$folder/file bs=1M count=512 2> /dev/null; sync
done
echo {age}00 > /proc/sys/vm/dirty_expire_centisecs
echo 25 > /proc/sys/vm/dirty_writeback_centisecs
"""
WRITER = """
fio --name=writer --filename=/mnt/{disk}/file --size=512m {writes} --ioengine=psync \
    --randrepeat=0 --fallocate=none --time_based --runtime=3600 > /dev/null 2>&1 &
"""
# Ends the load of a guest. Without the writes that it has left, the next case begins as this one.
END = "killall -q -INT fio; while pidof fio > /dev/null; do sleep 0.1; done; sync"
# Table 1 of the paper: the time of a read in ms, and the reads per second.
PAPER = {"alone": (16.64, 141), "neither": (39.30, 60), "flush": (20.58, 92)}


def configuration(directory, flushes, schedules):
    text = ""
    for name, (guest, device, offset) in DISKS.items():
        layers = '{ kind = "schedule" }' if schedules else ""
        text += (f'[[disk]]\nname = "{name}"\nvm = "{guest}"\nimage = "{directory}/{name}.img"\n'
                 f'model = {{ kind = "hdd", device = "{device}", size = "100G", offset = "{offset}" }}\n'
                 f"layers = [{layers}]\n"
                 f'[disk.vhost_user]\nsocket = "{directory}/{name}.sock"\n')
    return text + (f'[[guest]]\nvm = "writer"\nflush = ["tunables"]\nflush_min = "256K"\n'
                   f'flush_interval = "1s"\nflush_when_idle = {str(flushes).lower()}\n')


def samples(control, seconds):
    """Samples of one case: the time, the reads with the sum of their times, the written bytes, and the
    dirty data of the writer."""
    found, begun = [], time.monotonic()
    for turn in range(int(seconds / INTERVAL) + 1):
        time.sleep(max(0.0, begun + turn * INTERVAL - time.monotonic()))
        count, _, latency_ns = control.operation("reader", "read")
        written = sum(control.operation(name, "write")[1] for name in ("writer", "spare"))
        found.append((time.monotonic() - begun, count, latency_ns, written, control.dirty("writer") or 0))
    return found


def figures(found):
    """The figures of a case, from its samples."""
    first, last = found[0], found[-1]
    reads, seconds = last[1] - first[1], last[0] - first[0]
    return {
        "reads_per_second": reads / seconds,
        "read_ms": (last[2] - first[2]) / 1e6 / max(reads, 1),
        "written_per_second": (last[3] - first[3]) / seconds,
        "dirty_max": max(sample[4] for sample in found),
    }


def measure(seconds, cases, load, rounds):
    """Runs the cases, each round in another order, with the same guests. Returns the samples of each case in
    each round."""
    number, pause, file_writes, age = LOADS[load]
    with tempfile.TemporaryDirectory(prefix="fathom-", dir="/tmp") as directory:
        for name in DISKS:
            with open(os.path.join(directory, f"{name}.img"), "wb") as file:
                file.truncate(2 << 30)
        daemon = Daemon(directory, configuration(directory, False, False))
        guests = []
        try:
            # Each guest has a processor of its own if there is one: an emulated guest occupies one now and then.
            processors = sorted(os.sched_getaffinity(0))
            for place, guest in enumerate(("reader", "writer")):
                disks = [name for name, disk in DISKS.items() if disk[0] == guest]
                processor = processors[place % len(processors)]
                guests.append(Guest(daemon, guest, disks, memory="768M", processor=processor))
            reader, writer = guests
            writer.run(WRITER_SETUP.format(age=age))
            found = {case: [] for case in cases}
            for turn in range(rounds):
                first = turn % len(cases)
                for case in cases[first:] + cases[:first]:
                    reads, writes, flushes, schedules = CASES[case]
                    daemon.reload(configuration(directory, flushes, schedules))
                    if writes:
                        writer.run(WRITER.format(disk=writes, writes=file_writes))
                    if reads:
                        reader.run(READER.format(reads=number, pause=pause))
                    # The first write-back has begun.
                    time.sleep(WARMUP + age)
                    found[case].append(samples(daemon.control, seconds))
                    reader.run(END)
                    writer.run(END)
                    print(f"{case}: {json.dumps(figures(found[case][-1]))}", file=sys.stderr, flush=True)
            return found
        finally:
            for guest in guests:
                guest.end()
            daemon.end()


def report(found):
    """Prints Table 1 with the figures of the cases: medians of the rounds, with the least and the greatest
    share. The share of the reads is that of the case `apart`. Returns the shares of the reads and of the writes by case."""
    table, shares = {case: [figures(rows) for rows in turns] for case, turns in found.items()}, {}
    print(f"{'two guests, one hard disk':26}{'read':>10}{'reads':>11}{'of apart':>20}{'paper':>22}"
          f"{'written':>12}{'of alone':>20}{'dirty, most':>13}")
    for case, rows in table.items():
        def middle(name):
            return statistics.median(row[name] for row in rows)
        def share(name, alone):
            """The share of each round in the median of what is reached alone."""
            if alone not in table:
                return None
            whole = statistics.median(row[name] for row in table[alone])
            return [row[name] / whole for row in rows]
        is_read, is_written, *_ = CASES[case]
        found_shares = (share("reads_per_second", "apart") if is_read else None,
                        share("written_per_second", "writer alone") if is_written else None)
        shares[case] = found_shares
        texts = [f"{statistics.median(values):.0%} ({min(values):.0%} to {max(values):.0%})" if values else ""
                 for values in found_shares]
        read_ms, reads = PAPER.get(case, (None, None))
        paper = f"{read_ms} ms {reads}/s {reads / PAPER['alone'][1]:.0%}" if reads else ""
        rate = f"{middle('read_ms'):7.1f} ms{middle('reads_per_second'):9.1f}/s" if is_read else " " * 21
        print(f"{case:26}{rate}{texts[0]:>20}{paper:>22}{middle('written_per_second') / 1024:8.0f} K/s"
              f"{texts[1]:>20}{middle('dirty_max') / (1 << 20):9.1f} MiB")
    print(f"Medians of {len(next(iter(found.values())))} rounds, with the least and the greatest of them.")
    return shares


GROUND, INK, GRID = "#ffffff", "#222222", "#dddddd"
READS_INK, DIRTY_INK = "#1f6fb4", "#d9822b"
WIDTH, HEIGHT, LEFT, TOP, GAP = 400, 92, 100, 46, 62


def bins(found):
    """The reads per second in each interval, by its middle."""
    return [((a[0] + b[0]) / 2, (b[1] - a[1]) / (b[0] - a[0])) for a, b in zip(found, found[1:])]


def panel(left, top, points, end, maximum, unit, ink, is_area):
    """A chart of the points."""
    def place(at, value):
        return f"{left + at / end * WIDTH:.1f},{top + HEIGHT - min(value / maximum, 1) * HEIGHT:.1f}"
    lines = []
    for part in (0, 0.5, 1):
        at = top + HEIGHT - part * HEIGHT
        lines.append(f'<path d="M{left},{at} h{WIDTH}" stroke="{GRID}"/>'
                     f'<text x="{left - 6}" y="{at + 4}" text-anchor="end">{maximum * part:g}{unit}</text>')
    line = " ".join(place(*point) for point in points)
    if is_area:
        line = f"{place(points[0][0], 0)} {line} {place(points[-1][0], 0)}"
    fill = f'fill="{ink}" fill-opacity="0.35"' if is_area else 'fill="none"'
    lines.append(f'<polyline points="{line}" {fill} stroke="{ink}" stroke-width="1.3"/>')
    return lines


def picture(found, path):
    """Writes the reads per second and the dirty data of each case over time as an SVG image."""
    rows = list(found)
    end = max(found[case][-1][0] for case in rows)
    reads_max = max(10, 50 * -(-max(value for case in rows for _, value in bins(found[case])) // 50))
    dirty_max = max(1, 2 * -(-max(sample[4] for case in rows for sample in found[case]) // (2 << 20)))
    width, height = LEFT + 2 * WIDTH + GAP + 20, TOP + len(rows) * (HEIGHT + 26) + 24
    second = LEFT + WIDTH + GAP
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        f'font-size="12" fill="{INK}">',
        f'<rect width="{width}" height="{height}" fill="{GROUND}"/>',
        f'<text x="{LEFT}" y="24" font-weight="bold">reads per second of one guest</text>',
        f'<text x="{second}" y="24" font-weight="bold">dirty data of the other guest, in MiB</text>',
    ]
    for index, case in enumerate(rows):
        top = TOP + index * (HEIGHT + 26)
        lines.append(f'<text x="8" y="{top + HEIGHT / 2 + 4}" font-weight="bold">{case}</text>')
        lines += panel(LEFT, top, bins(found[case]), end, reads_max, "", READS_INK, False)
        dirty = [(sample[0], sample[4] / (1 << 20)) for sample in found[case]]
        lines += panel(second, top, dirty, end, dirty_max, "", DIRTY_INK, True)
    bottom = TOP + len(rows) * (HEIGHT + 26) + 2
    for left in (LEFT, second):
        for at in range(0, int(end) + 1, 15):
            lines.append(f'<text x="{left + at / end * WIDTH:.1f}" y="{bottom}" text-anchor="middle">{at} s</text>')
    with open(path, "w", encoding="utf-8") as file:
        file.write("\n".join([*lines, "</svg>"]) + "\n")


def checks(found, shares):
    """The targets of reads that leave the device a third of its time, with the cases of `schedule`, of those
    beside a writer on another device: a name, the figure, the bound, whether it is the least or the most, and the unit."""
    def middle(case):
        return statistics.median(figures(rows)["read_ms"] for rows in found[case])
    bounds = []
    for case in ("schedule", "both"):
        reads, writes = (statistics.median(values) for values in shares[case])
        name = f"two guests, {case}"
        bounds += [
            (f"{name}: pausing reads beside writes, of those apart", 100 * reads, 95, True, " %"),
            (f"{name}: the time of pausing reads, of that apart", middle(case) / middle("apart"), 1.1, False, ""),
            (f"{name}: writes beside pausing reads, of those alone", 100 * writes, 90, True, " %"),
        ]
    return bounds


def run(seconds, svg=None, cases=None, load="often", rounds=3):
    """Measures, prints the table, and writes the picture of the first round if `svg` is a path. Returns the
    targets."""
    subprocess.run([os.path.join(ROOT, "scripts/guest")], check=True, stdout=sys.stderr)
    found = measure(seconds, list(cases or CASES), load, rounds)
    shares = report(found)
    if svg:
        picture({case: turns[0] for case, turns in found.items() if CASES[case][0]}, svg)
        print(f"the picture is in {svg}")
    return checks(found, shares) if set(CASES) <= set(found) else []
