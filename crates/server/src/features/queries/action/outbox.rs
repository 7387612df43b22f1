//! A bounded queue of rows that wait for a thread. Rows that do not fit are counted.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fathom_cql::Value;
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::features::queries::kept::ResultChange;

/// The most rows that wait.
const ROWS_MAX: usize = 4096;
/// The most bytes of waiting rows.
const BYTES_MAX: usize = 4 << 20;
/// The size of a value without its text, in bytes.
const VALUE_BYTES: usize = 24;

/// The queue. See the module.
#[derive(Default)]
pub(super) struct Outbox {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Waiting>,
    bytes: usize,
    /// Rows that did not fit since the last one that did.
    lost: u64,
    closing: bool,
    closed: bool,
}

/// A row that waits.
#[derive(Clone, Debug)]
pub(super) struct Waiting {
    /// When the row was inserted or deleted.
    pub time_ns: u64,
    /// The number of insertions, or, if negative, of deletions.
    pub count: i64,
    /// The row.
    pub row: Arc<[Value]>,
    /// The number of changes that the limit suppressed before this one.
    pub suppressed: u64,
    /// The number of changes before this one that did not fit.
    pub lost: u64,
}

fn bytes(row: &[Value]) -> usize {
    let text = |value: &Value| match value {
        Value::Text(text) => text.len(),
        _ => 0,
    };
    row.iter().map(|value| VALUE_BYTES + text(value)).sum()
}

impl Outbox {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Starts a thread that repeats `work` until it returns false.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn start(
        name: &str,
        mut work: impl FnMut(&Self) -> bool + Send + 'static,
    ) -> Result<Arc<Self>, String> {
        let outbox = Arc::new(Self::default());
        let ours = Arc::clone(&outbox);
        let thread = std::thread::Builder::new().name(name.to_owned());
        let spawned = thread.spawn(move || {
            let _closed = Closed(Arc::clone(&ours));
            while work(&ours) {}
        });
        spawned.map(|_| outbox).map_err(|error| format!("no thread could be started: {error}"))
    }

    /// Adds a change. Returns the number of lost rows.
    pub fn put(&self, change: &ResultChange, suppressed: u64) -> u64 {
        let mut state = self.state();
        let more = bytes(&change.row);
        let full = state.waiting.len() >= ROWS_MAX || state.bytes + more > BYTES_MAX;
        if full || state.closing || state.closed {
            state.lost += 1;
            return 1;
        }
        let lost = std::mem::take(&mut state.lost);
        state.bytes += more;
        state.waiting.push_back(Waiting {
            time_ns: change.time_ns,
            count: change.count,
            row: Arc::clone(&change.row),
            suppressed,
            lost,
        });
        self.changed.notify_all();
        0
    }

    /// Waits for rows, and takes at most `rows_max` of them; none if the queue is closed and empty.
    pub fn take(&self, rows_max: usize) -> Vec<Waiting> {
        let waits = |state: &mut State| state.waiting.is_empty() && !state.closing;
        let mut state = self.state();
        self.changed.wait_while(&mut state, waits);
        let count = state.waiting.len().min(rows_max);
        let taken: Vec<Waiting> = state.waiting.drain(..count).collect();
        state.bytes -= taken.iter().map(|waiting| bytes(&waiting.row)).sum::<usize>();
        taken
    }

    /// Waits for `time`. Returns false if the queue is closed before or meanwhile.
    pub fn pause(&self, time: Duration) -> bool {
        let mut state = self.state();
        self.changed.wait_while_for(&mut state, |state| !state.closing, time);
        !state.closing
    }

    /// Whether the queue is closed.
    pub fn is_closing(&self) -> bool {
        self.state().closing
    }

    /// Closes the queue: it accepts no more rows.
    pub fn close(&self) {
        self.state().closing = true;
        self.changed.notify_all();
    }

    /// Waits until the thread has ended, at most until `end`.
    pub fn wait_closed(&self, end: Instant) {
        let left = end.saturating_duration_since(Instant::now());
        let waits = |state: &mut State| !state.closed;
        self.changed.wait_while_for(&mut self.state(), waits, left);
    }
}

/// Marks the queue as closed when the thread ends, even by a panic.
struct Closed(Arc<Outbox>);

impl Drop for Closed {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.closed = true;
        state.waiting = VecDeque::new();
        state.bytes = 0;
        drop(state);
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(number: i64, text: &str) -> ResultChange {
        let row = [Value::Integer(number), Value::text(text)];
        ResultChange { time_ns: number as u64, count: 1, row: row.into() }
    }

    #[test]
    fn rows_that_do_not_fit_are_counted_and_reported() {
        let outbox = Outbox::default();
        let lost: u64 = (0..5000).map(|number| outbox.put(&change(number, ""), 0)).sum();
        assert_eq!(lost, 5000 - ROWS_MAX as u64);
        assert_eq!(outbox.take(10).len(), 10);
        assert_eq!(outbox.put(&change(1, ""), 3), 0);
        let rest = outbox.take(usize::MAX);
        let last = rest.last().unwrap();
        assert_eq!((rest.len(), last.lost, last.suppressed), (ROWS_MAX - 9, lost, 3));
        assert_eq!(outbox.state().bytes, 0);
        let long = "x".repeat(BYTES_MAX / 3);
        let lost: u64 = (0..5).map(|number| outbox.put(&change(number, &long), 0)).sum();
        assert_eq!(lost, 3);
    }

    #[test]
    fn waiting_rows_are_taken_after_the_close_and_new_ones_rejected() {
        let (sender, receiver) = std::sync::mpsc::channel();
        let outbox = Outbox::start("test", move |outbox| {
            let taken = outbox.take(2);
            for waiting in &taken {
                sender.send(waiting.time_ns).unwrap();
            }
            !taken.is_empty()
        })
        .unwrap();
        for number in 0..5 {
            assert_eq!(outbox.put(&change(number, ""), 0), 0);
        }
        outbox.close();
        assert_eq!(outbox.put(&change(5, ""), 0), 1);
        outbox.wait_closed(Instant::now() + Duration::from_secs(30));
        assert!(outbox.state().closed);
        assert_eq!(receiver.iter().collect::<Vec<u64>>(), [0, 1, 2, 3, 4]);
        assert!(!outbox.pause(Duration::from_secs(30)));
    }

    #[test]
    fn a_panic_of_the_thread_closes_the_queue() {
        let outbox = Outbox::start("test", |outbox| {
            outbox.take(1);
            // A panic without a message on standard error.
            std::panic::resume_unwind(Box::new(()))
        })
        .unwrap();
        outbox.put(&change(0, ""), 0);
        outbox.wait_closed(Instant::now() + Duration::from_secs(30));
        assert!(outbox.state().closed);
        assert_eq!(outbox.put(&change(0, ""), 0), 1);
    }
}
