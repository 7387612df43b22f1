"""Daemons, loads, queries and centres as separate processes, and their CPU time."""

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
    """An experiment cannot continue."""


def wait_until(what, condition, seconds=20):
    """Waits until the condition is true, and returns its value."""
    end = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise Failed(f"{what}: not within {seconds} s")
        time.sleep(0.02)


def end_with_parent():
    """Makes the kernel kill this process when the bench ends, even if the bench is killed."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Process:
    """A process with a session of its own: Ctrl-C ends only the bench, which ends the process."""

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

    def messages(self):
        with open(self.errors, encoding="utf-8", errors="replace") as file:
            return file.read()

    def check(self):
        """Fails if the process has ended."""
        if self.process.poll() is not None:
            raise Failed(f"{self.name} ended ({self.process.returncode}):\n{self.messages()[-2000:]}")
        return True

    def cpu_ns(self):
        """The CPU time of all its threads, including those that have ended."""
        try:
            return time.clock_gettime_ns(~self.pid << 3 | 2)
        except OSError as error:
            raise Failed(f"{self.name} does not exist any more:\n{self.messages()[-2000:]}") from error

    def threads_ns(self):
        """The CPU time of its current threads, by name."""
        times = collections.Counter()
        folder = f"/proc/{self.pid}/task"
        for thread in os.listdir(folder):
            try:
                with open(f"{folder}/{thread}/comm", encoding="utf-8") as file:
                    name = file.read().strip()
                with open(f"{folder}/{thread}/schedstat", encoding="ascii") as file:
                    times[name] += int(file.read().split()[0])
            except (OSError, IndexError):
                pass  # The thread has ended meanwhile, or the kernel has no schedstat.
        return times

    def wait_until_idle(self, seconds=120):
        """Waits until the process takes less than a quarter of a core."""
        def idle():
            before = self.cpu_ns()
            time.sleep(0.2)
            return self.cpu_ns() - before < 50_000_000
        wait_until(f"the end of the work of {self.name}", idle, seconds)

    def terminate(self):
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
    """A daemon with one disk, which is used over vhost-user."""

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
        wait_until("the daemon's start", lambda: self.check() and "ready" in self.messages())

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
        """The number of events that the tap has counted: two for each completed request."""
        disk, = self.get("/v1/statistics")["disks"]
        return 2 * sum(kind["count"] + kind["errors"] for kind in disk["operations"])

    def wait_for_listener(self):
        """Waits until the daemon collects events, as it does while there is a listener."""
        wait_until("a listener", lambda: self.check() and "events" in self.threads_ns())
        # The thread first attaches itself to the taps.
        time.sleep(0.3)

    def wait_for_centre(self):
        def running():
            status = self.get("/v1/monitor")
            return self.check() and status["state"] == "running" and status["fragments"] > 0
        wait_until(f"the link of {self.name}", running, 40)


class Load(Process):
    """Sequential reads of 4 KiB, with `depth` requests in flight."""

    def __init__(self, rig, daemon, depth, seconds, name="load", warmup_ms=100, namespace=None):
        super().__init__(rig, name, [
            FATHOM, "bench", daemon.disk, "--sequential", "--depth", str(depth),
            "--duration", f"{int(seconds * 1000)}ms", "--warmup", f"{warmup_ms}ms", "--rounds", "1",
            "--json"], namespace)
        self.seconds = seconds

    def requests_per_second(self):
        """Waits for the end of the load, and returns the measured rate."""
        if self.wait(self.seconds + 30):
            raise Failed(f"the load failed:\n{self.messages()[-2000:]}")
        with open(self.out, encoding="utf-8") as file:
            return json.load(file)["summaries"][0]["iops"]


class Results:
    """Rows in CSV that are appended to a file: those of the counter, whose number is 1, and others."""

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
                for row in re.finditer(rb"(?m)^1,[^,]+,(\d+),([+-]),(\d+),", whole):
                    self.rows -= 1
                    self.last_ns = int(row[1])
                    self.balance += 1 if row[2] == b"+" else -1
                    self.seen += int(row[3]) if row[2] == b"+" else 0

    def settled(self, end_ns):
        """Whether all events before the load's end have been counted. A second without events has no
        count."""
        self.update()
        return self.balance == 0 and self.seen > 0 and self.last_ns >= end_ns

    def wait(self, process, end_ns, seconds=120):
        wait_until(f"the counts of {process.name}", lambda: process.check() and
                   self.settled(end_ns), seconds)
        time.sleep(0.1)
        # At the end of a second, one of its two rows may have arrived before the other.
        wait_until(f"the last counts of {process.name}", lambda: self.settled(end_ns), seconds)


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
        """Returns the number of events seen, of rows, and of events reported as missing. Ends the
        daemon."""
        results = Results(self.out)
        results.wait(self, time.monotonic_ns())
        # Rows still leave windows for some seconds. A query that is late when the daemon ends is
        # cut off.
        self.wait_until_idle()
        # At the end of the daemon the query ends regularly, and reports missing events.
        self.daemon.terminate()
        if self.wait(60):
            raise Failed(f"the query failed:\n{self.messages()[-2000:]}")
        missing = sum(int(count) for count in re.findall(
            r"(?m)^(\d+) events? (?:missing in the input|arrived too late)", self.messages()))
        return results.seen, results.rows, missing


class Reader(Process):
    """The cheapest reader: it drops events, and counts them by the heads of blocks."""

    def __init__(self, rig, daemon):
        super().__init__(rig, "reader", [sys.executable, os.path.join(HERE, "reader.py"),
                                         daemon.control])
        daemon.wait_for_listener()
        self.check()

    def finish(self):
        time.sleep(0.5)
        self.terminate()
        if self.wait(20):
            raise Failed(f"the reader failed:\n{self.messages()[-2000:]}")
        with open(self.out, encoding="ascii") as file:
            counts = json.load(file)
        return counts["events"], counts["blocks"], counts["dropped"]


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
            r"listening for hosts at (\S+)", self.messages()))[1]

    def hosts(self):
        """The columns of the newest complete table of hosts, by the hosts' names."""
        lines = self.messages().split("\n")[:-1]
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
        """The largest lag of a host, in milliseconds."""
        units = {"ns": 1e-6, "us": 1e-3, "µs": 1e-3, "ms": 1.0, "s": 1e3, "min": 6e4}
        lags = [host["lag"].split() for host in self.hosts().values()]
        return max((float(value) * units.get(unit, 0.0) for value, unit in lags), default=0.0)


