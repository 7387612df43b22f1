//! Makes guests write their dirty data, as the configuration allows.
//!
//! - `qmp`: QEMU's machine protocol, which sends keys to a guest.
//! - `balloon`: takes memory from a guest.
//! - `agent`: runs `sync` by the guest agent.
//! - `freeze`: freezes file systems by the guest agent while snapshots are taken, and thaws them.
//! - `marks`: which guests are being flushed.
//! - `restorers`: which guests have to be given their memory again, or be thawed, by a few threads.
//! - `record`: remembers a changed value of a guest, so that it is put back even by the next
//!   daemon.
//!
//! The paper: *Design Choices for Utilizing Disk Idleness in a Virtual Machine Environment*
//! (Elango, Krishnakumaran, Arpaci-Dusseau), sections 3.3.2, 3.3.4 and 4.5.

mod agent;
mod balloon;
pub(crate) mod feature;
pub(crate) mod freeze;
mod fuzz;
pub(crate) mod idle;
mod marks;
mod metrics;
pub(crate) mod options;
#[cfg(test)]
mod peer;
mod qmp;
mod record;
pub(crate) mod requests;
pub(crate) mod restore;
mod restorers;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fathom_control::{ErrorBody, ErrorCode, FlushReport, FlushWay};
use fathom_introspect::{Kernel, TunableError};
use parking_lot::{Mutex, RwLock};

use crate::configuration::Placed;
use crate::daemon::stack::refusal;
use crate::features::flush::options::GuestOptions;
use crate::process::line::PeerError;
use balloon::{Balloon, Steps};
use marks::{Active, Busy, Marks};
use record::{Kind, Own, Record, Records};
use restorers::{Restoration, Restorers};

pub(crate) use agent::Sync;
pub use fuzz::fuzz_flush;

/// How long QEMU may take to accept the keys, and the agent to begin.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(3);
/// The interval at which a shutdown checks whether flushes have ended.
const CHECK_INTERVAL: Duration = Duration::from_millis(2);
/// The `vm.dirty_expire_centisecs` of a guest during a flush, in centiseconds. The value is not 0,
/// which an administrator might choose.
const EXPIRE_NOW: u32 = 1;
/// How long a guest with its least memory must not write, so that the balloon has no further
/// effect. The interval of its periodic write-back is added: its kernel checks the limits of dirty
/// data then.
const EXHAUSTED_TIME: Duration = Duration::from_secs(2);
/// The interval of periodic write-back of a guest whose tunables are not known: the default of
/// Linux.
const WRITEBACK_INTERVAL: Duration = Duration::from_secs(5);
/// How long a shutdown waits until the tunables are put back and the memory is given back.
const RESTORE_TIME_MAX: Duration = Duration::from_secs(4);
const _: () = assert!(RESTORE_TIME_MAX.as_secs() > balloon::COMMAND_TIME_MAX.as_secs());

/// The state of all flushes.
pub(crate) struct Flusher {
    guests: RwLock<Vec<GuestOptions>>,
    marks: Marks,
    restorers: Mutex<Restorers>,
    thawers: Mutex<Restorers>,
    records: Records,
    /// Values that are not yet put back.
    replaced: Mutex<BTreeMap<(Kind, String), Record>>,
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
    /// Reads the records in `folder` of the daemon with the control socket `control`.
    pub(crate) fn new(guests: &[Placed<GuestOptions>], folder: PathBuf, control: &Path) -> Self {
        let records = Records::new(folder, control);
        let replaced = records.read_all().into_iter().map(|it| (it.key(), it)).collect();
        Self {
            guests: RwLock::new(options_of(guests)),
            marks: Marks::default(),
            restorers: Mutex::default(),
            thawers: Mutex::default(),
            counts: Mutex::default(),
            replaced: Mutex::new(replaced),
            records,
        }
    }

    /// Sets the options of all guests. Returns whether they have changed.
    pub(crate) fn set(&self, guests: &[Placed<GuestOptions>]) -> bool {
        let new = options_of(guests);
        let mut guests = self.guests.write();
        let differs = *guests != new;
        *guests = new;
        differs
    }

    /// The options of the guest of `vm`.
    pub(crate) fn options(&self, vm: &str) -> Option<GuestOptions> {
        let guests = self.guests.read();
        guests.iter().find(|guest| guest.vm == vm).cloned()
    }

