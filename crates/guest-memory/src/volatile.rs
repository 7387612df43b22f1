//! Copies of memory that changes meanwhile: each byte is read or written once.

/// Copies from memory of a guest, in words if both sides allow it.
///
/// # Safety
/// `place` must be mapped for the length of `target`.
#[inline]
#[expect(clippy::cast_ptr_alignment, reason = "the line before checks the alignment")]
pub(crate) unsafe fn copy_from(mut place: *const u8, mut target: &mut [u8]) {
    while !target.is_empty() {
        if place as usize % 8 == 0 && target.len() >= 8 {
            let (head, rest) = target.split_at_mut(8);
            // SAFETY: the caller checked the range; the place is aligned.
            head.copy_from_slice(&unsafe { place.cast::<u64>().read_volatile() }.to_ne_bytes());
            (place, target) = (place.wrapping_add(8), rest);
        } else {
            let (head, rest) = target.split_at_mut(1);
            // SAFETY: the caller checked the range.
            head[0] = unsafe { place.read_volatile() };
            (place, target) = (place.wrapping_add(1), rest);
        }
    }
}

/// Copies to memory of a guest, in words if both sides allow it.
///
/// # Safety
/// `place` must be mapped, and writable, for the length of `source`.
#[expect(clippy::cast_ptr_alignment, reason = "the line before checks the alignment")]
pub(crate) unsafe fn copy_to(mut place: *mut u8, mut source: &[u8]) {
    while !source.is_empty() {
        match source.split_first_chunk() {
            Some((head, rest)) if place as usize % 8 == 0 => {
                // SAFETY: the caller checked the range; the place is aligned.
                unsafe { place.cast::<u64>().write_volatile(u64::from_ne_bytes(*head)) };
                (place, source) = (place.wrapping_add(8), rest);
            }
            _ => {
                // SAFETY: the caller checked the range.
                unsafe { place.write_volatile(source[0]) };
                (place, source) = (place.wrapping_add(1), &source[1..]);
            }
        }
    }
}

/// The eight bytes at a place as a number.
///
/// # Safety
/// They must be mapped.
#[inline]
#[expect(clippy::cast_ptr_alignment, reason = "the line before checks the alignment")]
pub(crate) unsafe fn u64_at(place: *const u8) -> u64 {
    if place as usize % 8 == 0 {
        // SAFETY: the caller has mapped them; any content is a valid number.
        return u64::from_le(unsafe { place.cast::<u64>().read_volatile() });
    }
    let mut bytes = [0; 8];
    // SAFETY: as above.
    unsafe { copy_from(place, &mut bytes) };
    u64::from_le_bytes(bytes)
}

/// The four bytes at a place as a number.
///
/// # Safety
/// They must be mapped.
#[inline]
#[expect(clippy::cast_ptr_alignment, reason = "the line before checks the alignment")]
pub(crate) unsafe fn u32_at(place: *const u8) -> u32 {
    if place as usize % 4 == 0 {
        // SAFETY: the caller has mapped them; any content is a valid number.
        return u32::from_le(unsafe { place.cast::<u32>().read_volatile() });
    }
    let mut bytes = [0; 4];
    // SAFETY: as above.
    unsafe { copy_from(place, &mut bytes) };
    u32::from_le_bytes(bytes)
}

/// Starts to fetch the line at an address into the processor's caches. Any address is allowed.
pub(crate) fn prefetch(place: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the instruction is a hint, for which any address is allowed.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(place.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}
