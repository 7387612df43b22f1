//! virtio-blk requests (virtio 1.2, section 5.2.6): parses a chain's memory into a request.
//!
//! The device assumes no framing: the header is the first 16 readable bytes and the status the last
//! writable byte, however the driver has divided them into descriptors.

use fathom_block::{ErrorKind, Operation, SECTOR_SIZE};
use fathom_guest_memory::{GuestAddress, GuestMemory, Purpose};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD,
    VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
    VIRTIO_BLK_T_WRITE_ZEROES,
};

use super::chain::{Chain, Piece, field};

/// The length of the header, in bytes.
pub(super) const HEADER_LENGTH: usize = 16;
/// The length of one segment of a discard or write-zeroes request, in bytes.
pub(super) const SEGMENT_LENGTH: usize = 16;
/// The most segments of a discard or write-zeroes request.
pub(super) const SEGMENTS_MAX: usize = 16;

/// The flag of a write-zeroes segment that allows the device to deallocate it.
const SEGMENT_UNMAP: u32 = 1;

/// Why a request is refused before it reaches the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequestError {
    /// There is no byte for the status, so no error can be reported to the guest.
    NoStatus,
    /// The header is truncated, or outside the guest's memory.
    Header,
    /// The data is outside the guest's memory.
    Data,
    /// The payload has an invalid length for the operation.
    Payload,
}

impl RequestError {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::NoStatus => "a request without room for its status",
            Self::Header => "a request header that is truncated or outside the guest's memory",
            Self::Data => "request data outside the guest's memory",
            Self::Payload => "a request payload of the wrong length",
        }
    }
}

/// A request as described by its chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Parsed {
    /// The requested operation; `None` if the device does not know the type.
    pub operation: Option<Operation>,
    /// The guest's priority for the request.
    pub io_priority: u16,
    /// The offset at which a read or write begins, in bytes.
    pub offset: u64,
    /// The length of the data, in bytes, without header and status.
    pub data_length: u64,
    /// The guest-physical address of the header.
    pub header: GuestAddress,
    /// The guest-physical address of the status byte.
    pub status: GuestAddress,
}

/// Parses `chain` and leaves only the data in it: header and status are cut off.
pub(super) fn parse(memory: &GuestMemory, chain: &mut Chain) -> Result<Parsed, RequestError> {
    let status = cut_status(memory, chain)?;
    let mut bytes = [0; HEADER_LENGTH];
    let header = chain.readable.first().map(|piece| piece.address).ok_or(RequestError::Header)?;
    if cut_front(memory, &mut chain.readable, &mut bytes) != HEADER_LENGTH {
        return Err(RequestError::Header);
    }
    let kind = u32::from_le_bytes(field(&bytes, 0));
    let priority = u32::from_le_bytes(field(&bytes, 4));
    let sector = u64::from_le_bytes(field(&bytes, 8));
    let operation = match kind {
        VIRTIO_BLK_T_IN => Some(Operation::Read),
        VIRTIO_BLK_T_OUT => Some(Operation::Write),
        VIRTIO_BLK_T_FLUSH => Some(Operation::Flush),
        VIRTIO_BLK_T_GET_ID => Some(Operation::GetId),
        VIRTIO_BLK_T_DISCARD => Some(Operation::Discard),
        VIRTIO_BLK_T_WRITE_ZEROES => Some(Operation::WriteZeroes),
        _ => None,
    };
    let data = match operation {
        Some(Operation::Read | Operation::GetId) => &chain.writable,
        _ => &chain.readable,
    };
    let data_length = data.iter().map(|piece| u64::from(piece.length)).sum();
    Ok(Parsed {
        operation,
        io_priority: priority as u16,
        // A sector number that does not fit is past the end of every disk.
        offset: sector.saturating_mul(SECTOR_SIZE),
        data_length,
        header,
        status,
    })
}

