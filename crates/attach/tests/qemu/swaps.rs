//! Pages in a swap file: limits, deaths of pagers and guards, a disk that hangs.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fathom_attach::{EvictionCounts, Request, ask};

use crate::evictions::{LIMIT, PATTERN, kill, status};
use crate::machine::{Machine, PagerProcess, until};

/// The folder for the swap file of a machine; none where it would be in memory.
fn folder(machine: &Machine) -> Option<PathBuf> {
    let folder = machine.folder.path().join("swap");
    let output = Command::new("stat").args(["-fc", "%T"]).arg(machine.folder.path()).output();
    let kind = String::from_utf8_lossy(&output.unwrap().stdout).trim().to_owned();
    if kind == "tmpfs" {
        println!("Skipped: temporary files are in memory");
        return None;
    }
    Some(folder)
}

fn start(machine: &Machine, folder: &Path, mode: &str, die_at: &str) -> PagerProcess {
    PagerProcess::start_evicting_with(machine, mode, die_at, Some(LIMIT), Some(folder))
}

/// Waits until so many bytes are in the file, and nothing is on its way.
fn await_swapped(machine: &Machine, bytes: u64) -> EvictionCounts {
    let begun = Instant::now();
    until("pages to go to the file", || {
        let now = status(machine).eviction;
        assert!(begun.elapsed() < Duration::from_secs(50), "{now:?}");
        assert_eq!((now.damaged, now.retreat.as_str()), (0, ""), "{now:?}");
        assert_eq!((now.file_obstacle.as_str(), now.file_failed), ("", 0), "{now:?}");
        (now.file_bytes >= bytes && now.store_bytes <= 1 << 20).then_some(now)
    })
}

fn swap_files(folder: &Path) -> usize {
    std::fs::read_dir(folder).map_or(0, Iterator::count)
}

pub fn pages_in_a_swap_file() {
    let mut machine = Machine::with_pattern();
    let Some(folder) = folder(&machine) else { return };
    let mut pager = start(&machine, &folder, "attach", "");
    pager.attached();
    let counts = await_swapped(&machine, PATTERN / 4);
    println!("{counts:?}");
    // Noise goes there, too, and the limit holds.
    assert_eq!(counts.incompressible, 0, "{counts:?}");
    until("the limit to hold", || {
        (status(&machine).eviction.resident_bytes <= LIMIT).then_some(())
    });
    machine.check_pattern();
    let after = await_swapped(&machine, PATTERN / 4);
    assert!(after.file_read > 500 && after.file_fault_ns.count() > 500, "{after:?}");
    assert_eq!(after.existing, 0, "{after:?}");
    println!(
        "a page of the file: p50 {} us, p99 {} us",
        after.file_fault_ns.percentile(50.0) / 1000,
        after.file_fault_ns.percentile(99.0) / 1000
    );
    // Without a limit nothing more leaves, and what is away comes when it is touched.
    let limit = |bytes| ask(&machine.folder(), machine.process(), Request::Limit(bytes)).unwrap();
    assert_eq!(limit(0).refused, "");
    machine.check_pattern();
    let limit = |bytes| ask(&machine.folder(), machine.process(), Request::Limit(bytes)).unwrap();
    assert_eq!(limit(LIMIT).refused, "");
    await_swapped(&machine, PATTERN / 4);
    let last = pager.detach();
    assert_eq!((last.state.as_str(), last.eviction.away_bytes), ("detached", 0), "{last:?}");
    assert_eq!((last.eviction.file_bytes, swap_files(&folder)), (0, 0), "{last:?}");
    machine.check_pattern();
    // A second store has a second file. One without is not mixed with it.
    let mut pager = start(&machine, &folder, "adopt", "");
    pager.attached();
    await_swapped(&machine, PATTERN / 4);
    assert_eq!(swap_files(&folder), 1);
    pager.kill();
    let mut pager = PagerProcess::start_evicting(&machine, "adopt", "", None);
    pager.attached();
    await_swapped(&machine, PATTERN / 4);
    machine.check_pattern();
    pager.detach();
    let mut pager = PagerProcess::start_evicting(&machine, "attach", "", Some(LIMIT));
    pager.attached();
    until("pages to leave", || (status(&machine).eviction.away_bytes > PATTERN / 4).then_some(()));
    pager.kill();
    let refused = start(&machine, &folder, "adopt", "").refused();
    assert!(refused.contains("without a swap file"), "{refused}");
    machine.check_pattern();
    let mut pager = PagerProcess::start_evicting(&machine, "adopt", "", None);
    pager.attached();
    pager.detach();
    machine.check_pattern();
}

