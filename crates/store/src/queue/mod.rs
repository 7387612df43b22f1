//! A queue of a volume or a snapshot.
//!
//! - `change`: requests that change blocks; `draft`: gathers parts of them; `share`: finds those of
//!   their blocks that are there already; `batch`: writes batches of the log.
//! - `read`: reads of data and of pages of maps.
//! - `difference`: extents that differ.
//! - `background`: checkpoints, walks, unions of change sets, and the scan of the fingerprint
//!   table; `merge`: merges; `relocate`: relocations; `punch`: free segments are given back;
//!   `scrub`: all is verified.
//! - `device`: the queue's own requests to the device.

mod background;
mod batch;
mod change;
mod device;
mod difference;
mod draft;
mod merge;
mod punch;
mod read;
mod relocate;
mod scrub;
mod share;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use fathom_block::{BackendContext, BackendQueue, ErrorKind, Operation, Outcome, Request, Waker};
use fathom_reactor::{Event, Pending};
use parking_lot::Mutex;

use crate::catalogue::PageId;
use crate::checkpoint::Checkpoint;
use crate::difference::{Comparison, ReadPages};
use crate::fingerprint::Fingerprinter;
use crate::pool::Inner;
use crate::recent::RecentReads;
use crate::state::Admission;

use batch::Batch;
use change::Change;
use device::{Device, Purpose};
use draft::{Draft, references};
use merge::Merging;
use read::Read;
use relocate::Relocating;
use scrub::Scrubbing;
use share::Sharing;

/// After this time a change that waits is looked at again, in nanoseconds.
const LOOK_NS: u64 = 1_000_000;

/// What a queue reads, and perhaps changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// A volume.
    Volume(u32),
    /// A snapshot, which does not change.
    Snapshot(u32),
    /// A volume or a snapshot, with extents that say what differs from another one.
    Difference(Comparison),
    /// Nothing: the queue has only the background work of the pool.
    Nothing,
}

/// See the module.
pub(crate) struct StoreQueue {
    inner: Arc<Inner>,
    /// The number of its waker in the pool, if it works for the pool.
    registered: Option<u64>,
    wanted: Wanted,
    device: Device,
    waker: Waker,
    in_kernel: Pending,
    /// Changes, reads and requests for extents, by number.
    changes: BTreeMap<u64, Change>,
    reads: BTreeMap<u64, Read>,
    made: u64,
    /// The changes that are not completely in batches, in order.
    pending: Vec<u64>,
    sharing: Sharing,
    /// Batches that wait for reads, by number, and those that can be written.
    drafts: BTreeMap<u64, Draft>,
    ready: VecDeque<Draft>,
    batches: BTreeMap<u64, Batch>,
    /// The pages of the fingerprint table that are being read, and the drafts that wait for each.
    index_loads: BTreeMap<u32, Vec<u64>>,
    /// Pages that are being read, and pages that cannot be.
    loading: BTreeSet<PageId>,
    broken: BTreeSet<PageId>,
    /// Those of them that could not be read because the device has failed: the next request tries
    /// again.
    unread: Vec<PageId>,
    /// Pages for comparisons, and those of them that are being read.
    compared: ReadPages,
    to_compare: BTreeSet<PageId>,
    /// Whether a comparison does without change sets, because they cannot be read.
    has_broken_set: bool,
    /// Requests that wait for a flush, and those that the flush in flight is for, with the last
    /// batch that it covers.
    #[expect(clippy::vec_box, reason = "a request travels in its box")]
    unflushed: Vec<Box<Request>>,
    #[expect(clippy::vec_box, reason = "a request travels in its box")]
    flushing: Option<(u64, Vec<Box<Request>>)>,
    checkpoint: Option<Checkpoint>,
    /// A checkpoint for which the device had no space goes on at this time, in nanoseconds.
    resume_ns: u64,
    is_walking: bool,
    is_scanning: bool,
    merging: Merging,
    relocating: Relocating,
    scrubbing: Scrubbing,
    is_closed: bool,
}

