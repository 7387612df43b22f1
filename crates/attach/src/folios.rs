//! Which pages of the VMM are single ones, by the kernel's own account.
//!
//! A page of a large folio must not leave: a punch of it, while anybody holds a reference to the
//! folio, only zeroes it. `/proc/PID/pagemap` says where a page is, `/proc/kpageflags` what it is
//! part of. Both need root, and without them no page is known to be single.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use crate::vmm::Vmm;

/// A page, in bytes.
const PAGE: u64 = 4096;

/// In `pagemap`: the number of the page, and whether it is there.
const NUMBER: u64 = (1 << 55) - 1;
const PRESENT: u64 = 1 << 63;
/// In `kpageflags`: part of a large folio, or nothing that could leave. A compound page has head
/// and tails; huge pages and what the hardware has lost are others.
const LARGE: u64 = 1 << 15 | 1 << 16 | 1 << 17 | 1 << 22;
const UNUSABLE: u64 = 1 << 19 | 1 << 20 | 1 << 21 | 1 << 24;

/// What is known of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Folio {
    /// A page of its own, which the VMM has mapped.
    Single,
    /// A part of something larger, or of an unknown kind.
    Large,
    /// The VMM has not mapped it.
    Absent,
}

/// The kernel's accounts of pages.
#[derive(Debug)]
pub(crate) struct Folios {
    places: File,
    flags: File,
}

impl Folios {
    /// Those of a VMM.
    ///
    /// # Errors
    /// Without the right to read them.
    pub fn open(vmm: &Vmm) -> io::Result<Self> {
        Ok(Self {
            places: File::open(vmm.path("pagemap"))?,
            flags: File::open("/proc/kpageflags")?,
        })
    }

    /// What the pages from `address` on are.
    ///
    /// # Errors
    /// When the accounts cannot be read, or do not say where pages are.
    pub fn at(&self, address: u64, count: usize) -> io::Result<Vec<Folio>> {
        let mut bytes = vec![0; count * 8];
        self.places.read_exact_at(&mut bytes, address / PAGE * 8)?;
        bytes.chunks_exact(8).map(|word| self.of(number(word))).collect()
    }

    fn of(&self, place: u64) -> io::Result<Folio> {
        if place & PRESENT == 0 {
            return Ok(Folio::Absent);
        }
        if place & NUMBER == 0 {
            // So does the kernel hide them.
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        let mut word = [0; 8];
        self.flags.read_exact_at(&mut word, (place & NUMBER) * 8)?;
        Ok(classify(number(&word)))
    }
}

fn number(word: &[u8]) -> u64 {
    u64::from_ne_bytes(word.try_into().expect("8 bytes"))
}

fn classify(flags: u64) -> Folio {
    if flags & (LARGE | UNUSABLE) == 0 { Folio::Single } else { Folio::Large }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_large_folios_are_not_single() {
        // UPTODATE, LRU, MMAP, SWAPBACKED of a page of its own.
        let usual = 1 << 3 | 1 << 5 | 1 << 11 | 1 << 14;
        assert_eq!(classify(usual), Folio::Single);
        for bit in [15, 16, 17, 22, 19, 20, 21, 24] {
            assert_eq!(classify(usual | 1 << bit), Folio::Large, "{bit}");
        }
    }
}
