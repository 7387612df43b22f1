"""The two workloads of section 7 of the paper with real guests, for the part `workloads` of bench/cache."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time

import tpch
from guest import FATHOM, GUEST, ROOT, Control, Daemon, Guest

IMAGES = os.path.join(GUEST, "bench")


class Find:
    """`find` for a missing name, after a source tree was unpacked several times."""

    name, disk, memory = "find", "8G", "512M"

    def __init__(self, options):
        self.copies = options.copies
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

    def __init__(self, options):
        self.folder, self.scale = options.folder, options.scale
        tables = os.path.join(self.folder, f"tpch-{self.scale:g}.tar")
        if not os.path.exists(tables):
            with tempfile.TemporaryDirectory() as folder:
                tpch.write(folder, self.scale)
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
        super().__init__(options)
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
        for table, column in tpch.INDICES:
            yield f"an index on {column}", self.client([f"CREATE INDEX by_{column} ON {table} ({column})"]) + "sync"
        yield "settling", "rm -r /run/input; sync; sleep 6; sync; echo 3 > /proc/sys/vm/drop_caches"


class Mariadb(Database):
    name = "mariadb"
    pool = "16M"

    def __init__(self, options):
        super().__init__(options)
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
        for table, column in tpch.INDICES:
            yield f"an index on {column}", self.client([f"CREATE INDEX by_{column} ON {table} ({column})"])
        yield "settling", "umount /db/input; rm -r /run/input; sync; sleep 6; sync; echo 3 > /proc/sys/vm/drop_caches"


WORKLOADS = {one.name: one for one in (Find, Mariadb, Sqlite)}


class Run:
    """A guest on a disk, and the steps of a workload in it."""

    def __init__(self, workload, folder, layers="[]", model="", record=None):
        self.workload, self.folder = workload, folder
        image = os.path.join(folder, "disk.img")
        with open(image, "wb") as file:
            file.truncate(int(workload.disk[:-1]) << 30)
        self.daemon = Daemon(folder, f'[[disk]]\nname = "disk"\nvm = "bench"\nimage = "{image}"\n{model}\nlayers = {layers}\n'
                             f'[disk.vhost_user]\nsocket = "{folder}/disk.sock"\nqueues = 1\n')
        self.recorder = None
        if record:
            self.recorder = subprocess.Popen([FATHOM, "record", "--control", f"{folder}/control.sock", "--force", "-q",
                                              "-o", record, "disk"])
        arguments = []
        for number, path in enumerate(workload.inputs):
            arguments += ["-drive", f"id=input{number},if=none,format=raw,snapshot=on,file={path}",
                          "-device", f"virtio-blk-pci,drive=input{number}"]
        self.guest = Guest(self.daemon, "bench", ["disk"], memory=workload.memory, kernel="default", arguments=arguments)
        self.guest.channel.socket.settimeout(1800)

    def step(self, what, script):
        """Runs a step. Returns its time in seconds."""
        begun = time.monotonic()
        output = self.guest.run(script)
        passed = time.monotonic() - begun
        print(f"  {self.workload.name}: {what}: {passed:.1f} s {output.strip()[:100] if what == 'measured' else ''}",
              file=sys.stderr, flush=True)
        return passed

    def setup(self):
        for what, script in self.workload.setup(self.guest):
            self.step(what, script)

    def end(self):
        self.guest.end()
        if self.recorder:
            time.sleep(1)
            self.recorder.send_signal(signal.SIGINT)
            self.recorder.wait()
        self.daemon.end()