class Rig:
    """A folder in memory and the processes of one measurement. Its end removes all of them."""

    def __enter__(self):
        self.directory = tempfile.mkdtemp(
            prefix=f"{PREFIX}{os.getpid()}-", dir=MEMORY if os.access(MEMORY, os.W_OK) else None)
        self.processes = []
        return self

    def __exit__(self, *_):
        # The processes are killed and the folder is removed even after an exception.
        try:
            for process in reversed(self.processes):
                process.terminate()
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
    """The names in a folder left by killed benches: each name contains the bench's process id."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return [name for name in names if name.startswith(PREFIX)
            and not os.path.isdir(f"/proc/{name.removeprefix(PREFIX).split('-')[0]}")]


def sweep():
    """Removes folders that killed benches left in memory."""
    for name in left_behind(MEMORY):
        shutil.rmtree(os.path.join(MEMORY, name), ignore_errors=True)


def interval(options, processes, loads, count):
    """Measures an interval while the loads run: the CPU time in per cent of a core, by process and for
    the first process also by thread.

    The interval begins when windows are full. `count` returns counters, whose growth is included.
    """
    time.sleep(options.settle)

    def sample():
        return (time.monotonic_ns(), [process.cpu_ns() for process in processes],
                processes[0].threads_ns(), count())

    begun = sample()
    time.sleep(options.seconds)
    ended = sample()
    for load in loads:
        if load.process.poll() is not None:
            raise Failed(f"{load.name} ended before it was measured:\n{load.messages()[-2000:]}")
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
    """The duration of the loads, which includes the interval."""
    return options.settle + options.seconds + 1.5


def rounds(options, names, measure):
    """Measures each configuration in each round. The order changes, so that a drift of the machine
    favours no configuration. Returns the samples by name, in the order of the rounds."""
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
