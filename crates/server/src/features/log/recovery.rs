//! Tries to recover the logs of a volume that has failed, until they work again or nobody uses
//! them.

use std::sync::{Arc, Weak};
use std::time::Duration;

use fathom_layers::wal::{LogVolume, RECOVERY_PAUSE_MAX};

use super::DiskLog;

/// The pause before the first attempt. It doubles with each attempt.
const PAUSE_MIN: Duration = Duration::from_secs(1);
/// How long an attempt waits for the requests of the logs that are in flight.
const QUIET_TIME_MAX: Duration = Duration::from_secs(2);

impl DiskLog {
    /// From now on, the log is recovered after its volume has failed and works again. A log in a
    /// cache is not: its changes complete before they are durable.
    pub(crate) fn recover_when_failed(&self, disk: &str) {
        if self.is_in_cache {
            return;
        }
        let name = disk.to_owned();
        self.wal.on_failure(move |wal| begin(wal.volume(), &name));
        if self.wal.status().log_failed.is_some() {
            begin(self.wal.volume(), disk);
        }
    }
}

/// Begins to try on another thread, unless one does already. Does not block.
fn begin(volume: &Arc<LogVolume>, disk: &str) {
    tracing::error!(
        disk,
        "its log volume failed; it is tried again every {} s",
        RECOVERY_PAUSE_MAX.as_secs()
    );
    if volume.set_tended(true) {
        return;
    }
    let (weak, name) = (Arc::downgrade(volume), disk.to_owned());
    let thread = std::thread::Builder::new().name("recover".into());
    if let Err(error) = thread.spawn(move || tend(&weak, &name)) {
        volume.set_tended(false);
        tracing::error!(disk, %error, "the log is not tried again: serve its disks again");
    }
}

/// Tries until no log on the volume has failed, or none is open.
fn tend(volume: &Weak<LogVolume>, disk: &str) {
    let (mut pause, mut last) = (PAUSE_MIN, String::new());
    loop {
        // While it waits, it keeps no volume that nobody uses.
        std::thread::sleep(pause);
        pause = (2 * pause).min(RECOVERY_PAUSE_MAX);
        let Some(volume) = volume.upgrade() else { return };
        match volume.recover(QUIET_TIME_MAX) {
            Ok(0) => {}
            Ok(logs) => {
                tracing::warn!(disk, logs, "the log volume works again: its logs are emptied");
            }
            Err(error) => {
                let text = format!("{:#}", error.failure(disk));
                if text != last {
                    tracing::warn!(disk, "the log volume is not usable yet: {text}");
                    last = text;
                }
            }
        }
        if volume.has_failed_log() {
            continue;
        }
        volume.set_tended(false);
        // One may have failed meanwhile, and found this thread.
        if !volume.has_failed_log() || volume.set_tended(true) {
            return;
        }
        pause = PAUSE_MIN;
    }
}
