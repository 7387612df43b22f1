//! A request to a disk, and its outcome.

use std::fmt;
use std::ops::Range;

use fathom_guest_memory::{Buffers, GuestAddress};
use fathom_insight::{Insight, Part};

use crate::aside::StoreId;
use crate::geometry::Capabilities;
use crate::layer::LAYERS_MAX;
use crate::split::Split;

/// The longest read or write, in bytes: 32 MiB, which NBD clients assume. Discards and zeroes carry
/// no data and may be longer.
pub const REQUEST_LENGTH_MAX: u64 = 32 << 20;

/// The length of a disk's serial, in bytes: `VIRTIO_BLK_ID_BYTES`.
pub const SERIAL_LENGTH: usize = 20;

/// The most parts of an insight for which a reused request keeps memory.
const PARTS_KEPT_MAX: usize = 64;

/// An operation on a disk. The set is closed, and every layer matches it in full: a layer that does
/// not handle an operation does not compile, so it cannot pass the operation on by mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Operation {
    /// Fill the buffers from the disk.
    Read,
    /// Write the buffers to the disk.
    Write,
    /// Make all writes durable that completed before this request was submitted.
    Flush,
    /// The data of the range is no longer needed. Any data may be read afterwards; here it is
    /// zeroes.
    Discard,
    /// The range reads as zeroes afterwards.
    WriteZeroes,
    /// Fill the buffers with the serial of the disk ([`SERIAL_LENGTH`] bytes, zero-padded).
    GetId,
    /// Report in [`Request::extents`] which parts of the range are allocated and which read as
    /// zeroes.
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

    /// Whether the operation changes the disk's data.
    pub fn modifies(self) -> bool {
        match self {
            Self::Write | Self::Discard | Self::WriteZeroes => true,
            Self::Read | Self::Flush | Self::GetId | Self::Extents => false,
        }
    }

    /// Whether the request's buffers carry the data of its range.
    pub fn carries_data(self) -> bool {
        match self {
            Self::Read | Self::Write => true,
            Self::Flush | Self::Discard | Self::WriteZeroes | Self::GetId | Self::Extents => false,
        }
    }

    /// Whether offset and length are a range of the disk.
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

/// Options of an operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags {
    /// Force unit access: the write is durable before it completes.
    pub force_unit_access: bool,
    /// [`Operation::WriteZeroes`] must leave the range allocated.
    pub keep_allocated: bool,
    /// [`Operation::WriteZeroes`] must fail with [`ErrorKind::Unsupported`] rather than be as slow
    /// as writing the zeroes out (NBD's `FAST_ZERO`).
    pub only_if_fast: bool,
    /// The request is background work, which no guest's request waits for. In a queue for the
    /// storage it comes after other requests.
    pub background: bool,
    /// The request writes content of a log back home. Even if guests wait for the log's space, none
    /// has asked for it.
    pub write_back: bool,
}

impl Flags {
    /// Whether the request is a layer's own work, for which no front end waits.
    pub fn is_work_of_layers(self) -> bool {
        self.background || self.write_back
    }
}

/// Why a request failed. Small and `Copy`: details for the operator are logged where the failure
/// happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    /// The back end failed to read or write.
    Io,
    /// The storage is full.
    NoSpace,
    /// The range reaches beyond the end of the disk.
    OutOfRange,
    /// Offset, length or memory does not have the disk's alignment.
    Misaligned,
    /// The disk is read-only.
    ReadOnly,
    /// The disk does not offer this operation.
    Unsupported,
    /// The request is longer than allowed.
    TooLong,
    /// The request contradicts itself; for example, its buffers do not add up to its length.
    Malformed,
    /// The disk is being closed.
    ShuttingDown,
    /// The request's memory cannot be read or written, because it has been unmapped or lost.
    Memory,
    /// The front end has taken the request back ([`Stack::withdraw`](crate::Stack::withdraw)):
    /// nothing of it is in flight any more.
    Withdrawn,
}

impl ErrorKind {
    /// Every kind, in the order of declaration.
    pub const ALL: [Self; 11] = [
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
        Self::Withdrawn,
    ];

