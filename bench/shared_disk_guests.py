"""Table 1 and Figures 3 and 4 of the paper with two real guests on one modelled hard disk, for
bench/shared-disk --guests."""

import json
import os
import subprocess
import sys
import tempfile
import time

from guest import ROOT
from guests import Daemon, Guest

# The cases: whether the other guest writes, whether guests are flushed in idle time, and whether the disks
# have the layer `schedule`.
CASES = {
    "alone": (False, False, False),
    "neither": (True, False, False),
    "flush": (True, True, False),
    "schedule": (True, False, True),
    "both": (True, True, True),
}
# The time before a measurement, and the interval of the samples, in seconds.
WARMUP = 12.0
INTERVAL = 0.5
# The reads between two pauses, and the length of a pause, in seconds: the device is free for about a third
# of the time.
READS, PAUSE = 800, 3
READER = f"""
fio --name=reader --filename=/dev/vda --size=2g --rw=randread --bs=4k --direct=1 --ioengine=psync \
    --randrepeat=0 --norandommap --thinktime={PAUSE}s --thinktime_blocks={READS} --time_based --runtime=3600 \
    > /dev/null 2>&1 &
"""
# Buffered writes at random places of a file. The guest writes them to the disk when they are 15 s old.
WRITER_SETUP = """set -e
mkfs.ext4 -q /dev/vda; mount /dev/vda /mnt
dd if=/dev/zero of=/mnt/file bs=1M count=256 2> /dev/null; sync
echo 1500 > /proc/sys/vm/dirty_expire_centisecs
echo 25 > /proc/sys/vm/dirty_writeback_centisecs
"""
WRITER = """
fio --name=writer --filename=/mnt/file --size=256m --rw=randwrite --bs=4k --ioengine=psync --rate_iops=64 \
    --randrepeat=0 --norandommap --fallocate=none --time_based --runtime=3600 > /dev/null 2>&1 &
"""
# Table 1 of the paper: the time of a read in ms, and the reads per second.
PAPER = {"alone": (16.64, 141), "neither": (39.30, 60), "flush": (20.58, 92)}


def configuration(directory, flushes, schedules):
    text = ""
    for name, offset in (("reader", "0"), ("writer", "50G")):
        layers = '{ kind = "schedule" }' if schedules else ""
        text += (f'[[disk]]\nname = "{name}"\nvm = "{name}"\nimage = "{directory}/{name}.img"\n'
                 f'model = {{ kind = "hdd", device = "spindle", size = "100G", offset = "{offset}" }}\n'
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
        _, written, _ = control.operation("writer", "write")
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


def measure(seconds, cases):
    """Runs the cases, one after the other with the same guests. Returns the samples of each."""
    with tempfile.TemporaryDirectory(prefix="fathom-", dir="/tmp") as directory:
        for name in ("reader", "writer"):
            with open(os.path.join(directory, f"{name}.img"), "wb") as file:
                file.truncate(2 << 30)
        daemon = Daemon(directory, configuration(directory, False, False))
        guests = []
        try:
            for name in ("reader", "writer"):
                guests.append(Guest(daemon, name, [name]))
            reader, writer = guests
            writer.run(WRITER_SETUP)
            found, writes = {}, False
            for case in cases:
                is_written, flushes, schedules = CASES[case]
                daemon.reload(configuration(directory, flushes, schedules))
                if is_written and not writes:
                    writer.run(WRITER)
                    writes = True
                reader.run(READER)
                time.sleep(WARMUP)
                found[case] = samples(daemon.control, seconds)
                reader.run("killall fio; sleep 1")
                print(f"{case}: {json.dumps(figures(found[case]))}", file=sys.stderr, flush=True)
            return found
        finally:
            for guest in guests:
                guest.end()
            daemon.end()


def report(found):
    """Prints Table 1 with the figures of the cases."""
    table = {case: figures(rows) for case, rows in found.items()}
    alone = table.get("alone")
    print(f"{'two guests, one hard disk':26}{'read':>10}{'reads':>11}{'of alone':>10}{'paper':>17}{'of alone':>10}"
          f"{'written':>12}{'dirty, most':>13}")
    for case, row in table.items():
        share = f"{row['reads_per_second'] / alone['reads_per_second']:.0%}" if alone else ""
        read_ms, reads = PAPER.get(case, (None, None))
        paper = f"{read_ms} ms {reads}/s" if reads else ""
        paper_share = f"{reads / PAPER['alone'][1]:.0%}" if reads else ""
        print(f"{case:26}{row['read_ms']:7.1f} ms{row['reads_per_second']:9.1f}/s{share:>10}{paper:>17}"
              f"{paper_share:>10}{row['written_per_second'] / 1024:8.0f} K/s{row['dirty_max'] / (1 << 20):9.1f} MiB")
    return table


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
    rows = [case for case in CASES if case in found]
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


def run(seconds, svg=None, cases=None):
    """Measures, prints the table, and writes the picture if `svg` is a path."""
    subprocess.run([os.path.join(ROOT, "scripts/guest")], check=True, stdout=sys.stderr)
    found = measure(seconds, cases or list(CASES))
    table = report(found)
    if svg:
        picture(found, svg)
        print(f"the picture is in {svg}")
    return table
