//! The reads of a queue.

use fathom_block::{
    Allocation, CacheHit, Crossing, ErrorKind, Extent, Operation, Outcome, Request, faults,
};
use fathom_wal::{ContentLocation, Segment};

use super::{WalQueue, purpose};

impl WalQueue {
    /// A read of the disk.
    pub(super) fn read(&mut self, mut request: Box<Request>, next: &mut Crossing<'_>) {
        let range = request.range();
        let mut segments = std::mem::take(&mut self.segments);
        segments.clear();
        let pin = self.inner.shared.access(|state| {
            if state.log.map().is_empty() {
                return None;
            }
            Some(state.log.pin(range, |segment| segments.push(segment)))
        });
        let Some(pin) = pin else {
            self.segments = segments;
            return next.submit(request);
        };
        let is_home = segments.iter().all(|segment| segment.source.is_none());
        let in_ring = |segment: &Segment| matches!(segment.source, Some(ContentLocation::Ring(_)));
        if segments.iter().any(in_ring) {
            self.count += 1;
            self.pins.insert(self.count, pin);
            *next.word(&mut request) = self.count;
        } else {
            self.inner.shared.access(|state| state.log.unpin(pin));
        }
        if is_home {
            self.segments = segments;
            return next.submit(request);
        }
        let (start, before) = (request.offset, faults());
        for segment in &segments {
            if matches!(
                segment.source,
                Some(ContentLocation::Zeroes { .. } | ContentLocation::Discard)
            ) {
                let from = segment.offset - start;
                request.buffers.fill_zero(from, segment.length as usize);
            }
        }
        if faults() != before {
            return self.end_read(request, Err(ErrorKind::Memory), next);
        }
        let is_part = segments.iter().any(|segment| segment.source.is_none());
        request.course.cache_hit = if is_part { CacheHit::Part } else { CacheHit::Hit };
        let split = next.split(request);
        for segment in &segments {
            let from = segment.offset - start;
            match segment.source {
                None => {
                    let piece = next.piece(split, from, segment.length);
                    next.submit(piece);
                }
                Some(ContentLocation::Ring(position)) => {
                    let mut piece = next.piece(split, from, segment.length);
                    piece.offset = self.inner.place(position);
                    next.submit_to(self.store, piece);
                }
                Some(ContentLocation::Zeroes { .. } | ContentLocation::Discard) => {}
            }
        }
        next.join(split);
        self.segments = segments;
    }

    /// Ends a read, and releases the space that it read.
    pub(super) fn end_read(
        &mut self,
        mut request: Box<Request>,
        outcome: Outcome,
        next: &mut Crossing<'_>,
    ) {
        let number = std::mem::take(next.word(&mut request));
        if let Some(pin) = self.pins.remove(&number) {
            self.inner.shared.access(|state| state.log.unpin(pin));
            // A change may wait for that space.
            self.inner.shared.wake();
        }
        next.complete(request, outcome);
    }

    /// Answers from the log, or asks the disk beneath for a range that is not in the log.
    pub(super) fn extents(&mut self, mut request: Box<Request>, next: &mut Crossing<'_>) {
        let range = request.range();
        let first = self.inner.shared.access(|state| state.log.map().first(range));
        let allocation = match first.source {
            Some(ContentLocation::Ring(_)) => Allocation::Data,
            Some(ContentLocation::Zeroes { keep_allocated: true }) => Allocation::Zero,
            Some(ContentLocation::Zeroes { keep_allocated: false } | ContentLocation::Discard) => {
                Allocation::Hole
            }
            None if first.length == request.length => return next.submit(request),
            None => {
                self.count += 1;
                let mut own = next.request();
                own.operation = Operation::Extents;
                (own.offset, own.length) = (first.offset, first.length);
                own.token = self.count << purpose::BITS | purpose::EXTENTS;
                self.extent_requests.insert(self.count, request);
                return next.submit(own);
            }
        };
        let (offset, length) = (first.offset, first.length);
        request.extents.push(Extent { offset, length, allocation });
        next.complete(request, Ok(()));
    }
}