    /// Marks the guest of `vm` as being flushed `by` this way, until the result is dropped.
    ///
    /// # Errors
    /// If it already is, or if its memory is being given back and the way is to take it.
    pub(crate) fn begin<'a>(&'a self, vm: &'a str, by: FlushWay) -> Result<Active<'a>, ErrorBody> {
        self.marks.flush(vm, by).map_err(|busy| {
            let (message, remedy) = match busy {
                Busy::Flushing => (
                    format!("the guest {vm:?} is already being flushed"),
                    "wait for the flush to end",
                ),
                Busy::Restoring => (
                    format!("the memory of the guest {vm:?} is being given back"),
                    "try again in some seconds, or use another way",
                ),
            };
            refusal(ErrorCode::Conflict, message, remedy)
        })
    }

    /// Waits until no guest is being flushed; the flushes end early during a shutdown. Restorations
    /// of an earlier flush may go on: their records stay.
    pub(crate) fn end(&self) {
        let end = Instant::now() + RESTORE_TIME_MAX;
        while self.marks.is_flushing() && Instant::now() < end {
            std::thread::sleep(CHECK_INTERVAL);
        }
    }

    /// The guests that are made to flush while their devices are idle.
    pub(crate) fn idle_guests(&self) -> Vec<GuestOptions> {
        let guests = self.guests.read();
        guests.iter().filter(|guest| guest.flush_when_idle).cloned().collect()
    }

    /// Counts a flush that has ended.
    pub(crate) fn count(&self, report: &FlushReport) {
        let mut counts = self.counts.lock();
        let counts = counts.entry(report.vm.clone()).or_default();
        counts.flushes += 1;
        counts.written_bytes += report.written_bytes;
        counts.incomplete += u64::from(!report.is_complete);
    }

    /// The counts by virtual machine.
    pub(crate) fn counts(&self) -> BTreeMap<String, FlushCounts> {
        self.counts.lock().clone()
    }

    /// Whether the tunables of the guest of `vm` have to be put back.
    pub(crate) fn has_tunables(&self, vm: &str) -> bool {
        self.replaced(Kind::Tunables, vm).is_some()
    }

    /// The virtual machines whose tunables have to be put back.
    pub(crate) fn tunables(&self) -> Vec<String> {
        self.all_replaced(Kind::Tunables)
    }

    /// The virtual machines whose balloon has to be put back.
    pub(crate) fn balloons(&self) -> Vec<String> {
        self.all_replaced(Kind::Balloon)
    }

    /// The virtual machines whose file systems may be frozen.
    pub(crate) fn frozen(&self) -> Vec<String> {
        self.all_replaced(Kind::Frozen)
    }

    fn all_replaced(&self, wanted: Kind) -> Vec<String> {
        let replaced = self.replaced.lock();
        let found = replaced.keys().filter(|(kind, _)| *kind == wanted);
        found.map(|(_, vm)| vm.clone()).collect()
    }

    fn replaced(&self, kind: Kind, vm: &str) -> Option<Record> {
        self.replaced.lock().get(&(kind, vm.to_owned())).cloned()
    }

    /// Puts the tunable of the guest of `vm` back, if it is replaced. `kernel` is the guest's
    /// kernel. Returns whether the guest's value was written.
    pub(crate) fn restore(&self, vm: &str, kernel: &Kernel) -> bool {
        let Some(record) = self.replaced(Kind::Tunables, vm) else { return false };
        let Own::DirtyExpire(own) = record.own else { return false };
        let restored = kernel.replace_dirty_expire(EXPIRE_NOW, own);
        // With another value, the guest has booted again, or its administrator has set the value.
        if restored != Err(TunableError::Unknown) {
            self.forget(&record);
        }
        restored.is_ok()
    }

    /// Remembers a guest's own value durably, before it is changed: so any later daemon can put it
    /// back.
    fn remember(&self, record: &Record) -> Result<(), ErrorBody> {
        self.records.write(record).map_err(|error| {
            refusal(
                ErrorCode::Failed,
                format!(
                    "the guest's own value cannot be recorded in {}: {error}",
                    self.records.folder().display()
                ),
                "nothing was changed; let the daemon write to that folder",
            )
        })?;
        self.replaced.lock().insert(record.key(), record.clone());
        Ok(())
    }

    /// Removes a record whose value needs no restoration, unless there is another one by now.
    fn forget(&self, record: &Record) {
        let mut replaced = self.replaced.lock();
        if replaced.get(&record.key()) != Some(record) {
            return;
        }
        if let Err(error) = self.records.remove(record) {
            tracing::warn!(vm = record.vm, "the record of a flush cannot be removed: {error}");
        }
        replaced.remove(&record.key());
    }

    /// The guests that have to be given something of this kind, and the threads that do it.
    fn restorers(&self, kind: Kind) -> &Mutex<Restorers> {
        if kind == Kind::Frozen { &self.thawers } else { &self.restorers }
    }

