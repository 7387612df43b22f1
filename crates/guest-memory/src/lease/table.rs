//! The table of words: its file, and both sides of it.

use std::fs::{self, File, Permissions};
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{FallocateFlags, fallocate};

use crate::mapping::{Mapping, MemoryOwner};

use super::folder::{self, TableFolder, TableOwner};
use super::word::PageWord;

/// The most processes that share a guest's memory with a pager.
pub const HOLDERS: usize = 2;

/// `fathomLT`, and the version of the layout.
const MAGIC: u64 = 0x544c_6d6f_6874_6166;
/// 1 was one file for each file of memory, without a folder.
const VERSION: u64 = 2;
/// The numbers of 64 bits before the first word: one page.
pub(super) const HEADER: usize = 512;
/// How often a word is changed that others change at the same time. Each failure is a success of
/// somebody else, but a process that does nothing else must not keep others from their work.
const ATTEMPTS_MAX: u32 = 1 << 16;
/// The largest file of guest memory that has a table: 16 TiB, as a VMM may announce.
const PAGES_MAX: u64 = 16 << 28;

/// Numbers of the header.
const AT_MAGIC: usize = 0;
const AT_VERSION: usize = 1;
const AT_DEVICE: usize = 2;
const AT_INODE: usize = 3;
const AT_PAGES: usize = 4;
/// The process of each holder; 0 for none.
const AT_HOLDERS: usize = 8;
/// How far a holder is: [`LEASES`] or [`EVICTION`].
const AT_READY: usize = 16;
/// Counts what holders have asked for: a futex.
const AT_WISHES: usize = 40;
/// From 64 on are the pager's figures (`figures.rs`). From here on are the pages that each holder
/// wants (`wanted.rs`).
const AT_WANTED: usize = 128;
/// How many ranges of pages a holder can ask for until the pager looks.
const WANTED_SLOTS: usize = 128;
/// The low bits of a range that has been asked for: how many pages. Those above: the first one.
const WANTED_COUNT_BITS: u32 = 16;
const _: () = assert!(AT_WANTED + HOLDERS * WANTED_SLOTS <= HEADER);
/// All accesses of a holder take leases.
const LEASES: u64 = 1;
/// The same, and it touches no page that is away: its mappings are registered, and it has no
/// others.
/// 2 and 3 were those of versions that do not wake the pager, or otherwise.
const EVICTION: u64 = 4;

/// A file of guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MemoryFile {
    /// Its device.
    pub device: u64,
    /// Its inode.
    pub inode: u64,
}

impl MemoryFile {
    /// The file that is open.
    ///
    /// # Errors
    /// Those of the descriptor.
    pub fn of(file: &File) -> io::Result<Self> {
        let found = file.metadata()?;
        Ok(Self { device: found.dev(), inode: found.ino() })
    }
}

/// What the header of a memory file's table has: numbers, and their places.
pub(super) fn expected(memory: MemoryFile) -> [(usize, u64); 4] {
    [(AT_MAGIC, MAGIC), (AT_VERSION, VERSION), (AT_DEVICE, memory.device), (AT_INODE, memory.inode)]
}

/// A mapped table.
#[derive(Debug)]
pub struct LeaseTable {
    file: File,
    map: Mapping,
    owner: Arc<MemoryOwner>,
    pages: u64,
}

impl LeaseTable {
    fn map(file: File, pages: u64) -> io::Result<Self> {
        let owner = Arc::new(MemoryOwner::new(None, None));
        let map = Mapping::new(&file, 0, (HEADER as u64 + pages) * 8, &owner)?;
        Ok(Self { file, map, owner, pages })
    }

