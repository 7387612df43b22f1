//! Joins: the rows of each side are kept by key, and a change on one side is matched with the rows
//! of the other.

use std::mem;
use std::rc::Rc;

use fathom_cql::Value;
use fathom_cql::ast::JoinKind;
use fathom_cql::eval::{evaluate, is_true};
use hashbrown::hash_table::Entry;
use hashbrown::{DefaultHashBuilder, HashTable};
use smallvec::SmallVec;

use super::build::Stateful;
use super::node::Matching;
use super::run::{Change, Run, RunBuilder, in_order};
use crate::columns::{ColumnValues, hash_of, hash_of_row};

const LEFT: usize = 0;

/// A row of one side: the columns with its values, and its position in them.
#[derive(Debug)]
struct Held {
    columns: Rc<Vec<Rc<ColumnValues>>>,
    row: u32,
    /// The number of copies of the row.
    count: i64,
    /// The number of matching rows on the other side, counting copies. Kept only if unmatched rows
    /// stay in the result.
    partners: i64,
}

impl Held {
    fn is(&self, run: &Run, row: usize) -> bool {
        #[cfg(test)]
        tests::COMPARED.set(tests::COMPARED.get() + 1);
        // A deleted row is often the same row of the same columns.
        Rc::ptr_eq(&self.columns, run.columns()) && self.row as usize == row
            || self
                .columns
                .iter()
                .zip(run.columns().iter())
                .all(|(mine, theirs)| mine.compare(self.row as usize, theirs, row).is_eq())
    }
}

/// The rows of one key.
#[derive(Debug)]
struct Bucket {
    hash: u64,
    key: Key,
    /// The rows of the left and of the right side.
    sides: [Rows; 2],
}

/// The most rows of a key that are searched linearly.
const SEARCHED_MAX: usize = 16;

/// The rows of one side that have a key. Many rows are found by the hash of the whole row, because
/// a linear search for each inserted or deleted row would take quadratic time in the size of the
/// window.
#[derive(Debug, Default)]
struct Rows {
    held: SmallVec<[Held; 1]>,
    /// The hash and the place of each row, if there are many rows.
    index: Option<Box<HashTable<(u64, u32)>>>,
}

impl Rows {
    fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Changes the count of a row.
    fn hold(
        &mut self,
        run: &Run,
        row: usize,
        (count, partners): (i64, i64),
        hasher: &DefaultHashBuilder,
    ) {
        let Self { held, index } = self;
        let mut hash = 0;
        let found = match index {
            // The oldest row is deleted first.
            None => held.iter().position(|held| held.is(run, row)),
            Some(index) => {
                hash = hash_of_row(run.columns(), row, hasher);
                let is =
                    |&(other, at): &(u64, u32)| other == hash && held[at as usize].is(run, row);
                index.find(hash, is).map(|&(_, at)| at as usize)
            }
        };
        let Some(at) = found else {
            held.push(Held { columns: Rc::clone(run.columns()), row: row as u32, count, partners });
            match index {
                Some(index) => {
                    let place = (hash, (held.len() - 1) as u32);
                    index.insert_unique(hash, place, |&(hash, _)| hash);
                }
                None if held.len() > SEARCHED_MAX => {
                    *index = Some(Box::new(indexed(held, hasher)));
                }
                None => {}
            }
            return;
        };
        held[at].count += count;
        held[at].partners = partners;
        if held[at].count != 0 {
            return;
        }
        let Some(table) = index else {
            held.remove(at);
            return;
        };
        let last = held.len() - 1;
        if let Ok(entry) = table.find_entry(hash, |&(_, place)| place as usize == at) {
            entry.remove();
        }
        if at < last {
            let moved = hash_of_row(&held[last].columns, held[last].row as usize, hasher);
            if let Some((_, place)) = table.find_mut(moved, |&(_, place)| place as usize == last) {
                *place = at as u32;
            }
        }
        held.swap_remove(at);
        if held.len() <= SEARCHED_MAX / 2 {
            *index = None;
        }
    }
}

/// The places of rows by their hashes.
fn indexed(held: &[Held], hasher: &DefaultHashBuilder) -> HashTable<(u64, u32)> {
    let mut index = HashTable::with_capacity(held.len());
    for (row, place) in held.iter().zip(0..) {
        let hash = hash_of_row(&row.columns, row.row as usize, hasher);
        index.insert_unique(hash, (hash, place), |&(hash, _)| hash);
    }
    index
}

