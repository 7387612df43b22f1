"""The time of `fsync` in a real guest whose write-back is held by the layer `schedule`, for
bench/shared-disk --only fsync."""

import os
import statistics
import subprocess
import sys
import tempfile
import time

from guest import ROOT, Daemon, Guest

# The cases: whether a neighbour reads all the time, and whether write-back is held when `fsync` begins.
CASES = {"alone": (False, False), "beside reads": (True, False), "held": (True, True)}
# Only a process that waits ends the holding.
SCHEDULE = ('{ kind = "schedule", device = "spindle", hold_max = "30s", held_requests = 100000, '
            'held_bytes = "1G" }')
SETUP = """set -e
mkfs.ext4 -q -E lazy_itable_init=0,lazy_journal_init=0 /dev/vda; mkdir -p /mnt
mount -o commit=3600 /dev/vda /mnt
for file in one two; do head -c 4194304 /dev/zero > /mnt/$file; done; sync
"""
# Two files are dirty, and nothing is written.
DIRTY = """echo 0 > /proc/sys/vm/dirty_writeback_centisecs
for file in one two; do
    yes $file | head -c 4194304 | dd of=/mnt/$file bs=64k conv=notrunc iflag=fullblock status=none
done
"""
# The kernel writes the files back, in the background.
WRITE_BACK = """echo 10 > /proc/sys/vm/dirty_expire_centisecs; echo 10 > /proc/sys/vm/dirty_writeback_centisecs
while [ $(awk '/^Dirty:/ { print $2 }' /proc/meminfo) -gt 64 ]; do sleep 0.05; done
"""
SYNC = "dd if=/dev/null of=/mnt/one conv=fsync,notrunc status=none"
READER = """
fio --name=reader --filename=/dev/vda --size=400m --rw=randread --bs=4k --direct=1 --ioengine=libaio --iodepth=4 \
    --time_based --runtime=3600 > /dev/null 2>&1 &
"""
# fio may wait for ever for reads that a signal made it forget, so it is killed.
END = "sync; killall -q -KILL fio; while pidof fio > /dev/null; do sleep 0.1; done"


def configuration(directory, schedules):
    text = ""
    for name, offset in (("data", "0"), ("busy", "50G")):
        text += (f'[[disk]]\nname = "{name}"\nvm = "{name}"\nimage = "{directory}/{name}.img"\n'
                 f'model = {{ kind = "hdd", device = "spindle", size = "100G", offset = "{offset}" }}\n'
                 f'layers = [{SCHEDULE if schedules else ""}]\n'
                 f'[disk.vhost_user]\nsocket = "{directory}/{name}.sock"\n')
    return text


def figures(daemon):
    """The figures of the layer `schedule` of the disk `data`."""
    layers = daemon.control.call("GET", "/v1/disks/data")["layers"]
    found = next(layer for layer in layers if layer["name"] == "schedule")["figures"]
    return {figure["name"]: figure["value"] for figure in found}


def once(daemon, guest, is_held):
    """The time of one `fsync` of a file with 4 MiB of changes, in ms."""
    guest.run(DIRTY)
    if is_held:
        guest.run(WRITE_BACK)
        before = figures(daemon)
        if not before["held"]:
            return None
    begun = time.perf_counter()
    guest.run(SYNC)
    time_ms = 1e3 * (time.perf_counter() - begun)
    if is_held:
        after = figures(daemon)
        released = {name: after[name] - before[name] for name in after if after[name] != before[name]}
        print(f"{time_ms:.0f} ms; held before: {before['held']}; {released}", file=sys.stderr)
    return time_ms


def run(rounds):
    """Measures and prints each case. Returns the medians, in ms."""
    subprocess.run([os.path.join(ROOT, "scripts/guest")], check=True, stdout=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="fathom-", dir="/tmp") as directory:
        for name in ("data", "busy"):
            with open(os.path.join(directory, f"{name}.img"), "wb") as file:
                file.truncate(400 << 20)
        daemon = Daemon(directory, configuration(directory, False))
        guests = []
        try:
            for name in ("data", "busy"):
                guests.append(Guest(daemon, name, [name]))
            guest, reader = guests
            guest.run(SETUP)
            times = {case: [] for case in CASES}
            for _ in range(rounds):
                for case, (reads, is_held) in CASES.items():
                    daemon.reload(configuration(directory, is_held))
                    if reads:
                        reader.run(READER)
                        time.sleep(1)
                    time_ms = once(daemon, guest, is_held)
                    if time_ms is None:
                        print("nothing was held in this round", file=sys.stderr)
                    else:
                        times[case].append(time_ms)
                    reader.run(END)
                    guest.run("sync")
        finally:
            for guest in guests:
                guest.end()
            daemon.end()
    medians = {}
    for case, found in times.items():
        if not found:
            raise SystemExit(f"no round of the case {case!r} was measured")
        medians[case] = statistics.median(found)
        print(f"{'fsync of 4 MiB in a guest':32}{case:14}{medians[case]:9.1f} ms"
              f"  ({min(found):.1f} to {max(found):.1f} ms, {len(found)} times)")
    return medians
