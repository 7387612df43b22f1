//! One thread's requests to a file.
//!
//! A request takes one of two paths. An operation that usually does not wait for a disk is a plain
//! system call: any transfer of a file in memory, and buffered writes to local file systems and
//! devices, which are copies into the page cache. (`io_uring` would pass a buffered write of most
//! file systems to a worker thread, which costs several times the copy; and the workers of one file
//! run one after another anyway.) If such a write waits nevertheless, because the kernel throttles
//! writers, the next writes take the other path for a while, so that reads do not wait for them.
//! Every other request goes through the ring, and its box waits in a slot for the completion event.
//!
//! Direct I/O needs aligned memory. A request whose own memory is not aligned is carried out piece
//! by piece through bounce memory, of which each queue has a budget. Requests wait in order until
//! the budget has room. The wait ends because the requests that hold bounce memory are in the ring.
//!
//! A durable operation completes only after the queue's witness has confirmed it (see
//! `durability`).

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use fathom_block::{
    Allocation, BackendContext, BackendQueue, Buffers, ErrorKind, Extent, Operation, Outcome,
    Request,
};
use fathom_reactor::{Event, OperationOwner, Pending, Reactor};
use io_uring::{opcode, squeue, types};
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use super::drain::Member;
use super::durability::Witness;
use super::in_flight;
use super::slot::{BOUNCE_PIECE_MAX, Next, PUNCH_HOLE, Slot, Stage, ZERO_RANGE, is_durable};
use super::{FileKind, Shared};

/// The duration above which an inline write counts as one that has waited for a disk, in
/// nanoseconds.
const THROTTLED_NS: u64 = 2_000_000;
/// How long writes then go through the ring, in nanoseconds.
const THROTTLE_REST_NS: u64 = 100_000_000;
/// The largest inline transfer, in bytes.
const INLINE_LENGTH_MAX: u64 = 1 << 20;
/// The bounce memory of one queue, in bytes.
const BOUNCE_BUDGET: u64 = 2 << 20;
const _: () = assert!(BOUNCE_BUDGET >= BOUNCE_PIECE_MAX, "a piece fits");
/// The most extents in one result.
const EXTENTS_MAX: usize = 1024;
/// The most segments that the kernel takes in one call (`UIO_MAXIOV`).
const SEGMENTS_MAX: usize = 1024;

/// Writes pages to the store, and waits for that.
const WRITE_AND_WAIT: u32 = libc::SYNC_FILE_RANGE_WAIT_BEFORE
    | libc::SYNC_FILE_RANGE_WRITE
    | libc::SYNC_FILE_RANGE_WAIT_AFTER;

/// The token of the watch on the descriptor that asks a queue to drain.
const TOKEN_DRAIN: u64 = (1 << 48) - 1;

/// One thread's access to a file.
pub(super) struct FileQueue {
    shared: Arc<Shared>,
    owner: OperationOwner,
    /// The count of the reactor's operations that the kernel has.
    pending: Pending,
    slots: Vec<Option<Slot>>,
    free: Vec<usize>,
    /// The time until which buffered writes take the ring, in nanoseconds of the stack's clock.
    rest_until_ns: u64,
    /// The unused bounce memory, in bytes.
    bounce_left: u64,
    /// Misaligned requests that wait for bounce memory, in order.
    waiting: VecDeque<Slot>,
    /// The zeroes for all requests that write zeroes.
    zeroes: Buffers,
    witness: Witness,
    /// This queue's part of the drain.
    member: Arc<Member>,
    /// Whether the queue has been asked to drain and has not answered.
    draining: bool,
}

impl FileQueue {
    pub(super) fn new(shared: Arc<Shared>, reactor: &mut Reactor) -> io::Result<Self> {
        let owner = reactor.register();
        let witness = Witness::new(&shared.durability, &shared.file);
        let member = shared.drain.join()?;
        reactor.watch(owner, TOKEN_DRAIN, member.wake());
        Ok(Self {
            shared,
            owner,
            slots: Vec::new(),
            free: Vec::new(),
            rest_until_ns: 0,
            pending: reactor.pending(),
            bounce_left: BOUNCE_BUDGET,
            waiting: VecDeque::new(),
            zeroes: Buffers::default(),
            witness,
            member,
            draining: false,
        })
    }

