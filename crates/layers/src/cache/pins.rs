//! The pins of a shard's slots: how many reads and writes use a slot. They are counted outside of the
//! shard's lock, so that the end of a hit takes no lock.
//!
//! A slot is pinned only under the lock, and unpinned without it. A slot that is to become free while
//! it is pinned is *loose*: the last who unpins it takes the lock and frees it.

use std::sync::atomic::{AtomicU8, Ordering};

/// The slot becomes free with its last pin.
const LOOSE: u8 = 0x80;
/// The most pins of a slot.
const PINS_MAX: u8 = LOOSE - 1;

/// See the module.
pub(super) struct Pins {
    slots: Box<[AtomicU8]>,
}

impl Pins {
    /// The pins of `slots` slots.
    pub(super) fn new(slots: u32) -> Self {
        // Memory of zeroes is used only when it is written.
        let zeroes = vec![0_u8; slots as usize];
        Self { slots: zeroes.into_iter().map(AtomicU8::new).collect() }
    }

    /// The number of pins.
    #[inline]
    pub(super) fn count(&self, slot: u32) -> u8 {
        // What was done while the slot was pinned has happened.
        self.slots[slot as usize].load(Ordering::Acquire) & PINS_MAX
    }

    /// Pins a slot, under the lock. Returns false if it has too many pins.
    #[inline]
    pub(super) fn pin(&self, slot: u32) -> bool {
        // Others only unpin meanwhile.
        if self.count(slot) == PINS_MAX {
            return false;
        }
        self.slots[slot as usize].fetch_add(1, Ordering::Relaxed);
        true
    }

    /// Releases a pin. If this returns true, the caller frees the slot under the lock.
    #[inline]
    #[must_use]
    pub(super) fn unpin(&self, slot: u32) -> bool {
        self.slots[slot as usize].fetch_sub(1, Ordering::AcqRel) == LOOSE | 1
    }

    /// A slot is to become free, under the lock. If it is pinned, this returns false: it is loose
    /// then.
    #[must_use]
    pub(super) fn loosen(&self, slot: u32) -> bool {
        if self.slots[slot as usize].fetch_or(LOOSE, Ordering::AcqRel) & PINS_MAX != 0 {
            return false;
        }
        self.tighten(slot);
        true
    }

    /// A loose slot becomes free, under the lock.
    pub(super) fn tighten(&self, slot: u32) {
        self.slots[slot as usize].fetch_and(!LOOSE, Ordering::AcqRel);
    }

    /// Whether a slot is loose.
    pub(super) fn is_loose(&self, slot: u32) -> bool {
        self.slots[slot as usize].load(Ordering::Relaxed) & LOOSE != 0
    }

    /// The memory, in bytes.
    pub(super) fn memory_bytes(&self) -> usize {
        size_of_val(&self.slots[..])
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::AtomicU32;

    use super::*;

    #[test]
    fn the_last_pin_frees_a_loose_slot() {
        let pins = Pins::new(2);
        assert!(pins.loosen(0) && !pins.is_loose(0));
        assert!(pins.pin(1) && pins.pin(1));
        assert!(!pins.loosen(1) && pins.is_loose(1));
        assert!(!pins.unpin(1) && pins.unpin(1));
        pins.tighten(1);
        assert!((0..PINS_MAX).all(|_| pins.pin(1)));
        assert!(!pins.pin(1) && pins.count(1) == PINS_MAX);
        assert!(!pins.unpin(1) && pins.pin(1));
    }

    /// Threads pin and unpin a slot, and free it: it is freed exactly once each time.
    #[test]
    fn a_slot_is_freed_once() {
        let (pins, lock) = (Pins::new(1), Mutex::new((true, 0_u32)));
        let freed = AtomicU32::new(0);
        let round = |is_freer: bool| {
            for _ in 0..20_000 {
                let mut state = lock.lock().unwrap();
                if is_freer {
                    if std::mem::replace(&mut state.0, false) {
                        state.1 += 1;
                        if pins.loosen(0) {
                            freed.fetch_add(1, Ordering::Relaxed);
                            state.0 = true;
                        }
                    }
                } else if state.0 && pins.pin(0) {
                    drop(state);
                    std::hint::spin_loop();
                    if pins.unpin(0) {
                        let mut state = lock.lock().unwrap();
                        pins.tighten(0);
                        freed.fetch_add(1, Ordering::Relaxed);
                        state.0 = true;
                    }
                }
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(|| round(false));
            scope.spawn(|| round(false));
            round(true);
        });
        let (is_free, begun) = *lock.lock().unwrap();
        assert!(is_free && begun > 0);
        assert_eq!(freed.into_inner(), begun);
        assert_eq!(pins.count(0), 0);
    }
}
