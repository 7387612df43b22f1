//! The swap file: a file on a disk with the content of pages that have left, in slots of a page
//! each. Threads of its own read and write it, past the host's cache.
//!
//! A disk may hang. A thread that waits for it cannot be killed, and whatever it has open stays open
//! after its process's death: then the guard would not notice the death, and the next pager could
//! not begin. So each of these threads has a table of descriptors of its own, with nothing in it but
//! the file and the bell. The thread that writes holds the file's lock (`flock`): what a dead
//! pager has begun to write may arrive late, and nobody else writes before that.

#![expect(unsafe_code, reason = "a table of descriptors for each thread")]

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{self, ErrorKind, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use fathom_guest_memory::MemoryFile;
use parking_lot::{Condvar, Mutex};
use rustix::event::EventfdFlags;
use rustix::fs::{FlockOperation, flock};
use rustix::thread::{UnshareFlags, unshare_unsafe};

use super::{PAGE, Page, TMPFS, check_folder, invalid};

/// The threads that read: so many reads are under way at once.
const READERS: usize = 4;
/// The pause before the lock of the file is tried again.
const LOCK_PAUSE: Duration = Duration::from_millis(50);

/// A page, aligned as direct I/O needs it.
#[derive(Clone)]
#[repr(C, align(4096))]
pub(crate) struct Block(pub Page);

impl Block {
    /// One of zeroes.
    pub fn zeroed() -> Box<Self> {
        Box::new(Self([0; PAGE as usize]))
    }
}

/// Contents for slots that follow each other.
pub(super) struct Write {
    /// Distinguishes it from others.
    pub number: u64,
    /// The first slot.
    pub slot: u64,
    pub blocks: Vec<Block>,
}

/// What has been done.
pub(super) enum Completed {
    Read { ticket: u64, content: io::Result<Box<Block>> },
    Written { write: Write, result: io::Result<()> },
}

#[derive(Default)]
struct Work {
    reads: VecDeque<(u64, u64)>,
    write: Option<Write>,
    completed: Vec<Completed>,
    is_over: bool,
}

/// Where the file is, and which one it is: another one in its place is not used.
#[derive(Clone, Debug)]
pub(super) struct SwapPlace {
    pub path: PathBuf,
    pub file: MemoryFile,
}

struct Shared {
    place: SwapPlace,
    work: Mutex<Work>,
    has_read: Condvar,
    has_write: Condvar,
}

/// The file, with the threads that use it. They begin with the first read, and the first write.
pub(crate) struct SwapFile {
    shared: Arc<Shared>,
    /// Readable when something has been done.
    bell: OwnedFd,
    has_readers: bool,
    has_writer: bool,
}

impl std::fmt::Debug for SwapFile {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("SwapFile")
            .field("place", &self.shared.place)
            .finish_non_exhaustive()
    }
}

fn options() -> fs::OpenOptions {
    let mut options = File::options();
    options.read(true).write(true).mode(0o600);
    options.custom_flags(libc::O_DIRECT | libc::O_NOFOLLOW | libc::O_CLOEXEC);
    options
}

/// Makes the file of a VMM in a folder on a disk, with so many slots. It takes space as it is
/// written.
///
/// # Errors
/// When others may use the folder, it is in memory, or its file system has no direct I/O.
pub(super) fn create(folder: &Path, name: &str, slots: u64) -> io::Result<SwapPlace> {
    check_folder(folder)?;
    if rustix::fs::statfs(folder)?.f_type as u64 == TMPFS {
        return Err(invalid("the folder is in memory (tmpfs)"));
    }
    // Never that of another store: what a dead pager has begun to write may arrive late.
    let unique = fathom_guest_memory::published_now_ns();
    let path = folder.join(format!("{name}-{unique}.swap"));
    let file = options().create_new(true).open(&path).map_err(|error| match error.kind() {
        ErrorKind::InvalidInput => invalid("its file system has no direct I/O"),
        _ => error,
    })?;
    let made = file.set_len(slots * PAGE).and_then(|()| MemoryFile::of(&file));
    match made {
        Ok(file) => Ok(SwapPlace { path, file }),
        Err(error) => {
            let _ = fs::remove_file(&path);
            Err(error)
        }
    }
}

impl SwapFile {
    /// The file at a place, which need not be there now.
    ///
    /// # Errors
    /// When there are no more descriptors.
    pub fn new(place: SwapPlace) -> io::Result<Self> {
        let bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let (has_read, has_write) = (Condvar::new(), Condvar::new());
        let shared = Arc::new(Shared { place, work: Mutex::default(), has_read, has_write });
        Ok(Self { shared, bell, has_readers: false, has_writer: false })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.shared.place.path
    }

    /// Has a slot read.
    pub fn read(&mut self, ticket: u64, slot: u64) {
        if !self.has_readers {
            let started = (0..READERS).filter(|_| self.start("swap-read", read_all).is_ok());
            // One is enough.
            self.has_readers = started.count() > 0;
        }
        let mut work = self.shared.work.lock();
        if self.has_readers {
            work.reads.push_back((ticket, slot));
            self.shared.has_read.notify_one();
        } else {
            let content = Err(io::Error::other("no thread can be started"));
            work.completed.push(Completed::Read { ticket, content });
            ring(self.bell.as_fd());
        }
    }

    /// Has contents written. There must be no other write under way.
    pub fn write(&mut self, write: Write) {
        self.has_writer = self.has_writer || self.start("swap-write", write_all).is_ok();
        let mut work = self.shared.work.lock();
        if self.has_writer {
            work.write = Some(write);
            self.shared.has_write.notify_one();
        } else {
            let result = Err(io::Error::other("no thread can be started"));
            work.completed.push(Completed::Written { write, result });
            ring(self.bell.as_fd());
        }
    }

