//! The queues of a cache: S3-FIFO with levels.
//!
//! A new block enters the small queue, a part of the slots. If it is hit there, it moves to
//! the main queue when its turn comes; otherwise it leaves the cache, and the ghosts remember it. A
//! block that the ghosts remember enters the main queue at once. A block of the main queue that has
//! been hit gets another round for each hit, up to a limit. The part, the limit, and how long
//! ghosts count are those of the ranks' [`Base`].
//!
//! The main queue consists of one queue for each level. The first block of a level lives longer
//! than that of the level below by a fixed ratio. Blocks of high levels skip the small queue as
//! long as their level leaves room for it. If all blocks have one level, this is S3-FIFO with the
//! base of this name, and CLOCK without a small queue. Where levels depend on the meaning of
//! blocks, those with one also skip the small queue while slots are free.
//!
//! A hit only counts: it moves nothing. A block that the caller removes leaves its entry in a
//! queue, because entries are not linked both ways. Such a stale entry is dropped when its turn
//! comes, unless the slot then has a block in the same queue, which takes this turn. At any time a
//! slot has as many entries in the queues as its state has stale ones, and one more if it has a
//! block. If a slot is reused while many stale entries exist, the block takes over a stale entry
//! and its place.
//!
//! Blocks can belong to several *pools*, each with a share of the slots. A pool has queues of its
//! own. The next block leaves from a pool that has more blocks than its share: from the one whose
//! first block is oldest, as if they all were in the same queues. A pool that has its share, or
//! more, may also replace its own blocks. So no pool loses a block of its share for one of another
//! pool.

use std::sync::Arc;

use crate::ghost::Ghost;
use crate::queues::Queues;
use crate::ranks::{Base, LEVELS, Ranks};
use crate::slots::{QUEUES, STALE_MAX, SlotStates};

/// The number of blocks that a search for a victim passes over. The next one is taken even if it
/// has been hit, so that a search takes a bounded time.
const STEPS_MAX: u32 = 512;
/// The entries of each queue that are looked at for a block of another one.
const SEARCH_MAX: u32 = 64;

/// The small queue. The main queue consists of one queue for each level.
const SMALL: usize = 0;
/// The slots beside the small queue that no level fills with blocks that skip this queue, in
/// percent.
const SPARE_PERCENT: u8 = 2;
const _: () = assert!(LEVELS < QUEUES);

/// Blocks with a share of the slots.
#[derive(Clone, Copy, Debug, Default)]
struct Pool {
    /// The blocks in each queue.
    counts: [u32; QUEUES],
    blocks: u32,
    /// The blocks that it keeps.
    share: u32,
}

/// The place of a block that the caller has taken out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kept {
    queue: usize,
    hits: u8,
}

