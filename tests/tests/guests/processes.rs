//! The process of each request of direct I/O, by each way in which programs submit it, and of
//! reads, writes and flushes for which a process waits; the list of all processes.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::{Duration, Instant};

use fathom_tests::{Classified, Error, Kind, Part, Result, patience};

use crate::scene::{Scene, kernel};

/// A place for files, the modules that it needs, and the commands that make and remove it.
struct Place {
    name: &'static str,
    modules: &'static str,
    make: &'static str,
    remove: &'static str,
}

const PLACES: [Place; 6] = [
    Place {
        name: "ext4",
        modules: "ext4",
        make: "mkfs.ext4 -q -F /dev/vdb; mount /dev/vdb /mnt",
        remove: "umount /mnt",
    },
    Place {
        name: "xfs",
        modules: "xfs",
        make: "mkfs.xfs -q -f /dev/vdb; mount /dev/vdb /mnt",
        remove: "umount /mnt",
    },
    // With checksums, newer kernels write through the page cache.
    Place {
        name: "btrfs",
        modules: "btrfs",
        make: "mkfs.btrfs -q -f /dev/vdb; mount -o nodatasum /dev/vdb /mnt",
        remove: "umount /mnt",
    },
    Place {
        name: "f2fs",
        modules: "f2fs",
        make: "mkfs.f2fs -q -f /dev/vdb; mount /dev/vdb /mnt",
        remove: "umount /mnt",
    },
    Place {
        name: "overlay on ext4",
        modules: "overlay",
        make: "mkfs.ext4 -q -F /dev/vdb; mount /dev/vdb /srv; mkdir /srv/lower /srv/upper /srv/work
            mount -t overlay -o lowerdir=/srv/lower,upperdir=/srv/upper,workdir=/srv/work all /mnt",
        remove: "umount /mnt; umount /srv",
    },
    Place {
        name: "ext4 on LUKS on a logical volume",
        modules: "dm_crypt",
        make: "pvcreate -ff -y /dev/vdb; vgcreate group /dev/vdb; lvcreate -Zn -Wn -l 100%FREE -n volume group
            echo secret > /run/key; volume=/dev/mapper/group-volume
            cryptsetup -q luksFormat --pbkdf pbkdf2 --pbkdf-force-iterations 1000 $volume /run/key
            cryptsetup open --key-file /run/key $volume secret
            mkfs.ext4 -q -E lazy_itable_init=0 /dev/mapper/secret; mount /dev/mapper/secret /mnt",
        remove: "umount /mnt; cryptsetup close secret; vgremove -f group; pvremove /dev/vdb",
    },
];

/// The jobs of fio: the names of their files, and their ways to submit I/O. With `--thread`, a
/// thread submits it, and the process is fio's first one.
const JOBS: [(&str, &str); 7] = [
    ("psync", "--ioengine=psync"),
    ("libaio", "--ioengine=libaio"),
    ("uring", "--ioengine=io_uring"),
    ("fixed", "--ioengine=io_uring --fixedbufs --registerfiles"),
    ("poll", "--ioengine=io_uring --sqthread_poll=1"),
    ("libaio-thread", "--ioengine=libaio --thread"),
    ("uring-thread", "--ioengine=io_uring --thread"),
];

/// The names of all jobs, as a shell's list.
fn names() -> String {
    JOBS.map(|(name, _)| name).join(" ")
}

/// Whether the process of a part is the expected one (0), unknown (1) or another one (2).
fn outcome(part: &Part, expected: Option<u32>) -> usize {
    match part.process_id {
        None => 1,
        number if number == expected => 0,
        Some(_) => 2,
    }
}

/// A command that runs all jobs, and prints the name and the process of each. `file` is an option
/// of a job by its number and name.
fn jobs(file: impl Fn(usize, &str) -> String) -> String {
    let mut script = String::new();
    for (number, (name, options)) in JOBS.iter().enumerate() {
        // A shell's number is that of the program in its place.
        let _ = writeln!(
            script,
            "sh -c 'echo \"{name} main $$\"; exec fio --name={name} {} --direct=1 --bs=4k --iodepth=8 \
             --rw=randrw --norandommap --size=1m --io_size=400k {options} > /run/fio-{name}' &",
            file(number, name)
        );
    }
    let _ = write!(
        script,
        "wait; for job in {}; do
            sed -n \"s/^$job: .* pid=\\([0-9]*\\):.*/$job job \\1/p\" /run/fio-$job
        done",
        names()
    );
    script
}

