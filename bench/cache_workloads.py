"""The two workloads of section 7 of the paper with real guests, for the part `workloads` of bench/cache."""

import csv
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time

import guest
import targets
import tpch
from guest import GUEST, ROOT, Daemon, Guest

IMAGES = os.path.join(GUEST, "bench")
BLOCK = 16 << 10
POLICIES = ["none", "sky", "auto"]
MODELS = ["hdd", "ssd"]
# The sizes of the cache, as parts of the working set.
PARTS = (1 / 10, 1 / 5, 1 / 3)
# What auto may lose against none, and the longest step of a workload in seconds.
SLOWER_MAX_PERCENT, STEP_MAX_S = 3, 3600


class Find:
    """`find` for a missing name, after a source tree was unpacked several times.

    `working_set` of a workload is about what its recording reads and writes, in bytes."""

    name, disk, memory = "find", "8G", "512M"
    paper = {"hdd": "3.6 to 4.6 x", "ssd": "1.2 x"}
    target = {"hdd": 4.6, "ssd": 1.0}

    def __init__(self, options):
        self.copies = options.copies
        self.working_set = 615 * options.copies << 20
        self.inputs = [f"{IMAGES}/sources.tar"]

    def setup(self, guest):
        guest.run("mkfs.ext4 -q /dev/vda && mount /dev/vda /mnt")
        for copy in range(self.copies):
            yield f"unpacking {copy + 1} of {self.copies}", f"mkdir /mnt/{copy} && tar -x -C /mnt/{copy} -f /dev/vdc && sync"
        yield "settling", "sync; sleep 6; sync; echo 3 > /proc/sys/vm/drop_caches"

    measured = "find /mnt -name no-such-file"


class Database:
    """Query 16 of TPC-H after secondary indices were made."""

    disk, memory = "2G", "512M"
    paper = {"hdd": "2.3 to 8.8 x", "ssd": "0.9 x"}
    target = {"hdd": 8.8, "ssd": 1.0}

    def __init__(self, options, scale):
        tables = os.path.join(options.folder, f"tpch-{scale:g}.tar")
        if not os.path.exists(tables):
            with tempfile.TemporaryDirectory() as folder:
                tpch.write(folder, scale)
                subprocess.run(["tar", "-c", "-C", folder, "-f", tables,
                                *(f"{name}.tbl" for name in tpch.TABLES)], check=True)
        self.tables = tables

    def prepare(self, guest):
        """Mounts the data's disk, and unpacks the tables into memory."""
        guest.run("mkfs.ext4 -q /dev/vda && mount /dev/vda /mnt\n"
                  "mkdir -p /run/input && tar -x -C /run/input -f /dev/vdc")


class Sqlite(Database):
    name = "sqlite"

    def __init__(self, options):
        super().__init__(options, 3 * options.scale)
        self.working_set = int(1550 * options.scale) << 20
        self.inputs = [self.tables]
        self.measured = self.client([tpch.QUERY], " | md5sum")

    @staticmethod
    def client(lines, pipe=""):
        text = "\n".join(line if line.startswith(".") else f"{line};" for line in lines)
        return f"sqlite3 -batch /mnt/tpch.db <<'END'{pipe}\n{text}\nEND\n"

    def setup(self, guest):
        self.prepare(guest)
        tables = [f"CREATE TABLE {name} ({columns})" for name, columns in tpch.TABLES.items()]
        # The tables of dbgen have no keys but those that are needed: an INTEGER PRIMARY KEY is the table itself.
        tables = [text.replace(",\n        PRIMARY KEY (ps_partkey, ps_suppkey)", "") for text in tables]
        yield "the tables", self.client(tables + [".mode list", ".separator |"])
        for name in tpch.TABLES:
            yield f"loading {name}", self.client([".mode list", ".separator |", f".import /run/input/{name}.tbl {name}"]) + "sync"
        for table, columns in tpch.INDICES:
            yield f"an index on {columns}", self.client([tpch.create_index(table, columns)]) + "sync"
        yield "settling", "rm -r /run/input; sync; sleep 6; sync; echo 3 > /proc/sys/vm/drop_caches"


