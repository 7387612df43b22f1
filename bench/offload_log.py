"""The part `--log` of bench/offload: the time of a redirected write, in real time on this machine.

Each disk is driven over vhost-user with one write of 4 KiB in flight. `device` writes and flushes a file directly, as
what the log device can do; it is also the other host's device for a log at another daemon, which is on this host and has
a Unix socket. For a cluster of three nodes, `plain` sends SET of 4 KiB to a node by a plain socket, and
for one of three primaries with a replica each, SET and WAIT 1.

The second table compares like with like: the same NBD client writes 4 KiB with force unit access, to the disk whose load
is carried, and to a disk that is served from the log's device, by the daemon that has the device.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time

import nbd_client
import targets

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FATHOM = os.path.join(ROOT, "target/release/fathom")
TIMES_MAX, CLUSTER_MAX = 1.1, 1000
SECONDS = 3
BLOCK = 4096
# The bytes of the log.
LOG = 192 << 20


def fail(text):
    sys.exit(f"bench/offload: {text}")


def quantiles(times_ns):
    times_ns = sorted(times_ns)
    at = lambda part: times_ns[min(int(len(times_ns) * part), len(times_ns) - 1)] / 1000
    return at(0.5), at(0.99)


def device(folder):
    """Durable writes of 8 KiB, the length of a record with 4 KiB, one after the other, into a file with space."""
    path = os.path.join(folder, "raw")
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.posix_fallocate(file, 0, 64 << 20)
    for offset in range(0, 64 << 20, 1 << 20):
        os.pwrite(file, bytes(1 << 20), offset)
    os.fsync(file)
    data, times_ns, at, end = os.urandom(2 * BLOCK), [], 0, time.monotonic() + SECONDS
    while time.monotonic() < end:
        begun = time.perf_counter_ns()
        os.pwrite(file, data, at)
        os.fdatasync(file)
        times_ns.append(time.perf_counter_ns() - begun)
        at = (at + 2 * BLOCK) % (64 << 20)
    os.close(file)
    os.unlink(path)
    return quantiles(times_ns)


def plain_cluster(nodes, copies):
    """SET of 4 KiB, and WAIT for copies, one after the other, on the first node that is a primary."""
    for node in nodes:
        host, port = node.rsplit(":", 1)
        with socket.create_connection((host, int(port))) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream = connection.makefile("rb")
            key = next((key for key in (f"bench{number}" for number in range(200))
                        if asks(connection, stream, key)), None)
            if not key:
                continue
            request = command("SET", key, os.urandom(BLOCK))
            if copies:
                request += command("WAIT", str(copies), "1000")
            times_ns, end = [], time.monotonic() + SECONDS
            while time.monotonic() < end:
                begun = time.perf_counter_ns()
                connection.sendall(request)
                for _ in range(1 + bool(copies)):
                    stream.readline()
                times_ns.append(time.perf_counter_ns() - begun)
            connection.sendall(command("DEL", key))
            stream.readline()
            return quantiles(times_ns)
    return fail("no node is a primary")


def command(*words):
    words = [word if isinstance(word, bytes) else word.encode() for word in words]
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


def asks(connection, stream, key):
    """Whether the node has the slot of a key, and is a primary."""
    connection.sendall(command("SET", key, "x"))
    return stream.readline() == b"+OK\r\n"


def durable_writes(path, export, base=0):
    """The median and the 99th percentile of a write of 4 KiB with force unit access from `base` on, one at a time, in
    µs."""
    connection = nbd_client.Connection(path, 10, export)
    data, times_ns, at, end = os.urandom(BLOCK), [], 0, time.monotonic() + SECONDS
    while time.monotonic() < end:
        begun = time.perf_counter_ns()
        connection.write_durably(base + at, data)
        times_ns.append(time.perf_counter_ns() - begun)
        at = (at + BLOCK) % (64 << 20)
    connection.close()
    return quantiles(times_ns)


class Daemon:
    """A daemon with a disk in memory whose changes are carried."""

    def __init__(self, folder, cluster, layer):
        self.folder = folder
        self.control = os.path.join(folder, "control.sock")
        image = os.path.join(folder, "image")
        with open(image, "wb") as file:
            file.truncate(1 << 30)
        text = (f'[daemon]\ncontrol = "{self.control}"\n{cluster}\n[[disk]]\nname = "disk"\nimage = "{image}"\n'
                f'tap = false\n{layer}\n[disk.vhost_user]\nsocket = "{folder}/disk.sock"\n'
                f'[[nbd]]\naddress = "unix:{folder}/nbd.sock"\n')
        path = os.path.join(folder, "fathom.toml")
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        self.log = open(os.path.join(folder, "log"), "w+b")
        self.process = subprocess.Popen([FATHOM, "serve", "--config", path], stderr=self.log)
        end = time.monotonic() + 60
        while subprocess.run([FATHOM, "disk", "info", "disk", "--control", self.control],
                             capture_output=True).returncode:
            if self.process.poll() is not None or time.monotonic() > end:
                self.process.kill()
                self.log.seek(0)
                fail(self.log.read().decode())
            time.sleep(0.1)

    def run(self, *arguments):
        done = subprocess.run([FATHOM, *arguments, "--control", self.control], capture_output=True, text=True)
        if done.returncode:
            fail(f"{' '.join(arguments)}: {done.stderr}")
        return done.stdout

    def writes(self):
        """The median and the 99th percentile of a write, in µs."""
        rows = json.loads(self.run("bench", "disk", "--write", "--depth", "1", "--range", "64M", "--json",
                                   "--duration", f"{SECONDS}s"))["summaries"]
        row = next(row for row in rows if row["workload"]["read_percent"] == 0)
        return row["latency_us_p50"], row["latency_us_p99"]

    def durable_writes(self):
        """The median and the 99th percentile of a durable write by a client of NBD, in µs."""
        return durable_writes(os.path.join(self.folder, "nbd.sock"), b"disk")

    def end(self):
        self.process.terminate()
        self.process.wait()
        self.log.close()


class Host:
    """Another daemon, which serves a disk on the log's device over NBD."""

    def __init__(self, folder):
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, "log"), "wb") as file:
            for _ in range((LOG >> 20) + 64):
                file.write(bytes(1 << 20))
        self.socket = os.path.join(folder, "nbd.sock")
        path = os.path.join(folder, "fathom.toml")
        with open(path, "w", encoding="utf-8") as file:
            file.write(f'[daemon]\ncontrol = "{folder}/control.sock"\n[[disk]]\nname = "log"\nimage = "{folder}/log"\n'
                       f'[[nbd]]\naddress = "unix:{self.socket}"\n')
        self.process = subprocess.Popen([FATHOM, "serve", "--config", path], stderr=subprocess.DEVNULL)
        end = time.monotonic() + 60
        while not os.path.exists(self.socket):
            if self.process.poll() is not None or time.monotonic() > end:
                fail("the other daemon does not start")
            time.sleep(0.1)

    def end(self):
        self.process.terminate()
        self.process.wait()


