//! What becomes of the log of a disk that is not served, as the operator decides
//! (`fathom log keep`, `fathom log discard`).
//!
//! The thread that tries to serve the disk carries the decision out, so that the image and the log
//! are opened only once at a time. It begins when an attempt in progress has failed, and the next
//! attempt follows at once. A decision that has not begun when its request ends is taken back:
//! nobody expects it any more. Other disks with a log in the same volume stay served: the volume is
//! the same open one, and the place of their logs is claimed.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use fathom_control::{DiskDefinition, ErrorBody, ErrorCode, LogAnswer, LogDecision};

use crate::daemon::Daemon;
use crate::daemon::changes::{Claims, stopping};
use crate::daemon::stack::refusal;
use crate::daemon::unserved::{Decision, ServingOutcome, Ticket};
use crate::features::log::settle_disk;

/// How long a request waits for an attempt in progress, the decision, and the attempt after it.
const DECISION_TIME_MAX: Duration = Duration::from_secs(30);

/// What became of a log, and the ticket of the attempt after that.
type Decided = Result<(LogAnswer, Ticket), ErrorBody>;

/// Carries out a decision on the thread of the disk. `decided` gets the outcome; without a word, it
/// ends with the disk's attempts.
fn carry_out(decision: LogDecision, decided: SyncSender<Decided>) -> Decision {
    Box::new(move |daemon: &Daemon, definition: &DiskDefinition, ticket: Ticket| {
        let settle = || daemon.settle_log(definition, &ticket, decision);
        let settled = catch_unwind(AssertUnwindSafe(settle)).unwrap_or_else(|_| {
            let remedy = "see the log, and report the bug";
            Err(refusal(ErrorCode::Failed, "the decision failed because of a bug", remedy))
        });
        // The request may have ended.
        let _ = decided.send(settled.map(|answer| (answer, ticket)));
    })
}

impl Daemon {
    /// Decides about the log of a disk that is not served, and tries to serve the disk, by request.
    pub(crate) fn decide_log(
        &self,
        name: &str,
        decision: LogDecision,
    ) -> Result<LogAnswer, ErrorBody> {
        let end = Instant::now() + DECISION_TIME_MAX;
        let (decided, outcome) = sync_channel(1);
        let Some(number) = self.unserved.decide(name, carry_out(decision, decided))? else {
            self.find(name)?;
            return Err(served(name));
        };
        self.ask_to_serve(name);
        let (mut answer, ticket) = self.await_decision(name, number, end, &outcome)?;
        match self.unserved.wait(&ticket, Some(end)) {
            ServingOutcome::Gone => answer.served = self.find(name).is_ok(),
            ServingOutcome::Refused(ErrorBody { message, remedy, .. }) => {
                (answer.message, answer.remedy) = (message, remedy);
            }
            ServingOutcome::Opening => {
                answer.message = "it is still being opened".into();
                answer.remedy = "`fathom disk list` shows when it is served".into();
            }
        }
        Ok(answer)
    }

    fn await_decision(
        &self,
        name: &str,
        number: u64,
        end: Instant,
        outcome: &Receiver<Decided>,
    ) -> Decided {
        match outcome.recv_timeout(end.saturating_duration_since(Instant::now())) {
            Ok(decided) => decided,
            // The attempt in progress has succeeded, or the configuration no longer has the disk.
            Err(RecvTimeoutError::Disconnected) => {
                if self.is_stopping() {
                    return Err(stopping());
                }
                self.find(name)?;
                Err(served(name))
            }
            Err(RecvTimeoutError::Timeout) if self.unserved.take_back(name, number) => {
                Err(refusal(
                    ErrorCode::Failed,
                    format!(
                        "nothing was decided: the disk {name:?} is still being opened, because its storage does not \
                         answer"
                    ),
                    "check the file systems, devices and servers of its image, log and cache, then try again",
                ))
            }
            Err(RecvTimeoutError::Timeout) => Err(refusal(
                ErrorCode::Failed,
                format!(
                    "the decision about the log of {name:?} is still being carried out: its storage does not answer"
                ),
                "the daemon's log shows when it has ended",
            )),
        }
    }

    /// Settles the log of a disk that is not served. The caller is the thread of the disk.
    fn settle_log(
        &self,
        planned: &DiskDefinition,
        ticket: &Ticket,
        decision: LogDecision,
    ) -> Result<LogAnswer, ErrorBody> {
        let Some(definition) = self.definition_to_open(planned)? else {
            let message = format!("the disk {:?} was removed in use", planned.name);
            return Err(refusal(ErrorCode::Conflict, message, "add it again first"));
        };
        let _opening = self.begin_opening(Claims::new(&definition), ticket.number())?;
        if decision == LogDecision::Keep {
            self.note_log(&definition);
        }
        let answer = settle_disk(&definition, &self.records_folder(), &self.parts, decision)?;
        let (disk, records) = (definition.name.as_str(), answer.records);
        match decision {
            LogDecision::Keep => tracing::warn!(disk, records, "the changes of its log are kept"),
            LogDecision::Discard => {
                tracing::warn!(disk, records, "the changes of its log are discarded");
            }
        }
        Ok(answer)
    }
}

/// The error for a disk whose log is in use.
fn served(name: &str) -> ErrorBody {
    refusal(
        ErrorCode::Conflict,
        format!("the disk {name:?} is served, so its log was not refused"),
        "there is nothing to decide: its changes are written home",
    )
}
