//! Waits until no request reaches past a new, lower end.
//!
//! A write in flight while the file is truncated makes the file grow again. So before a truncation,
//! each queue is asked, through an event descriptor in its thread's reactor, to answer as soon as
//! none of its requests in flight reaches past the new end. The capacity has been lowered by then,
//! and a queue checks the range of every new write against it. So no write after the answer can
//! reach past the end. Without truncations, the drain costs nothing.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::event::{EventfdFlags, eventfd};

/// The queues of a file.
#[derive(Default)]
pub(super) struct Drain {
    state: Mutex<State>,
    answered: Condvar,
}

#[derive(Default)]
struct State {
    /// The number of rounds so far; each round asks all queues once.
    round: u64,
    members: Vec<Arc<Member>>,
    /// For each member, the last round that it has answered.
    answers: Vec<u64>,
}

/// A queue's part of the drain.
pub(super) struct Member {
    wake: File,
    /// The last round in which the queue was asked.
    round: AtomicU64,
}

impl Member {
    /// The descriptor that becomes readable when the queue is asked.
    pub(super) fn wake(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Makes the descriptor unreadable again.
    pub(super) fn take_wake(&self) {
        let _ = (&self.wake).read(&mut [0; 8]);
    }

    /// The last round in which the queue was asked. Read the capacity after this call.
    pub(super) fn round(&self) -> u64 {
        self.round.load(Ordering::Acquire)
    }

    fn signal(&self) {
        // A write never blocks; a full counter is already readable.
        let _ = (&self.wake).write(&1_u64.to_ne_bytes());
    }
}

impl Drain {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Adds a queue.
    ///
    /// # Errors
    /// When the host has no descriptors left.
    pub(super) fn join(&self) -> io::Result<Arc<Member>> {
        let wake = File::from(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?);
        let mut state = self.state();
        let round = state.round;
        let member = Arc::new(Member { wake, round: AtomicU64::new(round) });
        state.members.push(Arc::clone(&member));
        // A queue that joins during a round has nothing in flight, and sees the lowered capacity.
        state.answers.push(round);
        Ok(member)
    }

    /// Removes `member`, which has nothing in flight. The watch of its reactor ends.
    pub(super) fn leave(&self, member: &Arc<Member>) {
        let mut state = self.state();
        if let Some(index) = state.members.iter().position(|other| Arc::ptr_eq(other, member)) {
            state.members.swap_remove(index);
            state.answers.swap_remove(index);
        }
        drop(state);
        member.signal();
        self.answered.notify_all();
    }

    /// Records that `member` has nothing in flight past the end of `round`.
    pub(super) fn answer(&self, member: &Arc<Member>, round: u64) {
        let mut state = self.state();
        if let Some(index) = state.members.iter().position(|other| Arc::ptr_eq(other, member)) {
            state.answers[index] = round;
        }
        drop(state);
        self.answered.notify_all();
    }

    /// Asks all queues and waits for their answers, for at most `limit`. Returns false if one is
    /// missing. Must not be called by a queue's thread, and only for one end at a time.
    pub(super) fn wait(&self, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        let mut state = self.state();
        state.round += 1;
        for member in &state.members {
            member.round.store(state.round, Ordering::Release);
            member.signal();
        }
        while state.answers.iter().any(|answer| *answer < state.round) {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            self.answered.wait_for(&mut state, left);
        }
        true
    }
}
