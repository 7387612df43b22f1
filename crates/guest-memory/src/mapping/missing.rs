//! Missing pages of a mapping, a touch of which must not make zeroes by itself.
//!
//! A page that a pager has taken away is missing in the file. An ordinary mapping would make zeroes
//! at the first touch, and the guest would read these instead of its own bytes. So a mapping of a
//! memory with a pager is registered with a userfaultfd of this process, with
//! `UFFD_FEATURE_SIGBUS`: a touch of a missing page is a `SIGBUS`, or `EFAULT` of a system call,
//! and changes nothing.
//!
//! Other pages are missing by right: those that the guest has never touched, and those that the VMM
//! has given back. They are zeroes. The word of the page says which it is. With a lease the page
//! cannot leave, so if one is granted and the page is missing, it is zeroes, and comes into being
//! by `UFFDIO_ZEROPAGE`, which cannot change a page that exists. The handler of `SIGBUS` does that,
//! and [`MissingPages::make`] does it in advance for memory that the kernel is going to access. If
//! none is granted, somebody has touched the page without a lease: the memory is lost to its owner,
//! as if the file had been truncated.

use std::fmt::Debug;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use rustix::io::Errno;

use crate::userfault::{MISSING_SHMEM, SIGBUS, UserFault};

/// A page, in bytes. Mappings of files with other pages have no pager.
const PAGE: usize = 4096;
/// How often a page is made while the kernel has it made again later.
const ATTEMPTS_MAX: u32 = 16;

/// Leases on the pages of a file. They are taken in a handler of a signal too, so they must not
/// lock, allocate, or wait.
pub(crate) trait FilePages: Send + Sync + Debug {
    /// Takes a lease for writing on a page of the file. Returns false if the page is away.
    fn lease_page(&self, page: u64) -> bool;

    /// Ends it.
    fn release_page(&self, page: u64);
}

/// The missing pages of a mapping.
#[derive(Debug)]
pub(super) struct MissingPages {
    faults: UserFault,
    /// The addresses of the mapping, of whole pages.
    range: Range<usize>,
    /// The page of the file at which it begins.
    first: u64,
    pages: Arc<dyn FilePages>,
}

impl MissingPages {
    /// Registers a mapping of a file from its page `first` on.
    ///
    /// # Errors
    /// When the kernel has no userfaultfd, or does not register the mapping.
    pub fn register(
        range: Range<usize>,
        first: u64,
        pages: &Arc<dyn FilePages>,
    ) -> io::Result<Self> {
        let faults = UserFault::of_this_process(MISSING_SHMEM | SIGBUS)?;
        faults.register(&(range.start as u64..range.end as u64))?;
        Ok(Self { faults, range, first, pages: Arc::clone(pages) })
    }

    /// Makes the page at an address if it is missing by right. Returns whether it is there now.
    /// Called by the handler too.
    pub fn bring(&self, address: usize) -> bool {
        let start = address & !(PAGE - 1);
        if !self.range.contains(&start) {
            return false;
        }
        let page = self.first + ((start - self.range.start) / PAGE) as u64;
        if !self.pages.lease_page(page) {
            return false;
        }
        let range = start as u64..(start + PAGE) as u64;
        let mut is_there = false;
        for _ in 0..ATTEMPTS_MAX {
            match self.faults.zero(&range) {
                Ok(_) => is_there = true,
                Err(error) => match Errno::from_io_error(&error) {
                    Some(Errno::EXIST) => is_there = true,
                    Some(Errno::AGAIN) => continue,
                    // Beyond the end of the file, or there is no memory.
                    _ => {}
                },
            }
            break;
        }
        let is_there = is_there && is_readable(start);
        self.pages.release_page(page);
        is_there
    }

    /// Makes the pages of a range of addresses that are missing by right, before the kernel
    /// accesses them. The caller has a lease on them. What cannot be made is an error of the
    /// access.
    pub fn make(&self, range: &Range<usize>) {
        let start = range.start & !(PAGE - 1);
        let end = range.end.next_multiple_of(PAGE).min(self.range.end);
        if start >= end {
            return;
        }
        // SAFETY: the range lies in a mapping of this process; its pages are only made accessible.
        let are_there = unsafe {
            let place = std::ptr::without_provenance_mut(start);
            libc::madvise(place, end - start, libc::MADV_POPULATE_READ) == 0
        };
        if !are_there {
            for address in (start..end).step_by(PAGE) {
                self.bring(address);
            }
        }
    }
}

/// Whether a page that exists can be accessed: it may be in swap and not come in, or be broken. A
/// touch of such a page would be the same `SIGBUS` again, for ever.
fn is_readable(start: usize) -> bool {
    // SAFETY: the page lies in a mapping of this process, and is only made accessible. The call may
    // be made in a handler of a signal.
    let result = unsafe {
        let place = std::ptr::without_provenance_mut(start);
        libc::madvise(place, PAGE, libc::MADV_POPULATE_READ)
    };
    // Kernels before 5.14 do not know the call.
    result == 0 || io::Error::last_os_error().raw_os_error() == Some(libc::EINVAL)
}
