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
//! - `settle`: the orderly end.
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
mod hit;
mod index;
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
mod settle;
mod shard;
mod share;
mod state;
mod sweep;
mod tables;
mod volume;

use std::any::Any;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use fathom_block::{
    Backend, Capabilities, Disk, ErrorKind, Figure, Geometry, Layer, LayerCause, LayerPart,
    LayerProblem, LayerReport, OpenContext, Urgency, Waker,
};
use fathom_cache::Policy;
use fathom_insight::Names;
use fathom_persistence::{Identity, Phase, Stamp};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use account::{Account, CLASSES, CacheCounts, Ledger, LedgerSnapshot};
use ahead::AheadState;
pub use fathom_cache::format;
pub use format::Superblock;
pub use kept::{Caches, NoMark};
use marking::Marking;
pub use open::{CacheDisk, CacheError, VolumeOptions};
pub use options::CacheOptions;
use queue::CacheQueue;
pub use share::CacheShare;
pub use state::{CacheHome, CacheHost, CacheMark, Dropped};
use volume::DiskState;
pub use volume::{CacheTimes, CacheVolume};

use crate::ChangeNotes;

/// The time between two attempts to end the use of a cache, in nanoseconds.
const RETRY_NS: u64 = 1_000_000_000;

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

/// Whether later starts may use what a volume has of a disk, if the volume has been silent;
/// `queue::silent` describes the transitions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Use {
    /// They may if the mark of the disk's store names the volume.
    Marked = 0,
    /// They may not, because a change has waited for the volume for too long.
    Left = 1,
    /// They may not, but the mark will be written.
    Returning = 2,
}

impl Use {
    const ALL: [Self; 3] = [Self::Marked, Self::Left, Self::Returning];
}

impl Phase for Use {
    /// No mark is written again unless the bits of what was changed without it are awaited.
    fn leads_to(self, next: Self) -> bool {
        (self, next) != (Self::Marked, Self::Returning)
    }
}

