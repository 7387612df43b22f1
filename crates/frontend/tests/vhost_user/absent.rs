//! Requests and rings whose memory a pager has taken away. The pager is the test, with the real
//! table of leases; it takes pages away from the guest's file and brings them back.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fathom_guest_memory::{
    GuestLeases, LEASE_FOLDER, MemoryFile, PageState, PageWord, PagerLeases, TableOwner,
};
use rustix::fs::{FallocateFlags, fallocate};
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;

use crate::client::{
    Client, DATA, Descriptor, INDIRECT, MEMORY, NEXT, READ, WRITABLE, WRITE, memfd,
};
use crate::serve;

const PAGE: u64 = 4096;
const HEADER: u64 = DATA;
const PLACE: u64 = DATA + 0x2000;
const STATUS: u64 = DATA + 0x5000;
const TABLE: u64 = DATA + 0x6000;
/// Long enough for a request that does not wait.
const SHORTLY: Duration = Duration::from_millis(60);
/// `VIRTIO_BLK_S_IOERR`.
const FAILED: u8 = 1;

struct Pager {
    leases: Option<PagerLeases>,
    memory: File,
}

/// A page that is away.
struct Away(u64, Vec<u8>);

impl Pager {
    /// `None` if this user cannot make the table.
    fn start(memory: &File) -> Option<Self> {
        let identity = MemoryFile::of(memory).unwrap();
        let owner = TableOwner { process: std::process::id(), start_ticks: 0, namespace: 0 };
        match PagerLeases::start(Path::new(LEASE_FOLDER), identity, MEMORY / PAGE, owner) {
            Ok(leases) => Some(Self { leases: Some(leases), memory: memory.try_clone().unwrap() }),
            Err(error) => {
                println!("Skipped: {LEASE_FOLDER}: {error}");
                None
            }
        }
    }

    fn leases(&self) -> &PagerLeases {
        self.leases.as_ref().unwrap()
    }

    fn word(&self, address: u64) -> PageWord {
        self.leases().table().word(address / PAGE)
    }

    fn evict(&self, address: u64) -> Away {
        let page = address / PAGE;
        let mut content = vec![0; PAGE as usize];
        self.memory.read_exact_at(&mut content, page * PAGE).unwrap();
        self.leases().table().change(page, PageWord::leave).expect("no lease");
        self.leases().table().change(page, PageWord::evict).unwrap();
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&self.memory, flags, page * PAGE, PAGE).unwrap();
        Away(page, content)
    }

    fn bring(&self, away: &Away) {
        self.leases().table().change(away.0, PageWord::come).unwrap();
        self.put_back(away);
    }

    /// Ends the way of a page that is coming.
    fn put_back(&self, Away(page, content): &Away) {
        let page = *page;
        self.memory.write_all_at(content, page * PAGE).unwrap();
        self.leases().table().change(page, PageWord::arrive).unwrap();
    }

    /// Waits until somebody wants the page, and brings it in.
    fn bring_when_wanted(&self, away: &Away) {
        let begun = Instant::now();
        while !self.word(away.0 * PAGE).is_wanted() {
            assert!(begun.elapsed() < Duration::from_secs(20), "nobody wants page {}", away.0);
            std::thread::sleep(Duration::from_micros(100));
        }
        self.bring(away);
    }
}

impl Drop for Pager {
    fn drop(&mut self) {
        self.leases.take().unwrap().put_aside();
        PagerLeases::remove_ended(Path::new(LEASE_FOLDER), |_| false);
    }
}

/// Puts a request whose parts are in pages of their own, with an indirect table.
fn put(client: &Client, head: u16, kind: u32, sector: u64) {
    put_pieces(client, head, kind, sector, &[(PLACE, 2 * PAGE as u32)]);
}

/// The same with these pieces of data: addresses and lengths.
fn put_pieces(client: &Client, head: u16, kind: u32, sector: u64, data: &[(u64, u32)]) {
    client.put_header(HEADER, kind, sector);
    client.put(STATUS, &[0xee]);
    let fills = if kind == READ { WRITABLE } else { 0 };
    let data = data.iter().map(|&(address, length)| (address, length, fills | NEXT));
    let pieces = [(HEADER, 16, NEXT)].into_iter().chain(data).chain([(STATUS, 1, WRITABLE)]);
    let mut count = 0;
    for (address, length, flags) in pieces {
        let descriptor = Descriptor { address, length, flags, next: count + 1 };
        client.put_descriptor(TABLE, count, descriptor);
        count += 1;
    }
    let length = 16 * u32::from(count);
    let table = Descriptor { address: TABLE, length, flags: INDIRECT, next: 0 };
    client.put_descriptor(Client::places(0).0, head, table);
}

fn offer(client: &mut Client, head: u16) {
    client.offer(0, head);
    client.kick(0);
}

fn data(seed: u8) -> Vec<u8> {
    (0..2 * PAGE as u32).map(|at| (at / 7) as u8 ^ seed).collect()
}

