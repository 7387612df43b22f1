//! How much room there is for the blocks of batches, which decides about
//! [guarantees](crate::guarantee).

use super::{SegmentState, Space};
use crate::reserve::{Chosen, Reserve};

/// The segments that wait for batches and are not given back: batches go on in them until others
/// are chosen.
const WAITING_MIN: usize = 4;

impl Space {
    /// The free places for data of batches, with those that the next checkpoints choose. A segment
    /// always keeps one, since a batch has a header.
    pub(crate) fn room(&self) -> u64 {
        let Reserve { open, waiting, prepared } = &self.log;
        let chosen = open.iter().chain(waiting).chain(prepared);
        self.spare + chosen.map(|chosen| chosen.left().saturating_sub(1) as u64).sum::<u64>()
    }

    /// The places that the next checkpoint may add to the room: those that became free, those of
    /// headers, and those of second copies of pages, which are chosen only where there is room.
    pub(crate) fn returning(&self) -> u64 {
        self.freed + self.headers + self.lent_to_copies()
    }

    /// The places that became free in a segment after it was chosen.
    fn hidden_in(&self, chosen: &Chosen) -> u64 {
        let used = usize::from(self.used[chosen.segment as usize]);
        (self.layout.segment_blocks as usize - used).saturating_sub(chosen.free.len()) as u64
    }

    /// The places that became free in segments after they were chosen, and that the next checkpoint
    /// adds to the room if [it is asked to](Self::want_hidden).
    pub(crate) fn hidden(&self) -> u64 {
        let waiting = self.log.waiting.iter().skip(WAITING_MIN).chain(&self.pages.waiting);
        waiting.map(|chosen| self.hidden_in(chosen)).sum()
    }

    /// The next checkpoint chooses segments anew in which places became free.
    pub(crate) fn want_hidden(&mut self) {
        self.is_hidden_wanted = true;
    }

    /// Gives segments back that wait, so that they are chosen with all of their free places. Those
    /// of batches are given back from the last one on: a recovery looks for batches in their order,
    /// and must not meet many that were left out.
    pub(super) fn give_back_hidden(&mut self) {
        if !std::mem::take(&mut self.is_hidden_wanted) {
            return;
        }
        let given = self.log.waiting.split_off(WAITING_MIN.min(self.log.waiting.len()));
        let pages = std::mem::take(&mut self.pages.waiting);
        for chosen in given.into_iter().chain(pages) {
            self.states[chosen.segment as usize] = SegmentState::Idle;
        }
    }

    /// Notes the room in the candidates that a checkpoint has chosen for nothing. `page_places` of
    /// it are for pages of maps.
    pub(super) fn note_spare(&mut self, left: impl Iterator<Item = u32>, page_places: usize) {
        let last = self.layout.segment_blocks - 1;
        let room = left.map(|segment| last.saturating_sub(u32::from(self.used[segment as usize])));
        let room: u64 = room.map(u64::from).sum();
        self.spare = room.saturating_sub(page_places as u64);
    }
}