    /// Transfers by a plain system call if that usually does not wait for a disk. Returns the
    /// request if it must take the ring.
    fn inline(
        &mut self,
        request: Box<Request>,
        context: &mut BackendContext<'_>,
    ) -> Option<Box<Request>> {
        let in_memory = self.shared.kind == FileKind::InMemory;
        let write = request.operation == Operation::Write;
        if !(in_memory || write && self.shared.copies_writes)
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
            let error = io::Error::last_os_error();
            if error.raw_os_error() == Some(libc::EINTR) {
                return Some(request);
            }
            let kind = failure(&request, error.raw_os_error().unwrap_or(libc::EIO));
            context.complete(request, Err(kind));
        } else if moved as u64 == request.length {
            context.complete(request, Ok(()));
        } else {
            let slot = Slot::new(request, Stage::Transfer { done: 0 }, 0);
            self.follow(slot.progress(moved as u64), context);
        }
        None
    }

    /// Puts `slot` into the ring for its next step, or queues it for bounce memory.
    fn start(&mut self, mut slot: Slot, context: &mut BackendContext<'_>) {
        if self.shared.direct && slot.bounce_length == 0 {
            let bounce = slot.bounce_needed(self.shared.memory_alignment - 1);
            if bounce > self.bounce_left || bounce > 0 && !self.waiting.is_empty() {
                self.waiting.push_back(slot);
                return;
            }
            self.bounce_left -= bounce;
            slot.bounce_length = bounce;
        }
        let bounce = self.launch(slot, context);
        self.give_bounce(bounce, context);
    }

    /// Gives back `bounce` bytes of bounce memory of a completed request, and starts waiting
    /// requests.
    fn give_bounce(&mut self, bounce: u64, context: &mut BackendContext<'_>) {
        if bounce == 0 {
            return;
        }
        self.bounce_left += bounce;
        while let Some(mut slot) = self.waiting.pop_front() {
            let bounce = slot.bounce_needed(self.shared.memory_alignment - 1);
            if bounce > self.bounce_left {
                self.waiting.push_front(slot);
                break;
            }
            self.bounce_left -= bounce;
            slot.bounce_length = bounce;
            self.bounce_left += self.launch(slot, context);
        }
    }

    /// Puts `slot`, which has its bounce memory, into the ring. If that fails, returns the length
    /// of its bounce memory.
    fn launch(&mut self, mut slot: Slot, context: &mut BackendContext<'_>) -> u64 {
        if !slot.prepare(&mut self.zeroes) {
            context.complete(slot.request, Err(ErrorKind::Memory));
            return slot.bounce_length;
        }
        let entry = self.entry(&slot);
        let entry = if self.shared.has_server { entry.flags(squeue::Flags::ASYNC) } else { entry };
        let token = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        self.slots[token] = Some(slot);
        // SAFETY: the slot keeps the request's buffers, and the shared file stays open, until the
        // event arrives; the segment list is on the heap and does not move with the slot.
        unsafe { context.reactor().push(self.owner, token as u64, entry) };
        if self.shared.direct {
            self.hand_over(context.reactor());
        }
        0
    }

    /// Submits the waiting entries to the kernel once they are as many as the operations in flight.
    /// An idle disk then begins with the first request rather than with the last of a batch, and a
    /// busy one gets large batches, which cost less.
    fn hand_over(&self, reactor: &mut Reactor) {
        let waiting = reactor.unsubmitted();
        if waiting >= self.pending.count().saturating_sub(waiting) {
            // An error recurs at the end of the thread's round, where it is handled.
            let _ = reactor.submit();
        }
    }

    fn entry(&self, slot: &Slot) -> squeue::Entry {
        let file = types::Fd(self.shared.file.as_raw_fd());
        let request = &slot.request;
        match slot.stage {
            Stage::Transfer { done } | Stage::Zeroes { done } => {
                transfer_entry(file, request, slot.remaining(), request.offset + done)
            }
            Stage::WriteBack { .. } => {
                // 0 is up to the end of the file.
                let length = u32::try_from(request.length).unwrap_or(0);
                let entry = opcode::SyncFileRange::new(file, length);
                entry.offset(request.offset).flags(WRITE_AND_WAIT).build()
            }
            Stage::Fallocate { mode } => opcode::Fallocate::new(file, request.length)
                .offset(request.offset)
                .mode(mode)
                .build(),
            Stage::Sync => opcode::Fsync::new(file).flags(types::FsyncFlags::DATASYNC).build(),
        }
    }

    /// Takes the next step, or completes the request.
    fn follow(&mut self, next: Next, context: &mut BackendContext<'_>) {
        let (slot, outcome) = match next {
            Next::Step(slot) => return self.start(slot, context),
            Next::Done(slot, Ok(())) => {
                let outcome = self.confirm(&slot);
                (slot, outcome)
            }
            Next::Done(slot, Err(errno)) => {
                let kind = self.failed(&slot, errno);
                (slot, Err(kind))
            }
            Next::End(slot, end) => {
                // If the disk has been made smaller since, the file may end there.
                if end < self.shared.capacity.load(Ordering::Acquire) {
                    self.shared.record_truncation(end);
                }
                (slot, Err(ErrorKind::Io))
            }
            Next::Unsupported(slot) => (slot, Err(ErrorKind::Unsupported)),
        };
        if is_durable(&slot.request) {
            in_flight::end();
        }
        context.complete(slot.request, outcome);
        self.give_bounce(slot.bounce_length, context);
    }

    /// Decides whether a success that the kernel reports is returned as a success.
    fn confirm(&self, slot: &Slot) -> Outcome {
        let shared = &self.shared;
        if !is_durable(&slot.request)
            || self.witness.confirm(&shared.durability, &shared.file, slot.generation)
        {
            return Ok(());
        }
        Err(ErrorKind::Io)
    }

    /// The error of a failed request. A failure may also poison all earlier writes.
    fn failed(&self, slot: &Slot, errno: i32) -> ErrorKind {
        let shared = &self.shared;
        // Both report once that the kernel could not write.
        let was_sync = matches!(slot.stage, Stage::Sync | Stage::WriteBack { .. });
        // A fault in the request's memory does not concern the store.
        if !(is_durable(&slot.request) || was_sync) || errno == libc::EFAULT {
            return failure(&slot.request, errno);
        }
        self.witness.failed(&shared.durability, &shared.file, errno, was_sync);
        // Lost writes are not reported as a lack of space, even if that is the kernel's error.
        if shared.durability.is_poisoned() { ErrorKind::Io } else { failure(&slot.request, errno) }
    }

    /// Answers the drain if nothing in flight reaches past the new end.
    fn answer_drain(&mut self) {
        let round = self.member.round();
        let capacity = self.shared.capacity.load(Ordering::Acquire);
        let reaches = |slot: &Slot| {
            let request = &slot.request;
            request.operation.has_range() && request.end().is_none_or(|end| end > capacity)
        };
        self.draining = self.slots.iter().flatten().chain(&self.waiting).any(reaches);
        if !self.draining {
            self.shared.drain.answer(&self.member, round);
        }
    }

    /// The first step of a `fallocate` with this mode.
    fn fallocate(&self, mode: i32) -> Stage {
        if self.shared.direct || self.shared.kind == FileKind::InMemory {
            return Stage::Fallocate { mode };
        }
        Stage::WriteBack { mode }
    }

    fn extents(&self, request: &mut Request) -> Outcome {
        // No other code uses the position of the description.
        let file = &self.shared.file;
        let end = request.offset + request.length;
        let mut offset = request.offset;
        while offset < end && request.extents.len() < EXTENTS_MAX {
            let data = match seek(file, SeekFrom::Data(offset)) {
                Ok(data) => data.min(end),
                Err(Errno::NXIO) => end,
                Err(error) => return Err(ErrorKind::from_errno(error.raw_os_error())),
            };
            if data > offset {
                let allocation = Allocation::Hole;
                request.extents.push(Extent { offset, length: data - offset, allocation });
                offset = data;
                continue;
            }
            let hole = seek(file, SeekFrom::Hole(offset));
            // The end of data moves while other requests run; an uncertain range counts as data.
            let hole = hole.map_or(end, |hole| hole.clamp(offset + 1, end));
            let allocation = Allocation::Data;
            request.extents.push(Extent { offset, length: hole - offset, allocation });
            offset = hole;
        }
        Ok(())
    }
}

