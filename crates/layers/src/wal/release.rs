//! Gives back the space of a log that is not needed any more, while a log that carries changes only
//! at times rests.
//!
//! Only for a store that keeps zeroes in little space
//! ([`Backend::frees_zeroes`](fathom_block::Backend::frees_zeroes)), for example a cluster's
//! memory. What records had used is overwritten with zeroes, piece by piece. No scan looks for
//! records before the tail of an empty log, and a new record gets no place of a piece in flight.

use fathom_block::{Crossing, Operation, Outcome};
use fathom_wal::Pin;

use super::LogState;
use super::queue::{WalQueue, purpose};
use super::switch::Mode;

/// The most bytes of a piece.
const PIECE: u64 = 1 << 20;

/// A piece in flight: the position behind it, and what keeps its place.
pub(super) struct Releasing {
    end: u64,
    pin: Pin,
}

impl LogState {
    /// The position and length of the next piece to release, if there is one and nothing needs the
    /// log.
    fn next_release(&self) -> Option<(u64, u64)> {
        let rests = self.carry.as_ref().is_some_and(|carry| carry.mode() == Mode::Resting);
        if !rests || self.failed.is_some() || !self.log.is_empty() {
            return None;
        }
        let (head, ring_length) = (self.log.head(), self.log.superblock().ring_length);
        let start = self.released.max(head.saturating_sub(ring_length));
        let length = (head - start).min(PIECE).min(ring_length - start % ring_length);
        (length > 0).then_some((start, length))
    }

    /// Whether space is being released, or may be.
    pub(super) fn may_release(&self) -> bool {
        self.is_releasing || self.next_release().is_some()
    }

    /// Begins to release the next piece.
    fn begin_release(&mut self) -> Option<(u64, u64, Releasing)> {
        let (start, length) = self.next_release().filter(|_| !self.is_releasing)?;
        self.is_releasing = true;
        let pin = self.log.hold(start);
        Some((start, length, Releasing { end: start + length, pin }))
    }

    /// A piece is released, or, unless it `is_ok`, all of it is given up.
    fn end_release(&mut self, releasing: Releasing, is_ok: bool) {
        let Releasing { end, pin } = releasing;
        self.is_releasing = false;
        self.log.unpin(pin);
        self.released = if is_ok { end } else { self.log.head() };
    }
}

impl WalQueue {
    /// Releases the next piece.
    pub(super) fn release(&mut self, next: &mut Crossing<'_>) {
        if !self.inner.frees_zeroes || self.is_closed || self.releasing.is_some() {
            return;
        }
        let begun = self.inner.shared.access(LogState::begin_release);
        let Some((position, length, releasing)) = begun else { return };
        self.releasing = Some(releasing);
        let mut own = next.request();
        own.operation = Operation::WriteZeroes;
        own.token = purpose::RELEASE;
        (own.offset, own.length) = (self.inner.place(position), length);
        next.submit_to(self.store, own);
    }

    /// A piece has been overwritten.
    pub(super) fn released(&mut self, outcome: Outcome) {
        if let Some(releasing) = self.releasing.take() {
            self.inner.shared.access(|state| state.end_release(releasing, outcome.is_ok()));
            // A change may wait for its place.
            self.inner.shared.wake();
        }
    }
}
