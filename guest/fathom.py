"""Hints of a guest's program to Fathom, the server of its virtual disk, as guest/fathom.h has them for C.

    import os, fathom

    with fathom.io_class(4):                # all that this thread reads, and writes with O_DIRECT or O_SYNC
        data = os.pread(file, 4096, 0)

Without Fathom, or with a kernel without hints (some before 6.5), it changes nothing. docs/hints.md describes the hints.
"""

import contextlib
import ctypes
import platform

CLASS_MAX = 31
UNIQUE = 32

# SYS_ioprio_set and SYS_ioprio_get.
_NUMBERS = {"x86_64": (251, 252), "aarch64": (30, 31), "riscv64": (30, 31)}
_SET, _GET = _NUMBERS.get(platform.machine(), (None, None))
_libc = ctypes.CDLL(None, use_errno=True)


def ioprio(io_class):
    """The I/O priority of requests of a class, for io_uring and libaio; 0, which is none, for a class out of range."""
    if not 0 <= io_class <= UNIQUE:
        return 0
    return 2 << 13 | 4 | (1 << 9 | io_class) << 3


@contextlib.contextmanager
def io_class(number):
    """What the thread does in the meantime has this I/O class."""
    before, wanted = -1, ioprio(number)
    if wanted and _SET:
        before = _libc.syscall(_GET, 1, 0)
        if before >= 0 and _libc.syscall(_SET, 1, 0, wanted):
            before = -1
    try:
        yield
    finally:
        if before >= 0:
            # A priority without a class is reported with a level, and set without one.
            _libc.syscall(_SET, 1, 0, before if before >> 13 else 0)
