//! The beginning of a store: what it is, and its latest state. There are two copies, each of
//! [`SUPERBLOCK_LENGTH`] bytes, one behind the other. The first sector of a copy is its own; what
//! is behind it has a checksum of its own, if anything is.
//!
//! ```text
//!  0        8         12                                          508        512        4096
//!  ┌────────┬─────────┬───────────────────────────────────────────┬──────────┬──────────┐
//!  │ magic  │ version │ fields of the store                       │ CRC-32C  │ extras   │
//!  └────────┴─────────┴───────────────────────────────────────────┴──────────┴──────────┘
//! ```
//! Every version of every format has its magic, version and checksum there, so that an earlier
//! program tells a later version apart from damage, and the end of a store's making from its loss.

use crate::bytes::{put, u32_at};
use crate::identity::Identity;

/// The length of a copy of a superblock, in bytes.
pub const SUPERBLOCK_LENGTH: usize = 4096;
/// The unit that a device writes completely or not at all, in bytes.
pub const SECTOR: usize = 512;
const VERSION_AT: usize = 8;
const CHECKSUM_AT: usize = SECTOR - 4;

/// The bytes of a copy of a superblock.
pub type SuperblockBytes = [u8; SUPERBLOCK_LENGTH];

/// How the two copies of a superblock are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyOrder {
    /// Alternately: while one is being written, the other is valid. The one with the higher number
    /// is the latest state. The second copy is written when the first one is durable, and the store
    /// is made once both are.
    Alternating,
    /// When the store is made, last of all, and never again. They are equal, and one is enough.
    Equal,
}

/// What there is instead of a superblock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// There is no store yet: zeroes, or one that was not completely made. Here one may be made.
    Blank,
    /// Other data. Nothing of it may be overwritten.
    Foreign,
    /// A store of a later version, which this program does not support.
    Newer(u32),
    /// It is damaged.
    Damaged,
}

impl Verdict {
    /// The verdict in words, on a store with the superblock `S`.
    pub fn describe<S: Superblock>(self) -> String {
        let (noun, newest) = (S::NOUN, S::NEWEST);
        match self {
            Self::Blank => format!("there is no {noun}"),
            Self::Foreign => format!("there is other data than a {noun}"),
            Self::Newer(version) => format!(
                "the {noun} has format {version}, and this program supports formats up to {newest}"
            ),
            Self::Damaged => format!("both superblocks of the {noun} are damaged"),
        }
    }
}

/// A superblock of one kind of store. The kind says how its own fields are laid out; all else is
/// here.
pub trait Superblock: Sized {
    /// What the store is called in messages.
    const NOUN: &'static str;
    /// The first bytes of a copy.
    const MAGIC: [u8; 8];
    /// The first bytes of each place for a copy where a store may be made, if a command has made
    /// such a place. Zeroes follow.
    const PREPARED: Option<[u8; 8]> = None;
    /// The latest version of the format.
    const NEWEST: u32;
    /// How the copies are written.
    const ORDER: CopyOrder;

    /// The version of the format in which the superblock is written: the earliest that has all of
    /// its fields.
    fn version(&self) -> u32 {
        Self::NEWEST
    }

    /// The identity of the store.
    fn identity(&self) -> Identity;

    /// The number of the superblock, if copies are written alternately.
    fn number(&self) -> u64 {
        0
    }

    /// Writes the fields of the store into a copy.
    fn put(&self, copy: &mut SuperblockBytes);

    /// Reads the fields of the store. `None` if no such superblock was ever written.
    fn get(version: u32, copy: &SuperblockBytes) -> Option<Self>;

    /// A copy of the superblock.
    fn encode(&self) -> SuperblockBytes {
        let mut copy = [0; SUPERBLOCK_LENGTH];
        self.put(&mut copy);
        put(&mut copy, 0, &Self::MAGIC);
        put(&mut copy, VERSION_AT, &self.version().to_le_bytes());
        seal(&mut copy);
        copy
    }

