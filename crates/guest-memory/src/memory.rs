//! A guest's memory: its regions, and the accesses to them.

use std::fmt;
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::access::MemoryAccess;
use crate::buffer::{Buffers, GuestAddress};
use crate::kept::Kept;
use crate::mapping::{Mapping, MemoryOwner};
use crate::pager::{Lease, Pager, Purpose, ShortLease};
use crate::region::{MappedAddress, Region};
use crate::volatile;
use crate::window::MemoryWindow;

/// The unit in which a pager takes memory away, in bytes.
const PAGE: u64 = 4096;

/// The numbers that are necessary to find an address in a region.
#[derive(Clone, Copy)]
struct Span {
    start: u64,
    length: u64,
    place: MappedAddress,
}

impl Default for Span {
    fn default() -> Self {
        Self { start: 0, length: 0, place: MappedAddress(std::ptr::null_mut()) }
    }
}

/// All of a guest's memory. Cheap to clone.
///
/// Methods that take a plain number for an address only look ([`Purpose::Look`]): the number comes
/// from what the guest's kernel has in its memory. Those that take a [`Purpose`] are for what the
/// guest has given to a device.
#[derive(Clone, Default)]
pub struct GuestMemory {
    /// The largest region: most accesses are in it. Empty if the memory has a pager, so that each
    /// access takes the way with a lease.
    main: Span,
    regions: Arc<[Region]>,
    pager: Option<Arc<dyn Pager>>,
    is_read_only: bool,
}

impl fmt::Debug for GuestMemory {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_list().entries(self.regions.iter()).finish()
    }
}

impl GuestMemory {
    /// Adds a region of `length` bytes at the guest-physical address `start`: the part of a file
    /// that begins at `file_offset`, mapped shared for reading and writing. The loss of a page is
    /// reported to `owner`.
    ///
    /// # Errors
    /// When the region is empty, wraps around, overlaps another one or is longer than its file, or
    /// the file cannot be mapped.
    pub fn add(
        &mut self,
        start: u64,
        length: u64,
        file: File,
        file_offset: u64,
        owner: &Arc<MemoryOwner>,
    ) -> io::Result<()> {
        self.check(start, length)?;
        let map = Mapping::new(&file, file_offset, length, owner)?;
        self.insert(Region::new(start, length, (Arc::new(file), file_offset), map));
        Ok(())
    }

    /// Adds a region of a file that is only read: an image of a memory. No access may write then.
    ///
    /// # Errors
    /// As those of [`add`](Self::add).
    pub fn add_image(
        &mut self,
        start: u64,
        length: u64,
        file: &Arc<File>,
        file_offset: u64,
    ) -> io::Result<()> {
        self.check(start, length)?;
        let map = Mapping::read_only(file, file_offset, length)?;
        self.insert(Region::new(start, length, (Arc::clone(file), file_offset), map));
        self.is_read_only = true;
        Ok(())
    }

    fn check(&self, start: u64, length: u64) -> io::Result<()> {
        let invalid = |text| Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        let Some(end) = start.checked_add(length) else {
            return invalid("a memory region wraps around");
        };
        if length == 0 {
            return invalid("a memory region is empty");
        }
        if self.regions.iter().any(|region| start < region.end() && region.start < end) {
            return invalid("memory regions overlap");
        }
        Ok(())
    }

    fn insert(&mut self, region: Region) {
        let mut regions = self.regions.to_vec();
        regions.push(region);
        regions.sort_by_key(|region| region.start);
        self.set_regions(regions.into());
    }

    /// Removes the region with this address and length. Returns whether it existed. Its mapping
    /// ends with its last user.
    pub fn remove(&mut self, start: u64, length: u64) -> bool {
        let before = self.regions.len();
        *self = self.part(|region| (region.start, region.length) != (start, length));
        self.regions.len() < before
    }

    /// The same memory with only some of its regions.
    #[must_use]
    pub fn part(&self, is_kept: impl Fn(&Region) -> bool) -> Self {
        let mut part = self.clone();
        part.set_regions(self.regions.iter().filter(|region| is_kept(region)).cloned().collect());
        part
    }

    /// The same memory, with files of its own: a search for what the guest has touched does not
    /// move the positions of the VMM's descriptors.
    #[must_use]
    pub fn reopened(&self) -> Self {
        let mut reopened = self.clone();
        reopened.set_regions(self.regions.iter().map(Region::reopened).collect());
        reopened
    }

