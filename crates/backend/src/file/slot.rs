//! The steps of a request through the ring.

use fathom_block::{Buffers, Operation, Request, faults};

/// The largest piece of zeroes in one write, in bytes.
const ZERO_PIECE_MAX: u64 = 256 << 10;
/// The largest piece of a misaligned request, in bytes.
pub(super) const BOUNCE_PIECE_MAX: u64 = 256 << 10;

/// The mode that zeroes a range and keeps it allocated.
pub(super) const ZERO_RANGE: i32 = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
/// The mode that deallocates a range.
pub(super) const PUNCH_HOLE: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;

/// The step that a slot's request waits for.
#[derive(Clone, Copy, Debug)]
pub(super) enum Stage {
    /// A read or a write, of which `done` bytes have been transferred.
    Transfer { done: u64 },
    /// A write of zeroes, because the file system has no better operation.
    Zeroes { done: u64 },
    /// What the page cache has of the range is written to the store, before `Fallocate`. That would
    /// drop it (a block device, a range of ext4 that is zeroed), so that a flush of an earlier
    /// write finds nothing to write, and completes before the range is zeroed.
    WriteBack { mode: i32 },
    /// The file system punches a hole or zeroes a range.
    Fallocate { mode: i32 },
    /// A sync that makes the request's effect durable.
    Sync,
}

/// A request in the ring.
pub(super) struct Slot {
    pub request: Box<Request>,
    pub stage: Stage,
    /// The generation in which a durable request began.
    pub generation: u64,
    /// Aligned memory in place of a piece of the request's own; empty if that is aligned.
    bounce: Buffers,
    /// The length of the queue's bounce memory that the request holds, in bytes.
    pub bounce_length: u64,
    /// The memory of the rest of a short transfer, or of a piece of zeroes.
    rest: Buffers,
}

/// The next action after a step.
pub(super) enum Next {
    /// Another step.
    Step(Slot),
    /// None: the request has succeeded, or has failed with an `errno`.
    Done(Slot, Result<(), i32>),
    /// None: the file ended before the range did, at this offset in bytes.
    End(Slot, u64),
    /// None: the file system has no operation that is fast enough.
    Unsupported(Slot),
}

/// Whether the request completes only when its effect is durable.
pub(super) fn is_durable(request: &Request) -> bool {
    match request.operation {
        Operation::Flush => true,
        Operation::Write | Operation::WriteZeroes | Operation::Discard => {
            request.flags.force_unit_access
        }
        Operation::Read | Operation::GetId | Operation::Extents => false,
    }
}

impl Slot {
    pub(super) fn new(request: Box<Request>, stage: Stage, generation: u64) -> Self {
        let (bounce, rest) = (Buffers::default(), Buffers::default());
        Self { request, stage, generation, bounce, bounce_length: 0, rest }
    }

    /// The memory of the next step of a transfer or of zeroes.
    pub(super) fn remaining(&self) -> &Buffers {
        let substitutes = [&self.rest, &self.bounce];
        substitutes.into_iter().find(|buffers| buffers.count() > 0).unwrap_or(&self.request.buffers)
    }

    /// The bounce memory that the request needs if memory has to be aligned by `mask`, in bytes; 0
    /// if its own memory is aligned.
    pub(super) fn bounce_needed(&self, mask: usize) -> u64 {
        let misaligned =
            |segment: &libc::iovec| (segment.iov_base as usize | segment.iov_len) & mask != 0;
        let request = &self.request;
        if mask == 0
            || !request.operation.carries_data()
            || !request.buffers.segments().iter().any(misaligned)
        {
            return 0;
        }
        request.length.min(BOUNCE_PIECE_MAX)
    }

