//! Writes a checkpoint: what is done next, for whoever carries out the writes.
//!
//! 1. The changed pages of maps go to new places, each to two if possible.
//! 2. The changed pages of the space map and the page table go over their copies that are not
//!    valid, those of the fingerprint table over their only copies, and the record to its place.
//! 3. A flush makes all of that durable.
//! 4. The superblock is written and made durable. Then the checkpoint is valid.

use std::sync::Arc;

use fathom_block::{ErrorKind, Operation, Outcome, Request, Shared, StoreAccess};
use fathom_persistence::{SUPERBLOCK_LENGTH, Superblock as _};

use crate::layout::{BLOCK, BLOCK_BYTES};
use crate::paged::{FrozenPages, Payload, encode};
use crate::pages::to_bytes;
use crate::state::{Frozen, State};
use crate::superblock::PoolSuperblock;

/// The most blocks of a write.
const WRITE_BLOCKS_MAX: usize = 256;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Pages,
    Tables,
    Flush,
    Superblock,
    LastFlush,
    Done,
}

/// The next step of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CheckpointStep {
    /// The request has been filled in and has to be carried out.
    Submit,
    /// Requests in flight have to complete first.
    Wait,
    /// The device has no space. The step is tried again after a while.
    Pause,
    /// The checkpoint is valid.
    Done,
    /// It has failed, and so has the pool.
    Failed,
}

/// A page of a table, to be written to a block.
struct TablePage {
    block: u64,
    index: u32,
    payload: Arc<Payload>,
}

/// See the module.
pub(crate) struct Checkpoint {
    frozen: Frozen,
    checksums: Vec<u32>,
    table: FrozenPages,
    tables: Vec<TablePage>,
    record: Vec<u8>,
    phase: Phase,
    next: usize,
    in_flight: usize,
    has_failed: bool,
    /// Whether the device has had no space for a write of the phase.
    has_no_space: bool,
}

impl Checkpoint {
    /// The checkpoint of this instant. `None` if another one has begun, or the pool has no place
    /// for it and has failed.
    pub(crate) fn begin(state: &Shared<State>) -> Option<Self> {
        let frozen = state.access(|state| {
            if !state.may_checkpoint() {
                return None;
            }
            let frozen = state.freeze();
            if frozen.is_none() {
                state.damage.get_or_insert("no place is left for a checkpoint".into());
                state.fail(ErrorKind::NoSpace);
            }
            frozen
        })?;
        let checksums = vec![0; frozen.pages.len()];
        Some(Self {
            record: frozen.record.encode(),
            frozen,
            checksums,
            table: Vec::new(),
            tables: Vec::new(),
            phase: Phase::Pages,
            next: 0,
            in_flight: 0,
            has_failed: false,
            has_no_space: false,
        })
    }

    /// Fills in `request` with the next write or flush, or says what to wait for.
    pub(crate) fn step(&mut self, state: &Shared<State>, request: &mut Request) -> CheckpointStep {
        loop {
            if self.has_failed {
                return if self.in_flight > 0 { CheckpointStep::Wait } else { self.fail(state) };
            }
            if self.has_no_space {
                if self.in_flight > 0 {
                    return CheckpointStep::Wait;
                }
                state.access(|state| state.is_out_of_space = true);
                state.wake();
                self.has_no_space = false;
                self.restart();
                return CheckpointStep::Pause;
            }
            if self.fill(state, request) {
                self.in_flight += 1;
                return CheckpointStep::Submit;
            }
            if self.phase == Phase::Done {
                return CheckpointStep::Done;
            }
            if self.in_flight > 0 {
                return CheckpointStep::Wait;
            }
            self.advance(state);
        }
    }

    /// A request has completed.
    pub(crate) fn completed(&mut self, outcome: Outcome) {
        self.in_flight -= 1;
        match outcome {
            Ok(()) => {}
            Err(ErrorKind::NoSpace) => self.has_no_space = true,
            Err(_) => self.has_failed = true,
        }
    }

