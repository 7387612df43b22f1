//! What the observer of swapped memory counts, against the host kernel's own counts, with a real
//! guest in a memory control group and real swap.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use fathom_control::{PagerDisk, PagerGuest};
use fathom_tests::{Daemon, Disk, Error, Guest, Qemu, Result, Served, patience, repository, until};
use parking_lot::Mutex;
use serde_json::json;

const MIB: u64 = 1 << 20;
/// The file that is read and stays unchanged, and the one that is changed in memory, in MiB.
const UNCHANGED: u64 = 48;
const CHANGED: u64 = 32;
/// What is read of the disk into memory that is free, in MiB.
const STALE: u64 = 48;

/// One of the tests has swap at a time: the other expects that there is none.
static ALONE: Mutex<()> = Mutex::new(());

/// A swap file. It goes when this value does, or when the test is killed: a shell that waits for
/// the end of its input switches it off.
struct Swap {
    keeper: Child,
}

impl Swap {
    /// `None`, with the reason printed, where there can be no swap file.
    fn start(mib: u64) -> Result<Option<Self>> {
        // Not below /tmp, which may be in memory.
        let path = repository().join(format!("target/swap-of-test-{}", std::process::id()));
        let script = "trap '' INT TERM HUP
            fallocate -l $2 \"$1\" && chmod 600 \"$1\" && mkswap -q \"$1\" && swapon \"$1\" && echo on
            cat > /dev/null; swapoff \"$1\"; rm -f \"$1\"";
        let mut keeper = Command::new("setsid")
            .args(["sh", "-c", script, "swap"])
            .arg(&path)
            .arg((mib << 20).to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()?;
        let mut line = String::new();
        if let Some(output) = keeper.stdout.take() {
            BufReader::new(output).read_line(&mut line)?;
        }
        let swap = Self { keeper };
        if line.trim() == "on" {
            return Ok(Some(swap));
        }
        println!("Skipped: a swap file cannot be used here (it needs root and a file system)");
        Ok(None)
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        drop(self.keeper.stdin.take());
        let _ = self.keeper.wait();
    }
}

/// A memory control group, version 1 or 2.
struct Group {
    path: PathBuf,
    limit: &'static str,
    none: &'static str,
}

impl Group {
    /// `None`, with the reason printed, where there can be no group.
    fn start() -> Option<Self> {
        let name = format!("fathom-test-{}", std::process::id());
        let versions = [
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "-1"),
            ("/sys/fs/cgroup", "memory.high", "max"),
        ];
        for (root, limit, none) in versions {
            let path = Path::new(root).join(&name);
            if fs::create_dir(&path).is_err() {
                continue;
            }
            let group = Self { path, limit, none };
            if group.path.join(limit).exists() {
                return Some(group);
            }
        }
        println!("Skipped: no memory control group can be made here (it needs root)");
        None
    }

    /// A QEMU whose processes are in the group from the start.
    fn qemu(&self, folder: &Path) -> Result<Qemu> {
        let (script, real) = (folder.join("qemu"), Qemu::current()?);
        let text = format!(
            "#!/bin/sh\necho $$ > {}/cgroup.procs\nexec {} \"$@\"\n",
            self.path.display(),
            real.binary().display()
        );
        fs::write(&script, text)?;
        let made = Command::new("chmod").arg("755").arg(&script).status()?;
        assert!(made.success());
        Qemu::at(&script)
    }

    /// Limits the group's memory so that most of it is swapped out, and takes the limit away.
    fn squeeze(&self) -> Result<()> {
        let limit = self.path.join(self.limit);
        // The kernel gives up when it finds nothing more: what is left is in use.
        for mib in [256_u64, 128, 64, 24] {
            let _ = fs::write(&limit, (mib * MIB).to_string());
        }
        Ok(fs::write(&limit, self.none)?)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::write(self.path.join(self.limit), self.none);
        // Processes that have just ended leave the group after a moment.
        let gone = || Ok(fs::remove_dir(&self.path).is_ok().then_some(()));
        let _ = until("the group to be empty", Duration::from_secs(10), gone);
    }
}

