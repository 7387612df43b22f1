//! Snapshots of volumes, with frozen file systems of the guests that use them if that is wanted.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use fathom_control::{ErrorBody, ErrorCode, Freeze};
use fathom_store::Pool;

use super::refused;
use crate::daemon::Daemon;
use crate::daemon::stack::refusal;
use crate::features::flush::Flusher;
use crate::features::flush::freeze::{FreezeGuest, FreezeOutcome};

/// Snapshots that are to be taken at one instant.
pub(crate) struct SnapshotRequest<'a> {
    /// The pool's path.
    pub(crate) path: &'a Path,
    pub(crate) pool: &'a Pool,
    pub(crate) volumes: &'a [String],
    /// The name of the snapshots.
    pub(crate) name: &'a str,
    /// The time now, in seconds since 1970.
    pub(crate) time_s: u64,
    pub(crate) freeze: Freeze,
}

impl SnapshotRequest<'_> {
    fn take(&self) -> Result<(), ErrorBody> {
        let volumes: Vec<&str> = self.volumes.iter().map(String::as_str).collect();
        self.pool.take_snapshot(&volumes, self.name, self.time_s).map_err(refused)
    }
}

impl Daemon {
    /// Takes snapshots. Returns which guests were not frozen although that was to be tried.
    ///
    /// # Errors
    /// If they cannot be taken, or not with frozen guests although that was required.
    pub(crate) fn take_snapshot(
        self: &Arc<Self>,
        request: &SnapshotRequest<'_>,
    ) -> Result<Option<String>, ErrorBody> {
        let taken = self.take_with(request)?;
        self.close_accounts(request);
        Ok(taken)
    }

    fn take_with(
        self: &Arc<Self>,
        request: &SnapshotRequest<'_>,
    ) -> Result<Option<String>, ErrorBody> {
        if request.freeze.is_off() {
            return request.take().map(|()| None);
        }
        let is_partial = request.freeze == Freeze::Try;
        let (guests, mut failures) = self.guests_of(request);
        if let (false, Some(error)) = (is_partial, failures.first()) {
            return Err(error.clone());
        }
        let flusher = self.part::<Flusher>();
        let is_stopping = || self.is_stopping();
        let outcome = flusher.with_frozen(&guests, is_partial, &is_stopping, || request.take());
        for vm in flusher.frozen().iter().filter(|vm| guests.iter().any(|it| it.vm == **vm)) {
            self.begin_thaw(vm);
            self.problem_waker()();
        }
        let FreezeOutcome { taken, failures: more } = outcome;
        failures.extend(more);
        let Some(taken) = taken else {
            let first = failures.into_iter().next();
            let ends = || refusal(ErrorCode::ShuttingDown, "the daemon is shutting down", "");
            return Err(first.unwrap_or_else(ends));
        };
        taken?;
        let Some(error) = failures.first() else { return Ok(None) };
        if !is_partial {
            return Err(undone(request, error));
        }
        let reasons: Vec<&str> = failures.iter().map(|error| &*error.message).collect();
        Ok(Some(format!(
            "the snapshot has what a power loss would have left of guests that were not frozen: {}",
            reasons.join("; ")
        )))
    }

    /// The guests that use the volumes, and why others of them cannot be frozen. A volume without a
    /// disk has no guest.
    fn guests_of(&self, request: &SnapshotRequest<'_>) -> (Vec<FreezeGuest>, Vec<ErrorBody>) {
        let served = request.volumes.iter().filter_map(|volume| {
            let disk = self.disk_of_volume(request.path, volume)?;
            Some((disk.disk.vm().to_owned(), disk.disk.name().to_owned()))
        });
        let mut vms: Vec<(String, String)> = served.collect();
        vms.sort();
        vms.dedup_by(|one, other| one.0 == other.0);
        let (mut guests, mut failures) = (Vec::new(), Vec::new());
        for (vm, disk) in vms {
            match self.guest_of(&vm, &disk) {
                Ok(guest) => guests.push(guest),
                Err(error) => failures.push(error),
            }
        }
        (guests, failures)
    }

    fn guest_of(&self, vm: &str, disk: &str) -> Result<FreezeGuest, ErrorBody> {
        let options = self.part::<Flusher>().options(vm).unwrap_or_default();
        let Some(agent) = options.agent else {
            return Err(refusal(
                ErrorCode::Unsupported,
                format!(
                    "the configuration names no agent of the guest that uses the disk {disk:?}"
                ),
                "give the disk a `vm`, and add a table [[guest]] with this `vm` and `agent`",
            ));
        };
        if self.is_migrating(vm) {
            return Err(refusal(
                ErrorCode::Conflict,
                format!("the guest {vm:?} is being migrated, and is not frozen meanwhile"),
                "wait for the migration to end, or take the snapshot without --freeze",
            ));
        }
        let time_max = Duration::from_nanos(options.freeze_time_max.0);
        Ok(FreezeGuest { vm: vm.to_owned(), agent, time_max })
    }
}

/// Deletes snapshots of which it is not known whether the guests were frozen. Returns the error.
fn undone(request: &SnapshotRequest<'_>, error: &ErrorBody) -> ErrorBody {
    let mut error = error.clone();
    for volume in request.volumes {
        if let Err(failure) = request.pool.delete_snapshot(volume, request.name) {
            error.message = format!(
                "{}; the snapshot {:?} of the volume {volume:?} could not be deleted again: \
                 {failure}",
                error.message, request.name
            );
        }
    }
    error
}
