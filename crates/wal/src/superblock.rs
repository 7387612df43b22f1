//! A superblock: the owner of a log, and the tail of its ring.
//!
//! There are two copies, which are written alternately: while one is being written, the other is
//! valid. The used bytes of a superblock are the first 512, a sector. The second sector has the
//! [witnesses](crate::Witness), which count only if they were written with the same superblock.

use std::fmt;

use crate::bytes::{array, put, u16_at, u32_at, u64_at};
use crate::record::{BLOCK_SIZE_MAX, BLOCK_SIZE_MIN};
use crate::witness::{self, Witness};

/// The length of a superblock in the log volume, in bytes.
pub const SUPERBLOCK_LENGTH: usize = 4096;
/// The number of bytes that are used.
const USED: usize = 512;
/// The first bytes of a superblock.
pub const MAGIC: [u8; 8] = *b"\x8eFATHWAL";
/// The first bytes of each superblock's place where a log may be made (`fathom log create`). Zeroes
/// follow.
const PREPARED: [u8; 8] = *b"\x8eFATHNEW";
const VERSION: u32 = 2;
/// The longest name of a disk, in bytes.
pub const NAME_LENGTH_MAX: usize = 128;
/// The longest name of a disk's store, in bytes. Only the end of a longer name is kept.
pub const HOME_LENGTH_MAX: usize = 192;
/// The longest name of a disk's store in format 1, in bytes.
const HOME_LENGTH_MAX_1: usize = 256;
const NAME_AT: usize = 104;
const HOME_AT: usize = NAME_AT + NAME_LENGTH_MAX;
/// The fields that format 2 has added.
const ADDED_AT: usize = HOME_AT + HOME_LENGTH_MAX;
const CHECKSUM_AT: usize = USED - 4;
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
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// The disk's name.
    pub name: String,
    /// The name of the disk's store, for example its image's path.
    pub home: String,
}

impl Owner {
    /// The disk `name` with the store `home`.
    ///
    /// # Errors
    /// If the name is longer than [`NAME_LENGTH_MAX`].
    pub fn new(name: &str, home: &str) -> Result<Self, SuperblockError> {
        if name.len() > NAME_LENGTH_MAX {
            return Err(SuperblockError::Name);
        }
        Ok(Self { name: name.to_owned(), home: end_of(home) })
    }
}

/// The end of a store's name that a superblock keeps.
fn end_of(home: &str) -> String {
    let mut start = home.len().saturating_sub(HOME_LENGTH_MAX);
    while !home.is_char_boundary(start) {
        start += 1;
    }
    home[start..].to_owned()
}

/// A superblock. See the module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Superblock {
    /// The log's identity, drawn at random when the log was made.
    pub log: [u8; 16],
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
    /// The age of the pair of log and image: each opening makes it one higher, first here, then in
    /// the image's mark.
    pub age: u64,
    /// The age of the newest change that the log has ever had.
    pub newest: u64,
    /// If it is not 0: marks up to this age are void. The image has no changes in the log.
    pub void: u64,
    /// The modification time of home when all changes before the tail were durable there, in
    /// nanoseconds since 1970; 0 if that is not known.
    pub home_time_ns: u64,
    /// When the superblock was written, in nanoseconds since 1970; 0 if that is not known.
    pub time_ns: u64,
    /// What home has to have where no record has changed it since.
    pub witnesses: Vec<Witness>,
}

/// Why a superblock cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SuperblockError {
    /// There is no log yet: zeroes, or a log that was not completely made.
    Blank,
    /// There is other data than a log.
    Foreign,
    /// The log has a later format, which this program does not support. Contains its version.
    Newer(u32),
    /// Both copies are damaged.
    Damaged,
    /// The disk's name is too long.
    Name,
}

impl fmt::Display for SuperblockError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Blank => formatter.write_str("there is no log yet"),
            Self::Foreign => formatter.write_str("there is other data than a log"),
            Self::Newer(version) => write!(
                formatter,
                "the log has format {version}, and this program supports formats up to {VERSION}"
            ),
            Self::Damaged => formatter.write_str("both superblocks of the log are damaged"),
            Self::Name => {
                write!(formatter, "the disk's name is longer than {NAME_LENGTH_MAX} bytes")
            }
        }
    }
}

impl std::error::Error for SuperblockError {}

