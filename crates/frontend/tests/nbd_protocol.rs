//! The protocol, byte for byte, with a client under the test's full control.

mod nbd_common;

use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fathom_block::Operation;
use fathom_frontend::nbd::{Address, Exports, Listener, ListenerOptions, NameError};
use nbd_common::*;

const MAY_WRITE: u16 = 1 << 1;

#[test]
fn exports_are_listed_described_and_chosen() {
    let (first, second) = (disk("first", MIB), disk("second", 2 * MIB));
    let server = Server::new(&[&first, &second]);
    let mut client = Client::greet(server.connect());
    let listed = client.option(LIST, &[]);
    assert_eq!(listed.len(), 3);
    assert_eq!(listed[0], (2, b"\0\0\0\x05firsta disk".to_vec()));
    assert_eq!(client.outcome(INFO, &go("third", &[])), ERROR | 6);
    // There are two exports and no default is set, so there is no default.
    assert_eq!(client.outcome(INFO, &go("", &[])), ERROR | 6);
    server.exports.set_default(Some("second"));
    let info = client.option(INFO, &go("", &[1, 2, 3]));
    let block_size: Vec<u8> = [
        &[0_u8, 3][..],
        &1_u32.to_be_bytes(),
        &4096_u32.to_be_bytes(),
        &(32_u32 << 20).to_be_bytes(),
    ]
    .concat();
    assert!(info.contains(&(3, block_size)));
    assert!(info.contains(&(3, b"\0\x01second".to_vec())));
    assert!(info.contains(&(3, b"\0\x02a disk".to_vec())));
    client.choose("", Mode::Structured);
    assert_eq!(client.capacity, 2 * MIB);
    assert_eq!(client.read(0, 10), [0; 10]);
}

#[test]
fn the_old_option_to_choose_an_export_still_works() {
    let server = Server::new(&[&disk("disk", MIB)]);
    for (flags, zeroes) in [(3_u32, 0), (1, 124)] {
        let mut client = Client::greet(server.connect());
        // The greeting has already been answered; this stream belongs to a second client.
        let stream = server.connect();
        client.stream = stream;
        assert_eq!(client.take(18)[..8], *b"NBDMAGIC");
        std::io::Write::write_all(&mut client.stream, &flags.to_be_bytes()).unwrap();
        client.send_option(EXPORT_NAME, b"disk");
        assert_eq!(client.take(8), MIB.to_be_bytes());
        let _flags = client.take(2);
        assert_eq!(client.take(zeroes), vec![0; zeroes]);
        assert_eq!(client.write(5, b"hello"), 0);
        assert_eq!(client.read(4, 7), b"\0hello\0");
    }
    let mut client = Client::greet(server.connect());
    client.send_option(EXPORT_NAME, b"nothing");
    assert!(client.is_disconnected());
}

#[test]
fn invalid_options_are_refused() {
    let server = Server::new(&[&disk("disk", MIB)]);
    let mut client = Client::greet(server.connect());
    assert_eq!(client.outcome(99, b"what"), ERROR | 1);
    assert_eq!(client.outcome(STARTTLS, &[]), ERROR | 2);
    assert_eq!(client.outcome(LIST, b"x"), ERROR | 3);
    assert_eq!(client.outcome(GO, b"\0\0\0\xffdisk"), ERROR | 3);
    assert_eq!(client.outcome(GO, &[0xff; 40]), ERROR | 3);
    let mut long = go("disk", &[]);
    long.push(0);
    assert_eq!(client.outcome(GO, &long), ERROR | 3);
    // Contexts require structured replies, and only `base:allocation` is known.
    assert_eq!(client.outcome(SET_META, &meta("disk", &["base:allocation"])), ERROR | 3);
    assert_eq!(client.outcome(STRUCTURED, &[]), ACK);
    assert_eq!(client.outcome(STRUCTURED, &[]), ERROR | 3);
    assert_eq!(client.option(LIST_META, &meta("disk", &[])).len(), 2);
    assert_eq!(client.option(LIST_META, &meta("disk", &["base:"])).len(), 2);
    assert_eq!(client.option(LIST_META, &meta("disk", &["qemu:"])).len(), 1);
    assert_eq!(client.option(SET_META, &meta("disk", &["x:y", "base:allocation"])).len(), 2);
    assert_eq!(client.outcome(SET_META, &meta("nothing", &["base:allocation"])), ERROR | 6);
    assert_eq!(client.outcome(SET_META, &[0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]), ERROR | 3);
    assert_eq!(client.outcome(EXTENDED, &[]), ACK);
    assert_eq!(client.outcome(EXTENDED, &[]), ERROR | 3);
    assert_eq!(client.outcome(STRUCTURED, &[]), ERROR | 3);
    // The last choice of contexts failed, so block status has none.
    let replies = client.option(GO, &go("disk", &[]));
    assert_eq!(replies.last().unwrap().0, ACK);
    client.mode = Mode::Extended;
    assert_eq!(client.ask(STATUS, 0, 0, 4096, &[]).error, 22);
    assert_eq!(client.read(0, 1), [0]);

    let mut client = Client::greet(server.connect());
    assert_eq!(client.outcome(ABORT, &[]), ACK);
    assert!(client.is_disconnected());
    assert_eq!(server.listener.counters().protocol_errors, 0);
}