/// A number of a file of the kernel, in its unit.
fn number(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let word = line.and_then(|line| line.split_whitespace().next());
    word.and_then(|word| word.parse().ok()).unwrap_or_else(|| panic!("{name} of {text}"))
}

/// What the host's kernel says of QEMU's mapping of the guest's memory: the bytes in swap.
fn swapped_of(guest: &Guest) -> Result<u64> {
    let maps = fs::read_to_string(format!("/proc/{}/smaps", guest.process().id()))?;
    let (mut is_memory, mut found) = (false, 0);
    for line in maps.lines() {
        if line.contains("rw-s") {
            is_memory = line.contains("/memfd:memory-backend-memfd");
        } else if line.contains("-p ") {
            is_memory = false;
        } else if is_memory && line.starts_with("Swap:") {
            found += number(line, "Swap:") * 1024;
        }
    }
    Ok(found)
}

/// The pages that the host has read from swap, in bytes.
fn read_from_swap() -> Result<u64> {
    Ok(number(&fs::read_to_string("/proc/vmstat")?, "pswpin ") * 4096)
}

struct Scene {
    // The order of dropping: the group can go when QEMU has ended.
    guest: Guest,
    daemon: Daemon,
    group: Group,
}

impl Scene {
    fn report(&self) -> Result<PagerGuest> {
        let found = self.daemon.client().pager(Some("disk"));
        let report = found.map_err(|error| Error::new(error.to_string()))?;
        report.guests.into_iter().next().ok_or_else(|| Error::new("no guest"))
    }

    fn counts(&self) -> Result<PagerDisk> {
        let watched = self.report()?.watched.into_iter().next();
        watched.ok_or_else(|| Error::new("the disk is not watched"))
    }

    /// Swaps the guest's memory out while it stands still, and compares the counts with those of
    /// the kernel. Then lets it run until the sample has been checked.
    fn squeeze(&self) -> Result<()> {
        self.guest.qmp(&json!({"execute": "stop"}))?;
        let before = self.counts()?.swapped_out;
        self.group.squeeze()?;
        // The last count has to be older than a tenth of a second.
        std::thread::sleep(Duration::from_millis(500));
        let (report, swapped) = (self.report()?, swapped_of(&self.guest)?);
        println!(
            "swapped out: {} MiB, {} MiB resident, counted in {} µs",
            swapped / MIB,
            report.resident_bytes.unwrap_or_default() / MIB,
            report.count_ns / 1000
        );
        assert_eq!(report.swapped_bytes, Some(swapped), "the kernel has other pages in swap");
        assert!(swapped > 128 * MIB, "only {swapped} bytes were swapped out");
        self.guest.qmp(&json!({"execute": "cont"}))?;
        // It is checked about once a second while the disk is used.
        until("the sample to be checked", patience(30), || {
            let first = self.counts()?.swapped_out;
            self.guest.check(USE)?;
            let is_over = first == self.counts()?.swapped_out && first != before;
            Ok(is_over.then_some(()))
        })
    }

    /// Runs a script whose accesses bring pages in. Returns the counts, what was brought in by the
    /// kernel's count of pages in swap, and what was read from swap.
    fn bring_in(&self, script: &str) -> Result<(PagerDisk, PagerDisk, u64, u64)> {
        let (before, read, swapped) = (self.counts()?, read_from_swap()?, swapped_of(&self.guest)?);
        self.guest.check_within(script, 120)?;
        let brought = swapped.saturating_sub(swapped_of(&self.guest)?);
        let (after, read) = (self.counts()?, read_from_swap()? - read);
        println!(
            "stale reads {} KiB, double paging {} KiB; brought in {} KiB, read from swap {} KiB",
            (after.stale_read_bytes - before.stale_read_bytes) >> 10,
            (after.double_paging_bytes - before.double_paging_bytes) >> 10,
            brought >> 10,
            read >> 10
        );
        Ok((before, after, brought, read))
    }
}

