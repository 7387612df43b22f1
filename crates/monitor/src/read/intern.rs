//! Equal texts share their memory.

use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};
use std::rc::Rc;
use std::sync::Arc;

use fathom_cql::Value;

use crate::columns::Column;

/// The most texts that are remembered.
const TEXTS: usize = 64 << 10;
/// The most bytes that these have together.
const BYTES: usize = 32 << 20;
/// The latest of them are found without a lookup.
const RECENT: usize = 1 << 10;

/// The texts of a reader.
///
/// The texts seen last have two places each by a cheap hash that a hostile file can make collide at
/// will, which costs a lookup; the table behind them is hashed with a key.
pub struct Texts {
    recent: Vec<Option<Arc<str>>>,
    table: HashSet<Arc<str>>,
    /// How long the texts of the table are together.
    bytes: usize,
    // The key of the cheap hash.
    seed: u64,
}

impl Texts {
    /// No texts.
    pub fn new() -> Self {
        let seed = RandomState::new().hash_one(0_u8) | 1;
        Self { recent: vec![None; RECENT], table: HashSet::new(), bytes: 0, seed }
    }

    /// The value of a text. What is no UTF-8 in it is replaced.
    pub fn value(&mut self, bytes: &[u8]) -> Value {
        Value::Text(Arc::clone(self.find(bytes).1))
    }

    /// A text, and its place among those seen last.
    fn find(&mut self, bytes: &[u8]) -> (usize, &Arc<str>) {
        let place = self.place(bytes);
        let is =
            |text: &Option<Arc<str>>| text.as_ref().is_some_and(|text| text.as_bytes() == bytes);
        let place = if is(&self.recent[place]) {
            place
        } else if is(&self.recent[place ^ 1]) {
            place ^ 1
        } else {
            let text = self.look_up(bytes);
            // The one that was here moves to the other place.
            self.recent.swap(place, place ^ 1);
            self.recent[place] = Some(text);
            place
        };
        (place, self.recent[place].get_or_insert_with(|| Arc::from("")))
    }

    /// A text that is not among those seen last.
    #[cold]
    fn look_up(&mut self, bytes: &[u8]) -> Arc<str> {
        let text = String::from_utf8_lossy(bytes);
        if let Some(text) = self.table.get(text.as_ref()) {
            return Arc::clone(text);
        }
        if self.table.len() >= TEXTS || self.bytes + text.len() > BYTES {
            // Those in use live on; the rest is likely gone for good.
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

/// A column of texts that is being read: few texts that are there often.
pub struct TextColumn {
    values: Vec<Value>,
    rows: Vec<u32>,
    /// Where among the values the text of each place of [`Texts::recent`] may be.
    known: Vec<u32>,
}

impl TextColumn {
    /// An empty one.
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

    /// Keeps the first rows.
    pub fn truncate(&mut self, rows: usize) {
        self.rows.truncate(rows);
    }

    /// Takes all out.
    pub fn take(&mut self) -> Column {
        let (values, rows) = (self.values.len(), self.rows.len());
        let values = std::mem::replace(&mut self.values, Vec::with_capacity(values));
        let rows = std::mem::replace(&mut self.rows, Vec::with_capacity(rows));
        Column::Indexed(Rc::new(Column::Values(values)), Rc::new(rows))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_column_has_what_was_put_in() {
        let (mut texts, mut column) = (Texts::new(), TextColumn::new());
        for round in 0..3 {
            // More than have a place at once.
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
        for number in 0..3 * TEXTS {
            texts.value(number.to_string().as_bytes());
            assert!(texts.table.len() <= TEXTS);
        }
        assert_eq!(texts.value(b"0"), Value::text("0"));
        for number in 0..100_u8 {
            texts.value(&vec![b'a' + number % 8; (1 << 20) + usize::from(number)]);
            let bytes: usize = texts.table.iter().map(|text| text.len()).sum();
            assert!(bytes <= BYTES && bytes == texts.bytes, "{bytes}");
        }
    }
}
