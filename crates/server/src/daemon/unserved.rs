//! The disks of the configuration that are not served, and the attempts to serve them.
//!
//! Opening a disk waits for its storage, which may hang, so each such disk has a thread: a hung
//! image, store or log delays no other disk. The thread tries at once, and again after growing
//! pauses: a lock is released, a device, a share or a server comes, somebody repairs an image.
//! `fathom disk retry` and a reload make it try at once.
//!
//! | state | becomes | when |
//! |---|---|---|
//! | opening | served | the attempt succeeds |
//! | opening | refused | the attempt fails; the reason and a remedy are known |
//! | refused | opening | the pause is over, or somebody asks |
//! | opening, refused | forgotten | the disk leaves the configuration or gets another definition there |
//!
//! An attempt for a disk that is forgotten meanwhile serves nothing. What an operator decides about
//! the disk's log is carried out by the same thread, between two attempts (the feature `log` makes
//! it).

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock, Weak};
use std::thread;
use std::time::{Duration, Instant};

use fathom_control::{DiskDefinition, DiskStatus, Done, ErrorBody, ErrorCode, UnservedDisk};
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::changes::stopping;
use super::{Daemon, unix_time_ns};
use crate::configuration::{Origin, Origins, check_disk};
use crate::daemon::stack::{invalid, refusal};

/// The pause after the first attempt that fails; each further one is longer by half.
const PAUSE: Duration = Duration::from_secs(1);
/// The pause after an attempt that was not made because somebody writes the image.
const PAUSE_WRITTEN: Duration = Duration::from_secs(2);
/// The longest pause between two attempts.
const PAUSE_MAX: Duration = Duration::from_secs(10);
/// How long `fathom disk retry` waits for the attempt.
const RETRY_TIME_MAX: Duration = Duration::from_secs(20);
/// The time after which an attempt in progress is a problem.
const OPENING_TIME_MAX: Duration = Duration::from_secs(5);

/// What the thread of a disk that is not served does before its next attempt, with that attempt's
/// ticket.
pub(crate) type Decision = Box<dyn FnOnce(&Daemon, &DiskDefinition, Ticket) + Send>;

/// The disks that are not served.
#[derive(Default)]
pub(crate) struct Unserved {
    daemon: OnceLock<Weak<Daemon>>,
    table: Mutex<Table>,
    /// Notified when an attempt has ended, or a disk is forgotten.
    ended: Condvar,
}

#[derive(Default)]
struct Table {
    disks: BTreeMap<String, Candidate>,
    /// The numbers of disks that are served, but not yet offered to all clients.
    finishing: BTreeSet<u64>,
    is_stopping: bool,
}

/// A disk that is not served.
struct Candidate {
    definition: DiskDefinition,
    /// Tells it from earlier and later ones of the same name.
    number: u64,
    since_unix_time_ns: u64,
    /// When the attempt in progress began.
    begun: Option<Instant>,
    /// The number of attempts that failed.
    attempts: u64,
    /// Whether the next attempt is to begin at once.
    is_asked: bool,
    /// Whether it has a thread that makes the attempts.
    has_thread: bool,
    /// Why the last attempt failed.
    refused: Option<ErrorBody>,
    /// What is to become of its log before the next attempt.
    decision: Option<Decision>,
    /// Ends the pause of its thread.
    wake: Arc<Condvar>,
}

/// A disk that is to be served.
#[derive(Clone)]
pub(crate) struct Ticket {
    name: String,
    number: u64,
    /// The number of failed attempts after which the outcome counts.
    attempts: u64,
}

/// What has become of a disk that is to be served.
pub(crate) enum ServingOutcome {
    /// It is served, or the configuration no longer has it.
    Gone,
    /// The attempt failed.
    Refused(ErrorBody),
    /// The attempt has not ended.
    Opening,
}

/// What shows whether somebody writes to a regular file.
#[derive(PartialEq, Eq)]
struct Stamp {
    file: (u64, u64),
    length: u64,
    modified: (i64, i64),
}

