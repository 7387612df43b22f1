//! Makes guests write their dirty data, as the configuration allows.
//!
//! - `qmp`: sends keys to a guest.
//! - `record`: remembers a replaced tunable, so that it is put back even by the next daemon.
//!
//! The paper: *Design Choices for Utilizing Disk Idleness in a Virtual Machine Environment*
//! (Elango, Krishnakumaran, Arpaci-Dusseau), sections 3.3.2 and 4.5.

mod qmp;
mod record;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant};

use fathom_control::{ErrorBody, ErrorCode, FlushReport};
use fathom_introspect::{Kernel, TunableError};

use crate::configuration::{GuestOptions, Placed};
use crate::lock;
use crate::wiring::refusal;
use record::Record;

/// How long QEMU may take to accept the keys.
const KEYS_TIME_MAX: Duration = Duration::from_secs(3);
/// The interval at which a shutdown checks whether flushes have ended.
const CHECK_INTERVAL: Duration = Duration::from_millis(2);
/// The `vm.dirty_expire_centisecs` of a guest during a flush, in centiseconds. The value is not 0, which
/// an administrator might choose.
const EXPIRE_NOW: u32 = 1;
/// How long a shutdown waits for the tunables to be put back.
const RESTORE_TIME_MAX: Duration = Duration::from_secs(2);

/// The state of all flushes.
pub(crate) struct Flusher {
    guests: RwLock<Vec<GuestOptions>>,
    /// The virtual machines that are being flushed.
    active: Mutex<BTreeSet<String>>,
    /// The folder of the records.
    folder: PathBuf,
    /// Tunables that are not yet put back, by virtual machine.
    replaced: Mutex<BTreeMap<String, Record>>,
    counts: Mutex<BTreeMap<String, FlushCounts>>,
}

/// The flushes of one virtual machine since the start of the daemon.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FlushCounts {
    /// All flushes.
    pub(crate) flushes: u64,
    /// Flushes that ended before all dirty data was written.
    pub(crate) incomplete: u64,
    /// The bytes that the guest wrote during its flushes.
    pub(crate) written_bytes: u64,
}

impl Flusher {
    /// Reads the records in `folder`.
    pub(crate) fn new(guests: &[Placed<GuestOptions>], folder: PathBuf) -> Self {
        let records = record::read_all(&folder);
        Self {
            guests: RwLock::new(options_of(guests)),
            active: Mutex::default(),
            counts: Mutex::default(),
            replaced: Mutex::new(records.into_iter().map(|it| (it.vm.clone(), it)).collect()),
            folder,
        }
    }

    /// Sets the options of all guests. Returns whether they have changed.
    pub(crate) fn set(&self, guests: &[Placed<GuestOptions>]) -> bool {
        let new = options_of(guests);
        let mut guests = self.guests.write().unwrap_or_else(PoisonError::into_inner);
        let differs = *guests != new;
        *guests = new;
        differs
    }

    /// The options of the guest of `vm`.
    pub(crate) fn options(&self, vm: &str) -> Option<GuestOptions> {
        let guests = self.guests.read().unwrap_or_else(PoisonError::into_inner);
        guests.iter().find(|guest| guest.vm == vm).cloned()
    }

    /// Marks the guest of `vm` as being flushed; `None` if it already is.
    pub(crate) fn begin<'a>(&'a self, vm: &'a str) -> Option<Active<'a>> {
        let is_new = lock(&self.active).insert(vm.to_owned());
        is_new.then(|| Active { flusher: self, vm })
    }

    /// Whether the guest of `vm` is being flushed.
    pub(crate) fn is_active(&self, vm: &str) -> bool {
        lock(&self.active).contains(vm)
    }

    /// Waits until no guest is being flushed; the flushes end early during a shutdown.
    pub(crate) fn end(&self) {
        let end = Instant::now() + RESTORE_TIME_MAX;
        while !lock(&self.active).is_empty() && Instant::now() < end {
            std::thread::sleep(CHECK_INTERVAL);
        }
    }

    /// The guests that are made to flush while their devices are idle.
    pub(crate) fn idle_guests(&self) -> Vec<GuestOptions> {
        let guests = self.guests.read().unwrap_or_else(PoisonError::into_inner);
        guests.iter().filter(|guest| guest.flush_when_idle).cloned().collect()
    }

    /// Counts a flush that has ended.
    pub(crate) fn count(&self, report: &FlushReport) {
        let mut counts = lock(&self.counts);
        let counts = counts.entry(report.vm.clone()).or_default();
        counts.flushes += 1;
        counts.written_bytes += report.written_bytes;
        counts.incomplete += u64::from(!report.is_complete);
    }

