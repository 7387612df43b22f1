//! Freezes the file systems of guests by their agents while a snapshot is taken.
//!
//! Each guest has a thread: it freezes when the agents of all guests have answered, waits until the
//! snapshot is taken, and thaws. Whatever the agents do, each wait has an end, and the guests are
//! thawed when their time is over, also while the snapshot is still being taken: then it is not
//! known whether it was taken in time.
//!
//! A record says that a guest is frozen, from before the command until the agent has confirmed the
//! thaw. As long as there is one, threads try to thaw the guest, also those of the next daemon.

use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use fathom_control::{ErrorBody, ErrorCode, FlushWay};
use parking_lot::{Condvar, Mutex};
use serde_json::{Value, json};

use super::agent::synchronize;
use super::record::{Kind, Own, Record};
use super::{ANSWER_TIME_MAX, Flusher};
use crate::daemon::stack::refusal;
use crate::daemon::status::unix_time_s;
use crate::process::line::{LineStream, PeerError};

/// The interval between looks for an answer, and for the end of the daemon.
const CHECK_INTERVAL: Duration = Duration::from_millis(5);

/// A guest that is to be frozen.
#[derive(Clone, Debug)]
pub(crate) struct FreezeGuest {
    /// The virtual machine.
    pub(crate) vm: String,
    /// The socket of its agent.
    pub(crate) agent: PathBuf,
    /// How long it may be frozen.
    pub(crate) time_max: Duration,
}

/// What became of a snapshot with frozen guests.
pub(crate) struct FreezeOutcome<T> {
    /// The result of the snapshot, if it was tried.
    pub(crate) taken: Option<T>,
    /// Why guests were not frozen until it was taken.
    pub(crate) failures: Vec<ErrorBody>,
}

/// What the threads of the guests and that of the snapshot know of each other.
struct Group<'a> {
    count: usize,
    /// Whether guests that can be frozen are, although others cannot.
    is_partial: bool,
    is_stopping: &'a (dyn Fn() -> bool + Sync),
    state: Mutex<GroupState>,
    changed: Condvar,
}

#[derive(Default)]
struct GroupState {
    /// The guests whose agents have answered.
    prepared: usize,
    /// Those that were frozen.
    frozen: usize,
    failures: Vec<ErrorBody>,
    /// Whether the snapshot is taken, or will not be.
    is_over: bool,
}

impl Group<'_> {
    fn change(&self, change: impl FnOnce(&mut GroupState)) {
        change(&mut self.state.lock());
        self.changed.notify_all();
    }

    /// Waits until `is_met`, or `end`, or the daemon ends. Returns whether it is met.
    fn wait(&self, end: Option<Instant>, is_met: impl Fn(&GroupState) -> bool) -> bool {
        let mut state = self.state.lock();
        while !is_met(&state) {
            if end.is_some_and(|end| Instant::now() >= end) || (self.is_stopping)() {
                return false;
            }
            self.changed.wait_for(&mut state, CHECK_INTERVAL);
        }
        true
    }

    /// Whether each guest is at a stage of which `reached` is the number.
    fn is_complete(&self, state: &GroupState, reached: usize) -> bool {
        let has_failed = !self.is_partial && !state.failures.is_empty();
        has_failed || state.is_over || reached + state.failures.len() >= self.count
    }

    /// Whether no guest has to be frozen any more.
    fn is_given_up(&self) -> bool {
        let state = self.state.lock();
        let has_failed = !self.is_partial && !state.failures.is_empty();
        has_failed || state.is_over || (self.is_stopping)()
    }

    fn fail(&self, error: ErrorBody) {
        self.change(|state| state.failures.push(error));
    }
}

