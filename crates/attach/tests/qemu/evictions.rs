//! Pages that leave QEMU's memory: deaths while they are away, a limit that changes, what makes
//! them come in.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use fathom_attach::{EvictionCounts, PagerStatus, Request, ask};

use crate::machine::{self, Machine, PATTERN_BYTES, PagerProcess, store, until};

const MIB: u64 = 1 << 20;
pub const LIMIT: u64 = 10 * MIB;
pub const PATTERN: u64 = PATTERN_BYTES as u64;

pub fn status(machine: &Machine) -> PagerStatus {
    ask(&machine.folder(), machine.process(), Request::Status).unwrap()
}

/// Waits until so many bytes are away.
pub fn await_away(machine: &Machine, bytes: u64) -> EvictionCounts {
    until("pages to leave", || {
        let now = status(machine).eviction;
        assert_eq!((now.damaged, now.retreat.as_str()), (0, ""), "{now:?}");
        (now.away_bytes >= bytes).then_some(now)
    })
}

pub fn kill(process: u32) {
    // SAFETY: a signal to a process that this test has started.
    unsafe { libc::kill(process as i32, libc::SIGKILL) };
}

pub fn pages_leave_and_a_limit_changes() {
    let mut machine = Machine::with_pattern();
    let mut pager = PagerProcess::start_evicting(&machine, "attach", "", Some(LIMIT));
    pager.attached();
    let counts = await_away(&machine, PATTERN / 2);
    println!("{counts:?}");
    // Pages of one number take no memory, those of noise stay, and the others become smaller.
    assert!(counts.filled_bytes > PATTERN / 10 && counts.incompressible > 100, "{counts:?}");
    assert!(counts.store_bytes > 0 && counts.store_bytes < counts.away_bytes, "{counts:?}");
    assert!(counts.resident_bytes < PATTERN, "{counts:?}");
    machine.check_pattern();
    let after = status(&machine).eviction;
    assert!(after.brought > 1000 && after.fault_ns.count() > 1000, "{after:?}");
    assert_eq!(after.existing, 0, "{after:?}");
    machine.check();
    // No limit: nothing leaves any more, and what is away stays until it is touched.
    let limit = |bytes| ask(&machine.folder(), machine.process(), Request::Limit(bytes)).unwrap();
    let free = limit(0);
    assert_eq!((free.refused.as_str(), free.eviction.limit_bytes), ("", 0));
    machine.check_pattern();
    let before = status(&machine).eviction;
    std::thread::sleep(Duration::from_millis(300));
    machine.check_pattern();
    assert_eq!(status(&machine).eviction.evicted, before.evicted);
    let limit = |bytes| ask(&machine.folder(), machine.process(), Request::Limit(bytes)).unwrap();
    assert_eq!(limit(LIMIT).eviction.limit_bytes, LIMIT);
    await_away(&machine, PATTERN / 2);
    let last = pager.detach();
    assert_eq!((last.state.as_str(), last.eviction.away_bytes), ("detached", 0), "{last:?}");
    assert_eq!(machine.registered(), 0);
    machine.check_pattern();
    // Attached again, to the same table of leases.
    let mut pager = PagerProcess::start_evicting(&machine, "adopt", "", Some(LIMIT));
    pager.attached();
    await_away(&machine, PATTERN / 2);
    machine.check_pattern();
    pager.detach();
    machine.check_pattern();
}

