//! Adds disks to a cache volume. These functions block.
//!
//! The blocks of a disk belong to one state of its store, which the disk's page and the mark of the
//! store name. At each opening a new state is drawn, first in the page, which also keeps the
//! earlier one, and then in the mark. So a crash between both costs nothing, and an older copy of
//! either does not fit the other.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fathom_block::{Operation, REQUEST_TIME_MAX, Shared, StoreAccess};
use fathom_persistence::Identity;
use parking_lot::Mutex;

use fathom_failure::Failure;

use super::format::{BLOCK_BITS, DiskRecord, Owner, REGIONS_PER_PAGE};
use super::open::{CacheDisk, CacheError};
use super::regions::Regions;
use super::shard::Reason;
use super::state::Dropped;
use super::volume::{CacheVolume, DiskState};

const WRITER_INTERVAL: Duration = Duration::from_millis(1);
/// The number of the writer while no queue writes.
pub(super) const NO_QUEUE: u64 = u64::MAX;

/// The right to write pages outside of any queue, until it is dropped.
struct Turn<'v>(&'v CacheVolume);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.keeper.access(|keeper| {
            keeper.writer = None;
            keeper.wake_queues();
        });
        self.0.keeper.wake();
    }
}

/// Why the blocks of a disk do not fit the state of its store.
fn misfit(record: &DiskRecord, disk: &CacheDisk) -> Option<Dropped> {
    let fits = |expected: u64| {
        expected != 0 && (expected == record.generation || expected == record.earlier)
    };
    if !record.owner.is_home(&disk.home) {
        return Some(Dropped::Home);
    }
    if record.log != Identity::NONE && record.log != disk.log {
        return Some(Dropped::Log);
    }
    if !disk.expected.is_some_and(fits) {
        return Some(Dropped::Mark);
    }
    match disk.modified_ns {
        None => None,
        Some(0) => Some(Dropped::Unknown),
        Some(modified_ns) => (modified_ns != record.modified_ns).then_some(Dropped::Modified),
    }
}

impl CacheVolume {
    /// The disk `name`, if the volume has one.
    pub(super) fn disk_named(&self, name: &str) -> Option<Arc<DiskState>> {
        self.keeper.access(|keeper| {
            let mut disks = keeper.disks.values();
            disks.find(|disk| disk.record.lock().owner.name == name).map(Arc::clone)
        })
    }

    /// Adds a disk, or finds it, for a layer that serves it. Also returns why its blocks were
    /// dropped, if they were.
    pub(super) fn attach(
        &self,
        disk: &CacheDisk,
    ) -> Result<(Arc<DiskState>, Option<Dropped>), CacheError> {
        let owner = Owner::new(&disk.name, &disk.home).map_err(|error| {
            CacheError::Disk(Failure::new(error.to_string()).advise("choose a shorter one"))
        })?;
        let Some(found) = self.disk_named(&disk.name) else {
            return Ok((self.add(disk, owner)?, None));
        };
        if found.is_attached.swap(true, Ordering::AcqRel) {
            let failure = Failure::new(format!("the disk {:?} already uses the cache", disk.name));
            return Err(CacheError::Disk(failure.advise("serve it once")));
        }
        let dropped = misfit(&found.record.lock(), disk);
        found.is_home_flushed.store(false, Ordering::Release);
        // What is in memory has been out of date since the disk was served without it.
        let renewed = if dropped.is_some() || !self.is_kept {
            self.renew(&found, disk, owner)
        } else {
            self.take_over(&found, disk)
        };
        if let Err(error) = renewed {
            found.is_attached.store(false, Ordering::Release);
            return Err(error);
        }
        found.capacity.store(disk.capacity, Ordering::Release);
        let end = disk.capacity.div_ceil(u64::from(self.format.block_size));
        self.sweep(found.number, end);
        self.drop_changed(&found, disk);
        // The mark names the disk's blocks again.
        found.regions.access(|regions| regions.is_unmarked = false);
        Ok((found, dropped))
    }

