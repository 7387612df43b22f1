//! The stream of what operators and the daemon changed.

use super::{Get, Stream, StreamColumn, column};
use crate::change::{Author, Change, ChangeKind, HostLabels};

/// `Changes`: what operators and the daemon changed.
#[derive(Clone, Copy, Debug)]
pub struct Changes;

impl Stream for Changes {
    type Record = Change;
    type Labels = HostLabels;

    const NAME: &'static str = "Changes";
    const COLUMNS: &'static [StreamColumn<Change, HostLabels>] = COLUMNS;

    fn time_ns(change: &Change) -> u64 {
        change.change_ts
    }
}

const KINDS: &[&str] = &ChangeKind::NAMES;
const AUTHORS: &[&str] = &Author::NAMES;

/// All columns, in order (`docs/events.md`). `VMName`, `VDisk`, `PDisk` and `IP` are those of
/// `IOstream`.
#[rustfmt::skip]
const COLUMNS: &[StreamColumn<Change, HostLabels>] = &[
    column("ChangeTS", Get::Time(|change| change.change_ts)),
    column("Change", Get::OpenWord(KINDS, |change| change.kind)),
    column("VMName", Get::Name(|change| change.vm_name)),
    column("VDisk", Get::Name(|change| change.virtual_disk)),
    column("PDisk", Get::Name(|change| change.physical_disk)),
    column("Layer", Get::Name(|change| change.layer)),
    column("Problem", Get::Name(|change| change.problem)),
    column("Text", Get::Name(|change| change.text)),
    column("ChangedBy", Get::Word(AUTHORS, |change| change.author)),
    column("Host", Get::Label(|labels| &labels.host)),
    column("IP", Get::Received),
];