pub fn pagers_killed_with_a_swap_file() {
    let mut machine = Machine::with_pattern();
    let Some(folder) = folder(&machine) else { return };
    for round in 0..3 {
        for step in [0, 3, 4, 5, 6, 7] {
            let mut pager = start(&machine, &folder, "attach", "");
            pager.attached();
            if round > 0 {
                // Else it dies at any moment: contents are being written, pages are read.
                await_swapped(&machine, PATTERN / 4);
            } else {
                std::thread::sleep(Duration::from_millis(20 + 7 * step));
            }
            pager.kill();
            if round == 1 {
                // Its guard reads the file.
                machine.check_pattern();
            }
            start(&machine, &folder, "adopt", &format!("pager:{step}")).died();
            machine.check();
            machine.check_pattern();
        }
    }
    let mut pager = start(&machine, &folder, "adopt", "");
    pager.attached();
    await_swapped(&machine, PATTERN / 4);
    pager.kill();
    machine.check_pattern();
    // The machine ends while a guard serves: nothing is left.
    kill(machine.process() as u32);
    until("the end of QEMU", || machine.ended());
    until("removal of the file", || (swap_files(&folder) == 0).then_some(()));
}

/// A file system on a block device whose requests can be held back: a loop device over a file of
/// FUSE, the server of which is stopped.
struct HungDisk {
    server: Child,
    point: PathBuf,
    device: Option<String>,
    folder: PathBuf,
}

fn run(words: &[&str]) -> Option<String> {
    let output = Command::new(words[0]).args(&words[1..]).stderr(Stdio::null()).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    output.status.success().then_some(text)
}

impl HungDisk {
    /// `None` if this host has not what it needs.
    fn make(folder: &Path) -> Option<Self> {
        let (point, mounted) = (folder.join("point"), folder.join("mounted"));
        for folder in [&point, &mounted] {
            std::fs::create_dir(folder).unwrap();
        }
        let server = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "--", "nbdfuse"])
            .arg(&point)
            .args(["[", "nbdkit", "--exit-with-parent", "memory", "256M", "]"])
            .stdin(Stdio::null())
            .spawn()
            .ok()?;
        let mut made = Self { server, point, device: None, folder: mounted };
        let image = made.point.join("nbd");
        let begun = Instant::now();
        while !image.exists() {
            let has_ended = made.server.try_wait().unwrap().is_some();
            if has_ended || begun.elapsed() > Duration::from_secs(10) {
                return None;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let device = run(&["losetup", "--show", "-f", image.to_str().unwrap()])?;
        made.device = Some(device.clone());
        run(&["mkfs.ext4", "-q", &device])?;
        run(&["mount", &device, made.folder.to_str().unwrap()])?;
        Some(made)
    }

    fn set_hanging(&self, is_hanging: bool) {
        let signal = if is_hanging { libc::SIGSTOP } else { libc::SIGCONT };
        // SAFETY: a signal to a process that this test has started.
        assert_eq!(unsafe { libc::kill(self.server.id() as i32, signal) }, 0);
    }
}

impl Drop for HungDisk {
    fn drop(&mut self) {
        self.set_hanging(false);
        let _ = run(&["umount", self.folder.to_str().unwrap()]);
        let _ = self.device.as_ref().map(|device| run(&["losetup", "-d", device]));
        let _ = run(&["fusermount3", "-uz", self.point.to_str().unwrap()]);
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

/// A disk hangs while pages are read and written: the pager answers and can be killed, its guard
/// serves what is in memory, the next pager begins, and when the disk goes on nothing is lost.
pub fn a_swap_file_that_hangs() {
    let outside = tempfile::tempdir().unwrap();
    let mut machine = Machine::with_pattern();
    let Some(disk) = HungDisk::make(outside.path()) else {
        println!("Skipped: this needs nbdfuse, nbdkit, FUSE and loop devices");
        return;
    };
    let folder = disk.folder.join("swap");
    let mut pager = start(&machine, &folder, "attach", "");
    pager.attached();
    await_swapped(&machine, PATTERN / 4);
    disk.set_hanging(true);
    // Somebody needs a page of the file: QEMU, in a thread that waits.
    let (done, reads) = std::thread::scope(|scope| {
        let reads = scope.spawn(|| machine.read_pattern());
        std::thread::sleep(Duration::from_millis(500));
        let begun = Instant::now();
        let now = status(&machine);
        println!("it answers after {:?}: {:?}", begun.elapsed(), now.eviction);
        // The pager is killed. Its threads hang, and nobody waits for them.
        let begun = Instant::now();
        kill(now.pager);
        drop(pager);
        let mut next = start(&machine, &folder, "adopt", "");
        let found = next.attached();
        println!("the next one is there after {:?}", begun.elapsed());
        assert!(begun.elapsed() < Duration::from_secs(8), "a thread that hangs was waited for");
        assert!(found.is_adopted && !reads.is_finished());
        disk.set_hanging(false);
        (next, reads.join().unwrap())
    });
    assert!(reads.is_some(), "QEMU does not answer");
    machine.check_pattern();
    until("pages to go to the file", || {
        let now = status(&machine).eviction;
        assert_eq!(now.damaged, 0, "{now:?}");
        (now.file_bytes >= PATTERN / 4 && now.file_obstacle.is_empty()).then_some(())
    });
    machine.check_pattern();
    let last = done.detach();
    assert_eq!((last.state.as_str(), last.eviction.away_bytes), ("detached", 0), "{last:?}");
    machine.check_pattern();
    drop(disk);
}
