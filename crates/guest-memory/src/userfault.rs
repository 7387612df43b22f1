//! A userfaultfd: the faults of a process's memory, and what the kernel does about them when asked.
//!
//! The crate `userfaultfd` needs libclang for a build, and an older `nix`. So the five calls are
//! here, with the types of `linux-raw-sys`, which `rustix` uses too.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use linux_raw_sys::general::{
    _UFFDIO_POISON, UFFD_API, UFFD_EVENT_PAGEFAULT, UFFD_PAGEFAULT_FLAG_WP, UFFDIO,
    UFFDIO_COPY_MODE_WP, UFFDIO_REGISTER_MODE_MISSING, UFFDIO_REGISTER_MODE_WP, uffdio_api,
    uffdio_copy, uffdio_poison, uffdio_range, uffdio_register, uffdio_writeprotect,
    uffdio_zeropage,
};
use linux_raw_sys::ioctl::{
    UFFDIO_API, UFFDIO_COPY, UFFDIO_REGISTER, UFFDIO_UNREGISTER, UFFDIO_WAKE, UFFDIO_WRITEPROTECT,
    UFFDIO_ZEROPAGE,
};
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::ioctl::{Opcode, Setter, Updater, opcode};

/// Faults of memory in files (`UFFD_FEATURE_MISSING_SHMEM`).
pub const MISSING_SHMEM: u64 = linux_raw_sys::general::UFFD_FEATURE_MISSING_SHMEM as u64;
/// Faults of writes to pages that are protected, in files too (`UFFD_FEATURE_PAGEFAULT_FLAG_WP`,
/// `UFFD_FEATURE_WP_HUGETLBFS_SHMEM`).
pub const PROTECT: u64 = (linux_raw_sys::general::UFFD_FEATURE_PAGEFAULT_FLAG_WP
    | linux_raw_sys::general::UFFD_FEATURE_WP_HUGETLBFS_SHMEM) as u64;
/// A fault is a SIGBUS, or `EFAULT` of a system call (`UFFD_FEATURE_SIGBUS`).
pub const SIGBUS: u64 = linux_raw_sys::general::UFFD_FEATURE_SIGBUS as u64;
/// `USERFAULTFD_IOC_NEW`: makes a userfaultfd of the calling process, by an open
/// `/dev/userfaultfd`.
pub const NEW: u64 = (UFFDIO as u64) << 8;
/// `UFFDIO_POISON`.
const POISON: Opcode = opcode::read_write::<uffdio_poison>(UFFDIO as u8, _UFFDIO_POISON as u8);
/// `UFFD_USER_MODE_ONLY`.
const USER_MODE_ONLY: libc::c_int = 1;
/// `UFFDIO_WRITEPROTECT_MODE_WP`.
const PROTECTED: u64 = 1;
/// The bytes of a message (`struct uffd_msg`).
const MESSAGE_BYTES: usize = 32;
/// The most messages that one call reads.
const MESSAGES_MAX: usize = 64;

/// The features of a userfaultfd on which its interface was never agreed.
const NOT_INITIALISED: u64 = 0;

/// What a thread has met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageFault {
    /// The address, in the registered process.
    pub address: u64,
    /// Whether it is a write to a page that is protected, rather than a missing page.
    pub is_protection: bool,
}

/// An open userfaultfd, of this process or of another.
#[derive(Debug)]
pub struct UserFault {
    file: OwnedFd,
    can_protect: bool,
}

impl UserFault {
    /// A userfaultfd that was made elsewhere, and was perhaps in use already. Agrees on the
    /// interface if nobody has, with the protection of pages if the kernel has it.
    ///
    /// # Errors
    /// When `file` is something else, or its interface was agreed on without `features`.
    pub fn adopt(file: OwnedFd, features: u64) -> io::Result<Self> {
        let mut agreed = agreed_features(file.as_fd())?;
        for features in [features | PROTECT, features] {
            if agreed != NOT_INITIALISED {
                break;
            }
            let mut request = uffdio_api { api: UFFD_API.into(), features, ioctls: 0 };
            // SAFETY: the type is that of UFFDIO_API.
            let done = unsafe { update::<{ UFFDIO_API as Opcode }, _>(file.as_fd(), &mut request) };
            match done {
                Ok(()) => agreed = features,
                // It does not have all of them; nothing was agreed.
                Err(error) if Errno::from_io_error(&error) == Some(Errno::INVAL) => {}
                Err(error) => return Err(error),
            }
        }
        if agreed & features != features {
            return Err(io::Error::other(format!("its features are {agreed:#x}")));
        }
        Ok(Self { file, can_protect: agreed & PROTECT == PROTECT })
    }

    /// Whether pages can be protected.
    pub fn can_protect(&self) -> bool {
        self.can_protect
    }

