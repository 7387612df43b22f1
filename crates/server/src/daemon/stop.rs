//! The shutdown: completes requests in flight and makes all writes durable, within a time limit.

use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use fathom_insight::change::{Author, ChangeKind};

use super::Daemon;
use super::withdrawal::Standing;
use crate::daemon::change_log::Note;
use crate::daemon::feature::Ending;
use crate::features::FEATURES;

/// The least time that remains for the last flushes.
const FLUSH_TIME_MIN: Duration = Duration::from_secs(5);
/// How long what a feature returns for its last stages may take.
const RESULTS_TIME_MAX: Duration = Duration::from_secs(3);

impl Daemon {
    /// Stops accepting connections, completes requests in flight, disconnects guests and clients,
    /// and flushes the back ends. Returns messages for all that did not end in time or failed.
    ///
    /// Disks do not wait for each other: a disk whose I/O hangs is abandoned after
    /// `shutdown_time_max`, and the others are flushed by then.
    pub(crate) fn stop(self: &Arc<Self>) -> Vec<String> {
        // New changes are rejected from now on. Changes in progress check this before they add
        // anything.
        self.stopping.store(true, Ordering::Release);
        self.note_change(&Note::new(ChangeKind::Stop, Author::Daemon));
        self.unserved.stop();
        let limit = Duration::from_nanos(self.options.shutdown_time_max.0);
        let end = Instant::now() + limit;
        let listeners = Task::start_all(self.end_features(Ending::Work));
        let disks: Vec<_> = self
            .served()
            .iter()
            .map(|served| (self.withdraw(served, Author::Daemon), Arc::clone(served)))
            .collect();
        let mut problems = Vec::new();
        let mut flushing = Vec::new();
        for (withdrawal, served) in disks {
            let name = served.disk.name().to_owned();
            match withdrawal.wait(end) {
                Standing::Clean => {}
                Standing::Unflushed(error) => {
                    problems.push(format!("the last flush of {name:?} failed: {error}"));
                }
                Standing::Behind(error) => problems.push(behind(&name, &error)),
                Standing::Flushing => flushing.push((withdrawal, name)),
                Standing::Draining => problems.push(format!(
                    "the disk {name:?} was abandoned: requests in flight have not completed for \
                     {} s, and none of them was acknowledged",
                    withdrawal.age().as_secs()
                )),
            }
        }
        problems.extend(Task::finish_all(listeners, end));
        let end = end.max(Instant::now() + FLUSH_TIME_MIN.min(limit));
        for (withdrawal, name) in flushing {
            match withdrawal.wait(end) {
                Standing::Clean => {}
                Standing::Unflushed(error) => {
                    problems.push(format!("the last flush of {name:?} failed: {error}"));
                }
                Standing::Behind(error) => problems.push(behind(&name, &error)),
                Standing::Flushing | Standing::Draining => {
                    problems.push(format!("the last flush of {name:?} did not end in time"));
                }
            }
        }
        // Last, so that listeners receive all events.
        let end = Instant::now() + RESULTS_TIME_MAX;
        problems.extend(run(self.end_features(Ending::Observers), end));
        problems.extend(run(self.end_features(Ending::Results), end));
        problems
    }

    /// Ends the features' work at a stage. Returns what may end beside that.
    fn end_features(self: &Arc<Self>, stage: Ending) -> Vec<Task> {
        FEATURES.iter().flat_map(|feature| feature.end(self, stage)).collect()
    }
}

fn behind(name: &str, error: &str) -> String {
    format!(
        "the log of {name:?} was not completely written back, the next start recovers it: {error}"
    )
}

/// A named task with a time limit.
pub(crate) struct Task {
    name: String,
    work: Box<dyn FnOnce() -> Result<(), String> + Send>,
}

/// A started task: its name, and the channel of its outcome.
type Started = (String, Result<mpsc::Receiver<Result<(), String>>, std::io::Error>);

impl Task {
    pub(crate) fn new(
        name: String,
        work: impl FnOnce() -> Result<(), String> + Send + 'static,
    ) -> Self {
        Self { name, work: Box::new(work) }
    }

    /// Starts `tasks`, each on a separate thread.
    fn start_all(tasks: Vec<Self>) -> Vec<Started> {
        let start = |Self { name, work }| {
            let (sender, receiver) = mpsc::channel();
            let spawned = std::thread::Builder::new().name("stop".into()).spawn(move || {
                let _ = sender.send(work());
            });
            (name, spawned.map(|_| receiver))
        };
        tasks.into_iter().map(start).collect()
    }

    /// Waits until `end`. Returns messages for tasks that failed or did not end.
    fn finish_all(started: Vec<Started>, end: Instant) -> Vec<String> {
        let mut problems = Vec::new();
        for (name, receiver) in started {
            let left = end.saturating_duration_since(Instant::now());
            match receiver.map(|receiver| receiver.recv_timeout(left)) {
                Ok(Ok(Ok(()))) => {}
                Ok(Ok(Err(error))) => problems.push(format!("{name} failed: {error}")),
                Ok(Err(mpsc::RecvTimeoutError::Timeout)) => {
                    problems.push(format!("{name} did not end in time"));
                }
                Ok(Err(mpsc::RecvTimeoutError::Disconnected)) => {
                    problems.push(format!("{name}: its thread panicked"));
                }
                Err(error) => problems.push(format!("{name}: no thread could be started: {error}")),
            }
        }
        problems
    }
}

/// Runs all `tasks` in parallel until `end`. Returns messages for tasks that failed or did not end.
pub(crate) fn run(tasks: Vec<Task>, end: Instant) -> Vec<String> {
    Task::finish_all(Task::start_all(tasks), end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_panics_and_delays_are_distinguished() {
        let end = Instant::now() + Duration::from_secs(2);
        let problems = run(
            vec![
                Task::new("good".into(), || Ok(())),
                Task::new("bad".into(), || Err("no".into())),
                // A panic without a message on standard error.
                Task::new("worse".into(), || std::panic::resume_unwind(Box::new(()))),
                Task::new("slow".into(), || {
                    std::thread::sleep(Duration::from_secs(8));
                    Ok(())
                }),
            ],
            end,
        );
        assert_eq!(
            problems,
            ["bad failed: no", "worse: its thread panicked", "slow did not end in time"]
        );
    }
}
