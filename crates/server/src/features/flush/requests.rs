//! Makes a guest write its dirty data, and observes it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fathom_block::Operation;
use fathom_control::{ErrorBody, ErrorCode, FlushReport, FlushWay};
use fathom_introspect::Kernel;
use fathom_layers::Tap;

use super::restore::Lowered;
use crate::daemon::stack::{self, refusal};
use crate::daemon::stop::{self, Task};
use crate::daemon::{Daemon, Served};
use crate::features::flush::options::GuestOptions;
use crate::features::flush::{Flusher, Inflated, Sync, begin_sync, has_synced, press_sysrq};

/// How long a flush may take.
const FLUSH_TIME_MAX: Duration = Duration::from_secs(30);
/// How long the flush of a disk may take afterwards.
const DISK_FLUSH_TIME_MAX: Duration = Duration::from_secs(20);
/// How long a guest may take to react to the keys.
const REACTION_TIME_MAX: Duration = Duration::from_secs(5);
/// The interval between two samples of the guest's counters.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(2);
/// How long a guest that has flushed must not write, so that the last write is known.
const QUIET_TIME: Duration = Duration::from_millis(100);
/// A guest counts as flushed when at most this much data is dirty, in bytes: programs write a
/// little all the time.
const REST_MAX: u64 = 256 << 10;

/// The counts of a guest and its disks at one time.
#[derive(Clone, Copy)]
struct Sample {
    /// Data that is dirty or being written, in bytes.
    dirty: Option<u64>,
    /// Data that is being written, in bytes.
    writeback: u64,
    /// The number of completed writes on all disks, and their bytes.
    writes: u64,
    written: u64,
}

