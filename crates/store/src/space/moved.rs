//! The places to which blocks are relocated.
//!
//! As those of batches, they are chosen by a checkpoint, and used when it is durable. There are no
//! batches in them, so that a recovery need not search them.

use super::{SegmentState, Space};
use crate::reserve::{Chosen, left_of};

/// The segments that are left to batches while blocks are relocated: they are wanted for batches
/// first.
const LOG_SEGMENTS_MIN: usize = 4;

/// A segment of which a larger part than one of so many is in use is not chosen: blocks that are
/// put there lie among others.
const USED_SHARE_MAX: u16 = 2;

impl Space {
    /// So many places are wanted for relocated blocks. The next checkpoint chooses them.
    pub(crate) fn want_moved(&mut self, count: usize) {
        self.moved_wanted = count;
    }

    /// The places for relocated blocks that may be used now.
    pub(crate) fn moved_left(&self) -> usize {
        self.moved.left()
    }

    /// Takes places for relocated blocks, at most `count`, in ascending order within a segment.
    pub(crate) fn place_moved(&mut self, count: usize) -> Vec<u64> {
        let Self { moved, states, layout, .. } = self;
        let places = Self::take_in_order(moved, states, layout, count);
        for place in &places {
            self.take(*place);
        }
        places
    }

    /// A write of a relocated block has failed: its segment is not used any more.
    pub(crate) fn retire(&mut self, place: u64) {
        let segment = self.layout.segment(place);
        self.states[segment as usize] = SegmentState::Retired;
        if self.moved.open.as_ref().is_some_and(|open| open.segment == segment) {
            self.moved.open = None;
        }
    }

    /// No places are wanted any more. Those that were not used are for whoever needs some.
    pub(crate) fn return_moved(&mut self) {
        self.moved_wanted = 0;
        let reserve = std::mem::take(&mut self.moved);
        let chosen = reserve.open.into_iter().chain(reserve.waiting).chain(reserve.prepared);
        for Chosen { segment, .. } in chosen {
            self.states[segment as usize] = SegmentState::Idle;
            // A checkpoint may choose them for batches.
            self.spent += 1;
        }
    }

    /// Gives the segments back that wait for batches, but for some: the emptiest ones are for
    /// relocated blocks.
    pub(super) fn give_back_log(&mut self) {
        let least = LOG_SEGMENTS_MIN * self.layout.segment_blocks as usize;
        while let Some(last) = self.log.waiting.back() {
            if self.log.left() - last.left() < least {
                return;
            }
            self.states[last.segment as usize] = SegmentState::Idle;
            self.log.waiting.pop_back();
        }
    }

    /// Chooses segments for relocated blocks. `idle` is the number of free places that are wanted
    /// for nothing else. Returns how many of them were chosen.
    pub(super) fn choose_moved(
        &mut self,
        candidates: &mut impl Iterator<Item = u32>,
        idle: usize,
    ) -> usize {
        let least = LOG_SEGMENTS_MIN * self.layout.segment_blocks as usize;
        let before = self.moved.left() + left_of(&self.moved.prepared);
        let mut chosen_now = 0;
        while before + chosen_now < self.moved_wanted && chosen_now + least < idle {
            let Some(segment) = candidates.next() else { break };
            if self.used[segment as usize] > self.layout.segment_blocks as u16 / USED_SHARE_MAX {
                break;
            }
            let chosen = self.pick(segment);
            chosen_now += chosen.left();
            self.moved.prepared.push(chosen);
        }
        chosen_now
    }
}