/// The error for `request` from an `errno`; `EINVAL` and `EPERM` of a transfer are failures of the
/// store, not of the guest.
fn failure(request: &Request, errno: i32) -> ErrorKind {
    let kind = ErrorKind::from_errno(errno);
    let is_unsupported = kind == ErrorKind::Unsupported && !request.operation.carries_data();
    let is_kept = matches!(kind, ErrorKind::NoSpace | ErrorKind::Memory) || is_unsupported;
    if is_kept { kind } else { ErrorKind::Io }
}

/// The priority of background work, as in `ioprio_set(2)`: the lowest of the class `best effort`,
/// so that it makes slow progress even under a continuous load.
const BACKGROUND: u16 = 2 << 13 | 7;

fn transfer_entry(
    file: types::Fd,
    request: &Request,
    buffers: &Buffers,
    offset: u64,
) -> squeue::Entry {
    let segments = buffers.segments();
    let count = segments.len().min(SEGMENTS_MAX) as u32;
    let flags = if request.flags.force_unit_access { libc::RWF_DSYNC } else { 0 };
    let priority = if request.flags.background { BACKGROUND } else { 0 };
    match (request.operation == Operation::Read, segments) {
        (true, [segment]) => {
            opcode::Read::new(file, segment.iov_base.cast(), segment.iov_len as u32)
                .offset(offset)
                .ioprio(priority)
                .build()
        }
        (true, _) => opcode::Readv::new(file, segments.as_ptr(), count)
            .offset(offset)
            .ioprio(priority)
            .build(),
        (false, [segment]) => {
            opcode::Write::new(file, segment.iov_base.cast(), segment.iov_len as u32)
                .offset(offset)
                .ioprio(priority)
                .rw_flags(flags)
                .build()
        }
        (false, _) => opcode::Writev::new(file, segments.as_ptr(), count)
            .offset(offset)
            .ioprio(priority)
            .rw_flags(flags)
            .build(),
    }
}

