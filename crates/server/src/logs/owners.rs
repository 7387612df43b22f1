//! The logs that the configuration names, and whose changes they have. A block device has its mark in another place, which may be
//! lost; but the log knows the device.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use fathom_control::{DiskDefinition, ErrorBody, ErrorCode};
use fathom_layers::wal::{LogOwner, owner_of_changes};

use crate::configuration::layers;
use crate::wiring::refusal;

/// The places of logs on files and devices, each with its offset in bytes.
#[derive(Default)]
pub(super) struct KnownLogs {
    places: Mutex<BTreeSet<(PathBuf, u64)>>,
}

impl KnownLogs {
    /// Remembers the log of a disk.
    pub(super) fn add(&self, definition: &DiskDefinition) {
        let Some(wal) = layers::wal(definition) else { return };
        if wal.server().is_none() && !wal.is_in_cache {
            let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
            places.insert((wal.log, wal.offset.0));
        }
    }

    /// Refuses a device without a mark whose changes are in a log.
    pub(super) fn check(&self, image: &Path, home: &str) -> Result<(), ErrorBody> {
        let places = self.places.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for (path, offset) in places {
            // A log that cannot be read now says nothing; its own disk reports it.
            let owner = owner_of_changes(&path, offset).ok().flatten();
            let Some(LogOwner { name, .. }) = owner.filter(|owner| owner.home == home) else {
                continue;
            };
            let (shown, log) = (image.display(), path.display());
            return Err(refusal(
                ErrorCode::Failed,
                format!(
                    "{shown} alone is out of date: the log at {log} has changes of it, for the disk {name:?}, although \
                     {shown} has no mark"
                ),
                format!(
                    "serve it as the disk {name:?} with that log, and then remove the layer or shut down the daemon: both \
                     write the changes back"
                ),
            ));
        }
        Ok(())
    }
}
