//! Makes a cache volume, or opens one, and adds disks to it. These functions block.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

use fathom_block::{Backend, Operation, Shared, StoreAccess};
use fathom_cache::Policy;
use fathom_failure::{Failing, Failure};
use fathom_persistence::{Identity, Superblock as _, Verdict};
use parking_lot::Mutex;

use super::format::{BLOCK_BITS, PAGE_LENGTH, REGIONS_PER_PAGE, Superblock};
use super::index_memory::IndexMemory;
use super::regions::Regions;
use super::shard::Reason;
use super::volume::{CacheTimes, CacheVolume, DiskState};

/// The least size of a region of a disk, as its binary logarithm.
pub(super) const REGION_SHIFT: u8 = 20;
/// The most bytes of zeroes in one request.
const ZEROES: u64 = 1 << 20;

/// The settings of a cache volume.
#[derive(Clone, Copy, Debug)]
pub struct VolumeOptions {
    /// The identity of the cache if one is made, drawn at random. `None` makes none.
    pub identity: Option<Identity>,
    /// The size of a block if a cache is made, in bytes: a power of two from 4096 to 65536.
    pub block_size: u32,
    /// The number of disks that the volume can have, if a cache is made.
    pub disks: u32,
    /// The number of pages for the regions of each disk, if a cache is made.
    pub bitmap_pages: u32,
    /// Whether the content outlives the daemon. If not, nothing is written but blocks.
    pub is_kept: bool,
    /// What decides which blocks are kept.
    pub policy: Policy,
    /// The times.
    pub times: CacheTimes,
}

/// The disk that a volume gets.
#[derive(Clone, Debug)]
pub struct CacheDisk {
    /// The disk's name.
    pub name: String,
    /// The name of the disk's store, such as its image's path.
    pub home: String,
    /// The size of the disk, in bytes.
    pub capacity: u64,
    /// The state of the store that its mark names for this cache. Blocks that were cached in
    /// another state are dropped.
    pub expected: Option<u64>,
    /// The modification time of the store, in nanoseconds since 1970; 0 if it is not known. Blocks
    /// that belong to another time are dropped. `None` if nothing else changes the store.
    pub modified_ns: Option<u64>,
    /// The state of the store from now on, drawn at random. The caller then writes it to the mark.
    pub generation: u64,
    /// The identity of the write-ahead log beneath the cache, or [`Identity::NONE`]. Blocks
    /// that are newer than the store without another log are dropped.
    pub log: Identity,
    /// The ranges of the disk that the log has changes of, in bytes. The cache drops what it has
    /// there.
    pub changes: Vec<Range<u64>>,
    /// The least size of a region, as its binary logarithm.
    pub region_shift: u8,
}

impl CacheDisk {
    /// The disk `name` of `capacity` bytes, for a cache in memory.
    pub fn in_memory(name: &str, capacity: u64) -> Self {
        Self {
            name: name.to_owned(),
            home: String::new(),
            capacity,
            expected: None,
            modified_ns: None,
            generation: 0,
            log: Identity::NONE,
            changes: Vec::new(),
            region_shift: REGION_SHIFT,
        }
    }
}

/// Why a cache cannot be used.
#[derive(Debug)]
pub enum CacheError {
    /// There is no superblock that can be used.
    Superblock(Verdict),
    /// The volume is too small, or its alignment does not fit.
    Volume(Failure),
    /// The disk cannot be added.
    Disk(Failure),
    /// The volume failed.
    Failed(io::Error),
}

impl fmt::Display for CacheError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Superblock(verdict) => formatter.write_str(&verdict.describe::<Superblock>()),
            Self::Volume(failure) | Self::Disk(failure) => failure.fmt(formatter),
            Self::Failed(error) => write!(formatter, "the cache volume failed: {error}"),
        }
    }
}

impl Error for CacheError {}