/// The process of each job, from the output of [`jobs`].
fn processes_of_jobs(output: &str) -> Result<BTreeMap<String, u32>> {
    let mut found = BTreeMap::new();
    for line in output.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [name, of, number] = words[..] else { continue };
        // A job's own number is that of a process, or of a thread.
        if (of == "main") == name.ends_with("thread") {
            let number = number.parse().map_err(|_| Error::new(format!("no number: {line:?}")))?;
            found.insert(name.to_owned(), number);
        }
    }
    if found.len() == JOBS.len() {
        return Ok(found);
    }
    Err(Error::new(format!("fio has not run all jobs: {output}")))
}

impl Scene {
    /// Notes each part of direct I/O that has another process than the job to which it belongs.
    /// `job` returns the name of the job of a part; `None` if it is of none.
    fn check_processes(
        &mut self,
        place: &str,
        requests: &[Classified],
        processes: &BTreeMap<String, u32>,
        job: impl Fn(&Classified, &Part) -> Option<String>,
    ) {
        // The right ones, those without a process, and the wrong ones of each job.
        let mut counts: BTreeMap<String, [u32; 3]> = BTreeMap::new();
        let mut examples = Vec::new();
        for request in requests {
            for part in &request.parts {
                if !matches!(part.kind, Kind::Direct | Kind::Device) {
                    continue;
                }
                let Some(job) = job(request, part) else { continue };
                let expected = processes.get(&job).copied();
                let outcome = match outcome(part, expected) {
                    0 if part.process.as_deref() != Some("fio") => 2,
                    outcome => outcome,
                };
                if outcome > 0 && examples.len() < 4 {
                    examples.push(format!("{job} ({expected:?}): {part:?}"));
                }
                counts.entry(job).or_default()[outcome] += 1;
            }
        }
        println!("{place}: requests with the right process, with none, with a wrong one");
        for (job, [right, none, wrong]) in &counts {
            println!("  {job:14} {right:5} {none:5} {wrong:5}");
        }
        let all = JOBS.iter().all(|(job, _)| {
            counts.get(*job).is_some_and(|[right, none, wrong]| *right >= 50 && none + wrong == 0)
        });
        let problem = format!("{counts:?}, for example {examples:#?}");
        self.note(place, if all { Ok(()) } else { Err(Error::new(problem)) });
    }

    /// All ways to submit direct I/O to files in /mnt.
    fn direct(&mut self, place: &str) -> Result<()> {
        // The files have their blocks, and modules that were loaded with the first requests are
        // known.
        self.prepare(&format!(
            "for file in {}; do dd if=/dev/urandom of=/mnt/$file bs=64k count=16; done; sync
            fio --name=first --filename=/mnt/first --size=64k --rw=write --direct=1 --ioengine=libaio; sleep 2",
            names()
        ))?;
        let script = format!(
            "{{ {}; }} > /run/jobs 2>&1",
            jobs(|_, name| format!("--filename=/mnt/{name}"))
        );
        let requests = self.requests(&script)?;
        let processes = processes_of_jobs(&self.guest.check("cat /run/jobs")?)?;
        self.check_processes(place, &requests, &processes, |_, part| {
            let path = part.path.as_deref().filter(|_| part.kind == Kind::Direct)?;
            path.rsplit('/').next().map(str::to_owned)
        });
        Ok(())
    }

    /// All ways to submit direct I/O to the disk itself.
    fn direct_to_disk(&mut self) -> Result<()> {
        const STEP: u64 = 16 << 20;
        let script = format!(
            "{{ {}; }} > /run/jobs 2>&1",
            jobs(|number, _| format!("--filename=/dev/vdb --offset={}", number as u64 * STEP))
        );
        let requests = self.requests(&script)?;
        let processes = processes_of_jobs(&self.guest.check("cat /run/jobs")?)?;
        self.check_processes("the disk", &requests, &processes, |request, _| {
            JOBS.get((request.offset / STEP) as usize).map(|(name, _)| (*name).to_owned())
        });
        Ok(())
    }
}

