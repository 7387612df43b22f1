//! Pages that are away, and pages that are missing by right, in mappings that are registered.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use rustix::fs::{FallocateFlags, MemfdFlags, SeekFrom, fallocate, seek};
use tempfile::TempDir;

use super::*;
use crate::{Buffers, GuestAddress, GuestMemory, MemoryOwner, Purpose, absences, faults};

const PAGE: u64 = 4096;
const PAGES: u64 = 16;
const OWNER: TableOwner = TableOwner { process: 1, start_ticks: 1, namespace: 1 };
const BASE: u64 = 0x10_0000;

struct Scene {
    folder: TempDir,
    file: File,
    owner: Arc<MemoryOwner>,
    pager: PagerLeases,
}

impl Scene {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = File::from(rustix::fs::memfd_create("absent", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(PAGES * PAGE).unwrap();
        let identity = MemoryFile::of(&file).unwrap();
        let pager = PagerLeases::start(folder.path(), identity, PAGES, OWNER).unwrap();
        Self { folder, file, owner: Arc::default(), pager }
    }

    fn plain(&self) -> GuestMemory {
        let mut memory = GuestMemory::default();
        let file = self.file.try_clone().unwrap();
        memory.add(BASE, PAGES * PAGE, file, 0, &self.owner).unwrap();
        memory
    }

    fn leased(&self) -> (GuestMemory, Arc<GuestLeases>) {
        let renewed = GuestLeases::renew(self.folder.path(), &self.plain(), None).unwrap();
        renewed.expect("a table")
    }

    /// Takes a page away, as a pager does.
    fn evict(&self, page: u64) -> [u8; 4096] {
        let mut content = [0; 4096];
        self.file.read_exact_at(&mut content, page * PAGE).unwrap();
        self.pager.table().change(page, PageWord::leave).unwrap();
        self.pager.table().change(page, PageWord::evict).unwrap();
        self.punch(page);
        content
    }

    fn punch(&self, page: u64) {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&self.file, flags, page * PAGE, PAGE).unwrap();
    }

    fn bring(&self, page: u64, content: &[u8]) {
        self.pager.table().change(page, PageWord::come).unwrap();
        self.file.write_all_at(content, page * PAGE).unwrap();
        self.pager.table().change(page, PageWord::arrive).unwrap();
    }

    fn is_missing(&self, page: u64) -> bool {
        seek(&self.file, SeekFrom::Hole(page * PAGE)).unwrap() == page * PAGE
    }
}

fn lend(memory: &GuestMemory, address: u64, length: u64, purpose: Purpose) -> Option<Buffers> {
    let mut buffers = Buffers::default();
    // SAFETY: the callers keep the memory.
    let is_lent = unsafe { memory.lend(&mut buffers, GuestAddress(address), length, purpose) };
    is_lent.then_some(buffers)
}

/// Has the kernel read the buffers.
fn write_to(socket: &UnixStream, buffers: &Buffers) -> io::Result<usize> {
    let segments = buffers.segments();
    // SAFETY: the kernel only reads the segments, and reports those that it cannot read.
    let written = unsafe {
        libc::writev(socket.as_raw_fd(), segments.as_ptr(), segments.len() as libc::c_int)
    };
    if written < 0 { Err(io::Error::last_os_error()) } else { Ok(written as usize) }
}

#[test]
fn a_touch_without_a_lease_of_a_page_that_is_away_is_an_error_and_never_zeroes() {
    let scene = Scene::start();
    let (memory, leases) = scene.leased();
    assert_eq!(leases.obstacle(), None);
    let write = memory.access(BASE + 2 * PAGE, PAGE, Purpose::Write).unwrap();
    write.write(0, &[7; 4096]);
    drop(write);
    let buffers = lend(&memory, BASE + 2 * PAGE, PAGE, Purpose::Read).unwrap();
    let segments = buffers.segments().to_vec();
    drop(buffers);
    let content = scene.evict(2);
    assert_eq!(content, [7; 4096]);
    // Somebody forgets to take a lease: first a system call, then the processor.
    let mut forgotten = Buffers::default();
    // SAFETY: the memory is mapped.
    unsafe { forgotten.push(segments[0].iov_base.cast(), PAGE as usize, None) };
    let (_read, socket) = UnixStream::pair().unwrap();
    let error = write_to(&socket, &forgotten).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
    assert!(scene.is_missing(2) && !scene.owner.is_lost());
    let before = faults();
    let touched = memory.regions()[0].map.access().bytes::<8>(2 * PAGE as usize + 8);
    assert_eq!((touched, faults() - before), ([0; 8], 1));
    assert!(scene.owner.is_lost(), "the guest's owner is told");
    assert!(scene.is_missing(2), "the guest would read zeroes");
    assert_eq!(scene.pager.table().word(2).state(), PageState::Evicted);
    scene.bring(2, &content);
}

