"""The part `--log` of bench/offload: the time of a redirected write, in real time on this machine.

Each disk is driven over vhost-user with one write of 4 KiB in flight. `device` writes and flushes a file directly, as
what the log device can do; `cluster` sends SET of 4 KiB and WAIT 1 to one primary of the same cluster by a plain socket.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time

import targets

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FATHOM = os.path.join(ROOT, "target/release/fathom")
TIMES_MAX, CLUSTER_MAX = 1.1, 1000
SECONDS = 3
BLOCK = 4096


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


def plain_cluster(nodes):
    """SET of 4 KiB and WAIT 1, one after the other, on the first node that is a primary."""
    for node in nodes:
        host, port = node.rsplit(":", 1)
        with socket.create_connection((host, int(port))) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream = connection.makefile("rb")
            key = next((key for key in (f"bench{number}" for number in range(200))
                        if asks(connection, stream, key)), None)
            if not key:
                continue
            request = command("SET", key, os.urandom(BLOCK)) + command("WAIT", "1", "1000")
            times_ns, end = [], time.monotonic() + SECONDS
            while time.monotonic() < end:
                begun = time.perf_counter_ns()
                connection.sendall(request)
                stream.readline()
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


class Daemon:
    """A daemon with a disk in memory whose changes are carried."""

    def __init__(self, folder, cluster, layer):
        self.folder = folder
        self.control = os.path.join(folder, "control.sock")
        image = os.path.join(folder, "image")
        with open(image, "wb") as file:
            file.truncate(1 << 30)
        text = (f'[daemon]\ncontrol = "{self.control}"\n{cluster}\n[[disk]]\nname = "disk"\nimage = "{image}"\n'
                f'tap = false\n{layer}\n[disk.vhost_user]\nsocket = "{folder}/disk.sock"\n')
        path = os.path.join(folder, "fathom.toml")
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        self.log = open(os.path.join(folder, "log"), "w+b")
        self.process = subprocess.Popen([FATHOM, "serve", "--config", path], stderr=self.log)
        end = time.monotonic() + 60
        while subprocess.run([FATHOM, "disk", "info", "disk", "--control", self.control],
                             capture_output=True).returncode:
            if self.process.poll() is not None or time.monotonic() > end:
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

    def end(self):
        self.process.terminate()
        self.process.wait()
        self.log.close()


def measure(folder, rounds, checks):
    """Prints the table, and appends the checks."""
    # Images in memory, so that only the log is on a device.
    memory = tempfile.mkdtemp(prefix="fathom-", dir="/dev/shm")
    cluster = subprocess.Popen([FATHOM, "offload", "cluster", os.path.join(folder, "nodes")], stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    table = []
    for line in cluster.stdout:
        table.append(line)
        if line.startswith("copies"):
            break
    else:
        fail(cluster.stderr.read())
    nodes = json.loads(next(line for line in table if line.startswith("nodes")).split("=", 1)[1])
    layers = {
        "file": f'layers = [{{ kind = "offload", log = "{folder}/log", size = "256M" }}]',
        "cluster": 'layers = [{ kind = "offload", cluster = "local", volume = "bench", size = "256M" }]',
    }
    found = {name: [] for name in ("file, plain", "file", "cluster, plain", "cluster")}
    try:
        for _ in range(rounds):
            for where, layer in layers.items():
                found[f"{where}, plain"].append(device(folder) if where == "file" else plain_cluster(nodes))
                daemon = Daemon(memory, "".join(table), layer)
                daemon.run("offload", "start", "disk")
                found[where].append(daemon.writes())
                daemon.end()
    finally:
        cluster.terminate()
        cluster.wait()
        subprocess.run(["rm", "-rf", memory], check=False)
    medians = {name: [statistics.median(column) for column in zip(*rows)] for name, rows in found.items()}
    print("\nA write of 4 KiB, one at a time, and what its log's device or cluster can do, in µs (medians of "
          f"{rounds} rounds)\n{'':28}{'p50':>9}{'p99':>9}{'plain p50':>12}{'ratio':>8}")
    for where, text in (("file", "log in a file"), ("cluster", "log in a local cluster")):
        (own, late), (plain, _) = medians[where], medians[f"{where}, plain"]
        print(f"{text:28}{own:9.0f}{late:9.0f}{plain:12.0f}{own / plain:8.2f}")
    times = medians["file"][0] / medians["file, plain"][0]
    checks.append((targets.at_most, "a redirected write, of a durable write of the log's file", times, TIMES_MAX))
    checks.append((targets.at_most, "a redirected write into a local cluster", medians["cluster"][0], CLUSTER_MAX,
                   " µs"))
