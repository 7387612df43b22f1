//! Opens a pool: takes the latest checkpoint, and brings the batches that came after it into the
//! maps.
//!
//! Batches are looked for in the segments that the checkpoint names. A header is valid if its code
//! is right and it has the generation of the opening that the checkpoint belongs to. Each block of
//! its data is compared with its checksum. What was not written is dropped, block by block: it was
//! never durable. Gaps do not matter, because headers are found wherever they lie.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use fathom_block::{Backend, Shared, StoreAccess};
use fathom_persistence::{SUPERBLOCK_LENGTH, Superblock as _};

use crate::batch::{BatchHeader, Run};
use crate::catalogue::{Catalogue, Change};
use crate::checkpoint::Checkpoint;
use crate::error::PoolError;
use crate::fingerprint::{Fingerprint, Fingerprinter};
use crate::index::{self, Index};
use crate::layout::{BLOCK, BLOCK_BYTES, Layout, TABLE_ENTRIES};
use crate::paged::Paged;
use crate::pages::{Fault, Pages, from_bytes};
use crate::record::CheckpointRecord;
use crate::rules::Rules;
use crate::seal::Key;
use crate::space::{EMPTY_SEGMENTS_MAX, Space};
use crate::state::{DIRTY_PAGES_MAX, Parts, State};
use crate::superblock::PoolSuperblock;

/// The bytes of a table that are read at once.
const READ_LENGTH: u64 = 1 << 20;

/// The pages of the page table behind those in use that an interrupted checkpoint may have written:
/// more than those of all pages that may change until two checkpoints have begun.
const INTERRUPTED_PAGES_MAX: u32 = 1024;
const _: () = assert!(INTERRUPTED_PAGES_MAX as u64 * TABLE_ENTRIES > 3 * DIRTY_PAGES_MAX);

/// What an opening has found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Segments that were searched for batches.
    pub segments: u64,
    /// Batches that came after the last checkpoint.
    pub batches: u64,
    /// Their blocks.
    pub blocks: u64,
    /// Their references to blocks that were written earlier.
    pub references: u64,
    /// Blocks of them that had not been written.
    pub torn_blocks: u64,
    /// Blocks that were durable, and have other content. They cannot be read.
    pub wrong_blocks: u64,
}

/// The latest checkpoint of a pool, as it is on the device.
pub(crate) struct Latest {
    pub(crate) superblock: PoolSuperblock,
    pub(crate) record: CheckpointRecord,
    pub(crate) space: Space,
    pub(crate) pages: Pages,
}

/// The valid superblock of the pool on a device.
///
/// # Errors
/// If there is none, or the device is too short for the pool.
pub(crate) fn read_superblock(
    access: &mut StoreAccess,
    capacity: u64,
) -> Result<PoolSuperblock, PoolError> {
    let length = 2 * SUPERBLOCK_LENGTH as u64;
    let copies = access.read(0, length.min(capacity))?;
    let superblock = PoolSuperblock::select(&copies).map_err(PoolError::NoPool)?;
    let layout = superblock.layout;
    let needed = layout.block(layout.places()) * BLOCK;
    if capacity < needed {
        return Err(PoolError::TooShort(needed));
    }
    Ok(superblock)
}

/// Reads the latest checkpoint.
///
/// # Errors
/// If the device fails or has no sound checkpoint.
pub(crate) fn read_latest(
    access: &mut StoreAccess,
    capacity: u64,
    cached_pages: usize,
    rules: Rules,
) -> Result<Latest, PoolError> {
    let superblock = read_superblock(access, capacity)?;
    let mut layout = superblock.layout;
    let (length, code) = superblock.record;
    let offset = layout.record(superblock.number) * BLOCK;
    let mut bytes = access.read(offset, u64::from(length).next_multiple_of(BLOCK))?;
    bytes.truncate(length as usize);
    let record = (superblock.key.code(&bytes) == code)
        .then(|| CheckpointRecord::decode(&bytes, layout.segments, superblock.version))
        .flatten()
        .ok_or_else(|| PoolError::Damaged("the record of its last checkpoint".into()))?;
    // The device may have grown.
    if let Some(segments) = layout.segments_on(capacity) {
        layout.segments = segments.max(layout.segments);
    }
    let space = Paged::new(layout.space_map(), layout.space_pages);
    let used = u32::try_from(layout.places().div_ceil(layout.places_in_page())).unwrap_or(u32::MAX);
    let space = read_table(access, &superblock, (space, used), "space map", rules)?;
    let table = Paged::new(layout.page_table(), layout.table_pages);
    let used = record.pages.div_ceil(TABLE_ENTRIES as u32) + INTERRUPTED_PAGES_MAX;
    let table = read_table(access, &superblock, (table, used), "page table", rules)?;
    let pages = Pages::new(table, record.pages, cached_pages, rules);
    Ok(Latest { record, space: Space::new(layout, space, rules), pages, superblock })
}

