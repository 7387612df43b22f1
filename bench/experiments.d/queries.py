"""The queries of the paper, and what the experiments make of them.

All are read with `--stream-compat`: a second is a microsecond, as the texts were written for.
"""

import os
import re

HERE = os.path.dirname(os.path.abspath(__file__))
PAPER = os.path.join(os.path.dirname(os.path.dirname(HERE)), "crates/cql/tests/paper")
# A tuple of the paper's: what a filter sees of an event, and how a stream of it is declared.
NAMES = "BlktapTS, Type, IOOp, ReqId, Sector, Size, VMName, VDisk, PDisk, FtrTS"
DECLARED = ", ".join(f"{name} {'char' if name in 'Type IOOp VMName VDisk PDisk' else 'integer'}"
                     for name in NAMES.split(", "))
# The machine that Query 1 asks about.
MACHINE = "muscatvm51"


def paper(name):
    """A query as it stands in the paper: `05`, `10m`."""
    with open(os.path.join(PAPER, f"query{name}.cql"), encoding="utf-8") as file:
        return file.read() + "\n"


def counter(stream="IOstream"):
    """How many events there were, told each second. It stands first, so its rows have number 1.

    Two seconds may have as many events; the mean instant, which costs little, makes the rows
    different.
    """
    return (f"query : select count(*), avg(BlktapTS) from {stream} "
            "[range 1000000 second slide 1000000 second];\n")


def copies(script, count, different=False):
    """A script so many times, each with streams of its own, and if different with windows each a
    millisecond longer than the one before."""
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
    """A stream at the centre of all that hosts see, or of what meets the condition there.

    Conditions of queries run at the hosts by themselves. They do not go below Rstream, and that of
    rows which are there for one instant is these rows again. So what stands behind it is done at
    the centre, over whole tuples, as in the paper.
    """
    where = f" where {condition}" if condition else ""
    return (f"vquery : Rstream(select {NAMES} from IOstream [now]{where});\n"
            f"vtable : register stream {name} ({DECLARED});\n")


def query_5(stream, condition):
    """Query 5 over another stream than that of the events, or Q5': without its condition."""
    own = 'select * from IOstream as IO where IO.Type = "Q";'
    script = paper("05")
    assert script.count(own) == 1, "Query 5 begins with the requests"
    rest = ' where IO.Type = "Q"' if condition else ""
    return script.replace(own, f"select * from {stream} as IO{rest};")


def query_10m():
    """Query 10M as it is printed: hosts fill in their addresses."""
    return paper("10m")
