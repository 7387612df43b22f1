//! How often blocks are read, for the choice of those with copies.
//!
//! Reads are counted in windows, each with its weight: at the end of each, all counts are halved.
//! Each queue gathers some reads in memory of its own, and adds them together if nobody else uses
//! the counts; otherwise they are not counted.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;

use super::copies::Comparison;

/// The reads that a queue gathers.
const READS_MAX: usize = 128;
/// The most blocks that are counted, for each slot; and at least.
const COUNTED_PER_SLOT: usize = 4;
const COUNTED_MIN: usize = 1024;
/// The reads in about two windows that a block with a copy has at least.
const READS_MIN: u32 = 2;

/// The counts of all queues.
#[derive(Debug)]
struct Counts {
    reads: HashMap<u64, u32>,
    /// When the window ends, and when the next plan is due, in nanoseconds.
    window_ns: u64,
    plan_ns: u64,
}

/// The most blocks of a plan.
const PLAN_MAX: usize = 8192;

/// Which blocks should have copies and lack them: each with the block that loses its slot, if no
/// slot is free.
pub(super) type Plan = Vec<(u64, Option<u64>)>;

/// See the module.
#[derive(Debug)]
pub(super) struct Heat {
    counts: Mutex<Counts>,
    slots: usize,
    /// The length of a window, in nanoseconds.
    window_ns: u64,
    /// The share of the reads whose blocks have copies, in thousandths, at the last plan.
    warmth: AtomicU32,
}

impl Heat {
    pub(super) fn new(slots: usize, window_ns: u64) -> Self {
        let counts = Counts { reads: HashMap::new(), window_ns: 0, plan_ns: 0 };
        let warmth = AtomicU32::new(0);
        Self { counts: Mutex::new(counts), slots, window_ns: window_ns.max(1), warmth }
    }

    /// Counts reads, unless another queue does so.
    fn add(&self, blocks: &[(u64, u32)]) {
        let Some(mut counts) = self.counts.try_lock() else { return };
        for (block, weight) in blocks {
            let count = counts.reads.entry(*block).or_default();
            *count = count.saturating_add(*weight);
        }
        let counted_max = (self.slots * COUNTED_PER_SLOT).max(COUNTED_MIN);
        while counts.reads.len() > counted_max {
            halve(&mut counts.reads);
        }
    }

    /// The share of the reads of late whose blocks had copies at the last plan.
    pub(super) fn warmth(&self) -> f64 {
        f64::from(self.warmth.load(Ordering::Relaxed)) / 1000.0
    }

    /// How often queues look for a new plan, in nanoseconds.
    pub(super) fn interval_ns(&self) -> u64 {
        self.window_ns / 16 + 1
    }

    /// The copies to make, if a new plan is due at `now_ns`. `compare` compares the blocks that
    /// should have one with the slots.
    pub(super) fn plan(
        &self,
        now_ns: u64,
        compare: impl FnOnce(&[u64]) -> Comparison,
    ) -> Option<Plan> {
        let mut counts = self.counts.try_lock()?;
        if counts.window_ns == 0 {
            counts.window_ns = now_ns.saturating_add(self.window_ns);
        }
        if now_ns < counts.plan_ns {
            return None;
        }
        counts.plan_ns = now_ns.saturating_add(self.interval_ns());
        if now_ns >= counts.window_ns {
            counts.window_ns = now_ns.saturating_add(self.window_ns);
            halve(&mut counts.reads);
        }
        let mut wanted: Vec<(u32, u64)> = counts
            .reads
            .iter()
            .filter(|(_, count)| **count >= READS_MIN)
            .map(|(block, count)| (*count, *block))
            .collect();
        // The order depends only on the counts.
        wanted.sort_unstable_by_key(|(count, block)| (u32::MAX - count, *block));
        wanted.truncate(self.slots);
        let blocks: Vec<u64> = wanted.iter().map(|(_, block)| *block).collect();
        let Comparison { lacking, shares, others } = compare(&blocks);
        let reads = |block: &u64| counts.reads.get(block).copied().unwrap_or(0);
        let all: u64 = counts.reads.values().map(|count| u64::from(*count)).sum();
        let warm = blocks.iter().zip(shares).map(|(block, share)| f64::from(reads(block)) * share);
        let warmth = warm.sum::<f64>() / all.max(1) as f64;
        self.warmth.store((warmth * 1000.0) as u32, Ordering::Relaxed);
        let mut others: Vec<(u32, u64)> =
            others.into_iter().map(|block| (reads(&block), block)).collect();
        others.sort_unstable();
        let mut victims = others.into_iter();
        let plan = lacking.into_iter().take(PLAN_MAX).map(|block| {
            let victim = victims.next();
            // Blocks with about as many reads do not replace each other.
            let is_worth = victim.is_none_or(|(count, _)| reads(&block) > count + count / 4);
            is_worth.then_some((block, victim.map(|(_, block)| block)))
        });
        Some(plan.flatten().collect())
    }
}

