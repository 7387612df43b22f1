//! A region of a guest's memory, and what the guest has touched of it.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use crate::mapping::{FilePages, Mapping};

/// An address in this process at which a region is mapped.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MappedAddress(pub *mut u8);

// SAFETY: a place is used only for accesses to the region, which can be shared.
unsafe impl Send for MappedAddress {}
// SAFETY: as above.
unsafe impl Sync for MappedAddress {}

/// A range of guest-physical addresses, mapped from a part of a file.
#[derive(Clone, Debug)]
pub struct Region {
    /// The guest-physical address of its first byte.
    pub start: u64,
    /// Its length in bytes.
    pub length: u64,
    /// The offset in its file at which it begins, in bytes.
    pub file_offset: u64,
    pub(crate) place: MappedAddress,
    pub(crate) map: Arc<Mapping>,
    pub(crate) file: Arc<File>,
}

impl Region {
    pub(crate) fn new(
        start: u64,
        length: u64,
        (file, file_offset): (Arc<File>, u64),
        map: Mapping,
    ) -> Self {
        Self {
            start,
            length,
            file_offset,
            place: MappedAddress(map.base()),
            map: Arc::new(map),
            file,
        }
    }

    /// The first address above it.
    pub fn end(&self) -> u64 {
        self.start + self.length
    }

    /// The device and the inode of its file. A file that cannot be identified equals no other.
    pub fn file_identity(&self) -> (u64, u64) {
        match self.file.metadata() {
            Ok(metadata) => (metadata.dev(), metadata.ino()),
            Err(_) => (u64::MAX, self.place.0 as u64),
        }
    }

    /// Whether its file has been truncated.
    pub fn is_truncated(&self) -> bool {
        let end = self.file_offset + self.length;
        self.file.metadata().is_ok_and(|metadata| metadata.len() < end)
    }

    /// The length of the region's file, in bytes.
    pub(crate) fn file_bytes(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    /// Copies the bytes at an offset of the region, through the file. A read through the mapping
    /// would allocate pages that the guest never touched.
    ///
    /// # Errors
    /// When the file cannot be read, or ends before.
    pub fn read_from_file(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(bytes, self.file_offset + offset)
    }

    /// The same region with an open file of its own, because the position of the descriptor belongs
    /// to the VMM. If the file cannot be opened again, the descriptor stays, whose position QEMU
    /// and other VMMs never use.
    pub(crate) fn reopened(&self) -> Self {
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        let file = File::open(path).map_or_else(|_| Arc::clone(&self.file), Arc::new);
        Self { file, ..self.clone() }
    }

    /// The same region in a mapping of its own. With `pages`, a touch of a page that is away is an
    /// error.
    pub(crate) fn anew(&self, pages: Option<&Arc<dyn FilePages>>) -> io::Result<Self> {
        let map = self.map.anew(&self.file, self.file_offset, pages)?;
        let file = (Arc::clone(&self.file), self.file_offset);
        Ok(Self::new(self.start, self.length, file, map))
    }

    /// The parts of the region that the guest has touched, from the address `start` on, in order;
    /// the whole region if this is unknown. Each part costs two system calls, and every second page
    /// can begin a part: a caller has to limit its time.
    pub fn touched(&self, start: u64) -> Touched<'_> {
        Touched { region: self, offset: start.saturating_sub(self.start) }
    }

    /// The first address from `start` on that the guest has touched; `start` itself if this is
    /// unknown. `start` is in the region.
    pub fn touched_from(&self, start: u64) -> Option<u64> {
        let (base, offset) = (self.file_offset, start - self.start);
        match seek(&self.file, SeekFrom::Data(base + offset)) {
            Ok(data) => {
                let offset = data.saturating_sub(base).max(offset);
                (offset < self.length).then_some(self.start + offset)
            }
            Err(Errno::NXIO) => None,
            Err(_) => Some(start),
        }
    }
}

/// See [`Region::touched`].
#[derive(Debug)]
pub struct Touched<'r> {
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
        let (from, base) = (*offset, region.file_offset);
        // This moves the position of an open file that the VMM may share. The result does not
        // depend on the position.
        let data = match seek(&region.file, SeekFrom::Data(base + from)) {
            Ok(data) => data,
            Err(error) => {
                *offset = region.length;
                let whole = (region.start + from, region.start + region.length);
                return (error != Errno::NXIO).then_some(whole);
            }
        };
        let begin = data.saturating_sub(base).max(from);
        if begin >= region.length {
            *offset = region.length;
            return None;
        }
        let hole = seek(&region.file, SeekFrom::Hole(base + begin));
        let stop = hole.map_or(region.length, |hole| hole.saturating_sub(base));
        let stop = stop.clamp(begin + 1, region.length);
        *offset = stop;
        Some((region.start + begin, region.start + stop))
    }
}
