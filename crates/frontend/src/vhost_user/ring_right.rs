//! The right to run rings.
//!
//! During a live migration two VMMs are connected to one disk: the source, whose guest runs, and
//! the destination, which sets up its device and waits. Only one of them may have running rings, or
//! two guests would write one disk. The second VMM's rings start as soon as the last ring of the
//! first has stopped.

use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};

/// How long a VMM's ring waits for another VMM's rings to stop.
const WAIT_MAX: Duration = Duration::from_secs(10);

/// The right to run rings, held by at most one session of a disk.
#[derive(Default)]
pub(super) struct RingRight {
    state: Mutex<State>,
    freed: Condvar,
}

#[derive(Default)]
struct State {
    holder: Option<u64>,
    /// The server ends: no session gets the right.
    closed: bool,
}

impl RingRight {
    /// Waits until no session other than `session` runs rings. Returns whether `session` holds the
    /// right now.
    pub(super) fn acquire(&self, session: u64) -> bool {
        self.acquire_within(session, WAIT_MAX)
    }

    fn acquire_within(&self, session: u64, limit: Duration) -> bool {
        let mut state = self.state();
        let is_held = |state: &mut State| {
            !state.closed && state.holder.is_some_and(|holder| holder != session)
        };
        self.freed.wait_while_for(&mut state, is_held, limit);
        if state.closed || state.holder.is_some_and(|other| other != session) {
            return false;
        }
        state.holder = Some(session);
        true
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Releases the right of `session`, if it holds it.
    pub(super) fn release(&self, session: u64) {
        let mut state = self.state();
        if state.holder == Some(session) {
            state.holder = None;
            self.freed.notify_all();
        }
    }

    /// The server ends: sessions that wait do not get the right.
    pub(super) fn close(&self) {
        self.state().closed = true;
        self.freed.notify_all();
    }

    /// The session that holds the right.
    pub(super) fn holder(&self) -> Option<u64> {
        self.state().holder
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn the_second_waits_for_the_first() {
        let right = Arc::new(RingRight::default());
        assert!(right.acquire(1));
        assert!(right.acquire(1));
        assert!(!right.acquire_within(2, Duration::from_millis(5)));
        right.release(2);
        assert_eq!(right.holder(), Some(1));
        let second = Arc::clone(&right);
        let waiting = std::thread::spawn(move || second.acquire(2));
        std::thread::sleep(Duration::from_millis(20));
        right.release(1);
        assert!(waiting.join().unwrap());
        assert_eq!(right.holder(), Some(2));
        let third = Arc::clone(&right);
        let waiting = std::thread::spawn(move || third.acquire(3));
        right.close();
        assert!(!waiting.join().unwrap());
    }
}
