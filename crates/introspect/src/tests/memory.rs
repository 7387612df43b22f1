//! The bounds of memory, and its touched parts.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::memory::{GuestMemory, Region};
use crate::synthetic::Store;
use crate::vmcoreinfo;

const PAGE: u64 = 4096;

/// Memory without a file: each region with its bytes.
fn memory(parts: Vec<(u64, Vec<u8>)>) -> GuestMemory {
    let regions = parts.iter().map(|(start, bytes)| Region {
        start: *start,
        length: bytes.len() as u64,
        place: bytes.as_ptr(),
        file: None,
    });
    let regions = regions.collect();
    // SAFETY: the vectors' bytes stay where they are, and live as long as the memory.
    unsafe { GuestMemory::new(regions, Arc::new(parts)) }
}

#[test]
fn reads_stay_within_one_region() {
    let memory = memory(vec![(16, (0..32).collect()), (1000, vec![7; 10]), (1010, vec![8; 8])]);
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
    }
    assert_eq!((memory.u32(1006), memory.u32(1007)), (Some(0x0707_0707), None));
    assert_eq!((memory.u16(46), memory.u16(47)), (Some(0x1f1e), None));
    let mut bytes = [1; 20];
    assert_eq!(memory.read(1000, &mut bytes), None);
    assert_eq!(bytes, [1; 20], "unchanged");
    assert_eq!(memory.read(1000, &mut []), Some(()));
    assert!(memory.contains(47) && !memory.contains(48) && !memory.contains(u64::MAX));
}

#[test]
fn windows_are_as_long_as_their_region() {
    let store = Store::new(&[(0, PAGE), (PAGE, 2 * PAGE), (1 << 20, PAGE)]).unwrap();
    let memory = store.memory();
    store.write_u64(PAGE - 8, 1);
    store.write_u64(PAGE, 2);
    store.write_u64(3 * PAGE - 8, 3);
    let window = memory.window(PAGE - 16);
    assert_eq!([window.u64(0), window.u64(8), window.u64(16)], [Some(0), Some(1), None]);
    assert_eq!([window.u32(8), window.u32(16)], [Some(1), None]);
    // Unaligned offsets, and offsets that would wrap around, have no words.
    let beyond = [1, 7, 9, 12, u64::MAX - 15, u64::MAX - 7, u64::MAX];
    assert!(beyond.iter().all(|offset| window.u64(*offset).is_none()));
    let window = memory.window(PAGE);
    assert_eq!([window.u64(0), window.u64(2 * PAGE - 8)], [Some(2), Some(3)]);
    let page = window.first(PAGE);
    assert_eq!([page.u64(0), page.u64(PAGE - 8), page.u64(PAGE)], [Some(2), Some(0), None]);
    assert_eq!(window.first(7).u64(0), None);
    for nowhere in [3 * PAGE, (1 << 20) - 8, (1 << 20) + PAGE, u64::MAX - 7, u64::MAX] {
        assert!([0, 8, 16].iter().all(|offset| memory.window(nowhere).u64(*offset).is_none()));
    }
}

#[test]
fn impossible_regions_are_omitted() {
    let far = |start| Region { start, length: 16, place: [0_u8; 16].as_ptr(), file: None };
    let regions =
        vec![far(u64::MAX - 7), far(u64::MAX - 15), far(1 << 52), Region { length: 0, ..far(0) }];
    // SAFETY: none of them is ever read.
    let memory = unsafe { GuestMemory::new(regions, Arc::new(())) };
    assert_eq!((memory.regions().len(), memory.end(), memory.length()), (0, 0, 0));
    assert!(vmcoreinfo::find(&memory, 0, None).notes.is_empty());
    assert_eq!(memory.u64(0), None);
}

#[test]
fn only_touched_parts_are_reported() {
    let store = Store::new(&[(0, 64 * PAGE), (1 << 30, 1 << 30)]).unwrap();
    for page in [3, 4, 63] {
        store.write_u64(page * PAGE + 8, 1);
    }
    store.write_u64((1 << 30) + 77 * PAGE, 1);
    let memory = store.memory();
    let touched: Vec<_> = memory
        .regions()
        .iter()
        .map(|region| GuestMemory::touched(region, 0).collect::<Vec<_>>())
        .collect();
    assert_eq!(touched[0], [(3 * PAGE, 5 * PAGE), (63 * PAGE, 64 * PAGE)]);
    assert_eq!(touched[1], [((1 << 30) + 77 * PAGE, (1 << 30) + 78 * PAGE)]);
    let alone = self::memory(vec![(5, vec![0; 10])]);
    assert_eq!(GuestMemory::touched(&alone.regions()[0], 0).collect::<Vec<_>>(), [(5, 15)]);
}

#[test]
fn a_search_of_memory_in_many_parts_keeps_its_time_limit_and_continues() {
    // A guest that touches every second page creates a separate part for each of them.
    let pages = 8192;
    let store = Store::new(&[(0, pages * PAGE)]).unwrap();
    for page in (0..pages).step_by(2) {
        store.write_u64(page * PAGE, 1);
    }
    let note = "OSRELEASE=9.9\nPAGESIZE=4096\n";
    store.write((pages - 2) * PAGE, note.as_bytes());
    let memory = store.memory();
    let (mut start, mut searches) = (0, 0);
    loop {
        // Even without any time, each search makes progress.
        let found = vmcoreinfo::find(&memory, start, Some(Instant::now()));
        searches += 1;
        let Some(rest) = found.rest else {
            assert_eq!(found.notes.len(), 1);
            break;
        };
        assert!(found.notes.is_empty() && rest > start, "{rest} after {start}");
        assert!(rest - start <= 1 << 20, "{} bytes in one search", rest - start);
        start = rest;
    }
    assert!(searches > 20, "{searches}");
    // With enough time, one search covers the whole memory.
    let end = Instant::now() + Duration::from_secs(600);
    let found = vmcoreinfo::find(&memory, 0, Some(end));
    assert_eq!((found.notes.len(), found.rest), (1, None));
}
