//! A process is its own VMM: one mapping is the guest's, another the pager's, a third the daemon's.
//! The pager dies after each step, and the next one goes on.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use fathom_guest_memory::{GuestLeases, GuestMemory, Mapping, Purpose};
use tempfile::TempDir;

use super::*;
use crate::faults::{Served, serve_missing, serve_protected};
use crate::test_guest::{TestGuest, tables_in};

const PAGES: u64 = 48;
const EVICTION: [Step; 4] = [Step::Left, Step::Protected, Step::Entered, Step::Evicted];
const RETURN: [Step; 4] = [Step::Coming, Step::Copied, Step::Unentered, Step::Arrived];

struct Scene {
    leases: TempDir,
    folder: TempDir,
    file: File,
    /// The guest's own mapping.
    guest: Arc<Mapping>,
    faults: UserFault,
    memory: Vec<MappedMemory>,
    vmm: Vmm,
    away: AwayPages,
    start: u64,
}

/// Content that depends on a seed. Some seeds make pages of one number.
fn content(seed: u64) -> Page {
    let mut page = [0; PAGE as usize];
    match seed % 5 {
        0 => page.fill((seed / 5) as u8),
        _ => fastrand::Rng::with_seed(seed).fill(&mut page[..1500]),
    }
    page
}

impl Scene {
    /// A guest whose pages have the contents of their numbers. `None` without the rights for it.
    fn start() -> Option<Self> {
        Self::start_with(false)
    }

    /// The same, with a swap file to which all contents go.
    fn start_with(has_swap: bool) -> Option<Self> {
        let TestGuest { file, guest, faults, memory, .. } =
            TestGuest::start(PAGES, |page| content(page).to_vec())?;
        let start = memory[0].start;
        let (leases, folder) =
            (tempfile::tempdir().unwrap(), tempfile::tempdir_in("/dev/shm").unwrap());
        let vmm = Vmm::open(std::process::id() as i32).unwrap();
        let swap =
            SwapOptions { folder: leases.path().join("swap"), bytes_max: None, memory_max: 0 };
        let store = folder.path().join("store");
        let away = AwayPages::create(
            &vmm,
            &memory,
            &leases.path().join("tables"),
            &store,
            has_swap.then_some(&swap),
        );
        let away = match away {
            Ok(away) => away,
            Err(failure) if has_swap => {
                println!("Skipped: {failure:#}");
                return None;
            }
            Err(failure) => panic!("{failure:#}"),
        };
        let mut away = away;
        away.set_spilling(true);
        let scene = Self { leases, folder, file, guest, faults, memory, vmm, away, start };
        Some(scene)
    }

    fn tables(&self) -> PathBuf {
        self.leases.path().join("tables")
    }