/// Reads the first pages of a table.
fn read_table(
    access: &mut StoreAccess,
    superblock: &PoolSuperblock,
    (mut table, used): (Paged, u32),
    name: &str,
    rules: Rules,
) -> Result<Paged, PoolError> {
    let length = 2 * u64::from(used.min(table.count())) * BLOCK;
    let mut index = 0;
    for start in (0..length).step_by(READ_LENGTH as usize) {
        let bytes = access.read(table.first() * BLOCK + start, READ_LENGTH.min(length - start))?;
        for copies in bytes.chunks_exact(2 * BLOCK_BYTES) {
            let latest = superblock.number;
            if !table.load(superblock.identity, latest, index, copies, rules.overwrites_later) {
                return Err(PoolError::Damaged(format!("page {index} of its {name}")));
            }
            index += 1;
        }
    }
    Ok(table)
}

/// The batches after a checkpoint, by sequence.
struct Search<'a> {
    superblock: &'a PoolSuperblock,
    record: &'a CheckpointRecord,
    layout: Layout,
    batches: BTreeMap<u64, BatchHeader>,
    /// Of each block of data of a batch, whether it has its content.
    written: BTreeMap<u64, Vec<bool>>,
    /// The fingerprints of the blocks that have their content, by place; none for those of volumes
    /// whose blocks are not shared.
    fingerprints: BTreeMap<u64, Option<Fingerprint>>,
    /// What makes those of a volume, if its blocks are shared.
    fingerprinters: BTreeMap<u32, Fingerprinter>,
    frontier: u64,
    found: Recovered,
    rules: Rules,
}

impl Search<'_> {
    /// Looks for batches in a segment. Returns whether there is one.
    fn search(
        &mut self,
        access: &mut StoreAccess,
        space: &Space,
        segment: u32,
    ) -> Result<bool, PoolError> {
        let blocks = u64::from(self.layout.segment_blocks);
        let first = u64::from(segment) * blocks;
        let bytes = access.read(self.layout.block(first) * BLOCK, blocks * BLOCK)?;
        let block = |index: usize| &bytes[index * BLOCK_BYTES..][..BLOCK_BYTES];
        self.found.segments += 1;
        let mut has_batch = false;
        let mut is_data = vec![false; blocks as usize];
        for index in 0..blocks as usize {
            if is_data[index] || space.is_used(first + index as u64) {
                continue;
            }
            let PoolSuperblock { identity, key, generation, .. } = self.superblock;
            let generation = Some(*generation).filter(|_| self.rules.compares_generations);
            let Some(header) = BatchHeader::decode(*identity, key, generation, block(index)) else {
                if !self.rules.goes_on_behind_gaps {
                    break;
                }
                continue;
            };
            let sequence = header.sequence;
            let is_later = sequence > self.record.sequence;
            if !is_later && !self.record.in_flight.contains(&sequence) {
                continue;
            }
            has_batch |= is_later;
            self.frontier = self.frontier.max(header.frontier);
            let mut written = Vec::new();
            for run in &header.runs {
                let Run::Data { volume, block: place, checksums, .. } = run else { continue };
                let fingerprinter = self.fingerprinters.get(volume);
                for (place, checksum) in (*place..).zip(checksums) {
                    let own = self.layout.place(place).and_then(|place| place.checked_sub(first));
                    let own = own.filter(|own| *own < blocks).map(|own| own as usize);
                    let is_right = own.is_some_and(|own| crc32c::crc32c(block(own)) == *checksum);
                    written.push(is_right || !self.rules.compares_contents);
                    let Some(own) = own else { continue };
                    is_data[own] = true;
                    if is_right && !self.fingerprinters.is_empty() {
                        let fingerprint =
                            fingerprinter.map(|found| found.fingerprint(block(own), *checksum));
                        self.fingerprints.insert(first + own as u64, fingerprint);
                    }
                }
            }
            self.written.insert(sequence, written);
            self.batches.insert(sequence, header);
        }
        Ok(has_batch)
    }

    /// The batches in the order in which they took effect: those that were in flight when a
    /// snapshot was taken come after it, and those that had failed are none.
    fn ordered(&self) -> Vec<u64> {
        let mut places: BTreeMap<u64, u64> = BTreeMap::new();
        let mut void = BTreeSet::new();
        for (sequence, header) in &self.batches {
            for run in &header.runs {
                let Run::Change(bytes) = run else { continue };
                if let Some(Change::Snapshot { in_flight, failed, .. }) = Change::decode(bytes) {
                    void.extend(failed);
                    places.extend(in_flight.into_iter().map(|behind| (behind, *sequence)));
                }
            }
        }
        let mut order: Vec<u64> = self.batches.keys().copied().collect();
        order.retain(|sequence| !void.contains(sequence));
        let place = |sequence: u64| places.get(&sequence).copied().unwrap_or(sequence);
        order.sort_by_key(|sequence| (place(*sequence), place(*sequence) != *sequence, *sequence));
        order
    }
}

