"""The paper's workloads in real guests, with a cache above a modelled disk, for the part `live` of bench/cache."""

import concurrent.futures
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time

import targets
from cache_workloads import (BLOCK, MODELS, POLICIES, SLOWER_MAX_PERCENT, WORKLOADS, Run, above_percent, prepare,
                             ratio_text, speedup)
from guest import processor_ns

# A folder in memory, so that the host's disk takes no part in a disk's time, and the least room that it needs.
MEMORY_FOLDER, ROOM_MIN = "/dev/shm", 12 << 30
# What empties the guest's caches of files directly before the measured step.
EMPTY = "sync; sleep 2; sync; echo 3 > /proc/sys/vm/drop_caches"


def host_ns():
    """The time for which the host's processors were busy, of all programs."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _, _, interrupts, softirq, *_ = map(int, file.readline().split()[1:])
    return (user + nice + system + interrupts + softirq) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


class Live(Run):
    """A workload in a guest, whose disk has a cache above a model. The disk's tap is between both, so that
    the disk's statistics are those of the requests that reach the model."""

    def __init__(self, workload, folder, disk, policy, size, is_build_modelled):
        self.model = f'model = {{ kind = "{disk}" }}'
        layers = f'{{ kind = "cache", size = "{size}", policy = "{policy}" }}, {{ kind = "tap" }}'
        super().__init__(workload, folder, layer=layers, model=self.model if is_build_modelled else "",
                         label=f"{workload.name}, {disk}, {policy}")
        self.is_build_modelled = is_build_modelled

    def build(self):
        """Sets the workload up. Returns how long this took, in seconds."""
        begun = time.monotonic()
        for what, script in self.workload.setup(self.guest):
            self.step(what, script)
        if not self.is_build_modelled:
            self.daemon.reload(self.configuration(self.model))
        return time.monotonic() - begun

    def sample(self):
        """The counters of what is measured."""
        layers = self.control.call("GET", "/v1/disks/disk")["layers"]
        layer = next(layer for layer in layers if layer["name"] == "cache")
        cache = {figure["name"]: figure["value"] for figure in layer["figures"]}
        (disk,) = self.control.call("GET", "/v1/statistics")["disks"]
        reads, _, reads_ns = self.control.operation("disk", "read")
        own_ns = processor_ns(self.guest.qemu()) + processor_ns(self.daemon.process.pid)
        return {"read": cache["read_bytes_total"], "hit": cache["hit_bytes_total"], "reads": reads,
                "reads_s": reads_ns / 1e9, "busy_s": disk["busy_ns"] / 1e9, "processor_s": own_ns / 1e9,
                "others_s": (host_ns() - own_ns) / 1e9}

    def measured(self):
        """Runs the measured step. Returns its figures and its output."""
        self.guest.run(EMPTY)
        before = self.sample()
        passed, output = self.step("measured", self.workload.measured)
        found = {name: value - before[name] for name, value in self.sample().items()}
        found["time_s"] = passed
        found["hits"] = found["hit"] / max(found["read"], 1)
        return found, output


def policies(workload, disk, size, options, base):
    """Runs a workload with each policy on a modelled disk. All guests are set up first, `options.jobs` at a time;
    then their measured steps follow each other, while the other guests are idle. Returns the figures by policy."""
    runs, found, outputs = {}, {}, set()
    lock = threading.Lock()

    def build(policy):
        folder = tempfile.mkdtemp(prefix=f"{policy}-", dir=base)
        # Guests start one after the other: their programs are registered for the end of this one.
        with lock:
            runs[policy] = Live(workload, folder, disk, policy, size, options.build == "modelled")
        took = runs[policy].build()
        print(f"    {workload.name}, {disk}, {policy}: set up in {took:.0f} s", file=sys.stderr, flush=True)

    try:
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            for one in [pool.submit(build, policy) for policy in POLICIES]:
                one.result()
        for policy in POLICIES:
            found[policy], output = runs[policy].measured()
            outputs.add(output)
    finally:
        for one in runs.values():
            one.end()
            shutil.rmtree(one.folder)
    if len(outputs) != 1:
        sys.exit(f"bench/cache: {workload.name}: the results differ between policies: {outputs}")
    return found


