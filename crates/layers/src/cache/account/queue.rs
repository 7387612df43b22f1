//! One queue's side of the accounts.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use fathom_block::Insight;
use fathom_cache::{CLASSES, Curve, Touch};
use fathom_insight::Name;

use super::cells::{Cells, Sample, add, read_begins, read_ends};
use super::{GROUPS, Ledger};

/// The waiting blocks at which a queue moves them into the curves.
const BATCH_MIN: usize = 32;
/// The most waiting blocks of a queue.
const SAMPLES_MAX: usize = 2048;
/// Of the reads of groups without a place, one in so many is noted.
const STRANGERS: u64 = 16;
/// A change of more blocks than this is not noted in the curves.
const BLOCKS_MAX: u64 = 1024;
/// The place of requests whose group has none.
const NO_PLACE: u8 = u8::MAX;

/// What is remembered of a read until it ends.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Looked {
    class: u8,
    group: u8,
}

/// The accounts as one queue writes them.
pub(crate) struct Account {
    ledger: Arc<Ledger>,
    cells: Arc<Cells>,
    /// The group of the last request, its place, and the generation of the place.
    last: (Name, u8, u32),
    strangers: u64,
}

impl Account {
    pub(crate) fn open(ledger: &Arc<Ledger>) -> Self {
        let cells: Arc<Cells> = Arc::default();
        ledger.queues.lock().open.push(Arc::clone(&cells));
        Self { ledger: Arc::clone(ledger), cells, last: (Name::NONE, NO_PLACE, 0), strangers: 0 }
    }

    /// What [`read_ended`](Self::read_ended) needs to know of a read.
    #[inline]
    pub(crate) fn look(&mut self, insight: &Insight, class: u8) -> Looked {
        let class = class.min(CLASSES as u8 - 1);
        let name = insight.facts.cgroup;
        if !name.is_some() {
            return Looked { class, group: NO_PLACE };
        }
        let is_last = |head: &super::groups::Head| {
            head.name.load(Ordering::Acquire) == name.0
                && head.generation.load(Ordering::Relaxed) == self.last.2
        };
        let (last, group, _) = self.last;
        let is_known =
            last == name && self.ledger.heads.get(usize::from(group)).is_some_and(is_last);
        let group = if is_known { group } else { self.find(name) };
        Looked { class, group }
    }

    /// The place of a group.
    #[cold]
    fn find(&mut self, name: Name) -> u8 {
        let heads = &self.ledger.heads;
        let place = heads.iter().position(|head| head.name.load(Ordering::Acquire) == name.0);
        let Some(place) = place else { return NO_PLACE };
        let generation = heads[place].generation.load(Ordering::Relaxed);
        let cell = &self.cells.groups[place];
        if cell.generation.load(Ordering::Relaxed) != generation {
            cell.begin(generation);
        }
        self.last = (name, place as u8, generation);
        place as u8
    }

    /// A read of blocks from `first` to before `end` begins. The cache has `hit_bytes` of it, which
    /// saves about `avoided_ns`.
    #[inline]
    pub(crate) fn read_begins(
        &mut self,
        insight: &Insight,
        class: u8,
        blocks: (u64, u64),
        (length, hit_bytes, avoided_ns): (u64, u64, u64),
        now_ns: u64,
    ) -> Looked {
        let count = blocks.1 - blocks.0;
        let mut looked = self.look(insight, class);
        if looked.group == NO_PLACE && insight.facts.cgroup.is_some() {
            self.stranger(insight.facts.cgroup, count, now_ns);
            looked = self.look(insight, class);
        }
        let of_class = &self.cells.classes[usize::from(looked.class)];
        read_begins(of_class, length, hit_bytes, avoided_ns);
        add(&self.cells.blocks, count);
        if let Some(group) = self.cells.groups.get(usize::from(looked.group)) {
            read_begins(&group.cell, length, hit_bytes, avoided_ns);
            add(&group.blocks, count);
        }
        self.touch(blocks, looked.group, Touch::Request, now_ns);
        looked
    }

    /// A read has ended after `time_ns`.
    #[inline]
    pub(crate) fn read_ended(&self, looked: Looked, is_hit: bool, time_ns: u64) {
        read_ends(&self.cells.classes[usize::from(looked.class)], is_hit, time_ns);
        if let Some(group) = self.cells.groups.get(usize::from(looked.group)) {
            read_ends(&group.cell, is_hit, time_ns);
        }
    }

    /// A change of blocks begins: their content comes into the cache, or leaves it.
    #[inline]
    pub(crate) fn change(
        &mut self,
        insight: &Insight,
        blocks: (u64, u64),
        touch: Touch,
        now_ns: u64,
    ) {
        if blocks.1 - blocks.0 <= BLOCKS_MAX {
            let group = self.look(insight, 0).group;
            self.touch(blocks, group, touch, now_ns);
        }
    }

    /// Notes the blocks that curves follow.
    #[inline]
    fn touch(&mut self, blocks: (u64, u64), group: u8, touch: Touch, now_ns: u64) {
        let head = self.ledger.heads.get(usize::from(group));
        let of_group = head.map_or(0, |head| head.threshold.load(Ordering::Relaxed));
        let threshold = of_group.max(self.ledger.threshold.load(Ordering::Relaxed));
        for block in blocks.0..blocks.1 {
            let hash = Curve::hash(block);
            if hash < threshold {
                let generation = self.last.2;
                self.follow(Sample { hash, touch, group, generation }, now_ns);
            }
        }
    }

    fn follow(&self, sample: Sample, now_ns: u64) {
        let Some(mut counted) = self.cells.counted.try_lock() else {
            // A reader is moving the list now.
            return add(&self.cells.dropped, 1);
        };
        if counted.samples.len() >= SAMPLES_MAX {
            return add(&self.cells.dropped, 1);
        }
        counted.samples.push(sample);
        if counted.samples.len() >= BATCH_MIN {
            if let Some(mut curves) = self.ledger.curves.try_lock() {
                self.ledger.collect(&self.cells, &mut counted, &mut curves, now_ns);
            }
        }
    }

    /// A group without a place reads.
    #[cold]
    fn stranger(&mut self, name: Name, blocks: u64, now_ns: u64) {
        let Some(names) = &self.ledger.names else { return };
        self.strangers += 1;
        let heads = &self.ledger.heads;
        let is_full = heads[GROUPS - 1].name.load(Ordering::Relaxed) != 0;
        if is_full && self.strangers % STRANGERS != 0 {
            return;
        }
        if let Some(mut curves) = self.ledger.curves.try_lock() {
            let text = |name| names.text(name);
            curves.groups.offer(heads, name, blocks * STRANGERS, now_ns, text);
        }
    }
}

impl Drop for Account {
    /// Keeps the counts.
    fn drop(&mut self) {
        let ledger = &self.ledger;
        let mut queues = ledger.queues.lock();
        let mut curves = ledger.curves.lock();
        ledger.collect(&self.cells, &mut self.cells.counted.lock(), &mut curves, 0);
        curves.groups.close(&self.cells);
        for (past, cell) in queues.past.iter_mut().zip(&self.cells.classes) {
            past.merge(&cell.read());
        }
        queues.dropped_past += self.cells.dropped.load(Ordering::Relaxed);
        queues.open.retain(|cells| !Arc::ptr_eq(cells, &self.cells));
    }
}
