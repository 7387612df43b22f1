//! The event: one record for each request and each response.

use fathom_block::{ErrorKind, Operation, Outcome, Request, SECTOR_SIZE};
use fathom_insight::event::{
    Event, FLAG_FORCE_UNIT_ACCESS, FLAG_KEEP_ALLOCATED, FLAG_ONLY_IF_FAST,
};

/// The type of an event (`Type` of Table 3.1 of the monitoring paper).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum EventType {
    /// `Q`: a request was queued.
    Request = b'Q',
    /// `R`: a request succeeded.
    Response = b'R',
    /// `E`: a request failed.
    Error = b'E',
    /// `N`: a request failed because its operation is not supported.
    Unsupported = b'N',
}

impl EventType {
    /// The type of the response to a request with `outcome`.
    pub fn of(outcome: Outcome) -> Self {
        match outcome {
            Ok(()) => Self::Response,
            Err(ErrorKind::Unsupported) => Self::Unsupported,
            Err(_) => Self::Error,
        }
    }
}

/// The letter of an operation (`IOOp` of Table 3.1; `r` and `w` have the same meaning there).
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

/// The event of `request` on queue `queue` of disk `disk` at `now_ns`. Without an outcome it is the
/// event of the request's arrival, else that of its response.
pub(super) fn record(
    request: &Request,
    outcome: Option<Outcome>,
    disk: u32,
    queue: u64,
    now_ns: u64,
) -> Event {
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
    Event {
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
        cache_hit: outcome.map_or(0, |_| request.course.cache_hit as u8),
        layer: outcome.map_or(0, |_| request.course.layer),
        held_us: outcome
            .map_or(0, |_| u32::try_from(request.course.held_ns / 1000).unwrap_or(u32::MAX)),
        held_by: outcome.map_or(0, |_| request.course.held_by as u8),
        database_system: facts.database.system as u8,
        database_part: facts.database.part as u8,
        database_index: facts.database.index,
        process_role: facts.process_role as u8,
        process_start: facts.process_start,
    }
}

#[cfg(test)]
mod tests {
    use fathom_block::HeldBy;
    use fathom_insight::Stream;
    use fathom_insight::stream::IoStream;

    use super::*;

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
        let event = record(&request, None, 1, 9, 0);
        assert_eq!((event.kind, event.class, event.path), (3, 6, 7));
        assert_eq!((event.process_id, event.queue, event.parts), (4711, 9, 0));
        assert_eq!(event.flags, FLAG_FORCE_UNIT_ACCESS | 0x100);
    }

    #[test]
    fn sectors_cover_unaligned_ranges() {
        let mut request = Request::default();
        (request.operation, request.offset, request.length) = (Operation::Read, 511, 2);
        let event = record(&request, None, 0, 0, 0);
        assert_eq!((event.sector, event.size), (0, 2));
        assert_eq!((event.record_type, event.io_op), (b'Q', b'r'));
        let response = record(&request, Some(Err(ErrorKind::Unsupported)), 0, 0, 0);
        assert_eq!(response.record_type, b'N');
    }

    #[test]
    fn letters_and_errors_are_those_of_the_columns() {
        let values = |name: &str| {
            let column = IoStream::COLUMNS.iter().find(|column| column.name == name).unwrap();
            column.get.texts().unwrap()
        };
        let letter = |letter: u8| char::from(letter).to_string();
        let operations = Operation::ALL.map(|operation| letter(operation_letter(operation)));
        assert_eq!(values("IOOp"), operations);
        let outcomes = [Ok(()), Err(ErrorKind::Io), Err(ErrorKind::Unsupported)];
        let responses = outcomes.map(|outcome| letter(EventType::of(outcome) as u8));
        assert_eq!(values("Type")[0], letter(EventType::Request as u8));
        assert_eq!(values("Type")[1..], responses);
        assert_eq!(values("Error"), ErrorKind::ALL.map(ErrorKind::name));
        assert_eq!(values("HeldBy"), &HeldBy::ALL.map(HeldBy::name)[1..]);
    }
}
