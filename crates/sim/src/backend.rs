//! A faulty store.
//!
//! Requests wait for some rounds. A request takes effect (a write becomes visible, a read takes its
//! data) in one round and completes in the same or a later round, in any order among the requests
//! in flight. The content of a write stays in a cache of sectors until a flush that was submitted
//! after the completion of the write makes it durable; force unit access bypasses the cache. A
//! crash leaves in each sector the durable content or any content that the cache has had since, and
//! any of the sectors of writes that had not yet taken effect. A store can hang: then no request
//! takes effect or completes until it continues.

mod faults;
mod options;

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use fathom_block::{
    Allocation, Backend, BackendContext, BackendOpenContext, BackendProblem, BackendQueue,
    Capabilities, ErrorKind, Extent, Geometry, Operation, Outcome, Request,
};
use fathom_reactor::Event;
use parking_lot::Mutex;

pub use options::SimOptions;

use crate::record::SimRecord;
use crate::{SECTOR, SECTOR_BYTES};

/// An effect of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JournalEntry {
    /// The bytes `data` became visible at `offset`.
    Write {
        /// The offset, in bytes.
        offset: u64,
        /// The content; zeroes for discards and zeroes.
        data: Vec<u8>,
    },
    /// A flush succeeded.
    Flush,
}

/// A sector's content that is not durable.
struct Cached {
    sector: usize,
    data: Box<[u8]>,
    /// The request that wrote it.
    request: u64,
    /// The number of requests that had completed before that request; `None` while it is in flight.
    completed_at: Option<u64>,
    /// Whether a failed flush has lost it: no flush makes it durable.
    is_lost: bool,
}

struct State {
    visible: Vec<u8>,
    durable: Vec<u8>,
    /// The cached contents, in the order in which they took effect.
    cache: Vec<Cached>,
    /// Writes that have not taken effect, by request number: offset and content.
    waiting: BTreeMap<u64, (u64, Vec<u8>)>,
    /// Whether each sector is allocated.
    allocated: Vec<bool>,
    allocated_bytes: u64,
    completions: u64,
    submissions: u64,
    base: Vec<u8>,
    journal: Vec<JournalEntry>,
    counts: SimCounts,
    is_hanging: bool,
    is_dead: bool,
    /// How often writes were lost, and how often the store was recovered from that.
    losses: u64,
    /// Failed writes that have yet to take effect: after how many further effects, where, and the
    /// content.
    late: Vec<(u32, u64, Vec<u8>)>,
    /// The size now, in bytes.
    capacity: u64,
}

/// The requests that a store has been given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SimCounts {
    /// Reads.
    pub reads: u64,
    /// Writes, discards and zeroes.
    pub writes: u64,
    /// Flushes.
    pub flushes: u64,
}

/// See the module.
pub struct SimBackend {
    options: SimOptions,
    seed: u64,
    state: Arc<Mutex<State>>,
    queues: Mutex<u64>,
    /// The record of all stores of the disk, and the number of this store in it.
    record: Option<(SimRecord, usize)>,
}

impl SimBackend {
    /// An empty store; `seed` determines all faults.
    pub fn new(options: SimOptions, seed: u64) -> Self {
        let image = vec![0; options.capacity as usize];
        Self::with_image(options, seed, image)
    }

