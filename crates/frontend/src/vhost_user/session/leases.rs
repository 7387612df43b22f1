//! The leases that a connection takes on the guest's memory for the guest's pager.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fathom_guest_memory::{GuestLeases, LEASE_FOLDER, MemoryFile};
use vhost::vhost_user::Result;

use super::super::NotLeased;
use super::super::mailbox::Due;
use super::super::memory::Memory;
use super::super::worker::Worker;
use super::{Session, failed};

/// For how long a daemon whose user may not open the table of a pager waits until the pager lets it
/// in. The pager finds the daemon by its mapping of the memory, which is there meanwhile.
const ADMISSION_TIME_MAX: Duration = Duration::from_secs(2);
const ADMISSION_PAUSE: Duration = Duration::from_millis(20);

/// Takes leases when the pager lets this user in, if it has to.
fn take_leases(memory: &mut Memory) -> io::Result<bool> {
    let begun = Instant::now();
    loop {
        match memory.renew_leases() {
            Err(error) if error.kind() == io::ErrorKind::ReadOnlyFilesystem => {
                let text = format!(
                    "the table of leases of the guest's pager can only be read: add \
                     ReadWritePaths=-{LEASE_FOLDER} to the daemon's unit ({error})"
                );
                return Err(io::Error::new(error.kind(), text));
            }
            Err(error) if error.kind() != io::ErrorKind::PermissionDenied => return Err(error),
            Err(_) if begun.elapsed() < ADMISSION_TIME_MAX => std::thread::sleep(ADMISSION_PAUSE),
            Err(error) => {
                let text = format!(
                    "the guest has a pager, which does not let this user in to its table of \
                     leases: is it alive, and root's? ({error}); see docs/pager.md"
                );
                return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
            }
            taken => return taken,
        }
    }
}

impl Session {
    pub(super) fn replace_memory(&mut self, mut memory: Memory) -> Result<()> {
        if let Err(error) = take_leases(&mut memory) {
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