#[test]
fn every_command_works_in_every_mode() {
    for mode in MODES {
        let probe = Probe::new(0, true);
        let disk = disk_of("disk", 64 * MIB, false, vec![probe.clone()]);
        let server = Server::new(&[&disk]);
        let mut client = server.client("disk", mode);
        assert_eq!(client.flags & MAY_WRITE, 0);
        let data = pattern(1, 100_003);
        assert_eq!(client.write(77, &data), 0);
        assert_eq!(client.read(77, 100_003), data);
        assert_eq!(client.ask(WRITE, FUA, 0, 3, b"abc").error, 0);
        assert_eq!(client.ask(FLUSH, 0, 0, 0, &[]).error, 0);
        assert_eq!(client.ask(CACHE, 0, 0, 4096, &[]), Answer::default());
        assert_eq!(client.ask(ZEROES, NO_HOLE, 100, 200, &[]).error, 0);
        assert_eq!(client.ask(ZEROES, FAST_ZERO | FUA, 0, 1, &[]).error, 0);
        assert_eq!(client.read(100, 200), [0; 200]);
        assert_eq!(client.read(0, 3), b"\0bc");
        assert_eq!(client.ask(TRIM, 0, 0, MIB, &[]).error, 0);
        if mode == Mode::Simple {
            assert_eq!(client.ask(STATUS, 0, 0, 4096, &[]).error, 22);
        } else {
            assert_eq!(client.write(2 * MIB, &[7; 4096]), 0);
            let all = client.ask(STATUS, 0, 0, 64 * MIB, &[]).extents;
            assert_eq!(all.iter().map(|(length, _)| length).sum::<u64>(), 64 * MIB);
            assert_eq!(all[0], (2 * MIB, 3));
            assert_eq!(all[1].1, 0);
            assert_eq!(client.ask(STATUS, REQUEST_ONE, 0, 64 * MIB, &[]).extents, [(2 * MIB, 3)]);
        }
        // The disk receives none of the following requests.
        let before: u64 = Operation::ALL.iter().map(|operation| probe.count(*operation)).sum();
        assert_eq!(client.ask(READ, 0, 64 * MIB - 1, 2, &[]).error, 22);
        assert_eq!(client.ask(READ, 0, u64::MAX, 2, &[]).error, 22);
        assert_eq!(client.ask(READ, 0, 0, 0, &[]).error, 22);
        assert_eq!(client.ask(READ, 0, 0, 32 * MIB + 1, &[]).error, 22);
        assert_eq!(client.ask(WRITE, 0, 64 * MIB, 2, b"xx").error, 28);
        assert_eq!(client.ask(WRITE, NO_HOLE, 0, 2, b"xx").error, 22);
        assert_eq!(client.ask(ZEROES, 0, 64 * MIB, 2, &[]).error, 28);
        assert_eq!(client.ask(99, 0, 0, 0, &[]).error, 22);
        // Too long, but read to its end, so that the connection continues.
        let long = vec![1; 32 * MIB as usize + 1];
        assert_eq!(client.write(0, &long), 22);
        let after: u64 = Operation::ALL.iter().map(|operation| probe.count(*operation)).sum();
        assert_eq!(after, before);
        // The longest allowed length.
        assert_eq!(client.write(5, &long[..32 << 20]), 0);
        assert_eq!(client.read(5, 32 * MIB), long[..32 << 20]);
        client.send(DISCONNECT, 0, 0, 0, &[]);
        assert!(client.is_disconnected());
    }
}

