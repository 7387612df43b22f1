//! Raw images and block devices, through `io_uring`.
//!
//! - `open`: what is opened, what it can do, the lock that keeps a second writer away.
//! - `queue`: requests in flight.

mod open;
mod queue;

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};

use fathom_block::{Backend, BackendProblem, BackendQueue, Capabilities, ErrorKind, Geometry};
use fathom_reactor::Reactor;

pub use open::{FileOptions, OpenError};
use queue::FileQueue;

/// A disk whose bytes are in a raw image or on a block device.
pub struct FileBackend {
    shared: Arc<Shared>,
}

/// What the queues of one file share.
struct Shared {
    file: File,
    capacity: AtomicU64,
    geometry: Geometry,
    capabilities: Capabilities,
    kind: FileKind,
    direct: bool,
    /// What the memory of direct I/O must be aligned to, in bytes; 1 for buffered I/O.
    memory_alignment: usize,
    /// A flush has failed: the kernel has dropped pages that the guest believes to be written, and
    /// would report the next flush as a success. From here on the disk only reads.
    poisoned: AtomicBool,
    /// The `errno` of the failure that poisoned.
    errno: AtomicI32,
    /// The file has no name any more, as [`Backend::inspect`] saw it last.
    deleted: AtomicBool,
    /// The length of the file, in bytes, where it was shorter than the disk at the last
    /// [`Backend::inspect`]; otherwise [`u64::MAX`].
    cut_length: AtomicU64,
}

/// What is behind the file descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FileKind {
    /// A file on a file system with a disk, or a server, beneath it.
    Regular,
    /// A file that lives in the page cache (tmpfs): nothing can block, nothing needs a flush.
    InMemory,
    /// A block device.
    Device,
}

impl FileBackend {
    /// Opens what `options` name.
    ///
    /// # Errors
    /// See [`OpenError`]: each says what to do next.
    pub fn open(options: &FileOptions) -> Result<Self, OpenError> {
        Ok(Self { shared: Arc::new(open::open(options)?) })
    }
}

impl Backend for FileBackend {
    fn name(&self) -> &'static str {
        match self.shared.kind {
            FileKind::Regular | FileKind::InMemory => "file",
            FileKind::Device => "device",
        }
    }

    fn capacity(&self) -> u64 {
        self.shared.capacity.load(Ordering::Relaxed)
    }

    fn geometry(&self) -> Geometry {
        self.shared.geometry
    }

    fn capabilities(&self) -> Capabilities {
        self.shared.capabilities
    }

    fn open_queue(&self, reactor: &mut Reactor) -> io::Result<Box<dyn BackendQueue>> {
        Ok(Box::new(FileQueue::new(Arc::clone(&self.shared), reactor)))
    }

    fn resize(&self, capacity: u64) -> Result<(), ErrorKind> {
        let shared = &self.shared;
        if shared.kind == FileKind::Device {
            // The device has its own idea; take over what it says now.
            let actual = open::device_capacity(&shared.file).map_err(|_| ErrorKind::Io)?;
            if actual != capacity {
                return Err(ErrorKind::Unsupported);
            }
            shared.capacity.store(actual, Ordering::Relaxed);
            return Ok(());
        }
        if !shared.capabilities.write {
            return Err(ErrorKind::ReadOnly);
        }
        if capacity % u64::from(shared.geometry.block_size) != 0 {
            return Err(ErrorKind::Misaligned);
        }
        let length = libc::off_t::try_from(capacity).map_err(|_| ErrorKind::OutOfRange)?;
        // SAFETY: a system call on our own descriptor.
        if unsafe { libc::ftruncate(shared.file.as_raw_fd(), length) } != 0 {
            let errno = io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
            return Err(ErrorKind::from_errno(errno));
        }
        // The new size is a promise to the guest: it has to survive a crash.
        shared.file.sync_all().map_err(|_| ErrorKind::Io)?;
        shared.capacity.store(capacity, Ordering::Relaxed);
        Ok(())
    }

    fn problems(&self) -> Vec<BackendProblem> {
        let shared = &self.shared;
        let mut problems = Vec::new();
        if shared.poisoned.load(Ordering::Acquire) {
            let errno = shared.errno.load(Ordering::Relaxed);
            problems.push(BackendProblem::WritesLost { errno, earlier: false });
        }
        if shared.deleted.load(Ordering::Relaxed) {
            let path = format!("/proc/{}/fd/{}", std::process::id(), shared.file.as_raw_fd());
            problems.push(BackendProblem::Deleted { path });
        }
        let (length, capacity) = (shared.cut_length.load(Ordering::Relaxed), self.capacity());
        if length < capacity {
            problems.push(BackendProblem::CutShort { length, capacity });
        }
        problems
    }

    fn inspect(&self) {
        let shared = &self.shared;
        if shared.kind == FileKind::Device {
            return;
        }
        let Ok(metadata) = shared.file.metadata() else { return };
        let length = metadata.len();
        let cut = length < shared.capacity.load(Ordering::Relaxed);
        shared.deleted.store(metadata.nlink() == 0, Ordering::Relaxed);
        shared.cut_length.store(if cut { length } else { u64::MAX }, Ordering::Relaxed);
    }
}