    /// A store with the durable content `image`, such as the result of a [`crash`](Self::crash).
    ///
    /// # Panics
    /// When the length of the image is not the capacity.
    pub fn with_image(options: SimOptions, seed: u64, image: Vec<u8>) -> Self {
        assert_eq!(
            image.len() as u64,
            options.capacity,
            "the length of an image is its disk's capacity"
        );
        let has_content = |sector: &[u8]| sector != &[0; SECTOR_BYTES][..sector.len()];
        let allocated: Vec<bool> = image.chunks(SECTOR_BYTES).map(has_content).collect();
        let allocated_bytes = allocated.iter().filter(|taken| **taken).count() as u64 * SECTOR;
        let state = State {
            visible: image.clone(),
            durable: image.clone(),
            cache: Vec::new(),
            waiting: BTreeMap::new(),
            allocated,
            allocated_bytes,
            completions: 0,
            submissions: 0,
            base: if options.journal { image } else { Vec::new() },
            journal: Vec::new(),
            counts: SimCounts::default(),
            is_hanging: false,
            is_dead: false,
            losses: 0,
            late: Vec::new(),
            capacity: options.capacity,
        };
        let state = Arc::new(Mutex::new(state));
        Self { options, seed, state, queues: Mutex::new(0), record: None }
    }

    /// This store as number `number` of `record`.
    pub(crate) fn recorded(self, record: SimRecord, number: usize) -> Self {
        Self { record: Some((record, number)), ..self }
    }

    /// The content that a crash at this moment leaves, by `seed`. The store itself is not changed.
    pub fn crash(&self, seed: u64) -> Vec<u8> {
        let state = self.state.lock();
        let mut random = fastrand::Rng::with_seed(seed);
        let mut image = state.durable.clone();
        let mut versions: BTreeMap<usize, Vec<&[u8]>> = BTreeMap::new();
        for cached in &state.cache {
            versions.entry(cached.sector).or_default().push(&cached.data);
        }
        for (offset, data) in state.waiting.values() {
            for (index, bytes) in data.chunks(SECTOR_BYTES).enumerate() {
                versions.entry((offset / SECTOR) as usize + index).or_default().push(bytes);
            }
        }
        for (sector, contents) in versions {
            // The index after the last one means that the durable content stays.
            if let Some(bytes) = contents.get(random.usize(0..=contents.len())) {
                image[sector * SECTOR_BYTES..][..SECTOR_BYTES].copy_from_slice(bytes);
            }
        }
        image
    }

    /// The visible content at this moment.
    pub fn image(&self) -> Vec<u8> {
        self.state.lock().visible.clone()
    }

    /// The durable content at this moment.
    pub fn durable(&self) -> Vec<u8> {
        self.state.lock().durable.clone()
    }

    /// The requests given to the store so far.
    pub fn counts(&self) -> SimCounts {
        self.state.lock().counts
    }

    /// From now on, all reads, changes and flushes fail.
    pub fn die(&self) {
        self.state.lock().is_dead = true;
    }

    /// Ends that.
    pub fn revive(&self) {
        self.state.lock().is_dead = false;
    }

    /// Replaces the content, durably.
    ///
    /// # Panics
    /// When the length of the image is not the capacity.
    pub fn replace(&self, image: &[u8]) {
        let mut state = self.state.lock();
        state.visible.copy_from_slice(image);
        state.durable.copy_from_slice(image);
        state.cache.clear();
    }

    /// Sets whether the store hangs.
    pub fn hang(&self, hangs: bool) {
        self.state.lock().is_hanging = hangs;
    }

    /// The number of entries of the journal.
    pub fn journal_length(&self) -> usize {
        self.state.lock().journal.len()
    }

    /// The journal so far.
    pub fn journal(&self) -> Vec<JournalEntry> {
        self.state.lock().journal.clone()
    }

    /// The content after exactly the first `count` entries of the journal.
    pub fn image_after(&self, count: usize) -> Vec<u8> {
        let state = self.state.lock();
        let mut image = state.base.clone();
        for entry in state.journal.iter().take(count) {
            if let JournalEntry::Write { offset, data } = entry {
                image[*offset as usize..][..data.len()].copy_from_slice(data);
            }
        }
        image
    }
}

