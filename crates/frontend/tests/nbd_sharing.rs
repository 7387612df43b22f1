//! Connections that share a thread: each is served, and none waits for another.

#[path = "common/hanging.rs"]
mod hanging;
mod nbd_common;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fathom_backend::Memory;
use fathom_block::{Disk, DiskOptions};
use fathom_frontend::nbd::{Address, Exports, Listener, ListenerOptions};
use hanging::Hanging;
use nbd_common::*;

const CROWD: u64 = 500;
/// A time limit for quick events on a busy machine.
const WAIT_MAX: Duration = Duration::from_secs(20);

/// The number of threads that serve connections of the disk `name`.
fn threads(name: &str) -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names =
        tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.filter(|task| task.trim_end() == format!("nbd-{name}")).count()
}

/// Waits until `name` has `count` threads.
fn await_threads(name: &str, count: usize) {
    let begun = Instant::now();
    while threads(name) != count {
        assert!(begun.elapsed() < WAIT_MAX, "{} threads instead of {count}", threads(name));
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Raises the limit on descriptors, because each client takes two sockets and an eventfd.
fn allow_descriptors() {
    let mut limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    limit.current = limit.maximum;
    rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
}

#[test]
fn five_hundred_clients_share_a_few_threads() {
    allow_descriptors();
    for threads_max in [1, 3] {
        let name = format!("crowd{threads_max}");
        let directory = tempfile::tempdir().unwrap();
        let exports = Arc::new(Exports::with_threads(threads_max));
        exports.add(&name, "", disk(&name, MIB)).unwrap();
        let options = ListenerOptions::new(Address::Unix(directory.path().join("nbd.sock")));
        let listener = Listener::new(options, Arc::clone(&exports)).unwrap();
        let server = Server { directory, exports, listener };
        let mut clients: Vec<Client> =
            (0..CROWD).map(|_| server.client(&name, Mode::Structured)).collect();
        assert_eq!(threads(&name), threads_max);
        for round in 0..3_u64 {
            // All at the same time.
            let block = |client: u64| pattern(round << 32 | client, 512);
            let writes: Vec<u64> = (0..)
                .zip(&mut clients)
                .map(|(index, client)| client.send(WRITE, 0, index * 512, 512, &block(index)))
                .collect();
            for (client, cookie) in clients.iter_mut().zip(writes) {
                assert_eq!(client.receive(), (cookie, Answer::default()));
            }
            // Each client reads the data that its neighbour wrote.
            for (index, client) in (0..).zip(&mut clients) {
                let other = (index + 1) % CROWD;
                assert_eq!(client.read(other * 512, 512), block(other));
            }
        }
        assert_eq!(threads(&name), threads_max);
        let begun = Instant::now();
        while !server.listener.connections().iter().all(|client| client.requests == 6) {
            assert!(begun.elapsed() < WAIT_MAX, "each client's requests are counted");
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(server.listener.connections().len() as u64, CROWD);
        // A thread ends with its last connection, and the next connection starts a new one.
        clients.truncate(1);
        await_threads(&name, 1);
        assert_eq!(clients[0].read(0, 1).len(), 1);
        clients.clear();
        await_threads(&name, 0);
        assert_eq!(server.client(&name, Mode::Simple).read(0, 1).len(), 1);
        await_threads(&name, 0);
    }
}

#[test]
fn a_client_that_reads_no_replies_stops_no_other_of_its_thread() {
    let server = Server::new(&[&disk("deaf", 8 * MIB)]);
    // More than the sockets hold, but less than makes other clients wait for memory: a client that
    // holds such memory would be cut off.
    let reads = 8;
    let mut deaf: Vec<Client> = (0..8).map(|_| server.client("deaf", Mode::Structured)).collect();
    for client in &mut deaf {
        for _ in 0..reads {
            client.send(READ, 0, 0, MIB, &[]);
        }
        // A client whose payload never arrives.
        let (_, header) = client.header(WRITE, 0, 0, MIB);
        io::Write::write_all(&mut client.stream, &header).unwrap();
    }
    let mut client = server.client("deaf", Mode::Structured);
    assert_eq!(threads("deaf"), 1);
    for index in 0..2000 {
        let data = pattern(index, 4096);
        let begun = Instant::now();
        assert_eq!(client.write(4 * MIB + index % 100 * 4096, &data), 0);
        assert_eq!(client.read(4 * MIB + index % 100 * 4096, 4096), data);
        assert!(begun.elapsed() < Duration::from_secs(8), "{:?}", begun.elapsed());
    }
    // The other clients receive their replies once they read them.
    for client in &mut deaf {
        for _ in 0..reads {
            assert_eq!(client.receive().1.error, 0);
        }
    }
}

#[test]
fn a_request_that_hangs_delays_only_its_own_connection() {
    let hanging = Hanging::default();
    let switch = Arc::clone(&hanging.0);
    let options = DiskOptions { name: "hangs".to_owned(), ..DiskOptions::default() };
    let disk = Disk::new(options, vec![Arc::new(hanging)], Arc::new(Memory::new(MIB))).unwrap();
    let server = Server::new(&[&disk]);
    let mut stuck: Vec<Client> = (0..3).map(|_| server.client("hangs", Mode::Simple)).collect();
    switch.store(true, Ordering::Relaxed);
    let cookies: Vec<u64> =
        stuck.iter_mut().map(|client| client.send(READ, 0, 0, 512, &[])).collect();
    // One client disconnects with its request in flight.
    drop(stuck.pop());
    let mut client = server.client("hangs", Mode::Extended);
    for index in 1..1000 {
        assert_eq!(client.write(index * 512, &pattern(index, 512)), 0);
        assert_eq!(client.read(index * 512, 512), pattern(index, 512));
    }
    assert_eq!(threads("hangs"), 1);
    assert_eq!(server.listener.connections().len(), 4, "a lost connection waits for the disk");
    switch.store(false, Ordering::Relaxed);
    for (client, cookie) in stuck.iter_mut().zip(cookies) {
        assert_eq!(client.receive().0, cookie);
    }
    drop(stuck);
    drop(client);
    await_threads("hangs", 0);
    assert!(server.listener.connections().is_empty());
}

#[test]
fn layers_change_while_the_clients_of_a_thread_work() {
    let disk = disk("changes", MIB);
    let server = Server::new(&[&disk]);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for number in 0..6 {
            let mut client = server.client("changes", MODES[number % 3]);
            let done = &done;
            scope.spawn(move || {
                let base = number as u64 * 64 << 10;
                let mut round = 0;
                while !done.load(Ordering::Relaxed) {
                    round += 1;
                    let data = pattern(round * 8 + number as u64, 4096);
                    assert_eq!(client.write(base + round % 16 * 4096, &data), 0);
                    assert_eq!(client.read(base + round % 16 * 4096, 4096), data);
                }
            });
        }
        for round in 0..40 {
            let probe = Probe::new(round % 2 * 100_000, true);
            disk.restack(vec![probe.clone()], fathom_block::CHANGE_TIME_MAX).unwrap();
            let begun = Instant::now();
            while probe.count(fathom_block::Operation::Write) < 20 {
                if begun.elapsed() > WAIT_MAX {
                    done.store(true, Ordering::Relaxed);
                    panic!("the new layer is not used");
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        done.store(true, Ordering::Relaxed);
    });
}