pub fn pagers_killed_with_pages_away() {
    let mut machine = Machine::with_pattern();
    for round in 0..3 {
        for step in 0..8 {
            let mut pager = PagerProcess::start_evicting(&machine, "attach", "", Some(LIMIT));
            pager.attached();
            await_away(&machine, PATTERN / 3);
            pager.kill();
            if round == 1 {
                // Its guard serves.
                machine.check_pattern();
            }
            let die_at = format!("pager:{step}");
            let next = PagerProcess::start_evicting(&machine, "adopt", &die_at, Some(LIMIT));
            // An adoption has neither record nor injection.
            match step {
                1 | 2 => next.kill(),
                _ => next.died(),
            }
            assert_eq!(machine.registered(), 64 * MIB, "round {round}, step {step}");
            machine.check();
            machine.check_pattern();
        }
    }
    // Of all these pagers' guards, some are left, but not all.
    until("the end of other guards", || (2..=8).contains(&machine::guards()).then_some(()));
    // One that comes has its turn, and none of them leaves
    // the faults to the kernel while pages are away.
    let mut pager = PagerProcess::start_evicting(&machine, "adopt", "", Some(LIMIT));
    assert!(pager.attached().is_adopted);
    await_away(&machine, PATTERN / 3);
    machine.check_pattern();
    let last = pager.detach();
    assert_eq!((last.state.as_str(), last.eviction.away_bytes), ("detached", 0), "{last:?}");
    machine.check_pattern();
    until("release of the memory", || (machine.registered() == 0).then_some(()));
}

pub fn guards_killed_with_pages_away() {
    let mut machine = Machine::with_pattern();
    let mut pager = PagerProcess::start_evicting(&machine, "attach", "", Some(LIMIT));
    let first = pager.attached().guard;
    await_away(&machine, PATTERN / 3);
    kill(first);
    let second = until("another guard", || {
        let guard = status(&machine).guard;
        (guard != first && guard != 0).then_some(guard)
    });
    machine.check_pattern();
    await_away(&machine, PATTERN / 3);
    // Both die: threads that touch a page wait, until somebody comes.
    kill(second);
    pager.kill();
    assert_eq!(machine.registered(), 64 * MIB);
    let mut pager = PagerProcess::start_evicting(&machine, "adopt", "", None);
    pager.attached();
    machine.check_pattern();
    machine.check();
    // It has no limit, and the pages that nobody touches are still away.
    let counts = status(&machine).eviction;
    assert_eq!((counts.limit_bytes, counts.damaged), (0, 0), "{counts:?}");
    let last = pager.detach();
    assert_eq!((last.state.as_str(), last.eviction.away_bytes), ("detached", 0), "{last:?}");
    machine.check_pattern();
}

pub fn a_foreign_process_has_all_pages_come_in() {
    let mut machine = Machine::with_pattern();
    let mut pager = PagerProcess::start_evicting(&machine, "attach", "", Some(LIMIT));
    pager.attached();
    await_away(&machine, PATTERN / 3);
    // This process maps the memory, and touches nothing of it.
    let folder = format!("/proc/{}/fd", machine.process());
    let is_memory = |path: &std::path::PathBuf| {
        std::fs::read_link(path).is_ok_and(|link| link.to_string_lossy().contains("memfd:memory"))
    };
    let mut files = std::fs::read_dir(folder).unwrap().flatten().map(|entry| entry.path());
    let file = File::options().read(true).open(files.find(is_memory).unwrap()).unwrap();
    let mapping = fathom_guest_memory::Mapping::read_only(&file, 0, MIB).unwrap();
    let now = until("all pages to come in", || {
        let now = status(&machine).eviction;
        (now.away_bytes == 0 && !now.retreat.is_empty()).then_some(now)
    });
    assert!(now.retreat.contains("also maps its guest's memory"), "{now:?}");
    machine.check_pattern();
    let evicted = status(&machine).eviction.evicted;
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(status(&machine).eviction.evicted, evicted, "a page has left");
    drop(mapping);
    until("the end of the retreat", || status(&machine).eviction.retreat.is_empty().then_some(()));
    await_away(&machine, PATTERN / 3);
    machine.check_pattern();
    // A read by a descriptor makes no page.
    let mut bytes = [0; 4096];
    file.read_exact_at(&mut bytes, 20 * MIB).unwrap();
    machine.check_pattern();
    pager.detach();
    machine.check_pattern();
}

/// The file of a machine's store.
fn store_file(machine: &Machine) -> PathBuf {
    let mut entries = std::fs::read_dir(store(machine)).unwrap();
    entries.next().expect("a store").unwrap().path()
}