/// Programs that read files through the page cache, each with the number of its process before its
/// own output. `read-N` is the file of the N-th program.
const READERS: [(&str, &str); 5] = [
    ("cat", "exec cat /mnt/read-0 > /dev/null"),
    ("dd", "exec dd if=/mnt/read-1 of=/dev/null bs=4k"),
    (
        "pread",
        "exec fio --name=job --filename=/mnt/read-2 --thread --ioengine=psync --rw=randread --bs=4k \
         --size=1m --invalidate=1 --fadvise_hint=random",
    ),
    (
        "mmap",
        "exec fio --name=job --filename=/mnt/read-3 --thread --ioengine=mmap --rw=randread --bs=4k \
         --size=1m --invalidate=1",
    ),
    (
        "io_uring",
        "exec fio --name=job --filename=/mnt/read-4 --thread --ioengine=io_uring --iodepth=4 --rw=randread \
         --bs=4k --size=1m --invalidate=1 --fadvise_hint=random",
    ),
];

impl Scene {
    /// The readers of files in /mnt: a request for which nobody waits has no process, and no other
    /// process than the reader is ever reported.
    fn readers(&mut self, place: &str) -> Result<()> {
        let mut script = "rm -f /run/readers; echo 3 > /proc/sys/vm/drop_caches\n".to_owned();
        for (number, (_, command)) in READERS.iter().enumerate() {
            self.prepare(&format!(
                "dd if=/dev/urandom of=/mnt/read-{number} bs=64k count=16; sync"
            ))?;
            let _ = writeln!(
                script,
                "sh -c 'echo \"read-{number} $$\" >> /run/readers; {command}' > /dev/null 2>&1"
            );
        }
        let requests = self.requests(&script)?;
        let output = self.guest.check("cat /run/readers")?;
        let lines = output.lines().filter_map(|line| line.split_once(' '));
        let numbers: BTreeMap<String, u32> = lines
            .filter_map(|(name, number)| Some((name.to_owned(), number.parse().ok()?)))
            .collect();
        // The right ones, those without a process, and the wrong ones of each file.
        let mut counts: BTreeMap<String, [u32; 3]> = BTreeMap::new();
        let reads = requests.iter().filter(|request| request.operation == "read");
        for part in reads.flat_map(|request| &request.parts) {
            let name = part.path.as_deref().and_then(|path| path.rsplit('/').next());
            let Some(name) = name.filter(|name| numbers.contains_key(*name)) else { continue };
            let outcome = outcome(part, numbers.get(name).copied());
            counts.entry(name.to_owned()).or_default()[outcome] += 1;
        }
        println!("{place}: reads with their reader, with none, with another one");
        for (number, (what, _)) in READERS.iter().enumerate() {
            let [right, none, wrong] =
                counts.get(&format!("read-{number}")).copied().unwrap_or_default();
            println!("  {what:10} {right:5} {none:5} {wrong:5}");
            // Single reads are awaited, unless the guest's processor is busy with something else
            // until the data is there; read-ahead is partly there before it is needed.
            let is_single = number >= 2;
            if wrong > 0 || is_single && right < none.max(1) {
                let problem = format!("{what}: {right} right, {none} without, {wrong} wrong");
                self.note(place, Err(Error::new(problem)));
            }
        }
        Ok(())
    }
}

/// Programs that make what they write durable, each with the number of its process before its own
/// output: after each write, or by `sync`.
const SYNCERS: [(&str, &str); 3] = [
    (
        "fsync",
        "exec fio --name=job --filename=/mnt/sync-0 --thread --ioengine=psync --rw=write --bs=4k \
         --size=400k --fsync=1",
    ),
    (
        "fdatasync",
        "exec fio --name=job --filename=/mnt/sync-1 --thread --ioengine=psync --rw=randwrite --bs=4k \
         --size=1m --io_size=200k --fdatasync=1",
    ),
    ("sync", "exec sync"),
];