/// Opens a pool.
///
/// # Errors
/// If the device fails, or has no sound pool.
pub(crate) fn recover(
    device: &Arc<dyn Backend>,
    memory: (usize, usize),
    rules: Rules,
) -> Result<(Shared<State>, Recovered), PoolError> {
    let Opened { state, found, mut access, fingerprints } = find(device, memory, rules)?;
    note_fingerprints(&state, &mut access, &fingerprints)?;
    // No batch is written before the new generation is durable: nothing of the old one counts then.
    Checkpoint::run(&state, &mut access)?;
    Ok((state, found))
}

/// Brings the fingerprints of blocks that were written after the last checkpoint into the index.
fn note_fingerprints(
    state: &Shared<State>,
    access: &mut StoreAccess,
    fingerprints: &BTreeMap<u64, Option<Fingerprint>>,
) -> Result<(), PoolError> {
    let identity = state.access(|state| state.identity);
    for (place, fingerprint) in fingerprints {
        for page in state.access(|state| state.admit_fingerprints(&[*place])) {
            let block = state.access(|state| state.load_fingerprints(page));
            let bytes = access.read(block * BLOCK, BLOCK)?;
            let words = index::read_page(identity, page, &bytes);
            state.access(|state| state.fingerprints_loaded(page, words.as_deref()));
        }
        state.access(|state| state.note_fingerprint(*place, *fingerprint));
    }
    Ok(())
}

/// A pool in memory.
pub(crate) struct Opened {
    pub(crate) state: Shared<State>,
    pub(crate) found: Recovered,
    pub(crate) access: StoreAccess,
    /// Those of the blocks that came after the last checkpoint, by place.
    fingerprints: BTreeMap<u64, Option<Fingerprint>>,
}

