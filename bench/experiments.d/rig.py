"""Daemons, loads, queries and centres as processes of their own, and what CPU time they take."""

import collections
import ctypes
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
FATHOM = os.environ.get("FATHOM") or os.path.join(ROOT, "target/release/fathom")
MEMORY = "/dev/shm"
PREFIX = "fathom-experiments-"
CHUNK = 1 << 24
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1


class Failed(Exception):
    """An experiment cannot go on."""


def wait_until(what, condition, seconds=20):
    """What the condition gives, once it is true."""
    end = time.monotonic() + seconds
    while True:
        given = condition()
        if given:
            return given
        if time.monotonic() > end:
            raise Failed(f"{what}: not within {seconds} s")
        time.sleep(0.02)


def end_with_parent():
    """Has the kernel end this process when the bench ends, even if that is killed."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Process:
    """A process with a session of its own: Ctrl-C ends the bench, and the bench the process."""

    def __init__(self, rig, name, command, namespace=None):
        self.name = name
        self.out, self.errors = rig.path(f"{name}.out"), rig.path(f"{name}.err")
        inside = ["ip", "netns", "exec", namespace] if namespace else []
        with open(self.out, "wb") as out, open(self.errors, "wb") as errors:
            self.process = subprocess.Popen(
                inside + command, stdin=subprocess.DEVNULL, stdout=out, stderr=errors,
                start_new_session=True, preexec_fn=end_with_parent)
        rig.processes.append(self)
        self.pid = self.process.pid

    def said(self):
        with open(self.errors, encoding="utf-8", errors="replace") as file:
            return file.read()

    def check(self):
        """Fails if it has ended."""
        if self.process.poll() is not None:
            raise Failed(f"{self.name} ended ({self.process.returncode}):\n{self.said()[-2000:]}")
        return True

    def cpu_ns(self):
        """The CPU time of all of its threads, those that have ended included."""
        try:
            return time.clock_gettime_ns(~self.pid << 3 | 2)
        except OSError as error:
            raise Failed(f"{self.name} is gone:\n{self.said()[-2000:]}") from error

    def threads_ns(self):
        """The CPU time of its threads that run, by name."""
        times = collections.Counter()
        folder = f"/proc/{self.pid}/task"
        for thread in os.listdir(folder):
            try:
                with open(f"{folder}/{thread}/comm", encoding="utf-8") as file:
                    name = file.read().strip()
                with open(f"{folder}/{thread}/schedstat", encoding="ascii") as file:
                    times[name] += int(file.read().split()[0])
            except (OSError, IndexError):
                pass  # It has ended meanwhile, or the kernel does not count.
        return times

    def wait_until_idle(self, seconds=120):
        """Waits until it takes less than a quarter of a core."""
        def idle():
            before = self.cpu_ns()
            time.sleep(0.2)
            return self.cpu_ns() - before < 50_000_000
        wait_until(f"the end of what {self.name} has to do", idle, seconds)

    def ask_to_end(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def wait(self, seconds):
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise Failed(f"{self.name} did not end within {seconds} s") from None

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class Local(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path):
        super().__init__("fathom", timeout=20)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


class Daemon(Process):
    """A daemon with one disk, which is driven over vhost-user."""

    def __init__(self, rig, name="host", disk="", monitor=None, vm="", namespace=None):
        self.control, self.disk = rig.path(f"{name}.control"), rig.path(f"{name}.disk")
        configuration = rig.path(f"{name}.toml")
        link = monitor and (f'[monitor]\naddress = "{monitor}"\nname = "{name}"\n'
                            "plain_allowed = true\n")
        with open(configuration, "w", encoding="utf-8") as file:
            file.write(f'[daemon]\ncontrol = "{self.control}"\n{link or ""}'
                       f'[[disk]]\nname = "disk"\nvm = "{vm}"\nmemory = "64M"\nclassify = false\n'
                       f'{disk}\n[disk.vhost_user]\nsocket = "{self.disk}"\n')
        super().__init__(rig, name, [FATHOM, "serve", "--config", configuration], namespace)
        wait_until("the daemon's start", lambda: self.check() and "ready" in self.said())

    def get(self, path):
        connection = Local(self.control)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read()
        except OSError as error:
            raise Failed(f"{self.name} does not answer {path}: {error}") from error
        finally:
            connection.close()
        if answer.status != 200:
            raise Failed(f"{self.name} answers {answer.status} to {path}: {body[:500]!r}")
        return json.loads(body)

    def events(self):
        """Those that the tap has counted: two for each request that is done."""
        disk, = self.get("/v1/statistics")["disks"]
        return 2 * sum(kind["count"] + kind["errors"] for kind in disk["operations"])

    def wait_for_listener(self):
        """Waits until events are collected, as they are while somebody listens."""
        wait_until("somebody who listens", lambda: self.check() and "events" in self.threads_ns())
        # The thread begins with attaching itself to the taps.
        time.sleep(0.3)

    def wait_for_centre(self):
        def running():
            status = self.get("/v1/monitor")
            return self.check() and status["state"] == "running" and status["fragments"] > 0
        wait_until(f"the link of {self.name}", running, 40)


class Load(Process):
    """Sequential reads of 4 KiB, as many under way at a time as the depth is."""

    def __init__(self, rig, daemon, depth, seconds, name="load", warmup_ms=100, namespace=None):
        super().__init__(rig, name, [
            FATHOM, "bench", daemon.disk, "--sequential", "--depth", str(depth),
            "--duration", f"{int(seconds * 1000)}ms", "--warmup", f"{warmup_ms}ms", "--rounds", "1",
            "--json"], namespace)
        self.seconds = seconds

    def requests_per_second(self):
        """What it measured, at its end."""
        if self.wait(self.seconds + 30):
            raise Failed(f"the load failed:\n{self.said()[-2000:]}")
        with open(self.out, encoding="utf-8") as file:
            return json.load(file)["summaries"][0]["iops"]


class Results:
    """Rows in CSV that come into a file: those of the counter, whose number is 1, and others."""

    def __init__(self, path):
        self.path, self.place, self.rest = path, 0, b""
        self.seen = self.rows = self.balance = self.last_ns = 0

    def update(self):
        with open(self.path, "rb") as file:
            file.seek(self.place)
            while chunk := file.read(CHUNK):
                self.place += len(chunk)
                whole, end, self.rest = (self.rest + chunk).rpartition(b"\n")
                self.rows += whole.count(b"\n") + len(end)
                self.rows -= len(re.findall(rb"(?m)^@query,", whole))
                for row in re.finditer(rb"(?m)^1,(\d+),([+-]),(\d+),", whole):
                    self.rows -= 1
                    self.last_ns = int(row[1])
                    self.balance += 1 if row[2] == b"+" else -1
                    self.seen += int(row[3]) if row[2] == b"+" else 0

    def settled(self, end_ns):
        """Whether all that came before the load's end was counted: a second without events has no
        count."""
        self.update()
        return self.balance == 0 and self.seen > 0 and self.last_ns >= end_ns

    def wait(self, process, end_ns, seconds=120):
        wait_until(f"the end of what {process.name} has to count", lambda: process.check() and
                   self.settled(end_ns), seconds)
        time.sleep(0.1)
        # A row of the second's end may have come without the other.
        wait_until(f"the end of what {process.name} counts", lambda: self.settled(end_ns), seconds)


class Query(Process):
    """`fathom query` over a daemon's events. Its results go to a file in memory."""

    def __init__(self, rig, daemon, script):
        path = rig.path("query.cql")
        with open(path, "w", encoding="utf-8") as file:
            file.write(script)
        super().__init__(rig, "query", [FATHOM, "query", "--stream-compat", "--csv", "--file", path,
                                        "--control", daemon.control])
        self.daemon = daemon
        daemon.wait_for_listener()
        self.check()

    def finish(self):
        """What it saw, what it says that it missed, and how many rows it gave. Ends the daemon."""
        results = Results(self.out)
        results.wait(self, time.monotonic_ns())
        # Rows leave windows for seconds still. One that is behind when the daemon ends is cut off.
        self.wait_until_idle()
        # With the daemon the query ends in order, and says what it missed.
        self.daemon.ask_to_end()
        if self.wait(60):
            raise Failed(f"the query failed:\n{self.said()[-2000:]}")
        missing = sum(int(count) for count in re.findall(
            r"(?m)^(\d+) events? (?:are missing|came too late)", self.said()))
        return results.seen, results.rows, missing


