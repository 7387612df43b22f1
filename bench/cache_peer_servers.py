"""The servers that the part `peers` of bench/cache compares."""

import os
import shutil
import signal
import subprocess
import sys
import time
from multiprocessing.pool import ThreadPool

import guest
import nbd_client

# The scripts that import this file need no compiled copy of it.
sys.dont_write_bytecode = True

BLOCK = 4096
# Much longer than a start takes, or an answer, on a machine that is stopped now and then.
WAIT_MAX_S = 1800
# What OCF's metadata take of a small cache device, in bytes.
OCF_METADATA = 36 << 20
OCF_SOURCE = "https://github.com/Open-CAS/ocf"
OCF_COMMIT = "b8b4b704aeba6429f1159b5ba031be98bf3b3c25"


def note(text):
    print(f"bench/cache: {text}", flush=True)


def progress(text):
    """Shows on a terminal what is being done, in a line that is written again."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


class Server:
    """A server of one disk on an NBD socket in its own folder. It can be killed and started again."""

    def __init__(self, name, folder):
        self.name, self.folder, self.process, self.starts = name, folder, None, 0
        os.makedirs(folder, exist_ok=True)
        self.socket = os.path.join(folder, "nbd.sock")
        self.uri = f"nbd+unix:///?socket={self.socket}"

    def path(self, name):
        return os.path.join(self.folder, name)

    def command(self):
        """The command line of the next start."""
        raise NotImplementedError

    def launch(self):
        """Starts the process without waiting until it serves."""
        if os.path.exists(self.socket):
            os.unlink(self.socket)
        with open(self.path("log"), "ab") as log:
            self.process = subprocess.Popen(self.command(), stdout=log, stderr=log,
                                            env={**os.environ, "TMPDIR": self.folder})
        self.starts += 1

    def connect(self):
        return nbd_client.Connection(self.socket, WAIT_MAX_S)

    def start(self):
        """Starts the server. Returns a connection to it."""
        self.launch()
        end = time.monotonic() + WAIT_MAX_S
        while True:
            try:
                return self.connect()
            except (FileNotFoundError, ConnectionError):
                if self.process.poll() is not None or time.monotonic() > end:
                    raise OSError(f"{self.name} did not start: {guest.read(self.path('log'))[-2000:]}") from None
                time.sleep(0.01)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def end(self):
        """The orderly end."""
        if self.process and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(WAIT_MAX_S)
            except subprocess.TimeoutExpired:
                self.kill()

    def cpu_s(self):
        return nbd_client.cpu_s(self.process.pid)


def blank(path, size):
    """Makes a file of zeroes, whose space is allocated."""
    with open(path, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)


class Fathom(Server):
    """Fathom with a cache on a file, in the mode write-back."""

    def __init__(self, folder, binary, disk_size, cache_size, log_size):
        super().__init__("Fathom", folder)
        self.binary = binary
        blank(self.path("disk.img"), disk_size)
        # A log that lasts, and a cache of this size beside it.
        subprocess.run([binary, "cache", "create", self.path("cache"), "--size", str(cache_size + log_size),
                        "--log", str(log_size), "--logs", "1", "--block-size", "4K"],
                       check=True, stdout=subprocess.DEVNULL)
        with open(self.path("fathom.toml"), "w", encoding="utf-8") as file:
            file.write(f'[daemon]\ncontrol = "{self.path("control.sock")}"\n'
                       f'[[nbd]]\naddress = "unix:{self.socket}"\n'
                       f'[[disk]]\nname = "disk"\nimage = "{self.path("disk.img")}"\n'
                       f'layers = [{{ kind = "cache", store = "{self.path("cache")}", mode = "write-back" }}]\n')

    def command(self):
        return [self.binary, "serve", "--config", self.path("fathom.toml"), "--log", "warning"]


class CacheFilter(Server):
    """nbdkit's filter `cache` above its plugin `file`. Without a size, the cache can have the whole disk."""

    def __init__(self, folder, disk_size, cache_size=None, mode="writeback"):
        super().__init__(f"nbdkit, {mode}" if cache_size else "nbdkit, no limit", folder)
        self.mode, self.cache_size = mode, cache_size
        blank(self.path("disk.img"), disk_size)

    def command(self):
        return ["nbdkit", "--foreground", "-U", self.socket, "--filter=cache", "file", self.path("disk.img"),
                f"cache={self.mode}", "cache-on-read=true", f"cache-min-block-size={BLOCK}",
                *([f"cache-max-size={self.cache_size}"] if self.cache_size else [])]