impl Flusher {
    /// Calls `take` while the file systems of `guests` are frozen. If one cannot be frozen, `take`
    /// is only called with `is_partial`. The guests are thawed when the call returns, or threads go
    /// on trying that: those of which [`frozen`](Self::frozen) has the names then.
    ///
    /// If the result has failures although `take` was called, these guests were not frozen until it
    /// had ended.
    pub(crate) fn with_frozen<T>(
        &self,
        guests: &[FreezeGuest],
        is_partial: bool,
        is_stopping: &(dyn Fn() -> bool + Sync),
        take: impl FnOnce() -> T,
    ) -> FreezeOutcome<T> {
        let group = Group {
            count: guests.len(),
            is_partial,
            is_stopping,
            state: Mutex::default(),
            changed: Condvar::new(),
        };
        let taken = thread::scope(|scope| {
            for guest in guests {
                let body = || {
                    if let Err(error) = self.freeze_one(guest, &group) {
                        group.fail(error);
                    }
                };
                let begun = thread::Builder::new().name("freeze".into()).spawn_scoped(scope, body);
                if let Err(error) = begun {
                    let message = format!("a thread cannot be started: {error}");
                    group.fail(refusal(ErrorCode::Failed, message, "try again"));
                }
            }
            let is_ready = group.wait(None, |state| group.is_complete(state, state.frozen));
            let may_take = is_ready && (is_partial || group.state.lock().failures.is_empty());
            let taken = may_take.then(take);
            // A guest that is not among the failures by then was frozen until here.
            group.change(|state| state.is_over = true);
            taken
        });
        FreezeOutcome { taken, failures: group.state.into_inner().failures }
    }

    /// Freezes a guest until the snapshot is taken.
    fn freeze_one(&self, guest: &FreezeGuest, group: &Group<'_>) -> Result<(), ErrorBody> {
        let _active = self.begin(&guest.vm, FlushWay::Agent)?;
        let mut line = prepare(guest).map_err(|error| failed(guest, &error))?;
        group.change(|state| state.prepared += 1);
        if !group.wait(None, |state| group.is_complete(state, state.prepared)) {
            return Err(ends());
        }
        if group.is_given_up() {
            return Ok(());
        }
        let record = Record::new(&guest.vm, Own::FrozenAt(unix_time_s()));
        self.remember(&record)?;
        let end = Instant::now() + guest.time_max;
        let kept = match freeze(&mut line, end, || group.is_given_up()) {
            Ok(()) => {
                keep_frozen(guest, group, end);
                Ok(())
            }
            Err(_) if group.is_given_up() => Ok(()),
            Err(error) => Err(failed(guest, &error)),
        };
        match thaw(&mut line, Instant::now() + ANSWER_TIME_MAX) {
            Ok(()) => self.forget(&record),
            Err(error) => tracing::warn!(
                vm = guest.vm,
                "the guest has not confirmed that its file systems are thawed: {error}; the daemon \
                 tries again"
            ),
        }
        kept
    }

    /// Thaws the guest of `vm`, which was frozen by an earlier snapshot. Returns whether the agent
    /// has confirmed it.
    pub(super) fn thaw_again(&self, vm: &str) -> bool {
        let Ok(_active) = self.marks.flush(vm, FlushWay::Agent) else { return false };
        let Some(record) = self.replaced(Kind::Frozen, vm) else { return false };
        let Some(agent) = self.options(vm).and_then(|options| options.agent) else { return false };
        let end = Instant::now() + ANSWER_TIME_MAX;
        let thawed = LineStream::open(&agent, end).and_then(|mut line| thaw(&mut line, end));
        if thawed.is_ok() {
            self.forget(&record);
        }
        thawed.is_ok()
    }

    /// The virtual machines whose guests may be frozen although no snapshot is being taken.
    pub(crate) fn left_frozen(&self) -> Vec<String> {
        let thawers = self.thawers.lock();
        self.frozen().into_iter().filter(|vm| thawers.has(vm)).collect()
    }

    /// The problem of such a guest, and its remedy.
    pub(crate) fn frozen_problem(&self, vm: &str) -> (String, String) {
        let message = format!(
            "the file systems of the guest {vm:?} were frozen for a snapshot, and its agent has not \
             confirmed that they are thawed: programs in it may wait"
        );
        let path = self.records.path_of(&Record::new(vm, Own::FrozenAt(0)));
        let remedy = format!(
            "start the agent in the guest, or use `fsfreeze --unfreeze` there: the daemon tries again \
             every second; if there is no such guest any more, stop the daemon and delete {}",
            path.display()
        );
        (message, remedy)
    }
}

