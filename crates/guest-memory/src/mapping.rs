//! Memory mapped from a file of another process.
//!
//! The other process can truncate its file, the file system can have no space for a page at its
//! first access, and the hardware can lose a page. The kernel then answers an access with `SIGBUS`,
//! which by default ends the whole process. Here a handler takes the signal:
//!
//! - Every [`Mapping`] is in a list that the handler reads without a lock. Entries are never freed,
//!   only reused, so that the handler can walk the list at any time.
//! - The handler replaces the lost page by anonymous zeroed memory, marks the memory of the
//!   mapping's [`MemoryOwner`] as lost, and returns: the access is repeated and succeeds.
//! - The thread that serves the owner sees the mark, acknowledges no further requests, and
//!   disconnects the owner.
//!
//! In a mapping of a memory with a pager, a missing page is a `SIGBUS` too; see `missing.rs`.
//!
//! An address outside all mappings gets the default action. If the kernel itself accesses a lost
//! page, there is no signal: the system call fails with `EFAULT`, which fails that one request.

mod missing;
#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{
    AtomicI32, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering, compiler_fence,
};
use std::sync::{Arc, Once};

use parking_lot::Mutex;
use rustix::fs::SealFlags;
use rustix::net::Shutdown;

use crate::access::MemoryAccess;
use crate::kept::Kept;
use crate::pager::Purpose;
pub(crate) use missing::FilePages;
use missing::MissingPages;

/// The most bytes of all mappings together: half of a process's address space, so that the rest
/// remains for everything else.
const MAPPED_MAX: u64 = 64 << 40;
/// The number of faults of one mapping that are repaired page by page. The next fault replaces the
/// whole mapping, because the kernel limits the number of areas in a process's memory.
const FAULTS_MAX: u32 = 8;
/// The magic number of hugetlbfs.
const HUGETLBFS: i64 = 0x9584_58f6;
/// The magic number of FUSE.
const FUSE: i64 = 0x6573_5546;

/// The bytes of all mappings.
static MAPPED: AtomicU64 = AtomicU64::new(0);
/// The list that the handler walks.
static NODES: AtomicPtr<Node> = AtomicPtr::new(ptr::null_mut());
/// The nodes of the list without a mapping.
static FREE_NODES: Mutex<Vec<&'static Node>> = Mutex::new(Vec::new());

thread_local! {
    /// The number of faults in this thread.
    static FAULTS: Cell<u64> = const { Cell::new(0) };
}

/// The number of lost pages that this thread has accessed so far. If the number changes during a
/// copy from mapped memory, some of the copied bytes are zeroes of the replacement, not the owner's
/// data.
pub fn faults() -> u64 {
    // The handler changes the number during any access, which the compiler must not assume away.
    compiler_fence(Ordering::SeqCst);
    let faults = FAULTS.get();
    compiler_fence(Ordering::SeqCst);
    faults
}

/// Why memory is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LossCause {
    /// The file has no such page: it was truncated, or there is no space for the page.
    Absent,
    /// The hardware has lost the page.
    Hardware,
}

/// The owner of mappings. A loss in one mapping is a loss to the owner.
#[derive(Debug, Default)]
pub struct MemoryOwner {
    /// The `si_code` of the first signal, or 0.
    code: AtomicI32,
    alarm: Option<OwnedFd>,
    budget: Option<Arc<MappingBudget>>,
}

impl MemoryOwner {
    /// A new owner. The first loss shuts down the socket `alarm` for reading, which wakes the
    /// thread that waits for its next message. All mappings of the owner count against `budget`.
    pub fn new(alarm: Option<OwnedFd>, budget: Option<Arc<MappingBudget>>) -> Self {
        Self { code: AtomicI32::new(0), alarm, budget }
    }

    /// Whether some of the memory is lost. Costs one load.
    #[inline]
    pub fn is_lost(&self) -> bool {
        self.code.load(Ordering::Relaxed) != 0
    }