impl StoreQueue {
    pub(crate) fn new(
        inner: Arc<Inner>,
        wanted: Wanted,
        recent: Arc<Mutex<RecentReads>>,
        device: Box<dyn BackendQueue>,
        (waker, in_kernel): (Waker, Pending),
    ) -> Self {
        let fingerprinter = match wanted {
            Wanted::Volume(volume) => inner.shared.access(|state| {
                let domain = &state.catalogue.volumes.get(&volume)?.domain;
                (!domain.is_empty()).then(|| Fingerprinter::new(&state.key, domain))
            }),
            Wanted::Snapshot(_) | Wanted::Difference(_) | Wanted::Nothing => None,
        };
        let is_rotational = inner.device.capabilities().rotational;
        let bits = inner.options.rules.fingerprint_bits;
        let sharing = Sharing::new(fingerprinter, is_rotational, bits, recent);
        // A comparison does no work for the pool.
        let is_comparison = matches!(wanted, Wanted::Difference(_));
        let registered = (!is_comparison).then(|| inner.register(&waker));
        Self {
            inner,
            registered,
            wanted,
            device: Device::new(device),
            waker,
            in_kernel,
            changes: BTreeMap::new(),
            reads: BTreeMap::new(),
            made: 0,
            pending: Vec::new(),
            sharing,
            drafts: BTreeMap::new(),
            ready: VecDeque::new(),
            batches: BTreeMap::new(),
            index_loads: BTreeMap::new(),
            loading: BTreeSet::new(),
            broken: BTreeSet::new(),
            unread: Vec::new(),
            compared: ReadPages::default(),
            to_compare: BTreeSet::new(),
            has_broken_set: false,
            unflushed: Vec::new(),
            flushing: None,
            checkpoint: None,
            resume_ns: 0,
            is_walking: false,
            is_scanning: false,
            merging: Merging::default(),
            relocating: Relocating::default(),
            scrubbing: Scrubbing::default(),
            is_closed: false,
        }
    }

    fn number(&mut self) -> u64 {
        self.made += 1;
        self.made
    }

    /// Continues all work that can continue now.
    fn work(&mut self, context: &mut BackendContext<'_>) {
        loop {
            let mut has_loaded = false;
            while let Some((request, outcome, purpose)) = self.device.completed() {
                has_loaded |= matches!(purpose, Purpose::Load { .. });
                self.returned(request, outcome, purpose, context);
            }
            if !self.changes.is_empty() {
                self.apply_batches(context);
                self.prepare_changes(context);
                self.write_batches(context);
                self.end_changes(context);
            }
            self.flush(context);
            if has_loaded {
                let reads: Vec<u64> = self.reads.keys().copied().collect();
                for number in reads {
                    self.go_on_reading(number, context);
                }
            }
            for id in self.unread.drain(..) {
                self.broken.remove(&id);
            }
            if !self.is_comparison() {
                self.checkpoint(context);
                self.walk(context);
                self.unite(context);
                self.count_fresh(context);
                self.scan(context);
                self.merge(context);
                self.relocate(context);
                self.punch(context);
                self.scrub(context);
            }
            if !self.device.has_completed() {
                break;
            }
        }
        if !self.pending.is_empty() || !self.ready.is_empty() {
            // A thread that is busy with other queues may not look at its wakers for a while.
            context.wake_at(context.now_ns() + LOOK_NS);
        }
    }

    /// A request to the device has completed.
    fn returned(
        &mut self,
        request: Box<Request>,
        outcome: Outcome,
        purpose: Purpose,
        context: &mut BackendContext<'_>,
    ) {
        match purpose {
            Purpose::Batch(sequence) => {
                self.device.give(request);
                self.batch_written(sequence, outcome);
            }
            Purpose::Piece { read, from, is_again } => {
                self.piece_read((read, from, is_again), request, outcome, context);
            }
            Purpose::Whole { read } => self.whole_read(read, request, outcome, context),
            Purpose::Edge { change, edge, entry, interval } => {
                self.edge_read((change, edge, entry, interval), request, outcome);
            }
            Purpose::Load { id, entry, interval, is_copy } => {
                self.loaded((id, entry, interval, is_copy), request, outcome, context);
            }
            Purpose::Walk { read, interval, is_copy } => {
                self.walk_read((read, interval, is_copy), request, outcome, context);
            }
            Purpose::Fingerprints { page } => {
                self.fingerprints_read(page, request, outcome, context);
            }
            Purpose::Scan { page } => self.scanned(page, request, outcome),
            Purpose::MergeTable { page } => self.merge_table_read(page, request, outcome),
            Purpose::MergeVictims { run } => {
                self.merge_victims_read(run, request, outcome, context);
            }
            Purpose::MergeKept { run } => self.merge_kept_read(run, request, outcome),
            Purpose::Relocate { first, count } => {
                self.lot_returned(first, count, request, outcome);
            }
            Purpose::Punch { first, count } => {
                self.punched((first, count), request, outcome, context);
            }
            Purpose::ScrubPage { read, is_again } => {
                self.scrub_page_read((read, is_again), request, outcome, context);
            }
            Purpose::ScrubBlocks { first, count, is_again } => {
                self.scrub_blocks_read((first, count, is_again), request, outcome);
            }
            Purpose::ScrubTables { is_again } => {
                self.scrub_tables_read(is_again, request, outcome, context);
            }
            Purpose::Compare { draft, part } => self.compared((draft, part), request, outcome),
            Purpose::Flush => self.flushed(request, outcome, context),
            Purpose::Checkpoint => self.checkpoint_written(request, outcome),
        }
    }

