//! Descriptor chains: from a head descriptor to the list of its memory.
//!
//! Every field here is read from the guest once. A chain is refused by name if it loops, leaves its
//! table, nests an indirect table, or has readable memory after writable memory.

use fathom_guest_memory::{GuestAddress, GuestMemory, Purpose};

use super::ring::Ring;

/// The most descriptors of one request, independent of the ring's size: QEMU's limit.
pub(super) const CHAIN_LENGTH_MAX: usize = 1024;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// `struct virtq_desc`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Descriptor {
    address: u64,
    length: u32,
    flags: u16,
    next: u16,
}

impl Descriptor {
    /// The descriptor in two words of memory, which are little-endian.
    pub(super) fn of([address, rest]: [u64; 2]) -> Self {
        let rest = u64::from_le(rest);
        Self {
            address: u64::from_le(address),
            length: rest as u32,
            flags: (rest >> 32) as u16,
            next: (rest >> 48) as u16,
        }
    }
}

/// One piece of a request's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub address: GuestAddress,
    pub length: u32,
}

/// Why a chain is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ChainError {
    /// It has more descriptors than its table, so it loops.
    Loop,
    /// A link leads out of the table.
    Link,
    /// An indirect table inside an indirect table, or one with a further link.
    Nested,
    /// An indirect table that is empty, odd in length, too long, or outside the guest's memory.
    Indirect,
    /// Readable memory after writable memory.
    Order,
}

impl ChainError {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Loop => "a descriptor chain that loops",
            Self::Link => "a descriptor link that leads out of its table",
            Self::Nested => "a nested indirect table",
            Self::Indirect => "an invalid indirect table",
            Self::Order => "readable memory after writable memory",
        }
    }
}

/// The memory of one request: first the pieces that the device reads, then those that it writes.
/// Reused for every request, so that a warm queue allocates nothing.
#[derive(Debug, Default)]
pub(super) struct Chain {
    pub readable: Vec<Piece>,
    pub writable: Vec<Piece>,
}

impl Chain {
    /// Collects the chain that begins at `head`, which must be below the ring's size.
    pub(super) fn read(&mut self, ring: &Ring, head: u16) -> Result<(), ChainError> {
        self.clear();
        let mut index = head;
        for _ in 0..ring.size() {
            let descriptor = ring.descriptor(index);
            let flags = descriptor.flags;
            if flags & INDIRECT != 0 {
                if flags & NEXT != 0 {
                    return Err(ChainError::Nested);
                }
                return self.read_indirect(ring.memory(), descriptor);
            }
            self.add(descriptor)?;
            if flags & NEXT == 0 {
                return Ok(());
            }
            index = descriptor.next;
            if index >= ring.size() {
                return Err(ChainError::Link);
            }
        }
        Err(ChainError::Loop)
    }

    fn read_indirect(&mut self, memory: &GuestMemory, table: Descriptor) -> Result<(), ChainError> {
        let length = table.length as usize;
        let count = length / 16;
        if length % 16 != 0 || count == 0 || count > usize::from(u16::MAX) {
            return Err(ChainError::Indirect);
        }
        let place = memory
            .access(table.address, u64::from(table.length), Purpose::Read)
            .ok_or(ChainError::Indirect)?;
        let mut index = 0;
        for _ in 0..count.min(CHAIN_LENGTH_MAX) {
            // The table need not be aligned.
            let bytes = place.bytes::<16>(16 * index);
            let word = |at| u64::from_ne_bytes(field(&bytes, at));
            let descriptor = Descriptor::of([word(0), word(8)]);
            let flags = descriptor.flags;
            if flags & INDIRECT != 0 {
                return Err(ChainError::Nested);
            }
            self.add(descriptor)?;
            if flags & NEXT == 0 {
                return Ok(());
            }
            index = usize::from(descriptor.next);
            if index >= count {
                return Err(ChainError::Link);
            }
        }
        Err(ChainError::Loop)
    }

    fn add(&mut self, descriptor: Descriptor) -> Result<(), ChainError> {
        let piece = Piece { address: GuestAddress(descriptor.address), length: descriptor.length };
        if descriptor.flags & WRITE != 0 {
            self.writable.push(piece);
        } else if self.writable.is_empty() {
            self.readable.push(piece);
        } else {
            return Err(ChainError::Order);
        }
        Ok(())
    }

    fn clear(&mut self) {
        self.readable.clear();
        self.writable.clear();
    }
}

/// The `N` bytes of a 16-byte wire structure that begin at `at`.
pub(super) fn field<const N: usize>(bytes: &[u8; 16], at: usize) -> [u8; N] {
    let mut field = [0; N];
    field.copy_from_slice(&bytes[at..at + N]);
    field
}
