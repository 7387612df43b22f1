//! Clients that violate the protocol, stall, disconnect or flood: each is answered or cut off and
//! counted, and the others continue.

mod nbd_common;

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use fathom_frontend::nbd::{fuzz_negotiation, fuzz_requests};
use nbd_common::*;

/// Waits until the server has counted `count` protocol errors.
fn await_errors(server: &Server, count: u64) {
    let end = Instant::now() + Duration::from_secs(20);
    while server.listener.counters().protocol_errors != count {
        let errors = server.listener.counters().protocol_errors;
        assert!(errors < count && Instant::now() < end, "{errors} instead of {count}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn clients_that_violate_the_negotiation_are_cut_off_and_counted() {
    let server = Server::with(&[&disk("disk", MIB)], |options| {
        options.negotiation_time_max = Duration::from_millis(400);
    });
    let mut good = server.client("disk", Mode::Structured);

    // Unknown flags.
    let mut stream = server.connect();
    stream.write_all(&[0xff; 4]).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    assert_eq!(answer.len(), 18);
    await_errors(&server, 1);
    // No magic.
    let mut client = Client::greet(server.connect());
    client.stream.write_all(&[b'x'; 64]).unwrap();
    assert!(client.is_disconnected());
    await_errors(&server, 2);
    // An option of 4 GiB.
    let mut client = Client::greet(server.connect());
    client.stream.write_all(b"IHAVEOPT\0\0\0\x07\xff\xff\xff\xff").unwrap();
    assert!(client.is_disconnected());
    await_errors(&server, 3);
    // An option that is too long is skipped, and the next one is answered.
    let mut client = Client::greet(server.connect());
    assert_eq!(client.outcome(GO, &vec![0; 300 << 10]), ERROR | 9);
    assert_eq!(client.outcome(LIST, &[]), ACK);
    // Too many options.
    let mut client = Client::greet(server.connect());
    let mut options = Vec::new();
    for _ in 0..300 {
        options.extend(b"IHAVEOPT\0\0\0\x03\0\0\0\0");
    }
    // The server may disconnect before all options are sent.
    let _ = client.stream.write_all(&options);
    let mut listed = Vec::new();
    let _ = client.stream.read_to_end(&mut listed);
    await_errors(&server, 4);
    // Too slow: one client sends nothing, and one an incomplete option. The client whose option was
    // skipped above has stalled too.
    let start = Instant::now();
    let mut silent = Client::greet(server.connect());
    let mut stalled = Client::greet(server.connect());
    stalled.stream.write_all(b"IHAVE").unwrap();
    assert!(silent.is_disconnected() && stalled.is_disconnected());
    assert!(start.elapsed() < Duration::from_secs(10));
    await_errors(&server, 7);
    // A client that disconnects within an option.
    let mut client = Client::greet(server.connect());
    client.stream.write_all(b"IHAVE").unwrap();
    drop(client);
    await_errors(&server, 8);
    // A client that disconnects immediately is not counted.
    drop(server.connect());

    assert_eq!(good.read(0, 4), [0; 4]);
    assert_eq!(server.listener.counters().refused, 0);
}

#[test]
fn clients_that_violate_the_transmission_are_cut_off_and_counted() {
    let server = Server::new(&[&disk("disk", MIB)]);
    let mut good = server.client("disk", Mode::Structured);
    // No magic number, for both widths; the requests before it are answered.
    for (count, mode) in (1..).zip(MODES) {
        let mut client = server.client("disk", mode);
        let cookie = client.send(READ, 0, 0, 8, &[]);
        client.stream.write_all(&[0; 64]).unwrap();
        assert_eq!(client.receive().0, cookie);
        assert!(client.is_disconnected());
        await_errors(&server, count);
    }
    // A header with a 32-bit length after an agreement on 64-bit lengths.
    let mut client = server.client("disk", Mode::Extended);
    client.mode = Mode::Structured;
    client.send(READ, 0, 0, 8, &[0; 8]);
    assert!(client.is_disconnected());
    await_errors(&server, 4);
    // Payloads far too long.
    let mut client = server.client("disk", Mode::Simple);
    client.send(WRITE, 0, 0, 0xffff_ffff, &[]);
    assert!(client.is_disconnected());
    await_errors(&server, 5);
    let mut client = server.client("disk", Mode::Extended);
    client.send(WRITE, 0, 0, u64::MAX, &[]);
    assert!(client.is_disconnected());
    await_errors(&server, 6);
    // A client that disconnects within a payload: the disk receives no byte of it.
    let mut client = server.client("disk", Mode::Structured);
    client.send(WRITE, 0, 0, MIB, &vec![9; 500_000]);
    drop(client);
    let end = Instant::now() + Duration::from_secs(10);
    while server.listener.connections().len() > 1 {
        assert!(Instant::now() < end);
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(good.read(0, MIB), vec![0; 1 << 20]);
    assert_eq!(server.listener.counters().protocol_errors, 6);
}

#[test]
fn a_client_that_reads_no_replies_delays_no_other() {
    let server = Server::new(&[&disk("disk", 64 * MIB)]);
    let mut good = server.client("disk", Mode::Structured);
    let mut greedy = server.client("disk", Mode::Simple);
    // Far more reads of 32 MiB than the server accepts: it soon stops reading requests.
    greedy.stream.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
    let mut sent = 0;
    for _ in 0..200_000 {
        let (_, header) = greedy.header(READ, 0, 0, 32 * MIB);
        match greedy.stream.write_all(&header) {
            Ok(()) => sent += 1,
            Err(_) => break,
        }
    }
    assert!(sent < 50_000, "{sent} requests were taken");
    let in_flight = || {
        let status = server.listener.connections();
        status.iter().map(|connection| connection.in_flight).max().unwrap()
    };
    let begun = Instant::now();
    while in_flight() == 0 && begun.elapsed() < Duration::from_secs(10) {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!((1..=2).contains(&in_flight()), "{} in flight", in_flight());
    assert_eq!(good.read(0, 4), [0; 4]);
    // The shutdown does not wait for this client for ever.
    let start = Instant::now();
    server.listener.shutdown();
    assert!(start.elapsed() < Duration::from_secs(12));
}

#[test]
fn no_more_connections_than_allowed() {
    let server = Server::with(&[&disk("disk", MIB)], |options| options.connections_max = 2);
    let first = server.client("disk", Mode::Simple);
    let mut second = server.client("disk", Mode::Simple);
    assert_eq!(server.connect().read(&mut [0; 1]).unwrap(), 0);
    assert_eq!(server.listener.counters().refused, 1);
    assert_eq!(second.read(0, 1), [0]);
    drop(first);
    let end = Instant::now() + Duration::from_secs(10);
    while server.listener.connections().len() > 1 {
        assert!(Instant::now() < end);
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(server.client("disk", Mode::Simple).read(0, 1), [0]);
}

/// The bytes of a well-behaved client, to be mutated.
fn well_behaved() -> Vec<u8> {
    let mut bytes = 3_u32.to_be_bytes().to_vec();
    let mut option = |code: u32, data: &[u8]| {
        bytes.extend(b"IHAVEOPT");
        bytes.extend(code.to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
    };
    option(LIST, &[]);
    option(STARTTLS, &[]);
    option(STRUCTURED, &[]);
    option(LIST_META, &meta("one", &["base:"]));
    option(EXTENDED, &[]);
    option(SET_META, &meta("two", &["base:allocation", "x:y"]));
    option(INFO, &go("one", &[1, 2, 3]));
    option(GO, &go("two", &[3]));
    bytes
}

/// A few thousand seeded inputs for the functions that `fuzz/` tests at length.
#[test]
fn the_negotiation_survives_random_and_mutated_bytes() {
    let well_behaved = well_behaved();
    let mut random = Random(2);
    for round in 0..6000 {
        let mut data = vec![random.next() as u8];
        if round % 4 == 0 {
            data.extend(pattern(round, random.below(200) as usize));
        } else {
            data.extend(&well_behaved);
            for _ in 0..=random.below(4) {
                let at = 1 + random.below(data.len() as u64 - 1) as usize;
                match random.below(5) {
                    0 => data[at] = random.next() as u8,
                    1 => data[at] ^= 1 << random.below(8),
                    2 => drop(data.drain(at..(at + 1 + random.below(9) as usize).min(data.len()))),
                    3 => {
                        let end = (at + random.below(60) as usize).min(data.len());
                        let copy = data[at..end].to_vec();
                        data.splice(at..at, copy);
                    }
                    _ => data.truncate(at.max(2)),
                }
                if data.len() < 2 {
                    break;
                }
            }
        }
        fuzz_negotiation(&data);
        fuzz_requests(&data);
    }
}

#[test]
fn clients_that_negotiate_without_an_end_take_no_place_of_others() {
    let server = Server::with(&[&disk("disk", MIB)], |options| options.connections_max = 8);
    let mut good: Vec<Client> = (0..6).map(|_| server.client("disk", Mode::Structured)).collect();
    let silent: Vec<_> = (0..20).map(|_| Client::greet(server.connect())).collect();
    good.push(server.client("disk", Mode::Structured));
    for client in &mut good {
        assert_eq!(client.read(0, 4), [0; 4]);
    }
    // The places of those that have an export are theirs.
    good.push(server.client("disk", Mode::Structured));
    let mut late = server.connect();
    assert_eq!(late.read(&mut [0; 18]).unwrap(), 0, "a ninth client was served");
    for client in &mut good {
        assert_eq!(client.read(0, 4), [0; 4]);
    }
    assert!(server.listener.counters().refused >= 19, "{:?}", server.listener.counters());
    drop(silent);
}

/// Random bytes against a whole server, partly after a good handshake.
#[test]
fn a_server_survives_random_bytes() {
    let server = Server::new(&[&disk("disk", MIB)]);
    let mut good = server.client("disk", Mode::Structured);
    let mut random = Random(3);
    for round in 0..300 {
        let mut client = if round % 2 == 0 {
            Client::greet(server.connect())
        } else {
            server.client("disk", MODES[round as usize / 2 % 3])
        };
        let mut data = pattern(round, random.below(3000) as usize);
        if round % 3 == 0 && round % 2 == 1 {
            // A good header before random bytes.
            let length = random.below(1 << 25);
            let command = random.below(9) as u16;
            let (_, header) =
                client.header(command, random.next() as u16 & 63, random.below(2 * MIB), length);
            data.splice(0..0, header);
        }
        // The server may disconnect at any byte.
        let _ = client.stream.write_all(&data);
        if round % 5 == 0 {
            let _ = client.stream.shutdown(std::net::Shutdown::Write);
            let _ = client.stream.read_to_end(&mut Vec::new());
        }
    }
    assert_eq!(good.read(0, 1).len(), 1);
    server.listener.shutdown();
}
