//! A store that does not answer.
//!
//! A read that the store has not answered in time is read at home. The store may answer at any
//! time, so what is read from it is read into memory of the layer, which stays, with the slots
//! pinned, until the answer has come. While anything is late, no queue of the volume uses the
//! index: all reads go home, and nothing is inserted. Changes go home as ever, and their blocks
//! leave the index, so that it is right when the store answers.
//!
//! A change whose region has no durable bit waits for the store, but not for longer than a read.
//! Then the mark of the disk's own store is removed, and changes need no bits:
//! ```text
//!  Marked ─ a change has waited too long, the mark is removed ─▶ Left: no start uses the disk's blocks; this one does
//!  Left ─ the store has answered everything ─▶ Returning: changes wait for their bits again; bits are written
//!  Returning ─ the bits of all changes before are durable, the mark is written ─▶ Marked
//!  Returning ─ a change has waited too long again, the mark is removed ─▶ Left
//! ```
//! The mark is changed with the lock of [`Marking`](crate::cache::marking::Marking) held, which
//! also guards the first and the last of these states.

use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use fathom_block::{CacheHit, Crossing, LayerCause, LayerProblem, Operation, Request, StoreAccess};
use fathom_persistence::Stamp;

use super::{CacheQueue, Reading};
use crate::cache::attach::NO_QUEUE;
use crate::cache::ending::{Ending, RETRY_NS, Use};
use crate::cache::{Cache, Inner};

/// The part of the time of a request after which what is late is looked at again.
const LOOKS: u64 = 10;
/// How often a thread checks whether another one still asks the store.
const ASK_INTERVAL: Duration = Duration::from_millis(2);

impl CacheQueue {
    /// A request is sent to the store: it is looked at when its time is over. Returns the time, in
    /// nanoseconds.
    pub(in crate::cache) fn watch(&mut self, next: &mut Crossing<'_>) -> u64 {
        let now_ns = next.round_ns();
        if self.watch_ns == 0 && self.inner.volume.is_watched() {
            self.watch_ns = now_ns + self.inner.volume.times.store_ns;
            next.wake_at(self.watch_ns);
        }
        now_ns
    }

    /// Looks for what the store has not answered in time.
    pub(super) fn look_for_late(&mut self, next: &mut Crossing<'_>) {
        self.look_at_changes(next);
        if self.watch_ns == 0 {
            return;
        }
        let now_ns = next.round_ns();
        if now_ns >= self.watch_ns {
            self.find_late(now_ns, next);
        }
        if self.watch_ns != 0 {
            next.wake_at(self.watch_ns);
        }
    }

    fn find_late(&mut self, now_ns: u64, next: &mut Crossing<'_>) {
        let limit_ns = self.inner.volume.times.store_ns;
        let is_over = |asked_ns: u64| asked_ns + limit_ns <= now_ns;
        let mut late: Vec<u64> = Vec::new();
        let mut first_ns = u64::MAX;
        for (number, reading) in &self.reads {
            if reading.in_store == 0 || reading.request.is_none() {
                continue;
            }
            if is_over(reading.asked_ns) {
                late.push(*number);
            } else {
                first_ns = first_ns.min(reading.asked_ns);
            }
        }
        let writing = self.writing.as_ref().filter(|writing| writing.in_flight() > 0);
        let others = (self.insertions.values().map(|inserting| inserting.asked_ns))
            .chain(self.probes.values().map(|(_, asked_ns)| *asked_ns))
            .chain(self.loading.as_ref().map(|loading| loading.asked_ns))
            .chain(writing.map(|writing| writing.asked_ns));
        let mut is_late = false;
        for asked_ns in others {
            is_late |= is_over(asked_ns);
            first_ns = first_ns.min(asked_ns);
        }
        self.watch_ns = match first_ns {
            u64::MAX => 0,
            _ => (first_ns + limit_ns).max(now_ns + limit_ns.div_ceil(LOOKS)),
        };
        self.set_late(is_late);
        // In the order in which they came.
        late.sort_unstable();
        for number in late {
            self.read_at_home(number, next);
        }
        self.end_late_fetches(now_ns, next);
    }

    fn set_late(&mut self, is_late: bool) {
        match (std::mem::replace(&mut self.is_late, is_late), is_late) {
            (false, true) => _ = self.inner.volume.late.fetch_add(1, Ordering::Relaxed),
            (true, false) => self.inner.volume.end_late(),
            _ => {}
        }
    }