/// The queues.
#[derive(Debug)]
pub struct Engine {
    /// The levels of groups of blocks.
    pub ranks: Ranks,
    slots: Arc<SlotStates>,
    /// The queues of the first pool, then those of the second, and so on.
    queues: Queues,
    ghost: Ghost,
    pools: Vec<Pool>,
    /// The blocks of all pools.
    blocks: u32,
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
            slots: Arc::new(SlotStates::new(slots)),
            queues: Queues::new(QUEUES, slots + extra_max),
            ghost: Ghost::new(slots * 11 / 10, slots * 9 / 10),
            pools: vec![Pool::default()],
            blocks: 0,
            extra: 0,
            extra_max,
            time: 0,
        }
    }

    /// A request for the block in `slot`, which now belongs to `group`.
    pub fn hit(&mut self, slot: u32, group: usize) {
        let before = self.slots.get(slot);
        let mut state = before;
        if self.ranks.is_use(group) {
            state.set_hits(state.hits().saturating_add(1));
        }
        state.set_group(group);
        if state != before {
            self.slots.set(slot, state);
        }
    }

    /// The states of the slots.
    pub fn states(&self) -> &Arc<SlotStates> {
        &self.slots
    }

    /// The group of the block in `slot`.
    pub fn group(&self, slot: u32) -> usize {
        self.slots.get(slot).group()
    }

    /// Adds a pool without a share. Returns its number.
    pub fn add_pool(&mut self) -> usize {
        self.pools.push(Pool::default());
        self.queues.add(QUEUES);
        self.pools.len() - 1
    }

    /// Sets the number of blocks that a pool keeps.
    pub fn set_share(&mut self, pool: usize, share: u32) {
        self.pools[pool].share = share;
    }

    /// The blocks that a pool lacks to its share.
    pub fn lacks(&self, pool: usize) -> u32 {
        let Pool { share, blocks, .. } = self.pools[pool];
        share.saturating_sub(blocks)
    }

    /// The number of blocks of a pool.
    pub fn blocks_of(&self, pool: usize) -> u32 {
        self.pools[pool].blocks
    }

    /// The block in `slot` belongs to the pool `to` from now on. Its entry moves when its turn
    /// comes.
    pub fn move_block(&mut self, slot: u32, from: usize, to: usize) {
        let queue = self.slots.get(slot).queue();
        if let Some(queue) = queue.filter(|_| self.pools[from].blocks > 0) {
            self.count(from, queue, false);
            self.count(to, queue, true);
        }
    }

    /// Counts a block that enters a queue or leaves it.
    fn count(&mut self, pool: usize, queue: usize, enters: bool) {
        let Pool { counts, blocks, .. } = &mut self.pools[pool];
        for count in [&mut counts[queue], blocks, &mut self.blocks] {
            // Calls in a wrong order do not panic.
            *count = if enters { *count + 1 } else { count.saturating_sub(1) };
        }
    }

    fn push(&mut self, pool: usize, queue: usize, slot: u32) {
        self.queues.push(pool * QUEUES + queue, slot, self.time);
    }

    /// A block of a pool has been put into `slot`, which was free.
    pub fn insert(&mut self, slot: u32, hash: u64, group: usize, pool: usize) {
        if slot as usize >= self.slots.count() {
            return;
        }
        self.remove(slot, pool);
        self.time = self.time.wrapping_add(1);
        let level = self.ranks.level(group);
        let Base { small_percent, ghost_periods, .. } = self.ranks.base();
        let is_known = self.ranks.is_use(group) && self.ghost.contains(hash, ghost_periods);
        if is_known {
            self.ghost.remove(hash);
        }
        // Blocks of a high level that already has most of the cache are sifted like others:
        // otherwise all of them leave before they are requested again if they are more than the
        // cache holds.
        let is_high = self.ranks.is_high(group) && self.held(main_queue(level)) < self.level_max();
        // While slots are free, blocks of all levels stay, and then those of the lowest leave
        // first: in the small queue, those that came first would leave, whatever their level.
        let is_filling = self.ranks.fills(group)
            && (self.blocks as usize) < self.slots.count()
            && self.is_small_due();
        let skips = is_known || is_high || is_filling || small_percent == 0;
        let queue = if skips { main_queue(level) } else { SMALL };
        self.enter(slot, queue, 0, group, pool);
    }

    /// A block of a pool whose content was written has been put into `slot`, which was free. `kept`
    /// is its place before. It gets a place at the end of the same queue, which costs a round if
    /// the write is no use.
    pub fn insert_again(&mut self, slot: u32, hash: u64, group: usize, pool: usize, kept: Kept) {
        if slot as usize >= self.slots.count() {
            return;
        }
        let Kept { queue, hits } = kept;
        let hits = if self.ranks.is_use(group) { hits.checked_add(1) } else { hits.checked_sub(1) };
        match hits {
            Some(hits) => {
                self.remove(slot, pool);
                self.enter(slot, queue, hits, group, pool);
            }
            None => self.insert(slot, hash, group, pool),
        }
    }

    /// The block in `slot`, which had none, enters a queue.
    fn enter(&mut self, slot: u32, queue: usize, hits: u8, group: usize, pool: usize) {
        let mut state = self.slots.get(slot);
        state.set_hits(hits);
        state.set_group(group);
        state.set_queue(Some(queue));
        let stale = state.stale();
        if stale == STALE_MAX || stale > 0 && self.extra >= self.extra_max {
            state.set_stale(stale - 1);
        } else {
            self.extra += usize::from(stale > 0);
            self.push(pool, queue, slot);
        }
        self.slots.set(slot, state);
        self.count(pool, queue, true);
    }

    /// The caller has taken the block of a pool out of `slot`. The ghosts do not remember it.
    /// Returns its place.
    pub fn remove(&mut self, slot: u32, pool: usize) -> Option<Kept> {
        let mut state = self.slots.get(slot);
        let queue = state.queue()?;
        state.set_queue(None);
        state.set_stale(state.stale() + 1);
        self.slots.set(slot, state);
        self.count(pool, queue, false);
        Some(Kept { queue, hits: state.hits() })
    }

    /// Takes a block out of the queues, so that its slot is free for a block of the pool `wanting`,
    /// or of any. `hash` returns the hash of the key of the block in a slot, and `pool_of` its
    /// pool. Returns `None` if there are no blocks, or if all belong to shares of other pools.
    pub fn victim(
        &mut self,
        wanting: Option<usize>,
        hash: impl Fn(u32) -> u64,
        pool_of: impl Fn(u32) -> usize,
    ) -> Option<u32> {
        let pool = self.source_pool(wanting)?;
        let mut steps = 0;
        while self.pools[pool].blocks > 0 {
            steps += 1;
            let (slot, queue) = self.next(pool, self.source(pool), &pool_of)?;
            let mut state = self.slots.get(slot);
            let hits = state.hits().min(self.ranks.base().rounds);
            let target = main_queue(self.ranks.level(state.group()));
            // A block whose group has become worth more since then is moved, too.
            let is_kept = hits > 0 || queue != SMALL && target > queue;
            if is_kept && steps < STEPS_MAX {
                state.set_hits(if queue == SMALL { 0 } else { hits.saturating_sub(1) });
                state.set_queue(Some(target));
                self.slots.set(slot, state);
                self.count(pool, queue, false);
                self.count(pool, target, true);
                self.push(pool, target, slot);
                continue;
            }
            state.set_queue(None);
            self.slots.set(slot, state);
            self.extra -= usize::from(state.stale() > 0);
            self.count(pool, queue, false);
            if queue == SMALL {
                self.ghost.insert(hash(slot));
            }
            return Some(slot);
        }
        None
    }

    /// The blocks of all pools in a queue.
    fn held(&self, queue: usize) -> u32 {
        self.pools.iter().map(|pool| pool.counts[queue]).sum()
    }

    /// Whether a block of a small queue leaves next.
    fn is_small_due(&self) -> bool {
        self.held(SMALL) >= self.percent(self.ranks.base().small_percent).max(1)
    }

    /// The blocks of a level from which on further blocks do not skip the small queue: so many that
    /// there are still blocks in the small queue, which leave before them.
    fn level_max(&self) -> u32 {
        self.percent((100 - SPARE_PERCENT).saturating_sub(self.ranks.base().small_percent))
    }

    /// A part of the slots.
    fn percent(&self, percent: u8) -> u32 {
        (self.slots.count() as u64 * u64::from(percent) / 100) as u32
    }

    /// The pool from which the next block leaves.
    fn source_pool(&self, wanting: Option<usize>) -> Option<usize> {
        if self.pools.len() == 1 {
            return Some(0);
        }
        let has_more = |pool: &usize| {
            let Pool { blocks, share, .. } = self.pools[*pool];
            blocks > share || blocks > 0 && blocks == share && wanting == Some(*pool)
        };
        let is_small_due = self.is_small_due();
        // Those with a block in the queue whose turn it is come first, then the oldest one.
        let age = |pool: &usize| {
            let queue = self.source(*pool);
            ((queue == SMALL) == is_small_due, self.age(*pool, queue))
        };
        (0..self.pools.len()).filter(has_more).max_by_key(age)
    }

    /// The life of a queue's first block, in units of what its level lives.
    fn age(&self, pool: usize, queue: usize) -> u64 {
        let begin = self.queues.first_time(pool * QUEUES + queue, self.time).unwrap_or(self.time);
        let age = u64::from(self.time.wrapping_sub(begin)) + 1;
        if queue == SMALL { age } else { age << (self.ranks.shift() * (QUEUES - queue) as u32) }
    }

    /// The queue of a pool from which its next block leaves.
    fn source(&self, pool: usize) -> usize {
        let counts = &self.pools[pool].counts;
        if counts[SMALL] > 0 && self.is_small_due() {
            return SMALL;
        }
        let levels = (1..QUEUES).filter(|queue| counts[*queue] > 0);
        levels.max_by_key(|queue| self.age(pool, *queue)).unwrap_or(SMALL)
    }

    /// Takes the first entry with a block out of a queue of a pool, or out of another one of the
    /// pool if the queue has none. Returns the slot, and the queue of its block. Stale entries
    /// before it are dropped, and entries of blocks that are in another queue are moved there.
    fn next(
        &mut self,
        pool: usize,
        queue: usize,
        pool_of: &impl Fn(u32) -> usize,
    ) -> Option<(u32, usize)> {
        while let Some(slot) = self.queues.pop(pool * QUEUES + queue) {
            match self.entry(slot, (pool, queue), pool_of) {
                Some(found) if found == (pool, queue) => return Some((slot, queue)),
                Some((other, found)) => self.push(other, found, slot),
                None => {}
            }
        }
        // The blocks have taken over stale entries of other queues, or have come from another pool.
        // The next entries of each queue are looked at without a loss for other blocks, and then
        // all.
        for (is_any, entries_max) in [(false, SEARCH_MAX), (true, u32::MAX)] {
            for list in 0..self.pools.len() * QUEUES {
                for _ in 0..self.queues.length(list).min(entries_max) {
                    let Some(slot) = self.queues.pop(list) else { break };
                    match self.entry(slot, (list / QUEUES, list % QUEUES), pool_of) {
                        Some((other, found)) if other == pool && (is_any || found == queue) => {
                            return Some((slot, found));
                        }
                        Some((other, found)) => self.push(other, found, slot),
                        None => {}
                    }
                }
            }
        }
        None
    }

    /// The pool and the queue of the block of an entry that was taken out of the queue `from` of a
    /// pool; `None` if the entry is stale.
    fn entry(
        &mut self,
        slot: u32,
        from: (usize, usize),
        pool_of: &impl Fn(u32) -> usize,
    ) -> Option<(usize, usize)> {
        let mut state = self.slots.get(slot);
        let found = state.queue().map(|queue| {
            let pool = if self.pools.len() == 1 { 0 } else { pool_of(slot) };
            (pool, queue)
        });
        if state.stale() == 0 || found == Some(from) {
            // A stale entry in the queue of its block is as good as the block's own, which is stale
            // then.
            return found;
        }
        state.set_stale(state.stale() - 1);
        self.slots.set(slot, state);
        let rest = state.stale() + u8::from(found.is_some());
        self.extra -= usize::from(rest > 0);
        None
    }

    /// The number of blocks.
    pub fn len(&self) -> u32 {
        self.blocks
    }

    /// The memory of the queues, in bytes.
    pub fn memory_bytes(&self) -> usize {
        self.slots.memory_bytes() + self.queues.memory_bytes() + self.ghost.memory_bytes()
    }
}

/// The queue of a level.
fn main_queue(level: u8) -> usize {
    (usize::from(level) + 1).min(QUEUES - 1)
}
