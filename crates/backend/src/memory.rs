//! A disk in memory.
//!
//! The bytes are in one private anonymous mapping without reserved swap. So only written data uses
//! memory, and a discard gives it back. The mapping is larger than the disk if the host allows it,
//! so that the disk can grow in place. Addresses never change, and the memory of a request that is
//! in flight while the disk shrinks stays mapped.
//!
//! A bit for each [`CHUNK`] shows whether the chunk may hold data. A write first copies and then
//! sets the bit; a discard first clears the bit and then drops the memory. So in every order of the
//! two, a clear bit means zeroes.
//!
//! A shrink lowers the capacity, waits until each queue has completed its current request, and only
//! then drops the memory past the new end. Otherwise a copy in progress would restore its bytes,
//! and they would be visible when the disk grows again. Each queue counts its requests where the
//! shrink sees the count, and reads the capacity after it has counted. So either the queue sees the
//! new capacity, or the shrink sees the request.

use std::io;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use fathom_block::{
    Allocation, Backend, BackendContext, BackendOpenContext, BackendProblem, BackendQueue, Buffers,
    Capabilities, ErrorKind, Extent, Figure, Geometry, Operation, Outcome, Request, faults,
    prefetch,
};
use fathom_reactor::Event;
use parking_lot::{Mutex, MutexGuard};

/// The unit in which allocation is recorded, in bytes.
const CHUNK: u64 = 64 << 10;
/// The unit in which memory is given back, in bytes.
const PAGE: u64 = 4096;
/// The address space requested beyond the capacity, for growth, in bytes.
const GROWTH: u64 = 256 << 30;

/// The size of a line of the processor's caches, in bytes, and the lines that are fetched before a
/// read: the processor fetches those behind them by itself.
const LINE: usize = 64;
const EXPECTED_LINES: usize = 4;

/// The longest time that a shrink waits for current requests. A copy can take long if the guest's
/// memory has to be fetched first.
const SHRINK_TIME_MAX: Duration = Duration::from_secs(20);
/// The interval at which a shrink polls the queues.
const SHRINK_POLL: Duration = Duration::from_micros(100);

/// A disk whose bytes are in the daemon's memory and end with the daemon.
pub struct Memory {
    shared: Arc<Shared>,
}

struct Shared {
    base: NonNull<u8>,
    /// The number of bytes mapped; the capacity never exceeds it.
    mapped: u64,
    capacity: AtomicU64,
    /// A bit for each chunk of the mapping.
    written: Box<[AtomicU64]>,
    /// For each queue, how often it has begun or completed a request: odd during a request.
    queues: Mutex<Vec<Arc<Count>>>,
}

// SAFETY: the mapping is accessed only by copies through raw pointers within checked bounds, never
// through references; concurrent copies to one address result in the bytes of one or the other, as
// on any disk.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

/// The requests that a queue has begun and completed. No other count is in the same lines of the
/// processor's cache, which is read in pairs of lines: each request writes it.
#[repr(align(128))]
#[derive(Default)]
struct Count(AtomicU64);

impl Memory {
    fn queue(&self) -> MemoryQueue {
        let shared = Arc::clone(&self.shared);
        let count = Arc::<Count>::default();
        shared.queues().push(Arc::clone(&count));
        MemoryQueue { shared, count }
    }

    /// Opens a disk of `capacity` bytes of zeroes.
    ///
    /// # Errors
    /// When the host does not grant that much address space (strict overcommit).
    pub fn open(capacity: u64) -> io::Result<Self> {
        let exact = capacity.max(1).next_multiple_of(CHUNK);
        let (base, mapped) = match map(exact + GROWTH) {
            Ok(base) => (base, exact + GROWTH),
            Err(_) => (map(exact)?, exact),
        };
        let words = mapped.div_ceil(CHUNK * 64) as usize;
        let written = (0..words).map(|_| AtomicU64::new(0)).collect();
        let capacity = AtomicU64::new(capacity);
        let shared = Shared { base, mapped, capacity, written, queues: Mutex::default() };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// The same, for bytes that will all be used, and at random: the host may use large pages for
    /// them. Then each written page of them takes more memory, up to 2 MiB with most processors,
    /// but never more than `capacity` in all.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_large(capacity: u64) -> io::Result<Self> {
        let memory = Self::open(capacity)?;
        let Shared { base, .. } = &*memory.shared;
        // A host without large pages refuses, which changes nothing. SAFETY: the range is within
        // our own private mapping, and the advice does not change its content.
        unsafe { libc::madvise(base.as_ptr().cast(), capacity as usize, libc::MADV_HUGEPAGE) };
        Ok(memory)
    }

