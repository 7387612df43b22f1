//! A superblock: the owner of a log, and the tail of its ring.
//!
//! There are two copies, which are written alternately: while one is being written, the other is
//! valid. The used bytes of a superblock are the first 512, a sector. The second sector has the
//! [witnesses](crate::Witness), which count only if they were written with the same superblock.

use fathom_persistence::bytes::{array, put, u32_at, u64_at};
use fathom_persistence::{Ages, CopyOrder, Identity, NAME_LENGTH_MAX, SuperblockBytes};

use crate::record::{BLOCK_SIZE_MAX, BLOCK_SIZE_MIN};
use crate::witness::{self, Witness};

/// The longest name of a disk's store, in bytes. Only the end of a longer name is kept.
const HOME_LENGTH_MAX: usize = 192;
/// The longest name of a disk's store in format 1, in bytes.
const HOME_LENGTH_MAX_1: usize = 256;
const LENGTHS_AT: usize = 80;
const NAMES_AT: usize = 104;
/// The fields that format 2 has added.
const ADDED_AT: usize = NAMES_AT + NAME_LENGTH_MAX + HOME_LENGTH_MAX;
/// The shortest ring, in blocks. A record has to fit, and later ones while it is brought home.
pub const RING_BLOCKS_MIN: u64 = 16;
/// The longest ring, in bytes.
const RING_LENGTH_MAX: u64 = 1 << 48;
/// The highest position of a tail, in bytes: 36 years of 1 GiB each second.
const TAIL_POSITION_MAX: u64 = 1 << 60;
/// The highest count of superblocks, openings or records in a superblock.
pub(crate) const COUNT_MAX: u64 = 1 << 56;
/// The highest position in a ring, in bytes.
pub(crate) const POSITION_MAX: u64 = 1 << 62;

/// The disk that a log belongs to.
pub type Owner = fathom_persistence::Owner<HOME_LENGTH_MAX>;

/// A superblock. See the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// The log's identity, drawn at random when the log was made.
    pub log: Identity,
    /// The disk that the log belongs to.
    pub owner: Owner,
    /// The size of a block, in bytes. Records begin and end on a block's boundary, and so do their
    /// data.
    pub block_size: u32,
    /// The length of the ring, in bytes: a multiple of the block size.
    pub ring_length: u64,
    /// The number of the superblock. Of two copies, the one with the higher number is valid.
    pub number: u64,
    /// The number of openings so far. A record has the epoch in which it was written.
    pub epoch: u64,
    /// The position of the oldest valid record.
    pub tail_position: u64,
    /// The sequence of that record.
    pub tail_sequence: u64,
    /// The lowest epoch that record may have.
    pub tail_epoch: u64,
    /// All records before this sequence were durable when the superblock was written.
    pub durable: u64,
    /// Records of earlier epochs prove nothing: what they prove has been given up.
    pub proofs_since: u64,
    /// The ages of the log, for the image's mark.
    pub ages: Ages,
    /// The modification time of home when all changes before the tail were durable there, in
    /// nanoseconds since 1970; 0 if that is not known.
    pub home_time_ns: u64,
    /// When the superblock was written, in nanoseconds since 1970; 0 if that is not known.
    pub time_ns: u64,
    /// What home has to have where no record has changed it since.
    pub witnesses: Vec<Witness>,
}

impl Superblock {
    /// The first superblock of a new log.
    pub fn new(log: Identity, owner: Owner, block_size: u32, ring_length: u64) -> Self {
        Self {
            log,
            owner,
            block_size,
            ring_length,
            number: 0,
            epoch: 0,
            tail_position: 0,
            tail_sequence: 0,
            tail_epoch: 0,
            durable: 0,
            proofs_since: 0,
            ages: Ages::default(),
            home_time_ns: 0,
            time_ns: 0,
            witnesses: Vec::new(),
        }
    }

    /// The fields that format 2 has added, in order.
    fn added(&self) -> [u64; 7] {
        let Self { durable, proofs_since, ages, home_time_ns, time_ns, .. } = *self;
        [durable, proofs_since, ages.age, ages.newest, ages.void, home_time_ns, time_ns]
    }

    /// Whether all fields are within their limits, so that no position or count computed from them
    /// overflows or lies outside the ring, and the ring has room for records.
    pub(crate) fn is_sane(&self) -> bool {
        let block = u64::from(self.block_size);
        self.block_size.is_power_of_two()
            && (BLOCK_SIZE_MIN..=BLOCK_SIZE_MAX).contains(&self.block_size)
            && (RING_BLOCKS_MIN * block..=RING_LENGTH_MAX).contains(&self.ring_length)
            && self.ring_length % block == 0
            && self.tail_position % block == 0
            && self.tail_position <= TAIL_POSITION_MAX
            && self.tail_sequence <= COUNT_MAX
            && self.tail_epoch <= self.epoch
            && self.epoch <= COUNT_MAX
            && self.number <= COUNT_MAX
            && self.durable <= COUNT_MAX
            && self.proofs_since <= self.epoch
            && self.ages.are_sane()
            && self.ages.age <= COUNT_MAX
    }
}

impl fathom_persistence::Superblock for Superblock {
    const NOUN: &'static str = "log";
    const MAGIC: [u8; 8] = *b"\x8eFATHWAL";
    const PREPARED: Option<[u8; 8]> = Some(*b"\x8eFATHNEW");
    const NEWEST: u32 = 2;
    const ORDER: CopyOrder = CopyOrder::Alternating;

    fn identity(&self) -> Identity {
        self.log
    }

