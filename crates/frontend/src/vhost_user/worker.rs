//! A ring.
//!
//! A thread drives one or more rings of a guest: it takes requests off a ring, sends them through
//! the ring's stack, and gives completed requests back to the guest. The session's thread changes a
//! ring through [`WorkerHandle::update`](super::mailbox::WorkerHandle::update), which runs a
//! closure on the ring's thread, between two rounds. So nothing on the request path is shared or
//! locked.

mod absent;
mod intake;
mod stop;

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use fathom_block::{Clock, Disk, ErrorKind, Mailbox, Operation, Outcome, RequestSource, Stack};
use fathom_guest_memory::{DirtyLog, GuestAddress, Lease, MemoryOwner, Purpose};
use fathom_reactor::{Event, OperationOwner, OwnerGroup, Reactor};

use self::absent::AbsentRequests;
use super::chain::Chain;
use super::event::{self, Call};
use super::inflight::QueueInflight;
use super::mailbox::Command;
use super::private_memory::{PrivateMemory, PrivateMemoryDetector};
use super::request::{self, Segment};
use super::ring::Ring;
use super::status::{BrokenRing, Counters};

/// The most requests that are taken before completed ones are given back: few enough that the guest
/// works on the first while the last are being served.
const BATCH: usize = 16;
/// The most repetitions of a request that earlier daemons or connections have not completed. After
/// these it fails, because it may have ended them.
const REPEATS_MAX: u8 = 8;
const TOKEN_KICK: u64 = 0;

/// The parameters of a new ring.
pub(super) struct WorkerStart {
    pub disk: Arc<Disk>,
    pub ring: Ring,
    pub kick: File,
    pub call: Option<Call>,
    pub enabled: bool,
    /// Whether the guest has accepted the volatile write cache; if not, every write is durable.
    pub write_back: bool,
    pub log: Option<Arc<DirtyLog>>,
    pub inflight: Option<QueueInflight>,
    pub private_memory: Arc<PrivateMemory>,
    pub memory_owner: Arc<MemoryOwner>,
    pub counters: Arc<Counters>,
}

/// The state of the request at a head while it is in flight.
struct Taken {
    /// Requests sent through the stack for it and not yet completed; 0 if the head is free.
    left: u16,
    /// The first failure among them.
    outcome: Outcome,
    /// The number of bytes written to its data if it succeeds.
    written: u32,
    status: GuestAddress,
    /// The lease on the status byte of a memory with a pager: it has to be there at the end.
    status_lease: Option<Lease>,
}

impl Taken {
    /// The state of a free head.
    const FREE: Self =
        Self { left: 0, outcome: Ok(()), written: 0, status: GuestAddress(0), status_lease: None };
}

/// The state of a ring, used only by the ring's thread.
pub(super) struct Worker {
    pub ring: Ring,
    pub call: Option<Call>,
    pub enabled: bool,
    pub log: Option<Arc<DirtyLog>>,
    disk: Arc<Disk>,
    kick: File,
    write_back: bool,
    inflight: Option<QueueInflight>,
    counters: Arc<Counters>,
    detector: PrivateMemoryDetector,
    mailbox: Arc<Mailbox<Command>>,
    /// Whether the thread is writing to a descriptor that the VMM also holds.
    writing: Arc<AtomicBool>,
    group: OwnerGroup,
    owner: OperationOwner,
    stack: Stack,
    /// The owner of the guest's memory. Once some of the memory is lost, no request is taken or
    /// given back.
    memory_owner: Arc<MemoryOwner>,
    taken: Vec<Taken>,
    /// Heads of requests of an earlier daemon, to be carried out before all others.
    recovered: VecDeque<u16>,
    /// Whether some of them have been repeated before. Then each is carried out alone, so that only
    /// a request that ends the daemon has its repetitions counted.
    careful: bool,
    ended: bool,
    /// Whether a command waits until nothing is in flight.
    draining: bool,
    /// The index in the ring of available requests from which each head was taken; `None` for those
    /// of an earlier daemon.
    positions: Vec<Option<u16>>,
    /// Heads of requests that were taken back from the disk's layers, to be carried out again.
    deferred: Vec<u16>,
    /// Requests that wait for pages that the guest's pager has taken away.
    absent: AbsentRequests,
    /// Until when a stop waits for requests that cannot be given back otherwise, in nanoseconds.
    finish_ns: Option<u64>,
    /// Whether the ring's contents were invalid: no more requests are taken from it.
    broken: Option<BrokenRing>,
    heads: Vec<u16>,
    chain: Chain,
    segments: Vec<Segment>,
    /// Whether the ring took requests when the thread began to look for work.
    open: bool,
    /// Whether the guest was asked to kick.
    armed: bool,
}