impl Stamp {
    /// That of a disk's image, if it is a regular file.
    fn of(definition: &DiskDefinition) -> Option<Self> {
        let metadata = std::fs::metadata(definition.image.as_ref()?).ok()?;
        metadata.is_file().then(|| Self {
            file: (metadata.dev(), metadata.ino()),
            length: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
        })
    }
}

impl Candidate {
    /// Why it is not served.
    fn reason(&self) -> ErrorBody {
        if let Some(refused) = &self.refused {
            return refused.clone();
        }
        let opening = self.begun.map_or(Duration::ZERO, |begun| begun.elapsed());
        if opening < OPENING_TIME_MAX {
            return refusal(ErrorCode::Failed, "it is being opened", "try again in a moment");
        }
        let seconds = opening.as_secs();
        refusal(
            ErrorCode::Failed,
            format!("it has been opened for {seconds} s: its storage does not answer"),
            "check the file systems, devices and servers of its image, log and cache: it is served as soon as \
             they answer",
        )
    }

    fn ticket(&self, name: &str) -> Ticket {
        // An attempt that somebody asks for begins after the one in progress.
        let attempts = self.attempts + u64::from(self.begun.is_some() && self.is_asked);
        Ticket { name: name.to_owned(), number: self.number, attempts }
    }
}

