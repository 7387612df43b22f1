//! The writers of pages, from the table that an interceptor fills.

use std::sync::Arc;

use fathom_insight::{ClassTable, Insight, ProcessRole};
use fathom_intercept::{Slots, Writer, Writers};

use super::SyntheticGuest;
use crate::resolver::RequestView;
use crate::synthetic::{CURRENT_PLACE, Shape};

fn writer(process_id: u32, command: &str) -> Writer {
    let mut bytes = [0; 16];
    bytes[..command.len()].copy_from_slice(command.as_bytes());
    Writer { process_id, start_ns: 30_000_000_000, command: bytes }
}

#[test]
fn an_interceptor_is_told_the_places_of_each_kernel() {
    for shape in [Shape::default(), Shape::recent(), Shape::seven()] {
        let synthetic = SyntheticGuest::new(&shape);
        let kernel = synthetic.guest().kernel().unwrap();
        let places = kernel.interception().unwrap();
        assert_eq!((places.current, places.page_size), (CURRENT_PLACE, 64));
        assert_eq!((places.pages, places.direct), (shape.pages, shape.direct));
        assert_eq!((places.task_leader, places.task_process), (448, 404));
        assert_eq!((places.task_start, places.task_command, places.task_flags), (560, 704, 44));
        assert_ne!(places.page_dirtied, 0);
        let lengths: u64 = places.regions.iter().map(|region| region.length).sum();
        assert_eq!(lengths, synthetic.memory.length());
    }
}

#[test]
fn each_page_has_its_own_writer() {
    for shape in [Shape::default(), Shape::recent(), Shape::seven()] {
        let synthetic = SyntheticGuest::new(&shape);
        let guest = synthetic.guest();
        let mut resolver = guest.resolver();
        let (writers, _file) = Writers::create(synthetic.memory.end()).unwrap();
        let writers = Arc::new(writers);
        assert!(!guest.set_writers(guest.status().kernels + 1, Arc::clone(&writers)));
        assert!(guest.set_writers(guest.status().kernels, Arc::clone(&writers)));
        let mut slots = Slots::default();
        let [first, second] = [writer(500, "first"), writer(501, "second\u{1b}[m")]
            .map(|writer| slots.slot(&writers, &writer));
        let table = ClassTable::default();
        let mut resolve = |name: &str, is_write| {
            let request = synthetic.linux.request(name);
            let view = RequestView { is_write, ..request.view };
            let mut insight = Insight::default();
            resolver.resolve(&view, request.pieces.iter().copied(), &table, &mut insight);
            // Pages of synthetic files have no places in them, so each is a part.
            let mut parts: Vec<(u64, u32, ProcessRole)> = Vec::new();
            for part in insight.parts(view.length) {
                let facts = part.facts;
                match parts.last_mut() {
                    Some(last) if (last.1, last.2) == (facts.process_id, facts.process_role) => {
                        last.0 += part.length / 4096;
                    }
                    _ => parts.push((part.length / 4096, facts.process_id, facts.process_role)),
                }
            }
            resolver.find_waiters(&view, request.pieces.iter().copied(), &mut insight);
            (parts, insight)
        };
        let frame = |name: &str| synthetic.linux.request(name).pieces[0].0 / 4096;
        let (writer, none) = (ProcessRole::Writer, ProcessRole::None);
        assert_eq!(resolve("one file", true).0, [(3, 0, none)]);
        writers.note(frame("one file"), first, false);
        writers.note(frame("one file") + 1, second, false);
        // A read of the page has nothing to do with its writer, and does not remove it.
        assert_eq!(resolve("one file", false).0, [(3, 0, none)]);
        let (parts, insight) = resolve("one file", true);
        assert_eq!(parts, [(1, 500, writer), (1, 501, writer), (1, 0, none)]);
        let facts = insight.parts[1].facts;
        let command = synthetic.names.text(facts.process).unwrap();
        assert_eq!((&*command, facts.process_start), ("second\u{fffd}[m", 3000));
        // The pages were not dirty any more when they had been written.
        assert_eq!(resolve("one file", true).0, [(3, 0, none)]);
        // A page that has become dirty again keeps its writer.
        let kernel = guest.kernel().unwrap();
        let page = synthetic.linux.request("data").pieces[0].0;
        let flags = kernel.physical(kernel.page_of(page) + kernel.layout.page_flags).unwrap();
        let clean = kernel.memory.u64(flags).unwrap();
        writers.note(page / 4096, first, false);
        synthetic.store.write_u64(flags, clean | 1 << kernel.places.dirty_bit.unwrap());
        for _ in 0..2 {
            assert_eq!(resolve("data", true).0, [(1, 500, writer)]);
        }
        synthetic.store.write_u64(flags, clean);
        assert_eq!(resolve("data", true).0, [(1, 500, writer)]);
        assert_eq!(resolve("data", true).0, [(1, 0, none)]);
        // Data whose file is known from the bio, and copies of pages.
        writers.note(frame("btrfs cached"), second, false);
        assert_eq!(resolve("btrfs cached", true).0, [(1, 501, writer)]);
        // Metadata has no writer.
        writers.note(frame("metadata"), first, false);
        assert_eq!(resolve("metadata", true).0[0].1, 0);
        // Who removes an earlier table leaves the one in use.
        let (other, _file) = Writers::create(synthetic.memory.end()).unwrap();
        writers.note(frame("data"), first, false);
        guest.remove_writers(&Arc::new(other));
        assert_eq!(resolve("data", true).0, [(1, 500, writer)]);
        writers.note(frame("data"), first, false);
        guest.remove_writers(&writers);
        assert!(guest.writers().is_none());
        assert_eq!(resolve("data", true).0, [(1, 0, none)]);
        // Lengths without an end are no loop.
        let (table, _file) = Writers::create(synthetic.memory.end()).unwrap();
        assert!(guest.set_writers(guest.status().kernels, Arc::new(table)));
        assert_eq!(resolve("data", true).0, [(1, 0, none)]);
        let view = synthetic.linux.request("data").view;
        resolver.find_waiters(&view, [(7, u64::MAX)].into_iter(), &mut Insight::default());
    }
}