/// Uses the disk for one and a half seconds, and little memory.
const USE: &str = "for i in 1 2 3; do
        dd if=/dev/vda of=/dev/null bs=4k count=1 skip=$i iflag=direct 2> /dev/null; sleep 0.5
    done";

/// A file with random content.
fn fill(name: &str, mib: u64) -> String {
    format!("dd if=/dev/urandom of=/mnt/{name} bs=1M count={mib} 2> /dev/null; sync")
}

#[test]
fn needless_io_of_a_swapped_guest_is_what_the_kernel_counts() -> Result<()> {
    let _alone = ALONE.lock();
    let Some(_swap) = Swap::start(1024)? else { return Ok(()) };
    let Some(group) = Group::start() else { return Ok(()) };
    let disk = Served::sparse("disk", 256).with("layers = [{ kind = 'swap-watch' }]");
    let daemon = Daemon::serve(&[disk])?;
    let guest = Guest::builder()
        .qemu(group.qemu(&daemon.path(""))?)
        .memory_mib(384)
        // Or else the kernel clears each page before a disk can read into it.
        .append(" init_on_alloc=0 init_on_free=0")
        .disk(Disk::vhost_user(daemon.path("disk.sock")).queues(2))
        .start()?;
    let scene = Scene { guest, daemon, group };
    if !scene.report()?.unknown.is_empty() {
        println!("Skipped: {}", scene.report()?.unknown);
        return Ok(());
    }
    let guest = &scene.guest;
    // QEMU is charged for what the guest touches first, and the daemon for what it reads first.
    // Free pages are full of something: the kernel keeps no copy of pages of zeroes.
    guest.check_within(
        "mount -t tmpfs -o size=300m none /mnt; tr '\\0' x < /dev/zero | head -c 220000000 > /mnt/x
        umount /mnt; mkfs.ext4 -q -F /dev/vda; mount /dev/vda /mnt
        echo 0 > /proc/sys/vm/dirty_writeback_centisecs; echo 90 > /proc/sys/vm/dirty_ratio
        echo 80 > /proc/sys/vm/dirty_background_ratio",
        120,
    )?;
    guest.check_within(&fill("unchanged", UNCHANGED), 120)?;
    guest.check_within(&fill("changed", CHANGED), 120)?;
    guest.check("echo 3 > /proc/sys/vm/drop_caches; cat /mnt/unchanged > /dev/null")?;
    let none = scene.counts()?;
    assert_eq!((none.stale_read_bytes, none.double_paging_bytes), (0, 0));
    assert_eq!((none.swapped_out.bytes, none.rereads.bytes), (0, 0));
    assert_eq!(scene.report()?.swapped_bytes, Some(0));

    // Silent writes: the file lies in the guest's page cache as it lies on the disk.
    scene.squeeze()?;
    // `cat` to nowhere would not touch the pages.
    let script = format!("md5sum /mnt/unchanged > /dev/null; {USE}; {USE}");
    let (before, after, brought, _) = scene.bring_in(&script)?;
    let silent = after.silent_writes.bytes - before.silent_writes.bytes;
    let changed = after.changed.bytes - before.changed.bytes;
    println!("silent {} KiB of {UNCHANGED} MiB, changed {} KiB", silent >> 10, changed >> 10);
    assert!(brought >= UNCHANGED * MIB * 3 / 4, "the guest has read its cache: {brought}");
    assert!((UNCHANGED * MIB / 2..=UNCHANGED * MIB * 5 / 4).contains(&silent), "{silent}");
    assert!(changed <= UNCHANGED * MIB / 16, "{changed} bytes were not changed");
    assert!(after.double_paging_bytes - before.double_paging_bytes < MIB);

    // Double paging: the file was changed in memory, was swapped out, and is written back.
    guest.check_within(
        &format!(
            "dd if=/dev/urandom of=/mnt/changed bs=1M count={CHANGED} conv=notrunc 2> /dev/null"
        ),
        120,
    )?;
    scene.squeeze()?;
    let (before, after, brought, read) = scene.bring_in("sync")?;
    let double = after.double_paging_bytes - before.double_paging_bytes;
    assert!((CHANGED * MIB / 2..=(CHANGED + 4) * MIB).contains(&double), "{double}");
    // Each page comes in once, from the device or as a neighbour of another.
    assert!(double <= brought, "{double} of {brought} bytes");
    assert!(double / 2 <= read, "{double} bytes of {read}");
    assert!(after.silent_writes.bytes - before.silent_writes.bytes <= CHANGED * MIB / 8);

    // Stale reads: what was freed is swapped out, and the disk is read into it.
    guest.check_within(
        "rm /mnt/unchanged; sync; mkdir -p /run/t; mount -t tmpfs -o size=200m none /run/t
        tr '\\0' y < /dev/zero | head -c 150000000 > /run/t/x; umount /run/t",
        120,
    )?;
    scene.squeeze()?;
    let script = format!("dd if=/dev/vda of=/dev/null bs=1M skip=128 count={STALE} 2> /dev/null");
    let (before, after, brought, read) = scene.bring_in(&script)?;
    let stale = after.stale_read_bytes - before.stale_read_bytes;
    assert!((STALE * MIB / 2..=(STALE + 4) * MIB).contains(&stale), "{stale}");
    assert!(stale <= brought && stale / 2 <= read, "{stale}: {brought}, {read} bytes");

    let shown = scene.daemon.command(&["pager"])?;
    let text = String::from_utf8_lossy(&shown.stdout).into_owned();
    println!("{text}");
    assert!(shown.status.success() && text.contains("STALE READS"), "{shown:?}");
    guest.check("umount /mnt")?;
    guest.check_console()?;
    scene.daemon.check("disk")?;
    let Scene { guest, daemon, group } = scene;
    guest.shutdown()?;
    drop((daemon, group));
    Ok(())
}

