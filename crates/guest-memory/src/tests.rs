//! Bounds, the edges of regions, the lifetime of mappings, and leases.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use super::*;

const PAGE: u64 = 4096;

/// A memory of these regions, each with its bytes.
fn memory(parts: &[(u64, &[u8])]) -> GuestMemory {
    let mut memory = GuestMemory::default();
    for (start, bytes) in parts {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(bytes, 0).unwrap();
        memory.add(*start, bytes.len() as u64, file, 0, &Arc::default()).unwrap();
    }
    memory
}

fn blank_file(length: u64) -> File {
    let file = tempfile::tempfile().unwrap();
    file.set_len(length).unwrap();
    file
}

/// Records leases, and refuses those that contain an address.
#[derive(Default)]
struct Recorder {
    taken: Mutex<Vec<(Range<u64>, Purpose)>>,
    held: Mutex<Vec<(Range<u64>, Purpose)>>,
    absent: Option<u64>,
}

impl Recorder {
    /// The leases since the last call.
    fn taken(&self) -> Vec<(Range<u64>, Purpose)> {
        std::mem::take(&mut self.taken.lock())
    }

    fn held(&self) -> usize {
        self.held.lock().len()
    }
}

impl Pager for Recorder {
    fn lease(&self, range: &Range<u64>, purpose: Purpose) -> bool {
        self.taken.lock().push((range.clone(), purpose));
        let is_granted = self.absent.is_none_or(|absent| !range.contains(&absent));
        if is_granted {
            self.held.lock().push((range.clone(), purpose));
        }
        is_granted
    }

    fn release(&self, range: &Range<u64>, purpose: Purpose) {
        let mut held = self.held.lock();
        let at = held.iter().position(|lease| *lease == (range.clone(), purpose));
        held.remove(at.expect("a lease that was taken"));
    }

    fn identity(&self) -> u64 {
        7
    }
}

/// The same memory without and with a pager: both must give the same answers.
fn both(memory: &GuestMemory) -> [GuestMemory; 2] {
    [memory.clone(), memory.with_pager(Arc::<Recorder>::default())]
}

#[test]
fn looks_stay_within_one_region() {
    let bytes: Vec<u8> = (0..32).collect();
    let all = memory(&[(16, &bytes), (1000, &[7; 10]), (1010, &[8; 8])]);
    for memory in both(&all) {
        assert_eq!((memory.end(), memory.length()), (1018, 50));
        assert_eq!(memory.u64(16), Some(0x0706_0504_0302_0100));
        // At any address, aligned or not.
        for place in 0..=24_u64 {
            let expected: Vec<u8> = (0..8).map(|index| (place + index) as u8).collect();
            assert_eq!(memory.u64(16 + place).unwrap().to_le_bytes(), expected[..]);
            assert_eq!(memory.u32(16 + place).unwrap().to_le_bytes(), expected[..4]);
            assert_eq!(memory.u16(16 + place).unwrap().to_le_bytes(), expected[..2]);
            let mut bytes = [0; 8];
            memory.read(16 + place, &mut bytes).unwrap();
            assert_eq!(bytes, expected[..]);
        }
        let outside = [0, 9, 15, 41, 48, 999, 1003, 1009, 1011, 1018, u64::MAX - 7, u64::MAX];
        for address in outside {
            assert_eq!(memory.u64(address), None, "{address}");
            assert!(memory.access(address, 8, Purpose::Read).is_none(), "{address}");
        }
        assert_eq!((memory.u32(1006), memory.u32(1007)), (Some(0x0707_0707), None));
        assert_eq!((memory.u16(46), memory.u16(47)), (Some(0x1f1e), None));
        let mut bytes = [1; 20];
        assert_eq!(memory.read(1000, &mut bytes), None);
        assert_eq!(bytes, [1; 20], "unchanged");
        assert_eq!(memory.read(1000, &mut []), Some(()));
        assert!(memory.contains(47) && !memory.contains(48) && !memory.contains(u64::MAX));
        for length in [33, u64::MAX - 15, u64::MAX] {
            assert!(memory.access(16, length, Purpose::Write).is_none(), "{length}");
        }
        for address in [16, 1000, 1017] {
            memory.prefetch(address);
        }
    }
}

