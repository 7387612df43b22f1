//! A disk that accepts writes again after some were lost: its store, its cache and its log.

use fathom_control::{DiskStatus, ErrorBody, ErrorCode};
use fathom_insight::change::{Author, ChangeKind};
use fathom_layers::Cache;

use super::changes::cache_of;
use crate::daemon::change_log::Note;
use crate::daemon::stack::refusal;
use crate::daemon::{Daemon, Served};
use crate::features::log::DiskLog;

/// Makes the image of a disk accept writes again after some were lost.
fn recover_home(served: &Served) -> Result<(), ErrorBody> {
    let name = served.disk.name();
    // A cache may have what the store has lost.
    let cache = cache_of(served);
    let reject = || cache.as_ref().map_or(Ok(()), Cache::reject_state);
    // The first attempt may report the lost writes once more, which are known.
    reject().or_else(|_| reject()).map_err(|error| {
        refusal(
            ErrorCode::Failed,
            format!("the mark of the image of {name:?} cannot be changed: {error}"),
            "make the image's folder writable, so that no later start uses what its cache has",
        )
    })?;
    served.disk.backend().recover().map_err(|error| {
        refusal(
            ErrorCode::Failed,
            format!("the disk {name:?} still cannot store writes: {error}"),
            "repair the store beneath it, then try again",
        )
    })?;
    if let Some(cache) = cache {
        cache.drop_blocks();
    }
    Ok(())
}

impl Daemon {
    /// Makes a disk accept writes again after some were lost.
    pub(crate) fn recover_disk(&self, name: &str) -> Result<DiskStatus, ErrorBody> {
        let _change = self.change(name)?;
        let served = self.find(name)?;
        let backend = served.disk.backend();
        let log = served.part::<DiskLog>();
        if log.as_ref().is_some_and(DiskLog::has_lost_store) {
            return Err(refusal(
                ErrorCode::Failed,
                format!("the store of the cache of {name:?} has lost writes while it was served"),
                "repair it, restart the daemon, then use `fathom disk recover` for each disk with a log in it",
            ));
        }
        let log = log.filter(|log| log.wal.lost().is_some());
        if !backend.has_lost_writes() && log.is_none() {
            return Err(refusal(
                ErrorCode::Conflict,
                format!("the disk {name:?} has lost no writes"),
                "no recovery is needed",
            ));
        }
        if backend.has_lost_writes() {
            recover_home(&served)?;
        }
        if let Some(log) = log {
            log.recover().map_err(|error| {
                refusal(
                    ErrorCode::Failed,
                    format!("the log of the disk {name:?} still cannot take changes: {error}"),
                    "repair the store beneath it, then try again",
                )
            })?;
            tracing::warn!(disk = name, "its log takes changes again; lost writes stay lost");
        }
        let definition = served.live().definition.clone();
        let recovered = Note::new(ChangeKind::DiskChanged, Author::Control).of(&definition);
        self.note_change(&recovered.with_text("accepts writes again; lost writes stay lost"));
        self.disk_status(name)
    }
}
