//! The queues of a cache: S3-FIFO with levels.
//!
//! A new block enters the small queue, a tenth of the slots. If it is hit there, it moves to the
//! main queue when its turn comes; otherwise it leaves the cache, and the ghosts remember it. A
//! block that the ghosts remember enters the main queue at once. A block of the main queue that has
//! been hit gets another round for each hit, at most three.
//!
//! The main queue consists of one queue for each level. The first block of a level lives longer than
//! that of the level below by a fixed ratio. Blocks of high levels skip the small queue as long as
//! their level has less than three quarters of the slots. If all blocks have one level, this is S3-FIFO.
//!
//! A hit only counts: it moves nothing. A block that the caller removes leaves its entry in a queue,
//! because entries are not linked both ways. Such a stale entry is dropped when its turn comes. At
//! any time a slot has as many entries in the queues as its state has stale ones, and one more if it
//! has a block. If a slot is reused while many stale entries exist, the block takes over a stale
//! entry and its place.

use crate::ghost::Ghost;
use crate::queues::Queues;
use crate::ranks::{LEVELS, Ranks};
use crate::slots::{QUEUES, STALE_MAX, Slot};

/// The number of blocks that a search for a victim passes over. The next one is taken even if it
/// has been hit, so that a search takes a bounded time.
const STEPS_MAX: u32 = 512;

/// The small queue. The main queue consists of one queue for each level.
const SMALL: usize = 0;
const _: () = assert!(LEVELS < QUEUES);

/// The queues.
#[derive(Debug)]
pub struct Engine {
    /// The levels of groups of blocks.
    pub ranks: Ranks,
    slots: Vec<Slot>,
    queues: Queues,
    ghost: Ghost,
    /// The blocks in each queue.
    counts: [u32; QUEUES],
    blocks: u32,
    /// The blocks that the small queue has at least before one of them leaves.
    small_min: u32,
    /// The blocks of a level from which on further blocks do not skip the small queue.
    level_max: u32,
    /// The entries of slots beyond one for each slot, and their limit.
    extra: usize,
    extra_max: usize,
    /// The number of insertions.
    time: u32,
}

impl Engine {
    /// Makes the queues for this number of slots.
    pub fn new(ranks: Ranks, slots: usize) -> Self {
        let extra_max = slots / 64;
        Self {
            ranks,
            slots: vec![Slot::default(); slots],
            queues: Queues::new(QUEUES, slots + extra_max),
            ghost: Ghost::new(slots * 11 / 10, slots * 9 / 10),
            counts: [0; QUEUES],
            blocks: 0,
            small_min: (slots / 10).max(1) as u32,
            level_max: (slots / 4 * 3) as u32,
            extra: 0,
            extra_max,
            time: 0,
        }
    }

    /// A request for the block in `slot`, which now belongs to `group`.
    pub fn hit(&mut self, slot: u32, group: usize) {
        let Some(state) = self.slots.get_mut(slot as usize) else { return };
        if self.ranks.is_use(group) {
            state.set_hits(state.hits().saturating_add(1));
        }
        state.set_group(group);
    }

    /// A block has been put into `slot`, which was free.
    pub fn insert(&mut self, slot: u32, hash: u64, group: usize) {
        if slot as usize >= self.slots.len() {
            return;
        }
        self.remove(slot);
        self.time = self.time.wrapping_add(1);
        let level = self.ranks.level(group);
        let is_known = self.ranks.is_use(group) && self.ghost.contains(hash);
        if is_known {
            self.ghost.remove(hash);
        }
        // Blocks of a high level that already has most of the cache are sifted like others: otherwise all
        // of them leave before they are requested again if they are more than the cache holds.
        let is_high = self.ranks.is_high(group) && self.counts[main_queue(level)] < self.level_max;
        let queue = if is_known || is_high { main_queue(level) } else { SMALL };
        let state = &mut self.slots[slot as usize];
        state.set_hits(0);
        state.set_group(group);
        state.set_queue(Some(queue));
        let stale = state.stale();
        if stale == STALE_MAX || stale > 0 && self.extra >= self.extra_max {
            state.set_stale(stale - 1);
        } else {
            self.extra += usize::from(stale > 0);
            self.queues.push(queue, slot, self.time);
        }
        self.counts[queue] += 1;
        self.blocks += 1;
    }

