//! The changes that clients have left in flight when they went.
//!
//! A client whose connection is lost connects again, sends a change again that was not answered,
//! and then newer ones. The older change may still be in flight: on another queue, in the kernel,
//! which completes the changes of two queues in any order. So newer requests for its range wait
//! until it has completed.
//!
//! While no such change is in flight, this costs a request one load.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use parking_lot::{Mutex, MutexGuard};

/// A change in flight whose client has gone.
struct Entry {
    client: u64,
    /// The number of the request among those of its client.
    token: u64,
    /// Counts up with each entry of the disk.
    number: u64,
    /// In bytes.
    range: Range<u64>,
    /// Whether its completion will not be known.
    is_stuck: bool,
}

#[derive(Default)]
struct State {
    entries: Vec<Entry>,
    added: u64,
}

/// What a new request meets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Meeting {
    /// No earlier change.
    Free,
    /// A change that has not completed: the request waits.
    Change,
    /// A change whose completion will not be known: the request fails.
    Stuck,
}

/// The changes of a disk that are in flight although their clients have gone.
#[derive(Default)]
pub struct Leftovers {
    count: AtomicUsize,
    clients: AtomicU64,
    state: Mutex<State>,
}

impl Leftovers {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// A number for a client of the disk.
    pub fn client(&self) -> u64 {
        self.clients.fetch_add(1, Ordering::Relaxed)
    }

    /// `client` has gone, and its change `token` of `range` (in bytes) is in flight.
    pub fn add(&self, client: u64, token: u64, range: Range<u64>) {
        let mut state = self.state();
        let number = state.added;
        state.added += 1;
        state.entries.push(Entry { client, token, number, range, is_stuck: false });
        self.count.store(state.entries.len(), Ordering::Release);
    }

    /// The change `token` of `client` has completed.
    pub fn end(&self, client: u64, token: u64) {
        self.retain(|entry| (entry.client, entry.token) != (client, token));
    }

    /// All changes of `client` have ended.
    pub fn end_all(&self, client: u64) {
        self.retain(|entry| entry.client != client);
    }

    /// The changes of `client` may still be in the kernel, and their completions will not be known:
    /// its thread has failed. From now on, requests for their ranges fail.
    pub fn give_up(&self, client: u64) {
        for entry in self.state().entries.iter_mut().filter(|entry| entry.client == client) {
            entry.is_stuck = true;
        }
    }

    fn retain(&self, keep: impl Fn(&Entry) -> bool) {
        let mut state = self.state();
        state.entries.retain(keep);
        self.count.store(state.entries.len(), Ordering::Release);
    }

    /// Whether there is none.
    pub(crate) fn is_empty(&self) -> bool {
        self.count.load(Ordering::Acquire) == 0
    }

    /// The number of the next entry. A request waits only for those with lower numbers, so that two
    /// requests never wait for each other.
    pub(crate) fn next(&self) -> u64 {
        self.state().added
    }

    /// What a request for `range` meets among the entries before the number `before`.
    pub(crate) fn meet(&self, range: &Range<u64>, before: u64) -> Meeting {
        let state = self.state();
        let met = |entry: &&Entry| {
            entry.number < before && entry.range.start < range.end && range.start < entry.range.end
        };
        let mut meeting = Meeting::Free;
        for entry in state.entries.iter().filter(met) {
            if entry.is_stuck {
                return Meeting::Stuck;
            }
            meeting = Meeting::Change;
        }
        meeting
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_waits_for_earlier_changes_of_its_range() {
        let leftovers = Leftovers::default();
        assert!(leftovers.is_empty());
        let (one, other) = (leftovers.client(), leftovers.client());
        leftovers.add(one, 3, 4096..8192);
        let before = leftovers.next();
        leftovers.add(other, 3, 0..4096);
        assert!(!leftovers.is_empty());
        assert_eq!(leftovers.meet(&(8191..9000), before), Meeting::Change);
        assert_eq!(leftovers.meet(&(8192..9000), before), Meeting::Free);
        assert_eq!(leftovers.meet(&(0..4096), before), Meeting::Free, "it came later");
        leftovers.end(other, 3);
        assert_eq!(leftovers.meet(&(0..4097), before), Meeting::Change);
        leftovers.give_up(one);
        assert_eq!(leftovers.meet(&(0..4097), before), Meeting::Stuck);
        leftovers.end_all(one);
        assert!(leftovers.is_empty());
    }
}
