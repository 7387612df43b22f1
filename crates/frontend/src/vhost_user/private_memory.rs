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
use std::time::{Duration, Instant};

use fathom_guest_memory::{GuestAddress, GuestMemory};

use super::ring::Ring;

/// The unit in which memory is examined, in bytes.
const BLANK_PAGE: u64 = 4096;
const ZEROES: [u8; BLANK_PAGE as usize] = [0; BLANK_PAGE as usize];
/// The approximate limit on the pages that are examined outside the densely examined ranges.
const BLANK_PAGES_MAX: u64 = 16_384;
/// The length of a densely examined range, in bytes.
const BLANK_DENSE: u64 = 1 << 20;
/// The longest time that the examination of a memory may take: files on slow disks are not examined
/// to the end.
const BLANK_TIME_MAX: Duration = Duration::from_secs(1);
/// The most non-zero bytes in memory that counts as blank: the flags that the daemon itself writes
/// into rings.
const MARKS_MAX: usize = 512;

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
        if ring.has_available() || !is_blank(ring.memory(), ring.used_range().0, BLANK_TIME_MAX) {
            self.mark_shared();
            return false;
        }
        self.state
            .0
            .compare_exchange(UNKNOWN, PRIVATE, Ordering::Relaxed, Ordering::Relaxed)
            .is_ok()
    }
}

/// Whether the memory holds nothing of a running guest: nearly all examined bytes are zero. The
/// function examines every byte of a small memory. In a large one it examines the ranges around
/// `near` and at the beginning of each region, and pages spread over the rest. Returns false if the
/// examination fails or takes longer than `limit`.
fn is_blank(memory: &GuestMemory, near: GuestAddress, limit: Duration) -> bool {
    let begun = Instant::now();
    let stride = (memory.length() / BLANK_PAGES_MAX).next_multiple_of(BLANK_PAGE).max(BLANK_PAGE);
    let mut page = [0; BLANK_PAGE as usize];
    let mut marks = 0;
    for region in memory.regions() {
        let mut offset = 0;
        while offset < region.length {
            let count = (region.length - offset).min(BLANK_PAGE);
            let part = &mut page[..count as usize];
            if region.read_from_file(offset, part).is_err() {
                return false;
            }
            if *part != ZEROES[..part.len()] {
                marks += part.iter().filter(|byte| **byte != 0).count();
            }
            if marks > MARKS_MAX || begun.elapsed() > limit {
                return false;
            }
            let dense =
                offset < BLANK_DENSE || (region.start + offset).abs_diff(near.0) < BLANK_DENSE;
            offset += if dense { BLANK_PAGE } else { stride };
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use fathom_guest_memory::Purpose;

    use super::super::memory::tests::memory;
    use super::*;

    #[test]
    fn memory_without_contents_of_a_guest_is_blank() {
        let near = GuestAddress(40 << 20);
        // Larger than the memory that is examined page by page.
        let length = 4 * BLANK_PAGES_MAX * BLANK_PAGE;
        let memory = memory(length, 0);
        let memory = memory.guest();
        // Without an effective time limit.
        let is_blank = || is_blank(memory, near, Duration::from_secs(600));
        assert!(is_blank());
        let write = |address, bytes: &[u8]| {
            memory.access(address, bytes.len() as u64, Purpose::Write).unwrap().write(0, bytes);
        };
        // As the daemon itself does in rings.
        write(near.0 + 0x1000, &[1]);
        write(near.0 + 0x3000, &[1]);
        assert!(is_blank());
        let data = [1; 2 * MARKS_MAX];
        for (address, length) in [(0, 4096), (near.0 - 0x7000, 4096), (length / 2, 64 << 10)] {
            write(address, &data.repeat(length / data.len()));
            assert!(!is_blank(), "{address:#x}");
            write(address, &vec![0; length]);
            assert!(is_blank(), "{address:#x}");
        }
        // Elsewhere the examination is sparse: it misses a page between two examined ones.
        write(length / 2 + BLANK_PAGE, &data);
        assert!(is_blank());
    }
}