#[test]
fn windows_are_as_long_as_their_region() {
    let mut all = GuestMemory::default();
    for (start, length) in [(0, PAGE), (PAGE, 2 * PAGE), (1 << 20, PAGE)] {
        all.add(start, length, blank_file(length), 0, &Arc::default()).unwrap();
    }
    for (address, value) in [(PAGE - 8, 1_u64), (PAGE, 2), (3 * PAGE - 8, 3)] {
        all.access(address, 8, Purpose::Write).unwrap().write(0, &value.to_le_bytes());
    }
    for memory in both(&all) {
        let window = memory.window(PAGE - 16);
        assert_eq!([window.u64(0), window.u64(8), window.u64(16)], [Some(0), Some(1), None]);
        assert_eq!([window.u32(8), window.u32(16)], [Some(1), None]);
        // Unaligned offsets, and offsets that would wrap around, have no words.
        let beyond = [1, 3, 7, 9, 12, u64::MAX - 15, u64::MAX - 7, u64::MAX];
        assert!(beyond.iter().all(|offset| window.u64(*offset).is_none()));
        assert!([1, 3, 6, 7, u64::MAX].iter().all(|offset| window.u32(*offset).is_none()));
        let page = memory.window(PAGE).first(PAGE);
        assert_eq!([page.u64(0), page.u64(PAGE - 8), page.u64(PAGE)], [Some(2), Some(0), None]);
        assert_eq!(memory.window(PAGE).first(7).u64(0), None);
        for nowhere in [3 * PAGE, (1 << 20) - 8, (1 << 20) + PAGE, u64::MAX - 7, u64::MAX] {
            assert!([0, 8, 16].iter().all(|offset| memory.window(nowhere).u64(*offset).is_none()));
        }
    }
    let window = all.window(PAGE);
    assert_eq!([window.u64(0), window.u64(2 * PAGE - 8)], [Some(2), Some(3)]);
}

#[test]
fn impossible_regions_are_refused() {
    let mut memory = memory(&[(0x1000, &[0; 4096])]);
    let mut add = |start, length, offset| {
        let file = blank_file(8192);
        memory.add(start, length, file, offset, &Arc::default()).map_err(|error| error.to_string())
    };
    for (start, length, offset, expected) in [
        (0, 0, 0, "is empty"),
        (u64::MAX - 100, 4096, 0, "wraps around"),
        (0, 4097, 0, "overlap"),
        (0x1fff, 4096, 0, "overlap"),
        (0x1000, 4096, 0, "overlap"),
        (0x8000, 8193, 0, "longer than its file"),
        (0x8000, 4096, 4097, "longer than its file"),
        (0x8000, 4096, u64::MAX, "wraps around"),
    ] {
        let error = add(start, length, offset).unwrap_err();
        assert!(error.contains(expected), "{start:#x} {length}: {error}");
    }
    // Up to the end of all addresses.
    add(u64::MAX - 4096, 4096, 4096).unwrap();
    assert_eq!(memory.u64(u64::MAX - 8), Some(0));
    assert_eq!((memory.u64(u64::MAX - 7), memory.window(u64::MAX - 1).u64(0)), (None, None));
}

#[test]
fn only_touched_parts_are_reported() {
    let mut memory = GuestMemory::default();
    for (start, length) in [(0, 64 * PAGE), (1 << 30, 1 << 30)] {
        memory.add(start, length, blank_file(length), 0, &Arc::default()).unwrap();
    }
    let touched = [3 * PAGE, 4 * PAGE, 63 * PAGE, (1 << 30) + 77 * PAGE];
    for address in touched {
        memory.access(address, 1, Purpose::Write).unwrap().write(0, &[1]);
    }
    for memory in [&memory, &memory.reopened()] {
        let [low, high] = memory.regions() else { panic!("two regions") };
        let parts: Vec<_> = low.touched(0).collect();
        assert_eq!(parts, [(3 * PAGE, 5 * PAGE), (63 * PAGE, 64 * PAGE)]);
        let parts: Vec<_> = high.touched(0).collect();
        assert_eq!(parts, [((1 << 30) + 77 * PAGE, (1 << 30) + 78 * PAGE)]);
        assert_eq!(low.touched_from(PAGE), Some(3 * PAGE));
        assert_eq!(high.touched_from((1 << 30) + 78 * PAGE), None);
        // The files hold what the mapping has, and a read of them touches nothing.
        let mut byte = [0];
        low.read_from_file(4 * PAGE, &mut byte).unwrap();
        assert_eq!(byte, [1]);
        low.read_from_file(9 * PAGE, &mut byte).unwrap();
        assert_eq!((byte, low.touched(5 * PAGE).count()), ([0], 1));
        assert!(low.read_from_file(64 * PAGE, &mut byte).is_err());
    }
}