/// What makes a guest write. Dropping it undoes its changes of the guest.
enum Action<'a> {
    Keys,
    Tunables { _lowered: Lowered<'a> },
    Agent(Sync),
    Balloon(Inflated<'a>),
}

impl Daemon {
    /// Makes the guest of `vm` write its dirty data, waits for it, and makes what it has written
    /// durable: a guest's emergency sync waits for nothing, and lowered tunables make no guest
    /// flush its disks.
    ///
    /// # Errors
    /// If there is no such guest, if the configuration does not allow the way, if the way fails, or
    /// if a disk cannot be flushed in time.
    pub(crate) fn flush_guest(
        self: &Arc<Self>,
        vm: &str,
        by: Option<FlushWay>,
    ) -> Result<FlushReport, ErrorBody> {
        let mut report = self.flush_guest_until(vm, by, &|| false)?;
        if report.is_complete {
            report.time_ns += self.flush_disks(vm)?;
        }
        Ok(report)
    }

    /// Flushes the disks of a virtual machine, all at the same time. Returns how long that took, in
    /// nanoseconds.
    fn flush_disks(&self, vm: &str) -> Result<u64, ErrorBody> {
        let begun = Instant::now();
        let task = |served: Arc<Served>| {
            let name = format!("the flush of the disk {:?}", served.disk.name());
            Task::new(name, move || {
                let flushed = stack::flush(&served.disk, DISK_FLUSH_TIME_MAX);
                flushed.map_err(|error| error.to_string())
            })
        };
        let tasks = self.served_of(vm).into_iter().map(task).collect();
        // A flush that hangs ends by itself a little earlier.
        let problems = stop::run(tasks, begun + DISK_FLUSH_TIME_MAX + Duration::from_secs(1));
        if problems.is_empty() {
            return Ok(begun.elapsed().as_nanos() as u64);
        }
        let message = format!(
            "the guest {vm:?} has written its dirty data, but not all of it is durable: {}",
            problems.join("; ")
        );
        let remedy =
            "`fathom disk info` shows the problems of a disk; flush again when its storage answers";
        Err(refusal(ErrorCode::Failed, message, remedy))
    }

    /// As [`flush_guest`](Self::flush_guest), but ends as soon as `is_disturbed` returns true.
    pub(crate) fn flush_guest_until(
        self: &Arc<Self>,
        vm: &str,
        by: Option<FlushWay>,
        is_disturbed: &dyn Fn() -> bool,
    ) -> Result<FlushReport, ErrorBody> {
        let flusher = self.part::<Flusher>();
        let options = flusher.options(vm).unwrap_or_default();
        if self.served_of(vm).is_empty() {
            return Err(refusal(
                ErrorCode::NotFound,
                format!("there is no disk of the virtual machine {vm:?}"),
                "`fathom disk list` shows the disks with their virtual machines",
            ));
        }
        let by = allowed_way(&options, vm, by)?;
        let active = flusher.begin(vm, by)?;
        let outcome = self.flush_marked(&options, vm, by, is_disturbed);
        drop(active);
        // What could not be given back. A kernel that was found during the flush comes before this.
        self.restore_tunables_of(vm);
        self.begin_balloon_restoration(vm);
        outcome
    }

    /// Refuses to begin a change of a guest that is being migrated.
    fn refuse_if_migrating(&self, vm: &str, by: FlushWay) -> Result<(), ErrorBody> {
        if !changes_guest(by) || !self.is_migrating(vm) {
            return Ok(());
        }
        let message =
            format!("the guest {vm:?} is being migrated, and is not flushed by {by} meanwhile");
        Err(refusal(
            ErrorCode::Conflict,
            message,
            "use another way, or wait for the migration to end",
        ))
    }

    /// Refuses to change anything in a guest once the daemon is shutting down: nothing waits for
    /// the restoration.
    fn refuse_if_stopping(&self) -> Result<(), ErrorBody> {
        let refused = || refusal(ErrorCode::ShuttingDown, "the daemon is shutting down", "");
        if self.is_stopping() { Err(refused()) } else { Ok(()) }
    }

    /// Flushes a guest that is marked.
    fn flush_marked(
        &self,
        options: &GuestOptions,
        vm: &str,
        by: FlushWay,
        is_disturbed: &dyn Fn() -> bool,
    ) -> Result<FlushReport, ErrorBody> {
        // A shutdown waits for guests that were marked before it began, so a guest is marked first.
        self.refuse_if_stopping()?;
        // Left by an earlier flush.
        self.put_tunables_back(vm);
        let kernel = self.kernel_of(vm);
        let (begun, before) = (Instant::now(), self.sample(vm, kernel.as_deref()));
        let mut action = self.begin_flush(options, vm, by, kernel.as_deref(), before.dirty)?;
        let mut report = FlushReport {
            vm: vm.to_owned(),
            by,
            is_complete: false,
            dirty_before_bytes: before.dirty,
            dirty_after_bytes: None,
            written_bytes: 0,
            first_write_ns: None,
            last_write_ns: None,
            time_ns: 0,
        };
        let (mut last, mut has_reacted) = (before, false);
        loop {
            std::thread::sleep(SAMPLE_INTERVAL);
            let (now, elapsed) = (self.sample(vm, kernel.as_deref()), begun.elapsed());
            if now.writes > last.writes {
                let at_ns = elapsed.as_nanos() as u64;
                report.first_write_ns.get_or_insert(at_ns);
                report.last_write_ns = Some(at_ns);
            }
            last = now;
            // The sum falls if a disk is removed meanwhile.
            report.written_bytes = now.written.saturating_sub(before.written);
            let begun_bytes = report.written_bytes.max(now.writeback);
            // A guest also writes a little by itself, such as a journal.
            has_reacted |= begun_bytes > before.dirty.unwrap_or_default() / 10;
            report.dirty_after_bytes = now.dirty;
            report.time_ns = elapsed.as_nanos() as u64;
            let quiet = elapsed
                .saturating_sub(Duration::from_nanos(report.last_write_ns.unwrap_or_default()));
            report.is_complete = match &mut action {
                // `sync` ends when all is written.
                Action::Agent(sync) => has_synced(vm, sync)?,
                _ => is_complete(&report, quiet),
            };
            let is_exhausted =
                matches!(&action, Action::Balloon(inflated) if inflated.is_exhausted(quiet));
            let is_over = report.is_complete || is_exhausted || elapsed > FLUSH_TIME_MAX;
            let has_to_end = changes_guest(by) && self.is_migrating(vm);
            if is_over || has_to_end || is_disturbed() {
                self.part::<Flusher>().count(&report);
                return Ok(report);
            }
            if by == FlushWay::Sysrq && !has_reacted && elapsed > REACTION_TIME_MAX {
                return Err(refusal(
                    ErrorCode::Failed,
                    format!("the guest {vm:?} does not react to the keys"),
                    "it needs a keyboard, and a kernel whose sysctl kernel.sysrq allows sync (16)",
                ));
            }
            self.refuse_if_stopping()?;
            if let Action::Balloon(inflated) = &mut action {
                inflated.advance()?;
            }
        }
    }

    /// Begins to make a guest write `by` this way.
    fn begin_flush<'a>(
        &'a self,
        options: &GuestOptions,
        vm: &'a str,
        by: FlushWay,
        kernel: Option<&Kernel>,
        dirty: Option<u64>,
    ) -> Result<Action<'a>, ErrorBody> {
        let go_on = || self.refuse_if_stopping().and_then(|()| self.refuse_if_migrating(vm, by));
        go_on()?;
        Ok(match (by, kernel) {
            (FlushWay::Sysrq, _) => {
                press_sysrq(vm, options.qmp.as_deref())?;
                Action::Keys
            }
            (FlushWay::Tunables, Some(kernel)) => {
                // First, so that the value is put back whatever happens.
                let lowered = Lowered { daemon: self, vm };
                self.part::<Flusher>().lower(vm, kernel, &go_on)?;
                Action::Tunables { _lowered: lowered }
            }
            (FlushWay::Tunables, None) => {
                return Err(refusal(
                    ErrorCode::Failed,
                    format!("the kernel of the guest {vm:?} is not known"),
                    "`fathom disk info` shows the reason; or use another way",
                ));
            }
            (FlushWay::Agent, _) => Action::Agent(begin_sync(vm, options.agent.as_deref())?),
            (FlushWay::Balloon, _) => {
                Action::Balloon(self.part::<Flusher>().inflate(options, kernel, dirty)?)
            }
        })
    }

    /// The disks of a virtual machine.
    pub(crate) fn served_of(&self, vm: &str) -> Vec<Arc<Served>> {
        let mut served = self.served();
        served.retain(|served| served.disk.vm() == vm);
        served
    }

    fn sample(&self, vm: &str, kernel: Option<&Kernel>) -> Sample {
        let counted = kernel.map(Kernel::dirty_total).unwrap_or_default();
        let dirty = counted.dirty.zip(counted.writeback).map(|(dirty, writing)| dirty + writing);
        let writeback = counted.writeback.unwrap_or_default();
        let mut sample = Sample { dirty, writeback, writes: 0, written: 0 };
        for served in self.served_of(vm) {
            let Some(tap) = served.part::<Tap>() else { continue };
            let counts = tap.counts();
            sample.writes += counts.completed[Operation::Write as usize];
            sample.written += counts.bytes[Operation::Write as usize];
        }
        sample
    }
}