impl Unserved {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock()
    }

    /// Ends all threads that wait for their next attempts.
    pub(crate) fn stop(&self) {
        let mut table = self.table();
        table.is_stopping = true;
        for disk in table.disks.values_mut() {
            // The request of a decision that waits ends.
            disk.decision = None;
            disk.wake.notify_all();
        }
        drop(table);
        self.ended.notify_all();
    }

    /// Forgets a disk that is served from now on. With a `ticket`, the attempt of that ticket
    /// serves it; returns false if that disk has been forgotten, so that it must not be served.
    pub(crate) fn take(&self, name: &str, ticket: Option<&Ticket>) -> bool {
        let mut table = self.table();
        if let Some(ticket) = ticket {
            if table.disks.get(name).is_none_or(|disk| disk.number != ticket.number) {
                return false;
            }
        }
        if let Some(disk) = table.disks.remove(name) {
            disk.wake.notify_all();
        }
        table.finishing.extend(ticket.map(Ticket::number));
        drop(table);
        self.ended.notify_all();
        true
    }

    /// The attempt of a ticket has ended.
    fn finish(&self, ticket: &Ticket) {
        if self.table().finishing.remove(&ticket.number) {
            self.ended.notify_all();
        }
    }

    /// Forgets disks for which `stays` is false. Returns the tickets of their attempts in progress.
    fn forget(&self, stays: impl Fn(&str) -> bool) -> Vec<Ticket> {
        let mut table = self.table();
        let mut forgotten = Vec::new();
        table.disks.retain(|name, disk| {
            let stays = stays(name);
            if !stays {
                disk.wake.notify_all();
                forgotten.push(disk.ticket(name));
            }
            stays
        });
        drop(table);
        self.ended.notify_all();
        forgotten
    }

    /// The reason why a disk is not served, if it is to be.
    pub(crate) fn reason(&self, name: &str) -> Option<ErrorBody> {
        self.table().disks.get(name).map(Candidate::reason)
    }

    /// The number of disks that are not served.
    pub(crate) fn count(&self) -> u64 {
        self.table().disks.len() as u64
    }

    /// All disks that are not served.
    pub(crate) fn list(&self) -> Vec<UnservedDisk> {
        let table = self.table();
        let disks = table.disks.iter().map(|(name, disk)| {
            let ErrorBody { message, remedy, .. } =
                disk.refused.clone().unwrap_or_else(|| refusal(ErrorCode::Failed, "", ""));
            UnservedDisk {
                name: name.clone(),
                vm: disk.definition.vm.clone(),
                image: disk.definition.image.as_ref().map(|path| path.display().to_string()),
                opening: disk.begun.is_some(),
                message,
                remedy,
                attempts: disk.attempts,
                since_unix_time_ns: disk.since_unix_time_ns,
            }
        });
        disks.collect()
    }

    /// The reasons of all disks that could not be served, or are being opened for long.
    pub(crate) fn problems(&self) -> Vec<(String, ErrorBody)> {
        let table = self.table();
        let is_known = |disk: &Candidate| {
            disk.refused.is_some()
                || disk.begun.is_some_and(|begun| begun.elapsed() >= OPENING_TIME_MAX)
        };
        let known = table.disks.iter().filter(|(_, disk)| is_known(disk));
        known.map(|(name, disk)| (name.clone(), disk.reason())).collect()
    }

    /// Waits until the attempt of a ticket has ended, or until `end`, if there is one.
    pub(crate) fn wait(&self, ticket: &Ticket, end: Option<Instant>) -> ServingOutcome {
        let mut table = self.table();
        loop {
            let disk = table.disks.get(&ticket.name).filter(|disk| disk.number == ticket.number);
            let is_finishing = table.finishing.contains(&ticket.number);
            match disk {
                None if !is_finishing => return ServingOutcome::Gone,
                Some(Candidate { attempts, refused: Some(refused), .. })
                    if *attempts > ticket.attempts =>
                {
                    return ServingOutcome::Refused(refused.clone());
                }
                _ => {}
            }
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            if table.is_stopping || left.is_some_and(|left| left.is_zero()) {
                return ServingOutcome::Opening;
            }
            match left {
                Some(left) => _ = self.ended.wait_for(&mut table, left),
                None => self.ended.wait(&mut table),
            }
        }
    }

    /// Leaves a decision about the log of a disk to its thread, for the time before the next
    /// attempt. Returns the number of the disk; `None` if no such disk is to be served.
    pub(crate) fn decide(&self, name: &str, decision: Decision) -> Result<Option<u64>, ErrorBody> {
        let mut table = self.table();
        if table.is_stopping {
            return Err(stopping());
        }
        let Some(disk) = table.disks.get_mut(name) else { return Ok(None) };
        if disk.decision.is_some() {
            let message = format!("another decision about the log of {name:?} waits already");
            return Err(refusal(ErrorCode::Conflict, message, "try again when it has ended"));
        }
        disk.decision = Some(decision);
        Ok(Some(disk.number))
    }

    /// Takes back a decision that has not begun. Returns false if it has.
    pub(crate) fn take_back(&self, name: &str, number: u64) -> bool {
        let mut table = self.table();
        let disk = table.disks.get_mut(name).filter(|disk| disk.number == number);
        disk.is_some_and(|disk| disk.decision.take().is_some())
    }

    /// The decision that the thread of a disk has to carry out now, and the ticket of the attempt
    /// after it.
    fn decision(&self, ticket: &Ticket) -> Option<(Decision, Ticket)> {
        let mut table = self.table();
        let disk = table.disks.get_mut(&ticket.name)?;
        if disk.number != ticket.number {
            return None;
        }
        disk.decision.take().map(|decision| (decision, disk.ticket(&ticket.name)))
    }

    /// Begins an attempt: the definition to serve, and whether it was asked for. `None` if the disk
    /// was forgotten.
    fn begin(&self, ticket: &Ticket) -> Option<(DiskDefinition, bool)> {
        let mut table = self.table();
        if table.is_stopping {
            return None;
        }
        let disk = table.disks.get_mut(&ticket.name)?;
        if disk.number != ticket.number {
            return None;
        }
        disk.begun = Some(Instant::now());
        Some((disk.definition.clone(), std::mem::take(&mut disk.is_asked)))
    }

    /// An attempt has failed. Returns whether this is another reason than before.
    fn refuse(&self, ticket: &Ticket, refused: &ErrorBody) -> bool {
        let mut table = self.table();
        let disk = table.disks.get_mut(&ticket.name).filter(|disk| disk.number == ticket.number);
        let Some(disk) = disk else { return false };
        disk.begun = None;
        disk.attempts += 1;
        let before = disk.refused.replace(refused.clone());
        drop(table);
        self.ended.notify_all();
        before.is_some_and(|before| before.message != refused.message)
    }

    /// Waits until the next attempt is due.
    fn pause(&self, ticket: &Ticket, pause: Duration) {
        let mut table = self.table();
        let end = Instant::now() + pause;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let disk = table.disks.get(&ticket.name).filter(|disk| disk.number == ticket.number);
            let Some(disk) = disk else { return };
            if table.is_stopping || disk.is_asked || left.is_zero() {
                return;
            }
            let wake = Arc::clone(&disk.wake);
            wake.wait_for(&mut table, left);
        }
    }
}