/// Zeroes are enough for a page of which every byte is going to be written, if it is away.
#[test]
fn only_whole_pages_that_are_away_are_asked_for_to_be_overwritten() {
    let scene = Scene::start();
    let (memory, _leases) = scene.leased();
    scene.file.write_all_at(&vec![9; 8 * 4096], 0).unwrap();
    for page in [1, 2, 4, 5] {
        scene.evict(page);
    }
    let words = || (0..8).map(|page| scene.pager.table().word(page)).collect::<Vec<_>>();
    let are = |which: fn(PageWord) -> bool| {
        (0..8).zip(words()).filter(|(_, word)| which(*word)).map(|(page, _)| page).collect()
    };
    // From the middle of page 1 to the middle of page 5.
    let (start, length) = (BASE + PAGE + 512, 4 * PAGE);
    assert!(lend(&memory, start, length, Purpose::Write).is_none());
    let wanted: Vec<u64> = are(PageWord::is_wanted);
    assert_eq!(wanted, [1, 2, 4, 5]);
    let overwritten: Vec<u64> = are(PageWord::is_overwritten);
    assert_eq!(overwritten, []);
    assert!(lend(&memory, start, length, Purpose::Overwrite).is_none());
    let overwritten: Vec<u64> = are(PageWord::is_overwritten);
    assert_eq!(overwritten, [2, 4]);
    // A look brings nothing in, and a range without a page that is away asks for nothing.
    memory.want(GuestAddress(BASE + 6 * PAGE), 100 * PAGE, Purpose::Overwrite);
    memory.want(GuestAddress(0), u64::MAX, Purpose::Overwrite);
    let overwritten: Vec<u64> = are(PageWord::is_overwritten);
    assert_eq!(overwritten, [1, 2, 4, 5]);
    for page in [1, 2, 4, 5] {
        scene.bring(page, &[0; 4096]);
    }
    let lent = lend(&memory, start, length, Purpose::Overwrite).unwrap();
    let leased: Vec<u64> = are(PageWord::is_leased);
    assert_eq!(leased, [1, 2, 3, 4, 5]);
    drop(lent);
    assert!(words().iter().all(|word| *word == PageWord(0)));
    // Memory that is only read cannot be overwritten.
    assert!(memory.read_only().access(start, length, Purpose::Overwrite).is_none());
}

#[test]
fn an_access_to_a_page_that_is_away_is_refused_and_counted_until_it_is_back() {
    let scene = Scene::start();
    let (memory, _leases) = scene.leased();
    scene.file.write_all_at(&[9; 3 * 4096], 3 * PAGE).unwrap();
    let contents = [4, 5].map(|page| scene.evict(page));
    let before = absences();
    assert!(lend(&memory, BASE + 3 * PAGE, 3 * PAGE, Purpose::Write).is_none());
    assert_eq!(absences() - before, 1);
    let words = [3, 4, 5].map(|page| scene.pager.table().word(page));
    assert_eq!(words.map(PageWord::is_wanted), [false, true, true], "all that is away is wanted");
    assert!(words.iter().all(|word| !word.is_leased()));
    // A look asks for nothing, and neither does what is no memory.
    assert_eq!(memory.u64(BASE + 4 * PAGE), None);
    assert!(memory.access(BASE + PAGES * PAGE, 8, Purpose::Read).is_none());
    assert_eq!(absences() - before, 1);
    scene.bring(4, &contents[0]);
    scene.bring(5, &contents[1]);
    let buffers = lend(&memory, BASE + 3 * PAGE, 3 * PAGE, Purpose::Write).unwrap();
    let mut bytes = [0; 3 * 4096];
    assert_eq!(buffers.copy_to(0, &mut bytes), bytes.len());
    assert_eq!(bytes, [9; 3 * 4096]);
    assert!(!scene.owner.is_lost());
}