    /// The counts by virtual machine.
    pub(crate) fn counts(&self) -> BTreeMap<String, FlushCounts> {
        lock(&self.counts).clone()
    }

    /// Whether tunables of a guest have to be put back.
    pub(crate) fn has_replaced(&self) -> bool {
        !lock(&self.replaced).is_empty()
    }

    /// Puts the tunable of the guest of `vm` back, if it is replaced. `kernel` is the guest's kernel.
    /// Returns whether the guest's value was written.
    pub(crate) fn restore(&self, vm: &str, kernel: &Kernel) -> bool {
        let Some(record) = lock(&self.replaced).get(vm).cloned() else { return false };
        let restored = kernel.replace_dirty_expire(EXPIRE_NOW, record.dirty_expire);
        // With another value, the guest has booted again, or its administrator has set the value.
        if restored != Err(TunableError::Unknown) {
            self.forget(&record);
        }
        restored.is_ok()
    }

    /// Removes a record whose tunable needs no restoration.
    fn forget(&self, record: &Record) {
        if let Err(error) = record.remove(&self.folder) {
            tracing::warn!(vm = record.vm, "the record of a tunable cannot be removed: {error}");
        }
        lock(&self.replaced).remove(&record.vm);
    }

    /// Lowers the guest's tunable until the result is dropped.
    pub(crate) fn lower<'a>(
        &'a self,
        vm: &str,
        kernel: &'a Kernel,
    ) -> Result<Lowered<'a>, ErrorBody> {
        let failed = |message: String, remedy: &str| refusal(ErrorCode::Failed, message, remedy);
        let uncertain = || {
            failed(
                format!("the tunables of the guest {vm:?} are not known for certain"),
                "use another way, for example --by sysrq",
            )
        };
        let tunables = kernel.tunables().ok_or_else(uncertain)?;
        if tunables.dirty_writeback == 0 || tunables.dirty_expire == EXPIRE_NOW {
            return Err(failed(
                format!(
                    "the guest {vm:?} has vm.dirty_writeback_centisecs = {} and \
                     vm.dirty_expire_centisecs = {}, so that lowering the latter has no effect",
                    tunables.dirty_writeback, tunables.dirty_expire
                ),
                "use another way, for example --by sysrq",
            ));
        }
        let record = Record::new(vm, tunables.dirty_expire);
        // Before the change, so that any later daemon can undo it.
        record.write(&self.folder).map_err(|error| {
            failed(
                format!("the tunable cannot be recorded in {}: {error}", self.folder.display()),
                "nothing was changed; let the daemon write to that folder",
            )
        })?;
        lock(&self.replaced).insert(vm.to_owned(), record.clone());
        if kernel.replace_dirty_expire(tunables.dirty_expire, EXPIRE_NOW).is_err() {
            self.forget(&record);
            return Err(uncertain());
        }
        Ok(Lowered { flusher: self, vm: vm.to_owned(), kernel })
    }
}

fn options_of(guests: &[Placed<GuestOptions>]) -> Vec<GuestOptions> {
    guests.iter().map(|guest| guest.definition.clone()).collect()
}

/// A lowered tunable. Dropping it puts the guest's value back.
pub(crate) struct Lowered<'a> {
    flusher: &'a Flusher,
    vm: String,
    kernel: &'a Kernel,
}

impl Drop for Lowered<'_> {
    fn drop(&mut self) {
        let _ = self.flusher.restore(&self.vm, self.kernel);
    }
}

/// A virtual machine that is being flushed, until this is dropped.
pub(crate) struct Active<'a> {
    flusher: &'a Flusher,
    vm: &'a str,
}

impl Drop for Active<'_> {
    fn drop(&mut self) {
        lock(&self.flusher.active).remove(self.vm);
    }
}

/// Presses the keys of the kernel's emergency sync.
pub(crate) fn press_sysrq(vm: &str, qmp: Option<&Path>) -> Result<(), ErrorBody> {
    let Some(qmp) = qmp else {
        let message = format!("the configuration has no QMP socket of the guest {vm:?}");
        return Err(refusal(ErrorCode::Unsupported, message, "add `qmp` to its [[guest]]"));
    };
    qmp::send_keys(qmp, &["alt", "sysrq", "s"], KEYS_TIME_MAX).map_err(|error| {
        let message = format!("the QMP socket {} of the guest {vm:?}: {error}", qmp.display());
        refusal(ErrorCode::Failed, message, error.remedy())
    })
}
