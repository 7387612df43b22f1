//! Bags of rows.

use crate::ast::{SetOperation, ToStream};
use crate::value::Row;

/// A bag (multiset): its rows, sorted, with duplicates.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Bag(Vec<Row>);

impl FromIterator<Row> for Bag {
    fn from_iter<I: IntoIterator<Item = Row>>(rows: I) -> Self {
        let mut rows: Vec<Row> = rows.into_iter().collect();
        rows.sort();
        Self(rows)
    }
}

impl IntoIterator for Bag {
    type Item = Row;
    type IntoIter = std::vec::IntoIter<Row>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

impl Bag {
    pub(super) fn rows(&self) -> &[Row] {
        &self.0
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// The count of a row.
    pub(super) fn count(&self, row: &Row) -> usize {
        let before = self.0.partition_point(|other| other < row);
        self.0.partition_point(|other| other <= row) - before
    }

    /// Each row once.
    pub(super) fn distinct(mut self) -> Self {
        self.0.dedup();
        self
    }

    /// Each row and its count.
    pub(super) fn counts(&self) -> impl Iterator<Item = (Row, i64)> + '_ {
        self.0.chunk_by(|a, b| a == b).map(|same| (same[0].clone(), same.len() as i64))
    }

    /// A bag in which a row's count is a function of its counts in the two bags.
    fn combine(&self, other: &Self, count: impl Fn(usize, usize) -> usize) -> Self {
        let both: Self = self.0.iter().chain(&other.0).cloned().collect();
        let each = both.distinct().into_iter();
        each.flat_map(|row| {
            let times = count(self.count(&row), other.count(&row));
            std::iter::repeat_n(row, times)
        })
        .collect()
    }

    /// The bag without the rows of another, each of which removes one row.
    pub(super) fn except_all(&self, other: &Self) -> Self {
        self.combine(other, usize::saturating_sub)
    }
}

/// Union, except and intersect, of bags or of sets.
pub(super) fn set(operation: SetOperation, all: bool, left: &Bag, right: &Bag) -> Bag {
    match (operation, all) {
        (SetOperation::Union, true) => left.combine(right, |left, right| left + right),
        (SetOperation::Except, true) => left.except_all(right),
        (SetOperation::Intersect, true) => left.combine(right, usize::min),
        (SetOperation::Union, false) => left.combine(right, |_, _| 1),
        (SetOperation::Except, false) => {
            left.combine(right, |left, right| usize::from(left > 0 && right == 0))
        }
        (SetOperation::Intersect, false) => {
            left.combine(right, |left, right| usize::from(left > 0 && right > 0))
        }
    }
}

/// The rows that arrive in a stream at an instant at which its relation changes.
pub(super) fn to_stream(to_stream: ToStream, before: &Bag, now: &Bag) -> Bag {
    match to_stream {
        ToStream::Insertions => now.except_all(before),
        ToStream::Deletions => before.except_all(now),
        ToStream::Whole => now.clone(),
    }
}
