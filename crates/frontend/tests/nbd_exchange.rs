//! The exchange of a reply and the wait for the next request, with clients that wait for each
//! reply.

#![allow(missing_docs, reason = "test code")]

mod nbd_common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use fathom_frontend::nbd::{BUDGET_MIN, RequestBudget};
use nbd_common::{Client, MIB, MODES, Mode, READ, Server, WRITE, disk};

const LENGTH: u64 = 4096;
/// Large replies, of which the socket takes fewer than so many.
const LARGE: u64 = 24 << 10;
const BLOCKS: u64 = 250;

fn wait_until(what: &str, mut is: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is() {
        assert!(begun.elapsed() < Duration::from_secs(20), "never: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The numbers of answered requests and of those in flight, of the only connection.
fn counts(server: &Server) -> (u64, u64) {
    let connections = server.listener.connections();
    assert_eq!(connections.len(), 1);
    (connections[0].requests, connections[0].in_flight)
}

/// Writes to each of the first blocks of a length a content that tells them apart.
fn fill(client: &mut Client, blocks: u64, length: u64) {
    for block in 0..blocks {
        assert_eq!(client.write(block * length, &vec![block as u8 + 1; length as usize]), 0);
    }
}

#[test]
fn replies_to_a_client_that_does_not_read_are_complete() {
    for mode in MODES {
        let disk = disk("a", 64 * MIB);
        let server = Server::new(&[&disk]);
        let mut client = server.client("a", mode);
        fill(&mut client, BLOCKS, LARGE);
        wait_until("the writes are answered", || counts(&server) == (BLOCKS, 0));
        // Far more than the socket takes. The thread rests after each.
        let mut cookies = Vec::new();
        for block in 0..BLOCKS {
            cookies.push(client.send(READ, 0, block * LARGE, LARGE, &[]));
            std::thread::sleep(Duration::from_millis(2));
        }
        wait_until("replies wait for the client", || counts(&server).1 > 0);
        let (answered, waiting) = counts(&server);
        // The first reply that did not fit counts as answered already.
        assert!(answered > BLOCKS && answered + waiting <= 2 * BLOCKS + 1, "{answered} {waiting}");
        for (block, cookie) in cookies.into_iter().enumerate() {
            let (found, answer) = client.receive();
            assert_eq!((found, answer.error), (cookie, 0));
            assert!(answer.data == vec![block as u8 + 1; LARGE as usize], "{mode:?} {block}");
        }
        wait_until("everything is answered", || counts(&server) == (2 * BLOCKS, 0));
    }
}

#[test]
fn an_idle_client_has_no_requests_in_flight() {
    let disk = disk("a", 64 * MIB);
    let server = Server::new(&[&disk]);
    let mut client = server.client("a", Mode::Simple);
    for count in 1..50 {
        assert_eq!(client.write(0, &[count as u8; LENGTH as usize]), 0);
        // The thread sleeps before the next.
        std::thread::sleep(Duration::from_millis(if count % 5 == 0 { 20 } else { 0 }));
        wait_until("the request is answered", || counts(&server) == (count, 0));
    }
}

#[test]
fn requests_of_all_sizes_follow_a_pause() {
    let disk = disk("a", 64 * MIB);
    let server = Server::new(&[&disk]);
    let mut client = server.client("a", Mode::Structured);
    for length in [512, LENGTH, 100 << 10, 128 << 10, 129 << 10, 1 << 20, 5 << 20] {
        for pause in [0, 5] {
            std::thread::sleep(Duration::from_millis(pause));
            let content: Vec<u8> = (0..length).map(|at| (at / 512 + pause) as u8).collect();
            assert_eq!(client.write(MIB, &content), 0);
            std::thread::sleep(Duration::from_millis(pause));
            assert!(client.read(MIB, length) == content, "{length}");
        }
    }
    // Several at once, after a pause, with a piece of the last.
    std::thread::sleep(Duration::from_millis(5));
    let cookies: Vec<u64> =
        (0..40).map(|block| client.send(READ, 0, block * LENGTH, LENGTH, &[])).collect();
    for _ in &cookies {
        assert!(cookies.contains(&client.receive().0));
    }
}

#[test]
fn a_second_client_on_the_thread_of_a_resting_one_is_served() {
    let disk = disk("a", 64 * MIB);
    let server = Server::new(&[&disk]);
    let mut first = server.client("a", Mode::Simple);
    fill(&mut first, 3, LENGTH);
    std::thread::sleep(Duration::from_millis(5));
    let mut second = server.client("a", Mode::Simple);
    for round in 0..20 {
        assert_eq!(second.read(0, LENGTH)[0], 1 + round);
        // The first one's bytes were awaited before the second came.
        assert_eq!(first.write(0, &[2 + round; LENGTH as usize]), 0);
    }
    // Those that leave, and one that comes again.
    drop(second);
    wait_until("the second has left", || server.listener.connections().len() == 1);
    assert_eq!(first.read(LENGTH, 512), [2; 512]);
    let cookie = first.send(WRITE, 0, 0, LENGTH, &[9; LENGTH as usize]);
    drop(first);
    let _ = cookie;
    wait_until("the first has left", || server.listener.connections().is_empty());
    let mut third = server.client("a", Mode::Simple);
    assert_eq!(third.read(0, 512), [9; 512]);
}

/// A client that once did not read for a moment has as much time later as any other, and no more.
#[test]
fn a_client_that_has_waited_once_may_wait_again() {
    let (first, second) = (disk("a", 64 * MIB), disk("b", 64 * MIB));
    let server = Server::with(&[&first, &second], |options| {
        options.budget = Arc::new(RequestBudget::new(BUDGET_MIN, BUDGET_MIN));
    });
    let mut client = server.client("a", Mode::Simple);
    let id = server.listener.connections()[0].id;
    let mut sent = 0;
    while counts(&server).1 == 0 {
        client.send(READ, 0, 0, LARGE, &[]);
        sent += 1;
        assert!(sent < BLOCKS, "the socket takes everything");
        std::thread::sleep(Duration::from_millis(20));
    }
    for _ in 0..sent {
        assert_eq!(client.receive().1.error, 0);
    }
    wait_until("everything is answered", || counts(&server) == (sent, 0));
    // Longer than a reply of the next length may take.
    std::thread::sleep(Duration::from_secs(5));
    // One client takes all memory of its export, so that the other one waits for it.
    let mut others = [server.client("b", Mode::Simple), server.client("b", Mode::Simple)];
    for other in &mut others {
        other.send(READ, 0, 0, BUDGET_MIN / 2, &[]);
        std::thread::sleep(Duration::from_millis(200));
    }
    client.send(READ, 0, 0, 4 * MIB, &[]);
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(client.receive().1.data.len() as u64, 4 * MIB);
    // But not for ever, although its next request is awaited, too.
    client.send(READ, 0, 0, 4 * MIB, &[]);
    wait_until("the client is cut off", || {
        server.listener.connections().iter().all(|connection| connection.id != id)
    });
}
