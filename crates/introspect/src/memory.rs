//! A guest's memory, mapped into this process, and images of such memory.
//!
//! The content is untrusted and changes while it is read. So there are no references into it: it is
//! copied by volatile reads, within bounds that are checked each time. Only the tunables of
//! write-back are ever written ([`crate::tunables`]).

use std::any::Any;
use std::fmt;
use std::fs::File;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use crate::vmcoreinfo::PAGE;

/// The end of physical addresses, which have at most 52 bits.
const ADDRESS_END: u64 = 1 << 52;

/// A range of guest-physical memory, and its mapping in this process.
#[derive(Debug)]
pub struct Region {
    /// The guest-physical address of its first byte.
    pub start: u64,
    /// The length in bytes.
    pub length: u64,
    /// The address of the first byte in this process.
    pub place: *const u8,
    /// The mapped file, and the offset of the region in it, in bytes. With the file, a search skips
    /// the parts that the guest never touched, without allocating them.
    pub file: Option<(OwnedFd, u64)>,
}

// SAFETY: the mapped memory is only accessed by volatile reads and atomic writes.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

/// The numbers of a region that are necessary to find an address in it.
#[derive(Clone, Copy)]
struct Span {
    start: u64,
    length: u64,
    place: *const u8,
}

impl Region {
    fn span(&self) -> Span {
        Span { start: self.start, length: self.length, place: self.place }
    }
}

// SAFETY: as for a region.
unsafe impl Send for Span {}
// SAFETY: as above.
unsafe impl Sync for Span {}

/// All of a guest's memory. Cheap to clone.
#[derive(Clone)]
pub struct GuestMemory {
    regions: Arc<[Region]>,
    /// The largest region: most reads are in it.
    main: Span,
    /// Whether the mappings can be written.
    is_writable: bool,
    /// Keeps the mappings alive.
    _owner: Arc<dyn Any + Send + Sync>,
}

impl fmt::Debug for GuestMemory {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_list().entries(self.regions.iter()).finish()
    }
}

impl GuestMemory {
    /// The memory of these regions, which `owner` keeps mapped. Regions above the end of physical
    /// addresses are omitted.
    ///
    /// # Safety
    /// The whole length of each region must be readable at its place until `owner` is dropped, even
    /// if the mapped file changes: for memory of another process, a handler has to replace lost
    /// pages. Other threads and processes may write there at any time.
    pub unsafe fn new(mut regions: Vec<Region>, owner: Arc<dyn Any + Send + Sync>) -> Self {
        regions.retain(|region| {
            let end = region.start.checked_add(region.length);
            region.length > 0 && end.is_some_and(|end| end <= ADDRESS_END)
        });
        regions.sort_by_key(|region| region.start);
        let nothing = Span { start: 0, length: 0, place: std::ptr::null() };
        let main = regions.iter().max_by_key(|region| region.length).map_or(nothing, Region::span);
        Self { regions: regions.into(), main, is_writable: false, _owner: owner }
    }

    /// The same memory, in which the tunables of a kernel can be replaced.
    ///
    /// # Safety
    /// The whole length of each region must also be writable at its place, as long as it has to be
    /// readable.
    #[must_use]
    pub unsafe fn writable(mut self) -> Self {
        self.is_writable = true;
        self
    }

    /// The regions, in the order of their addresses.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// The first address above all memory.
    pub fn end(&self) -> u64 {
        self.regions.iter().map(|region| region.start + region.length).max().unwrap_or(0)
    }

    /// The number of bytes of memory.
    pub fn length(&self) -> u64 {
        self.regions.iter().map(|region| region.length).sum()
    }

    /// The place of `length` bytes at `address`, if they are all in one region.
    #[inline]
    fn place(&self, address: u64, length: u64) -> Option<*const u8> {
        #[cfg(any(test, feature = "recording"))]
        recording::note(address, length);
        let (place, left) = self.find(address);
        (left >= length.max(1)).then_some(place)
    }

    /// The place of the byte at `address`, and the number of bytes from there to the end of its
    /// region; 0 if there is no memory.
    #[inline]
    fn find(&self, address: u64) -> (*const u8, u64) {
        let offset = address.wrapping_sub(self.main.start);
        if offset < self.main.length {
            return (self.main.place.wrapping_add(offset as usize), self.main.length - offset);
        }
        self.find_elsewhere(address)
    }

    #[inline(never)]
    fn find_elsewhere(&self, address: u64) -> (*const u8, u64) {
        for region in self.regions.iter() {
            let offset = address.wrapping_sub(region.start);
            if offset < region.length {
                return (region.place.wrapping_add(offset as usize), region.length - offset);
            }
        }
        (std::ptr::null(), 0)
    }

