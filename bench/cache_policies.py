"""The replacement without data, for the part `policies` of bench/cache."""

import bz2
import csv
import functools
import json
import os
import random
import struct
import subprocess
import sys
import tempfile

from guest import ROOT
from nbd_client import READ, WRITE

PEERS = ["LRU", "ARC", "LIRS", "WTinyLFU", "S3FIFO", "Sieve"]
BLOCK = 4096
WORSE_MAX, SLOWER_MAX = 0.01, 0.03
# WRITE(6), (10), (12) and (16).
SCSI_WRITES = {0x0A, 0x2A, 0xAA, 0x8A}

PEER_PROGRAM = """
import json, sys, libcachesim
path, names, sizes = sys.argv[1], sys.argv[2].split(","), [int(size) for size in sys.argv[3].split(",")]
parameters = libcachesim.ReaderInitParam(ignore_obj_size=True)
for size in sizes:
    for name in names:
        reader = libcachesim.TraceReader(
            path, trace_type=libcachesim.TraceType.ORACLE_GENERAL_TRACE, reader_init_params=parameters)
        ratio = getattr(libcachesim, name)(size).process_trace(reader)[0]
        print(json.dumps([size, name, ratio]), flush=True)
"""


# Writes for each size and algorithm which requests a disk gets beneath this cache, as a trace.
MISSES_PROGRAM = """
import csv, sys, libcachesim
path, names, sizes = sys.argv[1], sys.argv[2].split(","), [int(size) for size in sys.argv[3].split(",")]
BLOCK, folder, rows, numbers = int(sys.argv[4]), sys.argv[5], [], {}
for row in csv.DictReader(open(path)):
    start, length = int(row["Sector"]) * 512, int(row["Size"]) * 512
    if length:
        volume = numbers.setdefault(row["VDisk"], len(numbers)) << 44
        first, last = start // BLOCK + volume, (start + length - 1) // BLOCK + volume
        rows.append((row["IOOp"], first, last, [row["BlktapTS"], "Q", row["IOOp"], row["VDisk"]],
                     [row["Sector"], row["Size"]]))
access = libcachesim.Request()
access.obj_size = 1
for size in sizes:
    for name in names:
        cache = getattr(libcachesim, name)(size)
        with open(f"{folder}/{size}.{name}", "w", newline="") as file:
            out = csv.writer(file)
            out.writerow("BlktapTS,Type,IOOp,VDisk,Sector,Size".split(","))
            for letter, first, last, begin, place in rows:
                missing = []
                for block in range(first, last + 1):
                    access.obj_id = block + 1
                    if not cache.get(access):
                        missing.append(block)
                if letter == "w":
                    out.writerow(begin + place)
                elif missing:
                    sector = (missing[0] & (1 << 44) - 1) * BLOCK // 512
                    out.writerow(begin + [sector, (missing[-1] - missing[0] + 1) * BLOCK // 512])
"""


