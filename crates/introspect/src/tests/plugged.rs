//! Memory that is plugged into a guest and out of it.

use std::sync::Arc;

use fathom_guest_memory::GuestMemory;
use fathom_insight::{ClassTable, Insight, Names};

use crate::guest::{Guest, GuestState};
use crate::synthetic::{Linux, NamedFacts, Shape, Store, attach};

/// The first `count` regions of a memory.
fn part(memory: &GuestMemory, count: usize) -> GuestMemory {
    let starts: Vec<u64> = memory.regions().iter().map(|region| region.start).collect();
    memory.part(|region| starts[..count].contains(&region.start))
}

#[test]
fn the_kernel_stays_attached_in_changed_memory() {
    let shape = Shape::default();
    let [low, room] = shape.memory();
    let store = Store::new(&[low, room, (1 << 30, 1 << 20)]).unwrap();
    let linux = Linux::build(&store, &shape);
    let whole = store.memory();
    let names: Arc<Names> = Arc::default();
    let header = linux.requests[0].view.header;
    let guest_of = |memory: &GuestMemory| Guest::new(memory, Arc::clone(&names), Box::new(|| {}));
    // The facts immediately after the change, without a step in between.
    let reported = |guest: &Arc<Guest>| {
        let request = linux.request("data");
        let mut insight = Insight::default();
        let pieces = request.pieces.iter().copied();
        let table = ClassTable::default();
        guest.resolver().resolve(&request.view, pieces, &table, &mut insight);
        NamedFacts::all(request.view.length, &insight, &names).remove(0)
    };

    let before = attach(&part(&whole, 2), &names, header);
    let expected = reported(&before);
    assert_eq!(expected.inode, 131);
    let with = guest_of(&whole);
    with.inherit_kernel(&before);
    assert_eq!((with.status().state, with.status().kernels), (GuestState::Attached, 1));
    assert_eq!(reported(&with), expected);
    let kernel = with.kernel().unwrap();
    assert_eq!(kernel.memory().length(), whole.length());
    assert_eq!(kernel.space.direct(shape.direct + (1 << 30)), Some(1 << 30));
    let without = guest_of(&part(&whole, 2));
    without.inherit_kernel(&with);
    assert_eq!(reported(&without), expected);
    let kernel = without.kernel().unwrap();
    assert_eq!(kernel.space.direct(shape.direct + (1 << 30)), None);

    // If a required part is missing, or there was no kernel, the search begins as usual.
    let torn = guest_of(&part(&whole, 1));
    torn.inherit_kernel(&with);
    assert_eq!((torn.status().state, reported(&torn).inode), (GuestState::Waiting, 0));
    let early = guest_of(&whole);
    early.inherit_kernel(&torn);
    assert_eq!(early.status().state, GuestState::Waiting);
    early.inherit_kernel(&with);
    store.write(shape.note, b"another");
    let late = guest_of(&store.memory());
    late.inherit_kernel(&early);
    assert_eq!(late.status().state, GuestState::Waiting);
}