impl Backend for SimBackend {
    fn name(&self) -> &'static str {
        "sim"
    }

    fn capacity(&self) -> u64 {
        self.state.lock().capacity
    }

    fn geometry(&self) -> Geometry {
        Geometry { alignment: self.options.alignment, ..Geometry::default() }
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::ALL
    }

    fn open_queue(
        &self,
        _context: &mut BackendOpenContext<'_>,
    ) -> io::Result<Box<dyn BackendQueue>> {
        let mut queues = self.queues.lock();
        *queues += 1;
        let seed = self.seed ^ queues.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Ok(Box::new(SimQueue {
            options: self.options.clone(),
            state: Arc::clone(&self.state),
            random: fastrand::Rng::with_seed(seed),
            pending: Vec::new(),
            record: self.record.clone(),
        }))
    }

    fn resize(&self, capacity: u64) -> Result<(), ErrorKind> {
        let mut state = self.state.lock();
        if capacity > self.options.capacity || capacity % SECTOR != 0 {
            return Err(ErrorKind::Unsupported);
        }
        // What is cut off does not reappear.
        let cut = capacity as usize..;
        if capacity < state.capacity {
            state.visible[cut.clone()].fill(0);
            state.durable[cut].fill(0);
            state.cache.retain(|cached| (cached.sector as u64) < capacity / SECTOR);
        }
        state.capacity = capacity;
        Ok(())
    }

    fn problems(&self) -> Vec<BackendProblem> {
        let is_lost = self.state.lock().is_lost();
        let problem = BackendProblem::WritesLost { errno: 5, earlier: false };
        is_lost.then_some(problem).into_iter().collect()
    }

    fn losses(&self) -> u64 {
        self.state.lock().losses
    }

    fn may_act_late(&self) -> bool {
        !self.state.lock().late.is_empty()
    }

    fn frees_zeroes(&self) -> bool {
        self.options.frees_zeroes
    }

    fn inspect(&self) {}

    fn recover(&self) -> io::Result<()> {
        let mut state = self.state.lock();
        if state.is_dead {
            return Err(io::ErrorKind::Other.into());
        }
        let seed = self.seed.wrapping_add(state.losses);
        state.recover(&mut fastrand::Rng::with_seed(seed));
        Ok(())
    }
}

/// A request in flight.
struct Pending {
    request: Box<Request>,
    number: u64,
    /// The number of requests that had completed when this one was submitted.
    completions_before: u64,
    /// The number of rounds until it takes effect; `None` after that.
    effect_in: Option<u32>,
    /// The number of rounds until it completes.
    completes_in: u32,
    outcome: Outcome,
}

struct SimQueue {
    options: SimOptions,
    state: Arc<Mutex<State>>,
    random: fastrand::Rng,
    pending: Vec<Pending>,
    record: Option<(SimRecord, usize)>,
}

impl State {
    /// Makes `data` visible at sector `sector`.
    fn put(&mut self, sector: usize, data: &[u8], number: u64, durable: bool) {
        let range = sector * SECTOR_BYTES..(sector + 1) * SECTOR_BYTES;
        self.visible[range.clone()].copy_from_slice(data);
        if durable {
            self.durable[range].copy_from_slice(data);
            self.cache.retain(|cached| cached.sector != sector);
        } else {
            self.cache.push(Cached {
                sector,
                data: data.into(),
                request: number,
                completed_at: None,
                is_lost: false,
            });
        }
    }

    /// Records that request `number` has completed as number `at` of all completions.
    fn complete(&mut self, number: u64, at: u64) {
        for cached in &mut self.cache {
            if cached.request == number {
                cached.completed_at = Some(at);
            }
        }
    }

    /// Makes all writes durable that were among the first `completions` requests to complete.
    fn flush(&mut self, completions: u64) {
        let covered = |cached: &Cached| cached.is_covered(completions);
        // The last covered content of each sector replaces all earlier ones.
        let mut last: BTreeMap<usize, usize> = BTreeMap::new();
        for (index, cached) in self.cache.iter().enumerate() {
            if covered(cached) {
                last.insert(cached.sector, index);
            }
        }
        for (sector, index) in &last {
            let range = sector * SECTOR_BYTES..(sector + 1) * SECTOR_BYTES;
            self.durable[range].copy_from_slice(&self.cache[*index].data);
        }
        let mut index = 0;
        self.cache.retain(|cached| {
            let kept = last.get(&cached.sector).is_none_or(|covered| index > *covered);
            index += 1;
            kept
        });
    }