#[test]
fn extended_headers_carry_64_bits() {
    let server = Server::new(&[&disk("disk", 64 << 30)]);
    let mut client = server.client("disk", Mode::Extended);
    assert_eq!(client.write(20 << 30, b"data"), 0);
    let all = client.ask(STATUS, 0, 0, 64 << 30, &[]).extents;
    assert_eq!(all.iter().map(|(length, _)| length).sum::<u64>(), 64 << 30);
    assert_eq!(all[0], (20 << 30, 3));
    assert_eq!(client.ask(ZEROES, 0, 0, 64 << 30, &[]).error, 0);
    assert_eq!(client.ask(TRIM, 0, 0, 64 << 30, &[]).error, 0);
    assert_eq!(client.read(20 << 30, 4), [0; 4]);
    // An unexpected payload is dropped, and the connection continues.
    assert_eq!(client.ask(STATUS, PAYLOAD, 0, 12, &[0; 12]).error, 22);
    assert_eq!(client.ask(READ, 0, 0, 1 << 40, &[]).error, 22);
    assert_eq!(client.read(0, 1), [0]);
    // The longest length of a 32-bit header.
    let mut client = server.client("disk", Mode::Structured);
    let part = client.ask(STATUS, 0, 0, 0xffff_f000, &[]).extents;
    assert_eq!(part, [(0xffff_f000, 3)]);
}

#[test]
fn a_disk_without_force_unit_access_flushes_after_a_write() {
    let probe = Probe::new(0, false);
    let disk = disk_of("disk", MIB, false, vec![probe.clone()]);
    let server = Server::new(&[&disk]);
    let mut client = server.client("disk", Mode::Structured);
    assert_eq!(client.ask(WRITE, FUA, 0, 3, b"abc").error, 0);
    assert_eq!(client.ask(ZEROES, FUA, 0, 3, &[]).error, 0);
    assert_eq!(client.ask(TRIM, FUA, 0, 3, &[]).error, 0);
    assert_eq!(client.ask(READ, FUA, 0, 3, &[]).error, 0);
    assert_eq!(probe.count(Operation::Flush), 3);
}

#[test]
fn a_read_only_disk_refuses_writes() {
    let disk = disk_of("disk", MIB, true, Vec::new());
    let server = Server::new(&[&disk]);
    for mode in MODES {
        let mut client = server.client("disk", mode);
        assert_ne!(client.flags & MAY_WRITE, 0);
        assert_eq!(client.write(0, &pattern(3, 300_000)), 1);
        assert_eq!(client.ask(TRIM, 0, 0, 512, &[]).error, 1);
        assert_eq!(client.ask(ZEROES, 0, 0, 512, &[]).error, 1);
        assert_eq!(client.read(0, 4), [0; 4]);
    }
}

