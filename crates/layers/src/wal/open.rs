//! Makes a log, or recovers one, before the first queue is opened. These functions block.

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, OnceLock};

use fathom_block::{Backend, Clock, Operation, Shared, StoreAccess};
use fathom_failure::Failure;
use fathom_persistence::{Identity, SUPERBLOCK_LENGTH, Superblock as _, Verdict};
use fathom_wal::{
    BLOCK_SIZE_MAX, Checkpoint, DATA_LENGTH_MAX, Damage, FoundRecord, Log, Owner, RING_OFFSET,
    ScanEnd, Scanner, Superblock, WITNESS_LENGTH, Witness, find_damage,
};
use parking_lot::Mutex;

use super::error::WalError;
use super::opening::Opening;
use super::recovery::RecoveryState;
use super::switch::Carry;
use super::{Inner, LogState, LogVolume, Opened, Region, Wal};

/// How long after the last noted time a daemon may have lived, if its end was not noted.
const LIFE_TOLERANCE_NS: u64 = 10_000_000_000;
/// The most bytes of one read during a scan.
const READ_LENGTH: u64 = DATA_LENGTH_MAX + BLOCK_SIZE_MAX as u64;

/// When changes complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Completion {
    /// When they are durable. A flush has nothing to wait for.
    Durable,
    /// When they are written. A flush makes them durable, as with any disk with a write cache.
    Written,
}

/// What happens to a log that cannot be used with its disk's store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settlement {
    /// It is refused.
    Refuse,
    /// The operator says that its changes belong to the store. Of a damaged log, those in front of
    /// the damage are kept.
    Keep,
    /// The operator says that its changes may be lost.
    Discard,
}

/// The life of a daemon. All times are in nanoseconds since 1970.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Life {
    /// From its beginning until it was last seen.
    pub time_ns: Range<u64>,
    /// Whether it was seen to end then.
    pub has_ended: bool,
}

impl Life {
    /// When it had ended at the latest.
    fn end_ns(&self) -> u64 {
        self.time_ns.end + if self.has_ended { 0 } else { LIFE_TOLERANCE_NS }
    }
}

/// When a disk's store was changed, and when a daemon last could have changed it. All times are in
/// nanoseconds since 1970.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HomeTimes {
    /// When anybody last changed its content.
    pub changed_ns: u64,
    /// The lives of daemons since the host's start, as far as they are known.
    pub lives: Vec<Life>,
    /// When the host was started.
    pub boot_ns: u64,
}

impl HomeTimes {
    /// When the daemon that opened the log at `opened_ns` had ended at the latest; `None` if that
    /// is not known.
    pub(super) fn end_ns(&self, opened_ns: u64) -> Option<u64> {
        if opened_ns == 0 {
            return None;
        }
        let has_opened = |life: &&Life| (life.time_ns.start..=life.end_ns()).contains(&opened_ns);
        // If two claim it, the later end is right for both.
        let ends = self.lives.iter().filter(has_opened).map(Life::end_ns);
        ends.max().or_else(|| Some(self.boot_ns).filter(|boot_ns| opened_ns < *boot_ns))
    }
}

/// The place of a disk's log, and its settings.
#[derive(Clone, Debug)]
pub struct WalOptions {
    /// The disk's name.
    pub name: String,
    /// The name of the disk's store, such as its image's path, or `device` and its key.
    pub home: String,
    /// The size of the disk, in bytes.
    pub home_capacity: u64,
    /// The alignment of the disk's store, in bytes.
    pub home_alignment: u32,
    /// Where the log's region begins in the volume, in bytes.
    pub offset: u64,
    /// The length of the region, in bytes; 0 for the rest of the volume.
    pub size: u64,
    /// The size of the log's blocks, in bytes; 0 for the volume's physical block size. Used only
    /// when a log is made.
    pub block_size: u32,
    /// The identity of the log if one is made, drawn at random.
    pub identity: Identity,
    /// How long a change may be only in the log, in nanoseconds.
    pub age_ns: u64,
    /// When changes complete.
    pub completion: Completion,
    /// The identity of the log that holds changes of the disk, if there is one. No other log is
    /// accepted.
    pub expected: Option<Identity>,
    /// The age in the mark of the disk's store that names the log; `None` if it has none.
    pub mark: Option<u64>,
    /// When the disk's store was changed, if that is known.
    pub times: Option<HomeTimes>,
    /// The disk's store, if nobody changes it before the log is used.
    pub home_store: HomeStore,
    /// The time at which the clock of the disk's queues was 0, in nanoseconds since 1970; 0 if that
    /// is not known.
    pub clock_start_ns: u64,
}

