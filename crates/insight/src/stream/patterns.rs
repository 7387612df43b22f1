//! The stream of what several requests together say about files.

use super::{Get, Stream, StreamColumn, column};
use crate::event::Labels;
use crate::pattern::{Evidence, Pattern, PatternKind};

/// `Patterns`: copies and encryption of files.
#[derive(Clone, Copy, Debug)]
pub struct Patterns;

impl Stream for Patterns {
    type Record = Pattern;
    type Labels = Labels;

    const NAME: &'static str = "Patterns";
    const COLUMNS: &'static [StreamColumn<Pattern, Labels>] = COLUMNS;

    fn time_ns(pattern: &Pattern) -> u64 {
        pattern.pattern_ts
    }
}

const KINDS: &[&str] = &PatternKind::NAMES;
const EVIDENCE: &[&str] = &Evidence::NAMES;

fn known(value: impl Into<u64>) -> Option<u64> {
    Some(value.into()).filter(|value| *value != 0)
}

/// All columns, in order (`docs/patterns.md`). Those of the same names are those of `IOstream`.
#[rustfmt::skip]
const COLUMNS: &[StreamColumn<Pattern, Labels>] = &[
    column("PatternTS", Get::Time(|pattern| pattern.pattern_ts)),
    column("Pattern", Get::OpenWord(KINDS, |pattern| pattern.kind)),
    column("VMName", Get::Label(|labels| &labels.vm_name)),
    column("VDisk", Get::Label(|labels| &labels.virtual_disk)),
    column("PDisk", Get::Label(|labels| &labels.physical_disk)),
    column("Path", Get::Name(|pattern| pattern.path)),
    column("Inode", Get::Number(|pattern| known(pattern.inode))),
    column("SourcePath", Get::Name(|pattern| pattern.source_path)),
    column("FileSystem", Get::Name(|pattern| pattern.file_system)),
    column("Device", Get::Name(|pattern| pattern.device)),
    column("Cgroup", Get::Name(|pattern| pattern.cgroup)),
    column("Process", Get::Name(|pattern| pattern.process)),
    column("ProcessId", Get::Number(|pattern| known(pattern.process_id))),
    column("ProcessStart", Get::Number(|pattern| known(u64::from(pattern.process_start) * 10_000_000))),
    column("Bytes", Get::Number(|pattern| Some(pattern.bytes))),
    column("Files", Get::Number(|pattern| Some(pattern.files))),
    column("Evidence", Get::OpenWord(EVIDENCE, |pattern| pattern.evidence)),
    column("IP", Get::Received),
];
