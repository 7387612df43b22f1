//! A cache of slow disks on a fast device, or in memory.
//!
//! The cache has blocks of several disks. They are never the only copy of anything: a change is
//! complete on the level below before it completes here, so that blocks that are lost cost only
//! time. In the mode [`CacheMode::WriteBack`], the level below is a write-ahead log on the same
//! volume, of which this layer knows no more than its place.
//!
//! - [`CacheVolume`]: the store of the cached blocks; its disks share its slots.
//! - `format`: the bytes on the volume, without I/O, of the crate `cache`; `docs/cache.md`
//!   describes them.
//! - `shard`: a part of the index, without I/O; a lock on it is never held across I/O. `blocks` is
//!   what most hits read of it without the lock: `index` finds the slot of a block, and `pins`
//!   counts the users of a slot.
//! - `regions`: the regions of a disk with recent changes, without I/O.
//! - `queue`, `insert`, `change`: one queue's reads, insertions and changes, and what it does while
//!   the store does not answer; `sweep`: changes of many blocks.
//! - `ahead`: reads files ahead of the guest.
//! - [`account`]: what the cache does for each disk, in counts and curves.
//! - `load`, `tables`: load and write the tables of the volume, in any open queue.
//! - `open`, `attach`: make or open a volume, and add disks to it.
//! - `state`, `note`: the state of a disk's store that its blocks belong to.
//! - `marking`: the mark of a store whose file system is full.
//! - `save`: the orderly end; `ending`: the end after a failure.
//! - `status`: what operators see of a cache.
//! - `options`, `kept`: the configuration, and the caches that disks share.
//! - `share`: what a disk keeps of a cache that it shares.
//!
//! A cache that outlives the daemon must never return old content after a crash, of any store and
//! at any instant. Two rules ensure this. A slot gets another block only after the tables without
//! its old mapping are durable (`shard`). And a change begins at home only after it is durably
//! noted that the mappings of its region are not valid (`regions`). A log beneath has the change
//! before that, so that in the mode write-back nothing waits for the note but the way home
//! ([`ChangeNotes`]).
//!
//! If the volume fails, or returns other data than it was given, it is taken out of service: the
//! disks continue without it. Before their next change, the mark of each image rejects what the
//! volume has cached, so that no later start uses it.

pub mod account;
mod ahead;
mod attach;
mod blocks;
mod change;
mod class;
mod ending;
mod hit;
mod index;
mod index_memory;
mod insert;
mod kept;
mod load;
mod marking;
mod note;
mod open;
mod options;
mod pins;
mod queue;
mod regions;
mod save;
mod shard;
mod share;
mod state;
mod status;
mod sweep;
mod tables;
mod volume;

use std::any::Any;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use fathom_block::{
    Backend, Capabilities, Disk, ErrorKind, Geometry, Layer, LayerPart, LayerReport, OpenContext,
    Urgency, Waker,
};
use fathom_cache::Policy;
use fathom_insight::Names;
use fathom_persistence::Identity;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use account::{Account, CLASSES, Ledger, LedgerSnapshot};
use ahead::AheadState;
use ending::{Ending, Use};
pub use fathom_cache::format;
pub use format::Superblock;
pub use kept::{Caches, NoMark};
use marking::Marking;
pub use open::{CacheDisk, CacheError, VolumeOptions};
pub use options::CacheOptions;
use queue::CacheQueue;
pub use share::CacheShare;
pub use state::{CacheHome, CacheHost, CacheMark, Dropped};
pub use status::CacheStatus;
use volume::DiskState;
pub use volume::{CacheTimes, CacheVolume};

use crate::ChangeNotes;

/// What goes into the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[repr(u8)]
pub enum CacheMode {
    /// What is read and what is written.
    #[default]
    WriteThrough = 0,
    /// What is read. A write takes its blocks out.
    WriteAround = 1,
    /// Nothing: the cache serves what it has. A write takes its blocks out.
    ReadOnly = 2,
    /// What is read and what is written. A log beneath the cache has the changes first.
    WriteBack = 3,
}

impl CacheMode {
    /// Every mode, in the order of its number.
    pub const ALL: [Self; 4] =
        [Self::WriteThrough, Self::WriteAround, Self::ReadOnly, Self::WriteBack];

