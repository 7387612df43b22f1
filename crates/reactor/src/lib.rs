//! A thread's one `io_uring`.
//!
//! Read [`Reactor`] first. The crate must not know disks.
//!
//! One thread serves each queue of Fathom, and that thread sleeps only in its reactor. Kicks of a
//! guest, bytes of a client, completions of a file and commands of the daemon all arrive as
//! [`Event`]s of the same ring, so an idle thread is blocked in one system call and uses no CPU.
//!
//! Each component that submits work registers as an [`OperationOwner`]; the events of its
//! submissions carry its mark and the token that it chose. Owners form groups ([`OwnerGroup`]), one
//! for each queue that the thread serves, so that operations in flight are counted for each queue
//! ([`Pending`]). The reactor does not depend on disks.

#![allow(unsafe_code)]
#![warn(missing_docs)]

mod inbox;

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use io_uring::types::{SubmitArgs, Timespec};
use io_uring::{IoUring, Probe, cqueue, opcode, squeue, types};

pub use inbox::Inbox;

/// The bits of a completion's user data that carry the token; the owner's mark is above them.
const TOKEN_BITS: u32 = 48;
const TOKEN_MASK: u64 = (1 << TOKEN_BITS) - 1;
/// The mark of submissions whose completions are ignored.
const NO_OWNER: u16 = u16::MAX;
/// The bit of a submission's mark that means that the submission uses no memory of its owner.
const USES_NO_MEMORY: u16 = 1 << 15;
/// `IORING_ENTER_GETEVENTS`: the kernel looks for completions.
const ENTER_GETEVENTS: u32 = 1;
/// How long a dropped reactor waits for operations in flight.
const DRAIN_LIMIT: Duration = Duration::from_secs(10);
/// How long it waits if some of them are known not to end soon.
const DRAIN_LIMIT_LEFT: Duration = Duration::from_millis(100);

/// A component that submits work to a reactor, made by [`Reactor::register`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OperationOwner(u16);

/// The owners of one queue, made by [`Reactor::begin_group`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OwnerGroup(u64);

/// One completion.
#[derive(Clone, Copy, Debug)]
pub struct Event {
    /// The owner of the submission.
    pub owner: OperationOwner,
    /// The group of the owner.
    pub group: OwnerGroup,
    /// The token of the submission, 48 bits.
    pub token: u64,
    /// The kernel's result: a count, or a negated `errno`.
    pub result: i32,
    /// Whether more events of the same submission follow (multi-shot polls).
    pub more: bool,
}

/// The number of submissions of an [`OwnerGroup`] in flight that use memory. It is shared with the
/// owner of that memory, who must not free the memory while the number is not zero. It outlives the
/// reactor.
#[derive(Clone, Debug, Default)]
pub struct Pending(Arc<AtomicUsize>);

impl Pending {
    /// The number of submissions.
    pub fn count(&self) -> usize {
        self.0.load(Ordering::Acquire)
    }

    /// Sets the count. Only the reactor's thread calls it.
    fn set(&self, count: usize) {
        self.0.store(count, Ordering::Release);
    }
}

/// The state of an owner.
struct Registration {
    group: OwnerGroup,
    pending: Pending,
    /// The number of submissions in flight that use memory.
    in_flight: usize,
    /// The tokens of active watches.
    watches: Vec<u64>,
    /// Whether events of this owner are dropped, because it is retired.
    retired: bool,
}

impl Registration {
    /// Whether no further event of it can arrive.
    fn is_quiet(&self) -> bool {
        self.in_flight == 0 && self.watches.is_empty()
    }
}

/// One thread's ring. The thread that submits first must make all later submissions too.
///
/// Dropping it cancels the operations in flight and waits for their end, for at most 10 s, or much
/// less after [`leave_behind`](Reactor::leave_behind). Afterwards [`Pending`] has the number of
/// those that have not ended.
pub struct Reactor {
    ring: IoUring,
    owners: Vec<Registration>,
    /// Owners that are retired and quiet: their marks are reused.
    free: Vec<OperationOwner>,
    /// Watches of retired owners that had an event and have to be ended again.
    lingering: Vec<(OperationOwner, u64)>,
    /// The group of new owners, and the count that they share.
    group: OwnerGroup,
    pending: Pending,
    groups: u64,
    /// The number of submissions of all owners in flight that use memory.
    in_flight: usize,
    /// Entries that did not fit in the submission queue.
    backlog: VecDeque<squeue::Entry>,
    /// Entries pushed since the last system call.
    unsubmitted: usize,
    /// The number of all entries so far.
    queued: u64,
    /// Of so many of them, all events that their submission had have been collected.
    settled: u64,
    /// The number of calls that may have taken time: see [`Reactor::rounds`].
    rounds: u64,
    /// How long the drop waits for operations in flight.
    drain_limit: Duration,
    /// Whether completions are deferred until the thread enters the kernel.
    defers: bool,
    /// Whether the kernel's flag for deferred work is ignored. Another processor may set the flag
    /// after this processor has already done the work; a thread that respected it then would never
    /// sleep. The flag is respected again after the next push or sleep.
    false_alarm: bool,
}

