//! A pool: its volumes and snapshots, and the changes of these.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use fathom_block::{Backend, Operation, Shared, StoreAccess, Waker};
use fathom_persistence::Identity;
use parking_lot::Mutex;

use crate::batch::BatchHeader;
use crate::batch::Run;
use crate::catalogue::{Change, Snapshot, Volume, is_domain, is_name, is_size};
use crate::checkpoint::{Checkpoint, kind_of};
use crate::difference::Comparison;
use crate::error::PoolError;
use crate::layout::{BLOCK, BLOCK_BYTES};
use crate::options::PoolOptions;
use crate::queue::Wanted;
use crate::recover::{self, Recovered};
use crate::refusal::PoolRefusal;
use crate::seal::Key;
use crate::state::{PoolCounts, State};
use crate::volume::StoreVolume;

/// How long a change of the catalogue waits for a place.
const PLACE_TIME_MAX: Duration = Duration::from_secs(20);
const PLACE_INTERVAL: Duration = Duration::from_millis(5);
/// The most volumes of a snapshot.
pub const SNAPSHOT_VOLUMES_MAX: usize = 64;
/// The domain of volumes for which none is given.
pub const DOMAIN: &str = "default";

/// What the queues of a pool share.
pub(crate) struct Inner {
    pub(crate) device: Arc<dyn Backend>,
    pub(crate) options: PoolOptions,
    pub(crate) shared: Shared<State>,
    pub(crate) identity: Identity,
    pub(crate) key: Key,
    /// The first block of the first segment.
    pub(crate) first_segment: u64,
    pub(crate) segment_blocks: u32,
    /// A checkpoint whose queue has ended.
    pub(crate) orphan: Mutex<Option<Checkpoint>>,
    /// When the next checkpoint is due, and the next walk may begin, in nanoseconds of the queues'
    /// clock.
    pub(crate) checkpoint_at_ns: AtomicU64,
    pub(crate) walk_at_ns: AtomicU64,
    /// Whether a queue carries out a walk, and whether one looks for the hooks of the index.
    pub(crate) is_walked: AtomicBool,
    pub(crate) is_scanned: AtomicBool,
    /// Whether sets of deleted snapshots may be there to be united with others.
    pub(crate) has_retired_sets: AtomicBool,
    /// Whether volumes have guarantees.
    pub(crate) has_guarantees: AtomicBool,
    /// Whether a queue carries out a merge, and when the next one is due.
    pub(crate) is_merged: AtomicBool,
    pub(crate) merge_at_ns: AtomicU64,
    /// Whether blocks are relocated, whether a queue does so, and when the last request came.
    pub(crate) relocates: bool,
    pub(crate) is_relocated: AtomicBool,
    pub(crate) used_at_ns: AtomicU64,
    /// Whether a scrub is in progress, and whether a queue carries it out.
    pub(crate) has_scrub: AtomicBool,
    pub(crate) is_scrubbed: AtomicBool,
    /// Whether free segments are given back, whether a queue does so, and when the next ones may
    /// be.
    pub(crate) punches: bool,
    pub(crate) is_punched: AtomicBool,
    pub(crate) punch_at_ns: AtomicU64,
    /// Held while the catalogue is changed.
    changing: Mutex<()>,
    /// The wakers of all queues, by number.
    wakers: Mutex<BTreeMap<u64, Waker>>,
    /// See [`Pool::on_unattended`].
    unattended: OnceLock<Box<dyn Fn() + Send + Sync>>,
    recovered: Recovered,
}

impl Inner {
    /// Notes a queue's waker. Returns the number with which it is [forgotten](Self::forget).
    pub(crate) fn register(&self, waker: &Waker) -> u64 {
        let mut wakers = self.wakers.lock();
        let number = wakers.last_key_value().map_or(0, |(last, _)| last + 1);
        wakers.insert(number, waker.clone());
        number
    }

    /// A queue has ended.
    pub(crate) fn forget(&self, number: u64) {
        self.wakers.lock().remove(&number);
        self.report_unattended();
    }

    /// Lets all queues look for work, also those that wait for nothing.
    pub(crate) fn wake_all(&self) {
        self.wakers.lock().values().for_each(Waker::wake);
        self.shared.wake();
        self.report_unattended();
    }

