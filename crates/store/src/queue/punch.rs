//! Gives free segments back to what is beneath the pool, some at a time.

use std::sync::atomic::Ordering;

use fathom_block::{BackendContext, Operation, Outcome, Request};

use super::StoreQueue;
use super::device::Purpose;
use crate::layout::BLOCK;

/// The most segments that are given back at once.
const SEGMENTS_MAX: u32 = 16;
/// The time between two such requests is this share of the time without requests after which
/// blocks are moved.
const PAUSE_SHARE: u64 = 20;

impl StoreQueue {
    /// Gives segments back if there are some.
    pub(super) fn punch(&mut self, context: &mut BackendContext<'_>) {
        if !self.inner.punches || self.is_closed || !self.has_punch() {
            return;
        }
        let at_ns = self.inner.punch_at_ns.load(Ordering::Relaxed);
        if context.now_ns() < at_ns {
            return context.wake_at(at_ns);
        }
        if self.inner.is_punched.swap(true, Ordering::AcqRel) {
            return;
        }
        let begun = self.inner.shared.access(|state| state.space.begin_punch(SEGMENTS_MAX));
        let Some((first, count)) = begun else { return self.leave_punch() };
        let blocks = u64::from(self.inner.segment_blocks);
        let mut own = self.device.take();
        own.operation = Operation::Discard;
        own.offset = (self.inner.first_segment + u64::from(first) * blocks) * BLOCK;
        own.length = u64::from(count) * blocks * BLOCK;
        self.device.submit(own, Purpose::Punch { first, count }, context);
    }

    fn has_punch(&self) -> bool {
        self.inner.shared.access(|state| state.space.has_punch() && state.failed.is_none())
    }

    /// Segments have been given back.
    pub(super) fn punched(
        &mut self,
        segments: (u32, u32),
        own: Box<Request>,
        outcome: Outcome,
        context: &mut BackendContext<'_>,
    ) {
        self.device.give(own);
        self.inner.shared.access(|state| {
            state.space.end_punch(segments, outcome.is_ok());
            state.counts.punched_segments += u64::from(segments.1) * u64::from(outcome.is_ok());
        });
        let next_ns = context.now_ns() + self.inner.options.idle_ns / PAUSE_SHARE;
        self.inner.punch_at_ns.store(next_ns, Ordering::Relaxed);
        self.leave_punch();
        if self.has_punch() {
            context.wake_at(next_ns);
        }
    }

    fn leave_punch(&mut self) {
        self.inner.is_punched.store(false, Ordering::Release);
    }

    /// The queue ends while segments are given back, which are not used again if the kernel may
    /// still do it.
    pub(super) fn leave_punch_undone(&mut self) {
        let segments = self.device.in_flight().find_map(|purpose| {
            if let Purpose::Punch { first, count } = purpose {
                Some((*first, *count))
            } else {
                None
            }
        });
        if let Some(segments) = segments {
            self.inner.shared.access(|state| state.space.end_punch(segments, false));
            self.leave_punch();
        }
    }
}
