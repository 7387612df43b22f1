//! Requests on their way to the server, and what happens when they complete.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::time::Duration;

use fathom_block::{BackendProblem, ErrorKind, Flags, Operation, PartAnswer};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::record::ExportRecord;
use crate::unflushed::Unflushed;
use crate::wire::{RequestHeader, command, error, flag};

/// What the server is asked.
#[derive(Clone)]
pub(crate) struct Asked {
    pub(crate) operation: Operation,
    pub(crate) offset: u64,
    pub(crate) length: u64,
    pub(crate) flags: Flags,
    /// The bytes of a write.
    pub(crate) data: Arc<[u8]>,
}

impl Asked {
    /// A flush.
    pub(crate) fn flush() -> Self {
        let data = Arc::from([]);
        Self { operation: Operation::Flush, offset: 0, length: 0, flags: Flags::default(), data }
    }

    /// Whether both change the same place, so that their order matters.
    fn meets(&self, other: &Self) -> bool {
        let (end, other_end) = (self.offset + self.length, other.offset + other.length);
        self.operation.modifies()
            && other.operation.modifies()
            && self.offset < other_end
            && other.offset < end
    }

    /// The part within the first `capacity` bytes; `None` if there is none.
    pub(crate) fn within(mut self, capacity: u64) -> Option<Self> {
        let left = capacity.checked_sub(self.offset).filter(|left| *left > 0)?;
        if self.length > left {
            self.length = left;
            let data = &self.data[..self.data.len().min(left as usize)];
            self.data = Arc::from(data);
        }
        Some(self)
    }

    /// The header on the wire.
    pub(crate) fn header(&self, cookie: u64) -> RequestHeader {
        let command = match self.operation {
            Operation::Write => command::WRITE,
            Operation::Flush => command::FLUSH,
            Operation::Discard => command::TRIM,
            Operation::WriteZeroes => command::WRITE_ZEROES,
            Operation::Read | Operation::GetId | Operation::Extents => command::READ,
        };
        let mut flags = 0;
        for (is_set, bit) in [
            (self.flags.force_unit_access && self.operation.modifies(), flag::FUA),
            (self.flags.keep_allocated, flag::NO_HOLE),
            (self.flags.only_if_fast, flag::FAST_ZERO),
        ] {
            flags |= if is_set { bit } else { 0 };
        }
        RequestHeader { flags, command, cookie, offset: self.offset, length: self.length }
    }
}

/// A part of a request.
pub(crate) struct Job {
    pub(crate) asked: Asked,
    /// `None`: the session's own flush.
    pub(crate) answer: Option<PartAnswer>,
    /// When it fails at the latest.
    pub(crate) deadline: Instant,
}

impl Job {
    pub(crate) fn finish(self, found: Result<Vec<u8>, ErrorKind>) {
        if let Some(answer) = self.answer {
            answer.finish(found);
        }
    }
}

/// For how long a server may still carry out a change of a connection that was given up. The
/// protocol knows no limit; this is twice the time limit of an operating system for a request to
/// its disk.
const LATE_TIME_MAX: Duration = Duration::from_secs(60);

/// The `errno` of a loss: the protocol has no more precise one for a flush.
const LOSS_ERRNO: i32 = 5;

/// What the back end reports of its thread.
#[derive(Default)]
pub(crate) struct ThreadReport {
    /// What a later daemon has to know, if somebody keeps that.
    pub(crate) record: Option<Arc<dyn ExportRecord>>,
    /// The `errno` of the last loss, whether an earlier daemon had it, and whether it could not be
    /// recorded.
    errno: AtomicI32,
    is_earlier: AtomicBool,
    is_unrecorded: AtomicBool,
    /// Why there is no connection.
    pub(crate) unreachable: Mutex<Option<String>>,
    /// How often acknowledged changes may have been lost, and how often changes were accepted again
    /// after that.
    losses: AtomicU64,
    /// The connections so far.
    pub(crate) connections: AtomicU64,
    /// When a connection was last given up whose server had a change.
    given_up: Mutex<Option<Instant>>,
    /// The size of the disk, in bytes. That of the export may be greater.
    pub(crate) capacity: AtomicU64,
    /// The disk has another size, which a connection has to begin with.
    pub(crate) renewed: Notify,
    /// Nobody asks anything any more.
    pub(crate) left: Notify,
    /// Called when the export becomes unreachable, and when it can be reached again.
    pub(crate) listener: Mutex<Option<Listener>>,
}