/// A segment of a discard or write-zeroes request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    /// The offset at which it begins, in bytes.
    pub offset: u64,
    /// Its length in bytes.
    pub length: u64,
    /// Whether the device may deallocate it.
    pub unmap: bool,
}

/// The segments of a discard or write-zeroes request, from its readable memory.
pub(super) fn segments(
    memory: &GuestMemory,
    chain: &mut Chain,
    operation: Operation,
    segments: &mut Vec<Segment>,
) -> Result<(), ErrorKind> {
    segments.clear();
    let length: u64 = chain.readable.iter().map(|piece| u64::from(piece.length)).sum();
    if length == 0 || length % SEGMENT_LENGTH as u64 != 0 {
        return Err(ErrorKind::Malformed);
    }
    if length > (SEGMENTS_MAX * SEGMENT_LENGTH) as u64 {
        return Err(ErrorKind::TooLong);
    }
    for _ in 0..length / SEGMENT_LENGTH as u64 {
        let mut bytes = [0; SEGMENT_LENGTH];
        if cut_front(memory, &mut chain.readable, &mut bytes) != SEGMENT_LENGTH {
            return Err(ErrorKind::Malformed);
        }
        let flags = u32::from_le_bytes(field(&bytes, 12));
        // Reserved flags, and unmap on a discard, must be refused (virtio 1.2, 5.2.6.2).
        let known = if operation == Operation::WriteZeroes { SEGMENT_UNMAP } else { 0 };
        if flags & !known != 0 {
            return Err(ErrorKind::Unsupported);
        }
        segments.push(Segment {
            offset: u64::from_le_bytes(field(&bytes, 0)).saturating_mul(SECTOR_SIZE),
            length: u64::from(u32::from_le_bytes(field(&bytes, 8))) * SECTOR_SIZE,
            unmap: flags & SEGMENT_UNMAP != 0,
        });
    }
    Ok(())
}

/// The status byte that reports an outcome to the guest.
pub(super) fn status(outcome: fathom_block::Outcome) -> u8 {
    match outcome {
        Ok(()) => VIRTIO_BLK_S_OK as u8,
        Err(ErrorKind::Unsupported) => VIRTIO_BLK_S_UNSUPP as u8,
        Err(_) => VIRTIO_BLK_S_IOERR as u8,
    }
}

/// Cuts the last writable byte off `chain`. Returns its address, at which there is memory.
pub(super) fn cut_status(
    memory: &GuestMemory,
    chain: &mut Chain,
) -> Result<GuestAddress, RequestError> {
    // Empty pieces at the end have no room for the byte.
    while chain.writable.last().is_some_and(|piece| piece.length == 0) {
        chain.writable.pop();
    }
    let last = chain.writable.last_mut().ok_or(RequestError::NoStatus)?;
    last.length -= 1;
    let address = last
        .address
        .0
        .checked_add(u64::from(last.length))
        .filter(|address| memory.contains(*address))
        .map(GuestAddress)
        .ok_or(RequestError::NoStatus)?;
    if last.length == 0 {
        chain.writable.pop();
    }
    Ok(address)
}

/// Moves the first bytes of `pieces` into `target`. Returns the number of bytes moved.
fn cut_front(memory: &GuestMemory, pieces: &mut Vec<Piece>, target: &mut [u8]) -> usize {
    let (mut done, mut gone) = (0, 0);
    for piece in pieces.iter_mut() {
        if done == target.len() {
            break;
        }
        let count = (target.len() - done).min(piece.length as usize);
        let access = memory.access(piece.address.0, count as u64, Purpose::Read);
        let Some(access) = access else { break };
        access.read(0, &mut target[done..done + count]);
        done += count;
        piece.length -= count as u32;
        piece.address.0 = piece.address.0.wrapping_add(count as u64);
        if piece.length > 0 {
            break;
        }
        gone += 1;
    }
    pieces.drain(..gone);
    done
}
