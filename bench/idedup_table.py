"""A server of a disk whose equal blocks are kept once, with a table of hashes on the disk that is looked up for every
block that is written: the way of dmdedup (Tarasov et al., OLS 2014), for bench/idedup.

The disk has the data, in the order in which it came, a map of 8 bytes for each block, and a hash table with 24 bytes
for each block: a lookup takes one page, at random. As in dmdedup one thread does everything, a cache of the least
recently used pages holds a share of both tables, and a flush writes the pages that have changed. One page for a lookup
is less than the tree takes that dmdedup has by default."""

import collections
import hashlib
import os
import socket
import struct
import sys
import threading

import nbd_client

# The scripts that import this file need no compiled copy of it.
sys.dont_write_bytecode = True

BLOCK = 4096
HASH, ENTRY = 16, 24
ENTRIES = BLOCK // ENTRY
ADDRESSES = BLOCK // 8
READ, WRITE, DISCONNECT, FLUSH = 0, 1, 2, 3
# The most requests in flight on the connection to the disk.
IN_FLIGHT = 16


class File:
    """The device as a file, while nothing is timed."""

    def __init__(self, path):
        self.file = os.open(path, os.O_RDWR)

    def read(self, offset, length):
        return os.pread(self.file, length, offset)

    def write(self, pieces):
        for offset, data in pieces:
            os.pwrite(self.file, data, offset)

    def flush(self):
        pass

    def close(self):
        os.close(self.file)


class Export:
    """The device as an export of a daemon, with the timing of a modelled disk."""

    def __init__(self, path, name):
        self.connection = nbd_client.Connection(path, 120, name.encode())

    def read(self, offset, length):
        return self.connection.requests([(READ, offset, length, b"")])[0]

    def write(self, pieces):
        for start in range(0, len(pieces), IN_FLIGHT):
            some = pieces[start:start + IN_FLIGHT]
            self.connection.requests([(WRITE, offset, len(data), bytes(data)) for offset, data in some])

    def flush(self):
        self.connection.flush()

    def close(self):
        self.connection.close()


