//! Processes that wait for pages.

use fathom_insight::{ClassTable, Facts, Insight};

use super::SyntheticGuest;
use crate::synthetic::Shape;

#[test]
fn a_process_that_waits_for_write_back_is_found() {
    for shape in [Shape::default(), Shape::recent(), Shape::seven()] {
        let synthetic = SyntheticGuest::new(&shape);
        let guest = synthetic.guest();
        let kernel = guest.kernel().unwrap();
        let page = synthetic.linux.request("data").pieces[0].0;
        let flags = kernel.layout.page_flags;
        let structure = kernel.space.walk(&kernel.memory, kernel.page_of(page)).unwrap() + flags;
        let clean = kernel.memory.u64(structure).unwrap();
        let set = |bits: u64| synthetic.store.write_u64(structure, bits);
        let (writeback, waiters) =
            (kernel.places.writeback_bit.unwrap(), kernel.places.waiters_bit.unwrap());
        let others = [page ^ 4096, 1 << 60, u64::MAX];
        let is_awaited = || guest.is_awaited(&mut others.into_iter().chain([page + 512]));
        assert!(!is_awaited());
        set(clean | 1 << writeback | 1 << waiters);
        assert!(is_awaited());
        // A process may also wait for the lock of a page.
        set((clean | 1 << waiters) & !(1 << writeback));
        assert!(!is_awaited());
        set((clean | 1 << writeback) & !(1 << waiters));
        assert!(!is_awaited());
    }
}

#[test]
fn the_process_that_waits_for_a_page_is_the_reader() {
    for shape in [Shape::default(), Shape::recent(), Shape::seven()] {
        let synthetic = SyntheticGuest::new(&shape);
        let guest = synthetic.guest();
        let mut resolver = guest.resolver();
        for (name, reader) in [
            ("a reader", Some("postgres")),
            ("a reader by io_uring", Some("postgres")),
            ("a waiter of another kind", None),
            ("no reader", None),
            ("data", None),
        ] {
            let request = synthetic.linux.request(name);
            let pieces = || request.pieces.iter().copied();
            let mut insight = Insight::default();
            resolver.resolve(&request.view, pieces(), &ClassTable::default(), &mut insight);
            assert_eq!(insight.facts.process_id, 0, "{name}");
            let before = insight.facts;
            resolver.find_readers(pieces(), &mut insight);
            let process = synthetic.names.text(insight.facts.process);
            assert_eq!(process.as_deref(), reader, "{name}");
            assert_eq!(insight.facts.process_id, if reader.is_some() { 77 } else { 0 }, "{name}");
            let (process, process_id) = (before.process, before.process_id);
            assert_eq!(Facts { process, process_id, ..insight.facts }, before, "{name}");
        }
        // A request whose process is known keeps it, and pages without an end are no loop.
        let request = synthetic.linux.request("direct");
        let mut insight = Insight::default();
        let pieces = || request.pieces.iter().copied();
        resolver.resolve(&request.view, pieces(), &ClassTable::default(), &mut insight);
        let known = insight.facts;
        let awaited = synthetic.linux.request("a reader").pieces[0].0;
        resolver.find_readers([(awaited, 4096)].into_iter(), &mut insight);
        assert_eq!(insight.facts, known);
        let many = std::iter::repeat([(u64::MAX - 1, u64::MAX), (7, 0)]).flatten().take(1 << 20);
        resolver.find_readers(many, &mut insight);
        assert_eq!(insight.facts, known);
    }
}

#[test]
fn each_part_has_its_own_reader() {
    let synthetic = SyntheticGuest::new(&Shape::recent());
    let guest = synthetic.guest();
    let mut resolver = guest.resolver();
    let request = synthetic.linux.request("data");
    let pieces = || request.pieces.iter().copied();
    let mut insight = Insight::default();
    resolver.resolve(&request.view, pieces(), &ClassTable::default(), &mut insight);
    let facts = insight.facts;
    let other = Facts { inode: 99, ..facts };
    insight.clear();
    insight.push(4096, other);
    insight.push(8192, facts);
    insight.finish(&ClassTable::default());
    let awaited = synthetic.linux.request("a reader").pieces[0].0;
    let none = synthetic.linux.request("no reader").pieces[0].0;
    let pages = [(none, 4096), (none, 4096), (awaited, 4096)];
    resolver.find_readers(pages.into_iter(), &mut insight);
    assert_eq!((insight.parts[0].facts.process_id, insight.parts[1].facts.process_id), (0, 77));
    assert_eq!(insight.facts, insight.parts[1].facts);
}
