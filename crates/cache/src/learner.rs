//! What the shards of a cache with the policy `auto` learn together.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::access::Access;
use crate::ranks::Ranks;
use crate::trials::Trials;

/// The trials of a cache. Only requests of their sample take the lock.
#[derive(Debug)]
pub struct Learner {
    threshold: u64,
    trials: Mutex<Trials>,
    /// The number of the present levels.
    version: AtomicU32,
}

impl Learner {
    /// For a cache of this number of slots.
    pub fn new(slots: u64) -> Self {
        let trials = Trials::new(slots);
        Self {
            threshold: trials.threshold(),
            trials: Mutex::new(trials),
            version: AtomicU32::new(0),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Trials> {
        self.trials.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Learns from a request.
    #[inline]
    pub fn observe(&self, hash: u64, group: usize, access: &Access) {
        if hash > self.threshold {
            return;
        }
        if self.lock().observe(hash, group, access) {
            self.version.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Takes over the levels if they have changed since `version`.
    #[inline]
    pub fn update(&self, version: &mut u32, ranks: &mut Ranks) {
        let current = self.version.load(Ordering::Relaxed);
        if current != *version {
            *version = current;
            ranks.clone_from(self.lock().ranks());
        }
    }

    /// The memory, in bytes.
    pub fn memory_bytes(&self) -> usize {
        size_of::<Self>() + self.lock().memory_bytes()
    }
}
