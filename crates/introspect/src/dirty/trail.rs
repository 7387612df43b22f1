//! Where a count reads, so that the next one can have it fetched together.
//!
//! A count follows pointers through some dozens of lines of the guest's memory. If it is made once
//! a second, none of them is in the processor's caches, and it waits for each of them. So the lines
//! are remembered, and fetched while another guest is counted. They are only hints: each count
//! reads everything again.

use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;

use super::budget::Budget;
use crate::kernel::Kernel;

/// The most lines of a guest that are remembered.
const LINES_MAX: usize = 512;
/// The length of a line of the processor's caches, in bytes.
const LINE: u64 = 64;
/// One in so many counts remembers its lines.
const INTERVAL: u32 = 64;

/// The lines that a count read, by their guest-physical addresses.
#[derive(Debug, Default)]
pub(crate) struct Trail {
    lines: Mutex<Vec<u64>>,
    counts: AtomicU32,
}

impl Trail {
    /// Whether the count that begins now remembers its lines.
    pub(super) fn is_due(&self) -> bool {
        self.counts.fetch_add(1, Ordering::Relaxed) % INTERVAL == 0
    }

    /// Replaces the lines.
    pub(super) fn set(&self, mut lines: Vec<u64>) {
        for address in &mut lines {
            *address -= *address % LINE;
        }
        lines.sort_unstable();
        lines.dedup();
        *self.lines.lock() = lines;
    }
}

impl Kernel {
    /// Starts to fetch what the next count of dirty pages will read into the processor's caches.
    pub fn expect_dirty(&self) {
        let lines = self.trail.lines.lock();
        for address in lines.iter() {
            self.memory.prefetch(*address);
        }
    }

    /// Remembers that a count reads the virtual address `address`, if it remembers its lines.
    pub(super) fn note(&self, address: u64, budget: &Budget) {
        budget.record(|lines| {
            if lines.len() < LINES_MAX {
                self.space.lines(&self.memory, address, lines);
            }
        });
    }
}