pub fn a_store_without_room() {
    let mut machine = Machine::with_pattern();
    let folder = store(&machine);
    std::fs::create_dir(&folder).unwrap();
    let mount = ["-t", "tmpfs", "-o", "size=1M,mode=700", "none"];
    if !Command::new("mount").args(mount).arg(&folder).status().is_ok_and(|done| done.success()) {
        println!("Skipped: tmpfs cannot be mounted");
        return;
    }
    let mut pager = PagerProcess::start_evicting(&machine, "attach", "", Some(LIMIT));
    pager.attached();
    let counts = until("a store without room", || {
        let counts = status(&machine).eviction;
        (counts.full > 0 && counts.away_bytes > 0).then_some(counts)
    });
    assert!(counts.store_bytes < MIB, "{counts:?}");
    for _ in 0..3 {
        machine.check_pattern();
        machine.check();
    }
    let last = pager.detach();
    assert_eq!((last.state.as_str(), last.eviction.away_bytes), ("detached", 0), "{last:?}");
    machine.check_pattern();
    assert!(Command::new("umount").arg(&folder).status().unwrap().success());
}

pub fn a_damaged_store() {
    let mut machine = Machine::with_pattern();
    let mut pager = PagerProcess::start_evicting(&machine, "attach", "", Some(LIMIT));
    pager.attached();
    await_away(&machine, PATTERN / 2);
    let file = File::options().write(true).open(store_file(&machine)).unwrap();
    // The data begins behind the index, at a multiple of 64 KiB.
    let start = (4096 + 8 * (64 << 20) / 4096_u64).next_multiple_of(64 << 10);
    file.write_all_at(&vec![0x5a; 1 << 20], start).unwrap();
    // The machine gets an error as of broken memory, of which QEMU dies; it never reads other
    // bytes.
    if machine.read_pattern().is_some() {
        machine.check_pattern();
    }
    let ended = until("the end of QEMU", || machine.ended());
    println!("QEMU: {ended}");
    drop(pager);
}

pub fn a_machine_that_ends_while_a_guard_serves() {
    let mut machine = Machine::with_pattern();
    let mut pager = PagerProcess::start_evicting(&machine, "attach", "", Some(LIMIT));
    pager.attached();
    await_away(&machine, PATTERN / 3);
    let file = store_file(&machine);
    pager.kill();
    machine.check_pattern();
    assert!(file.exists());
    kill(machine.process() as u32);
    until("the end of QEMU", || machine.ended());
    until("removal of the store", || (!file.exists()).then_some(()));
    let leases = machine.folder().with_extension("leases");
    until("removal of the leases", || {
        let mut names =
            std::fs::read_dir(&leases).unwrap().flatten().map(|entry| entry.file_name());
        names.all(|name| name == ".removing").then_some(())
    });
}

pub fn what_has_no_limit() {
    let memory = "memory-backend-memfd,id=m,size=64M,share=on";
    let refused = |machine: &Machine| {
        PagerProcess::start_evicting(machine, "attach", "", Some(LIMIT)).refused()
    };
    let plugged = "memory-backend-memfd,id=plugged,size=64M,share=on";
    let device = "virtio-mem-pci,memdev=plugged,requested-size=0";
    let arguments = ["-m", "64M,maxmem=256M", "-object", plugged, "-device", device];
    let mut machine = Machine::with(&[], memory, &arguments);
    let text = refused(&machine);
    assert!(text.contains("virtio-mem"), "{text}");
    machine.check();
    // A disk of QEMU's own that is read directly.
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("disk");
    File::create(&path).unwrap().set_len(MIB).unwrap();
    let direct = |cache: &str| {
        let drive = format!("file={},format=raw,if=virtio,{cache}", path.display());
        Machine::with(&[], memory, &["-drive", &drive])
    };
    let mut machine = direct("cache=none");
    let text = refused(&machine);
    assert!(text.contains("directly into its guest's memory"), "{text}");
    machine.check();
    assert_eq!(machine.registered(), 0);
    drop(machine);
    let mut machine = direct("cache=writeback");
    let mut pager = PagerProcess::start_evicting(&machine, "attach", "", Some(64 * MIB));
    pager.attached();
    machine.check();
    pager.detach();
}