/// Whether a way changes something in a guest until the flush ends.
fn changes_guest(by: FlushWay) -> bool {
    matches!(by, FlushWay::Tunables | FlushWay::Balloon)
}

/// The way to flush a guest with these options.
fn allowed_way(
    options: &GuestOptions,
    vm: &str,
    by: Option<FlushWay>,
) -> Result<FlushWay, ErrorBody> {
    let allowed = by.filter(|way| options.flush.contains(way));
    let first = by.is_none().then(|| options.flush.first().copied()).flatten();
    allowed.or(first).ok_or_else(|| {
        let way = by.map_or(String::new(), |way| format!(" by {way}"));
        let example = by.unwrap_or(FlushWay::Tunables);
        refusal(
            ErrorCode::Unsupported,
            format!("the configuration does not allow flushing the guest {vm:?}{way}"),
            format!(
                "add a table [[guest]] with `vm = {vm:?}` and `flush = [\"{example}\"]` to it, and \
                 reload"
            ),
        )
    })
}

/// Whether a guest has written what was dirty at the beginning, and `quiet` is long enough to know
/// its last write.
fn is_complete(report: &FlushReport, quiet: Duration) -> bool {
    let (Some(before), Some(after)) = (report.dirty_before_bytes, report.dirty_after_bytes) else {
        return report.first_write_ns.is_some() && quiet > QUIET_TIME * 10;
    };
    let rest = (before / 50).max(REST_MAX).min(before / 2);
    after <= rest && quiet > QUIET_TIME || before > 0 && report.written_bytes >= before * 2
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(before: Option<u64>, after: Option<u64>, written: u64) -> FlushReport {
        FlushReport {
            vm: "web".into(),
            by: FlushWay::Sysrq,
            is_complete: false,
            dirty_before_bytes: before,
            dirty_after_bytes: after,
            written_bytes: written,
            first_write_ns: (written > 0).then_some(1),
            last_write_ns: (written > 0).then_some(1),
            time_ns: 2,
        }
    }

    #[test]
    fn a_flush_is_complete_when_the_dirty_data_was_written() {
        const MIB: u64 = 1 << 20;
        let complete = |before, after, written, quiet_ms| {
            is_complete(&report(before, after, written), Duration::from_millis(quiet_ms))
        };
        let (before, quiet) = (Some(100 * MIB), 101);
        assert!(complete(before, Some(2 * MIB), 98 * MIB, quiet));
        assert!(!complete(before, Some(2 * MIB), 98 * MIB, 50), "it still writes");
        assert!(!complete(before, Some(3 * MIB), 97 * MIB, quiet));
        // New data is dirty all the time.
        assert!(!complete(before, Some(100 * MIB), 199 * MIB, 0));
        assert!(complete(before, Some(100 * MIB), 200 * MIB, 0));
        // Little data: half of it at least.
        assert!(!complete(Some(MIB / 4), Some(MIB / 4), 0, quiet));
        assert!(complete(Some(MIB / 4), Some(MIB / 8), MIB / 8, quiet));
        assert!(complete(Some(0), Some(0), 0, quiet), "nothing was dirty");
        assert!(!complete(None, None, 0, 2000), "the guest has not reacted");
        assert!(complete(None, None, MIB, 1001));
    }

    #[test]
    fn only_configured_ways_are_allowed() {
        let options =
            |flush: &[FlushWay]| GuestOptions { flush: flush.to_vec(), ..GuestOptions::default() };
        let both = options(&[FlushWay::Tunables, FlushWay::Sysrq]);
        assert_eq!(allowed_way(&both, "web", None), Ok(FlushWay::Tunables));
        assert_eq!(allowed_way(&both, "web", Some(FlushWay::Sysrq)), Ok(FlushWay::Sysrq));
        for (options, by) in
            [(options(&[]), None), (options(&[FlushWay::Sysrq]), Some(FlushWay::Tunables))]
        {
            let refused = allowed_way(&options, "web", by).unwrap_err();
            assert_eq!(refused.code, ErrorCode::Unsupported);
            assert!(refused.remedy.contains("tunables"), "{refused:?}");
        }
    }
}
