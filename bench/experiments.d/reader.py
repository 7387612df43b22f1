"""Reads the events of a daemon and drops them: `reader.py CONTROL-SOCKET`, until SIGTERM.

Then it prints the number of blocks and events, and the number of events that the daemon had to
drop. It reads only the head of each block (docs/recording.md).
"""

import json
import signal
import socket
import struct
import sys

ROWS, DROPPED = 1, 2
HEAD = struct.Struct("<4sBBHIII")


class Stream:
    """The body of an HTTP answer in chunks."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)
        self.file = self.socket.makefile("rb", buffering=1 << 20)
        self.socket.sendall(
            b"GET /v1/recording HTTP/1.1\r\nHost: fathom\r\nConnection: close\r\n\r\n")
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            line = self.file.readline()
            if not line:
                sys.exit("the daemon does not answer")
            head += line
        if not head.startswith(b"HTTP/1.1 200") or b"chunked" not in head.lower():
            sys.exit(f"an unexpected answer: {head.decode(errors='replace')}")
        self.left = None

    def read(self, length):
        parts = []
        while length:
            if not self.left:
                if self.left == 0:
                    self.file.readline()
                self.left = int(self.file.readline() or b"0", 16)
                if not self.left:
                    sys.exit("the stream of events was cut off")
            part = self.file.read(min(length, self.left))
            if not part:
                sys.exit("the stream of events was cut off")
            self.left -= len(part)
            length -= len(part)
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


def main():
    counts = {"blocks": 0, "events": 0, "dropped": 0}

    def end(*_):
        print(json.dumps(counts), flush=True)
        sys.exit(0)

    signal.signal(signal.SIGTERM, end)
    stream = Stream(sys.argv[1])
    head = stream.read(32)
    stream.read(struct.unpack_from("<I", head, 12)[0])
    while True:
        mark, kind, packed, _, stored, _, count = HEAD.unpack_from(stream.read(40))
        if mark != b"FBLK":
            sys.exit("a block does not begin with its mark")
        rest = stream.read(stored)
        counts["blocks"] += 1
        if kind == ROWS:
            counts["events"] += count
        elif kind == DROPPED and not packed:
            counts["dropped"] += int.from_bytes(rest[:8], "little")


if __name__ == "__main__":
    main()
