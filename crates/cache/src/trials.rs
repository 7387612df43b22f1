//! Trials: small caches that follow a sample of the requests, each with other rules. The cache
//! itself follows the rules of the one that was best lately.
//!
//! A trial has a part of the cache's slots and sees the requests for the same part of all keys,
//! chosen by their hashes, so that it hits as often as a whole cache with its rules would
//! ("miniature simulation", Waldspurger and others, ATC 2017). Four trials do not tell blocks
//! apart, and have different [`Base`]s: none is best for all workloads. They are all that the
//! policy `none` has; the best is the one with the fewest misses.
//!
//! The policy `auto` has four more, and the best is the one that saved most disk time. The first
//! trusts the classes of requests, because a file's size and kind are known before anything is
//! learned. The others begin like it, and learn. Those that do not tell blocks apart limit what the
//! policy costs where its knowledge does not help.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{BuildHasherDefault, Hasher};

use crate::access::BlockAccess;
use crate::engine::Engine;
use crate::ranks::{Base, Ranks};
use crate::worth::Worth;

/// The most slots of a trial.
const SLOTS: u64 = 4096;
/// With the policy `none`, a trial has at most this part of the cache's slots, but not fewer than
/// `SLOTS_MIN` for that: hits of a smaller one depend on chance.
const PART: u64 = 8;
const SLOTS_MIN: u64 = 128;
/// How long keys are followed to learn what blocks are worth, in slots of the cache, for each trial
/// that learns.
const HORIZONS: [u64; 3] = [2, 8, 32];
/// The bases of the trials that do not tell blocks apart. The cache begins with the first one.
const BASES: [Base; 4] = [Base::S3_FIFO, Base::CLOCK, Base::STRICT, Base::BRIEF];
/// The most trials.
const TRIALS: usize = BASES.len() + HORIZONS.len() + 1;
/// No slot.
const NONE: u32 = u32::MAX;
/// The requests of the sample between two comparisons of the bases, and those after which their
/// misses so far count half.
const PERIOD_BASE: u32 = 256;
const HALF_BASE: u32 = 16_384;
/// How many more misses a base has when the cache changes to another one: what that would keep is
/// not in the cache at first.
const LEAD_BASE: f64 = 1.01;
/// The requests of the sample between two comparisons of saved time, and those after which it
/// counts half.
const PERIOD: u32 = 512;
const HALF: u32 = 4096;
/// How much more time another trial must have saved before the cache follows it, and the base with
/// which the cache begins: what was learned is lost with such a change.
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
    misses: f64,
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
            misses: 0.0,
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
        self.misses += 1.0;
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
    /// Those of the bases first.
    caches: Vec<Trial>,
    /// The slot in each trial of the blocks that one of them has: most blocks are in all of them.
    index: HashMap<u64, [u32; TRIALS], BuildHasherDefault<Same>>,
    /// The base with the fewest misses, and the trial that the cache follows.
    base: usize,
    best: usize,
    requests: u32,
}

impl Trials {
    /// Makes the trials of the policy `none`, for a cache of this number of slots.
    pub fn of_bases(slots: u64) -> Self {
        let part = (slots / PART).max(SLOTS_MIN).min(slots);
        Self::new(slots, part, &[])
    }

    /// Makes the trials of the policy `auto`, for a cache of this number of slots.
    pub fn of_classes(slots: u64) -> Self {
        let learning = HORIZONS.map(Some);
        let horizons = [&[None], &learning[..]].concat();
        Self::new(slots, slots, &horizons)
    }

    /// Trials with about `part` of the slots: of the bases, and of the classes with these horizons.
    /// The cache begins with the first of the latter.
    fn new(slots: u64, part: u64, horizons: &[Option<u64>]) -> Self {
        let slots = slots.max(1);
        let part = part.clamp(1, SLOTS);
        let threshold = (u128::from(u64::MAX) * u128::from(part) / u128::from(slots)) as u64;
        let trial = |ranks, horizon| Trial::new(part as usize, ranks, horizon, threshold);
        let bases = BASES.iter().map(|base| trial(Ranks::of_base(*base), None));
        let classes = horizons.iter().map(|horizon| trial(Ranks::guess(), *horizon));
        Self {
            threshold,
            caches: bases.chain(classes).collect(),
            index: HashMap::default(),
            base: 0,
            best: if horizons.is_empty() { 0 } else { BASES.len() },
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
        if self.requests % PERIOD_BASE != 0 {
            return false;
        }
        let before = self.best;
        self.compare_bases();
        let has_classes = self.caches.len() > BASES.len();
        if has_classes && self.requests % PERIOD == 0 {
            self.compare_times();
        }
        if self.requests == HALF_BASE {
            self.requests = 0;
            self.caches.iter_mut().for_each(|trial| trial.misses /= 2.0);
        }
        // A trial that learns changes its levels itself.
        self.best != before || has_classes
    }

    /// Finds the base with the fewest misses. The cache follows it if it follows a base.
    fn compare_bases(&mut self) {
        let follows_base = self.best == self.base;
        for index in 0..BASES.len() {
            if self.caches[index].misses * LEAD_BASE < self.caches[self.base].misses {
                self.base = index;
            }
        }
        if follows_base {
            self.best = self.base;
        }
    }

    /// Finds the trial that saved most time, of those with classes and the best base.
    fn compare_times(&mut self) {
        for index in (BASES.len()..self.caches.len()).chain([self.base]) {
            let lead = if index == 0 { LEAD_EQUAL } else { LEAD };
            if self.caches[index].saved_ns > self.caches[self.best].saved_ns * lead {
                self.best = index;
            }
        }
        if self.requests % HALF == 0 {
            self.caches.iter_mut().for_each(|trial| trial.saved_ns /= 2.0);
        }
    }

    fn request(&mut self, hash: u64, group: usize, access: &BlockAccess) {
        let found = self.index.get(&hash).copied().unwrap_or([NONE; TRIALS]);
        let mut slots = found;
        for (trial, slot) in slots.iter_mut().enumerate().take(self.caches.len()) {
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
