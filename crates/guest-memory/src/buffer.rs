//! The memory of a request's data.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;

use crate::pager::Lease;

/// An address in a guest's physical memory, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GuestAddress(pub u64);

/// The alignment of owned memory, in bytes, which satisfies direct I/O on any disk.
const ALIGNMENT: usize = 4096;
/// The most owned memory that a reused request keeps, in bytes.
const KEPT_MAX: usize = 256 << 10;
/// The most segments for which a reused request keeps memory.
const SEGMENTS_KEPT_MAX: usize = 256;

/// An ordered list of memory segments, in a guest's memory or in memory that the request owns.
///
/// A segment of a guest's memory also has its guest-physical address. A segment is never read or
/// written through a reference, because a guest may change its memory at any time: the methods here
/// copy its bytes, and so does the kernel, which gets the [segments](Self::segments). If a byte
/// changes during a copy, the copy has either value. Bytes of a lost page
/// ([`Mapping`](crate::Mapping)) read as zeroes; [`faults`](crate::faults) distinguishes them from
/// the guest's zeroes.
#[derive(Debug, Default)]
pub struct Buffers {
    segments: Vec<libc::iovec>,
    addresses: Vec<Option<GuestAddress>>,
    length: u64,
    owned: Option<Owned>,
    /// What keeps the pages of a guest's memory present.
    leases: Vec<Lease>,
}

// SAFETY: the segments point to memory that stays mapped as long as the request is in flight (the
// contract of `push`), for every thread.
unsafe impl Send for Buffers {}

impl Buffers {
    /// Appends `length` bytes at `pointer`.
    ///
    /// # Safety
    /// The memory must be mapped, readable and (for operations that fill it) writable until the
    /// request has completed. There must be no reference to it as a Rust object. Memory shared with
    /// another process must be a [`Mapping`](crate::Mapping), which survives the loss of a page.
    pub unsafe fn push(&mut self, pointer: *mut u8, length: usize, address: Option<GuestAddress>) {
        if length == 0 {
            return;
        }
        self.segments.push(libc::iovec { iov_base: pointer.cast(), iov_len: length });
        self.addresses.push(address);
        self.length += length as u64;
    }

    /// Keeps a lease until the segments are removed.
    pub(crate) fn keep(&mut self, lease: Lease) {
        self.leases.push(lease);
    }

    /// Replaces all segments by `length` bytes of memory that the request owns, aligned for direct
    /// I/O. The bytes are zero or stale.
    pub fn allocate(&mut self, length: usize) {
        self.clear_segments();
        if self.owned.as_ref().is_none_or(|owned| owned.capacity < length) {
            self.owned = Some(Owned::new(length.max(ALIGNMENT)));
        }
        if let (Some(owned), true) = (&self.owned, length > 0) {
            self.segments
                .push(libc::iovec { iov_base: owned.pointer.as_ptr().cast(), iov_len: length });
            self.addresses.push(None);
            self.length = length as u64;
        }
    }

    /// The bytes of owned memory, or `None` if the request does not own the memory.
    pub fn owned(&self) -> Option<&[u8]> {
        let owned = self.owned.as_ref()?;
        let segment = self.owned_segment(owned)?;
        // SAFETY: the memory is initialised, ours, at least this long, and borrowed with self.
        Some(unsafe { std::slice::from_raw_parts(owned.pointer.as_ptr(), segment.iov_len) })
    }

    /// The bytes of owned memory for writing, or `None` if the request does not own the memory.
    pub fn owned_mut(&mut self) -> Option<&mut [u8]> {
        let owned = self.owned.as_ref()?;
        let segment = self.owned_segment(owned)?;
        // SAFETY: the memory is initialised, ours alone, at least this long, borrowed with self.
        Some(unsafe { std::slice::from_raw_parts_mut(owned.pointer.as_ptr(), segment.iov_len) })
    }

    fn owned_segment(&self, owned: &Owned) -> Option<&libc::iovec> {
        match self.segments.as_slice() {
            [segment] if segment.iov_base.cast() == owned.pointer.as_ptr() => Some(segment),
            _ => None,
        }
    }