    /// Begins the waiting changes that may begin, and reads the edges of those that have begun.
    fn prepare_changes(&mut self, context: &mut BackendContext<'_>) {
        let Wanted::Volume(volume) = self.wanted else { return };
        for index in 0..self.pending.len() {
            let number = self.pending[index];
            let Some(change) = self.changes.get_mut(&number) else { continue };
            if !change.is_locked && change.outcome.is_ok() {
                let has_data = change.request.operation == Operation::Write;
                let admitted = self.inner.shared.attempt(&self.waker, |state| {
                    match state.begin_change(volume, &change.range, has_data) {
                        Admission::Wait => None,
                        other @ (Admission::Begun(_) | Admission::Refused(_)) => Some(other),
                    }
                });
                match admitted {
                    None | Some(Admission::Wait) => continue,
                    Some(Admission::Refused(kind)) => change.outcome = Err(kind),
                    Some(Admission::Begun(promise)) => {
                        (change.is_locked, change.promise) = (true, promise);
                    }
                }
            }
            if change.is_locked && !change.is_ready() {
                self.read_edges(number, context);
            }
        }
    }

    /// Completes the changes of which all batches have ended.
    fn end_changes(&mut self, context: &mut BackendContext<'_>) {
        let Wanted::Volume(volume) = self.wanted else { return };
        let complete = self.changes.iter().filter(|(_, change)| change.is_complete());
        let complete: Vec<u64> = complete.map(|(number, _)| *number).collect();
        let mut is_any = false;
        for number in complete {
            let Some(change) = self.changes.remove(&number) else { continue };
            if change.is_locked {
                self.inner
                    .shared
                    .access(|state| state.end_change(volume, &change.range, change.promise));
                is_any = true;
            }
            if change.outcome.is_ok() && change.request.flags.force_unit_access {
                self.unflushed.push(change.request);
            } else {
                context.complete(change.request, change.outcome);
            }
        }
        let changes = &self.changes;
        let is_pending =
            |number: &u64| changes.get(number).is_some_and(|change| !change.todo.is_empty());
        self.pending.retain(is_pending);
        if is_any {
            self.inner.shared.wake();
        }
    }

    /// Begins a flush of the device if a request waits for one.
    fn flush(&mut self, context: &mut BackendContext<'_>) {
        if self.flushing.is_some() || self.unflushed.is_empty() {
            return;
        }
        let covered = self.inner.shared.access(|state| state.completed());
        self.flushing = Some((covered, std::mem::take(&mut self.unflushed)));
        let mut own = self.device.take();
        own.operation = Operation::Flush;
        self.device.submit(own, Purpose::Flush, context);
    }

    fn flushed(&mut self, own: Box<Request>, outcome: Outcome, context: &mut BackendContext<'_>) {
        self.device.give(own);
        let Some((covered, requests)) = self.flushing.take() else { return };
        if outcome.is_ok() {
            self.inner.shared.access(|state| state.flushed(covered));
        }
        for request in requests {
            context.complete(request, outcome);
        }
    }
}