#[test]
fn a_request_waits_for_its_pages_and_others_go_on() {
    let memory = memfd(MEMORY);
    let Some(pager) = Pager::start(&memory) else { return };
    let served = serve();
    let mut client = Client::connect_with(&served.socket, 2, 0, memory);
    client.start_queue(0, 0);
    client.start_queue(1, 0);
    let parts = [HEADER, PLACE, PLACE + PAGE, STATUS, TABLE];
    for (round, part) in (0_u8..).zip(parts) {
        for kind in [WRITE, READ] {
            put(&client, 0, kind, 64);
            let expected = data(round);
            client.put(PLACE, &if kind == WRITE { expected.clone() } else { vec![0; 8192] });
            let away = pager.evict(part);
            offer(&mut client, 0);
            // The other queue of the same thread; its requests have pages of their own.
            let pieces = [(DATA + 0x10000, 16, false), (DATA + 0x11000, 1, true)];
            client.put_header(DATA + 0x10000, crate::client::FLUSH, 0);
            assert_eq!(client.request_chain(1, &pieces, DATA + 0x11000).0, 0);
            assert_eq!(client.wait_for(0, SHORTLY), None, "{part:x} is away");
            assert!(pager.word(part).is_wanted());
            pager.bring(&away);
            assert_eq!(client.wait(0).0, 0);
            assert_eq!(client.get(STATUS, 1), [0], "{kind} with {part:x} away");
            assert_eq!(client.get(PLACE, 8192), expected, "{kind} with {part:x} away");
            let words = parts.map(|part| pager.word(part));
            assert!(words.iter().all(|word| !word.is_leased()), "{words:?}");
        }
    }
    let status = served.server.status();
    assert_eq!((status.refused, status.lost, status.panics), (0, 0, 0));
}

/// A read of the disk makes its pages anew, and asks for all of them at once; a write needs them.
#[test]
fn a_read_overwrites_its_pages_and_all_pieces_are_asked_for_at_once() {
    let memory = memfd(MEMORY);
    let Some(pager) = Pager::start(&memory) else { return };
    let served = serve();
    let mut client = Client::connect_with(&served.socket, 1, 0, memory);
    client.start_queue(0, 0);
    for kind in [WRITE, READ] {
        client.put(PLACE, &data(7));
        // A page, and all but the end of the next one.
        let pieces = [(PLACE, PAGE as u32), (PLACE + PAGE, PAGE as u32 - 512)];
        put_pieces(&client, 0, kind, 64, &pieces);
        let mut away = [PLACE, PLACE + PAGE].map(|place| pager.evict(place));
        offer(&mut client, 0);
        assert_eq!(client.wait_for(0, SHORTLY), None);
        let words = [PLACE, PLACE + PAGE].map(|place| pager.word(place));
        assert!(words.iter().all(|word| word.is_wanted()), "{words:?}");
        let are_overwritten = words.map(PageWord::is_overwritten);
        assert_eq!(are_overwritten, [kind == READ, false], "{words:?}");
        if kind == READ {
            away[0].1.fill(0);
        }
        for away in away {
            pager.bring(&away);
        }
        assert_eq!(client.wait(0).0, 0);
        assert_eq!(client.get(STATUS, 1), [0], "{kind}");
        assert_eq!(client.get(PLACE, 8192), data(7), "{kind}");
    }
}

#[test]
fn a_page_that_leaves_while_its_request_is_in_flight_stays_until_the_end() {
    let memory = memfd(MEMORY);
    let Some(pager) = Pager::start(&memory) else { return };
    let layer = crate::holding::Holding::default();
    let holds = Arc::clone(&layer.holds);
    holds.store(true, std::sync::atomic::Ordering::Relaxed);
    let served = crate::serve_with(vec![Arc::new(layer)], false);
    let mut client = Client::connect_with(&served.socket, 1, 0, memory);
    client.start_queue(0, 0);
    put(&client, 0, WRITE, 0);
    offer(&mut client, 0);
    assert_eq!(client.wait_for(0, SHORTLY), None);
    let table = pager.leases().table();
    for part in [PLACE, PLACE + PAGE, STATUS, 0, 0x1000, 0x2000] {
        assert!(table.change(part / PAGE, PageWord::leave).is_err(), "{part:x} is in use");
    }
    assert_eq!(client.wait_for(0, SHORTLY), None);
    holds.store(false, std::sync::atomic::Ordering::Relaxed);
    assert_eq!(client.wait(0).0, 0);
    assert_eq!(client.get(STATUS, 1), [0]);
    pager.evict(STATUS);
}

#[test]
fn a_ring_starts_when_its_parts_have_come_in() {
    let memory = memfd(MEMORY);
    let Some(pager) = Pager::start(&memory) else { return };
    let served = serve();
    let mut client = Client::connect_with(&served.socket, 1, 0, memory);
    let away = [0, 0x1000, 0x2000].map(|part| pager.evict(part));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // One after the other: each attempt wants the first part that is away.
            for one in away {
                pager.bring_when_wanted(&one);
            }
        });
        client.start_queue(0, 0);
    });
    client.assert_works(0);
}

