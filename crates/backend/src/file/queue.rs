//! One thread's requests to a file.
//!
//! A request goes one of two ways. What the kernel can do without waiting for a disk is done by a
//! plain system call, at once: any transfer of a file in memory, and buffered writes, which are
//! copies into the page cache. (`io_uring` would hand a buffered write of most file systems to a
//! worker thread, which costs several times the copy; and the workers of one file run one after
//! another anyway.) Should such a write turn out to wait, because the kernel throttles writers,
//! the following ones take the other way for a while, so that reads need not wait behind them.
//! Everything else goes through the ring, and its box waits in a slot until the event comes.

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use fathom_block::{
    Allocation, BackendContext, BackendQueue, Buffers, ErrorKind, Extent, Operation, Outcome,
    Request,
};
use fathom_reactor::{Event, Owner, Reactor};
use io_uring::{opcode, squeue, types};

use super::{FileKind, Shared};

/// An inline write that took longer than this has waited for a disk, in nanoseconds.
const THROTTLED_NS: u64 = 2_000_000;
/// How long writes then go through the ring, in nanoseconds.
const THROTTLE_REST_NS: u64 = 100_000_000;
/// The largest transfer that is done inline, in bytes.
const INLINE_LENGTH_MAX: u64 = 1 << 20;
/// The largest piece of zeroes written at once, in bytes.
const ZERO_PIECE_MAX: u64 = 1 << 20;
/// The most extents told at once.
const EXTENTS_MAX: usize = 1024;
/// The most segments that the kernel takes in one call (`UIO_MAXIOV`).
const SEGMENTS_MAX: usize = 1024;

/// What a slot's request waits for.
#[derive(Clone, Copy, Debug)]
enum Stage {
    /// Bytes read or written; so many have moved already.
    Transfer { done: u64 },
    /// Zeroes being written out because the file system knows no better way.
    Zeroes { done: u64 },
    /// A hole punched, or a range zeroed, by the file system.
    Fallocate { mode: i32 },
    /// What was done made durable.
    Sync,
}

/// A request in the ring.
struct Slot {
    request: Box<Request>,
    stage: Stage,
    /// Aligned memory in place of the request's own, or the rest of a short transfer.
    substitute: Buffers,
    /// Whether the substitute's bytes must be copied into the request's memory afterwards.
    bounced: bool,
}

/// One thread's way to a file.
pub(super) struct FileQueue {
    shared: Arc<Shared>,
    owner: Owner,
    slots: Vec<Option<Slot>>,
    free: Vec<usize>,
    /// Until when buffered writes take the ring, by the stack's clock.
    rest_until_ns: u64,
}

impl FileQueue {
    pub(super) fn new(shared: Arc<Shared>, reactor: &mut Reactor) -> Self {
        let owner = reactor.register();
        Self { shared, owner, slots: Vec::new(), free: Vec::new(), rest_until_ns: 0 }
    }

    /// Does a transfer by a plain system call where that cannot wait for a disk. Returns the
    /// request where it must take the ring.
    fn inline(
        &mut self,
        request: Box<Request>,
        context: &mut BackendContext<'_>,
    ) -> Option<Box<Request>> {
        let in_memory = self.shared.kind == FileKind::InMemory;
        let write = request.operation == Operation::Write;
        if !(in_memory || write && !self.shared.direct)
            || request.length > INLINE_LENGTH_MAX
            || request.flags.force_unit_access && !in_memory
            || request.buffers.count() > SEGMENTS_MAX
        {
            return Some(request);
        }
        let start_ns = if in_memory { 0 } else { context.now_ns() };
        if start_ns < self.rest_until_ns {
            return Some(request);
        }
        let segments = request.buffers.segments();
        let (file, count) = (self.shared.file.as_raw_fd(), segments.len() as libc::c_int);
        let offset = request.offset as libc::off_t;
        // SAFETY: the request owns its segments, which are mapped while it is in flight.
        let moved = unsafe {
            if write {
                libc::pwritev(file, segments.as_ptr(), count, offset)
            } else {
                libc::preadv(file, segments.as_ptr(), count, offset)
            }
        };
        if !in_memory {
            let end_ns = context.now_ns();
            if end_ns.saturating_sub(start_ns) > THROTTLED_NS {
                self.rest_until_ns = end_ns + THROTTLE_REST_NS;
            }
        }
        if moved < 0 {
            let error = std::io::Error::last_os_error();
            if error.raw_os_error() == Some(libc::EINTR) {
                return Some(request);
            }
            let kind = failure(&request, error.raw_os_error().unwrap_or(libc::EIO));
            context.complete(request, Err(kind));
        } else if moved as u64 == request.length {
            context.complete(request, Ok(()));
        } else {
            let slot = Slot::new(request, Stage::Transfer { done: 0 });
            if let Some(slot) = slot.progress(moved as u64, context) {
                self.start(slot, context.reactor());
            }
        }
        None
    }

