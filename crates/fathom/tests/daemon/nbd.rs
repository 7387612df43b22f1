//! A small NBD client: simple replies, one request at a time or many in flight.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

/// The size of the blocks of `fill_block` and `read_block`.
const BLOCK: u64 = 4096;
/// The commands of requests.
pub const READ: u16 = 0;
pub const WRITE: u16 = 1;
pub const DISCONNECT: u16 = 2;
pub const FLUSH: u16 = 3;
pub const TRIM: u16 = 4;
const OPTION_GO: u32 = 7;
const REPLY_ACK: u32 = 1;
const REPLY_INFO: u32 = 3;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;

pub struct Nbd {
    stream: UnixStream,
    capacity: u64,
}

impl Nbd {
    pub fn connect(socket: &Path, export: &str) -> Self {
        Self::try_connect(socket, export).unwrap()
    }

    /// Connects if the server is there and has the export.
    pub fn try_connect(socket: &Path, export: &str) -> io::Result<Self> {
        let mut stream = UnixStream::connect(socket)?;
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting)?;
        assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
        // Fixed newstyle, no zeroes.
        stream.write_all(&3_u32.to_be_bytes())?;
        let mut option = b"IHAVEOPT".to_vec();
        option.extend(OPTION_GO.to_be_bytes());
        option.extend((export.len() as u32 + 6).to_be_bytes());
        option.extend((export.len() as u32).to_be_bytes());
        option.extend(export.as_bytes());
        option.extend(0_u16.to_be_bytes());
        stream.write_all(&option)?;
        let mut nbd = Self { stream, capacity: 0 };
        loop {
            let mut head = [0; 20];
            nbd.stream.read_exact(&mut head)?;
            let kind = u32::from_be_bytes(head[12..16].try_into().unwrap());
            let length = u32::from_be_bytes(head[16..].try_into().unwrap());
            let mut data = vec![0; length as usize];
            nbd.stream.read_exact(&mut data)?;
            match kind {
                REPLY_ACK => return Ok(nbd),
                REPLY_INFO if data[..2] == [0, 0] => {
                    nbd.capacity = u64::from_be_bytes(data[2..10].try_into().unwrap());
                }
                REPLY_INFO => {}
                other => return Err(io::Error::other(format!("reply {other:#x}"))),
            }
        }
    }

    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Sends a request. Returns false if the server has closed the connection.
    pub fn send(&mut self, kind: u16, cookie: u64, offset: u64, length: u32, data: &[u8]) -> bool {
        self.send_with(0, kind, cookie, offset, length, data)
    }

    /// The same with command flags.
    pub fn send_with(
        &mut self,
        flags: u16,
        kind: u16,
        cookie: u64,
        offset: u64,
        length: u32,
        data: &[u8],
    ) -> bool {
        let mut request = REQUEST_MAGIC.to_be_bytes().to_vec();
        request.extend(flags.to_be_bytes());
        request.extend(kind.to_be_bytes());
        request.extend(cookie.to_be_bytes());
        request.extend(offset.to_be_bytes());
        request.extend(length.to_be_bytes());
        request.extend(data);
        self.stream.write_all(&request).is_ok()
    }

    /// The next reply: cookie and error. `None` if the server has closed the connection.
    pub fn reply(&mut self) -> Option<(u64, u32)> {
        let mut reply = [0; 16];
        self.stream.read_exact(&mut reply).ok()?;
        assert_eq!(reply[..4], REPLY_MAGIC.to_be_bytes());
        let error = u32::from_be_bytes(reply[4..8].try_into().unwrap());
        Some((u64::from_be_bytes(reply[8..].try_into().unwrap()), error))
    }

    /// The data of a reply.
    pub fn data(&mut self, length: usize) -> Option<Vec<u8>> {
        let mut data = vec![0; length];
        self.stream.read_exact(&mut data).ok()?;
        Some(data)
    }

    /// Takes the reply to a read of `length` bytes.
    pub fn read_reply(&mut self, length: u32) {
        assert_eq!(self.reply().map(|(_, error)| error), Some(0));
        self.stream.read_exact(&mut vec![0; length as usize]).unwrap();
    }

    pub fn write(&mut self, offset: u64, data: &[u8]) {
        assert!(self.send(WRITE, 1, offset, data.len() as u32, data));
        assert_eq!(self.reply(), Some((1, 0)));
    }

    /// Fills a block of 4 KiB. Returns the error of the reply; `None` if the connection ends.
    pub fn fill_block(&mut self, block: u64, content: u8) -> Option<u32> {
        let data = [content; BLOCK as usize];
        if !self.send(WRITE, block, block * BLOCK, BLOCK as u32, &data) {
            return None;
        }
        self.reply().map(|reply| reply.1)
    }

    /// The byte with which a block of 4 KiB is filled.
    pub fn read_block(&mut self, block: u64) -> u8 {
        let data = self.read(block * BLOCK, BLOCK as u32);
        assert!(data.iter().all(|byte| *byte == data[0]), "a block is torn");
        data[0]
    }

    /// The error of a read of a block of 4 KiB; 0 if it has none.
    pub fn read_error(&mut self, block: u64) -> u32 {
        assert!(self.send(READ, 2, block * BLOCK, BLOCK as u32, &[]));
        let (_, error) = self.reply().unwrap();
        if error == 0 {
            self.stream.read_exact(&mut [0; BLOCK as usize]).unwrap();
        }
        error
    }

    pub fn read(&mut self, offset: u64, length: u32) -> Vec<u8> {
        assert!(self.send(READ, 2, offset, length, &[]));
        assert_eq!(self.reply(), Some((2, 0)));
        let mut data = vec![0; length as usize];
        self.stream.read_exact(&mut data).unwrap();
        data
    }
}