/// See [`ThreadReport::listener`].
pub(crate) type Listener = Box<dyn Fn() + Send + Sync>;

impl ThreadReport {
    /// Whether a server may still carry out a change of a connection that was given up.
    pub(crate) fn may_act_late(&self) -> bool {
        let given_up = self.given_up.lock();
        given_up.is_some_and(|given_up| given_up.elapsed() < LATE_TIME_MAX)
    }

    /// The number of losses and recoveries so far.
    pub(crate) fn losses(&self) -> u64 {
        self.losses.load(Ordering::Relaxed)
    }

    /// Whether acknowledged changes may have been lost, so that none is accepted.
    pub(crate) fn is_lost(&self) -> bool {
        self.losses() % 2 == 1
    }

    /// The report of an export whose changes a record outlives.
    pub(crate) fn new(record: Option<Arc<dyn ExportRecord>>) -> Self {
        Self { record, ..Self::default() }
    }

    /// Acknowledged changes may have been lost. From here on none is accepted, and a later daemon
    /// knows it.
    pub(crate) fn lose(&self) {
        let lose = |losses| (losses % 2 == 0).then_some(losses + 1);
        if self.losses.fetch_update(Ordering::Relaxed, Ordering::Relaxed, lose).is_err() {
            return;
        }
        self.errno.store(LOSS_ERRNO, Ordering::Relaxed);
        let recorded = self.record.as_ref().map_or(Ok(()), |it| it.record_loss(LOSS_ERRNO));
        self.is_unrecorded.store(recorded.is_err(), Ordering::Relaxed);
        if let Err(error) = recorded {
            tracing::error!(%error, "the record of lost writes cannot be stored");
        }
    }

    /// An earlier daemon has lost changes, with `errno`, and that is recorded.
    pub(crate) fn lost_earlier(&self, errno: i32) {
        self.errno.store(errno, Ordering::Relaxed);
        self.is_earlier.store(true, Ordering::Relaxed);
        let lose = |losses| (losses % 2 == 0).then_some(losses + 1);
        let _ = self.losses.fetch_update(Ordering::Relaxed, Ordering::Relaxed, lose);
    }

    /// Changes are accepted again.
    ///
    /// # Errors
    /// If the record of the loss cannot be removed. Nothing has changed then.
    pub(crate) fn recover(&self) -> std::io::Result<()> {
        if !self.is_lost() {
            return Ok(());
        }
        self.record.as_ref().map_or(Ok(()), |record| record.clear_loss())?;
        self.is_earlier.store(false, Ordering::Relaxed);
        self.is_unrecorded.store(false, Ordering::Relaxed);
        let recover = |losses| (losses % 2 == 1).then_some(losses + 1);
        let _ = self.losses.fetch_update(Ordering::Relaxed, Ordering::Relaxed, recover);
        Ok(())
    }

    /// The problems of a loss.
    pub(crate) fn loss(&self) -> Vec<BackendProblem> {
        if !self.is_lost() {
            return Vec::new();
        }
        let errno = self.errno.load(Ordering::Relaxed);
        let lost =
            BackendProblem::WritesLost { errno, earlier: self.is_earlier.load(Ordering::Relaxed) };
        let is_unrecorded = self.is_unrecorded.load(Ordering::Relaxed);
        let unrecorded = is_unrecorded.then_some(BackendProblem::LossNotRecorded);
        [lost].into_iter().chain(unrecorded).collect()
    }

    /// Sets the reason why there is no connection.
    pub(crate) fn set_unreachable(&self, reason: Option<String>) {
        let is_reachable = reason.is_none();
        let before = std::mem::replace(&mut *self.unreachable.lock(), reason);
        if before.is_none() != is_reachable {
            if let Some(listener) = &*self.listener.lock() {
                listener();
            }
        }
    }

    /// The size of the disk, in bytes.
    pub(crate) fn capacity(&self) -> u64 {
        self.capacity.load(Ordering::Relaxed)
    }
}

/// A request that the server has, or gets again on the next connection.
struct Sent {
    job: Job,
    /// Whether a server may have it.
    is_submitted: bool,
    /// The last change that had completed before a flush was sent.
    covers: u64,
    /// The number of losses when it was taken on.
    losses: u64,
}

