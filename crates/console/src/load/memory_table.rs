//! A relay for servers without memory slots.
//!
//! The driver library announces each memory region separately (`ADD_MEM_REG`), and requires servers
//! that offer this. Other servers, such as SPDK's, take one table of all memory (`SET_MEM_TABLE`).
//! A relay in this process translates between the two. Only the setup messages pass through it.
//! Requests and notifications go through memory and eventfds, so the relay does not affect the
//! measurement.
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

/// The unit of the lengths of memory regions, in bytes. Servers that map huge pages need whole
/// ones.
pub(super) const PIECE_UNIT: u64 = 2 << 20;

/// The length of a message's header: request, flags and the payload's length, a `u32` each.
const HEADER_LENGTH: usize = 12;
/// The longest payload that the relay passes on, in bytes.
const PAYLOAD_MAX: usize = 4096;
/// The most memory regions in a table; the format's limit.
const REGIONS_MAX: usize = 8;

const VERSION_FLAG: u32 = 1;
const REPLY_FLAG: u32 = 4;
const NEED_REPLY_FLAG: u32 = 8;

/// The protocol feature of memory slots.
const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;

/// The requests that the relay recognises; it passes others on unchanged.
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

/// A socket on which the server appears to have memory slots. One driver can connect to it.
pub(super) struct MemoryTable {
    directory: TempDir,
}

impl MemoryTable {
    /// Connects to the server, and waits for the driver on a new thread, which ends when either
    /// side closes its connection.
    pub(super) fn start(server: &Path) -> io::Result<Self> {
        let server = UnixStream::connect(server)?;
        let directory = tempfile::tempdir()?;
        let listener = UnixListener::bind(socket(directory.path()))?;
        let run = move || {
            if let Ok((driver, _)) = listener.accept() {
                // The driver reports the end of the connection.
                let _ = Relay { driver, server, regions: Vec::new() }.run();
            }
        };
        thread::Builder::new().name("memory table".into()).spawn(run)?;
        Ok(Self { directory })
    }

    /// The socket for the driver.
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

    /// Whether the server answers the request.
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

    /// An answer made by the relay.
    fn answer(request: u32, value: u64) -> Self {
        let payload = value.to_ne_bytes().to_vec();
        Self { request, flags: VERSION_FLAG | REPLY_FLAG, payload, files: Vec::new() }
    }
}

/// A memory region.
struct Region {
    /// Its address for the driver and for the device.
    start: u64,
    /// Its length in bytes, a multiple of a huge page; shorter in a table if another region begins
    /// earlier.
    length: u64,
    /// Its offset in the file, in bytes.
    offset: u64,
    file: File,
}

struct Relay {
    driver: UnixStream,
    server: UnixStream,
    regions: Vec<Region>,
}

impl Relay {
    /// Passes messages on until one side closes its connection.
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

    /// Passes a message on. Returns the server's answer, if the request has one.
    fn pass(&self, message: &Message) -> io::Result<Option<Message>> {
        message.write(&self.server)?;
        message.is_answered().then(|| self.read_answer()).transpose()
    }

    fn read_answer(&self) -> io::Result<Message> {
        Message::read(&self.server)?.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }

    /// A `SET_MEM_TABLE` message with all regions added so far.
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

/// The memory region that a message adds, extended to whole huge pages.
fn region(message: &mut Message) -> io::Result<Region> {
    let invalid = || io::Error::from(io::ErrorKind::InvalidData);
    let file = message.files.pop().ok_or_else(invalid)?;
    // The values follow eight bytes of padding: guest address, size, user address and offset.
    let (start, length, offset) = (message.number(8)?, message.number(16)?, message.number(32)?);
    let end = length.checked_add(offset).ok_or_else(invalid)?;
    let whole = end.next_multiple_of(PIECE_UNIT);
    if file.metadata()?.size() < whole {
        file.set_len(whole)?;
    }
    Ok(Region { start, length: whole - offset, offset, file })
}
