//! The event: one record for each request and each response.

use fathom_block::{ErrorKind, Operation, Outcome, Request, SECTOR_SIZE};

/// What a record tells about (`Type` of Table 3.1 of the monitoring paper).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum EventType {
    /// `Q`: a request has been queued.
    Request = b'Q',
    /// `R`: its response, after success.
    Response = b'R',
    /// `E`: its response, after a failure.
    Error = b'E',
    /// `N`: its response, because the operation is not supported.
    Unsupported = b'N',
}

impl EventType {
    /// What the response to a request with `outcome` is.
    pub fn of(outcome: Outcome) -> Self {
        match outcome {
            Ok(()) => Self::Response,
            Err(ErrorKind::Unsupported) => Self::Unsupported,
            Err(_) => Self::Error,
        }
    }
}

/// The letter of an operation (`IOOp` of Table 3.1, whose `r` and `w` keep their meaning).
pub fn operation_letter(operation: Operation) -> u8 {
    match operation {
        Operation::Read => b'r',
        Operation::Write => b'w',
        Operation::Flush => b'f',
        Operation::Discard => b'd',
        Operation::WriteZeroes => b'z',
        Operation::GetId => b'i',
        Operation::Extents => b'x',
    }
}

/// The request asked to be durable at its completion.
pub const FLAG_FORCE_UNIT_ACCESS: u16 = 1;
/// The request's zeroes must stay allocated.
pub const FLAG_KEEP_ALLOCATED: u16 = 2;
/// The request's zeroes must be fast or refused.
pub const FLAG_ONLY_IF_FAST: u16 = 4;

/// The number of 64-bit words that an event is.
pub const EVENT_WORDS: usize = 12;

/// One record, 96 bytes, as `docs/events.md` draws it. The names are those of Table 3.1 of the
/// monitoring paper; what is known of the request's meaning is that of most of its bytes. Columns
/// of text are numbers of [`Names`](fathom_insight::Names), 0 is none.
///
/// `VMName`, `VDisk` and `PDisk` are the same for all events of a disk: [`Labels`] has them, under
/// the number `disk`. `FtrTS`, `MtrTS` and `IP` are added by whoever receives the event.
///
/// [`Labels`]: super::Labels
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Event {
    /// `BlktapTS`: when it happened, in nanoseconds of the stack's clock (`CLOCK_MONOTONIC`).
    pub blktap_ts: u64,
    /// `ReqId`: the same for a request and its response, unique within the disk.
    pub req_id: u64,
    /// `Sector`: the first sector of 512 bytes that the range touches.
    pub sector: u64,
    /// `Size`: how many sectors the range touches; 0 where the operation has no range.
    pub size: u64,
    /// The disk's number: the key of its [`Labels`](super::Labels).
    pub disk: u32,
    /// `Type`: an [`EventType`] as its letter.
    pub record_type: u8,
    /// `IOOp`: the operation's letter, see [`operation_letter`].
    pub io_op: u8,
    /// Flags of the request: `FLAG_…` in the low byte, in the high byte how the guest's kernel
    /// marked it ([`RequestFlags`](fathom_insight::RequestFlags)).
    pub flags: u16,
    /// For `E` and `N`: 1 + the position of the error in [`ErrorKind`]; 0 otherwise.
    pub error: u8,
    /// `Kind`: the number of the [`Kind`](fathom_block::Kind); 0 is unknown.
    pub kind: u8,
    /// `Class`: 1 + the I/O class, 0 where there is none.
    pub class: u8,
    /// `CacheHit`: 0 unknown, 1 miss, 2 hit, 3 in part. Empty for now.
    pub cache_hit: u8,
    /// `Layer`: 1 + the level of the layer that answered, 0 for the back end. Empty for now.
    pub layer: u8,
    /// Where the meaning was learnt: the number of the [`Source`](fathom_insight::Source).
    pub source: u8,
    /// The I/O priority that the guest gave; 0 is none.
    pub io_priority: u16,
    /// `Inode`: 0 where unknown.
    pub inode: u64,
    /// `FileSize`, in bytes; 0 where unknown.
    pub file_size: u64,
    /// `Path`.
    pub path: u32,
    /// `FileSystem`: its type.
    pub file_system: u32,
    /// `Cgroup`.
    pub cgroup: u32,
    /// `Process`: its command.
    pub process: u32,
    /// The block device that the file system names itself by.
    pub device: u32,
    /// The process number; 0 where unknown.
    pub process_id: u32,
    /// The queue of the disk that the request came through.
    pub queue: u32,
    /// The parts of different meaning that the request has; 0 where it has one.
    pub parts: u16,
    /// How sure the meaning is: the number of the [`Confidence`](fathom_insight::Confidence).
    pub confidence: u8,
    /// The lifetime that the application expects of what it writes; 0 is not set.
    pub write_hint: u8,
}

const _: () = assert!(size_of::<Event>() == EVENT_WORDS * 8 && align_of::<Event>() == 8);