/// Waits until the snapshot is taken, or the guest has to be thawed before.
fn keep_frozen(guest: &FreezeGuest, group: &Group<'_>, end: Instant) {
    group.change(|state| state.frozen += 1);
    group.wait(Some(end), |state| state.is_over);
    let mut state = group.state.lock();
    if !state.is_over {
        // Noted before the thaw, and read after the snapshot.
        state.frozen -= 1;
        let error = if (group.is_stopping)() { ends() } else { expired(guest) };
        state.failures.push(error);
    }
}

fn failed(guest: &FreezeGuest, error: &PeerError) -> ErrorBody {
    let FreezeGuest { vm, agent, .. } = guest;
    let message = format!("the agent's socket {} of the guest {vm:?}: {error}", agent.display());
    refusal(ErrorCode::Failed, message, remedy(error))
}

/// What the operator can do after an error.
fn remedy(error: &PeerError) -> &'static str {
    match error {
        PeerError::Refused(_) => {
            "let the agent run `guest-fsfreeze-freeze`, -thaw and -status (its option --block-rpcs, \
             or --allow-rpcs), and see its log"
        }
        other => super::agent::remedy(other),
    }
}

fn expired(guest: &FreezeGuest) -> ErrorBody {
    refusal(
        ErrorCode::Failed,
        format!(
            "the guest {:?} was thawed before the snapshot was taken, after {} ms",
            guest.vm,
            guest.time_max.as_millis()
        ),
        "try again when the pool's device is less busy",
    )
}

fn ends() -> ErrorBody {
    refusal(ErrorCode::ShuttingDown, "the daemon is shutting down", "")
}

/// Connects to an agent whose guest is not frozen.
fn prepare(guest: &FreezeGuest) -> Result<LineStream, PeerError> {
    let end = Instant::now() + ANSWER_TIME_MAX;
    let mut line = LineStream::open(&guest.agent, end)?;
    synchronize(&mut line, end)?;
    if !is_thawed(&mut line, end)? {
        return Err(PeerError::Refused("the file systems are frozen already".into()));
    }
    Ok(line)
}

fn is_thawed(line: &mut LineStream, end: Instant) -> Result<bool, PeerError> {
    line.send(b"", &json!({ "execute": "guest-fsfreeze-status" }), end)?;
    match line.result(None, end)?.as_str() {
        Some("thawed") => Ok(true),
        Some("frozen") => Ok(false),
        _ => Err(PeerError::Foreign),
    }
}

/// Freezes all file systems by `end`.
fn freeze(
    line: &mut LineStream,
    end: Instant,
    is_given_up: impl Fn() -> bool,
) -> Result<(), PeerError> {
    line.send(b"", &json!({ "execute": "guest-fsfreeze-freeze" }), end)?;
    loop {
        if let Some(result) = line.available_result()? {
            return match result.as_u64() {
                Some(0) => Err(PeerError::Refused("the guest has no such file system".into())),
                Some(_) => Ok(()),
                None => Err(PeerError::Foreign),
            };
        }
        if Instant::now() >= end || is_given_up() {
            return Err(PeerError::Busy);
        }
        thread::sleep(CHECK_INTERVAL);
    }
}

/// Thaws all file systems by `end`. An agent carries out one command after the other: a freeze that
/// it is still busy with has ended when it confirms the thaw.
fn thaw(line: &mut LineStream, end: Instant) -> Result<(), PeerError> {
    let command = json!({ "execute": "guest-fsfreeze-thaw" });
    // At once, because the agent may be hanging in the freeze; and again for an answer that is
    // known to be that of the thaw.
    line.send(b"", &command, end)?;
    synchronize(line, end)?;
    line.send(b"", &command, end)?;
    match line.result(None, end) {
        Ok(Value::Number(_)) => Ok(()),
        Ok(_) => Err(PeerError::Foreign),
        // It has nothing to thaw.
        Err(PeerError::Refused(_)) if is_thawed(line, end)? => Ok(()),
        Err(error) => Err(error),
    }
}