fn halve(reads: &mut HashMap<u64, u32>) {
    reads.retain(|_, count| {
        *count /= 2;
        *count > 0
    });
}

/// The reads that one queue has gathered.
#[derive(Debug)]
pub(super) struct Gathered {
    blocks: Vec<(u64, u32)>,
}

impl Gathered {
    pub(super) fn new() -> Self {
        Self { blocks: Vec::with_capacity(READS_MAX) }
    }

    /// Counts a read of a block, with a weight.
    pub(super) fn count(&mut self, block: u64, weight: u32, heat: &Heat) {
        self.blocks.push((block, weight));
        if self.blocks.len() >= READS_MAX {
            self.pass_on(heat);
        }
    }

    /// Adds the reads to the counts.
    pub(super) fn pass_on(&mut self, heat: &Heat) {
        heat.add(&self.blocks);
        self.blocks.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The blocks that are read most get copies, and keep them until others are read clearly more
    /// often.
    #[test]
    fn the_blocks_read_most_have_copies() {
        let heat = Heat::new(2, 1600);
        let mut gathered = Gathered::new();
        let mut read = |block, times| {
            for _ in 0..times {
                gathered.count(block, 1, &heat);
            }
            gathered.pass_on(&heat);
        };
        read(1, 10);
        read(2, 20);
        read(3, 1);
        let none =
            |wanted: &[u64]| Comparison { lacking: wanted.to_vec(), ..Comparison::default() };
        assert_eq!(heat.plan(1, none), Some(vec![(2, None), (1, None)]));
        assert_eq!(heat.plan(2, none), None, "the next plan is not due");
        // Block 4 is read about as often as block 1, and then clearly more often.
        let has = |copies: [u64; 2]| {
            move |wanted: &[u64]| {
                let lacking = wanted.iter().filter(|block| !copies.contains(block));
                let others = copies.into_iter().filter(|block| !wanted.contains(block));
                let lacking = lacking.copied().collect();
                Comparison { lacking, others: others.collect(), shares: Vec::new() }
            }
        };
        read(4, 11);
        assert_eq!(heat.plan(200, has([1, 2])), Some(vec![]));
        read(4, 10);
        assert_eq!(heat.plan(400, has([1, 2])), Some(vec![(4, Some(1))]));
        // What is not read any more is forgotten.
        for window in 1..=6 {
            heat.plan(window * 1601, none);
        }
        assert_eq!(heat.plan(20_000, none), Some(vec![]));
    }

    #[test]
    fn the_counts_are_bounded() {
        let heat = Heat::new(1, 1);
        let mut gathered = Gathered::new();
        for block in 0..100_000 {
            gathered.count(block, 1, &heat);
        }
        assert!(heat.counts.lock().reads.len() <= COUNTED_MIN);
    }
}