    fn number(&self) -> u64 {
        self.number
    }

    fn put(&self, copy: &mut SuperblockBytes) {
        put(copy, 12, &self.block_size.to_le_bytes());
        put(copy, 16, &self.log.0);
        for (index, value) in [
            self.number,
            self.epoch,
            self.ring_length,
            self.tail_position,
            self.tail_sequence,
            self.tail_epoch,
        ]
        .into_iter()
        .enumerate()
        {
            put(copy, 32 + 8 * index, &value.to_le_bytes());
        }
        self.owner.put(copy, LENGTHS_AT, NAMES_AT);
        for (index, value) in self.added().into_iter().enumerate() {
            put(copy, ADDED_AT + 8 * index, &value.to_le_bytes());
        }
        witness::encode(&self.witnesses, self.number, copy);
    }

    fn get(version: u32, copy: &SuperblockBytes) -> Option<Self> {
        let owner = if version == 1 {
            let owner = fathom_persistence::Owner::<HOME_LENGTH_MAX_1>::get;
            let owner = owner(copy, LENGTHS_AT, NAMES_AT)?;
            Owner::new(&owner.name, &owner.home).ok()?
        } else {
            Owner::get(copy, LENGTHS_AT, NAMES_AT)?
        };
        let added =
            |index: usize| if version == 1 { 0 } else { u64_at(copy, ADDED_AT + 8 * index) };
        let superblock = Self {
            log: Identity(array(copy, 16)),
            owner,
            block_size: u32_at(copy, 12),
            number: u64_at(copy, 32),
            epoch: u64_at(copy, 40),
            ring_length: u64_at(copy, 48),
            tail_position: u64_at(copy, 56),
            tail_sequence: u64_at(copy, 64),
            tail_epoch: u64_at(copy, 72),
            durable: added(0),
            proofs_since: added(1),
            ages: Ages { age: added(2), newest: added(3), void: added(4) },
            home_time_ns: added(5),
            time_ns: added(6),
            witnesses: witness::decode(copy, u64_at(copy, 32)),
        };
        superblock.is_sane().then_some(superblock)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use fathom_persistence::{Superblock as _, Verdict, seal};

    use super::*;

    pub(crate) fn superblock() -> Superblock {
        Superblock {
            log: Identity(*b"0123456789abcdef"),
            owner: Owner::new("data", "/images/data.raw").unwrap(),
            block_size: 512,
            ring_length: 64 << 10,
            number: 6,
            epoch: 3,
            tail_position: 512,
            tail_sequence: 1,
            tail_epoch: 2,
            durable: 5,
            proofs_since: 1,
            ages: Ages { age: 9, newest: 8, void: 7 },
            home_time_ns: 11,
            time_ns: 12,
            witnesses: vec![Witness { offset: 8192, checksum: 5 }],
        }
    }

    #[test]
    fn a_superblock_is_read_as_written() {
        let superblock = superblock();
        assert_eq!(Superblock::decode(&superblock.encode()), Ok(superblock));
    }

    #[test]
    fn values_with_which_no_record_could_be_written_are_damage() {
        let changed = |change: fn(&mut Superblock)| {
            let mut superblock = superblock();
            change(&mut superblock);
            Superblock::decode(&superblock.encode())
        };
        for insane in [
            changed(|superblock| superblock.ring_length = 15 * 512),
            changed(|superblock| superblock.ring_length = RING_LENGTH_MAX + 512),
            changed(|superblock| superblock.tail_position = TAIL_POSITION_MAX + 512),
            changed(|superblock| superblock.tail_sequence = 1 << 61),
            changed(|superblock| superblock.tail_sequence = COUNT_MAX + 1),
            changed(|superblock| superblock.epoch = COUNT_MAX + 1),
            changed(|superblock| superblock.number = COUNT_MAX + 1),
            changed(|superblock| superblock.tail_epoch = 4),
            changed(|superblock| superblock.proofs_since = 4),
            changed(|superblock| superblock.ages.newest = 10),
            changed(|superblock| superblock.ages.void = 10),
            changed(|superblock| superblock.ages.age = COUNT_MAX + 1),
            changed(|superblock| superblock.durable = COUNT_MAX + 1),
        ] {
            assert_eq!(insane, Err(Verdict::Damaged));
        }
        let sound = changed(|superblock| {
            superblock.ring_length = 16 * 512;
            superblock.tail_position = TAIL_POSITION_MAX;
            superblock.tail_sequence = COUNT_MAX;
            (superblock.epoch, superblock.number) = (COUNT_MAX, COUNT_MAX);
        });
        assert!(sound.is_ok());
    }

    /// A superblock as version 1 of the format had it: nothing but zeroes behind a longer name.
    #[test]
    fn a_superblock_of_format_1_is_read() {
        let superblock = superblock();
        let home = "/a/very/long/path/".repeat(14);
        let mut bytes = superblock.encode();
        bytes[ADDED_AT..508].fill(0);
        bytes[8] = 1;
        let owner = fathom_persistence::Owner::<HOME_LENGTH_MAX_1>::new("data", &home).unwrap();
        owner.put(&mut bytes, LENGTHS_AT, NAMES_AT);
        seal(&mut bytes);
        let owner = Owner::new("data", &home).unwrap();
        let found = Superblock::decode(&bytes).unwrap();
        assert_eq!((found.owner.clone(), found.added()), (owner.clone(), [0; 7]));
        assert_eq!(found.tail_position, superblock.tail_position);
        assert_eq!(Superblock::decode(&found.encode()), Ok(found));
    }
}