    /// The table of a memory file of at most `pages_max` pages; `None` if there is none.
    ///
    /// # Errors
    /// When there is a file that is no such table, or it cannot be used.
    pub(super) fn open(
        folder: &Path,
        memory: MemoryFile,
        pages_max: u64,
    ) -> io::Result<Option<Self>> {
        let path = TableFolder::of(folder, memory).table();
        let mut options = File::options();
        options.read(true).write(true).custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC);
        let file = match options.open(&path) {
            Ok(file) => file,
            Err(error) => {
                // Without a free descriptor, a file that does not exist is not found either.
                // A file in the place of its folder is a table of an earlier version.
                let found = fs::symlink_metadata(&path).map_err(|error| error.kind());
                return match found {
                    Err(ErrorKind::NotFound) => Ok(None),
                    Err(ErrorKind::NotADirectory) => Err(folder::of_earlier_version(&path)),
                    _ => Err(error),
                };
            }
        };
        let words = (file.metadata()?.len() / 8).saturating_sub(HEADER as u64);
        let table = Self::map(file, words.min(PAGES_MAX).min(pages_max))?;
        let is_valid = expected(memory).iter().all(|(at, value)| table.number(*at) == *value);
        if !is_valid || table.number(AT_PAGES) > table.pages {
            let text = format!("{} is no table of leases of this version", path.display());
            return Err(io::Error::new(ErrorKind::InvalidData, text));
        }
        let pages = table.number(AT_PAGES);
        Ok(Some(Self { pages, ..table }))
    }

    /// Makes one in a new folder, in place of any other.
    fn create(
        folder: &Path,
        memory: MemoryFile,
        pages: u64,
        owner: TableOwner,
    ) -> io::Result<Self> {
        if pages > PAGES_MAX {
            return Err(io::Error::new(ErrorKind::InvalidInput, "the memory is too large"));
        }
        let place = TableFolder::of(folder, memory);
        let part = place.begin(owner)?;
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
            .open(part.table())?;
        // Of whoever may use the folder.
        file.set_permissions(Permissions::from_mode(0o666))?;
        // All of it, so that no access fails later for lack of space.
        fallocate(&file, FallocateFlags::empty(), 0, (HEADER as u64 + pages) * 8)?;
        let table = Self::map(file, pages)?;
        for (at, value) in [
            (AT_DEVICE, memory.device),
            (AT_INODE, memory.inode),
            (AT_PAGES, pages),
            (AT_VERSION, VERSION),
            (AT_MAGIC, MAGIC),
        ] {
            table.set_number(at, value);
        }
        place.complete(&part)?;
        Ok(table)
    }

    fn number(&self, at: usize) -> u64 {
        self.map.access().load_u64(at, Ordering::Acquire)
    }

    pub(super) fn set_number(&self, at: usize, value: u64) {
        if let Some(cell) = self.map.access().u64s().get(at) {
            cell.store(value, Ordering::Release);
        }
    }

    /// The number of pages.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// Whether the table's memory is lost: its words mean nothing any more.
    pub fn is_lost(&self) -> bool {
        self.owner.is_lost()
    }

    /// Distinguishes it from other tables.
    pub(super) fn identity(&self) -> Option<MemoryFile> {
        MemoryFile::of(&self.file).ok()
    }

    /// Changes the word of a page in one step. Returns the new word, or the one that `change` did
    /// not want to change. A page outside the table has none.
    ///
    /// # Errors
    /// The word that was not changed; a leased one for a page outside the table, and if others
    /// change it without end.
    pub fn change(
        &self,
        page: u64,
        change: impl Fn(PageWord) -> Option<PageWord>,
    ) -> Result<PageWord, PageWord> {
        let outside = PageWord(u64::MAX);
        if page >= self.pages {
            return Err(outside);
        }
        let access = self.map.access();
        let cell: &AtomicU64 = access.u64s().get(HEADER + page as usize).ok_or(outside)?;
        let mut now = PageWord(cell.load(Ordering::Acquire));
        for _ in 0..ATTEMPTS_MAX {
            let Some(next) = change(now) else { return Err(now) };
            let exchanged =
                cell.compare_exchange_weak(now.0, next.0, Ordering::SeqCst, Ordering::Acquire);
            match exchanged {
                Ok(_) => return Ok(next),
                Err(other) => now = PageWord(other),
            }
        }
        Err(outside)
    }

    /// The word of a page; a leased one for a page outside the table.
    pub fn word(&self, page: u64) -> PageWord {
        self.change(page, |_| None).unwrap_or_else(|word| word)
    }

    /// Changes all words that are not 0.
    fn change_all(&self, change: impl Fn(PageWord) -> PageWord) {
        for page in 0..self.pages {
            let _ = self.change(page, |word| Some(change(word)).filter(|next| *next != word));
        }
    }

    /// Locks the place of a holder as long as the table is open. The kernel gives it back at the
    /// holder's death. Returns false if another has it.
    fn lock(&self, holder: usize, kind: i32) -> io::Result<bool> {
        // SAFETY: an all-zero structure is valid; `l_pid` has to be 0.
        let mut lock: libc::flock = unsafe { std::mem::zeroed() };
        lock.l_type = kind as libc::c_short;
        lock.l_whence = libc::SEEK_SET as libc::c_short;
        lock.l_start = holder as libc::off_t;
        lock.l_len = 1;
        // SAFETY: the structure outlives the call.
        let result =
            unsafe { libc::fcntl(self.file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) };
        if result == 0 {
            return Ok(true);
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EAGAIN | libc::EACCES) => Ok(false),
            _ => Err(error),
        }
    }

    /// Takes the place of a holder and gives back what a dead one had only to read.
    pub(super) fn take_place(&self) -> io::Result<Option<usize>> {
        for holder in 0..HOLDERS {
            if self.lock(holder, libc::F_WRLCK)? {
                self.bury(holder);
                self.set_number(AT_HOLDERS + holder, u64::from(std::process::id()));
                return Ok(Some(holder));
            }
        }
        Ok(None)
    }

    /// The caller has the lock.
    fn bury(&self, holder: usize) {
        self.set_number(AT_READY + holder, 0);
        self.set_number(AT_HOLDERS + holder, 0);
        self.change_all(|word| word.give_back(holder));
    }

    /// Asks for pages of which the words say that they are wanted, in the `turn`-th slot of a
    /// holder. What the pager has not read there is lost, and asked for again.
    pub(super) fn ask(&self, holder: usize, turn: usize, pages: &Range<u64>) {
        let most = (1 << WANTED_COUNT_BITS) - 1;
        let count = pages.end.saturating_sub(pages.start).min(most);
        let slot = AT_WANTED + holder % HOLDERS * WANTED_SLOTS + turn % WANTED_SLOTS;
        if count > 0 && pages.start < PAGES_MAX {
            self.set_number(slot, pages.start << WANTED_COUNT_BITS | count);
        }
    }

    /// The pages for which holders have asked, which may be any. Each request is returned once.
    pub fn take_asked(&self, mut each: impl FnMut(Range<u64>)) {
        let access = self.map.access();
        let slots = access.u64s().get(AT_WANTED..AT_WANTED + HOLDERS * WANTED_SLOTS);
        for slot in slots.unwrap_or_default() {
            // Most are empty, and need not be written.
            let found =
                if slot.load(Ordering::Relaxed) == 0 { 0 } else { slot.swap(0, Ordering::SeqCst) };
            let (first, count) =
                (found >> WANTED_COUNT_BITS, found & ((1 << WANTED_COUNT_BITS) - 1));
            if count > 0 {
                each(first..first + count);
            }
        }
    }

    /// How often holders have asked for something; the lower half of a number.
    pub(super) fn wishes(&self) -> u32 {
        self.number(AT_WISHES) as u32
    }

    /// Wakes all who [wait](Self::await_wish).
    pub(super) fn wish(&self) {
        let access = self.map.access();
        let Some(cell) = access.u64s().get(AT_WISHES) else { return };
        cell.fetch_add(1, Ordering::SeqCst);
        // SAFETY: the kernel does not access the word, of which it needs the address only.
        unsafe { libc::syscall(libc::SYS_futex, cell.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
    }

    /// Waits until holders have asked for something, if they have since there were `heard` wishes.
    /// It may return without that.
    ///
    /// # Errors
    /// When the word cannot be waited for.
    pub(super) fn await_wish(&self, heard: u32) -> io::Result<()> {
        let access = self.map.access();
        let cell = access.u64s().get(AT_WISHES).ok_or(ErrorKind::UnexpectedEof)?;
        let forever = std::ptr::null::<libc::timespec>();
        // SAFETY: the word is mapped; the kernel reads its first four bytes, which are the lower
        // half on the machines that have a pager, by an atomic access.
        let result = unsafe {
            libc::syscall(libc::SYS_futex, cell.as_ptr(), libc::FUTEX_WAIT, heard, forever)
        };
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            _ if result == 0 => Ok(()),
            Some(libc::EAGAIN | libc::EINTR) => Ok(()),
            _ => Err(error),
        }
    }

    /// Says that all accesses of a holder take leases, and whether pages may leave.
    pub(super) fn set_ready(&self, holder: usize, for_eviction: bool) {
        self.set_number(AT_READY + holder, if for_eviction { EVICTION } else { LEASES });
    }

    /// Whether the holder has said that pages may leave.
    pub(super) fn is_ready_for_eviction(&self, holder: usize) -> bool {
        self.number(AT_READY + holder) >= EVICTION
    }

    /// Whether the word of a page can be accessed without a signal, by the kernel's account: the
    /// file of a table may have been truncated.
    pub(super) fn is_reachable(&self, page: u64) -> bool {
        let offset = ((HEADER as u64 + page) * 8 & !4095) as usize;
        if page >= self.pages || offset >= self.map.length() {
            return false;
        }
        let place = self.map.base().wrapping_add(offset);
        // SAFETY: the page lies in the table's mapping, and is only made accessible.
        unsafe { libc::madvise(place.cast(), 4096, libc::MADV_POPULATE_WRITE) == 0 }
    }
}

