//! What the shards of a cache learn together.

use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::{Mutex, MutexGuard};

use crate::access::BlockAccess;
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

/// A request of the sample.
#[derive(Clone, Copy, Debug)]
pub struct Observation {
    pub hash: u64,
    pub group: u16,
    pub access: BlockAccess,
}

impl Learner {
    /// Follows these trials.
    pub fn new(trials: Trials) -> Self {
        Self {
            threshold: trials.threshold(),
            trials: Mutex::new(trials),
            version: AtomicU32::new(0),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Trials> {
        self.trials.lock()
    }

    /// The greatest hash of the keys whose requests are observed.
    pub fn threshold(&self) -> u64 {
        self.threshold
    }

    /// Learns from requests of the sample, and takes them out of the list. While another thread
    /// learns, a list of less than `waiting_max` stays as it is.
    pub fn observe_all(&self, waiting: &mut Vec<Observation>, waiting_max: usize) {
        let mut trials = match self.trials.try_lock() {
            Some(trials) => trials,
            None if waiting.len() < waiting_max => return,
            None => self.lock(),
        };
        for Observation { hash, group, access } in waiting.drain(..) {
            self.learn(&mut trials, hash, group.into(), &access);
        }
    }

    fn learn(&self, trials: &mut Trials, hash: u64, group: usize, access: &BlockAccess) {
        if trials.observe(hash, group, access) {
            self.version.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Learns from a request.
    #[inline]
    pub fn observe(&self, hash: u64, group: usize, access: &BlockAccess) {
        if hash > self.threshold {
            return;
        }
        self.learn(&mut self.lock(), hash, group, access);
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
