"""What write-back caches still have after kill -9, for the part `peers` of bench/cache."""

import os
import random
import signal
import struct
import sys
import threading
import time

from cache_peer_servers import BLOCK, CacheFilter, Fathom, Ocf, progress
from nbd_client import READ, WRITE

# The scripts that import this file need no compiled copy of it.
sys.dont_write_bytecode = True

# The caches are smaller than the disk, so that dirty blocks have to make room.
DISK, CACHE, LOG = 32 << 20, 16 << 20, 8 << 20
BLOCKS = DISK // BLOCK
SECTOR = 512
BATCH = 16
# How long a server writes before it is killed, and how long a start runs before it is killed.
LIFE_S, START_S = (0.2, 1.5), (0.0, 0.15)


def content(block, sequence):
    """A block: in each 8 bytes its number and that of the write."""
    return struct.pack("<II", block, sequence) * (BLOCK // 8)


class Model:
    """What each block may have. `flushed` has the write that a flush has made durable, `acknowledged` the last
    one that was acknowledged, and `sent` all later than the flushed one that may be there."""

    def __init__(self):
        self.sequence = 0
        self.flushed, self.acknowledged, self.sent = {}, {}, {}

    def write(self, block):
        """A write that is being sent. Returns its content."""
        self.sequence += 1
        self.sent.setdefault(block, []).append(self.sequence)
        return content(block, self.sequence)

    def acknowledge(self, blocks):
        for block in blocks:
            self.acknowledged[block] = self.sent[block][-1]

    def flush(self):
        """A flush that was acknowledged: what had been acknowledged before is durable."""
        for block, sequence in self.acknowledged.items():
            self.flushed[block] = sequence
            self.sent[block] = []
        self.acknowledged.clear()

    def judge(self, block, data):
        """Whether a block has lost what was flushed, what was only acknowledged, and whether it is mixed of several
        writes. It is expected to have this content from now on."""
        flushed = self.flushed.get(block, 0)
        allowed = {flushed, *self.sent.get(block, [])}
        sequence = struct.unpack_from("<II", data)[1]
        whole = data == (content(block, sequence) if sequence else bytes(BLOCK))
        if whole and sequence in allowed:
            lost, unflushed = False, sequence < self.acknowledged.get(block, 0)
        else:
            # Writes in flight may be torn between sectors.
            lost, unflushed = not self.torn(block, data, allowed), True
        self.flushed[block] = sequence
        self.sent[block] = []
        self.acknowledged.pop(block, None)
        return lost, unflushed and not lost, not whole

    @staticmethod
    def torn(block, data, allowed):
        """Whether each sector has a content that is allowed."""
        choices = {content(block, sequence)[:SECTOR] if sequence else bytes(SECTOR) for sequence in allowed}
        return all(bytes(data[at:at + SECTOR]) in choices for at in range(0, BLOCK, SECTOR))


class Trial:
    """A server that is killed again and again, and what it lost."""

    def __init__(self, server, chance):
        self.server, self.chance, self.model = server, chance, Model()
        self.kills = self.flushes = self.writes = self.lost = self.unflushed = 0

    def write_until_killed(self, connection):
        """Writes skewed blocks, flushes now and then, and kills the server at a random time."""
        timer = threading.Timer(self.chance.uniform(*LIFE_S), self.server.kill)
        timer.start()
        try:
            while True:
                blocks = {int(BLOCKS * self.chance.random() ** 2) for _ in range(BATCH)}
                connection.requests([(WRITE, block * BLOCK, BLOCK, self.model.write(block)) for block in blocks])
                self.model.acknowledge(blocks)
                self.writes += len(blocks)
                if self.chance.random() < 0.1:
                    connection.flush()
                    self.model.flush()
                    self.flushes += 1
        except ConnectionError:
            timer.join()
            if self.server.process.returncode != -signal.SIGKILL:
                raise OSError("the server ended by itself") from None
            self.kills += 1
        finally:
            timer.cancel()

    def verify(self, connection):
        """Reads all blocks, and makes durable what was found."""
        for first in range(0, BLOCKS, BATCH):
            found = connection.requests([(READ, (first + at) * BLOCK, BLOCK, b"") for at in range(BATCH)])
            for at, data in found.items():
                block = first + at
                lost, unflushed, mixed = self.model.judge(block, data)
                self.lost += lost
                self.unflushed += unflushed
                if mixed:
                    connection.requests([(WRITE, block * BLOCK, BLOCK, self.model.write(block))])
                    self.model.acknowledge([block])
        connection.flush()
        self.model.flush()

    def life(self):
        """A life after the first: perhaps killed at its start, then verified."""
        if self.chance.random() < 0.3:
            self.server.launch()
            time.sleep(self.chance.uniform(*START_S))
            self.server.kill()
            self.kills += 1
        connection = self.server.start()
        self.verify(connection)
        return connection

    def run(self, kills):
        connection = self.server.start()
        while self.kills < kills:
            progress(f"{self.server.name}: {self.kills} of {kills} kills")
            self.write_until_killed(connection)
            connection = self.life()
        connection.close()
        self.server.end()
        progress("")


def safety(options, plugin, folder):
    """The second table. Returns what was measured with its limit."""
    servers = [Fathom(os.path.join(folder, "safe-fathom"), options.binary, DISK, CACHE, LOG)]
    if plugin:
        servers.append(Ocf(os.path.join(folder, "safe-ocf"), plugin, DISK, CACHE, clean_s=1))
    servers += [CacheFilter(os.path.join(folder, "safe-writeback"), DISK, CACHE),
                CacheFilter(os.path.join(folder, "safe-no-limit"), DISK),
                CacheFilter(os.path.join(folder, "safe-unsafe"), DISK, CACHE, "unsafe")]
    print(f"\n{'kill -9':20}{'kills':>7}{'writes':>10}{'flushes':>9}{'flushed blocks lost':>21}"
          f"{'unflushed blocks lost':>23}", flush=True)
    verdicts = []
    for server in servers:
        trial, failure = Trial(server, random.Random(13)), ""
        try:
            trial.run(options.kills)
        except OSError as error:
            failure = f"  stopped: {str(error).strip()}"
        finally:
            server.end()
            progress("")
        print(f"{server.name:20}{trial.kills:7}{trial.writes:10,}{trial.flushes:9,}{trial.lost:21,}"
              f"{trial.unflushed:23,}{failure}", flush=True)
        if server.name == "Fathom":
            verdicts.append(("blocks that Fathom lost after a flush", trial.lost if not failure else None, 0))
    return verdicts
