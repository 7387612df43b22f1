//! Whether a process of the guest waits for a request.

use fathom_block::{Kind, Operation, Request};
use fathom_insight::RequestFlags;

/// The position of the class in an I/O priority, in bits (`IOPRIO_CLASS_SHIFT` of Linux).
const PRIORITY_CLASS_SHIFT: u32 = 13;
/// The classes `real-time` and `idle` of I/O priorities.
const PRIORITY_REAL_TIME: u16 = 1;
const PRIORITY_IDLE: u16 = 3;

/// The flags of changes of the disk that a process waits for.
const WAITED: [RequestFlags; 4] = [
    RequestFlags::SYNCHRONOUS,
    RequestFlags::FORCE_UNIT_ACCESS,
    RequestFlags::FLUSH,
    RequestFlags::SWAP,
];

/// The need for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Need {
    /// It does not use the device.
    None,
    /// It is a flush. It never waits, because it moves no data of its own.
    Flush,
    /// A process waits for it, or that is unknown.
    Waited,
    /// No process waits for it.
    Background,
}

impl Need {
    /// The need for `request`, by its insight.
    ///
    /// The guest's own priority is first. Without insight, a request counts as waited for. Linux
    /// marks what a process waits for with `REQ_SYNC`: reads, direct writes, the journal, and the
    /// writes of `fsync`. It does not mark background write-back and discards. A read is waited for
    /// even if it is marked as read-ahead, because Linux marks all buffered reads so, and their
    /// first pages are those that a process waits for. Memory that is swapped out is waited for by
    /// what needs the memory.
    pub(super) fn of(request: &Request) -> Self {
        match request.operation {
            Operation::GetId | Operation::Extents => return Self::None,
            Operation::Flush => return Self::Flush,
            Operation::Read | Operation::Write | Operation::Discard | Operation::WriteZeroes => {}
        }
        let insight = &request.insight;
        match insight.io_priority >> PRIORITY_CLASS_SHIFT {
            PRIORITY_REAL_TIME => return Self::Waited,
            PRIORITY_IDLE => return Self::Background,
            _ => {}
        }
        if request.flags.background {
            return Self::Background;
        }
        let is_known = insight.flags != RequestFlags::default() || insight.facts.is_known();
        if !is_known || request.operation == Operation::Read || request.flags.force_unit_access {
            return Self::Waited;
        }
        let is_marked = WAITED.iter().any(|flag| insight.flags.contains(*flag));
        if is_marked || matches!(insight.facts.kind, Kind::Journal | Kind::Swap) {
            return Self::Waited;
        }
        Self::Background
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(operation: Operation, flags: u8, kind: Kind) -> Request {
        let mut request = Request::default();
        request.operation = operation;
        request.insight.flags = RequestFlags(flags);
        request.insight.facts.kind = kind;
        request
    }

    #[test]
    fn the_marks_of_the_guest_decide() {
        let (sync, ahead) = (RequestFlags::SYNCHRONOUS.0, RequestFlags::READ_AHEAD.0);
        let background = RequestFlags::BACKGROUND.0;
        for (operation, flags, kind, expected) in [
            (Operation::Write, 0, Kind::Unknown, Need::Waited),
            (Operation::Discard, 0, Kind::Unknown, Need::Waited),
            (Operation::Read, ahead, Kind::Data, Need::Waited),
            (Operation::Write, 0, Kind::Data, Need::Background),
            (Operation::Write, background, Kind::Unknown, Need::Background),
            (Operation::Write, sync, Kind::Data, Need::Waited),
            (Operation::Write, RequestFlags::PRIORITY.0, Kind::Metadata, Need::Background),
            (Operation::Write, 0, Kind::Journal, Need::Waited),
            (Operation::Write, 0, Kind::Swap, Need::Waited),
            (Operation::Discard, background, Kind::Unknown, Need::Background),
            (Operation::Flush, background, Kind::Unknown, Need::Flush),
            (Operation::GetId, 0, Kind::Unknown, Need::None),
        ] {
            let request = request(operation, flags, kind);
            assert_eq!(Need::of(&request), expected, "{operation} {flags} {kind:?}");
        }
    }

    #[test]
    fn the_priority_that_the_guest_sets_is_first() {
        let mut idle = request(Operation::Read, RequestFlags::SYNCHRONOUS.0, Kind::Data);
        idle.insight.io_priority = 3 << 13 | 7;
        assert_eq!(Need::of(&idle), Need::Background);
        let mut urgent = request(Operation::Write, RequestFlags::BACKGROUND.0, Kind::Data);
        urgent.insight.io_priority = 1 << 13;
        assert_eq!(Need::of(&urgent), Need::Waited);
        let mut own = request(Operation::Write, 0, Kind::Unknown);
        own.flags.background = true;
        assert_eq!(Need::of(&own), Need::Background);
        own.flags = fathom_block::Flags::default();
        own.insight.facts.kind = Kind::Data;
        own.flags.force_unit_access = true;
        assert_eq!(Need::of(&own), Need::Waited);
    }
}
