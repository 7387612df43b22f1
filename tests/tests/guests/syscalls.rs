//! System calls of real programs, noted by the plugin for QEMU, against what the guest's own kernel
//! traces.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use fathom_control::{CopiedFile, PatternsReport};
use fathom_tests::{Error, Result, accelerator, patience, until};

use crate::introspection::newest;
use crate::scene::{Scene, kernel, processors};
use crate::writers::plugin;

/// Programs with threads, processes, signals, and each way to read and write. Programs have names
/// of their own, so that the guest's shell is not traced.
const WORK: &str = "
    cd /mnt
    /run/probe if=/dev/zero of=/mnt/a bs=64k count=16 2> /dev/null
    /run/probe if=/mnt/a of=/mnt/b bs=4k count=8 skip=3 seek=5 2> /dev/null
    /run/probe if=/mnt/a of=/mnt/b bs=4k count=2 oflag=append conv=notrunc,fsync 2> /dev/null
    /run/probe if=/mnt/none of=/mnt/b 2> /dev/null || true
    /run/probesh -c '/run/probe if=/mnt/a of=/dev/null bs=128k 2> /dev/null; (exit 3); echo x > /mnt/x; rm /mnt/x' || true
    /run/probecp /mnt/a /mnt/copied
    /run/probesh -c 'trap \"\" USR1; trap : USR2; kill -USR1 $$; kill -USR2 $$; /run/probesleep 0.3' || true
    /run/probesleep 1 & sleep 0.2; kill -STOP $!; sleep 0.1; kill -CONT $!; wait
    fio --name=j --filename=/mnt/f --thread --numjobs=3 --ioengine=psync --rw=randrw --bs=4k --size=256k > /dev/null
    sync";

/// A call: the thread, the number and the result.
type Truth = BTreeMap<(u64, u64, i64), u64>;

/// What differs by itself: programs that begin or end, and the end of a signal's handler.
const APART: [u64; 6] = [15, 59, 60, 219, 231, 322];
/// The call with which the kernel continues one that a signal has interrupted.
const RESTART: u64 = 219;

/// The calls of a trace, each with the times that it took, in seconds.
fn traced(trace: &str) -> (Truth, BTreeMap<(u64, u64), f64>) {
    let (mut calls, mut times) = (Truth::new(), BTreeMap::new());
    let mut begun: BTreeMap<u64, (u64, f64)> = BTreeMap::new();
    let mut restarts: BTreeMap<u64, (u64, f64)> = BTreeMap::new();
    for line in trace.lines() {
        let parse = || -> Option<(u64, f64, bool, u64, i64)> {
            let (head, rest) = line.split_once(": sys_")?;
            let mut words = head.split_whitespace().rev();
            let time: f64 = words.next()?.parse().ok()?;
            let (task, _) = head.split_once(" [")?;
            let thread = task.rsplit('-').next()?.trim().parse().ok()?;
            let rest = rest.split_once("NR ")?.1;
            if line.contains(": sys_enter: ") {
                let number = rest.split_once(' ')?.0.parse().ok()?;
                Some((thread, time, true, number, 0))
            } else {
                let (number, result) = rest.split_once(" = ")?;
                Some((thread, time, false, number.parse().ok()?, result.trim().parse().ok()?))
            }
        };
        match parse() {
            Some((thread, time, true, number, _)) => {
                let (number, time) = match restarts.remove(&thread) {
                    // The kernel makes the call again: to a program it is one.
                    Some((before, from)) if number == before || number == RESTART => (before, from),
                    Some((before, _)) => {
                        *calls.entry((thread, before, -512)).or_default() += 1;
                        (number, time)
                    }
                    None => (number, time),
                };
                begun.insert(thread, (number, time));
            }
            Some((thread, time, false, number, result)) => {
                let Some((entered, from)) = begun.remove(&thread) else { continue };
                if (-516..=-512).contains(&result) {
                    restarts.insert(thread, (entered, from));
                    continue;
                }
                let number = if number == RESTART { entered } else { number };
                if entered == number && !APART.contains(&number) {
                    *calls.entry((thread, number, result)).or_default() += 1;
                    *times.entry((thread, number)).or_default() += time - from;
                }
            }
            None => {}
        }
    }
    (calls, times)
}

