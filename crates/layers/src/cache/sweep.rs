//! Takes the blocks of a long change out of the cache, in steps, between which the queue serves
//! other requests: a change may have many blocks, and a cache many slots.
//!
//! From the beginning on, the shards let none of these blocks in
//! ([`Shard::begin_range`](super::shard::Shard)). The change begins at home only after the last
//! step. So what a read finds between two steps is content from before a change that has not
//! completed.
//!
//! The blocks are looked up one by one if that costs less than a look at all slots.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use fathom_block::{Crossing, Request};

use super::format::BLOCK_BITS;
use super::queue::CacheQueue;
use super::shard::Reason;
use super::volume::CacheVolume;

/// The most work of a queue in a round. A look at a slot is 1.
const WORK_MAX: u64 = 32 << 10;
/// The work of a look for a block: its places in the index are not adjacent to those of the next
/// one.
const BLOCK_WORK: u64 = 8;
/// The most work under one lock.
const LOCKED_MAX: u64 = 4096;

/// The blocks of one disk that are being taken out.
pub(super) struct Sweep {
    keys: Range<u64>,
    reason: Reason,
    /// Whether the blocks are looked up, and not all slots.
    is_by_block: bool,
    /// The next key, or the next slot of the volume.
    next: u64,
}

impl Sweep {
    /// Begins to take the blocks with `keys` out of `volume`.
    pub(super) fn new(volume: &CacheVolume, keys: Range<u64>, reason: Reason) -> Self {
        let count = keys.end.saturating_sub(keys.start);
        let is_by_block = count.saturating_mul(BLOCK_WORK) < u64::from(volume.format.slots);
        Self { next: if is_by_block { keys.start } else { 0 }, keys, reason, is_by_block }
    }

    /// Continues for as long as there is `work`, from which it takes what it has used. Returns
    /// whether all blocks are out.
    pub(super) fn advance(&mut self, volume: &CacheVolume, work: &mut u64) -> bool {
        if self.is_by_block {
            self.advance_blocks(volume, work)
        } else {
            self.advance_slots(volume, work)
        }
    }

    fn advance_blocks(&mut self, volume: &CacheVolume, work: &mut u64) -> bool {
        while self.next < self.keys.end {
            if *work == 0 {
                return false;
            }
            let count = (*work).min(LOCKED_MAX).div_ceil(BLOCK_WORK);
            let end = volume.shard_end(self.next).min(self.keys.end).min(self.next + count);
            let mut shard = volume.shard(volume.shard_of(self.next));
            for key in self.next..end {
                shard.take_out(key, self.reason);
            }
            *work = work.saturating_sub((end - self.next) * BLOCK_WORK);
            self.next = end;
        }
        true
    }

    fn advance_slots(&mut self, volume: &CacheVolume, work: &mut u64) -> bool {
        let disk = (self.keys.start >> BLOCK_BITS) as u16;
        let shard_slots = u64::from(volume.shard_slots);
        while self.next < u64::from(volume.format.slots) {
            if *work == 0 {
                return false;
            }
            let (number, from) = (self.next / shard_slots, self.next % shard_slots);
            let mut shard = volume.shard(number as usize);
            if shard.mapped_of(disk) == 0 {
                // Nothing of the disk is in the shard any more, and nothing in the range gets into
                // it.
                *work -= 1;
                self.next = (number + 1) * shard_slots;
                continue;
            }
            let count = (*work).min(LOCKED_MAX).min(shard_slots - from);
            shard.sweep(&self.keys, from as u32, count as u32, self.reason);
            *work -= count;
            self.next += count;
        }
        true
    }
}

/// A change whose blocks are being taken out.
struct Held {
    /// The number of the change.
    number: u64,
    request: Box<Request>,
    sweep: Sweep,
}

/// The long changes of a queue that have not begun at home, in order.
pub(super) struct Sweeps {
    held: VecDeque<Held>,
    /// The work that is left in this round.
    work: u64,
}

impl Default for Sweeps {
    fn default() -> Self {
        Self { held: VecDeque::new(), work: WORK_MAX }
    }
}

impl CacheVolume {
    /// Takes the blocks with `keys` out. No lock is held for long, but the caller waits.
    pub(super) fn take_out(&self, keys: Range<u64>, reason: Reason) {
        let mut sweep = Sweep::new(self, keys, reason);
        let mut is_out = false;
        while !is_out {
            let mut work = WORK_MAX;
            is_out = sweep.advance(self, &mut work);
        }
    }
}

impl CacheQueue {
    /// The change `number` of the blocks with `keys` begins at home when they are out of the cache.
    pub(super) fn hold_for_sweep(
        &mut self,
        number: u64,
        request: Box<Request>,
        (keys, reason): (Range<u64>, Reason),
        next: &mut Crossing<'_>,
    ) {
        let sweep = Sweep::new(&self.inner.volume, keys, reason);
        self.sweeps.held.push_back(Held { number, request, sweep });
        if self.sweeps.held.len() == 1 {
            self.sweep(next);
        }
    }

    /// A new round: continues the sweeps.
    pub(super) fn continue_sweeps(&mut self, next: &mut Crossing<'_>) {
        self.sweeps.work = WORK_MAX;
        self.sweep(next);
    }

    fn sweep(&mut self, next: &mut Crossing<'_>) {
        let volume = Arc::clone(&self.inner.volume);
        let Sweeps { held, work } = &mut self.sweeps;
        while let Some(first) = held.front_mut() {
            if !first.sweep.advance(&volume, work) {
                // The other requests of the queue are first.
                return next.wake_at(next.round_ns());
            }
            if let Some(Held { request, .. }) = held.pop_front() {
                next.submit(request);
            }
        }
    }

    /// Gives up what has not begun at home, because the queue ends.
    pub(super) fn abandon_sweeps(&mut self) {
        for Held { number, .. } in std::mem::take(&mut self.sweeps.held) {
            let Some(changing) = self.changes.get(&number) else { continue };
            for (shard, range) in changing.ranges.iter().enumerate() {
                self.inner.volume.shard(shard).end_range(*range);
            }
        }
    }
}

#[cfg(test)]
#[path = "sweep_tests.rs"]
mod tests;
