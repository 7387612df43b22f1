//! One queue's hits, which take no lock that other queues take for their hits.

use std::sync::Arc;

use crate::access::BlockAccess;
use crate::hash;
use crate::learner::{Learner, Observation};
use crate::ranks::group;
use crate::slots::SlotStates;

/// The waiting observations at which they are passed on, unless another queue passes on its own.
const BATCH: usize = 32;
/// The most waiting observations.
const WAITING_MAX: usize = 256;
/// The observations of a millisecond of 2²⁰ ns that are passed on, on average, and the most that
/// are passed on at once. Hits are more frequent only while nearly all requests of the queue hit in
/// memory: then there is little to learn from each.
const PER_MILLISECOND: u64 = 16;
const BURST: u64 = 8192;

/// What the replacements of a cache need to know of one queue's hits.
///
/// A hit of a block whose state says everything already changes nothing in its replacement, so that
/// the queue does not need the lock of its shard. What the policies `none` and `auto` learn of it
/// waits in a list of the queue.
#[derive(Debug)]
pub struct Hits {
    learner: Option<Arc<Learner>>,
    /// A copy of the learner's, which is beside what others change: the greatest hash of the
    /// sample.
    threshold: u64,
    waiting: Vec<Observation>,
    /// The observations that may be passed on until the next millisecond, and the present one.
    allowed: u64,
    millisecond: u64,
}

impl Hits {
    pub(crate) fn new(learner: Option<Arc<Learner>>) -> Self {
        let threshold = learner.as_ref().map_or(0, |learner| learner.threshold());
        Self { learner, threshold, waiting: Vec::new(), allowed: BURST, millisecond: 0 }
    }

    /// Whether a hit of the block in `slot` changes nothing. Otherwise the caller calls
    /// [`Replacement::hit`](crate::Replacement::hit) of the slot's shard under its lock. `access`
    /// is a read.
    #[inline]
    pub fn is_settled(states: &SlotStates, slot: u32, access: &BlockAccess) -> bool {
        access.is_continued || !access.is_write && states.is_settled(slot, group(access))
    }

    /// A hit of the block of `key` at a time in nanoseconds, which changed nothing in its
    /// replacement.
    #[inline]
    pub fn observe(&mut self, key: u64, access: &BlockAccess, now_ns: u64) {
        let Some(learner) = &self.learner else { return };
        if access.is_continued {
            return;
        }
        let hash = hash(key);
        if hash <= self.threshold {
            let millisecond = now_ns >> 20;
            if millisecond > self.millisecond {
                let more = (millisecond - self.millisecond).saturating_mul(PER_MILLISECOND);
                self.allowed = self.allowed.saturating_add(more).min(BURST);
                self.millisecond = millisecond;
            }
            let Some(allowed) = self.allowed.checked_sub(1) else { return };
            self.allowed = allowed;
            self.waiting.push(Observation { hash, group: group(access) as u16, access: *access });
            if self.waiting.len() >= BATCH {
                learner.observe_all(&mut self.waiting, WAITING_MAX);
            }
        }
    }

    /// Passes on what waits: the queue is about to use a replacement under a lock.
    #[inline]
    pub fn pass_on(&mut self) {
        if let (Some(learner), false) = (&self.learner, self.waiting.is_empty()) {
            learner.observe_all(&mut self.waiting, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replacement::{Policy, Replacement, ReplacementOptions};

    /// A replacement whose settled hits are passed on in batches decides as one that sees each hit
    /// at once.
    #[test]
    fn batches_of_hits_change_no_decision() {
        for policy in [Policy::None, Policy::Sky, Policy::Auto] {
            let options = ReplacementOptions { policy };
            let slots = 300;
            let mut both = [0, 1].map(|_| Replacement::new(&options, slots));
            let mut hits = both[1].hits();
            let states = Arc::clone(both[1].states());
            let mut keys = vec![u64::MAX; slots as usize];
            let (mut random, mut settled, mut free) = (fastrand::Rng::with_seed(3), 0, 0);
            for step in 0..60_000_u64 {
                // The blocks of interest change.
                let base = step / 20_000 * 200;
                let key = base + (random.f64() * random.f64() * 600.0) as u64;
                let class = (key % 6) as u8;
                let miss_ns = if key % 3 == 0 { 5_000_000 } else { 100_000 };
                let access = BlockAccess { class, miss_ns, ..BlockAccess::default() };
                if let Some(slot) = (0..slots).find(|slot| keys[*slot as usize] == key) {
                    both[0].hit(slot, key, &access);
                    if Hits::is_settled(&states, slot, &access) {
                        settled += 1;
                        hits.observe(key, &access, step * 100_000);
                    } else {
                        hits.pass_on();
                        both[1].hit(slot, key, &access);
                    }
                    continue;
                }
                hits.pass_on();
                let admits = both.each_mut().map(|replacement| replacement.admits(key, &access));
                assert_eq!(admits[0], admits[1]);
                if !admits[0] {
                    continue;
                }
                let slot = if free < slots {
                    free += 1;
                    free - 1
                } else {
                    let key = |slot: u32| keys[slot as usize];
                    let victims = both.each_mut().map(|one| one.victim(None, key));
                    assert_eq!(victims[0], victims[1], "step {step}");
                    victims[0].expect("the cache is full")
                };
                keys[slot as usize] = key;
                for replacement in &mut both {
                    replacement.insert(slot, key, &access);
                }
            }
            assert!(settled > 10_000, "{policy:?}: {settled}");
        }
    }

    #[test]
    fn a_queue_that_waits_for_another_one_keeps_a_bounded_list() {
        let replacement = Replacement::new(&ReplacementOptions { policy: Policy::Auto }, 100);
        let (mut hits, mut other) = (replacement.hits(), replacement.hits());
        let learner = other.learner.clone().expect("it learns");
        let access = BlockAccess::default();
        let busy = learner.lock();
        for key in 1..WAITING_MAX as u64 {
            hits.observe(key, &access, 0);
        }
        assert_eq!(hits.waiting.len(), WAITING_MAX - 1);
        drop(busy);
        hits.observe(0, &access, 0);
        other.observe(0, &access, 0);
        assert!(hits.waiting.is_empty() && other.waiting.len() == 1);
        other.pass_on();
        assert!(other.waiting.is_empty());
    }

    /// Of a flood of hits, a burst and then a bounded number in each millisecond are passed on.
    #[test]
    fn a_flood_of_hits_is_observed_in_part() {
        let replacement = Replacement::new(&ReplacementOptions { policy: Policy::Auto }, 100);
        let mut hits = replacement.hits();
        let seconds = 2;
        let mut observed = 0;
        for number in 0..seconds * 1_000_000 {
            let waiting = hits.waiting.len();
            hits.observe(number, &BlockAccess::default(), number * 1000);
            observed += u64::from(hits.waiting.len() != waiting);
        }
        let expected = BURST + (seconds * 1_000_000_000 >> 20) * PER_MILLISECOND;
        assert!(observed.abs_diff(expected) <= PER_MILLISECOND, "{observed} of {expected}");
    }
}
