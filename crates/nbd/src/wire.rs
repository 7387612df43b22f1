//! The constants of the NBD protocol, and the layout of its requests.
//!
//! All integers on the wire are big-endian.

/// The magic number of a server's first message: `NBDMAGIC`.
pub const GREETING_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// The magic number of the newstyle handshake and of every option: `IHAVEOPT`.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// The magic number of a reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// The magic number of a request with a 32-bit length.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// The magic number of a request with a 64-bit length.
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// The magic number of a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// The magic number of a chunk of a structured reply.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
/// The magic number of a chunk of a reply with extended headers.
pub const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// The longest string of the protocol, in bytes.
pub const STRING_LENGTH_MAX: usize = 4096;
/// The length of a request's header, in bytes.
pub const REQUEST_LENGTH: usize = 28;
/// The length of a simple reply's header, in bytes.
pub const SIMPLE_REPLY_LENGTH: usize = 16;
/// The length of an extended request's header, in bytes.
pub const EXTENDED_REQUEST_LENGTH: usize = 32;

/// Flags of the handshake, the same bits in both directions.
pub mod handshake {
    /// Each option has a reply.
    pub const FIXED_NEWSTYLE: u16 = 1 << 0;
    /// No 124 zeroes after `OPTION_EXPORT_NAME`.
    pub const NO_ZEROES: u16 = 1 << 1;
}

/// Options of the handshake.
pub mod option {
    /// Choose an export and begin transmission; has no error reply.
    pub const EXPORT_NAME: u32 = 1;
    /// End the negotiation.
    pub const ABORT: u32 = 2;
    /// List the exports.
    pub const LIST: u32 = 3;
    /// Start TLS.
    pub const STARTTLS: u32 = 5;
    /// Describe an export.
    pub const INFO: u32 = 6;
    /// Describe an export and begin transmission.
    pub const GO: u32 = 7;
    /// Use structured replies.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// List the metadata contexts of an export.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Choose metadata contexts.
    pub const SET_META_CONTEXT: u32 = 10;
    /// Use extended headers (64-bit lengths).
    pub const EXTENDED_HEADERS: u32 = 11;
}

/// Types of replies to options.
pub mod reply {
    /// The option has succeeded.
    pub const ACK: u32 = 1;
    /// An export's name and description.
    pub const SERVER: u32 = 2;
    /// A piece of information about an export.
    pub const INFO: u32 = 3;
    /// A metadata context.
    pub const META_CONTEXT: u32 = 4;
    /// The option is unknown.
    pub const ERROR_UNSUPPORTED: u32 = 1 << 31 | 1;
    /// The option is not allowed by policy.
    pub const ERROR_POLICY: u32 = 1 << 31 | 2;
    /// The option is invalid, or inconsistent with earlier options.
    pub const ERROR_INVALID: u32 = 1 << 31 | 3;
    /// TLS is required first.
    pub const ERROR_TLS_REQUIRED: u32 = 1 << 31 | 5;
    /// There is no such export.
    pub const ERROR_UNKNOWN: u32 = 1 << 31 | 6;
    /// The option is too long.
    pub const ERROR_TOO_BIG: u32 = 1 << 31 | 9;
}

/// Kinds of information in a reply of type [`reply::INFO`].
pub mod info {
    /// Size and flags.
    pub const EXPORT: u16 = 0;
    /// The export's canonical name.
    pub const NAME: u16 = 1;
    /// A description for people.
    pub const DESCRIPTION: u16 = 2;
    /// The smallest, the preferred and the largest size of a request.
    pub const BLOCK_SIZE: u16 = 3;
}

