//! The stream of system calls.

use super::{Get, Stream, StreamColumn, column};
use crate::syscall::{Syscall, UNKNOWN, error_of};

/// `Syscalls`: system calls of processes in guests, when they have ended.
#[derive(Clone, Copy, Debug)]
pub struct Syscalls;

/// What all calls of a guest have in common.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GuestLabels {
    /// The name of the virtual machine.
    pub vm_name: String,
}

impl Stream for Syscalls {
    type Record = Syscall;
    type Labels = GuestLabels;

    const NAME: &'static str = "Syscalls";
    const COLUMNS: &'static [StreamColumn<Syscall, GuestLabels>] = COLUMNS;

    fn time_ns(call: &Syscall) -> u64 {
        call.syscall_ts
    }
}

fn known(value: impl Into<u64>) -> Option<u64> {
    Some(value.into()).filter(|value| *value != 0)
}

fn is_known(value: u64) -> Option<u64> {
    Some(value).filter(|value| *value != UNKNOWN)
}

/// All columns, in order (`docs/syscalls.md`). Those of the same names are those of `IOstream`.
#[rustfmt::skip]
const COLUMNS: &[StreamColumn<Syscall, GuestLabels>] = &[
    column("SyscallTS", Get::Time(|call| call.syscall_ts)),
    column("Call", Get::Name(|call| call.call)),
    column("Number", Get::Number(|call| Some(call.number))),
    column("VMName", Get::Label(|labels| &labels.vm_name)),
    column("Process", Get::Name(|call| call.process)),
    column("ProcessId", Get::Number(|call| known(call.process_id))),
    column("ThreadId", Get::Number(|call| known(call.thread_id))),
    column("ProcessStart", Get::Number(|call| known(u64::from(call.process_start) * 10_000_000))),
    column("Cgroup", Get::Name(|call| call.cgroup)),
    column("Path", Get::Name(|call| call.path)),
    column("Inode", Get::Number(|call| known(call.inode))),
    column("SourcePath", Get::Name(|call| call.source_path)),
    column("FileSystem", Get::Name(|call| call.file_system)),
    column("Device", Get::Name(|call| call.device)),
    column("Offset", Get::Number(|call| is_known(call.offset))),
    column("Length", Get::Number(|call| is_known(call.length))),
    column("Result", Get::Number(|call| error_of(call.result).map_or(Some(call.result), |_| None))),
    column("Errno", Get::Number(|call| error_of(call.result))),
    column("Duration", Get::Number(|call| Some(call.duration))),
    column("IP", Get::Received),
];