    /// Opens a disk of `capacity` bytes of zeroes, for tests and examples.
    ///
    /// # Panics
    /// When [`open`](Self::open) fails.
    pub fn new(capacity: u64) -> Self {
        Self::open(capacity).expect("address space for a memory disk")
    }
}

fn map(length: u64) -> io::Result<NonNull<u8>> {
    let length = usize::try_from(length).map_err(|_| io::Error::from_raw_os_error(libc::ENOMEM))?;
    // SAFETY: a new anonymous mapping at an address that the kernel chooses affects no other
    // memory.
    let base = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            length,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(base.cast()).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and has this length, and the object has no other owner.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.mapped as usize) };
    }
}

impl Shared {
    fn queues(&self) -> MutexGuard<'_, Vec<Arc<Count>>> {
        self.queues.lock()
    }

    /// Waits until each queue has completed its current request. Returns false if one takes too
    /// long.
    fn await_queues(&self) -> bool {
        let end = Instant::now() + SHRINK_TIME_MAX;
        // Queues that are opened later see the current capacity.
        let queues = self.queues().clone();
        queues.iter().all(|queue| {
            let Count(queue) = &**queue;
            let before = queue.load(Ordering::Acquire);
            while before % 2 == 1 && queue.load(Ordering::Acquire) == before {
                if Instant::now() > end {
                    return false;
                }
                std::thread::sleep(SHRINK_POLL);
            }
            true
        })
    }

    /// Copies between the disk and the request's buffers. Fails if memory of the guest was lost,
    /// which then reads as zeroes.
    fn transfer(&self, request: &Request, write: bool) -> Outcome {
        let before = faults();
        let place = self.base.as_ptr().wrapping_add(request.offset as usize);
        let length = request.buffers.length() as usize;
        // SAFETY: the crossing checked the range against a capacity that was at most the mapping;
        // the buffers have its length; guest memory and this private mapping cannot overlap. A
        // concurrent change results in one byte or the other, as on any disk.
        unsafe {
            if write {
                request.buffers.gather(0, length, place);
            } else {
                request.buffers.scatter(0, length, place);
            }
        }
        if faults() == before { Ok(()) } else { Err(ErrorKind::Memory) }
    }

    /// Copies `length` bytes from `offset` on to byte `from` of `buffers` on. Fails as
    /// [`transfer`](Self::transfer) does.
    fn read(&self, offset: u64, length: u64, buffers: &Buffers, from: u64) -> Outcome {
        let before = faults();
        let place = self.base.as_ptr().wrapping_add(offset as usize);
        // SAFETY: as in `transfer`: the caller checked both ranges.
        unsafe { buffers.scatter(from, length as usize, place) };
        if faults() == before { Ok(()) } else { Err(ErrorKind::Memory) }
    }

    /// Copies `bytes` to `offset`. The caller has checked the range.
    fn write(&self, offset: u64, bytes: &[u8]) {
        let place = self.base.as_ptr().wrapping_add(offset as usize);
        // SAFETY: as in `transfer`; no reference to this private mapping exists.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), place, bytes.len()) };
    }

    fn mark_written(&self, offset: u64, length: u64) {
        for chunk in offset / CHUNK..=(offset + length - 1) / CHUNK {
            let (word, bit) = (&self.written[(chunk / 64) as usize], 1 << (chunk % 64));
            if word.load(Ordering::Acquire) & bit == 0 {
                word.fetch_or(bit, Ordering::AcqRel);
            }
        }
    }

    /// The length of the chunks that have been written, in bytes.
    fn used(&self) -> u64 {
        let written = |word: &AtomicU64| u64::from(word.load(Ordering::Relaxed).count_ones());
        self.written.iter().map(written).sum::<u64>() * CHUNK
    }

    fn is_written(&self, chunk: u64) -> bool {
        self.written[(chunk / 64) as usize].load(Ordering::Acquire) & (1 << (chunk % 64)) != 0
    }

    /// Zeroes the range and gives back its whole pages.
    fn zero(&self, offset: u64, length: u64) {
        let end = offset + length;
        for chunk in offset.div_ceil(CHUNK)..end / CHUNK {
            self.written[(chunk / 64) as usize].fetch_and(!(1 << (chunk % 64)), Ordering::AcqRel);
        }
        let first = offset.next_multiple_of(PAGE).min(end);
        let last = (end / PAGE * PAGE).max(first);
        let at = |place: u64| self.base.as_ptr().wrapping_add(place as usize);
        // SAFETY: within the mapping, by the crossing's check.
        unsafe {
            at(offset).write_bytes(0, (first - offset) as usize);
            at(last).write_bytes(0, (end - last) as usize);
        }
        if last > first {
            let (start, count) = (at(first), (last - first) as usize);
            // SAFETY: whole pages of our own private mapping, which read as zeroes afterwards.
            if unsafe { libc::madvise(start.cast(), count, libc::MADV_DONTNEED) } != 0 {
                // The pages of locked memory cannot be given back.
                // SAFETY: within the mapping.
                unsafe { start.write_bytes(0, count) };
            }
        }
    }

    fn extents(&self, request: &mut Request) {
        const EXTENTS_MAX: usize = 4096;
        let (mut offset, end) = (request.offset, request.offset + request.length);
        while offset < end && request.extents.len() < EXTENTS_MAX {
            let data = self.is_written(offset / CHUNK);
            let mut next = (offset / CHUNK + 1) * CHUNK;
            while next < end && self.is_written(next / CHUNK) == data {
                next += CHUNK;
            }
            let next = next.min(end);
            let allocation = if data { Allocation::Data } else { Allocation::Hole };
            request.extents.push(Extent { offset, length: next - offset, allocation });
            offset = next;
        }
    }
}