#[test]
fn a_guest_that_is_not_swapped_has_zeroes() -> Result<()> {
    let _alone = ALONE.lock();
    let disk = Served::sparse("disk", 64).with("layers = [{ kind = 'swap-watch' }]");
    let daemon = Daemon::serve(&[disk, Served::sparse("other", 16)])?;
    let guest = Guest::builder()
        .disk(Disk::vhost_user(daemon.path("disk.sock")).queues(2))
        .disk(Disk::vhost_user(daemon.path("other.sock")).queues(2))
        .start()?;
    guest.check(
        "mkfs.ext4 -q -F /dev/vda; mount /dev/vda /mnt
        dd if=/dev/urandom of=/mnt/f bs=1M count=16 2> /dev/null; sync
        echo 3 > /proc/sys/vm/drop_caches; cat /mnt/f > /dev/null; umount /mnt",
    )?;
    let report = daemon.client().pager(None).map_err(|error| Error::new(error.to_string()))?;
    // One guest, with one of its two disks watched.
    assert_eq!(report.guests.len(), 1, "{report:?}");
    let found = &report.guests[0];
    assert_eq!(found.disks, ["disk", "other"]);
    assert_eq!((found.memory_bytes, found.watched.len()), (512 * MIB, 1));
    if found.unknown.is_empty() && report.host_swap_used_bytes == 0 {
        assert_eq!(found.swapped_bytes, Some(0));
        let resident = found.resident_bytes.unwrap_or_default();
        assert!((32 * MIB..=512 * MIB).contains(&resident), "{resident}");
        let disk = PagerDisk { disk: "disk".into(), ..PagerDisk::default() };
        // Only the first requests look, before the first check has an answer.
        let examined_requests = found.watched[0].examined_requests;
        assert_eq!(found.watched[0], PagerDisk { examined_requests, ..disk });
        std::thread::sleep(Duration::from_secs(1));
        guest.check("dd if=/dev/vda of=/dev/null bs=4k count=64 iflag=direct 2> /dev/null")?;
        let after = daemon.client().pager(Some("disk")).map_err(|it| Error::new(it.to_string()))?;
        assert_eq!(after.guests[0].watched[0].examined_requests, examined_requests);
    }
    let refused = daemon.client().pager(Some("nobody")).unwrap_err().to_string();
    assert!(refused.contains("nobody"), "{refused}");
    guest.shutdown()
}
