//! Interned texts: equal texts share their memory.

use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};
use std::rc::Rc;
use std::sync::Arc;

use fathom_cql::Value;

use crate::columns::ColumnValues;

/// The most texts in the table.
const TEXTS_MAX: usize = 64 << 10;
/// The most bytes of the texts in the table.
const BYTES_MAX: usize = 32 << 20;
/// The number of recent texts that are found without a lookup in the table.
const RECENT: usize = 1 << 10;

/// The interned texts of a reader.
///
/// Recent texts are found by a cheap hash, two places for each hash. A hostile file can cause
/// collisions, which cost only a lookup in the table; the table's hash has a random key.
pub struct Texts {
    recent: Vec<Option<Arc<str>>>,
    table: HashSet<Arc<str>>,
    /// The bytes of all texts in the table.
    bytes: usize,
    // A random seed of the cheap hash.
    seed: u64,
}

impl Texts {
    /// No texts yet.
    pub fn new() -> Self {
        let seed = RandomState::new().hash_one(0_u8) | 1;
        Self { recent: vec![None; RECENT], table: HashSet::new(), bytes: 0, seed }
    }

    /// The value of a text. Invalid UTF-8 is replaced.
    pub fn value(&mut self, bytes: &[u8]) -> Value {
        Value::Text(Arc::clone(self.find(bytes).1))
    }

    /// A text, and its place among the recent texts.
    fn find(&mut self, bytes: &[u8]) -> (usize, &Arc<str>) {
        let place = self.place(bytes);
        let is = |text: &Option<Arc<str>>| {
            text.as_ref().is_some_and(|text| is_same(text.as_bytes(), bytes))
        };
        let place = if is(&self.recent[place]) {
            place
        } else if is(&self.recent[place ^ 1]) {
            place ^ 1
        } else {
            let text = self.look_up(bytes);
            // The text that was here moves to the other place.
            self.recent.swap(place, place ^ 1);
            self.recent[place] = Some(text);
            place
        };
        (place, self.recent[place].get_or_insert_with(|| Arc::from("")))
    }

    /// Finds a text in the table, or adds it.
    #[cold]
    fn look_up(&mut self, bytes: &[u8]) -> Arc<str> {
        let text = String::from_utf8_lossy(bytes);
        if let Some(text) = self.table.get(text.as_ref()) {
            return Arc::clone(text);
        }
        if self.table.len() >= TEXTS_MAX || self.bytes + text.len() > BYTES_MAX {
            // Texts that are in use stay allocated; the others are probably not needed any more.
            self.table.clear();
            self.bytes = 0;
        }
        self.bytes += text.len();
        let text: Arc<str> = text.into();
        self.table.insert(Arc::clone(&text));
        text
    }

    fn place(&self, bytes: &[u8]) -> usize {
        let mut hash = self.seed ^ bytes.len() as u64;
        let mut add = |word: u64| hash = (hash.rotate_left(5) ^ word).wrapping_mul(self.seed);
        if let Some((_, last)) = bytes.split_last_chunk::<8>() {
            for chunk in bytes.chunks_exact(8) {
                add(chunk.try_into().map_or(0, u64::from_le_bytes));
            }
            add(u64::from_le_bytes(*last));
        } else {
            let word = bytes.iter().fold(0, |word, &byte| word << 8 | u64::from(byte));
            add(word);
        }
        (hash >> 54) as usize % RECENT
    }
}

/// Whether two texts are equal. Most are short, and are compared without a call.
#[inline]
pub fn is_same(one: &[u8], other: &[u8]) -> bool {
    if one.len() != other.len() || one.len() > 16 {
        return one == other;
    }
    match (one.first_chunk::<8>(), other.first_chunk::<8>()) {
        // The last eight bytes overlap with the first ones, or follow them.
        (Some(first), Some(other_first)) => {
            first == other_first && one.last_chunk::<8>() == other.last_chunk()
        }
        _ => one.iter().eq(other),
    }
}