impl Backend for Memory {
    fn name(&self) -> &'static str {
        "memory"
    }

    fn capacity(&self) -> u64 {
        self.shared.capacity.load(Ordering::Relaxed)
    }

    fn geometry(&self) -> Geometry {
        Geometry::default()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::ALL
    }

    fn open_queue(
        &self,
        _context: &mut BackendOpenContext<'_>,
    ) -> io::Result<Box<dyn BackendQueue>> {
        Ok(Box::new(self.queue()))
    }

    fn resize(&self, capacity: u64) -> Result<(), ErrorKind> {
        if capacity > self.shared.mapped {
            return Err(ErrorKind::NoSpace);
        }
        let before = self.shared.capacity.swap(capacity, Ordering::Relaxed);
        if capacity < before {
            // The capacity before the counts; see the module documentation.
            fence(Ordering::SeqCst);
            if !self.shared.await_queues() {
                self.shared.capacity.store(before, Ordering::Relaxed);
                return Err(ErrorKind::Io);
            }
            self.shared.zero(capacity, before - capacity);
        }
        Ok(())
    }

    fn problems(&self) -> Vec<BackendProblem> {
        Vec::new()
    }

    fn figures(&self) -> Vec<Figure> {
        let meaning = "The memory that the disk's content takes, at most.";
        vec![Figure::gauge("used_bytes", meaning, self.shared.used())]
    }

    fn losses(&self) -> u64 {
        0
    }

    fn inspect(&self) {}

    fn recover(&self) -> io::Result<()> {
        Ok(())
    }
}

struct MemoryQueue {
    shared: Arc<Shared>,
    /// See [`Shared::queues`]; only this queue writes it.
    count: Arc<Count>,
}

impl Drop for MemoryQueue {
    fn drop(&mut self) {
        self.shared.queues().retain(|other| !Arc::ptr_eq(other, &self.count));
    }
}

impl MemoryQueue {
    /// Calls `carry_out` such that a shrink waits for it.
    fn counted<R>(&self, carry_out: impl FnOnce(&Self) -> R) -> R {
        let Count(cell) = &*self.count;
        let count = cell.load(Ordering::Relaxed);
        cell.store(count + 1, Ordering::Relaxed);
        // The count before the capacity; see the module documentation.
        fence(Ordering::SeqCst);
        let result = carry_out(self);
        cell.store(count + 2, Ordering::Release);
        result
    }