impl WalOptions {
    /// The time now, by the system's clock, in nanoseconds since 1970; 0 if that is not known.
    pub(super) fn time_ns(&self) -> u64 {
        match self.clock_start_ns {
            0 => 0,
            start_ns => start_ns + Clock::System.now_ns(),
        }
    }
}

/// The store of a disk whose log is opened. Without it, nobody knows whether it has what it had.
#[derive(Clone, Default)]
pub struct HomeStore(pub Option<Arc<dyn Backend>>);

impl fmt::Debug for HomeStore {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_tuple("HomeStore")
            .field(&self.0.as_ref().map(|store| store.name()))
            .finish()
    }
}

impl Wal {
    /// Recovers the log in `volume`, or makes one if there is none. Reads through the layer include
    /// the log's changes immediately; write-back follows later.
    ///
    /// # Errors
    /// If the log cannot be used. Nothing has changed then.
    pub fn open(volume: &Arc<LogVolume>, options: &WalOptions) -> Result<Self, WalError> {
        Self::open_at(volume, options, true, (None, Settlement::Refuse))
    }

    /// Opens a log that was refused, or was lost, as the operator has decided. No disk must use it.
    ///
    /// # Errors
    /// If the volume fails, or there is no log to keep.
    pub fn settle(
        volume: &Arc<LogVolume>,
        options: &WalOptions,
        settlement: Settlement,
    ) -> Result<Self, WalError> {
        Self::open_at(volume, options, true, (None, settlement))
    }

    /// As [`open`](Self::open). `is_alone` is whether nothing but logs uses the volume, so that it
    /// may accept writes again after it has lost some. `carry` is the switch of a log that carries
    /// changes only at times.
    pub(crate) fn open_at(
        volume: &Arc<LogVolume>,
        options: &WalOptions,
        is_alone: bool,
        (mut carry, settlement): (Option<Carry>, Settlement),
    ) -> Result<Self, WalError> {
        let owner = Owner::new(&options.name, &options.home)?;
        let region = region(volume, options)?;
        let claim = volume.claim(&region).ok_or_else(|| {
            let failure = Failure::new("its place overlaps another disk's log");
            WalError::Region(failure.advise("correct `offset` and `size`"))
        })?;
        if volume.finished().1 {
            let text = "a flush of it failed for another disk's log: stop serving all disks with a \
                        log on it, then serve them again";
            return Err(WalError::Volume(io::Error::other(text)));
        }
        let is_restored = volume.restore(is_alone)?;
        let opening = Opening { volume, options, is_alone, settlement, owner, region };
        let start = opening.region.start;
        let mut access = StoreAccess::open(volume.backend())?;
        let superblock = opening.read_or_make(&mut access)?;
        opening.check_owner(&superblock)?;
        opening.check_region(&superblock)?;
        if is_restored {
            rewrite(&mut access, start, &superblock)?;
        }
        let (mut log, damage) = recover(&mut access, start, &superblock, carry.as_mut())?;
        let held = log.held();
        opening.settle_damage(&mut log, damage)?;
        if opening.refuses() {
            opening.check_home(&log, &superblock, held)?;
        }
        // A log that carries changes only at times lets others go past it.
        let has_witnesses = opening.refuses() && carry.is_none();
        let changed = examine_home(&mut log, options, has_witnesses).map_err(WalError::Home)?;
        if let Some(Witness { offset, .. }) = changed.filter(|_| !log.is_empty()) {
            return Err(WalError::OtherContent { offset, held, time_ns: superblock.time_ns });
        }
        log.clip(options.home_capacity);
        opening.check_alignment(&log)?;
        let opened =
            Opened { sequence: log.head_sequence(), capacity: options.home_capacity, held };
        opening.begin(&mut access, &mut log, superblock.block_size)?;
        let store = volume.backend();
        let frees_zeroes =
            carry.is_some() && store.frees_zeroes() && store.capabilities().write_zeroes;
        let inner = Inner {
            volume: Arc::clone(volume),
            base: start,
            superblock: log.superblock().clone(),
            age_ns: AtomicU64::new(options.age_ns),
            clock_start_ns: options.clock_start_ns,
            has_old_mark: AtomicBool::new(false),
            completion: options.completion,
            frees_zeroes,
            shared: Shared::new(LogState::new(log, carry)),
            rounds: AtomicU64::new(0),
            is_home_flushed: AtomicBool::new(false),
            notes: Mutex::default(),
            unattended: OnceLock::new(),
            on_failure: OnceLock::new(),
            on_changes: OnceLock::new(),
            is_alone,
            opened,
            _claim: claim,
        };
        let wal = Self { inner: Arc::new(inner) };
        volume.add(&wal);
        Ok(wal)
    }
}