/// A table on the side of the pager.
#[derive(Debug)]
pub struct PagerLeases {
    table: Arc<LeaseTable>,
    folder: TableFolder,
}

impl PagerLeases {
    /// Takes up the table of a memory file of `pages` pages that an earlier pager of the same VMM
    /// has left, or makes one. Copies of the earlier pager are dropped. The table stays as long as
    /// the VMM runs: who has a lease keeps it.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn start(
        folder: &Path,
        memory: MemoryFile,
        pages: u64,
        owner: TableOwner,
    ) -> io::Result<Self> {
        let place = TableFolder::of(folder, memory);
        let found = LeaseTable::open(folder, memory, pages).ok().flatten();
        let is_its = |table: &LeaseTable| table.pages == pages && place.owner() == Some(owner);
        let table = match found.filter(is_its) {
            Some(table) => table,
            None => LeaseTable::create(folder, memory, pages, owner)?,
        };
        table.change_all(PageWord::stay);
        Ok(Self { table: Arc::new(table), folder: place })
    }

    /// The table of a memory file of `pages` pages that a living pager has made: nothing is
    /// changed.
    ///
    /// # Errors
    /// When there is none, or it cannot be used. Holders write to the table: one that says that it
    /// has another number of pages is not used.
    pub fn join(folder: &Path, memory: MemoryFile, pages: u64) -> io::Result<Self> {
        let table = LeaseTable::open(folder, memory, pages)?.ok_or(ErrorKind::NotFound)?;
        if table.pages != pages {
            let text = format!("it has {} pages in place of {pages}", table.pages);
            return Err(io::Error::new(ErrorKind::InvalidData, text));
        }
        Ok(Self { table: Arc::new(table), folder: TableFolder::of(folder, memory) })
    }

    /// The table.
    pub fn table(&self) -> &LeaseTable {
        &self.table
    }

    /// The table, for a thread.
    pub(super) fn shared(&self) -> Arc<LeaseTable> {
        Arc::clone(&self.table)
    }

    /// Lets daemons of these users use the table, and wake the pager. At most [`HOLDERS`] users are
    /// admitted at a time; those of before stay if there is room.
    ///
    /// # Errors
    /// When the file system has no access control lists, or this user may not change them.
    pub fn admit(&self, users: &[u32]) -> io::Result<()> {
        self.folder.admit(users)
    }

    /// The processes that have a place in the table, and take leases for what they have mapped
    /// since. What dead ones had only to read is given back.
    ///
    /// # Errors
    /// Those of the table's file.
    pub fn members(&self) -> io::Result<Vec<u32>> {
        self.holders_from(0)
    }

    /// The processes of which all accesses take leases. What dead ones had only to read is given
    /// back.
    ///
    /// # Errors
    /// Those of the table's file.
    pub fn holders(&self) -> io::Result<Vec<u32>> {
        self.holders_from(LEASES)
    }

    /// Those of [`holders`](Self::holders) that let pages leave: they have no access from before
    /// their leases, and a touch of a page that is away is an error.
    ///
    /// # Errors
    /// Those of the table's file.
    pub fn holders_for_eviction(&self) -> io::Result<Vec<u32>> {
        self.holders_from(EVICTION)
    }

    fn holders_from(&self, ready: u64) -> io::Result<Vec<u32>> {
        let mut living = Vec::new();
        for holder in 0..HOLDERS {
            let process = self.table.number(AT_HOLDERS + holder);
            if process != 0 && self.table.lock(holder, libc::F_WRLCK)? {
                self.table.bury(holder);
                self.table.lock(holder, libc::F_UNLCK)?;
            } else if process != 0 && self.table.number(AT_READY + holder) >= ready {
                living.push(process as u32);
            }
        }
        Ok(living)
    }

    /// Drops all copies.
    pub fn forget(&self) {
        self.table.change_all(PageWord::stay);
    }

    /// Puts the table of a VMM that has ended aside, for [`remove_ended`](Self::remove_ended).
    /// Holders that still have it take leases of no effect.
    pub fn put_aside(self) {
        let _ = self.folder.put_aside();
    }

    /// Removes the tables in `folder` of VMMs that have ended, and what was put aside.
    ///
    /// Whoever may write to a table can keep the kernel from removing it, for as long as they
    /// like: this call, and its process, then neither return nor end. So it belongs into a process
    /// that nobody waits for. What one is removing, others leave alone.
    pub fn remove_ended(folder: &Path, has_ended: impl Fn(TableOwner) -> bool) {
        folder::remove_ended(folder, has_ended);
    }
}