/// A row of the stream.
#[derive(Debug)]
pub(crate) struct Row {
    pub process: String,
    pub thread: u64,
    pub number: u64,
    pub call: String,
    pub result: i64,
    pub seconds: f64,
    pub path: String,
    pub source: String,
    pub offset: Option<u64>,
    pub length: Option<u64>,
}

pub(crate) fn rows(csv: &str) -> Vec<Row> {
    let row = |line: &str| -> Option<Row> {
        let fields: Vec<&str> = line.split(',').collect();
        let [process, thread, number, call, result, errno, duration, path, source, offset, length] =
            fields[..]
        else {
            return None;
        };
        let text = |field: &str| field.trim_matches('"').to_owned();
        Some(Row {
            process: text(process),
            thread: thread.parse().ok()?,
            number: number.parse().ok()?,
            call: text(call),
            result: match errno.parse::<i64>() {
                Ok(errno) => -errno,
                Err(_) => result.parse().ok()?,
            },
            seconds: duration.parse::<f64>().ok()? / 1e9,
            path: text(path),
            source: text(source),
            offset: offset.parse().ok(),
            length: length.parse().ok(),
        })
    };
    csv.lines().filter_map(row).collect()
}

const QUERY: &str = "select Process, ThreadId, Number, Call, Result, Errno, Duration, Path, SourcePath, \
    Offset, Length from Syscalls";

impl Scene {
    /// Runs the programs while the guest traces them, and compares.
    fn calls(&mut self, place: &str) -> Result<()> {
        let seconds = patience(20);
        let (csv, trace) = std::thread::scope(|scope| -> Result<(String, String)> {
            let time = format!("{}s", seconds.as_secs() + 5);
            let daemon = &self.daemon;
            let query =
                scope.spawn(move || daemon.command(&["query", QUERY, "--for", &time, "--csv"]));
            std::thread::sleep(std::time::Duration::from_secs(2));
            let trace = self.guest.check(&format!(
                "cd /sys/kernel/tracing
                echo > trace; echo 1 > tracing_on; for e in enter exit; do echo 1 > events/raw_syscalls/sys_$e/enable; done
                ({WORK}) > /dev/null 2>&1
                cd /sys/kernel/tracing
                for e in enter exit; do echo 0 > events/raw_syscalls/sys_$e/enable; done
                cat trace | grep ': sys_'"
            ))?;
            let csv = query.join().map_err(|_| Error::new("the query panicked"))??;
            Ok((String::from_utf8_lossy(&csv.stdout).into_owned(), trace))
        })?;
        let (expected, times) = traced(&trace);
        let rows = rows(&csv);
        let mut found = Truth::new();
        let mut found_times: BTreeMap<(u64, u64), f64> = BTreeMap::new();
        for row in rows.iter().filter(|row| !APART.contains(&row.number)) {
            *found.entry((row.thread, row.number, row.result)).or_default() += 1;
            *found_times.entry((row.thread, row.number)).or_default() += row.seconds;
        }
        let mut wrong = String::new();
        let total: u64 = expected.values().sum();
        let mut missing = 0;
        for (key, count) in &expected {
            let have = found.get(key).copied().unwrap_or(0);
            if have != *count {
                missing += count.abs_diff(have);
                let _ = writeln!(wrong, "{key:?}: {have} instead of {count}");
            }
        }
        let more: u64 = found
            .iter()
            .filter(|(key, _)| !expected.contains_key(key))
            .inspect(|(key, count)| {
                let _ = writeln!(wrong, "{key:?}: {count} that the kernel has not traced");
            })
            .map(|(_, count)| count)
            .sum();
        // Durations: the kernel's own are from inside of ours.
        let slow = times.iter().filter(|(key, seconds)| {
            let ours = found_times.get(*key).copied().unwrap_or(0.0);
            **seconds > 0.1 && !(**seconds * 0.98..**seconds * 1.3 + 0.02).contains(&ours)
        });
        for (key, seconds) in slow {
            let _ = writeln!(wrong, "{key:?} took {seconds:.3} s, not {:?}", found_times.get(key));
        }
        println!("{place}: {total} calls traced, {missing} different, {more} too many");
        wrong += &of_files(&rows);
        if total < 500 || !wrong.is_empty() {
            let head: Vec<&str> = wrong.lines().take(40).collect();
            return Err(Error::new(format!("{place}: {total} calls\n{}", head.join("\n"))));
        }
        Ok(())
    }
}

