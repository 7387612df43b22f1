//! The stream of disks' requests.

use super::{Get, Stream, StreamColumn, column};
use crate::event::{Event, Labels};

/// `IOstream`: an event for each request and each response.
#[derive(Clone, Copy, Debug)]
pub struct IoStream;

impl Stream for IoStream {
    type Record = Event;
    type Labels = Labels;

    const NAME: &'static str = "IOstream";
    const COLUMNS: &'static [StreamColumn<Event, Labels>] = COLUMNS;
    const ALIASES: &'static [(&'static str, &'static str)] =
        &[("IOP", "IOOp"), ("IOPp", "IOOp"), ("I00p", "IOOp")];

    fn time_ns(event: &Event) -> u64 {
        event.blktap_ts
    }
}

const TYPES: &[&str] = &["Q", "R", "E", "N"];
const OPERATIONS: &[&str] = &["r", "w", "f", "d", "z", "i", "x"];
const KINDS: &[&str] = &["data", "metadata", "journal", "swap", "direct", "directory", "device"];
const HITS: &[&str] = &["miss", "hit", "part"];
const HOLDERS: &[&str] = &["limit", "schedule", "wal", "offload"];
const SYSTEMS: &[&str] = &["sqlite", "innodb", "postgresql"];
const PARTS: &[&str] = &["table", "index", "log", "other"];
const SOURCES: &[&str] = &["flags", "page", "bio", "calls", "application"];
const ROLES: &[&str] = &["submitter", "waiter", "writer"];
const CONFIDENCES: &[&str] = &["likely", "sure"];
const ERRORS: &[&str] = &[
    "input/output error",
    "no space left",
    "out of range",
    "misaligned",
    "read-only",
    "unsupported",
    "too long",
    "malformed",
    "shutting down",
    "memory lost",
    "withdrawn",
];

/// The number; `None` if it is 0.
fn some(number: u64) -> Option<u64> {
    if number == 0 { None } else { Some(number) }
}

/// The number less one; `None` if it is 0.
fn less_one(number: u8) -> Option<u64> {
    if number == 0 { None } else { Some(u64::from(number) - 1) }
}

/// All columns, in order (`docs/queries.md` lists them): first those of the monitoring paper's
/// Table 3.1 with its names, in 64 bits where the paper has 32, then the meaning of a request.
#[rustfmt::skip]
const COLUMNS: &[StreamColumn<Event, Labels>] = &[
    column("BlktapTS", Get::Time(|event| event.blktap_ts)),
    column("Type", Get::Letter(TYPES, |event| event.record_type)),
    column("IOOp", Get::Letter(OPERATIONS, |event| event.io_op)),
    column("ReqId", Get::Number(|event| Some(event.req_id))),
    column("Sector", Get::Number(|event| Some(event.sector))),
    column("Size", Get::Number(|event| Some(event.size))),
    column("VMName", Get::Label(|labels| &labels.vm_name)),
    column("VDisk", Get::Label(|labels| &labels.virtual_disk)),
    column("PDisk", Get::Label(|labels| &labels.physical_disk)),
    column("FtrTS", Get::Collected),
    column("MtrTS", Get::ReceivedTime),
    column("IP", Get::Received),
    column("Kind", Get::Word(KINDS, |event| event.kind)),
    column("Class", Get::Number(|event| less_one(event.class))),
    column("Inode", Get::Number(|event| some(event.inode))),
    column("Path", Get::Name(|event| event.path)),
    column("FileSize", Get::Number(|event| some(event.file_size))),
    column("FileSystem", Get::Name(|event| event.file_system)),
    column("Cgroup", Get::Name(|event| event.cgroup)),
    column("Process", Get::Name(|event| event.process)),
    column("ProcessId", Get::Number(|event| some(event.process_id.into()))),
    column("Device", Get::Name(|event| event.device)),
    column("Error", Get::OpenWord(ERRORS, |event| event.error)),
    column("Flags", Get::Number(|event| Some(event.flags.into()))),
    column("IoPriority", Get::Number(|event| some(event.io_priority.into()))),
    column("CacheHit", Get::Word(HITS, |event| event.cache_hit)),
    column("Layer", Get::Number(|event| less_one(event.layer))),
    column("Source", Get::Word(SOURCES, |event| event.source)),
    column("Confidence", Get::Word(CONFIDENCES, |event| event.confidence)),
    column("Queue", Get::Number(|event| Some(event.queue.into()))),
    column("WriteHint", Get::Number(|event| some(event.write_hint.into()))),
    column("HeldBy", Get::Word(HOLDERS, |event| event.held_by)),
    column("HeldTime", Get::Number(|event| some(u64::from(event.held_us) * 1000))),
    column("DbSystem", Get::Word(SYSTEMS, |event| event.database_system)),
    column("DbPart", Get::Word(PARTS, |event| event.database_part)),
    column("DbIndex", Get::Number(|event| some(event.database_index.into()))),
    column("ProcessRole", Get::Word(ROLES, |event| event.process_role)),
    column("ProcessStart", Get::Number(|event| some(u64::from(event.process_start) * 10_000_000))),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Confidence, DatabasePart, DatabaseSystem, InsightSource, Kind, ProcessRole};

    #[test]
    fn words_are_the_names_of_the_numbers() {
        assert_eq!(KINDS, &Kind::ALL.map(Kind::name)[1..]);
        assert_eq!(SYSTEMS, &DatabaseSystem::ALL.map(DatabaseSystem::name)[1..]);
        assert_eq!(PARTS, &DatabasePart::ALL.map(DatabasePart::name)[1..]);
        assert_eq!(SOURCES, &InsightSource::ALL.map(InsightSource::name)[1..]);
        assert_eq!(ROLES, &ProcessRole::ALL.map(ProcessRole::name)[1..]);
        assert_eq!(CONFIDENCES, &Confidence::ALL.map(Confidence::name)[1..]);
    }
}