@functools.cache
def environment():
    """The Python of a virtual environment with libcachesim."""
    folder = os.path.join(ROOT, "target/libcachesim")
    python = os.path.join(folder, "bin/python")
    if subprocess.run([python, "-c", "import libcachesim"], capture_output=True).returncode \
            if os.path.exists(python) else True:
        print(f"bench/cache: installing libcachesim from PyPI into {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "libcachesim==0.3.5"], check=True)
    return python


def cloudphysics(path):
    """The requests of a vscsi trace: command, volume, offset, length, and the time in nanoseconds."""
    with open(path, "rb") as file:
        data = file.read()
    for at in range(0, len(data) - 31, 32):
        length, operation, sector, time_us = struct.unpack_from("<4xI4xH2xQQ", data, at)
        yield WRITE if operation in SCSI_WRITES else READ, 0, sector * 512, length, time_us * 1000


def tencent(path):
    """The requests of a trace of Tencent: command, volume, offset, length, and the time in nanoseconds."""
    with bz2.open(path, "rt") as file:
        for line in file:
            time_s, sector, sectors, operation, volume = line.split(",")
            yield (WRITE if operation == "1" else READ, int(volume), int(sector) * 512, int(sectors) * 512,
                   int(time_s) * 1_000_000_000)


def unroll(requests, file):
    """Writes the accesses to blocks in libcachesim's format. Returns the number of distinct blocks."""
    numbers = {}
    for _, volume, offset, length, _ in requests:
        if length:
            for block in range(offset // BLOCK, (offset + length - 1) // BLOCK + 1):
                number = numbers.setdefault((volume, block), len(numbers) + 1)
                file.write(struct.pack("<IQIq", 0, number, BLOCK, -2))
    file.flush()
    return len(numbers)


def replay(binary, path, blocks, *options):
    """The rows of `fathom replay`."""
    sizes = ",".join(str(size * BLOCK) for size in blocks)
    command = [binary, "replay", path, "--cache", sizes, "--block", "4K", "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"bench/cache: {' '.join(command)}: {done.stderr}")
    return json.loads(done.stdout)["rows"]


def miss_ratios(binary, name, path, requests, verdicts):
    """The first table. Returns the number of distinct blocks."""
    with tempfile.NamedTemporaryFile() as file:
        distinct = unroll(requests(path), file)
        sizes = [distinct // part for part in (1000, 100, 10)]
        command = [environment(), "-c", PEER_PROGRAM, file.name, ",".join(PEERS),
                   ",".join(map(str, sizes))]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    ratios = {}
    for line in done.stdout.splitlines():
        if line.startswith("["):
            size, peer, ratio = json.loads(line)
            ratios[size, peer] = ratio
    print(f"\n{name}: {distinct:,} distinct blocks; miss ratios\n{'blocks':>8}"
          + "".join(f"{peer:>10}" for peer in PEERS) + f"{'fathom':>10}{'to best':>9}")
    for row in replay(binary, path, sizes, "--policy", "none"):
        size, own = row["cache"] // BLOCK, 1 - row["hit_ratio"]
        peers = [ratios[size, peer] for peer in PEERS]
        worse = own / min(peers) - 1
        print(f"{size:8}" + "".join(f"{ratio:10.5f}" for ratio in peers) + f"{own:10.5f}{worse:+9.2%}",
              flush=True)
        verdicts.append((f"{name}, {size} blocks: miss ratio above the best peer's", worse, WORSE_MAX))
    return distinct


def workloads():
    """Workloads by a seed: the name, the distinct blocks, and the rows (letter, block, blocks, class)."""
    chance = random.Random(13)
    skewed = lambda keys, power: int(keys * chance.random() ** power)
    rows, at = [], 10_000_000
    for turn in range(8):
        rows += [("r", number * 7919 % 3000 * 64, 1, 5) for number in range(3000)]
        for _ in range(2000):
            rows.append(("w", at, 16, 0))
            at += 16
        rows += [("r", 1_000_000 + (turn * 1000 + number) % 4000 * 16, 16, 0) for number in range(1000)]
    yield "find", 323_000, rows
    yield "skew", 50_000, [("r", skewed(50_000, 4) * 3, 1, "") for _ in range(200_000)]
    rows = []
    for phase in range(6):
        for _ in range(30_000):
            block = (phase * 1_000_000 + skewed(20_000, 3)) * 3
            rows.append((chance.choice("rrrw"), block, chance.choice((1, 4)), ""))
    yield "phases", 100_000, rows
    rows, log, scan = [], 90_000_000, 0
    for _ in range(150_000):
        kind = chance.randrange(10)
        if kind == 0:
            rows.append(("w", log, 8, ""))
            log += 8
        elif kind <= 2:
            rows.append(("r", 80_000_000 + scan, 32, ""))
            scan = (scan + 32) % 200_000
        else:
            rows.append(("r", skewed(60_000, 3) * 5, 1, ""))
    yield "mix", 260_000, rows


def write_trace(rows, path):
    """Writes rows (time, letter, volume, sector, sectors, class) as a trace in CSV, in their order."""
    with open(path, "w", encoding="ascii") as file:
        file.write("BlktapTS,Type,IOOp,VDisk,Sector,Size,Class\n")
        for time_ns, letter, volume, sector, sectors, group in rows:
            file.write(f"{time_ns},Q,{letter},{volume},{sector},{sectors},{group}\n")


def peers_times(binary, path, sizes):
    """The time of a disk's reads beneath caches with the algorithms of the peers above a trace in CSV, in seconds,
    by the model, the size and the algorithm."""
    times = {}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([environment(), "-c", MISSES_PROGRAM, path, ",".join(PEERS), ",".join(map(str, sizes)),
                        str(BLOCK), folder], check=True)
        for size in sizes:
            for peer in PEERS:
                for disk in ("hdd", "ssd"):
                    rows = replay(binary, f"{folder}/{size}.{peer}", [1], "--policy", "none", "--disk", disk)
                    times[disk, size, peer] = rows[0]["disk_read_ns"] / 1e9
    return times


class Totals:
    """The disk time of each algorithm over all sizes of a workload, and over all workloads."""

    def __init__(self):
        self.times, self.lines, self.best = {}, 0, 0

    def add(self, name, disk, peers, auto):
        """A line of the second table."""
        for workload in (name, "all"):
            sums = self.times.setdefault((workload, disk), [0.0] * (len(PEERS) + 1))
            sums[:] = [one + other for one, other in zip(sums, (*peers, auto))]
        self.lines += 1
        # The printed times have two digits.
        self.best += auto <= min(peers) * 1.0005

    def show(self, verdicts):
        """Prints the totals, and appends the targets: the total of `auto` is below each peer's."""
        print(f"\n{'total, in s':14}{'disk':4}{'':8}" + "".join(f"{name:>9}" for name in (*PEERS, "auto")) + f"{'to best':>8}")
        for (workload, disk), (*peers, auto) in self.times.items():
            print(f"{workload:14}{disk:4}{'':8}" + "".join(f"{time:9.2f}" for time in (*peers, auto))
                  + f"{auto / min(peers) - 1:+8.1%}")
            if workload == "all":
                for peer, time in zip(PEERS, peers):
                    verdicts.append((f"{disk}: total disk time of auto, above that of {peer}", auto / time - 1, 0.0))
        print(f"auto is at or below the best of the peers in {self.best} of {self.lines} lines", flush=True)


def disk_times(binary, name, rows, distinct, verdicts, totals):
    """The second table: a trace with these rows."""
    sizes = [distinct // part for part in (100, 10, 3)]
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        write_trace(rows, file.name)
        of_peers = peers_times(binary, file.name, sizes)
        own = {disk: replay(binary, file.name, sizes, "--policy", "none,sky,auto", "--disk", disk)
               for disk in ("hdd", "ssd")}
    for disk, found in own.items():
        times = {(row["cache"], row["policy"]): row["disk_read_ns"] / 1e9 for row in found}
        for size in sizes:
            none, sky, auto = (times[size * BLOCK, policy] for policy in ("none", "sky", "auto"))
            peers = [of_peers[disk, size, peer] for peer in PEERS]
            print(f"{name:14}{disk:4}{size:8}" + "".join(f"{time:9.2f}" for time in (*peers, none, sky, auto))
                  + f"{auto / none - 1:+8.1%}{auto / min(peers) - 1:+8.1%}", flush=True)
            where = f"{name}, {disk}, {size} blocks"
            verdicts.append((f"{where}: auto slower than none", auto / none - 1, SLOWER_MAX))
            totals.add(name, disk, peers, auto)


def exported(binary, path):
    """The requests of a trace in any format that Fathom reads: command, volume, offset, length, and the time in
    nanoseconds."""
    volumes = {}
    command = [binary, "record", "--export", path, "-o", "-"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        for row in csv.DictReader(child.stdout):
            if row["Type"] == "Q" and row["IOOp"] in ("r", "w"):
                yield (WRITE if row["IOOp"] == "w" else READ, volumes.setdefault(row["VDisk"], len(volumes)),
                       int(row["Sector"]) * 512, int(row["Size"]) * 512, int(row["BlktapTS"]))
    if child.returncode:
        sys.exit(f"bench/cache: {' '.join(command)} failed")


def readers(options):
    """The traces and their readers. Those of the folder have readers of their own, which check Fathom's."""
    more = ((os.path.abspath(path), functools.partial(exported, options.binary)) for path in options.trace)
    return (("cloudphysics.vscsi", cloudphysics), ("tencent-cbs.bz2", tencent), *more)


def policies(options):
    """The part `policies`. Returns what was measured with its limit: the text, the figure, the limit."""
    verdicts, traces, totals = [], [], Totals()
    for name, requests in readers(options):
        path = os.path.join(options.traces, name)
        name = os.path.basename(name)
        if not os.path.exists(path):
            print(f"bench/cache: {path} is absent, and skipped")
            continue
        traces.append((name, path, requests, miss_ratios(options.binary, name, path, requests, verdicts)))
    print(f"\n{'reads, in s':14}{'disk':4}{'blocks':>8}" + "".join(f"{name:>9}" for name in (*PEERS, "none", "sky", "auto"))
          + f"{'to none':>8}{'to best':>8}")
    for name, path, requests, distinct in traces:
        rows = ((time_ns, "rw"[command], volume, offset // 512, length // 512, "")
                for command, volume, offset, length, time_ns in requests(path))
        disk_times(options.binary, name.split(".")[0][:13], rows, distinct, verdicts, totals)
    for name, distinct, requests in workloads():
        rows = ((number * 1000, letter, 0, block * 8, blocks * 8, group)
                for number, (letter, block, blocks, group) in enumerate(requests))
        disk_times(options.binary, name, rows, distinct, verdicts, totals)
    totals.show(verdicts)
    return verdicts
