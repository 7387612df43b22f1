//! Makes a log, or recovers one, before the first queue is opened. These functions block.

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, OnceLock};

use fathom_block::{Backend, Clock, Operation, Shared};
use fathom_failure::Failure;
use fathom_persistence::{Identity, SUPERBLOCK_LENGTH, Superblock as _, Verdict};
use fathom_wal::{
    BLOCK_SIZE_MAX, BLOCK_SIZE_MIN, Checkpoint, DATA_LENGTH_MAX, Damage, FoundRecord, Log, Owner,
    RING_BLOCKS_MIN, RING_OFFSET, ScanEnd, Scanner, Superblock, WITNESS_LENGTH, Witness,
    find_damage, is_record,
};
use parking_lot::Mutex;

use super::error::WalError;
use super::recovery::RecoveryState;
use super::switch::Carry;
use super::{Inner, LogState, LogVolume, Opened, Region, Wal};
use crate::access::StoreAccess;

/// The beginning of the name of a store that is a block device. Other names are paths.
const DEVICE_PREFIX: &str = "device ";
/// The bytes behind the superblocks that are examined before a log is made there: with these, the
/// first MiB.
const EXAMINED: u64 = (1 << 20) - RING_OFFSET;
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
    fn end_ns(&self, opened_ns: u64) -> Option<u64> {
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
    fn time_ns(&self) -> u64 {
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
        let refuses = settlement == Settlement::Refuse;
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
        let mut access = StoreAccess::open(volume.backend())?;
        let superblock = match read_superblock(&mut access, region.start)? {
            Ok(superblock) => superblock,
            Err(Verdict::Blank) if options.expected.is_some() => {
                return Err(WalError::NotExpected);
            }
            Err(Verdict::Blank) if settlement != Settlement::Keep => {
                if is_alone {
                    refuse_content(&mut access, &region)?;
                }
                make(&mut access, volume, &region, &owner, options)?
            }
            Err(Verdict::Damaged) if settlement == Settlement::Discard => {
                make(&mut access, volume, &region, &owner, options)?
            }
            Err(error) => return Err(error.into()),
        };
        let is_expected = options.expected.map(|expected| expected == superblock.log);
        // The mark of an image may say that the disk was renamed.
        let may_be_renamed = settlement == Settlement::Keep
            || settlement == Settlement::Discard && is_expected == Some(true);
        if settlement == Settlement::Discard && is_expected == Some(false) {
            return Err(WalError::NotExpected);
        }
        if !may_be_renamed && superblock.owner.name != owner.name {
            return Err(WalError::OtherDisk(superblock.owner.name));
        }
        if is_expected == Some(false) {
            return Err(WalError::NotExpected);
        }
        let length = region.end - region.start;
        let alignment = volume.backend().geometry().alignment;
        if superblock.block_size < alignment {
            let message = format!(
                "the log has blocks of {} bytes, and its volume an alignment of {alignment}",
                superblock.block_size
            );
            let remedy = "put it back on a device like that on which it was made";
            return Err(WalError::Region(Failure::new(message).advise(remedy)));
        }
        if RING_OFFSET + superblock.ring_length > length {
            let needed = RING_OFFSET + superblock.ring_length;
            let message = format!("the log has {needed} bytes, and its place has {length}");
            let failure = Failure::new(message).advise("make the place as large as it was");
            return Err(WalError::Region(failure));
        }
        if is_restored {
            rewrite(&mut access, region.start, &superblock)?;
        }
        let (mut log, damage) = recover(&mut access, region.start, &superblock, carry.as_mut())?;
        let held = log.held();
        match damage {
            Some(damage) if refuses => return Err(WalError::Damaged(damage)),
            damage if !refuses => {
                let epoch = damage.map_or(0, |damage| damage.epoch);
                log.give_up(epoch, settlement == Settlement::Discard);
            }
            _ => {}
        }
        // The mark of a device belongs to the device whatever its name, and names this log.
        let is_marked = options.expected.is_some() && owner.home.starts_with(DEVICE_PREFIX);
        let is_other = superblock.owner.home != owner.home && !is_marked;
        if refuses && !log.is_empty() && is_other {
            return Err(WalError::OtherHome(superblock.owner.home));
        }
        if let Some(mark) = options.mark.filter(|_| refuses) {
            log.compare(mark).map_err(|mismatch| {
                let time_ns = superblock.time_ns;
                WalError::Mismatched { mismatch, held, time_ns }
            })?;
        }
        let capacity = options.home_capacity;
        if refuses && log.map().first(capacity..u64::MAX).length < u64::MAX - capacity {
            return Err(WalError::SmallerHome(capacity, held));
        }
        if let Some(times) = options.times.as_ref().filter(|_| refuses && !log.is_empty()) {
            let (changed_ns, end_ns) = (times.changed_ns, times.end_ns(superblock.time_ns));
            if let Some(end_ns) = end_ns.filter(|end_ns| changed_ns > *end_ns) {
                return Err(WalError::ChangedHome { changed_ns, end_ns, held });
            }
        }
        // A log that carries changes only at times lets others go past it.
        let has_witnesses = refuses && carry.is_none();
        let changed = examine_home(&mut log, options, has_witnesses).map_err(WalError::Home)?;
        if let Some(Witness { offset, .. }) = changed.filter(|_| !log.is_empty()) {
            return Err(WalError::OtherContent { offset, held, time_ns: superblock.time_ns });
        }
        log.clip(options.home_capacity);
        let request_alignment = alignment.max(options.home_alignment);
        if !log.map().is_aligned(request_alignment.into(), alignment.into()) {
            // They could be neither read nor written home.
            return Err(WalError::Alignment(request_alignment));
        }
        let ring_length = ring_length(&region, superblock.block_size);
        let opened =
            Opened { sequence: log.head_sequence(), capacity: options.home_capacity, held };
        log.set_time(options.time_ns());
        if !log.is_empty() {
            // The next superblock says that all found records are durable.
            access.carry_out(Operation::Flush, 0, &mut [])?;
        }
        let checkpoint = log.resume(&owner, ring_length);
        write_checkpoint(&mut access, region.start, &checkpoint)?;
        log.checkpointed();
        let store = volume.backend();
        let frees_zeroes =
            carry.is_some() && store.frees_zeroes() && store.capabilities().write_zeroes;
        let inner = Inner {
            volume: Arc::clone(volume),
            base: region.start,
            superblock: log.superblock().clone(),
            age_ns: AtomicU64::new(options.age_ns),
            clock_start_ns: options.clock_start_ns,
            has_old_mark: AtomicBool::new(false),
            completion: options.completion,
            frees_zeroes,
            shared: Shared::new(LogState {
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
            }),
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

/// Refuses a place without a log that has other content: a file system may leave the first 8 KiB
/// empty. Where a log was given up, the ring still begins with a record.
fn refuse_content(access: &mut StoreAccess, region: &Region) -> Result<(), WalError> {
    let start = region.start + RING_OFFSET;
    let length = region.end.saturating_sub(start).min(EXAMINED);
    let bytes = access.read(start, length)?;
    if is_record(&bytes) || bytes.iter().all(|byte| *byte == 0) {
        return Ok(());
    }
    Err(Verdict::Foreign.into())
}

fn ring_length(region: &Region, block_size: u32) -> u64 {
    let block_size = u64::from(block_size);
    (region.end - region.start).saturating_sub(RING_OFFSET) / block_size * block_size
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

fn make(
    access: &mut StoreAccess,
    volume: &LogVolume,
    region: &Region,
    owner: &Owner,
    options: &WalOptions,
) -> Result<Superblock, WalError> {
    let geometry = volume.backend().geometry();
    let block_size = match options.block_size {
        0 => geometry.physical_block_size.clamp(BLOCK_SIZE_MIN, BLOCK_SIZE_MAX),
        size => size,
    };
    let block_size = block_size.max(geometry.alignment);
    let length = ring_length(region, block_size);
    let mut superblock = Superblock::new(options.identity, owner.clone(), block_size, length);
    let least = RING_BLOCKS_MIN * u64::from(block_size);
    if superblock.ring_length < least {
        let least = RING_OFFSET + least;
        let failure = Failure::new(format!("a log has at least {least} bytes"));
        return Err(WalError::Region(failure.advise("correct `size`, or use a larger volume")));
    }
    for number in 0..2 {
        superblock.number = number;
        let bytes = Box::new(superblock.encode());
        let checkpoint = Checkpoint { offset: superblock.offset(), bytes };
        write_checkpoint(access, region.start, &checkpoint)?;
    }
    Ok(superblock)
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
