//! A bounded table of texts. Requests and events carry the numbers of the texts.

use std::borrow::Cow;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

/// The number of a text in [`Names`]; 0 is no text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name(pub u32);

impl Name {
    /// No text.
    pub const NONE: Self = Self(0);

    /// Whether there is a text.
    pub fn is_some(self) -> bool {
        self.0 != 0
    }
}

/// A table of texts, each with a number. A full table removes the text that was added first, but a
/// text that [`number`](Self::number) was called with again is kept for another pass. The number of
/// a removed text has no text. It is not assigned to another text before the numbers wrap around
/// (2³² texts later). Threads share the table.
pub struct Names {
    capacity: usize,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    numbers: HashMap<Arc<str>, u32>,
    texts: HashMap<u32, Entry>,
    /// The numbers in the order in which their texts are removed.
    order: VecDeque<u32>,
    /// The last number that was assigned.
    last: u32,
}

struct Entry {
    text: Arc<str>,
    /// Whether the text was requested since it was put at the end of the order. If so, it is put
    /// there again instead of being removed.
    is_used: bool,
}

impl Default for Names {
    /// A table for 65,536 texts.
    fn default() -> Self {
        Self::new(1 << 16)
    }
}

impl Names {
    /// The longest text that is kept whole, in bytes. Of a longer text the end is kept, after a
    /// mark that distinguishes it from others with the same end.
    pub const LENGTH_MAX: usize = 1024;

    /// A table that keeps `capacity` texts (at least one).
    pub fn new(capacity: usize) -> Self {
        Self { capacity: capacity.max(1), inner: Mutex::default() }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }

    /// The number of `text`, which is added if it is new. An empty text has no number.
    pub fn number(&self, text: &str) -> Name {
        if text.is_empty() {
            return Name::NONE;
        }
        let text = &*shorten(text);
        let mut inner = self.inner();
        if let Some(number) = inner.numbers.get(text).copied() {
            if let Some(entry) = inner.texts.get_mut(&number) {
                entry.is_used = true;
            }
            return Name(number);
        }
        if inner.texts.len() == self.capacity {
            inner.remove_one();
        }
        // After 2³² - 1 texts the numbers start again at 1. Numbers in use are skipped.
        loop {
            inner.last = inner.last.wrapping_add(1);
            if inner.last != 0 && !inner.texts.contains_key(&inner.last) {
                break;
            }
        }
        let (number, text) = (inner.last, Arc::<str>::from(text));
        inner.numbers.insert(Arc::clone(&text), number);
        inner.texts.insert(number, Entry { text, is_used: false });
        inner.order.push_back(number);
        Name(number)
    }

    /// The text of a number; `None` if it has none, or if the text was removed.
    pub fn text(&self, name: Name) -> Option<Arc<str>> {
        self.inner().texts.get(&name.0).map(|entry| Arc::clone(&entry.text))
    }

    /// The number of texts.
    pub fn len(&self) -> usize {
        self.inner().texts.len()
    }

    /// Whether the table is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Inner {
    /// Removes the first text in order whose `is_used` is not set. The texts before it lose their
    /// mark and are put at the end, so the loop ends.
    fn remove_one(&mut self) {
        while let Some(number) = self.order.pop_front() {
            match self.texts.get_mut(&number) {
                Some(entry) if entry.is_used => {
                    entry.is_used = false;
                    self.order.push_back(number);
                }
                Some(_) => {
                    if let Some(entry) = self.texts.remove(&number) {
                        self.numbers.remove(&entry.text);
                    }
                    return;
                }
                None => {}
            }
        }
    }
}

/// The text, without its beginning if it is too long. The text is cut between characters. A hash of
/// the whole text between two ellipses replaces the beginning, so that texts with the same end stay
/// distinct.
fn shorten(text: &str) -> Cow<'_, str> {
    if text.len() <= Names::LENGTH_MAX {
        return Cow::Borrowed(text);
    }
    // FNV-1a: the same in every process and release.
    let number = text.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |number, byte| {
        (number ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    let mark = format!("…{number:016x}…");
    let mut start = text.len() + mark.len() - Names::LENGTH_MAX;
    while !text.is_char_boundary(start) {
        start += 1;
    }
    Cow::Owned(mark + &text[start..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_keeps_its_number_until_it_is_removed() {
        let names = Names::new(2);
        let (a, b) = (names.number("a"), names.number("b"));
        assert_eq!(names.number("a"), a);
        assert_eq!(names.text(a).as_deref(), Some("a"));
        // "a" was requested again, "b" was not.
        let c = names.number("c");
        assert_eq!(names.text(b), None);
        assert_eq!((names.text(a).as_deref(), names.text(c).as_deref()), (Some("a"), Some("c")));
        assert_ne!(names.number("b"), b);
        assert_eq!(names.len(), 2);
        assert_eq!(names.number(""), Name::NONE);
        assert_eq!(names.text(Name::NONE), None);
    }

    #[test]
    fn a_long_text_keeps_its_end() {
        let names = Names::new(2);
        let long = format!("{}ü/end", "ü".repeat(Names::LENGTH_MAX));
        let kept = names.text(names.number(&long)).unwrap();
        assert!(kept.len() <= Names::LENGTH_MAX && kept.ends_with("ü/end"));
        // The mark shows that the text was cut, and identifies the whole text.
        assert!(kept.starts_with('…'), "{kept}");
        let other = format!("{}ä/end", "ü".repeat(Names::LENGTH_MAX));
        let other = format!("another{}", other.replace('ä', "ü"));
        assert_ne!(names.number(&long), names.number(&other), "two files have different numbers");
        let whole = "x".repeat(Names::LENGTH_MAX);
        assert_eq!(&*names.text(names.number(&whole)).unwrap(), whole);
    }
}
