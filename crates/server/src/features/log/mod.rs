//! The log volumes of the layers `wal` and `offload`. They are made if missing, and disks whose
//! logs are on the same volume share it.

mod attend;
pub(crate) mod decision;
pub(crate) mod definition;
mod equip;
pub(crate) mod feature;
mod identity;
mod in_cache;
mod offload;
mod open;
mod owners;
mod prepare;
mod recovery;
mod settle;
mod volumes;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use fathom_block::{Attendance, BackendProblem, Disk, Layer};
use fathom_control::DiskDefinition;
use fathom_image::LogMark;
use fathom_layers::offload::OffloadOptions;
use fathom_layers::{Offload, Opened, Wal};

use crate::features::keep::lives::Lives;
pub(crate) use definition::WalDefinition;
pub(crate) use identity::is_named;
pub(crate) use in_cache::CacheStores;
use in_cache::LogLoss;
pub(crate) use offload::{AutoKind, OffloadDefinition};
pub(crate) use settle::settle_disk;
pub use settle::{LogCommand, settle_log};
use volumes::OpenVolume;

/// The remedy for a block device without a name of its own.
pub(crate) const NAME_DEVICE: &str =
    "give it a name that only this device has: `key = \"NAME\"` of the disk, or `--key NAME`";

/// The open log volumes, by path.
#[derive(Default)]
pub(crate) struct LogVolumes {
    /// The lives of the daemon.
    pub(crate) lives: Lives,
    places: Opened<PathBuf, OpenVolume>,
    known: owners::KnownLogs,
}

/// Whether two definitions have the same log; the settings that can change may differ.
pub(crate) fn is_same_log(one: &WalDefinition, other: &WalDefinition) -> bool {
    let place = |wal: &WalDefinition| wal.log.canonicalize().unwrap_or_else(|_| wal.log.clone());
    // What is carried can change, too.
    let carry = other.offload.map(|offload| offload.carry).unwrap_or_default();
    let offload = one.offload.map(|offload| OffloadOptions { carry, ..offload });
    let same = WalDefinition { log: other.log.clone(), age: other.age, offload, ..one.clone() };
    same == *other && place(one) == place(other)
}

/// The log of a disk, and the mark of the disk's image that names the log.
#[derive(Clone)]
pub(crate) struct DiskLog {
    /// The layer.
    pub wal: Wal,
    /// The layer `offload`, if the log is that of one.
    pub offload: Option<Offload>,
    /// Whether the log is that of a cache in the mode `write-back`.
    pub is_in_cache: bool,
    mark: Arc<LogMark>,
    /// The record of a loss of acknowledged writes, for a log in a cache.
    loss: Option<Arc<LogLoss>>,
    /// A queue of the disk while no front end has one.
    attendance: Arc<Attendance>,
}

impl DiskLog {
    /// The layer with the log.
    pub(crate) fn layer(&self) -> Arc<dyn Layer> {
        match &self.offload {
            Some(offload) => Arc::new(offload.clone()),
            None => Arc::new(self.wal.clone()),
        }
    }

    /// Gives the log the options that can change.
    pub(crate) fn apply(&self, wal: &WalDefinition) {
        self.wal.set_age(wal.age.0);
        if let (Some(offload), Some(options)) = (&self.offload, wal.offload) {
            offload.set_carry(options.carry);
        }
    }

    /// Writes all changes of the log back within `limit`, and removes the mark, because the image
    /// no longer needs the log. There must be no other user of `disk`.
    pub(crate) fn bring_home(&self, disk: &Arc<Disk>, limit: Duration) -> io::Result<()> {
        match &self.offload {
            Some(offload) => offload.drain(disk, limit)?,
            None => self.wal.drain(disk, limit)?,
        }
        self.end()
    }

    /// Removes the mark of an empty log, because the disk is not served after all.
    pub(crate) fn abandon(&self) {
        if self.wal.status().used == 0 {
            // If this fails, the mark stays although the image is up to date.
            let _ = self.end();
        }
    }

    /// The loss of acknowledged writes that the operator has not confirmed.
    pub(crate) fn problem(&self) -> Option<BackendProblem> {
        self.wal.lost().map(|errno| BackendProblem::WritesLost { errno, earlier: true })
    }

    /// Whether the store of a log in a cache has lost writes since it was opened.
    pub(crate) fn has_lost_store(&self) -> bool {
        self.is_in_cache && self.wal.volume().backend().has_lost_writes()
    }

    /// The operator has confirmed the loss of acknowledged writes.
    pub(crate) fn recover(&self) -> io::Result<()> {
        let Some(errno) = self.wal.lost() else { return Ok(()) };
        if let Some(loss) = &self.loss {
            loss.clear()?;
        }
        self.wal.end_loss().inspect_err(|_| {
            // The disk stays as it was, also in a later daemon.
            let _ = self.loss.as_ref().map(|loss| loss.write(errno));
        })
    }

    /// Ends a log whose changes the operator has given up, and with them the loss that the log may
    /// have.
    pub(crate) fn discard(&self) -> io::Result<()> {
        self.recover()?;
        self.end()
    }

    /// Removes the mark: the log is empty and takes no more changes. Another disk may then have a
    /// log in the place of a log in a cache.
    ///
    /// If the mark cannot be removed, for example because the file system is full, the log notes
    /// that it is void.
    pub(crate) fn end(&self) -> io::Result<()> {
        if self.wal.lost().is_some() {
            return Err(io::Error::other("acknowledged writes may be lost"));
        }
        if let Err(error) = self.mark.clear() {
            if self.wal.part(true).is_err() {
                return Err(error);
            }
            tracing::warn!(%error, "the mark of an image that names its log stays: the log notes that it is void");
            return Ok(());
        }
        if self.is_in_cache {
            if let Err(error) = self.wal.erase() {
                tracing::warn!(%error, "an empty log keeps its place in a cache");
            }
        } else if let Err(error) = self.wal.part(false) {
            // A copy of the image with its mark would still fit the log.
            tracing::warn!(%error, "the end of a log is not noted in it");
        }
        Ok(())
    }
}

impl LogVolumes {
    /// Remembers the logs of disks, before any of the disks is opened.
    pub(crate) fn know<'d>(&self, disks: impl Iterator<Item = &'d DiskDefinition>) {
        disks.for_each(|disk| self.known.add(disk, |path| self.place(path)));
    }

    /// Whether a log has changes of a disk, whose image has no mark. `of` is the disk's name, its
    /// image, and the name of that in logs. `None` if the log does not answer in time, which is a
    /// [doubt](Self::doubt).
    pub(crate) fn has_changes(&self, wal: &WalDefinition, of: (&str, &Path, &str)) -> Option<bool> {
        self.known.has_changes(wal, |path| self.place(path), of)
    }

    /// Why it is not certain that a disk on a device without a mark has all its changes: a message
    /// and a remedy.
    pub(crate) fn doubt(&self, disk: &str) -> Option<(String, String)> {
        self.known.doubt(disk)
    }
}