impl Reactor {
    /// A ring with a submission queue of `entries` entries (rounded up to a power of two).
    ///
    /// # Errors
    /// When the kernel refuses a ring: `io_uring` disabled (`kernel.io_uring_disabled`), a seccomp
    /// filter, or no memory.
    pub fn new(entries: u32) -> io::Result<Self> {
        let modern = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag()
            .setup_cqsize(entries * 4)
            .setup_clamp()
            .build(entries);
        let (ring, defers) = match modern {
            Ok(ring) => (ring, true),
            // Kernels before 6.1 have no deferred task work.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                (IoUring::builder().setup_cqsize(entries * 4).setup_clamp().build(entries)?, false)
            }
            Err(error) => return Err(error),
        };
        Ok(Self {
            ring,
            owners: Vec::new(),
            free: Vec::new(),
            lingering: Vec::new(),
            group: OwnerGroup::default(),
            pending: Pending::default(),
            groups: 0,
            in_flight: 0,
            backlog: VecDeque::new(),
            unsubmitted: 0,
            queued: 0,
            settled: 0,
            rounds: 0,
            drain_limit: DRAIN_LIMIT,
            defers,
            false_alarm: false,
        })
    }

    /// Begins a new group: owners that register from now on belong to it.
    pub fn begin_group(&mut self) -> OwnerGroup {
        self.groups += 1;
        self.group = OwnerGroup(self.groups);
        self.pending = Pending::default();
        self.group
    }

    /// Makes `group` the current group: owners that register from now on belong to it and count in
    /// `pending`, which must be the group's [`pending`](Self::pending).
    pub fn enter(&mut self, group: OwnerGroup, pending: &Pending) {
        if self.group != group {
            self.group = group;
            self.pending = pending.clone();
        }
    }

    /// The current group.
    pub fn group(&self) -> OwnerGroup {
        self.group
    }

    /// Registers a new owner of submissions, in the current group.
    ///
    /// # Panics
    /// When there are already 32,767 owners.
    pub fn register(&mut self) -> OperationOwner {
        let registration = Registration {
            group: self.group,
            pending: self.pending.clone(),
            in_flight: 0,
            watches: Vec::new(),
            retired: false,
        };
        if let Some(owner) = self.free.pop() {
            self.owners[usize::from(owner.0)] = registration;
            return owner;
        }
        let owner = OperationOwner(u16::try_from(self.owners.len()).unwrap_or(USES_NO_MEMORY));
        assert!(owner.0 < USES_NO_MEMORY, "a reactor has at most 32,767 owners");
        self.owners.push(registration);
        owner
    }

    /// Ends the watches of `owner`, which must not submit anything afterwards. Its later events are
    /// dropped. When it has no submissions in flight, another owner may get its mark.
    pub fn retire(&mut self, owner: OperationOwner) {
        let Some(registration) = self.owners.get_mut(usize::from(owner.0)) else { return };
        if std::mem::replace(&mut registration.retired, true) {
            return;
        }
        let quiet = registration.is_quiet();
        for token in registration.watches.clone() {
            self.unwatch(owner, token);
        }
        if quiet {
            self.free.push(owner);
        }
    }

    /// [Retires](Self::retire) all owners of `group`.
    pub fn retire_group(&mut self, group: OwnerGroup) {
        for index in 0..self.owners.len() {
            if self.owners[index].group == group {
                self.retire(OperationOwner(index as u16));
            }
        }
    }

    /// The number of registered owners that are not retired.
    pub fn owners(&self) -> usize {
        self.owners.iter().filter(|owner| !owner.retired).count()
    }

    /// The operations that this kernel's `io_uring` supports.
    ///
    /// # Errors
    /// When the kernel refuses the probe.
    pub fn probe(&self) -> io::Result<Probe> {
        let mut probe = Probe::new();
        self.ring.submitter().register_probe(&mut probe)?;
        Ok(probe)
    }

    /// The number of submissions of the current group in flight that use memory.
    pub fn pending(&self) -> Pending {
        self.pending.clone()
    }

    /// Queues `entry`; it reaches the kernel with the next [`submit`](Self::submit) or
    /// [`wait`](Self::wait).
    ///
    /// # Safety
    /// All memory and descriptors that `entry` names must stay valid until its event arrives.
    pub unsafe fn push(&mut self, owner: OperationOwner, token: u64, entry: squeue::Entry) {
        let registration = &mut self.owners[usize::from(owner.0)];
        registration.in_flight += 1;
        registration.pending.set(registration.pending.count() + 1);
        self.in_flight += 1;
        // SAFETY: the caller keeps the entry's memory and descriptors valid until its event.
        unsafe { self.enqueue(owner.0, token, entry) };
    }

    /// Queues `entry`, which has an event only if it fails. It must never wait, so that the kernel
    /// carries it out within the call that submits it. It has succeeded if it has had no event by
    /// the time at which [`is_settled`](Self::is_settled) is true for the number that this returns.
    /// Needs a reactor that [defers](Self::defers_completions).
    ///
    /// # Safety
    /// All memory and descriptors that `entry` names must stay valid until then.
    pub unsafe fn push_silent(
        &mut self,
        owner: OperationOwner,
        token: u64,
        entry: squeue::Entry,
    ) -> u64 {
        let entry = entry.flags(squeue::Flags::SKIP_SUCCESS);
        // SAFETY: the caller keeps the entry's memory and descriptors valid.
        unsafe { self.enqueue(owner.0 | USES_NO_MEMORY, token, entry) };
        self.queued
    }

    /// Whether the kernel has taken the entry with this number, and the event that it may have had
    /// then has been collected.
    pub fn is_settled(&mut self, number: u64) -> bool {
        if self.ring.completion().is_empty() && !self.ring.submission().cq_overflow() {
            self.settled = self.taken();
        }
        self.settled >= number
    }

    /// The number of entries that the kernel has taken.
    fn taken(&self) -> u64 {
        self.queued - self.unsubmitted as u64
    }

    /// Whether completions are deferred until the thread enters the kernel: since Linux 6.1.
    pub fn defers_completions(&self) -> bool {
        self.defers
    }

    /// # Safety
    /// As for [`push`](Self::push).
    unsafe fn enqueue(&mut self, mark: u16, token: u64, entry: squeue::Entry) {
        debug_assert!(token <= TOKEN_MASK);
        let entry = entry.user_data((u64::from(mark) << TOKEN_BITS) | (token & TOKEN_MASK));
        self.unsubmitted += 1;
        self.queued += 1;
        self.false_alarm = false;
        if !self.backlog.is_empty() {
            self.backlog.push_back(entry);
            return;
        }
        // SAFETY: the caller keeps the entry's memory and descriptors valid until its event.
        if unsafe { self.ring.submission().push(&entry) }.is_err() {
            self.backlog.push_back(entry);
        }
    }

    /// Requests one event when `descriptor` is readable. The next event needs another call.
    ///
    /// The descriptor must stay open until the event has arrived or the reactor is dropped.
    pub fn watch(&mut self, owner: OperationOwner, token: u64, descriptor: BorrowedFd<'_>) {
        self.poll(owner, token, descriptor.as_raw_fd(), libc::POLLIN as u32, false);
    }

    /// Requests one event when `descriptor` is writable. The next event needs another call.
    pub fn watch_writable(
        &mut self,
        owner: OperationOwner,
        token: u64,
        descriptor: BorrowedFd<'_>,
    ) {
        self.poll(owner, token, descriptor.as_raw_fd(), libc::POLLOUT as u32, false);
    }

    /// Requests one event when the other side of the socket `descriptor` has closed it, or its
    /// sending side, even if not all of its bytes have been read.
    pub fn watch_hang_up(&mut self, owner: OperationOwner, token: u64, descriptor: BorrowedFd<'_>) {
        self.poll(owner, token, descriptor.as_raw_fd(), libc::POLLRDHUP as u32, false);
    }

    /// Requests an event each time `descriptor` becomes readable, until an event whose `more` is
    /// false.
    pub fn watch_always(&mut self, owner: OperationOwner, token: u64, descriptor: BorrowedFd<'_>) {
        self.poll(owner, token, descriptor.as_raw_fd(), libc::POLLIN as u32, true);
    }

    fn poll(
        &mut self,
        owner: OperationOwner,
        token: u64,
        descriptor: RawFd,
        mask: u32,
        multi: bool,
    ) {
        self.owners[usize::from(owner.0)].watches.push(token);
        let entry = opcode::PollAdd::new(types::Fd(descriptor), mask).multi(multi).build();
        // SAFETY: a poll uses no memory; the kernel holds the file after the submission.
        unsafe { self.enqueue(owner.0 | USES_NO_MEMORY, token, entry) };
    }

    /// Cancels the submission that `owner` has [pushed](Self::push) with `token`. The cancelled
    /// submission still gets its event.
    pub fn cancel(&mut self, owner: OperationOwner, token: u64) {
        let entry =
            opcode::AsyncCancel::new((u64::from(owner.0) << TOKEN_BITS) | (token & TOKEN_MASK))
                .build();
        // SAFETY: a cancellation uses no memory.
        unsafe { self.enqueue(NO_OWNER, 0, entry) };
    }

    /// Ends a [watch](Self::watch) of `owner` with `token`. Its pending events still arrive; the
    /// last one reports its end.
    pub fn unwatch(&mut self, owner: OperationOwner, token: u64) {
        let mark = owner.0 | USES_NO_MEMORY;
        let data = (u64::from(mark) << TOKEN_BITS) | (token & TOKEN_MASK);
        // SAFETY: a cancellation uses no memory.
        unsafe { self.enqueue(NO_OWNER, 0, opcode::PollRemove::new(data).build()) };
    }

    /// Operations in flight are known not to end soon, and their memory will be kept: the drop
    /// hardly waits.
    pub fn leave_behind(&mut self) {
        self.drain_limit = DRAIN_LIMIT_LEFT;
    }

    /// Cancels all submissions and waits, for at most `limit`, and hardly after
    /// [`leave_behind`](Self::leave_behind), until none that uses memory is in
    /// flight. Returns whether none is. Events are dropped: this is for the end of a reactor after
    /// a failure.
    pub fn drain(&mut self, limit: Duration) -> bool {
        if self.in_flight == 0 {
            return true;
        }
        let limit = limit.min(self.drain_limit);
        let start = Instant::now();
        let all = types::CancelBuilder::any();
        // Kernels before 5.19 cannot cancel all submissions in one step: there they are only waited
        // for.
        let cancel = opcode::AsyncCancel2::new(all).build();
        // SAFETY: a cancellation uses no memory.
        unsafe { self.enqueue(NO_OWNER, 0, cancel) };
        let mut events = Vec::new();
        while self.in_flight > 0 {
            let left = limit.saturating_sub(start.elapsed());
            if left.is_zero() || self.wait(Some(left)).is_err() {
                break;
            }
            if self.collect(&mut events).is_err() {
                break;
            }
            events.clear();
        }
        self.in_flight == 0
    }

    /// Submits the queued entries to the kernel without waiting. Makes no system call if there are
    /// none.
    ///
    /// # Errors
    /// When the kernel refuses the ring itself (never because of a single entry).
    pub fn submit(&mut self) -> io::Result<()> {
        self.rounds += 1;
        while self.unsubmitted > 0 {
            self.fill();
            match self.ring.submit() {
                Ok(0) => break,
                Ok(count) => self.unsubmitted = self.unsubmitted.saturating_sub(count),
                Err(error) if is_transient(&error) => break,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Submits the queued entries to the kernel and sleeps until there is an event or `limit` has
    /// passed; `None` is no limit. A signal ends the sleep early.
    ///
    /// # Errors
    /// When the kernel refuses the ring itself.
    pub fn wait(&mut self, limit: Option<Duration>) -> io::Result<()> {
        self.rounds += 1;
        self.fill();
        if !self.backlog.is_empty() {
            // More entries are queued than fit in the ring: submit them ring by ring.
            self.submit()?;
        }
        if !self.ring.completion().is_empty() {
            return self.submit();
        }
        self.false_alarm = false;
        let result = match limit {
            None => self.ring.submit_and_wait(1),
            Some(limit) if limit.is_zero() => self.look(),
            Some(limit) => {
                let time = Timespec::new().sec(limit.as_secs()).nsec(limit.subsec_nanos());
                self.ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&time))
            }
        };
        match result {
            Ok(count) => {
                self.unsubmitted = self.unsubmitted.saturating_sub(count);
                Ok(())
            }
            Err(error) if error.raw_os_error() == Some(libc::ETIME) => {
                // The kernel took the entries before the sleep.
                self.unsubmitted = self.backlog.len() + self.ring.submission().len();
                Ok(())
            }
            Err(error) if is_transient(&error) => {
                self.unsubmitted = self.backlog.len() + self.ring.submission().len();
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Submits the entries in the ring, and lets the kernel do its deferred work, without a timer.
    fn look(&mut self) -> io::Result<usize> {
        let entries = self.ring.submission().len() as u32;
        // SAFETY: There is no argument. The entries are those of `submit`.
        unsafe { self.ring.submitter().enter::<libc::sigset_t>(entries, 0, ENTER_GETEVENTS, None) }
    }

    /// Whether [`collect`](Self::collect) would find an event now. Reads two shared words and makes
    /// no system call, so it is suitable for polling.
    pub fn is_ready(&mut self) -> bool {
        !self.ring.completion().is_empty() || self.has_deferred()
    }

    /// Whether the kernel has completions that it posts when the thread enters it: as deferred
    /// work, unless the flag is a false alarm, or because the completion queue was full.
    fn has_deferred(&mut self) -> bool {
        let queue = self.ring.submission();
        !self.false_alarm && queue.taskrun() || queue.cq_overflow()
    }

    /// The number of calls that submitted, waited or collected. While it does not change, so little
    /// time passes that one reading of a clock is enough.
    pub fn rounds(&self) -> u64 {
        self.rounds
    }

    /// The number of entries to be submitted to the kernel.
    pub fn unsubmitted(&self) -> usize {
        self.unsubmitted
    }

    /// Whether there are entries to be submitted to the kernel.
    pub fn has_unsubmitted(&self) -> bool {
        self.unsubmitted > 0
    }

    /// Appends the events that have arrived to `events`, in order of arrival.
    ///
    /// # Errors
    /// When the kernel refuses the ring itself.
    pub fn collect(&mut self, events: &mut Vec<Event>) -> io::Result<()> {
        self.rounds += 1;
        if self.ring.completion().is_empty() && self.has_deferred() {
            // Entering the kernel posts them.
            self.fill();
            match self.look() {
                Ok(count) => self.unsubmitted = self.unsubmitted.saturating_sub(count),
                Err(error) if is_transient(&error) => {
                    self.unsubmitted = self.backlog.len() + self.ring.submission().len();
                }
                Err(error) => return Err(error),
            }
            self.false_alarm = self.ring.completion().is_empty();
        }
        let taken = self.taken();
        for entry in self.ring.completion() {
            let data = entry.user_data();
            let mark = (data >> TOKEN_BITS) as u16;
            if mark == NO_OWNER {
                continue;
            }
            let owner = OperationOwner(mark & !USES_NO_MEMORY);
            let token = data & TOKEN_MASK;
            let more = cqueue::more(entry.flags());
            let registration = &mut self.owners[usize::from(owner.0)];
            if !more {
                if mark & USES_NO_MEMORY == 0 {
                    self.in_flight = self.in_flight.saturating_sub(1);
                    registration.in_flight = registration.in_flight.saturating_sub(1);
                    registration.pending.set(registration.pending.count().saturating_sub(1));
                } else if let Some(index) = registration.watches.iter().position(|t| *t == token) {
                    registration.watches.swap_remove(index);
                }
            }
            let group = registration.group;
            if registration.retired {
                if more {
                    // The kernel does not end a watch that is just reporting an event, so it is
                    // ended again below.
                    self.lingering.push((owner, token));
                } else if registration.is_quiet() {
                    self.free.push(owner);
                }
                continue;
            }
            events.push(Event { owner, group, token, result: entry.result(), more });
        }
        if !self.ring.submission().cq_overflow() {
            self.settled = taken;
        }
        while let Some((owner, token)) = self.lingering.pop() {
            self.unwatch(owner, token);
        }
        Ok(())
    }

    /// Moves entries from the backlog into the submission queue until it is full.
    fn fill(&mut self) {
        while let Some(entry) = self.backlog.front() {
            // SAFETY: the caller of `push` keeps the entry's memory and descriptors valid until its
            // event.
            if unsafe { self.ring.submission().push(entry) }.is_err() {
                break;
            }
            self.backlog.pop_front();
        }
    }
}

impl Drop for Reactor {
    fn drop(&mut self) {
        self.drain(DRAIN_LIMIT);
    }
}

/// Whether an error of `io_uring_enter` is temporary: a signal, or a full completion queue that the
/// caller is about to empty.
fn is_transient(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY))
}

#[cfg(test)]
mod tests;
