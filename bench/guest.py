"""A daemon and real guests on its disks, for benchmarks."""

import atexit
import base64
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

# The scripts that import this file need no compiled copy of it.
sys.dont_write_bytecode = True

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FATHOM = os.path.join(ROOT, "target/release/fathom")
GUEST = os.environ.get("FATHOM_GUEST") or os.path.join(ROOT, "target/guest")
TOOLS = os.path.join(GUEST, "tools/tools.ext4")


def make(*kernels):
    """Makes the guest, and further kernels, if they do not exist."""
    subprocess.run([os.path.join(ROOT, "scripts/guest"), *kernels], check=True)


def read(path):
    """The text of a file; empty if it does not exist."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def processor_ns(pid):
    """The CPU time of a process, including that of threads that have ended."""
    # The number of a process's own clock (MAKE_PROCESS_CPUCLOCK of Linux).
    return time.clock_gettime_ns((~pid << 3) | 2)


class Control(http.client.HTTPConnection):
    """The daemon's control interface."""

    def __init__(self, path):
        super().__init__("localhost")
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self.path)

    def answer(self, method, path, body=None, status=200):
        """The bytes of an answer with this status."""
        text = None if body is None else json.dumps(body)
        self.request(method, path, text, {"Content-Type": "application/json"})
        answer = self.getresponse()
        found = answer.read()
        if answer.status != status:
            raise SystemExit(f"the daemon refuses {path} {body or ''}: {found.decode()}")
        return found

    def get(self, path, status=200):
        """The bytes of a report, or of an answer with another status. The connection stays open."""
        return self.answer("GET", path, status=status)

    def call(self, method, path, body=None):
        """The answer to a request, on a connection of its own."""
        try:
            return json.loads(self.answer(method, path, body))
        finally:
            self.close()

    def change(self, disk, what):
        """Changes a disk."""
        self.call("PATCH", f"/v1/disks/{disk}", what)

    def operation(self, disk, name):
        """The count, the bytes and the sum of latencies of a disk's operation so far."""
        disks = self.call("GET", "/v1/statistics")["disks"]
        operations = next(found for found in disks if found["name"] == disk)["operations"]
        found = next((found for found in operations if found["operation"] == name), None)
        return (found["count"], found["bytes"], found["latency_sum_ns"]) if found else (0, 0, 0)

    def dirty(self, vm):
        """The dirty data of a guest with what is being written, in bytes; `None` if unknown."""
        guests = self.call("GET", f"/v1/dirty?guest={vm}")["guests"]
        found = next((guest for guest in guests if "dirty_bytes" in guest), None)
        return found and found["dirty_bytes"] + found["writeback_bytes"]


class Channel:
    """The guest's command channel (scripts/guest-files/agent)."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)
        self.socket.settimeout(300)
        self.stream = self.socket.makefile("rb")
        self.number = 0

    def run(self, script):
        """Runs a script and returns its output."""
        self.number += 1
        text = base64.b64encode(script.encode()).decode()
        self.socket.sendall(f"{self.number} {text}\n".encode())
        while True:
            line = self.stream.readline()
            if not line:
                raise SystemExit("the guest has ended")
            words = line.split()
            if words[:1] == [b"fathom"] and int(words[1]) == self.number:
                output = self.stream.read(int(words[3])).decode()
                if int(words[2]) != 0:
                    raise SystemExit(f"in the guest: {output}")
                return output


class Daemon:
    """A daemon with a configuration file, in a folder with the sockets."""

    def __init__(self, directory, text):
        self.directory = directory
        self.configuration = os.path.join(directory, "fathom.toml")
        self.write(text)
        self.log = open(os.path.join(directory, "daemon.log"), "w", encoding="utf-8")
        command = [FATHOM, "serve", "--config", self.configuration]
        self.process = subprocess.Popen(command, stderr=self.log)
        atexit.register(self.end)
        path = os.path.join(directory, "control.sock")
        for _ in range(500):
            if any(" ready in " in line for line in self.lines()):
                break
            time.sleep(0.02)
        else:
            raise SystemExit("the daemon did not start:\n" + "\n".join(self.lines()))
        self.control = Control(path)

    def write(self, text):
        """Writes the configuration file."""
        with open(self.configuration, "w", encoding="utf-8") as file:
            file.write(f'[daemon]\ncontrol = "{self.directory}/control.sock"\n{text}')

    def reload(self, text):
        """Sets another configuration."""
        self.write(text)
        report = self.control.call("POST", "/v1/reload")
        if report["refused"]:
            raise SystemExit(f"the daemon refuses: {report['refused']}")

    def lines(self):
        """The daemon's log."""
        return read(os.path.join(self.directory, "daemon.log")).splitlines()

    def own_memory_kib(self):
        """The daemon's own memory, without the guests'."""
        text = read(f"/proc/{self.process.pid}/status")
        return int(re.search(r"RssAnon:\s+(\d+)", text).group(1))

    def cpu_ns(self, threads=""):
        """The CPU time of the daemon's threads whose names begin with `threads`."""
        total = 0
        for thread in os.listdir(f"/proc/{self.process.pid}/task"):
            task = f"/proc/{self.process.pid}/task/{thread}"
            if read(f"{task}/comm").startswith(threads):
                total += int((read(f"{task}/schedstat") or "0").split()[0])
        return total

    def all_cpu_ns(self):
        """The CPU time of the daemon, including that of threads that have ended."""
        return processor_ns(self.process.pid)

    def end(self):
        """Ends the daemon."""
        self.process.terminate()
        self.process.wait()
        self.log.close()