/// The values of the columns that must be equal.
#[derive(Debug)]
enum Key {
    Integer(i64),
    Values(Box<[Value]>),
}

impl Key {
    fn new(columns: &[&Rc<ColumnValues>], row: usize) -> Self {
        match columns {
            [column] => match column.value(row) {
                Value::Integer(integer) => Self::Integer(integer),
                value => Self::Values([value].into()),
            },
            columns => Self::Values(columns.iter().map(|column| column.value(row)).collect()),
        }
    }

    fn is(&self, columns: &[&Rc<ColumnValues>], row: usize) -> bool {
        match self {
            Self::Integer(integer) => match &**columns[0] {
                ColumnValues::Integers(integers) => integers[row] == *integer,
                column => column.is(row, &Value::Integer(*integer)),
            },
            Self::Values(values) => {
                columns.iter().zip(values).all(|(column, value)| column.is(row, value))
            }
        }
    }
}

/// A join and the rows of its sides.
#[derive(Debug)]
pub(super) struct Join {
    hasher: DefaultHashBuilder,
    table: HashTable<Bucket>,
    changes: Vec<Change>,
    pairs: Pairs,
}

/// Outputs pairs.
#[derive(Debug)]
struct Pairs {
    matching: Matching,
    /// Whether unmatched rows of the left, and of the right side, stay in the result.
    stays: [bool; 2],
    builder: RunBuilder,
    scratch: Vec<Value>,
}

impl Join {
    pub(super) fn new(matching: Matching) -> Self {
        let stays = [
            matches!(matching.kind, JoinKind::Left | JoinKind::Full),
            matches!(matching.kind, JoinKind::Right | JoinKind::Full),
        ];
        let (builder, scratch) = (RunBuilder::default(), Vec::new());
        Self {
            hasher: DefaultHashBuilder::default(),
            table: HashTable::new(),
            changes: Vec::new(),
            pairs: Pairs { matching, stays, builder, scratch },
        }
    }

    /// Computes the changes of the pairs from the inserted and deleted rows of an epoch.
    pub(super) fn epoch(&mut self, left: &[Run], right: &[Run]) -> Vec<Run> {
        let mut changes = mem::take(&mut self.changes);
        in_order(left.iter().chain(right), &mut changes);
        let keyed = |side: usize, run| {
            let equal = &self.pairs.matching.equal[side];
            let columns: Vec<_> = equal.iter().filter_map(|&key| Run::column(run, key)).collect();
            (side, run, columns)
        };
        let left = left.iter().map(|run| keyed(LEFT, run));
        let runs: Vec<_> = left.chain(right.iter().map(|run| keyed(1 - LEFT, run))).collect();
        for change in &changes {
            let (side, run, keys) = &runs[change.run as usize];
            self.change(*side, run, keys, change.row as usize, change.time);
        }
        self.changes = changes;
        self.pairs.builder.take().into_iter().collect()
    }

    /// Inserts or deletes a row of one side.
    fn change(
        &mut self,
        side: usize,
        run: &Run,
        keys: &[&Rc<ColumnValues>],
        row: usize,
        time: u64,
    ) {
        let count = run.count(row);
        let Self { hasher, table, pairs, .. } = self;
        if keys.iter().any(|key| key.is_null(row)) {
            // A null is equal to no value.
            if pairs.stays[side] {
                pairs.push_unmatched(side, run.columns(), row, time, count);
            }
            return;
        }
        let hash = hash_of(keys, row, hasher);
        let same = |bucket: &Bucket| bucket.hash == hash && bucket.key.is(keys, row);
        let mut entry = match table.entry(hash, same, |bucket| bucket.hash) {
            Entry::Occupied(entry) => entry,
            Entry::Vacant(entry) => {
                let sides = [Rows::default(), Rows::default()];
                entry.insert(Bucket { hash, key: Key::new(keys, row), sides })
            }
        };
        let [left, right] = &mut entry.get_mut().sides;
        let (mine, theirs) = if side == LEFT { (left, right) } else { (right, left) };
        let partners = pairs.match_row(side, run, row, time, count, &mut theirs.held);
        mine.hold(run, row, (count, partners), hasher);
        if mine.is_empty() && theirs.is_empty() {
            entry.remove();
        }
    }
}

impl Stateful for Join {
    fn rows(&self) -> usize {
        self.table.iter().flat_map(|bucket| &bucket.sides).map(|side| side.held.len()).sum()
    }
}

