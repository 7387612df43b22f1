//! Trials: small caches that follow a sample of the requests, each with other rules. The cache itself
//! follows the rules of the one that saved most disk time lately.
//!
//! A trial has a part of the cache's slots and sees the requests for the same part of all keys, chosen
//! by their hashes, so that it hits as often as a whole cache with its rules would ("miniature
//! simulation", Waldspurger and others, ATC 2017). The first trial trusts the classes of requests,
//! because a file's size and kind are known before anything is learned; it does the same as the second
//! for requests without a meaning. The second does not tell blocks apart, so that the policy costs at
//! most what it takes to notice that its knowledge does not help. The others begin like the first, and
//! learn.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use crate::access::Access;
use crate::engine::Engine;
use crate::ranks::Ranks;
use crate::worth::Worth;

/// The most slots of a trial.
const SLOTS: u64 = 4096;
/// How long keys are followed to learn what blocks are worth, in slots of the cache, for each trial
/// that learns.
const HORIZONS: [u64; 3] = [2, 8, 32];
/// The requests between two comparisons.
const PERIOD: u32 = 512;
/// The comparisons after which the results so far count half.
const HALF: u32 = 8;
/// The trial that does not tell blocks apart.
const EQUAL: usize = 1;
/// What another trial must have saved in addition before the cache follows it.
const LEAD: f64 = 1.02;

/// A hasher of keys that are hashes.
#[derive(Default)]
struct Same(u64);

impl Hasher for Same {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0 << 8 | u64::from(*byte);
        }
    }

    fn write_u64(&mut self, word: u64) {
        // The high bits of sampled hashes are alike.
        self.0 = word.rotate_left(32) ^ word;
    }
}

/// A small cache.
#[derive(Debug)]
struct Trial {
    engine: Engine,
    worth: Option<Worth>,
    index: HashMap<u64, u32, BuildHasherDefault<Same>>,
    hashes: Vec<u64>,
    slots: usize,
    saved_ns: f64,
}

impl Trial {
    fn new(slots: usize, ranks: Ranks, horizon: Option<u64>, hash_max: u64) -> Self {
        Self {
            worth: horizon
                .map(|horizon| Worth::new(horizon * slots as u64, hash_max, ranks.clone())),
            engine: Engine::new(ranks, slots),
            index: HashMap::default(),
            hashes: Vec::new(),
            slots,
            saved_ns: 0.0,
        }
    }

    fn request(&mut self, hash: u64, group: usize, access: &Access) {
        if let Some(worth) = &mut self.worth {
            if worth.observe(hash, group, access) {
                self.engine.ranks.clone_from(worth.ranks());
            }
        }
        if let Some(slot) = self.index.get(&hash) {
            self.saved_ns += f64::from(access.miss_ns);
            self.engine.hit(*slot, group);
            return;
        }
        if self.engine.ranks.is_refused(group) {
            return;
        }
        let slot = if self.hashes.len() < self.slots {
            self.hashes.push(hash);
            self.hashes.len() as u32 - 1
        } else {
            let hashes = &self.hashes;
            let Some(slot) = self.engine.victim(None, |slot| hashes[slot as usize], |_| 0) else {
                return;
            };
            self.index.remove(&self.hashes[slot as usize]);
            self.hashes[slot as usize] = hash;
            slot
        };
        self.index.insert(hash, slot);
        self.engine.insert(slot, hash, group, 0);
    }
}

/// The trials.
#[derive(Debug)]
pub struct Trials {
    /// Keys with a hash of at most this one are sampled.
    threshold: u64,
    caches: Vec<Trial>,
    best: usize,
    requests: u32,
}

impl Trials {
    /// Makes the trials for a cache of this number of slots.
    pub fn new(slots: u64) -> Self {
        let slots = slots.max(1);
        let part = slots.min(SLOTS);
        let threshold = (u128::from(u64::MAX) * u128::from(part) / u128::from(slots)) as u64;
        let part = part as usize;
        let trial = |ranks, horizon| Trial::new(part, ranks, horizon, threshold);
        let fixed = [trial(Ranks::guess(), None), trial(Ranks::equal(), None)];
        let learning = HORIZONS.map(|horizon| trial(Ranks::guess(), Some(horizon)));
        Self {
            threshold,
            caches: fixed.into_iter().chain(learning).collect(),
            best: 0,
            requests: 0,
        }
    }

    /// The greatest hash of the keys whose requests are observed.
    pub fn threshold(&self) -> u64 {
        self.threshold
    }

    /// The levels that the cache follows now.
    pub fn ranks(&self) -> &Ranks {
        &self.caches[self.best].engine.ranks
    }

    /// Learns from a request of the sample. Returns whether the levels may have changed.
    pub fn observe(&mut self, hash: u64, group: usize, access: &Access) -> bool {
        self.caches.iter_mut().for_each(|trial| trial.request(hash, group, access));
        self.requests += 1;
        if self.requests % PERIOD != 0 {
            return false;
        }
        // The cache goes back to equal blocks as soon as nothing is gained by telling them apart.
        let saved_ns = |index: usize| self.caches[index].saved_ns;
        let mut best = if saved_ns(EQUAL) > saved_ns(self.best) { EQUAL } else { self.best };
        for index in 0..self.caches.len() {
            if saved_ns(index) > saved_ns(best) * LEAD {
                best = index;
            }
        }
        self.best = best;
        if self.requests == PERIOD * HALF {
            self.requests = 0;
            self.caches.iter_mut().for_each(|trial| trial.saved_ns /= 2.0);
        }
        true
    }

    /// The memory, in bytes.
    pub fn memory_bytes(&self) -> usize {
        let bytes = |trial: &Trial| {
            let index = trial.index.capacity() * (size_of::<(u64, u32)>() + 1);
            let worth = trial.worth.as_ref().map_or(0, Worth::memory_bytes);
            size_of::<Trial>()
                + trial.engine.memory_bytes()
                + index
                + worth
                + size_of_val(&trial.hashes[..])
        };
        self.caches.iter().map(bytes).sum()
    }
}
