//! Trials: small caches that follow a sample of the requests, each with other rules. The cache
//! itself follows the rules of the one that saved most disk time lately.
//!
//! A trial has a part of the cache's slots and sees the requests for the same part of all keys,
//! chosen by their hashes, so that it hits as often as a whole cache with its rules would
//! ("miniature simulation", Waldspurger and others, ATC 2017). The first trial trusts the classes
//! of requests, because a file's size and kind are known before anything is learned. The second
//! does not tell blocks apart, so that the policy costs at most what it takes to notice that its
//! knowledge does not help. The next ones begin like the first, and learn. The last ones do not
//! tell blocks apart either, and have other small queues: none is best for all workloads.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{BuildHasherDefault, Hasher};

use crate::access::BlockAccess;
use crate::engine::Engine;
use crate::ranks::{Probation, Ranks};
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
/// The trials that do not tell blocks apart either, with other small queues. With a large one,
/// blocks leave in the order of their last use, as far as this is known, which is best if what is
/// used changes.
const PROBATIONS: [Probation; 2] =
    [Probation { small_percent: 50 }, Probation { small_percent: 98 }];
/// The number of trials.
const TRIALS: usize = HORIZONS.len() + PROBATIONS.len() + 2;
/// No slot.
const NONE: u32 = u32::MAX;
/// What another trial must have saved in addition before the cache follows it, and the one that
/// does not tell blocks apart: what was learned is lost with such a change.
const LEAD: f64 = 1.02;
const LEAD_EQUAL: f64 = 1.05;

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
    /// The hash of the block in each slot that has been used.
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
            hashes: Vec::new(),
            slots,
            saved_ns: 0.0,
        }
    }

    /// A request for the block with a hash, which is in the slot `found`, or in none. Returns the
    /// slot in which it is then, and the hash of the block that has left this slot.
    fn request(
        &mut self,
        hash: u64,
        found: u32,
        group: usize,
        access: &BlockAccess,
    ) -> (u32, Option<u64>) {
        if let Some(worth) = &mut self.worth {
            if worth.observe(hash, group, access) {
                self.engine.ranks.clone_from(worth.ranks());
            }
        }
        if found != NONE {
            self.saved_ns += f64::from(access.miss_ns);
            self.engine.hit(found, group);
            return (found, None);
        }
        if self.engine.ranks.is_refused(group) {
            return (NONE, None);
        }
        let mut left = None;
        let slot = if self.hashes.len() < self.slots {
            self.hashes.push(hash);
            self.hashes.len() as u32 - 1
        } else {
            let hashes = &self.hashes;
            let Some(slot) = self.engine.victim(None, |slot| hashes[slot as usize], |_| 0) else {
                return (NONE, None);
            };
            left = Some(std::mem::replace(&mut self.hashes[slot as usize], hash));
            slot
        };
        self.engine.insert(slot, hash, group, 0);
        (slot, left)
    }
}

/// The trials.
#[derive(Debug)]
pub struct Trials {
    /// Keys with a hash of at most this one are sampled.
    threshold: u64,
    caches: Vec<Trial>,
    /// The slot in each trial of the blocks that one of them has: most blocks are in all of them.
    index: HashMap<u64, [u32; TRIALS], BuildHasherDefault<Same>>,
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
        let others =
            PROBATIONS.map(|probation| trial(Ranks::equal().with_probation(probation), None));
        Self {
            threshold,
            caches: fixed.into_iter().chain(learning).chain(others).collect(),
            index: HashMap::default(),
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
    pub fn observe(&mut self, hash: u64, group: usize, access: &BlockAccess) -> bool {
        self.request(hash, group, access);
        self.requests += 1;
        if self.requests % PERIOD != 0 {
            return false;
        }
        let saved_ns = |index: usize| self.caches[index].saved_ns;
        let mut best = self.best;
        for index in 0..self.caches.len() {
            let lead = if index == EQUAL { LEAD_EQUAL } else { LEAD };
            if saved_ns(index) > saved_ns(best) * lead {
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

    fn request(&mut self, hash: u64, group: usize, access: &BlockAccess) {
        let found = self.index.get(&hash).copied().unwrap_or([NONE; TRIALS]);
        let mut slots = found;
        for (trial, slot) in slots.iter_mut().enumerate() {
            let (now, left) = self.caches[trial].request(hash, *slot, group, access);
            *slot = now;
            if let Some(left) = left {
                self.forget(left, trial);
            }
        }
        if slots != found {
            self.index.insert(hash, slots);
        }
    }

    /// A block has left a trial.
    fn forget(&mut self, hash: u64, trial: usize) {
        if let Entry::Occupied(mut entry) = self.index.entry(hash) {
            entry.get_mut()[trial] = NONE;
            if *entry.get() == [NONE; TRIALS] {
                entry.remove();
            }
        }
    }

    /// The memory, in bytes.
    pub fn memory_bytes(&self) -> usize {
        let bytes = |trial: &Trial| {
            let worth = trial.worth.as_ref().map_or(0, Worth::memory_bytes);
            size_of::<Trial>()
                + trial.engine.memory_bytes()
                + worth
                + size_of_val(&trial.hashes[..])
        };
        let index = self.index.capacity() * (size_of::<(u64, [u32; TRIALS])>() + 1);
        index + self.caches.iter().map(bytes).sum::<usize>()
    }
}