#[test]
fn an_access_copies_and_has_atomic_numbers() {
    let memory = memory(&[(0x1000, &[0; 64]), (0x2000, &[0; 3])]);
    let access = memory.access(0x1000, 32, Purpose::Write).unwrap();
    access.write(3, b"eleven byte");
    assert_eq!((&access.bytes::<6>(3), access.length()), (b"eleven", 32));
    let mut back = [0; 13];
    access.read(2, &mut back);
    assert_eq!(&back, b"\0eleven byte\0");
    access.u16s()[10].store(0x1234, Ordering::Release);
    access.u64s()[3].store(7, Ordering::Relaxed);
    assert_eq!(access.load_u16(10, Ordering::Acquire), 0x1234);
    assert_eq!(memory.u64(0x1018).map(u64::from_le), Some(u64::from_le(7)));
    let lengths = [access.u8s().len(), access.u16s().len(), access.u32s().len()];
    assert_eq!((lengths, access.u64s().len()), ([32, 16, 8], 4));
    // Not aligned, or too short for a number.
    let odd = memory.access(0x1001, 9, Purpose::Write).unwrap();
    assert!(!odd.is_aligned(2) && odd.u16s().is_empty() && odd.u8s().len() == 9);
    assert!(memory.access(0x2000, 3, Purpose::Write).unwrap().u32s().is_empty());
    // Who reads does not change.
    let read = memory.access(0x1000, 32, Purpose::Read).unwrap();
    assert!(read.u8s().is_empty() && read.load_u64(3, Ordering::Relaxed) == 7);
    assert_eq!(memory.replace_u32(0x1018, u32::from_le(7), 9), Some(Ok(())));
    assert_eq!(memory.replace_u32(0x1018, u32::from_le(7), 9), Some(Err(9)));
    assert_eq!(memory.replace_u32(0x1019, 0, 0), None);
    assert_eq!(memory.replace_u32(0x2000, 0, 0), None);
    assert_eq!(memory.read_only().replace_u32(0x1018, 9, 1), None);
    assert!(memory.read_only().access(0x1000, 1, Purpose::Write).is_none());
    assert_eq!(memory.u32(0x1018), Some(9));
}

#[test]
fn an_image_is_never_written() {
    let file = Arc::new(blank_file(8192));
    file.write_all_at(&[5; 8192], 0).unwrap();
    let mut memory = GuestMemory::default();
    memory.add_image(0x1000, 5000, &file, 100).unwrap();
    assert!(memory.add_image(0x9000, 8192, &file, 1).is_err());
    assert_eq!((memory.u32(0x1000), memory.u64(0x1000 + 4993)), (Some(0x0505_0505), None));
    assert!(memory.access(0x1000, 8, Purpose::Write).is_none());
    assert_eq!(memory.replace_u32(0x1000, 0x0505_0505, 0), None);
    // It survives the loss of its end.
    file.set_len(4096).unwrap();
    assert_eq!(memory.u32(0x2000), Some(0));
}

/// Whether this process has an area mapped at an address.
fn is_mapped(address: usize) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().any(|line| line.starts_with(&format!("{address:x}-")))
}

#[test]
fn a_region_is_mapped_as_long_as_it_has_a_user() {
    let mut whole = memory(&[(0, &[1; 4096]), (0x10_0000, &[2; 4096])]);
    let place = whole.access(0x10_0000, 1, Purpose::Look).unwrap().place() as usize;
    let reader = whole.clone();
    let held = whole.hold(GuestAddress(0x10_0800), 16, Purpose::Read).unwrap();
    assert!(whole.remove(0x10_0000, 4096) && !whole.remove(0x10_0000, 4096));
    assert!(!whole.contains(0x10_0000) && whole.u32(0) == Some(0x0101_0101));
    assert_eq!(reader.u32(0x10_0000), Some(0x0202_0202));
    drop((whole, reader));
    assert!(is_mapped(place));
    assert_eq!(held.bytes::<2>(14), [2, 2]);
    drop(held);
    assert!(!is_mapped(place));
}

