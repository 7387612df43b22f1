//! Prints what a pager costs a native program, as lines of JSON: its first touches, its faults, and
//! its speed below a limit, beside the kernel's swap in the same run. `bench/pager` calls it.
//!
//! The program is this one again, with a file in memory as QEMU has. Emulation would hide what a
//! fault costs.

#![allow(unsafe_code)]

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fathom_attach::{
    AttachOptions, EvictionOptions, Helpers, LimitHandle, Pager, PagerStatus, SystemCall, Vmm,
    attach, clean, guard, inject,
};
use parking_lot::Mutex;
use serde_json::{Value, json};

const PAGE: usize = 4096;
const MIB: usize = 1 << 20;
/// The program's memory in MiB: a half is its active one. Before it lies what only first touches
/// use.
const MEMORY_MIB: usize = 512;
const FRESH_MIB: usize = 64;
/// How often each speed is measured, and for how long.
const TRIES: usize = 3;
const WORK: Duration = Duration::from_secs(3);
/// A touch that takes longer than this has met a fault, in nanoseconds.
const FAULT_NS: u64 = 1500;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words[..] {
        ["program"] => program(),
        ["guard"] => guard().expect("a pager"),
        ["clean", leases] => clean(Path::new(leases), None),
        ["clean", leases, swap] => clean(Path::new(leases), Some(Path::new(swap))),
        ["inject", thread, number, first, second, third] => {
            let word = |text: &str| text.parse::<u64>().expect("a number");
            let arguments = [word(first), word(second), word(third)];
            let call = SystemCall { number: word(number), arguments };
            let report = inject(thread.parse().expect("a number"), call, &mut |_| {});
            println!("{}", serde_json::to_string(&report).expect("a report"));
        }
        _ => measure(),
    }
}

/// A program with memory that it shares. It carries out the lines of its standard input.
fn program() {
    let length = (MEMORY_MIB + 2 * FRESH_MIB) * MIB;
    let file = rustix::fs::memfd_create("program", rustix::fs::MemfdFlags::CLOEXEC).expect("memfd");
    rustix::fs::ftruncate(&file, length as u64).expect("a length");
    // SAFETY: a new mapping of a file of this process.
    let base = unsafe {
        use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap};
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        let base = mmap(std::ptr::null_mut(), length, rights, MapFlags::SHARED, &file, 0);
        let base = base.expect("a mapping");
        madvise(base, length, Advice::LinuxDontFork).expect("advice");
        base as usize
    };
    for line in std::io::stdin().lines() {
        let line = line.expect("a line");
        let words: Vec<&str> = line.split(' ').collect();
        // In another thread: this one waits in a system call that can be made again.
        let answer = match words[..] {
            ["fresh", which] => {
                let start = base + which.parse::<usize>().expect("0 or 1") * FRESH_MIB * MIB;
                std::thread::spawn(move || fresh(start))
            }
            ["fill"] => std::thread::spawn(move || fill(base + 2 * FRESH_MIB * MIB)),
            ["work"] => std::thread::spawn(move || work(base + 2 * FRESH_MIB * MIB)),
            ["touch"] => std::thread::spawn(move || touch(base + 2 * FRESH_MIB * MIB)),
            _ => break,
        };
        println!("{}", answer.join().expect("an answer"));
    }
}

fn place(base: usize, page: usize) -> *mut u64 {
    std::ptr::with_exposed_provenance_mut(base + page * PAGE)
}

/// The first touches of pages.
fn fresh(base: usize) -> Value {
    let pages = FRESH_MIB * MIB / PAGE;
    let begun = Instant::now();
    for page in 0..pages {
        // SAFETY: the page lies in the mapping.
        unsafe { place(base, page).write_volatile(1) };
    }
    json!(begun.elapsed().as_nanos() as f64 / pages as f64)
}

/// Fills all memory with content of which LZ4 makes about a third.
fn fill(base: usize) -> Value {
    let mut random = fastrand::Rng::with_seed(1);
    for page in 0..MEMORY_MIB * MIB / PAGE {
        for word in 0..PAGE / 8 {
            let value = if word % 4 == 0 { random.u64(..) } else { page as u64 };
            // SAFETY: the word lies in the mapping.
            unsafe { place(base, page).add(word).write_volatile(value) };
        }
    }
    json!(0)
}