/// The bytes of each superblock's place where a log may be made.
pub fn prepared() -> [u8; SUPERBLOCK_LENGTH] {
    let mut bytes = [0; SUPERBLOCK_LENGTH];
    put(&mut bytes, 0, &PREPARED);
    bytes
}

/// Whether there is a log in this place, a part of one, or leave to make one: all else but zeroes
/// is other data. `bytes` begin with the place of a superblock.
pub fn is_place(bytes: &[u8]) -> bool {
    bytes.starts_with(&MAGIC) || bytes.starts_with(&PREPARED)
}

/// The writes that remove a log, in order: an offset in bytes from the start of the region, and
/// the bytes. Each is durable before the next. `superblocks` are both copies.
///
/// The witnesses go first, so that a superblock that is torn by sectors is never more than its
/// first one. Then the second copy goes: a log whose second superblock is blank was never used, so
/// that a crash in between leaves no older state of the log.
pub fn erasure(superblocks: &[u8; 2 * SUPERBLOCK_LENGTH]) -> Vec<(u64, [u8; SUPERBLOCK_LENGTH])> {
    let place = |copy: usize| (copy * SUPERBLOCK_LENGTH) as u64;
    let without_witnesses = |copy: usize| {
        let mut bytes = [0; SUPERBLOCK_LENGTH];
        put(&mut bytes, 0, &superblocks[copy * SUPERBLOCK_LENGTH..][..USED]);
        (place(copy), bytes)
    };
    let zeroes = |copy| (place(copy), [0; SUPERBLOCK_LENGTH]);
    vec![without_witnesses(1), without_witnesses(0), zeroes(1), zeroes(0)]
}

impl Superblock {
    /// The superblock's bytes.
    ///
    /// # Panics
    /// If the owner was not made by [`Owner::new`].
    pub fn encode(&self) -> [u8; SUPERBLOCK_LENGTH] {
        let mut bytes = [0; SUPERBLOCK_LENGTH];
        put(&mut bytes, 0, &MAGIC);
        put(&mut bytes, 8, &VERSION.to_le_bytes());
        put(&mut bytes, 12, &self.block_size.to_le_bytes());
        put(&mut bytes, 16, &self.log);
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
            put(&mut bytes, 32 + 8 * index, &value.to_le_bytes());
        }
        let (name, home) = (self.owner.name.as_bytes(), self.owner.home.as_bytes());
        assert!(name.len() <= NAME_LENGTH_MAX && home.len() <= HOME_LENGTH_MAX);
        put(&mut bytes, 80, &(name.len() as u16).to_le_bytes());
        put(&mut bytes, 82, &(home.len() as u16).to_le_bytes());
        put(&mut bytes, NAME_AT, name);
        put(&mut bytes, HOME_AT, home);
        for (index, value) in self.added().into_iter().enumerate() {
            put(&mut bytes, ADDED_AT + 8 * index, &value.to_le_bytes());
        }
        let checksum = crc32c::crc32c(&bytes[..CHECKSUM_AT]);
        put(&mut bytes, CHECKSUM_AT, &checksum.to_le_bytes());
        witness::encode(&self.witnesses, self.number, &mut bytes);
        bytes
    }

    /// The fields that format 2 has added, in order.
    fn added(&self) -> [u64; 7] {
        let Self { durable, proofs_since, age, newest, void, home_time_ns, time_ns, .. } = *self;
        [durable, proofs_since, age, newest, void, home_time_ns, time_ns]
    }

    /// Reads a superblock.
    fn decode(bytes: &[u8]) -> Result<Self, SuperblockError> {
        let rest = bytes.strip_prefix(&PREPARED).unwrap_or(bytes);
        if rest.iter().all(|byte| *byte == 0) {
            return Err(SuperblockError::Blank);
        }
        if bytes.len() < USED || bytes[..8] != MAGIC {
            return Err(SuperblockError::Foreign);
        }
        if u32_at(bytes, CHECKSUM_AT) != crc32c::crc32c(&bytes[..CHECKSUM_AT]) {
            return Err(SuperblockError::Damaged);
        }
        // Every version of the format has its magic number, version and checksum at these offsets.
        let version = u32_at(bytes, 8);
        if version > VERSION {
            return Err(SuperblockError::Newer(version));
        }
        let text = |at: usize, length: u16, limit: usize| {
            let text = bytes.get(at..at + usize::from(length).min(limit))?;
            (usize::from(length) <= limit).then_some(())?;
            String::from_utf8(text.to_vec()).ok()
        };
        let name = text(NAME_AT, u16_at(bytes, 80), NAME_LENGTH_MAX);
        let home_max = if version == 1 { HOME_LENGTH_MAX_1 } else { HOME_LENGTH_MAX };
        let home = text(HOME_AT, u16_at(bytes, 82), home_max);
        let (Some(name), Some(home)) = (name, home) else { return Err(SuperblockError::Damaged) };
        let added =
            |index: usize| if version == 1 { 0 } else { u64_at(bytes, ADDED_AT + 8 * index) };
        let superblock = Self {
            log: array(bytes, 16),
            owner: Owner { name, home: end_of(&home) },
            block_size: u32_at(bytes, 12),
            number: u64_at(bytes, 32),
            epoch: u64_at(bytes, 40),
            ring_length: u64_at(bytes, 48),
            tail_position: u64_at(bytes, 56),
            tail_sequence: u64_at(bytes, 64),
            tail_epoch: u64_at(bytes, 72),
            durable: added(0),
            proofs_since: added(1),
            age: added(2),
            newest: added(3),
            void: added(4),
            home_time_ns: added(5),
            time_ns: added(6),
            witnesses: witness::decode(bytes, u64_at(bytes, 32)),
        };
        if version == 0 || !superblock.is_sane() {
            return Err(SuperblockError::Damaged);
        }
        Ok(superblock)
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
            && self.newest <= self.age
            && self.void <= self.age
            && self.age <= COUNT_MAX
    }

    /// Where to write the superblock, in bytes from the start of the region.
    pub fn offset(&self) -> u64 {
        (self.number & 1) * SUPERBLOCK_LENGTH as u64
    }
}