    /// The requests in flight were lost: the phase is carried out again.
    pub(crate) fn restart(&mut self) {
        (self.next, self.in_flight) = (0, 0);
    }

    fn fail(&self, state: &Shared<State>) -> CheckpointStep {
        state.access(|state| {
            let number = self.frozen.number;
            state.damage.get_or_insert(format!("checkpoint {number} could not be written"));
            state.fail(ErrorKind::Io);
        });
        state.wake();
        CheckpointStep::Failed
    }

    /// Whether it can be continued.
    pub(crate) fn is_continuable(&self) -> bool {
        !self.has_failed && self.phase != Phase::Done && self.in_flight == 0
    }

    fn advance(&mut self, state: &Shared<State>) {
        self.next = 0;
        state.access(|state| state.is_out_of_space = false);
        self.phase = match self.phase {
            Phase::Pages => {
                self.collect_tables(state);
                Phase::Tables
            }
            Phase::Tables => Phase::Flush,
            Phase::Flush => Phase::Superblock,
            Phase::Superblock => Phase::LastFlush,
            Phase::LastFlush | Phase::Done => {
                state.access(|state| state.commit(&self.frozen, &self.table));
                state.wake();
                Phase::Done
            }
        };
    }

    fn collect_tables(&mut self, state: &Shared<State>) {
        state.access(|state| {
            self.table = state.pages_written(&self.frozen, &self.checksums);
            let space = state.space.map();
            let entry = |(index, payload): &(u32, Arc<Payload>), block| TablePage {
                block,
                index: *index,
                payload: Arc::clone(payload),
            };
            let pages = self.frozen.space.iter().map(|page| entry(page, space.target(page.0)));
            self.tables.extend(pages);
            let table = state.pages.table();
            let pages = self.table.iter().map(|page| entry(page, table.target(page.0)));
            self.tables.extend(pages);
            let pages = state.index.freeze().into_iter();
            let pages = pages.map(|(block, index, payload)| TablePage {
                block,
                index,
                payload: Arc::from(payload),
            });
            self.tables.extend(pages);
        });
    }

    /// Fills in the next request of the phase. Returns false if it has none.
    fn fill(&mut self, state: &Shared<State>, request: &mut Request) -> bool {
        match self.phase {
            Phase::Pages => self.fill_pages(request),
            Phase::Tables => self.fill_tables(state, request),
            Phase::Flush | Phase::LastFlush => {
                request.operation = Operation::Flush;
                std::mem::replace(&mut self.next, 1) == 0
            }
            Phase::Superblock => {
                if std::mem::replace(&mut self.next, 1) == 1 {
                    return false;
                }
                let superblock = state.access(|state| self.superblock(state));
                put(request, superblock.offset(), SUPERBLOCK_LENGTH);
                let bytes = superblock.encode();
                request.buffers.copy_from(0, &bytes);
                true
            }
            Phase::Done => false,
        }
    }

    fn superblock(&self, state: &State) -> PoolSuperblock {
        PoolSuperblock {
            version: PoolSuperblock::NEWEST,
            identity: state.identity,
            key: state.key,
            number: self.frozen.number,
            generation: self.frozen.generation,
            layout: state.layout(),
            record: (self.record.len() as u32, state.key.code(&self.record)),
        }
    }

    /// The page that is the `at`-th to be written, and its block: first all pages, and then the
    /// second copies.
    fn page_at(&self, at: usize) -> Option<(usize, u64)> {
        let pages = self.frozen.pages.len();
        match self.frozen.pages.get(at) {
            Some((_, _, block)) => Some((at, *block)),
            None => self.frozen.copies.get(at - pages).map(|block| (at - pages, *block)),
        }
    }