    /// What has been done since this was last asked.
    pub fn completed(&self) -> Vec<Completed> {
        // First: what is done later rings again.
        let _ = rustix::io::read(&self.bell, &mut [0; 8]);
        std::mem::take(&mut self.shared.work.lock().completed)
    }

    /// Starts a thread, and waits until it has nothing open any more but the bell.
    fn start(&self, name: &str, work: fn(&Shared, BorrowedFd<'_>)) -> io::Result<()> {
        let shared = Arc::clone(&self.shared);
        let (sender, receiver) = mpsc::sync_channel(1);
        let bell = self.bell.as_raw_fd();
        std::thread::Builder::new().name(name.into()).spawn(move || {
            let isolated = isolate(bell);
            let is_isolated = isolated.as_ref().map(|_| ()).map_err(io::Error::kind);
            let _ = sender.send(is_isolated);
            if let Ok(bell) = isolated {
                work(&shared, bell.as_fd());
            }
        })?;
        receiver.recv().map_err(io::Error::other)?.map_err(io::Error::from)
    }
}

impl AsFd for SwapFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

/// The threads end when they have done what is under way. They are not waited for.
impl Drop for SwapFile {
    fn drop(&mut self) {
        self.shared.work.lock().is_over = true;
        self.shared.has_read.notify_all();
        self.shared.has_write.notify_all();
    }
}

/// Gives this thread a table of descriptors of its own, with only `bell` in it.
fn isolate(bell: i32) -> io::Result<OwnedFd> {
    // SAFETY: from here on this thread uses no descriptor that it has not opened itself, but for
    // `bell`, which is open until the caller knows that this function has returned.
    unsafe { unshare_unsafe(UnshareFlags::FILES) }?;
    let number = bell as libc::c_uint;
    let others = [(0, number.checked_sub(1)), (number + 1, Some(libc::c_uint::MAX))];
    for (first, last) in others {
        let Some(last) = last else { continue };
        // SAFETY: the table is this thread's own, and nothing of this thread uses it.
        if unsafe { libc::close_range(first, last, 0) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    // SAFETY: it is open in the table of this thread, which has no other owner of it.
    Ok(unsafe { OwnedFd::from_raw_fd(bell) })
}

fn ring(bell: BorrowedFd<'_>) {
    let _ = rustix::io::write(bell, &1_u64.to_ne_bytes());
}

impl Shared {
    fn open(&self) -> io::Result<File> {
        let file = options().open(&self.place.path)?;
        let is_it = MemoryFile::of(&file)? == self.place.file;
        is_it.then_some(file).ok_or_else(|| invalid("another file is in its place"))
    }

    fn complete(&self, completed: Completed, bell: BorrowedFd<'_>) {
        self.work.lock().completed.push(completed);
        ring(bell);
    }
}

/// The life of a thread that reads.
fn read_all(shared: &Shared, bell: BorrowedFd<'_>) {
    let mut file = None;
    loop {
        let (ticket, slot) = {
            let mut work = shared.work.lock();
            loop {
                if work.is_over {
                    return;
                }
                if let Some(read) = work.reads.pop_front() {
                    break read;
                }
                shared.has_read.wait(&mut work);
            }
        };
        let content = read(shared, &mut file, slot);
        if content.is_err() {
            file = None;
        }
        shared.complete(Completed::Read { ticket, content }, bell);
    }
}

fn read(shared: &Shared, file: &mut Option<File>, slot: u64) -> io::Result<Box<Block>> {
    let file = match file {
        Some(file) => file,
        None => file.insert(shared.open()?),
    };
    let mut block = Block::zeroed();
    // A file that was cut off ends before.
    file.read_exact_at(&mut block.0, slot * PAGE)?;
    Ok(block)
}

/// The life of the thread that writes.
fn write_all(shared: &Shared, bell: BorrowedFd<'_>) {
    let mut file = None;
    loop {
        let write = {
            let mut work = shared.work.lock();
            loop {
                if work.is_over {
                    return;
                }
                if let Some(write) = work.write.take() {
                    break write;
                }
                shared.has_write.wait(&mut work);
            }
        };
        if file.is_none() {
            file = match locked(shared) {
                Ok(Some(file)) => Some(file),
                Ok(None) => return,
                Err(error) => {
                    shared.complete(Completed::Written { write, result: Err(error) }, bell);
                    continue;
                }
            };
        }
        let result = file.as_ref().map_or(Ok(()), |file| write_blocks(file, &write));
        if result.is_err() {
            file = None;
        }
        shared.complete(Completed::Written { write, result }, bell);
    }
}

/// The file, when nobody else writes it any more. `None` if the wait is not of use any more.
fn locked(shared: &Shared) -> io::Result<Option<File>> {
    let file = shared.open()?;
    while let Err(error) = flock(&file, FlockOperation::NonBlockingLockExclusive) {
        if error != rustix::io::Errno::WOULDBLOCK {
            return Err(error.into());
        }
        let mut work = shared.work.lock();
        if !work.is_over {
            shared.has_write.wait_for(&mut work, LOCK_PAUSE);
        }
        if work.is_over {
            return Ok(None);
        }
    }
    Ok(Some(file))
}

fn write_blocks(file: &File, write: &Write) -> io::Result<()> {
    let mut done = 0;
    while done < write.blocks.len() {
        let parts: Vec<IoSlice<'_>> =
            write.blocks[done..].iter().map(|block| IoSlice::new(&block.0)).collect();
        let offset = (write.slot + done as u64) * PAGE;
        match rustix::io::pwritev(file, &parts, offset) {
            // A part of a page is written again.
            Ok(bytes) if bytes >= PAGE as usize => done += bytes / PAGE as usize,
            Ok(_) => return Err(ErrorKind::WriteZero.into()),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