    /// The length of all segments together, in bytes.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// The number of segments.
    pub fn count(&self) -> usize {
        self.segments.len()
    }

    /// The segments, for a system call. The returned memory does not move while the request is in
    /// flight.
    pub fn segments(&self) -> &[libc::iovec] {
        &self.segments
    }

    /// The guest-physical address of each segment in a guest's memory.
    pub fn addresses(&self) -> &[Option<GuestAddress>] {
        &self.addresses
    }

    /// Copies up to `target.len()` bytes out, from byte `from` of all segments on. Returns the
    /// number of bytes copied.
    pub fn copy_to(&self, from: u64, target: &mut [u8]) -> usize {
        let mut done = 0;
        self.each(from, target.len(), |pointer, length| {
            // SAFETY: the segment is mapped while the request is in flight (the contract of
            // `push`); `target` is a distinct Rust object, so the two cannot overlap; `done +
            // length` is within it.
            unsafe {
                std::ptr::copy_nonoverlapping(pointer, target[done..].as_mut_ptr(), length);
            }
            done += length;
        });
        done
    }

    /// Copies the `target.len()` bytes from `from` on, or returns `false` if there are fewer.
    /// `cursor` remembers the segment, so that accesses in ascending order do not search for it.
    pub fn peek(&self, cursor: &mut Cursor, from: u64, target: &mut [u8]) -> bool {
        if from.checked_add(target.len() as u64).is_none_or(|end| end > self.length) {
            return false;
        }
        if from < cursor.start {
            *cursor = Cursor::default();
        }
        let (mut from, mut done) = (from, 0);
        while let Some(segment) = self.segments.get(cursor.segment) {
            let skip = (from - cursor.start) as usize;
            if skip >= segment.iov_len {
                cursor.start += segment.iov_len as u64;
                cursor.segment += 1;
                continue;
            }
            let count = (segment.iov_len - skip).min(target.len() - done);
            // SAFETY: as in `copy_to`: `skip + count` is within the segment, `done + count` within
            // the target.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    segment.iov_base.cast::<u8>().wrapping_add(skip),
                    target[done..].as_mut_ptr(),
                    count,
                );
            }
            done += count;
            if done == target.len() {
                return true;
            }
            from += count as u64;
        }
        done == target.len()
    }

    /// Copies `length` bytes from byte `from` of all segments on to `target`.
    ///
    /// # Safety
    /// `target` must be valid for writes of `length` bytes, in memory that is no segment's.
    pub unsafe fn gather(&self, from: u64, length: usize, mut target: *mut u8) {
        self.each(from, length, |pointer, count| {
            // SAFETY: the segment is mapped while the request is in flight, and the caller's memory
            // cannot overlap it.
            unsafe { std::ptr::copy_nonoverlapping(pointer, target, count) };
            target = target.wrapping_add(count);
        });
    }

    /// Copies `length` bytes from `source` to byte `from` of all segments on.
    ///
    /// # Safety
    /// `source` must be valid for reads of `length` bytes, in memory that is no segment's.
    pub unsafe fn scatter(&self, from: u64, length: usize, mut source: *const u8) {
        self.each(from, length, |pointer, count| {
            // SAFETY: as in `gather`, in the other direction.
            unsafe { std::ptr::copy_nonoverlapping(source, pointer, count) };
            source = source.wrapping_add(count);
        });
    }

    /// Copies up to `source.len()` bytes in, to byte `from` of all segments on. Returns the number
    /// of bytes that fit.
    pub fn copy_from(&mut self, from: u64, source: &[u8]) -> usize {
        let mut done = 0;
        self.each(from, source.len(), |pointer, length| {
            // SAFETY: as in `copy_to`, in the other direction.
            unsafe { std::ptr::copy_nonoverlapping(source[done..].as_ptr(), pointer, length) };
            done += length;
        });
        done
    }

    /// Fills `length` bytes with zeroes, from byte `from` of all segments on.
    pub fn fill_zero(&mut self, from: u64, length: usize) {
        // SAFETY: the segment is mapped while the request is in flight.
        self.each(from, length, |pointer, count| unsafe { pointer.write_bytes(0, count) });
    }

    /// Drops the first `count` bytes, which a short read or write has already transferred.
    pub fn advance(&mut self, count: u64) {
        let mut left = count.min(self.length) as usize;
        self.length -= left as u64;
        let mut skipped = 0;
        for segment in &mut self.segments {
            if segment.iov_len <= left {
                left -= segment.iov_len;
                skipped += 1;
            } else {
                segment.iov_base = segment.iov_base.cast::<u8>().wrapping_add(left).cast();
                segment.iov_len -= left;
                if let Some(GuestAddress(address)) = self.addresses[skipped].as_mut() {
                    *address += left as u64;
                }
                break;
            }
        }
        self.segments.drain(..skipped);
        self.addresses.drain(..skipped);
    }

    /// Drops all bytes from `length` on.
    pub fn truncate(&mut self, length: u64) {
        let mut left = length as usize;
        let mut kept = 0;
        for segment in &mut self.segments {
            if left == 0 {
                break;
            }
            segment.iov_len = segment.iov_len.min(left);
            left -= segment.iov_len;
            kept += 1;
        }
        self.segments.truncate(kept);
        self.addresses.truncate(kept);
        self.length = self.length.min(length);
    }

    /// Makes this refer to `length` bytes of `other`, from its byte `from` on. `other` still owns
    /// the memory.
    ///
    /// # Safety
    /// `other` must not be cleared, dropped or given back before this request has completed.
    pub unsafe fn borrow_from(&mut self, other: &Self, from: u64, length: u64) {
        self.clear_segments();
        let mut skip = from as usize;
        let mut left = length as usize;
        for (segment, address) in other.segments.iter().zip(&other.addresses) {
            if skip >= segment.iov_len {
                skip -= segment.iov_len;
                continue;
            }
            let count = (segment.iov_len - skip).min(left);
            let base = segment.iov_base.cast::<u8>().wrapping_add(skip);
            let address = address.map(|GuestAddress(start)| GuestAddress(start + skip as u64));
            // SAFETY: the caller keeps the memory of `other` while this request is in flight.
            unsafe { self.push(base, count, address) };
            skip = 0;
            left -= count;
            if left == 0 {
                break;
            }
        }
    }

    /// Removes the segments. Keeps owned memory of up to 256 KiB for the next use.
    pub fn clear(&mut self) {
        self.clear_segments();
        self.segments.shrink_to(SEGMENTS_KEPT_MAX);
        self.addresses.shrink_to(SEGMENTS_KEPT_MAX);
        if self.owned.as_ref().is_some_and(|owned| owned.capacity > KEPT_MAX) {
            self.owned = None;
        }
    }

    fn clear_segments(&mut self) {
        self.segments.clear();
        self.addresses.clear();
        self.leases.clear();
        self.length = 0;
    }

    /// Calls `visit` with each contiguous piece of the range, in order.
    fn each(&self, from: u64, length: usize, mut visit: impl FnMut(*mut u8, usize)) {
        let mut skip = from as usize;
        let mut left = length;
        for segment in &self.segments {
            if skip >= segment.iov_len {
                skip -= segment.iov_len;
                continue;
            }
            let count = (segment.iov_len - skip).min(left);
            visit(segment.iov_base.cast::<u8>().wrapping_add(skip), count);
            skip = 0;
            left -= count;
            if left == 0 {
                break;
            }
        }
    }
}

