//! What a write-back round still writes home, in the order of the disk, and in how many steps.

use std::collections::VecDeque;

use fathom_block::{Capabilities, Operation};
use fathom_wal::{ContentLocation, Segment};

/// The most bytes of one step.
pub(super) const STEP_LENGTH_MAX: u64 = 1 << 20;

/// What one step writes home.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) operation: Operation,
    /// Whether zeroes stay allocated.
    pub(super) keep_allocated: bool,
    /// The range of the disk, in bytes.
    pub(super) offset: u64,
    pub(super) length: u64,
    /// The segments in the log with the data; none for zeroes.
    pub(super) run: Vec<Segment>,
}

/// The rest of a round.
#[derive(Debug)]
pub(super) struct Agenda {
    segments: VecDeque<Segment>,
    /// Zeroes that home has refused as an operation. They are written as data.
    refused: Vec<Segment>,
    /// What home can do with zeroes besides writing them.
    below: Capabilities,
    bytes: u64,
    steps: u64,
}

impl Agenda {
    /// All of `segments`, which are in the order of their offsets.
    pub(super) fn new(segments: Vec<Segment>, below: Capabilities) -> Self {
        let segments = segments.into_iter().filter(|segment| segment.source.is_some()).collect();
        let mut agenda = Self { segments, refused: Vec::new(), below, bytes: 0, steps: 0 };
        let mut at = 0;
        while let Some(first) = agenda.segments.get(at) {
            let (count, length) = agenda.run(at);
            let length = if count > 0 { length } else { agenda.moved(first) };
            agenda.bytes += length;
            agenda.steps += length.div_ceil(STEP_LENGTH_MAX).max(1);
            at += count.max(1);
        }
        agenda
    }

    pub(super) fn is_empty(&self) -> bool {
        self.segments.is_empty() && self.refused.is_empty()
    }

    /// The bytes that are left to write.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The steps that are left.
    pub(super) fn steps(&self) -> u64 {
        self.steps
    }

    /// The bytes that the next step writes; 0 if it only zeroes a range by an operation, or if
    /// there is none.
    pub(super) fn next_bytes(&self) -> u64 {
        if let Some(refused) = self.refused.last() {
            return refused.length.min(STEP_LENGTH_MAX);
        }
        let Some(first) = self.segments.front() else { return 0 };
        match self.run(0) {
            (0, _) => self.moved(first).min(STEP_LENGTH_MAX),
            (_, length) => length,
        }
    }

    /// Takes what the next step writes.
    pub(super) fn take(&mut self) -> Option<Piece> {
        let piece = match self.refused.pop() {
            Some(refused) => {
                let (piece, rest) = as_data(refused);
                self.refused.extend(rest);
                piece
            }
            None => self.take_segments()?,
        };
        if piece.operation == Operation::Write {
            self.bytes = self.bytes.saturating_sub(piece.length);
        }
        self.steps = self.steps.saturating_sub(1);
        Some(piece)
    }

    fn take_segments(&mut self) -> Option<Piece> {
        let (count, length) = self.run(0);
        if count > 0 {
            let run: Vec<Segment> = self.segments.drain(..count).collect();
            let offset = run[0].offset;
            let operation = Operation::Write;
            return Some(Piece { operation, keep_allocated: false, offset, length, run });
        }
        let first = self.segments.pop_front()?;
        let Some(operation) = self.zeroing(&first) else {
            let (piece, rest) = as_data(first);
            if let Some(rest) = rest {
                self.segments.push_front(rest);
            }
            return Some(piece);
        };
        let keep_allocated = first.source == Some(ContentLocation::Zeroes { keep_allocated: true });
        let Segment { offset, length, .. } = first;
        Some(Piece { operation, keep_allocated, offset, length, run: Vec::new() })
    }

    /// Home has refused zeroes. For example, a block device refuses ranges that are not aligned to
    /// its blocks.
    pub(super) fn refuse(&mut self, operation: Operation, offset: u64, length: u64) {
        let source = Some(ContentLocation::Zeroes { keep_allocated: false });
        let zeroes = Segment { offset, length, source, sequence: 0 };
        if operation == Operation::Discard && self.below.write_zeroes {
            self.steps += 1;
            self.segments.push_front(zeroes);
        } else {
            self.bytes += length;
            self.steps += length.div_ceil(STEP_LENGTH_MAX);
            self.refused.push(zeroes);
        }
    }

