//! The producer of `Syscalls`: the calls that interceptors of guests have noted.

use std::sync::Arc;

use fathom_block::Clock;
use fathom_insight::Facts;
use fathom_insight::stream::{self, GuestLabels};
use fathom_insight::syscall::{Syscall, UNKNOWN, error_of};
use fathom_intercept::{Call, CallOffset, CallReaders, SystemCall, system_call};

use super::producer::{Attached, Producer, Reading, RecordReader, Source};
use crate::daemon::Daemon;
use crate::features::intercept::NotedCalls;
use crate::features::intercept::reading::{Caller, NotedReader};

/// The guests whose calls are noted.
pub(super) struct CallsOfGuests;

impl Producer for CallsOfGuests {
    fn stream(&self) -> usize {
        super::SYSCALLS
    }

    fn sources(&self, daemon: &Arc<Daemon>) -> Vec<Box<dyn Source>> {
        let noted = crate::features::intercept::feature::noted_calls(daemon);
        noted.into_iter().map(|calls| Box::new(CallSource(calls)) as Box<dyn Source>).collect()
    }
}

/// A guest whose calls are noted.
struct CallSource(NotedCalls);

impl Source for CallSource {
    fn key(&self) -> u64 {
        self.0.number
    }

    fn disk(&self) -> &'static str {
        ""
    }

    fn attach(&self) -> Option<Box<dyn Attached>> {
        let reader = NotedReader::new(self.0.clone(), CallReaders::All);
        let reader = CallReader { reader, read: Vec::new() };
        let labels = GuestLabels { vm_name: self.0.vm.clone() };
        Some(Box::new(Reading::<stream::Syscalls, _>::new(reader, &labels)))
    }
}

/// A reader of the calls of a guest.
struct CallReader {
    reader: NotedReader,
    read: Vec<Call>,
}

impl RecordReader<Syscall> for CallReader {
    fn drain(&mut self, records: &mut Vec<Syscall>) {
        self.read.clear();
        self.reader.read(&mut self.read);
        let now_ns = Clock::System.now_ns();
        for place in 0..self.read.len() {
            let call = self.read[place];
            records.extend(self.record(&call, now_ns));
        }
    }

    fn dropped(&self) -> u64 {
        self.reader.missed()
    }
}

impl CallReader {
    /// The record of a call; `None` if its process is not meant. Nothing of the call is trusted.
    fn record(&mut self, call: &Call, now_ns: u64) -> Option<Syscall> {
        let known = system_call(call.number);
        let Caller { process, command, cgroup } = self.reader.caller(call, now_ns)?;
        let facts: Option<Facts> = self.reader.file(call.file, now_ns);
        let source = self.reader.file(call.source, now_ns);
        let name = known.map_or_else(String::new, |known| known.name.to_owned());
        // An instant in the future would hold the stream up.
        let duration = call.duration_ns;
        let ended_ns = call.begun_ns.saturating_add(duration).min(now_ns);
        let Facts { path, file_system, device, .. } = facts.unwrap_or_default();
        Some(Syscall {
            syscall_ts: ended_ns,
            duration,
            result: call.result,
            offset: known.and_then(|known| offset(known, call)).unwrap_or(UNKNOWN),
            length: known.and_then(|known| length(known, call)).unwrap_or(UNKNOWN),
            inode: call.file.inode,
            number: call.number,
            call: self.reader.names().number(&name).0,
            path: path.0,
            source_path: source.unwrap_or_default().path.0,
            file_system: file_system.0,
            device: device.0,
            cgroup: cgroup.0,
            process: command.0,
            process_id: process.process_id,
            process_start: (process.start_ns / 10_000_000) as u32,
            thread_id: call.thread_id,
        })
    }
}

/// Where in its file a call began.
fn offset(known: &SystemCall, call: &Call) -> Option<u64> {
    if call.file.address == 0 {
        return None;
    }
    match known.offset {
        CallOffset::None => None,
        CallOffset::Argument(place) => call.arguments.get(usize::from(place)).copied(),
        CallOffset::Position if error_of(call.result).is_some() => Some(call.position),
        // The call has moved the position, also that of a file that is only appended to.
        CallOffset::Position => call.position.checked_sub(call.result),
    }
}

/// The bytes that a call was for.
fn length(known: &SystemCall, call: &Call) -> Option<u64> {
    call.arguments.get(usize::from(known.length?)).copied()
}
