//! The request: what is asked of a disk, and what comes of it.

use std::fmt;

use fathom_insight::{Insight, Part};

use crate::aside::StoreId;
use crate::buffer::{Buffers, GuestAddress};
use crate::geometry::Capabilities;
use crate::layer::LAYERS_MAX;
use crate::split::Split;

/// The longest read or write, in bytes: 32 MiB, what NBD clients take for granted.
/// Discards and zeroes carry no data and may be longer.
pub const REQUEST_LENGTH_MAX: u64 = 32 << 20;

/// The length of a disk's serial, in bytes, as `VIRTIO_BLK_ID_BYTES` has it.
pub const SERIAL_LENGTH: usize = 20;

/// Parts of an insight beyond this count are given back when their request is used again.
const PARTS_KEPT_MAX: usize = 64;

/// What is asked. The set is closed, and every layer matches it in full: an operation that a
/// layer does not know is a compile error there, never a request passed on unseen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Operation {
    /// Fill the buffers from the disk.
    Read,
    /// Put the buffers on the disk.
    Write,
    /// Make everything that has completed before this request was submitted durable.
    Flush,
    /// The range is of no use any more. It may read as anything afterwards, here as zeroes.
    Discard,
    /// The range reads as zeroes afterwards.
    WriteZeroes,
    /// Fill the buffers with the serial of the disk ([`SERIAL_LENGTH`] bytes, zero-padded).
    GetId,
    /// Say which parts of the range are allocated and which read as zeroes, in
    /// [`Request::extents`].
    Extents,
}

impl Operation {
    /// Every operation, in the order of declaration.
    pub const ALL: [Self; 7] = [
        Self::Read,
        Self::Write,
        Self::Flush,
        Self::Discard,
        Self::WriteZeroes,
        Self::GetId,
        Self::Extents,
    ];

    /// The name used in logs, metrics and the control interface.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Flush => "flush",
            Self::Discard => "discard",
            Self::WriteZeroes => "write-zeroes",
            Self::GetId => "get-id",
            Self::Extents => "extents",
        }
    }

    /// Whether the operation changes what the disk holds.
    pub fn modifies(self) -> bool {
        match self {
            Self::Write | Self::Discard | Self::WriteZeroes => true,
            Self::Read | Self::Flush | Self::GetId | Self::Extents => false,
        }
    }

    /// Whether the request's buffers carry its range's bytes.
    pub fn carries_data(self) -> bool {
        match self {
            Self::Read | Self::Write => true,
            Self::Flush | Self::Discard | Self::WriteZeroes | Self::GetId | Self::Extents => false,
        }
    }

    /// Whether offset and length name a range of the disk.
    pub fn has_range(self) -> bool {
        match self {
            Self::Read | Self::Write | Self::Discard | Self::WriteZeroes | Self::Extents => true,
            Self::Flush | Self::GetId => false,
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

/// How an operation is to be carried out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags {
    /// Force unit access: the write is durable before it completes.
    pub force_unit_access: bool,
    /// [`Operation::WriteZeroes`] must leave the range allocated.
    pub keep_allocated: bool,
    /// [`Operation::WriteZeroes`] must fail with [`ErrorKind::Unsupported`] rather than be as slow
    /// as writing the zeroes out (NBD's `FAST_ZERO`).
    pub only_if_fast: bool,
    /// It is work in the background, which no guest's request waits for: where requests queue up
    /// for the storage, it comes after them.
    pub background: bool,
}

/// Why a request failed. Small and `Copy`: what there is to tell a person is logged where the
/// failure happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// The back end failed to read or write.
    Io,
    /// There is no room left beneath the disk.
    NoSpace,
    /// The range ends behind the end of the disk.
    OutOfRange,
    /// Offset, length or memory is no multiple of what the disk needs.
    Misaligned,
    /// The disk is read-only.
    ReadOnly,
    /// The disk does not offer this operation.
    Unsupported,
    /// The request is longer than allowed.
    TooLong,
    /// The request contradicts itself, for example buffers that do not add up to its length.
    Malformed,
    /// The disk is being closed.
    ShuttingDown,
    /// The request's memory cannot be read or written: it is not there any more.
    Memory,
}

impl ErrorKind {
    /// Every kind, in the order of declaration.
    pub const ALL: [Self; 10] = [
        Self::Io,
        Self::NoSpace,
        Self::OutOfRange,
        Self::Misaligned,
        Self::ReadOnly,
        Self::Unsupported,
        Self::TooLong,
        Self::Malformed,
        Self::ShuttingDown,
        Self::Memory,
    ];