class CountedFilter(Server):
    """nbdkit's filter `cache` above a disk without data, where the blocks that it reads are counted."""

    def __init__(self, folder, disk_size, cache_size):
        super().__init__("nbdkit", folder)
        self.disk_size, self.cache_size = disk_size, cache_size

    def command(self):
        # Beneath the cache, each block is a request of its own.
        return ["nbdkit", "--foreground", "--threads=1", "-U", self.socket,
                "--filter=cache", "--filter=blocksize", "--filter=stats", "null", str(self.disk_size),
                f"maxdata={BLOCK}", f"statsfile={self.path('statistics')}",
                "cache=writethrough", "cache-on-read=true", f"cache-min-block-size={BLOCK}",
                f"cache-max-size={self.cache_size}"]

    def misses(self):
        """The blocks that were read beneath, after the end."""
        for line in guest.read(self.path("statistics")).splitlines():
            if line.startswith("read: "):
                return int(line.split()[1])
        return 0


class Ocf(Server):
    """OCF in a plugin of nbdkit, above two files."""

    def __init__(self, folder, plugin, disk_size, cache_size, clean_s=0):
        super().__init__("OCF", folder)
        self.plugin, self.clean_s = plugin, clean_s
        blank(self.path("disk.img"), disk_size)
        blank(self.path("cache"), cache_size + OCF_METADATA)

    def command(self):
        # The first start makes the cache. All others load what there is.
        return ["nbdkit", "--foreground", "-U", self.socket, self.plugin, f"core={self.path('disk.img')}",
                f"cache={self.path('cache')}", "mode=wb", f"load={int(self.starts > 0)}", f"clean={self.clean_s}"]


class CountedOcf(Server):
    """OCF with volumes without data, which counts hits."""

    def __init__(self, folder, plugin, disk_size, lines, cutoff):
        super().__init__("OCF", folder)
        self.plugin, self.disk_size, self.lines, self.cutoff = plugin, disk_size, lines, cutoff

    def command(self):
        return ["nbdkit", "--foreground", "--threads=1", "-U", self.socket, self.plugin,
                f"core=null:{self.disk_size}", "cache=null:", f"lines={self.lines}", "mode=wt",
                f"cutoff={self.cutoff}", f"statistics={self.path('statistics')}"]


def run(command, what):
    """Runs a step of the build. Returns whether it succeeded."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        note(f"{what}: {(done.stderr or done.stdout)[-2000:].strip()}")
    return done.returncode == 0


def fetch_ocf(source, folder):
    """Fetches OCF at its fixed commit. Returns whether it is there."""
    if not os.path.exists(os.path.join(folder, "Makefile")):
        note(f"fetching OCF from {source} into {folder}")
        if not run(["git", "clone", "--quiet", "--no-checkout", source, folder], "OCF cannot be fetched"):
            return False
        if not run(["git", "-C", folder, "checkout", "--quiet", OCF_COMMIT], "OCF lacks the commit"):
            shutil.rmtree(folder)
            return False
    return True


def build_ocf(source):
    """Builds OCF and the plugin around it. Returns the plugin, or `None` with a message."""
    folder = os.path.join(guest.ROOT, "target/ocf")
    checkout, build = os.path.join(folder, "source"), os.path.join(folder, "build")
    library, plugin = os.path.join(build, "ocf.o"), os.path.join(folder, "nbdkit-ocf-plugin.so")
    own = [os.path.join(guest.ROOT, "bench/ocf", name) for name in ("plugin.c", "context.c")]
    flags = ["-O2", "-fPIC", f"-I{build}/include", f"-I{build}/src/ocf/env"]
    if not os.path.exists("/usr/include/nbdkit-plugin.h"):
        note("OCF is skipped: nbdkit-plugin.h is not installed; run: scripts/install bench")
        return None
    if not fetch_ocf(source or OCF_SOURCE, checkout):
        return None
    if not os.path.exists(library):
        note("building OCF")
        shutil.rmtree(build, ignore_errors=True)
        os.makedirs(build)
        if not run(["make", "-s", "-C", checkout, "inc", "src", "env", f"O={build}", "OCF_ENV=posix", "CMD=cp"],
                   "OCF cannot be prepared"):
            return None
        # OCF refuses caches of less than 40 MiB. Those of 1 % of a trace are smaller.
        smaller = os.path.join(build, "include/ocf/ocf_def.h")
        text = guest.read(smaller)
        with open(smaller, "w", encoding="utf-8") as file:
            file.write(text.replace("(40 * MiB)", "(1 * MiB)"))
        sources = [os.path.join(root, name) for root, _, names in os.walk(f"{build}/src")
                   for name in names if name.endswith(".c")]
        objects = [f"{build}/{number}.o" for number in range(len(sources))]
        compile_one = lambda one, target: run(["gcc", *flags, "-w", "-c", one, "-o", target], "OCF does not build")
        with ThreadPool(os.cpu_count()) as pool:
            if not all(pool.starmap(compile_one, zip(sources, objects))):
                return None
        if not run(["ld", "-r", "-o", library, *objects], "OCF does not link"):
            return None
    if not run(["gcc", *flags, "-Wall", "-shared", "-o", plugin, *own, library, "-lz", "-pthread"],
               "the plugin of OCF does not build"):
        return None
    return plugin
