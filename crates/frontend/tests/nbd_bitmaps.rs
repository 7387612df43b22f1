//! Several metadata contexts in one connection: allocation, and what has changed since earlier
//! states.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fathom_block::Disk;
use fathom_frontend::nbd::{BITMAPS_MAX, BitmapRefusal, Bitmaps};

mod nbd_common;

use nbd_common::*;

const BITMAP: &str = "qemu:dirty-bitmap:";

/// Earlier states, of which each is a disk that has data where there were changes.
#[derive(Default)]
struct Earlier {
    disks: BTreeMap<String, Arc<Disk>>,
    is_held_back: AtomicBool,
}

impl Bitmaps for Earlier {
    fn names(&self, count: usize) -> Vec<String> {
        self.disks.keys().take(count).cloned().collect()
    }

    fn find(&self, name: &str) -> Result<(), BitmapRefusal> {
        self.open(name).map(drop)
    }

    fn open(&self, name: &str) -> Result<Arc<Disk>, BitmapRefusal> {
        let disk = self.disks.get(name).ok_or(BitmapRefusal::Unknown)?;
        if self.is_complete() {
            return Ok(Arc::clone(disk));
        }
        Err(BitmapRefusal::Unavailable("a layer is in the way".into()))
    }

    fn is_complete(&self) -> bool {
        !self.is_held_back.load(Ordering::Relaxed)
    }
}

struct World {
    server: Server,
    earlier: Arc<Earlier>,
    disk: Arc<Disk>,
}

impl World {
    /// A disk with data in its first MiB, and bitmaps in each of which one MiB is dirty.
    fn new(count: u64) -> Self {
        let mut earlier = Earlier::default();
        let server = Server::new(&[]);
        for number in 0..count {
            let name = format!("s{number}");
            let changed = disk(&name, 64 * MIB);
            server.exports.add(&name, "", Arc::clone(&changed)).unwrap();
            assert_eq!(
                server.client(&name, Mode::Simple).write(number * MIB, &vec![1; 1 << 20]),
                0
            );
            server.exports.remove(&name);
            earlier.disks.insert(name, changed);
        }
        let (earlier, disk) = (Arc::new(earlier), disk("disk", 64 * MIB));
        let bitmaps: Arc<dyn Bitmaps> = Arc::clone(&earlier) as _;
        server.exports.add_with_bitmaps("disk", "", Arc::clone(&disk), Some(bitmaps)).unwrap();
        assert_eq!(server.client("disk", Mode::Simple).write(0, &vec![1; 1 << 20]), 0);
        Self { server, earlier, disk }
    }

    /// A client that has chosen contexts, and the numbers and names of these.
    fn client(&self, mode: Mode, queries: &[&str]) -> (Client, Vec<(u32, String)>) {
        let mut client = Client::greet(self.server.connect());
        client.mode = mode;
        let code = if mode == Mode::Extended { EXTENDED } else { STRUCTURED };
        assert_eq!(client.outcome(code, &[]), ACK);
        let mut replies = client.option(SET_META, &meta("disk", queries));
        assert_eq!(replies.pop().unwrap().0, ACK);
        let context = |(_, data): (u32, Vec<u8>)| {
            let id = u32::from_be_bytes(data[..4].try_into().unwrap());
            (id, String::from_utf8(data[4..].to_vec()).unwrap())
        };
        let contexts = replies.into_iter().map(context).collect();
        assert_eq!(client.option(GO, &go("disk", &[])).last().unwrap().0, ACK);
        (client, contexts)
    }
}

fn word(bytes: &[u8], at: usize, length: usize) -> u64 {
    bytes[at..at + length].iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte))
}

/// The chunks of the reply to a block status: the number of the context, lengths and flags.
fn status(client: &mut Client, flags: u16, length: u64) -> Vec<(u32, Vec<(u64, u64)>)> {
    client.send(STATUS, flags, 0, length, &[]);
    let is_extended = client.mode == Mode::Extended;
    let mut chunks = Vec::new();
    loop {
        let header = client.take(if is_extended { 32 } else { 20 });
        let kind = word(&header, 6, 2);
        let length = if is_extended { word(&header, 24, 8) } else { word(&header, 16, 4) };
        let payload = client.take(length as usize);
        assert_eq!(kind, if is_extended { 6 } else { 5 }, "{payload:?}");
        let (from, size) = if is_extended { (8, 8) } else { (4, 4) };
        let pairs = payload[from..].chunks(2 * size);
        let extents: Vec<_> =
            pairs.map(|pair| (word(pair, 0, size), word(pair, size, size))).collect();
        if is_extended {
            assert_eq!(word(&payload, 4, 4), extents.len() as u64);
        }
        chunks.push((word(&payload, 0, 4) as u32, extents));
        if word(&header, 4, 2) & 1 == 1 {
            return chunks;
        }
    }
}

