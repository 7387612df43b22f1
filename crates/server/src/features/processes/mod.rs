//! The processes of guests, read when they are requested.

pub(crate) mod feature;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use fathom_block::{Clock, Facts};
use fathom_control::{CallFile, CallInfo, ErrorBody, GuestProcesses, ProcessInfo, ProcessesReport};
use fathom_insight::Names;
use fathom_introspect::{Process, WaitingCall};

use crate::daemon::Daemon;
use crate::daemon::status::unix_time_ns;
use crate::features::guests::select::SelectedGuest;
use crate::features::guests::usage::insight_of;

impl Daemon {
    /// The processes of all guests, or of the guest with this name, number or disk.
    ///
    /// # Errors
    /// When there is no such guest.
    pub(crate) fn processes(&self, guest: Option<&str>) -> Result<ProcessesReport, ErrorBody> {
        let names = self.names();
        let guests = self.selected_guests(guest)?;
        Ok(ProcessesReport {
            time_ns: Clock::System.now_ns(),
            unix_time_ns: unix_time_ns(),
            guests: guests.into_iter().map(|guest| processes_of(guest, names)).collect(),
        })
    }
}

fn processes_of(guest: SelectedGuest, names: &Arc<Names>) -> GuestProcesses {
    let SelectedGuest { view, vm, .. } = guest;
    let mut found = GuestProcesses {
        number: view.number,
        vm,
        disks: view.disks,
        insight: insight_of(view.status),
        ..GuestProcesses::default()
    };
    let Some(kernel) = view.kernel else { return found };
    let begun = Instant::now();
    // A failure while one guest's memory is read must not affect the answer about other guests.
    let read = catch_unwind(AssertUnwindSafe(|| kernel.processes(names)));
    let Ok(read) = read else { return found };
    found.count_ns = begun.elapsed().as_nanos() as u64;
    found.uptime_ns = read.uptime_ns;
    found.is_whole = read.is_whole;
    found.processes = read.processes.into_iter().map(|process| info(process, names)).collect();
    found
}

fn info(process: Process, names: &Names) -> ProcessInfo {
    ProcessInfo {
        process_id: process.process_id.into(),
        parent_id: process.parent_id.into(),
        command: process.command,
        start_ns: process.start_ns,
        cgroup: process.cgroup,
        is_kernel: process.is_kernel,
        threads: process.threads.into(),
        read_bytes: process.read_bytes,
        dirtied_bytes: process.dirtied_bytes,
        cancelled_bytes: process.cancelled_bytes,
        calls: process.calls.iter().map(|call| call_of(call, names)).collect(),
    }
}

fn call_of(call: &WaitingCall, names: &Names) -> CallInfo {
    let text = |name| names.text(name).as_deref().unwrap_or_default().to_owned();
    let file = |facts: &Facts| CallFile {
        path: text(facts.path),
        file_system: text(facts.file_system),
        device: text(facts.device),
        inode: facts.inode,
    };
    CallInfo {
        thread_id: call.thread_id.into(),
        call: call.call.into(),
        file: call.file.is_known().then(|| file(&call.file)),
        source: call.source.as_ref().map(file),
        is_uninterruptible: call.is_uninterruptible,
    }
}
