//! Free segments that are given back to what is beneath the pool: the file system of its file.
//!
//! A segment is given back when a durable checkpoint knows it to be empty and has not chosen it,
//! and the reads have ended that began before: a recovery needs nothing in it. It is not chosen
//! while that is in progress.

use super::{SegmentState, Space};

/// The segments to be given back.
#[derive(Default)]
pub(super) struct Punches {
    /// Whether each segment has been given back since the opening, and not been used since.
    is_given: Vec<bool>,
    /// Those that the last checkpoint's instant has left, and those of them that may be given back.
    left: Vec<u32>,
    ready: Vec<u32>,
}

impl Punches {
    pub(super) fn new(segments: u32) -> Self {
        Self { is_given: vec![false; segments as usize], left: Vec::new(), ready: Vec::new() }
    }

    /// Something will be written to a segment.
    pub(super) fn note_use(&mut self, segment: u32) {
        self.is_given[segment as usize] = false;
    }

    /// The checkpoint is durable, and no read needs what was free at its instant.
    pub(super) fn activate(&mut self) {
        self.ready = std::mem::take(&mut self.left);
        self.ready.reverse();
    }
}

impl Space {
    fn is_empty(&self, segment: u32) -> bool {
        self.states[segment as usize] == SegmentState::Idle && self.used[segment as usize] == 0
    }

    /// A checkpoint has chosen its segments: notes those that are empty.
    pub(super) fn note_empty(&mut self) {
        let is_left =
            |segment: &u32| !self.punches.is_given[*segment as usize] && self.is_empty(*segment);
        self.punches.left = (0..self.layout.segments).filter(is_left).collect();
        if !self.rules.punches_after_checkpoint {
            self.punches.activate();
        }
    }

    /// Whether a segment may be given back.
    pub(crate) fn has_punch(&self) -> bool {
        !self.punches.ready.is_empty()
    }

    /// Begins to give adjoining segments back, at most `count`. Returns the first one, and how many
    /// they are; they have to be [passed back](Self::end_punch).
    pub(crate) fn begin_punch(&mut self, count: u32) -> Option<(u32, u32)> {
        let first = loop {
            let segment = self.punches.ready.pop()?;
            if self.is_empty(segment) {
                break segment;
            }
        };
        let mut end = first + 1;
        while end < first + count && self.punches.ready.last() == Some(&end) && self.is_empty(end) {
            self.punches.ready.pop();
            end += 1;
        }
        for segment in first..end {
            self.states[segment as usize] = SegmentState::Punching;
        }
        Some((first, end - first))
    }

    /// Segments have been given back. One of which that has failed is not used any more: it may be
    /// carried out late.
    pub(crate) fn end_punch(&mut self, (first, count): (u32, u32), is_done: bool) {
        for segment in first..first + count {
            self.punches.is_given[segment as usize] = true;
            self.states[segment as usize] =
                if is_done { SegmentState::Idle } else { SegmentState::Retired };
        }
    }
}
