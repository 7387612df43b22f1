//! Waits until no request reaches behind a new, nearer end.
//!
//! A write that is under way while the file is cut makes the file grow again. Before the cut, each
//! queue is asked, through an event descriptor in its thread's reactor, to answer as soon as
//! nothing that it has in flight reaches behind the new end. The capacity is lowered before it is
//! asked, and a queue looks at the capacity whenever it is given something to write: what comes
//! after its answer cannot reach there. A disk that is not being cut pays for none of this.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};

/// The queues of a file.
#[derive(Default)]
pub(super) struct Drain {
    state: Mutex<State>,
    answered: Condvar,
}

#[derive(Default)]
struct State {
    /// Counts the times that queues were asked.
    round: u64,
    members: Vec<Arc<Member>>,
    /// For each member, the last round that it has answered.
    answers: Vec<u64>,
}

/// What a queue is asked through.
pub(super) struct Member {
    wake: File,
    /// The last round in which it was asked.
    round: AtomicU64,
}

impl Member {
    /// What becomes readable when the queue is asked.
    pub(super) fn wake(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    /// Makes the descriptor unreadable again.
    pub(super) fn take_wake(&self) {
        let _ = (&self.wake).read(&mut [0; 8]);
    }

    /// The last round in which the queue was asked. Look at the capacity afterwards.
    pub(super) fn round(&self) -> u64 {
        self.round.load(Ordering::Acquire)
    }

    fn ask(&self) {
        // It never blocks; a full counter is readable already.
        let _ = (&self.wake).write(&1_u64.to_ne_bytes());
    }
}

impl Drain {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A queue more.
    ///
    /// # Errors
    /// When there is no descriptor for it.
    pub(super) fn join(&self) -> io::Result<Arc<Member>> {
        let wake = File::from(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?);
        let mut state = self.state();
        let round = state.round;
        let member = Arc::new(Member { wake, round: AtomicU64::new(round) });
        state.members.push(Arc::clone(&member));
        // Who joins during a round has nothing in flight, and sees the lowered capacity.
        state.answers.push(round);
        Ok(member)
    }

    /// `member` has nothing in flight and ends. Its reactor's watch ends with it.
    pub(super) fn leave(&self, member: &Arc<Member>) {
        let mut state = self.state();
        if let Some(index) = state.members.iter().position(|other| Arc::ptr_eq(other, member)) {
            state.members.swap_remove(index);
            state.answers.swap_remove(index);
        }
        drop(state);
        member.ask();
        self.answered.notify_all();
    }

    /// `member` has nothing in flight behind the end of `round`.
    pub(super) fn answer(&self, member: &Arc<Member>, round: u64) {
        let mut state = self.state();
        if let Some(index) = state.members.iter().position(|other| Arc::ptr_eq(other, member)) {
            state.answers[index] = round;
        }
        drop(state);
        self.answered.notify_all();
    }

    /// Asks all queues and waits for their answers, `limit` at most. False where one is missing.
    /// Call it from no queue's thread, and for one end at a time.
    pub(super) fn wait(&self, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        let mut state = self.state();
        state.round += 1;
        for member in &state.members {
            member.round.store(state.round, Ordering::Release);
            member.ask();
        }
        while state.answers.iter().any(|answer| *answer < state.round) {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            state =
                self.answered.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}
