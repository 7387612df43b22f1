//! The ranges of the disk whose newest content is in the log, and where it is.

use std::collections::BTreeMap;
use std::ops::Range;

/// The place of a range's newest content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContentLocation {
    /// In the ring, from this position on.
    Ring(u64),
    /// It reads as zeroes.
    Zeroes {
        /// Whether the range stays allocated in the disk's store.
        keep_allocated: bool,
    },
    /// It reads as zeroes, and its space in the disk's store is released.
    Discard,
}

impl ContentLocation {
    /// The source of the content that begins `count` bytes later.
    fn skip(self, count: u64) -> Self {
        match self {
            Self::Ring(position) => Self::Ring(position + count),
            other => other,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    end: u64,
    sequence: u64,
    source: ContentLocation,
}

/// A range of the disk whose newest content has one source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Where the range begins, in bytes.
    pub offset: u64,
    /// The length of the range, in bytes; never 0.
    pub length: u64,
    /// The source of the newest content; `None` for home.
    pub source: Option<ContentLocation>,
    /// The sequence of the record with the content; 0 for home.
    pub sequence: u64,
}

/// A map from ranges of the disk to the sources of their newest content. Ranges do not overlap: a
/// new range replaces the parts of older ones that it covers.
#[derive(Debug, Default)]
pub struct Map {
    places: BTreeMap<u64, Place>,
}

impl Map {
    /// The newest content of `range` is now that of record `sequence`, at `source`.
    pub fn insert(&mut self, range: Range<u64>, sequence: u64, source: ContentLocation) {
        self.cut(&range);
        self.places.insert(range.start, Place { end: range.end, sequence, source });
    }

    /// Removes `range` from the map.
    pub fn cut(&mut self, range: &Range<u64>) {
        if let Some((&start, &place)) = self.places.range(..range.start).next_back() {
            if place.end > range.start {
                self.places.insert(start, Place { end: range.start, ..place });
                if place.end > range.end {
                    let source = place.source.skip(range.end - start);
                    self.places.insert(range.end, Place { source, ..place });
                }
            }
        }
        while let Some((&start, &place)) = self.places.range(range.clone()).next() {
            self.places.remove(&start);
            if place.end > range.end {
                let source = place.source.skip(range.end - start);
                self.places.insert(range.end, Place { source, ..place });
            }
        }
    }

    /// Calls `visit` with the segments of `range`, in order.
    pub fn segments(&self, range: Range<u64>, mut visit: impl FnMut(Segment)) {
        let before = self.places.range(..=range.start).next_back().map(|(start, _)| *start);
        let mut offset = range.start;
        for (&start, place) in self.places.range(before.unwrap_or(range.start)..range.end) {
            if place.end <= offset {
                continue;
            }
            if start > offset {
                visit(Segment { offset, length: start - offset, source: None, sequence: 0 });
                offset = start;
            }
            let length = place.end.min(range.end) - offset;
            let source = Some(place.source.skip(offset - start));
            visit(Segment { offset, length, source, sequence: place.sequence });
            offset += length;
        }
        if offset < range.end {
            let length = range.end - offset;
            visit(Segment { offset, length, source: None, sequence: 0 });
        }
    }

    /// The first segment of `range`, which must not be empty.
    pub fn first(&self, range: Range<u64>) -> Segment {
        let Range { start, end } = range;
        let before = self.places.range(..=start).next_back();
        if let Some((&offset, place)) = before.filter(|(_, place)| place.end > start) {
            let source = Some(place.source.skip(start - offset));
            let length = place.end.min(end) - start;
            return Segment { offset: start, length, source, sequence: place.sequence };
        }
        let next = self.places.range(start..end).next().map_or(end, |(offset, _)| *offset);
        Segment { offset: start, length: next - start, source: None, sequence: 0 }
    }

    /// The segments with content of records up to `sequence`, in order of their offsets.
    pub fn until(&self, sequence: u64) -> impl Iterator<Item = Segment> {
        self.places.iter().filter(move |(_, place)| place.sequence <= sequence).map(
            |(&offset, place)| Segment {
                offset,
                length: place.end - offset,
                source: Some(place.source),
                sequence: place.sequence,
            },
        )
    }

    /// Removes the content of records up to `sequence`.
    pub fn forget(&mut self, sequence: u64) {
        self.places.retain(|_, place| place.sequence > sequence);
    }

    /// Whether each range is aligned to `alignment` bytes, and its place in the ring to
    /// `ring_alignment` bytes.
    pub fn is_aligned(&self, alignment: u64, ring_alignment: u64) -> bool {
        self.places.iter().all(|(start, place)| {
            let position = match place.source {
                ContentLocation::Ring(position) => position,
                ContentLocation::Zeroes { .. } | ContentLocation::Discard => 0,
            };
            start % alignment == 0 && place.end % alignment == 0 && position % ring_alignment == 0
        })
    }

    /// The number of ranges.
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Whether everything is at home.
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }
}
