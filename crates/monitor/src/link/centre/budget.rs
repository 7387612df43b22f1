//! How much memory a host may take at the centre.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How often one who waits looks whether it is to go on.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);

/// Bytes that are taken, of so many. What is asked for at once is had even where it is more than
/// that, but alone.
#[derive(Debug)]
pub struct Budget {
    most: usize,
    taken: Mutex<usize>,
    given: Condvar,
}

impl Budget {
    pub fn new(most: usize) -> Self {
        Self { most, taken: Mutex::new(0), given: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, usize> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes bytes, and waits until there are so many, or `goes_on` says no: then there are none.
    pub fn take(self: &Arc<Self>, bytes: usize, goes_on: &dyn Fn() -> bool) -> Option<Lease> {
        let mut taken = self.lock();
        while *taken > 0 && taken.saturating_add(bytes) > self.most {
            if !goes_on() {
                return None;
            }
            let waited = self.given.wait_timeout(taken, LOOK_INTERVAL);
            taken = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        *taken += bytes;
        Some(Lease { budget: Arc::clone(self), bytes })
    }

    /// How many are taken.
    #[cfg(test)]
    pub fn taken(&self) -> usize {
        *self.lock()
    }
}

/// Bytes that are taken until this is dropped.
#[derive(Debug)]
pub struct Lease {
    budget: Arc<Budget>,
    bytes: usize,
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut taken = self.budget.lock();
        *taken = taken.saturating_sub(self.bytes);
        self.budget.given.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_asks_for_too_much_waits() {
        let budget = Arc::new(Budget::new(100));
        let all = budget.take(1000, &|| true).expect("alone everything is had");
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