class Table:
    """The disk. `size` is that of the disk that is served, in bytes."""

    def __init__(self, device, size):
        self.device, self.size = device, size
        blocks = size // BLOCK
        self.map_first = blocks
        self.table_first = self.map_first + -(-blocks // ADDRESSES)
        # Three quarters of the entries are used when the disk is full.
        self.table_pages = -(-blocks * 4 // (3 * ENTRIES))
        self.pages = self.table_first + self.table_pages - self.map_first
        self.cache, self.changed = collections.OrderedDict(), set()
        self.next, self.cache_max = 1, self.pages
        self.reads = self.writes = self.lookups = 0

    @staticmethod
    def bytes_of(size):
        """The bytes of the device."""
        blocks = size // BLOCK
        return (blocks * 2 + blocks // ADDRESSES + 64) * BLOCK

    def limit(self, share):
        """Keeps this share of the pages of the tables in memory, from now on."""
        self.cache_max = max(2, int(self.pages * share))
        self.make_room()

    def make_room(self):
        while len(self.cache) > self.cache_max:
            number, page = self.cache.popitem(last=False)
            if number in self.changed:
                self.changed.discard(number)
                self.writes += 1
                self.device.write([(number * BLOCK, page)])

    def page(self, number, is_change=False):
        page = self.cache.get(number)
        if page is None:
            self.reads += 1
            page = bytearray(self.device.read(number * BLOCK, BLOCK))
            self.cache[number] = page
            self.make_room()
        else:
            self.cache.move_to_end(number)
        if is_change:
            self.changed.add(number)
        return page

    def address(self, block):
        """The place of a block; 0 for zeroes."""
        page = self.page(self.map_first + block // ADDRESSES)
        return struct.unpack_from("<Q", page, block % ADDRESSES * 8)[0]

    def find_or_add(self, data):
        """The place of a block with this content, and whether it has to be written there."""
        self.lookups += 1
        digest = hashlib.blake2b(data, digest_size=HASH).digest()
        number = self.table_first + int.from_bytes(digest[:8], "little") % self.table_pages
        page = self.page(number)
        free = None
        for at in range(0, ENTRIES * ENTRY, ENTRY):
            place = struct.unpack_from("<Q", page, at + HASH)[0]
            if place == 0:
                free = at
                break
            if page[at:at + HASH] == digest:
                return place, False
        place, self.next = self.next, self.next + 1
        if free is not None:
            page = self.page(number, True)
            page[free:free + ENTRY] = digest + struct.pack("<Q", place)
        return place, True

    def write(self, offset, data):
        new = []
        for block in range(offset // BLOCK, (offset + len(data)) // BLOCK):
            content = data[block * BLOCK - offset:][:BLOCK]
            place, is_new = self.find_or_add(content) if any(content) else (0, False)
            page = self.page(self.map_first + block // ADDRESSES, True)
            struct.pack_into("<Q", page, block % ADDRESSES * 8, place)
            if is_new and new and new[-1][0] + len(new[-1][1]) == place * BLOCK:
                new[-1][1].extend(content)
            elif is_new:
                new.append((place * BLOCK, bytearray(content)))
        self.device.write(new)

    def read(self, offset, length):
        runs, found = [], bytearray()
        for block in range(offset // BLOCK, (offset + length) // BLOCK):
            place = self.address(block)
            is_next = runs and (place == runs[-1][0] + runs[-1][1] if runs[-1][0] else not place)
            if is_next:
                runs[-1][1] += 1
            else:
                runs.append([place, 1])
        for place, count in runs:
            found += self.device.read(place * BLOCK, count * BLOCK) if place else bytes(count * BLOCK)
        return found

    def flush(self):
        pieces = [(number * BLOCK, self.cache[number]) for number in sorted(self.changed)]
        self.writes += len(pieces)
        self.changed.clear()
        self.device.write(pieces)
        self.device.flush()


class Server:
    """Serves a table over NBD to one client, in a thread."""

    def __init__(self, path, table):
        self.table = table
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(path)
        self.socket.listen(1)
        self.failure = None
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self):
        client, _ = self.socket.accept()
        stream = client.makefile("rb", 1 << 20)
        try:
            if self.negotiate(client, stream):
                self.transmit(client, stream)
        except (OSError, struct.error, ValueError, IndexError) as error:
            self.failure = repr(error)
        finally:
            client.close()

    def negotiate(self, client, stream):
        # HAS_FLAGS and SEND_FLUSH.
        flags = 5
        client.sendall(b"NBDMAGICIHAVEOPT" + struct.pack(">H", 3))
        stream.read(4)
        while True:
            _, option, length = struct.unpack(">8sII", stream.read(16))
            data = stream.read(length)

            def reply(kind, payload=b"", option=option):
                client.sendall(struct.pack(">QIII", 0x3E889045565A9, option, kind, len(payload)) + payload)

            if option == 1:
                client.sendall(struct.pack(">QH", self.table.size, flags) + bytes(124))
                return True
            if option in (6, 7) and data:
                reply(3, struct.pack(">HQH", 0, self.table.size, flags))
                reply(3, struct.pack(">HIII", 3, BLOCK, 128 << 10, 32 << 20))
                reply(1)
                if option == 7:
                    return True
            elif option == 2:
                reply(1)
                return False
            else:
                reply(1 << 31 | 1)

    def transmit(self, client, stream):
        while head := stream.read(28):
            magic, _, command, cookie, offset, length = struct.unpack(">IHHQQI", head)
            if magic != 0x25609513 or command == DISCONNECT:
                return
            answer = b""
            if command == WRITE:
                self.table.write(offset, stream.read(length))
            elif command == READ:
                answer = self.table.read(offset, length)
            elif command == FLUSH:
                self.table.flush()
            client.sendall(struct.pack(">IIQ", 0x67446698, 0, cookie) + answer)
