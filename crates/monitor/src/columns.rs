//! Values by column.

use std::cmp::Ordering;
use std::hash::{BuildHasher, Hash, Hasher};
use std::rc::Rc;
use std::sync::Arc;

use fathom_cql::Value;

/// The values of a column. The variants differ in cost only: equal values are equal in any of them.
#[derive(Clone, Debug)]
pub enum ColumnValues {
    /// This number of nulls.
    Nulls(usize),
    /// Integers, none of them null.
    Integers(Vec<i64>),
    /// Floats, none of them null.
    Floats(Vec<f64>),
    /// Any values.
    Values(Vec<Value>),
    /// Indices into another column: for columns with few distinct values.
    Indexed(Rc<ColumnValues>, Rc<Vec<u32>>),
}

impl Default for ColumnValues {
    fn default() -> Self {
        Self::Nulls(0)
    }
}

impl ColumnValues {
    /// The number of values.
    pub fn len(&self) -> usize {
        match self {
            Self::Nulls(count) => *count,
            Self::Integers(integers) => integers.len(),
            Self::Floats(floats) => floats.len(),
            Self::Values(values) => values.len(),
            Self::Indexed(_, rows) => rows.len(),
        }
    }

    /// Whether there are no values.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The memory that the values take, in bytes, approximately.
    pub(crate) fn bytes(&self) -> usize {
        let text = |value: &Value| match value {
            Value::Text(text) => text.len(),
            _ => 0,
        };
        match self {
            Self::Nulls(_) => 0,
            Self::Integers(integers) => size_of_val(&**integers),
            Self::Floats(floats) => size_of_val(&**floats),
            Self::Values(values) => size_of_val(&**values) + values.iter().map(text).sum::<usize>(),
            Self::Indexed(of, rows) => of.bytes() + size_of_val(&***rows),
        }
    }

    /// Keeps only the first `rows` values.
    pub(crate) fn truncate(&mut self, rows: usize) {
        match self {
            Self::Nulls(count) => *count = rows.min(*count),
            Self::Integers(integers) => integers.truncate(rows),
            Self::Floats(floats) => floats.truncate(rows),
            Self::Values(values) => values.truncate(rows),
            Self::Indexed(_, of) => Rc::make_mut(of).truncate(rows),
        }
    }

    /// Takes all values out, and reserves room for `capacity` values of the same kind.
    pub(crate) fn replace(&mut self, capacity: usize) -> Self {
        let new = match self {
            Self::Nulls(_) | Self::Indexed(..) => Self::Nulls(0),
            Self::Integers(_) => Self::Integers(Vec::with_capacity(capacity)),
            Self::Floats(_) => Self::Floats(Vec::with_capacity(capacity)),
            Self::Values(_) => Self::Values(Vec::with_capacity(capacity)),
        };
        std::mem::replace(self, new)
    }

    /// Adds a value. A float of -0 becomes 0, because no computed value is -0.
    #[inline]
    pub fn push(&mut self, value: Value) {
        match (&mut *self, value) {
            (Self::Integers(integers), Value::Integer(integer)) => integers.push(integer),
            (Self::Floats(floats), Value::Float(number)) => floats.push(number + 0.0),
            (Self::Values(values), Value::Float(number)) => values.push(Value::Float(number + 0.0)),
            (Self::Values(values), value) => values.push(value),
            (Self::Nulls(count), Value::Null) => *count += 1,
            (_, value) => self.push_other(value),
        }
    }

    /// Adds a copy of a value. Tag and number are copied separately, as they were written: a
    /// processor stalls when one wide load follows narrower stores to the same memory.
    #[inline]
    pub(crate) fn push_copy(&mut self, value: &Value) {
        match (&mut *self, value) {
            (Self::Integers(integers), Value::Integer(integer)) => integers.push(*integer),
            (Self::Floats(floats), Value::Float(number)) => floats.push(number + 0.0),
            (Self::Values(values), Value::Integer(integer)) => {
                values.push(Value::Integer(*integer));
            }
            (Self::Values(values), Value::Float(number)) => values.push(Value::Float(number + 0.0)),
            (_, value) => self.push(value.clone()),
        }
    }