/// Reads and writes pages of the active half, in random order: pages a second.
fn work(base: usize) -> Value {
    let mut random = fastrand::Rng::with_seed(2);
    let pages = MEMORY_MIB * MIB / PAGE / 2;
    let begun = Instant::now();
    let mut count = 0_u64;
    while begun.elapsed() < WORK {
        for _ in 0..256 {
            let page = random.usize(..pages);
            // Some work with each page: a quarter of it is read, and a word written.
            let start = place(base, page);
            let mut sum = 0_u64;
            for word in 0..128 {
                // SAFETY: the word lies in the mapping.
                sum = sum.rotate_left(1) ^ unsafe { start.add(word * 4).read_volatile() };
            }
            // SAFETY: as above.
            unsafe { start.write_volatile(sum) };
        }
        count += 256;
    }
    json!(count as f64 / begun.elapsed().as_secs_f64())
}

/// Reads a word of each page of all memory in random order: the times of those that met a fault.
fn touch(base: usize) -> Value {
    let mut pages: Vec<usize> = (0..MEMORY_MIB * MIB / PAGE).collect();
    fastrand::Rng::with_seed(3).shuffle(&mut pages);
    let mut times = Vec::new();
    let begun = Instant::now();
    for page in pages {
        let touched = Instant::now();
        // SAFETY: the page lies in the mapping.
        unsafe { place(base, page).read_volatile() };
        let time = touched.elapsed().as_nanos() as u64;
        if time >= FAULT_NS {
            times.push(time);
        }
    }
    let total = begun.elapsed().as_secs_f64();
    times.sort_unstable();
    let at = |share: f64| times.get((times.len() as f64 * share) as usize).copied().unwrap_or(0);
    json!({"faults": times.len(), "p50_us": at(0.5) as f64 / 1e3, "p99_us": at(0.99) as f64 / 1e3,
           "longest_us": times.last().copied().unwrap_or(0) as f64 / 1e3, "seconds": total})
}

/// The program in a process of its own.
struct Program {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Program {
    fn start() -> Self {
        let mut command = Command::new("/proc/self/exe");
        command.arg("program").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("a program");
        let input = child.stdin.take().expect("an input");
        let output = BufReader::new(child.stdout.take().expect("an output"));
        Self { child, input, output }
    }

    fn ask(&mut self, line: &str) -> Value {
        writeln!(self.input, "{line}").expect("a program");
        let mut answer = String::new();
        self.output.read_line(&mut answer).expect("an answer");
        serde_json::from_str(&answer).expect("an answer")
    }

