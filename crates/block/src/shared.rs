//! State that the queues of a disk share.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::waker::Waker;

struct Inner<T> {
    state: T,
    parked: Vec<Waker>,
}

/// State that several queues share, under the one rule for it: it is locked for a look and never
/// across I/O, and whoever has to wait for another queue is woken.
///
/// The state is reachable within a closure alone, which gets nothing that waits; so no lock
/// outlives the call. A request that cannot go on stays in its own queue's part, which
/// [parks](Self::attempt); whoever changes what others may wait for [wakes](Self::wake) them all,
/// and each tries again.
pub struct Shared<T> {
    inner: Mutex<Inner<T>>,
}

impl<T> Shared<T> {
    /// A state for which nobody waits.
    pub fn new(state: T) -> Self {
        Self { inner: Mutex::new(Inner { state, parked: Vec::new() }) }
    }

    fn lock(&self) -> MutexGuard<'_, Inner<T>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at the state, or changes it. The closure must not wait for anything.
    pub fn look<R>(&self, look: impl FnOnce(&mut T) -> R) -> R {
        look(&mut self.lock().state)
    }

    /// The same. Where it gives `None`, `waker` is used at the next [`wake`](Self::wake): no change
    /// comes between the look and the wait.
    pub fn attempt<R>(
        &self,
        waker: &Waker,
        attempt: impl FnOnce(&mut T) -> Option<R>,
    ) -> Option<R> {
        let mut inner = self.lock();
        let result = attempt(&mut inner.state);
        if result.is_none() && !inner.parked.iter().any(|parked| parked.is_same(waker)) {
            inner.parked.push(waker.clone());
        }
        result
    }

    /// Wakes all that have parked.
    pub fn wake(&self) {
        let parked = std::mem::take(&mut self.lock().parked);
        for waker in parked {
            waker.wake();
        }
    }
}
