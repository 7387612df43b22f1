"""The part `peers` of bench/cache: Fathom beside OCF and nbdkit's filter `cache`."""

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile

import nbd_client
from cache_peer_safety import safety
from cache_peer_servers import (BLOCK, CacheFilter, CountedFilter, CountedOcf, Fathom, Ocf, build_ocf, note,
                                progress)
from nbd_client import READ, WRITE

# The scripts that import this file need no compiled copy of it.
sys.dont_write_bytecode = True

REGION = 1 << 20
# Requests of the replays that are in flight.
BATCH = 16
PARTS = (100, 10)
# Open CAS's own sequential cut-off.
CUTOFF = 1 << 20
DISK, CACHE, LOG = 256 << 20, 384 << 20, 128 << 20
# fio's pattern, depth, and the requests between two flushes (0: none).
POINTS = [("randread", 1, 0), ("randread", 32, 0), ("randwrite", 1, 1), ("randwrite", 32, 32), ("randwrite", 32, 0)]
# How much higher the miss ratio of the class-blind policy may be, as a part of the peer's.
WORSE_MAX = 0.01


class Load:
    """Requests of whole blocks on one disk: (command, block, blocks). The regions of all volumes are
    put close together, in their order."""

    def __init__(self, name, requests):
        self.name = name
        rows = [(command, volume, offset // BLOCK, (offset + length - 1) // BLOCK)
                for command, volume, offset, length, *_ in requests if length]
        per_region = REGION // BLOCK
        regions = {(volume, block // per_region) for _, volume, first, last in rows
                   for block in (first, last)}
        regions |= {(volume, region) for _, volume, first, last in rows
                    for region in range(first // per_region + 1, last // per_region)}
        places = {region: place for place, region in enumerate(sorted(regions))}
        self.size = len(places) * REGION
        self.rows = [(command, places[volume, first // per_region] * per_region + first % per_region,
                      last - first + 1) for command, volume, first, last in rows]
        self.distinct = len({block + at for _, block, blocks in self.rows for at in range(blocks)})
        self.reads = sum(blocks for command, _, blocks in self.rows if command == READ)

    def csv(self, path):
        """Writes the requests for `fathom replay`."""
        with open(path, "w", encoding="ascii") as file:
            file.write("BlktapTS,Type,IOOp,Sector,Size\n")
            for number, (command, block, blocks) in enumerate(self.rows):
                file.write(f"{number * 100_000},Q,{'rw'[command]},{block * 8},{blocks * 8}\n")

    def send(self, connection):
        """Sends all requests, block by block, in their order."""
        data, batch = bytes(BLOCK), []
        for command, block, blocks in self.rows:
            for at in range(block, block + blocks):
                batch.append((command, at * BLOCK, BLOCK, data if command == WRITE else b""))
                if len(batch) == BATCH:
                    connection.requests(batch)
                    batch.clear()
        connection.requests(batch)


def loads(options, readers):
    """The traces that are there, and a load by a seed."""
    for name, reader in readers:
        path = os.path.join(options.traces, name)
        if os.path.exists(path):
            yield Load(os.path.basename(name).split(".")[0], reader(path))
        else:
            note(f"{path} is absent, and skipped")
    chance = random.Random(13)
    yield Load("skew", [(WRITE if chance.random() < 0.25 else READ, 0,
                         int(50_000 * chance.random() ** 4) * 3 * BLOCK, BLOCK) for _ in range(300_000)])


def replayed(binary, load, sizes):
    """Read hit ratios of `fathom replay` by policy and blocks of the cache."""
    with tempfile.NamedTemporaryFile(suffix=".csv") as file:
        load.csv(file.name)
        command = [binary, "replay", file.name, "--cache", ",".join(str(size * BLOCK) for size in sizes),
                   "--block", "4K", "--policy", "none,auto", "--json"]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"bench/cache: {' '.join(command)}: {done.stderr}")
    rows = json.loads(done.stdout)["rows"]
    assert all(row["reads"] == load.reads for row in rows)
    return {(row["policy"], row["cache"] // BLOCK): row["read_hit_ratio"] for row in rows}


def served(server, load):
    """Sends a load to a server, and ends it."""
    progress(f"{load.name} on {server.name}")
    try:
        connection = server.start()
        load.send(connection)
        connection.close()
    finally:
        server.end()
        progress("")


def ocf_hits(folder, plugin, load, size, cutoff):
    """The read hit ratio of OCF."""
    server = CountedOcf(folder, plugin, load.size, size, cutoff)
    served(server, load)
    with open(server.path("statistics"), encoding="ascii") as file:
        found = json.load(file)
    assert found["lines"] == size and found["reads"] + found["read_passed"] >= load.reads
    return found["read_hits"] / load.reads


def filter_hits(folder, load, size):
    """The read hit ratio of nbdkit's filter."""
    server = CountedFilter(folder, load.size, size * BLOCK)
    served(server, load)
    return 1 - server.misses() / load.reads


def hit_ratios(options, readers, plugin, folder):
    """The first table. Returns what was measured with its limit."""
    verdicts = []
    names = ["OCF", "no cut-off", "nbdkit", "none", "auto"]
    print(f"\n{'read hit ratio':15}{'blocks':>8}" + "".join(f"{name:>12}" for name in names), flush=True)
    for load in loads(options, readers):
        sizes = [load.distinct // part for part in PARTS]
        own = replayed(options.binary, load, sizes)
        for size in sizes:
            place = os.path.join(folder, "counted")
            found = [ocf_hits(place, plugin, load, size, cutoff) if plugin else None for cutoff in (CUTOFF, 0)]
            found.append(filter_hits(place, load, size))
            found += [own[policy, size] for policy in ("none", "auto")]
            shutil.rmtree(place)
            print(f"{load.name:15}{size:8}"
                  + "".join(f"{'-' if ratio is None else format(ratio, '.4f'):>12}" for ratio in found), flush=True)
            best = max(ratio for ratio in found[:3] if ratio is not None)
            verdicts.append((f"{load.name}, {size} blocks: miss ratio of reads above the best peer's",
                             (1 - found[3]) / (1 - best) - 1, WORSE_MAX))
    return verdicts


def measured(server, point, seconds):
    """One measurement: the requests a second, and the server's CPU time for each in µs."""
    pattern, depth, flush = point
    rate, cpu_us, _ = nbd_client.fio(server, pattern, depth, seconds, DISK, f"--fsync={flush}")
    # What is dirty is no burden of the next measurement.
    connection = server.connect()
    connection.flush()
    connection.close()
    return rate, cpu_us


def fill(connection):
    """Writes all blocks, so that none is a hole, and reads them twice, so that all of them are in the cache."""
    data = os.urandom(BLOCK)
    for command in WRITE, READ, READ:
        for at in range(0, DISK, BATCH * BLOCK):
            connection.requests([(command, at + number * BLOCK, BLOCK, data if command == WRITE else b"")
                                 for number in range(BATCH)])
        connection.flush()


def speed(options, plugin, folder):
    """The third table: requests of 4 KiB of disks that are in the cache as a whole."""
    servers = [Fathom(os.path.join(folder, "fathom"), options.binary, DISK, CACHE, LOG)]
    if plugin:
        servers.append(Ocf(os.path.join(folder, "ocf"), plugin, DISK, CACHE))
    servers.append(CacheFilter(os.path.join(folder, "nbdkit"), DISK, CACHE))
    figures = {}
    try:
        for server in servers:
            progress(f"filling the cache of {server.name}")
            connection = server.start()
            fill(connection)
            connection.close()
        for number in range(options.rounds):
            for point in POINTS:
                for server in servers[number % len(servers):] + servers[:number % len(servers)]:
                    progress(f"round {number + 1} of {options.rounds}: {server.name}")
                    figures.setdefault((point, server.name), []).append(measured(server, point, options.seconds))
    finally:
        for server in servers:
            server.end()
        progress("")
    median = {key: [statistics.median(column) for column in zip(*rows)] for key, rows in figures.items()}
    print(f"\n{'4 KiB over NBD':16}{'depth':>6}{'flush after':>12}" + "".join(
        f"{server.name.split(',')[0] + '/s':>12}{'CPU µs':>9}" for server in servers), flush=True)
    for point in POINTS:
        rows = [median[point, server.name] for server in servers]
        print(f"{point[0]:16}{point[1]:6}{point[2] or 'none':>12}"
              + "".join(f"{rate:12,.0f}{cpu_us:9.1f}" for rate, cpu_us in rows), flush=True)


def peers(options, readers):
    """The part `peers`. Returns what was measured with its limit: the text, the figure, the limit."""
    plugin = build_ocf(options.ocf or os.environ.get("FATHOM_OCF"))
    version = subprocess.run(["nbdkit", "--version"], capture_output=True, text=True, check=True).stdout.strip()
    print(f"\n{version}; OCF {'is not measured' if not plugin else 'of 2026-06-20'}")
    tables = options.tables.split(",")
    verdicts = []
    if "hits" in tables:
        with tempfile.TemporaryDirectory(prefix="fathom-bench.", dir="/dev/shm") as folder:
            verdicts += hit_ratios(options, readers, plugin, folder)
    # A file system with extended attributes, for the marks of images.
    with tempfile.TemporaryDirectory(prefix="fathom-bench.", dir="/var/tmp") as folder:
        if "safety" in tables:
            verdicts += safety(options, plugin, folder)
        if "speed" in tables:
            speed(options, plugin, folder)
    return verdicts
