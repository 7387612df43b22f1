//! A bounded ring between a queue's thread and one reader.
//!
//! One thread pushes and one thread pops, and neither waits: a push into a full ring drops the
//! event and counts it. The two positions ensure that only one side at a time accesses a slot: the
//! pusher publishes `head` after it has filled a slot, and the reader publishes `tail` after it has
//! emptied one.

use std::sync::atomic::{AtomicU64, Ordering};

use fathom_insight::event::{EVENT_WORDS, Event};

/// A position on a separate cache line, so that the two sides do not share one.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Position(AtomicU64);

/// A ring of events. See the module.
#[derive(Debug)]
pub(super) struct Ring {
    slots: Box<[[AtomicU64; EVENT_WORDS]]>,
    head: Position,
    tail: Position,
    dropped: Position,
}

impl Ring {
    /// A ring for at least `capacity` events.
    pub(super) fn new(capacity: usize) -> Self {
        let slots = (0..capacity.max(2).next_power_of_two())
            .map(|_| [const { AtomicU64::new(0) }; EVENT_WORDS])
            .collect();
        Self {
            slots,
            head: Position::default(),
            tail: Position::default(),
            dropped: Position::default(),
        }
    }

    /// Adds `event`, or drops and counts it if the ring is full. Only one thread calls this.
    pub(super) fn push(&self, event: Event) {
        let head = self.head.0.load(Ordering::Relaxed);
        if head - self.tail.0.load(Ordering::Acquire) == self.slots.len() as u64 {
            let dropped = self.dropped.0.load(Ordering::Relaxed);
            self.dropped.0.store(dropped + 1, Ordering::Relaxed);
            return;
        }
        let slot = &self.slots[head as usize & (self.slots.len() - 1)];
        for (target, word) in slot.iter().zip(event.to_words()) {
            target.store(word, Ordering::Relaxed);
        }
        self.head.0.store(head + 1, Ordering::Release);
    }

    /// Moves all events into `events`. Only one thread at a time calls this.
    pub(super) fn drain(&self, events: &mut Vec<Event>) {
        let tail = self.tail.0.load(Ordering::Relaxed);
        let head = self.head.0.load(Ordering::Acquire);
        events.reserve((head - tail) as usize);
        for position in tail..head {
            let slot = &self.slots[position as usize & (self.slots.len() - 1)];
            let words = std::array::from_fn(|index| slot[index].load(Ordering::Relaxed));
            events.push(Event::from_words(words));
        }
        self.tail.0.store(head, Ordering::Release);
    }

    /// Discards all events. Only the reader's thread calls this.
    pub(super) fn clear(&self) {
        self.tail.0.store(self.head.0.load(Ordering::Acquire), Ordering::Release);
    }

    /// The number of events dropped since the ring was made.
    pub(super) fn dropped(&self) -> u64 {
        self.dropped.0.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
