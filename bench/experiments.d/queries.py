"""The queries of the paper, and the experiments' variants of them.

All are read with `--stream-compat`: a second means a microsecond, as the texts assume.
"""

import os
import re

HERE = os.path.dirname(os.path.abspath(__file__))
PAPER = os.path.join(os.path.dirname(os.path.dirname(HERE)), "crates/cql/tests/paper")
# A tuple of the paper: the columns of an event that a filter sees, and the declaration of a stream
# of it.
NAMES = "BlktapTS, Type, IOOp, ReqId, Sector, Size, VMName, VDisk, PDisk, FtrTS"
DECLARED = ", ".join(f"{name} {'char' if name in 'Type IOOp VMName VDisk PDisk' else 'integer'}"
                     for name in NAMES.split(", "))
# The machine in the condition of Query 1.
MACHINE = "muscatvm51"


def paper(name):
    """The text of a query in the paper: `05`, `10m`."""
    with open(os.path.join(PAPER, f"query{name}.cql"), encoding="utf-8") as file:
        return file.read() + "\n"


def counter(stream="IOstream"):
    """A query that counts the events of each second. It must be the first query, so that its rows
    have the number 1.

    Two seconds may have equal counts; the mean instant, which costs little, makes the rows
    different.
    """
    return (f"query : select count(*), avg(BlktapTS) from {stream} "
            "[range 1000000 second slide 1000000 second];\n")


def copies(script, count, different=False):
    """`count` copies of a script, each with streams of its own. With `different` the windows of each
    copy are a millisecond longer than those of the previous one."""
    names = re.findall(r"register\s+stream\s+(\w+)", script)
    if not names:
        return script * count
    own = rf"\b({'|'.join(names)})\b"

    def copy(number):
        text = re.sub(own, rf"\g<1>{number}", script)
        window = f"[range {3_000_000 + 1000 * number} second]"
        return text.replace("[range 3000000 second]", window) if different else text

    return "".join(copy(number) for number in range(count))


def forwarded(name, condition=""):
    """A stream at the centre of all events of the hosts, or of those that meet the condition.

    Normally the split moves conditions of queries to the hosts, but not below Rstream, and the
    Rstream of rows that exist for one instant is these rows again. So queries over this stream
    run at the centre, over whole tuples, as in the paper.
    """
    where = f" where {condition}" if condition else ""
    return (f"vquery : Rstream(select {NAMES} from IOstream [now]{where});\n"
            f"vtable : register stream {name} ({DECLARED});\n")


def query_5(stream, condition):
    """Query 5 over the stream `stream`; without its condition it is Q5'."""
    own = 'select * from IOstream as IO where IO.Type = "Q";'
    script = paper("05")
    assert script.count(own) == 1, "Query 5 begins with the requests"
    rest = ' where IO.Type = "Q"' if condition else ""
    return script.replace(own, f"select * from {stream} as IO{rest};")


def query_10m():
    """Query 10M as printed in the paper, in which hosts fill in their addresses."""
    return paper("10m")
