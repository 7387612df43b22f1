//! Hosts without authentication and hosts that violate the protocol are refused with a reason;
//! other hosts are not affected.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use fathom_cql::Value;
use fathom_monitor::link::{Centre, Host, HostState, LinkState, Watch, unix_time_ns};
use fathom_tls::Tls;

use super::support::*;

const TEXT: &str = "select VDisk, ReqId, BlktapTS from IOstream";

/// A centre with one good host.
struct Case {
    centre: Centre,
    watch: Watch,
    feed: Feed,
    _host: Host,
    collected: Collected,
    given: u64,
}

impl Case {
    fn new() -> Self {
        let mut centre = centre(TEXT, |options| options.patience = Duration::from_millis(500));
        let feed = Feed::default();
        let host = host(&feed, plain("good", &centre.address().to_string()), 0);
        let mut collected = Collected::default();
        run_until(&mut centre, &mut collected, |_| feed.is_wanted());
        let watch = centre.watch();
        Self { centre, watch, feed, _host: host, collected, given: 0 }
    }

    /// Runs the centre until `done` returns true. The good host has events all the time.
    fn run_until(&mut self, mut done: impl FnMut() -> bool) {
        let (feed, given) = (&self.feed, &mut self.given);
        run_until(&mut self.centre, &mut self.collected, |_| {
            feed.give_events(&events(0, unix_time_ns(), 1), 0);
            *given += 1;
            done()
        });
    }

    /// Checks that all events of the good host have arrived in time.
    fn finish(mut self) {
        let last = unix_time_ns();
        self.feed.give(Part::Watermark(last));
        let (watch, given) = (self.watch.clone(), self.given);
        run_until(&mut self.centre, &mut self.collected, |watermark_ns| {
            of(&watch.status(), "good").rows == given && watermark_ns >= last
        });
        let disks = (0..3).map(|disk| Value::text(&format!("disk-0-{disk}")));
        let rows: i64 = disks.map(|disk| self.collected.rows(0, &disk)).sum();
        let known = of(&watch.status(), "good");
        assert_eq!((rows as u64, known.late, known.dropped_rows), (given, 0, 0));
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.centre.address()).unwrap();
        stream.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        stream
    }
}

fn preamble() -> Vec<u8> {
    b"\x8eFATLNK\n\x01\0\0\0".to_vec()
}

fn frame(kind: u8, bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u32).to_le_bytes()[..], &[kind], bytes].concat()
}

fn hello(name: &str) -> Vec<u8> {
    let text = |text: &str| [&(text.len() as u16).to_le_bytes()[..], text.as_bytes()].concat();
    [preamble(), frame(1, &[text(name), text("1")].concat())].concat()
}