    fn fill_pages(&mut self, request: &mut Request) -> bool {
        // A page may have no second copy.
        while self.page_at(self.next).is_some_and(|(_, block)| block == 0) {
            self.next += 1;
        }
        let Some((_, first)) = self.page_at(self.next) else { return false };
        let adjoins = |count: &usize| {
            let next = self.page_at(self.next + count);
            next.is_some_and(|(_, block)| block == first + *count as u64)
        };
        let count = (0..WRITE_BLOCKS_MAX).take_while(adjoins).count();
        put(request, first * BLOCK, count * BLOCK_BYTES);
        let Some(bytes) = request.buffers.owned_mut() else { return false };
        for (at, bytes) in (self.next..).zip(bytes.chunks_exact_mut(BLOCK_BYTES)) {
            let index = at % self.frozen.pages.len();
            to_bytes(&self.frozen.pages[index].1, bytes);
            self.checksums[index] = crc32c::crc32c(bytes);
        }
        self.next += count;
        true
    }

    fn fill_tables(&mut self, state: &Shared<State>, request: &mut Request) -> bool {
        let (identity, layout) = state.access(|state| (state.identity, state.layout()));
        if let Some(page) = self.tables.get(self.next) {
            let bytes = encode(identity, self.frozen.number, page.index, &page.payload);
            put(request, page.block * BLOCK, BLOCK_BYTES);
            request.buffers.copy_from(0, &bytes[..]);
            self.next += 1;
            return true;
        }
        if self.next > self.tables.len() || self.has_failed {
            return false;
        }
        self.next += 1;
        let length = self.record.len().next_multiple_of(BLOCK_BYTES);
        if length as u64 > u64::from(layout.record_blocks) * BLOCK {
            state.access(|state| {
                state.damage.get_or_insert("the record of the checkpoint has no place".into());
            });
            self.has_failed = true;
            return false;
        }
        put(request, layout.record(self.frozen.number) * BLOCK, length);
        if let Some(bytes) = request.buffers.owned_mut() {
            bytes[..self.record.len()].copy_from_slice(&self.record);
            bytes[self.record.len()..].fill(0);
        }
        true
    }

    /// Carries out the checkpoint of this instant, and waits for it, unless a queue has begun one.
    ///
    /// # Errors
    /// If the pool or its device fails.
    pub(crate) fn run(state: &Shared<State>, access: &mut StoreAccess) -> std::io::Result<()> {
        let failed = || std::io::Error::other("a checkpoint of the pool cannot be written");
        match Self::begin(state) {
            Some(mut checkpoint) => checkpoint.finish(state, access),
            // A queue has begun one.
            None if state.access(|state| state.failed.is_none()) => Ok(()),
            None => Err(failed()),
        }
    }

    /// Carries out the rest of the checkpoint, and waits for it.
    ///
    /// # Errors
    /// As for [`run`](Self::run).
    pub(crate) fn finish(
        &mut self,
        state: &Shared<State>,
        access: &mut StoreAccess,
    ) -> std::io::Result<()> {
        let mut request = Request::default();
        loop {
            request.reset();
            match self.step(state, &mut request) {
                CheckpointStep::Done => return Ok(()),
                CheckpointStep::Submit => {
                    let (operation, offset) = (request.operation, request.offset);
                    let bytes = request.buffers.owned_mut().unwrap_or_default();
                    let done = access.carry_out(operation, offset, bytes);
                    self.completed(done.map_err(|error| kind_of(&error)));
                }
                CheckpointStep::Pause => return Err(std::io::ErrorKind::StorageFull.into()),
                CheckpointStep::Wait | CheckpointStep::Failed => {
                    return Err(std::io::Error::other("a checkpoint of the pool failed"));
                }
            }
        }
    }
}

/// The kind of a request's error.
pub(crate) fn kind_of(error: &std::io::Error) -> ErrorKind {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<ErrorKind>());
    inner.copied().unwrap_or(ErrorKind::Io)
}

/// Makes a request a write of `length` bytes.
fn put(request: &mut Request, offset: u64, length: usize) {
    (request.operation, request.offset) = (Operation::Write, offset);
    request.length = length as u64;
    request.buffers.allocate(length);
}