    /// Has the guest of `vm` be given its memory, or thawed, if it is not yet. Returns whether a
    /// thread has to be started for that. It counts as started.
    fn begin_restorer(&self, kind: Kind, vm: &str) -> bool {
        let mut restorers = self.restorers(kind).lock();
        self.replaced(kind, vm).is_some() && restorers.begin(vm, Instant::now())
    }

    /// What a thread that gives guests their memory, or thaws them, does next.
    fn next_restoration(&self, kind: Kind) -> Restoration {
        self.restorers(kind).lock().next(Instant::now())
    }

    /// An attempt to give the guest of `vm` its memory, or to thaw it, has ended. If that is not
    /// done, it is tried again later.
    fn end_restoration(&self, kind: Kind, vm: &str) {
        // Locked during the question, so that a record of a flush that ends now is not forgotten.
        let mut restorers = self.restorers(kind).lock();
        let is_done = self.replaced(kind, vm).is_none();
        restorers.end(vm, is_done, Instant::now());
    }

    /// Notes that a thread could not be started.
    fn forget_restorer(&self, kind: Kind) {
        self.restorers(kind).lock().not_started();
    }

    /// Gives the guest of `vm` its memory again, which an earlier flush has taken. Returns whether
    /// it was given back; otherwise there is nothing to give, or it is not possible now.
    pub(crate) fn restore_balloon(&self, vm: &str) -> bool {
        let Some(_restoring) = self.marks.restore(vm) else { return false };
        let Some(record) = self.replaced(Kind::Balloon, vm) else { return false };
        let Some(qmp) = self.options(vm).and_then(|options| options.qmp) else { return false };
        let Ok(mut balloon) = Balloon::open(&qmp) else { return false };
        self.deflate(&record, &mut balloon).is_ok()
    }

    /// Gives a guest its own memory. The order is given even if the guest has it: what QEMU shows
    /// is what the guest has reported, and it may follow an earlier order later. A guest that has
    /// more has started again, and keeps it.
    fn deflate(&self, record: &Record, balloon: &mut Balloon) -> Result<(), PeerError> {
        if let Own::MemoryBytes(own) = record.own {
            let memory = balloon.memory()?;
            balloon.set(own.max(memory))?;
        }
        self.forget(record);
        Ok(())
    }

    /// Takes memory from the guest of `vm`, of which `dirty` bytes are dirty, until the result is
    /// dropped.
    pub(crate) fn inflate<'a>(
        &'a self,
        options: &GuestOptions,
        kernel: Option<&Kernel>,
        dirty: Option<u64>,
    ) -> Result<Inflated<'a>, ErrorBody> {
        let vm = &options.vm;
        let dirty = dirty.ok_or_else(|| {
            refusal(
                ErrorCode::Failed,
                format!("it is not known how much data of the guest {vm:?} is dirty"),
                "`fathom disk info` shows the reason; or use another way",
            )
        })?;
        let qmp = qmp_of(vm, options.qmp.as_deref())?;
        let failed = |error: PeerError| {
            let message = format!("the QMP socket {} of the guest {vm:?}: {error}", qmp.display());
            refusal(ErrorCode::Failed, message, qmp::remedy(&error))
        };
        let mut balloon = Balloon::open(qmp).map_err(failed)?;
        let mut own = balloon.memory().map_err(failed)?;
        let mut is_changed = false;
        if let Some(Record { own: Own::MemoryBytes(earlier), .. }) =
            self.replaced(Kind::Balloon, vm)
        {
            // An earlier restoration has failed.
            own = own.max(earlier);
            is_changed = true;
        }
        let floor = options.balloon_floor.map_or(own, |floor| floor.0);
        if own <= floor {
            return Err(refusal(
                ErrorCode::Failed,
                format!(
                    "the guest {vm:?} has {own} bytes of memory, not more than its `balloon_floor`"
                ),
                "use another way, or lower `balloon_floor`",
            ));
        }
        let record = Record::new(vm, Own::MemoryBytes(own));
        self.remember(&record)?;
        let steps = Steps::new(own, dirty, floor);
        let exhausted_time = EXHAUSTED_TIME + writeback_interval(kernel);
        Ok(Inflated { flusher: self, record, own, is_changed, balloon, steps, exhausted_time })
    }

    /// Lowers the guest's tunable until it is [restored](Self::restore), unless `go_on` refuses it
    /// at the last moment.
    pub(crate) fn lower(
        &self,
        vm: &str,
        kernel: &Kernel,
        go_on: &dyn Fn() -> Result<(), ErrorBody>,
    ) -> Result<(), ErrorBody> {
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
        let record = Record::new(vm, Own::DirtyExpire(tunables.dirty_expire));
        self.remember(&record)?;
        let lowered = go_on().and_then(|()| {
            let replaced = kernel.replace_dirty_expire(tunables.dirty_expire, EXPIRE_NOW);
            replaced.map_err(|_| uncertain())
        });
        if let Err(error) = lowered {
            self.forget(&record);
            return Err(error);
        }
        Ok(())
    }
}