impl Event {
    /// The record of `request` on queue `queue` of disk `disk` at `now_ns`: of its arrival when
    /// there is no outcome yet.
    pub fn new(
        request: &Request,
        outcome: Option<Outcome>,
        disk: u32,
        queue: u64,
        now_ns: u64,
    ) -> Self {
        let (sector, size) = if request.length == 0 {
            (request.offset / SECTOR_SIZE, 0)
        } else {
            let first = request.offset / SECTOR_SIZE;
            let last = (request.offset.saturating_add(request.length) - 1) / SECTOR_SIZE;
            (first, last - first + 1)
        };
        let (insight, facts) = (&request.insight, &request.insight.facts);
        let mut flags = u16::from(insight.flags.0) << 8;
        for (set, flag) in [
            (request.flags.force_unit_access, FLAG_FORCE_UNIT_ACCESS),
            (request.flags.keep_allocated, FLAG_KEEP_ALLOCATED),
            (request.flags.only_if_fast, FLAG_ONLY_IF_FAST),
        ] {
            flags |= if set { flag } else { 0 };
        }
        Self {
            blktap_ts: now_ns,
            req_id: request.id,
            sector,
            size,
            disk,
            record_type: outcome.map_or(EventType::Request, EventType::of) as u8,
            io_op: operation_letter(request.operation),
            flags,
            error: match outcome {
                Some(Err(error)) => 1 + error as u8,
                Some(Ok(())) | None => 0,
            },
            kind: facts.kind as u8,
            class: insight.class.map_or(0, |class| class.0.saturating_add(1)),
            source: facts.source as u8,
            io_priority: insight.io_priority,
            inode: facts.inode,
            file_size: facts.file_size,
            path: facts.path.0,
            file_system: facts.file_system.0,
            cgroup: facts.cgroup.0,
            process: facts.process.0,
            device: facts.device.0,
            process_id: facts.process_id,
            queue: queue as u32,
            parts: u16::try_from(insight.parts.len()).unwrap_or(u16::MAX),
            confidence: facts.confidence as u8,
            write_hint: facts.write_hint,
            ..Self::default()
        }
    }

    /// The record as words, in the order of its fields, little end first within a word.
    pub(super) fn to_words(self) -> [u64; EVENT_WORDS] {
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let marks = u32::from_le_bytes([
            self.record_type,
            self.io_op,
            self.flags as u8,
            (self.flags >> 8) as u8,
        ]);
        let insight = u64::from_le_bytes([
            self.error,
            self.kind,
            self.class,
            self.cache_hit,
            self.layer,
            self.source,
            self.io_priority as u8,
            (self.io_priority >> 8) as u8,
        ]);
        let place = u32::from(self.parts)
            | u32::from(self.confidence) << 16
            | u32::from(self.write_hint) << 24;
        [
            self.blktap_ts,
            self.req_id,
            self.sector,
            self.size,
            pair(self.disk, marks),
            insight,
            self.inode,
            self.file_size,
            pair(self.path, self.file_system),
            pair(self.cgroup, self.process),
            pair(self.device, self.process_id),
            pair(self.queue, place),
        ]
    }

    /// The record that [`to_words`](Self::to_words) took apart.
    pub(super) fn from_words(words: [u64; EVENT_WORDS]) -> Self {
        let [blktap_ts, req_id, sector, size, disk_marks, insight, ..] = words;
        let [_, _, _, _, _, _, inode, file_size, files, owners, origin, place] = words;
        let [record_type, io_op, flags_low, flags_high] = ((disk_marks >> 32) as u32).to_le_bytes();
        let [error, kind, class, cache_hit, layer, source, priority_low, priority_high] =
            insight.to_le_bytes();
        Self {
            blktap_ts,
            req_id,
            sector,
            size,
            disk: disk_marks as u32,
            record_type,
            io_op,
            flags: u16::from_le_bytes([flags_low, flags_high]),
            error,
            kind,
            class,
            cache_hit,
            layer,
            source,
            io_priority: u16::from_le_bytes([priority_low, priority_high]),
            inode,
            file_size,
            path: files as u32,
            file_system: (files >> 32) as u32,
            cgroup: owners as u32,
            process: (owners >> 32) as u32,
            device: origin as u32,
            process_id: (origin >> 32) as u32,
            queue: place as u32,
            parts: (place >> 32) as u16,
            confidence: (place >> 48) as u8,
            write_hint: (place >> 56) as u8,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_keep_every_field() {
        let event = Event {
            blktap_ts: 1,
            req_id: 2,
            sector: 3,
            size: 4,
            disk: 5,
            record_type: b'E',
            io_op: b'z',
            flags: 0x0102,
            error: 6,
            kind: 7,
            class: 8,
            cache_hit: 9,
            layer: 10,
            source: 11,
            io_priority: 0x0c0d,
            inode: 14,
            file_size: 15,
            path: 16,
            file_system: 17,
            cgroup: 18,
            process: 19,
            device: 20,
            process_id: 21,
            queue: 22,
            parts: 0x1718,
            confidence: 25,
            write_hint: 26,
        };
        assert_eq!(Event::from_words(event.to_words()), event);
    }

    #[test]
    fn the_insight_fills_its_columns() {
        let mut request = Request::default();
        let insight = &mut request.insight;
        insight.facts.kind = fathom_block::Kind::Journal;
        insight.facts.path = fathom_insight::Name(7);
        insight.facts.process_id = 4711;
        insight.flags.insert(fathom_insight::RequestFlags::METADATA);
        insight.class = Some(fathom_block::IoClass(5));
        request.flags.force_unit_access = true;
        let event = Event::new(&request, None, 1, 9, 0);
        assert_eq!((event.kind, event.class, event.path), (3, 6, 7));
        assert_eq!((event.process_id, event.queue, event.parts), (4711, 9, 0));
        assert_eq!(event.flags, FLAG_FORCE_UNIT_ACCESS | 0x100);
    }

    #[test]
    fn sectors_cover_ranges_that_are_no_whole_sectors() {
        let mut request = Request::default();
        (request.operation, request.offset, request.length) = (Operation::Read, 511, 2);
        let event = Event::new(&request, None, 0, 0, 0);
        assert_eq!((event.sector, event.size), (0, 2));
        assert_eq!((event.record_type, event.io_op), (b'Q', b'r'));
        let response = Event::new(&request, Some(Err(ErrorKind::Unsupported)), 0, 0, 0);
        assert_eq!(response.record_type, b'N');
    }
}