    /// Puts `slot` into the ring for its next step.
    fn start(&mut self, mut slot: Slot, reactor: &mut Reactor) {
        if self.shared.direct && !slot.bounced && slot.request.operation.carries_data() {
            self.bounce(&mut slot);
        }
        let entry = self.entry(&slot);
        let token = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        self.slots[token] = Some(slot);
        // SAFETY: the slot keeps the request's buffers, and the shared file stays open, until the
        // event is seen; the segment list is on the heap and does not move with the slot.
        unsafe { reactor.push(self.owner, token as u64, entry) };
    }

    /// Gives the request aligned memory where direct I/O needs it.
    fn bounce(&self, slot: &mut Slot) {
        let mask = self.shared.memory_alignment - 1;
        let misaligned =
            |segment: &libc::iovec| (segment.iov_base as usize | segment.iov_len) & mask != 0;
        if mask == 0 || !slot.request.buffers.segments().iter().any(misaligned) {
            return;
        }
        slot.substitute.allocate(slot.request.length as usize);
        slot.bounced = true;
        if slot.request.operation == Operation::Write {
            if let Some(bytes) = slot.substitute.owned_mut() {
                slot.request.buffers.copy_to(0, bytes);
            }
        }
    }

    fn entry(&self, slot: &Slot) -> squeue::Entry {
        let file = types::Fd(self.shared.file.as_raw_fd());
        let request = &slot.request;
        match slot.stage {
            Stage::Transfer { done } => {
                let buffers =
                    if slot.substitute.count() > 0 { &slot.substitute } else { &request.buffers };
                transfer_entry(file, request, buffers, request.offset + done)
            }
            Stage::Zeroes { done } => {
                transfer_entry(file, request, &slot.substitute, request.offset + done)
            }
            Stage::Fallocate { mode } => opcode::Fallocate::new(file, request.length)
                .offset(request.offset)
                .mode(mode)
                .build(),
            Stage::Sync => opcode::Fsync::new(file).flags(types::FsyncFlags::DATASYNC).build(),
        }
    }

    /// Handles `result` of a slot's step. Returns the slot where another step follows; where none
    /// does, the request has been completed.
    fn step(&self, mut slot: Slot, result: i32, context: &mut BackendContext<'_>) -> Option<Slot> {
        if result == -libc::EINTR || result == -libc::EAGAIN {
            return Some(slot);
        }
        match slot.stage {
            Stage::Transfer { .. } | Stage::Zeroes { .. } if result < 0 => {
                let kind = failure(&slot.request, -result);
                slot.finish(Err(kind), context)
            }
            Stage::Transfer { .. } | Stage::Zeroes { .. } => slot.progress(result as u64, context),
            Stage::Fallocate { mode } if result < 0 => slot.fallback(mode, -result, context),
            Stage::Fallocate { .. } if slot.request.flags.force_unit_access => {
                slot.stage = Stage::Sync;
                Some(slot)
            }
            Stage::Sync if result < 0 => {
                let _ = self.shared.errno.compare_exchange(
                    0,
                    -result,
                    Ordering::Relaxed,
                    Ordering::Relaxed,
                );
                if !self.shared.poisoned.swap(true, Ordering::AcqRel) {
                    let error = std::io::Error::from_raw_os_error(-result);
                    tracing::error!(
                        %error,
                        "a flush failed: written data is lost; the disk takes no more writes until \
                         it is opened anew"
                    );
                }
                slot.finish(Err(ErrorKind::from_errno(-result)), context)
            }
            Stage::Fallocate { .. } | Stage::Sync => slot.finish(Ok(()), context),
        }
    }