    /// Where to write the superblock, in bytes from the start of the store.
    fn offset(&self) -> u64 {
        (self.number() & 1) * SUPERBLOCK_LENGTH as u64
    }

    /// Reads one copy.
    ///
    /// # Errors
    /// If it is no sound superblock.
    fn decode(copy: &[u8]) -> Result<Self, Verdict> {
        let prepared = Self::PREPARED.and_then(|prepared| copy.strip_prefix(&prepared));
        if prepared.unwrap_or(copy).iter().all(|byte| *byte == 0) {
            return Err(Verdict::Blank);
        }
        let copy: &SuperblockBytes = copy.try_into().map_err(|_| Verdict::Foreign)?;
        if !copy.starts_with(&Self::MAGIC) {
            return Err(Verdict::Foreign);
        }
        if u32_at(copy, CHECKSUM_AT) != crc32c::crc32c(&copy[..CHECKSUM_AT]) {
            return Err(Verdict::Damaged);
        }
        match u32_at(copy, VERSION_AT) {
            0 => Err(Verdict::Damaged),
            later if later > Self::NEWEST => Err(Verdict::Newer(later)),
            version => Self::get(version, copy).ok_or(Verdict::Damaged),
        }
    }

    /// Selects the valid superblock from the bytes of both copies.
    ///
    /// # Errors
    /// If neither can be used. After [`Verdict::Blank`] a store may be made here.
    fn select(copies: &[u8]) -> Result<Self, Verdict> {
        use Verdict::{Blank, Damaged, Foreign, Newer};
        let copy = |number| copies.chunks(SUPERBLOCK_LENGTH).nth(number).unwrap_or_default();
        let copies = (Self::decode(copy(0)), Self::decode(copy(1)));
        if Self::ORDER == CopyOrder::Equal {
            return match copies {
                (Ok(one), _) | (_, Ok(one)) => Ok(one),
                (Err(verdict), Err(Blank)) | (_, Err(verdict)) => Err(verdict),
            };
        }
        match copies {
            (Ok(one), Ok(other)) if one.identity() != other.identity() => Err(Damaged),
            (Ok(one), Ok(other)) => Ok(if one.number() > other.number() { one } else { other }),
            // A store that a later version has opened belongs to that version, whatever the other
            // copy is.
            (Err(Newer(version)), _) | (_, Err(Newer(version))) => Err(Newer(version)),
            (Ok(_) | Err(Blank | Damaged), Err(Blank)) => Err(Blank),
            (Ok(one), Err(Damaged | Foreign)) | (Err(Damaged | Foreign), Ok(one)) => Ok(one),
            (Err(Damaged), _) | (_, Err(Damaged)) | (Err(Blank), Ok(_)) => Err(Damaged),
            _ => Err(Foreign),
        }
    }

    /// A copy's place where a store may be made: what a command writes to permit that.
    ///
    /// # Panics
    /// If no such place is [prepared](Self::PREPARED) for this kind of store.
    fn prepared() -> SuperblockBytes {
        let mut copy = [0; SUPERBLOCK_LENGTH];
        put(&mut copy, 0, &Self::PREPARED.expect("this kind of store has prepared places"));
        copy
    }

    /// Whether there is such a store, a part of one, or leave to make one: all else but zeroes is
    /// other data. `bytes` begin with the place of a copy.
    fn is_place(bytes: &[u8]) -> bool {
        bytes.starts_with(&Self::MAGIC)
            || Self::PREPARED.is_some_and(|prepared| bytes.starts_with(&prepared))
    }
}

/// Corrects the checksum of a copy.
pub fn seal(copy: &mut [u8]) {
    let checksum = crc32c::crc32c(&copy[..CHECKSUM_AT]);
    put(copy, CHECKSUM_AT, &checksum.to_le_bytes());
}