    /// The caller has taken the block out of `slot`. The ghosts do not remember it.
    pub fn remove(&mut self, slot: u32) {
        let Some(state) = self.slots.get_mut(slot as usize) else { return };
        if let Some(queue) = state.queue() {
            state.set_queue(None);
            state.set_stale(state.stale() + 1);
            self.counts[queue] -= 1;
            self.blocks -= 1;
        }
    }

    /// Takes a block out of the queues, so that its slot is free. `hash` returns the hash of the key of
    /// the block in a slot. Returns `None` if there are no blocks.
    pub fn victim(&mut self, hash: impl Fn(u32) -> u64) -> Option<u32> {
        let mut steps = 0;
        while self.blocks > 0 {
            steps += 1;
            let (slot, queue) = self.next(self.source())?;
            self.counts[queue] -= 1;
            let state = &mut self.slots[slot as usize];
            let hits = state.hits();
            let target = main_queue(self.ranks.level(state.group()));
            // A block whose group has become worth more since then is moved, too.
            let is_kept = hits > 0 || queue != SMALL && target > queue;
            if is_kept && steps < STEPS_MAX {
                state.set_hits(if queue == SMALL { 0 } else { hits.saturating_sub(1) });
                state.set_queue(Some(target));
                self.counts[target] += 1;
                self.queues.push(target, slot, self.time);
                continue;
            }
            state.set_queue(None);
            self.blocks -= 1;
            if queue == SMALL {
                self.ghost.insert(hash(slot));
            }
            return Some(slot);
        }
        None
    }

    /// The queue from which the next block leaves.
    fn source(&self) -> usize {
        if self.counts[SMALL] >= self.small_min {
            return SMALL;
        }
        // The life of a level's first block, in units of what a level lives.
        let shift = self.ranks.shift();
        let age = |queue: &usize| {
            let begin = self.queues.first_time(*queue, self.time).unwrap_or(self.time);
            (u64::from(self.time.wrapping_sub(begin)) + 1) << (shift * (QUEUES - queue) as u32)
        };
        let levels = (1..QUEUES).filter(|queue| self.counts[*queue] > 0);
        levels.max_by_key(age).unwrap_or(SMALL)
    }

    /// Takes the first entry with a block out of a queue, or out of another one if the queue has
    /// none. Returns the slot, and the queue of its block. Stale entries before it are dropped, and
    /// entries of blocks that are in another queue are moved there.
    fn next(&mut self, queue: usize) -> Option<(u32, usize)> {
        while let Some(slot) = self.queues.pop(queue) {
            match self.entry(slot) {
                Some(found) if found == queue => return Some((slot, queue)),
                Some(other) => self.queues.push(other, slot, self.time),
                None => {}
            }
        }
        // The blocks have taken over stale entries of other queues.
        for other in 0..QUEUES {
            while let Some(slot) = self.queues.pop(other) {
                if let Some(found) = self.entry(slot) {
                    return Some((slot, found));
                }
            }
        }
        None
    }

    /// The queue of the block of an entry that was taken out of a queue; `None` if the entry is
    /// stale.
    fn entry(&mut self, slot: u32) -> Option<usize> {
        let state = &mut self.slots[slot as usize];
        if state.stale() == 0 {
            return state.queue();
        }
        state.set_stale(state.stale() - 1);
        let rest = state.stale() + u8::from(state.queue().is_some());
        self.extra -= usize::from(rest > 0);
        None
    }

    /// The number of blocks.
    pub fn len(&self) -> u32 {
        self.blocks
    }

    /// The memory of the queues, in bytes.
    pub fn memory_bytes(&self) -> usize {
        size_of_val(&self.slots[..]) + self.queues.memory_bytes() + self.ghost.memory_bytes()
    }
}

/// The queue of a level.
fn main_queue(level: u8) -> usize {
    (usize::from(level) + 1).min(QUEUES - 1)
}