#[test]
fn a_reply_has_a_chunk_for_each_context() {
    let world = World::new(3);
    for mode in [Mode::Structured, Mode::Extended] {
        let names = [&format!("{BITMAP}s2"), "base:allocation", "x:y", &format!("{BITMAP}s1")];
        let names: Vec<&str> = names.iter().map(|name| &name[..]).collect();
        let (mut client, contexts) = world.client(mode, &names);
        let name = |number: u32| format!("{BITMAP}s{number}");
        assert_eq!(contexts, [(1, "base:allocation".into()), (2, name(2)), (3, name(1))]);
        let left = |before: u64| (63 - before) * MIB;
        let expected = [
            (1, vec![(MIB, 0), (left(0), 3)]),
            (2, vec![(2 * MIB, 0), (MIB, 1), (left(2), 0)]),
            (3, vec![(MIB, 0), (MIB, 1), (left(1), 0)]),
        ];
        assert_eq!(status(&mut client, 0, 64 * MIB), expected);
        let first = |(id, extents): &(u32, Vec<_>)| (*id, vec![extents[0]]);
        let firsts: Vec<_> = expected.iter().map(first).collect();
        assert_eq!(status(&mut client, REQUEST_ONE, 64 * MIB), firsts);
        // Other requests of the connection go on.
        assert_eq!(client.read(MIB - 1, 2), [1, 0]);
        let (mut client, contexts) = world.client(mode, &[&name(0)]);
        assert_eq!(contexts, [(2, name(0))]);
        assert_eq!(status(&mut client, 0, 2 * MIB), [(2, vec![(MIB, 1), (MIB, 0)])]);
        assert_eq!(client.ask(STATUS, 0, 64 * MIB, 1, &[]).error, 22);
    }
}

#[test]
fn contexts_are_listed_and_chosen_by_their_names() {
    let world = World::new(9);
    let mut client = Client::greet(world.server.connect());
    assert_eq!(client.outcome(STRUCTURED, &[]), ACK);
    let mut count = |code, queries: &[&str]| client.option(code, &meta("disk", queries)).len() - 1;
    assert_eq!(count(LIST_META, &[]), 10);
    assert_eq!(count(LIST_META, &[BITMAP]), 9);
    assert_eq!(count(LIST_META, &["qemu:", "base:"]), 10);
    assert_eq!(count(LIST_META, &[&format!("{BITMAP}s4")]), 1);
    assert_eq!(count(LIST_META, &[&format!("{BITMAP}z")]), 0);
    assert_eq!(count(SET_META, &[BITMAP, "qemu:"]), 0, "only exact names are chosen");
    assert_eq!(count(SET_META, &[&format!("{BITMAP}s4"), &format!("{BITMAP}s4")]), 1);
    let names: Vec<String> = (0..9).map(|number| format!("{BITMAP}s{number}")).collect();
    let mut names: Vec<&str> = names.iter().map(String::as_str).collect();
    assert_eq!(client.outcome(SET_META, &meta("disk", &names)), ERROR | 9);
    names.truncate(BITMAPS_MAX);
    assert_eq!(client.outcome(SET_META, &meta("disk", &names)), ACK);
    world.earlier.is_held_back.store(true, Ordering::Relaxed);
    assert_eq!(client.outcome(SET_META, &meta("disk", &names[..1])), ERROR | 2);
    assert_eq!(client.outcome(SET_META, &meta("disk", &["base:allocation"])), ACK);
    assert_eq!(world.server.listener.counters().protocol_errors, 0);
}

#[test]
fn a_bitmap_that_is_not_complete_any_more_is_an_error_and_no_answer() {
    let world = World::new(1);
    let (mut client, _) = world.client(Mode::Structured, &[&format!("{BITMAP}s0")]);
    assert_eq!(status(&mut client, 0, MIB), [(2, vec![(MIB, 1)])]);
    world.earlier.is_held_back.store(true, Ordering::Relaxed);
    assert_eq!(client.ask(STATUS, 0, 0, MIB, &[]).error, 5);
    assert_eq!(client.read(0, 1), [1]);
    world.earlier.is_held_back.store(false, Ordering::Relaxed);
    assert_eq!(status(&mut client, 0, MIB), [(2, vec![(MIB, 1)])]);
}

#[test]
fn the_earlier_state_is_held_until_the_client_has_gone() {
    let world = World::new(1);
    let held = || Arc::strong_count(&world.earlier.disks["s0"]);
    let before = held();
    let name = format!("{BITMAP}s0");
    let (mut client, _) = world.client(Mode::Extended, &[&name, "base:allocation"]);
    assert_eq!(status(&mut client, 0, MIB).len(), 2);
    assert!(held() > before);
    // It leaves with requests in flight.
    for _ in 0..500 {
        client.send(STATUS, 0, 0, 64 * MIB, &[]);
    }
    drop(client);
    let begun = Instant::now();
    while held() > before {
        assert!(begun.elapsed() < Duration::from_secs(20), "it is held for ever");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(world.disk.capacity(), 64 * MIB);
}