/// Selects the valid superblock of the two copies.
///
/// # Errors
/// If neither can be used. After [`SuperblockError::Blank`] a log may be made here.
pub fn select(first: &[u8], second: &[u8]) -> Result<Superblock, SuperblockError> {
    use SuperblockError::{Blank, Damaged, Foreign, Newer};
    match (Superblock::decode(first), Superblock::decode(second)) {
        (Ok(one), Ok(other)) if one.log != other.log => Err(Damaged),
        (Ok(one), Ok(other)) => Ok(if one.number > other.number { one } else { other }),
        // A log that a later version has opened belongs to that version, whatever the other copy
        // is.
        (Err(Newer(version)), _) | (_, Err(Newer(version))) => Err(Newer(version)),
        // The second copy is written after the first one is durable. A log is made once both are.
        (Ok(_) | Err(Blank | Damaged), Err(Blank)) => Err(Blank),
        (Ok(one), Err(Damaged | Foreign)) | (Err(Damaged | Foreign), Ok(one)) => Ok(one),
        (Err(Damaged), _) | (_, Err(Damaged)) | (Err(Blank), Ok(_)) => Err(Damaged),
        _ => Err(Foreign),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn superblock() -> Superblock {
        Superblock {
            log: *b"0123456789abcdef",
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
            age: 9,
            newest: 8,
            void: 7,
            home_time_ns: 11,
            time_ns: 12,
            witnesses: vec![Witness { offset: 8192, checksum: 5 }],
        }
    }

    #[test]
    fn a_superblock_survives_encoding_and_each_flipped_bit_is_detected() {
        let superblock = superblock();
        let bytes = superblock.encode();
        assert_eq!(Superblock::decode(&bytes), Ok(superblock));
        for bit in 0..USED * 8 {
            let mut other = bytes;
            other[bit / 8] ^= 1 << (bit % 8);
            assert!(Superblock::decode(&other).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn the_newer_sound_copy_is_selected() {
        let blank = [0; SUPERBLOCK_LENGTH];
        let older = superblock();
        let newer = Superblock { number: 7, epoch: 4, ..older.clone() };
        assert_eq!((older.offset(), newer.offset()), (0, 4096));
        let (old, new) = (older.encode(), newer.encode());
        assert_eq!(select(&old, &new), Ok(newer.clone()));
        let mut torn = new;
        torn[300..].fill(0);
        assert_eq!(select(&old, &torn), Ok(older.clone()));
        assert_eq!(select(&torn, &torn), Err(SuperblockError::Damaged));
        // The making of the log was interrupted after any of its steps.
        for first in [blank, old, torn] {
            assert_eq!(select(&first, &blank), Err(SuperblockError::Blank));
        }
        assert_eq!(select(&blank, &new), Err(SuperblockError::Damaged));
        let mut other = blank;
        other[1080] = 0x53;
        assert_eq!(select(&other, &blank), Err(SuperblockError::Foreign));
        let prepared = prepared();
        assert_eq!(select(&prepared, &prepared), Err(SuperblockError::Blank));
        // The log was not completely made.
        assert_eq!(select(&old, &prepared), Err(SuperblockError::Blank));
        assert!(is_place(&prepared) && is_place(&old) && !is_place(&blank) && !is_place(&other));
        let mut later = new;
        later[8] = 3;
        let checksum = crc32c::crc32c(&later[..CHECKSUM_AT]);
        put(&mut later, CHECKSUM_AT, &checksum.to_le_bytes());
        assert_eq!(select(&old, &later), Err(SuperblockError::Newer(3)));
        let another = Superblock { log: [1; 16], ..older };
        assert_eq!(select(&another.encode(), &new), Err(SuperblockError::Damaged));
    }

    #[test]
    fn a_log_whose_erasure_was_torn_is_sound_or_blank() {
        const SECTOR: usize = 512;
        let older = superblock();
        let newer = Superblock { number: 7, witnesses: older.witnesses.repeat(32), ..older };
        let mut image = [0; 2 * SUPERBLOCK_LENGTH];
        for superblock in [&superblock(), &newer] {
            put(&mut image, superblock.offset() as usize, &superblock.encode());
        }
        let mut was_blank = false;
        for (offset, bytes) in erasure(&image) {
            let offset = offset as usize;
            for sectors in 0..1 << (SUPERBLOCK_LENGTH / SECTOR) {
                let mut torn = image;
                for sector in (0..8).filter(|sector| sectors >> sector & 1 == 1) {
                    let at = sector * SECTOR;
                    put(&mut torn, offset + at, &bytes[at..at + SECTOR]);
                }
                let (first, second) = torn.split_at(SUPERBLOCK_LENGTH);
                let is_blank = match select(first, second) {
                    Ok(found) => {
                        assert_eq!((found.log, found.age), (newer.log, newer.age));
                        false
                    }
                    Err(SuperblockError::Blank) => true,
                    Err(error) => panic!("{error} at {offset}, sectors {sectors:b}"),
                };
                // What has begun to be blank does not come back with the next write.
                assert!(is_blank || !was_blank || sectors == 0, "at {offset}, sectors {sectors:b}");
            }
            put(&mut image, offset, &bytes);
            let (first, second) = image.split_at(SUPERBLOCK_LENGTH);
            was_blank = select(first, second) == Err(SuperblockError::Blank);
        }
        assert!(was_blank && image.iter().all(|byte| *byte == 0));
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
            changed(|superblock| superblock.newest = 10),
            changed(|superblock| superblock.void = 10),
            changed(|superblock| superblock.age = COUNT_MAX + 1),
            changed(|superblock| superblock.durable = COUNT_MAX + 1),
        ] {
            assert_eq!(insane, Err(SuperblockError::Damaged));
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
        bytes[ADDED_AT..CHECKSUM_AT].fill(0);
        bytes[8] = 1;
        put(&mut bytes, 82, &(home.len() as u16).to_le_bytes());
        put(&mut bytes, HOME_AT, home.as_bytes());
        let checksum = crc32c::crc32c(&bytes[..CHECKSUM_AT]);
        put(&mut bytes, CHECKSUM_AT, &checksum.to_le_bytes());
        let owner = Owner::new("data", &home).unwrap();
        let found = Superblock::decode(&bytes).unwrap();
        assert_eq!((found.owner.clone(), found.added()), (owner.clone(), [0; 7]));
        assert_eq!(found.tail_position, superblock.tail_position);
        assert_eq!(Superblock::decode(&found.encode()), Ok(found));
    }

    #[test]
    fn long_disk_names_are_rejected_and_long_store_names_are_cut() {
        assert_eq!(Owner::new(&"a".repeat(129), ""), Err(SuperblockError::Name));
        let owner = Owner::new(&"a".repeat(128), &"\u{e4}".repeat(200)).unwrap();
        assert_eq!(owner.home.len(), 192);
        let superblock = Superblock { owner, ..superblock() };
        assert_eq!(Superblock::decode(&superblock.encode()), Ok(superblock));
    }
}