#[test]
fn lost_memory_reads_as_zeroes_and_is_reported() {
    let (file, owner) = (blank_file(2 * PAGE), Arc::new(MemoryOwner::default()));
    file.write_all_at(&[1; 2 * PAGE as usize], 0).unwrap();
    let mut memory = GuestMemory::default();
    memory.add(0, 2 * PAGE, file.try_clone().unwrap(), 0, &owner).unwrap();
    let before = faults();
    file.set_len(PAGE).unwrap();
    assert!(memory.regions()[0].is_truncated());
    assert_eq!((memory.u32(PAGE - 4), owner.is_lost()), (Some(0x0101_0101), false));
    assert_eq!((memory.u32(PAGE), owner.is_lost()), (Some(0), true));
    assert_eq!(faults(), before + 1);
}

#[test]
fn each_access_takes_a_lease_on_its_range() {
    let pager = Arc::new(Recorder::default());
    let plain = memory(&[(0, &[0; 4096]), (4096, &[0; 64])]);
    let memory = plain.with_pager(Arc::<Recorder>::clone(&pager));
    let once = |range, purpose| {
        assert_eq!(pager.taken(), [(range, purpose)]);
        assert_eq!(pager.held(), 0);
    };
    memory.u64(8).unwrap();
    once(8..16, Purpose::Look);
    memory.u32(4094 - 4).unwrap();
    once(4090..4094, Purpose::Look);
    memory.read(4096, &mut [0; 5]).unwrap();
    once(4096..4101, Purpose::Look);
    memory.replace_u32(4, 0, 1).unwrap().unwrap();
    once(4..8, Purpose::Write);
    // A window keeps a lease of at most a page.
    let window = memory.window(100).first(50);
    assert_eq!((window.u32(4), window.u64(4), window.u64(44)), (Some(0), Some(0), None));
    assert_eq!((pager.taken(), pager.held()), (vec![(100..4096, Purpose::Look)], 1));
    drop(window);
    assert_eq!(pager.held(), 0);
    // No lease for what is no memory, or no access.
    assert!(memory.u64(4096 + 57).is_none() && memory.window(9000).u64(0).is_none());
    assert!(memory.contains(5) && memory.read(7, &mut []).is_some());
    memory.prefetch(0);
    plain.u64(8).unwrap();
    assert!(pager.taken().is_empty());
    // A guard keeps its lease.
    let access = memory.access(0, 4096, Purpose::Write).unwrap();
    let held = memory.hold(GuestAddress(4096), 64, Purpose::Read).unwrap();
    assert_eq!(pager.taken(), [(0..4096, Purpose::Write), (4096..4160, Purpose::Read)]);
    assert_eq!(pager.held(), 2);
    access.write(0, &[1]);
    drop(access);
    assert_eq!(pager.held(), 1);
    drop((memory, held));
    assert_eq!(pager.held(), 0);
}

#[test]
fn lent_memory_crosses_regions_and_keeps_its_leases() {
    let pager = Arc::new(Recorder::default());
    let plain = memory(&[(0, &[1; 4096]), (4096, &[2; 64]), (8192, &[3; 64])]);
    let memory = plain.with_pager(Arc::<Recorder>::clone(&pager));
    let lend = |memory: &GuestMemory, buffers: &mut Buffers, address, length| {
        // SAFETY: the memory lives longer than the buffers are used.
        unsafe { memory.lend(buffers, GuestAddress(address), length, Purpose::Write) }
    };
    for memory in [&plain, &memory] {
        let mut buffers = Buffers::default();
        assert!(lend(memory, &mut buffers, 4090, 16));
        assert_eq!(buffers.addresses(), [4090, 4096].map(|at| Some(GuestAddress(at))));
        let mut bytes = [0; 16];
        assert_eq!(buffers.copy_to(0, &mut bytes), 16);
        assert_eq!((bytes[5], bytes[6]), (1, 2));
        buffers.clear();
        for (address, length) in [(4096, 65), (5000, 1), (u64::MAX, 1), (8250, u64::MAX)] {
            assert!(!lend(memory, &mut buffers, address, length), "{address} {length}");
            buffers.clear();
        }
        assert!(lend(memory, &mut buffers, 7, 0) && buffers.count() == 0);
    }
    pager.taken();
    let mut buffers = Buffers::default();
    assert!(lend(&memory, &mut buffers, 4090, 16) && lend(&memory, &mut buffers, 8192, 64));
    let expected = [4090..4096, 4096..4106, 8192..8256].map(|range| (range, Purpose::Write));
    assert_eq!(pager.taken(), expected);
    buffers.advance(10);
    assert_eq!(pager.held(), 3);
    buffers.clear();
    assert_eq!(pager.held(), 0);
    assert!(lend(&memory, &mut buffers, 0, 4096));
    drop(buffers);
    assert_eq!(pager.held(), 0);
}

