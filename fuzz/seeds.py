#!/usr/bin/env python3
"""Writes the initial inputs of the fuzz targets into fuzz/corpus.

A guided search needs valid inputs to start from. Without them it does not find a ring's
index, 1026 bytes into the memory, or a [[disk]] in a file.
"""
import bz2
import re
import struct
from pathlib import Path

FUZZ = Path(__file__).resolve().parent


def seed(target, name, data):
    folder = FUZZ / "corpus" / target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"seed-{name}").write_bytes(data)


def configuration():
    text = (FUZZ.parent / "docs/configuration.md").read_text()
    for number, block in enumerate(re.findall(r"```toml\n(.*?)```", text, re.S)):
        seed("configuration", f"page-{number}", block.encode())
    # The keys that the page's examples do not have. /dev/zero and the like exist on every host.
    seed("configuration", "keys", b"""\
daemon = { control = "c", log = "debug", shutdown_time_max = "2.5s" }
[[disk]]
name = "a"
serial = "S"
null = "1.5G"
block_size = "4K"
tap = false
layers = [
    { kind = "tap" },
    { kind = "fault", effect = "late", offset = "1M", length = 4096, after = 1, strikes_max = 2 },
]
model = { kind = "hdd", seed = 1, spanning = true, write_cache = "1M" }
vhost_user = { socket = "s", queues = 2, spin = "250us", group = "root" }
[[disk]]
name = "b"
image = "/dev/zero"
model = { kind = "sata-ssd", power_loss_protected = true }
[[nbd]]
address = "unix:n"
exports = "all"
group = "root"
[[nbd]]
address = "127.0.0.1:10809"
plain_allowed = true
tls = { psk = "/dev/null" }
""")


def cql():
    # The first byte selects the dialect: Fathom's (0) or STREAM's (1).
    text = (FUZZ.parent / "docs/queries.md").read_text()
    for number, block in enumerate(re.findall(r"```sql[^\n]*\n(.*?)```", text, re.S)):
        seed("cql", f"page-{number}", b"\x00" + block.encode())
    for path in sorted((FUZZ.parent / "crates/cql/tests/paper").glob("*.cql")):
        seed("cql", path.stem, b"\x01" + path.read_bytes())
    seed("cql", "words", b"""\x00create stream S (a integer, b float, c text, d boolean);
create view V (x, y) as select a, b from S [rows 9] where d and c like '%a_' or a not in (1, 2);
Rstream(select * from V [now] union all (select y, cast(x as integer) from V except select 1, 2)
order by 1 desc limit 3);
Dstream(select distinct case a when 1 then upper(c) else 'x' || c end as e,
coalesce(b, greatest(1.5, -a % 3)) from S [range 1 minute slide 2 ms] as s
full join S [partition by c, d rows 2] as t on s.a = t.a and s.b between 0 and t.b
left join S [tumbling 5 us] on true where s.c is not null);
q: select c, count(distinct a), percentile(b, 99), approx_count_distinct(d), stddev(b),
approx_count_distinct(a, 5), histogram(a), histogram(b, 0.25), top_k(c, 3) from S
[unbounded] cross join (select 1 as one from S) as o group by c having max(a) < $limit;
select exists (select * from S) as e, (select max(a) from S [now] where c in (select c from S)) as m,
a not in (select b from S [rows 2]) as n from S [now] where not exists (select 1 from V) or
b = (select y from V [rows 1]);""")


def database():
    # One page of each part of each captured file.
    for path in sorted((FUZZ.parent / "crates/database/tests/pages").glob("*.txt")):
        pages, length = {}, 0
        for line in path.read_text().splitlines():
            words = line.split(" ")
            if words[0] == "file":
                file, length = words[1].replace("/", "-"), int(words[2])
            elif words[0] == "page":
                page = pages[(file, words[2])] = bytearray(length)
            elif words[0] != "#":
                data = bytes.fromhex(words[1])
                page[int(words[0]):int(words[0]) + len(data)] = data
        for (file, part), page in pages.items():
            seed("database", f"{path.stem}-{file}-{part}", bytes(page))