    /// The number of segments from index `at` on that one step copies, and their bytes; 0 if that
    /// one is zeroes.
    fn run(&self, at: usize) -> (usize, u64) {
        let (mut count, mut length) = (0, 0);
        let mut end = None;
        for segment in self.segments.range(at..) {
            let is_data = matches!(segment.source, Some(ContentLocation::Ring(_)));
            let continues = end.is_none_or(|end| {
                segment.offset == end && length + segment.length <= STEP_LENGTH_MAX
            });
            if !is_data || !continues {
                break;
            }
            (count, length) = (count + 1, length + segment.length);
            end = Some(segment.offset + segment.length);
        }
        (count, length)
    }

    /// The operation that zeroes a segment; `None` if zeroes are written as data.
    fn zeroing(&self, segment: &Segment) -> Option<Operation> {
        match segment.source {
            Some(ContentLocation::Discard) if self.below.discard => Some(Operation::Discard),
            Some(ContentLocation::Discard | ContentLocation::Zeroes { .. })
                if self.below.write_zeroes =>
            {
                Some(Operation::WriteZeroes)
            }
            _ => None,
        }
    }

    /// The bytes that are written for zeroes.
    fn moved(&self, segment: &Segment) -> u64 {
        if self.zeroing(segment).is_some() { 0 } else { segment.length }
    }
}

/// The first step that writes zeroes as data, and the rest.
fn as_data(zeroes: Segment) -> (Piece, Option<Segment>) {
    let Segment { offset, length, .. } = zeroes;
    let piece = Piece {
        operation: Operation::Write,
        keep_allocated: false,
        offset,
        length: length.min(STEP_LENGTH_MAX),
        run: Vec::new(),
    };
    let rest = Segment { offset: offset + piece.length, length: length - piece.length, ..zeroes };
    (piece, Some(rest).filter(|rest| rest.length > 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segment(offset: u64, length: u64, source: ContentLocation) -> Segment {
        Segment { offset, length, source: Some(source), sequence: 1 }
    }

    /// By seed: what the steps write covers all segments once, in their order, and what was
    /// announced is what is done.
    #[test]
    fn the_steps_cover_all_segments_and_are_counted() {
        for seed in 0..500 {
            let mut random = fastrand::Rng::with_seed(seed);
            let below = Capabilities {
                discard: random.bool(),
                write_zeroes: random.bool(),
                ..Capabilities::ALL
            };
            let (mut segments, mut at) = (Vec::new(), 0);
            for position in 0..random.u64(1..200) {
                at += if random.bool() { 0 } else { random.u64(1..9) * 4096 };
                let (source, length) = match random.u8(..8) {
                    0 => (ContentLocation::Discard, random.u64(1..2000) * 4096),
                    1 => {
                        let keep_allocated = random.bool();
                        (ContentLocation::Zeroes { keep_allocated }, random.u64(1..2000) * 4096)
                    }
                    _ => (ContentLocation::Ring(position << 30), random.u64(1..=256) * 4096),
                };
                segments.push(segment(at, length, source));
                at += length;
            }
            let mut agenda = Agenda::new(segments.clone(), below);
            let (mut done, mut refusals) = (Vec::new(), 0);
            loop {
                let (steps, bytes, next) = (agenda.steps(), agenda.bytes(), agenda.next_bytes());
                let Some(piece) = agenda.take() else { break };
                let moved = if piece.operation == Operation::Write { piece.length } else { 0 };
                assert_eq!(moved, next, "seed {seed}");
                assert_eq!((agenda.steps(), agenda.bytes()), (steps - 1, bytes - moved));
                assert!(moved <= STEP_LENGTH_MAX);
                if piece.operation != Operation::Write && random.u8(..4) == 0 {
                    agenda.refuse(piece.operation, piece.offset, piece.length);
                    refusals += 1;
                    continue;
                }
                let length: u64 = piece.run.iter().map(|segment| segment.length).sum();
                assert!(piece.run.is_empty() || length == piece.length);
                done.push((piece.offset, piece.length));
            }
            assert_eq!((agenda.steps(), agenda.bytes(), agenda.is_empty()), (0, 0, true));
            assert!(refusals == 0 || below.discard || below.write_zeroes);
            done.sort_unstable();
            let join = |ranges: Vec<(u64, u64)>| {
                let mut joined: Vec<(u64, u64)> = Vec::new();
                for (offset, length) in ranges {
                    match joined.last_mut() {
                        Some(last) if last.0 + last.1 == offset => last.1 += length,
                        Some(last) => {
                            assert!(last.0 + last.1 < offset, "seed {seed}: nothing twice");
                            joined.push((offset, length));
                        }
                        None => joined.push((offset, length)),
                    }
                }
                joined
            };
            let all = segments.iter().map(|segment| (segment.offset, segment.length)).collect();
            assert_eq!(join(done), join(all), "seed {seed}");
        }
    }
}