    /// Drops the blocks in the regions in which the log beneath has changes: their bits may not be
    /// durable. What is in a table that is not loaded yet is dropped because of the bit.
    fn drop_changed(&self, state: &DiskState, disk: &CacheDisk) {
        if disk.changes.is_empty() || !self.is_kept {
            return;
        }
        let mark = || {
            let tables = self.next_tables();
            state.regions.access(|regions| {
                for range in &disk.changes {
                    regions.mark(range.start, range.end - range.start, 0, tables);
                }
            });
        };
        mark();
        let block_size = u64::from(self.format.block_size);
        let is_changed = |key: u64| {
            let offset = (key & ((1 << BLOCK_BITS) - 1)) * block_size;
            key >> BLOCK_BITS == u64::from(state.number)
                && state.regions.access(|regions| regions.is_active(offset))
        };
        for shard in 0..self.shards.len() {
            let mut shard = self.shard(shard);
            let slots = 0..shard.slots();
            shard.sweep_where(slots, Reason::Discard, is_changed);
        }
        // Tables whose writing began meanwhile may have the blocks.
        mark();
    }

    /// Adds a disk that the volume does not have.
    fn add(&self, disk: &CacheDisk, owner: Owner) -> Result<Arc<DiskState>, CacheError> {
        let pages = self.format.bitmap_pages;
        let shift = Regions::shift_for(disk.capacity, pages, disk.region_shift);
        // Entered at once, so that two disks do not get one number.
        let state = self.keeper.access(|keeper| {
            let numbers = 1..=self.format.disks as u16;
            let free = { numbers }.find(|number| !keeper.disks.contains_key(number));
            // The place of a disk that does not use the cache any more.
            let detached = || {
                let mut disks = keeper.disks.values();
                let unused = disks.find(|other| {
                    let is_empty = other.record.lock().generation == 0;
                    is_empty && !other.is_attached.load(Ordering::Acquire)
                });
                unused.map(|other| other.number)
            };
            let number = free.or_else(detached)?;
            let record =
                DiskRecord { owner: owner.clone(), region_shift: shift, ..DiskRecord::default() };
            let state = Arc::new(DiskState {
                number,
                record: Mutex::new(record),
                is_record_dirty: AtomicBool::new(false),
                regions: Shared::new(Regions::new(shift, pages)),
                is_attached: AtomicBool::new(true),
                capacity: AtomicU64::new(disk.capacity),
                is_home_flushed: AtomicBool::new(false),
            });
            keeper.disks.insert(number, Arc::clone(&state));
            Some(state)
        });
        let state = state.ok_or_else(|| {
            let failure =
                Failure::new(format!("the cache already has {} disks", self.format.disks));
            let remedy = "detach one with `fathom cache detach`, or make the cache again for more";
            CacheError::Disk(failure.advise(remedy))
        })?;
        let renewed = self.renew(&state, disk, owner);
        if let Err(error) = renewed {
            state.is_attached.store(false, Ordering::Release);
            return Err(error);
        }
        self.drop_changed(&state, disk);
        Ok(state)
    }

    /// The number of the next tables that are written.
    pub(super) fn next_tables(&self) -> u64 {
        self.keeper.access(|keeper| keeper.tables) + 1
    }

    /// Sets the bits of all regions of a disk until the next tables are written. A queue of another
    /// disk may load the tables now: because of the bits, it takes over no block of this disk after
    /// its blocks have left.
    fn mark_all(&self, state: &DiskState) {
        let tables = self.next_tables();
        state.regions.access(|regions| regions.load_all(0, tables));
    }