impl BackendQueue for FileQueue {
    fn submit(&mut self, mut request: Box<Request>, context: &mut BackendContext<'_>) {
        let shared = &self.shared;
        let mut generation = 0;
        if is_durable(&request) {
            match self.witness.begin(&shared.durability, &shared.file) {
                Some(current) => generation = current,
                None => return context.complete(request, Err(ErrorKind::Io)),
            }
        }
        if request.operation.modifies() {
            if shared.durability.is_poisoned() {
                return context.complete(request, Err(ErrorKind::Io));
            }
            // The crossing has checked the capacity; a truncation may have begun since.
            let capacity = shared.capacity.load(Ordering::Acquire);
            if request.end().is_none_or(|end| end > capacity) {
                return context.complete(request, Err(ErrorKind::OutOfRange));
            }
        }
        let stage = match request.operation {
            Operation::Read | Operation::Write => match self.inline(request, context) {
                None => return,
                Some(back) => {
                    request = back;
                    Stage::Transfer { done: 0 }
                }
            },
            Operation::Flush => {
                if shared.kind == FileKind::InMemory || !shared.capabilities.write {
                    return context.complete(request, Ok(()));
                }
                Stage::Sync
            }
            Operation::WriteZeroes if request.flags.keep_allocated => self.fallocate(ZERO_RANGE),
            Operation::WriteZeroes | Operation::Discard => self.fallocate(PUNCH_HOLE),
            Operation::Extents => {
                let outcome = self.extents(&mut request);
                return context.complete(request, outcome);
            }
            // The crossing has answered it.
            Operation::GetId => return context.complete(request, Ok(())),
        };
        if is_durable(&request) {
            in_flight::begin();
        }
        self.start(Slot::new(request, stage, generation), context);
    }

    fn event(&mut self, event: &Event, context: &mut BackendContext<'_>) {
        if event.owner != self.owner {
            return;
        }
        if event.token == TOKEN_DRAIN {
            self.member.take_wake();
            context.reactor().watch(self.owner, TOKEN_DRAIN, self.member.wake());
            return self.answer_drain();
        }
        let index = event.token as usize;
        let Some(slot) = self.slots.get_mut(index).and_then(Option::take) else { return };
        self.free.push(index);
        self.follow(slot.after(event.result), context);
        if self.draining {
            self.answer_drain();
        }
    }

    fn advance(&mut self, _context: &mut BackendContext<'_>) {}
}

impl Drop for FileQueue {
    fn drop(&mut self) {
        // With a request in flight, its end is unknown; the member stays, and the file is not
        // truncated.
        if self.slots.iter().all(Option::is_none) {
            self.shared.drain.leave(&self.member);
        }
        // If the kernel still works on requests (their thread failed, and the reactor's end did not
        // complete them), their memory must stay.
        if self.pending.count() > 0 {
            std::mem::forget(std::mem::take(&mut self.slots));
            std::mem::forget(std::mem::take(&mut self.zeroes));
            std::mem::forget(Arc::clone(&self.shared));
        }
    }
}
