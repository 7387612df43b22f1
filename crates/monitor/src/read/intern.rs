//! Equal texts share their memory.

use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use fathom_cql::Value;

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
        let place = self.place(bytes);
        for place in [place, place ^ 1] {
            if let Some(text) = &self.recent[place] {
                if text.as_bytes() == bytes {
                    return Value::Text(Arc::clone(text));
                }
            }
        }
        let text = String::from_utf8_lossy(bytes);
        let text = if let Some(text) = self.table.get(text.as_ref()) {
            Arc::clone(text)
        } else {
            if self.table.len() >= TEXTS || self.bytes + text.len() > BYTES {
                // Those in use live on; the rest is likely gone for good.
                self.table.clear();
                self.bytes = 0;
            }
            self.bytes += text.len();
            let text: Arc<str> = text.into();
            self.table.insert(Arc::clone(&text));
            text
        };
        // The one that was here moves to the other place.
        self.recent.swap(place, place ^ 1);
        self.recent[place] = Some(Arc::clone(&text));
        Value::Text(text)
    }

    fn place(&self, bytes: &[u8]) -> usize {
        let mut hash = self.seed ^ bytes.len() as u64;
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            hash = (hash.rotate_left(5) ^ u64::from_le_bytes(word)).wrapping_mul(self.seed);
        }
        (hash >> 54) as usize % RECENT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