    /// Waits for the right to write pages outside of any queue, as long as for one request of the
    /// volume.
    fn turn(&self) -> Result<Turn<'_>, CacheError> {
        let end = Instant::now() + REQUEST_TIME_MAX;
        loop {
            let (is_mine, failed) = self.keeper.access(|keeper| {
                let is_mine = keeper.writer.is_none() && keeper.failed.is_none();
                if is_mine {
                    keeper.writer = Some(NO_QUEUE);
                }
                (is_mine, keeper.failed)
            });
            if is_mine {
                return Ok(Turn(self));
            }
            if let Some(kind) = failed {
                return Err(io::Error::other(kind).into());
            }
            if Instant::now() > end {
                return Err(io::Error::from(io::ErrorKind::TimedOut).into());
            }
            std::thread::sleep(WRITER_INTERVAL);
        }
    }

    /// Keeps the blocks of a disk, and notes the new state of its store.
    fn take_over(&self, state: &DiskState, disk: &CacheDisk) -> Result<(), CacheError> {
        let _turn = self.turn()?;
        let record = {
            let record = state.record.lock();
            let (generation, earlier) = (disk.generation, disk.expected.unwrap_or_default());
            DiskRecord { generation, earlier, log: disk.log, ..record.clone() }
        };
        let mut access = StoreAccess::open(&self.backend)?;
        self.write_record(&mut access, state, record)
    }

    /// Drops all blocks of a disk, and notes the state of its store. No queue uses the disk.
    fn renew(&self, state: &DiskState, disk: &CacheDisk, owner: Owner) -> Result<(), CacheError> {
        let record = DiskRecord {
            owner,
            generation: disk.generation,
            earlier: 0,
            modified_ns: disk.modified_ns.unwrap_or_default(),
            log: disk.log,
            region_shift: state.record.lock().region_shift,
        };
        let is_unused = self.keeper.access(|keeper| keeper.unused.remove(&state.number));
        // Nothing is inserted: no queue uses the disk.
        let turn = if self.is_kept { Some(self.turn()?) } else { None };
        let rejects = turn.is_some() && !is_unused;
        if rejects {
            // Nobody writes tables now: the next ones show that the blocks are gone.
            self.mark_all(state);
        }
        self.sweep(state.number, 0);
        if turn.is_some() {
            let mut access = StoreAccess::open(&self.backend)?;
            if rejects {
                self.write_all_bits(&mut access, state)?;
            }
            self.write_record(&mut access, state, record)?;
        } else {
            *state.record.lock() = record;
        }
        Ok(())
    }

    /// Drops all blocks of a disk that does not use the cache any more, and makes room for another
    /// one. The mark of its store has been removed.
    pub(super) fn detach(&self, state: &DiskState) -> Result<(), CacheError> {
        if self.is_kept {
            self.mark_all(state);
        }
        // Also insertions that are in flight end without a block.
        self.drop_blocks(state.number);
        if !self.is_kept {
            return Ok(());
        }
        let _turn = self.turn()?;
        let record = DiskRecord { generation: 0, earlier: 0, ..state.record.lock().clone() };
        self.write_record(&mut StoreAccess::open(&self.backend)?, state, record)
    }

    /// Drops all blocks of the disks whose store had the state `generation`, which a mark still
    /// has.
    pub(super) fn give_up(&self, generation: u64) -> Result<(), CacheError> {
        let disks = self.keeper.access(|keeper| keeper.disks.clone());
        for state in disks.values() {
            let has_state = {
                let record = state.record.lock();
                generation != 0 && [record.generation, record.earlier].contains(&generation)
            };
            if !has_state {
                continue;
            }
            if state.is_attached.load(Ordering::Acquire) {
                return Err(CacheError::Disk(Failure::new("a disk uses these blocks")));
            }
            self.detach(state)?;
        }
        Ok(())
    }

    /// Makes the page of a disk durable.
    fn write_record(
        &self,
        access: &mut StoreAccess,
        state: &DiskState,
        record: DiskRecord,
    ) -> Result<(), CacheError> {
        let place = self.format.disk_page(state.number);
        self.write_now(access, place, |sequence| self.format.disk_bytes(place, sequence, &record))?;
        access.carry_out(Operation::Flush, 0, &mut [])?;
        let log = record.log;
        *state.record.lock() = record;
        state.note_log(log);
        Ok(())
    }

    /// Makes the bits of all regions of a disk durable. Mappings of the disk may be in the tables.
    /// They are dropped when they are loaded, also by the next opening if this one ends before the
    /// disk's new state is noted.
    fn write_all_bits(
        &self,
        access: &mut StoreAccess,
        state: &DiskState,
    ) -> Result<(), CacheError> {
        for page in 0..self.format.bitmap_pages {
            // Also those beyond the end, where an earlier disk may have been longer.
            let bits = vec![u64::MAX; REGIONS_PER_PAGE as usize / 64];
            let place = self.format.bitmap_first(state.number) + page;
            self.write_now(access, place, |sequence| {
                self.format.bitmap_bytes(place, sequence, &bits)
            })?;
            state.regions.access(|regions| regions.page_durable(page, &bits, 0));
        }
        access.carry_out(Operation::Flush, 0, &mut [])?;
        Ok(())
    }

    /// Writes a page. The caller has the turn.
    fn write_now(
        &self,
        access: &mut StoreAccess,
        page: u32,
        bytes: impl FnOnce(u64) -> Box<[u8]>,
    ) -> io::Result<()> {
        let sequence = self.keeper.access(|keeper| keeper.sequences[page as usize] + 1);
        let offset = self.format.page_offset(page, sequence);
        access.carry_out(Operation::Write, offset, &mut bytes(sequence))?;
        self.keeper.access(|keeper| keeper.sequences[page as usize] = sequence);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_fit_one_state_of_one_store() {
        let record = DiskRecord {
            owner: Owner::new("a", "/a").unwrap(),
            generation: 7,
            earlier: 6,
            modified_ns: 50,
            log: Identity::NONE,
            region_shift: 20,
        };
        let disk = |expected, modified_ns| CacheDisk {
            name: "a".into(),
            home: "/a".into(),
            capacity: 1 << 20,
            expected,
            modified_ns,
            generation: 9,
            log: Identity::NONE,
            changes: Vec::new(),
            region_shift: 20,
        };
        let of = |expected, modified_ns| misfit(&record, &disk(expected, modified_ns));
        assert_eq!((of(Some(7), Some(50)), of(Some(6), Some(50))), (None, None));
        assert_eq!(of(Some(7), None), None);
        assert_eq!(of(Some(7), Some(51)), Some(Dropped::Modified));
        assert_eq!(of(Some(7), Some(49)), Some(Dropped::Modified), "of a backup");
        assert_eq!(of(Some(7), Some(0)), Some(Dropped::Unknown));
        for expected in [None, Some(0), Some(5), Some(8)] {
            assert_eq!(of(expected, Some(50)), Some(Dropped::Mark));
        }
        assert_eq!(
            misfit(&record, &CacheDisk { home: "/b".into(), ..disk(Some(7), Some(50)) }),
            Some(Dropped::Home)
        );
        // What is newer than the store without its log fits only with that log.
        let (one, other) = (Identity([1; 16]), Identity([2; 16]));
        for (noted, found, fits) in [
            (Identity::NONE, one, true),
            (one, one, true),
            (one, Identity::NONE, false),
            (one, other, false),
        ] {
            let record = DiskRecord { log: noted, ..record.clone() };
            let disk = CacheDisk { log: found, ..disk(Some(7), Some(50)) };
            assert_eq!(misfit(&record, &disk), (!fits).then_some(Dropped::Log));
        }
        let first = DiskRecord { generation: 0, earlier: 0, ..record };
        assert_eq!(misfit(&first, &disk(Some(0), None)), Some(Dropped::Mark));
    }
}