impl Scene {
    /// Programs that wait until their data is durable: a flush is that of the program, and no other
    /// process than it, or a thread of the kernel, is ever reported.
    fn syncers(&mut self, place: &str) -> Result<()> {
        println!("{place}: flushes, journal writes and data writes with their process, with none,");
        println!("  with a thread of the kernel, with another one");
        for (number, (what, command)) in SYNCERS.iter().enumerate() {
            self.prepare(&format!(
                "dd if=/dev/urandom of=/mnt/sync-{number} bs=64k count=16; sync; sleep 0.2
                for file in $(seq 20); do echo $file > /mnt/new-{number}-$file; done; sleep 0.1"
            ))?;
            let start = self.uptime()?;
            let script = format!("sh -c 'echo $$ > /run/syncer; {command}' > /dev/null 2>&1");
            // The data of what was prepared is written before, but for `sync`.
            if *what != "sync" {
                self.guest.check("sync")?;
            }
            let requests = self.requests(&script)?;
            let own = self.guest.check("cat /run/syncer")?.trim().parse().ok();
            let end = self.uptime()?;
            let mut counts: BTreeMap<&str, [u32; 4]> = BTreeMap::new();
            let mut examples = Vec::new();
            // The flushes with the file of the program, with another one, and with none.
            let mut files = [0; 3];
            let flushes = requests.iter().filter(|request| request.operation == "flush");
            for request in flushes {
                let path = request.parts.iter().find_map(|part| part.path.as_deref());
                let is_own = |path: &str| path.ends_with(&format!("/sync-{number}"));
                files[path.map_or(2, |path| usize::from(!is_own(path)))] += 1;
            }
            let mut kernel_threads = BTreeMap::new();
            for request in &requests {
                for part in &request.parts {
                    let kind = match (request.operation.as_str(), part.kind) {
                        ("flush", _) => "flush",
                        ("write", Kind::Journal) => "journal",
                        ("write", Kind::Data) => "data",
                        _ => continue,
                    };
                    let outcome = match part.process_id {
                        None => 1,
                        number if number == own => 0,
                        Some(number) if self.is_of_kernel(number, &mut kernel_threads)? => 2,
                        Some(_) => 3,
                    };
                    // The start of the process is that of the program.
                    let started = part.process_start.unwrap_or(0);
                    let is_right = outcome != 0 || (start..=end).contains(&(started / 100));
                    if outcome == 3 || !is_right {
                        examples.push(format!("{own:?}, {start} to {end} s: {part:?}"));
                    }
                    counts.entry(kind).or_default()[outcome] += 1;
                }
                if request.operation == "flush" && request.parts.is_empty() {
                    counts.entry("flush").or_default()[1] += 1;
                }
            }
            println!("  {what:10} {counts:?}, files of flushes {files:?}");
            // Each write of the program ends with a flush, which is given to its file. Another file
            // is one whose write the same flush ends.
            let [own, other, without] = files;
            if *what != "sync" && (own < 20 || own < 2 * (other + without)) {
                let problem = format!("{what}: files of flushes {files:?}");
                self.note(place, Err(Error::new(problem)));
            }
            let [right, none, kernel, _] = counts.get("flush").copied().unwrap_or_default();
            let is_enough = *what == "sync" || right >= 2 * (none + kernel) && right >= 20;
            if !is_enough || !examples.is_empty() {
                let problem = format!("{what}: {counts:?}, for example {examples:#?}");
                self.note(place, Err(Error::new(problem)));
            }
        }
        Ok(())
    }

    /// The time since the guest's boot, in seconds.
    fn uptime(&self) -> Result<u64> {
        let text = self.guest.check("cat /proc/uptime")?;
        let seconds = text.split('.').next().and_then(|seconds| seconds.parse().ok());
        seconds.ok_or_else(|| Error::new(format!("no time: {text}")))
    }

    /// Whether a process is a thread of the kernel. `known` has those that were examined.
    fn is_of_kernel(&self, number: u32, known: &mut BTreeMap<u32, bool>) -> Result<bool> {
        if let Some(is_it) = known.get(&number) {
            return Ok(*is_it);
        }
        let process = format!("/proc/{number}");
        let command = format!(
            "if [ -d {process} ] && ! readlink {process}/exe > /dev/null; then echo kernel; fi"
        );
        let is_it = !self.guest.check(&command)?.trim().is_empty();
        known.insert(number, is_it);
        Ok(is_it)
    }