    /// Calls `carry_out` if the range is within the capacity.
    fn at_once(
        &self,
        offset: u64,
        length: u64,
        carry_out: impl FnOnce(&Shared) -> Outcome,
    ) -> Option<Outcome> {
        self.counted(|queue| {
            let end = offset.checked_add(length)?;
            let is_within = end <= queue.shared.capacity.load(Ordering::Relaxed);
            is_within.then(|| carry_out(&queue.shared))
        })
    }

    fn carry_out(&self, request: &mut Request) -> Outcome {
        let (offset, length) = (request.offset, request.length);
        // The crossing has checked the capacity; a shrink may have begun since.
        let capacity = self.shared.capacity.load(Ordering::Relaxed);
        if request.operation.has_range() && request.end().is_none_or(|end| end > capacity) {
            return Err(ErrorKind::OutOfRange);
        }
        match request.operation {
            Operation::Read | Operation::Write => {
                let write = request.operation == Operation::Write;
                let outcome = self.shared.transfer(request, write);
                if write {
                    self.shared.mark_written(offset, length);
                }
                return outcome;
            }
            Operation::Discard | Operation::WriteZeroes => self.shared.zero(offset, length),
            Operation::Extents => self.shared.extents(request),
            // The data does not outlive the daemon, so there is nothing to make durable. The
            // crossing answers requests for the serial.
            Operation::Flush | Operation::GetId => {}
        }
        Ok(())
    }
}

impl BackendQueue for MemoryQueue {
    fn submit(&mut self, mut request: Box<Request>, context: &mut BackendContext<'_>) {
        let outcome = self.counted(|queue| queue.carry_out(&mut request));
        context.complete(request, outcome);
    }

    fn read_now(
        &mut self,
        offset: u64,
        length: u64,
        buffers: &mut Buffers,
        from: u64,
    ) -> Option<Outcome> {
        self.at_once(offset, length, |shared| shared.read(offset, length, buffers, from))
    }

    fn write_now(&mut self, offset: u64, bytes: &[u8]) -> Option<Outcome> {
        if bytes.is_empty() {
            return None;
        }
        let length = bytes.len() as u64;
        self.at_once(offset, length, |shared| {
            shared.write(offset, bytes);
            shared.mark_written(offset, length);
            Ok(())
        })
    }

    fn expect(&mut self, offset: u64) {
        let first = self.shared.base.as_ptr().wrapping_add(offset as usize);
        for line in 0..EXPECTED_LINES {
            prefetch(first.wrapping_add(line * LINE));
        }
    }

    fn event(&mut self, _event: &Event, _context: &mut BackendContext<'_>) {}

    fn advance(&mut self, _context: &mut BackendContext<'_>) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_at_once_is_there_and_nothing_is_written_beyond_the_capacity() {
        let memory = Memory::new(1 << 20);
        let mut queue = memory.queue();
        assert_eq!(queue.write_now(4096, &[7; 8192]), Some(Ok(())));
        let mut buffers = Buffers::default();
        buffers.allocate(8192);
        assert_eq!(queue.read_now(4096, 8192, &mut buffers, 0), Some(Ok(())));
        assert!(buffers.owned().unwrap().iter().all(|byte| *byte == 7));
        for offset in [(1 << 20) - 512, 1 << 20, u64::MAX - 100] {
            assert_eq!(queue.write_now(offset, &[7; 1024]), None);
        }
        assert_eq!(queue.write_now(0, &[]), None);
        memory.resize(8192).unwrap();
        assert_eq!(queue.write_now(4096, &[8; 8192]), None);
        memory.resize(1 << 20).unwrap();
        assert_eq!(queue.read_now(4096, 8192, &mut buffers, 0), Some(Ok(())));
        let bytes = buffers.owned().unwrap();
        assert!(bytes[..4096].iter().all(|byte| *byte == 7));
        assert!(bytes[4096..].iter().all(|byte| *byte == 0));
    }
}
