//! Processes that wait for pages.

use fathom_insight::{ClassTable, Facts, Insight, Kind, ProcessRole};

use super::SyntheticGuest;
use crate::resolver::RequestView;
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
            ("a waiter for write-back", Some("postgres")),
            ("a reader", Some("postgres")),
            ("a reader by io_uring", Some("postgres")),
            ("a waiter of another kind", None),
            ("no reader", None),
            ("data", None),
        ] {
            let request = synthetic.linux.request(name);
            let view = request.view;
            let pieces = || request.pieces.iter().copied();
            let mut insight = Insight::default();
            resolver.resolve(&view, pieces(), &ClassTable::default(), &mut insight);
            assert_eq!(insight.facts.process_id, 0, "{name}");
            let before = insight.facts;
            resolver.find_waiters(&view, pieces(), &mut insight);
            let process = synthetic.names.text(insight.facts.process);
            assert_eq!(process.as_deref(), reader, "{name}");
            assert_eq!(insight.facts.process_id, if reader.is_some() { 77 } else { 0 }, "{name}");
            if reader.is_some() {
                assert_eq!(insight.facts.process_role, ProcessRole::Waiter, "{name}");
                assert_eq!(insight.facts.process_start, 7738, "{name}");
            }
            let Facts { process, process_id, process_start, process_role, .. } = before;
            let others =
                Facts { process, process_id, process_start, process_role, ..insight.facts };
            assert_eq!(others, before, "{name}");
            // Who reads does not wait for write-back, and the other way round.
            let other = RequestView { is_write: !view.is_write, ..view };
            insight.facts = before;
            resolver.find_waiters(&other, pieces(), &mut insight);
            assert_eq!(insight.facts, before, "{name}");
        }
        // A request whose process is known keeps it, and pages without an end are no loop.
        let request = synthetic.linux.request("direct");
        let view = RequestView { is_write: false, ..request.view };
        let mut insight = Insight::default();
        let pieces = || request.pieces.iter().copied();
        resolver.resolve(&request.view, pieces(), &ClassTable::default(), &mut insight);
        let known = insight.facts;
        let awaited = synthetic.linux.request("a reader").pieces[0].0;
        resolver.find_waiters(&view, [(awaited, 4096)].into_iter(), &mut insight);
        assert_eq!(insight.facts, known);
        let many = std::iter::repeat([(u64::MAX - 1, u64::MAX), (7, 0)]).flatten().take(1 << 20);
        resolver.find_waiters(&view, many, &mut insight);
        assert_eq!(insight.facts, known);
    }
}

#[test]
fn each_part_has_its_own_reader() {
    let synthetic = SyntheticGuest::new(&Shape::recent());
    let guest = synthetic.guest();
    let mut resolver = guest.resolver();
    let request = synthetic.linux.request("data");
    let view = RequestView { is_write: false, ..request.view };
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
    resolver.find_waiters(&view, pages.into_iter(), &mut insight);
    assert_eq!((insight.parts[0].facts.process_id, insight.parts[1].facts.process_id), (0, 77));
    assert_eq!(insight.facts, insight.parts[1].facts);
}

#[test]
fn a_flush_has_the_process_that_needs_it() {
    for shape in [Shape::default(), Shape::recent(), Shape::seven()] {
        let synthetic = SyntheticGuest::new(&shape);
        let guest = synthetic.guest();
        let mut resolver = guest.resolver();
        let table = ClassTable::default();
        for (name, role) in [
            ("flush, a process", ProcessRole::Submitter),
            ("flush, jbd2", ProcessRole::Waiter),
            ("flush, XFS", ProcessRole::Waiter),
            ("flush, F2FS", ProcessRole::Waiter),
            ("flush, a thread of the kernel", ProcessRole::Submitter),
            ("flush, Btrfs", ProcessRole::Submitter),
        ] {
            let request = synthetic.linux.request(name);
            let mut insight = Insight::default();
            resolver.resolve(&request.view, std::iter::empty(), &table, &mut insight);
            assert_eq!(insight.facts.process_role, role, "{name}");
            // What was known is not looked for again.
            let facts = insight.facts;
            resolver.find_waiters(&request.view, std::iter::empty(), &mut insight);
            assert_eq!(insight.facts, facts, "{name}");
        }
        let flush = synthetic.linux.request("flush");
        let mut insight = Insight::default();
        resolver.resolve(&flush.view, std::iter::empty(), &table, &mut insight);
        assert_eq!(insight.facts, Facts::default());
        // A structure that belongs to another flush is none.
        let kernel = guest.kernel().unwrap();
        let header = synthetic.linux.request("flush, jbd2").view.header;
        let context = header - kernel.layout.request_size + kernel.layout.request_context.unwrap();
        let foreign = kernel.memory.u64(context).unwrap();
        let own = flush.view.header - kernel.layout.request_size;
        synthetic.store.write_u64(own + kernel.layout.request_context.unwrap(), foreign);
        resolver.resolve(&flush.view, std::iter::empty(), &table, &mut insight);
        assert_eq!(insight.facts, Facts::default());
        // A list that leads in a circle ends.
        let fq = kernel.u64(foreign + kernel.layout.context_flush.unwrap()).unwrap();
        let list = fq + kernel.layout.flush_lists.unwrap() + 16;
        let link = kernel.u64(list).unwrap();
        let place = kernel.physical(link).unwrap();
        synthetic.store.write_u64(place, link);
        let flush = synthetic.linux.request("flush, jbd2");
        insight.clear();
        resolver.resolve(&flush.view, std::iter::empty(), &table, &mut insight);
        assert_eq!(insight.facts.kind, Kind::Journal);
    }
}