    /// Adds copies of two values.
    #[inline]
    pub(crate) fn push_copies(&mut self, one: &Value, other: &Value) {
        match (&mut *self, one, other) {
            (Self::Integers(integers), Value::Integer(one), Value::Integer(other)) => {
                integers.extend([*one, *other]);
            }
            (Self::Floats(floats), Value::Float(one), Value::Float(other)) => {
                floats.extend([one + 0.0, other + 0.0]);
            }
            _ => {
                self.push_copy(one);
                self.push_copy(other);
            }
        }
    }

    /// Adds a value of another kind than the previous ones.
    #[cold]
    fn push_other(&mut self, value: Value) {
        if self.is_empty() {
            *self = match value {
                Value::Null => Self::Nulls(0),
                Value::Integer(_) => Self::Integers(Vec::new()),
                Value::Float(_) => Self::Floats(Vec::new()),
                _ => Self::Values(Vec::new()),
            };
        } else {
            let values = (0..self.len()).map(|row| self.value(row)).collect();
            *self = Self::Values(values);
        }
        self.push(value);
    }

    /// Adds an integer.
    #[inline]
    pub fn push_integer(&mut self, integer: i64) {
        match self {
            Self::Integers(integers) => integers.push(integer),
            _ => self.push(Value::Integer(integer)),
        }
    }

    /// Adds nulls until there are `rows` values.
    pub(crate) fn pad(&mut self, rows: usize) {
        if let Self::Nulls(count) = self {
            *count = rows.max(*count);
        }
        while self.len() < rows {
            self.push(Value::Null);
        }
    }

    /// Adds a value of another column.
    #[inline]
    pub(crate) fn push_from(&mut self, other: &Self, row: usize) {
        match other {
            Self::Nulls(_) => self.push(Value::Null),
            Self::Integers(integers) => self.push_integer(integers[row]),
            Self::Floats(floats) => self.push(Value::Float(floats[row])),
            Self::Values(values) => self.push(values[row].clone()),
            Self::Indexed(of, rows) => self.push(of.value(rows[row] as usize)),
        }
    }

    /// A value.
    ///
    /// # Panics
    /// If there is no such row.
    #[inline]
    pub fn value(&self, row: usize) -> Value {
        match self {
            Self::Nulls(_) => Value::Null,
            Self::Integers(integers) => Value::Integer(integers[row]),
            Self::Floats(floats) => Value::Float(floats[row]),
            Self::Values(values) => values[row].clone(),
            Self::Indexed(of, rows) => of.value(rows[row] as usize),
        }
    }

    /// Replaces a value with the value of a row.
    #[inline]
    pub(crate) fn read(&self, row: usize, place: &mut Value) {
        match (self, place) {
            (Self::Nulls(_), place) => *place = Value::Null,
            (Self::Integers(integers), place) => *place = Value::Integer(integers[row]),
            (Self::Floats(floats), place) => *place = Value::Float(floats[row]),
            (Self::Values(values), place) => put(place, &values[row]),
            (Self::Indexed(of, rows), place) => of.read(rows[row] as usize, place),
        }
    }

    /// Replaces each integer.
    pub(crate) fn map_integers(&mut self, map: impl Fn(i64) -> i64) {
        match self {
            Self::Nulls(_) | Self::Floats(_) => {}
            Self::Integers(integers) => integers.iter_mut().for_each(|each| *each = map(*each)),
            Self::Values(values) => {
                for value in values {
                    if let Value::Integer(integer) = value {
                        *integer = map(*integer);
                    }
                }
            }
            Self::Indexed(of, _) => Rc::make_mut(of).map_integers(map),
        }
    }

    /// The values of some rows.
    pub(crate) fn gather(&self, rows: &[u32]) -> Self {
        match self {
            Self::Nulls(_) => Self::Nulls(rows.len()),
            Self::Integers(integers) => {
                Self::Integers(rows.iter().map(|&row| integers[row as usize]).collect())
            }
            Self::Floats(floats) => {
                Self::Floats(rows.iter().map(|&row| floats[row as usize]).collect())
            }
            Self::Values(values) => {
                Self::Values(rows.iter().map(|&row| values[row as usize].clone()).collect())
            }
            // A few rows do not keep the many values of other rows in memory.
            Self::Indexed(of, at) if rows.len() < of.len() / 4 => {
                rows.iter().map(|&row| of.value(at[row as usize] as usize)).collect()
            }
            Self::Indexed(of, at) => {
                let rows = rows.iter().map(|&row| at[row as usize]).collect();
                Self::Indexed(Rc::clone(of), Rc::new(rows))
            }
        }
    }