impl Ticket {
    /// The number of the disk that is to be served.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }
}

impl Daemon {
    /// Lets threads begin to serve disks.
    pub(crate) fn allow_attempts(self: &Arc<Self>) {
        let _ = self.unserved.daemon.set(Arc::downgrade(self));
    }

    /// Begins to serve a disk of the configuration, on a thread of its own.
    pub(crate) fn begin_serving(&self, definition: &DiskDefinition) -> Ticket {
        let name = &definition.name;
        self.forget_unserved(|other| other != name);
        let candidate = Candidate {
            definition: definition.clone(),
            number: self.instance(),
            since_unix_time_ns: unix_time_ns(),
            begun: Some(Instant::now()),
            attempts: 0,
            is_asked: false,
            has_thread: true,
            refused: None,
            decision: None,
            wake: Arc::default(),
        };
        let ticket = candidate.ticket(name);
        self.unserved.table().disks.insert(name.clone(), candidate);
        self.begin_attempts(&ticket);
        ticket
    }

    /// Makes the attempts to serve a disk begin with one at once. `None` if no such disk is to be
    /// served.
    pub(crate) fn ask_to_serve(&self, name: &str) -> Option<Ticket> {
        let mut table = self.unserved.table();
        let disk = table.disks.get_mut(name)?;
        disk.is_asked = true;
        let lacks_thread = !std::mem::replace(&mut disk.has_thread, true);
        let ticket = disk.ticket(name);
        disk.wake.notify_all();
        drop(table);
        if lacks_thread {
            self.begin_attempts(&ticket);
        }
        Some(ticket)
    }

    /// Whether a disk of this definition is not served although it is to be.
    pub(crate) fn is_unserved(&self, definition: &DiskDefinition) -> bool {
        let table = self.unserved.table();
        table.disks.get(&definition.name).is_some_and(|disk| disk.definition == *definition)
    }

    /// Forgets disks that are not served and for which `stays` is false. Their attempts in progress
    /// serve nothing, and keep neither the name nor the socket.
    pub(crate) fn forget_unserved(&self, stays: impl Fn(&str) -> bool) -> usize {
        let forgotten = self.unserved.forget(stays);
        self.with_state(|state| {
            for ticket in &forgotten {
                if let Some(claims) = state.opening.get_mut(&ticket.number) {
                    claims.release();
                }
            }
        });
        forgotten.len()
    }

    /// Serves a disk at once that is not served, by request.
    pub(crate) fn retry_disk(&self, name: &str) -> Result<DiskStatus, ErrorBody> {
        let Some(ticket) = self.ask_to_serve(name) else {
            self.find(name)?;
            return Err(refusal(
                ErrorCode::Conflict,
                format!("the disk {name:?} is served already"),
                "there is nothing to try again",
            ));
        };
        match self.unserved.wait(&ticket, Some(Instant::now() + RETRY_TIME_MAX)) {
            ServingOutcome::Gone => self.disk_status(name),
            ServingOutcome::Refused(refused) => Err(refused),
            ServingOutcome::Opening => Err(still_opening(name)),
        }
    }

    /// Ends the attempts to serve a disk, by request. `None` if no such disk is to be served.
    pub(crate) fn give_up_serving(&self, name: &str) -> Option<Done> {
        let count = self.forget_unserved(|other| other != name);
        let message = format!("the disk {name:?} was not served, and is no longer tried");
        (count > 0).then_some(Done { message })
    }

