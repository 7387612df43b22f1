//! Servers without memory slots.
//!
//! The driver library announces each piece of memory by itself (`ADD_MEM_REG`), and asks for servers
//! that offer that. Others, SPDK's among them, take one table of all memory (`SET_MEM_TABLE`). A
//! relay between the two, in this process, turns the one into the other. Only the messages of the
//! setup pass through it: requests and notifications go through memory and eventfds, so it costs
//! nothing that is measured.
use std::{
    fs::File,
    io::{self, IoSlice, Read},
    os::{
        fd::{AsRawFd, RawFd},
        unix::{
            fs::MetadataExt,
            net::{UnixListener, UnixStream},
        },
    },
    path::{Path, PathBuf},
    thread,
};

use tempfile::TempDir;
use virtio_driver::ScmSocket;

/// What the memory's pieces are multiples of, in bytes: servers that map huge pages want whole ones.
pub(super) const PIECE_UNIT: u64 = 2 << 20;

/// The length of a message's header: request, flags and the payload's length, a `u32` each.
const HEADER_LENGTH: usize = 12;
/// The longest payload that is relayed, in bytes.
const PAYLOAD_MAX: usize = 4096;
/// The most pieces of memory in a table: the format's own bound.
const REGIONS_MAX: usize = 8;

const VERSION_FLAG: u32 = 1;
const REPLY_FLAG: u32 = 4;
const NEED_REPLY_FLAG: u32 = 8;

/// The protocol feature of memory slots.
const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;

/// The requests that the relay knows; the others pass as they are.
mod request {
    pub const GET_FEATURES: u32 = 1;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const GET_VRING_BASE: u32 = 11;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const GET_QUEUE_NUM: u32 = 17;
    pub const GET_CONFIG: u32 = 24;
    pub const GET_MAX_MEM_SLOTS: u32 = 36;
    pub const ADD_MEM_REG: u32 = 37;
    pub const REM_MEM_REG: u32 = 38;
}

/// A socket on which the server seems to have memory slots. One driver can connect.
pub(super) struct MemoryTable {
    directory: TempDir,
}

impl MemoryTable {
    /// Connects to the server, and waits for the driver on a thread of its own, which ends when
    /// either side hangs up.
    pub(super) fn start(server: &Path) -> io::Result<Self> {
        let server = UnixStream::connect(server)?;
        let directory = tempfile::tempdir()?;
        let listener = UnixListener::bind(socket(directory.path()))?;
        let run = move || {
            if let Ok((driver, _)) = listener.accept() {
                // Its end is the driver's to report.
                let _ = Relay { driver, server, regions: Vec::new() }.run();
            }
        };
        thread::Builder::new().name("memory table".into()).spawn(run)?;
        Ok(Self { directory })
    }

    /// Where the driver connects.
    pub(super) fn socket(&self) -> PathBuf {
        socket(self.directory.path())
    }
}

fn socket(directory: &Path) -> PathBuf {
    directory.join("server.sock")
}

/// A message with its descriptors.
struct Message {
    request: u32,
    flags: u32,
    payload: Vec<u8>,
    files: Vec<File>,
}

impl Message {
    /// Reads a message; `None` at the end of the connection.
    fn read(mut stream: &UnixStream) -> io::Result<Option<Self>> {
        let mut header = [0; HEADER_LENGTH];
        let (count, file) = stream.recv_with_fd(&mut header)?;
        if count == 0 {
            return Ok(None);
        }
        stream.read_exact(&mut header[count..])?;
        let word = |index: usize| {
            let bytes = &header[4 * index..4 * index + 4];
            u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
        };
        let length = word(2) as usize;
        if length > PAYLOAD_MAX {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut payload = vec![0; length];
        stream.read_exact(&mut payload)?;
        let files = file.into_iter().collect();
        Ok(Some(Self { request: word(0), flags: word(1), payload, files }))
    }

    fn write(&self, stream: &UnixStream) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(HEADER_LENGTH + self.payload.len());
        for word in [self.request, self.flags, self.payload.len() as u32] {
            bytes.extend(word.to_ne_bytes());
        }
        bytes.extend(&self.payload);
        let descriptors: Vec<RawFd> = self.files.iter().map(AsRawFd::as_raw_fd).collect();
        let sent = stream.send_with_fds(&[IoSlice::new(&bytes)], &descriptors)?;
        if sent == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }

