//! A server to test, and a client under the test's full control.

#![allow(dead_code, reason = "each test file uses its part")]

use std::collections::HashMap;
use std::io;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fathom_backend::Memory;
use fathom_block::{
    Capabilities, Crossing, Disk, DiskOptions, Layer, LayerPart, LayerQueue, OpenContext,
    Operation, Outcome, Request,
};
use fathom_frontend::nbd::{Address, Exports, Listener, ListenerOptions};
use tempfile::TempDir;

pub const MIB: u64 = 1 << 20;

/// A server on a Unix socket in a directory of its own.
pub struct Server {
    pub directory: TempDir,
    pub exports: Arc<Exports>,
    pub listener: Listener,
}

impl Server {
    /// Serves `disks`, each under its own name.
    pub fn new(disks: &[&Arc<Disk>]) -> Self {
        Self::with(disks, |_| {})
    }

    pub fn with(disks: &[&Arc<Disk>], change: impl FnOnce(&mut ListenerOptions)) -> Self {
        let directory = tempfile::tempdir().unwrap();
        // One thread for each disk, shared by its clients.
        let exports = Arc::new(Exports::with_threads(1));
        for disk in disks {
            exports.add(disk.name(), "a disk", Arc::clone(disk)).unwrap();
        }
        let mut options = ListenerOptions::new(Address::Unix(directory.path().join("nbd.sock")));
        change(&mut options);
        let listener = Listener::new(options, Arc::clone(&exports)).unwrap();
        Self { directory, exports, listener }
    }

    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("nbd.sock")
    }

    /// The URI of an export.
    pub fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.socket().display())
    }

    pub fn path(&self, name: &str) -> String {
        self.directory.path().join(name).display().to_string()
    }

    pub fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(self.socket()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream
    }

    /// A client that has completed the handshake and chosen `export`.
    pub fn client(&self, export: &str, mode: Mode) -> Client {
        let mut client = Client::greet(self.connect());
        client.choose(export, mode);
        client
    }
}

pub fn disk(name: &str, capacity: u64) -> Arc<Disk> {
    disk_of(name, capacity, false, Vec::new())
}

pub fn disk_of(
    name: &str,
    capacity: u64,
    read_only: bool,
    layers: Vec<Arc<dyn Layer>>,
) -> Arc<Disk> {
    let options = DiskOptions { name: name.to_owned(), read_only, ..DiskOptions::default() };
    Disk::new(options, layers, Arc::new(Memory::new(capacity))).unwrap()
}

/// A layer that counts requests, may delay each, and may not support forced unit access.
pub struct Probe {
    pub delay_ns: u64,
    pub force_unit_access: bool,
    pub counts: Arc<[AtomicU64; 7]>,
}

impl Probe {
    pub fn new(delay_ns: u64, force_unit_access: bool) -> Arc<Self> {
        Arc::new(Self { delay_ns, force_unit_access, counts: Arc::default() })
    }

    pub fn count(&self, operation: Operation) -> u64 {
        self.counts[index(operation)].load(Ordering::Relaxed)
    }
}

fn index(operation: Operation) -> usize {
    Operation::ALL.iter().position(|other| *other == operation).unwrap()
}

struct ProbeQueue(u64, Arc<[AtomicU64; 7]>);

impl Layer for Probe {
    fn name(&self) -> &'static str {
        "probe"
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        Capabilities { force_unit_access: self.force_unit_access, ..below }
    }

    fn open_queue(&self, _context: &mut OpenContext<'_>) -> io::Result<LayerPart> {
        Ok(LayerPart::queue(ProbeQueue(self.delay_ns, Arc::clone(&self.counts))))
    }
}

impl LayerQueue for ProbeQueue {
    fn submit(&mut self, request: Box<Request>, next: &mut Crossing<'_>) {
        self.1[index(request.operation)].fetch_add(1, Ordering::Relaxed);
        if self.0 == 0 {
            next.submit(request);
        } else {
            let due = next.now_ns() + self.0;
            next.hold(request, None, due);
        }
    }