    fn is_unattended(&self) -> bool {
        let is_wanted = |state: &mut State| state.has_work() && !state.users.is_empty();
        self.wakers.lock().is_empty() && self.shared.access(is_wanted)
    }

    fn report_unattended(&self) {
        if let Some(call) = self.unattended.get().filter(|_| self.is_unattended()) {
            call();
        }
    }
}

/// The use of a pool's space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolStatus {
    /// The bytes of all places for blocks.
    pub bytes: u64,
    /// The bytes of those in use, by blocks of volumes and snapshots and by pages of maps.
    pub used_bytes: u64,
    /// The bytes of blocks to which several entries of maps may refer, because they were equal.
    pub shared_bytes: u64,
    /// The free bytes that are kept for the guarantees of volumes.
    pub guaranteed_bytes: u64,
    /// Whether blocks may be in use that nothing refers to, so that a walk will free them.
    pub has_garbage: bool,
    /// The bytes of memory that the pool takes, about.
    pub memory_bytes: u64,
    /// Counts since the opening.
    pub counts: PoolCounts,
    /// What the opening found.
    pub recovered: Recovered,
}

/// An open pool on a device. All disks with a volume of the pool must share it.
#[derive(Clone)]
pub struct Pool {
    pub(crate) inner: Arc<Inner>,
}

/// A pool that is closed when nobody uses it.
#[derive(Clone)]
pub struct WeakPool {
    inner: Weak<Inner>,
}

impl WeakPool {
    /// The pool, if it is open.
    pub fn upgrade(&self) -> Option<Pool> {
        self.inner.upgrade().map(|inner| Pool { inner })
    }
}