    /// The kind of error that an `errno` of the operating system means for a request.
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
            Self::Withdrawn => "withdrawn",
        }
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

impl std::error::Error for ErrorKind {}

/// The outcome of a request.
pub type Outcome = Result<(), ErrorKind>;

/// The allocation of a part of a disk in the storage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allocation {
    /// It holds data.
    Data,
    /// It reads as zeroes and has no space allocated.
    Hole,
    /// It reads as zeroes and has space allocated.
    Zero,
}

/// A part of a disk with one [`Allocation`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Its offset, in bytes from the start of the disk.
    pub offset: u64,
    /// Its length, in bytes; never 0.
    pub length: u64,
    /// Its allocation.
    pub allocation: Allocation,
}

/// Whether a layer had the data of a read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum CacheHit {
    /// No layer has checked.
    #[default]
    Unknown = 0,
    /// The layer had none of it.
    Miss = 1,
    /// The layer had all of it.
    Hit = 2,
    /// The layer had a part of it.
    Part = 3,
}

impl CacheHit {
    /// The name used in events and the control interface; empty if no layer has checked.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Unknown => "",
            Self::Miss => "miss",
            Self::Hit => "hit",
            Self::Part => "part",
        }
    }
}

/// The kind of a layer that has held a request back by its own rule.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum HeldBy {
    /// No layer.
    #[default]
    None = 0,
    /// A limit on requests or bytes per second.
    Limit = 1,
    /// The order in which requests use a shared device.
    Schedule = 2,
    /// A log without space, until changes have been written back.
    Wal = 3,
    /// The end of the write-back of a disk whose load is not carried any more, or a log without
    /// space.
    Offload = 4,
}

impl HeldBy {
    /// Every value, in the order of its number.
    pub const ALL: [Self; 5] = [Self::None, Self::Limit, Self::Schedule, Self::Wal, Self::Offload];

    /// The name used in events, logs and the control interface; empty for none.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "",
            Self::Limit => "limit",
            Self::Schedule => "schedule",
            Self::Wal => "wal",
            Self::Offload => "offload",
        }
    }
}

/// A record of a request's path and times. Times are those of the stack's clock in nanoseconds,
/// with the resolution of one round of its thread; 0 if the clock was not read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Course {
    /// The number of requests in flight in the same stack when this request came.
    pub ahead: u32,
    /// Whether a layer had the read data, as reported by that layer.
    pub cache_hit: CacheHit,
    /// 1 + the position of the layer that holds or has answered the request, counted from the front
    /// end; 0 for the back end.
    pub layer: u8,
    /// The kind of the last layer that has held the request back by its own rule.
    pub held_by: HeldBy,
    /// The time for which layers have held the request back by their own rules, in nanoseconds.
    /// This part of the latency is not caused by the storage.
    pub held_ns: u64,
    /// The time at which the back end got the request.
    pub sent_ns: u64,
    /// The time at which the back end completed the request; also 0 if no layer that takes requests
    /// lies above the back end.
    pub returned_ns: u64,
}

impl Course {
    /// Records that a layer has held the request back for `held_ns` nanoseconds.
    pub fn hold(&mut self, by: HeldBy, held_ns: u64) {
        self.held_by = by;
        self.held_ns = self.held_ns.saturating_add(held_ns);
    }

    /// A layer has sent a request of its own in the place of this one, and that request has taken
    /// the course `own`. Nothing changes if it was split.
    pub fn follow(&mut self, own: &Self) {
        if own.sent_ns == 0 && own.layer == 0 {
            return;
        }
        if own.held_by != HeldBy::default() {
            self.hold(own.held_by, own.held_ns);
        }
        self.layer = own.layer;
        (self.sent_ns, self.returned_ns) = (own.sent_ns, own.returned_ns);
    }
}