#[test]
fn pages_that_are_missing_by_right_are_zeroes_for_the_processor_and_for_the_kernel() {
    let scene = Scene::start();
    let (memory, _leases) = scene.leased();
    assert!(scene.is_missing(0));
    // A look, a lent range over pages of both kinds, and a ring.
    assert_eq!(memory.u64(BASE + 8), Some(0));
    assert!(!scene.is_missing(0));
    scene.file.write_all_at(&[3; 4096], 6 * PAGE).unwrap();
    let buffers = lend(&memory, BASE + 5 * PAGE + 100, 3 * PAGE, Purpose::Read).unwrap();
    let (_read, socket) = UnixStream::pair().unwrap();
    assert_eq!(write_to(&socket, &buffers).unwrap() as u64, 3 * PAGE);
    assert!((5..9).all(|page| !scene.is_missing(page)) && scene.is_missing(9));
    let ring = memory.hold(GuestAddress(BASE + 10 * PAGE), 2 * PAGE, Purpose::Write).unwrap();
    // The VMM gives pages back that are in use.
    for round in 0..3 {
        scene.punch(10);
        scene.punch(11);
        assert_eq!(ring.bytes::<4>(4094), [0; 4]);
        ring.write(4094, &[round + 1; 4]);
        assert_eq!(ring.bytes::<4>(4094), [round + 1; 4]);
    }
    let mut bytes = [0; 4];
    scene.file.read_exact_at(&mut bytes, 11 * PAGE - 2).unwrap();
    assert_eq!(bytes, [3; 4]);
    assert!(!scene.owner.is_lost());
    assert!(scene.pager.table().word(5).is_leased() && !scene.pager.table().word(0).is_leased());
}

#[test]
fn a_page_that_comes_into_being_makes_a_copy_invalid() {
    let scene = Scene::start();
    let (memory, _leases) = scene.leased();
    scene.file.write_all_at(&[5; 4096], 3 * PAGE).unwrap();
    let table = scene.pager.table();
    table.change(3, PageWord::leave).unwrap();
    table.change(3, PageWord::copied).unwrap();
    assert_eq!(memory.u64(BASE + 3 * PAGE), Some(u64::from_ne_bytes([5; 8])));
    assert!(table.word(3).is_copied(), "a look changes nothing");
    scene.punch(3);
    assert_eq!(memory.u64(BASE + 3 * PAGE), Some(0));
    assert_eq!(table.word(3), PageWord(0));
}

#[test]
fn pages_may_leave_only_when_no_access_from_before_the_leases_is_left() {
    let scene = Scene::start();
    let plain = scene.plain();
    let looker = plain.clone();
    let ring = plain.hold(GuestAddress(BASE), 64, Purpose::Write).unwrap();
    let renewed = GuestLeases::renew(scene.folder.path(), &plain, None).unwrap();
    let (memory, leases) = renewed.expect("a table");
    drop(plain);
    let (other_memory, other) = scene.leased();
    let all = [Arc::clone(&leases), Arc::clone(&other)];
    let own = [std::process::id()];
    leases.set_ready();
    let ready = || (scene.pager.holders().unwrap(), scene.pager.holders_for_eviction().unwrap());
    assert_eq!(ready(), (own.to_vec(), vec![]));
    // Introspection, and a ring, of one connection: the other has to wait as well.
    assert!(GuestLeases::set_ready_for_eviction(&all).is_some());
    drop(looker);
    assert!(GuestLeases::set_ready_for_eviction(&all).is_some());
    // Renewing in between does not forget them.
    let renewed = GuestLeases::renew(scene.folder.path(), &memory, Some(&leases)).unwrap();
    assert!(Arc::ptr_eq(&renewed.unwrap().1, &leases));
    assert_eq!(ready(), (own.to_vec(), vec![]));
    drop(ring);
    assert_eq!(GuestLeases::set_ready_for_eviction(&all), None);
    assert_eq!(ready(), (own.to_vec(), own.to_vec()));
    leases.set_ready();
    assert_eq!(ready().1, own.to_vec(), "a further renewal takes nothing back");
    // Memory in a file that cannot be registered has leases, and pages stay.
    drop((memory, other_memory));
    let folder = tempfile::tempdir().unwrap();
    let file = tempfile::tempfile_in("/var/tmp").unwrap();
    file.set_len(PAGE).unwrap();
    if rustix::fs::fstatfs(&file).unwrap().f_type == 0x0102_1994 {
        println!("Skipped in part: /var/tmp is in memory");
        return;
    }
    let identity = MemoryFile::of(&file).unwrap();
    let pager = PagerLeases::start(folder.path(), identity, 1, OWNER).unwrap();
    let mut on_disk = GuestMemory::default();
    on_disk.add(0, PAGE, file, 0, &Arc::default()).unwrap();
    let renewed = GuestLeases::renew(folder.path(), &on_disk, None).unwrap();
    let (on_disk, leases) = renewed.expect("a table");
    let obstacle = GuestLeases::set_ready_for_eviction(&[leases]).unwrap();
    assert!(obstacle.contains("is no error"), "{obstacle}");
    assert!(pager.holders_for_eviction().unwrap().is_empty());
    assert_eq!(on_disk.u64(0), Some(0));
}

