//! A process is its own VMM: one mapping is the guest's, another the pager's, a third the daemon's.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use fathom_guest_memory::{GuestLeases, GuestMemory, Mapping, Purpose};
use tempfile::TempDir;

use super::*;
use crate::test_guest::{TestGuest, tables_in};

const PAGES: u64 = 64;

struct Scene {
    folder: TempDir,
    file: File,
    /// The guest's own mapping.
    guest: Arc<Mapping>,
    faults: UserFault,
    tripwires: Vec<Tripwire>,
    memory: Vec<MappedMemory>,
    shadow: Shadow,
    _device: OwnedFd,
}

impl Scene {
    /// A guest whose pages all have content, and a shadow of `budget` pages. `None` without the
    /// rights for it.
    fn start(budget: u64) -> Option<Self> {
        let TestGuest { file, guest, faults, memory, device } =
            TestGuest::start(PAGES, |page| vec![page as u8 + 1; 8])?;
        let tripwire = Tripwire::map(device.as_fd(), file.try_clone().unwrap(), 0, PAGES * PAGE);
        let folder = tempfile::tempdir().unwrap();
        let vmm = Vmm::open(std::process::id() as i32).unwrap();
        let shadow = Shadow::start(&vmm, &faults, &memory, folder.path(), budget * PAGE);
        let shadow = match shadow {
            Ok(shadow) => shadow,
            Err(failure) if rustix::process::geteuid().is_root() => panic!("{failure}"),
            Err(failure) => {
                println!("Skipped: {failure}");
                return None;
            }
        };
        let tripwires = vec![tripwire.unwrap()];
        Some(Self { folder, file, guest, faults, tripwires, memory, shadow, _device: device })
    }

    fn sweep_all(&mut self) {
        for _ in 0..PAGES / BATCH as u64 {
            self.shadow.sweep(&self.faults, &self.tripwires);
        }
    }

    /// The guest writes to a page, and the pager serves its fault.
    fn guest_writes(&mut self, page: u64, value: u8) {
        let guest = Arc::clone(&self.guest);
        let at = (page * PAGE) as usize;
        let writer = std::thread::spawn(move || guest.access().write(at, &[value; 8]));
        while !writer.is_finished() {
            let Self { faults, shadow, tripwires, memory, .. } = self;
            faults
                .faults(|fault| {
                    if fault.is_protection {
                        return shadow.write_fault(fault.address, faults, tripwires);
                    }
                    let address = fault.address & !(PAGE - 1);
                    assert!(memory[0].range().contains(&address));
                    let own = address..address + PAGE;
                    shadow.missing(own.clone(), faults, tripwires);
                    faults.zero(&own).unwrap();
                })
                .unwrap();
        }
        writer.join().unwrap();
        let byte = self.guest.access().u8s()[at].load(Ordering::Relaxed);
        assert_eq!(byte, value);
    }

    /// The daemon's memory, with leases.
    fn daemon(&self) -> GuestMemory {
        let mut memory = GuestMemory::default();
        let file = self.file.try_clone().unwrap();
        memory.add(0, PAGES * PAGE, file, 0, &Arc::default()).unwrap();
        let leases = GuestLeases::find(self.folder.path(), &memory).unwrap();
        memory.with_pager(leases.expect("a table of leases"))
    }

    fn finish(self) -> ShadowCounts {
        let Self { shadow, faults, tripwires, folder, .. } = self;
        let counts = shadow.finish(&faults, &tripwires, true);
        assert_eq!(tables_in(folder.path()), 0, "a table is left");
        counts
    }
}

#[test]
fn what_the_guest_writes_was_equal_to_its_copy() {
    let Some(mut scene) = Scene::start(PAGES) else { return };
    scene.sweep_all();
    let counts = scene.shadow.counts();
    assert_eq!((counts.copies, counts.copied_bytes), (PAGES, PAGES * PAGE), "{counts:?}");
    scene.guest_writes(3, 100);
    scene.guest_writes(3, 101);
    let counts = scene.shadow.counts();
    assert_eq!((counts.write_faults, counts.equal, counts.mismatches), (1, 1, 0), "{counts:?}");
    // What was written to is hot, and is copied again only after some sweeps.
    scene.sweep_all();
    assert_eq!(scene.shadow.counts().copies, PAGES);
    (0..HOT_SWEEPS).for_each(|_| scene.sweep_all());
    assert_eq!(scene.shadow.counts().copies, PAGES + 1);
    let counts = scene.finish();
    assert_eq!((counts.equal, counts.mismatches), (PAGES + 1, 0), "{counts:?}");
}