    /// A userfaultfd of this process for faults of its own code, which needs no right. With
    /// [`SIGBUS`] among the features, system calls that touch a missing page fail too.
    ///
    /// # Errors
    /// When the kernel has none, or the process may not make one.
    pub fn of_this_process(features: u64) -> io::Result<Self> {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | USER_MODE_ONLY;
        // SAFETY: the argument is a value; the result is a new descriptor, which nothing else owns.
        let file = unsafe {
            use std::os::fd::FromRawFd;
            let made = libc::syscall(libc::SYS_userfaultfd, flags);
            if made < 0 {
                return Err(io::Error::last_os_error());
            }
            OwnedFd::from_raw_fd(made as i32)
        };
        Self::adopt(file, features)
    }

    /// A userfaultfd of this process, by an open `/dev/userfaultfd`.
    ///
    /// # Errors
    /// Those of the device, and as those of [`adopt`](Self::adopt).
    pub fn own(device: BorrowedFd<'_>, features: u64) -> io::Result<Self> {
        // SAFETY: the argument of USERFAULTFD_IOC_NEW is a value; the result is a new descriptor,
        // which nothing else owns.
        let file = unsafe {
            use std::os::fd::{AsRawFd, FromRawFd};
            let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
            let made = libc::ioctl(device.as_raw_fd(), NEW, flags);
            if made < 0 {
                return Err(io::Error::last_os_error());
            }
            OwnedFd::from_raw_fd(made)
        };
        Self::adopt(file, features)
    }

    /// Has the faults of missing pages in `range` reported from now on, and those of pages that are
    /// protected later, if it can protect them.
    ///
    /// # Errors
    /// `EBUSY` if another userfaultfd has a part of it.
    pub fn register(&self, range: &Range<u64>) -> io::Result<()> {
        let protect = if self.can_protect { UFFDIO_REGISTER_MODE_WP } else { 0 };
        let mode = u64::from(UFFDIO_REGISTER_MODE_MISSING | protect);
        let mut request = uffdio_register { range: raw(range), mode, ioctls: 0 };
        // SAFETY: the type is that of UFFDIO_REGISTER. It changes no byte of the memory.
        unsafe { update::<{ UFFDIO_REGISTER as Opcode }, _>(self.as_fd(), &mut request) }
    }

    /// Leaves the faults of `range` to the kernel again, and lets threads that wait for one go on.
    ///
    /// # Errors
    /// When nothing, or something else, is mapped there.
    pub fn unregister(&self, range: &Range<u64>) -> io::Result<()> {
        // SAFETY: the type is that of UFFDIO_UNREGISTER. It changes no byte of the memory.
        unsafe { set::<{ UFFDIO_UNREGISTER as Opcode }>(self.as_fd(), raw(range)) }
    }

    /// Lets threads that wait for a page of `range` try again.
    ///
    /// # Errors
    /// `EINVAL` if the range is not of whole pages.
    pub fn wake(&self, range: &Range<u64>) -> io::Result<()> {
        // SAFETY: the type is that of UFFDIO_WAKE. It changes no byte of the memory.
        unsafe { set::<{ UFFDIO_WAKE as Opcode }>(self.as_fd(), raw(range)) }
    }

    /// Protects `range` against writes by its process, which then wait; or ends this, and lets
    /// threads go on that wait. It changes no page, and brings none in.
    ///
    /// # Errors
    /// `EAGAIN` if the process changes its mappings at this moment; `ENOENT` if the range is not
    /// registered.
    pub fn protect(&self, range: &Range<u64>, is_protected: bool) -> io::Result<()> {
        let mode = if is_protected { PROTECTED } else { 0 };
        let mut request = uffdio_writeprotect { range: raw(range), mode };
        // SAFETY: the type is that of UFFDIO_WRITEPROTECT. It changes no byte of the memory.
        unsafe { update::<{ UFFDIO_WRITEPROTECT as Opcode }, _>(self.as_fd(), &mut request) }
    }

    /// Puts zeroes into the missing pages at the beginning of `range`, up to the first page that is
    /// not missing, and lets threads go on that wait for them. Returns the bytes that it has put.
    ///
    /// # Errors
    /// `EEXIST` if the first page is not missing; `ENOENT` if the range is not registered; `ESRCH`
    /// if the process has ended.
    pub fn zero(&self, range: &Range<u64>) -> io::Result<u64> {
        let mut request = uffdio_zeropage { range: raw(range), mode: 0, zeropage: 0 };
        // SAFETY: the type is that of UFFDIO_ZEROPAGE. The kernel changes only pages that do not
        // exist.
        let done =
            unsafe { update::<{ UFFDIO_ZEROPAGE as Opcode }, _>(self.as_fd(), &mut request) };
        match (done, request.zeropage) {
            (_, bytes) if bytes > 0 => Ok(bytes as u64),
            (Err(error), _) => Err(error),
            (Ok(()), _) => Err(Errno::AGAIN.into()),
        }
    }

