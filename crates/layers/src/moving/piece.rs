//! What of a run of regions is copied, and what is zeroed.

use std::ops::Range;

use fathom_block::{Allocation, Extent};

/// The most bytes of a piece with data.
pub(super) const DATA_MAX: u64 = 1 << 20;
/// The most bytes of a piece of zeroes.
pub(super) const ZEROES_MAX: u64 = 32 << 20;

/// What a piece has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PieceKind {
    /// Data that is read from the source.
    Data,
    /// Zeroes.
    Zeroes,
    /// Zeroes that the target has refused as an operation: they are written.
    WrittenZeroes,
}

/// A part of the disk that takes a request or two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) kind: PieceKind,
    /// Its offset in bytes.
    pub(super) offset: u64,
    /// Its length in bytes, never 0.
    pub(super) length: u64,
}

/// The pieces of `range`, in bytes, none longer than the greatest length of their kind.
pub(super) fn pieces_of(kind: PieceKind, range: Range<u64>) -> impl Iterator<Item = Piece> {
    let length_max = match kind {
        PieceKind::Data | PieceKind::WrittenZeroes => DATA_MAX,
        PieceKind::Zeroes => ZEROES_MAX,
    };
    let mut offset = range.start;
    std::iter::from_fn(move || {
        let length = range.end.saturating_sub(offset).min(length_max);
        let piece = Piece { kind, offset, length };
        offset += length;
        (length > 0).then_some(piece)
    })
}

/// The pieces of the part of `span` that the store's answer `extents` covers, and where that ends,
/// in bytes. Each boundary but the end of the span is a multiple of `unit`. What the answer leaves
/// out between two extents is data.
pub(super) fn divide(span: &Range<u64>, extents: &[Extent], unit: u64) -> (Vec<Piece>, u64) {
    let mut pieces = Vec::new();
    let (mut at, mut covered) = (span.start, span.start);
    for extent in extents {
        let end = extent.offset.saturating_add(extent.length).min(span.end);
        if end <= at {
            continue;
        }
        covered = end;
        if extent.allocation == Allocation::Data {
            let end = end.next_multiple_of(unit).min(span.end);
            pieces.extend(pieces_of(PieceKind::Data, at..end));
            at = end;
            continue;
        }
        let start = extent.offset.max(at).next_multiple_of(unit).min(span.end);
        let end = if end == span.end { end } else { end / unit * unit };
        if start < end {
            pieces.extend(pieces_of(PieceKind::Data, at..start));
            pieces.extend(pieces_of(PieceKind::Zeroes, start..end));
            at = end;
        }
    }
    // The last unit that the answer covers in part is in the next answer, unless this one does not
    // get further.
    let end = match covered {
        covered if covered == span.end || covered == span.start => span.end,
        covered if at == span.start => covered.next_multiple_of(unit).min(span.end),
        _ => at,
    };
    if at < end {
        pieces.extend(pieces_of(PieceKind::Data, at..end));
        at = end;
    }
    (pieces, at)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever a store answers, each byte of what is covered is in one piece, and none of its data
    /// is taken for zeroes.
    #[test]
    fn no_answer_loses_data() {
        for seed in 0..20_000 {
            let mut random = fastrand::Rng::with_seed(seed);
            let unit = 1 << random.u32(0..13);
            let start = random.u64(0..100) * 4096;
            let span = start..start + random.u64(1..200) * 512;
            let mut extents = Vec::new();
            let mut at = start.saturating_sub(random.u64(0..2) * 512);
            while random.u32(0..8) > 0 {
                let length = random.u64(1..40) * 512;
                let kinds = [Allocation::Data, Allocation::Hole, Allocation::Zero];
                let allocation = kinds[random.usize(0..3)];
                extents.push(Extent { offset: at, length, allocation });
                at += length + u64::from(random.u32(0..5) == 0) * 512;
            }
            let (pieces, end) = divide(&span, &extents, unit);
            assert!(end > span.start && end <= span.end, "seed {seed}");
            let mut at = span.start;
            for piece in &pieces {
                assert_eq!(piece.offset, at, "seed {seed}");
                at += piece.length;
                assert!(at == span.end || at % unit == 0, "seed {seed}");
                let zeroes = piece.kind == PieceKind::Zeroes;
                let is_zero = |byte: u64| {
                    let has = |it: &&Extent| it.offset <= byte && byte < it.offset + it.length;
                    let found = extents.iter().find(has);
                    found.is_some_and(|extent| extent.allocation != Allocation::Data)
                };
                let bytes = (piece.offset..at).step_by(512);
                assert!(!zeroes || bytes.into_iter().all(is_zero), "seed {seed}");
            }
            assert_eq!(at, end, "seed {seed}");
        }
    }
}