/// A place in the segments of [`Buffers`], for [`Buffers::peek`].
#[derive(Clone, Copy, Debug, Default)]
pub struct Cursor {
    segment: usize,
    /// The bytes before the segment.
    start: u64,
}

/// Aligned memory that belongs to a request.
#[derive(Debug)]
struct Owned {
    pointer: NonNull<u8>,
    capacity: usize,
}

// SAFETY: the memory belongs to this object alone.
unsafe impl Send for Owned {}

impl Owned {
    fn new(length: usize) -> Self {
        let layout = Self::layout(length);
        // SAFETY: the layout has a size that is not zero.
        let pointer = unsafe { alloc_zeroed(layout) };
        let Some(pointer) = NonNull::new(pointer) else { handle_alloc_error(layout) };
        Self { pointer, capacity: layout.size() }
    }

    fn layout(length: usize) -> Layout {
        Layout::from_size_align(length.next_multiple_of(ALIGNMENT), ALIGNMENT)
            .expect("a request's memory is bounded far below the address space")
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with the same layout.
        unsafe { dealloc(self.pointer.as_ptr(), Self::layout(self.capacity)) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two_segments(first: &mut [u8], second: &mut [u8]) -> Buffers {
        let mut buffers = Buffers::default();
        // SAFETY: the slices outlive the buffers in each test.
        unsafe {
            buffers.push(first.as_mut_ptr(), first.len(), Some(GuestAddress(0x1000)));
            buffers.push(second.as_mut_ptr(), second.len(), Some(GuestAddress(0x9000)));
        }
        buffers
    }

    #[test]
    fn bytes_cross_the_boundary_of_segments() {
        let (mut first, mut second) = (*b"abc", *b"defgh");
        let mut buffers = two_segments(&mut first, &mut second);
        let mut target = [0; 4];
        assert_eq!(buffers.copy_to(2, &mut target), 4);
        assert_eq!(&target, b"cdef");
        assert_eq!(buffers.copy_to(6, &mut target), 2);
        assert_eq!(buffers.copy_from(1, b"XYZ"), 3);
        buffers.fill_zero(7, 9);
        assert_eq!((&first, &second), (b"aXY", b"Zefg\0"));
    }

    #[test]
    fn a_cursor_goes_forward_and_back() {
        let (mut first, mut second) = (*b"abc", *b"defgh");
        let buffers = two_segments(&mut first, &mut second);
        let mut cursor = Cursor::default();
        let mut at = |from, length| {
            let mut target = vec![0; length];
            buffers.peek(&mut cursor, from, &mut target).then_some(target)
        };
        for _ in 0..2 {
            assert_eq!(at(0, 2).as_deref(), Some(&b"ab"[..]));
            assert_eq!(at(1, 4).as_deref(), Some(&b"bcde"[..]));
            assert_eq!(at(3, 5).as_deref(), Some(&b"defgh"[..]));
            assert_eq!((at(3, 6), at(9, 0), at(u64::MAX, 2)), (None, None, None));
            assert_eq!(at(8, 0).as_deref(), Some(&b""[..]));
        }
    }

    #[test]
    fn advancing_and_truncating_keep_guest_addresses_in_step() {
        let (mut first, mut second) = ([0; 8], [0; 8]);
        let mut buffers = two_segments(&mut first, &mut second);
        buffers.advance(10);
        assert_eq!(buffers.length(), 6);
        assert_eq!(buffers.addresses(), [Some(GuestAddress(0x9002))]);
        buffers.truncate(4);
        assert_eq!((buffers.length(), buffers.segments()[0].iov_len), (4, 4));
        buffers.truncate(0);
        assert_eq!(buffers.count(), 0);
    }

    #[test]
    fn owned_memory_is_aligned_and_used_again() {
        let mut buffers = Buffers::default();
        buffers.allocate(100);
        let first = buffers.owned().unwrap().as_ptr();
        assert_eq!(first as usize % ALIGNMENT, 0);
        buffers.clear();
        assert!(buffers.owned().is_none());
        buffers.allocate(4096);
        assert_eq!(buffers.owned().unwrap().as_ptr(), first);
        buffers.allocate(KEPT_MAX + 1);
        buffers.clear();
        assert!(buffers.owned.is_none());
    }

    #[test]
    fn a_part_can_be_borrowed() {
        let (mut first, mut second) = (*b"abc", *b"defgh");
        let buffers = two_segments(&mut first, &mut second);
        let mut part = Buffers::default();
        // SAFETY: `buffers` lives longer than `part` is used.
        unsafe { part.borrow_from(&buffers, 2, 3) };
        let mut target = [0; 8];
        assert_eq!(part.copy_to(0, &mut target), 3);
        assert_eq!(&target[..3], b"cde");
        assert_eq!(part.addresses(), [Some(GuestAddress(0x1002)), Some(GuestAddress(0x9000))]);
    }
}