impl LogState {
    /// The state of a log that no queue uses yet.
    fn new(log: Log, carry: Option<Carry>) -> Self {
        Self {
            // What is before it may have been released.
            released: log.head(),
            is_releasing: false,
            log,
            failed: None,
            recovery: RecoveryState::default(),
            orphans: Vec::new(),
            queues: Vec::new(),
            opened: 0,
            is_writing_back: false,
            checkpoint: None,
            checkpoint_flush: None,
            home_failed: None,
            retry_ns: 0,
            since_ns: 0,
            wanted: 0,
            is_space_awaited: false,
            is_draining: false,
            carry,
        }
    }
}

/// Drops the witnesses that home does not have, and, unless the log `has_witnesses`, all. Returns
/// the first that home does not have.
fn examine_home(
    log: &mut Log,
    options: &WalOptions,
    has_witnesses: bool,
) -> io::Result<Option<Witness>> {
    let home = options.home_store.0.as_ref().filter(|_| has_witnesses);
    let is_needed = home.is_some() && !log.superblock().witnesses.is_empty();
    let mut access = home.filter(|_| is_needed).map(StoreAccess::open).transpose()?;
    let (mut changed, mut failed) = (None, None);
    log.retain_witnesses(|map, witness| {
        let Some(access) = access.as_mut().filter(|_| failed.is_none()) else { return false };
        if witness.range().end > options.home_capacity {
            return false;
        }
        if witness.has_content(map, u64::MAX) {
            // It may be at home already, or a part of it.
            return true;
        }
        match access.read(witness.offset, WITNESS_LENGTH) {
            Ok(content) if fathom_wal::checksum(&content) == witness.checksum => true,
            Ok(_) => {
                changed.get_or_insert(*witness);
                false
            }
            Err(error) => {
                failed = Some(error);
                false
            }
        }
    });
    failed.map_or(Ok(changed), Err)
}

/// The valid superblock of the log that begins at `start`.
pub(super) fn read_superblock(
    access: &mut StoreAccess,
    start: u64,
) -> io::Result<Result<Superblock, Verdict>> {
    Ok(Superblock::select(&access.read(start, 2 * SUPERBLOCK_LENGTH as u64)?))
}