/// A request on its way through a stack.
///
/// The holder of the box owns the buffers in it. The box returns to the front end with the outcome.
/// The stack reuses boxes (see [`Stack::request`](crate::Stack::request)), so a queue allocates
/// nothing after its first requests.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub struct Request {
    // The fields that every level reads come first, in two cache lines.
    /// Unique within its disk while the daemon runs.
    pub id: u64,
    /// The offset of the range, in bytes; 0 if the operation has no range.
    pub offset: u64,
    /// The length of the range, in bytes; 0 if the operation has no range.
    pub length: u64,
    /// The operation.
    pub operation: Operation,
    /// Its options.
    pub flags: Flags,
    /// The level that made the request: 0 for the front end, n + 1 for layer n.
    pub(crate) origin: usize,
    /// The further store that it was submitted to; `None` on the way down.
    pub(crate) store: Option<StoreId>,
    /// The split request of which it is a piece.
    pub(crate) split: Option<Split>,
    /// For the use of the request's maker: a descriptor index, a client's cookie.
    pub token: u64,
    /// The guest-physical address of the request's own header, if a guest made the request.
    pub header: Option<GuestAddress>,
    /// Its path and times so far.
    pub course: Course,
    /// A word for each layer, which carries data from the way down to the way up.
    pub(crate) words: [u64; LAYERS_MAX],
    /// The memory of its data.
    pub buffers: Buffers,
    /// The known meaning of the request. It is a hint: a wrong one may cost time, never data.
    pub insight: Insight,
    /// The answer to [`Operation::Extents`]: adjoining extents in order, from `offset` on. They may
    /// end before the end of the range, and are never empty on success.
    pub extents: Vec<Extent>,
}

impl Default for Operation {
    /// The operation of a blank request: it neither changes nor transfers data.
    fn default() -> Self {
        Self::Flush
    }
}

impl Request {
    /// The range, in bytes. The crossing has checked that its end fits in 64 bits.
    pub fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.length
    }

    /// The end of the range (exclusive), in bytes; `None` if it does not fit in 64 bits.
    pub fn end(&self) -> Option<u64> {
        self.offset.checked_add(self.length)
    }

    /// The further store to which a layer submitted the request; `None` if it was submitted to the
    /// level below.
    pub fn store(&self) -> Option<StoreId> {
        self.store
    }

    /// Refuses a request that contradicts itself or needs more than a level of the stack, or a
    /// store, offers.
    pub(crate) fn check(
        &self,
        capabilities: &Capabilities,
        capacity: u64,
        alignment_mask: u64,
    ) -> Result<(), ErrorKind> {
        match self.operation {
            // Every level can answer that the whole range is data.
            Operation::Extents => {}
            Operation::Read
            | Operation::Write
            | Operation::Flush
            | Operation::Discard
            | Operation::WriteZeroes
            | Operation::GetId => capabilities.check(self)?,
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

    /// Copies the insight of `whole` for the `length` bytes from `from` on, of which this request
    /// consists: for layers that make several requests from one. The caller sets the length first.
    ///
    /// The class is that of the whole. Allocates nothing after the first uses.
    pub fn inherit(&mut self, whole: &Self, from: u64) {
        let (mine, theirs) = (&mut self.insight, &whole.insight);
        mine.facts = theirs.facts;
        mine.class = theirs.class;
        mine.io_priority = theirs.io_priority;
        mine.flags = theirs.flags;
        mine.file_offset = theirs.file_offset.and_then(|offset| offset.checked_add(from));
        mine.parts.clear();
        let end = from.saturating_add(self.length);
        for part in &theirs.parts {
            let start = part.offset.max(from);
            let stop = part.offset.saturating_add(part.length).min(end);
            if start < stop {
                let (offset, length) = (start - from, stop - start);
                let skipped = start - part.offset;
                let file_offset = part.file_offset.and_then(|offset| offset.checked_add(skipped));
                mine.parts.push(Part { offset, length, facts: part.facts, file_offset });
            }
        }
        if let [part] = mine.parts[..] {
            mine.facts = part.facts;
            mine.file_offset = part.file_offset;
            mine.parts.clear();
        }
    }

    /// Resets the box to a blank request, and keeps its memory for later use.
    pub fn reset(&mut self) {
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
    fn a_piece_inherits_the_insight_of_its_bytes() {
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