impl Scene {
    /// Waits until the calls of a program are noted again.
    pub(crate) fn await_calls(&self, program: &str) -> Result<()> {
        until("the calls of a program", patience(60), || {
            let csv = std::thread::scope(|scope| {
                let query =
                    scope.spawn(|| self.daemon.command(&["query", QUERY, "--for", "3s", "--csv"]));
                std::thread::sleep(std::time::Duration::from_secs(1));
                self.prepare(program)?;
                query.join().map_err(|_| Error::new("the query panicked"))?
            })?;
            let rows = rows(&String::from_utf8_lossy(&csv.stdout));
            let is_noted = rows.iter().any(|row| row.call == "clock_nanosleep");
            Ok(is_noted.then_some(()))
        })
    }

    /// Direct writes in both streams: each call takes longer than until the disk has its request.
    fn waits(&self) -> Result<()> {
        let page = include_str!("../../../docs/syscalls.md");
        let queries = page.split("```sql").skip(1).filter_map(|part| part.split("```").next());
        let query = queries.into_iter().find(|query| query.contains("Waited"));
        let query = query.ok_or_else(|| Error::new("the page has no such query"))?;
        let csv = std::thread::scope(|scope| {
            let query =
                scope.spawn(|| self.daemon.command(&["query", query, "--for", "8s", "--csv"]));
            std::thread::sleep(std::time::Duration::from_secs(2));
            self.prepare("/run/probe if=/dev/zero of=/mnt/direct bs=64k count=20 oflag=direct")?;
            query.join().map_err(|_| Error::new("the query panicked"))?
        })?;
        let csv = String::from_utf8_lossy(&csv.stdout).into_owned();
        let mut count = 0;
        for line in csv.lines().filter(|line| line.contains("probe") && line.contains("/direct")) {
            // Rows also leave the windows.
            let [_, _, "+", .., waited, took] = line.split(',').collect::<Vec<_>>()[..] else {
                continue;
            };
            let times = (waited.parse::<u64>(), took.parse::<u64>());
            let (Ok(waited), Ok(took)) = times else { return Err(Error::new(line)) };
            if waited >= took {
                return Err(Error::new(format!("{line}: the disk was later than the end")));
            }
            count += 1;
        }
        if count < 20 { Err(Error::new(format!("{count} of 20 writes:\n{csv}"))) } else { Ok(()) }
    }

    /// A copy that moves no data.
    fn clones(&self) -> Result<()> {
        self.prepare(
            "umount /mnt; mkfs.xfs -q -f /dev/vdb; mount /dev/vdb /mnt
            head -c 3000000 /dev/zero > /mnt/a; sync",
        )?;
        let csv = std::thread::scope(|scope| {
            let query =
                scope.spawn(|| self.daemon.command(&["query", QUERY, "--for", "8s", "--csv"]));
            std::thread::sleep(std::time::Duration::from_secs(2));
            self.prepare("/run/probecp --reflink=always /mnt/a /mnt/cloned")?;
            query.join().map_err(|_| Error::new("the query panicked"))?
        })?;
        let rows = rows(&String::from_utf8_lossy(&csv.stdout));
        let cloned: Vec<&Row> = rows.iter().filter(|row| row.source == "/a").collect();
        match &cloned[..] {
            [row] if (&*row.call, &*row.path, row.result) == ("ioctl", "/cloned", 0) => Ok(()),
            _ => Err(Error::new(format!("{cloned:?}"))),
        }
    }
}

