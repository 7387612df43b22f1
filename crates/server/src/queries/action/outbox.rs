//! Rows that wait for a thread: few enough, and the others are counted.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fathom_cql::Value;

use super::super::kept::Change;

/// The most rows that wait.
const ROWS_MAX: usize = 4096;
/// The most bytes of their texts.
const BYTES_MAX: usize = 4 << 20;
/// What a value takes besides its text.
const VALUE_BYTES: usize = 24;

/// See the module.
#[derive(Default)]
pub(super) struct Outbox {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Waiting>,
    bytes: usize,
    /// Rows that found no room since the last that did.
    lost: u64,
    closing: bool,
    closed: bool,
}

/// A row that waits.
#[derive(Clone, Debug)]
pub(super) struct Waiting {
    /// When it came, or went.
    pub time_ns: u64,
    /// How often it came; below 0, how often it went.
    pub count: i64,
    /// The row.
    pub row: Arc<[Value]>,
    /// How many before it the limit left out.
    pub left_out: u64,
    /// How many before it found no room.
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
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has a thread work on what waits, until it is closed and empty or `work` says no.
    ///
    /// # Errors
    /// When there is no thread.
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
        spawned.map(|_| outbox).map_err(|error| format!("there is no thread for it: {error}"))
    }

    /// Puts a change behind the others. Gives how many rows are lost.
    pub fn put(&self, change: &Change, left_out: u64) -> u64 {
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
            left_out,
            lost,
        });
        self.changed.notify_all();
        0
    }

    /// Waits for rows, and takes up to `most` of them; none when it is closed.
    pub fn take(&self, most: usize) -> Vec<Waiting> {
        let waits = |state: &mut State| state.waiting.is_empty() && !state.closing;
        let mut state =
            self.changed.wait_while(self.state(), waits).unwrap_or_else(PoisonError::into_inner);
        let count = state.waiting.len().min(most);
        let taken: Vec<Waiting> = state.waiting.drain(..count).collect();
        state.bytes -= taken.iter().map(|waiting| bytes(&waiting.row)).sum::<usize>();
        taken
    }

    /// Waits for a time. False when it is closed before that is over.
    pub fn pause(&self, time: Duration) -> bool {
        let waits = |state: &mut State| !state.closing;
        let result = self.changed.wait_timeout_while(self.state(), time, waits);
        !result.unwrap_or_else(PoisonError::into_inner).0.closing
    }

    /// Whether it takes no more rows.
    pub fn is_closing(&self) -> bool {
        self.state().closing
    }

    /// Takes no more rows.
    pub fn close(&self) {
        self.state().closing = true;
        self.changed.notify_all();
    }

    /// Waits until its thread has ended, but not beyond `end`.
    pub fn wait_closed(&self, end: Instant) {
        let left = end.saturating_duration_since(Instant::now());
        let waits = |state: &mut State| !state.closed;
        drop(self.changed.wait_timeout_while(self.state(), left, waits));
    }
}

/// Says at the end of the thread, however it comes, that it ends.
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

    fn change(number: i64, text: &str) -> Change {
        let row = [Value::Integer(number), Value::text(text)];
        Change { time_ns: number as u64, count: 1, row: row.into() }
    }

    #[test]
    fn what_has_no_room_is_counted_and_reported() {
        let outbox = Outbox::default();
        let lost: u64 = (0..5000).map(|number| outbox.put(&change(number, ""), 0)).sum();
        assert_eq!(lost, 5000 - ROWS_MAX as u64);
        assert_eq!(outbox.take(10).len(), 10);
        assert_eq!(outbox.put(&change(1, ""), 3), 0);
        let rest = outbox.take(usize::MAX);
        let last = rest.last().unwrap();
        assert_eq!((rest.len(), last.lost, last.left_out), (ROWS_MAX - 9, lost, 3));
        assert_eq!(outbox.state().bytes, 0);
        let long = "x".repeat(BYTES_MAX / 3);
        let lost: u64 = (0..5).map(|number| outbox.put(&change(number, &long), 0)).sum();
        assert_eq!(lost, 3);
    }

    #[test]
    fn what_waits_at_the_close_is_taken_and_no_more() {
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
    fn a_thread_that_panics_holds_up_no_other() {
        let outbox = Outbox::start("test", |outbox| {
            outbox.take(1);
            // A panic without the noise of one.
            std::panic::resume_unwind(Box::new(()))
        })
        .unwrap();
        outbox.put(&change(0, ""), 0);
        outbox.wait_closed(Instant::now() + Duration::from_secs(30));
        assert!(outbox.state().closed);
        assert_eq!(outbox.put(&change(0, ""), 0), 1);
    }
}