impl Pool {
    /// Opens the pool on a device. Blocks until what came after its last checkpoint is in the maps.
    ///
    /// # Errors
    /// If there is no sound pool, or the device fails.
    pub fn open(device: Arc<dyn Backend>, options: PoolOptions) -> Result<Self, PoolError> {
        let memory = (options.cached_pages, options.index_pages);
        let (shared, recovered) = recover::recover(&device, memory, options.rules)?;
        let (identity, key, layout) =
            shared.access(|state| (state.identity, state.key, state.layout()));
        let has_guarantees = shared.access(|state| !state.guarantees.is_empty());
        let relocates = options.relocates.unwrap_or(device.capabilities().rotational);
        let punches = options.punches && device.capabilities().discard;
        let inner = Inner {
            device,
            options,
            shared,
            identity,
            key,
            first_segment: layout.first_segment(),
            segment_blocks: layout.segment_blocks,
            orphan: Mutex::default(),
            checkpoint_at_ns: AtomicU64::new(0),
            walk_at_ns: AtomicU64::new(0),
            is_walked: AtomicBool::new(false),
            is_scanned: AtomicBool::new(false),
            has_retired_sets: AtomicBool::new(true),
            has_guarantees: AtomicBool::new(has_guarantees),
            is_merged: AtomicBool::new(false),
            merge_at_ns: AtomicU64::new(0),
            relocates,
            is_relocated: AtomicBool::new(false),
            used_at_ns: AtomicU64::new(0),
            has_scrub: AtomicBool::new(false),
            is_scrubbed: AtomicBool::new(false),
            punches,
            is_punched: AtomicBool::new(false),
            punch_at_ns: AtomicU64::new(0),
            changing: Mutex::default(),
            wakers: Mutex::default(),
            unattended: OnceLock::new(),
            recovered,
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// A reference that does not keep the pool open.
    pub fn downgrade(&self) -> WeakPool {
        WeakPool { inner: Arc::downgrade(&self.inner) }
    }

    /// The identity of the pool.
    pub fn identity(&self) -> Identity {
        self.inner.identity
    }

    /// All volumes, in the order in which they were made.
    pub fn volumes(&self) -> Vec<Volume> {
        self.inner.shared.access(|state| state.catalogue.volumes.values().cloned().collect())
    }

    /// All snapshots, in the order in which they were taken.
    pub fn snapshots(&self) -> Vec<Snapshot> {
        self.inner.shared.access(|state| state.catalogue.snapshots.values().cloned().collect())
    }

    /// The use of the pool.
    pub fn status(&self) -> PoolStatus {
        let recovered = self.inner.recovered;
        self.inner.shared.access(|state| PoolStatus {
            bytes: state.layout().data_bytes(),
            used_bytes: state.space.used_places() * BLOCK,
            shared_bytes: state.space.shared_places() * BLOCK,
            guaranteed_bytes: state.guaranteed() * BLOCK,
            has_garbage: state.has_garbage || state.walk.is_some(),
            memory_bytes: state.memory(),
            counts: state.counts,
            recovered,
        })
    }

    /// How many volumes and snapshots are open.
    pub fn open_count(&self) -> usize {
        self.inner.shared.access(|state| state.users.len())
    }

    /// What was found to be wrong with the pool.
    pub fn damage(&self) -> Option<String> {
        self.inner.shared.access(|state| state.damage.clone())
    }

    /// Looks for equal blocks that were written several times, and lets a walk free all but one of
    /// each. The queues of open volumes carry that out.
    pub fn request_merge(&self) {
        self.inner.shared.access(|state| state.is_merge_wanted = true);
        self.inner.wake_all();
    }

    /// A volume as a back end. While it exists, the volume is in use.
    ///
    /// # Errors
    /// If there is none with this name, or it is in use.
    pub fn volume(&self, name: &str) -> Result<Arc<dyn Backend>, PoolError> {
        let found = self.inner.shared.access(|state| {
            let found = state.catalogue.volume(name)?.clone();
            if state.users.insert(found.id) { Ok(found) } else { Err(PoolRefusal::InUse) }
        })?;
        let (wanted, size) = (Wanted::Volume(found.id), found.size);
        Ok(Arc::new(StoreVolume::new(self.clone(), Arc::clone(&self.inner), wanted, size)))
    }

    /// A snapshot as a back end without changes. While it exists, the snapshot is in use.
    ///
    /// # Errors
    /// If there is none with these names, or it is in use.
    pub fn snapshot(&self, volume: &str, name: &str) -> Result<Arc<dyn Backend>, PoolError> {
        let found = self.inner.shared.access(|state| {
            let volume = state.catalogue.volume(volume)?.id;
            let found = state.catalogue.snapshot(volume, name)?.clone();
            if state.users.insert(found.id) { Ok(found) } else { Err(PoolRefusal::InUse) }
        })?;
        let (wanted, size) = (Wanted::Snapshot(found.id), found.size);
        Ok(Arc::new(StoreVolume::new(self.clone(), Arc::clone(&self.inner), wanted, size)))
    }

    /// Makes an empty volume of `size` bytes in the domain [`DOMAIN`]. It is durable when the call
    /// returns.
    ///
    /// # Errors
    /// If name or size are not possible, or the pool fails.
    pub fn create_volume(&self, name: &str, size: u64) -> Result<(), PoolError> {
        self.create_volume_in(name, size, DOMAIN)
    }

    /// Makes an empty volume of `size` bytes in a domain, in which equal blocks are kept once. An
    /// empty name is no domain.
    ///
    /// # Errors
    /// If name, size or domain are not possible, or the pool fails.
    pub fn create_volume_in(&self, name: &str, size: u64, domain: &str) -> Result<(), PoolError> {
        self.change(|state| {
            state.catalogue.check_name(name)?;
            if !is_domain(domain) {
                return Err(PoolRefusal::BadName);
            }
            state.catalogue.check_room(1)?;
            if !is_size(size) {
                return Err(PoolRefusal::BadSize);
            }
            let id = state.catalogue.next_id;
            Ok(Change::Create { id, size, name: name.to_owned(), domain: domain.to_owned() })
        })
    }

    /// Gives a volume another domain, for what is written from its next opening on.
    ///
    /// # Errors
    /// If there is no such volume, or the domain is not possible.
    pub fn set_domain(&self, name: &str, domain: &str) -> Result<(), PoolError> {
        self.change(|state| {
            let id = state.catalogue.volume(name)?.id;
            if !is_domain(domain) {
                return Err(PoolRefusal::BadName);
            }
            Ok(Change::Domain { id, domain: domain.to_owned() })
        })
    }

    /// Deletes a volume that is not in use. Its space becomes free later. Its snapshots stay.
    ///
    /// # Errors
    /// If there is none, it is in use, or one of its snapshots is held.
    pub fn delete_volume(&self, name: &str) -> Result<(), PoolError> {
        self.change(|state| {
            let id = state.catalogue.volume(name)?.id;
            if state.is_used(id) {
                Err(PoolRefusal::InUse)
            } else if state.catalogue.is_held(id) {
                Err(PoolRefusal::Held)
            } else {
                Ok(Change::Delete { id })
            }
        })
    }

    /// Gives a volume another name.
    ///
    /// # Errors
    /// If there is none, or the new name is not possible.
    pub fn rename_volume(&self, name: &str, new: &str) -> Result<(), PoolError> {
        self.change(|state| {
            let id = state.catalogue.volume(name)?.id;
            state.catalogue.check_name(new)?;
            Ok(Change::Rename { id, name: new.to_owned() })
        })
    }

    /// Takes a snapshot of several volumes at one instant, while they are used: each has what a
    /// power loss at this instant would have left. It is durable when the call returns.
    ///
    /// # Errors
    /// If a volume does not exist or has a snapshot with this name, a guarantee could not be kept
    /// with the snapshot, or the pool fails.
    pub fn take_snapshot(
        &self,
        volumes: &[&str],
        name: &str,
        time_s: u64,
    ) -> Result<(), PoolError> {
        self.change(|state| {
            if !is_name(name) {
                return Err(PoolRefusal::BadName);
            }
            if volumes.len() > SNAPSHOT_VOLUMES_MAX {
                return Err(PoolRefusal::TooMany);
            }
            state.catalogue.check_room(volumes.len())?;
            let mut members: Vec<(u32, u32)> = Vec::new();
            for (volume, snapshot) in volumes.iter().zip(state.catalogue.next_id..) {
                let id = state.catalogue.volume(volume)?.id;
                let is_double = members.iter().any(|(other, _)| *other == id);
                if is_double || state.catalogue.snapshot(id, name).is_ok() {
                    return Err(PoolRefusal::NameTaken);
                }
                members.push((id, snapshot));
            }
            if state.breaks_guarantees(&members) {
                return Err(PoolRefusal::Guaranteed);
            }
            let (name, in_flight, failed) = (name.to_owned(), Vec::new(), Vec::new());
            Ok(Change::Snapshot { members, name, time_s, in_flight, failed })
        })
    }

    /// Deletes a snapshot. What only it had becomes free later.
    ///
    /// # Errors
    /// If there is none, or it is held or in use.
    pub fn delete_snapshot(&self, volume: &str, name: &str) -> Result<(), PoolError> {
        self.change(|state| {
            let volume = state.catalogue.volume(volume)?.id;
            let snapshot = state.catalogue.snapshot(volume, name)?;
            let id = snapshot.id;
            if snapshot.hold.is_some() {
                return Err(PoolRefusal::Held);
            }
            if state.is_used(id) {
                return Err(PoolRefusal::InUse);
            }
            Ok(Change::DeleteSnapshot { id })
        })
    }

    /// Makes a volume with the content of a snapshot, at once.
    ///
    /// # Errors
    /// If there is no such snapshot, or the new name is not possible.
    pub fn clone_snapshot(&self, volume: &str, name: &str, new: &str) -> Result<(), PoolError> {
        self.change(|state| {
            let volume = state.catalogue.volume(volume)?.id;
            let snapshot = state.catalogue.snapshot(volume, name)?.id;
            state.catalogue.check_name(new)?;
            state.catalogue.check_room(1)?;
            let id = state.catalogue.next_id;
            Ok(Change::Clone { snapshot, id, name: new.to_owned() })
        })
    }

    /// Gives a volume that is not in use the content and the size of one of its snapshots. Its
    /// other snapshots stay.
    ///
    /// # Errors
    /// If there is no such snapshot, or the volume is in use.
    pub fn roll_back(&self, volume: &str, name: &str) -> Result<(), PoolError> {
        self.change(|state| {
            let id = state.catalogue.volume(volume)?.id;
            let snapshot = state.catalogue.snapshot(id, name)?.id;
            if state.is_used(id) {
                return Err(PoolRefusal::InUse);
            }
            Ok(Change::Rollback { id, snapshot })
        })
    }

    /// Sets the size of a volume, in bytes.
    pub(crate) fn resize(&self, id: u32, size: u64) -> Result<(), PoolError> {
        let shared = &self.inner.shared;
        let before =
            shared.access(|state| state.catalogue.volumes.get(&id).map(|found| found.size));
        if before.is_some_and(|before| size > before) && !self.trim(id)? {
            // What an interrupted change of the size has left would come back.
            return Err(PoolError::Full);
        }
        self.change(|_| {
            if is_size(size) { Ok(Change::Resize { id, size }) } else { Err(PoolRefusal::BadSize) }
        })?;
        // What is in flight behind the new end is written before the next change of the size, so
        // that a recovery drops it as well.
        let end = Instant::now() + PLACE_TIME_MAX;
        while shared.access(|state| state.has_change_behind(id)) {
            if Instant::now() > end {
                return Err(PoolError::Device(io::ErrorKind::TimedOut.into()));
            }
            std::thread::sleep(PLACE_INTERVAL);
        }
        self.trim(id).map(drop)
    }

    /// The size of a volume or a snapshot, in bytes.
    pub(crate) fn size_of(&self, id: u32) -> u64 {
        self.inner.shared.access(|state| {
            let found = state.catalogue.branch(id);
            found.map_or(0, |(_, size)| size)
        })
    }

    /// Drops what a volume has behind its end. Returns false if the pool has no place for that.
    fn trim(&self, id: u32) -> Result<bool, PoolError> {
        let shared = &self.inner.shared;
        let mut access = StoreAccess::open(&self.inner.device)?;
        let end = Instant::now() + PLACE_TIME_MAX;
        let checkpoints = shared.access(|state| state.counts.checkpoints);
        while !shared.access(State::begin_trim) {
            if shared.access(|state| state.has_no_room_since(checkpoints)) || Instant::now() > end {
                return Ok(false);
            }
            self.await_place(&mut access)?;
        }
        let done = recover::trim(shared, &mut access, id);
        shared.access(State::end_trim);
        done.map(|()| true)
    }

    /// Carries out a checkpoint that is wanted, or waits for a moment.
    fn await_place(&self, access: &mut StoreAccess) -> Result<(), PoolError> {
        let inner = &self.inner;
        let orphan = inner.orphan.lock().take();
        let wants = || inner.shared.access(|state| state.wants_checkpoint(false));
        let begin = || if wants() { Checkpoint::begin(&inner.shared) } else { None };
        match orphan.or_else(begin) {
            Some(checkpoint) => self.finish(checkpoint, access)?,
            None => std::thread::sleep(PLACE_INTERVAL),
        }
        Ok(())
    }

    /// Carries out the rest of a checkpoint. One for which the device has no space is left to who
    /// comes next.
    fn finish(&self, mut checkpoint: Checkpoint, access: &mut StoreAccess) -> io::Result<()> {
        let done = checkpoint.finish(&self.inner.shared, access);
        if done.is_err() && checkpoint.is_continuable() {
            *self.inner.orphan.lock() = Some(checkpoint);
        }
        done
    }

    /// Carries out a change of the catalogue that `plan` makes, and makes it durable.
    pub(crate) fn change(
        &self,
        plan: impl Fn(&State) -> Result<Change, PoolRefusal>,
    ) -> Result<(), PoolError> {
        let inner = &self.inner;
        let _changing = inner.changing.lock();
        let mut access = StoreAccess::open(&inner.device)?;
        let end = Instant::now() + PLACE_TIME_MAX;
        let (placed, change) = loop {
            let mut is_full = false;
            let placed = inner.shared.access(|state| {
                let what = || state.damage.clone().unwrap_or_else(|| "it has failed".into());
                if state.failed.is_some() {
                    return Err(PoolError::Failed(what()));
                }
                let change = plan(state)?;
                if !change.fits() || !state.has_room_for(&change) {
                    return Err(PoolRefusal::TooMany.into());
                }
                let placed = state.place_change(change);
                is_full = placed.is_none() && state.is_full();
                Ok(placed)
            })?;
            if let Some(placed) = placed {
                break placed;
            }
            if is_full || Instant::now() > end {
                return Err(PoolError::Full);
            }
            self.await_place(&mut access)?;
        };
        let header = BatchHeader {
            generation: placed.generation,
            sequence: placed.sequence,
            frontier: placed.frontier,
            runs: vec![Run::Change(change.encode())],
        };
        let mut block = vec![0; BLOCK_BYTES];
        header.encode(inner.identity, &inner.key, &mut block);
        let offset = (inner.first_segment + placed.places.header) * BLOCK;
        let written = access
            .carry_out(Operation::Write, offset, &mut block)
            .and_then(|()| access.carry_out(Operation::Flush, 0, &mut []));
        inner.shared.access(|state| {
            let outcome = written.as_ref().copied().map_err(kind_of);
            state.end_batch(placed.sequence, outcome);
            if written.is_err() {
                // It is not known whether the change was made.
                state.damage.get_or_insert("a change of the catalogue could not be written".into());
                state.fail(fathom_block::ErrorKind::Io);
            }
        });
        inner.has_retired_sets.store(true, Ordering::SeqCst);
        let has_guarantees = inner.shared.access(|state| !state.guarantees.is_empty());
        inner.has_guarantees.store(has_guarantees, Ordering::SeqCst);
        inner.wake_all();
        Ok(written?)
    }

    /// Writes a checkpoint if anything has changed since the last one, so that the next opening has
    /// nothing to search. Blocks for about `limit` at most for each request.
    ///
    /// # Errors
    /// If that fails. The next opening takes longer then.
    pub fn save(&self, limit: Duration) -> io::Result<()> {
        let inner = &self.inner;
        let mut access = StoreAccess::open_within(&inner.device, limit)?;
        let orphan = inner.orphan.lock().take();
        if let Some(orphan) = orphan {
            self.finish(orphan, &mut access)?;
        }
        let wants = inner.shared.access(|state| {
            state.has_changes() && !state.is_checkpointing && state.failed.is_none()
        });
        let begun = if wants { Checkpoint::begin(&inner.shared) } else { None };
        begun.map_or(Ok(()), |checkpoint| self.finish(checkpoint, &mut access))
    }

    /// A comparison, whose [use](State::readers) was noted, as a back end.
    pub(crate) fn comparing(&self, compared: Comparison, size: u64) -> Arc<dyn Backend> {
        let wanted = Wanted::Difference(compared);
        Arc::new(StoreVolume::new(self.clone(), Arc::clone(&self.inner), wanted, size))
    }

    /// What a back end had is not in use by it any more.
    pub(crate) fn release(&self, wanted: Wanted) {
        self.inner.shared.access(|state| match wanted {
            Wanted::Volume(id) | Wanted::Snapshot(id) => {
                state.users.remove(&id);
            }
            Wanted::Difference(Comparison { base, target, .. }) => {
                for id in base.into_iter().chain([target]) {
                    if let Some(count) = state.readers.get_mut(&id) {
                        *count -= 1;
                    }
                }
                state.readers.retain(|_, count| *count > 0);
            }
            Wanted::Nothing => {}
        });
    }

    /// A back end without content, whose queues carry out the background work of the pool while no
    /// volume has a queue.
    pub fn attendant(&self) -> Arc<dyn Backend> {
        Arc::new(StoreVolume::new(self.clone(), Arc::clone(&self.inner), Wanted::Nothing, BLOCK))
    }

    /// Whether there is background work that need not wait: a walk, or a merge that was requested.
    pub fn has_work(&self) -> bool {
        self.inner.shared.access(|state| state.has_work())
    }

    /// Whether there is such work for a volume in use, and no queue that carries it out.
    pub fn is_unattended(&self) -> bool {
        self.inner.is_unattended()
    }

    /// Sets what is called, once, whenever the pool may have become
    /// [unattended](Self::is_unattended). It must not block.
    pub fn on_unattended(&self, call: impl Fn() + Send + Sync + 'static) {
        let _ = self.inner.unattended.set(Box::new(call));
    }
}