class Mariadb(Database):
    name = "mariadb"

    def __init__(self, options):
        super().__init__(options, options.scale)
        self.working_set = int(767 * options.scale) << 20
        # Less than the tables, as in the paper: 140 MB of tables for a scale factor of 1.
        self.pool = f"{max(6, int(50 * options.scale))}M"
        self.inputs = [self.tables, f"{IMAGES}/mariadb.ext4"]
        self.measured = self.client([tpch.QUERY], " | md5sum")

    @staticmethod
    def client(lines, pipe=""):
        text = "".join(f"{line};\n" for line in lines)
        return f"chroot /db mariadb --socket=/tmp/socket --batch test <<'END'{pipe}\n{text}END\n"

    def setup(self, guest):
        self.prepare(guest)
        server = (f"mariadbd --user=root --datadir=/data --socket=/tmp/socket --skip-networking --skip-grant-tables "
                  f"--innodb-buffer-pool-size={self.pool} --innodb-log-file-size=16M --pid-file=/tmp/pid")
        yield "the server's first start", f"""set -e
mkdir /db; mount /dev/vdd /db; mount -t tmpfs tmpfs /db/tmp; mkdir /mnt/data
mount --bind /mnt/data /db/data; mount --bind /run/input /db/input; mount --bind /dev /db/dev
chroot /db mariadb-install-db --force --user=root --datadir=/data --skip-test-db --auth-root-authentication-method=normal
(chroot /db {server} > /run/mariadb.log 2>&1 &)
for i in $(seq 100); do [ -S /db/tmp/socket ] && break; sleep 0.3; done
[ -S /db/tmp/socket ] || {{ cat /run/mariadb.log; exit 1; }}
chroot /db mariadb --socket=/tmp/socket -e 'CREATE DATABASE test'"""
        yield "the tables", self.client(f"CREATE TABLE {name} ({columns})" for name, columns in tpch.TABLES.items())
        for name in tpch.TABLES:
            yield f"loading {name}", self.client(
                [f"LOAD DATA INFILE '/input/{name}.tbl' INTO TABLE {name} FIELDS TERMINATED BY '|'"])
        for table, columns in tpch.INDICES:
            yield f"an index on {columns}", self.client([tpch.create_index(table, columns)])
        yield "settling", "umount /db/input; rm -r /run/input; sync; sleep 6; sync; echo 3 > /proc/sys/vm/drop_caches"


WORKLOADS = {one.name: one for one in (Find, Mariadb, Sqlite)}


class Run:
    """A guest on a disk, and the steps of a workload in it. `layer` and `model` are those of the disk, in
    TOML; with `record`, its requests are recorded into this file. Messages begin with `label`."""

    def __init__(self, workload, folder, layer="", model="", record=None, label=None):
        self.workload, self.folder, self.recorder = workload, folder, None
        self.layer, self.label = layer, label or workload.name
        self.image = os.path.join(folder, "disk.img")
        with open(self.image, "wb") as file:
            file.truncate(int(workload.disk[:-1]) << 30)
        self.daemon = Daemon(folder, self.configuration(model))
        self.control = self.daemon.control
        if record:
            self.recorder = subprocess.Popen([guest.FATHOM, "record", "--control", f"{folder}/control.sock", "--force",
                                              "--quiet", "--output", record, "disk"])
        arguments = []
        for number, path in enumerate(workload.inputs):
            arguments += ["-drive", f"id=input{number},if=none,format=raw,snapshot=on,file={path}",
                          "-device", f"virtio-blk-pci,drive=input{number}"]
        self.guest = Guest(self.daemon, "bench", ["disk"], memory=workload.memory, kernel="default",
                           arguments=arguments)
        self.guest.channel.socket.settimeout(STEP_MAX_S)

    def configuration(self, model):
        """The daemon's configuration of the disk."""
        return (f'[[disk]]\nname = "disk"\nvm = "bench"\nimage = "{self.image}"\n{model}\nlayers = [{self.layer}]\n'
                f'[disk.vhost_user]\nsocket = "{self.folder}/disk.sock"\nqueues = 1\n')

    def step(self, what, script):
        """Runs a step in the guest. Returns its time in seconds, and its output."""
        begun = time.monotonic()
        output = self.guest.run(script)
        passed = time.monotonic() - begun
        print(f"    {self.label}: {what}: {passed:.1f} s", file=sys.stderr, flush=True)
        return passed, output.strip()

    def measure(self):
        """Sets the workload up, and runs its measured step. Returns the clock at the step's beginning in
        nanoseconds."""
        for what, script in self.workload.setup(self.guest):
            self.step(what, script)
        began_ns = time.monotonic_ns()
        self.step("measured", self.workload.measured)
        return began_ns

    def end(self):
        self.guest.end()
        if self.recorder:
            self.recorder.send_signal(signal.SIGINT)
            self.recorder.wait()
        self.daemon.end()


def run(workload, **options):
    """Runs a workload in a guest and a folder of its own. Returns what `Run.measure` does."""
    with tempfile.TemporaryDirectory(prefix="fathom-", dir="/tmp") as folder:
        one = Run(workload, folder, **options)
        try:
            return one.measure()
        finally:
            one.end()