#[test]
fn a_ring_that_stops_gives_back_what_waits_for_pages() {
    let memory = memfd(MEMORY);
    let Some(pager) = Pager::start(&memory) else { return };
    let served = serve();
    let mut client = Client::connect_with(&served.socket, 1, 0, memory);
    client.start_queue(0, 0);
    put(&client, 0, WRITE, 8);
    client.put(PLACE, &data(3));
    let away = pager.evict(HEADER);
    offer(&mut client, 0);
    assert_eq!(client.wait_for(0, SHORTLY), None);
    assert_eq!(client.frontend.get_vring_base(0).unwrap(), 0, "the ring continues with it");
    client.start_queue(0, 0);
    client.kick(0);
    assert_eq!(client.wait_for(0, SHORTLY), None);
    pager.bring(&away);
    assert_eq!((client.wait(0).0, client.get(STATUS, 1)), (0, vec![0]));
    let mut back = data(0);
    assert_eq!(client.request(0, READ, 8, &mut back), 0);
    assert_eq!(back, data(3));
}

#[test]
fn pages_that_nobody_brings_fail_their_request_and_a_status_byte_is_never_missed() {
    let memory = memfd(MEMORY);
    let Some(pager) = Pager::start(&memory) else { return };
    let served = serve();
    let mut client = Client::connect_with(&served.socket, 1, 0, memory);
    client.start_queue(0, 0);
    put(&client, 0, WRITE, 8);
    let away = pager.evict(PLACE);
    offer(&mut client, 0);
    assert_eq!(client.wait(0).0, 0);
    assert_eq!(client.get(STATUS, 1), [FAILED]);
    // One that is on its way, from a slow disk, is waited for.
    put(&client, 0, WRITE, 8);
    client.put(STATUS, &[FAILED]);
    pager.leases().table().change(away.0, PageWord::come).unwrap();
    offer(&mut client, 0);
    assert_eq!(client.wait_for(0, Duration::from_secs(6)), None);
    pager.put_back(&away);
    assert_eq!(client.wait(0).0, 0);
    assert_eq!(client.get(STATUS, 1), [0]);
    put(&client, 0, WRITE, 8);
    client.put(STATUS, &[0]);
    let away = pager.evict(STATUS);
    offer(&mut client, 0);
    // What is in the page would say that it had succeeded.
    assert_eq!(client.wait_for(0, Duration::from_secs(6)), None);
    pager.bring(&away);
    assert_eq!(client.wait(0).0, 0);
    assert_eq!(client.get(STATUS, 1), [FAILED]);
    client.assert_works(0);
    assert_eq!(served.server.status().refused, 0, "nothing was wrong with them");
}

/// The ring does something else for longer than a request may wait, and its pages come meanwhile.
#[test]
fn a_request_whose_pages_have_come_does_not_fail_because_its_time_is_over() {
    let memory = memfd(MEMORY);
    let Some(pager) = Pager::start(&memory) else { return };
    let served = serve();
    let mut client = Client::connect_with(&served.socket, 1, 0, memory);
    client.start_queue(0, 0);
    put(&client, 0, WRITE, 8);
    client.put(PLACE, &data(1));
    let away = pager.evict(PLACE);
    offer(&mut client, 0);
    assert_eq!(client.wait_for(0, SHORTLY), None);
    client.frontend.set_vring_enable(0, false).unwrap();
    pager.bring(&away);
    std::thread::sleep(Duration::from_millis(5200));
    client.frontend.set_vring_enable(0, true).unwrap();
    assert_eq!((client.wait(0).0, client.get(STATUS, 1)), (0, vec![0]));
}

#[test]
fn a_connection_that_runs_takes_leases_when_a_pager_comes_and_none_when_it_has_gone() {
    let memory = memfd(MEMORY);
    let served = serve();
    let mut client = Client::connect_with(&served.socket, 2, 0, memory.try_clone().unwrap());
    client.start_queue(0, 0);
    client.start_queue(1, 0);
    client.assert_works(0);
    assert!(served.server.lease_renewal().run().is_empty());
    let Some(pager) = Pager::start(&memory) else { return };
    let leases = served.server.lease_renewal().run();
    let leases: Vec<_> = leases.into_iter().map(Result::unwrap).collect();
    assert_eq!(leases.len(), 1);
    leases[0].set_ready();
    assert_eq!(GuestLeases::set_ready_for_eviction(&leases), None, "queue 1 was never used");
    assert_eq!(pager.leases().holders_for_eviction().unwrap(), [std::process::id()]);
    client.assert_works(0);
    let away = pager.evict(PLACE);
    put(&client, 0, READ, 0);
    offer(&mut client, 0);
    pager.bring_when_wanted(&away);
    assert_eq!((client.wait(0).0, client.get(STATUS, 1)), (0, vec![0]));
    assert_eq!(pager.word(0).state(), PageState::Resident);
    assert!(pager.word(0).is_leased(), "the ring");
    drop((leases, pager));
    assert!(served.server.lease_renewal().run().is_empty());
    client.assert_works(1);
    assert_eq!(served.server.status().memory, MEMORY);
}