fn options_of(guests: &[Placed<GuestOptions>]) -> Vec<GuestOptions> {
    guests.iter().map(|guest| guest.definition.clone()).collect()
}

/// After which time at most the guest's kernel looks for dirty data to write.
fn writeback_interval(kernel: Option<&Kernel>) -> Duration {
    let tunables = kernel.and_then(Kernel::tunables);
    tunables.map_or(WRITEBACK_INTERVAL, |tunables| {
        Duration::from_millis(u64::from(tunables.dirty_writeback) * 10)
    })
}

/// A guest from which memory is taken. Dropping it gives the memory back.
pub(crate) struct Inflated<'a> {
    flusher: &'a Flusher,
    record: Record,
    /// The guest's own memory, in bytes.
    own: u64,
    /// Whether the order that QEMU has may be another one.
    is_changed: bool,
    balloon: Balloon,
    steps: Steps,
    exhausted_time: Duration,
}

impl Inflated<'_> {
    /// Whether nothing more is to be expected: the guest has had its least memory for a while, and
    /// has not written for the time `quiet`.
    pub(crate) fn is_exhausted(&self, quiet: Duration) -> bool {
        let at_floor = self.steps.at_floor(Instant::now());
        at_floor.is_some_and(|time| time.min(quiet) > self.exhausted_time)
    }

    /// Takes more memory, if it is time to.
    pub(crate) fn advance(&mut self) -> Result<(), ErrorBody> {
        let Some(bytes) = self.steps.next(Instant::now()) else { return Ok(()) };
        self.is_changed = true;
        self.balloon.set(bytes).map_err(|error| {
            let message = format!("the balloon of the guest {:?}: {error}", self.record.vm);
            refusal(ErrorCode::Failed, message, qmp::remedy(&error))
        })
    }
}

impl Drop for Inflated<'_> {
    fn drop(&mut self) {
        // Without a question for the guest's memory: the guest may not have followed the last order
        // yet.
        let restored = if self.is_changed { self.balloon.set(self.own) } else { Ok(()) };
        match restored {
            Ok(()) => self.flusher.forget(&self.record),
            Err(error) => tracing::warn!(
                vm = self.record.vm,
                "the guest's memory cannot be given back now: {error}; the daemon tries again"
            ),
        }
    }
}

/// Presses the keys of the kernel's emergency sync.
pub(crate) fn press_sysrq(vm: &str, qmp: Option<&Path>) -> Result<(), ErrorBody> {
    let qmp = qmp_of(vm, qmp)?;
    qmp::send_keys(qmp, &["alt", "sysrq", "s"], ANSWER_TIME_MAX).map_err(|error| {
        let message = format!("the QMP socket {} of the guest {vm:?}: {error}", qmp.display());
        refusal(ErrorCode::Failed, message, qmp::remedy(&error))
    })
}

fn qmp_of<'a>(vm: &str, qmp: Option<&'a Path>) -> Result<&'a Path, ErrorBody> {
    qmp.ok_or_else(|| {
        let message = format!("the configuration has no QMP socket of the guest {vm:?}");
        refusal(ErrorCode::Unsupported, message, "add `qmp` to its [[guest]]")
    })
}

/// Makes the guest agent run `sync`.
pub(crate) fn begin_sync(vm: &str, socket: Option<&Path>) -> Result<Sync, ErrorBody> {
    let Some(socket) = socket else {
        let message = format!("the configuration has no agent of the guest {vm:?}");
        return Err(refusal(ErrorCode::Unsupported, message, "add `agent` to its [[guest]]"));
    };
    agent::begin_sync(socket, ANSWER_TIME_MAX).map_err(|error| {
        let message =
            format!("the agent's socket {} of the guest {vm:?}: {error}", socket.display());
        refusal(ErrorCode::Failed, message, agent::remedy(&error))
    })
}

/// Whether `sync` in the guest of `vm` has ended.
pub(crate) fn has_synced(vm: &str, sync: &mut Sync) -> Result<bool, ErrorBody> {
    sync.poll().map_err(|error| {
        let message = format!("the agent of the guest {vm:?}: {error}");
        refusal(ErrorCode::Failed, message, agent::remedy(&error))
    })
}
