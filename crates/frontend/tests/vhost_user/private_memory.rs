//! A guest whose writes to memory do not arrive is distinguished from an idle one.

use std::time::{Duration, Instant};

use crate::client::{Client, DATA, MEMORY, memfd};
use crate::serve;

/// A time by which the memory has been examined: a second after a kick on an empty ring.
const EXAMINED_AFTER: Duration = Duration::from_secs(3);

#[test]
fn kicks_in_a_blank_memory_are_suspected_until_a_request_arrives() {
    let served = serve();
    let mut client = Client::start(&served.socket, 2, 0);
    std::thread::sleep(EXAMINED_AFTER);
    assert!(!served.server.status().blind, "there was no kick");
    client.kick(0);
    let begun = Instant::now();
    while !served.server.status().blind {
        assert!(begun.elapsed() < Duration::from_secs(20), "never suspected");
        std::thread::sleep(Duration::from_millis(10));
    }
    client.assert_works(1);
    assert!(!served.server.status().blind);
    // Each connection is examined separately.
    drop(client);
    let client = Client::start(&served.socket, 1, 0);
    assert!(!served.server.status().blind);
    drop(client);
}

#[test]
fn kicks_of_an_idle_guest_are_not_suspected() {
    let served = serve();
    let memory = memfd(MEMORY);
    let mut client = Client::connect_with(&served.socket, 1, 0, memory);
    client.put(DATA + 0x12345, &[0x5a; 1024]);
    client.start_queue(0, 0);
    client.kick(0);
    std::thread::sleep(EXAMINED_AFTER);
    assert!(!served.server.status().blind);
    client.assert_works(0);
}