#[test]
fn what_the_pager_refuses_is_no_memory() {
    let pager = Arc::new(Recorder { absent: Some(100), ..Recorder::default() });
    let plain = memory(&[(0, &[1; 4096]), (4096, &[1; 64])]);
    let memory = plain.with_pager(Arc::<Recorder>::clone(&pager));
    assert_eq!((memory.u64(96), memory.u64(104)), (None, Some(0x0101_0101_0101_0101)));
    // A window ends where the next page is absent.
    let window = memory.window(4096 - 8);
    assert_eq!((window.u64(0), window.u64(8)), (Some(0x0101_0101_0101_0101), None));
    assert_eq!(memory.window(64).u32(0), None);
    drop(window);
    assert_eq!((memory.replace_u32(100, 0, 0), memory.read(99, &mut [0; 2])), (None, None));
    assert!(memory.access(0, 101, Purpose::Read).is_none());
    assert!(memory.hold(GuestAddress(0), 101, Purpose::Read).is_none());
    let mut buffers = Buffers::default();
    // SAFETY: the memory lives longer than the buffers are used.
    assert!(!unsafe { memory.lend(&mut buffers, GuestAddress(50), 99, Purpose::Read) });
    assert_eq!(pager.held(), 0);
    // It stays so in a memory with more regions, and in a part.
    let mut more = memory.clone();
    more.add(8192, 4096, blank_file(4096), 0, &Arc::default()).unwrap();
    let part = more.part(|region| region.start == 0);
    assert_eq!((more.u64(96), part.u64(96), more.u64(8192)), (None, None, Some(0)));
}

#[test]
fn a_number_is_never_torn() {
    let memory = memory(&[(0, &[0; 4096])]);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let access = memory.access(0, 64, Purpose::Write).unwrap();
            for value in (0..200_000_u64).map(|index| index % 256 * 0x0101_0101_0101_0101) {
                access.write(8, &value.to_ne_bytes());
            }
            done.store(true, Ordering::Release);
        });
        while !done.load(Ordering::Acquire) {
            let bytes = memory.u64(8).unwrap().to_ne_bytes();
            assert!(bytes.iter().all(|byte| *byte == bytes[0]), "{bytes:?}");
        }
    });
}

#[test]
fn written_pages_are_marked_to_the_bit_and_never_behind_the_end() {
    let file = blank_file(8192);
    let log = DirtyLog::new(&file, 4096, 2, &Arc::default()).unwrap();
    log.mark(GuestAddress(4095), 2);
    log.mark(GuestAddress(7 * 4096), 4096);
    log.mark(GuestAddress(8 * 4096), 0);
    log.mark(GuestAddress(15 * 4096), u64::MAX);
    let bits = || {
        let mut bytes = [0; 4];
        file.read_exact_at(&mut bytes, 4096).unwrap();
        bytes
    };
    assert_eq!(bits(), [0b1000_0011, 0b1000_0000, 0, 0]);
    let memory = memory(&[(10 * PAGE, &[0; 3 * 4096]), (13 * PAGE, &[0; 4096])]);
    let mut buffers = Buffers::default();
    // SAFETY: the memory lives longer than the buffers are used.
    let is_memory =
        unsafe { memory.lend(&mut buffers, GuestAddress(12 * PAGE - 1), PAGE + 2, Purpose::Write) };
    log.mark_buffers(&buffers);
    assert_eq!((is_memory, bits()), (true, [0b1000_0011, 0b1011_1000, 0, 0]));
    buffers.allocate(64);
    log.mark_buffers(&buffers);
    assert_eq!(bits(), [0b1000_0011, 0b1011_1000, 0, 0]);
    assert!(DirtyLog::new(&file, 8190, 4, &Arc::default()).is_err());
    assert!(DirtyLog::new(&file, 0, (1 << 32) + 1, &Arc::default()).is_err());
}