#[test]
fn a_memory_whose_pager_has_gone_is_an_ordinary_one() {
    let scene = Scene::start();
    let (memory, _leases) = scene.leased();
    let plain = memory.without_pager().unwrap();
    drop(memory);
    assert_eq!((plain.pager_identity(), plain.regions().len()), (0, 1));
    let buffers = lend(&plain, BASE, 2 * PAGE, Purpose::Read).unwrap();
    let (_read, socket) = UnixStream::pair().unwrap();
    assert_eq!(write_to(&socket, &buffers).unwrap() as u64, 2 * PAGE);
    assert_eq!(plain.u64(BASE + 5 * PAGE), Some(0));
    assert!(!scene.owner.is_lost());
}

#[test]
fn a_lost_table_makes_no_page() {
    let scene = Scene::start();
    let (memory, _leases) = scene.leased();
    let ring = memory.hold(GuestAddress(BASE), 64, Purpose::Write).unwrap();
    let path =
        folder::TableFolder::of(scene.folder.path(), MemoryFile::of(&scene.file).unwrap()).table();
    File::options().write(true).open(path).unwrap().set_len(0).unwrap();
    assert!(scene.is_missing(0));
    assert_eq!(ring.bytes::<8>(0), [0; 8]);
    assert!(scene.is_missing(0) && scene.owner.is_lost());
}

/// A refused access whose page arrives before the holder has asked for it is begun again like any
/// other: it must not be taken for one to no memory.
#[test]
fn a_page_that_arrives_as_it_is_asked_for_was_away() {
    let scene = Scene::start();
    let (memory, _leases) = scene.leased();
    let is_over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let table = scene.pager.table();
            while !is_over.load(std::sync::atomic::Ordering::Relaxed) {
                if table.change(5, PageWord::leave).is_ok()
                    && table.change(5, PageWord::evict).is_ok()
                {
                    table.change(5, PageWord::come).unwrap();
                    table.change(5, PageWord::arrive).unwrap();
                }
            }
        });
        let mut refused = 0;
        for _ in 0..300_000 {
            let before = absences();
            if memory.access(BASE + 5 * PAGE, 8, Purpose::Read).is_none() {
                refused += 1;
                assert!(absences() > before, "refusal {refused} is none of a page that is away");
            }
        }
        is_over.store(true, std::sync::atomic::Ordering::Relaxed);
        println!("{refused} were refused");
    });
    // No memory at all is not away.
    let before = absences();
    assert!(memory.access(BASE + PAGES * PAGE, 8, Purpose::Read).is_none());
    assert_eq!(absences(), before);
}

#[test]
fn no_page_may_leave_while_another_connection_has_no_registered_mappings() {
    let scene = Scene::start();
    let (_memory, leases) = scene.leased();
    let all = [leases];
    let is_ready = || !scene.pager.holders_for_eviction().unwrap_or_default().is_empty();
    // It comes when the others have been found already.
    let other = GuestLeases::find(scene.folder.path(), &scene.plain()).unwrap().unwrap();
    assert!(GuestLeases::set_ready_for_eviction(&all).is_some());
    assert!(!is_ready());
    drop(other);
    assert_eq!(GuestLeases::set_ready_for_eviction(&all), None);
    assert!(is_ready());
    assert!(all[0].is_on(&[MemoryFile::of(&scene.file).unwrap()]) && !all[0].is_on(&[]));
}