    /// Why memory was lost; `None` if none was.
    pub fn cause(&self) -> Option<LossCause> {
        match self.code.load(Ordering::Relaxed) {
            0 => None,
            libc::BUS_MCEERR_AR => Some(LossCause::Hardware),
            _ => Some(LossCause::Absent),
        }
    }

    /// Called by the handler: nothing here may lock or allocate.
    fn lose(&self, code: i32) {
        let first =
            self.code.compare_exchange(0, code, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        if let (true, Some(alarm)) = (first, &self.alarm) {
            // `shutdown` is safe in a signal handler: the function only makes the system call.
            let _ = rustix::net::shutdown(alarm, Shutdown::Read);
        }
    }
}

/// A limit on the bytes that several owners together may have mapped.
#[derive(Debug)]
pub struct MappingBudget {
    used: AtomicU64,
    max: u64,
}

impl MappingBudget {
    /// A budget of `max` bytes.
    pub fn new(max: u64) -> Self {
        Self { used: AtomicU64::new(0), max }
    }
}

/// Adds `length` to `used`, unless the sum exceeds `max`. Returns whether it was added.
fn take(used: &AtomicU64, max: u64, length: u64) -> bool {
    let add = |used: u64| used.checked_add(length).filter(|sum| *sum <= max);
    used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).is_ok()
}

/// An amount of mapped memory, counted until this is dropped.
#[derive(Debug)]
struct Reservation {
    length: u64,
    budget: Option<Arc<MappingBudget>>,
}

impl Reservation {
    fn new(length: u64, budget: Option<&Arc<MappingBudget>>) -> io::Result<Self> {
        let full = |whose| {
            let text = format!("{whose} would have more memory mapped than the limit allows");
            io::Error::new(io::ErrorKind::OutOfMemory, text)
        };
        if budget.is_some_and(|budget| !take(&budget.used, budget.max, length)) {
            return Err(full("the VMMs of this disk"));
        }
        let reservation = Self { length, budget: budget.cloned() };
        if !take(&MAPPED, MAPPED_MAX, length) {
            // Dropping the reservation subtracts the length, which `take` has not added.
            MAPPED.fetch_add(length, Ordering::Relaxed);
            return Err(full("all VMMs together"));
        }
        Ok(reservation)
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        MAPPED.fetch_sub(self.length, Ordering::Relaxed);
        if let Some(budget) = &self.budget {
            budget.used.fetch_sub(self.length, Ordering::Relaxed);
        }
    }
}

/// A mapping as the handler sees it.
struct Node {
    start: AtomicUsize,
    /// The end of the mapping (exclusive); 0 while the node has no mapping.
    end: AtomicUsize,
    /// The size of the file's pages, in bytes.
    page: AtomicUsize,
    faults: AtomicU32,
    owner: AtomicPtr<MemoryOwner>,
    /// Null if missing pages are not registered.
    missing: AtomicPtr<MissingPages>,
    next: *const Node,
}

// SAFETY: `next` is written once, before the node can be reached, and nodes are never freed.
unsafe impl Sync for Node {}

