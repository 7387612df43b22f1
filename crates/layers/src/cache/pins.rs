//! The pins of a shard's slots: how many reads and writes use a slot. They are counted outside of
//! the shard's lock, so that a hit takes no lock.
//!
//! A slot that is to become free while it is pinned is *loose*: the last who unpins it takes the
//! lock and frees it. Whoever pins a slot without the lock then looks whether it still has the
//! block (`blocks`), because any slot can be pinned so for a moment, also a free one.

use std::sync::atomic::{AtomicU8, Ordering};

use fathom_block::prefetch_to_change;

/// The slot becomes free with its last pin.
const LOOSE: u8 = 0x80;
/// The most pins of a slot.
const PINS_MAX: u8 = LOOSE - 1;
/// The pins of a slot from which on it is pinned only under the lock, which always can pin a slot
/// that has a pin of no read.
const UNLOCKED_MAX: u8 = PINS_MAX / 2;

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

    /// Fetches the pins of a slot into the processor's caches, to change them.
    #[inline]
    pub(super) fn prefetch(&self, slot: u32) {
        prefetch_to_change(self.slots.as_ptr().wrapping_add(slot as usize));
    }

    /// Whether nobody has pinned a slot, under the lock. Whoever pins it later sees what was done
    /// under the lock before.
    #[inline]
    pub(super) fn is_unpinned(&self, slot: u32) -> bool {
        // A change of the count, also by nothing, has its place among the changes by those who pin.
        self.slots[slot as usize].fetch_add(0, Ordering::AcqRel) & PINS_MAX == 0
    }

    /// Pins a slot, under the lock. Returns false if it has too many pins.
    #[inline]
    pub(super) fn pin(&self, slot: u32) -> bool {
        self.pin_below(slot, PINS_MAX)
    }

    /// Pins a slot without the lock. Returns false if it has many pins.
    #[inline]
    pub(super) fn pin_unlocked(&self, slot: u32) -> bool {
        self.pin_below(slot, UNLOCKED_MAX)
    }

    #[inline]
    fn pin_below(&self, slot: u32, max: u8) -> bool {
        let pins = &self.slots[slot as usize];
        // Most slots have no pin: a guess fetches the memory once, to change it.
        let mut count = 0;
        // A loose slot has a greater count: its last pin would be released twice.
        while count < max {
            let changed =
                pins.compare_exchange_weak(count, count + 1, Ordering::AcqRel, Ordering::Relaxed);
            match changed {
                Ok(_) => return true,
                Err(now) => count = now,
            }
        }
        false
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
        let pins = &self.slots[slot as usize];
        // A change by nothing has its place among the changes by those who pin, too.
        if pins.compare_exchange(0, 0, Ordering::AcqRel, Ordering::Acquire).is_ok() {
            return true;
        }
        if pins.fetch_or(LOOSE, Ordering::AcqRel) & PINS_MAX != 0 {
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

    /// The number of pins.
    #[cfg(test)]
    pub(super) fn count(&self, slot: u32) -> u8 {
        self.slots[slot as usize].load(Ordering::Acquire) & PINS_MAX
    }

    /// The memory, in bytes.
    pub(super) fn memory_bytes(&self) -> usize {
        size_of_val(&self.slots[..])
    }
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;
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
                let mut state = lock.lock();
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
                        let mut state = lock.lock();
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
        let (is_free, begun) = *lock.lock();
        assert!(is_free && begun > 0);
        assert_eq!(freed.into_inner(), begun);
        assert_eq!(pins.count(0), 0);
    }
}
