//! Several looks at contiguous memory, whose place is looked up once.

use std::marker::PhantomData;

use crate::kept::Kept;
use crate::memory::GuestMemory;

/// The memory from an address on, to the end of its region. A structure of the kernel does not
/// extend beyond its region, which ends where the memory ends. With a pager, the window is at most
/// a page long, and keeps a lease.
pub struct MemoryWindow<'m> {
    _memory: PhantomData<&'m GuestMemory>,
    #[cfg(all(feature = "recording", debug_assertions))]
    address: u64,
    place: *const u8,
    /// The offsets at which there are eight bytes are below this; 0 if there is no memory.
    words: u64,
    _kept: Kept,
}

impl MemoryWindow<'_> {
    /// A window of `length` bytes.
    ///
    /// # Safety
    /// They must be mapped at `place` for the lifetime of the window.
    #[inline]
    #[cfg_attr(
        not(all(feature = "recording", debug_assertions)),
        expect(unused_variables, reason = "only recordings need it")
    )]
    pub(crate) unsafe fn new(address: u64, place: *const u8, length: u64, kept: Kept) -> Self {
        Self {
            _memory: PhantomData,
            #[cfg(all(feature = "recording", debug_assertions))]
            address,
            place,
            words: length.saturating_sub(7),
            _kept: kept,
        }
    }

    /// The first `length` bytes.
    #[must_use]
    pub fn first(self, length: u64) -> Self {
        Self { words: self.words.min(length.saturating_sub(7)), ..self }
    }

    /// The place of `length` bytes (at most 8), if they are aligned.
    #[inline]
    fn place(&self, offset: u64, length: u64) -> Option<*const u8> {
        let place = self.place.wrapping_add(offset as usize);
        if offset >= self.words || place as u64 % length != 0 {
            return None;
        }
        #[cfg(all(feature = "recording", debug_assertions))]
        crate::recording::note(self.address + offset, length);
        Some(place)
    }

    /// The eight bytes at an offset as a number; `None` outside the window, or if they are not
    /// aligned.
    #[inline]
    #[expect(clippy::cast_ptr_alignment, reason = "`place` checks the alignment")]
    pub fn u64(&self, offset: u64) -> Option<u64> {
        let place = self.place(offset, 8)?;
        // SAFETY: eight aligned bytes of a region, which the memory keeps mapped; any content is a
        // valid number.
        Some(u64::from_le(unsafe { place.cast::<u64>().read_volatile() }))
    }

    /// The four bytes at an offset as a number; `None` outside the window, or if they are not
    /// aligned.
    #[inline]
    #[expect(clippy::cast_ptr_alignment, reason = "`place` checks the alignment")]
    pub fn u32(&self, offset: u64) -> Option<u32> {
        let place = self.place(offset, 4)?;
        // SAFETY: as above, for four bytes.
        Some(u32::from_le(unsafe { place.cast::<u32>().read_volatile() }))
    }
}
