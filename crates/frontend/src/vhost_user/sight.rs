//! Whether the daemon sees what the guest writes.
//!
//! A VMM can hand over the file of a memory that it has mapped privately (`share=off` in QEMU). All
//! is set up as for any guest, but the guest's stores go to copies of the file's pages: its ring
//! stays empty here however often it kicks, and the guest waits for ever.
//!
//! A kick on an empty ring proves nothing: VMMs kick once to be on the safe side. So a ring that is
//! still empty a second later is only a reason to look at the memory as a whole. A guest that runs
//! has its code and data there; where next to nothing but zeroes is found, the guest writes
//! elsewhere. What follows is a warning and nothing else.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use super::ring::Ring;

/// How long a ring may stay empty after a kick before the memory is looked at, in nanoseconds.
const WAIT_NS: u64 = 1_000_000_000;

/// Nothing is known yet.
const UNKNOWN: u8 = 0;
/// Something of the guest was seen.
const SEEN: u8 = 1;
/// The guest has kicked, and there is nothing of it in its memory.
const BLIND: u8 = 2;

/// What is known about a connection's memory, by all its rings.
#[derive(Debug, Default)]
pub(super) struct Sight(AtomicU8);

impl Sight {
    /// Whether the guest uses its disk but nothing of what it writes arrives here.
    pub(super) fn is_blind(&self) -> bool {
        self.0.load(Ordering::Relaxed) == BLIND
    }
}

/// One ring's part in finding out.
pub(super) struct Lookout {
    sight: Arc<Sight>,
    /// Something was seen: there is nothing left to find out.
    ended: bool,
    /// When to look at the memory; `u64::MAX` where no kick is unanswered.
    deadline_ns: u64,
}

impl Lookout {
    pub(super) fn new(sight: Arc<Sight>) -> Self {
        Self { sight, ended: false, deadline_ns: u64::MAX }
    }

    /// The guest has kicked.
    pub(super) fn kicked(&mut self, now_ns: u64) {
        if !self.ended && self.deadline_ns == u64::MAX {
            self.deadline_ns = now_ns.saturating_add(WAIT_NS);
        }
    }

    /// The ring has requests. Cheap: it is called in each round.
    pub(super) fn see(&mut self) {
        if !self.ended {
            self.ended = true;
            self.deadline_ns = u64::MAX;
            self.sight.0.store(SEEN, Ordering::Relaxed);
        }
    }

    /// When [`look`](Self::look) is due, in nanoseconds; `u64::MAX` is never.
    pub(super) fn deadline_ns(&self) -> u64 {
        self.deadline_ns
    }

    /// Looks at the memory of a ring that has stayed empty. Returns whether it has just turned out
    /// that nothing of the guest is there.
    pub(super) fn look(&mut self, ring: &Ring) -> bool {
        self.deadline_ns = u64::MAX;
        if self.sight.0.load(Ordering::Relaxed) == SEEN {
            self.ended = true;
            return false;
        }
        if ring.has_available() || !ring.memory().is_blank(ring.used_range().0) {
            self.see();
            return false;
        }
        self.sight.0.compare_exchange(UNKNOWN, BLIND, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}