    /// The same memory, in which no access may write.
    #[must_use]
    pub fn read_only(&self) -> Self {
        Self { is_read_only: true, ..self.clone() }
    }

    /// The same memory, in which every access takes a lease from `pager`. Clones have the pager
    /// too; earlier ones do not.
    #[must_use]
    pub fn with_pager(&self, pager: Arc<dyn Pager>) -> Self {
        Self { pager: Some(pager), main: Span::default(), ..self.clone() }
    }

    /// The same memory without a pager. Regions in which missing pages are registered are mapped
    /// anew.
    ///
    /// # Errors
    /// When a region cannot be mapped.
    pub fn without_pager(&self) -> io::Result<Self> {
        let mut without = Self { pager: None, ..self.clone() };
        let of_region = |region: &Region| {
            if region.map.is_registered() { region.anew(None) } else { Ok(region.clone()) }
        };
        without.set_regions(self.regions.iter().map(of_region).collect::<io::Result<_>>()?);
        Ok(without)
    }

    /// The same memory with other regions in the same places, in which every access takes a lease
    /// from `pager`.
    pub(crate) fn with_leases(&self, regions: Vec<Region>, pager: Arc<dyn Pager>) -> Self {
        let mut with = self.with_pager(pager);
        with.set_regions(regions.into());
        with
    }

    /// A number of the pager; 0 without one.
    pub fn pager_identity(&self) -> u64 {
        self.pager.as_ref().map_or(0, |pager| pager.identity())
    }

    fn set_regions(&mut self, regions: Arc<[Region]>) {
        let main = regions.iter().max_by_key(|region| region.length);
        self.main = match main {
            Some(&Region { start, length, place, .. }) if self.pager.is_none() => {
                Span { start, length, place }
            }
            _ => Span::default(),
        };
        self.regions = regions;
    }

    /// The regions, in the order of their addresses.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// The first address above all memory.
    pub fn end(&self) -> u64 {
        self.regions.last().map_or(0, Region::end)
    }

    /// The number of bytes of memory.
    pub fn length(&self) -> u64 {
        self.regions.iter().map(|region| region.length).sum()
    }

    /// Whether there is memory at `address`.
    #[inline]
    pub fn contains(&self, address: u64) -> bool {
        address.wrapping_sub(self.main.start) < self.main.length || self.region(address).is_some()
    }

    /// The place of the byte at `address`, and the number of bytes from there to the end of its
    /// region.
    #[inline(never)]
    fn region(&self, address: u64) -> Option<(*mut u8, u64)> {
        self.regions.iter().find_map(|region| {
            let offset = address.wrapping_sub(region.start);
            let place = || region.place.0.wrapping_add(offset as usize);
            (offset < region.length).then(|| (place(), region.length - offset))
        })
    }

    /// The place of `length` bytes at an address in the largest region; `None` anywhere else, and
    /// if an access needs a lease.
    #[inline]
    fn place(&self, address: u64, length: u64) -> Option<*mut u8> {
        let offset = address.wrapping_sub(self.main.start);
        let fits = offset < self.main.length && length <= self.main.length - offset;
        fits.then(|| self.main.place.0.wrapping_add(offset as usize))
    }

