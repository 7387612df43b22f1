"""Several real guests on one daemon, for the comparisons in this folder."""

import json
import os
import subprocess
import time

import guest
from guest import FATHOM, GUEST, ROOT, Channel

TOOLS = os.path.join(GUEST, "tools/tools.ext4")


class Control(guest.Control):
    """The daemon's control interface, with a connection for each request."""

    def call(self, method, path, body=None):
        """The answer to a request."""
        text = None if body is None else json.dumps(body)
        self.request(method, path, text, {"Content-Type": "application/json"})
        answer = self.getresponse()
        found = answer.read()
        self.close()
        if answer.status != 200:
            raise SystemExit(f"the daemon refuses {path} {body}: {found.decode()}")
        return json.loads(found)

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


def read(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except FileNotFoundError:
        return ""


class Daemon:
    """A daemon with a configuration file, in a folder with the sockets."""

    def __init__(self, directory, text):
        self.directory = directory
        self.configuration = os.path.join(directory, "fathom.toml")
        self.write(text)
        self.log = open(os.path.join(directory, "daemon.log"), "w", encoding="utf-8")
        command = [FATHOM, "serve", "--config", self.configuration]
        self.process = subprocess.Popen(command, stderr=self.log)
        path = os.path.join(directory, "control.sock")
        for _ in range(500):
            if os.path.exists(path):
                break
            time.sleep(0.02)
        else:
            raise SystemExit("the daemon did not start:\n" + self.lines())
        self.control = Control(path)

    def write(self, text):
        with open(self.configuration, "w", encoding="utf-8") as file:
            file.write(f'[daemon]\ncontrol = "{self.directory}/control.sock"\n{text}')

    def reload(self, text):
        """Sets another configuration."""
        self.write(text)
        report = self.control.call("POST", "/v1/reload")
        if report["refused"]:
            raise SystemExit(f"the daemon refuses: {report['refused']}")

    def lines(self):
        return read(os.path.join(self.directory, "daemon.log"))

    def end(self):
        self.process.terminate()
        self.process.wait()
        self.log.close()


class Guest:
    """A guest on disks of the daemon. `arguments` are options of QEMU."""

    def __init__(self, daemon, name, disks, memory="512M", cpus=1, arguments=()):
        path = os.path.join(daemon.directory, name)
        command = [FATHOM, "vm", "--control", f"{daemon.directory}/control.sock"]
        for disk in disks:
            command += ["--disk", disk]
        command += ["--memory", memory, "--cpus", str(cpus), "--network", "none"]
        command += ["--kernel", f"{GUEST}/vmlinuz", "--initrd", f"{GUEST}/initrd.img"]
        command += ["--append", "console=ttyS0 loglevel=4 mitigations=off"]
        command += ["--serial", f"file:{path}.console"]
        command += ["--", "-serial", f"unix:{path}.channel,server=on,wait=off", *arguments]
        with open(f"{path}.log", "w", encoding="utf-8") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
        begun = time.monotonic()
        while "fathom-guest ready" not in read(f"{path}.console"):
            if self.process.poll() is not None or time.monotonic() - begun > 180:
                raise SystemExit("the guest did not boot:\n" + read(f"{path}.console")[-2000:]
                                 + read(f"{path}.log")[-2000:])
            time.sleep(0.1)
        self.channel = Channel(f"{path}.channel")

    def run(self, script):
        return self.channel.run(script)

    def end(self):
        self.process.terminate()
        self.process.wait()