    fn number(&self, offset: usize) -> io::Result<u64> {
        let bytes = self.payload.get(offset..offset + 8).and_then(|bytes| bytes.try_into().ok());
        bytes.map(u64::from_ne_bytes).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Whether the server answers.
    fn is_answered(&self) -> bool {
        const GETS: [u32; 5] = [
            request::GET_FEATURES,
            request::GET_VRING_BASE,
            request::GET_PROTOCOL_FEATURES,
            request::GET_QUEUE_NUM,
            request::GET_CONFIG,
        ];
        GETS.contains(&self.request) || self.flags & NEED_REPLY_FLAG != 0
    }

    /// The relay's own answer.
    fn answer(request: u32, value: u64) -> Self {
        let payload = value.to_ne_bytes().to_vec();
        Self { request, flags: VERSION_FLAG | REPLY_FLAG, payload, files: Vec::new() }
    }
}

/// A piece of memory.
struct Region {
    /// Its address, in the driver as for the device.
    start: u64,
    /// The length of whole huge pages, in bytes; less where another piece begins before that.
    length: u64,
    /// Where it begins in the file.
    offset: u64,
    file: File,
}

struct Relay {
    driver: UnixStream,
    server: UnixStream,
    regions: Vec<Region>,
}

impl Relay {
    /// Passes messages on until one side hangs up.
    fn run(&mut self) -> io::Result<()> {
        while let Some(mut message) = Message::read(&self.driver)? {
            let answer = match message.request {
                request::GET_MAX_MEM_SLOTS => {
                    Some(Message::answer(message.request, REGIONS_MAX as u64))
                }
                request::REM_MEM_REG => Some(Message::answer(message.request, 0)),
                request::ADD_MEM_REG => {
                    self.regions.push(region(&mut message)?);
                    let table = self.table()?;
                    table.write(&self.server)?;
                    let answer = self.read_answer()?;
                    Some(Message::answer(message.request, answer.number(0)?))
                }
                request::SET_PROTOCOL_FEATURES => {
                    let features = message.number(0)? & !CONFIGURE_MEM_SLOTS;
                    message.payload = features.to_ne_bytes().to_vec();
                    self.pass(&message)?
                }
                request::GET_PROTOCOL_FEATURES => {
                    let mut answer = self.pass(&message)?;
                    if let Some(answer) = &mut answer {
                        let features = answer.number(0)? | CONFIGURE_MEM_SLOTS;
                        answer.payload = features.to_ne_bytes().to_vec();
                    }
                    answer
                }
                _ => self.pass(&message)?,
            };
            if let Some(answer) = answer {
                answer.write(&self.driver)?;
            }
        }
        Ok(())
    }

    /// Passes a message on, and gives the server's answer if there is to be one.
    fn pass(&self, message: &Message) -> io::Result<Option<Message>> {
        message.write(&self.server)?;
        message.is_answered().then(|| self.read_answer()).transpose()
    }

    fn read_answer(&self) -> io::Result<Message> {
        Message::read(&self.server)?.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }

    /// All memory that there is so far.
    fn table(&self) -> io::Result<Message> {
        if self.regions.len() > REGIONS_MAX {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut payload = Vec::new();
        payload.extend((self.regions.len() as u32).to_ne_bytes());
        payload.extend([0; 4]);
        let mut files = Vec::new();
        for region in &self.regions {
            let next = self.regions.iter().map(|other| other.start).filter(|s| *s > region.start);
            let room = next.min().map_or(u64::MAX, |next| next - region.start);
            for number in [region.start, region.length.min(room), region.start, region.offset] {
                payload.extend(number.to_ne_bytes());
            }
            files.push(region.file.try_clone()?);
        }
        let flags = VERSION_FLAG | NEED_REPLY_FLAG;
        Ok(Message { request: request::SET_MEM_TABLE, flags, payload, files })
    }
}

/// The piece of memory that a message adds, made longer so that it is whole huge pages.
fn region(message: &mut Message) -> io::Result<Region> {
    let invalid = || io::Error::from(io::ErrorKind::InvalidData);
    let file = message.files.pop().ok_or_else(invalid)?;
    // Behind eight bytes of padding: guest address, size, user address and offset.
    let (start, length, offset) = (message.number(8)?, message.number(16)?, message.number(32)?);
    let end = length.checked_add(offset).ok_or_else(invalid)?;
    let whole = end.next_multiple_of(PIECE_UNIT);
    if file.metadata()?.size() < whole {
        file.set_len(whole)?;
    }
    Ok(Region { start, length: whole - offset, offset, file })
}