class Reader(Process):
    """The cheapest reader: it throws events away, and knows from the heads of blocks how many."""

    def __init__(self, rig, daemon):
        super().__init__(rig, "reader", [sys.executable, os.path.join(HERE, "reader.py"),
                                         daemon.control])
        daemon.wait_for_listener()
        self.check()

    def finish(self):
        time.sleep(0.5)
        self.ask_to_end()
        if self.wait(20):
            raise Failed(f"the reader failed:\n{self.said()[-2000:]}")
        with open(self.out, encoding="ascii") as file:
            told = json.load(file)
        return told["events"], told["blocks"], told["dropped"]


class Centre(Process):
    """`fathom monitor`. Its results go to a file in memory."""

    def __init__(self, rig, script, address, namespace=None):
        path = rig.path("centre.cql")
        with open(path, "w", encoding="utf-8") as file:
            file.write(script)
        super().__init__(rig, "centre", [
            FATHOM, "monitor", "--listen", address, "--plain", "--stream-compat", "--csv",
            "--status", "500ms", "--file", path], namespace)
        self.address = wait_until("the centre's start", lambda: self.check() and re.search(
            r"hosts are served at (\S+)", self.said()))[1]

    def hosts(self):
        """The columns of the newest whole table of hosts, by the hosts' names."""
        lines = self.said().split("\n")[:-1]
        heads = [at for at, line in enumerate(lines) if re.match(r"host +state ", line)]
        if len(heads) < 2:
            return {}
        table = [re.split(r" {2,}", line.strip()) for line in lines[heads[-2]:heads[-1]]]
        names = table[0]
        return {row[0]: dict(zip(names[1:], row[1:])) for row in table[1:] if len(row) >= 9}

    def results(self):
        return Results(self.out)

    def late(self):
        return sum(int(host["late"]) for host in self.hosts().values())

    def lag_ms(self):
        """How far the host that lags most does so."""
        units = {"ns": 1e-6, "us": 1e-3, "µs": 1e-3, "ms": 1.0, "s": 1e3, "min": 6e4}
        lags = [host["lag"].split() for host in self.hosts().values()]
        return max((float(value) * units.get(unit, 0.0) for value, unit in lags), default=0.0)


