//! Values by column.

use std::cmp::Ordering;
use std::hash::{Hash, Hasher};

use fathom_cql::Value;

/// The values of a column. Which of the two it is makes no difference but to the time that it
/// takes.
#[derive(Clone, Debug)]
pub enum Column {
    /// Integers, none of them null.
    Integers(Vec<i64>),
    /// Any values.
    Values(Vec<Value>),
}

impl Default for Column {
    fn default() -> Self {
        Self::Integers(Vec::new())
    }
}

impl Column {
    /// How many values there are.
    pub fn len(&self) -> usize {
        match self {
            Self::Integers(integers) => integers.len(),
            Self::Values(values) => values.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Takes all values out, or those from a row on.
    pub fn truncate(&mut self, rows: usize) {
        match self {
            Self::Integers(integers) => integers.truncate(rows),
            Self::Values(values) => values.truncate(rows),
        }
    }

    /// Adds a value. Zero has no sign, as nothing that is computed has one.
    pub fn push(&mut self, value: Value) {
        let value = match value {
            Value::Float(number) => Value::Float(number + 0.0),
            other => other,
        };
        match (&mut *self, value) {
            (Self::Integers(integers), Value::Integer(integer)) => integers.push(integer),
            (Self::Values(values), value) => values.push(value),
            (Self::Integers(integers), value) => {
                let mut values = Vec::with_capacity(integers.capacity().max(integers.len() + 1));
                values.extend(integers.drain(..).map(Value::Integer));
                values.push(value);
                *self = Self::Values(values);
            }
        }
    }

    /// Adds an integer.
    pub fn push_integer(&mut self, integer: i64) {
        match self {
            Self::Integers(integers) => integers.push(integer),
            Self::Values(values) => values.push(Value::Integer(integer)),
        }
    }

    /// Adds a value of another column.
    pub fn push_from(&mut self, other: &Self, row: usize) {
        match other {
            Self::Integers(integers) => self.push_integer(integers[row]),
            Self::Values(values) => self.push(values[row].clone()),
        }
    }

    /// A value.
    ///
    /// # Panics
    /// When there is no such row.
    pub fn value(&self, row: usize) -> Value {
        match self {
            Self::Integers(integers) => Value::Integer(integers[row]),
            Self::Values(values) => values[row].clone(),
        }
    }

    /// The values of some rows.
    pub(crate) fn gather(&self, rows: &[u32]) -> Self {
        match self {
            Self::Integers(integers) => {
                Self::Integers(rows.iter().map(|&row| integers[row as usize]).collect())
            }
            Self::Values(values) => {
                Self::Values(rows.iter().map(|&row| values[row as usize].clone()).collect())
            }
        }
    }

    /// The order of two values, as [`Value`]s have it.
    pub(crate) fn compare(&self, row: usize, other: &Self, other_row: usize) -> Ordering {
        match (self, other) {
            (Self::Integers(mine), Self::Integers(theirs)) => mine[row].cmp(&theirs[other_row]),
            (Self::Values(mine), Self::Values(theirs)) => mine[row].cmp(&theirs[other_row]),
            (Self::Integers(mine), Self::Values(theirs)) => {
                Value::Integer(mine[row]).cmp(&theirs[other_row])
            }
            (Self::Values(mine), Self::Integers(theirs)) => {
                mine[row].cmp(&Value::Integer(theirs[other_row]))
            }
        }
    }

    /// Whether a value equals another.
    pub(crate) fn is(&self, row: usize, value: &Value) -> bool {
        match (self, value) {
            (Self::Integers(integers), Value::Integer(integer)) => integers[row] == *integer,
            (Self::Integers(_), _) => false,
            (Self::Values(values), Value::Text(text)) => match &values[row] {
                Value::Text(mine) => mine == text,
                _ => false,
            },
            (Self::Values(values), value) => values[row] == *value,
        }
    }

    /// Feeds a value to a hasher; equal ones alike.
    pub(crate) fn hash(&self, row: usize, state: &mut impl Hasher) {
        match self {
            Self::Integers(integers) => integers[row].hash(state),
            Self::Values(values) => match &values[row] {
                Value::Integer(integer) => integer.hash(state),
                other => other.hash(state),
            },
        }
    }

    pub(crate) fn is_null(&self, row: usize) -> bool {
        match self {
            Self::Integers(_) => false,
            Self::Values(values) => values[row].is_null(),
        }
    }
}

impl FromIterator<Value> for Column {
    fn from_iter<I: IntoIterator<Item = Value>>(values: I) -> Self {
        let mut column = Self::default();
        for value in values {
            column.push(value);
        }
        column
    }
}
