//! The swap file: a file on a disk with the content of pages that have left, in slots of a page
//! each. Threads of its own read and write it, past the host's cache.
//!
//! A disk may hang, so these threads have nothing open but the file and the bell
//! ([`isolate`]). The thread that writes holds the file's lock (`flock`): what a dead pager has
//! begun to write may arrive late, and nobody else writes before that.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{self, ErrorKind, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use fathom_guest_memory::MemoryFile;
use parking_lot::{Condvar, Mutex};
use rustix::event::EventfdFlags;
use rustix::fs::{FlockOperation, flock};

use super::{PAGE, Page, TMPFS, check_folder, invalid};
use crate::isolate;

/// The threads that read: so many reads are under way at once.
const READERS: usize = 4;
/// For how long the disk is waited for when the file is made or removed.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(2);
/// File systems on which a write may arrive after the death of who has begun it and has given up
/// the lock: NFS, SMB (three of them), 9P, Ceph.
const REMOTE: [u64; 6] = [0x6969, 0x517b, 0xff53_4d42, 0xfe53_4d42, 0x0102_1997, 0x00c3_6400];
/// The pause before the lock of the file is tried again.
const LOCK_PAUSE: Duration = Duration::from_millis(50);

/// A page, aligned as direct I/O needs it.
#[derive(Clone, Debug)]
#[repr(C, align(4096))]
pub(crate) struct DirectPage(pub Page);

impl DirectPage {
    /// One of zeroes.
    pub fn zeroed() -> Box<Self> {
        Box::new(Self([0; PAGE as usize]))
    }
}

/// Contents for slots, in ascending order.
pub(super) struct Write {
    /// Distinguishes it from others.
    pub number: u64,
    pub blocks: Vec<(u64, DirectPage)>,
}

/// What has been done.
pub(super) enum Completed {
    Read { ticket: u64, content: io::Result<Box<DirectPage>> },
    Written { write: Write, result: io::Result<()> },
}

#[derive(Default)]
struct Work {
    /// A ticket and a slot each: for somebody who waits, and for nobody.
    reads: VecDeque<(u64, u64)>,
    reads_for_nobody: VecDeque<(u64, u64)>,
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

/// Makes the file of a VMM, with the name `name` and what makes it unique, in a folder on a disk,
/// with so many slots. It takes space as it is written. Files of earlier stores of the VMM are
/// removed.
///
/// # Errors
/// When others may use the folder, it is in memory or on another host, its file system has no
/// direct I/O, or the disk does not answer.
pub(super) fn create(folder: &Path, name: &str, slots: u64) -> io::Result<SwapPlace> {
    let (folder, name) = (folder.to_owned(), name.to_owned());
    isolate::within("swap-create", ANSWER_TIME_MAX, move || create_now(&folder, &name, slots))
}

fn create_now(folder: &Path, name: &str, slots: u64) -> io::Result<SwapPlace> {
    check_folder(folder)?;
    match rustix::fs::statfs(folder)?.f_type as u64 {
        TMPFS => return Err(invalid("the folder is in memory (tmpfs)")),
        kind if REMOTE.contains(&kind) => return Err(invalid("the folder is on another host")),
        _ => {}
    }
    for entry in fs::read_dir(folder)?.flatten() {
        let other = entry.file_name().to_string_lossy().into_owned();
        let rest = other.strip_prefix(name).and_then(|rest| rest.strip_suffix(".swap"));
        if rest.is_some_and(|rest| rest.starts_with('-')) {
            let _ = fs::remove_file(entry.path());
        }
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

/// Removes a file. If that takes long, it goes on.
pub(super) fn remove(path: &Path) {
    let path = path.to_owned();
    let _ = isolate::within("swap-remove", ANSWER_TIME_MAX, move || fs::remove_file(path));
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

    /// Has a slot read: later than others if it is `for_nobody`.
    pub fn read(&mut self, ticket: u64, slot: u64, for_nobody: bool) {
        if !self.has_readers {
            let started = (0..READERS).filter(|_| self.start("swap-read", read_all).is_ok());
            // One is enough.
            self.has_readers = started.count() > 0;
        }
        let mut work = self.shared.work.lock();
        if self.has_readers {
            let Work { reads, reads_for_nobody, .. } = &mut *work;
            let queue = if for_nobody { reads_for_nobody } else { reads };
            queue.push_back((ticket, slot));
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

    /// Starts a thread.
    fn start(&self, name: &str, work: fn(&Shared, BorrowedFd<'_>)) -> io::Result<()> {
        let shared = Arc::clone(&self.shared);
        isolate::spawn(name, Some(self.bell.as_fd()), move |bell| {
            if let Some(bell) = bell {
                work(&shared, bell.as_fd());
            }
        })?;
        Ok(())
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
                let next = work.reads.pop_front();
                if let Some(read) = next.or_else(|| work.reads_for_nobody.pop_front()) {
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

fn read(shared: &Shared, file: &mut Option<File>, slot: u64) -> io::Result<Box<DirectPage>> {
    let file = match file {
        Some(file) => file,
        None => file.insert(shared.open()?),
    };
    let mut block = DirectPage::zeroed();
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
    for run in write.blocks.chunk_by(|(slot, _), (next, _)| slot + 1 == *next) {
        let mut done = 0;
        while done < run.len() {
            let rest = &run[done..];
            let parts: Vec<IoSlice<'_>> =
                rest.iter().map(|(_, block)| IoSlice::new(&block.0)).collect();
            match rustix::io::pwritev(file, &parts, rest[0].0 * PAGE) {
                // A part of a page is written again.
                Ok(bytes) if bytes >= PAGE as usize => done += bytes / PAGE as usize,
                Ok(_) => return Err(ErrorKind::WriteZero.into()),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
    Ok(())
}