def medians(rounds):
    """The median of each figure, by policy."""
    return {policy: {name: statistics.median(one[policy][name] for one in rounds) for name in rounds[0][policy]}
            for policy in POLICIES}


def table(workload, disk, part, size, rounds):
    """Prints the medians of the rounds. Returns the disk time of `none` and of `auto`."""
    found = medians(rounds)
    base = found["none"]
    others = max(one[policy]["others_s"] / one[policy]["time_s"] for one in rounds for policy in POLICIES)
    print(f"\n{workload.name}, in guests on a modelled {disk}, with a cache of {size / (1 << 20):.0f} MiB ({part} % of about "
          f"{workload.working_set / (1 << 20):,.0f} MiB that it reads and writes)\n"
          f"the measured step; {'one round' if len(rounds) == 1 else f'medians of {len(rounds)} rounds'}; "
          f"other programs used {others:.2f} of {os.cpu_count()} processors at most\n"
          f"{'policy':8}{'time':>11}{'to none':>9}{'processor':>12}{'hits':>8}{'disk reads':>12}{'disk time':>12}"
          f"{'to none':>14}{'disk busy':>12}{'paper':>14}")
    for policy, own in found.items():
        to_none = ["", ""]
        if policy != "none":
            to_none = [ratio_text(base["time_s"], own["time_s"]), ratio_text(base["reads_s"], own["reads_s"])]
        print(f"{policy:8}{own['time_s']:9.2f} s{to_none[0]:>9}{own['processor_s']:10.2f} s{own['hits']:8.1%}"
              f"{own['reads']:12,.0f}{own['reads_s']:10.3f} s{to_none[1]:>14}{own['busy_s']:10.3f} s"
              f"{workload.paper[disk] if policy == 'sky' else '':>14}", flush=True)
    return base["reads_s"], found["auto"]["reads_s"]


def live(options):
    """The part `live`. Returns the checks: a function of `targets`, and its arguments."""
    prepare(options)
    chosen = options.only.split(",") if options.only else []
    unknown = [name for name in chosen if name not in [*WORKLOADS, *MODELS]]
    if unknown:
        sys.exit(f"bench/cache: --only {unknown[0]}: not one of {', '.join([*WORKLOADS, *MODELS])}")
    parts = [int(part) for part in options.percent.split(",")]
    verdicts = []
    room = os.statvfs(MEMORY_FOLDER)
    base = MEMORY_FOLDER if room.f_bavail * room.f_frsize >= ROOM_MIN else "/var/tmp"
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fathom-", dir=base) as folder:
        options.folder = folder
        for name in [name for name in WORKLOADS if name in chosen] or WORKLOADS:
            workload = WORKLOADS[name](options)
            for disk in [disk for disk in MODELS if disk in chosen] or MODELS:
                best = 0
                for part in parts:
                    size = max(1, workload.working_set * part // 100 // BLOCK) * BLOCK
                    rounds = []
                    for number in range(options.rounds):
                        print(f"… {name}, {disk}, a cache of {part} %, round {number + 1} of {options.rounds}, after "
                              f"{(time.monotonic() - begun) / 60:.0f} minutes", file=sys.stderr, flush=True)
                        rounds.append(policies(workload, disk, size, options, folder))
                    none, auto = table(workload, disk, part, size, rounds)
                    best = max(best, speedup(none, auto))
                    verdicts.append((targets.at_most, f"{name}, live, {disk}, {part} %: disk time of auto above none's",
                                     above_percent(none, auto), SLOWER_MAX_PERCENT, " %"))
                verdicts.append((targets.at_least, f"{name}, live, {disk}: best of auto to none in disk time",
                                 best, workload.target[disk], ""))
    return verdicts
