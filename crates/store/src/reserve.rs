//! Segments that were chosen, in the order of their use.

use std::collections::VecDeque;

/// A segment that was chosen: its places that are free.
#[derive(Debug)]
pub(crate) struct Chosen {
    pub(crate) segment: u32,
    /// Numbers within the segment, ascending.
    pub(crate) free: Vec<u16>,
    pub(crate) next: usize,
}

impl Chosen {
    pub(crate) fn left(&self) -> usize {
        self.free.len() - self.next
    }
}

/// Segments in the order of their use.
#[derive(Debug, Default)]
pub(crate) struct Reserve {
    pub(crate) open: Option<Chosen>,
    pub(crate) waiting: VecDeque<Chosen>,
    /// Chosen by a checkpoint that is not durable yet, or that reads delay.
    pub(crate) prepared: Vec<Chosen>,
}

impl Reserve {
    /// The number of free places in segments that may be used now.
    pub(crate) fn left(&self) -> usize {
        self.open.iter().chain(&self.waiting).map(Chosen::left).sum()
    }

    pub(crate) fn segments(&self) -> impl Iterator<Item = u32> {
        self.waiting.iter().chain(&self.prepared).map(|chosen| chosen.segment)
    }
}

/// The free places of these segments.
pub(crate) fn left_of(chosen: &[Chosen]) -> usize {
    chosen.iter().map(Chosen::left).sum()
}
