//! Hints for the processor's caches.

#![expect(unsafe_code, reason = "hints for the caches")]

/// Starts to fetch the line at an address into the processor's caches. Any address is allowed.
#[inline]
pub fn prefetch<T>(address: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the instruction is a hint. It accesses no memory that the program can see, and an
    // address without memory has no effect.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// The same, for a line that is changed next: other processors lose it.
#[inline]
pub fn prefetch_to_change<T>(address: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as above; processors without this instruction ignore it. The compiler's own hint for
    // a change becomes this instruction only if all processors of the target have it.
    unsafe {
        std::arch::asm!(
            "prefetchw [{address}]",
            address = in(reg) address,
            options(nostack, preserves_flags, readonly)
        );
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}
