//! Raw images and block devices, through `io_uring`.
//!
//! - `open`: opens the file, determines its capabilities, and takes the lock that excludes a second
//!   writer.
//! - `queue`: requests in flight; `slot`: one of them.
//! - `durability`: decides whether a success that the kernel reports is reliable. `fathom_image`
//!   records what a later daemon has to know of a failure.
//! - `keepsake`: what outlives the daemon, and tells the next one of a failure.
//! - `in_flight`: what does a part of that without one.
//! - `drain`: waits for requests past the new end of a file before it is truncated.

mod drain;
mod durability;
mod in_flight;
mod keepsake;
mod open;
mod queue;
mod slot;

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use fathom_block::{
    Backend, BackendOpenContext, BackendProblem, BackendQueue, Capabilities, ErrorKind, Geometry,
};
use parking_lot::{Mutex, MutexGuard};

use drain::Drain;
use durability::Durability;
pub use in_flight::{count_syncs_in_flight, read_syncs_in_flight};
pub use keepsake::{Keeper, Left, report_of_keepsake, set_keeper};
pub use open::{FileOptions, OpenError};
use queue::FileQueue;

/// The longest time that a truncation of the file waits for requests past the new end.
const DRAIN_TIME_MAX: Duration = Duration::from_secs(20);
/// The value of [`Shared::truncated_length`] for a file that is as long as its disk.
const NOT_TRUNCATED: u64 = u64::MAX;

/// A disk in a raw image or on a block device.
pub struct FileBackend {
    shared: Arc<Shared>,
}

/// The state that the queues of one file share.
struct Shared {
    file: File,
    /// The kernel's node of the device, if the file is another one: it has a lock, too.
    _node: Option<File>,
    capacity: AtomicU64,
    geometry: Geometry,
    capabilities: Capabilities,
    kind: FileKind,
    direct: bool,
    /// Whether its file system asks a server, for which the kernel's workers then wait.
    has_server: bool,
    /// Whether a write is a copy into the page cache, which usually does not wait for the storage.
    copies_writes: bool,
    /// The alignment of memory for direct I/O, in bytes; 1 for buffered I/O.
    memory_alignment: usize,
    durability: Durability,
    drain: Drain,
    /// Held while the length of the file is changed, or compared with the capacity.
    length: Mutex<()>,
    /// Whether the file had no name at the last [`Backend::inspect`].
    deleted: AtomicBool,
    /// The shortest length to which another process has truncated the file, in bytes, or
    /// [`NOT_TRUNCATED`].
    truncated_length: AtomicU64,
}

/// The kind of the open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FileKind {
    /// A file on a file system with a disk or a server.
    Regular,
    /// A file whose data is in the page cache (tmpfs): no operation blocks, and no flush is needed.
    InMemory,
    /// A block device.
    Device,
}

impl Shared {
    /// Records that another process has truncated the file to at most `length` bytes. The bytes
    /// past it are lost. If the disk accepted further writes, the file would grow again and read as
    /// zeroes there.
    fn record_truncation(&self, length: u64) {
        let is_shorter = length < self.truncated_length.fetch_min(length, Ordering::Relaxed);
        if is_shorter && self.capabilities.write {
            self.durability.poison(&self.file, libc::EIO);
        }
    }

    /// The current length of the file, in bytes.
    fn length(&self) -> io::Result<u64> {
        match self.kind {
            FileKind::Device => open::device_capacity(&self.file),
            FileKind::Regular | FileKind::InMemory => Ok(self.file.metadata()?.len()),
        }
    }

    fn changing_length(&self) -> MutexGuard<'_, ()> {
        self.length.lock()
    }

    /// Sets the length of the file and the size of the disk to `capacity` bytes.
    fn resize_file(&self, capacity: u64) -> Result<(), ErrorKind> {
        i64::try_from(capacity).map_err(|_| ErrorKind::OutOfRange)?;
        let before = self.capacity.load(Ordering::Relaxed);
        if capacity < before {
            // Before the wait, so that no new request writes past the new end.
            self.capacity.store(capacity, Ordering::Release);
            if !self.drain.wait(DRAIN_TIME_MAX) {
                self.capacity.store(before, Ordering::Release);
                tracing::error!("requests past the new end of the file do not complete");
                return Err(ErrorKind::Io);
            }
        }
        if let Err(error) = self.file.set_len(capacity) {
            self.capacity.store(before, Ordering::Release);
            return Err(ErrorKind::from_errno(error.raw_os_error().unwrap_or(libc::EIO)));
        }
        self.capacity.store(capacity, Ordering::Release);
        // The guest relies on the new size, so it has to survive a crash. The kernel may report
        // lost writes to this sync.
        self.file.sync_all().map_err(|error| {
            self.durability.poison(&self.file, error.raw_os_error().unwrap_or(libc::EIO));
            ErrorKind::Io
        })
    }
}

impl FileBackend {
    /// Opens the file of `options`. A file whose writes an earlier daemon has lost opens too, and
    /// the loss is among its [problems](Backend::problems).
    ///
    /// # Errors
    /// See [`OpenError`].
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

    fn open_queue(
        &self,
        context: &mut BackendOpenContext<'_>,
    ) -> io::Result<Box<dyn BackendQueue>> {
        Ok(Box::new(FileQueue::new(Arc::clone(&self.shared), context.reactor())?))
    }

    fn resize(&self, capacity: u64) -> Result<(), ErrorKind> {
        let shared = &self.shared;
        let _length = shared.changing_length();
        if shared.kind == FileKind::Device {
            // The size of a device cannot be set; take over its current size.
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
        let length = shared.truncated_length.load(Ordering::Relaxed);
        if length != NOT_TRUNCATED {
            problems.push(BackendProblem::CutShort { length, capacity: self.capacity() });
        }
        problems
    }

    fn losses(&self) -> u64 {
        self.shared.durability.generation()
    }

    fn inspect(&self) {
        let shared = &self.shared;
        // A change of the length checks it itself.
        let Some(_length) = shared.length.try_lock() else { return };
        if let Ok(length) = shared.length() {
            if length < self.capacity() {
                shared.record_truncation(length);
            } else if !shared.capabilities.write {
                shared.truncated_length.store(NOT_TRUNCATED, Ordering::Relaxed);
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
                "the file has {length} bytes, but the disk has {capacity}"
            )));
        }
        shared.durability.recover(&shared.file)?;
        shared.truncated_length.store(NOT_TRUNCATED, Ordering::Relaxed);
        Ok(())
    }
}