    fn complete(&mut self, request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        next.complete(request, outcome);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Simple,
    Structured,
    Extended,
}

pub const MODES: [Mode; 3] = [Mode::Simple, Mode::Structured, Mode::Extended];

/// Options, commands and flags as numbers, independent of the server's table.
pub const EXPORT_NAME: u32 = 1;
pub const ABORT: u32 = 2;
pub const LIST: u32 = 3;
pub const STARTTLS: u32 = 5;
pub const INFO: u32 = 6;
pub const GO: u32 = 7;
pub const STRUCTURED: u32 = 8;
pub const LIST_META: u32 = 9;
pub const SET_META: u32 = 10;
pub const EXTENDED: u32 = 11;
pub const ACK: u32 = 1;
pub const ERROR: u32 = 1 << 31;

pub const READ: u16 = 0;
pub const WRITE: u16 = 1;
pub const DISCONNECT: u16 = 2;
pub const FLUSH: u16 = 3;
pub const TRIM: u16 = 4;
pub const CACHE: u16 = 5;
pub const ZEROES: u16 = 6;
pub const STATUS: u16 = 7;

pub const FUA: u16 = 1;
pub const NO_HOLE: u16 = 2;
pub const REQUEST_ONE: u16 = 8;
pub const FAST_ZERO: u16 = 16;
pub const PAYLOAD: u16 = 32;

/// A reply to a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Answer {
    pub error: u32,
    /// The data of a read.
    pub data: Vec<u8>,
    /// The lengths and flags of a block status.
    pub extents: Vec<(u64, u64)>,
}

pub struct Client<S = UnixStream> {
    pub stream: S,
    pub mode: Mode,
    pub capacity: u64,
    pub flags: u16,
    next: u64,
    /// The lengths of reads in flight, because a simple reply does not contain its length.
    lengths: HashMap<u64, usize>,
}