    /// What an `errno` of the operating system means for a request.
    pub fn from_errno(errno: i32) -> Self {
        match errno {
            libc::ENOSPC | libc::EDQUOT | libc::EFBIG => Self::NoSpace,
            libc::EROFS | libc::EPERM | libc::EACCES => Self::ReadOnly,
            libc::EOPNOTSUPP | libc::ENOSYS => Self::Unsupported,
            libc::EINVAL => Self::Misaligned,
            libc::EFAULT => Self::Memory,
            _ => Self::Io,
        }
    }

    /// The name used in logs, metrics and the control interface.
    pub fn name(self) -> &'static str {
        match self {
            Self::Io => "input/output error",
            Self::NoSpace => "no space left",
            Self::OutOfRange => "out of range",
            Self::Misaligned => "misaligned",
            Self::ReadOnly => "read-only",
            Self::Unsupported => "unsupported",
            Self::TooLong => "too long",
            Self::Malformed => "malformed",
            Self::ShuttingDown => "shutting down",
            Self::Memory => "memory lost",
        }
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

impl std::error::Error for ErrorKind {}

/// What comes of a request.
pub type Outcome = Result<(), ErrorKind>;

/// Whether a part of a disk has room of its own beneath.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allocation {
    /// It holds data.
    Data,
    /// It reads as zeroes and has no room beneath.
    Hole,
    /// It reads as zeroes and has room beneath.
    Zero,
}

/// A part of a disk that is of one [`Allocation`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Where it begins, in bytes from the start of the disk.
    pub offset: u64,
    /// How long it is, in bytes; never 0.
    pub length: u64,
    /// What it holds.
    pub allocation: Allocation,
}

/// Whether a layer had what a request read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum CacheHit {
    /// No layer looked.
    #[default]
    Unknown = 0,
    /// Nothing of it.
    Miss = 1,
    /// All of it.
    Hit = 2,
    /// A part of it.
    Part = 3,
}

/// How a request went, as far as anyone looked at the clock while it did. Times are those of the
/// stack's clock in nanoseconds, exact to one round of its thread, and 0 where nobody looked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Course {
    /// Requests that were under way in the same stack when this one came.
    pub ahead: u32,
    /// Whether a layer had what was read, as that layer says.
    pub cache_hit: CacheHit,
    /// 1 + the position of the layer that has it or has answered it, counted from the front end; 0
    /// for the back end.
    pub layer: u8,
    /// When the back end got it.
    pub sent_ns: u64,
    /// When the back end had given it back; 0 also where nothing lies between it and whoever
    /// asks.
    pub returned_ns: u64,
}

/// One request on its way through a stack.
///
/// Whoever holds the box owns the buffers with it; the box comes back with the outcome. Boxes are
/// kept and used again by their stack (see [`Stack::request`](crate::Stack::request)), so a warm
/// queue allocates nothing.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct Request {
    // What every part looks at comes first, in two cache lines.
    /// Unique within its disk while the daemon runs.
    pub id: u64,
    /// Where the range begins, in bytes; 0 where the operation has no range.
    pub offset: u64,
    /// How long the range is, in bytes; 0 where the operation has no range.
    pub length: u64,
    /// What is asked.
    pub operation: Operation,
    /// How.
    pub flags: Flags,
    /// The level that made the request: 0 for the front end, n + 1 for layer n.
    pub(crate) origin: usize,
    /// The store that it was submitted to; `None` on the way down.
    pub(crate) store: Option<StoreId>,
    /// The request of which it is a piece.
    pub(crate) split: Option<Split>,
    /// Free for whoever made the request: a descriptor index, a client's cookie.
    pub token: u64,
    /// The guest-physical address of the request's own header, where a guest asked.
    pub header: Option<GuestAddress>,
    /// How it went so far.
    pub course: Course,
    /// A word for each layer, to remember something from the way down on the way up.
    pub(crate) words: [u64; LAYERS_MAX],
    /// The memory that the bytes come from or go to.
    pub buffers: Buffers,
    /// What is known about the request's meaning. A hint: a wrong one may cost time, never data.
    pub insight: Insight,
    /// The answer to [`Operation::Extents`]: adjoining, in order, from `offset` on. May end before
    /// the end of the range, never empty on success.
    pub extents: Vec<Extent>,
}

