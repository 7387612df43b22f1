"""A daemon and a real guest on its disks, for benchmarks."""

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


def make(*kernels):
    """Makes the guest, and further kernels, if they do not exist."""
    subprocess.run([os.path.join(ROOT, "scripts/guest"), *kernels], check=True)


class Control(http.client.HTTPConnection):
    """The daemon's control interface."""

    def __init__(self, path):
        super().__init__("localhost")
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self.path)

    def get(self, path, status=200):
        """The bytes of a report, or of an answer with another status."""
        self.request("GET", path)
        answer = self.getresponse()
        body = answer.read()
        if answer.status != status:
            raise SystemExit(f"the daemon refuses {path}: {body.decode()}")
        return body

    def change(self, disk, what):
        """Changes a disk."""
        self.request(
            "PATCH", f"/v1/disks/{disk}", json.dumps(what), {"Content-Type": "application/json"}
        )
        answer = self.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise SystemExit(f"the daemon refuses {what}: {body.decode()}")


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
            words = self.stream.readline().split()
            if words[:1] == [b"fathom"] and int(words[1]) == self.number:
                output = self.stream.read(int(words[3])).decode()
                if int(words[2]) != 0:
                    raise SystemExit(f"in the guest: {output}")
                return output


class Machine:
    """A daemon with disks, and a guest on them: `/dev/vda` and on, in the order of `images`, a name
    and a path for each. With `kernel`, the name of a kernel of scripts/guest, the guest has the root
    image, otherwise it is diskless. Each of `ports` is a further serial port, `/dev/ttyS2` and on,
    with a socket of that name in the directory."""

    def __init__(self, directory, images, memory, layers="[]", queues=1, cpus=1, kernel=None, ports=()):
        self.directory = directory
        configuration = os.path.join(directory, "fathom.toml")
        with open(configuration, "w", encoding="utf-8") as file:
            file.write(f'[daemon]\ncontrol = "{directory}/control.sock"\n')
            for name, image in images.items():
                file.write(
                    f'[[disk]]\nname = "{name}"\nvm = "bench"\nimage = "{image}"\nlayers = {layers}\n'
                    f'[disk.vhost_user]\nsocket = "{directory}/{name}.sock"\nqueues = {queues}\n'
                )
        self.log = open(os.path.join(directory, "daemon.log"), "w+", encoding="utf-8")
        self.daemon = subprocess.Popen(
            [FATHOM, "serve", "--config", configuration], stderr=self.log
        )
        self.wait_for(os.path.join(directory, "control.sock"))
        channel = os.path.join(directory, "channel.sock")
        console = os.path.join(directory, "console.log")
        command = [FATHOM, "vm", "--control", f"{directory}/control.sock"]
        command += [word for name in images for word in ("--disk", name)]
        command += ["--memory", memory, "--cpus", str(cpus), "--network", "none"]
        append = "console=ttyS0 loglevel=4 mitigations=off"
        extra = ["-serial", f"unix:{channel},server=on,wait=off"]
        for port in ports:
            extra += ["-serial", f"unix:{directory}/{port},server=on,wait=off"]
        if kernel:
            command += ["--kernel", f"{GUEST}/{kernel}/vmlinuz", "--initrd", f"{GUEST}/{kernel}/boot.img"]
            append += f" root=/dev/vd{chr(ord('a') + len(images))} rw"
            extra += ["-drive", f"id=root,if=none,format=raw,snapshot=on,file={GUEST}/root.ext4",
                      "-device", "virtio-blk-pci,drive=root"]
        else:
            command += ["--kernel", f"{GUEST}/vmlinuz", "--initrd", f"{GUEST}/initrd.img"]
        command += ["--append", append, "--serial", f"file:{console}", "--", *extra]
        self.guest = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        begun = time.monotonic()
        while "fathom-guest ready" not in self.read(console):
            if self.guest.poll() is not None or time.monotonic() - begun > 180:
                raise SystemExit("the guest did not boot:\n" + self.read(console)[-2000:])
            time.sleep(0.1)
        self.channel = Channel(channel)

    def control(self):
        """A connection to the daemon."""
        return Control(os.path.join(self.directory, "control.sock"))

    def read(self, path):
        """The text of a file; empty if it does not exist."""
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                return file.read()
        except FileNotFoundError:
            return ""

    def wait_for(self, path):
        """Waits for a file."""
        for _ in range(200):
            if os.path.exists(path):
                return
            time.sleep(0.02)
        raise SystemExit(f"{path} was not created")

    def lines(self):
        """The daemon's log."""
        return self.read(os.path.join(self.directory, "daemon.log")).splitlines()

    def own_memory_kib(self):
        """The daemon's own memory, without the guest's."""
        text = self.read(f"/proc/{self.daemon.pid}/status")
        return int(re.search(r"RssAnon:\s+(\d+)", text).group(1))

    def cpu_ns(self, threads=""):
        """The CPU time of the daemon's threads whose names begin with `threads`."""
        total = 0
        for thread in os.listdir(f"/proc/{self.daemon.pid}/task"):
            task = f"/proc/{self.daemon.pid}/task/{thread}"
            if self.read(f"{task}/comm").startswith(threads):
                total += int((self.read(f"{task}/schedstat") or "0").split()[0])
        return total

    def all_cpu_ns(self):
        """The CPU time of the daemon, including that of threads that have ended."""
        # The number of a process's own clock (MAKE_PROCESS_CPUCLOCK of Linux).
        return time.clock_gettime_ns((~self.daemon.pid << 3) | 2)

    def copy_memory(self, path):
        """Copies the guest's memory into a file, while the guest stands still."""
        own = self.guest.pid
        (qemu,) = self.read(f"/proc/{own}/task/{own}/children").split()[:1]
        files = [f"/proc/{qemu}/fd/{number}" for number in os.listdir(f"/proc/{qemu}/fd")]
        memory = next(file for file in files if "memory-backend-memfd" in os.readlink(file))
        os.kill(int(qemu), signal.SIGSTOP)
        try:
            subprocess.run(["cp", "--sparse=always", memory, path], check=True)
        finally:
            os.kill(int(qemu), signal.SIGCONT)

    def end(self):
        """Ends the guest and the daemon."""
        for process in (self.guest, self.daemon):
            process.terminate()
            process.wait()
        self.log.close()