impl Worker {
    pub(super) fn new(
        start: WorkerStart,
        mailbox: Arc<Mailbox<Command>>,
        writing: Arc<AtomicBool>,
        reactor: &mut Reactor,
    ) -> io::Result<Self> {
        event::check(&start.kick, "kick")?;
        let owner = reactor.register();
        let stack = start.disk.open_queue(reactor, Clock::System)?;
        reactor.watch_always(owner, TOKEN_KICK, start.kick.as_fd());
        let size = usize::from(start.ring.size());
        let mut worker = Self {
            taken: std::iter::repeat_with(|| Taken::FREE).take(size).collect(),
            memory_owner: start.memory_owner,
            ring: start.ring,
            call: start.call,
            enabled: start.enabled,
            log: start.log,
            disk: start.disk,
            kick: start.kick,
            write_back: start.write_back,
            inflight: start.inflight,
            counters: start.counters,
            detector: PrivateMemoryDetector::new(start.private_memory),
            mailbox,
            writing,
            group: reactor.group(),
            owner,
            stack,
            recovered: VecDeque::new(),
            careful: false,
            ended: false,
            draining: false,
            positions: vec![None; size],
            deferred: Vec::new(),
            absent: AbsentRequests::default(),
            finish_ns: None,
            broken: None,
            heads: Vec::with_capacity(BATCH),
            chain: Chain::default(),
            segments: Vec::new(),
            open: false,
            armed: false,
        };
        if let Err(error) = worker.recover() {
            worker.stack.end(reactor);
            return Err(error);
        }
        worker.ring.disable_notifications();
        // An earlier daemon may have died between giving a request back and the interrupt. A
        // superfluous interrupt does no harm; a missing one leaves the guest waiting for ever.
        worker.interrupt();
        Ok(worker)
    }