#[test]
fn many_concurrent_requests_are_all_answered() {
    for mode in MODES {
        let probe = Probe::new(300_000, true);
        let disk = disk_of("disk", 64 * MIB, false, vec![probe]);
        let server = Server::new(&[&disk]);
        let mut client = server.client("disk", mode);
        let mut stream = client.stream.try_clone().unwrap();
        // More than a connection's limits, so that some requests have to wait.
        let mut bytes = Vec::new();
        let mut cookies = std::collections::HashSet::new();
        for index in 0..3000_u64 {
            let (cookie, header) = client.header(WRITE, 0, index * 512, 512);
            bytes.extend(header);
            bytes.extend([index as u8; 512]);
            cookies.insert(cookie);
        }
        for index in 0..24 {
            let (cookie, header) = client.header(READ, 0, index, 8 * MIB);
            bytes.extend(header);
            cookies.insert(cookie);
        }
        let writer = std::thread::spawn(move || {
            std::io::Write::write_all(&mut stream, &bytes).unwrap();
        });
        while !cookies.is_empty() {
            let (cookie, answer) = client.receive();
            assert_eq!(answer.error, 0);
            assert!(cookies.remove(&cookie), "each request is answered once");
        }
        writer.join().unwrap();
        for index in 0..3000_u64 {
            assert_eq!(client.read(index * 512, 512), [index as u8; 512]);
        }
    }
}

/// A seeded sequence of requests against a plain model, in every mode.
#[test]
fn a_disk_holds_the_same_bytes_as_an_array() {
    const LENGTH: u64 = 600_000;
    for (seed, mode) in (1..).zip(MODES) {
        let disk = disk("disk", LENGTH);
        let server = Server::new(&[&disk]);
        let mut clients = [server.client("disk", mode), server.client("disk", mode)];
        let mut model = vec![0; LENGTH as usize];
        let mut random = Random(seed);
        for step in 0..2000_u64 {
            let client = &mut clients[random.below(2) as usize];
            let offset = random.below(LENGTH - 1);
            let length_max = if random.below(10) == 0 { 300_000 } else { 5000 };
            let length = 1 + random.below(length_max.min(LENGTH - offset));
            let range = offset as usize..(offset + length) as usize;
            match random.below(5) {
                0 | 1 => assert_eq!(client.read(offset, length), model[range], "step {step}"),
                2 | 3 => {
                    let data = pattern(seed << 32 | step, length as usize);
                    assert_eq!(client.write(offset, &data), 0);
                    model[range].copy_from_slice(&data);
                }
                _ => {
                    let command = if random.below(2) == 0 { ZEROES } else { TRIM };
                    assert_eq!(client.ask(command, 0, offset, length, &[]).error, 0);
                    model[range].fill(0);
                }
            }
        }
        assert_eq!(clients[0].read(0, LENGTH), model);
    }
}

#[test]
fn a_new_size_and_new_layers_take_effect() {
    let disk = disk("disk", MIB);
    let server = Server::new(&[&disk]);
    let mut client = server.client("disk", Mode::Structured);
    assert_eq!(client.write(0, b"before"), 0);
    disk.resize(3 * MIB).unwrap();
    assert_eq!(server.client("disk", Mode::Simple).capacity, 3 * MIB);
    let probe = Probe::new(0, true);
    disk.restack(vec![probe.clone()], fathom_block::CHANGE_TIME_MAX).unwrap();
    let end = Instant::now() + Duration::from_secs(10);
    while probe.count(Operation::Read) == 0 {
        assert_eq!(client.read(0, 6), b"before");
        assert!(Instant::now() < end, "the new layer is used");
    }
    disk.restack(Vec::new(), fathom_block::CHANGE_TIME_MAX).unwrap();
    assert_eq!(client.read(0, 6), b"before");
}

#[test]
fn a_removed_export_finishes_its_requests_in_flight() {
    let slow = Probe::new(300_000_000, true);
    let (first, second) = (disk_of("first", MIB, false, vec![slow]), disk("second", MIB));
    let server = Server::new(&[&first, &second]);
    let mut client = server.client("first", Mode::Structured);
    let mut other = server.client("second", Mode::Structured);
    let mut waiting = Client::greet(server.connect());
    let cookies: Vec<u64> =
        (0..8).map(|index| client.send(WRITE, 0, index * 8, 8, b"in time!")).collect();
    std::thread::sleep(Duration::from_millis(100));
    let removed = server.exports.remove("first").unwrap();
    assert!(Arc::ptr_eq(&removed, &first));
    for cookie in cookies {
        assert_eq!(client.receive(), (cookie, Answer::default()));
    }
    assert!(client.is_disconnected());
    assert_eq!(other.read(0, 1), [0]);
    assert_eq!(waiting.outcome(INFO, &go("first", &[])), ERROR | 6);
    assert!(server.exports.remove("first").is_none());
    server.exports.add("first", "", removed).unwrap();
    assert_eq!(server.client("first", Mode::Simple).read(0, 8), b"in time!");
}