    /// The name used in configurations and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::WriteThrough => "write-through",
            Self::WriteAround => "write-around",
            Self::ReadOnly => "read-only",
            Self::WriteBack => "write-back",
        }
    }

    fn inserts_reads(self) -> bool {
        self != Self::ReadOnly
    }

    fn inserts_writes(self) -> bool {
        matches!(self, Self::WriteThrough | Self::WriteBack)
    }
}

struct Inner {
    volume: Arc<CacheVolume>,
    disk: Arc<DiskState>,
    mode: AtomicU8,
    mark: Arc<dyn CacheMark>,
    /// The mark, if it could not be written yet.
    marking: Marking,
    /// The name of the cache that the disk shares with others; empty for its own.
    name: String,
    /// Why the blocks that the volume had of the disk were dropped, if they were.
    dropped: Option<Dropped>,
    /// Whether the modification time of the disk's store is noted.
    is_noted: bool,
    /// The numbers of the ranges beyond the disk's end, in each shard.
    beyond: Mutex<Vec<u64>>,
    ledger: Arc<Ledger>,
    ahead: AheadState,
    /// Reads whose content was not what the cache had noted.
    mismatches: AtomicU64,
    /// The state of the ending, and the time of the next attempt.
    ending: Mutex<(Ending, u64)>,
    /// A [`Use`], and the number of the bits that must be durable before the mark is written again.
    used: AtomicU8,
    bits_awaited: AtomicU64,
    /// Whether the store has not answered just before the disk leaves the volume.
    was_silent: AtomicBool,
}

impl Inner {
    fn mode(&self) -> CacheMode {
        CacheMode::ALL[usize::from(self.mode.load(Ordering::Relaxed)) % CacheMode::ALL.len()]
    }

    /// Whether what is read at home goes into the cache.
    fn inserts_reads(&self) -> bool {
        let is_durable =
            || !self.volume.is_kept || self.disk.is_home_flushed.load(Ordering::Acquire);
        self.mode().inserts_reads() && is_durable()
    }

    /// Whether a log waits for bits that may still be written.
    fn are_notes_awaited(&self) -> bool {
        self.disk.regions.access(|regions| regions.are_bits_awaited())
            && self.ending.lock().0 != Ending::Ended
    }
}

impl ChangeNotes for Inner {
    fn number(&self) -> u64 {
        self.disk.regions.access(|regions| regions.bits())
    }

    fn are_durable(&self, number: u64, waker: &Waker) -> bool {
        let mut is_new = false;
        let answer = self.disk.regions.attempt(waker, |regions| {
            // Without a mark, no start uses what the cache has of the disk.
            if regions.are_durable(number) || self.ending.lock().0 == Ending::Ended {
                return Some(());
            }
            is_new = regions.await_bits(number);
            None
        });
        if is_new {
            self.volume.keeper.access(|keeper| {
                keeper.is_urgent = true;
                keeper.wake_queues();
            });
        }
        answer.is_some()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        for (shard, number) in self.beyond.lock().drain(..).enumerate() {
            self.volume.shard(shard).end_range(number);
        }
        // What the disk had is lent to the others.
        _ = self.volume.set_share(self.disk.number, 0);
        self.disk.is_attached.store(false, Ordering::Release);
    }
}

/// The layer. See the module.
#[derive(Clone)]
pub struct Cache {
    inner: Arc<Inner>,
}

impl Cache {
    /// The cache of a disk on a volume. This function blocks.
    ///
    /// # Errors
    /// If the volume cannot take the disk.
    pub fn new(
        volume: &Arc<CacheVolume>,
        disk: &CacheDisk,
        mode: CacheMode,
        mark: Arc<dyn CacheMark>,
    ) -> Result<Self, CacheError> {
        Self::named("", volume, disk, mode, mark, None)
    }