    /// The memory from `address` on, for several reads of contiguous memory: its place is looked up
    /// once.
    #[inline]
    pub(crate) fn window(&self, address: u64) -> Window<'_> {
        let (place, left) = self.find(address);
        Window {
            _memory: PhantomData,
            #[cfg(any(test, feature = "recording"))]
            address,
            place,
            words: left.saturating_sub(7),
        }
    }

    /// Starts to fetch the line at `address` into the processor's caches.
    pub(crate) fn prefetch(&self, address: u64) {
        let (place, left) = self.find(address);
        #[cfg(target_arch = "x86_64")]
        if left > 0 {
            // SAFETY: the instruction is a hint, for which any address is allowed.
            unsafe {
                use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
                _mm_prefetch::<_MM_HINT_T0>(place.cast());
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = (place, left);
    }

    /// The number of the page at `address`, counted over all regions.
    pub(crate) fn number_of(&self, address: u64) -> Option<u64> {
        let mut before = 0;
        for region in self.regions.iter() {
            let offset = address.wrapping_sub(region.start);
            if offset < region.length {
                return Some((before + offset) / PAGE);
            }
            before += region.length;
        }
        None
    }

    /// Whether there is memory at `address`.
    pub fn contains(&self, address: u64) -> bool {
        self.place(address, 1).is_some()
    }

    /// The eight bytes at `address` as a number; `None` outside the memory.
    #[inline]
    #[expect(clippy::cast_ptr_alignment, reason = "the line before checks the alignment")]
    pub fn u64(&self, address: u64) -> Option<u64> {
        let place = self.place(address, 8)?;
        if place as usize % 8 == 0 {
            // SAFETY: eight aligned bytes of a mapped region; any content is a valid number.
            return Some(u64::from_le(unsafe { place.cast::<u64>().read_volatile() }));
        }
        let mut bytes = [0; 8];
        copy(place, &mut bytes);
        Some(u64::from_le_bytes(bytes))
    }

    /// The four bytes at `address` as a number; `None` outside the memory.
    #[inline]
    #[expect(clippy::cast_ptr_alignment, reason = "the line before checks the alignment")]
    pub fn u32(&self, address: u64) -> Option<u32> {
        let place = self.place(address, 4)?;
        if place as usize % 4 == 0 {
            // SAFETY: four aligned bytes of a mapped region; any content is a valid number.
            return Some(u32::from_le(unsafe { place.cast::<u32>().read_volatile() }));
        }
        let mut bytes = [0; 4];
        copy(place, &mut bytes);
        Some(u32::from_le_bytes(bytes))
    }

    /// The two bytes at `address` as a number; `None` outside the memory.
    pub fn u16(&self, address: u64) -> Option<u16> {
        let mut bytes = [0; 2];
        self.read(address, &mut bytes)?;
        Some(u16::from_le_bytes(bytes))
    }

    /// Replaces the aligned four bytes at `address` in one atomic step, if they are the number
    /// `current`. Otherwise returns their number. `None` if they are not in one region, not
    /// aligned, or cannot be written.
    pub(crate) fn replace_u32(
        &self,
        address: u64,
        current: u32,
        new: u32,
    ) -> Option<Result<(), u32>> {
        let place = self.place(address, 4).filter(|place| *place as usize % 4 == 0)?;
        if !self.is_writable {
            return None;
        }
        // SAFETY: four aligned bytes of a region that is mapped writable; other threads and
        // processes access them at any time, which an atomic access allows.
        let cell = unsafe { AtomicU32::from_ptr(place.cast_mut().cast()) };
        let replaced = cell.compare_exchange(
            current.to_le(),
            new.to_le(),
            Ordering::AcqRel,
            Ordering::Acquire,
        );
        Some(replaced.map(drop).map_err(u32::from_le))
    }

    /// Copies the bytes at `address`. `None`, with `bytes` unchanged, if they are not all in one
    /// region.
    pub fn read(&self, address: u64, bytes: &mut [u8]) -> Option<()> {
        copy(self.place(address, bytes.len() as u64)?, bytes);
        Some(())
    }

    /// The parts of a region that the guest has touched, from `start` on, in order; the whole
    /// region if this is unknown. Each part costs two system calls, and every second page can begin
    /// a part: a caller has to limit its time.
    pub(crate) fn touched(region: &Region, start: u64) -> Touched<'_> {
        Touched { region, offset: start.saturating_sub(region.start) }
    }

    /// The first address from `start` on that the guest has touched; `start` itself if this is
    /// unknown. `start` is in the region.
    pub(crate) fn touched_from(region: &Region, start: u64) -> Option<u64> {
        let Some((file, base)) = &region.file else { return Some(start) };
        let offset = start - region.start;
        match seek(file, SeekFrom::Data(base + offset)) {
            Ok(data) => {
                let offset = data.saturating_sub(*base).max(offset);
                (offset < region.length).then_some(region.start + offset)
            }
            Err(Errno::NXIO) => None,
            Err(_) => Some(start),
        }
    }
}

/// See [`GuestMemory::touched`].
pub(crate) struct Touched<'r> {
    region: &'r Region,
    offset: u64,
}