/// Waits until the centre closes the connection, and returns the bytes that it sent.
fn rest(case: &mut Case, stream: &mut TcpStream) -> Vec<u8> {
    let mut all = Vec::new();
    case.run_until(|| {
        let mut bytes = [0; 1 << 12];
        match stream.read(&mut bytes) {
            Ok(0) => true,
            Ok(count) => {
                all.extend_from_slice(&bytes[..count]);
                false
            }
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    });
    all
}

#[test]
fn other_protocols_are_refused() {
    let mut case = Case::new();
    let version = b"\x8eFATLNK\n\x02\0\0\0".to_vec();
    let before = hello("x");
    let kind = [preamble(), frame(65, &[0; 8])].concat();
    let huge = [preamble(), vec![0xff, 0xff, 0xff, 0xff, 1]].concat();
    let long = [preamble(), frame(1, &[0xff; 900])].concat();
    let random: Vec<u8> =
        (0..4096_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let (http, empty) = (b"GET / HTTP/1.1\r\n\r\n".to_vec(), hello(""));
    let cases: [(Vec<u8>, &str); 8] = [
        (http, "speaks another protocol"),
        (random, "speaks another protocol"),
        (version, "version 2"),
        (kind, "unknown kind"),
        (huge, "too long"),
        (long, "too long"),
        (empty, "not a valid host name"),
        (before[..14].to_vec(), "left"),
    ];
    for (at, (bytes, reason)) in cases.into_iter().enumerate() {
        let mut stream = case.connect();
        stream.write_all(&bytes).unwrap();
        if reason == "left" {
            stream.shutdown(std::net::Shutdown::Write).unwrap();
        }
        let answer = rest(&mut case, &mut stream);
        assert!(answer.len() < 1000);
        let watch = case.watch.clone();
        case.run_until(|| watch.status().refused == at as u64 + 1);
        let refusal = case.watch.status().refusals.last().unwrap().reason.clone();
        assert!(refusal.contains(reason), "{refusal:?} is not about {reason:?}");
    }
    assert_eq!(case.watch.status().hosts.len(), 1);
    case.finish();
}

/// Connects as a host, sends frames after the hello, and returns the centre's problem with the
/// host.
fn misbehave(case: &mut Case, name: &str, frames: &[Vec<u8>]) -> String {
    let mut stream = case.connect();
    stream.set_nodelay(true).unwrap();
    stream.write_all(&hello(name)).unwrap();
    // It answers pings until it receives its fragments.
    let (mut bytes, mut begun, mut at) = (Vec::new(), false, 12);
    case.run_until(|| {
        let mut piece = [0; 1 << 12];
        if let Ok(count) = stream.read(&mut piece) {
            bytes.extend_from_slice(&piece[..count]);
        }
        while bytes.len() >= at + 5 {
            let length = u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
            if bytes.len() < at + 5 + length {
                break;
            }
            let body = &bytes[at + 5..at + 5 + length];
            let kind = bytes[at + 4];
            match kind {
                67 => {
                    let clock = unix_time_ns().to_le_bytes();
                    let _ = stream.write_all(&frame(7, &[&body[..4], &clock[..]].concat()));
                }
                66 => begun = true,
                _ => {}
            }
            at += 5 + length;
        }
        begun
    });
    for frame in frames {
        let _ = stream.write_all(frame);
    }
    let watch = case.watch.clone();
    case.run_until(|| of(&watch.status(), name).state == HostState::Away);
    rest(case, &mut stream);
    of(&case.watch.status(), name).problem.unwrap()
}

#[test]
fn hosts_that_violate_the_protocol_are_disconnected() {
    let mut case = Case::new();
    let accepted = frame(2, &[1, 0, 0, 0, 0]);
    let rows = |number: u64, fragment: u16, block: &[u8]| {
        let head = [&number.to_le_bytes()[..], &fragment.to_le_bytes(), &[0]].concat();
        frame(4, &[&head[..], block].concat())
    };
    let watermark =
        |time_ns: i64| frame(5, &[1_u64.to_le_bytes(), time_ns.to_le_bytes(), [0; 8]].concat());
    let future = unix_time_ns() + 3600 * SECOND;
    let cases: [(&str, Vec<Vec<u8>>, &str); 8] = [
        ("rubbish", vec![vec![0xaa; 100]], "unknown kind"),
        ("huge", vec![[&[0xff; 4][..], &[4]].concat()], "too long"),
        ("twice", vec![accepted.clone(), accepted.clone()], "accepted again"),
        ("nothing", vec![accepted.clone(), rows(1, 999, b"")], "unknown fragment"),
        ("damaged", vec![accepted.clone(), rows(1, 0, &[7; 100])], "mark"),
        ("future", vec![accepted.clone(), watermark(future)], "future"),
        ("never", vec![accepted.clone(), watermark(-1)], "out of range"),
        ("hello", vec![hello("hello")[12..].to_vec()], "second hello"),
    ];
    for (name, frames, reason) in cases {
        let problem = misbehave(&mut case, name, &frames);
        assert!(problem.contains(reason), "{name}: {problem:?} is not about {reason:?}");
    }
    // A host that disconnects in the middle of a frame.
    let frames = [accepted, vec![100, 0, 0, 0, 4, 1, 2, 3]];
    let mut stream = case.connect();
    stream.write_all(&hello("torn")).unwrap();
    for frame in frames {
        stream.write_all(&frame).unwrap();
    }
    drop(stream);
    let watch = case.watch.clone();
    case.run_until(|| {
        let status = watch.status();
        let torn = status.hosts.iter().find(|host| host.name == "torn");
        torn.is_some_and(|host| host.state == HostState::Away)
    });
    case.finish();
}

/// Connections of an address that never identify themselves take each other's places.
#[test]
fn connections_without_a_host_lock_no_host_out() {
    let mut case = Case::new();
    let silent: Vec<TcpStream> = (0..600).map(|_| case.connect()).collect();
    let feed = Feed::default();
    let begin = std::time::Instant::now();
    let late = host(&feed, plain("late", &case.centre.address().to_string()), 0);
    case.run_until(|| feed.is_wanted());
    assert!(begin.elapsed() < Duration::from_secs(15), "{:?}", begin.elapsed());
    assert!(case.watch.status().refused >= 600 - 64, "{}", case.watch.status().refused);
    drop((silent, late));
    case.finish();
}

#[test]
fn hosts_without_a_valid_certificate_are_refused() {
    let (authority, other) = (Authority::new(), Authority::new());
    let mut centre = centre(TEXT, |options| options.tls = Some(authority.centre()));
    let address = centre.address().to_string();
    let feed = Feed::default();
    let good = host(&feed, authority.host("good", &address), 0);
    let mut collected = Collected::default();
    run_until(&mut centre, &mut collected, |_| feed.is_wanted());
    let watch = centre.watch();
    let mut refused = |options: fathom_monitor::link::HostOptions, of_host: &str| {
        let (feed, before) = (Feed::default(), watch.status().refused);
        let host = host(&feed, options, 0);
        run_until(&mut centre, &mut collected, |_| {
            let is_reported =
                host.status().problem.is_some_and(|problem| problem.contains(of_host));
            is_reported && watch.status().refused > before
        });
        assert!(!feed.is_wanted());
        watch.status().refusals.last().unwrap().reason.clone()
    };
    // A name that is not in the certificate.
    let mut options = authority.host("good", &address);
    options.name = "better".into();
    let reason = refused(options, "for good, not for \"better\"");
    assert!(reason.contains("for good, not for \"better\""), "{reason}");
    // An authority that the centre does not trust.
    let tls = Tls::mutual_client(&other.files("evil", &authority)).unwrap();
    let mut options = authority.host("evil", &address);
    options.tls = Some(tls);
    let reason = refused(options, "");
    assert!(reason.contains("certificate is refused"), "{reason}");
    // A centre with an untrusted certificate, or with another name.
    let tls = Tls::mutual_client(&authority.files("wary", &other)).unwrap();
    let mut options = authority.host("wary", &address);
    options.tls = Some(tls);
    refused(options, "certificate is refused");
    let mut options = authority.host("wary", &address);
    options.centre_name = Some("other".into());
    refused(options, "certificate is refused");
    // Plain text.
    refused(plain("good", &address), "");
    let status = watch.status();
    assert_eq!(status.hosts.len(), 1);
    assert_eq!((of(&status, "good").connections, good.status().state), (1, LinkState::Running));
}

/// The program at the centre's address may send any bytes.
#[test]
fn a_host_disconnects_from_an_invalid_centre() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let feed = Feed::default();
    let mut host = host(&feed, plain("alpha", &address), 0);
    let fragments =
        |plans: &[u8]| frame(66, &[&[1, 0, 0, 0][..], &[0; 8], &[1], &[0; 8], plans].concat());
    let welcome = [preamble(), frame(65, &[1; 8])].concat();
    let cases: [(Vec<u8>, &str); 5] = [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec(), "speaks another protocol"),
        ([preamble(), vec![0xff, 0xff, 0xff, 0xff, 66]].concat(), "too long"),
        ([preamble(), fragments(b"")].concat(), "without a welcome"),
        ([welcome.clone(), frame(70, &[4, 0, b'f', b'u', b'l', b'l'])].concat(), "full"),
        ([welcome, fragments(&[0x9f; 5000])].concat(), "cannot be read"),
    ];
    for (bytes, problem) in cases {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(&bytes).unwrap();
        until(problem, || host.status().problem.is_some_and(|known| known.contains(problem)));
        assert_eq!(host.status().fragments, 0);
    }
    host.stop(Duration::from_secs(5));
}