    /// Lets the reads go home that wait for what was read ahead and is not in the cache in time.
    fn end_late_fetches(&mut self, now_ns: u64, next: &mut Crossing<'_>) {
        let limit_ns = self.inner.volume.times.store_ns;
        let insertions = self.insertions.values();
        let is_late = |asked_ns: u64| asked_ns + limit_ns <= now_ns;
        let mut fetches: Vec<u64> = insertions
            .filter(|inserting| inserting.fetch != 0 && is_late(inserting.asked_ns))
            .map(|inserting| inserting.fetch)
            .collect();
        fetches.sort_unstable();
        for fetch in fetches {
            self.fetch_ended(fetch, next);
        }
    }

    /// Sends a read home. Its memory and its slots stay in use until the store has answered.
    fn read_at_home(&mut self, number: u64, next: &mut Crossing<'_>) {
        let Some(reading) = self.reads.get_mut(&number) else { return };
        let Some(mut request) = reading.request.take() else { return };
        reading.is_late = true;
        let begin_ns = reading.begin_ns;
        let is_reserved = std::mem::take(&mut reading.is_reserved);
        let is_other = std::mem::take(&mut reading.is_other);
        let mut parts = std::mem::take(&mut reading.parts);
        self.inner.volume.late.fetch_add(1, Ordering::Relaxed);
        self.cancel(&mut parts);
        self.keep_parts(parts);
        if is_reserved {
            self.inner.volume.end_copy(request.length);
        }
        request.course.cache_hit = CacheHit::Miss;
        // Its end is counted.
        *next.word(&mut request) = begin_ns << 1 | u64::from(is_other);
        next.submit(request);
    }

    /// The store has answered a part of the read `number`.
    pub(super) fn piece_returned(&mut self, number: u64) {
        let Some(reading) = self.reads.get_mut(&number) else { return };
        reading.in_store = reading.in_store.saturating_sub(1);
        if reading.in_store == 0 && std::mem::take(&mut reading.is_late) {
            self.inner.volume.end_late();
        }
    }

    /// All parts have come of a read that was sent home meanwhile.
    pub(super) fn answered_late(
        &mut self,
        reading: &Reading,
        data: Box<Request>,
        next: &mut Crossing<'_>,
    ) {
        debug_assert!(!reading.is_late, "the store has answered");
        self.unpin(&reading.hits);
        next.recycle(data);
    }

    /// Removes the mark of the disk's store if a change has waited for the volume for too long.
    pub(in crate::cache) fn look_at_changes(&mut self, next: &mut Crossing<'_>) {
        self.take_ending();
        let volume = &self.inner.volume;
        if self.waiting.is_empty() || volume.has_failed() || !volume.is_watched() {
            return;
        }
        let (now_ns, end_ns) = (next.round_ns(), self.waiting_ns + volume.times.store_ns);
        if now_ns < end_ns {
            return next.wake_at(end_ns);
        }
        match self.end_of_use(next) {
            Ending::Ended | Ending::InUse => {}
            Ending::Failed => next.wake_at(now_ns + RETRY_NS),
        }
    }

    /// Returns to a store that answers again.
    pub(in crate::cache) fn tend_return(&mut self, next: &mut Crossing<'_>) {
        let inner = &self.inner;
        let of_disk = inner.of_disk();
        if of_disk == Use::Marked || self.is_closed || inner.volume.has_failed() {
            return;
        }
        let limit_ns = inner.volume.times.store_ns;
        // Another queue may write the bits.
        next.wake_at(next.round_ns() + limit_ns.div_ceil(LOOKS));
        if inner.volume.is_silent() {
            return;
        }
        if of_disk == Use::Left {
            inner.begin_return();
        } else {
            inner.end_return();
        }
    }
}

impl Inner {
    /// Changes wait for their bits again.
    fn begin_return(&self) {
        // A thread may remove the mark right now.
        let Some(_marking) = self.marking.try_lock() else { return };
        let is_free = self.volume.keeper.access(|keeper| keeper.writer != Some(NO_QUEUE));
        if self.of_disk() != Use::Left || !is_free {
            return;
        }
        let awaited = self.disk.regions.access(|regions| {
            regions.is_unmarked = false;
            regions.bits()
        });
        self.bits_awaited.store(awaited, Ordering::Relaxed);
        *self.ending.lock() = (Ending::InUse, 0);
        self.set_use(Use::Returning);
        self.volume.keeper.access(|keeper| {
            keeper.is_urgent = true;
            keeper.wake_queues();
        });
    }

