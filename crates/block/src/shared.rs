//! State that the queues of a disk share.

use parking_lot::{Mutex, MutexGuard};

use crate::waker::Waker;

struct Inner<T> {
    state: T,
    parked: Vec<Waker>,
}

/// State that several queues share. It is locked while it is read or changed, never across I/O. A
/// queue that has to wait for another queue is woken.
///
/// The state is reachable only within a closure, so no lock outlives the call. A request that has
/// to wait stays in its own queue's part of the layer, which [parks](Self::attempt). A queue that
/// changes the state in a way that others may wait for [wakes](Self::wake) all parked queues, and
/// each tries again.
pub struct Shared<T> {
    inner: Mutex<Inner<T>>,
}

impl<T> Shared<T> {
    /// A state without waiting queues.
    pub fn new(state: T) -> Self {
        Self { inner: Mutex::new(Inner { state, parked: Vec::new() }) }
    }

    fn lock(&self) -> MutexGuard<'_, Inner<T>> {
        self.inner.lock()
    }

    /// Reads or changes the state. The closure must not block.
    pub fn access<R>(&self, access: impl FnOnce(&mut T) -> R) -> R {
        access(&mut self.lock().state)
    }

    /// Reads or changes the state. If the closure returns `None`, `waker` is parked under the same
    /// lock and is used at the next [`wake`](Self::wake), so no change is missed.
    pub fn attempt<R>(
        &self,
        waker: &Waker,
        attempt: impl FnOnce(&mut T) -> Option<R>,
    ) -> Option<R> {
        let mut inner = self.lock();
        let result = attempt(&mut inner.state);
        if result.is_none() && !inner.parked.iter().any(|parked| parked.is_same(waker)) {
            // Removes the wakers of closed queues.
            inner.parked.retain(|parked| !parked.is_orphan());
            inner.parked.push(waker.clone());
        }
        result
    }

    /// Uses all parked wakers.
    pub fn wake(&self) {
        let parked = std::mem::take(&mut self.lock().parked);
        for waker in parked {
            waker.wake();
        }
    }
}