/// Capabilities of an export.
pub mod transmission {
    /// The flags are valid.
    pub const HAS_FLAGS: u16 = 1 << 0;
    /// Writes are refused.
    pub const READ_ONLY: u16 = 1 << 1;
    /// Flush is supported.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// Force unit access is supported.
    pub const SEND_FUA: u16 = 1 << 3;
    /// The disk is rotational.
    pub const ROTATIONAL: u16 = 1 << 4;
    /// Trim is supported.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// Write-zeroes is supported.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// Don't-fragment is supported.
    pub const SEND_DF: u16 = 1 << 7;
    /// After a flush on one connection, all connections see its completed writes.
    pub const CAN_MULTI_CONN: u16 = 1 << 8;
    /// Cache is supported.
    pub const SEND_CACHE: u16 = 1 << 10;
    /// Fast-zero is supported.
    pub const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// Commands of the transmission phase.
pub mod command {
    /// Read a range.
    pub const READ: u16 = 0;
    /// Write a range.
    pub const WRITE: u16 = 1;
    /// End the connection.
    pub const DISCONNECT: u16 = 2;
    /// Make completed writes durable.
    pub const FLUSH: u16 = 3;
    /// Discard a range.
    pub const TRIM: u16 = 4;
    /// Announce that a range will be read soon.
    pub const CACHE: u16 = 5;
    /// Write zeroes to a range.
    pub const WRITE_ZEROES: u16 = 6;
    /// Describe the allocation of a range.
    pub const BLOCK_STATUS: u16 = 7;
}

/// Flags of a command.
pub mod flag {
    /// The data is durable before the reply.
    pub const FUA: u16 = 1 << 0;
    /// Write-zeroes must leave the range allocated.
    pub const NO_HOLE: u16 = 1 << 1;
    /// A read's data is in one chunk.
    pub const DF: u16 = 1 << 2;
    /// Block status describes only the first extent.
    pub const REQUEST_ONE: u16 = 1 << 3;
    /// Write-zeroes must be fast or fail.
    pub const FAST_ZERO: u16 = 1 << 4;
    /// The length is that of a payload after the header (extended headers only).
    pub const PAYLOAD_LENGTH: u16 = 1 << 5;
}

/// Types of chunks in structured and extended replies.
pub mod chunk {
    /// The flag of a reply's last chunk.
    pub const DONE: u16 = 1 << 0;
    /// No payload.
    pub const NONE: u16 = 0;
    /// An offset and data.
    pub const OFFSET_DATA: u16 = 1;
    /// Extents with 32-bit lengths.
    pub const BLOCK_STATUS: u16 = 5;
    /// Extents with 64-bit lengths.
    pub const BLOCK_STATUS_EXTENDED: u16 = 6;
    /// An error number and a text.
    pub const ERROR: u16 = 1 << 15 | 1;
}

/// States of an extent in the context `base:allocation`.
pub mod state {
    /// The range is not allocated.
    pub const HOLE: u32 = 1 << 0;
    /// The range reads as zeroes.
    pub const ZERO: u32 = 1 << 1;
}

/// The state of an extent that has changed, in a context of a [`DIRTY_BITMAP`].
pub const DIRTY: u32 = 1 << 0;

/// Errors of the transmission phase.
pub mod error {
    /// Not permitted: the export is read-only.
    pub const PERMISSION: u32 = 1;
    /// Input or output failed.
    pub const IO: u32 = 5;
    /// The request is invalid.
    pub const INVALID: u32 = 22;
    /// No space left, or a write past the end.
    pub const NO_SPACE: u32 = 28;
    /// Not supported: there is no fast way to write zeroes.
    pub const NOT_SUPPORTED: u32 = 95;
    /// The server is shutting down.
    pub const SHUTDOWN: u32 = 108;
}

/// The metadata context for allocation.
pub const BASE_ALLOCATION: &str = "base:allocation";
/// The number of [`BASE_ALLOCATION`] on a connection.
pub const BASE_ALLOCATION_ID: u32 = 1;
/// The beginning of the names of metadata contexts for what has changed: the rest names since when.
pub const DIRTY_BITMAP: &str = "qemu:dirty-bitmap:";
/// The number of the first of these on a connection.
pub const DIRTY_BITMAP_ID: u32 = BASE_ALLOCATION_ID + 1;

/// The form of requests and replies on a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Simple replies only.
    #[default]
    Simple,
    /// Structured replies to reads and block status.
    Structured,
    /// 64-bit headers in both directions.
    Extended,
}

impl Mode {
    /// The length of a request's header, in bytes.
    pub fn request_length(self) -> usize {
        match self {
            Self::Simple | Self::Structured => REQUEST_LENGTH,
            Self::Extended => EXTENDED_REQUEST_LENGTH,
        }
    }