/// Whether a disk still uses a cache that has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    /// Its mark has not been changed yet.
    InUse,
    /// The cache is not used any more.
    Ended,
    /// The mark could not be changed: changes of the disk must fail.
    Failed,
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

    /// The state of the ending. A failed attempt is repeated after a second.
    fn ending(&self, now_ns: u64) -> Ending {
        let mut ending = self.ending.lock();
        if ending.0 == Ending::Failed {
            if ending.1 == 0 {
                ending.1 = now_ns + RETRY_NS;
            } else if now_ns >= ending.1 {
                *ending = (Ending::InUse, 0);
            }
        }
        ending.0
    }

    /// The mark of the disk's store has the new generation: the earlier one does not fit any more.
    fn confirm(&self) {
        self.disk.record.lock().earlier = 0;
        self.disk.is_record_dirty.store(true, Ordering::Release);
        self.volume.keeper.access(|keeper| {
            keeper.due_ns = keeper.due_ns.max(1);
            keeper.wake_queues();
        });
    }

    /// Removes the mark of the disk's store, if it names this cache. If that is impossible, the
    /// cache itself forgets the state that the mark names, so that no later start uses its blocks.
    /// The blocks are gone then.
    fn give_up(&self) -> io::Result<()> {
        let rejected = self.reject();
        rejected.or_else(|error| self.volume.detach(&self.disk).map_err(|_| error))
    }

    fn of_disk(&self) -> Use {
        Use::ALL[usize::from(self.used.load(Ordering::Acquire)) % Use::ALL.len()]
    }

    /// The caller has the lock of the marking.
    fn set_use(&self, used: Use) {
        self.of_disk().step(used);
        self.used.store(used as u8, Ordering::Release);
    }

    /// Removes the mark of the disk's store, if it names this cache. It is not written again.
    fn reject(&self) -> io::Result<()> {
        let mut marking = self.marking.state.lock();
        *marking = None;
        self.marking.end();
        self.set_use(Use::Marked);
        self.reject_mark()
    }

    /// Removes the mark of the disk's store, if it names this cache. The caller has the lock of the
    /// marking.
    fn reject_mark(&self) -> io::Result<()> {
        let marked = self.mark.read();
        let is_other = |state: &Stamp| state.identity != self.volume.identity();
        match marked {
            // No cache fits, or only another one, which knows of all changes.
            Ok(None) => Ok(()),
            Ok(Some(state)) if is_other(&state) => Ok(()),
            _ => self.mark.reject(),
        }
    }

    /// An attempt to change the mark has ended.
    fn end(&self, has_succeeded: bool) {
        if has_succeeded {
            self.disk.regions.access(|regions| regions.is_unmarked = true);
        }
        {
            let mut ending = self.ending.lock();
            if ending.0 != Ending::Ended {
                *ending = (if has_succeeded { Ending::Ended } else { Ending::Failed }, 0);
            }
        }
        // A log that waits for bits need not wait any more.
        self.disk.regions.wake();
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

/// The state of a disk's cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStatus {
    /// Reads, and those that the cache had wholly.
    pub reads: u64,
    /// Reads that the cache had wholly.
    pub hits: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes read that the cache had.
    pub hit_bytes: u64,
    /// The time that the bytes which the cache had would have taken at home, as estimated, in
    /// nanoseconds.
    pub avoided_ns: u64,
    /// The time of hits, in nanoseconds.
    pub hit_ns: u64,
    /// The time of reads that the cache had not wholly, in nanoseconds.
    pub miss_ns: u64,
    /// Reads whose content was not what the cache had noted.
    pub mismatches: u64,
    /// Slots of the volume, of all disks.
    pub slots: u64,
    /// Slots that have a block.
    pub mapped: u64,
    /// Blocks inserted, of all disks.
    pub insertions: u64,
    /// Blocks removed to make room, of all disks.
    pub evictions: u64,
    /// Blocks removed because they were written, of all disks.
    pub overwritten: u64,
    /// Blocks removed because they were discarded or filled with zeroes, or because their disk has
    /// shrunk or left, of all disks.
    pub discarded: u64,
    /// Blocks that the policy did not admit, of all disks.
    pub refused: u64,
    /// Insertions without a free slot, of all disks.
    pub no_room: u64,
    /// Blocks read ahead, of all disks.
    pub ahead: u64,
    /// Of these, blocks that were read then.
    pub ahead_used: u64,
    /// Of these, blocks that have left the cache without having been read.
    pub ahead_unused: u64,
    /// Slots that the disk keeps however busy the other disks are.
    pub share: u64,
    /// Blocks of the disk, if it has or had a share.
    pub blocks_of_disk: Option<u64>,
    /// Regions of the disk with recent changes.
    pub regions: u64,
    /// The error of the volume, if it is out of service.
    pub failed: Option<ErrorKind>,
    /// Whether the tables have been loaded.
    pub is_loaded: bool,
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
            is_noted: volume.is_kept && disk.stamp.is_some(),
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

    /// The state now.
    pub fn status(&self) -> CacheStatus {
        let inner = &self.inner;
        let (counts, mapped) = inner.volume.counts();
        let mut total = CacheCounts::default();
        inner.ledger.counts().iter().for_each(|counts| total.merge(counts));
        CacheStatus {
            reads: total.reads,
            hits: total.hits,
            read_bytes: total.read_bytes,
            hit_bytes: total.hit_bytes,
            avoided_ns: total.avoided_ns,
            hit_ns: total.hit_ns,
            miss_ns: total.miss_ns,
            mismatches: inner.mismatches.load(Ordering::Relaxed),
            slots: u64::from(inner.volume.slots()),
            mapped,
            insertions: counts.insertions,
            evictions: counts.evictions,
            overwritten: counts.overwritten,
            discarded: counts.discarded,
            refused: counts.refused,
            no_room: counts.no_room,
            ahead: counts.ahead,
            ahead_used: counts.ahead_used,
            ahead_unused: counts.ahead_unused,
            share: inner.volume.share_of(inner.disk.number),
            blocks_of_disk: inner.volume.blocks_of(inner.disk.number),
            regions: inner.disk.regions.access(|regions| regions.active() as u64),
            failed: inner.volume.keeper.access(|keeper| keeper.failed),
            is_loaded: inner.volume.is_loaded(),
        }
    }

    /// What the cache has done for the disk, and its miss-ratio curves, at `now_ns` of the stacks'
    /// clock.
    pub fn ledger(&self, now_ns: u64) -> LedgerSnapshot {
        self.inner.ledger.snapshot(now_ns)
    }

    /// The blocks that the cache has by class, of all disks, and those of this disk.
    pub fn held(&self) -> ([u64; CLASSES], u64) {
        self.inner.volume.held(self.inner.disk.number)
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
        let status = Cache::status(self);
        let mut problems = Vec::new();
        if let Some(kind) = status.failed {
            let message = if kind == ErrorKind::Malformed {
                "its cache returned other data than it was given, and is out of service".into()
            } else {
                format!("its cache is out of service: {kind}")
            };
            problems.push(LayerProblem {
                cause: LayerCause::OutOfService,
                message,
                remedy: "replace the cache's device, or remove the layer: no data is lost".into(),
            });
        }
        if *self.inner.ending.lock() != (Ending::InUse, 0)
            && self.inner.ending.lock().0 == Ending::Failed
        {
            let state =
                if status.failed.is_some() { "the disk rejects changes" } else { "changes wait" };
            problems.push(LayerProblem {
                cause: LayerCause::MarkNotRemoved,
                message: format!("the mark of its image cannot be changed: {state}"),
                remedy:
                    "make the image's folder writable, and space on its file system: a later start \
                         could otherwise read old blocks from the cache"
                        .into(),
            });
        }
        problems.extend(self.inner.marking.problem());
        problems.extend(self.silence());
        let mut figures = vec![
            Figure::counter("reads_total", "Reads.", status.reads),
            Figure::counter("hits_total", "Reads that the cache had wholly.", status.hits),
            Figure::counter("read_bytes_total", "Bytes read.", status.read_bytes),
            Figure::counter("hit_bytes_total", "Bytes read that the cache had.", status.hit_bytes),
            Figure::counter("hit_nanoseconds_total", "Time of hits.", status.hit_ns),
            Figure::counter(
                "miss_nanoseconds_total",
                "Time of reads that the cache had not wholly.",
                status.miss_ns,
            ),
            Figure::counter(
                "avoided_nanoseconds_total",
                "Time that hits would have taken without the cache, as estimated.",
                status.avoided_ns,
            ),
            Figure::counter(
                "mismatches_total",
                "Reads with other data than the cache was given.",
                status.mismatches,
            ),
            Figure::gauge("slots", "Blocks that the cache can have, of all disks.", status.slots),
            Figure::gauge("blocks", "Blocks that the cache has, of all disks.", status.mapped),
            Figure::counter(
                "insertions_total",
                "Blocks put into the cache, of all disks.",
                status.insertions,
            ),
            Figure::counter(
                "evictions_total",
                "Blocks removed to make room, of all disks.",
                status.evictions,
            ),
            Figure::counter(
                "overwritten_total",
                "Blocks removed because they were written, of all disks.",
                status.overwritten,
            ),
            Figure::counter(
                "discarded_total",
                "Blocks removed because they were discarded or zeroed, or their disk shrank or left, of \
                 all disks.",
                status.discarded,
            ),
            Figure::counter(
                "refused_total",
                "Blocks that the policy did not admit, of all disks.",
                status.refused,
            ),
            Figure::counter(
                "no_room_total",
                "Blocks that were not put into the cache because no slot was free, of all disks.",
                status.no_room,
            ),
            Figure::counter(
                "read_ahead_total",
                "Blocks read ahead of the guest, of all disks.",
                status.ahead,
            ),
            Figure::counter(
                "read_ahead_used_total",
                "Blocks read ahead that the guest has read, of all disks.",
                status.ahead_used,
            ),
            Figure::counter(
                "read_ahead_unused_total",
                "Blocks read ahead that have left the cache unread, of all disks.",
                status.ahead_unused,
            ),
            Figure::gauge("regions", "Regions with recent changes.", status.regions),
        ];
        if let Some(blocks) = status.blocks_of_disk {
            let meaning = "Blocks that the disk keeps however busy others are.";
            figures.push(Figure::gauge("share", meaning, status.share));
            let meaning = "Blocks that the cache has of this disk.";
            figures.push(Figure::gauge("blocks_of_disk", meaning, blocks));
        }
        LayerReport { figures, problems }
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

    fn settle(&self, disk: &Arc<Disk>, limit: Duration) -> io::Result<()> {
        Cache::settle(self, disk, limit)
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