/// What a server is asked, across connections.
pub(crate) struct JobList {
    sent: BTreeMap<u64, Sent>,
    /// Changes of places that changes in `sent` change: which one of them wins must not depend on
    /// the connection.
    held: VecDeque<Job>,
    next: u64,
    pub(crate) unflushed: Unflushed,
    /// Whether a flush of the session's own is in flight.
    has_own_flush: bool,
    /// Whether a later daemon would know that there are changes in `unflushed`.
    is_noted: bool,
    timeout: Duration,
    shared: Arc<ThreadReport>,
}

impl JobList {
    pub(crate) fn new(shared: Arc<ThreadReport>, timeout: Duration) -> Self {
        Self {
            sent: BTreeMap::new(),
            held: VecDeque::new(),
            next: 0,
            unflushed: Unflushed::default(),
            has_own_flush: false,
            is_noted: false,
            timeout,
            shared,
        }
    }

    /// The cookie of the next request.
    pub(crate) fn cookie(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Takes a request on. Returns its cookie, if it can be sent now.
    pub(crate) fn admit(&mut self, job: Job) -> Option<u64> {
        let operation = job.asked.operation;
        if self.shared.is_lost() && (operation.modifies() || operation == Operation::Flush) {
            job.finish(Err(ErrorKind::Io));
            return None;
        }
        if self.has_to_wait(&job, self.held.len()) {
            self.held.push_back(job);
            return None;
        }
        Some(self.take_on(job))
    }

    fn take_on(&mut self, job: Job) -> u64 {
        let cookie = self.cookie();
        let losses = self.shared.losses();
        self.sent.insert(cookie, Sent { job, is_submitted: false, covers: 0, losses });
        cookie
    }

    /// Whether a change meets one that has been sent, or one of the first `count` that are held.
    fn has_to_wait(&self, job: &Job, count: usize) -> bool {
        let others = self.sent.values().map(|sent| &sent.job).chain(self.held.iter().take(count));
        job.asked.operation.modifies() && others.into_iter().any(|it| it.asked.meets(&job.asked))
    }

    /// The cookie of a request that was held and can be sent now.
    pub(crate) fn release(&mut self) -> Option<u64> {
        let mut indices = 0..self.held.len();
        let index = indices.find(|index| !self.has_to_wait(&self.held[*index], *index))?;
        let job = self.held.remove(index)?;
        Some(self.take_on(job))
    }

    /// A flush of the session's own, if there are too many changes that the server may lose.
    pub(crate) fn own_flush(&mut self) -> Option<Job> {
        if !self.unflushed.is_long() {
            return None;
        }
        self.begin_own_flush()
    }

    /// The last flush of the session, if nobody else has sent one since the last change.
    pub(crate) fn last_flush(&mut self) -> Option<Job> {
        if self.unflushed.is_empty() || self.shared.is_lost() {
            return None;
        }
        self.begin_own_flush()
    }

    fn begin_own_flush(&mut self) -> Option<Job> {
        if self.has_own_flush {
            return None;
        }
        self.has_own_flush = true;
        let deadline = Instant::now() + self.timeout;
        Some(Job { asked: Asked::flush(), answer: None, deadline })
    }

    /// What is to be sent under a cookie.
    pub(crate) fn send(&mut self, cookie: u64) -> Option<Asked> {
        let covers = self.unflushed.last();
        let sent = self.sent.get_mut(&cookie)?;
        (sent.is_submitted, sent.covers) = (true, covers);
        Some(sent.job.asked.clone())
    }

    /// The cookies of all requests that have not completed, in the order in which they came.
    pub(crate) fn cookies(&self) -> Vec<u64> {
        self.sent.keys().copied().collect()
    }

    /// The same of changes that an earlier connection has sent.
    pub(crate) fn sent_changes(&self) -> Vec<u64> {
        let is_such = |sent: &Sent| sent.is_submitted && sent.job.asked.operation.modifies();
        self.sent.iter().filter(|(_, sent)| is_such(sent)).map(|(cookie, _)| *cookie).collect()
    }

    /// The bytes that follow a reply without an error; `None` if the server has no such request.
    pub(crate) fn payload(&self, cookie: u64) -> Option<usize> {
        let asked = &self.sent.get(&cookie)?.job.asked;
        Some(if asked.operation == Operation::Read { asked.length as usize } else { 0 })
    }

    /// The server has carried a request out, or not.
    pub(crate) fn complete(&mut self, cookie: u64, error: u32, bytes: Vec<u8>) {
        let Some(Sent { job, covers, losses, .. }) = self.sent.remove(&cookie) else { return };
        let mut outcome = if error == 0 { Ok(bytes) } else { Err(kind(error)) };
        let operation = job.asked.operation;
        if operation == Operation::Flush {
            self.has_own_flush &= job.answer.is_some();
            if outcome.is_ok() {
                self.unflushed.forget(covers);
            } else {
                self.lose();
            }
        } else if operation.modifies() && outcome.is_ok() && !self.shared.is_lost() {
            self.unflushed.note(&job.asked);
        }
        self.note();
        if self.shared.losses() != losses && operation != Operation::Read {
            outcome = Err(ErrorKind::Io);
        }
        job.finish(outcome);
    }

    /// Notes for a later daemon whether there are changes that the server may still lose.
    fn note(&mut self) {
        let is_so = !self.unflushed.is_empty();
        if let Some(record) = self.shared.record.as_ref().filter(|_| is_so != self.is_noted) {
            record.note_unflushed(is_so);
            self.is_noted = is_so;
        }
    }

    /// The changes that the server may still lose, but for what lies beyond the end of a disk that
    /// has become smaller.
    pub(crate) fn unflushed_within(&self) -> Vec<Asked> {
        let capacity = self.shared.capacity();
        let all = self.unflushed.all().into_iter();
        all.filter_map(|asked| asked.within(capacity)).collect()
    }

    /// The server may have lost changes that it has acknowledged.
    pub(crate) fn lose(&mut self) {
        self.shared.lose();
        self.unflushed = Unflushed::default();
        self.note();
    }

    /// When the first request fails, if there is one.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let sent = self.sent.values().next().map(|sent| sent.job.deadline);
        let held = self.held.front().map(|job| job.deadline);
        sent.into_iter().chain(held).min()
    }