    /// Waits until all contents are in the swap file.
    fn settle(&mut self) {
        let begun = Instant::now();
        while self.away.store().bytes() > 0 {
            self.away.progress(&self.faults);
            assert!(
                begun.elapsed() < Duration::from_secs(20),
                "{}",
                self.away.store().swap_obstacle()
            );
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// Brings a page in, and waits for it.
    fn bring_now(&mut self, page: u64) {
        let begun = Instant::now();
        while self.bring(page) == Brought::Reading {
            self.away.progress(&self.faults);
            assert!(begun.elapsed() < Duration::from_secs(20));
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    fn evict(&mut self, page: u64) -> Evicted {
        let address = self.start + page * PAGE;
        let mut found = Vec::new();
        let own = address..address + PAGE;
        let each = &mut |page, outcome| found.push((page, outcome));
        self.away.evict(0, own, &self.faults, &self.file, each);
        assert_eq!((found.len(), found[0].0), (1, 0));
        found[0].1
    }

    fn bring(&mut self, page: u64) -> Brought {
        self.away.bring(self.start + page * PAGE, &self.faults)
    }

    fn exists(&self, page: u64) -> bool {
        let data = rustix::fs::seek(&self.file, rustix::fs::SeekFrom::Data(page * PAGE));
        data.is_ok_and(|found| found == page * PAGE)
    }

    /// Serves faults until a thread of the guest has done something.
    fn guest<R: Send + 'static>(&mut self, work: impl FnOnce(&Mapping) -> R + Send + 'static) -> R {
        let guest = Arc::clone(&self.guest);
        let thread = std::thread::spawn(move || work(&guest));
        while !thread.is_finished() {
            let Self { faults, memory, away, .. } = self;
            away.progress(faults);
            let mut found = Vec::new();
            faults.faults(|fault| found.push(fault)).unwrap();
            for fault in found {
                if fault.is_protection {
                    serve_protected(faults, Some(away), fault.address);
                } else {
                    let served = serve_missing(faults, memory, Some(away), fault.address);
                    assert!(!matches!(served, Served::Stray | Served::Released), "{served:?}");
                }
            }
        }
        thread.join().unwrap()
    }

    fn guest_reads(&mut self, page: u64) -> Page {
        self.guest(move |guest| {
            let mut target = [0; PAGE as usize];
            guest.access().read((page * PAGE) as usize, &mut target);
            target
        })
    }

    fn guest_writes(&mut self, page: u64, seed: u64) {
        self.guest(move |guest| guest.access().write((page * PAGE) as usize, &content(seed)));
    }

    /// The pager has died, and the next one comes.
    fn succeed(&mut self) {
        let path = self.away.store().path().to_owned();
        let swap = self.away.store().swap_path().map(Path::to_owned);
        let (vmm, memory, leases) = (&self.vmm, &self.memory, &self.tables());
        self.away = AwayPages::open(vmm, memory, leases, &path, swap.as_deref()).unwrap();
        self.away.recover();
        self.away.set_spilling(true);
        self.away.listen().unwrap();
        self.faults.wake(&self.memory[0].range()).unwrap();
    }

    /// Does something, and dies after a step. Returns whether the step came.
    fn die(&mut self, step: Step, work: impl FnOnce(&mut Self)) -> bool {
        self.away.dies_after = Some(step);
        let died = catch_unwind(AssertUnwindSafe(|| work(self))).is_err();
        self.away.dies_after = None;
        self.succeed();
        died
    }

    /// Has all pages come in.
    fn bring_all(&mut self) {
        let begun = Instant::now();
        while !self.away.is_complete() {
            self.away.bring_some(&self.faults, Duration::from_millis(1));
            self.away.progress(&self.faults);
            assert!(begun.elapsed() < Duration::from_secs(20));
        }
    }

    /// The daemon's memory, with leases, in mappings of its own.
    fn daemon(&self) -> GuestMemory {
        let mut plain = GuestMemory::default();
        let file = self.file.try_clone().unwrap();
        plain.add(0, PAGES * PAGE, file, 0, &Arc::default()).unwrap();
        let (memory, leases) =
            GuestLeases::renew(&self.tables(), &plain, None).unwrap().expect("a table");
        drop(plain);
        assert_eq!(leases.obstacle(), None);
        memory
    }
}

#[test]
fn a_page_leaves_the_memory_and_comes_back_as_it_was() {
    let Some(mut scene) = Scene::start() else { return };
    for page in 0..PAGES {
        assert_eq!(scene.evict(page), Evicted::Gone);
        assert!(!scene.exists(page), "page {page} is still there");
    }
    assert_eq!(scene.away.count(), PAGES);
    assert!(scene.away.store().bytes() > 0);
    for page in 0..PAGES {
        match page % 3 {
            0 => assert_eq!(scene.guest_reads(page), content(page)),
            1 => scene.guest_writes(page, 1000 + page),
            _ => assert_eq!(scene.bring(page), Brought::Here),
        }
        assert_eq!(scene.bring(page), Brought::NotAway);
        let seed = if page % 3 == 1 { 1000 + page } else { page };
        assert_eq!(scene.guest_reads(page), content(seed), "page {page}");
        // It can be written to at once.
        scene.guest_writes(page, 2000 + page);
    }
    assert_eq!((scene.away.count(), scene.away.store().bytes()), (0, 0));
    let Scene { away, leases, folder, .. } = scene;
    away.end(true);
    assert_eq!(tables_in(&leases.path().join("tables")), 0);
    assert_eq!(std::fs::read_dir(folder.path().join("store")).unwrap().count(), 0);
}

#[test]
fn a_pager_dies_after_each_step_and_no_byte_is_lost() {
    let Some(mut scene) = Scene::start() else { return };
    let mut seed = 100;
    for page in 0..PAGES {
        for step in EVICTION {
            assert!(
                scene.die(step, |scene| {
                    scene.evict(page);
                }),
                "{step:?} did not come"
            );
            assert_eq!(scene.away.count(), u64::from(step == Step::Evicted), "{step:?}");
            let now = scene.guest_reads(page);
            assert!(now == content(seed) || now == content(page), "page {page}, {step:?}");
            seed += 1;
            scene.guest_writes(page, seed);
            assert_eq!(scene.guest_reads(page), content(seed), "page {page}, {step:?}");
        }
        for step in RETURN {
            assert_eq!(scene.evict(page), Evicted::Gone);
            assert!(
                scene.die(step, |scene| {
                    scene.bring(page);
                }),
                "{step:?} did not come"
            );
            // What comes next may die, too.
            let _ = scene.die(step, |scene| {
                scene.bring(page);
            });
            assert_eq!(scene.guest_reads(page), content(seed), "page {page}, {step:?}");
            seed += 1;
            scene.guest_writes(page, seed);
            assert_eq!(scene.guest_reads(page), content(seed), "page {page}, {step:?}");
            assert_eq!((scene.away.count(), scene.away.store().entries()), (0, (0, 0)));
        }
    }
}

#[test]
fn a_page_with_a_lease_stays_and_the_daemon_waits_for_one_that_is_away() {
    let Some(mut scene) = Scene::start() else { return };
    let daemon = scene.daemon();
    let lease = daemon.access(3 * PAGE + 100, 8, Purpose::Read).unwrap();
    assert_eq!(scene.evict(3), Evicted::Leased);
    drop(lease);
    assert_eq!(scene.evict(3), Evicted::Gone);
    assert_eq!(scene.evict(4), Evicted::Gone);
    assert!(daemon.access(3 * PAGE, 8, Purpose::Look).is_none(), "a look brings nothing in");
    scene.away.serve_wanted(&scene.faults);
    assert_eq!(scene.away.count(), 2);
    // A request over both: refused, and the pager knows.
    assert!(daemon.access(3 * PAGE + 4000, 200, Purpose::Write).is_none());
    let mut polled =
        [rustix::event::PollFd::new(&scene.away.wanted()[0], rustix::event::PollFlags::IN)];
    assert_eq!(rustix::event::poll(&mut polled, None).unwrap(), 1);
    scene.away.serve_wanted(&scene.faults);
    assert_eq!((scene.away.count(), scene.away.counts().wanted), (0, 2));
    daemon.access(3 * PAGE + 4000, 200, Purpose::Write).unwrap().write(0, &[7; 200]);
    let mut expected = content(3);
    expected[4000..].fill(7);
    assert_eq!(scene.guest_reads(3), expected);
}

/// A device that is going to write a whole page gets one of zeroes, also when the pager dies
/// meanwhile; the next time the page has its content.
#[test]
fn a_page_that_a_device_overwrites_comes_without_its_content() {
    let Some(mut scene) = Scene::start() else { return };
    let daemon = scene.daemon();
    let fill = |purpose| {
        let access = daemon.access(3 * PAGE, 2 * PAGE - 8, purpose);
        access.map(|access| access.write(0, &[7; 2 * PAGE as usize - 8]))
    };
    for step in [None].into_iter().chain(RETURN.map(Some)) {
        for page in [3, 4] {
            scene.guest_writes(page, 71);
            assert_eq!(scene.evict(page), Evicted::Gone);
        }
        assert!(fill(Purpose::Overwrite).is_none());
        let before = scene.away.counts().overwritten;
        if step.is_none() {
            scene.away.serve_wanted(&scene.faults);
            assert_eq!(scene.away.counts().overwritten, before + 1);
            assert_eq!(scene.away.count(), 0);
        } else if let Some(step) = step {
            assert!(scene.die(step, |scene| {
                scene.bring(3);
            }));
        }
        assert_eq!(scene.guest_reads(3), [0; PAGE as usize], "{step:?}");
        // Not all of this one is written.
        assert_eq!(scene.guest_reads(4), content(71), "{step:?}");
        if fill(Purpose::Overwrite).is_none() {
            // It exists, and a dead pager has not said so.
            scene.away.serve_wanted(&scene.faults);
            assert!(fill(Purpose::Overwrite).is_some(), "{step:?}");
        }
        assert_eq!(scene.guest_reads(3), [7; PAGE as usize]);
        // It has to come with its content again.
        assert_eq!(scene.evict(3), Evicted::Gone);
        assert_eq!(scene.guest_reads(3), [7; PAGE as usize]);
    }
}

#[test]
fn zeroes_come_only_where_nothing_is_away_and_what_the_vmm_gives_back_is_free() {
    let Some(mut scene) = Scene::start() else { return };
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    // In one run: a page that is away between pages that QEMU has given back.
    for page in [16, 18, 20] {
        assert_eq!(scene.evict(page), Evicted::Gone);
    }
    for page in [15, 17, 19, 21] {
        fallocate(&scene.file, flags, page * PAGE, PAGE).unwrap();
    }
    assert_eq!(scene.guest_reads(17), [0; PAGE as usize]);
    assert!(!scene.exists(16) && !scene.exists(18), "zeroes for a page that is away");
    for page in [16, 18, 20] {
        assert_eq!(scene.guest_reads(page), content(page));
    }
    assert_eq!(scene.guest_reads(19), [0; PAGE as usize]);
    // A page that is missing and leaves is zeroes.
    fallocate(&scene.file, flags, 30 * PAGE, PAGE).unwrap();
    assert_eq!(scene.evict(30), Evicted::Gone);
    assert_eq!(scene.guest_reads(30), [0; PAGE as usize]);
    // One that does not become smaller stays, and can be written to.
    let mut noise = [0; PAGE as usize];
    fastrand::Rng::with_seed(3).fill(&mut noise);
    scene.guest(move |guest| guest.access().write(31 * PAGE as usize, &noise));
    assert_eq!(scene.evict(31), Evicted::Incompressible);
    assert!(scene.exists(31));
    assert_eq!(scene.guest_reads(31), noise);
    scene.guest_writes(31, 5);
    assert_eq!(scene.guest_reads(31), content(5));
}

#[test]
fn all_pages_come_in_also_without_the_mapping_of_some() {
    let Some(mut scene) = Scene::start() else { return };
    for page in 0..PAGES {
        assert_eq!(scene.evict(page), Evicted::Gone);
    }
    let time = Duration::from_secs(60);
    assert!(scene.away.bring_some(&scene.faults, time));
    assert!(scene.away.is_complete() && scene.away.bring_some(&scene.faults, time));
    for page in 0..PAGES {
        assert!(scene.exists(page));
        assert_eq!(scene.guest_reads(page), content(page));
        assert_eq!(scene.evict(page), Evicted::Gone);
    }
    scene.away.retain(|_| true);
    assert_eq!(scene.away.count(), PAGES);
    // Its memory was unplugged.
    scene.away.retain(|_| false);
    assert_eq!((scene.away.count(), scene.away.store().bytes()), (0, 0));
    assert!(scene.away.is_complete());
}

#[test]
fn a_damaged_page_is_an_error_and_never_another_content() {
    let Some(mut scene) = Scene::start() else { return };
    assert_eq!(scene.evict(7), Evicted::Gone);
    assert_eq!(scene.evict(8), Evicted::Gone);
    // Whatever has a content is overwritten.
    let store = File::options().read(true).write(true).open(scene.away.store().path()).unwrap();
    let length = store.metadata().unwrap().len();
    let data = rustix::fs::seek(&store, rustix::fs::SeekFrom::Data(64 << 10)).unwrap();
    store.write_all_at(&[0x5a; 600], data).unwrap();
    assert_eq!(length, store.metadata().unwrap().len());
    let outcomes = [scene.bring(7), scene.bring(8)];
    assert!(outcomes.contains(&Brought::Damaged), "{outcomes:?}");
    let damaged = outcomes.iter().filter(|outcome| **outcome == Brought::Damaged).count() as u64;
    assert_eq!((scene.away.damaged(), scene.away.count()), (damaged, damaged));
    assert!(scene.away.is_complete() && !scene.exists(7));
    // Twice is once, and the daemon does not get it either.
    assert_eq!(scene.bring(7), Brought::Damaged);
    assert_eq!(scene.away.damaged(), damaged);
    assert!(scene.daemon().access(7 * PAGE, 8, Purpose::Read).is_none());
    scene.succeed();
    assert_eq!(scene.bring(7), Brought::Damaged);
    // A page without an entry is damaged, too, and not zeroes.
    assert_eq!(scene.evict(9), Evicted::Gone);
    let index = 4096 + 9 * 8;
    store.write_all_at(&[0; 8], index).unwrap();
    assert_eq!(scene.bring(9), Brought::Damaged);
    assert_eq!(scene.bring(9), Brought::Damaged, "a second time");
    // What is overwritten is whole again.
    let daemon = scene.daemon();
    assert!(daemon.access(9 * PAGE, PAGE, Purpose::Overwrite).is_none());
    assert_eq!(scene.bring(9), Brought::Here);
    daemon.access(9 * PAGE, PAGE, Purpose::Overwrite).unwrap().write(0, &content(9));
    assert_eq!(scene.guest_reads(9), content(9));
}

#[test]
fn pages_leave_together_but_for_those_that_stay() {
    let Some(mut scene) = Scene::start() else { return };
    let daemon = scene.daemon();
    let lease = daemon.access(10 * PAGE, 8, Purpose::Read).unwrap();
    let mut noise = [0; PAGE as usize];
    fastrand::Rng::with_seed(3).fill(&mut noise);
    scene.guest(move |guest| guest.access().write(13 * PAGE as usize, &noise));
    let mut found = Vec::new();
    let all = scene.start + 8 * PAGE..scene.start + 40 * PAGE;
    let each = &mut |page, outcome| found.push((page, outcome));
    scene.away.evict(0, all, &scene.faults, &scene.file, each);
    let outcome = |page| match page {
        2 => Evicted::Leased,
        5 => Evicted::Incompressible,
        _ => Evicted::Gone,
    };
    let expected: Vec<_> = (0..EVICTED_AT_ONCE as u64).map(|page| (page, outcome(page))).collect();
    assert_eq!(found, expected);
    drop(lease);
    for page in 8..8 + EVICTED_AT_ONCE as u64 {
        assert_eq!(scene.exists(page), matches!(page, 10 | 13), "page {page}");
        // Those that stayed can be written to.
        let expected = if page == 13 { noise } else { content(page) };
        assert_eq!(scene.guest_reads(page), expected);
        scene.guest_writes(page, 500 + page);
        assert_eq!(scene.guest_reads(page), content(500 + page));
    }
    assert!(scene.exists(8 + EVICTED_AT_ONCE as u64));
}

#[test]
fn pages_whose_words_are_false_are_not_waited_for_and_the_others_come() {
    let Some(mut scene) = Scene::start() else { return };
    for page in 0..8 {
        assert_eq!(scene.evict(page), Evicted::Gone);
    }
    // A daemon that means harm says that two of them are there, and that one is away that is not.
    let table = scene.away.tables()[0].table();
    for page in [2, 5] {
        table.change(page, |_| Some(PageWord(0))).unwrap();
    }
    table.change(20, |_| PageWord(0).leave()?.evict()).unwrap();
    let time = Duration::from_secs(10);
    // The first round may have begun anywhere.
    for _ in 0..3 {
        scene.away.bring_some(&scene.faults, time);
    }
    assert!(scene.away.is_complete(), "{} are away", scene.away.count());
    for page in [0, 1, 3, 4, 6, 7, 20, 30] {
        assert_eq!(scene.guest_reads(page), content(page), "page {page}");
    }
    // An honest daemon's pages are all waited for, wherever the hand is.
    for page in [30, 31, 40] {
        assert_eq!(scene.evict(page), Evicted::Gone);
    }
    scene.away.bring_some(&scene.faults, Duration::ZERO);
    assert_eq!(scene.evict(41), Evicted::Gone);
    for _ in 0..3 {
        scene.away.bring_some(&scene.faults, time);
    }
    assert!(scene.away.is_complete());
    for page in [30, 31, 40, 41] {
        assert!(scene.exists(page), "page {page}");
        assert_eq!(scene.guest_reads(page), content(page), "page {page}");
    }
}

/// With a swap file: a content is in memory, on its way to the file, in it, or on its way back when
/// the pager dies, and the next one finds it.
#[test]
fn pages_come_back_from_a_swap_file_also_after_each_death() {
    let Some(mut scene) = Scene::start_with(true) else { return };
    let mut seed = 100;
    for page in 0..PAGES {
        for (count, step) in EVICTION.into_iter().chain(RETURN).enumerate() {
            let is_leaving = count < EVICTION.len();
            if is_leaving {
                let evict = |scene: &mut Scene| {
                    scene.evict(page);
                };
                assert!(scene.die(step, evict), "{step:?} did not come");
            } else {
                assert_eq!(scene.evict(page), Evicted::Gone);
                match page % 3 {
                    // It is in the file.
                    0 => scene.settle(),
                    // It may be on its way.
                    1 => drop(scene.away.progress(&scene.faults)),
                    _ => {}
                }
                assert!(scene.die(step, |scene| scene.bring_now(page)), "{step:?} did not come");
                let _ = scene.die(step, |scene| scene.bring_now(page));
            }
            let now = scene.guest_reads(page);
            assert!(now == content(seed) || is_leaving && now == content(page), "{page}, {step:?}");
            seed += 1;
            scene.guest_writes(page, seed);
            assert_eq!(scene.guest_reads(page), content(seed), "page {page}, {step:?}");
        }
    }
    scene.bring_all();
    assert_eq!(scene.away.store().swap_bytes(), 0);
}

#[test]
fn all_kinds_of_pages_go_to_the_file_and_come_in_together() {
    let Some(mut scene) = Scene::start_with(true) else { return };
    let mut noise = [0; PAGE as usize];
    fastrand::Rng::with_seed(3).fill(&mut noise);
    scene.guest(move |guest| guest.access().write(31 * PAGE as usize, &noise));
    for page in 0..PAGES {
        assert_eq!(scene.evict(page), Evicted::Gone, "page {page}");
    }
    scene.settle();
    let facts = (0..PAGES).filter(|page| page % 5 == 0).count() as u64;
    assert_eq!(scene.away.store().entries(), (facts, 0));
    assert_eq!(scene.away.store().swap_bytes(), (PAGES - facts) * PAGE);
    // The next pager, and a device that overwrites one of them: it is not read.
    scene.succeed();
    let daemon = scene.daemon();
    assert!(daemon.access(6 * PAGE, PAGE, Purpose::Overwrite).is_none());
    scene.away.serve_wanted(&scene.faults);
    assert_eq!(scene.away.counts().overwritten, 1);
    assert!(daemon.access(6 * PAGE, PAGE, Purpose::Overwrite).is_some());
    // One that it wants, and one that it wants as a whole when it is being read already.
    assert!(daemon.access(7 * PAGE, PAGE, Purpose::Read).is_none());
    scene.away.serve_wanted(&scene.faults);
    assert!(daemon.access(7 * PAGE, PAGE, Purpose::Overwrite).is_none());
    scene.bring_all();
    assert_eq!(scene.away.counts().overwritten, 2);
    let read = scene.away.store().swap_counts().read;
    assert!(read < PAGES - facts, "{read}");
    for page in 0..PAGES {
        let expected = match page {
            6 | 7 => [0; PAGE as usize],
            31 => noise,
            page => content(page),
        };
        assert_eq!(scene.guest_reads(page), expected, "page {page}");
    }
    let Scene { away, leases, .. } = scene;
    away.end(true);
    assert_eq!(std::fs::read_dir(leases.path().join("swap")).unwrap().count(), 0);
}

#[test]
fn a_swap_file_that_is_damaged_cut_off_or_replaced_is_an_error_and_never_another_content() {
    let Some(mut scene) = Scene::start_with(true) else { return };
    for page in [6, 7, 8, 9] {
        assert_eq!(scene.evict(page), Evicted::Gone);
    }
    scene.settle();
    let path = scene.away.store().swap_path().unwrap().to_owned();
    let file = File::options().read(true).write(true).open(&path).unwrap();
    // The slots are those of the pages in the order of their leaving.
    let mut swapped = [0; 2 * PAGE as usize];
    file.read_exact_at(&mut swapped, 0).unwrap();
    assert_eq!(swapped[..PAGE as usize], content(6));
    swapped[100] ^= 1;
    file.write_all_at(&swapped[..PAGE as usize], 0).unwrap();
    file.write_all_at(&swapped[..PAGE as usize], PAGE).unwrap();
    file.sync_all().unwrap();
    for page in [6, 7] {
        scene.bring_now(page);
        assert!(!scene.exists(page) && scene.away.damaged.contains(&page), "page {page}");
    }
    assert_eq!(scene.guest_reads(8), content(8));
    file.set_len(2 * PAGE).unwrap();
    scene.bring_now(9);
    assert!(!scene.exists(9) && scene.away.damaged() == 3);
    assert!(scene.away.is_complete());
    // What leaves now goes to memory, and on to the file.
    assert_eq!(scene.evict(11), Evicted::Gone);
    scene.settle();
    // Another file is not used; what is in memory comes.
    std::fs::rename(&path, path.with_extension("old")).unwrap();
    std::fs::copy(path.with_extension("old"), &path).unwrap();
    scene.succeed();
    assert_eq!(scene.evict(12), Evicted::Gone);
    let begun = Instant::now();
    while scene.away.store().swap_obstacle().is_empty() {
        scene.away.progress(&scene.faults);
        assert!(begun.elapsed() < Duration::from_secs(20));
    }
    let obstacle = scene.away.store().swap_obstacle();
    assert!(obstacle.contains("another file"), "{obstacle}");
    assert_eq!(scene.guest_reads(12), content(12));
    assert_eq!(scene.bring(11), Brought::Reading);
    scene.away.progress(&scene.faults);
    // The right one is there again.
    std::fs::rename(path.with_extension("old"), &path).unwrap();
    assert_eq!(scene.guest_reads(11), content(11));
    assert!(scene.away.store().swap_counts().failed > 0);
}

#[test]
fn a_full_swap_file_loses_nothing_and_is_said() {
    let Some(mut scene) = Scene::start_with(true) else { return };
    let path = scene.away.store().path().to_owned();
    scene.away.end(false);
    let swap = SwapOptions {
        folder: scene.leases.path().join("swap"),
        bytes_max: Some(3 * PAGE + 100),
        memory_max: 0,
    };
    let (vmm, memory, tables) = (&scene.vmm, &scene.memory, scene.leases.path().join("tables"));
    let store = path.parent().unwrap();
    scene.away = AwayPages::create(vmm, memory, &tables, store, Some(&swap)).unwrap();
    scene.away.set_spilling(true);
    for page in 1..5 {
        assert_eq!(scene.evict(page), Evicted::Gone);
    }
    let begun = Instant::now();
    while scene.away.store().swap_obstacle().is_empty() {
        scene.away.progress(&scene.faults);
        assert!(begun.elapsed() < Duration::from_secs(20));
    }
    assert_eq!(scene.away.store().swap_obstacle(), "the swap file is full");
    assert_eq!(scene.away.store().swap_bytes(), 3 * PAGE);
    // What does not become smaller stays now.
    let mut noise = [0; PAGE as usize];
    fastrand::Rng::with_seed(3).fill(&mut noise);
    scene.guest(move |guest| guest.access().write(31 * PAGE as usize, &noise));
    assert_eq!(scene.evict(31), Evicted::Incompressible);
    for page in 1..5 {
        assert_eq!(scene.guest_reads(page), content(page));
    }
}