/// The state of a pool in memory, with so many pages of maps and of the fingerprint table. Nothing
/// on the device changes.
///
/// # Errors
/// If the device fails, or has no sound pool.
pub(crate) fn find(
    device: &Arc<dyn Backend>,
    (cached_pages, index_pages): (usize, usize),
    rules: Rules,
) -> Result<Opened, PoolError> {
    let mut access = StoreAccess::open(device)?;
    let latest = read_latest(&mut access, device.capacity(), cached_pages, rules)?;
    let Latest { superblock, record, mut space, pages } = latest;
    let mut search = Search {
        superblock: &superblock,
        record: &record,
        layout: *space.layout(),
        batches: BTreeMap::new(),
        written: BTreeMap::new(),
        fingerprints: BTreeMap::new(),
        fingerprinters: fingerprinters(&superblock.key, &record.catalogue),
        frontier: 0,
        found: Recovered::default(),
        rules,
    };
    let mut seen = BTreeSet::new();
    for segment in record.busy.iter().filter(|segment| seen.insert(**segment)) {
        search.search(&mut access, &space, *segment)?;
    }
    let mut empty = 0;
    for segment in record.order.iter().filter(|segment| seen.insert(**segment)) {
        empty += u32::from(!search.search(&mut access, &space, *segment)?);
        if empty > EMPTY_SEGMENTS_MAX {
            break;
        }
    }
    let searched = record.busy.iter().chain(&record.order).copied();
    // Two checkpoints' worth of changed pages, if the last one was interrupted.
    let page_places = (search.layout.places() / 8).min(4 * DIRTY_PAGES_MAX);
    space.open(searched, page_places as usize);
    let index = Index::new(space.layout(), index_pages);
    let last = search.batches.keys().next_back().copied().unwrap_or(0);
    let state = State::new(Parts {
        identity: superblock.identity,
        key: superblock.key,
        catalogue: record.catalogue.clone(),
        space,
        pages,
        index,
        generation: superblock.generation + 1,
        number: superblock.number,
        sequence: last.max(record.sequence),
        has_garbage: record.has_garbage,
        rules,
    });
    let state = Shared::new(state);
    for sequence in search.ordered() {
        replay(&mut search, sequence, &state, &mut access)?;
    }
    let Search { found, fingerprints, .. } = search;
    Ok(Opened { state, found, access, fingerprints })
}

/// What makes the fingerprints of each volume whose blocks are shared.
fn fingerprinters(key: &Key, catalogue: &Catalogue) -> BTreeMap<u32, Fingerprinter> {
    let shared = catalogue.volumes.values().filter(|volume| !volume.domain.is_empty());
    shared.map(|volume| (volume.id, Fingerprinter::new(key, &volume.domain))).collect()
}

/// Applies a batch.
fn replay(
    search: &mut Search<'_>,
    sequence: u64,
    state: &Shared<State>,
    access: &mut StoreAccess,
) -> Result<(), PoolError> {
    let damaged = || PoolError::Damaged(format!("batch {sequence} after its last checkpoint"));
    let Some(header) = search.batches.get(&sequence) else { return Ok(()) };
    let mut written = search.written.get(&sequence).into_iter().flatten();
    let is_durable = sequence <= search.frontier;
    search.found.batches += 1;
    for run in &header.runs {
        match run {
            Run::Data { volume, first, block, checksums } => {
                for (index, checksum) in (0..).zip(checksums) {
                    search.found.blocks += 1;
                    match written.next() {
                        Some(true) => {}
                        _ if is_durable => search.found.wrong_blocks += 1,
                        _ => {
                            search.found.torn_blocks += 1;
                            continue;
                        }
                    }
                    let checksums = vec![*checksum];
                    let (first, block) = (first + index, block + index);
                    let one = Run::Data { volume: *volume, first, block, checksums };
                    apply(state, access, &one)?;
                }
            }
            Run::References { volume, first, block, checksums } => {
                for (index, checksum) in (0..).zip(checksums) {
                    search.found.references += 1;
                    let is_right =
                        find_target(state, access, block + index, *checksum, search.rules)?;
                    if !is_right && !is_durable {
                        search.found.torn_blocks += 1;
                        continue;
                    }
                    search.found.wrong_blocks += u64::from(!is_right);
                    let checksums = vec![*checksum];
                    let (first, block) = (first + index, block + index);
                    let one = Run::References { volume: *volume, first, block, checksums };
                    apply(state, access, &one)?;
                }
            }
            Run::Zeroes { .. } => apply(state, access, run)?,
            Run::Change(bytes) => {
                let change = Change::decode(bytes).ok_or_else(damaged)?;
                if let Change::Resize { id, size } = change {
                    // What lies behind the old end would come back with a larger size.
                    let before = state
                        .access(|state| state.catalogue.volumes.get(&id).map(|found| found.size));
                    if before.is_some_and(|before| size > before) {
                        trim(state, access, id)?;
                    }
                }
                state.access(|state| state.change(&change)).ok_or_else(damaged)?;
                if let Change::Resize { id, .. } = change {
                    trim(state, access, id)?;
                }
            }
        }
    }
    Ok(())
}