    /// Allocates or frees the space of some sectors, or fails.
    fn allocate(&mut self, first: usize, count: usize, taken: bool, room: u64) -> Outcome {
        let sectors = first..first + count;
        let change = self.allocated[sectors.clone()].iter().filter(|now| **now != taken).count();
        let bytes = change as u64 * SECTOR;
        if taken {
            if self.allocated_bytes + bytes > room {
                return Err(ErrorKind::NoSpace);
            }
            self.allocated_bytes += bytes;
        } else {
            self.allocated_bytes -= bytes;
        }
        self.allocated[sectors].fill(taken);
        Ok(())
    }

    fn extents(&self, request: &mut Request) {
        let end = request.offset + request.length;
        let mut offset = request.offset;
        while offset < end {
            let taken = self.allocated[(offset / SECTOR) as usize];
            let mut next = offset;
            while next < end && self.allocated[(next / SECTOR) as usize] == taken {
                next += SECTOR;
            }
            let allocation = if taken { Allocation::Data } else { Allocation::Hole };
            request.extents.push(Extent { offset, length: next - offset, allocation });
            offset = next;
        }
    }
}

impl SimQueue {
    fn fails(&mut self, rate: f64) -> bool {
        self.state.lock().is_dead || rate > 0.0 && self.random.f64() < rate
    }

    /// Applies a request that modifies the store.
    fn change(&mut self, pending: &Pending) -> Outcome {
        let request = &pending.request;
        let is_sound = request.offset >= self.options.write_error_end;
        let rate = if is_sound { 0.0 } else { self.options.write_error_rate };
        let failed = self.fails(rate) || self.state.lock().is_lost();
        let mut state = self.state.lock();
        let Some((offset, data)) = state.waiting.remove(&pending.number) else { return Ok(()) };
        let first = (offset / SECTOR) as usize;
        let taken = request.operation == Operation::Write || request.flags.keep_allocated;
        // What a failed request has not zeroed stays data.
        if taken || !failed {
            state.allocate(first, data.len() / SECTOR_BYTES, taken, self.options.room)?;
        }
        if failed && self.options.late_max > 0 && self.random.bool() {
            let after = self.random.u32(1..=self.options.late_max);
            state.late.push((after, offset, data));
            return Err(ErrorKind::Io);
        }
        let durable = request.flags.force_unit_access && !failed;
        let mut torn = Vec::new();
        for (index, bytes) in data.chunks(SECTOR_BYTES).enumerate() {
            if failed && self.random.bool() {
                continue;
            }
            state.put(first + index, bytes, pending.number, durable);
            if failed {
                let offset = offset + index as u64 * SECTOR;
                torn.push(JournalEntry::Write { offset, data: bytes.to_vec() });
            }
        }
        drop(state);
        if failed {
            for entry in torn {
                self.note(entry);
            }
            return Err(ErrorKind::Io);
        }
        self.note(JournalEntry::Write { offset, data });
        Ok(())
    }

    /// Records an effect in the journal, if there is one.
    fn note(&self, entry: JournalEntry) {
        if self.options.journal {
            self.state.lock().journal.push(entry.clone());
        }
        if let Some((record, number)) = &self.record {
            record.note(*number, entry);
        }
    }

