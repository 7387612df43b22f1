//! The files and the control groups of system calls that an interceptor has noted.

use std::sync::Arc;

use fathom_insight::{Facts, Name};

use crate::files::FileCache;
use crate::groups::GroupCache;
use crate::guest::Guest;
use crate::kernel::Kernel;

/// Finds out the files and control groups of calls. Only one thread uses it. It caches files and
/// groups, and checks a cached entry against the guest's memory before each use.
pub struct CallResolver {
    guest: Arc<Guest>,
    generation: u64,
    kernel: Option<Arc<Kernel>>,
    files: FileCache,
    groups: GroupCache,
}

impl CallResolver {
    /// A resolver of the calls of a guest.
    pub fn new(guest: Arc<Guest>) -> Self {
        Self {
            guest,
            generation: 0,
            kernel: None,
            files: FileCache::default(),
            groups: GroupCache::default(),
        }
    }

    fn kernel(&mut self) -> Option<Arc<Kernel>> {
        if self.generation != self.guest.generation() {
            self.generation = self.guest.generation();
            self.kernel = self.guest.kernel();
            (self.files, self.groups) = (FileCache::default(), GroupCache::default());
        }
        self.kernel.clone()
    }

    /// The facts about the file with its inode at an address, if the inode still has this number.
    /// `now_ns` is the time of any monotonic clock.
    pub fn file(&mut self, address: u64, number: u64, now_ns: u64) -> Option<Facts> {
        let kernel = self.kernel()?;
        self.files.begin();
        let found = self.files.inode(&kernel, self.guest.names(), address, now_ns)?;
        Some(found.facts).filter(|facts| facts.inode == number)
    }

    /// The path of the control group at an address.
    pub fn group(&mut self, address: u64, now_ns: u64) -> Option<Name> {
        let kernel = self.kernel()?;
        let state = address.wrapping_add(kernel.layout.cgroup_self?);
        self.groups.begin();
        Some(self.groups.group(&kernel, self.guest.names(), state, now_ns)?.name)
    }

    /// The path of the control group of the process with its `task_struct` at an address, if the
    /// process still has this number.
    pub fn cgroup(&mut self, task: u64, process_id: u32, now_ns: u64) -> Option<Name> {
        let kernel = self.kernel()?;
        if kernel.u32(task.wrapping_add(kernel.layout.task_process))? != process_id {
            return None;
        }
        let state = kernel.group_of_task(task)?;
        self.groups.begin();
        Some(self.groups.group(&kernel, self.guest.names(), state, now_ns)?.name)
    }
}

impl Kernel {
    /// The address of the state of a task's control group.
    pub(crate) fn group_of_task(&self, task: u64) -> Option<u64> {
        let layout = &self.layout;
        let set = self.pointer(task.wrapping_add(layout.task_groups?))?;
        let group = self.pointer(set.wrapping_add(layout.groups_default?))?;
        Some(group.wrapping_add(layout.cgroup_self?))
    }
}