impl BackendQueue for StoreQueue {
    fn submit(&mut self, request: Box<Request>, context: &mut BackendContext<'_>) {
        let number = self.number();
        self.note_use(context);
        match request.operation {
            Operation::Read | Operation::Extents => {
                self.reads.insert(number, Read::new(request));
                self.go_on_reading(number, context);
            }
            Operation::Write | Operation::WriteZeroes | Operation::Discard => {
                if !matches!(self.wanted, Wanted::Volume(_)) {
                    return context.complete(request, Err(ErrorKind::ReadOnly));
                }
                self.changes.insert(number, Change::new(request));
                self.pending.push(number);
            }
            Operation::Flush => self.unflushed.push(request),
            Operation::GetId => context.complete(request, Err(ErrorKind::Unsupported)),
        }
        // The rest of the thread's requests come first, so that they get into the same batch.
        context.wake_at(0);
    }

    fn event(&mut self, event: &Event, context: &mut BackendContext<'_>) {
        self.device.call(context, |queue, context| queue.event(event, context));
        if self.device.has_completed() {
            self.work(context);
        }
    }

    fn advance(&mut self, context: &mut BackendContext<'_>) {
        self.device.call(context, |queue, context| queue.advance(context));
        self.work(context);
    }

    fn close(&mut self, context: &mut BackendContext<'_>) {
        self.is_closed = true;
        self.device.call(context, |queue, context| queue.close(context));
        self.work(context);
    }

    fn reopen(&mut self, context: &mut BackendContext<'_>) {
        self.is_closed = false;
        self.device.call(context, |queue, context| queue.reopen(context));
        self.work(context);
    }

    fn is_idle(&self) -> bool {
        self.device.is_idle()
            && self.checkpoint.is_none()
            && !self.is_walking
            && !self.is_scanning
            && !self.merging.is_active()
            && !self.relocating.is_active()
            && !self.scrubbing.is_active()
    }
}

impl Drop for StoreQueue {
    /// Other queues take over the checkpoint and the walk. Places that the kernel may still read
    /// or write are not used again while the pool is open.
    fn drop(&mut self) {
        let is_stuck = self.in_kernel.count() > 0;
        if let Some(mut checkpoint) = self.checkpoint.take() {
            checkpoint.restart();
            *self.inner.orphan.lock() = Some(checkpoint);
        }
        if self.is_walking {
            self.leave_walk_undone();
        }
        self.leave_scan();
        self.leave_merge_undone();
        self.leave_relocation_undone(is_stuck);
        self.leave_punch_undone();
        self.leave_scrub_undone(is_stuck);
        let intervals: Vec<u64> = self
            .device
            .in_flight()
            .filter_map(|purpose| match purpose {
                Purpose::Edge { interval, .. }
                | Purpose::Load { interval, .. }
                | Purpose::Walk { interval, .. } => Some(*interval),
                Purpose::Batch(_)
                | Purpose::Piece { .. }
                | Purpose::Whole { .. }
                | Purpose::Fingerprints { .. }
                | Purpose::Scan { .. }
                | Purpose::Compare { .. }
                | Purpose::MergeTable { .. }
                | Purpose::MergeVictims { .. }
                | Purpose::MergeKept { .. }
                | Purpose::Relocate { .. }
                | Purpose::Punch { .. }
                | Purpose::ScrubPage { .. }
                | Purpose::ScrubBlocks { .. }
                | Purpose::ScrubTables { .. }
                | Purpose::Flush
                | Purpose::Checkpoint => None,
            })
            .chain(self.reads.values().filter_map(Read::interval))
            .chain(self.drafts.values().filter_map(|draft| draft.interval))
            .chain(self.merging.intervals())
            .collect();
        self.inner.shared.access(|state| {
            for (sequence, batch) in &self.batches {
                state.end_batch(*sequence, Err(ErrorKind::Io));
                state.unpin(&batch.pins);
            }
            self.ready.iter().for_each(|draft| state.unpin(&references(&draft.parts)));
            for page in self.index_loads.keys() {
                state.fingerprints_loaded(*page, None);
            }
            if let Wanted::Volume(volume) = self.wanted {
                for change in self.changes.values().filter(|change| change.is_locked) {
                    state.end_change(volume, &change.range, change.promise);
                }
            }
            for interval in intervals.into_iter().filter(|_| !is_stuck) {
                state.end_read(interval);
            }
        });
        self.inner.shared.wake();
        if let Some(registered) = self.registered {
            self.inner.forget(registered);
        }
    }
}