    fn effect(&mut self, pending: &mut Pending) {
        pending.effect_in = None;
        let late = self.state.lock().act_late();
        for (offset, data) in late {
            self.note(JournalEntry::Write { offset, data });
        }
        pending.outcome = match pending.request.operation {
            Operation::Write | Operation::Discard | Operation::WriteZeroes => self.change(pending),
            Operation::Read if self.fails(self.options.read_error_rate) => Err(ErrorKind::Io),
            Operation::Read => {
                let request = &mut pending.request;
                let start = request.offset as usize;
                let state = self.state.lock();
                request
                    .buffers
                    .copy_from(0, &state.visible[start..start + request.length as usize]);
                Ok(())
            }
            Operation::Flush if self.state.lock().is_lost() => Err(ErrorKind::Io),
            Operation::Flush if self.fails(self.options.flush_error_rate) => {
                if self.options.loses_writes {
                    self.state.lock().lose(pending.completions_before);
                }
                Err(ErrorKind::Io)
            }
            Operation::Flush => {
                self.state.lock().flush(pending.completions_before);
                self.note(JournalEntry::Flush);
                Ok(())
            }
            Operation::Extents => {
                self.state.lock().extents(&mut pending.request);
                Ok(())
            }
            // The stack answers it above the back end.
            Operation::GetId => Ok(()),
        };
    }

    fn complete(&mut self, pending: Pending, context: &mut BackendContext<'_>) {
        let mut state = self.state.lock();
        let at = state.completions;
        state.completions += 1;
        state.complete(pending.number, at);
        drop(state);
        context.complete(pending.request, pending.outcome);
    }
}

impl Drop for SimQueue {
    /// The end of a queue waits for the kernel, so each request in flight takes effect now or
    /// never.
    fn drop(&mut self) {
        for mut pending in std::mem::take(&mut self.pending) {
            if pending.effect_in.is_some() && self.random.bool() {
                self.state.lock().waiting.remove(&pending.number);
            } else if pending.effect_in.is_some() {
                self.effect(&mut pending);
            }
            let mut state = self.state.lock();
            let at = state.completions;
            state.completions += 1;
            state.complete(pending.number, at);
        }
    }
}

impl BackendQueue for SimQueue {
    fn submit(&mut self, request: Box<Request>, context: &mut BackendContext<'_>) {
        let mut state = self.state.lock();
        let number = state.submissions;
        state.submissions += 1;
        match request.operation {
            Operation::Read => state.counts.reads += 1,
            Operation::Flush => state.counts.flushes += 1,
            Operation::Write | Operation::Discard | Operation::WriteZeroes => {
                state.counts.writes += 1;
            }
            Operation::GetId | Operation::Extents => {}
        }
        if request.operation.modifies() {
            let mut data = vec![0; request.length as usize];
            if request.operation == Operation::Write {
                request.buffers.copy_to(0, &mut data);
            }
            state.waiting.insert(number, (request.offset, data));
        }
        let (completions_before, is_hanging) = (state.completions, state.is_hanging);
        drop(state);
        let completes_in = self.random.u32(0..=self.options.rounds_max);
        let effect_in = Some(self.random.u32(0..=completes_in));
        let outcome = Ok(());
        let mut pending =
            Pending { request, number, completions_before, effect_in, completes_in, outcome };
        if self.options.rounds_max == 0 && !is_hanging {
            self.effect(&mut pending);
            self.complete(pending, context);
        } else {
            self.pending.push(pending);
        }
    }

    fn event(&mut self, _event: &Event, _context: &mut BackendContext<'_>) {}

    fn advance(&mut self, context: &mut BackendContext<'_>) {
        if self.state.lock().is_hanging {
            return;
        }
        let mut pending = std::mem::take(&mut self.pending);
        self.random.shuffle(&mut pending);
        for mut each in pending {
            match each.effect_in {
                Some(0) => self.effect(&mut each),
                Some(rounds) => each.effect_in = Some(rounds - 1),
                None => {}
            }
            if each.completes_in == 0 {
                self.complete(each, context);
            } else {
                each.completes_in -= 1;
                self.pending.push(each);
            }
        }
    }
}