class Cluster:
    """A cluster of this host."""

    def __init__(self, folder, copies):
        self.copies = copies
        arguments = [FATHOM, "offload", "cluster", folder, "--copies", str(copies)]
        self.process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if line.startswith("copies"):
                break
        else:
            fail(self.process.stderr.read())
        self.table = "".join(lines)
        self.nodes = json.loads(next(line for line in lines if line.startswith("nodes")).split("=", 1)[1])

    def end(self):
        self.process.terminate()
        self.process.wait()


def middle(rows):
    """The medians of columns."""
    return [statistics.median(column) for column in zip(*rows)]


def measure(folder, rounds, checks):
    """Prints the table, and appends the checks."""
    # Images in memory, so that only the log is on a device.
    memory = tempfile.mkdtemp(prefix="fathom-", dir="/dev/shm")
    in_cluster = f'layers = [{{ kind = "offload", cluster = "local", volume = "bench", size = "{LOG}" }}]'
    at_host = f'layers = [{{ kind = "offload", log = "nbd+unix:///log?socket={folder}/host/nbd.sock", size = "{LOG}" }}]'
    cases = [("file", "a file", f'layers = [{{ kind = "offload", log = "{folder}/log", size = "{LOG}" }}]', None),
             ("host", "a disk of another daemon", at_host, None),
             ("three", "a local cluster of three nodes", in_cluster, 0),
             ("copies", "the same, with a replica of each", in_cluster, 1)]
    print(f"\nA write of 4 KiB, one at a time, and what its log's device or cluster can do, in µs (medians of {rounds} "
          f"rounds)\n{'log in':34}{'p50':>9}{'p99':>9}{'plain p50':>12}{'ratio':>8}")
    alike = []
    try:
        for name, text, layer, copies in cases:
            cluster = None if copies is None else Cluster(os.path.join(folder, f"nodes-{copies}"), copies)
            host = Host(os.path.join(folder, "host")) if name == "host" else None
            try:
                own, plain, durable, served = [], [], [], []
                for _ in range(rounds):
                    plain.append(device(folder) if cluster is None else plain_cluster(cluster.nodes, copies))
                    daemon = Daemon(memory, cluster.table if cluster else "", layer)
                    daemon.run("offload", "start", "disk")
                    own.append(daemon.writes())
                    durable.append(daemon.durable_writes())
                    daemon.end()
                    if cluster is None:
                        # At the other host, or by a daemon with a disk on the log's device.
                        server = host or Host(os.path.join(folder, "device"))
                        served.append(durable_writes(server.socket, b"log", LOG))
                        if not host:
                            server.end()
            finally:
                for other in filter(None, (cluster, host)):
                    other.end()
            (half, late), (base, _) = middle(own), middle(plain)
            print(f"{text:34}{half:9.0f}{late:9.0f}{base:12.0f}{half / base:8.2f}", flush=True)
            if served:
                alike.append((text, middle(durable), middle(served)))
            if name == "file":
                checks.append((targets.at_most, "a redirected write, of a durable write of the log's file", half / base,
                               TIMES_MAX))
            if name == "three":
                checks.append((targets.at_most, "a redirected write into a local cluster of three nodes", half,
                               CLUSTER_MAX, " µs"))
        print(f"\nThe same by a client of NBD, and its durable writes to a disk on the log's device, in µs\n"
              f"{'log in':34}{'p50':>9}{'p99':>9}{'device p50':>12}{'ratio':>8}")
        for text, (half, late), (base, _) in alike:
            print(f"{text:34}{half:9.0f}{late:9.0f}{base:12.0f}{half / base:8.2f}")
            checks.append((targets.at_most, f"a redirected write, of one to a disk on the log's device: {text}",
                           half / base, TIMES_MAX))
    finally:
        subprocess.run(["rm", "-rf", memory], check=False)