    /// Puts `content` at `address`, of whole pages, where all pages are missing, and protects them
    /// against writes. Threads go on that wait for them; those that write wait again.
    ///
    /// # Errors
    /// `EEXIST` if a page is not missing; `ENOENT` if the range is not registered; `ESRCH` if the
    /// process has ended; `ENOMEM` if its memory group has no room; `EAGAIN` if it changes its
    /// mappings at this moment.
    pub fn copy_protected(&self, address: u64, content: &[u8]) -> io::Result<()> {
        let mut request = uffdio_copy {
            dst: address,
            src: content.as_ptr() as u64,
            len: content.len() as u64,
            mode: u64::from(UFFDIO_COPY_MODE_WP),
            copy: 0,
        };
        // SAFETY: the type is that of UFFDIO_COPY. The kernel reads `content`, and changes only
        // pages that do not exist.
        unsafe { update::<{ UFFDIO_COPY as Opcode }, _>(self.as_fd(), &mut request) }
    }

    /// Makes missing pages of `range` fail: a thread that touches one gets a `SIGBUS`, as if its
    /// memory were broken.
    ///
    /// # Errors
    /// `EINVAL` if the kernel cannot (before Linux 6.6), and as
    /// [`copy_protected`](Self::copy_protected).
    pub fn poison(&self, range: &Range<u64>) -> io::Result<()> {
        let mut request = uffdio_poison { range: raw(range), mode: 0, updated: 0 };
        // SAFETY: the type is that of UFFDIO_POISON. The kernel changes only pages that do not
        // exist.
        unsafe { update::<POISON, _>(self.as_fd(), &mut request) }
    }

    /// Whether a fault has occurred that nobody has read.
    pub fn has_faults(&self) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let mut polled = [PollFd::new(&self.file, PollFlags::IN)];
        poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0)
    }

    /// Reads the faults that have occurred, without waiting: calls `each` with them.
    ///
    /// # Errors
    /// Those of the descriptor.
    pub fn faults(&self, mut each: impl FnMut(PageFault)) -> io::Result<()> {
        let mut bytes = [0_u8; MESSAGE_BYTES * MESSAGES_MAX];
        let length = match rustix::io::read(&self.file, &mut bytes) {
            Ok(length) => length,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        for message in bytes[..length].chunks_exact(MESSAGE_BYTES) {
            if u32::from(message[0]) == UFFD_EVENT_PAGEFAULT {
                let word = |at: usize| message[at..at + 8].try_into().expect("8 bytes");
                let flags = u64::from_ne_bytes(word(8));
                each(PageFault {
                    address: u64::from_ne_bytes(word(16)),
                    is_protection: flags & u64::from(UFFD_PAGEFAULT_FLAG_WP) != 0,
                });
            }
        }
        Ok(())
    }
}

impl AsFd for UserFault {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// An open `/dev/userfaultfd`.
///
/// # Errors
/// When there is none, or this user may not open it.
pub fn open_device() -> io::Result<OwnedFd> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    Ok(rustix::fs::open("/dev/userfaultfd", flags, rustix::fs::Mode::empty())?)
}

/// The features that were agreed on, as the kernel shows them; [`NOT_INITIALISED`] if none were.
fn agreed_features(file: BorrowedFd<'_>) -> io::Result<u64> {
    use std::io::Read;
    use std::os::fd::AsRawFd;
    let mut text = String::new();
    File::open(format!("/proc/self/fdinfo/{}", file.as_raw_fd()))?
        .take(4096)
        .read_to_string(&mut text)?;
    let line = text.lines().find_map(|line| line.strip_prefix("API:"));
    let word = line.and_then(|line| line.trim().split(':').nth(1));
    let features = word.and_then(|word| u64::from_str_radix(word, 16).ok());
    features.ok_or_else(|| io::Error::other("it is not a userfaultfd"))
}

fn raw(range: &Range<u64>) -> uffdio_range {
    uffdio_range { start: range.start, len: range.end - range.start }
}

/// A call of ioctl that reads and writes its argument.
///
/// # Safety
/// `OPCODE` has to be a call on a userfaultfd, and `T` the type of its argument.
unsafe fn update<const OPCODE: Opcode, T>(file: BorrowedFd<'_>, value: &mut T) -> io::Result<()> {
    // SAFETY: as the caller promises.
    unsafe { Ok(rustix::ioctl::ioctl(file, Updater::<OPCODE, T>::new(value))?) }
}

/// A call of ioctl that reads a range.
///
/// # Safety
/// `OPCODE` has to be a call on a userfaultfd, and its argument a range.
unsafe fn set<const OPCODE: Opcode>(file: BorrowedFd<'_>, range: uffdio_range) -> io::Result<()> {
    // SAFETY: as the caller promises.
    unsafe { Ok(rustix::ioctl::ioctl(file, Setter::<OPCODE, uffdio_range>::new(range))?) }
}