fn region(volume: &LogVolume, options: &WalOptions) -> Result<Region, WalError> {
    let capacity = volume.backend().capacity();
    let alignment = u64::from(volume.backend().geometry().alignment);
    let end = match options.size {
        0 => Some(capacity),
        size => options.offset.checked_add(size),
    };
    let end = end.filter(|end| *end <= capacity && options.offset < *end).ok_or_else(|| {
        let message = format!("the log's place ends beyond the log volume's {capacity} bytes");
        let failure = Failure::new(message);
        WalError::Region(failure.advise("correct `offset` and `size`, or use a larger volume"))
    })?;
    if options.offset % u64::from(BLOCK_SIZE_MAX) != 0 || alignment > u64::from(BLOCK_SIZE_MAX) {
        let failure = Failure::new("the log's place does not begin at a multiple of 4 KiB");
        return Err(WalError::Region(failure.advise("correct `offset`")));
    }
    Ok(options.offset..end)
}

/// Writes a superblock, and makes it and all earlier writes durable.
pub(super) fn write_checkpoint(
    access: &mut StoreAccess,
    base: u64,
    checkpoint: &Checkpoint,
) -> io::Result<()> {
    let mut bytes = checkpoint.bytes.clone();
    access.carry_out(Operation::Write, base + checkpoint.offset, &mut bytes[..])?;
    access.carry_out(Operation::Flush, 0, &mut [])
}

fn recover(
    access: &mut StoreAccess,
    start: u64,
    superblock: &Superblock,
    mut carry: Option<&mut Carry>,
) -> Result<(Log, Option<Damage>), WalError> {
    let mut log = Log::new(superblock.clone());
    let end = scan(access, start, superblock, |_, found| {
        log.recover(found);
        if let Some(carry) = &mut carry {
            carry.recover(&found.record);
        }
    })?;
    let Some(end) = end else { return Ok((log, None)) };
    let damage =
        find_damage(superblock, end, |offset, length| access.read(start + offset, length))?;
    Ok((log, damage))
}

/// Writes the valid superblock and records again, because the volume has lost writes. The kernel
/// may still return data that the volume does not hold and that no later flush writes. Acknowledged
/// changes were made durable by an earlier flush.
pub(super) fn rewrite(
    access: &mut StoreAccess,
    start: u64,
    superblock: &Superblock,
) -> Result<(), WalError> {
    let mut records = Vec::new();
    scan(access, start, superblock, |offset, found| {
        records.push((offset, found.record.length));
    })?;
    let mut again = vec![(superblock.offset(), SUPERBLOCK_LENGTH as u64)];
    again.extend(records);
    for (offset, length) in again {
        let mut bytes = access.read(start + offset, length)?;
        access.carry_out(Operation::Write, start + offset, &mut bytes)?;
    }
    access.carry_out(Operation::Flush, 0, &mut [])?;
    Ok(())
}

/// Calls `visit` with each valid record and its place in bytes from the start of the region, which
/// begins at `base`. Returns where the log ends.
pub(super) fn scan(
    access: &mut StoreAccess,
    base: u64,
    superblock: &Superblock,
    mut visit: impl FnMut(u64, &FoundRecord<'_>),
) -> Result<Option<ScanEnd>, WalError> {
    let mut scanner = Scanner::new(superblock);
    let ring_end = RING_OFFSET + superblock.ring_length;
    // The last read, and where it begins: one read covers many small records.
    let (mut start, mut bytes) = (0, Vec::new());
    while let Some((offset, length)) = scanner.next_read() {
        if offset < start || offset + length as u64 > start + bytes.len() as u64 {
            start = offset;
            let count = READ_LENGTH.max(length as u64).min(ring_end - offset);
            bytes = access.read(base + offset, count)?;
        }
        let at = (offset - start) as usize;
        if let Some(found) = scanner.feed(&bytes[at..at + length]) {
            visit(offset, &found);
        }
    }
    Ok(scanner.end())
}