def extent(recording):
    """The time of the first request of a recording in nanoseconds, and the bytes of the blocks that its
    requests read or write: the working set."""
    first_ns, blocks = None, set()
    command = [guest.FATHOM, "record", "--export", recording, "--output", "-", "--format", "csv", "--quiet"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for row in csv.DictReader(process.stdout):
            if row["Type"] == "Q" and row["IOOp"] in ("r", "w", "d", "z"):
                first_ns = first_ns or int(row["BlktapTS"])
                if row["IOOp"] in ("r", "w"):
                    start, length = int(row["Sector"]) * 512, int(row["Size"]) * 512
                    blocks.update(range(start // BLOCK, (start + length - 1) // BLOCK + 1))
    return first_ns, len(blocks) * BLOCK


def replayed(recording, sizes, disk, warmup_ns):
    """The rows of `fathom replay` that count what follows the warm-up, by size and policy."""
    command = [guest.FATHOM, "replay", recording, "--cache", ",".join(map(str, sizes)), "--block", str(BLOCK),
               "--policy", ",".join(POLICIES), "--disk", disk, "--warmup", f"{warmup_ns}ns", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"bench/cache: {' '.join(command)}: {done.stderr}")
    return {(row["cache"], row["policy"]): row for row in json.loads(done.stdout)["rows"]}


def ratio_text(base, own):
    """How many times as fast `own` is, as text. Without any disk time, there is no ratio."""
    return f"{base / own:.2f} x" if own > 1e-9 else "no disk time" if base > 1e-9 else "-"


def speedup(base, own):
    """The same as a number."""
    return base / own if own > 1e-9 else math.inf if base > 1e-9 else 1.0


def above_percent(base, own):
    """How much `own` is above `base`, in percent."""
    return 100 * (own / base - 1) if base > 1e-9 else math.inf if own > 1e-9 else 0.0


def replays(workload, recording, began_ns, verdicts):
    """Prints what the policies do with the recording of a workload at each size."""
    first_ns, working_set = extent(recording)
    sizes = [max(1, int(working_set * part) // BLOCK) * BLOCK for part in PARTS]
    print(f"\n{workload.name}, replayed: a working set of {working_set / (1 << 20):.0f} MiB; reads of the measured phase\n"
          f"{'disk':6}{'cache':>17}{'policy':>8}{'hits':>9}{'disk reads':>12}{'disk time':>12}{'to none':>14}{'paper':>14}")
    for disk in MODELS:
        rows, best = replayed(recording, sizes, disk, began_ns - first_ns), 0
        for part, size in zip(PARTS, sizes):
            base = rows[size, "none"]["disk_read_ns"] / 1e9
            for policy in POLICIES:
                row = rows[size, policy]
                own = row["disk_read_ns"] / 1e9
                to_none = "" if policy == "none" else ratio_text(base, own)
                paper = workload.paper[disk] if policy == "sky" else ""
                print(f"{disk:6}{f'{size / (1 << 20):.0f} MiB ({part:.0%})':>17}{policy:>8}{row['read_hit_ratio']:9.1%}"
                      f"{row['disk_reads']:12}{own:10.3f} s{to_none:>14}{paper:>14}")
            auto = rows[size, "auto"]["disk_read_ns"] / 1e9
            best = max(best, speedup(base, auto))
            verdicts.append((targets.at_most, f"{workload.name}, replayed, {disk}, {part:.0%}: disk time of auto above none's",
                             above_percent(base, auto), SLOWER_MAX_PERCENT, " %"))
        verdicts.append((targets.at_least, f"{workload.name}, replayed, {disk}: best of auto to none in disk time",
                         best, workload.target[disk], ""))


def prepare(options):
    """Makes the guest and what the workloads need."""
    if options.binary:
        guest.FATHOM = os.path.abspath(options.binary)
    subprocess.run([os.path.join(ROOT, "scripts/guest"), "default"], check=True, stdout=sys.stderr)
    subprocess.run([os.path.join(ROOT, "bench/cache-images")], check=True, stdout=sys.stderr)


def workloads(options):
    """The part `workloads`. Returns the checks: a function of `targets`, and its arguments."""
    prepare(options)
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="fathom-", dir="/tmp") as folder:
        options.folder = folder
        for name in options.only.split(",") if options.only else WORKLOADS:
            workload = WORKLOADS[name](options)
            recording = os.path.join(options.keep or folder, f"{name}.rec")
            print(f"… {name}: a recording in a guest on a disk without a model", file=sys.stderr, flush=True)
            replays(workload, recording, run(workload, record=recording), verdicts)
    return verdicts