    /// A connection is given up, perhaps while it repeated what an earlier one had left. Its server
    /// may still carry out the changes that it has.
    pub(crate) fn give_up(&self, was_repeating: bool) {
        let mut sent = self.sent.values().filter(|sent| sent.is_submitted);
        let has_change = sent.any(|sent| sent.job.asked.operation.modifies());
        if has_change || was_repeating && !self.unflushed.is_empty() {
            self.note_late();
        }
    }

    fn note_late(&self) {
        let mut given_up = self.shared.given_up.lock();
        *given_up = Some(Instant::now());
    }

    /// Ends the requests whose time is over. Returns whether there were some.
    pub(crate) fn expire(&mut self) -> bool {
        let (now, mut has_any) = (Instant::now(), false);
        while let Some(first) = self.sent.first_entry().filter(|it| it.get().job.deadline <= now) {
            let Sent { job, is_submitted, .. } = first.remove();
            if is_submitted && job.asked.operation.modifies() {
                // Before anybody knows that it has failed.
                self.note_late();
            }
            self.has_own_flush &= job.answer.is_some();
            job.finish(Err(ErrorKind::Io));
            has_any = true;
        }
        while self.held.front().is_some_and(|job| job.deadline <= now) {
            if let Some(job) = self.held.pop_front() {
                job.finish(Err(ErrorKind::Io));
            }
            has_any = true;
        }
        has_any
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.sent.is_empty() && self.held.is_empty()
    }

    /// Ends all requests: nobody waits for them.
    pub(crate) fn close(&mut self) {
        for (_, Sent { job, .. }) in std::mem::take(&mut self.sent) {
            job.finish(Err(ErrorKind::ShuttingDown));
        }
        for job in std::mem::take(&mut self.held) {
            job.finish(Err(ErrorKind::ShuttingDown));
        }
    }
}

/// The kind of a server's error.
fn kind(number: u32) -> ErrorKind {
    match number {
        error::PERMISSION => ErrorKind::ReadOnly,
        error::NO_SPACE => ErrorKind::NoSpace,
        error::NOT_SUPPORTED => ErrorKind::Unsupported,
        _ => ErrorKind::Io,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lies_beyond_the_end_is_cut_off() {
        let write = |offset: u64, length: usize| {
            let (operation, flags) = (Operation::Write, Flags::default());
            let data = Arc::from(vec![1; length]);
            Asked { operation, offset, length: length as u64, flags, data }
        };
        let within = |asked: Asked| asked.within(100).map(|it| (it.length, it.data.len()));
        assert_eq!(within(write(0, 100)), Some((100, 100)));
        assert_eq!(within(write(90, 20)), Some((10, 10)));
        assert_eq!((within(write(100, 20)), within(write(101, 1))), (None, None));
        let zeroes = Asked { length: 50, data: Arc::from([]), ..write(80, 0) };
        assert_eq!(within(zeroes), Some((20, 0)));
    }
}