    /// Finds the requests that an earlier daemon has taken and not given back.
    fn recover(&mut self) -> io::Result<()> {
        let Some(inflight) = &mut self.inflight else { return Ok(()) };
        let used_index = self.ring.used_index();
        if self.memory_owner.is_lost() {
            // The index is not the guest's, and recorded requests must not be taken for completed
            // ones.
            return Err(io::Error::other("the guest's memory is lost"));
        }
        let mut recovered = inflight.recover(used_index);
        // The in-flight memory may have more entries than the ring.
        recovered.retain(|&head| head < self.ring.size());
        self.careful = recovered.iter().any(|&head| inflight.is_repeated(head));
        self.recovered = recovered.into();
        // The front end knows only the count of requests given back; the rest were taken as well.
        self.ring.set_next_available(used_index.wrapping_add(self.recovered.len() as u16));
        if !self.recovered.is_empty() {
            tracing::info!(
                disk = self.disk.name(),
                requests = self.recovered.len(),
                "repeating requests that had not completed when the ring stopped or the daemon ended"
            );
            self.counters.recovered.fetch_add(self.recovered.len() as u64, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Whether the ring takes requests.
    fn is_serving(&self) -> bool {
        self.enabled
            && !self.draining
            && self.broken.is_none()
            && !self.stack.is_closing()
            && !self.memory_owner.is_lost()
    }

    /// Repeats a request that an earlier daemon had taken.
    fn repeat(&mut self, head: u16, reactor: &Reactor) {
        let repeats = self.inflight.as_mut().map_or(0, |inflight| inflight.repeat(head));
        if repeats < REPEATS_MAX {
            return self.begin(head, reactor);
        }
        self.counters.refused.fetch_add(1, Ordering::Relaxed);
        tracing::error!(
            disk = self.disk.name(),
            vm = self.disk.vm(),
            "a request fails after {repeats} repetitions without a completion"
        );
        // With a pager, the byte of the status may have been away.
        if repeats == REPEATS_MAX || self.ring.memory().pager_identity() != 0 {
            return self.fail(head);
        }
        // The last attempt to set the status has not succeeded.
        self.return_head(head, 0);
        self.publish();
    }

    /// Warns the operator of a misbehaving guest, once for each connection. Every refusal is
    /// counted.
    fn warn(&self, what: &str) {
        if !self.counters.warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                disk = self.disk.name(),
                vm = self.disk.vm(),
                "refused from the guest: {what}; further refusals are only counted"
            );
        }
    }

    fn break_ring(&mut self, what: &str) {
        if self.memory_owner.is_lost() {
            // The lost memory reads as zeroes that the guest never wrote.
            self.broken = Some(BrokenRing::uncounted());
            return;
        }
        self.broken = Some(BrokenRing::counted(&self.counters));
        tracing::error!(
            disk = self.disk.name(),
            vm = self.disk.vm(),
            "the ring is out of use until the guest resets its device: {what}"
        );
    }

    /// Gives completed requests back to the guest. Returns whether there were any.
    fn give_back(&mut self) -> bool {
        if !self.stack.has_completed() {
            return false;
        }
        while let Some((request, outcome)) = self.stack.completed() {
            let head = request.token as u16;
            if let (Some(log), Operation::Read | Operation::GetId) = (&self.log, request.operation)
            {
                log.mark_buffers(&request.buffers);
            }
            self.stack.recycle(request);
            self.complete(head, outcome);
        }
        self.publish();
        true
    }

    /// Counts the completion of one of the stack requests of `head`.
    fn complete(&mut self, head: u16, outcome: Outcome) {
        let taken = &mut self.taken[usize::from(head)];
        let withdrawn = Err(ErrorKind::Withdrawn);
        // A request of which one part has failed is not carried out again.
        if taken.outcome.is_ok() || taken.outcome == withdrawn && outcome.is_err() {
            taken.outcome = outcome;
        }
        taken.left -= 1;
        if taken.left > 0 {
            return;
        }
        let Taken { outcome, written, status, .. } = *taken;
        // Until the end of this function, the byte is there.
        let _status_lease = taken.status_lease.take();
        if outcome == withdrawn {
            return self.deferred.push(head);
        }
        if self.memory_owner.is_lost() {
            // The request's data may have come from, or gone to, a page that is no longer the
            // guest's.
            return;
        }
        // There was memory when the request was taken, and it is replaced only when nothing is in
        // flight.
        if let Some(access) = self.ring.memory().access(status.0, 1, Purpose::Write) {
            access.write(0, &[request::status(outcome)]);
        }
        if let Some(log) = &self.log {
            log.mark(status, 1);
        }
        if self.memory_owner.is_lost() {
            return;
        }
        let written = if outcome.is_ok() { written } else { 0 };
        self.return_head(head, written.saturating_add(1));
    }

    /// Completes the request of `head` without the disk.
    fn finish(&mut self, head: u16, outcome: Outcome) {
        self.taken[usize::from(head)].left = 1;
        self.complete(head, outcome);
        self.publish();
    }

    fn return_head(&mut self, head: u16, written: u32) {
        if let Some(inflight) = &mut self.inflight {
            inflight.give_back(head);
        }
        self.ring.give_back(head, written);
    }

    /// Lets the guest see the requests given back, and interrupts it if necessary.
    fn publish(&mut self) {
        if self.memory_owner.is_lost() {
            return;
        }
        self.ring.publish();
        if let Some(inflight) = &mut self.inflight {
            inflight.published(self.ring.next_used());
        }
        if let Some(log) = &self.log {
            let (address, length) = self.ring.used_range();
            log.mark(address, length);
        }
        if self.ring.needs_interrupt() {
            self.interrupt();
        }
    }

    /// Has layers that only observe drop what they have of the guest's memory of before.
    pub(super) fn refresh_observers(&mut self) {
        self.stack.refresh_observers();
    }

    /// Interrupts the guest.
    pub(super) fn interrupt(&mut self) {
        if let Some(call) = &mut self.call {
            call.signal(&self.writing);
        }
    }

    /// Whether new requests can be taken: not while an earlier daemon's requests run one by one.
    fn is_open(&self) -> bool {
        self.is_serving() && (!self.careful || self.recovered.is_empty())
    }
}

impl RequestSource for Worker {
    fn stack(&mut self) -> &mut Stack {
        &mut self.stack
    }

