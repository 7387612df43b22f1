//! Requests that a layer has split into several.

#![expect(unsafe_code, reason = "a parent keeps the memory of its pieces")]

use crate::crossing::Step;
use crate::request::{Outcome, Request};

/// A request that a layer has [split](crate::Crossing::split).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split(u32);

struct Entry {
    level: usize,
    parent: Box<Request>,
    /// The number of pieces that have not returned.
    left: usize,
    /// Whether all pieces have been made.
    joined: bool,
    outcome: Outcome,
}

/// The split requests of one queue. A parent stays here until the last piece has released its
/// memory, which makes the pieces safe.
#[derive(Default)]
pub(crate) struct Splits {
    entries: Vec<Option<Entry>>,
    free: Vec<u32>,
}

impl Splits {
    pub(crate) fn begin(&mut self, level: usize, parent: Box<Request>) -> Split {
        let entry = Some(Entry { level, parent, left: 0, joined: false, outcome: Ok(()) });
        if let Some(index) = self.free.pop() {
            self.entries[index as usize] = entry;
            return Split(index);
        }
        self.entries.push(entry);
        Split(self.entries.len() as u32 - 1)
    }

    fn entry(&mut self, split: Split) -> Option<&mut Entry> {
        let entry = self.entries.get_mut(split.0 as usize).and_then(Option::as_mut);
        debug_assert!(entry.is_some(), "a split lives until its last piece has returned");
        entry
    }

    /// Makes `piece` the `length` bytes of the parent from `from` on.
    pub(crate) fn piece(&mut self, split: Split, piece: &mut Request, from: u64, length: u64) {
        let Some(entry) = self.entry(split) else { return };
        debug_assert!(!entry.joined, "all pieces are made before the join");
        let parent = &entry.parent;
        piece.operation = parent.operation;
        piece.flags = parent.flags;
        piece.offset = parent.offset + from;
        piece.length = length;
        piece.inherit(parent, from);
        if parent.operation.carries_data() {
            // SAFETY: the parent stays in its entry, uncleared, until `give_back` has counted this
            // piece, whose box has released the memory by then. A piece that is lost keeps the
            // parent forever.
            unsafe { piece.buffers.borrow_from(&parent.buffers, from, length) };
        }
        piece.split = Some(split);
        entry.left += 1;
    }

    /// Notes the outcome of a piece.
    pub(crate) fn note(&mut self, split: Split, outcome: Outcome) {
        let Some(entry) = self.entry(split) else { return };
        if entry.outcome.is_ok() {
            entry.outcome = outcome;
        }
    }

    /// Called after the last piece was made. Returns the next step if all pieces have returned.
    pub(crate) fn join(&mut self, split: Split) -> Option<Step> {
        self.entry(split)?.joined = true;
        self.end(split)
    }

    /// Counts a piece that has released its memory. Returns the next step if it was the last one.
    pub(crate) fn give_back(&mut self, split: Split) -> Option<Step> {
        self.entry(split)?.left -= 1;
        self.end(split)
    }

    fn end(&mut self, split: Split) -> Option<Step> {
        let slot = self.entries.get_mut(split.0 as usize)?;
        let Entry { level, parent, outcome, .. } =
            slot.take_if(|entry| entry.joined && entry.left == 0)?;
        self.free.push(split.0);
        Some(Step::Gathered { level, parent, outcome })
    }

    /// Leaks the memory that the kernel may still use, instead of freeing it.
    pub(crate) fn leak(&mut self) {
        std::mem::forget(std::mem::take(&mut self.entries));
    }
}