/// Places, lengths and files of the calls of which they are known.
fn of_files(rows: &[Row]) -> String {
    let mut wrong = String::new();
    let mut expect = |what: &str, is_right: bool| {
        if !is_right {
            let _ = writeln!(wrong, "{what}");
        }
    };
    let of = |call: &str, path: &str| -> Vec<&Row> {
        let (call, path) = (call.to_owned(), path.to_owned());
        rows.iter()
            .filter(|row| row.process == "probe" && row.call == call && row.path == path)
            .collect()
    };
    let offsets =
        |rows: &[&Row]| -> Vec<u64> { rows.iter().filter_map(|row| row.offset).collect() };
    let wrote = of("write", "/a");
    let expected: Vec<u64> = (0..16).map(|number| number << 16).collect();
    expect(&format!("writes of /a: {:?}", offsets(&wrote)), offsets(&wrote) == expected);
    expect("their lengths", wrote.iter().all(|row| row.length == Some(1 << 16)));
    let wrote = offsets(&of("write", "/b"));
    // Eight blocks from the fifth on, and two at the end.
    let expected: Vec<u64> = (5..15).map(|number| number << 12).collect();
    expect(&format!("writes of /b: {wrote:?}"), wrote == expected);
    let read = offsets(&of("read", "/a"));
    expect(&format!("reads of /a: {read:?}"), read.starts_with(&[12_288, 16_384]));
    expect("fsync of /b", of("fsync", "/b").len() == 1);
    let is_copy = |row: &&Row| row.process == "probecp" && row.call == "copy_file_range";
    let copied: Vec<&Row> = rows.iter().filter(is_copy).collect();
    let bytes: i64 = copied.iter().map(|row| row.result.max(0)).sum();
    let is_named = copied.iter().all(|row| (&*row.path, &*row.source) == ("/copied", "/a"));
    expect(&format!("copies: {copied:?}"), bytes == 1 << 20 && is_named);
    let failed =
        rows.iter().any(|row| row.call == "openat" && row.process == "probe" && row.result == -2);
    expect("a file that does not exist", failed);
    wrong
}

fn calls_of(kernel: &str) -> Result<()> {
    if accelerator()?.starts_with("kvm") {
        println!("Skipped: the plugin needs an emulated guest");
        return Ok(());
    }
    let table = "calls = ['probe*', 'fio*']\n";
    let (plugin, processors) = (plugin()?, processors(kernel));
    let started =
        Scene::start_intercepted_above(kernel, 512, &plugin, "", processors, table, Vec::new())?;
    let Some(mut scene) = started else {
        println!("Skipped: there is no kernel {kernel}");
        return Ok(());
    };
    scene.prepare(
        "mount -t tracefs none /sys/kernel/tracing 2> /dev/null || true
        echo 16384 > /sys/kernel/tracing/buffer_size_kb
        # The clock of each processor differs, and threads move.
        echo mono > /sys/kernel/tracing/trace_clock
        for e in enter exit; do
            echo 'comm ~ \"probe*\" || comm ~ \"fio*\"' > /sys/kernel/tracing/events/raw_syscalls/sys_$e/filter
        done
        cp $(command -v dd) /run/probe; cp $(command -v sh) /run/probesh
        cp $(command -v cp) /run/probecp; cp $(command -v sleep) /run/probesleep
        mkfs.ext4 -q -F -b 4096 /dev/vdb; mount /dev/vdb /mnt",
    )?;
    until("the calls to be noted", patience(60), || {
        let noted =
            scene.daemon.log().contains("the system calls of processes of a guest are noted");
        Ok(noted.then_some(()))
    })?;
    // The plugin finds the end of calls with the first one.
    scene.prepare("for i in 1 2 3; do /run/probesleep 0.3; done")?;
    let found = scene.calls("ext4");
    scene.note("calls", found);
    let found = scene.waits();
    scene.note("waits", found);
    // A daemon that has ended leaves the guest running, and the next one goes on.
    scene.daemon.restart()?;
    scene.daemon.wait_for_guest("disk")?;
    scene.prepare("echo x > /mnt/x; sync")?;
    let found = scene.await_calls("/run/probesleep 0.1");
    scene.note("after a restart of the daemon", found);
    if scene.has("clones", "xfs", "mkfs.xfs")? {
        let found = scene.clones();
        scene.note("clones", found);
    }
    // Another boot has other places.
    scene.guest.reboot()?;
    scene.prepare(
        "mount /dev/vdb /mnt; cp $(command -v sleep) /run/probesleep; echo x > /mnt/x; sync",
    )?;
    let found = scene.await_calls("/run/probesleep 0.1");
    scene.note("after a reboot", found);
    scene.end()
}

