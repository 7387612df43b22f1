//! Raw images and block devices, through `io_uring`.
//!
//! - `open`: what is opened, what it can do, the lock that keeps a second writer away.
//! - `queue`: requests in flight; `slot`: one of them.
//! - `durability`: whether a success of the kernel's may be believed; what a later daemon has to
//!   know of it is recorded by `fathom_image`.
//! - `drain`: what a cut of the file waits for.

mod drain;
mod durability;
mod open;
mod queue;
mod slot;

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use fathom_block::{Backend, BackendProblem, BackendQueue, Capabilities, ErrorKind, Geometry};
use fathom_reactor::Reactor;

use drain::Drain;
use durability::Durability;
pub use open::{FileOptions, OpenError};
use queue::FileQueue;

/// How long a cut of the file waits for requests that reach behind the new end.
const DRAIN_TIME_MAX: Duration = Duration::from_secs(20);
/// [`Shared::cut_length`] of a file that is as long as its disk.
const NOT_CUT: u64 = u64::MAX;

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
    durability: Durability,
    drain: Drain,
    /// Held while the length of the file is changed, or held against the capacity.
    length: Mutex<()>,
    /// The file has no name any more, as [`Backend::inspect`] saw it last.
    deleted: AtomicBool,
    /// A length of the file at which somebody else has cut it, in bytes, or [`NOT_CUT`].
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

impl Shared {
    /// Somebody else has cut the file to `length` bytes, or less than what is behind them would
    /// be read. What was written there is lost: were the disk to take further writes, the file
    /// would grow again and read as zeroes where it was cut.
    fn cut_to(&self, length: u64) {
        let news = length < self.cut_length.fetch_min(length, Ordering::Relaxed);
        if news && self.capabilities.write {
            self.durability.poison(&self.file, libc::EIO);
        }
    }

    /// The length of the file now, in bytes.
    fn length(&self) -> io::Result<u64> {
        match self.kind {
            FileKind::Device => open::device_capacity(&self.file),
            FileKind::Regular | FileKind::InMemory => Ok(self.file.metadata()?.len()),
        }
    }

    fn changing_length(&self) -> MutexGuard<'_, ()> {
        self.length.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the file the length `capacity`, in bytes, and the disk the size.
    fn resize_file(&self, capacity: u64) -> Result<(), ErrorKind> {
        i64::try_from(capacity).map_err(|_| ErrorKind::OutOfRange)?;
        let before = self.capacity.load(Ordering::Relaxed);
        if capacity < before {
            // First, so that nothing new is written there.
            self.capacity.store(capacity, Ordering::Release);
            if !self.drain.wait(DRAIN_TIME_MAX) {
                self.capacity.store(before, Ordering::Release);
                tracing::error!("requests behind the new end of the file do not end");
                return Err(ErrorKind::Io);
            }
        }
        if let Err(error) = self.file.set_len(capacity) {
            self.capacity.store(before, Ordering::Release);
            return Err(ErrorKind::from_errno(error.raw_os_error().unwrap_or(libc::EIO)));
        }
        self.capacity.store(capacity, Ordering::Release);
        // The new size is a promise to the guest: it has to survive a crash. The sync may be the
        // one that the kernel reports lost writes to.
        self.file.sync_all().map_err(|error| {
            self.durability.poison(&self.file, error.raw_os_error().unwrap_or(libc::EIO));
            ErrorKind::Io
        })
    }
}

impl FileBackend {
    /// Opens what `options` name. A file whose writes an earlier daemon has lost opens too, and
    /// says so among its [problems](Backend::problems).
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
        Ok(Box::new(FileQueue::new(Arc::clone(&self.shared), reactor)?))
    }

    fn resize(&self, capacity: u64) -> Result<(), ErrorKind> {
        let shared = &self.shared;
        let _length = shared.changing_length();
        if shared.kind == FileKind::Device {
            // The device has its own idea; take over what it says now.
            let actual = open::device_capacity(&shared.file).map_err(|_| ErrorKind::Io)?;
            if actual != capacity {
                return Err(ErrorKind::Unsupported);
            }
            shared.capacity.store(actual, Ordering::Release);
            return Ok(());
        }
        if !shared.capabilities.write {
            return Err(ErrorKind::ReadOnly);
        }
        if capacity % u64::from(shared.geometry.block_size) != 0 {
            return Err(ErrorKind::Misaligned);
        }
        if shared.durability.is_poisoned() {
            return Err(ErrorKind::Io);
        }
        shared.resize_file(capacity)
    }

    fn problems(&self) -> Vec<BackendProblem> {
        let shared = &self.shared;
        let mut problems = shared.durability.problems();
        if shared.deleted.load(Ordering::Relaxed) {
            let path = format!("/proc/{}/fd/{}", std::process::id(), shared.file.as_raw_fd());
            problems.push(BackendProblem::Deleted { path });
        }
        let length = shared.cut_length.load(Ordering::Relaxed);
        if length != NOT_CUT {
            problems.push(BackendProblem::CutShort { length, capacity: self.capacity() });
        }
        problems
    }

    fn inspect(&self) {
        let shared = &self.shared;
        // Whoever changes the length has an eye on it.
        let _length = match shared.length.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        if let Ok(length) = shared.length() {
            if length < self.capacity() {
                shared.cut_to(length);
            } else if !shared.capabilities.write {
                shared.cut_length.store(NOT_CUT, Ordering::Relaxed);
            }
        }
        if shared.kind != FileKind::Device {
            if let Ok(metadata) = shared.file.metadata() {
                shared.deleted.store(metadata.nlink() == 0, Ordering::Relaxed);
            }
        }
    }

    fn recover(&self) -> io::Result<()> {
        let shared = &self.shared;
        let _length = shared.changing_length();
        let (length, capacity) = (shared.length()?, self.capacity());
        if length < capacity {
            return Err(io::Error::other(format!(
                "the file has {length} bytes and the disk {capacity}"
            )));
        }
        shared.durability.recover(&shared.file)?;
        shared.cut_length.store(NOT_CUT, Ordering::Relaxed);
        Ok(())
    }
}
