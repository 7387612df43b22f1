//! A request that changes blocks of a volume.

use std::collections::VecDeque;
use std::ops::Range;

use fathom_block::{ErrorKind, Operation, Outcome, Request, faults};

use crate::layout::{BLOCK, BLOCK_BYTES};
use crate::tree::RANGE_MAX;

/// How often a part of a change may fail before the change fails.
const FAILURES_MAX: u32 = 3;

/// The old content of a block of which a change has only a part.
#[derive(Debug, Default)]
pub(super) enum EdgeContent {
    #[default]
    Unknown,
    Reading,
    Known(Box<[u8]>),
}

/// A block at the beginning or the end of a change.
#[derive(Debug)]
pub(super) struct Edge {
    pub(super) block: u64,
    pub(super) content: EdgeContent,
}

/// A part of a change that goes into a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// One block with data.
    Data(u64),
    /// Blocks of zeroes.
    Zeroes(Range<u64>),
}

/// See the module.
pub(super) struct Change {
    pub(super) request: Box<Request>,
    /// The blocks.
    pub(super) range: Range<u64>,
    pub(super) is_locked: bool,
    /// The pages that it may change, which were promised to it.
    pub(super) promise: usize,
    pub(super) edges: Vec<Edge>,
    /// The blocks that are in no batch.
    pub(super) todo: VecDeque<Range<u64>>,
    /// Its parts that are in a draft or a batch.
    pub(super) parts: usize,
    pub(super) outcome: Outcome,
    failures: u32,
}

impl Change {
    pub(super) fn new(request: Box<Request>) -> Self {
        let (start, end) = (request.offset, request.offset + request.length);
        let range = start / BLOCK..end.div_ceil(BLOCK);
        let mut blocks = Vec::new();
        if start % BLOCK != 0 {
            blocks.push(range.start);
        }
        if end % BLOCK != 0 && !blocks.contains(&(range.end - 1)) {
            blocks.push(range.end - 1);
        }
        let edge = |block| Edge { block, content: EdgeContent::Unknown };
        Self {
            request,
            todo: VecDeque::from([range.clone()]),
            range,
            is_locked: false,
            promise: 0,
            edges: blocks.into_iter().map(edge).collect(),
            parts: 0,
            outcome: Ok(()),
            failures: 0,
        }
    }

    /// Whether its blocks can go into batches.
    pub(super) fn is_ready(&self) -> bool {
        let is_known = |edge: &Edge| matches!(edge.content, EdgeContent::Known(_));
        self.is_locked && self.edges.iter().all(is_known)
    }

    /// Whether all of its batches have ended, and no more will come.
    pub(super) fn is_complete(&self) -> bool {
        let is_reading = |edge: &Edge| matches!(edge.content, EdgeContent::Reading);
        self.parts == 0
            && (self.todo.is_empty() || self.outcome.is_err())
            && !self.edges.iter().any(is_reading)
    }

    /// Takes the next part for a batch.
    pub(super) fn next_part(&mut self) -> Option<Part> {
        let range = self.todo.front_mut().filter(|_| self.outcome.is_ok())?;
        let first = range.start;
        let is_edge = |block: u64| self.edges.iter().any(|edge| edge.block == block);
        let part = if self.request.operation == Operation::Write || is_edge(first) {
            range.start += 1;
            Part::Data(first)
        } else {
            let mut end = range.end.min((first / RANGE_MAX + 1) * RANGE_MAX);
            if is_edge(end - 1) {
                end -= 1;
            }
            range.start = end;
            Part::Zeroes(first..end)
        };
        if range.is_empty() {
            self.todo.pop_front();
        }
        self.parts += 1;
        Some(part)
    }

    /// Takes a part back that found no place in a batch, or whose batch has failed.
    pub(super) fn put_back(&mut self, part: Part) {
        self.parts -= 1;
        let range = match part {
            Part::Data(block) => block..block + 1,
            Part::Zeroes(range) => range,
        };
        match self.todo.front_mut().filter(|front| front.start == range.end) {
            Some(front) => front.start = range.start,
            None => self.todo.push_front(range),
        }
    }

