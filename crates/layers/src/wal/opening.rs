//! What decides whether a log may be opened: its superblock, its disk, its place, its damage, and
//! the disk's store.

use fathom_block::{Operation, StoreAccess};
use fathom_failure::Failure;
use fathom_persistence::{Superblock as _, Verdict};
use fathom_wal::{
    BLOCK_SIZE_MAX, BLOCK_SIZE_MIN, Checkpoint, Damage, Held, Log, Owner, RING_BLOCKS_MIN,
    RING_OFFSET, Superblock, is_record,
};

use super::error::WalError;
use super::open::{Settlement, WalOptions, read_superblock, write_checkpoint};
use super::{LogVolume, Region};

/// The beginning of the name of a store that is a block device. Other names are paths.
const DEVICE_PREFIX: &str = "device ";
/// The bytes behind the superblocks that are examined before a log is made there: with these, the
/// first MiB.
const EXAMINED: u64 = (1 << 20) - RING_OFFSET;

/// A log that is opened, and what decides whether it may be.
pub(super) struct Opening<'a> {
    pub volume: &'a LogVolume,
    pub options: &'a WalOptions,
    /// Whether nothing but logs uses the volume.
    pub is_alone: bool,
    pub settlement: Settlement,
    pub owner: Owner,
    pub region: Region,
}

impl Opening<'_> {
    /// Whether a log is refused that the operator would have to decide about.
    pub(super) fn refuses(&self) -> bool {
        self.settlement == Settlement::Refuse
    }

    /// The superblock of the log, which is made if there is none.
    pub(super) fn read_or_make(&self, access: &mut StoreAccess) -> Result<Superblock, WalError> {
        let Self { volume, options, region, owner, settlement, .. } = self;
        match read_superblock(access, region.start)? {
            Ok(superblock) => Ok(superblock),
            Err(Verdict::Blank) if options.expected.is_some() => Err(WalError::NotExpected),
            Err(Verdict::Blank) if *settlement != Settlement::Keep => {
                if self.is_alone {
                    refuse_content(access, region)?;
                }
                make(access, volume, region, owner, options)
            }
            Err(Verdict::Damaged) if *settlement == Settlement::Discard => {
                make(access, volume, region, owner, options)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Refuses the log of another disk, and another log than the expected one.
    pub(super) fn check_owner(&self, superblock: &Superblock) -> Result<(), WalError> {
        let is_expected = self.options.expected.map(|expected| expected == superblock.log);
        let discards = self.settlement == Settlement::Discard;
        // The mark of an image may say that the disk was renamed.
        let may_be_renamed =
            self.settlement == Settlement::Keep || discards && is_expected == Some(true);
        if discards && is_expected == Some(false) {
            return Err(WalError::NotExpected);
        }
        if !may_be_renamed && superblock.owner.name != self.owner.name {
            return Err(WalError::OtherDisk(superblock.owner.name.clone()));
        }
        if is_expected == Some(false) {
            return Err(WalError::NotExpected);
        }
        Ok(())
    }

    /// Refuses a log that does not fit its place.
    pub(super) fn check_region(&self, superblock: &Superblock) -> Result<(), WalError> {
        let length = self.region.end - self.region.start;
        let alignment = self.volume.backend().geometry().alignment;
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
        Ok(())
    }

    /// Refuses a damaged log, or gives up what the operator has decided to give up.
    pub(super) fn settle_damage(
        &self,
        log: &mut Log,
        damage: Option<Damage>,
    ) -> Result<(), WalError> {
        match damage {
            Some(damage) if self.refuses() => return Err(WalError::Damaged(damage)),
            damage if !self.refuses() => {
                let epoch = damage.map_or(0, |damage| damage.epoch);
                log.give_up(epoch, self.settlement == Settlement::Discard);
            }
            _ => {}
        }
        Ok(())
    }

    /// Refuses a log that does not belong to the state of the disk's store.
    pub(super) fn check_home(
        &self,
        log: &Log,
        superblock: &Superblock,
        held: Held,
    ) -> Result<(), WalError> {
        let Self { options, owner, .. } = self;
        // The mark of a device belongs to the device whatever its name, and names this log.
        let is_marked = options.expected.is_some() && owner.home.starts_with(DEVICE_PREFIX);
        let is_other = superblock.owner.home != owner.home && !is_marked;
        if !log.is_empty() && is_other {
            return Err(WalError::OtherHome(superblock.owner.home.clone()));
        }
        if let Some(mark) = options.mark {
            log.compare(mark).map_err(|mismatch| {
                let time_ns = superblock.time_ns;
                WalError::Mismatched { mismatch, held, time_ns }
            })?;
        }
        let capacity = options.home_capacity;
        if log.map().first(capacity..u64::MAX).length < u64::MAX - capacity {
            return Err(WalError::SmallerHome(capacity, held));
        }
        if let Some(times) = options.times.as_ref().filter(|_| !log.is_empty()) {
            let (changed_ns, end_ns) = (times.changed_ns, times.end_ns(superblock.time_ns));
            if let Some(end_ns) = end_ns.filter(|end_ns| changed_ns > *end_ns) {
                return Err(WalError::ChangedHome { changed_ns, end_ns, held });
            }
        }
        Ok(())
    }

    /// Refuses a log whose changes could be neither read nor written home.
    pub(super) fn check_alignment(&self, log: &Log) -> Result<(), WalError> {
        let alignment = self.volume.backend().geometry().alignment;
        let request_alignment = alignment.max(self.options.home_alignment);
        if !log.map().is_aligned(request_alignment.into(), alignment.into()) {
            return Err(WalError::Alignment(request_alignment));
        }
        Ok(())
    }

    /// Writes the superblock of the new opening.
    pub(super) fn begin(
        &self,
        access: &mut StoreAccess,
        log: &mut Log,
        block_size: u32,
    ) -> Result<(), WalError> {
        log.set_time(self.options.time_ns());
        if !log.is_empty() {
            // The next superblock says that all found records are durable.
            access.carry_out(Operation::Flush, 0, &mut [])?;
        }
        let checkpoint = log.resume(&self.owner, ring_length(&self.region, block_size));
        write_checkpoint(access, self.region.start, &checkpoint)?;
        log.checkpointed();
        Ok(())
    }
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