class Rig:
    """A folder in memory and the processes of one measurement. All end with it."""

    def __enter__(self):
        self.directory = tempfile.mkdtemp(
            prefix=f"{PREFIX}{os.getpid()}-", dir=MEMORY if os.access(MEMORY, os.W_OK) else None)
        self.processes = []
        return self

    def __exit__(self, *_):
        # Whatever happens meanwhile, nothing is left behind.
        try:
            for process in reversed(self.processes):
                process.ask_to_end()
            end = time.monotonic() + 5
            while time.monotonic() < end and any(
                    process.process.poll() is None for process in self.processes):
                time.sleep(0.02)
        finally:
            for process in self.processes:
                process.kill()
            shutil.rmtree(self.directory, ignore_errors=True)

    def path(self, name):
        return os.path.join(self.directory, name)


def left_behind(folder):
    """What benches made there that were killed: each name has the number of its process."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return [name for name in names if name.startswith(PREFIX)
            and not os.path.isdir(f"/proc/{name.removeprefix(PREFIX).split('-')[0]}")]


def sweep():
    """Gives back the memory that such files take."""
    for name in left_behind(MEMORY):
        shutil.rmtree(os.path.join(MEMORY, name), ignore_errors=True)


def interval(options, processes, loads, count):
    """CPU time in per cent of a core while the loads run, by process and the first one's threads.

    The interval begins when windows are full. `count` says what has grown meanwhile.
    """
    time.sleep(options.settle)

    def look():
        return (time.monotonic_ns(), [process.cpu_ns() for process in processes],
                processes[0].threads_ns(), count())

    begun = look()
    time.sleep(options.seconds)
    ended = look()
    for load in loads:
        if load.process.poll() is not None:
            raise Failed(f"{load.name} ended before it was measured:\n{load.said()[-2000:]}")
    ns = ended[0] - begun[0]
    return {
        "seconds": ns / 1e9,
        "cpu": {process.name: 100 * (after - before) / ns
                for process, before, after in zip(processes, begun[1], ended[1])},
        "threads": {name: round(100 * (after - begun[2][name]) / ns, 3)
                    for name, after in ended[2].items()},
        "grown": {name: after - begun[3][name] for name, after in ended[3].items()},
    }


def load_seconds(options):
    """How long loads run, such that the interval lies within."""
    return options.settle + options.seconds + 1.5


def rounds(options, names, measure):
    """Measures each configuration in each round. Which goes first changes, so that a drift of the
    machine favours none. Gives the samples by name, in order of the rounds."""
    names = list(names)
    samples = {name: [] for name in names}
    for number in range(options.rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            note(f"round {number + 1} of {options.rounds}: {name}")
            try:
                samples[name].append(measure(name))
            except Failed as failed:
                raise Failed(f"{name}: {failed}") from failed
    note("")
    return samples


def note(text):
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
