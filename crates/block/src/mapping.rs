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
//! An address outside all mappings gets the default action. If the kernel itself accesses a lost
//! page, there is no signal: the system call fails with `EFAULT`, which fails that one request.

use std::cell::Cell;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Once};

use parking_lot::Mutex;
use rustix::fs::SealFlags;
use rustix::net::Shutdown;

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
    FAULTS.get()
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
    budget: Option<Arc<Budget>>,
}

impl MemoryOwner {
    /// A new owner. The first loss shuts down the socket `alarm` for reading, which wakes the
    /// thread that waits for its next message. All mappings of the owner count against `budget`.
    pub fn new(alarm: Option<OwnedFd>, budget: Option<Arc<Budget>>) -> Self {
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
pub struct Budget {
    used: AtomicU64,
    max: u64,
}

impl Budget {
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
    budget: Option<Arc<Budget>>,
}

impl Reservation {
    fn new(length: u64, budget: Option<&Arc<Budget>>) -> io::Result<Self> {
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
                next,
            }));
            NODES.store(node, Ordering::Release);
            node
        });
        drop(free);
        node.faults.store(0, Ordering::Relaxed);
        node.page.store(page, Ordering::Relaxed);
        node.owner.store(Arc::as_ptr(owner).cast_mut(), Ordering::Relaxed);
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
                FAULTS.set(FAULTS.get() + 1);
                if node.mend(address, range, code) {
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

/// A part of a file, mapped shared, for reading and writing.
///
/// The other process may write it at any time. So its bytes are reached only through the raw
/// pointer: by atomic or volatile accesses, by copies to and from the daemon's own memory, and by
/// the kernel. If a byte changes during a copy, the copy has either value. A lost page reads as
/// zeroes, after [`MemoryOwner::is_lost`] has become true.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    /// The number of bytes mapped before the requested part, which need not begin at a page.
    skip: usize,
    length: usize,
    /// The number of bytes mapped, in whole pages.
    mapped: usize,
    node: &'static Node,
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
    /// Maps `length` bytes of `file` from `offset` on, which need not be at a page. The mapping is
    /// excluded from core dumps. The file is sealed against truncation if that is possible.
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
        let page = page_size(file)?;
        let skip = offset % page;
        let mapped = length
            .checked_add(skip)
            .and_then(|length| length.checked_next_multiple_of(page))
            .ok_or_else(|| invalid("a mapping is too long"))?;
        let reservation = Reservation::new(mapped, owner.budget.as_ref())?;
        seal(file);
        install();
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing of ours.
        let base = unsafe {
            libc::mmap(
                ptr::null_mut(),
                mapped as usize,
                libc::PROT_READ | libc::PROT_WRITE,
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
        let node = Node::register(address, mapped as usize, page as usize, owner);
        Ok(Self {
            base,
            skip: skip as usize,
            length: length as usize,
            mapped: mapped as usize,
            node,
            owner: Arc::clone(owner),
            _reservation: reservation,
        })
    }

    /// The address of the first byte. The [`length`](Self::length) bytes from there on can be read
    /// and written until the mapping is dropped.
    pub fn base(&self) -> *mut u8 {
        self.base.as_ptr().wrapping_add(self.skip)
    }

    /// The number of bytes.
    pub fn length(&self) -> usize {
        self.length
    }

    /// The owner of the memory.
    pub fn owner(&self) -> &Arc<MemoryOwner> {
        &self.owner
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

/// The size of the pages that `file` is mapped in, in bytes.
fn page_size(file: &File) -> io::Result<u64> {
    let system = rustix::fs::fstatfs(file)?;
    match system.f_type {
        HUGETLBFS => Ok((system.f_bsize as u64).max(4096)),
        FUSE => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "shared memory on FUSE is refused: the file system's process could block any access",
        )),
        _ => Ok(rustix::param::page_size() as u64),
    }
}

/// Seals `file` against truncation. Files without seals, or whose owner allows no further seals,
/// stay as they are.
fn seal(file: &File) {
    let Ok(seals) = rustix::fs::fcntl_get_seals(file) else { return };
    if !seals.intersects(SealFlags::SHRINK | SealFlags::SEAL) {
        let _ = rustix::fs::fcntl_add_seals(file, SealFlags::SHRINK);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    use rustix::fs::MemfdFlags;

    fn memory_file(length: u64, flags: MemfdFlags) -> File {
        let flags = MemfdFlags::CLOEXEC | flags;
        let file = File::from(rustix::fs::memfd_create(c"test", flags).unwrap());
        file.set_len(length).unwrap();
        file
    }

    fn read(mapping: &Mapping, at: usize) -> u8 {
        assert!(at < mapping.length());
        // SAFETY: within the mapping.
        unsafe { mapping.base().wrapping_add(at).read_volatile() }
    }

    #[test]
    fn a_truncated_page_reads_as_zeroes_and_marks_only_its_owner() {
        let (file, other) = (
            memory_file(64 << 10, MemfdFlags::empty()),
            memory_file(64 << 10, MemfdFlags::empty()),
        );
        let (owner, neighbour) =
            (Arc::new(MemoryOwner::default()), Arc::new(MemoryOwner::default()));
        let mapping = Mapping::new(&file, 0, 64 << 10, &owner).unwrap();
        let beside = Mapping::new(&other, 0, 64 << 10, &neighbour).unwrap();
        file.write_all_at(&vec![7; 64 << 10], 0).unwrap();
        assert_eq!((read(&mapping, 5000), owner.cause(), faults()), (7, None, 0));
        file.set_len(8192).unwrap();
        assert_eq!((read(&mapping, 8191), owner.is_lost()), (7, false));
        assert_eq!((read(&mapping, 8192), owner.cause()), (0, Some(LossCause::Absent)));
        assert_eq!((read(&mapping, 4096), faults()), (7, 1));
        // Faults of further pages, until the whole mapping is replaced.
        for at in (8192..64 << 10).step_by(4096) {
            assert_eq!(read(&mapping, at), 0);
        }
        assert_eq!(u64::from(FAULTS_MAX) + 1, faults());
        assert_eq!((read(&mapping, 0), read(&beside, 0), neighbour.is_lost()), (0, 0, false));
    }

    #[test]
    fn a_part_that_begins_within_a_page_is_mapped() {
        let file = memory_file(16 << 10, MemfdFlags::empty());
        file.write_all_at(b"part", 5000).unwrap();
        let mapping = Mapping::new(&file, 5000, 4, &Arc::default()).unwrap();
        assert_eq!((read(&mapping, 0), read(&mapping, 3), mapping.length()), (b'p', b't', 4));
        let map = |offset, length| Mapping::new(&file, offset, length, &Arc::default());
        assert!(map(0, 0).is_err() && map(16 << 10, 1).is_err() && map(u64::MAX, 2).is_err());
        let null = File::options().read(true).write(true).open("/dev/null").unwrap();
        assert!(Mapping::new(&null, 0, 4096, &Arc::default()).is_err());
        let directory = File::open("/tmp").unwrap();
        assert!(Mapping::new(&directory, 0, 1, &Arc::default()).is_err());
    }

    #[test]
    fn a_file_that_can_be_sealed_is() {
        let file = memory_file(8192, MemfdFlags::ALLOW_SEALING);
        let _mapping = Mapping::new(&file, 0, 8192, &Arc::default()).unwrap();
        assert!(file.set_len(4096).is_err());
        file.set_len(16384).unwrap();
    }

    #[test]
    fn mappings_are_excluded_from_core_dumps() {
        let file = memory_file(8192, MemfdFlags::empty());
        let mapping = Mapping::new(&file, 0, 8192, &Arc::default()).unwrap();
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let start = format!("{:x}-", mapping.base() as usize);
        let (_, from) = maps.split_once(&start).expect("the mapping has a line");
        let flags = from.lines().find(|line| line.starts_with("VmFlags:")).unwrap();
        assert!(flags.split_whitespace().any(|flag| flag == "dd"), "{flags}");
    }

    #[test]
    fn a_budget_is_kept_and_given_back() {
        let file = memory_file(64 << 10, MemfdFlags::empty());
        let owner = Arc::new(MemoryOwner::new(None, Some(Arc::new(Budget::new(96 << 10)))));
        let first = Mapping::new(&file, 0, 64 << 10, &owner).unwrap();
        assert!(Mapping::new(&file, 0, 64 << 10, &owner).is_err());
        let second = Mapping::new(&file, 0, 32 << 10, &owner).unwrap();
        drop((first, second));
        assert!(Mapping::new(&file, 0, 64 << 10, &owner).is_ok());
        // A file may claim any length; a mapping larger than the limit is refused.
        let huge = memory_file(1 << 50, MemfdFlags::empty());
        assert!(Mapping::new(&huge, 0, 127 << 40, &Arc::default()).is_err());
    }
}