impl<S: Read + Write> Client<S> {
    /// Performs the handshake.
    pub fn greet(mut stream: S) -> Self {
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting).unwrap();
        assert_eq!(&greeting, b"NBDMAGICIHAVEOPT\0\x03");
        stream.write_all(&3_u32.to_be_bytes()).unwrap();
        Self { stream, mode: Mode::Simple, capacity: 0, flags: 0, next: 1, lengths: HashMap::new() }
    }

    pub fn send_option(&mut self, code: u32, data: &[u8]) {
        let mut bytes = b"IHAVEOPT".to_vec();
        bytes.extend(code.to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
        self.stream.write_all(&bytes).unwrap();
    }

    /// Sends an option and returns all replies, the last of them an acknowledgement or an error.
    pub fn option(&mut self, code: u32, data: &[u8]) -> Vec<(u32, Vec<u8>)> {
        self.send_option(code, data);
        let mut replies = Vec::new();
        loop {
            let header = self.take(20);
            assert_eq!(header[..8], 0x0003_e889_0455_65a9_u64.to_be_bytes());
            assert_eq!(header[8..12], code.to_be_bytes());
            let kind = u32::from_be_bytes(header[12..16].try_into().unwrap());
            let length = u32::from_be_bytes(header[16..20].try_into().unwrap());
            replies.push((kind, self.take(length as usize)));
            if kind == ACK || kind & ERROR != 0 {
                return replies;
            }
        }
    }

    /// The type of the last reply to an option.
    pub fn outcome(&mut self, code: u32, data: &[u8]) -> u32 {
        self.option(code, data).pop().unwrap().0
    }

    pub fn choose(&mut self, export: &str, mode: Mode) {
        self.mode = mode;
        match mode {
            Mode::Simple => {}
            Mode::Structured => assert_eq!(self.outcome(STRUCTURED, &[]), ACK),
            Mode::Extended => assert_eq!(self.outcome(EXTENDED, &[]), ACK),
        }
        if mode != Mode::Simple {
            let replies = self.option(SET_META, &meta(export, &["base:allocation"]));
            assert_eq!(replies.len(), 2);
            assert_eq!(replies[0].1, [&1_u32.to_be_bytes()[..], b"base:allocation"].concat());
        }
        let replies = self.option(GO, &go(export, &[3]));
        assert_eq!(replies.last().unwrap().0, ACK, "{replies:?}");
        let (_, info) = &replies[0];
        assert_eq!(info[..2], [0, 0]);
        self.capacity = u64::from_be_bytes(info[2..10].try_into().unwrap());
        self.flags = u16::from_be_bytes(info[10..12].try_into().unwrap());
    }

    pub fn take(&mut self, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    /// The cookie and the bytes of a request, without a payload.
    pub fn header(&mut self, command: u16, flags: u16, offset: u64, length: u64) -> (u64, Vec<u8>) {
        let cookie = self.next;
        self.next += 1;
        let extended = self.mode == Mode::Extended;
        let magic: u32 = if extended { 0x21e4_1c71 } else { 0x2560_9513 };
        let payload = extended && command == WRITE;
        let flags = if payload { flags | PAYLOAD } else { flags };
        let mut bytes = magic.to_be_bytes().to_vec();
        bytes.extend(flags.to_be_bytes());
        bytes.extend(command.to_be_bytes());
        bytes.extend(cookie.to_be_bytes());
        bytes.extend(offset.to_be_bytes());
        if extended {
            bytes.extend(length.to_be_bytes());
        } else {
            bytes.extend(u32::try_from(length).unwrap().to_be_bytes());
        }
        if command == READ {
            self.lengths.insert(cookie, length as usize);
        }
        (cookie, bytes)
    }

    /// Sends a request and returns its cookie.
    pub fn send(&mut self, command: u16, flags: u16, offset: u64, length: u64, data: &[u8]) -> u64 {
        let (cookie, mut bytes) = self.header(command, flags, offset, length);
        bytes.extend(data);
        self.stream.write_all(&bytes).unwrap();
        cookie
    }

    /// Receives the next reply and its cookie.
    pub fn receive(&mut self) -> (u64, Answer) {
        let magic = u32::from_be_bytes(self.take(4).try_into().unwrap());
        match magic {
            0x6744_6698 => {
                assert_ne!(self.mode, Mode::Extended);
                let rest = self.take(12);
                let error = u32::from_be_bytes(rest[..4].try_into().unwrap());
                let cookie = u64::from_be_bytes(rest[4..].try_into().unwrap());
                let mut answer = Answer { error, ..Answer::default() };
                if let Some(length) = self.lengths.remove(&cookie) {
                    assert_eq!(self.mode, Mode::Simple, "the reply to a read is structured");
                    if error == 0 {
                        answer.data = self.take(length);
                    }
                }
                (cookie, answer)
            }
            0x668e_33ef => {
                assert_eq!(self.mode, Mode::Structured);
                let rest = self.take(16);
                let length = u32::from_be_bytes(rest[12..].try_into().unwrap());
                self.chunk(&rest, u64::from(length), None)
            }
            0x6e8a_278c => {
                assert_eq!(self.mode, Mode::Extended);
                let rest = self.take(28);
                let offset = u64::from_be_bytes(rest[12..20].try_into().unwrap());
                let length = u64::from_be_bytes(rest[20..].try_into().unwrap());
                self.chunk(&rest, length, Some(offset))
            }
            other => panic!("a reply with the magic {other:#x}"),
        }
    }

    fn chunk(&mut self, header: &[u8], length: u64, offset: Option<u64>) -> (u64, Answer) {
        assert_eq!(header[..2], [0, 1], "every reply has one chunk, marked as the last");
        let kind = u16::from_be_bytes(header[2..4].try_into().unwrap());
        let cookie = u64::from_be_bytes(header[4..12].try_into().unwrap());
        let payload = self.take(length as usize);
        let mut answer = Answer::default();
        match kind {
            0 => assert!(payload.is_empty()),
            1 => {
                if let Some(offset) = offset {
                    assert_eq!(payload[..8], offset.to_be_bytes());
                }
                answer.data = payload[8..].to_vec();
            }
            5 => {
                assert_eq!(payload[..4], [0, 0, 0, 1]);
                answer.extents = payload[4..]
                    .chunks(8)
                    .map(|pair| {
                        let word =
                            |at: usize| u32::from_be_bytes(pair[at..at + 4].try_into().unwrap());
                        (u64::from(word(0)), u64::from(word(4)))
                    })
                    .collect();
            }
            6 => {
                assert_eq!(payload[..4], [0, 0, 0, 1]);
                answer.extents = payload[8..]
                    .chunks(16)
                    .map(|pair| {
                        let word =
                            |at: usize| u64::from_be_bytes(pair[at..at + 8].try_into().unwrap());
                        (word(0), word(8))
                    })
                    .collect();
                let count = u32::from_be_bytes(payload[4..8].try_into().unwrap());
                assert_eq!(answer.extents.len(), count as usize);
            }
            0x8001 => {
                answer.error = u32::from_be_bytes(payload[..4].try_into().unwrap());
                let text = u16::from_be_bytes(payload[4..6].try_into().unwrap());
                assert_eq!(payload.len(), 6 + usize::from(text));
            }
            other => panic!("a chunk of type {other}"),
        }
        self.lengths.remove(&cookie);
        (cookie, answer)
    }

    /// Sends a request and waits for its reply.
    pub fn ask(
        &mut self,
        command: u16,
        flags: u16,
        offset: u64,
        length: u64,
        data: &[u8],
    ) -> Answer {
        let cookie = self.send(command, flags, offset, length, data);
        let (answered, answer) = self.receive();
        assert_eq!(answered, cookie);
        answer
    }

    pub fn write(&mut self, offset: u64, data: &[u8]) -> u32 {
        self.ask(WRITE, 0, offset, data.len() as u64, data).error
    }

    pub fn read(&mut self, offset: u64, length: u64) -> Vec<u8> {
        let answer = self.ask(READ, 0, offset, length, &[]);
        assert_eq!(answer.error, 0);
        answer.data
    }

    /// Whether the server has disconnected.
    pub fn is_disconnected(&mut self) -> bool {
        let mut byte = [0];
        match self.stream.read(&mut byte) {
            Ok(0) => true,
            Ok(_) => false,
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }
}

/// The data of INFO and GO.
pub fn go(name: &str, infos: &[u16]) -> Vec<u8> {
    let mut data = (name.len() as u32).to_be_bytes().to_vec();
    data.extend(name.as_bytes());
    data.extend((infos.len() as u16).to_be_bytes());
    data.extend(infos.iter().flat_map(|info| info.to_be_bytes()));
    data
}

/// The data of the metadata context options.
pub fn meta(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut data = (name.len() as u32).to_be_bytes().to_vec();
    data.extend(name.as_bytes());
    data.extend((queries.len() as u32).to_be_bytes());
    for query in queries {
        data.extend((query.len() as u32).to_be_bytes());
        data.extend(query.as_bytes());
    }
    data
}

/// Bytes that depend on the seed.
pub fn pattern(seed: u64, length: usize) -> Vec<u8> {
    let mut random = Random(seed);
    let mut bytes: Vec<u8> =
        (0..length.div_ceil(8)).flat_map(|_| random.next().to_le_bytes()).collect();
    bytes.truncate(length);
    bytes
}

/// A small seeded generator (`SplitMix64`).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ word >> 31
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}

/// Whether client programs are installed; prints a message if not.
pub fn have(programs: &[&str]) -> bool {
    let paths: Vec<PathBuf> =
        std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()).collect();
    for program in programs {
        if !paths.iter().any(|path| path.join(program).is_file()) {
            eprintln!("SKIPPED: {program} is not installed; run: scripts/install test");
            return false;
        }
    }
    true
}

/// Runs a program and returns its standard output; panics with all output if it fails.
pub fn run(program: &str, arguments: &[&str]) -> String {
    let output = attempt(program, arguments);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {}\n{text}{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    text
}

/// Runs a program for at most 60 s.
pub fn attempt(program: &str, arguments: &[&str]) -> Output {
    let path = std::env::var("PATH").unwrap_or_default();
    Command::new("timeout")
        .args(["60", program])
        .args(arguments)
        // Python's libnbd belongs to the distribution's interpreter, so that one comes first.
        .env("PATH", format!("/usr/bin:{path}"))
        .output()
        .unwrap()
}
