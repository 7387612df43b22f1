//! Separate processors for server and client, so that neither disturbs the other.
use std::{fs, io};

use rustix::{
    process::Pid,
    thread::{CpuSet, sched_getaffinity, sched_setaffinity},
};

use super::LoadError;

/// Restores the client's processors when it is dropped. The server's are not restored.
pub(super) struct Pinned {
    before: CpuSet,
}

impl Pinned {
    /// Runs the server's threads on the first processor that this thread may use, and this thread
    /// and the threads that it starts on the second.
    ///
    /// # Errors
    /// If fewer than two processors are usable, the server's process is not visible, or a system
    /// call fails.
    pub(super) fn new(server: Option<i32>) -> Result<Self, LoadError> {
        let system = |error| LoadError::System("setting the processors", error);
        let before = sched_getaffinity(None).map_err(io::Error::from).map_err(system)?;
        let mut usable = (0..CpuSet::MAX_CPU).filter(|&processor| before.is_set(processor));
        let (Some(first), Some(second)) = (usable.next(), usable.next()) else {
            let message = "server and client need a processor each, but only one is usable";
            return Err(LoadError::Option(message.into()));
        };
        let Some(server) = server else {
            return Err(LoadError::Option("the server's process is not visible from here".into()));
        };
        for entry in fs::read_dir(format!("/proc/{server}/task")).map_err(system)? {
            let name = entry.map_err(system)?.file_name();
            let thread = name.to_str().and_then(|name| Pid::from_raw(name.parse().ok()?));
            // The call fails for a thread that has ended since, which does not matter.
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
