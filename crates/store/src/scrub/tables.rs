//! The pages of the space map and of the page table, of which the valid copies are read.
//!
//! A checkpoint writes over a copy that is not valid. So a copy that is valid before a read and
//! after it has not changed meanwhile. Memory has the content of all these pages: the next
//! checkpoint writes one that is damaged anew, over its other copy.

use super::{Phase, Scrub, ScrubStep};
use crate::layout::BLOCK_BYTES;
use crate::paged::{Paged, payload};
use crate::state::State;

/// The most pages that are read at once.
const PAGES_MAX: u32 = 64;

/// Pages of a table that are read, with both copies of each.
#[derive(Clone, Debug)]
pub(crate) struct TableRead {
    /// The number of the scrub.
    pub(super) scrub: u64,
    is_space: bool,
    first: u32,
    /// The first block that is read, and that of the valid copy of each page.
    start: u64,
    valid: Vec<u64>,
}

impl TableRead {
    /// The first block, and how many there are.
    pub(crate) fn blocks(&self) -> (u64, usize) {
        (self.start, 2 * self.valid.len())
    }
}

fn table(state: &mut State, is_space: bool) -> &mut Paged {
    if is_space { state.space.map() } else { state.pages.table() }
}

impl Scrub {
    pub(super) fn step_tables(&mut self, state: &mut State) -> Option<ScrubStep> {
        let of_space = state.space.map().count();
        let is_space = self.table < of_space;
        let first = if is_space { self.table } else { self.table - of_space };
        let table = table(state, is_space);
        let last = table.count().min(first + PAGES_MAX);
        if first >= last {
            self.phase = Phase::Done;
            return None;
        }
        self.table += last - first;
        let valid = (first..last).map(|index| table.current(index)).collect();
        let start = table.first() + 2 * u64::from(first);
        Some(ScrubStep::Tables(TableRead {
            scrub: self.report.number,
            is_space,
            first,
            start,
            valid,
        }))
    }

    /// Pages of a table were not read: they are read later.
    pub(super) fn tables_undone(&mut self, state: &mut State, read: &TableRead) {
        let before = if read.is_space { 0 } else { state.space.map().count() };
        (self.table, self.phase) = (before + read.first, Phase::Tables);
    }

    /// Pages of a table have been read; `None` if they could not be. Returns whether one is damaged
    /// and `is_last` is not set: then they are read once more.
    pub(super) fn tables_read(
        &mut self,
        state: &mut State,
        read: &TableRead,
        bytes: Option<&[u8]>,
        is_last: bool,
    ) -> bool {
        let identity = state.identity;
        let table = table(state, read.is_space);
        let mut damaged = Vec::new();
        for (index, block) in (read.first..).zip(&read.valid) {
            let at = (block - read.start) as usize * BLOCK_BYTES;
            let bytes = bytes.and_then(|bytes| bytes.get(at..at + BLOCK_BYTES));
            let is_right = bytes.is_some_and(|bytes| payload(identity, index, bytes).is_some());
            if !is_right && table.current(index) == *block {
                damaged.push(index);
            }
        }
        if !damaged.is_empty() && !is_last {
            return true;
        }
        for index in &damaged {
            table.change(*index as usize);
        }
        self.report.mended_pages += damaged.len() as u64;
        if !damaged.is_empty() {
            state.note_change();
        }
        false
    }
}
