//! Whether the guest's writes to its memory reach the daemon.
//!
//! A VMM can hand over the file of a memory that it has mapped privately (`share=off` in QEMU). The
//! connection is set up as for any guest, but the guest's stores go to private copies of the file's
//! pages. So its ring stays empty here however often the guest kicks, and the guest waits for ever.
//!
//! A kick on an empty ring proves nothing, because some VMMs send a first kick as a precaution. So
//! a ring that is still empty a second later is only a reason to examine the memory as a whole. A
//! running guest has its code and data there; if the memory is nearly all zeroes, the guest writes
//! elsewhere. The only consequence is a warning.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use super::ring::Ring;

/// How long a ring may stay empty after a kick before the memory is examined, in nanoseconds.
const WAIT_NS: u64 = 1_000_000_000;

/// Not known yet.
const UNKNOWN: u8 = 0;
/// The daemon has seen writes of the guest.
const SHARED: u8 = 1;
/// The guest has kicked, but its memory holds nothing of a guest.
const PRIVATE: u8 = 2;

/// The knowledge about a connection's memory, shared by all its rings.
#[derive(Debug, Default)]
pub(super) struct PrivateMemory(AtomicU8);

impl PrivateMemory {
    /// Whether the guest uses its disk but none of its writes to memory reach the daemon.
    pub(super) fn is_detected(&self) -> bool {
        self.0.load(Ordering::Relaxed) == PRIVATE
    }
}

/// One ring's part of the detection.
pub(super) struct PrivateMemoryDetector {
    state: Arc<PrivateMemory>,
    /// Whether writes of the guest were seen, which ends the detection.
    ended: bool,
    /// When to examine the memory, in nanoseconds; `u64::MAX` if no kick is unanswered.
    deadline_ns: u64,
}

impl PrivateMemoryDetector {
    pub(super) fn new(state: Arc<PrivateMemory>) -> Self {
        Self { state, ended: false, deadline_ns: u64::MAX }
    }

    /// Records a kick of the guest.
    pub(super) fn kicked(&mut self, now_ns: u64) {
        if !self.ended && self.deadline_ns == u64::MAX {
            self.deadline_ns = now_ns.saturating_add(WAIT_NS);
        }
    }

    /// Records that the memory is shared, because the ring has requests or the memory has contents.
    /// This method is cheap, because each round calls it.
    pub(super) fn mark_shared(&mut self) {
        if !self.ended {
            self.ended = true;
            self.deadline_ns = u64::MAX;
            self.state.0.store(SHARED, Ordering::Relaxed);
        }
    }

    /// When [`examine`](Self::examine) is due, in nanoseconds; `u64::MAX` is never.
    pub(super) fn deadline_ns(&self) -> u64 {
        self.deadline_ns
    }

    /// Examines the memory of a ring that has stayed empty. Returns whether this call is the first
    /// to find nothing of the guest there.
    pub(super) fn examine(&mut self, ring: &Ring) -> bool {
        self.deadline_ns = u64::MAX;
        if self.state.0.load(Ordering::Relaxed) == SHARED {
            self.ended = true;
            return false;
        }
        if ring.has_available() || !ring.memory().is_blank(ring.used_range().0) {
            self.mark_shared();
            return false;
        }
        self.state
            .0
            .compare_exchange(UNKNOWN, PRIVATE, Ordering::Relaxed, Ordering::Relaxed)
            .is_ok()
    }
}
