//! A host that fills its centre with giant texts: `fathom monitor` lets it go at its bound, and its
//! memory stays within it.

use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fathom_cql::Type;
use fathom_cql::catalog::StreamSchema;
use fathom_monitor::link::unix_time_ns;
use fathom_monitor::recording::{BlockBuilder, Cell, Clock, Header};

use crate::process::{PATIENCE, command};

/// The longest text that a row may hold, in bytes.
const TEXT: usize = 8 << 10;
/// The rows of a frame: it has 4 MiB at most before it is packed.
const ROWS: usize = 400;
/// What the rows that a host tells of relations may take, in bytes.
const RELATIONS_MAX: usize = 256 << 20;
/// What the centre may take for it in all, in bytes: the rows, what waits for their instants, and
/// what the query that they are for keeps of them. The rows of a host that went may still be on
/// their way out while those of the next come; those of three hosts at once would exceed it.
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
            .stderr(File::create(folder.path().join("said")).unwrap())
            .spawn()
            .unwrap();
        Self { child, folder }
    }

    fn said(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("said")).unwrap()
    }

    fn address(&self) -> String {
        let begun = Instant::now();
        loop {
            let said = self.said();
            let whole = said.rfind('\n').map_or("", |end| &said[..end]);
            if let Some(address) =
                whole.lines().find_map(|l| l.strip_prefix("hosts are served at "))
            {
                return address.to_owned();
            }
            assert!(begun.elapsed() < PATIENCE, "{said}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The most memory that it has had, in bytes.
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

/// What a host hears of the centre.
#[derive(Default)]
struct Heard {
    /// The epoch of its fragments, once it has some.
    epoch: Option<[u8; 4]>,
    /// Why it was let go of.
    bye: Option<String>,
    ended: bool,
}

/// A connection to the centre, by one who is what it likes to be.
struct Liar {
    writer: Arc<Mutex<TcpStream>>,
    heard: Arc<Mutex<Heard>>,
    number: u64,
}

impl Liar {
    fn connect(address: &str, name: &str) -> Self {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        let mut reader = stream.try_clone().unwrap();
        let liar = Self { writer: Arc::new(Mutex::new(stream)), heard: Arc::default(), number: 0 };
        let preamble = b"\x8eFATLNK\n\x01\0\0\0".to_vec();
        assert!(liar.write(&[preamble, frame(1, &[&text(name), &text("1")])].concat()));
        let (writer, heard) = (Arc::clone(&liar.writer), Arc::clone(&liar.heard));
        std::thread::spawn(move || {
            let mut preamble = [0; 12];
            let mut goes_on = reader.read_exact(&mut preamble).is_ok();
            while goes_on {
                let mut head = [0; 5];
                let mut body = Vec::new();
                goes_on = reader.read_exact(&mut head).is_ok();
                if goes_on {
                    body.resize(u32::from_le_bytes(head[..4].try_into().unwrap()) as usize, 0);
                    goes_on = reader.read_exact(&mut body).is_ok();
                }
                match head[4] {
                    _ if !goes_on => {}
                    66 => heard.lock().unwrap().epoch = Some(body[..4].try_into().unwrap()),
                    67 => {
                        let pong = frame(7, &[&body[..4], &unix_time_ns().to_le_bytes()]);
                        goes_on = writer.lock().unwrap().write_all(&pong).is_ok();
                    }
                    70 => {
                        let why = String::from_utf8_lossy(&body[2..]).into_owned();
                        heard.lock().unwrap().bye = Some(why);
                    }
                    _ => {}
                }
            }
            heard.lock().unwrap().ended = true;
        });
        let epoch = liar.until("its fragments", |heard| heard.epoch);
        assert!(liar.write(&frame(2, &[&epoch, &[0]])));
        liar
    }

    /// Whether the centre takes it.
    fn write(&self, bytes: &[u8]) -> bool {
        self.writer.lock().unwrap().write_all(bytes).is_ok()
    }

    fn until<T>(&self, what: &str, mut found: impl FnMut(&Heard) -> Option<T>) -> T {
        let begun = Instant::now();
        loop {
            if let Some(found) = found(&self.heard.lock().unwrap()) {
                return found;
            }
            assert!(begun.elapsed() < PATIENCE, "never: {what}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Tells of rows of the first fragment, and that their instant is over.
    fn tell(&mut self, block: &[u8]) -> bool {
        self.number += 2;
        let (rows, over) = ((self.number - 1).to_le_bytes(), self.number.to_le_bytes());
        let rows = frame(4, &[&rows, &[0, 0, 0], block]);
        let watermark = frame(5, &[&over, &unix_time_ns().to_le_bytes(), &[0; 8]]);
        self.write(&[rows, watermark].concat())
    }
}

/// A block of rows that come, each with a giant text of its own from the number `first` on.
fn block(first: usize) -> Vec<u8> {
    let columns = [("Path", Type::Text), ("@count", Type::Integer)];
    let header = Header::new(&StreamSchema::new("fragment", &columns), Clock::Unknown, 0);
    let mut builder = BlockBuilder::new(&header);
    for number in first..first + ROWS {
        let path: Arc<str> = format!("/{number:010}/{}", "x".repeat(TEXT - 12)).into();
        builder.append(unix_time_ns(), [Cell::Text(&path), Cell::Integer(1)]);
    }
    builder.take().unwrap()
}

#[test]
fn giant_texts_of_a_host_take_no_more_memory_than_their_bound() {
    let centre = Centre::start("select distinct Path from IOstream [range 1 hour]");
    let address = centre.address();
    // One that comes again with others is let go of again, and leaves nothing behind.
    for round in 0..3 {
        let mut liar = Liar::connect(&address, "liar");
        let mut told = 0;
        while liar.tell(&block(round << 32 | told)) {
            told += ROWS;
            assert!(told * TEXT < 4 * RELATIONS_MAX, "nothing bounds the bytes");
        }
        liar.until("the end", |heard| heard.ended.then_some(()));
        let bye = liar.heard.lock().unwrap().bye.clone().unwrap_or_default();
        assert!(bye.contains("256 MiB") && bye.contains("shorter texts"), "{told} rows: {bye}");
        assert!(
            told * TEXT > RELATIONS_MAX / 10 * 9,
            "{told} rows, which is less than it may have"
        );
        assert!(centre.memory_max() < MEMORY_MAX, "{} bytes", centre.memory_max());
    }
}