impl Iterator for Touched<'_> {
    type Item = (u64, u64);

    fn next(&mut self) -> Option<(u64, u64)> {
        let Self { region, offset } = self;
        if *offset >= region.length {
            return None;
        }
        let from = *offset;
        let Some((file, base)) = &region.file else {
            *offset = region.length;
            return Some((region.start + from, region.start + region.length));
        };
        // This moves the position of an open file that the VMM may share. The result does not
        // depend on the position.
        let data = match seek(file, SeekFrom::Data(base + from)) {
            Ok(data) => data,
            Err(error) => {
                *offset = region.length;
                let whole = (region.start + from, region.start + region.length);
                return (error != Errno::NXIO).then_some(whole);
            }
        };
        let begin = data.saturating_sub(*base).max(from);
        if begin >= region.length {
            *offset = region.length;
            return None;
        }
        let hole = seek(file, SeekFrom::Hole(base + begin));
        let stop = hole.map_or(region.length, |hole| hole.saturating_sub(*base));
        let stop = stop.clamp(begin + 1, region.length);
        *offset = stop;
        Some((region.start + begin, region.start + stop))
    }
}

/// The memory from an address on, to the end of its region. A structure of the kernel does not
/// extend beyond its region, which ends where the memory ends.
#[derive(Clone, Copy)]
pub(crate) struct Window<'a> {
    _memory: PhantomData<&'a GuestMemory>,
    #[cfg(any(test, feature = "recording"))]
    address: u64,
    place: *const u8,
    /// The offsets at which there are eight bytes are below this; 0 if there is no memory.
    words: u64,
}

impl Window<'_> {
    /// The first `length` bytes.
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
        #[cfg(any(test, feature = "recording"))]
        recording::note(self.address + offset, length);
        Some(place)
    }

    /// The eight bytes at an offset as a number; `None` outside the window, or if they are not
    /// aligned.
    #[inline]
    #[expect(clippy::cast_ptr_alignment, reason = "`place` checks the alignment")]
    pub fn u64(&self, offset: u64) -> Option<u64> {
        let place = self.place(offset, 8)?;
        // SAFETY: eight aligned bytes of a mapped region, which the memory keeps mapped; any
        // content is a valid number.
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

/// A mapping of a file, for the lifetime of this object.
pub(crate) struct Mapping {
    place: *mut libc::c_void,
    length: usize,
}

// SAFETY: the mapped memory is only accessed by volatile reads and writes.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `length` bytes of a file, for reading or for reading and writing.
    pub fn new(file: &File, length: usize, is_writable: bool) -> io::Result<Self> {
        let (access, flags) = if is_writable {
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_NORESERVE)
        } else {
            (libc::PROT_READ, libc::MAP_SHARED)
        };
        // SAFETY: a new mapping of an open file, at an address that the kernel chooses.
        let place =
            unsafe { libc::mmap(std::ptr::null_mut(), length, access, flags, file.as_raw_fd(), 0) };
        if place == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { place, length })
    }

    /// The address of an offset of the file.
    pub fn place(&self, offset: u64) -> *mut u8 {
        self.place.cast::<u8>().wrapping_add(offset as usize)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is this object's own.
        unsafe { libc::munmap(self.place, self.length) };
    }
}

/// Copies by volatile reads, in words if both sides allow it.
#[expect(clippy::cast_ptr_alignment, reason = "the line before checks the alignment")]
fn copy(mut place: *const u8, mut bytes: &mut [u8]) {
    while !bytes.is_empty() {
        if place as usize % 8 == 0 && bytes.len() >= 8 {
            let (head, rest) = bytes.split_at_mut(8);
            // SAFETY: the caller checked the range; the place is aligned.
            head.copy_from_slice(&unsafe { place.cast::<u64>().read_volatile() }.to_ne_bytes());
            place = place.wrapping_add(8);
            bytes = rest;
        } else {
            let (head, rest) = bytes.split_at_mut(1);
            // SAFETY: the caller checked the range.
            head[0] = unsafe { place.read_volatile() };
            place = place.wrapping_add(1);
            bytes = rest;
        }
    }
}

/// A recording of the reads, for tests: their number and their ranges.
#[cfg(any(test, feature = "recording"))]
pub(crate) mod recording {
    use std::cell::{Cell, RefCell};

    thread_local! {
        static COUNT: Cell<u64> = const { Cell::new(0) };
        static BYTES: Cell<u64> = const { Cell::new(0) };
        static IS_RECORDING: Cell<bool> = const { Cell::new(false) };
        static RANGES: RefCell<Vec<(u64, u32)>> = const { RefCell::new(Vec::new()) };
    }

    /// Counts a read of the memory, and records it if recording is on.
    #[inline]
    pub fn note(address: u64, length: u64) {
        COUNT.set(COUNT.get() + 1);
        BYTES.set(BYTES.get() + length);
        if IS_RECORDING.get() {
            RANGES.with_borrow_mut(|ranges| ranges.push((address, length as u32)));
        }
    }

    /// The number of reads on this thread.
    pub fn count() -> u64 {
        COUNT.get()
    }

    /// The number of bytes of these reads, including reads outside the memory.
    #[cfg(test)]
    pub fn bytes() -> u64 {
        BYTES.get()
    }

    /// Runs `act`. Returns its result and the guest-physical ranges that it read.
    pub fn record<T>(act: impl FnOnce() -> T) -> (T, Vec<(u64, u32)>) {
        IS_RECORDING.set(true);
        let result = act();
        IS_RECORDING.set(false);
        (result, RANGES.take())
    }
}
