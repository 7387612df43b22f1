"""NBD clients and the CPU time of servers, for bench/nbd and bench/cache."""

import json
import os
import socket
import struct
import subprocess
import sys

# The scripts that import this file need no compiled copy of it.
sys.dont_write_bytecode = True

READ, WRITE, DISCONNECT, FLUSH = 0, 1, 2, 3
FUA = 1
TICK = os.sysconf("SC_CLK_TCK")


def cpu_s(pid):
    """The CPU time of a process with all its threads so far, in seconds."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def fio(server, pattern, depth, seconds, size, *options):
    """One measurement with requests of 4 KiB. Returns the requests per second, the server's CPU time for each in µs,
    and the share of a processor that the client took."""
    before = server.cpu_s()
    done = subprocess.run(
        ["fio", "--name=bench", "--ioengine=nbd", f"--uri={server.uri}", f"--rw={pattern}",
         "--bs=4k", f"--iodepth={depth}", f"--size={size}", "--time_based", "--randrepeat=1",
         f"--runtime={seconds}", "--norandommap", *options, "--output-format=json"],
        capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"fio failed on {server.name}:\n{done.stderr}{done.stdout}")
    job = json.loads(done.stdout[done.stdout.index("{"):])["jobs"][0]
    side = job["read" if pattern == "randread" else "write"]
    cpu_us = (server.cpu_s() - before) * 1e6 / max(side["total_ios"], 1)
    return side["iops"], cpu_us, (job["usr_cpu"] + job["sys_cpu"]) / 100


def request(command, number, offset, length, flags=0):
    """The bytes of a request, without the data of a write."""
    return struct.pack(">IHHQQI", 0x25609513, flags, command, number, offset, length)


class Connection:
    """A plain NBD connection without structured replies to an export, by default the default one, as
    https://github.com/NetworkBlockDevice/nbd describes it in doc/proto.md."""

    def __init__(self, path, timeout_s, export=b""):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(timeout_s)
        self.socket.connect(path)
        self.take(16)  # NBDMAGIC, IHAVEOPT
        flags = struct.unpack(">H", self.take(2))[0]
        self.socket.sendall(struct.pack(">I", flags & 3) + b"IHAVEOPT" + struct.pack(">II", 1, len(export)) + export)
        self.size = struct.unpack(">QH", self.take(10))[0]
        if not flags & 2:
            self.take(124)

    def fill(self, buffer):
        """Fills a buffer with the next bytes from the server."""
        view = memoryview(buffer)
        while view:
            count = self.socket.recv_into(view)
            if count == 0:
                raise ConnectionResetError("the server closed the connection")
            view = view[count:]
        return buffer

    def take(self, length):
        """The next bytes from the server."""
        return self.fill(bytearray(length))

    def requests(self, requests, flags=0):
        """Sends requests at once, at most 16 of a block: (command, offset, length, data). Returns by the
        position of a request what it read. Raises OSError when the server refuses one, or ends."""
        self.socket.sendall(b"".join(
            request(command, number, offset, length, flags) + data
            for number, (command, offset, length, data) in enumerate(requests)))
        found = {}
        for _ in requests:
            magic, error, number = struct.unpack(">IIQ", self.take(16))
            if magic != 0x67446698 or error:
                raise OSError(f"the server answered {error}")
            command, _, length, _ = requests[number]
            if command == READ:
                found[number] = self.take(length)
        return found

    def write_durably(self, offset, data):
        """Writes a block with force unit access."""
        self.requests([(WRITE, offset, len(data), data)], FUA)

    def flush(self):
        self.requests([(FLUSH, 0, 0, b"")])

    def close(self):
        self.socket.sendall(request(DISCONNECT, 0, 0, 0))
        self.socket.recv(1)
        self.socket.close()