#[test]
fn a_write_without_a_lease_is_a_mismatch_and_one_with_a_lease_is_not() {
    let Some(mut scene) = Scene::start(PAGES) else { return };
    scene.sweep_all();
    // Somebody of whom the pager does not know.
    scene.file.write_all_at(&[200], 5 * PAGE + 77).unwrap();
    scene.guest_writes(5, 100);
    assert_eq!(scene.shadow.counts().mismatches, 1);
    // The daemon.
    let daemon = scene.daemon();
    daemon.access(6 * PAGE, 512, Purpose::Write).unwrap().write(0, &[200; 512]);
    scene.guest_writes(6, 100);
    let mut bytes = [0; 8];
    daemon.read(7 * PAGE, &mut bytes).unwrap();
    assert_eq!(bytes, [8; 8]);
    scene.guest_writes(7, 100);
    let counts = scene.finish();
    assert_eq!((counts.mismatches, counts.overwritten), (1, 1), "{counts:?}");
    assert_eq!(counts.equal, PAGES - 2);
}

#[test]
fn pages_with_a_lease_are_not_copied() {
    let Some(mut scene) = Scene::start(PAGES) else { return };
    let daemon = scene.daemon();
    let ring = daemon.access(10 * PAGE + 100, PAGE, Purpose::Read).unwrap();
    scene.sweep_all();
    let counts = scene.shadow.counts();
    assert_eq!((counts.copies, counts.leased), (PAGES - 2, 2), "{counts:?}");
    drop(ring);
    scene.sweep_all();
    assert_eq!(scene.shadow.counts().copies, PAGES);
    // A read of a copied page leaves its copy valid, and one for writing does not.
    let reads = daemon.access(20 * PAGE, 8, Purpose::Read).unwrap();
    let writes = daemon.access(21 * PAGE, 8, Purpose::Write).unwrap();
    let start = scene.memory[0].start;
    let word = |scene: &Scene, page| scene.shadow.word(0, start + page * PAGE).0.word(page);
    assert!(word(&scene, 20).is_copied() && word(&scene, 20).is_leased());
    assert!(!word(&scene, 21).is_copied() && word(&scene, 21).is_leased());
    drop((reads, writes));
    assert!(!word(&scene, 21).is_leased());
    // The invalid copy is dropped, and the page copied anew.
    scene.sweep_all();
    assert_eq!(scene.shadow.counts().overwritten, 1);
    scene.sweep_all();
    let counts = scene.shadow.counts();
    assert_eq!((counts.copies, counts.mismatches), (PAGES + 1, 0), "{counts:?}");
    assert!(word(&scene, 21).is_copied());
}

#[test]
fn a_budget_is_kept_and_turns_over_only_while_the_guest_writes() {
    let Some(mut scene) = Scene::start(8) else { return };
    (0..4).for_each(|_| scene.sweep_all());
    assert_eq!(scene.shadow.counts().copies, 8);
    assert!(!scene.shadow.is_busy());
    scene.guest_writes(2, 50);
    (0..2).for_each(|_| scene.sweep_all());
    let counts = scene.shadow.counts();
    assert!(counts.copied_bytes <= 8 * PAGE, "{counts:?}");
    assert!(counts.copies > 8 && counts.copies <= 10, "{counts:?}");
    assert_eq!((counts.mismatches, counts.write_faults), (0, 1));
}

#[test]
fn a_page_that_the_vmm_punches_is_no_mismatch() {
    let Some(mut scene) = Scene::start(PAGES) else { return };
    scene.sweep_all();
    let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&scene.file, flags, 9 * PAGE, 2 * PAGE).unwrap();
    scene.guest_writes(9, 100);
    scene.guest_writes(9, 101);
    let counts = scene.finish();
    assert_eq!((counts.mismatches, counts.vanished), (0, 2), "{counts:?}");
}

#[test]
fn a_holder_without_leases_suspends_it() {
    let Some(mut scene) = Scene::start(PAGES) else { return };
    let process = std::process::id() as i32;
    let own = DaemonProcess { process, user: rustix::process::geteuid().as_raw() };
    let reason = scene.shadow.check_holders(&[own]).unwrap_err();
    assert!(reason.contains("takes no leases"), "{reason}");
    scene.sweep_all();
    scene.shadow.suspend(&scene.faults, &reason);
    let counts = scene.shadow.counts();
    assert_eq!((counts.copied_bytes, counts.suspended.as_str()), (0, reason.as_str()));
    assert!(!scene.shadow.is_busy());
    // Nothing is protected any more: no fault.
    scene.guest.access().write(0, &[1]);
    let mut memory = GuestMemory::default();
    let file = scene.file.try_clone().unwrap();
    memory.add(0, PAGES * PAGE, file, 0, &Arc::default()).unwrap();
    let leases = GuestLeases::find(scene.folder.path(), &memory).unwrap().unwrap();
    scene.shadow.check_holders(&[own]).expect_err("it takes leases, but not for all accesses");
    leases.set_ready();
    scene.shadow.check_holders(&[own]).unwrap();
    scene.shadow.suspend(&scene.faults, "");
    scene.sweep_all();
    assert!(scene.shadow.counts().copied_bytes > 0);
    drop(leases);
    scene.shadow.check_holders(&[own]).expect_err("the holder has gone");
}