#[test]
fn a_listener_completes_requests_before_it_ends() {
    let slow = Probe::new(200_000_000, true);
    let disk = disk_of("disk", MIB, false, vec![slow]);
    let server = Server::new(&[&disk]);
    let socket = server.socket();
    let mut client = server.client("disk", Mode::Extended);
    let mut idle = server.client("disk", Mode::Simple);
    let _negotiating = Client::greet(server.connect());
    let cookie = client.send(READ, 0, 0, 4096, &[]);
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(server.listener.connections().len(), 3);
    let reader = std::thread::spawn(move || {
        assert_eq!(client.receive(), (cookie, Answer { data: vec![0; 4096], ..Answer::default() }));
        assert!(client.is_disconnected());
        assert!(idle.is_disconnected());
    });
    let start = Instant::now();
    server.listener.shutdown();
    assert!(start.elapsed() < Duration::from_secs(4));
    reader.join().unwrap();
    assert!(!socket.exists());
}

#[test]
fn a_socket_is_for_its_owner_and_is_replaced_after_a_crash() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("nbd.sock");
    // As left behind by a killed daemon.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let options = ListenerOptions::new(Address::Unix(path.clone()));
    let listener = Listener::new(options.clone(), Arc::new(Exports::new())).unwrap();
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    let error = Listener::new(options, Arc::new(Exports::new())).err().unwrap();
    assert_eq!(error.kind(), std::io::ErrorKind::AddrInUse);
    listener.shutdown();
    assert!(!path.exists());
}

#[test]
fn plain_tcp_is_refused_unless_allowed() {
    let tcp = Address::Tcp("127.0.0.1:0".parse().unwrap());
    let mut options = ListenerOptions::new(tcp);
    let error = Listener::new(options.clone(), Arc::new(Exports::new())).err().unwrap();
    assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
    options.plain_allowed = true;
    let listener = Listener::new(options, Arc::new(Exports::new())).unwrap();
    assert!(matches!(listener.address(), Address::Tcp(address) if address.port() != 0));
}

#[test]
fn names_are_checked() {
    let exports = Exports::new();
    exports.add("", "", disk("a", MIB)).unwrap();
    assert_eq!(exports.add("", "", disk("b", MIB)), Err(NameError::Taken));
    assert_eq!(exports.add(&"x".repeat(5000), "", disk("c", MIB)), Err(NameError::Invalid));
    assert_eq!(exports.add("a\0b", "", disk("d", MIB)), Err(NameError::Invalid));
    assert_eq!(exports.list().len(), 1);
}

#[test]
fn an_idle_connection_uses_no_processor_time() {
    let server = Server::new(&[&disk("disk", MIB)]);
    let mut clients: Vec<Client> =
        (0..20).map(|_| server.client("disk", Mode::Structured)).collect();
    for client in &mut clients {
        for _ in 0..100 {
            assert_eq!(client.read(0, 1), [0]);
        }
    }
    std::thread::sleep(Duration::from_millis(50));
    let ticks = || {
        // Only the serving threads: other tests run in this process at the same time.
        let mut total = 0_u64;
        for task in std::fs::read_dir("/proc/self/task").unwrap().flatten() {
            let stat = std::fs::read_to_string(task.path().join("schedstat")).unwrap_or_default();
            let name = std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
            if name.starts_with("nbd-") {
                total += stat.split(' ').next().and_then(|ns| ns.parse().ok()).unwrap_or(0);
            }
        }
        total
    };
    // Other tests may be serving at the moment, so several intervals are measured.
    let quiet = (0..20).any(|_| {
        let before = ticks();
        std::thread::sleep(Duration::from_millis(300));
        ticks().saturating_sub(before) < 1_000_000
    });
    assert!(quiet, "idle threads sleep");
}