    /// An access to `length` bytes at an address; `None` if they are not all in one region, if the
    /// purpose is to write and the memory is only read, or if the pager refuses.
    #[inline]
    pub fn access(&self, address: u64, length: u64, purpose: Purpose) -> Option<MemoryAccess<'_>> {
        if purpose.is_write() && self.is_read_only {
            return None;
        }
        let Some(place) = self.place(address, length) else {
            return self.access_elsewhere(address, length, purpose);
        };
        // SAFETY: self keeps the largest region mapped, and the range is within it.
        Some(unsafe { MemoryAccess::new(place, length as usize, purpose, Kept::NOTHING) })
    }

    #[inline(never)]
    fn access_elsewhere(
        &self,
        address: u64,
        length: u64,
        purpose: Purpose,
    ) -> Option<MemoryAccess<'_>> {
        let (place, left) = self.region(address)?;
        if length > left {
            return None;
        }
        let kept = match self.lease(GuestAddress(address), length, purpose)? {
            Some(lease) => Kept::lease(lease),
            None => Kept::NOTHING,
        };
        // SAFETY: self keeps the region mapped, and the range is within it.
        Some(unsafe { MemoryAccess::new(place, length as usize, purpose, kept) })
    }

    /// A lease on a range in one region, if there is a pager; `None` if it refuses. Accesses to the
    /// range succeed as long as it lives.
    #[inline]
    pub fn lease(
        &self,
        GuestAddress(address): GuestAddress,
        length: u64,
        purpose: Purpose,
    ) -> Option<Option<Lease>> {
        let Some(pager) = &self.pager else { return Some(None) };
        Lease::take(pager, address..address + length, purpose).map(Some)
    }

    /// Asks for the absent pages of a range of addresses, which need not be memory: for a request
    /// that has to wait for another page anyway.
    pub fn want(&self, GuestAddress(address): GuestAddress, length: u64, purpose: Purpose) {
        let Some(pager) = &self.pager else { return };
        let end = address.saturating_add(length);
        for region in self.regions.iter() {
            let part = address.max(region.start)..end.min(region.end());
            if !part.is_empty() {
                pager.want(&part, purpose);
            }
        }
    }

    /// The same access for a long time: it keeps its region mapped, and a lease if there is a
    /// pager.
    pub fn hold(
        &self,
        GuestAddress(address): GuestAddress,
        length: u64,
        purpose: Purpose,
    ) -> Option<MemoryAccess<'static>> {
        if purpose.is_write() && self.is_read_only {
            return None;
        }
        let is_in = |region: &&Region| address.wrapping_sub(region.start) < region.length;
        let region = self.regions.iter().find(is_in)?;
        let offset = address - region.start;
        if length > region.length - offset {
            return None;
        }
        let lease = self.lease(GuestAddress(address), length, purpose)?;
        let place = region.place.0.wrapping_add(offset as usize);
        let kept = Kept::new(lease, Some(Arc::clone(&region.map)));
        // SAFETY: the mapping is kept, and the range is within it.
        Some(unsafe { MemoryAccess::new(place, length as usize, purpose, kept) })
    }

    /// Appends `length` bytes at an address to `buffers`, for the kernel to read or to fill. They
    /// may be in several regions. Returns false, with a part of them appended, if some are no
    /// memory or the pager refuses. Its leases end when the buffers are cleared.
    ///
    /// # Safety
    /// The caller must keep this memory, or a clone with its regions, until the request has
    /// completed.
    pub unsafe fn lend(
        &self,
        buffers: &mut Buffers,
        GuestAddress(mut address): GuestAddress,
        length: u64,
        purpose: Purpose,
    ) -> bool {
        let mut left = length;
        while left > 0 {
            let (place, count) = match self.place(address, left) {
                Some(place) => (place, left),
                None => match self.lend_elsewhere(buffers, address, left, purpose) {
                    Some(part) => part,
                    None => return false,
                },
            };
            // SAFETY: the range is mapped, and remains so until the request has completed (the
            // contract of this function). Regions are mappings that survive the loss of a page.
            unsafe { buffers.push(place, count as usize, Some(GuestAddress(address))) };
            left -= count;
            let Some(next) = address.checked_add(count) else { return left == 0 };
            address = next;
        }
        true
    }

    /// The place of the memory at an address, and the number of its bytes, at most `length`.
    #[inline(never)]
    fn lend_elsewhere(
        &self,
        buffers: &mut Buffers,
        address: u64,
        length: u64,
        purpose: Purpose,
    ) -> Option<(*mut u8, u64)> {
        let (place, left) = self.region(address)?;
        let count = length.min(left);
        if let Some(lease) = self.lease(GuestAddress(address), count, purpose)? {
            buffers.keep(lease);
            let is_in = |region: &&Region| address.wrapping_sub(region.start) < region.length;
            if let Some(region) = self.regions.iter().find(is_in) {
                region.map.make_missing(place, count);
            }
        }
        Some((place, count))
    }

    /// The place of `length` bytes at an address, for a look without a lease.
    #[inline]
    fn place_to_look(&self, address: u64, length: u64) -> Option<*mut u8> {
        #[cfg(all(feature = "recording", debug_assertions))]
        crate::recording::note(address, length);
        self.place(address, length)
    }

    /// The eight bytes at `address` as a number; `None` outside the memory.
    #[inline]
    pub fn u64(&self, address: u64) -> Option<u64> {
        match self.place_to_look(address, 8) {
            // SAFETY: it is the place of eight bytes.
            Some(place) => Some(unsafe { volatile::u64_at(place) }),
            None => self.u64_elsewhere(address),
        }
    }

    #[inline(never)]
    fn u64_elsewhere(&self, address: u64) -> Option<u64> {
        // SAFETY: it is the place of eight bytes.
        self.look_elsewhere(address, 8, |place| unsafe { volatile::u64_at(place) })
    }

    /// A short look at `length` bytes anywhere, with a lease if there is a pager.
    #[inline]
    fn look_elsewhere<T>(
        &self,
        address: u64,
        length: u64,
        look: impl FnOnce(*mut u8) -> T,
    ) -> Option<T> {
        let (place, left) = self.region(address)?;
        if length > left {
            return None;
        }
        let _lease = match &self.pager {
            Some(pager) => Some(ShortLease::take(&**pager, address..address + length)?),
            None => None,
        };
        Some(look(place))
    }

    /// The four bytes at `address` as a number; `None` outside the memory.
    #[inline]
    pub fn u32(&self, address: u64) -> Option<u32> {
        match self.place_to_look(address, 4) {
            // SAFETY: it is the place of four bytes.
            Some(place) => Some(unsafe { volatile::u32_at(place) }),
            None => self.u32_elsewhere(address),
        }
    }

    #[inline(never)]
    fn u32_elsewhere(&self, address: u64) -> Option<u32> {
        // SAFETY: it is the place of four bytes.
        self.look_elsewhere(address, 4, |place| unsafe { volatile::u32_at(place) })
    }

    /// The two bytes at `address` as a number; `None` outside the memory.
    pub fn u16(&self, address: u64) -> Option<u16> {
        let mut bytes = [0; 2];
        self.read(address, &mut bytes)?;
        Some(u16::from_le_bytes(bytes))
    }

    /// Copies the bytes at `address`. `None`, with `bytes` unchanged, if they are not all in one
    /// region.
    #[inline]
    pub fn read(&self, address: u64, bytes: &mut [u8]) -> Option<()> {
        let length = bytes.len() as u64;
        // SAFETY: it is the place of as many bytes.
        let mut copy = |place: *mut u8| unsafe { volatile::copy_from(place, bytes) };
        match self.place_to_look(address, length) {
            Some(place) => copy(place),
            None => self.look_elsewhere(address, length, copy)?,
        }
        Some(())
    }

    /// Replaces the aligned four bytes at `address` in one atomic step, if they are the number
    /// `current`. Otherwise returns their number. `None` if they are not in one region, not
    /// aligned, or cannot be written.
    pub fn replace_u32(&self, address: u64, current: u32, new: u32) -> Option<Result<(), u32>> {
        let access = self.access(address, 4, Purpose::Write)?;
        let cell: &AtomicU32 = access.u32s().first()?;
        let replaced = cell.compare_exchange(
            current.to_le(),
            new.to_le(),
            Ordering::AcqRel,
            Ordering::Acquire,
        );
        Some(replaced.map(drop).map_err(u32::from_le))
    }

    /// The memory from `address` on, for several looks at contiguous memory.
    #[inline]
    pub fn window(&self, address: u64) -> MemoryWindow<'_> {
        let offset = address.wrapping_sub(self.main.start);
        if offset < self.main.length {
            let place = self.main.place.0.wrapping_add(offset as usize);
            // SAFETY: self keeps the largest region mapped, and this is its rest.
            return unsafe {
                MemoryWindow::new(address, place, self.main.length - offset, Kept::NOTHING)
            };
        }
        self.window_elsewhere(address)
    }

    #[inline(never)]
    fn window_elsewhere(&self, address: u64) -> MemoryWindow<'_> {
        let (place, mut length) = self.region(address).unwrap_or((std::ptr::null_mut(), 0));
        let mut kept = Kept::NOTHING;
        if let Some(pager) = &self.pager {
            // What follows in the next page may be absent.
            let lengths = [PAGE, PAGE - address % PAGE].map(|most| length.min(most));
            let take = |length| {
                let lease = Lease::take(pager, address..address + length, Purpose::Look)?;
                Some((length, Kept::lease(lease)))
            };
            (length, kept) = lengths.into_iter().find_map(take).unwrap_or((0, kept));
        }
        // SAFETY: self keeps the region mapped, and this is a part of its rest.
        unsafe { MemoryWindow::new(address, place, length, kept) }
    }

    /// Starts to fetch the line at `address` into the processor's caches. Brings no page in.
    pub fn prefetch(&self, address: u64) {
        let place = self.place(address, 1).or_else(|| {
            let is_without = self.pager.is_none();
            is_without.then(|| self.region(address)).flatten().map(|(place, _)| place)
        });
        if let Some(place) = place {
            volatile::prefetch(place);
        }
    }
}