/// Files that are copied by calls, with and without their data, are reported once by the layer
/// `patterns`.
#[test]
fn copies_by_calls_are_patterns() -> Result<()> {
    const SIZE: u64 = 3_000_000;
    if accelerator()?.starts_with("kvm") {
        println!("Skipped: the plugin needs an emulated guest");
        return Ok(());
    }
    let (layers, table) = (", { kind = 'patterns' }", "calls = ['probecp']\n");
    let started =
        Scene::start_intercepted_above(&kernel(), 512, &plugin()?, layers, 1, table, Vec::new())?;
    let Some(mut scene) = started else { return Ok(()) };
    let places = [
        ("ext4", "mkfs.ext4 -q -F -b 4096 /dev/vdb", "--reflink=never"),
        ("xfs", "mkfs.xfs -q -f /dev/vdb", "--reflink=always"),
    ];
    for (name, make, way) in places {
        if !scene.has(name, name, "")? {
            continue;
        }
        scene.prepare(&format!(
            "cp $(command -v cp) /run/probecp; {make}; mount /dev/vdb /mnt
            head -c {SIZE} /dev/urandom > /mnt/source-{name}; sync; sleep 2"
        ))?;
        // The plugin finds the end of calls with the first one.
        scene.prepare("for i in 1 2 3; do sleep 0.3; done; /run/probecp /bin/true /run/true")?;
        scene.prepare(&format!(
            "/run/probecp {way} /mnt/source-{name} /mnt/first-{name}; sync
            /run/probecp /mnt/source-{name} /mnt/second-{name}; sync; sleep 3"
        ))?;
        let found = until("the copies", patience(30), || {
            let output = scene.daemon.command(&["patterns", "disk", "--json"])?;
            let report: PatternsReport = serde_json::from_slice(&output.stdout)?;
            let copies = report.disks.into_iter().flat_map(|disk| disk.copies);
            let own: Vec<CopiedFile> =
                copies.filter(|copy| copy.target.path.ends_with(name)).collect();
            Ok((own.len() >= 2).then_some(own))
        })?;
        let mut wrong = String::new();
        for copy in &found {
            let CopiedFile { target, source, bytes, evidence, by, .. } = copy;
            println!(
                "{name}: {bytes} of {} from {} by {by:?}, {evidence:?}",
                target.path, source.path
            );
            // Without clones, this program reads and writes.
            let is_by_call = target.path != "/first-ext4";
            let is_right = source.path == format!("/source-{name}")
                && bytes.abs_diff(SIZE) < 4096
                && evidence == if is_by_call { "call" } else { "" }
                && (!is_by_call || by.command == "probecp" && by.process_id != 0);
            if !is_right {
                let _ = writeln!(wrong, "{copy:?}");
            }
        }
        if found.len() != 2 || !wrong.is_empty() {
            scene.note(name, Err(Error::new(format!("{} copies: {wrong}", found.len()))));
        }
        scene.prepare("umount /mnt")?;
    }
    scene.end()
}