    /// The name used in status.
    pub fn name(self) -> &'static str {
        match self {
            Self::Simple => "simple",
            Self::Structured => "structured",
            Self::Extended => "extended",
        }
    }
}

/// The header of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHeader {
    /// See [`flag`].
    pub flags: u16,
    /// See [`command`].
    pub command: u16,
    /// The client's identifier of the request, which the reply repeats.
    pub cookie: u64,
    /// The offset of the range, in bytes.
    pub offset: u64,
    /// The length of the range or of the payload, in bytes.
    pub length: u64,
}

impl RequestHeader {
    /// Parses a header. `bytes` has at least [`Mode::request_length`] bytes. Returns `None` if the
    /// magic number is wrong.
    #[inline]
    pub fn parse(bytes: &[u8], mode: Mode) -> Option<Self> {
        let (magic, length) = match mode {
            Mode::Simple | Mode::Structured => (REQUEST_MAGIC, u64::from(read_u32(bytes, 24)?)),
            Mode::Extended => (EXTENDED_REQUEST_MAGIC, read_u64(bytes, 24)?),
        };
        if read_u32(bytes, 0)? != magic {
            return None;
        }
        Some(Self {
            flags: read_u16(bytes, 4)?,
            command: read_u16(bytes, 6)?,
            cookie: read_u64(bytes, 8)?,
            offset: read_u64(bytes, 16)?,
            length,
        })
    }

    /// The bytes of the header in the modes with 32-bit lengths. A longer length is cut off.
    pub fn encode(&self) -> [u8; REQUEST_LENGTH] {
        let mut bytes = [0; REQUEST_LENGTH];
        bytes[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        bytes[4..6].copy_from_slice(&self.flags.to_be_bytes());
        bytes[6..8].copy_from_slice(&self.command.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        bytes[16..24].copy_from_slice(&self.offset.to_be_bytes());
        bytes[24..].copy_from_slice(&(self.length as u32).to_be_bytes());
        bytes
    }
}

/// The header of a simple reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimpleReply {
    /// 0, or one of [`error`].
    pub error: u32,
    /// The identifier of the request.
    pub cookie: u64,
}

impl SimpleReply {
    /// Parses a header. Returns `None` if the magic number is wrong.
    pub fn parse(bytes: &[u8; SIMPLE_REPLY_LENGTH]) -> Option<Self> {
        if read_u32(bytes, 0)? != SIMPLE_REPLY_MAGIC {
            return None;
        }
        Some(Self { error: read_u32(bytes, 4)?, cookie: read_u64(bytes, 8)? })
    }
}

/// The big-endian 16-bit number at `at`; `None` past the end.
#[inline]
pub fn read_u16(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// The big-endian 32-bit number at `at`; `None` past the end.
#[inline]
pub fn read_u32(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

/// The big-endian 64-bit number at `at`; `None` past the end.
#[inline]
pub fn read_u64(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_be_bytes(*bytes.get(at..)?.first_chunk()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_of_both_widths_are_parsed_and_a_wrong_magic_number_is_refused() {
        let mut bytes = Vec::new();
        bytes.extend(REQUEST_MAGIC.to_be_bytes());
        bytes.extend(flag::FUA.to_be_bytes());
        bytes.extend(command::WRITE.to_be_bytes());
        bytes.extend(7_u64.to_be_bytes());
        bytes.extend(4096_u64.to_be_bytes());
        bytes.extend(512_u32.to_be_bytes());
        let header = RequestHeader::parse(&bytes, Mode::Structured).unwrap();
        assert_eq!((header.cookie, header.offset, header.length), (7, 4096, 512));
        assert_eq!((header.flags, header.command), (flag::FUA, command::WRITE));
        assert_eq!(header.encode()[..], bytes[..]);
        assert!(RequestHeader::parse(&bytes, Mode::Extended).is_none());
        assert!(RequestHeader::parse(&bytes[..27], Mode::Simple).is_none());
        bytes[..4].copy_from_slice(&EXTENDED_REQUEST_MAGIC.to_be_bytes());
        bytes[24..].copy_from_slice(&[0; 4]);
        bytes.extend(9_u32.to_be_bytes());
        assert_eq!(RequestHeader::parse(&bytes, Mode::Extended).unwrap().length, 9);
    }
}
