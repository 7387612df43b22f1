//! A reader of the calls of a guest, which leaves out those of processes that are not meant.

use std::sync::Arc;

use fathom_insight::{Facts, Name, Names};
use fathom_intercept::{Call, CallFile, CallPosition, CallReaders, Writer};
use fathom_introspect::CallResolver;

use super::NotedCalls;
use super::choice::{DECLINED_NS, Decisions};

/// A reader of calls. They are noted while it exists.
pub(crate) struct NotedReader {
    pub noted: NotedCalls,
    readers: CallReaders,
    position: CallPosition,
    resolver: CallResolver,
    decisions: Decisions,
}

/// Who made a call.
pub(crate) struct Caller {
    pub process: Writer,
    pub command: Name,
    pub cgroup: Name,
}

impl NotedReader {
    pub(crate) fn new(noted: NotedCalls, readers: CallReaders) -> Self {
        noted.calls.set_reading(readers, true);
        let position = noted.calls.reader();
        let resolver = CallResolver::new(Arc::clone(&noted.guest));
        Self { noted, readers, position, resolver, decisions: Decisions::default() }
    }

    /// The texts of the guest.
    pub(crate) fn names(&self) -> &Arc<Names> {
        self.noted.guest.names()
    }

    /// Adds the calls since the last time. Nothing of a call is trusted.
    pub(crate) fn read(&mut self, calls: &mut Vec<Call>) {
        self.noted.calls.read(&mut self.position, calls);
    }

    /// The calls that were written over before they were read.
    pub(crate) fn missed(&self) -> u64 {
        self.position.missed
    }

    /// Who made a call; `None` if the process is not meant.
    pub(crate) fn caller(&mut self, call: &Call, now_ns: u64) -> Option<Caller> {
        let process = self.noted.writers.process(call.process).unwrap_or_default();
        let cgroup = match call.group {
            0 => self.resolver.cgroup(call.task, process.process_id, now_ns),
            group => self.resolver.group(group, now_ns),
        };
        let cgroup = cgroup.unwrap_or_default();
        let choice = &self.noted.choice;
        // Without others the interceptor has decided.
        if choice.has_others() && !choice.has_command(process.command()) {
            let CallFile { address, inode } = call.program;
            let program = self.resolver.file(address, inode, now_ns).unwrap_or_default().path;
            let names = self.noted.guest.names();
            if !self.decisions.decide(choice, names, (cgroup, program)) {
                self.noted.writers.decline(call.process, now_ns.saturating_add(DECLINED_NS));
                return None;
            }
        }
        let command = self.names().number(&String::from_utf8_lossy(process.command()));
        Some(Caller { process, command, cgroup })
    }

    /// The facts about a file of a call, if it is still the same.
    pub(crate) fn file(&mut self, file: CallFile, now_ns: u64) -> Option<Facts> {
        match file.address {
            0 => None,
            address => self.resolver.file(address, file.inode, now_ns),
        }
    }
}

impl Drop for NotedReader {
    fn drop(&mut self) {
        self.noted.calls.set_reading(self.readers, false);
    }
}
