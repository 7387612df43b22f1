//! The control groups of a disk that have a place: counts and a curve of their own.
//!
//! A group gets a free place with its first read. If there is none, it becomes a candidate. A
//! candidate replaces the group with the least activity if it has been read twice as much recently.
//! So a guest that makes many groups costs no memory, and changes few places: one that was given
//! keeps its group for a minute.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use fathom_cache::{CacheCounts, RecentCurve};
use fathom_insight::Name;

use super::cells::{Cells, Sample};
use super::{CurveSnapshot, GROUPS, GroupCounts};

/// The time after which activity counts half, in nanoseconds.
const EPOCH_NS: u64 = 60_000_000_000;

/// What queues read of a place.
#[derive(Debug, Default)]
pub(super) struct Head {
    /// The number of the group's name; 0 is none.
    pub(super) name: AtomicU32,
    pub(super) generation: AtomicU32,
    /// Blocks with hashes below are of interest to its curve.
    pub(super) threshold: AtomicU64,
}

pub(super) type Heads = [Head; GROUPS];

struct Group {
    name: Name,
    cgroup: Arc<str>,
    generation: u32,
    curve: RecentCurve,
    /// The counts of closed queues.
    past: CacheCounts,
    /// The blocks read in this epoch, and half of those of earlier epochs.
    activity: u64,
    begin_ns: u64,
}

/// The groups with a place, and those that would like one.
pub(super) struct Groups {
    samples: usize,
    share: f64,
    generation_ns: u64,
    places: Vec<Group>,
    /// The activity of other groups.
    candidates: Vec<(Name, u64)>,
    epoch_ns: u64,
    generations: u32,
}

impl Groups {
    pub(super) fn new(samples: usize, share: f64, generation_ns: u64) -> Self {
        Self {
            samples,
            share,
            generation_ns,
            places: Vec::new(),
            candidates: Vec::new(),
            epoch_ns: 0,
            generations: 0,
        }
    }

    /// A group without a place has read `blocks` blocks. Gives it a place if it deserves one.
    /// `text` returns the path of a group.
    pub(super) fn offer(
        &mut self,
        heads: &Heads,
        name: Name,
        blocks: u64,
        now_ns: u64,
        text: impl Fn(Name) -> Option<Arc<str>>,
    ) {
        self.advance(now_ns);
        if self.places.iter().any(|group| group.name == name) {
            return;
        }
        if let Some(place) = self.place_of(name, &text) {
            // The names have been forgotten, and the group has a new number.
            self.places[place].name = name;
            return self.publish(heads);
        }
        let place = if self.places.len() < GROUPS {
            self.places.len()
        } else {
            let activity = self.count_candidate(name, blocks);
            let idle = self.places.iter().enumerate();
            let idle = idle.filter(|(_, group)| now_ns.saturating_sub(group.begin_ns) >= EPOCH_NS);
            let least = idle.min_by_key(|(_, group)| group.activity);
            match least {
                Some((place, group)) if activity > group.activity.saturating_mul(2) => place,
                _ => return,
            }
        };
        let Some(cgroup) = text(name) else { return };
        self.candidates.retain(|(other, _)| *other != name);
        self.generations = self.generations.wrapping_add(1).max(1);
        let group = Group {
            name,
            cgroup,
            generation: self.generations,
            curve: RecentCurve::new(self.samples, self.share, self.generation_ns, now_ns),
            past: CacheCounts::default(),
            activity: blocks,
            begin_ns: now_ns,
        };
        if place == self.places.len() {
            self.places.push(group);
        } else {
            self.places[place] = group;
        }
        self.publish(heads);
    }

    /// The place of a group that has another number now.
    fn place_of(&self, name: Name, text: impl Fn(Name) -> Option<Arc<str>>) -> Option<usize> {
        let cgroup = text(name)?;
        self.places.iter().position(|group| group.cgroup == cgroup)
    }

