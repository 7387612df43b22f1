//! Values and their types.

use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// The type of a column or an expression. A value of any type may be null.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Type {
    /// True or false.
    Boolean,
    /// A signed integer of 64 bits; an overflow gives null.
    Integer,
    /// A binary floating-point number of 64 bits.
    Float,
    /// A text in UTF-8.
    Text,
}

impl Type {
    /// The name in the language.
    pub fn name(self) -> &'static str {
        match self {
            Self::Boolean => "boolean",
            Self::Integer => "integer",
            Self::Float => "float",
            Self::Text => "text",
        }
    }
}

impl fmt::Display for Type {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// A value, of some [`Type`] or null.
///
/// The order is total. Null comes first. Floats have the order of IEEE 754's `totalOrder`, with -0
/// as 0 and all NaNs as one. `order by` and groups use this order, in which null equals null.
/// Comparisons in expressions follow SQL.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Value {
    /// No value.
    Null,
    /// See [`Type::Boolean`].
    Boolean(bool),
    /// See [`Type::Integer`].
    Integer(i64),
    /// See [`Type::Float`].
    Float(f64),
    /// See [`Type::Text`].
    Text(Arc<str>),
}

/// A row: one value for each column.
pub type Row = Vec<Value>;

impl Value {
    /// A text.
    pub fn text(text: &str) -> Self {
        Self::Text(text.into())
    }

    /// The type, or `None` for null.
    pub fn kind(&self) -> Option<Type> {
        match self {
            Self::Null => None,
            Self::Boolean(_) => Some(Type::Boolean),
            Self::Integer(_) => Some(Type::Integer),
            Self::Float(_) => Some(Type::Float),
            Self::Text(_) => Some(Type::Text),
        }
    }

    /// Whether the value is null.
    pub fn is_null(&self) -> bool {
        matches!(self, Self::Null)
    }

    fn rank(&self) -> u8 {
        match self {
            Self::Null => 0,
            Self::Boolean(_) => 1,
            Self::Integer(_) => 2,
            Self::Float(_) => 3,
            Self::Text(_) => 4,
        }
    }
}

/// The float that represents all floats that the order treats as equal.
pub(crate) fn canonical(number: f64) -> f64 {
    if number.is_nan() {
        f64::NAN
    } else if number == 0.0 {
        0.0
    } else {
        number
    }
}

impl Ord for Value {
    fn cmp(&self, other: &Self) -> Ordering {
        match (self, other) {
            (Self::Boolean(left), Self::Boolean(right)) => left.cmp(right),
            (Self::Integer(left), Self::Integer(right)) => left.cmp(right),
            (Self::Float(left), Self::Float(right)) => {
                canonical(*left).total_cmp(&canonical(*right))
            }
            // Equal texts usually share memory.
            (Self::Text(left), Self::Text(right)) if Arc::ptr_eq(left, right) => Ordering::Equal,
            (Self::Text(left), Self::Text(right)) => left.cmp(right),
            _ => self.rank().cmp(&other.rank()),
        }
    }
}

impl PartialOrd for Value {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Value {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Value {}

impl Hash for Value {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.rank().hash(state);
        match self {
            Self::Null => {}
            Self::Boolean(value) => value.hash(state),
            Self::Integer(value) => value.hash(state),
            Self::Float(value) => canonical(*value).to_bits().hash(state),
            Self::Text(value) => value.hash(state),
        }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null => Ok(()),
            Self::Boolean(value) => write!(formatter, "{value}"),
            Self::Integer(value) => write!(formatter, "{value}"),
            Self::Float(value) => write!(formatter, "{value}"),
            Self::Text(value) => formatter.write_str(value),
        }
    }
}