def devices():
    # A list of mounts and, after a zero byte each, the files of a tree like /sys.
    source = (FUZZ.parent / "crates/devices/src/fuzz.rs").read_text()
    whole = re.search(r'const WHOLE: &\[u8\] = b"(.*?)";', source, re.S).group(1)
    whole = re.sub(r"\\\n *", "", whole).encode().decode("unicode_escape").encode("latin-1")
    seed("devices", "whole", whole)
    for number, part in enumerate(whole.split(b"\0")[0].splitlines(True)):
        seed("devices", f"mount-{number}", part + whole[whole.index(b"\0"):])


def events():
    # The first byte selects the columns (all or some), the unit of times, and the column of the
    # time.
    lines = (FUZZ.parent / "crates/monitor/tests/sample/events.csv").read_bytes().splitlines(True)
    seed("events", "csv", b"\x00" + b"".join(lines[:12]))
    seed("events", "csv-some", b"\x05" + b"".join(lines[:4]))
    seed("events", "csv-tabs", b"\x00" + b"".join(lines[:9]).replace(b",", b"\t"))
    quoted = b'BlktapTS,Type,Size,Path\r\n1.5,Q,8,"/a, ""b""\n"\r\n-1,R,x,\r\n2000-01-01,E,8,/\r\n'
    seed("events", "csv-quoted", b"\x02" + quoted)
    blkparse = b"".join(
        b"  8,0    3 %8d     0.%09d   697  %s  WS %d + 8 [%s]\n"
        % (number, number, b"QC"[number % 2:][:1], number // 2 * 8, [b"a process", b"0"][number % 2])
        for number in range(10))
    seed("events", "blkparse", b"\x00" + blkparse)
    seed("events", "blkparse-summary", b"\x00" + blkparse + b"CPU0 (sda):\n Reads Queued:  1, 4KiB\n")
    seed("events", "bzip2", b"\x00" + bz2.compress(blkparse))
    tencent = b"".join(b"15383232%02d,%d,8,%d,10\n" % (n, n * 8, n % 2) for n in range(10))
    seed("events", "tencent", b"\x00" + tencent)
    seed("events", "oracle-general", b"\x00" + b"".join(
        struct.pack("<IQIq", number // 8, number * 8, 4096, number + 1 if number % 7 else -1) for number in range(12)))
    for name, lines in (
            ("iolog-2", ["fio version 2 iolog", "/dev/sda add", "/dev/sda read 8192 4096", "/dev/sda wait 150 0",
                         "/dev/sda write 0 4096", "/dev/sda sync 0 0"]),
            ("iolog-3", ["fio version 3 iolog", "0 /dev/sda add", "310 /dev/sda read 8192 4096", "340 /dev/sda trim 0 65536"]),
            ("msr-cambridge", ["128166372003061629,usr,0,Read,7014609920,24576,41286",
                               "128166372016382155,usr,0,Write,1317441536,8192,1963"]),
            ("spc", ["0,20941264,8192,W,0.551706,x", "0,20939840,8192,r,0.554041"]),
            ("arc", ["2029 64 0 0", "2093 8 0 1"]),
            ("disksim", ["0.000000 0 46712824 16 1", "0.500000 0 34 8 0x10"]),
            ("mqsim", ["4851300 1 524288 16 0", "4864300 1 524304 16 1"])):
        seed("events", name, b"\x00" + "".join(line + "\n" for line in lines).encode())
    seed("events", "vscsi-1", b"\x00" + b"".join(
        bytes([1, 0, 0, 0, 0, 16, 0, 0, 1, 0, 0, 0, 0x2a, 0, 0, 1]) + struct.pack("<QQ", n * 8, n)
        for n in range(8)))
    seed("events", "vscsi-2", b"\x00" + b"".join(
        bytes([0x2a, 0, 0, 2, 1, 0, 0, 0, 0, 16, 0, 0, 1, 0, 0, 0])
        + struct.pack("<QQQ", n * 8, n, 3) for n in range(8)))


def recording():
    # The first byte selects whether checksums are corrected (if it is even), and the columns to
    # read.
    def varint(number):
        out = b""
        while number > 127:
            out, number = out + bytes([number & 127 | 128]), number >> 7
        return out + bytes([number])

    def counted(data):
        return varint(len(data)) + data

    def signed(*numbers):
        return b"".join(varint(number * 2 if number >= 0 else -number * 2 - 1) for number in numbers)

    def stream(name, *columns):
        text = bytes([len(name)]) + name + struct.pack("<H", len(columns))
        for kind, is_time, name in columns:
            text += bytes([kind, is_time, len(name)]) + name
        return text

    def head(version, text):
        return b"\x8eFATHOM\n" + struct.pack("<HHIqII", version, 1, len(text), 5, 0, 0) + text

    def header(*columns):
        return head(1, stream(b"IOstream", *columns))

    def block(kind, plain, count=0, first=0, last=0, packed=False, of_stream=0):
        stored = plain
        if packed:
            # A single LZ4 sequence without a match.
            length = len(plain) - 15
            stored = b"\xf0" + b"\xff" * (length // 255) + bytes([length % 255]) + plain
        return b"FBLK" + struct.pack("<BBHIIIqqI", kind, packed, of_stream, len(stored), len(plain), count,
                                     first, last, 0) + stored

    columns = header((2, 1, b"BlktapTS"), (4, 0, b"Type"), (2, 0, b"Size"), (4, 0, b"Path"),
                     (3, 0, b"Ratio"), (1, 0, b"Is"), (2, 1, b"FtrTS"), (4, 0, b"VDisk"))
    rows = counted(signed(100, 1, 0, 5)) + b"".join((
        b"\x02\x00",
        b"\x03" + counted(varint(2) + counted(b"Q") + counted(b"R") + bytes([0, 1, 0, 1])),
        b"\x03" + counted(signed(8, 0, -8, 300)),
        b"\x04" + counted(bytes([0b1010]) + varint(1) + counted("/ä".encode()) + bytes([0, 0])),
        b"\x03" + counted(struct.pack("<4d", 0.5, -0.0, float("nan"), float("inf"))),
        b"\x03" + counted(bytes([1, 0, 1, 1])),
        b"\x04" + counted(bytes([0b0111]) + signed(200, 1, 1)),
        b"\x01" + counted(b"web"),
    ))
    notes = (block(2, struct.pack("<QB", 7, 1) + counted(b"web")) + block(3, b"", 0, 106, 106)
             + block(9, b"later") + block(4, struct.pack("<QQ", 8, 7)))
    whole = columns + block(1, rows, 4, 100, 106) + block(1, rows, 4, 100, 106, True) + notes
    seed("recording", "whole", b"\x00" + whole)
    seed("recording", "some-columns", b"\x02" + whole)
    seed("recording", "wrong-sums", b"\x01" + whole)
    seed("recording", "cut", b"\x00" + whole[:-len(notes) - 9])
    seed("recording", "empty", b"\x00" + header())
    # Two streams that the program knows, and one that it does not.
    time, text = (2, 1, b"ChangeTS"), (4, 0, b"Change")
    streams = (stream(b"IOstream", (2, 1, b"BlktapTS")) + stream(b"Changes", time, text)
               + stream(b"Later", (2, 0, b"X")))
    one = counted(signed(100)) + b"\x02\x00"
    change = counted(signed(90)) + b"\x02\x00" + b"\x01" + counted(b"reload")
    several = (head(2, bytes([3]) + streams) + block(1, one, 1, 100, 100)
               + block(1, change, 1, 90, 90, of_stream=1)
               + block(1, counted(signed(5)) + b"\x03" + counted(signed(7)), 1, 5, 5, of_stream=2))
    seed("recording", "several-streams", b"\x00" + several + notes)
    seed("recording", "one-of-several", b"\x04" + several + notes)


def wal():
    # The first byte selects whether checksums are corrected (if it is odd).
    def superblock(number, position, sequence):
        numbers = struct.pack("<6Q", number, 3, 16 * 512, position, sequence, 1)
        text = b"\x8eFATHWAL" + struct.pack("<II", 1, 512) + bytes(range(16)) + numbers
        text += struct.pack("<HH", 4, 6) + bytes(20) + b"disk".ljust(128, b"\0") + b"/image"
        return text.ljust(508, b"\0") + struct.pack("<I", crc32c(text.ljust(508, b"\0"))) + bytes(3584)

    def record(epoch, sequence, position, *entries):
        text = bytes(range(8)) + struct.pack("<3Q", epoch, sequence, position)
        length, data = 512, b""
        packed = b""
        for kind, flags, offset, size in entries:
            content = bytes([sequence]) * (size if kind == 1 else 0)
            data += content
            length += len(content)
            packed += struct.pack("<BBHIQQ8x", kind, flags, 0, crc32c(content) if content else 0,
                                  offset, size)
        text += struct.pack("<QH14x", length, len(entries)) + packed
        block = text.ljust(504, b"\0")
        return b"WREC" + struct.pack("<I", crc32c(b"WREC" + block)) + block + data

    # The last record did not fit at the end of the ring and is at its beginning.
    ring = (record(3, 9, 16 * 512, (1, 0, 512, 512), (2, 1, 4096, 1 << 40))
            + record(3, 10, 18 * 512)).ljust(10 * 512, b"\0")
    ring += record(1, 7, 10 * 512, (1, 0, 0, 1024), (3, 0, 512, 512))
    ring += record(2, 8, 13 * 512, (2, 0, 0, 512), (1, 0, 8192, 512))
    whole = superblock(6, 10 * 512, 7) + superblock(5, 0, 1) + ring.ljust(16 * 512, b"\0")
    seed("wal", "whole", b"\x00" + whole)
    seed("wal", "mended", b"\x01" + whole)
    seed("wal", "torn", b"\x00" + whole[:-2048] + bytes(2048))


def nbd_negotiation():
    def counted(text):
        return struct.pack(">I", len(text)) + text

    def meta(name, *queries):
        return counted(name) + struct.pack(">I", len(queries)) + b"".join(map(counted, queries))

    def go(name, *kinds):
        return counted(name) + struct.pack(f">H{len(kinds)}H", len(kinds), *kinds)

    def option(code, data=b""):
        return b"IHAVEOPT" + struct.pack(">I", code) + counted(data)

    flags = struct.pack(">I", 3)
    look = option(3) + option(6, go(b"one", 1, 2, 3))
    contexts = option(9, meta(b"one", b"base:")) + option(10, meta(b"two", b"base:allocation", b"x:y"))
    # The first byte selects TLS (modulo 3: none, offered, required) and the size of the pieces.
    seed("nbd_negotiation", "simple", b"\x00" + flags + look + option(7, go(b"two", 3)))
    seed("nbd_negotiation", "structured",
         b"\x04" + flags + option(5) + option(8) + contexts + option(7, go(b"two", 3)))
    seed("nbd_negotiation", "extended",
         b"\x08" + flags + option(5) + option(11) + contexts + look + option(7, go(b"two")))
    seed("nbd_negotiation", "old", b"\x00" + flags + option(1, b"one"))
    seed("nbd_negotiation", "abort", b"\x00" + flags + option(77) + option(2))


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def cbor(value):
    def head(major, number):
        return bytes([major << 5 | 25]) + struct.pack(">H", number)

    if isinstance(value, bool) or value is None:
        return bytes([0xf6 if value is None else 0xf4 + value])
    if isinstance(value, float):
        return b"\xfb" + struct.pack(">d", value)
    if isinstance(value, int):
        return head(0, value)
    if isinstance(value, str):
        return head(3, len(value)) + value.encode()
    if isinstance(value, dict):
        return head(5, len(value)) + b"".join(cbor(k) + cbor(v) for k, v in value.items())
    return head(4, len(value)) + b"".join(map(cbor, value))


def link():
    def frame(kind, data=b""):
        return struct.pack("<IB", len(data), kind) + data

    def text(data):
        return struct.pack("<H", len(data)) + data

    def block(rows, columns):
        times = b"\x02" * rows
        payload = bytes([len(times)]) + times
        for encoding, data in columns:
            payload += bytes([encoding, len(data)]) + data
        head = b"FBLK" + struct.pack("<BBHIIIqq", 1, 0, 0, len(payload), len(payload), rows, 1, rows)
        return head + struct.pack("<I", crc32c(head + payload)) + payload

    def rows(number, fragment, reset, data):
        return frame(4, struct.pack("<QHB", number, fragment, reset) + data)

    # VDisk, Size, and the count: a text for all rows, values, a constant.
    data = block(3, [(1, b"a"), (3, b"\x02\x04\x06"), (1, b"\x02")])
    sparse = block(3, [(4, b"\x05\x01\x01a\x00\x00"), (2, b""), (3, b"\x02\x02\x02")])
    # The first byte selects the sender (bit 0) and the size of the pieces.
    host = b"\xfe" + frame(1, text(b"host") + text(b"1")) + frame(2, struct.pack("<IB", 1, 0))
    seed("link", "host", host + rows(1, 0, 0, data) + rows(2, 1, 1, sparse)
         + frame(5, struct.pack("<QqQ", 3, 9, 3)) + frame(6, struct.pack("<QQQ", 4, 1, 2))
         + frame(7, struct.pack("<Iq", 1, 99)) + frame(3, struct.pack("<I", 1) + text(b"no"))
         + frame(8, text(b"bye")))
    columns = [{"name": "Size", "kind": "Integer"}]
    window = {"Window": [{"Range": {"length_ns": 5, "slide_ns": None}}, {"Source": 0}]}
    over = {"Binary": ["Greater", {"Column": 0}, {"Literal": {"Integer": 8}}]}
    plans = [{"output": {"Stream": {"Source": 0}}, "columns": columns},
             {"output": {"Relation": {"Filter": [window, over]}}, "columns": columns}]
    fragments = cbor({"stream": "IOstream", "columns": columns, "plans": plans})
    seed("link", "centre", b"\xff" + frame(65, bytes(8)) + frame(67, bytes(4))
         + frame(66, struct.pack("<IQBq", 1, 0, 1, -5) + fragments) + frame(68, bytes(8))
         + frame(69, bytes(8)) + frame(70, text(b"full")))


def introspection():
    # The first byte selects the kernel's age (bit 0), and one request or everything (bit 1). The
    # second byte selects the request. The mutations follow: each has a position, a method (its
    # highest bit: within structures) and a value.
    for number in range(48):
        for how in range(10):
            mutation = struct.pack("<I", number * 977 | (how | 0x80 * (number & 1)) << 24)
            mutation += struct.pack("<Q", number * 0x9E3779B97F4A7C15 & (1 << 64) - 1)
            first = number & 1 | (how & 1) << 1
            seed("introspection", f"{number}-{how}", bytes([first, number]) + mutation)


def flush():
    # The first byte is the size of the pieces in which the bytes arrive.
    seed("flush", "qmp", b'''\x40{"QMP": {"version": {}, "capabilities": []}}\r
{"return": {}}\r
{"timestamp": {"seconds": 1, "microseconds": 2}, "event": "BALLOON_CHANGE", "data": {"actual": 1}}\r
{"error": {"class": "GenericError", "desc": "no"}}\r
''')
    seed("flush", "agent", b'''\x01\xff{"return": 7}
{"return": {"pid": 9}}
{"return": {"exitcode": 0, "exited": true}}
''')
    seed("flush", "tunables", b'{"version":1,"vm":"web","dirty_expire":3000}')
    seed("flush", "balloon", b'{"version":1,"vm":"web","memory_bytes":536870912}')


def virtio_request():
    next_, write, indirect = 1, 2, 4
    # After the rings, which end at 0x706: the tables and their targets.
    tables, header, data, status = 0x7a0, 0x710, 0x720, 0x790

    def table(*pieces):
        last = len(pieces) - 1
        return b"".join(
            struct.pack("<QIHH", place, length, flags | (next_ if i < last else 0), i + 1 if i < last else 0)
            for i, (place, length, flags) in enumerate(pieces))

    def ring(name, kind, payload, *pieces):
        head = struct.pack("<IIQ", kind, 0, 8)
        pieces = [(header, 16, 0), *pieces, (status, 1, write)]
        available = struct.pack("<HHH", 0, 1, 0)
        for suffix, descriptors, behind in (
                ("", table(*pieces), b""),
                ("-indirect", table((tables, 16 * len(pieces), indirect)), table(*pieces))):
            memory = bytearray(tables) + behind
            memory[0:len(descriptors)] = descriptors
            memory[0x400:0x406] = available
            memory[header:header + 16] = head
            memory[data:data + len(payload)] = payload
            seed("virtio_request", name + suffix, bytes(memory))

    ring("read", 0, b"", (0x1000, 512, write), (0x2000, 512, write))
    ring("write", 1, b"", (0x1000, 512, 0), (0x2000, 512, 0))
    ring("flush", 4, b"")
    ring("id", 8, b"", (0x1000, 20, write))
    segments = struct.pack("<QII", 8, 8, 0) + struct.pack("<QII", 64, 8, 0)
    ring("discard", 11, segments, (data, 32, 0))
    ring("zeroes", 13, struct.pack("<QII", 8, 8, 1), (data, 16, 0))


configuration()
cql()
database()
devices()
events()
introspection()
link()
nbd_negotiation()
recording()
virtio_request()
wal()