    /// Starts the thread that makes the attempts of a disk.
    fn begin_attempts(&self, ticket: &Ticket) {
        let Some(daemon) = self.unserved.daemon.get().cloned() else { return };
        let (unserved, ours) = (Arc::clone(&self.unserved), ticket.clone());
        let work = move || run(&daemon, &unserved, &ours);
        let name = format!("open-{}", ticket.name);
        if let Err(error) = thread::Builder::new().name(name).spawn(work) {
            let message = format!("no thread could be started: {error}");
            let remedy =
                "end other processes or raise the limit, then try again with `fathom disk retry`";
            self.unserved.refuse(ticket, &refusal(ErrorCode::Failed, message, remedy));
            if let Some(disk) = self.unserved.table().disks.get_mut(&ticket.name) {
                disk.has_thread = false;
            }
            self.wake_watch();
        }
    }

    /// Tries to serve a disk. `before` is the stamp of its image after the last attempt.
    fn attempt(
        &self,
        definition: &DiskDefinition,
        ticket: &Ticket,
        before: Option<&Option<Stamp>>,
    ) -> Result<(), ErrorBody> {
        // A file that has just come may not be complete.
        if before.is_some_and(|before| *before != Stamp::of(definition)) {
            let name = &ticket.name;
            return Err(refusal(
                ErrorCode::Failed,
                format!("the image of the disk {name:?} is new, or somebody writes it"),
                format!(
                    "it is served when it has not changed for some time; `fathom disk retry {name}` serves \
                     it at once"
                ),
            ));
        }
        let places = Origins::new(Origin::Flag("the configuration"));
        let serve = |definition: DiskDefinition, configured| {
            check_disk(&definition, &places).map_err(|problems| invalid(&problems))?;
            self.serve_disk(definition, configured, Some(ticket))
        };
        if !self.serve_planned(definition, serve)? {
            // It was removed in use.
            self.unserved.take(&ticket.name, Some(ticket));
        }
        Ok(())
    }
}

/// The answer while an attempt has not ended.
pub(crate) fn still_opening(name: &str) -> ErrorBody {
    refusal(
        ErrorCode::Failed,
        format!("the disk {name:?} is still being opened: its storage does not answer"),
        "it is served as soon as its storage answers; `fathom disk list` shows it then",
    )
}

/// The thread of a disk that is not served: until it is, or is forgotten.
fn run(daemon: &Weak<Daemon>, unserved: &Unserved, ticket: &Ticket) {
    let (mut pause, mut stamp, mut is_first) = (PAUSE, None, true);
    loop {
        let Some(strong) = daemon.upgrade() else { return };
        let Some((definition, is_asked)) = unserved.begin(ticket) else { return };
        if let Some((decision, ticket)) = unserved.decision(ticket) {
            decision(&strong, &definition, ticket);
        }
        let before = stamp.as_ref().filter(|_| !is_asked);
        let attempt = AssertUnwindSafe(|| strong.attempt(&definition, ticket, before));
        let outcome = catch_unwind(attempt).unwrap_or_else(|_| {
            let remedy = "see the log, and report the bug";
            Err(refusal(ErrorCode::Failed, "opening the disk failed because of a bug", remedy))
        });
        unserved.finish(ticket);
        let name = ticket.name.as_str();
        let refused = match outcome {
            Ok(()) => {
                if !is_first {
                    tracing::info!(disk = name, "is served");
                    strong.release_keepsakes();
                    strong.wake_watch();
                }
                return;
            }
            Err(_) if strong.is_stopping() => stopping(),
            Err(refused) => refused,
        };
        if unserved.refuse(ticket, &refused) {
            tracing::warn!(disk = name, "is still not served: {}", refused.message);
        }
        strong.wake_watch();
        drop(strong);
        let now = Stamp::of(&definition);
        let is_written = stamp.as_ref().is_some_and(|stamp| *stamp != now);
        stamp = Some(now);
        pause = match (is_written, is_first) {
            (true, _) => PAUSE_WRITTEN,
            (false, true) => PAUSE,
            (false, false) => (pause * 3 / 2).min(PAUSE_MAX),
        };
        is_first = false;
        unserved.pause(ticket, pause);
    }
}
