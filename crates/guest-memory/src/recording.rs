//! A recording of the looks at memory, for tests: their number and their ranges.
//!
//! Only programs with assertions (`debug_assertions`) record. A build of the whole workspace unites
//! the features of all its parts: without this condition, a release that is built together with
//! tests or examples would count each look, too.

use std::cell::{Cell, RefCell};

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
    static BYTES: Cell<u64> = const { Cell::new(0) };
    static IS_RECORDING: Cell<bool> = const { Cell::new(false) };
    static RANGES: RefCell<Vec<(u64, u32)>> = const { RefCell::new(Vec::new()) };
}

/// Counts a look at the memory, and records it if recording is on.
#[inline]
#[cfg_attr(not(debug_assertions), expect(dead_code, reason = "a release records nothing"))]
pub(crate) fn note(address: u64, length: u64) {
    COUNT.set(COUNT.get() + 1);
    BYTES.set(BYTES.get() + length);
    if IS_RECORDING.get() {
        RANGES.with_borrow_mut(|ranges| ranges.push((address, length as u32)));
    }
}

/// The number of looks on this thread.
pub fn count() -> u64 {
    COUNT.get()
}

/// The number of bytes of these looks, including looks outside the memory.
pub fn bytes() -> u64 {
    BYTES.get()
}

/// Runs `act`. Returns its result and the guest-physical ranges at which it looked.
pub fn record<T>(act: impl FnOnce() -> T) -> (T, Vec<(u64, u32)>) {
    IS_RECORDING.set(true);
    let result = act();
    IS_RECORDING.set(false);
    (result, RANGES.take())
}
