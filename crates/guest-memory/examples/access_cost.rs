//! Prints the time of each kind of access: without a pager, with one that does nothing, and with a
//! table of leases.

#![allow(unsafe_code)]

use std::hint::black_box;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use fathom_guest_memory::{
    Buffers, GuestAddress, GuestLeases, GuestMemory, MemoryFile, Pager, PagerLeases, Purpose,
};

const ROUNDS: u64 = 2_000_000;
const TRIES: usize = 7;

struct NoPager;

impl Pager for NoPager {
    fn lease(&self, _range: &Range<u64>, _purpose: Purpose) -> bool {
        true
    }

    fn release(&self, _range: &Range<u64>, _purpose: Purpose) {}

    fn identity(&self) -> u64 {
        1
    }
}

/// The shortest time of a round among several tries, in nanoseconds.
fn time(mut act: impl FnMut(u64)) -> f64 {
    let tries = (0..TRIES).map(|_| {
        let begun = Instant::now();
        (0..ROUNDS).for_each(&mut act);
        begun.elapsed().as_nanos() as f64 / ROUNDS as f64
    });
    tries.fold(f64::INFINITY, f64::min)
}

fn measure(what: &str, memory: &GuestMemory) {
    let at = |round: u64| black_box(0x1_0000 + round % 64 * 4160);
    let look = time(|round| {
        black_box(memory.u64(at(round)));
    });
    let window = time(|round| {
        let window = memory.window(at(round));
        black_box([window.u64(0), window.u64(8), window.u64(64), window.u64(128)]);
    });
    let header = time(|round| {
        let access = memory.access(at(round), 16, Purpose::Read).unwrap();
        black_box(access.bytes::<16>(0));
    });
    let status = time(|round| {
        let access = memory.access(at(round), 1, Purpose::Write).unwrap();
        access.write(0, &[0]);
    });
    let mut buffers = Buffers::default();
    let lend = time(|round| {
        // SAFETY: the memory lives longer than the buffers are used.
        let is_lent =
            unsafe { memory.lend(&mut buffers, GuestAddress(at(round)), 4096, Purpose::Write) };
        assert!(is_lent);
        buffers.clear();
    });
    let ring = memory.hold(GuestAddress(0x8000), 4096, Purpose::Write).unwrap();
    let held = time(|round| {
        let index = black_box(round as usize % 1024);
        ring.u16s()[index].store(ring.load_u16(index, Ordering::Acquire), Ordering::Release);
    });
    println!(
        "{what:16}{look:8.2}{window:8.2}{header:8.2}{status:8.2}{lend:8.2}{held:8.2}   ns for a \
         look, a window of 4, a header, a status, data, a word of a ring"
    );
}

fn main() {
    let file = rustix::fs::memfd_create("memory", rustix::fs::MemfdFlags::CLOEXEC);
    let file = std::fs::File::from(file.expect("a file"));
    file.set_len(16 << 20).expect("a length");
    let source = file.try_clone().expect("a descriptor");
    let mut memory = GuestMemory::default();
    memory.add(0, 16 << 20, file, 0, &Arc::default()).expect("a mapping");
    measure("without a pager", &memory);
    measure("with a pager", &memory.with_pager(Arc::new(NoPager)));
    let folder = tempfile::tempdir().expect("a folder");
    let file = MemoryFile::of(&source).expect("its identity");
    let owner = fathom_guest_memory::TableOwner { process: 1, start_ticks: 1, namespace: 1 };
    let _pager = PagerLeases::start(folder.path(), file, 4096, owner).expect("a table");
    let leases = GuestLeases::find(folder.path(), &memory).expect("a place").expect("a table");
    measure("with leases", &memory.with_pager(leases));
    let renewed = GuestLeases::renew(folder.path(), &memory, None).expect("a place");
    measure("registered", &renewed.expect("a table").0);
}
