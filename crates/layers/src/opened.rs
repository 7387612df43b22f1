//! What several users share while it is open, by key.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;

use parking_lot::Mutex;

/// Places for things that are opened once, whoever comes first, and shared then. Each place has a
/// lock of its own: who opens something keeps it locked, so that nobody else opens the same, and
/// other places are free meanwhile.
#[derive(Debug)]
pub struct Opened<K, T> {
    places: Mutex<HashMap<K, Arc<Mutex<T>>>>,
}

impl<K, T> Default for Opened<K, T> {
    fn default() -> Self {
        Self { places: Mutex::default() }
    }
}

impl<K: Eq + Hash, T: Default> Opened<K, T> {
    /// The place of `key`. Places that nobody has, and in which nothing is open by `is_open`, are
    /// removed.
    pub fn place(&self, key: K, is_open: impl Fn(&T) -> bool) -> Arc<Mutex<T>> {
        let mut places = self.places.lock();
        places.retain(|_, place| {
            Arc::strong_count(place) > 1 || place.try_lock().is_none_or(|place| is_open(&place))
        });
        Arc::clone(places.entry(key).or_default())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Weak;

    use super::*;

    #[test]
    fn places_are_shared_and_stay_while_they_are_used() {
        let opened: Opened<u32, Weak<u32>> = Opened::default();
        let place = |key| opened.place(key, |value| value.strong_count() > 0);
        let (one, two) = (place(1), place(2));
        assert!(Arc::ptr_eq(&one, &place(1)) && !Arc::ptr_eq(&one, &two));
        let value = Arc::new(5);
        *one.lock() = Arc::downgrade(&value);
        drop((one, two));
        // Nothing is open in the second place, and nobody has it.
        drop(place(3));
        assert_eq!(opened.places.lock().len(), 2);
        assert_eq!(place(1).lock().upgrade(), Some(Arc::clone(&value)));
        drop(value);
        drop(place(3));
        assert_eq!(opened.places.lock().len(), 1);
    }
}
