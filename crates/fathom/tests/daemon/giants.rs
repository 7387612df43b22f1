//! A host that sends giant texts to its centre: `fathom monitor` disconnects it at the bound, and
//! its memory stays within the bound.

use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fathom_cql::Type;
use fathom_cql::catalog::StreamSchema;
use fathom_monitor::link::unix_time_ns;
use fathom_monitor::recording::{BlockBuilder, Cell, Clock, Header};
use parking_lot::Mutex;

use crate::process::command;

/// The longest wait for the centre, which may have 256 MiB of rows to take in before it disconnects
/// a host, on a machine with other tests.
const PATIENCE: Duration = Duration::from_secs(300);
/// The length of the text of a row, in bytes; the longest allowed.
const TEXT: usize = 8 << 10;
/// The rows of a frame. A frame has at most 4 MiB before it is compressed.
const ROWS: usize = 400;
/// The most frames that a host sends before the centre acknowledges the first of them. The texts
/// compress well, so that the sockets alone would take in the frames of a gigabyte.
const FRAMES_MAX: u64 = 32;
/// The most bytes of the rows of relations that a host may send.
const RELATIONS_MAX: usize = 256 << 20;
/// The most memory of the centre, in bytes: the rows, those that wait for their instants, and the
/// state of the query. The rows of a disconnected host may still be in memory when those of the
/// next arrive; the rows of three hosts together would exceed this.
const MEMORY_MAX: u64 = 640 << 20;

/// A `fathom monitor` in plain text.
struct Centre {
    child: Child,
    folder: tempfile::TempDir,
}

impl Centre {
    fn start(query: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let child = command(folder.path())
            .args(["monitor", "--listen", "127.0.0.1:0", "--plain", query])
            .stdout(Stdio::null())
            .stderr(File::create(folder.path().join("messages")).unwrap())
            .spawn()
            .unwrap();
        Self { child, folder }
    }

