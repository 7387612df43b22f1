//! The limit of the memory that a host takes at the centre.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};

/// The interval at which a waiting thread checks whether to stop waiting.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);

/// A limit on bytes in use. A single request above the limit is granted if no other bytes are in
/// use.
#[derive(Debug)]
pub struct MemoryBudget {
    limit: usize,
    taken: Mutex<usize>,
    released: Condvar,
    /// The number of threads that wait for room.
    waiting: AtomicUsize,
}

impl MemoryBudget {
    pub fn new(limit: usize) -> Self {
        Self { limit, taken: Mutex::new(0), released: Condvar::new(), waiting: AtomicUsize::new(0) }
    }

    fn lock(&self) -> MutexGuard<'_, usize> {
        self.taken.lock()
    }

    /// Takes bytes, and waits until there is room for them. Returns `None` if `keep_waiting`
    /// returns false.
    pub fn take(self: &Arc<Self>, bytes: usize, keep_waiting: &dyn Fn() -> bool) -> Option<Lease> {
        let mut taken = self.lock();
        while *taken > 0 && taken.saturating_add(bytes) > self.limit {
            if !keep_waiting() {
                return None;
            }
            self.waiting.fetch_add(1, Ordering::Relaxed);
            self.released.wait_for(&mut taken, CHECK_INTERVAL);
            self.waiting.fetch_sub(1, Ordering::Relaxed);
        }
        *taken += bytes;
        Some(Lease { budget: Arc::clone(self), bytes })
    }

    /// The number of bytes in use.
    #[cfg(test)]
    pub fn taken(&self) -> usize {
        *self.lock()
    }
}

/// Bytes in use. They are released when this is dropped.
#[derive(Debug)]
pub struct Lease {
    budget: Arc<MemoryBudget>,
    bytes: usize,
}

impl Lease {
    /// Whether a thread waits for room in the memory from which these bytes were taken.
    pub fn is_waited_for(&self) -> bool {
        self.budget.waiting.load(Ordering::Relaxed) > 0
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut taken = self.budget.lock();
        *taken = taken.saturating_sub(self.bytes);
        self.budget.released.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_above_the_limit_waits() {
        let budget = Arc::new(MemoryBudget::new(100));
        let all = budget.take(1000, &|| true).expect("nothing else is in use");
        assert!(budget.take(1, &|| false).is_none());
        drop(all);
        let some = budget.take(60, &|| false).unwrap();
        let _others = budget.take(40, &|| false).unwrap();
        assert!(budget.take(1, &|| false).is_none());
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| budget.take(60, &|| true));
            drop(some);
            let lease = waits.join().unwrap().unwrap();
            assert_eq!((lease.bytes, budget.taken()), (60, 100));
        });
        assert_eq!(budget.taken(), 40);
    }
}
