//! Processors of their own for server and client, so that neither is in the other's way.
use std::{fs, io};

use rustix::{
    process::Pid,
    thread::{CpuSet, sched_getaffinity, sched_setaffinity},
};

use super::LoadError;

/// Gives back the client's choice of processors when it is dropped. The server keeps its own.
pub(super) struct Pinned {
    before: CpuSet,
}

impl Pinned {
    /// Has the server's threads run on the first processor that this thread may use, and this
    /// thread and those that it starts on the second.
    pub(super) fn new(server: Option<i32>) -> Result<Self, LoadError> {
        let system = |error| LoadError::System("the choice of processors", error);
        let before = sched_getaffinity(None).map_err(io::Error::from).map_err(system)?;
        let mut usable = (0..CpuSet::MAX_CPU).filter(|&processor| before.is_set(processor));
        let (Some(first), Some(second)) = (usable.next(), usable.next()) else {
            return Err(LoadError::Option("a processor each takes two, and one is usable".into()));
        };
        let Some(server) = server else {
            return Err(LoadError::Option("the server's process cannot be seen from here".into()));
        };
        for entry in fs::read_dir(format!("/proc/{server}/task")).map_err(system)? {
            let name = entry.map_err(system)?.file_name();
            let thread = name.to_str().and_then(|name| Pid::from_raw(name.parse().ok()?));
            // A thread that has ended since needs no processor.
            if thread.is_some() {
                let _ = sched_setaffinity(thread, &only(first));
            }
        }
        sched_setaffinity(None, &only(second)).map_err(io::Error::from).map_err(system)?;
        Ok(Self { before })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = sched_setaffinity(None, &self.before);
    }
}

fn only(processor: usize) -> CpuSet {
    let mut set = CpuSet::new();
    set.set(processor);
    set
}