class Guest:
    """A guest on disks of the daemon: `/dev/vda` and on, in their order. With `kernel`, the name of a
    kernel of scripts/guest, the guest has the root image, otherwise it is diskless. Each of `ports` is a
    further serial port, `/dev/ttyS2` and on, with a socket of that name in the folder. `arguments` are
    further options of QEMU. With `processor`, QEMU runs on this processor of the host alone."""

    def __init__(self, daemon, name, disks, memory="512M", cpus=1, kernel=None, ports=(), arguments=(),
                 processor=None):
        path = os.path.join(daemon.directory, name)
        command = [FATHOM, "vm", "--control", f"{daemon.directory}/control.sock"]
        command += [word for disk in disks for word in ("--disk", disk)]
        command += ["--memory", memory, "--cpus", str(cpus), "--network", "none"]
        # An emulated guest on a busy host fails the kernel's check of its timer.
        append = "console=ttyS0 loglevel=4 mitigations=off no_timer_check"
        extra = ["-serial", f"unix:{path}.channel,server=on,wait=off"]
        for port in ports:
            extra += ["-serial", f"unix:{daemon.directory}/{port},server=on,wait=off"]
        if kernel:
            command += ["--kernel", f"{GUEST}/{kernel}/vmlinuz", "--initrd", f"{GUEST}/{kernel}/boot.img"]
            append += f" root=/dev/vd{chr(ord('a') + len(disks))} rw"
            extra += ["-drive", f"id=root,if=none,format=raw,snapshot=on,file={GUEST}/root.ext4",
                      "-device", "virtio-blk-pci,drive=root"]
        else:
            command += ["--kernel", f"{GUEST}/vmlinuz", "--initrd", f"{GUEST}/initrd.img"]
        command += ["--append", append, "--serial", f"file:{path}.console", "--", *extra, *arguments]
        if processor is not None:
            command = ["taskset", "--cpu-list", str(processor), *command]
        with open(f"{path}.log", "w", encoding="utf-8") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
        atexit.register(self.end)
        begun = time.monotonic()
        while "fathom-guest ready" not in read(f"{path}.console"):
            has_failed = self.process.poll() is not None or "Kernel panic" in read(f"{path}.console")
            if has_failed or time.monotonic() - begun > 180:
                raise SystemExit("the guest did not boot:\n" + read(f"{path}.console")[-2000:]
                                 + read(f"{path}.log")[-2000:])
            time.sleep(0.1)
        self.channel = Channel(f"{path}.channel")

    def run(self, script):
        """Runs a script in the guest and returns its output."""
        return self.channel.run(script)

    def qemu(self):
        """The process of QEMU."""
        own = self.process.pid
        return int(read(f"/proc/{own}/task/{own}/children").split()[0])

    def copy_memory(self, path):
        """Copies the guest's memory into a file, while the guest stands still."""
        qemu = self.qemu()
        files = [f"/proc/{qemu}/fd/{number}" for number in os.listdir(f"/proc/{qemu}/fd")]
        memory = next(file for file in files if "memory-backend-memfd" in os.readlink(file))
        os.kill(qemu, signal.SIGSTOP)
        try:
            subprocess.run(["cp", "--sparse=always", memory, path], check=True)
        finally:
            os.kill(qemu, signal.SIGCONT)

    def end(self):
        """Ends the guest."""
        self.process.terminate()
        self.process.wait()


class Machine:
    """A daemon with disks, and a guest on them. `images` has a name and a path for each disk; `options`
    are those of `Guest`."""

    def __init__(self, directory, images, memory, layers="[]", **options):
        self.directory = directory
        self.daemon = Daemon(directory, "".join(
            f'[[disk]]\nname = "{name}"\nvm = "bench"\nimage = "{image}"\nlayers = {layers}\n'
            f'[disk.vhost_user]\nsocket = "{directory}/{name}.sock"\nqueues = 1\n'
            for name, image in images.items()
        ))
        self.guest = Guest(self.daemon, "bench", images, memory, **options)
        self.control = self.daemon.control

    def end(self):
        """Ends the guest and the daemon."""
        self.guest.end()
        self.daemon.end()
