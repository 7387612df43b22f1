//! A bounded ring of records between a thread that makes them and one reader.
//!
//! One thread pushes and one thread pops, and neither waits: a push into a full ring drops the
//! record and counts it. The two positions ensure that only one side at a time accesses a slot: the
//! pusher publishes `head` after it has filled a slot, and the reader publishes `tail` after it has
//! emptied one.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::Record;

/// A position on a separate cache line, so that the two sides do not share one.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Position(AtomicU64);

/// A ring of records. See the module.
#[derive(Debug)]
pub struct Ring<R> {
    /// The words of the slots, one slot after the other.
    words: Box<[AtomicU64]>,
    /// The number of slots less one; the number is a power of two.
    mask: u64,
    head: Position,
    tail: Position,
    dropped: Position,
    records: PhantomData<R>,
}

impl<R: Record> Ring<R> {
    /// A ring for at least `capacity` records.
    pub fn new(capacity: usize) -> Self {
        let slots = capacity.max(2).next_power_of_two();
        Self {
            words: (0..slots * R::WORDS).map(|_| AtomicU64::new(0)).collect(),
            mask: slots as u64 - 1,
            head: Position::default(),
            tail: Position::default(),
            dropped: Position::default(),
            records: PhantomData,
        }
    }

    fn slot(&self, position: u64) -> &[AtomicU64] {
        let start = (position & self.mask) as usize * R::WORDS;
        &self.words[start..start + R::WORDS]
    }

    /// Adds a record, or drops and counts it if the ring is full. Only one thread at a time calls
    /// this.
    pub fn push(&self, record: R) {
        let head = self.head.0.load(Ordering::Relaxed);
        if head - self.tail.0.load(Ordering::Acquire) > self.mask {
            let dropped = self.dropped.0.load(Ordering::Relaxed);
            self.dropped.0.store(dropped + 1, Ordering::Relaxed);
            return;
        }
        for (target, word) in self.slot(head).iter().zip(record.to_words().as_ref()) {
            target.store(*word, Ordering::Relaxed);
        }
        self.head.0.store(head + 1, Ordering::Release);
    }

    /// Moves all records into `records`. Only one thread at a time calls this.
    pub fn drain(&self, records: &mut Vec<R>) {
        let tail = self.tail.0.load(Ordering::Relaxed);
        let head = self.head.0.load(Ordering::Acquire);
        records.reserve((head - tail) as usize);
        for position in tail..head {
            let mut words = R::Words::default();
            for (word, from) in words.as_mut().iter_mut().zip(self.slot(position)) {
                *word = from.load(Ordering::Relaxed);
            }
            records.push(R::from_words(words));
        }
        self.tail.0.store(head, Ordering::Release);
    }

    /// Discards all records. Only the reader's thread calls this.
    pub fn clear(&self) {
        self.tail.0.store(self.head.0.load(Ordering::Acquire), Ordering::Release);
    }

    /// The number of records dropped since the ring was made.
    pub fn dropped(&self) -> u64 {
        self.dropped.0.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::Event;

    #[test]
    fn a_full_ring_drops_the_newest_and_counts() {
        let ring = Ring::new(4);
        for req_id in 0..6 {
            ring.push(Event { req_id, ..Event::default() });
        }
        let mut events = Vec::new();
        ring.drain(&mut events);
        assert!(events.iter().map(|event| event.req_id).eq(0..4));
        assert_eq!(ring.dropped(), 2);
        ring.push(Event::default());
        ring.clear();
        events.clear();
        ring.drain(&mut events);
        assert!(events.is_empty());
    }

    #[test]
    fn events_between_two_threads_are_whole_and_in_order() {
        const COUNT: u64 = 200_000;
        let ring = Ring::new(64);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for req_id in 0..COUNT {
                    ring.push(Event { req_id, inode: !req_id, ..Event::default() });
                }
            });
            let (mut events, mut seen, mut next) = (Vec::new(), 0, 0);
            while seen + ring.dropped() < COUNT {
                ring.drain(&mut events);
                for event in events.drain(..) {
                    assert!(event.req_id >= next && event.inode == !event.req_id);
                    next = event.req_id + 1;
                    seen += 1;
                }
            }
        });
    }
}