    fn extents(&self, request: &mut Request) -> Outcome {
        let file = self.shared.file.as_raw_fd();
        let end = request.offset + request.length;
        let mut offset = request.offset;
        while offset < end && request.extents.len() < EXTENTS_MAX {
            // SAFETY: system calls on our own descriptor, whose position nobody uses.
            let data = unsafe { libc::lseek(file, offset as libc::off_t, libc::SEEK_DATA) };
            let data = match u64::try_from(data) {
                Ok(data) => data.min(end),
                Err(_) => match std::io::Error::last_os_error().raw_os_error() {
                    Some(libc::ENXIO) => end,
                    errno => return Err(ErrorKind::from_errno(errno.unwrap_or(libc::EIO))),
                },
            };
            if data > offset {
                let allocation = Allocation::Hole;
                request.extents.push(Extent { offset, length: data - offset, allocation });
                offset = data;
                continue;
            }
            // SAFETY: as above.
            let hole = unsafe { libc::lseek(file, offset as libc::off_t, libc::SEEK_HOLE) };
            // The end of data moves while other requests run; what is in doubt is data.
            let hole = u64::try_from(hole).map_or(end, |hole| hole.clamp(offset + 1, end));
            let allocation = Allocation::Data;
            request.extents.push(Extent { offset, length: hole - offset, allocation });
            offset = hole;
        }
        Ok(())
    }
}

/// The mode that zeroes a range and keeps it allocated.
const ZERO_RANGE: i32 = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
/// The mode that gives a range's room back.
const PUNCH_HOLE: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;

impl Slot {
    fn new(request: Box<Request>, stage: Stage) -> Self {
        Self { request, stage, substitute: Buffers::default(), bounced: false }
    }

    /// `count` more bytes have moved.
    fn progress(mut self, count: u64, context: &mut BackendContext<'_>) -> Option<Self> {
        let length = self.request.length;
        if count == 0 {
            // The file is shorter than the disk (somebody else has cut it), or takes no more.
            return self.finish(Err(ErrorKind::Io), context);
        }
        match &mut self.stage {
            Stage::Transfer { done } => {
                *done += count;
                if *done >= length {
                    return self.finish(Ok(()), context);
                }
                if self.bounced {
                    // The bounced bytes are owned memory, whose start must stay for the copy back:
                    // begin again, which is rare and right whatever has moved.
                    *done = 0;
                    return Some(self);
                }
                let done = *done;
                // SAFETY: the request and its buffers stay in the slot as long as the substitute.
                unsafe {
                    self.substitute.borrow_from(&self.request.buffers, done, length - done);
                }
                Some(self)
            }
            Stage::Zeroes { done } => {
                *done += count;
                if *done < length {
                    self.substitute.truncate((length - *done).min(ZERO_PIECE_MAX));
                    return Some(self);
                }
                if self.request.flags.force_unit_access {
                    self.stage = Stage::Sync;
                    return Some(self);
                }
                self.finish(Ok(()), context)
            }
            Stage::Fallocate { .. } | Stage::Sync => self.finish(Ok(()), context),
        }
    }

    /// The file system refused a `fallocate` with this mode.
    fn fallback(mut self, mode: i32, errno: i32, context: &mut BackendContext<'_>) -> Option<Self> {
        if !matches!(errno, libc::EOPNOTSUPP | libc::ENOSYS | libc::ENODEV) {
            let kind = failure(&self.request, errno);
            return self.finish(Err(kind), context);
        }
        if self.request.operation == Operation::Discard {
            // A discard is a wish.
            return self.finish(Ok(()), context);
        }
        if mode != ZERO_RANGE {
            self.stage = Stage::Fallocate { mode: ZERO_RANGE };
            return Some(self);
        }
        if self.request.flags.only_if_fast {
            return self.finish(Err(ErrorKind::Unsupported), context);
        }
        self.substitute.allocate(self.request.length.min(ZERO_PIECE_MAX) as usize);
        let length = self.substitute.length() as usize;
        self.substitute.fill_zero(0, length);
        self.stage = Stage::Zeroes { done: 0 };
        Some(self)
    }

