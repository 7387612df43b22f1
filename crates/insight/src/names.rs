//! A bounded table of texts, so that a request and an event carry numbers.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The number of a text in [`Names`]; 0 is no text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name(pub u32);

impl Name {
    /// No text.
    pub const NONE: Self = Self(0);

    /// Whether it stands for a text.
    pub fn is_some(self) -> bool {
        self.0 != 0
    }
}

/// A table of texts, each under one number. It keeps the latest so many: a number whose text was
/// forgotten stands for nothing, never for another text. Shared by all who write and read it.
pub struct Names {
    capacity: usize,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    numbers: HashMap<Arc<str>, u32>,
    /// The texts of the numbers from `first` on.
    texts: VecDeque<Arc<str>>,
    first: u32,
}

impl Default for Names {
    /// A table for 65,536 texts.
    fn default() -> Self {
        Self::new(1 << 16)
    }
}

impl Names {
    /// The longest text that is kept whole, in bytes; of a longer one the end is kept.
    pub const LENGTH_MAX: usize = 1024;

    /// A table that keeps the latest `capacity` texts (at least one).
    pub fn new(capacity: usize) -> Self {
        let inner = Inner { first: 1, ..Inner::default() };
        Self { capacity: capacity.max(1), inner: Mutex::new(inner) }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of `text`; an empty one has none.
    pub fn number(&self, text: &str) -> Name {
        if text.is_empty() {
            return Name::NONE;
        }
        let text = shorten(text);
        let mut inner = self.inner();
        if let Some(number) = inner.numbers.get(text) {
            return Name(*number);
        }
        if inner.texts.len() == self.capacity {
            if let Some(oldest) = inner.texts.pop_front() {
                inner.numbers.remove(&oldest);
                inner.first = inner.first.wrapping_add(1);
            }
        }
        let number = inner.first.wrapping_add(inner.texts.len() as u32);
        if number == 0 {
            // After four thousand million texts the numbers begin anew.
            *inner = Inner { first: 1, ..Inner::default() };
            drop(inner);
            return self.number(text);
        }
        let text: Arc<str> = text.into();
        inner.numbers.insert(Arc::clone(&text), number);
        inner.texts.push_back(text);
        Name(number)
    }

    /// The text of a number; `None` where it has none, or was forgotten.
    pub fn text(&self, name: Name) -> Option<Arc<str>> {
        let inner = self.inner();
        let place = name.0.checked_sub(inner.first)?;
        inner.texts.get(place as usize).cloned()
    }

    /// How many texts there are.
    pub fn len(&self) -> usize {
        self.inner().texts.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The end of a text that is too long, cut between characters.
fn shorten(text: &str) -> &str {
    let mut start = text.len().saturating_sub(Names::LENGTH_MAX);
    while !text.is_char_boundary(start) {
        start += 1;
    }
    &text[start..]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_keeps_its_number_until_it_is_forgotten() {
        let names = Names::new(2);
        let (a, b) = (names.number("a"), names.number("b"));
        assert_eq!(names.number("a"), a);
        assert_eq!(names.text(a).as_deref(), Some("a"));
        let c = names.number("c");
        assert_eq!(names.text(a), None);
        assert_eq!((names.text(b).as_deref(), names.text(c).as_deref()), (Some("b"), Some("c")));
        assert_ne!(names.number("a"), a);
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
    }
}