/// Programs that end at once in a control group that is meant and in one that is not, one that is
/// moved, and one that is meant by its path.
const PLACES: &str = "
    for i in $(seq 20); do
        sh -c 'echo 0 > /sys/fs/cgroup/probed/inner/cgroup.procs; exec dd if=/dev/zero of=/mnt/in bs=4k count=2 2> /dev/null'
        sh -c 'echo 0 > /sys/fs/cgroup/other/cgroup.procs; exec dd if=/dev/zero of=/mnt/out bs=4k count=2 2> /dev/null'
        md5sum /mnt/in; /run/md5sum /mnt/out
    done
    sh -c 'for i in $(seq 30); do : > /mnt/before; sleep 0.05; done
        echo 0 > /sys/fs/cgroup/probed/inner/cgroup.procs
        for i in $(seq 40); do : > /mnt/after; sleep 0.1; done
        echo 0 > /sys/fs/cgroup/other/cgroup.procs
        for i in $(seq 40); do : > /mnt/again; sleep 0.05; done'
    sync";

impl Scene {
    /// Calls of processes that are chosen by their places.
    fn chosen(&mut self) -> Result<()> {
        let seconds = format!("{}s", patience(25).as_secs());
        let csv = std::thread::scope(|scope| -> Result<_> {
            let daemon = &self.daemon;
            let query =
                scope.spawn(move || daemon.command(&["query", QUERY, "--for", &seconds, "--csv"]));
            std::thread::sleep(std::time::Duration::from_secs(2));
            self.prepare(PLACES)?;
            query.join().map_err(|_| Error::new("the query panicked"))?
        })?;
        let rows = rows(&String::from_utf8_lossy(&csv.stdout));
        let of = |process: &str, call: &str, path: &str| {
            let is_one =
                |row: &&Row| (&*row.process, &*row.call, &*row.path) == (process, call, path);
            rows.iter().filter(is_one).count()
        };
        let mut wrong = String::new();
        for (process, call, path, count) in [
            ("dd", "write", "/in", 40),
            ("dd", "write", "/out", 0),
            ("md5sum", "read", "/in", 1),
            ("md5sum", "read", "/out", 0),
            ("sh", "openat", "/before", 0),
            ("sh", "openat", "/after", 1),
        ] {
            let found = of(process, call, path);
            let is_right = if count == 0 || count == 40 { found == count } else { found >= count };
            println!("{process} {call} {path}: {found}");
            if !is_right {
                let _ = writeln!(wrong, "{process} {call} {path}: {found}, not {count}");
            }
        }
        // The path of the program, as that of other files, is that in its file system.
        let others: Vec<&Row> =
            rows.iter().filter(|row| row.path == "/again" && row.call == "openat").collect();
        if others.len() > 1 {
            let _ = writeln!(wrong, "{} calls in the last group", others.len());
        }
        if wrong.is_empty() { Ok(()) } else { Err(Error::new(wrong)) }
    }
}

#[test]
fn processes_are_chosen_by_group_and_program() -> Result<()> {
    if accelerator()?.starts_with("kvm") {
        println!("Skipped: the plugin needs an emulated guest");
        return Ok(());
    }
    let table = "calls = ['none', 'cgroup:/probed/*', 'path:/usr/bin/md5*']\n";
    let started =
        Scene::start_intercepted_above(&kernel(), 512, &plugin()?, "", 1, table, Vec::new())?;
    let Some(mut scene) = started else { return Ok(()) };
    scene.prepare(
        "mountpoint -q /sys/fs/cgroup || mount -t cgroup2 none /sys/fs/cgroup
        mkdir -p /sys/fs/cgroup/probed/inner /sys/fs/cgroup/other; cp $(command -v md5sum) /run/md5sum
        mkfs.ext4 -q -F -b 4096 /dev/vdb; mount /dev/vdb /mnt",
    )?;
    until("the calls to be noted", patience(60), || {
        let noted =
            scene.daemon.log().contains("the system calls of processes of a guest are noted");
        Ok(noted.then_some(()))
    })?;
    // The plugin finds the end of calls with the first one.
    scene.prepare("for i in 1 2 3; do sleep 0.3; done")?;
    let found = scene.chosen();
    scene.note("chosen", found);
    scene.end()
}

#[test]
fn calls_are_those_that_the_kernel_traces() -> Result<()> {
    calls_of(&kernel())
}

#[test]
fn calls_are_those_that_the_newest_kernel_traces() -> Result<()> {
    calls_of(&newest())
}
