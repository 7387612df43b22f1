//! The search of memory: its parts, and their bounds.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fathom_guest_memory::GuestMemory;

use crate::guest::Guest;
use crate::synthetic::Store;
use crate::vmcoreinfo;

const PAGE: u64 = 4096;

#[test]
fn memory_above_the_end_of_physical_addresses_is_omitted() {
    let high = 1 << 52;
    let store = Store::new(&[(0, PAGE), (high - PAGE, PAGE), (high, PAGE)]).unwrap();
    let guest = Guest::new(&store.memory(), Arc::default(), Box::new(|| {}));
    assert_eq!((guest.memory().length(), guest.memory().end()), (2 * PAGE, high));
    let nothing = GuestMemory::default();
    assert!(vmcoreinfo::find(&nothing, 0, None).notes.is_empty());
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
