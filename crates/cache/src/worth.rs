//! What blocks are worth: the disk time that the next request for a block would cost without the
//! cache, on average, by group of blocks.
//!
//! A group has the class of the last request for a block, whether that was a write, and how much
//! its miss costs. Keys whose hash is below a threshold are followed, whether they are in the cache
//! or not. If such a key is requested again, the cost of that request is credited to the group that
//! the key had before; if it is not requested again for a long time, nothing is credited. So the
//! policy learns from what it does not keep, too, and needs no experiments.
//!
//! The worth of a group decides its level. A block of one level lives four times as long as one of
//! the level below before both leave. So disk time saved for each slot and time is about equal at
//! the ends of all queues, if blocks are less likely to be requested again the longer they wait.

use crate::access::BlockAccess;
use crate::ranks::{LEVEL_MEAN, LEVEL_SHIFT, LEVELS, Ranks};
use crate::slots::GROUPS;

/// The most keys that are followed.
const FOLLOWED: usize = 4096;
/// The observations between two changes of the levels.
const STEP: u32 = 512;
/// The observations after which they all count half.
const HALF: f64 = 32_768.0;
/// Each group begins with this many observations of what its class lets expect.
const PRIOR: f64 = 16.0;

/// A key that is followed.
#[derive(Clone, Copy, Debug, Default)]
struct Followed {
    /// The hash, or 0 if the key has been requested again.
    hash: u64,
    group: u16,
}

/// The sums of a group's observations.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    saved_ns: f64,
    count: f64,
}

/// The worth of groups.
#[derive(Debug)]
pub struct Worth {
    /// Keys with a hash of at most this one are followed.
    threshold: u64,
    /// The keys in order of their last request: a ring.
    ring: Vec<Followed>,
    next: usize,
    /// The positions in the ring by hash, plus 1; sets of four.
    index: Vec<[u16; 4]>,
    sums: Vec<Sums>,
    observations: u32,
    /// What each group is expected to be worth before anything is learned, in units of the mean.
    expected: [f64; GROUPS],
    ranks: Ranks,
}

impl Worth {
    /// Without observations, for a stream of keys with hashes up to `hash_max`. Keys are followed
    /// for about this number of requests of the stream. `ranks` are the levels before anything is
    /// learned.
    pub fn new(horizon: u64, hash_max: u64, ranks: Ranks) -> Self {
        let horizon = horizon.max(1);
        let ring = FOLLOWED.min(horizon.next_power_of_two().max(256) as usize);
        let threshold = (u128::from(hash_max) * ring as u128 / u128::from(horizon))
            .min(u128::from(hash_max)) as u64;
        Self {
            threshold,
            ring: vec![Followed::default(); ring],
            next: 0,
            index: vec![[0; 4]; ring / 2],
            sums: vec![Sums::default(); GROUPS],
            observations: 0,
            expected: std::array::from_fn(|group| {
                let above = i32::from(ranks.level(group)) - i32::from(LEVEL_MEAN);
                f64::from(above * LEVEL_SHIFT as i32).exp2()
            }),
            ranks,
        }
    }

    /// The levels of groups by their worth.
    pub fn ranks(&self) -> &Ranks {
        &self.ranks
    }

    /// Learns from a request. Returns whether the levels may have changed.
    pub fn observe(&mut self, hash: u64, group: usize, access: &BlockAccess) -> bool {
        if hash > self.threshold {
            return false;
        }
        let hash = hash.max(1);
        // The high bits of followed hashes are alike.
        let set = hash as usize & (self.index.len() - 1);
        let known = self.index[set].iter().position(|entry| {
            let entry = usize::from(*entry);
            entry > 0 && self.ring[entry - 1].hash == hash
        });
        let way = if let Some(way) = known {
            let before = &mut self.ring[usize::from(self.index[set][way]) - 1];
            let sums = &mut self.sums[usize::from(before.group)];
            sums.saved_ns += f64::from(access.miss_ns);
            sums.count += 1.0;
            before.hash = 0;
            way
        } else {
            // The oldest of the set is forgotten if none is free: it is about to expire.
            let age = |entry: u16| {
                let entry = usize::from(entry);
                if entry == 0 {
                    return usize::MAX;
                }
                (self.next + self.ring.len() - (entry - 1)) % self.ring.len()
            };
            (0..4).max_by_key(|way| age(self.index[set][*way])).unwrap_or(0)
        };
        self.expire();
        self.index[set][way] = self.next as u16 + 1;
        self.ring[self.next] = Followed { hash, group: group as u16 };
        self.next = (self.next + 1) % self.ring.len();
        self.observations += 1;
        let is_due = self.observations % STEP == 0;
        if is_due {
            self.judge();
        }
        is_due
    }

    /// Ends the observation of the key whose place in the ring is used next.
    fn expire(&mut self) {
        let old = self.ring[self.next];
        if old.hash != 0 {
            self.sums[usize::from(old.group)].count += 1.0;
            let set = old.hash as usize & (self.index.len() - 1);
            for entry in &mut self.index[set] {
                if usize::from(*entry) == self.next + 1 {
                    *entry = 0;
                }
            }
        }
    }

    /// Sets the levels of the groups by what was observed.
    fn judge(&mut self) {
        let all = self.sums.iter().fold(Sums::default(), |all, sums| Sums {
            saved_ns: all.saved_ns + sums.saved_ns,
            count: all.count + sums.count,
        });
        if all.saved_ns <= 0.0 || all.count < f64::from(STEP) {
            return;
        }
        let mean_ns = all.saved_ns / all.count;
        for (group, sums) in self.sums.iter().enumerate() {
            let expected = self.expected[group];
            let worth = (sums.saved_ns / mean_ns + PRIOR * expected) / (sums.count + PRIOR);
            let level = f64::from(LEVEL_MEAN) + worth.log2() / f64::from(LEVEL_SHIFT);
            let level = level.round().clamp(0.0, LEVELS as f64 - 1.0) as u8;
            self.ranks.set(group, level, worth < 1.0 / 64.0);
        }
        if all.count > HALF {
            for sums in &mut self.sums {
                sums.saved_ns /= 2.0;
                sums.count /= 2.0;
            }
        }
    }

    /// The memory, in bytes.
    pub fn memory_bytes(&self) -> usize {
        size_of_val(&self.ring[..]) + size_of_val(&self.index[..]) + size_of_val(&self.sums[..])
    }
}
