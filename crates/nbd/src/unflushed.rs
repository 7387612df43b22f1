//! Changes that the server has acknowledged and may still lose, because no flush that began later
//! has succeeded. If the connection breaks, the server may have been killed; so the next connection
//! begins with them.

use std::collections::VecDeque;

use crate::job::Asked;

/// From this many bytes on, a flush of the session's own follows; twice as many delay further
/// requests.
const LENGTH_MAX: usize = 16 << 20;
/// The memory of a change besides its data, in bytes.
const CHANGE_LENGTH: usize = 128;

/// The changes, in the order in which they completed.
#[derive(Default)]
pub(crate) struct Unflushed {
    changes: VecDeque<(u64, Asked)>,
    last: u64,
    length: usize,
}

fn length(asked: &Asked) -> usize {
    CHANGE_LENGTH + asked.data.len()
}

impl Unflushed {
    /// A change has completed.
    pub(crate) fn note(&mut self, asked: &Asked) {
        // A durable one has to come after older ones of the same place.
        if asked.flags.force_unit_access && self.changes.is_empty() {
            return;
        }
        self.last += 1;
        self.length += length(asked);
        self.changes.push_back((self.last, asked.clone()));
    }

    /// The number of the last change.
    pub(crate) fn last(&self) -> u64 {
        self.last
    }

    /// A flush has succeeded that was sent after the change `last` had completed.
    pub(crate) fn forget(&mut self, last: u64) {
        while self.changes.front().is_some_and(|(number, _)| *number <= last) {
            let (_, asked) = self.changes.pop_front().unwrap_or_else(|| unreachable!());
            self.length -= length(&asked);
        }
    }

    /// Whether they should be flushed soon.
    pub(crate) fn is_long(&self) -> bool {
        self.length > LENGTH_MAX
    }

    /// Whether requests have to wait for a flush.
    pub(crate) fn is_full(&self) -> bool {
        self.length > 2 * LENGTH_MAX
    }

    /// Whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }

    /// All of them.
    pub(crate) fn all(&self) -> Vec<Asked> {
        self.changes.iter().map(|(_, asked)| asked.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use fathom_block::{Flags, Operation};

    use super::*;

    fn write(offset: u64, force_unit_access: bool, length: usize) -> Asked {
        let flags = Flags { force_unit_access, ..Flags::default() };
        let (operation, data) = (Operation::Write, Arc::from(vec![1; length]));
        Asked { operation, offset, length: length as u64, flags, data }
    }

    #[test]
    fn a_flush_covers_what_had_completed_when_it_was_sent() {
        let mut unflushed = Unflushed::default();
        unflushed.note(&write(0, true, 1));
        assert!(unflushed.all().is_empty(), "the server has promised that it is durable");
        unflushed.note(&write(1, false, 1));
        let covers = unflushed.last();
        // This one would be undone by the one before it.
        unflushed.note(&write(1, true, 1));
        unflushed.note(&write(2, false, 1));
        unflushed.forget(covers);
        let places: Vec<u64> = unflushed.all().iter().map(|asked| asked.offset).collect();
        assert_eq!(places, [1, 2]);
        unflushed.forget(unflushed.last());
        assert_eq!((unflushed.all().len(), unflushed.length), (0, 0));
    }

    #[test]
    fn their_memory_has_limits() {
        let mut unflushed = Unflushed::default();
        while !unflushed.is_long() {
            unflushed.note(&write(0, false, 1 << 20));
        }
        assert_eq!(unflushed.all().len(), 16);
        while !unflushed.is_full() {
            unflushed.note(&write(0, false, 0));
        }
        assert!(unflushed.all().len() < 1 << 18);
    }
}