    /// The order of two values: that of [`Value`].
    pub(crate) fn compare(&self, row: usize, other: &Self, other_row: usize) -> Ordering {
        match (self, other) {
            (Self::Integers(mine), Self::Integers(theirs)) => mine[row].cmp(&theirs[other_row]),
            (Self::Values(mine), Self::Values(theirs)) => mine[row].cmp(&theirs[other_row]),
            (Self::Indexed(mine, rows), Self::Indexed(theirs, other_rows)) => {
                let (row, other_row) = (rows[row] as usize, other_rows[other_row] as usize);
                if Rc::ptr_eq(mine, theirs) && row == other_row {
                    return Ordering::Equal;
                }
                mine.compare(row, theirs, other_row)
            }
            _ => self.value(row).cmp(&other.value(other_row)),
        }
    }

    /// The rank of each value, which is the number of distinct smaller values; and the number of
    /// distinct values.
    pub(crate) fn ranks(&self) -> (Vec<u64>, u64) {
        let mut sorted: Vec<usize> = (0..self.len()).collect();
        sorted.sort_unstable_by(|&one, &other| self.compare(one, self, other));
        let mut ranks = vec![0; self.len()];
        let mut count = 0;
        for same in sorted.chunk_by(|&one, &other| self.compare(one, self, other).is_eq()) {
            for &row in same {
                ranks[row] = count;
            }
            count += 1;
        }
        (ranks, count)
    }

    /// Whether a value equals another.
    #[inline]
    pub(crate) fn is(&self, row: usize, value: &Value) -> bool {
        match (self, value) {
            (Self::Integers(integers), Value::Integer(integer)) => integers[row] == *integer,
            (Self::Values(values), Value::Text(text)) => match &values[row] {
                // Equal texts mostly share their memory.
                Value::Text(mine) => Arc::ptr_eq(mine, text) || mine == text,
                _ => false,
            },
            (Self::Values(values), value) => values[row] == *value,
            (Self::Nulls(_), value) => value.is_null(),
            (Self::Indexed(of, rows), value) => of.is(rows[row] as usize, value),
            (Self::Floats(floats), value) => Value::Float(floats[row]) == *value,
            (Self::Integers(_), _) => false,
        }
    }

    /// Feeds a value to a hasher. Equal values give equal hashes.
    #[inline]
    fn hash(&self, row: usize, state: &mut impl Hasher) {
        match self {
            Self::Nulls(_) => Value::Null.hash(state),
            Self::Integers(integers) => integers[row].hash(state),
            Self::Floats(floats) => Value::Float(floats[row]).hash(state),
            Self::Values(values) => match &values[row] {
                Value::Integer(integer) => integer.hash(state),
                other => other.hash(state),
            },
            Self::Indexed(of, rows) => of.hash(rows[row] as usize, state),
        }
    }

    pub(crate) fn is_null(&self, row: usize) -> bool {
        match self {
            Self::Nulls(_) => true,
            Self::Integers(_) | Self::Floats(_) => false,
            Self::Values(values) => values[row].is_null(),
            Self::Indexed(of, rows) => of.is_null(rows[row] as usize),
        }
    }
}