    fn named(
        name: &str,
        volume: &Arc<CacheVolume>,
        disk: &CacheDisk,
        mode: CacheMode,
        mark: Arc<dyn CacheMark>,
        names: Option<Arc<Names>>,
    ) -> Result<Self, CacheError> {
        let (state, dropped) = volume.attach(disk)?;
        let inner = Inner {
            volume: Arc::clone(volume),
            disk: state,
            mode: AtomicU8::new(mode as u8),
            mark,
            marking: Marking::default(),
            name: name.to_owned(),
            dropped,
            is_noted: volume.is_kept && disk.modified_ns.is_some(),
            beyond: Mutex::default(),
            ledger: Arc::new(Ledger::new(volume.slots().into(), names)),
            ahead: AheadState::default(),
            mismatches: AtomicU64::new(0),
            ending: Mutex::new((Ending::InUse, 0)),
            used: AtomicU8::new(Use::Marked as u8),
            bits_awaited: AtomicU64::new(0),
            was_silent: AtomicBool::new(false),
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The volume.
    pub fn volume(&self) -> &Arc<CacheVolume> {
        &self.inner.volume
    }

    /// The name of the cache that the disk shares with others; empty for its own.
    pub fn shared_name(&self) -> &str {
        &self.inner.name
    }

    /// Guarantees a number of slots to the disk: while it has no more blocks than these, it loses
    /// none for a block of another disk of the cache. The slots that it does not use are lent.
    ///
    /// # Errors
    /// If the shares of all disks would exceed the cache, or too many disks have a share.
    pub fn set_share(&self, slots: u64) -> Result<(), CacheError> {
        self.inner.volume.set_share(self.inner.disk.number, slots)
    }

    /// Whether the disk can have a share of so many slots.
    fn can_have_share(&self, slots: u64) -> bool {
        self.inner.volume.can_share(self.inner.disk.number, slots)
    }

    /// Notes that the disk has the write-ahead log with this identity beneath the cache from now
    /// on, or [`Identity::NONE`]. A log that the disk had before is empty. It becomes durable with
    /// the next tables; until then, a start with another log than the noted one finds an empty
    /// cache.
    pub fn set_log(&self, identity: Identity) {
        let Inner { volume, disk, .. } = &*self.inner;
        {
            let mut record = disk.record.lock();
            if !volume.is_kept || record.log == identity {
                return;
            }
            record.log = identity;
            disk.regions.access(|regions| regions.is_log_noted = false);
        }
        disk.is_record_dirty.store(true, Ordering::Release);
        volume.keeper.access(|keeper| {
            keeper.due_ns = keeper.due_ns.max(1);
            keeper.wake_queues();
        });
    }

    /// The notes that the cache makes of changes: the bits of their regions.
    pub fn notes(&self) -> Arc<dyn ChangeNotes> {
        Arc::<Inner>::clone(&self.inner)
    }

    /// Sets whether each change goes to a log directly beneath the cache that brings it home only
    /// when the [`notes`](Self::notes) are durable. Changes then need not wait for their notes.
    /// Ends before the first queue without this log opens.
    pub fn rely_on_log(&self, relies: bool) {
        let relies = relies && self.inner.volume.is_kept;
        self.inner.disk.regions.access(|regions| regions.has_log = relies);
    }

    /// `layer`, if it is a cache.
    pub fn of(layer: &dyn Layer) -> Option<&Self> {
        layer.as_any()?.downcast_ref()
    }

    /// Why the blocks that the volume had of the disk were dropped, if they were.
    pub fn dropped(&self) -> Option<Dropped> {
        self.inner.dropped
    }

    /// Changes what goes into the cache.
    pub fn set_mode(&self, mode: CacheMode) {
        self.inner.mode.store(mode as u8, Ordering::Relaxed);
    }

    /// The disk's store has lost writes, and is about to accept writes again. No later start uses
    /// what the cache has of the disk now. The caller calls [`drop_blocks`](Self::drop_blocks)
    /// then. Blocks.
    ///
    /// # Errors
    /// If neither the mark of the disk's image nor the cache can be changed.
    pub fn reject_state(&self) -> io::Result<()> {
        if self.inner.volume.is_kept { self.inner.give_up() } else { Ok(()) }
    }

    /// Takes all blocks of the disk out of the cache.
    pub fn drop_blocks(&self) {
        self.inner.volume.drop_blocks(self.inner.disk.number);
    }

    /// Whether the cache's store answers, which it gets at most `limit` for. Blocks.
    pub fn answers(&self, limit: Duration) -> bool {
        self.inner.ask_store(limit);
        !self.inner.is_silent()
    }

    /// Sets how far files are read ahead of the guest, in bytes; 0, with which a cache begins, ends
    /// it.
    pub fn set_read_ahead(&self, bytes: u64) {
        self.inner.ahead.set_window(bytes);
    }

    /// What the cache has done for the disk, and its miss-ratio curves, at `now_ns` of the stacks'
    /// clock.
    pub fn ledger(&self, now_ns: u64) -> LedgerSnapshot {
        self.inner.ledger.snapshot(now_ns)
    }

    /// The blocks that the cache has by class, of all disks, and those of this disk.
    pub fn blocks_by_class(&self) -> ([u64; CLASSES], u64) {
        self.inner.volume.blocks_by_class(self.inner.disk.number)
    }

    /// The name of the policy that decides which blocks are kept.
    pub fn policy_name(&self) -> &'static str {
        match self.inner.volume.policy {
            Policy::None => "none",
            Policy::Sky => "sky",
            Policy::Auto => "auto",
        }
    }

    /// What goes into the cache.
    pub fn mode(&self) -> CacheMode {
        self.inner.mode()
    }
}

impl Layer for Cache {
    fn name(&self) -> &'static str {
        "cache"
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        below
    }

