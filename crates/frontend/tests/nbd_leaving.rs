//! What a client that has gone leaves in flight never lands on newer data.

#![allow(missing_docs, reason = "test code")]

#[path = "common/holding.rs"]
mod holding;
mod nbd_common;

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fathom_block::Disk;
use holding::Holding;
use nbd_common::{Answer, Client, DISCONNECT, MIB, Mode, READ, Server, WRITE, disk_of};

const SHUTDOWN: u32 = 108;
const LENGTH: usize = 4096;
/// Longer than a thread needs to notice that a client has gone.
const SOME_TIME: Duration = Duration::from_millis(200);

/// A disk whose writes are held while the flag is set.
fn held(gives_none_back: bool) -> (Server, Arc<Disk>, Arc<AtomicBool>) {
    let holds = Arc::new(AtomicBool::new(true));
    let layer = Holding { holds: Arc::clone(&holds), gives_none_back };
    let disk = disk_of("a", 64 * MIB, false, vec![Arc::new(layer)]);
    (Server::new(&[&disk]), disk, holds)
}

fn wait_until(what: &str, mut is: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is() {
        assert!(begun.elapsed() < Duration::from_secs(20), "never: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn send_writes(client: &mut Client, count: u64, content: u8) {
    for block in 0..count {
        let length = LENGTH as u64;
        client.send(WRITE, 0, block * length, length, &[content; LENGTH]);
    }
}

/// The number of requests in flight on all connections.
fn in_flight(server: &Server) -> u64 {
    server.listener.connections().iter().map(|connection| connection.in_flight).sum()
}

#[test]
fn held_writes_of_a_lost_client_never_land() {
    // The second count is the most that a connection may have in flight, so that the server reads
    // no more.
    for count in [3, 1024] {
        let (server, _, holds) = held(false);
        let mut first = server.client("a", Mode::Simple);
        send_writes(&mut first, count, 1);
        wait_until("the writes are held", || in_flight(&server) == count);
        drop(first);
        let mut second = server.client("a", Mode::Simple);
        wait_until("the writes are dropped", || in_flight(&server) == 0);
        holds.store(false, Ordering::Relaxed);
        assert_eq!(second.write(0, &[2; LENGTH]), 0);
        wait_until("the first connection ends", || server.listener.connections().len() == 1);
        std::thread::sleep(SOME_TIME);
        let content = second.read(0, 2 * LENGTH as u64);
        assert_eq!((content[0], content[LENGTH]), (2, 0), "an older write has landed");
    }
}

#[test]
fn newer_requests_wait_for_what_the_storage_has_of_a_lost_client() {
    let (server, disk, holds) = held(true);
    let mut first = server.client("a", Mode::Simple);
    send_writes(&mut first, 2, 1);
    wait_until("the writes are in flight", || in_flight(&server) == 2);
    drop(first);
    let mut second = server.client("a", Mode::Simple);
    // Reads of other places pass; one that overlaps waits, as a write does.
    assert_eq!(second.read(MIB, 512)[0], 0);
    let write = second.send(WRITE, 0, 4096, 4096, &[2; LENGTH]);
    let read = second.send(READ, 0, 0, 512, &[]);
    let free = second.send(READ, 0, MIB, 512, &[]);
    assert_eq!(second.receive().0, free);
    std::thread::sleep(SOME_TIME);
    holds.store(false, Ordering::Relaxed);
    let mut answers = [second.receive(), second.receive()];
    answers.sort_by_key(|answer| answer.0);
    assert_eq!((answers[0].0, answers[1].0), (write, read));
    assert_eq!(answers[1].1.data, [1; 512], "the older write came first");
    assert_eq!(second.read(4096, 512), [2; 512]);
    std::thread::sleep(SOME_TIME);
    assert_eq!(second.read(4096, 512), [2; 512], "an older write has landed");
    drop(second);
    // Nothing is remembered of them.
    let mut third = server.client("a", Mode::Simple);
    assert_eq!(third.write(0, &[3; LENGTH]), 0);
    drop((third, disk));
}

#[test]
fn held_requests_of_a_client_that_disconnects_are_answered() {
    let (server, _, holds) = held(false);
    let mut first = server.client("a", Mode::Simple);
    let one = first.send(WRITE, 0, 0, 4096, &[1; LENGTH]);
    let (_, disconnect) = first.header(DISCONNECT, 0, 0, 0);
    first.stream.write_all(&disconnect).unwrap();
    std::thread::sleep(SOME_TIME);
    // They wait for their time.
    holds.store(false, Ordering::Relaxed);
    assert_eq!((first.receive(), first.is_disconnected()), ((one, Answer::default()), true));
    // But not for ever.
    holds.store(true, Ordering::Relaxed);
    let mut second = server.client("a", Mode::Simple);
    let one = second.send(WRITE, 0, 0, 4096, &[2; LENGTH]);
    let (_, disconnect) = second.header(DISCONNECT, 0, 0, 0);
    second.stream.write_all(&disconnect).unwrap();
    let (cookie, answer) = second.receive();
    assert_eq!((cookie, answer.error), (one, SHUTDOWN));
    let mut third = server.client("a", Mode::Simple);
    assert_eq!(third.read(0, 512), [1; 512]);
}