/// The values of a column, for loops over many rows.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ColumnView<'c> {
    Nulls,
    Integers(&'c [i64]),
    Floats(&'c [f64]),
    Values(&'c [Value]),
    Indexed(&'c ColumnValues, &'c [u32]),
}

impl<'c> ColumnView<'c> {
    pub(crate) fn new(column: &'c ColumnValues) -> Self {
        match column {
            ColumnValues::Nulls(_) => Self::Nulls,
            ColumnValues::Integers(integers) => Self::Integers(integers),
            ColumnValues::Floats(floats) => Self::Floats(floats),
            ColumnValues::Values(values) => Self::Values(values),
            ColumnValues::Indexed(of, rows) => Self::Indexed(of, rows),
        }
    }

    /// Replaces a value with the value of a row.
    #[inline]
    pub(crate) fn read(self, row: usize, place: &mut Value) {
        match self {
            Self::Nulls => *place = Value::Null,
            Self::Integers(integers) => *place = Value::Integer(integers[row]),
            Self::Floats(floats) => *place = Value::Float(floats[row]),
            Self::Values(values) => put(place, &values[row]),
            Self::Indexed(ColumnValues::Values(values), rows) => {
                put(place, &values[rows[row] as usize]);
            }
            Self::Indexed(of, rows) => of.read(rows[row] as usize, place),
        }
    }
}

/// Replaces a value with a copy of another.
#[inline]
fn put(place: &mut Value, value: &Value) {
    match (value, place) {
        // The text is often the same as before.
        (Value::Text(text), Value::Text(there)) if Arc::ptr_eq(text, there) => {}
        (Value::Integer(integer), place) => *place = Value::Integer(*integer),
        (Value::Float(number), place) => *place = Value::Float(*number),
        (value, place) => *place = value.clone(),
    }
}

/// The hash of the values that some columns have in a row.
pub(crate) fn hash_of(columns: &[&Rc<ColumnValues>], row: usize, hasher: &impl BuildHasher) -> u64 {
    let mut state = hasher.build_hasher();
    for column in columns {
        column.hash(row, &mut state);
    }
    state.finish()
}

/// The hash of all values of a row.
pub(crate) fn hash_of_row(
    columns: &[Rc<ColumnValues>],
    row: usize,
    hasher: &impl BuildHasher,
) -> u64 {
    let mut state = hasher.build_hasher();
    for column in columns {
        column.hash(row, &mut state);
    }
    state.finish()
}

impl FromIterator<Value> for ColumnValues {
    fn from_iter<I: IntoIterator<Item = Value>>(values: I) -> Self {
        let mut column = Self::default();
        for value in values {
            column.push(value);
        }
        column
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_column_holds_the_values_added() {
        let values = [
            vec![],
            vec![Value::Null; 3],
            vec![Value::Integer(1), Value::Integer(-2)],
            vec![Value::Null, Value::Integer(1), Value::text("a")],
            vec![Value::Integer(1), Value::Null, Value::Integer(1)],
            vec![Value::Float(-0.0), Value::Boolean(true), Value::Integer(7)],
            vec![Value::Float(-0.0), Value::Float(f64::NAN), Value::Float(0.0), Value::Float(-1.5)],
            vec![Value::Integer(1), Value::Float(1.0), Value::Float(1.0)],
        ];
        for values in values {
            let column: ColumnValues = values.iter().cloned().collect();
            let held: Vec<Value> = (0..column.len()).map(|row| column.value(row)).collect();
            assert_eq!(held, values);
            let rows: Vec<u32> = (0..values.len() as u32).rev().collect();
            let reversed: ColumnValues = values.iter().rev().cloned().collect();
            let indexed = ColumnValues::Indexed(Rc::new(reversed), Rc::new(rows));
            let mixed = ColumnValues::Values(values.clone());
            for (row, value) in values.iter().enumerate() {
                assert!(column.is(row, value) && mixed.is(row, value) && indexed.is(row, value));
                assert_eq!(column.is_null(row), value.is_null());
                assert_eq!(indexed.is_null(row), value.is_null());
                assert!(column.compare(row, &mixed, row).is_eq());
                assert!(column.compare(row, &indexed, row).is_eq());
                assert!(indexed.compare(row, &indexed, row).is_eq());
                assert_eq!(&indexed.value(row), value);
                assert_eq!(&indexed.gather(&[row as u32, row as u32]).value(1), value);
                for (other_row, other) in values.iter().enumerate() {
                    assert_eq!(column.is(row, other), value == other);
                    assert_eq!(column.compare(row, &mixed, other_row), value.cmp(other));
                }
            }
            let (ranks, count) = indexed.ranks();
            assert!(ranks.iter().all(|rank| *rank < count));
            for (one, rank) in values.iter().zip(&ranks) {
                for (other, other_rank) in values.iter().zip(&ranks) {
                    assert_eq!(rank.cmp(other_rank), one.cmp(other));
                }
            }
            let mut padded = column.clone();
            padded.pad(5);
            assert_eq!(padded.len(), 5.max(values.len()));
            padded.truncate(1);
            assert_eq!(padded.len(), values.len().clamp(1, 1));
        }
    }
}
