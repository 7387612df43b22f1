//! Processors of their own for server and client, so that neither is in the other's way.
use std::{fs, io, mem};

use super::LoadError;

/// Gives back the client's choice of processors when it is dropped. The server keeps its own.
pub(super) struct Pinned {
    before: libc::cpu_set_t,
}

impl Pinned {
    /// Has the server's threads run on the first processor that this thread may use, and this
    /// thread and those that it starts on the second.
    pub(super) fn new(server: Option<i32>) -> Result<Self, LoadError> {
        let system = |error| LoadError::System("the choice of processors", error);
        let before = affinity(0).map_err(system)?;
        // SAFETY: the number is below that of the set's bits.
        let mut usable = (0..libc::CPU_SETSIZE as usize)
            .filter(|&processor| unsafe { libc::CPU_ISSET(processor, &before) });
        let (Some(first), Some(second)) = (usable.next(), usable.next()) else {
            return Err(LoadError::Option("a processor each takes two, and one is usable".into()));
        };
        let Some(server) = server else {
            return Err(LoadError::Option("the server's process cannot be seen from here".into()));
        };
        for entry in fs::read_dir(format!("/proc/{server}/task")).map_err(system)? {
            let name = entry.map_err(system)?.file_name();
            // A thread that has ended since needs no processor.
            if let Some(thread) = name.to_str().and_then(|name| name.parse().ok()) {
                let _ = set_affinity(thread, &only(first));
            }
        }
        set_affinity(0, &only(second)).map_err(system)?;
        Ok(Self { before })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = set_affinity(0, &self.before);
    }
}

fn only(processor: usize) -> libc::cpu_set_t {
    // SAFETY: all zeroes are the empty set, and the number is below that of its bits.
    unsafe {
        let mut set: libc::cpu_set_t = mem::zeroed();
        libc::CPU_SET(processor, &mut set);
        set
    }
}

fn affinity(thread: i32) -> io::Result<libc::cpu_set_t> {
    // SAFETY: all zeroes are the empty set; it lives through the call, which has its size.
    unsafe {
        let mut set: libc::cpu_set_t = mem::zeroed();
        match libc::sched_getaffinity(thread, mem::size_of_val(&set), &raw mut set) {
            0 => Ok(set),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

fn set_affinity(thread: i32, set: &libc::cpu_set_t) -> io::Result<()> {
    // SAFETY: the set lives through the call, which has its size.
    match unsafe { libc::sched_setaffinity(thread, mem::size_of_val(set), set) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
