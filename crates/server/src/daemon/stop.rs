//! The end: everything in flight completed, everything written made durable, within a bound.

use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::sync::{MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use super::Daemon;
use crate::wiring;

/// What is kept of the time for the last flushes, at least.
const FLUSH_TIME_MIN: Duration = Duration::from_secs(5);
/// How often a change under way is looked at.
const LOOK_INTERVAL: Duration = Duration::from_millis(5);

/// How long listeners' streams may take to end.
const EVENTS_TIME_MAX: Duration = Duration::from_secs(1);
/// How long the results of queries may take to be told.
const QUERIES_TIME_MAX: Duration = Duration::from_secs(1);

impl Daemon {
    /// Accepts nobody any more, completes what is in flight, lets go of guests and clients, and
    /// flushes the back ends. Says what did not end in time; nothing on a clean end.
    pub(crate) fn stop(&self) -> Vec<String> {
        // Changes are refused from here on, and those under way are waited for.
        self.stopping.store(true, Ordering::Release);
        let limit = self.options.shutdown_time_max;
        let end = Instant::now() + limit;
        let change = self.changes_by(end);
        let mut problems = Vec::new();
        if change.is_none() {
            problems.push("a change under way did not end in time".to_owned());
        }
        let mut tasks: Vec<Task> = Vec::new();
        for listening in self.listening() {
            let address = listening.definition().address;
            if let Some(listener) = listening.listener().take() {
                tasks.push(Task::new(format!("the listener at {address}"), move || {
                    listener.shutdown();
                    Ok(())
                }));
            }
        }
        for served in self.served() {
            let server = served.live().server.take();
            if let Some(server) = server {
                tasks.push(Task::new(
                    format!("the guest of {:?}", served.disk.name()),
                    move || {
                        server.shutdown();
                        Ok(())
                    },
                ));
            }
        }
        problems.extend(run(tasks, end));
        let end = end.max(Instant::now() + FLUSH_TIME_MIN.min(limit));
        let mut flushes = Vec::new();
        for served in self.served() {
            let name = format!("the last flush of {:?}", served.disk.name());
            flushes.push(Task::new(name, move || {
                let left = end.saturating_duration_since(Instant::now());
                wiring::flush(&served.disk, left).map_err(|error| error.to_string())
            }));
        }
        problems.extend(run(flushes, end));
        // Last, so that listeners have all that happened.
        self.queries.begin_end();
        self.events.end(EVENTS_TIME_MAX);
        self.queries.end(QUERIES_TIME_MAX);
        self.end_monitor();
        problems
    }

    /// The right to change what is served, if it can be had by `end`.
    fn changes_by(&self, end: Instant) -> Option<MutexGuard<'_, ()>> {
        loop {
            match self.changes.try_lock() {
                Ok(guard) => return Some(guard),
                Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
                Err(TryLockError::WouldBlock) if Instant::now() < end => {
                    std::thread::sleep(LOOK_INTERVAL);
                }
                Err(TryLockError::WouldBlock) => return None,
            }
        }
    }
}

/// Something that is to be done at the end, and its name.
struct Task {
    name: String,
    work: Box<dyn FnOnce() -> Result<(), String> + Send>,
}

impl Task {
    fn new(name: String, work: impl FnOnce() -> Result<(), String> + Send + 'static) -> Self {
        Self { name, work: Box::new(work) }
    }
}

/// Does all `tasks` at once. Gives what failed, and what was not done by `end`.
fn run(tasks: Vec<Task>, end: Instant) -> Vec<String> {
    let mut problems = Vec::new();
    let mut waiting = Vec::new();
    for Task { name, work } in tasks {
        let (sender, receiver) = mpsc::channel();
        let spawned = std::thread::Builder::new().name("stop".into()).spawn(move || {
            let _ = sender.send(work());
        });
        match spawned {
            Ok(_) => waiting.push((name, receiver)),
            Err(error) => problems.push(format!("{name}: no thread for it: {error}")),
        }
    }
    for (name, receiver) in waiting {
        let left = end.saturating_duration_since(Instant::now());
        match receiver.recv_timeout(left) {
            Ok(Ok(())) => {}
            Ok(Err(error)) => problems.push(format!("{name} failed: {error}")),
            Err(mpsc::RecvTimeoutError::Timeout) => {
                problems.push(format!("{name} did not end in time"));
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                problems.push(format!("{name}: its thread panicked"));
            }
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_panics_and_delays_are_told_apart() {
        let end = Instant::now() + Duration::from_secs(2);
        let problems = run(
            vec![
                Task::new("good".into(), || Ok(())),
                Task::new("bad".into(), || Err("no".into())),
                // A panic without the noise of one.
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