impl Failing for CacheError {
    fn remedy(&self) -> String {
        let remedy = match self {
            Self::Superblock(Verdict::Foreign) => {
                "choose another place, or replace it with `fathom cache create --force`"
            }
            Self::Superblock(Verdict::Newer(_)) => {
                "start the later version again, or run `fathom cache create --force`"
            }
            Self::Superblock(Verdict::Blank) => "make one with `fathom cache create`",
            Self::Superblock(Verdict::Damaged) => {
                "all blocks are on their disks: run `fathom cache create --force` to make it again, \
                 unless a disk in the mode `write-back` has changes in its logs"
            }
            Self::Volume(failure) | Self::Disk(failure) => &failure.remedy,
            Self::Failed(_) => "repair it",
        };
        remedy.to_owned()
    }
}

impl From<io::Error> for CacheError {
    fn from(error: io::Error) -> Self {
        Self::Failed(error)
    }
}

impl From<Verdict> for CacheError {
    fn from(verdict: Verdict) -> Self {
        Self::Superblock(verdict)
    }
}

impl CacheVolume {
    /// Opens the cache in `backend`, or makes one if there is none. The tables are loaded later, by
    /// the queues.
    ///
    /// # Errors
    /// If the cache cannot be used. Nothing has changed then.
    pub fn open(backend: Arc<dyn Backend>, options: &VolumeOptions) -> Result<Self, CacheError> {
        Self::open_within(backend, options, &IndexMemory::default())
    }

    /// As [`open`](Self::open), with a limit on the memory of indexes.
    pub(super) fn open_within(
        backend: Arc<dyn Backend>,
        options: &VolumeOptions,
        memory: &IndexMemory,
    ) -> Result<Self, CacheError> {
        let alignment = backend.geometry().alignment;
        if alignment as usize > PAGE_LENGTH {
            let message = format!("the volume has an alignment of {alignment} bytes");
            return Err(CacheError::Volume(Failure::new(message).advise("choose another one")));
        }
        let new = |identity: Identity| {
            let (size, pages) = (backend.capacity(), options.bitmap_pages);
            Superblock::new(identity, size, options.block_size, options.disks, pages).ok_or_else(
                || {
                    let failure = Failure::new("the volume is too small");
                    CacheError::Volume(failure.advise("make it larger"))
                },
            )
        };
        if !options.is_kept {
            let format = new(options.identity.unwrap_or_default())?;
            return Ok(Self::assemble(
                backend,
                format,
                false,
                options.policy,
                options.times,
                Vec::new(),
            ));
        }
        let mut access = StoreAccess::open(&backend)?;
        let length = (2 * PAGE_LENGTH as u64).min(backend.capacity());
        let format = match Superblock::select(&access.read(0, length)?) {
            Ok(format) => format,
            Err(error) => {
                let identity = options.identity.filter(|_| error == Verdict::Blank);
                let format = new(identity.ok_or(error)?)?;
                make(&mut access, &format)?;
                format
            }
        };
        if format.length() > backend.capacity() {
            let (needed, found) = (format.length(), backend.capacity());
            let message = format!("the cache has {needed} bytes, and its volume {found}");
            let failure = Failure::new(message).advise("make the volume as large as it was");
            return Err(CacheError::Volume(failure));
        }
        let part = memory.take(&format)?;
        let mut sequences = vec![0; format.pages() as usize];
        let (disks, unused) = read_disks(&mut access, &format, &mut sequences)?;
        let mut volume =
            Self::assemble(backend, format, true, options.policy, options.times, sequences);
        volume.index_part = Some(part);
        volume.keeper.access(|keeper| (keeper.disks, keeper.unused) = (disks, unused));
        Ok(volume)
    }

    /// Takes the blocks of a disk from number `first` on out of the index.
    pub(super) fn sweep(&self, disk: u16, first: u64) {
        let key = |block: u64| u64::from(disk) << BLOCK_BITS | block.min((1 << BLOCK_BITS) - 1);
        self.take_out(key(first)..key(u64::MAX), Reason::Discard);
    }

