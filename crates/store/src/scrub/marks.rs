//! The pages of maps that a scrub has seen.

use crate::catalogue::PageId;
use crate::pages::Pages;

const SEEN: u8 = 1;
const DONE: u8 = 2;

/// Marks of pages, by their numbers.
#[derive(Default)]
pub(crate) struct PageMarks(Vec<u8>);

impl PageMarks {
    fn has(&self, id: PageId, mark: u8) -> bool {
        self.0.get(id as usize).is_some_and(|marks| marks & mark != 0)
    }

    fn set(&mut self, id: PageId, mark: u8) {
        if self.0.len() <= id as usize {
            self.0.resize(id as usize + 1, 0);
        }
        self.0[id as usize] |= mark;
    }

    /// The number is that of another page now.
    pub(crate) fn clear(&mut self, id: PageId) {
        if let Some(marks) = self.0.get_mut(id as usize) {
            *marks = 0;
        }
    }

    /// The bytes of memory that this takes.
    pub(crate) fn memory(&self) -> u64 {
        self.0.len() as u64
    }
}

impl Pages {
    /// A scrub begins, or ends.
    pub(super) fn mark_scrubbed(&mut self, is_begun: bool) {
        self.scrubbed = is_begun.then(PageMarks::default);
    }

    /// The copy of a page on the device has been read.
    pub(super) fn set_seen(&mut self, id: PageId) {
        if let Some(marks) = &mut self.scrubbed {
            marks.set(id, SEEN);
        }
    }

    pub(super) fn is_seen(&self, id: PageId) -> bool {
        self.scrubbed.as_ref().is_some_and(|marks| marks.has(id, SEEN))
    }

    /// All that a page leads to has been visited.
    pub(super) fn set_done(&mut self, id: PageId) {
        if let Some(marks) = &mut self.scrubbed {
            marks.set(id, DONE);
        }
    }

    pub(super) fn is_done(&self, id: PageId) -> bool {
        self.scrubbed.as_ref().is_some_and(|marks| marks.has(id, DONE))
    }

    /// What a page leads to has to be visited after all.
    pub(super) fn clear_marks(&mut self, id: PageId) {
        if let Some(marks) = &mut self.scrubbed {
            marks.clear(id);
        }
    }
}
