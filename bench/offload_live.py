"""The part `--live` of bench/offload: two real guests on one modelled hard disk, in real time.

One guest has a steady load (30 % reads, most of them of a few MiB); the other one has peaks, in which its load grows
threefold within 10 s and stays so for 25 s. In the run `act`, both disks have the layer `offload` with `auto = "act"`,
and nobody but the daemon starts and stops it. The times are those that fio measures in the steady guest. The clocks of
the guests and of the host are the same.
"""

import random
import shutil
import subprocess
import sys
import tempfile
import time

import targets
from guest import ROOT, Daemon, Guest, make

# A folder in memory, so that the host's disk takes no part in a disk's time, and the least room that it needs.
MEMORY_FOLDER, ROOM_MIN = "/dev/shm", 4 << 30
DISKS = {"steady": "0", "noisy": "50G"}
# Requests per second of each disk, and those that the noisy one adds in two steps.
BASE, FIRST, SECOND = 24, 20, 34
# The time before the first peak, the length of the growth and of the rest of a peak, and the time between peaks, in s.
QUIET, GROWTH, STAY, BETWEEN = 120, 10, 25, 65
PEAKS = 4
# Most reads are of this part of the disk.
HOT = "zoned_abs:80/4m:20/1020m"
LOAD = ("fio --name={name} --filename=/dev/vda --size=1g --rw=randrw --rwmixread=30 --bs=4k --direct=1 --ioengine=libaio "
        "--iodepth=32 --norandommap --randrepeat=0 --random_distribution={hot} --rate_iops={reads},{writes} "
        "--rate_process=poisson --time_based --runtime={seconds} {more} > /tmp/{name}.out 2>&1 &")
# The 90th percentile and the mean under a peak: the least by which they are less than without the layer, and the most by
# which they are above those of a low load, in percent.
LESS_MIN, LOW_MAX = 40, 3


def fail(text):
    sys.exit(f"bench/offload: {text}")


def load(name, rate, seconds, more=""):
    reads = round(rate * 0.3)
    return LOAD.format(name=name, hot=HOT, reads=reads, writes=rate - reads, seconds=seconds, more=more)


def configuration(directory, acts):
    text = ""
    for name, offset in DISKS.items():
        log = (f'{{ kind = "offload", log = "{directory}/{name}.offload", size = "512M", copies = "64M", window = "2m", '
               f'model = {{ kind = "ssd" }}, auto = "act" }}')
        text += (f'[[disk]]\nname = "{name}"\nvm = "{name}"\nimage = "{directory}/{name}.img"\n'
                 f'model = {{ kind = "hdd", device = "spindle", size = "100G", offset = "{offset}" }}\n'
                 f"layers = [{log if acts else ''}]\n"
                 f'[disk.vhost_user]\nsocket = "{directory}/{name}.sock"\n')
    return text


class Watch:
    """When the disks are carried, as the daemon reports it."""

    def __init__(self, daemon, acts):
        self.control, self.acts = daemon.control, acts
        self.states = []

    def until(self, end):
        """Looks until a time."""
        while (left := end - time.time()) > 0:
            time.sleep(min(0.25, left))
            if self.acts:
                disks = self.control.call("GET", "/v1/offload")["disks"]
                self.states.append((time.time(), {disk["state"] for disk in disks}))

    def share(self, state, begin, end):
        """The share of a time in which a disk was in a state."""
        states = [state in states for at, states in self.states if begin <= at < end]
        return sum(states) / len(states) if states else 0.0

    def delay(self, begin, end):
        """The time from `begin` until a disk was carried first."""
        carried = (max(at - begin, 0.0) for at, states in self.states if begin <= at < end and "carrying" in states)
        return next(carried, None)