    /// A batch with a part of it has failed.
    pub(super) fn note_failure(&mut self, kind: ErrorKind) {
        self.failures += 1;
        if self.failures >= FAILURES_MAX {
            self.outcome = Err(kind);
        }
    }

    /// Writes what block `block` has after the change into `bytes`. Fails if the guest's memory is
    /// lost.
    pub(super) fn compose(&self, block: u64, bytes: &mut [u8]) -> Outcome {
        let start = block * BLOCK;
        let from = self.request.offset.max(start);
        let to = (self.request.offset + self.request.length).min(start + BLOCK);
        let edge = self.edges.iter().find(|edge| edge.block == block);
        if let Some(EdgeContent::Known(content)) = edge.map(|edge| &edge.content) {
            bytes.copy_from_slice(content);
        }
        let target = &mut bytes[(from - start) as usize..(to - start) as usize];
        if self.request.operation != Operation::Write {
            target.fill(0);
            return Ok(());
        }
        let before = faults();
        self.request.buffers.copy_to(from - self.request.offset, target);
        if faults() == before { Ok(()) } else { Err(ErrorKind::Memory) }
    }
}

/// Whether a block is all zeroes.
pub(super) fn is_zero(bytes: &[u8]) -> bool {
    const ZEROES: [u8; BLOCK_BYTES] = [0; BLOCK_BYTES];
    *bytes == ZEROES
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(operation: Operation, offset: u64, length: u64) -> Change {
        let mut request = Box::new(Request::default());
        (request.operation, request.offset, request.length) = (operation, offset, length);
        if operation == Operation::Write {
            request.buffers.allocate(length as usize);
            request.buffers.owned_mut().unwrap().fill(7);
        }
        Change::new(request)
    }

    fn parts(change: &mut Change) -> Vec<Part> {
        std::iter::from_fn(|| change.next_part()).collect()
    }

    #[test]
    fn a_change_is_divided_at_its_edges() {
        let mut write = change(Operation::Write, 4096, 8192);
        write.is_locked = true;
        assert!(write.edges.is_empty() && write.is_ready() && !write.is_complete());
        assert_eq!(parts(&mut write), [Part::Data(1), Part::Data(2)]);
        write.put_back(Part::Data(2));
        write.put_back(Part::Data(1));
        assert_eq!((write.todo.len(), write.todo[0].clone()), (1, 1..3));
        let mut zeroes = change(Operation::WriteZeroes, 512, 4 * BLOCK);
        assert_eq!(zeroes.edges.iter().map(|edge| edge.block).collect::<Vec<_>>(), [0, 4]);
        assert_eq!(parts(&mut zeroes), [Part::Data(0), Part::Zeroes(1..4), Part::Data(4)]);
        let mut long = change(Operation::Discard, (RANGE_MAX - 1) * BLOCK, (RANGE_MAX + 2) * BLOCK);
        let expected = [
            Part::Zeroes(RANGE_MAX - 1..RANGE_MAX),
            Part::Zeroes(RANGE_MAX..2 * RANGE_MAX),
            Part::Zeroes(2 * RANGE_MAX..2 * RANGE_MAX + 1),
        ];
        assert_eq!(parts(&mut long), expected);
        let inner = change(Operation::Write, 512, 512);
        assert_eq!((inner.edges.len(), inner.range.clone()), (1, 0..1));
    }

    #[test]
    fn a_part_of_a_block_keeps_the_rest_of_it() {
        for (operation, value) in [(Operation::Write, 7), (Operation::Discard, 0)] {
            let mut change = change(operation, 3584, 1024);
            for edge in &mut change.edges {
                edge.content = EdgeContent::Known(vec![9; BLOCK_BYTES].into());
            }
            let mut bytes = vec![1; BLOCK_BYTES];
            change.compose(0, &mut bytes).unwrap();
            assert!(bytes[..3584].iter().all(|byte| *byte == 9));
            assert!(bytes[3584..].iter().all(|byte| *byte == value));
            change.compose(1, &mut bytes).unwrap();
            assert!(bytes[..512].iter().all(|byte| *byte == value));
            assert!(bytes[512..].iter().all(|byte| *byte == 9));
        }
        assert!(is_zero(&[0; BLOCK_BYTES]) && !is_zero(&[1; BLOCK_BYTES]));
    }
}