    /// Prepares the memory of the next step. Returns false if the bytes to write are lost.
    pub(super) fn prepare(&mut self, zeroes: &mut Buffers) -> bool {
        let length = self.request.length;
        match self.stage {
            Stage::Transfer { done } if self.bounce_length > 0 => {
                self.bounce.allocate((length - done).min(BOUNCE_PIECE_MAX) as usize);
                if self.request.operation == Operation::Write {
                    let before = faults();
                    if let Some(bytes) = self.bounce.owned_mut() {
                        self.request.buffers.copy_to(done, bytes);
                    }
                    // Zeroes that the guest never wrote must not reach the disk.
                    return faults() == before;
                }
            }
            Stage::Zeroes { done } => {
                if zeroes.count() == 0 {
                    // New memory is zeroed, and no code writes to it.
                    zeroes.allocate(ZERO_PIECE_MAX as usize);
                }
                // SAFETY: the queue keeps the zeroes as long as it has slots.
                unsafe { self.rest.borrow_from(zeroes, 0, (length - done).min(ZERO_PIECE_MAX)) };
            }
            Stage::Transfer { .. }
            | Stage::WriteBack { .. }
            | Stage::Fallocate { .. }
            | Stage::Sync => {}
        }
        true
    }

    /// The next action after the `result` of a step: a count, or a negated `errno`.
    pub(super) fn after(mut self, result: i32) -> Next {
        if result == -libc::EINTR || result == -libc::EAGAIN {
            return Next::Step(self);
        }
        match self.stage {
            Stage::Transfer { .. } | Stage::Zeroes { .. } if result >= 0 => {
                self.progress(result as u64)
            }
            Stage::Fallocate { mode } if result < 0 => self.fallback(mode, -result),
            _ if result < 0 => Next::Done(self, Err(-result)),
            Stage::WriteBack { mode } => {
                self.stage = Stage::Fallocate { mode };
                Next::Step(self)
            }
            Stage::Fallocate { .. } if self.request.flags.force_unit_access => {
                self.stage = Stage::Sync;
                Next::Step(self)
            }
            Stage::Transfer { .. }
            | Stage::Zeroes { .. }
            | Stage::Fallocate { .. }
            | Stage::Sync => Next::Done(self, Ok(())),
        }
    }

    /// Accounts for `count` more bytes.
    pub(super) fn progress(mut self, count: u64) -> Next {
        let length = self.request.length;
        match &mut self.stage {
            Stage::Transfer { done } if count == 0 => {
                let end = self.request.offset + *done;
                // A write of no bytes has not met the end of the file, because files grow.
                if self.request.operation == Operation::Read {
                    Next::End(self, end)
                } else {
                    Next::Done(self, Err(libc::EIO))
                }
            }
            Stage::Transfer { done } => {
                if let (Operation::Read, 1.., Some(bytes)) =
                    (self.request.operation, self.bounce_length, self.bounce.owned())
                {
                    let moved = bytes.len().min(count as usize);
                    self.request.buffers.copy_from(*done, &bytes[..moved]);
                }
                *done += count;
                if *done >= length {
                    return Next::Done(self, Ok(()));
                }
                if self.bounce_length == 0 {
                    let done = *done;
                    // SAFETY: the request and its memory stay in the slot as long as the rest.
                    unsafe { self.rest.borrow_from(&self.request.buffers, done, length - done) };
                }
                Next::Step(self)
            }
            Stage::Zeroes { .. } if count == 0 => Next::Done(self, Err(libc::EIO)),
            Stage::Zeroes { done } => {
                *done += count;
                if *done < length {
                    return Next::Step(self);
                }
                if self.request.flags.force_unit_access {
                    self.stage = Stage::Sync;
                    return Next::Step(self);
                }
                Next::Done(self, Ok(()))
            }
            Stage::WriteBack { .. } | Stage::Fallocate { .. } | Stage::Sync => {
                Next::Done(self, Ok(()))
            }
        }
    }

    /// Chooses another operation after the file system refused a `fallocate` with this mode.
    fn fallback(mut self, mode: i32, errno: i32) -> Next {
        if !matches!(errno, libc::EOPNOTSUPP | libc::ENOSYS | libc::ENODEV) {
            return Next::Done(self, Err(errno));
        }
        if self.request.operation == Operation::Discard {
            // A discard is only a hint.
            return Next::Done(self, Ok(()));
        }
        if mode != ZERO_RANGE {
            self.stage = Stage::Fallocate { mode: ZERO_RANGE };
            return Next::Step(self);
        }
        if self.request.flags.only_if_fast {
            return Next::Unsupported(self);
        }
        self.stage = Stage::Zeroes { done: 0 };
        Next::Step(self)
    }
}
