//! The sizes and capabilities of a disk.

use crate::request::{ErrorKind, Operation, Request};

/// The unit of virtio's offsets and of the paper's `Sector` and `Size`, in bytes.
pub const SECTOR_SIZE: u64 = 512;

/// Sizes of a disk, in bytes. The capacity is not here because it can change; see
/// [`Disk::capacity`](crate::Disk::capacity).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// The logical block size that clients see; a power of two from 512 to 4096.
    pub block_size: u32,
    /// The size that the storage writes without reading first; at least `block_size`.
    pub physical_block_size: u32,
    /// The size that is best for throughput; 0 if unknown.
    pub optimal_size: u32,
    /// The alignment of the offset and length of every request; 1 if there is no restriction.
    pub alignment: u32,
}

impl Default for Geometry {
    fn default() -> Self {
        Self { block_size: 512, physical_block_size: 4096, optimal_size: 0, alignment: 1 }
    }
}

impl Geometry {
    /// Whether a store of the geometry `other` can be used as if it had this one: it has the same
    /// logical blocks, and every request that is aligned here is aligned there.
    pub(crate) fn admits(self, other: Self) -> bool {
        let is_multiple = self.alignment.checked_rem(other.alignment.max(1)) == Some(0);
        self.block_size == other.block_size && is_multiple
    }
}

/// The operations that a layer or back end offers. It must not claim more than it honours: the
/// crossing refuses all other requests before they reach it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Whether operations that modify are accepted.
    pub write: bool,
    /// Whether [`Operation::Flush`] makes completed writes durable (a disk without durable storage,
    /// like memory, honours it by doing nothing).
    pub flush: bool,
    /// Whether writes can be durable at their completion; see
    /// [`Flags::force_unit_access`](crate::Flags::force_unit_access).
    pub force_unit_access: bool,
    /// Whether [`Operation::Discard`] frees space.
    pub discard: bool,
    /// Whether [`Operation::WriteZeroes`] is offered.
    pub write_zeroes: bool,
    /// Whether [`Operation::Extents`] is answered by the back end; if not, the answer is that
    /// everything is data.
    pub extents: bool,
    /// Whether seeks cost time.
    pub rotational: bool,
}

impl Capabilities {
    /// All operations, on a disk without moving parts.
    pub const ALL: Self = Self {
        write: true,
        flush: true,
        force_unit_access: true,
        discard: true,
        write_zeroes: true,
        extents: true,
        rotational: false,
    };

    /// The same capabilities without operations that modify.
    #[must_use]
    pub fn read_only(self) -> Self {
        Self { write: false, discard: false, write_zeroes: false, ..self }
    }

    /// What `other` does not offer of this, in words. An answer about extents is not missed:
    /// without it everything is data.
    pub(crate) fn lacking_in(self, other: Self) -> Option<&'static str> {
        let offers = [
            (self.write && !other.write, "writes"),
            (self.flush && !other.flush, "flushes"),
            (self.force_unit_access && !other.force_unit_access, "durable writes"),
            (self.discard && !other.discard, "discards"),
            (self.write_zeroes && !other.write_zeroes, "writes of zeroes"),
        ];
        offers.into_iter().find(|(is_lacking, _)| *is_lacking).map(|(_, what)| what)
    }

    /// Refuses a request that these capabilities do not cover.
    pub(crate) fn check(&self, request: &Request) -> Result<(), ErrorKind> {
        let offered = match request.operation {
            Operation::Read | Operation::GetId => true,
            Operation::Write => self.write,
            Operation::Flush => self.flush,
            Operation::Discard => self.write && self.discard,
            Operation::WriteZeroes => self.write && self.write_zeroes,
            Operation::Extents => self.extents,
        };
        if request.operation.modifies() && !self.write {
            return Err(ErrorKind::ReadOnly);
        }
        if !offered || request.flags.force_unit_access && !self.force_unit_access {
            return Err(ErrorKind::Unsupported);
        }
        Ok(())
    }
}