    /// Has the mark written when the bits are durable of all changes that have not waited for them.
    fn end_return(&self) {
        let awaited = self.bits_awaited.load(Ordering::Relaxed);
        if !self.disk.regions.access(|regions| regions.are_durable(awaited)) {
            return;
        }
        let Some(mut marking) = self.marking.try_lock() else { return };
        if self.of_disk() != Use::Returning {
            return;
        }
        let age = self.disk.record.lock().generation;
        *marking = Some(Stamp { identity: self.volume.identity(), age });
        self.marking.begin();
        self.set_use(Use::Marked);
    }

    /// Ends the use of the volume by later starts, and the waiting of changes for it. Returns
    /// whether the mark does not name it any more. Blocks.
    pub(in crate::cache) fn end_use(&self) -> bool {
        let mut marking = self.marking.state.lock();
        *marking = None;
        self.marking.end();
        let has_ended = self.reject_mark().is_ok();
        if has_ended && !self.volume.has_failed() {
            self.set_use(Use::Left);
        }
        self.end(has_ended);
        has_ended
    }
}

impl Inner {
    /// Whether the store does not answer, or has not when it was last asked.
    pub(in crate::cache) fn is_silent(&self) -> bool {
        self.volume.is_silent() || self.was_silent.load(Ordering::Relaxed)
    }

    /// Finds out whether the store answers, for at most twice `limit`: with a flush, because the
    /// kernel may have what is read. Blocks.
    pub(in crate::cache) fn ask_store(&self, limit: Duration) {
        let volume = &self.volume;
        if !volume.is_kept || volume.has_failed() {
            return;
        }
        if volume.is_silent() {
            // Whether or not it has answered a moment later.
            return self.was_silent.store(true, Ordering::Relaxed);
        }
        let is_silent = || {
            // One thread asks at a time. If an earlier one gets no answer, there is none.
            let begun = Instant::now();
            while volume.is_asked.swap(true, Ordering::AcqRel) {
                if begun.elapsed() >= limit {
                    return true;
                }
                std::thread::sleep(ASK_INTERVAL);
            }
            let (sender, answer) = mpsc::sync_channel(1);
            let asked = Arc::clone(volume);
            let ask = move || {
                let opened = StoreAccess::open_within(&asked.backend, limit);
                let answer =
                    opened.and_then(|mut access| access.carry_out(Operation::Flush, 0, &mut []));
                asked.is_asked.store(false, Ordering::Release);
                _ = sender.send(answer);
            };
            // A file system may hang when its file is opened.
            let begun = std::thread::Builder::new().name("ask-store".into()).spawn(ask);
            if begun.is_err() {
                volume.is_asked.store(false, Ordering::Release);
                return false;
            }
            match answer.recv_timeout(limit) {
                Ok(answer) => answer.is_err_and(|error| error.kind() == io::ErrorKind::TimedOut),
                Err(_) => true,
            }
        };
        self.was_silent.store(is_silent(), Ordering::Relaxed);
    }
}

impl Cache {
    /// The problem of a store that does not answer, or has not.
    pub(in crate::cache) fn silence(&self) -> Option<LayerProblem> {
        let inner = &self.inner;
        let store = &inner.name;
        let used = inner.of_disk();
        if inner.volume.has_failed() {
            return None;
        }
        let (cause, state, remedy) = if inner.volume.is_silent() {
            let remedy = "check the device beneath it: the cache continues when it answers. `fathom cache detach` \
                          takes it away from the disk";
            let state = "does not answer: what it has is read from the disk beneath";
            (LayerCause::NotAnswering, state, remedy)
        } else if used != Use::Marked {
            (
                LayerCause::ChangesMissed,
                "has not answered",
                "nothing has to be done: the cache notes the changes that it has missed",
            )
        } else {
            return None;
        };
        let missed = match used {
            Use::Marked => "",
            Use::Left | Use::Returning => ". A start would find the cache of this disk empty now",
        };
        let message = format!("the store of its cache, {store}, {state}{missed}");
        Some(LayerProblem { cause, message, remedy: remedy.into() })
    }
}