impl Node {
    /// Returns a node for a new mapping.
    fn register(
        start: usize,
        length: usize,
        page: usize,
        owner: &Arc<MemoryOwner>,
        missing: Option<&MissingPages>,
    ) -> &'static Self {
        let mut free = FREE_NODES.lock();
        let node = free.pop().unwrap_or_else(|| {
            // The list grows only here, under the lock.
            let next = NODES.load(Ordering::Acquire);
            let node: &'static mut Self = Box::leak(Box::new(Self {
                start: AtomicUsize::new(0),
                end: AtomicUsize::new(0),
                page: AtomicUsize::new(0),
                faults: AtomicU32::new(0),
                owner: AtomicPtr::new(ptr::null_mut()),
                missing: AtomicPtr::new(ptr::null_mut()),
                next,
            }));
            NODES.store(node, Ordering::Release);
            node
        });
        drop(free);
        node.faults.store(0, Ordering::Relaxed);
        node.page.store(page, Ordering::Relaxed);
        node.owner.store(Arc::as_ptr(owner).cast_mut(), Ordering::Relaxed);
        let missing = missing.map_or(ptr::null_mut(), |missing| ptr::from_ref(missing).cast_mut());
        node.missing.store(missing, Ordering::Relaxed);
        node.start.store(start, Ordering::Release);
        node.end.store(start + length, Ordering::Release);
        node
    }

    /// Takes the mapping out of the list. Called before it is unmapped.
    fn release(&'static self) {
        self.end.store(0, Ordering::Release);
        FREE_NODES.lock().push(self);
    }

    /// The range of the mapping, if `address` lies in it.
    fn range_with(&self, address: usize) -> Option<(usize, usize)> {
        loop {
            let end = self.end.load(Ordering::Acquire);
            let start = self.start.load(Ordering::Acquire);
            // A node that was reused meanwhile has another end.
            if self.end.load(Ordering::Acquire) == end {
                return (start <= address && address < end).then_some((start, end));
            }
        }
    }

    /// Makes a page that is missing by right. Called by the handler.
    fn bring(&self, address: usize) -> bool {
        // SAFETY: as for the owner in `mend`: the mapping holds it.
        let missing = unsafe { self.missing.load(Ordering::Relaxed).as_ref() };
        missing.is_some_and(|missing| missing.bring(address))
    }

    /// Replaces the page at `address` by zeroes. Returns whether the access can be repeated. Called
    /// by the handler.
    fn mend(&self, address: usize, (start, end): (usize, usize), code: i32) -> bool {
        let page = self.page.load(Ordering::Relaxed);
        let faults = self.faults.fetch_add(1, Ordering::Relaxed);
        let owner = self.owner.load(Ordering::Relaxed);
        // SAFETY: a thread that accesses a mapping holds it, the mapping holds its owner, and the
        // signal came from such an access.
        if let Some(owner) = unsafe { owner.as_ref() } {
            owner.lose(code);
        }
        let first = start + (address - start) / page * page;
        let whole = faults >= FAULTS_MAX && replace(start, end - start);
        whole || replace(first, page.min(end - first))
    }
}

/// Maps zeroes over a range of a mapping. Called by the handler.
fn replace(start: usize, length: usize) -> bool {
    // SAFETY: the range belongs to a mapping of ours and consists of whole pages. The old memory is
    // reached only through raw pointers, whose reads may return any value at any time. The C
    // library passes the call directly to the kernel, so it may be made in a signal handler.
    let place = unsafe {
        libc::mmap(
            ptr::without_provenance_mut(start),
            length,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    place != libc::MAP_FAILED
}

/// Handles `SIGBUS`.
extern "C" fn on_bus_error(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    _context: *mut libc::c_void,
) {
    // SAFETY: the location of this thread's error number is always valid.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let before = unsafe { *errno };
    // SAFETY: the kernel passes a complete structure to a handler with SA_SIGINFO.
    let code = unsafe { (*info).si_code };
    if code == libc::BUS_MCEERR_AO {
        // A lost page that no thread has accessed yet.
        return;
    }
    if code > 0 {
        // SAFETY: a signal with such a code has an address.
        let address = unsafe { (*info).si_addr() } as usize;
        let mut next = NODES.load(Ordering::Acquire).cast_const();
        // SAFETY: nodes are never freed.
        while let Some(node) = unsafe { next.as_ref() } {
            if let Some(range) = node.range_with(address) {
                let is_brought = code != libc::BUS_MCEERR_AR && node.bring(address);
                FAULTS.set(FAULTS.get() + u64::from(!is_brought));
                if is_brought || node.mend(address, range, code) {
                    // SAFETY: as above.
                    unsafe { *errno = before };
                    return;
                }
                break;
            }
            next = node.next;
        }
    }
    // The address is in no mapping: the default action follows when the access is repeated, or
    // immediately if a process sent the signal.
    // SAFETY: both calls may be made in a signal handler;
    // an all-zero action is the default one.
    unsafe {
        let action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, &raw const action, ptr::null_mut());
        if code <= 0 {
            libc::raise(signal);
        }
        *errno = before;
    }
}

/// Installs the handler, once.
fn install() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        // SAFETY: the handler does only what a signal handler may do. It runs on the thread's stack
        // for signals, if there is one, and needs a few hundred bytes.
        let result = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) = on_bus_error;
            action.sa_sigaction = handler as libc::sighandler_t;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut())
        };
        assert_eq!(result, 0, "SIGBUS can be handled");
    });
}