    fn messages(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("messages")).unwrap()
    }

    fn address(&self) -> String {
        let begun = Instant::now();
        loop {
            let messages = self.messages();
            let whole = messages.rfind('\n').map_or("", |end| &messages[..end]);
            if let Some(address) =
                whole.lines().find_map(|l| l.strip_prefix("listening for hosts at "))
            {
                return address.to_owned();
            }
            assert!(begun.elapsed() < PATIENCE, "{messages}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The maximum of its resident memory so far, in bytes.
    fn memory_max(&self) -> u64 {
        let path = format!("/proc/{}/status", self.child.id());
        let text = std::fs::read_to_string(path).expect("it runs");
        let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    }
}

impl Drop for Centre {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn frame(kind: u8, parts: &[&[u8]]) -> Vec<u8> {
    let body = parts.concat();
    [&(body.len() as u32).to_le_bytes()[..], &[kind], &body].concat()
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u16).to_le_bytes()[..], text.as_bytes()].concat()
}

/// The messages that a host has received from the centre.
#[derive(Default)]
struct Received {
    /// The epoch of the host's fragments, once it has received them.
    epoch: Option<[u8; 4]>,
    /// The number of the last frame that the centre has taken in.
    acknowledged: u64,
    /// The reason for the end of the connection.
    bye: Option<String>,
    ended: bool,
}

/// A connection to the centre from a hostile host.
struct HostileHost {
    writer: Arc<Mutex<TcpStream>>,
    received: Arc<Mutex<Received>>,
    number: u64,
    /// How far it is behind, in nanoseconds.
    behind_ns: i64,
}

impl HostileHost {
    fn connect(address: &str, name: &str) -> Self {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        let mut reader = stream.try_clone().unwrap();
        let writer = Arc::new(Mutex::new(stream));
        let host = Self { writer, received: Arc::default(), number: 0, behind_ns: 0 };
        let preamble = b"\x8eFATLNK\n\x01\0\0\0".to_vec();
        assert!(host.write(&[preamble, frame(1, &[&text(name), &text("1")])].concat()));
        let (writer, received) = (Arc::clone(&host.writer), Arc::clone(&host.received));
        std::thread::spawn(move || {
            let mut preamble = [0; 12];
            let mut open = reader.read_exact(&mut preamble).is_ok();
            while open {
                let mut head = [0; 5];
                let mut body = Vec::new();
                open = reader.read_exact(&mut head).is_ok();
                if open {
                    body.resize(u32::from_le_bytes(head[..4].try_into().unwrap()) as usize, 0);
                    open = reader.read_exact(&mut body).is_ok();
                }
                match head[4] {
                    _ if !open => {}
                    66 => received.lock().epoch = Some(body[..4].try_into().unwrap()),
                    67 => {
                        let pong = frame(7, &[&body[..4], &unix_time_ns().to_le_bytes()]);
                        open = writer.lock().write_all(&pong).is_ok();
                    }
                    68 => {
                        let number = u64::from_le_bytes(body[..8].try_into().unwrap());
                        received.lock().acknowledged = number;
                    }
                    70 => {
                        let reason = String::from_utf8_lossy(&body[2..]).into_owned();
                        received.lock().bye = Some(reason);
                    }
                    _ => {}
                }
            }
            received.lock().ended = true;
        });
        let epoch = host.until("its fragments", |received| received.epoch);
        assert!(host.write(&frame(2, &[&epoch, &[0]])));
        host
    }

    /// Sends bytes. Returns whether the connection is still open.
    fn write(&self, bytes: &[u8]) -> bool {
        self.writer.lock().write_all(bytes).is_ok()
    }

    fn until<T>(&self, what: &str, mut found: impl FnMut(&Received) -> Option<T>) -> T {
        let begun = Instant::now();
        loop {
            if let Some(found) = found(&self.received.lock()) {
                return found;
            }
            assert!(begun.elapsed() < PATIENCE, "never: {what}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Sends rows of the first fragment and the watermark after them. Returns whether the
    /// connection is still open.
    fn send(&mut self, block: &[u8]) -> bool {
        self.number += 2;
        let taken = self.number.saturating_sub(FRAMES_MAX);
        self.until("an acknowledgement", |received| {
            (received.acknowledged >= taken || received.ended).then_some(())
        });
        let (rows, end) = ((self.number - 1).to_le_bytes(), self.number.to_le_bytes());
        let rows = frame(4, &[&rows, &[0, 0, 0], block]);
        let time_ns = unix_time_ns() - self.behind_ns;
        let watermark = frame(5, &[&end, &time_ns.to_le_bytes(), &[0; 8]]);
        self.write(&[rows, watermark].concat())
    }
}

/// A block of added rows, each with a distinct giant text, numbered from `first` on.
fn block(first: usize, behind_ns: i64) -> Vec<u8> {
    let columns = [("Path", Type::Text), ("@count", Type::Integer)];
    let header = Header::new(&StreamSchema::new("fragment", &columns), Clock::Unknown, 0);
    let mut builder = BlockBuilder::new(&header);
    for number in first..first + ROWS {
        let path: Arc<str> = format!("/{number:010}/{}", "x".repeat(TEXT - 12)).into();
        builder.append(unix_time_ns() - behind_ns, [Cell::Text(&path), Cell::Integer(1)]);
    }
    builder.take().unwrap()
}

#[test]
fn giant_texts_of_a_host_are_bounded_in_memory() {
    let centre = Centre::start("select distinct Path from IOstream [range 1 hour]");
    let address = centre.address();
    // A host that connects again with other texts is disconnected again, and its memory is
    // released.
    for round in 0..3 {
        let mut host = HostileHost::connect(&address, "hostile");
        let mut sent = 0;
        while host.send(&block(round << 32 | sent, 0)) {
            sent += ROWS;
            // On a busy machine, it is disconnected later than it has sent too much.
            assert!(sent * TEXT < 16 * RELATIONS_MAX, "the bytes are not bounded");
        }
        host.until("the end", |received| received.ended.then_some(()));
        let bye = host.received.lock().bye.clone().unwrap_or_default();
        assert!(bye.contains("256 MiB") && bye.contains("shorter texts"), "{sent} rows: {bye}");
        assert!(sent * TEXT > RELATIONS_MAX / 10 * 9, "{sent} rows, fewer than allowed");
        assert!(centre.memory_max() < MEMORY_MAX, "{} bytes", centre.memory_max());
    }
}

/// The rows of a host wait for their instants in at most 32 MiB. A host that lags, on a busy
/// machine for example, has its rows taken in nevertheless.
#[test]
fn a_host_far_behind_is_not_stuck() {
    let centre = Centre::start("select distinct Path from IOstream [range 1 hour]");
    let mut host = HostileHost::connect(&centre.address(), "slow");
    host.behind_ns = 60_000_000_000;
    for sent in (0..25).map(|round| round * ROWS) {
        let rows = block(sent, host.behind_ns);
        assert!(host.send(&rows), "{:?}", host.received.lock().bye);
    }
    let last = host.number;
    host.until("the last acknowledgement", |received| {
        (received.acknowledged == last || received.ended).then_some(())
    });
    assert_eq!(host.received.lock().bye, None);
}