impl Default for Operation {
    /// The operation of a blank request: the one that changes nothing and moves nothing.
    fn default() -> Self {
        Self::Flush
    }
}

impl Request {
    /// The first byte behind the range, or `None` where it does not fit 64 bits.
    pub fn end(&self) -> Option<u64> {
        self.offset.checked_add(self.length)
    }

    /// The store that did it, where a layer submitted it to one; `None` where the part below did it.
    pub fn store(&self) -> Option<StoreId> {
        self.store
    }

    /// Refuses a request that contradicts itself or asks for more than a part of the stack, or a
    /// store, offers.
    pub(crate) fn check(
        &self,
        capabilities: &Capabilities,
        capacity: u64,
        alignment_mask: u64,
    ) -> Result<(), ErrorKind> {
        match self.operation {
            // Everything can say that all of a range is data.
            Operation::Extents => {}
            _ => capabilities.check(self)?,
        }
        if self.operation.has_range() {
            let end = self.end().ok_or(ErrorKind::OutOfRange)?;
            if end > capacity {
                return Err(ErrorKind::OutOfRange);
            }
            if self.length == 0 {
                return Err(ErrorKind::Malformed);
            }
            if (self.offset | self.length) & alignment_mask != 0 {
                return Err(ErrorKind::Misaligned);
            }
        } else if self.offset != 0 || self.length != 0 {
            return Err(ErrorKind::Malformed);
        }
        if self.operation.carries_data() {
            if self.length > REQUEST_LENGTH_MAX {
                return Err(ErrorKind::TooLong);
            }
            if self.buffers.length() != self.length {
                return Err(ErrorKind::Malformed);
            }
        }
        Ok(())
    }

    /// Takes over what is known of `whole`, of which this request is the `length` bytes from
    /// `from` on: for layers that make several requests of one. Set the length first.
    ///
    /// The class stays that of the whole. Allocates nothing once warm.
    pub fn inherit(&mut self, whole: &Self, from: u64) {
        let (mine, theirs) = (&mut self.insight, &whole.insight);
        mine.facts = theirs.facts;
        mine.class = theirs.class;
        mine.io_priority = theirs.io_priority;
        mine.flags = theirs.flags;
        mine.parts.clear();
        let end = from.saturating_add(self.length);
        for part in &theirs.parts {
            let start = part.offset.max(from);
            let stop = part.offset.saturating_add(part.length).min(end);
            if start < stop {
                let (offset, length) = (start - from, stop - start);
                mine.parts.push(Part { offset, length, facts: part.facts });
            }
        }
        if let [part] = mine.parts[..] {
            mine.facts = part.facts;
            mine.parts.clear();
        }
    }

    /// Makes the box as good as new, keeping the memory that it has for later use.
    pub(crate) fn reset(&mut self) {
        self.operation = Operation::default();
        self.flags = Flags::default();
        self.offset = 0;
        self.length = 0;
        self.buffers.clear();
        self.header = None;
        self.insight.clear();
        self.insight.parts.shrink_to(PARTS_KEPT_MAX);
        self.course = Course::default();
        self.extents.clear();
        self.store = None;
        self.split = None;
        self.token = 0;
        self.words = [0; LAYERS_MAX];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fathom_insight::{ClassTable, Facts, Kind};

    #[test]
    fn a_piece_inherits_what_is_known_of_its_bytes() {
        let of = |inode| Facts { kind: Kind::Data, inode, ..Facts::default() };
        let mut whole = Request { length: 12 << 10, ..Request::default() };
        whole.insight.push(4096, of(1));
        whole.insight.push(8192, of(2));
        whole.insight.finish(&ClassTable::default());
        whole.insight.io_priority = 7;
        let mut piece = Request { length: 4096, ..Request::default() };
        piece.inherit(&whole, 2048);
        let parts: Vec<_> =
            piece.insight.parts(4096).map(|part| (part.offset, part.length)).collect();
        assert_eq!(parts, [(0, 2048), (2048, 2048)]);
        assert_eq!((piece.insight.facts.inode, piece.insight.io_priority), (2, 7));
        piece.inherit(&whole, 0);
        assert!(piece.insight.parts.is_empty());
        assert_eq!(piece.insight.facts, of(1));
        piece.reset();
        assert_eq!((piece.insight.facts, piece.insight.class), (Facts::default(), None));
    }
}
