//! The leases that a connection takes on the guest's memory for the guest's pager.

use std::sync::Arc;

use fathom_guest_memory::{GuestLeases, MemoryFile};
use vhost::vhost_user::Result;

use super::super::NotLeased;
use super::super::mailbox::Due;
use super::super::memory::Memory;
use super::super::worker::Worker;
use super::{Session, failed};

impl Session {
    pub(super) fn replace_memory(&mut self, mut memory: Memory) -> Result<()> {
        if let Err(error) = memory.renew_leases() {
            let (disk, vm) = (self.disk.name(), self.disk.vm());
            tracing::error!(disk, vm, %error, "no leases for the guest's pager");
            // What the pager takes away would be zeroes here.
            return Err(failed(error));
        }
        self.set_memory(memory)
    }

    /// Begins to take leases, or ends it, if the guest's pager has come or gone. Returns when no
    /// request from before is in flight.
    ///
    /// # Errors
    /// The files of the guest's memory, some of whose accesses take no leases, and why.
    pub(in super::super) fn renew_leases(
        &mut self,
    ) -> std::result::Result<Option<Arc<GuestLeases>>, NotLeased> {
        let mut memory = self.memory.clone();
        match memory.renew_leases() {
            Ok(true) => {
                // A ring that cannot go on with the same memory has stopped.
                let _ = self.set_memory(memory);
                self.refresh_observers();
            }
            Ok(false) => {}
            Err(error) => {
                let (disk, vm) = (self.disk.name(), self.disk.vm());
                tracing::error!(disk, vm, %error, "no leases for the guest's pager: it does nothing");
                let files = self.memory.guest().regions().iter().map(|region| {
                    let (device, inode) = region.file_identity();
                    MemoryFile { device, inode }
                });
                return Err(NotLeased { files: files.collect(), reason: error.to_string() });
            }
        }
        Ok(self.memory.leases().cloned())
    }

    /// Has layers that only observe drop the memory of before. Those of a queue that is not used
    /// would keep it.
    fn refresh_observers(&self) {
        for worker in self.rings.iter().filter_map(|ring| ring.worker.as_ref()) {
            worker.update(Due::AtOnce, Worker::refresh_observers);
        }
    }
}