    /// Takes all blocks of a disk out of the cache. Insertions in flight end without a block.
    pub(super) fn drop_blocks(&self, disk: u16) {
        for (shard, number) in self.remove_from(disk, 0).into_iter().enumerate() {
            self.shard(shard).end_range(number);
        }
    }

    /// Takes the blocks of a disk from the byte `from` on out of the cache, and lets none in.
    /// Returns the numbers of these ranges in the shards.
    pub(super) fn remove_from(&self, disk: u16, from: u64) -> Vec<u64> {
        let first = from / u64::from(self.format.block_size);
        let key = |block: u64| u64::from(disk) << BLOCK_BITS | block;
        let keys = key(first)..key((1 << BLOCK_BITS) - 1);
        let shards = 0..self.shards.len();
        let numbers = shards.map(|shard| self.shard(shard).begin_range(keys.clone())).collect();
        self.take_out(keys, Reason::Discard);
        numbers
    }
}

/// Makes a cache: blank pages, and the superblock.
fn make(access: &mut StoreAccess, format: &Superblock) -> io::Result<()> {
    let end = format.page_offset(format.pages(), 0);
    let mut zeroes = vec![0; ZEROES as usize];
    let mut at = 0;
    while at < end {
        let length = ZEROES.min(end - at) as usize;
        access.carry_out(Operation::Write, at, &mut zeroes[..length])?;
        at += length as u64;
    }
    access.carry_out(Operation::Flush, 0, &mut [])?;
    for copy in 0..2 {
        access.carry_out(Operation::Write, copy * PAGE_LENGTH as u64, &mut format.encode())?;
        access.carry_out(Operation::Flush, 0, &mut [])?;
    }
    Ok(())
}

type Disks = BTreeMap<u16, Arc<DiskState>>;

/// Reads the pages of disks and regions. Returns the disks, and the numbers that no disk has had.
fn read_disks(
    access: &mut StoreAccess,
    format: &Superblock,
    sequences: &mut [u64],
) -> io::Result<(Disks, BTreeSet<u16>)> {
    let (mut disks, mut unused) = (Disks::new(), BTreeSet::new());
    let mut read = |page: u32| -> io::Result<(bool, Option<Vec<u8>>)> {
        let copies = access.read(format.page_offset(page, 0), 2 * PAGE_LENGTH as u64)?;
        let mut each = copies.chunks(PAGE_LENGTH).enumerate();
        let is_certain = each.all(|(index, copy)| format.is_sound_or_blank(page, index, copy));
        let Some((sequence, bytes)) = format.valid(page, &copies) else {
            return Ok((is_certain, None));
        };
        sequences[page as usize] = sequence;
        Ok((is_certain, Some(bytes.to_vec())))
    };
    for number in 1..=format.disks as u16 {
        let (is_certain, bytes) = read(format.disk_page(number))?;
        if is_certain && bytes.is_none() {
            unused.insert(number);
        }
        let Some(record) = bytes.and_then(|bytes| format.read_disk(&bytes)) else { continue };
        let mut regions = Regions::new(record.region_shift, format.bitmap_pages);
        for page in 0..format.bitmap_pages {
            let (is_certain, bytes) = read(format.bitmap_first(number) + page)?;
            let bits = match bytes {
                Some(bytes) if is_certain => format.read_bitmap(&bytes),
                None if is_certain => continue,
                // The newer copy may be the one that is not sound.
                _ => vec![u64::MAX; REGIONS_PER_PAGE as usize / 64],
            };
            regions.load(page, &bits, 0);
        }
        let state = DiskState {
            number,
            record: Mutex::new(record),
            is_record_dirty: AtomicBool::new(false),
            regions: Shared::new(regions),
            is_attached: AtomicBool::new(false),
            capacity: AtomicU64::new(u64::MAX),
            is_home_flushed: AtomicBool::new(false),
        };
        disks.insert(number, Arc::new(state));
    }
    Ok((disks, unused))
}
