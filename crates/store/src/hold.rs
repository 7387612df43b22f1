//! Holds: snapshots that nobody deletes until they are released.

use crate::catalogue::{Catalogue, Change, is_reason};
use crate::error::PoolError;
use crate::pool::Pool;
use crate::refusal::PoolRefusal;

impl Catalogue {
    /// Whether a snapshot of the volume `id` is held.
    pub(crate) fn is_held(&self, id: u32) -> bool {
        self.snapshots.values().any(|snapshot| snapshot.volume == id && snapshot.hold.is_some())
    }
}

impl Pool {
    /// Holds a snapshot: neither it nor its volume can be deleted until it is released. One that is
    /// held gets the new reason. The hold is durable when the call returns.
    ///
    /// # Errors
    /// If there is no such snapshot, the reason is not possible, or the pool fails.
    pub fn hold_snapshot(&self, volume: &str, name: &str, reason: &str) -> Result<(), PoolError> {
        self.change(|state| {
            if !is_reason(reason) {
                return Err(PoolRefusal::BadReason);
            }
            let volume = state.catalogue.volume(volume)?.id;
            let id = state.catalogue.snapshot(volume, name)?.id;
            Ok(Change::Hold { id, reason: reason.to_owned() })
        })
    }

    /// Releases a snapshot that is held.
    ///
    /// # Errors
    /// If there is no such snapshot, it is not held, or the pool fails.
    pub fn release_snapshot(&self, volume: &str, name: &str) -> Result<(), PoolError> {
        self.change(|state| {
            let volume = state.catalogue.volume(volume)?.id;
            let snapshot = state.catalogue.snapshot(volume, name)?;
            if snapshot.hold.is_none() {
                return Err(PoolRefusal::NotHeld);
            }
            Ok(Change::Release { id: snapshot.id })
        })
    }
}