    /// The list of processes, compared with the guest's own before and after.
    fn list(&mut self) -> Result<()> {
        let busy = self.guest.spawn(
            "fio --name=job --filename=/mnt/busy --thread --ioengine=psync --rw=randwrite --bs=4k \
             --size=1m --time_based --runtime=60 --fsync=1 > /dev/null &
            echo $! > /run/busy; wait || true",
        )?;
        let client = self.daemon.client();
        let ask = || client.processes(Some("disk")).map_err(|error| Error::new(error.to_string()));
        // The program begins some time after its start, and waits most of its time.
        let (mut waiting, mut asked) = (0, 0);
        let end = Instant::now() + patience(10);
        while waiting < 50 && Instant::now() < end {
            asked += 1;
            std::thread::sleep(Duration::from_millis(5));
            let report = ask()?;
            let fio = report.guests[0].processes.iter().filter(|process| process.command == "fio");
            let calls = fio.flat_map(|process| &process.calls);
            waiting += calls
                .filter(|call| {
                    let path = call.file.as_ref().map(|file| file.path.as_str());
                    ["fsync", "pwrite64"].contains(&call.call.as_str()) && path == Some("/busy")
                })
                .count();
        }
        let before = self.own_list()?;
        let report = ask()?;
        let after = self.own_list()?;
        self.guest.check("kill $(cat /run/busy)")?;
        self.guest.finish(busy)?;
        let guest = &report.guests[0];
        println!(
            "{} processes in {} µs; of {asked} reports, {waiting} had fio's call",
            guest.processes.len(),
            guest.count_ns / 1000
        );
        let mut wrong = Vec::new();
        let mut known = 0;
        for (number, [parent, start, threads, read, dirtied, cancelled]) in &before {
            let Some(later) = after.get(number).filter(|later| later[1] == *start) else {
                continue;
            };
            let is_it = |process: &&fathom_control::ProcessInfo| process.process_id == *number;
            let Some(process) = guest.processes.iter().find(is_it) else {
                wrong.push(format!("{number} is missing"));
                continue;
            };
            let between = |early: &u64, late: &u64, value: Option<u64>| {
                value.is_some_and(|value| (*early..=*late).contains(&value))
            };
            let is_right = process.parent_id == *parent
                && process.start_ns.map(|ns| ns / 10_000_000) == Some(*start)
                && between(threads, &later[2], Some(process.threads))
                && between(read, &later[3], process.read_bytes)
                && between(dirtied, &later[4], process.dirtied_bytes)
                && between(cancelled, &later[5], process.cancelled_bytes);
            if !is_right {
                wrong.push(format!("{process:?}, not {:?} to {later:?}", before[number]));
            }
            known += 1;
        }
        let is_near =
            guest.uptime_ns.is_some_and(|ns| ns / 1_000_000_000 <= self.uptime().unwrap_or(0));
        if !guest.is_whole || known < 10 || waiting < 50 || !is_near || !wrong.is_empty() {
            let uptime_ns = guest.uptime_ns;
            let problem =
                format!("{known} known, {waiting} calls, up {uptime_ns:?} ns, {wrong:#?}");
            self.note("the list", Err(Error::new(problem)));
        }
        Ok(())
    }

    /// The guest's own list of its processes: parent, start in hundredths of a second, number of
    /// threads, and the account of I/O, by their numbers.
    fn own_list(&self) -> Result<BTreeMap<u64, [u64; 6]>> {
        let output = self.guest.check(
            "cd /proc; for process in [0-9]*; do
                stat=$(sed 's/.*) //' $process/stat 2> /dev/null) || continue
                io=$(awk '/_bytes/ { printf \"%s \", $2 }' $process/io 2> /dev/null) || continue
                set -- $stat; parent=$2 threads=${18} start=${20}
                echo $process $parent $start $threads $io
            done",
        )?;
        let lines = output.lines().filter_map(|line| {
            let numbers: Vec<u64> =
                line.split_whitespace().map(|word| word.parse().ok()).collect::<Option<_>>()?;
            let (number, rest) = numbers.split_first()?;
            Some((*number, rest.try_into().ok()?))
        });
        Ok(lines.collect())
    }
}

/// All ways with a kernel. A disk takes some time for a request, in which its reader begins to
/// wait.
fn processes(kernel: &str) -> Result<()> {
    let Some(mut scene) = Scene::start_above(kernel, 400, ", { kind = 'delay', time = '2ms' }")?
    else {
        return Ok(());
    };
    for place in &PLACES {
        if !scene.has(place.name, place.modules, "")? {
            continue;
        }
        scene.prepare(place.make)?;
        scene.direct(place.name)?;
        scene.readers(place.name)?;
        scene.syncers(place.name)?;
        if place.name == "ext4" {
            scene.list()?;
        }
        scene.prepare(&format!("{}; blkdiscard -f /dev/vdb", place.remove))?;
    }
    scene.direct_to_disk()?;
    scene.end()
}

/// The oldest kernel, with all modules.
#[test]
fn processes_of_requests() -> Result<()> {
    processes(&kernel())
}

/// The newest kernel.
#[test]
fn processes_of_requests_of_the_newest_kernel() -> Result<()> {
    processes(&crate::introspection::newest())
}