impl Pairs {
    /// Matches an inserted or deleted row with the rows of the other side. Returns the number of
    /// matches.
    fn match_row(
        &mut self,
        side: usize,
        run: &Run,
        row: usize,
        time: u64,
        count: i64,
        theirs: &mut [Held],
    ) -> i64 {
        let counts_partners = self.stays != [false; 2];
        let mut partners = 0;
        for other in theirs {
            let mine = (run.columns(), row);
            let their = (&other.columns, other.row as usize);
            let (left, right) = if side == LEFT { (mine, their) } else { (their, mine) };
            if !self.matches(left, right) {
                continue;
            }
            self.push_pair(left, right, time, count * other.count);
            if !counts_partners {
                continue;
            }
            partners += other.count;
            let before = other.partners;
            other.partners += count;
            let becomes_unmatched = i64::from(other.partners == 0) - i64::from(before == 0);
            if self.stays[1 - side] && becomes_unmatched != 0 {
                let count = becomes_unmatched * other.count;
                self.push_unmatched(1 - side, &other.columns, other.row as usize, time, count);
            }
        }
        if self.stays[side] && partners == 0 {
            self.push_unmatched(side, run.columns(), row, time, count);
        }
        partners
    }

    /// Whether two rows with equal keys match.
    fn matches(&mut self, left: Place<'_>, right: Place<'_>) -> bool {
        let Some(residual) = &self.matching.residual else { return true };
        self.scratch.clear();
        for (columns, row) in [left, right] {
            self.scratch.extend(columns.iter().map(|column| column.value(row)));
        }
        is_true(&evaluate(residual, &self.scratch))
    }

    /// Outputs a change of a pair's count by `count`.
    fn push_pair(&mut self, left: Place<'_>, right: Place<'_>, time: u64, count: i64) {
        let outputs = &self.matching.outputs;
        let middle = self.matching.widths[LEFT];
        let columns = self.builder.begin(time, count, outputs.len());
        for (column, &from) in columns.iter_mut().zip(outputs) {
            if from < middle {
                column.push_from(&left.0[from], left.1);
            } else {
                column.push_from(&right.0[from - middle], right.1);
            }
        }
    }

    /// Outputs a change of an unmatched row's count by `count`.
    fn push_unmatched(
        &mut self,
        side: usize,
        mine: &[Rc<ColumnValues>],
        row: usize,
        time: u64,
        count: i64,
    ) {
        let outputs = &self.matching.outputs;
        let first = if side == LEFT { 0 } else { self.matching.widths[LEFT] };
        let own = first..first + self.matching.widths[side];
        let columns = self.builder.begin(time, count, outputs.len());
        for (column, from) in columns.iter_mut().zip(outputs) {
            if own.contains(from) {
                column.push_from(&mine[from - first], row);
            } else {
                column.push(Value::Null);
            }
        }
    }
}

/// A row: some columns and a position in them.
type Place<'a> = (&'a Rc<Vec<Rc<ColumnValues>>>, usize);

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    thread_local! {
        /// The number of row comparisons.
        pub(super) static COMPARED: Cell<usize> = const { Cell::new(0) };
    }

    /// In a window with many rows of one key, each row costs as much as in a small window. The test
    /// counts comparisons instead of measuring time.
    #[test]
    fn many_rows_of_a_key_are_not_searched_linearly() {
        let mut join = Join::new(Matching {
            kind: JoinKind::Left,
            equal: [vec![0], vec![0]],
            residual: None,
            widths: [2, 2],
            outputs: vec![0, 1, 2, 3],
        });
        let all = 20_000;
        let run = |order: &mut dyn Iterator<Item = i64>, count: i64| {
            let mut builder = RunBuilder::default();
            for (number, time) in order.zip(0..) {
                // Each row has two copies.
                builder.push(time, count, &[Value::Integer(7), Value::Integer(number / 2)]);
            }
            builder.take().unwrap()
        };
        let rows = |runs: &[Run]| runs.iter().map(Run::len).sum::<usize>();
        assert_eq!(rows(&join.epoch(&[run(&mut (0..all), 1)], &[])), all as usize);
        assert_eq!(join.rows(), all as usize / 2);
        // The rows are deleted in another order than they were inserted.
        let mut going = (0..all).map(|number| number * 7919 % all);
        assert_eq!(rows(&join.epoch(&[run(&mut going, -1)], &[])), all as usize);
        assert_eq!((join.rows(), join.table.len()), (0, 0));
        let compared = COMPARED.get();
        assert!(compared < 4 * all as usize, "{compared} comparisons for {all} rows");
    }
}