/// A part of a file, mapped shared.
///
/// The other process may write it at any time. So its bytes are reached only through an
/// [`MemoryAccess`], by copies, and by the kernel. If a byte changes during a copy, the copy has
/// either value. A lost page reads as zeroes, after [`MemoryOwner::is_lost`] has become true.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    /// The number of bytes mapped before the requested part, which need not begin at a page.
    skip: usize,
    length: usize,
    /// The number of bytes mapped, in whole pages.
    mapped: usize,
    purpose: Purpose,
    node: &'static Node,
    /// The handler reaches both through the node.
    missing: Option<Box<MissingPages>>,
    owner: Arc<MemoryOwner>,
    _reservation: Reservation,
}

impl std::fmt::Debug for Node {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Node")
    }
}

// SAFETY: the mapping is reached through the raw pointer alone, as described above, from any
// thread.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `length` bytes of `file` from `offset` on, which need not be at a page, for reading and
    /// writing. The mapping is excluded from core dumps. The file is sealed against truncation if
    /// that is possible.
    ///
    /// # Errors
    /// If the range is empty, reaches beyond the end of the file or exceeds a limit; if the file is
    /// not a regular one or lies on FUSE; or if the kernel refuses.
    pub fn new(
        file: &File,
        offset: u64,
        length: u64,
        owner: &Arc<MemoryOwner>,
    ) -> io::Result<Self> {
        let mapping = Self::map(file, (offset, length), owner, Purpose::Write, None)?;
        seal(file);
        Ok(mapping)
    }

    /// Maps `length` bytes of `file` from `offset` on, for reading. The file belongs to no other
    /// process, and may be on any file system.
    ///
    /// # Errors
    /// As those of [`new`](Self::new).
    pub fn read_only(file: &File, offset: u64, length: u64) -> io::Result<Self> {
        Self::map(file, (offset, length), &Arc::default(), Purpose::Read, None)
    }

    /// The same part of its file, mapped anew for reading and writing. With `pages`, its missing
    /// pages are registered.
    ///
    /// # Errors
    /// As those of [`new`](Self::new), and when its missing pages cannot be registered.
    pub(crate) fn anew(
        &self,
        file: &File,
        offset: u64,
        pages: Option<&Arc<dyn FilePages>>,
    ) -> io::Result<Self> {
        Self::map(file, (offset, self.length as u64), &self.owner, Purpose::Write, pages)
    }

    /// Whether its missing pages are registered.
    pub(crate) fn is_registered(&self) -> bool {
        self.missing.is_some()
    }

    /// Makes pages of a range of addresses that are missing by right, on which the caller has a
    /// lease, before the kernel accesses them.
    pub(crate) fn make_missing(&self, start: *const u8, length: u64) {
        if let Some(missing) = &self.missing {
            let start = start as usize;
            missing.make(&(start..start.saturating_add(length as usize)));
        }
    }

    fn map(
        file: &File,
        (offset, length): (u64, u64),
        owner: &Arc<MemoryOwner>,
        purpose: Purpose,
        pages: Option<&Arc<dyn FilePages>>,
    ) -> io::Result<Self> {
        let invalid = |text: &str| io::Error::new(io::ErrorKind::InvalidInput, text.to_owned());
        let end = offset.checked_add(length).ok_or_else(|| invalid("a mapping wraps around"))?;
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Err(invalid(
                "shared memory must be a regular file, and this descriptor is not one",
            ));
        }
        if length == 0 || end > metadata.len() {
            return Err(invalid("a mapping is empty or longer than its file"));
        }
        let system = rustix::fs::fstatfs(file)?;
        if system.f_type == FUSE && purpose.is_write() {
            return Err(invalid(
                "shared memory on FUSE is refused: the file system's process could block any access",
            ));
        }
        let page = match system.f_type {
            HUGETLBFS => (system.f_bsize as u64).max(4096),
            _ => page_size(),
        };
        if pages.is_some() && page != page_size() {
            return Err(invalid("huge pages have no pager"));
        }
        let skip = offset % page;
        let mapped = length
            .checked_add(skip)
            .and_then(|length| length.checked_next_multiple_of(page))
            .ok_or_else(|| invalid("a mapping is too long"))?;
        let reservation = Reservation::new(mapped, owner.budget.as_ref())?;
        install();
        let writing = if purpose.is_write() { libc::PROT_WRITE } else { 0 };
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing of ours.
        let base = unsafe {
            libc::mmap(
                ptr::null_mut(),
                mapped as usize,
                libc::PROT_READ | writing,
                libc::MAP_SHARED | libc::MAP_NORESERVE,
                file.as_raw_fd(),
                (offset - skip) as libc::off_t,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: advice about a mapping of ours. Without it a core dump would be larger and
        // contain another process's memory.
        unsafe { libc::madvise(base, mapped as usize, libc::MADV_DONTDUMP) };
        let base =
            NonNull::new(base.cast::<u8>()).ok_or_else(|| invalid("a mapping at address 0"))?;
        let address = base.as_ptr() as usize;
        let register = |pages| {
            let range = address..address + mapped as usize;
            MissingPages::register(range, (offset - skip) / page, pages).map(Box::new)
        };
        let missing = match pages.map(register).transpose() {
            Ok(missing) => missing,
            Err(error) => {
                // SAFETY: mapped above, and nobody knows it.
                unsafe { libc::munmap(base.as_ptr().cast(), mapped as usize) };
                return Err(error);
            }
        };
        let node =
            Node::register(address, mapped as usize, page as usize, owner, missing.as_deref());
        Ok(Self {
            base,
            skip: skip as usize,
            length: length as usize,
            mapped: mapped as usize,
            purpose,
            node,
            missing,
            owner: Arc::clone(owner),
            _reservation: reservation,
        })
    }

    /// The address of the first byte. The [`length`](Self::length) bytes from there on can be read
    /// until the mapping is dropped, and written unless it is only for reading.
    pub(crate) fn base(&self) -> *mut u8 {
        self.base.as_ptr().wrapping_add(self.skip)
    }

    /// The number of bytes.
    pub fn length(&self) -> usize {
        self.length
    }

    /// An access to a part of it, which keeps it mapped; `None` if it is shorter.
    pub fn hold(self: &Arc<Self>, offset: usize, length: usize) -> Option<MemoryAccess<'static>> {
        let fits = offset.checked_add(length)? <= self.length;
        fits.then(|| {
            let place = self.base().wrapping_add(offset);
            let kept = Kept::new(None, Some(Arc::clone(self)));
            // SAFETY: the part is mapped as long as the mapping, for this purpose.
            unsafe { MemoryAccess::new(place, length, self.purpose, kept) }
        })
    }

    /// An access to all of it.
    #[inline]
    pub fn access(&self) -> MemoryAccess<'_> {
        // SAFETY: all of it is mapped as long as self, for this purpose.
        unsafe { MemoryAccess::new(self.base(), self.length, self.purpose, Kept::NOTHING) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // It leaves the list first: after it is unmapped, another mapping may get its addresses.
        self.node.release();
        // SAFETY: mapped in `new` with this length, and no user of the mapping remains.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.mapped) };
    }
}

/// The size of the host's pages, in bytes. `rustix` reads it from the auxiliary vector, which is
/// not a program's own under valgrind.
fn page_size() -> u64 {
    // SAFETY: the call has no conditions.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    u64::try_from(size).unwrap_or(4096)
}

/// Seals `file` against truncation. Files without seals, or whose owner allows no further seals,
/// stay as they are.
fn seal(file: &File) {
    let Ok(seals) = rustix::fs::fcntl_get_seals(file) else { return };
    if !seals.intersects(SealFlags::SHRINK | SealFlags::SEAL) {
        let _ = rustix::fs::fcntl_add_seals(file, SealFlags::SHRINK);
    }
}