/// The writes that remove a store, in order: an offset in bytes from its start, and the bytes. Each
/// is durable before the next. `copies` are those of the superblock.
///
/// What is behind the first sectors goes first, so that a copy that is torn by sectors is never
/// more than its first one. Then the second copy goes: a store whose second copy is blank was never
/// used, so that a crash in between leaves no older state.
pub fn erasure(copies: &[u8; 2 * SUPERBLOCK_LENGTH]) -> Vec<(u64, SuperblockBytes)> {
    let place = |copy: usize| (copy * SUPERBLOCK_LENGTH) as u64;
    let first_sector = |copy: usize| {
        let mut bytes = [0; SUPERBLOCK_LENGTH];
        put(&mut bytes, 0, &copies[copy * SUPERBLOCK_LENGTH..][..SECTOR]);
        (place(copy), bytes)
    };
    let zeroes = |copy| (place(copy), [0; SUPERBLOCK_LENGTH]);
    vec![first_sector(1), first_sector(0), zeroes(1), zeroes(0)]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bytes::{array, u64_at};

    /// A store with a number and extras; as a log's, or, if it `IS_EQUAL`, as a cache's.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    struct Store<const IS_EQUAL: bool> {
        identity: Identity,
        number: u64,
        extras: u8,
    }

    impl<const IS_EQUAL: bool> Superblock for Store<IS_EQUAL> {
        const NOUN: &'static str = "store";
        const MAGIC: [u8; 8] = *b"A STORE.";
        const PREPARED: Option<[u8; 8]> = if IS_EQUAL { None } else { Some(*b"A PLACE.") };
        const NEWEST: u32 = 2;
        const ORDER: CopyOrder = if IS_EQUAL { CopyOrder::Equal } else { CopyOrder::Alternating };

        fn identity(&self) -> Identity {
            self.identity
        }

        fn number(&self) -> u64 {
            self.number
        }

        fn put(&self, copy: &mut SuperblockBytes) {
            put(copy, 16, &self.identity.0);
            put(copy, 32, &self.number.to_le_bytes());
            copy[SECTOR..2 * SECTOR].fill(self.extras);
        }

        fn get(_: u32, copy: &SuperblockBytes) -> Option<Self> {
            let identity = Identity(array(copy, 16));
            Some(Self { identity, number: u64_at(copy, 32), extras: copy[SECTOR] })
        }
    }

    const IDENTITY: Identity = Identity(*b"0123456789abcdef");

    fn store<const IS_EQUAL: bool>(number: u64) -> Store<IS_EQUAL> {
        Store { identity: IDENTITY, number, extras: 7 }
    }

    fn select<const IS_EQUAL: bool>(
        first: &SuperblockBytes,
        second: &SuperblockBytes,
    ) -> Result<Store<IS_EQUAL>, Verdict> {
        Store::select(&[&first[..], second].concat())
    }

    /// What may be in the place of a copy.
    fn copies(number: u64) -> Vec<(SuperblockBytes, Result<(), Verdict>)> {
        let sound = store::<false>(number).encode();
        let (mut torn, mut later, mut other) = (sound, sound, [0; SUPERBLOCK_LENGTH]);
        torn[300] ^= 1;
        later[VERSION_AT] = 3;
        seal(&mut later);
        other[1080] = 0x53;
        vec![
            (sound, Ok(())),
            (torn, Err(Verdict::Damaged)),
            (later, Err(Verdict::Newer(3))),
            (other, Err(Verdict::Foreign)),
            ([0; SUPERBLOCK_LENGTH], Err(Verdict::Blank)),
            (Store::<false>::prepared(), Err(Verdict::Blank)),
        ]
    }

    #[test]
    fn a_superblock_is_read_as_written_and_each_flipped_bit_of_its_sector_is_found() {
        let bytes = store::<false>(6).encode();
        assert_eq!(Store::decode(&bytes), Ok(store::<false>(6)));
        for bit in 0..SECTOR * 8 {
            let mut other = bytes;
            other[bit / 8] ^= 1 << (bit % 8);
            assert!(Store::<false>::decode(&other).is_err(), "bit {bit}");
        }
        let mut without_version = bytes;
        without_version[VERSION_AT] = 0;
        seal(&mut without_version);
        assert_eq!(Store::<false>::decode(&without_version), Err(Verdict::Damaged));
        assert_eq!(Store::<false>::decode(&bytes[..512]), Err(Verdict::Foreign));
        assert_eq!(Store::<false>::decode(&[]), Err(Verdict::Blank));
        for (bytes, verdict) in copies(6) {
            assert_eq!(Store::<false>::decode(&bytes).map(drop), verdict);
            let is_place = matches!(bytes[0], b'A');
            assert_eq!(Store::<false>::is_place(&bytes), is_place);
        }
    }

    #[test]
    fn the_latest_of_alternating_copies_is_selected() {
        use Verdict::{Blank, Damaged, Foreign, Newer};
        assert_eq!((store::<false>(6).offset(), store::<false>(7).offset()), (0, 4096));
        for (first, one) in copies(6) {
            for (second, other) in copies(7) {
                let expected = match (one, other) {
                    (Ok(()) | Err(Damaged | Foreign), Ok(())) => Ok(7),
                    (Err(Newer(3)), _) | (_, Err(Newer(3))) => Err(Newer(3)),
                    // Its making was interrupted after any of its steps.
                    (Ok(()) | Err(Blank | Damaged), Err(Blank)) => Err(Blank),
                    (Ok(()), _) => Ok(6),
                    (Err(Foreign), Err(Blank | Foreign)) | (Err(Blank), Err(Foreign)) => {
                        Err(Foreign)
                    }
                    _ => Err(Damaged),
                };
                let found = select::<false>(&first, &second).map(|found| found.number);
                assert_eq!(found, expected, "{one:?} and {other:?}");
            }
        }
        let another = Store { identity: Identity::NONE, ..store::<false>(6) };
        let both = select::<false>(&another.encode(), &store::<false>(7).encode());
        assert_eq!(both, Err(Damaged));
    }

    #[test]
    fn one_of_equal_copies_is_enough() {
        let prepared = (Store::<false>::prepared(), Err(Verdict::Foreign));
        for (first, one) in copies(6).into_iter().take(5).chain([prepared]) {
            for (second, other) in copies(6).into_iter().take(5).chain([prepared]) {
                let expected = match (one, other) {
                    (Ok(()), _) | (_, Ok(())) => Ok(6),
                    (Err(verdict), Err(Verdict::Blank)) | (_, Err(verdict)) => Err(verdict),
                };
                let found = select::<true>(&first, &second).map(|found| found.number);
                assert_eq!(found, expected, "{one:?} and {other:?}");
            }
        }
        assert_eq!(Store::<true>::select(&[0; 100]), Err(Verdict::Blank));
    }

    #[test]
    fn a_store_whose_erasure_was_torn_is_sound_or_blank() {
        let mut image = [0; 2 * SUPERBLOCK_LENGTH];
        for number in [6, 7] {
            let superblock = store::<false>(number);
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
                let is_blank = match Store::<false>::select(&torn) {
                    Ok(found) => {
                        assert_eq!(found.identity, IDENTITY);
                        false
                    }
                    Err(Verdict::Blank) => true,
                    Err(verdict) => panic!("{verdict:?} at {offset}, sectors {sectors:b}"),
                };
                // What has begun to be blank does not come back with the next write.
                assert!(is_blank || !was_blank || sectors == 0, "at {offset}, sectors {sectors:b}");
            }
            put(&mut image, offset, &bytes);
            was_blank = Store::<false>::select(&image) == Err(Verdict::Blank);
        }
        assert!(was_blank && image.iter().all(|byte| *byte == 0));
    }
}
