//! The bytes of the long texts in memory.
//!
//! State is counted in rows, groups and values, whose size is moderate unless their texts are long.
//! A host may send long texts. Operators share texts, so each text is counted once, from its
//! arrival until its last reference is dropped. Texts that a query's functions create are not
//! counted.

use std::sync::{Arc, Weak};

use fathom_cql::Value;
use hashbrown::HashMap;

use crate::columns::ColumnValues;

/// The length from which a text is counted, in bytes.
const LONG_MIN: usize = 256;
/// The number of noted texts that may already be unreferenced, in addition to as many as are in
/// use.
const UNREFERENCED_MAX: usize = 1024;

/// The long texts that have arrived and are still in use.
#[derive(Debug, Default)]
pub(super) struct Texts {
    /// The texts by their addresses. A noted text keeps its address, so no other text can have it.
    known: HashMap<usize, Weak<str>>,
    /// The number of texts in use at the last check.
    in_use: usize,
}

impl Texts {
    /// Notes the long texts among some values.
    pub(super) fn note(&mut self, values: &[Value]) {
        for value in values {
            match value {
                Value::Text(text) if text.len() >= LONG_MIN => self.add(text),
                _ => {}
            }
        }
    }

    /// Notes the long texts of a column.
    pub(super) fn note_column(&mut self, column: &ColumnValues) {
        match column {
            ColumnValues::Values(values) => self.note(values),
            ColumnValues::Indexed(of, _) => self.note_column(of),
            ColumnValues::Integers(_) | ColumnValues::Floats(_) | ColumnValues::Nulls(_) => {}
        }
    }

    #[cold]
    fn add(&mut self, text: &Arc<str>) {
        self.known.entry(address(text)).or_insert_with(|| Arc::downgrade(text));
        if self.known.len() > 2 * self.in_use + UNREFERENCED_MAX {
            self.remove_unreferenced();
        }
    }

    /// Removes unreferenced texts. Only this frees their memory.
    fn remove_unreferenced(&mut self) {
        self.known.retain(|_, text| text.strong_count() > 0);
        self.in_use = self.known.len();
    }

    /// The bytes of all texts in use. Takes time in proportion to their number.
    pub(super) fn bytes(&mut self) -> usize {
        self.remove_unreferenced();
        self.known.values().filter_map(Weak::upgrade).map(|text| text.len()).sum()
    }
}

fn address(text: &Arc<str>) -> usize {
    Arc::as_ptr(text).cast::<u8>() as usize
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;

    fn long(number: usize) -> Arc<str> {
        format!("{number:01000}").into()
    }

    #[test]
    fn a_text_counts_once_and_as_long_as_it_is_in_use() {
        let mut texts = Texts::default();
        let text = long(1);
        for _ in 0..3 {
            texts.note(&[Value::Text(Arc::clone(&text))]);
        }
        texts.note(&[Value::Text("short".into()), Value::Integer(7)]);
        let other: Rc<ColumnValues> =
            Rc::new([long(2), long(3)].map(Value::Text).into_iter().collect());
        texts.note_column(&ColumnValues::Indexed(Rc::clone(&other), Rc::new(vec![0, 1, 1, 0])));
        assert_eq!(texts.bytes(), 3000);
        drop(other);
        assert_eq!(texts.bytes(), 1000);
        drop(text);
        assert_eq!(texts.bytes(), 0);
    }

    #[test]
    fn unreferenced_texts_are_removed_without_a_query() {
        let mut texts = Texts::default();
        let kept: Vec<Arc<str>> = (0..100).map(long).collect();
        for text in &kept {
            texts.note(&[Value::Text(Arc::clone(text))]);
        }
        for number in 0..50_000 {
            texts.note(&[Value::Text(long(number))]);
            assert!(texts.known.len() <= 2 * (kept.len() + 1) + UNREFERENCED_MAX);
        }
        assert_eq!(texts.bytes(), 100_000);
    }
}