/// Shares the place of a reference. Returns false if the block that was there has not survived.
fn find_target(
    state: &Shared<State>,
    access: &mut StoreAccess,
    block: u64,
    checksum: u32,
    rules: Rules,
) -> Result<bool, PoolError> {
    let Some(place) = state.access(|state| state.layout().place(block)) else { return Ok(false) };
    let is_used = state.access(|state| state.space.is_used(place));
    // Otherwise an earlier batch has freed it, or it was never durable.
    let is_right = is_used
        || !rules.drops_references
        || rules.takes_again && crc32c::crc32c(&access.read(block * BLOCK, BLOCK)?) == checksum;
    state.access(|state| {
        if is_right {
            state.space.share(place);
        }
    });
    Ok(is_right)
}

/// Applies a run, and reads the pages that are missing.
fn apply(state: &Shared<State>, access: &mut StoreAccess, run: &Run) -> Result<(), PoolError> {
    if let Some((volume, blocks)) = run.blocks() {
        note_changed(state, access, volume, &blocks)?;
    }
    let mut done = 0;
    complete(state, access, |state| state.apply(run, &mut done))
}

/// Drops what lies behind the end of a volume.
///
/// # Errors
/// If the device fails, or a map is damaged.
pub(crate) fn trim(
    state: &Shared<State>,
    access: &mut StoreAccess,
    volume: u32,
) -> Result<(), PoolError> {
    if let Some(blocks) = state.access(|state| state.behind(volume)) {
        note_changed(state, access, volume, &blocks)?;
    }
    complete(state, access, |state| state.trim(volume))
}

/// Blocks of a volume are about to change. A set that cannot be read is forgotten.
fn note_changed(
    state: &Shared<State>,
    access: &mut StoreAccess,
    volume: u32,
    blocks: &Range<u64>,
) -> Result<(), PoolError> {
    match complete(state, access, |state| state.note_changed(volume, blocks)) {
        Err(PoolError::Damaged(_)) => {
            state.access(|state| state.catalogue.forget_set(volume));
            Ok(())
        }
        noted => noted,
    }
}

/// Repeats `attempt` until it is complete, and reads the pages that it misses.
///
/// # Errors
/// If the device fails, or a map is damaged.
pub(crate) fn complete<T>(
    state: &Shared<State>,
    access: &mut StoreAccess,
    mut attempt: impl FnMut(&mut State) -> Result<T, Fault>,
) -> Result<T, PoolError> {
    loop {
        match state.access(&mut attempt) {
            Ok(done) => return Ok(done),
            Err(Fault::Missing(id)) => load(state, access, id)?,
            Err(Fault::Damaged) => {
                return Err(PoolError::Damaged("a map leads to a page that does not exist".into()));
            }
        }
    }
}

/// Reads a page of a map into memory.
///
/// # Errors
/// If the device fails, or the page is not what it should be.
pub(crate) fn load(
    state: &Shared<State>,
    access: &mut StoreAccess,
    id: u32,
) -> Result<(), PoolError> {
    let entry = state.access(|state| state.pages.entry(id));
    let damaged = || PoolError::Damaged(format!("page {id} of its maps"));
    let is_on_device = state.access(|state| state.layout().place(entry.block)).is_some();
    if !is_on_device {
        return Err(damaged());
    }
    let mut failure = None;
    for block in state.access(|state| state.copies_of(&entry)) {
        match access.read(block * BLOCK, BLOCK) {
            Ok(bytes) if crc32c::crc32c(&bytes) == entry.checksum => {
                state.access(|state| {
                    state.pages.insert(id, entry, from_bytes(&bytes));
                    if block != entry.block {
                        state.mend(id);
                    }
                });
                return Ok(());
            }
            Ok(_) => {}
            Err(error) => failure = Some(error),
        }
    }
    Err(failure.map_or_else(damaged, PoolError::from))
}