    /// Gives the request back; no step follows.
    fn finish(mut self, outcome: Outcome, context: &mut BackendContext<'_>) -> Option<Self> {
        if self.bounced && self.request.operation == Operation::Read && outcome.is_ok() {
            if let Some(bytes) = self.substitute.owned() {
                self.request.buffers.copy_from(0, bytes);
            }
        }
        context.complete(self.request, outcome);
        None
    }
}

/// What an `errno` means for `request`; `EINVAL` and `EPERM` of a transfer are failures of the
/// store, not of the guest.
fn failure(request: &Request, errno: i32) -> ErrorKind {
    match ErrorKind::from_errno(errno) {
        ErrorKind::NoSpace => ErrorKind::NoSpace,
        ErrorKind::Unsupported if !request.operation.carries_data() => ErrorKind::Unsupported,
        _ => ErrorKind::Io,
    }
}

fn transfer_entry(
    file: types::Fd,
    request: &Request,
    buffers: &Buffers,
    offset: u64,
) -> squeue::Entry {
    let segments = buffers.segments();
    let count = segments.len().min(SEGMENTS_MAX) as u32;
    let flags = if request.flags.force_unit_access { libc::RWF_DSYNC } else { 0 };
    match (request.operation == Operation::Read, segments) {
        (true, [segment]) => {
            opcode::Read::new(file, segment.iov_base.cast(), segment.iov_len as u32)
                .offset(offset)
                .build()
        }
        (true, _) => opcode::Readv::new(file, segments.as_ptr(), count).offset(offset).build(),
        (false, [segment]) => {
            opcode::Write::new(file, segment.iov_base.cast(), segment.iov_len as u32)
                .offset(offset)
                .rw_flags(flags)
                .build()
        }
        (false, _) => opcode::Writev::new(file, segments.as_ptr(), count)
            .offset(offset)
            .rw_flags(flags)
            .build(),
    }
}

impl BackendQueue for FileQueue {
    fn submit(&mut self, mut request: Box<Request>, context: &mut BackendContext<'_>) {
        let poisoned = || self.shared.poisoned.load(Ordering::Acquire);
        let stage = match request.operation {
            Operation::Write | Operation::Discard | Operation::WriteZeroes | Operation::Flush
                if poisoned() =>
            {
                return context.complete(request, Err(ErrorKind::Io));
            }
            Operation::Read | Operation::Write => match self.inline(request, context) {
                None => return,
                Some(back) => {
                    request = back;
                    Stage::Transfer { done: 0 }
                }
            },
            Operation::Flush => {
                if self.shared.kind == FileKind::InMemory || !self.shared.capabilities.write {
                    return context.complete(request, Ok(()));
                }
                Stage::Sync
            }
            Operation::WriteZeroes if request.flags.keep_allocated => {
                Stage::Fallocate { mode: ZERO_RANGE }
            }
            Operation::WriteZeroes | Operation::Discard => Stage::Fallocate { mode: PUNCH_HOLE },
            Operation::Extents => {
                let outcome = self.extents(&mut request);
                return context.complete(request, outcome);
            }
            // Answered above, by the crossing.
            Operation::GetId => return context.complete(request, Ok(())),
        };
        self.start(Slot::new(request, stage), context.reactor());
    }

    fn event(&mut self, event: &Event, context: &mut BackendContext<'_>) {
        if event.owner != self.owner {
            return;
        }
        let index = event.token as usize;
        let Some(slot) = self.slots.get_mut(index).and_then(Option::take) else { return };
        self.free.push(index);
        if let Some(slot) = self.step(slot, event.result, context) {
            self.start(slot, context.reactor());
        }
    }

    fn advance(&mut self, _context: &mut BackendContext<'_>) {}
}
