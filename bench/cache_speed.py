"""The parts `speed` and `memory` of bench/cache."""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile

import guest

# The scripts that import this file need no compiled copy of it.
sys.dont_write_bytecode = True

DISK = "128M"
# More than the disk, or less than a hundredth of it.
CACHES = {"without": None, "hits": "192M", "misses": "1M"}
# The measurements into which one is divided, by depth. Client and server poll for each other, or sleep
# for up to a second after one of them was interrupted, which takes twice as long for each request.
SLICES = {1: 6, 32: 3}
# What hits may cost: the part of the requests a second of the disk without the cache.
HIT_LOSS_MAX = 0.10
MISS_US_MAX = 5.0
MEMORY_GB_MAX = 2.0
SLOTS = 10**12 // (16 << 10)


def configuration(folder):
    """Disks in memory: without a cache, with one that has all, and with one that has nearly nothing."""
    text = ""
    for name, size in CACHES.items():
        policy = ', policy = "none"' if name == "misses" else ""
        cache = f'{{ kind = "cache", size = "{size}"{policy} }}' if size else ""
        text += (f'[[disk]]\nname = "{name}"\nmemory = "{DISK}"\nlayers = [{cache}]\n'
                 f'[disk.vhost_user]\nsocket = "{folder}/{name}.sock"\nqueues = 2\n')
    return text


class Bench:
    """A daemon with these disks, and figures of `fathom bench`."""

    def __init__(self, folder, options):
        self.options = options
        guest.FATHOM = options.binary
        self.daemon = guest.Daemon(folder, configuration(folder))
        self.control = f"{folder}/control.sock"

    def run(self, disk, *arguments):
        """The summaries of `fathom bench` for one disk."""
        command = [self.options.binary, "bench", disk, "--control", self.control, "--json", *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"bench/cache: {' '.join(command)}: {done.stderr}")
        return json.loads(done.stdout)["summaries"]

    def fill(self):
        """Writes each disk, so that no read finds memory that was never used, and reads it once."""
        for disk in CACHES:
            common = ["--sequential", "--block-size", "64K", "--depth", "8", "--duration", "1500ms"]
            self.run(disk, "--write", *common)
            self.run(disk, *common)

    def read(self, queues):
        """By depth and disk: the requests a second, CPU time and latency, each in µs."""
        figures = {}
        for depth in 1, 32:
            slices = SLICES[depth]
            duration = f"{int(self.options.seconds * 1000 / slices)}ms"
            for _ in range(self.options.rounds * slices):
                for disk in CACHES:
                    found, = self.run(disk, "--depth", str(depth), "--queues", str(queues), "--duration", duration)
                    figure = (found["iops"], found["server_cpu_us_per_request"] or 0,
                              found["latency_us_p50"])
                    figures.setdefault((depth, disk), []).append(figure)
        return {key: [statistics.median(column) for column in zip(*rows)]
                for key, rows in figures.items()}


def speed(options):
    """The part `speed`. Returns what was measured with its limit: the text, the figure, the limit."""
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="fathom-bench.", dir="/dev/shm") as folder:
        bench = Bench(folder, options)
        bench.fill()
        found = {queues: bench.read(queues) for queues in (1, 2)}
        bench.daemon.end()
    print(f"\n{'reads of 4 KiB':16}{'queues':>7}{'depth':>6}{'requests/s':>13}{'to without':>11}"
          f"{'CPU µs':>9}{'P50 µs':>9}")
    for queues, figures in found.items():
        for depth in 1, 32:
            for disk in CACHES:
                iops, cpu_us, p50_us = figures[depth, disk]
                print(f"{disk:16}{queues:7}{depth:6}{iops:13,.0f}"
                      f"{iops / figures[depth, 'without'][0]:11.3f}{cpu_us:9.3f}{p50_us:9.2f}",
                      flush=True)
    ratio = {(queues, depth): figures[depth, "hits"][0] / figures[depth, "without"][0]
             for queues, figures in found.items() for depth in (1, 32)}
    for depth in 1, 32:
        verdicts.append((f"one queue at depth {depth}: part of the requests a second that hits lose",
                         1 - ratio[1, depth], HIT_LOSS_MAX))
    verdicts.append(("two queues at depth 32: part of what two queues gain that hits lose",
                     1 - ratio[2, 32] / ratio[1, 32], HIT_LOSS_MAX))
    for depth in 1, 32:
        without, misses = found[1][depth, "without"], found[1][depth, "misses"]
        verdicts.append((f"one queue at depth {depth}: CPU time of a miss in µs more",
                         misses[1] - without[1], MISS_US_MAX))
    verdicts.append(("one queue at depth 1: latency (P50) of a miss in µs more",
                     found[1][1, "misses"][2] - found[1][1, "without"][2], MISS_US_MAX))
    return verdicts


def memory(options):
    """The part `memory`: fills the index of a cache of 1 TB, without its data."""
    command = ["scripts/cargo", "test", "--quiet", "--release", "-p", "fathom-layers", "--lib", "--",
               "--ignored", "--nocapture", "the_index_of_a_terabyte"]
    done = subprocess.run(command, cwd=guest.ROOT, capture_output=True, text=True,
                          env={**os.environ, "FATHOM_SLOTS": str(SLOTS)})
    found = re.search(r"(\d+) slots: (\d+) bytes counted, (\d+) bytes resident, (\d+) ms",
                      done.stdout + done.stderr)
    if done.returncode or not found:
        sys.exit(f"bench/cache: {' '.join(command)}: {done.stdout}{done.stderr}")
    slots, counted, resident, time_ms = map(int, found.groups())
    print(f"\nindex of 1 TB in blocks of 16 KiB, kept on a volume: {slots:,} slots, "
          f"{resident / slots:.2f} bytes a slot ({counted / slots:.2f} counted), "
          f"{resident / 1e9:.3f} GB resident, filled in {time_ms / 1000:.1f} s", flush=True)
    return [("memory of 1 TB of cache at 16 KiB blocks, in GB", resident / 1e9, MEMORY_GB_MAX)]