    fn geometry(&self, below: Geometry) -> Geometry {
        // Reads of slots have the volume's alignment.
        let alignment = below.alignment.max(self.inner.volume.backend.geometry().alignment);
        let block_size = below.block_size.max(alignment);
        let physical_block_size = below.physical_block_size.max(block_size);
        Geometry { alignment, block_size, physical_block_size, ..below }
    }

    fn resizing(&self, from: u64, to: u64) -> Result<(), ErrorKind> {
        let volume = &self.inner.volume;
        if to < from && volume.is_kept {
            // After a crash and a later growth, blocks beyond the end would reappear.
            return Err(ErrorKind::Unsupported);
        }
        if volume.is_kept {
            // The size changes the modification time, too: now or a little later.
            self.inner.disk.regions.access(|regions| regions.notes.changed(1));
            volume.keeper.access(|keeper| keeper.wake_queues());
        }
        let mut beyond = self.inner.beyond.lock();
        for (shard, number) in beyond.drain(..).enumerate() {
            volume.shard(shard).end_range(number);
        }
        if to < from {
            // Nothing beyond the end goes into the cache before the next growth.
            *beyond = volume.remove_from(self.inner.disk.number, to);
        }
        Ok(())
    }

    fn status(&self) -> LayerReport {
        self.report()
    }

    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }

    fn stores(&self) -> Vec<Arc<dyn Backend>> {
        vec![Arc::clone(&self.inner.volume.backend)]
    }

    fn retire(&self, disk: &Arc<Disk>, limit: Duration) {
        let _ = disk;
        let store_ns = self.inner.volume.times.store_ns;
        self.inner.ask_store(limit.min(Duration::from_nanos(store_ns)));
    }

    fn leave(&self, disk: &Arc<Disk>, limit: Duration) -> io::Result<()> {
        let _ = (disk, limit);
        let inner = &self.inner;
        let is_silent = inner.is_silent();
        // The disk changes without the cache from now on.
        if inner.volume.is_kept {
            if is_silent {
                inner.reject()?;
            } else {
                inner.give_up()?;
            }
            inner.end(true);
        }
        if is_silent {
            // Its page stays. Without the mark, it fits nothing.
            inner.volume.drop_blocks(inner.disk.number);
            return Ok(());
        }
        // Without the mark, the blocks fit nothing, also if this fails.
        let _ = inner.volume.detach(&inner.disk);
        Ok(())
    }

    fn save_state(&self, disk: &Arc<Disk>, limit: Duration) -> io::Result<()> {
        Cache::save_state(self, disk, limit)
    }

    fn open_queue(&self, context: &mut OpenContext<'_>) -> io::Result<LayerPart> {
        let store = context.open_store(&self.inner.volume.backend)?;
        let waker = context.waker()?;
        let ending = context.work(Urgency::Request)?;
        let noting = context.work(Urgency::Background)?;
        let marking = context.work(Urgency::Background)?;
        let account = Account::open(&self.inner.ledger);
        let inner = Arc::clone(&self.inner);
        let below = context.below().capabilities;
        let queue = CacheQueue::new(inner, account, store, waker, below, (ending, noting, marking));
        Ok(LayerPart::queue(queue))
    }
}