/// A column of texts that is being read. It holds each distinct text once.
pub struct TextColumn {
    values: Vec<Value>,
    rows: Vec<u32>,
    /// For each place of [`Texts::recent`], where its text may be in `values`.
    known: Vec<u32>,
}

impl TextColumn {
    /// An empty column.
    pub fn new() -> Self {
        Self { values: Vec::new(), rows: Vec::new(), known: vec![0; RECENT] }
    }

    /// Adds a text.
    pub fn push(&mut self, bytes: &[u8], texts: &mut Texts) {
        let (place, text) = texts.find(bytes);
        let known = &mut self.known[place];
        match self.values.get(*known as usize) {
            Some(Value::Text(there)) if Arc::ptr_eq(there, text) => {}
            _ => {
                *known = self.values.len() as u32;
                self.values.push(Value::Text(Arc::clone(text)));
            }
        }
        self.rows.push(*known);
    }

    /// Adds a null.
    pub fn push_null(&mut self) {
        let null = self.values.iter().position(Value::is_null).unwrap_or_else(|| {
            self.values.push(Value::Null);
            self.values.len() - 1
        });
        self.rows.push(null as u32);
    }

    /// Keeps only the first `rows` rows.
    pub fn truncate(&mut self, rows: usize) {
        self.rows.truncate(rows);
    }

    /// Takes the column out, and leaves an empty one.
    pub fn take(&mut self) -> ColumnValues {
        let (values, rows) = (self.values.len(), self.rows.len());
        let values = std::mem::replace(&mut self.values, Vec::with_capacity(values));
        let rows = std::mem::replace(&mut self.rows, Vec::with_capacity(rows));
        ColumnValues::Indexed(Rc::new(ColumnValues::Values(values)), Rc::new(rows))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_column_holds_what_was_added() {
        let (mut texts, mut column) = (Texts::new(), TextColumn::new());
        for round in 0..3 {
            // More texts than there are recent places.
            let text = |row: usize| format!("{}", row * 7 % (20 + round * 4000));
            for row in 0..9000 {
                if row % 5 == 4 {
                    column.push_null();
                } else {
                    column.push(text(row).as_bytes(), &mut texts);
                }
                if row % 100 == 0 {
                    column.push(b"bad", &mut texts);
                    column.truncate(row + 1);
                }
            }
            let column = column.take();
            assert_eq!(column.len(), 9000);
            for row in 0..9000 {
                let is = if row % 5 == 4 { Value::Null } else { Value::text(&text(row)) };
                assert_eq!(column.value(row), is, "row {row}");
            }
        }
    }

    #[test]
    fn texts_of_any_length_are_compared() {
        for length in 0..40_u8 {
            let text: Vec<u8> = (0..length).collect();
            assert!(is_same(&text, &text.clone()));
            assert!(!is_same(&text, &[&text[..], b"x"].concat()));
            for at in 0..text.len() {
                let mut other = text.clone();
                other[at] ^= 0x80;
                assert!(!is_same(&text, &other), "byte {at} of {length}");
            }
        }
    }

    #[test]
    fn equal_texts_are_one() {
        let mut texts = Texts::new();
        let (Value::Text(one), Value::Text(other)) = (texts.value(b"root"), texts.value(b"root"))
        else {
            panic!("texts are texts")
        };
        assert!(Arc::ptr_eq(&one, &other));
        assert_eq!(texts.value(b"a\xff"), Value::text("a\u{fffd}"));
        assert_eq!(texts.value(b"a\xff"), Value::text("a\u{fffd}"));
    }

    #[test]
    fn the_table_is_bounded() {
        let mut texts = Texts::new();
        for number in 0..3 * TEXTS_MAX {
            texts.value(number.to_string().as_bytes());
            assert!(texts.table.len() <= TEXTS_MAX);
        }
        assert_eq!(texts.value(b"0"), Value::text("0"));
        for number in 0..100_u8 {
            texts.value(&vec![b'a' + number % 8; (1 << 20) + usize::from(number)]);
            let bytes: usize = texts.table.iter().map(|text| text.len()).sum();
            assert!(bytes <= BYTES_MAX && bytes == texts.bytes, "{bytes}");
        }
    }
}