    /// Counts the blocks of a candidate; if there are too many candidates, the least active one is
    /// replaced, and its blocks count for the new one (the sketch Space-Saving).
    fn count_candidate(&mut self, name: Name, blocks: u64) -> u64 {
        if let Some((_, count)) = self.candidates.iter_mut().find(|(other, _)| *other == name) {
            *count += blocks;
            return *count;
        }
        if self.candidates.len() < GROUPS {
            self.candidates.push((name, blocks));
            return blocks;
        }
        let least = self.candidates.iter_mut().min_by_key(|(_, count)| *count);
        least.map_or(0, |least| {
            // What others have read does not make it deserve a place.
            *least = (name, least.1 / 2 + blocks);
            blocks
        })
    }

    /// Adds what a queue has counted since the last time.
    pub(super) fn count(&mut self, cells: &Cells, counted: &mut [(u32, u64); GROUPS]) {
        for (place, group) in self.places.iter_mut().enumerate() {
            let cell = &cells.groups[place];
            if cell.generation.load(Ordering::Relaxed) != group.generation {
                continue;
            }
            let blocks = cell.blocks.load(Ordering::Relaxed);
            let (generation, before) = &mut counted[place];
            if *generation != group.generation {
                (*generation, *before) = (group.generation, 0);
            }
            let more = blocks.saturating_sub(*before);
            *before = blocks;
            group.curve.count(more);
            group.activity += more;
        }
    }

    /// Passes a block to the curve of its group.
    pub(super) fn sample(&mut self, sample: &Sample) {
        let group = self.places.get_mut(usize::from(sample.group));
        if let Some(group) = group.filter(|group| group.generation == sample.generation) {
            group.curve.sample(sample.hash, sample.touch);
        }
    }

    /// Takes a block out of all curves.
    pub(super) fn remove(&mut self, hash: u64) {
        for group in &mut self.places {
            group.curve.sample(hash, fathom_cache::Touch::Removal);
        }
    }

    /// Begins new generations and epochs.
    pub(super) fn advance(&mut self, now_ns: u64) {
        for group in &mut self.places {
            group.curve.advance(now_ns);
        }
        if self.epoch_ns == 0 {
            self.epoch_ns = now_ns;
        }
        let epochs = now_ns.saturating_sub(self.epoch_ns) / EPOCH_NS;
        if epochs > 0 {
            self.epoch_ns += epochs * EPOCH_NS;
            let shift = epochs.min(63) as u32;
            self.places.iter_mut().for_each(|group| group.activity >>= shift);
            self.candidates.iter_mut().for_each(|(_, count)| *count >>= shift);
            self.candidates.retain(|(_, count)| *count > 0);
        }
    }

    /// Shows the places to the queues.
    pub(super) fn publish(&self, heads: &Heads) {
        for (head, group) in heads.iter().zip(&self.places) {
            head.threshold.store(group.curve.threshold(), Ordering::Relaxed);
            head.generation.store(group.generation, Ordering::Relaxed);
            head.name.store(group.name.0, Ordering::Release);
        }
    }

    /// Keeps the counts of a queue that is closed.
    pub(super) fn close(&mut self, cells: &Cells) {
        for (group, cell) in self.places.iter_mut().zip(&cells.groups) {
            if cell.generation.load(Ordering::Relaxed) == group.generation {
                group.past.merge(&cell.cell.read());
            }
        }
    }

    pub(super) fn snapshot(&self, open: &[Arc<Cells>]) -> Vec<GroupCounts> {
        let counts = |place: usize, group: &Group| {
            let mut counts = group.past;
            for cells in open {
                let cell = &cells.groups[place];
                if cell.generation.load(Ordering::Relaxed) == group.generation {
                    counts.merge(&cell.cell.read());
                }
            }
            counts
        };
        let group = |(place, group): (usize, &Group)| GroupCounts {
            cgroup: Arc::clone(&group.cgroup),
            counts: counts(place, group),
            curve: CurveSnapshot::of(&group.curve),
        };
        self.places.iter().enumerate().map(group).collect()
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.places.iter().map(|group| group.curve.memory_bytes()).sum()
    }
}