    fn group(&self) -> OwnerGroup {
        self.group
    }

    fn take(&mut self, reactor: &mut Reactor) -> bool {
        if !self.is_serving() {
            return false;
        }
        if self.is_absent_held() {
            return false;
        }
        if self.is_absent_due() {
            self.repeat_absent(reactor);
            self.heads.clear();
        } else if !self.deferred.is_empty() {
            if self.careful && self.stack.in_flight() > 0 {
                return false;
            }
            self.repeat_deferred(reactor);
            self.heads.clear();
        } else if !self.recovered.is_empty() {
            if self.careful && self.stack.in_flight() > 0 {
                return false;
            }
            let count = if self.careful { 1 } else { self.recovered.len().min(BATCH) };
            for _ in 0..count {
                let Some(head) = self.recovered.pop_front() else { break };
                self.repeat(head, reactor);
            }
            self.heads.clear();
        } else if self.ring.has_available() {
            self.detector.mark_shared();
            self.heads.clear();
            let first = self.ring.next_available();
            if let Err(error) = self.ring.take(BATCH, &mut self.heads) {
                self.break_ring(error.name());
            }
            for (position, head) in self.heads.iter().enumerate() {
                let position = first.wrapping_add(position as u16);
                self.positions[usize::from(*head)] = Some(position);
            }
        } else {
            return false;
        }
        for index in 0..self.heads.len() {
            let head = self.heads[index];
            if self.taken[usize::from(head)].left > 0 || self.put_aside().any(|other| other == head)
            {
                // Two requests would share its entry and its memory.
                self.break_ring("a request that is available twice");
                break;
            }
            if let Some(inflight) = &mut self.inflight {
                inflight.take(head);
            }
            self.begin(head, reactor);
        }
        if let Err(error) = self.stack.run_round(reactor) {
            self.break_ring(&error.to_string());
        }
        true
    }

    fn give(&mut self, reactor: &mut Reactor) -> bool {
        let mut busy = self.give_back();
        if self.mailbox.is_pending() {
            busy |= self.take_commands(reactor);
        }
        busy
    }

    /// A kick.
    fn signal(&mut self, event: &Event, reactor: &mut Reactor) {
        event::take(&self.kick);
        self.detector.kicked(self.stack.now_ns());
        if !event.more {
            reactor.watch_always(self.owner, TOKEN_KICK, self.kick.as_fd());
        }
    }

    fn is_ready(&mut self, _: &mut Reactor) -> bool {
        self.open && self.ring.has_available()
    }

    fn rest(&mut self, now_ns: u64, reactor: &mut Reactor) -> u64 {
        self.open = self.is_open();
        if self.detector.deadline_ns() <= now_ns && self.detector.examine(&self.ring) {
            // The component that watches the disk reports the private memory.
            self.disk.failures().call();
        }
        if self.stack.is_closing() {
            // The change of the layers waits until nothing is in flight.
            self.stack.withdraw(reactor);
            if self.stack.has_completed() {
                return now_ns;
            }
        }
        let finish_ns = self.finish_ns.unwrap_or(u64::MAX);
        self.detector.deadline_ns().min(finish_ns).min(self.absent_deadline_ns())
    }

    fn arm(&mut self, _: &mut Reactor) -> bool {
        self.armed = self.open;
        self.armed && self.ring.enable_notifications()
    }

    fn disarm(&mut self) {
        if std::mem::take(&mut self.armed) {
            self.ring.disable_notifications();
        }
    }

    fn fail(&mut self, error: &io::Error) {
        self.break_ring(&error.to_string());
    }

    fn is_ended(&self) -> bool {
        self.ended
    }
}

impl Drop for Worker {
    /// After a failure requests may be in flight, and the kernel may still use their memory.
    fn drop(&mut self) {
        if self.stack.holds_memory() {
            tracing::error!(
                disk = self.disk.name(),
                "requests of a failed queue are still in flight: their memory stays mapped"
            );
            std::mem::forget(self.ring.memory().clone());
        }
    }
}