    fn work(&mut self) -> f64 {
        let speeds = (0..TRIES).map(|_| self.ask("work").as_f64().expect("a speed"));
        median(speeds.collect())
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// A pager that serves in a thread.
struct Serving {
    status: Arc<Mutex<PagerStatus>>,
    limit: LimitHandle,
    stop: std::os::unix::net::UnixStream,
    thread: JoinHandle<PagerStatus>,
}

impl Serving {
    fn start(program: &Program, folder: &Path) -> Self {
        let options = AttachOptions {
            folder: folder.join("records"),
            qmp: None,
            helpers: Helpers {
                program: PathBuf::from("/proc/self/exe"),
                injector: vec!["inject".into()],
                guard: vec!["guard".into()],
                cleaner: vec!["clean".into()],
            },
            must_adopt: false,
        };
        let vmm = Vmm::open(program.child.id() as i32).expect("a program");
        let mut pager: Pager = attach(vmm, &options, &mut |_| {}).expect("a pager");
        pager
            .allow_eviction(EvictionOptions {
                leases: folder.join("leases"),
                store: folder.join("store"),
                swap: None,
                ask: Arc::new(|| {}),
            })
            .expect("nothing is away");
        let (status, limit) = (pager.status(), pager.limit());
        let (stop, asked) = std::os::unix::net::UnixStream::pair().expect("a socket");
        let thread = std::thread::spawn(move || {
            pager.serve(std::os::fd::AsFd::as_fd(&asked)).expect("faults");
            pager.detach()
        });
        Self { status, limit, stop, thread }
    }

    fn end(mut self) -> PagerStatus {
        self.stop.write_all(&[0]).expect("a pager");
        self.thread.join().expect("a pager")
    }

    /// Waits until the program is below the limit.
    fn await_limit(&self, bytes: u64) {
        let begun = Instant::now();
        while self.status.lock().eviction.resident_bytes > bytes {
            assert!(begun.elapsed() < Duration::from_secs(60), "it stays above its limit");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn report(what: &str, value: &Value) {
    println!("{}", json!({"what": what, "value": value}));
}

fn measure() {
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    let limit = (MEMORY_MIB / 2 * MIB) as u64;
    let mut program = Program::start();
    // What has been used before the pager comes stays; the fresh memory is away for good.
    report("fresh_plain_ns", &program.ask("fresh 0"));
    program.ask("fill");
    let plain = program.work();
    report("plain", &json!(plain));
    let pager = Serving::start(&program, folder.path());
    report("pause_us", &json!(pager.status.lock().pause_ns as f64 / 1e3));
    report("fresh_registered_ns", &program.ask("fresh 1"));
    report("registered", &json!(program.work()));
    pager.end();
    report("plain_again", &json!(program.work()));
    let mut program = Program::start();
    program.ask("fill");
    let pager = Serving::start(&program, folder.path());
    pager.limit.set(Some(limit)).expect("a limit");
    pager.await_limit(limit);
    let counts = pager.status.lock().eviction.clone();
    report(
        "saved",
        &json!({"away": counts.away_bytes, "store": counts.store_bytes,
                "resident": counts.resident_bytes}),
    );
    // The first time, pages that were chosen blindly come back.
    report("limited_first", &program.ask("work"));
    report("limited", &json!(program.work()));
    report("touch", &program.ask("touch"));
    let stop = Arc::new(AtomicBool::new(false));
    let loads: Vec<_> = (0..2)
        .map(|_| {
            let stop = Arc::clone(&stop);
            std::thread::spawn(move || while !stop.load(Ordering::Relaxed) {})
        })
        .collect();
    report("touch_busy", &program.ask("touch"));
    stop.store(true, Ordering::Relaxed);
    for load in loads {
        load.join().expect("a load");
    }
    let last = pager.end();
    assert_eq!(last.state, "detached");
    // The kernel's swap gets what the pager has taken altogether.
    let taken = counts.resident_bytes + counts.store_bytes;
    report("own_bytes", &json!(taken));
    drop(program);
    match swapped(taken, folder.path()) {
        Ok(()) => {}
        Err(error) => eprintln!("the kernel's swap was not measured: {error}"),
    }
}

/// The same below the limit of a memory group, with the kernel's swap in memory.
fn swapped(limit: u64, folder: &Path) -> std::io::Result<()> {
    let group = Path::new("/sys/fs/cgroup/memory/fathom-bench-pager");
    let image = folder.join("swap");
    let file = File::create(&image)?;
    fs::set_permissions(&image, fs::Permissions::from_mode(0o600))?;
    file.set_len((2 * MEMORY_MIB * MIB) as u64)?;
    let run = |program: &str, words: &[&str]| -> std::io::Result<String> {
        let output = Command::new(program).args(words).output()?;
        if !output.status.success() {
            return Err(std::io::Error::other(format!("{program}: {output:?}")));
        }
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let device = run("losetup", &["-f", "--show", &image.display().to_string()])?;
    run("mkswap", &[&device])?;
    run("swapon", &["-p", "10", &device])?;
    let measured = (|| {
        fs::create_dir_all(group)?;
        let mut program = Program::start();
        fs::write(group.join("cgroup.procs"), program.child.id().to_string())?;
        fs::write(group.join("memory.limit_in_bytes"), limit.to_string())?;
        program.ask("fill");
        report("swap_first", &program.ask("work"));
        report("swap", &json!(program.work()));
        report("swap_touch", &program.ask("touch"));
        Ok(())
    })();
    run("swapoff", &[&device])?;
    run("losetup", &["-d", &device])?;
    // The group is empty once the program has been collected.
    std::thread::sleep(Duration::from_millis(100));
    let _ = fs::remove_dir(group);
    measured
}