def run(directory, acts):
    """Runs both guests. Returns the times of the steady guest's requests, as pairs of the time of the end in s and
    the latency in ms, the times at which peaks began to grow, and what was carried."""
    for name in DISKS:
        with open(f"{directory}/{name}.img", "wb") as image:
            image.truncate(1 << 30)
    daemon = Daemon(directory, configuration(directory, acts))
    guests = {name: Guest(daemon, name, [name]) for name in DISKS}
    watch, peaks = Watch(daemon, acts), []
    seconds = QUIET + PEAKS * (GROWTH + STAY + BETWEEN)
    log = "--write_lat_log=/tmp/steady --log_unix_epoch=1"
    guests["steady"].run(load("steady", BASE, seconds, log))
    guests["noisy"].run(load("noisy", BASE, seconds))
    begun = time.time()
    watch.until(begun + QUIET)
    randomly = random.Random(1)
    for number in range(PEAKS):
        peaks.append(time.time())
        print(f"    {'act' if acts else 'off'}: peak {number + 1} of {PEAKS}", file=sys.stderr, flush=True)
        guests["noisy"].run(load("first", FIRST, GROWTH + STAY))
        watch.until(peaks[-1] + GROWTH / 2)
        guests["noisy"].run(load("second", SECOND, GROWTH / 2 + STAY))
        watch.until(peaks[-1] + GROWTH + STAY + BETWEEN * randomly.uniform(0.8, 1.0))
    watch.until(begun + seconds + 5)
    times = []
    found = guests["steady"].run("while pidof fio > /dev/null; do sleep 0.2; done; cat /tmp/steady_clat.1.log")
    for line in found.splitlines():
        at_ms, latency_ns = line.split(",")[:2]
        times.append((int(at_ms) / 1000, int(latency_ns) / 1e6))
    for guest in guests.values():
        guest.end()
    daemon.end()
    if len(times) < seconds * BASE / 2:
        fail(f"the steady guest has made only {len(times)} requests")
    return times, peaks, watch


def figures(times, windows):
    """The mean, the 90th and the 99th percentile of the requests that ended within windows of time, in ms."""
    found = sorted(latency for at, latency in times if any(begin <= at < end for begin, end in windows))
    if not found:
        fail("no request ended in a window of time")
    at = lambda part: found[min(int(len(found) * part), len(found) - 1)]
    return sum(found) / len(found), at(0.9), at(0.99)


def measure(checks):
    """Prints the table, and appends its checks."""
    if shutil.disk_usage(MEMORY_FOLDER).free < ROOM_MIN:
        fail(f"{MEMORY_FOLDER} lacks room: {ROOM_MIN >> 30} GiB are needed")
    subprocess.run(["scripts/cargo", "build", "--quiet", "--release", "--bin", "fathom"], cwd=ROOT, check=True)
    make()
    total = QUIET + PEAKS * (GROWTH + STAY + BETWEEN)
    print(f"\nTwo guests on one modelled hard disk: the requests of the one without peaks (takes {2 * total // 60 + 1} min)\n"
          f"{'':12}{'mean':>8}{'p90':>8}{'p99':>8} ms{'deviation':>11}", flush=True)
    found = {}
    for way in ("off", "act"):
        with tempfile.TemporaryDirectory(dir=MEMORY_FOLDER) as directory:
            times, peaks, watch = run(directory, way == "act")
        low = [(begin - 30, begin) for begin in peaks]
        peak = [(begin + GROWTH, begin + GROWTH + STAY) for begin in peaks]
        for name, windows in (("low", low), ("peak", peak)):
            mean, p90, p99 = figures(times, windows)
            found[way, name] = (mean, p90)
            print(f"{way + ', ' + name:12}{mean:8.1f}{p90:8.1f}{p99:8.1f}   {p90 - mean:11.1f}", flush=True)
    delays = [watch.delay(begin, begin + GROWTH + STAY) for begin in peaks]
    late = [delay for delay in delays if delay is not None]
    shares = [sum(watch.share(state, begin, end) for begin, end in low) / len(low) for state in ("carrying", "returning")]
    print(f"a disk was carried in {len(late)} of {len(peaks)} peaks"
          + (f", {sum(late) / len(late):.1f} s after they began to grow on average" if late else "")
          + f".\nIn the 30 s before peaks, one was carried for {shares[0]:.0%} of the time, and content returned, so that "
          f"changes of the same\nplaces still went to the log, for {shares[1]:.0%}.")
    for number, name in enumerate(("mean", "90th percentile")):
        off, act, base = found["off", "peak"][number], found["act", "peak"][number], found["off", "low"][number]
        checks += [(targets.at_least, f"in guests: {name} under the peak, less than without", 100 * (1 - act / off),
                    LESS_MIN, " %"),
                   (targets.at_most, f"in guests: {name} under the peak, above that of a low load",
                    100 * (act / base - 1), LOW_MAX, " %")]
