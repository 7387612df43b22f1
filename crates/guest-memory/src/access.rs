//! The guard of one access.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use crate::kept::Kept;
use crate::mapping::Mapping;
use crate::pager::Purpose;
use crate::volatile;

/// Mapped memory that may be accessed as long as this lives. Its bytes are copied in and out, or
/// accessed as atomic numbers in the order of bytes of this host.
///
/// Offsets are the caller's own: one outside the length is a mistake of the program and panics, as
/// with a slice.
#[derive(Debug)]
pub struct MemoryAccess<'m> {
    place: *mut u8,
    length: usize,
    is_writable: bool,
    _kept: Kept,
    _borrowed: PhantomData<&'m Mapping>,
}

// SAFETY: the memory stays mapped for every thread as long as the access lives, and is accessed
// only by volatile and atomic instructions.
unsafe impl Send for MemoryAccess<'_> {}
// SAFETY: as above.
unsafe impl Sync for MemoryAccess<'_> {}

impl MemoryAccess<'_> {
    /// An access to `length` bytes at `place`.
    ///
    /// # Safety
    /// They must be mapped for its lifetime, which may be that of what it keeps, and writable if
    /// the purpose is to write.
    #[inline]
    pub(crate) unsafe fn new(place: *mut u8, length: usize, purpose: Purpose, kept: Kept) -> Self {
        let is_writable = purpose.is_write();
        Self { place, length, is_writable, _kept: kept, _borrowed: PhantomData }
    }

    /// The address of the first byte in this process.
    #[cfg(test)]
    pub(crate) fn place(&self) -> *mut u8 {
        self.place
    }

    /// The number of bytes.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Whether the memory begins at a multiple of `alignment` in this process, as atomic numbers
    /// must.
    pub fn is_aligned(&self, alignment: usize) -> bool {
        self.place as usize % alignment == 0
    }

    /// The place of `length` bytes at an offset.
    #[inline]
    fn at(&self, offset: usize, length: usize) -> *mut u8 {
        let fits = offset <= self.length && length <= self.length - offset;
        assert!(fits, "{length} bytes at {offset} of {}", self.length);
        self.place.wrapping_add(offset)
    }

    /// Copies the bytes at an offset out, each once.
    #[inline]
    pub fn read(&self, offset: usize, target: &mut [u8]) {
        let place = self.at(offset, target.len());
        // SAFETY: the range is within the access.
        unsafe { volatile::copy_from(place, target) };
    }

    /// Copies bytes in, each once.
    #[inline]
    pub fn write(&self, offset: usize, source: &[u8]) {
        assert!(self.is_writable, "an access that may write");
        let place = self.at(offset, source.len());
        // SAFETY: the range is within the access, which may write.
        unsafe { volatile::copy_to(place, source) };
    }

    /// The `N` bytes at an offset, which need not be aligned, each read once.
    #[inline]
    pub fn bytes<const N: usize>(&self, offset: usize) -> [u8; N] {
        let place = self.at(offset, N);
        // SAFETY: the range is within the access; bytes are always aligned.
        unsafe { place.cast::<[u8; N]>().read_volatile() }
    }

    /// The `index`th number of 16 bits. The memory must be [aligned](Self::is_aligned).
    #[inline]
    pub fn load_u16(&self, index: usize, order: Ordering) -> u16 {
        self.cells::<AtomicU16>()[index].load(order)
    }

    /// The `index`th number of 64 bits. The memory must be [aligned](Self::is_aligned).
    #[inline]
    pub fn load_u64(&self, index: usize, order: Ordering) -> u64 {
        self.cells::<AtomicU64>()[index].load(order)
    }

    /// The memory as bytes to change; none if the access may not write.
    #[inline]
    pub fn u8s(&self) -> &[AtomicU8] {
        self.cells_to_change()
    }

    /// The memory as numbers of 16 bits to change; none if the access may not write, or is not
    /// aligned.
    #[inline]
    pub fn u16s(&self) -> &[AtomicU16] {
        self.cells_to_change()
    }

    /// The same for numbers of 32 bits.
    #[inline]
    pub fn u32s(&self) -> &[AtomicU32] {
        self.cells_to_change()
    }

    /// The same for numbers of 64 bits.
    #[inline]
    pub fn u64s(&self) -> &[AtomicU64] {
        self.cells_to_change()
    }

    #[inline]
    fn cells_to_change<T: Cell>(&self) -> &[T] {
        if self.is_writable { self.cells() } else { &[] }
    }

    #[inline]
    fn cells<T: Cell>(&self) -> &[T] {
        if self.place as usize % align_of::<T>() != 0 {
            return &[];
        }
        // SAFETY: the memory is mapped as long as self, and aligned; atomic numbers may be changed
        // by others at any time, and all of their bytes are valid. Nothing stores to them if the
        // access may not write.
        unsafe { std::slice::from_raw_parts(self.place.cast::<T>(), self.length / size_of::<T>()) }
    }
}

/// An atomic number.
///
/// # Safety
/// Each content is valid, and all accesses are atomic.
unsafe trait Cell {}

// SAFETY: an atomic number of the standard library.
unsafe impl Cell for AtomicU8 {}
// SAFETY: as above.
unsafe impl Cell for AtomicU16 {}
// SAFETY: as above.
unsafe impl Cell for AtomicU32 {}
// SAFETY: as above.
unsafe impl Cell for AtomicU64 {}
