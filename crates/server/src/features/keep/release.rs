//! What an earlier daemon has left of files that no disk has.

use crate::daemon::Daemon;

impl Daemon {
    /// Releases what an earlier daemon has left of files that no disk has, if all disks of the
    /// configuration are served.
    pub(crate) fn release_keepsakes(&self) {
        if self.unserved.count() > 0 {
            return;
        }
        let records = self.records_folder();
        let release = move || super::release_unused(&records);
        // If that fails, they stay until the next start.
        let _ = std::thread::Builder::new().name("keep".into()).spawn(release);
    }
}
