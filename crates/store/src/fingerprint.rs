//! Fingerprints of blocks: equal blocks of one domain have the same one.
//!
//! A fingerprint proposes a block that may be equal, and decides nothing: blocks are compared
//! before one takes the place of the other. So it need not resist collisions. It has 56 bits of the
//! XXH3 of the block's checksum, which is made in any case, and of some of its words. It
//! is keyed with the secret of its *domain*: the blocks of one domain are never found by another
//! one, whose guests could otherwise learn from the time of a write what others have.

use std::fmt;

use xxhash_rust::xxh3::xxh3_64_with_secret;

use crate::seal::Key;

/// The bits of a fingerprint.
const BITS: u32 = 56;
/// The bytes of a fingerprint in the table.
pub(crate) const FINGERPRINT: usize = BITS as usize / 8;
/// The words of a block that are part of its fingerprint, at equal distances, and their bytes.
const WORDS: usize = 16;
const WORD: usize = 8;
/// As many bytes as XXH3 takes by default.
const SECRET: usize = 192;

/// See the module. It is never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Fingerprint(u64);

impl Fingerprint {
    /// The fingerprint with these bits; `None` if they are 0.
    pub(crate) fn from_bits(bits: u64) -> Option<Self> {
        let bits = bits & ((1 << BITS) - 1);
        (bits != 0).then_some(Self(bits))
    }

    pub(crate) fn bits(self) -> u64 {
        self.0
    }
}

/// Makes the fingerprints of a domain.
pub(crate) struct Fingerprinter([u8; SECRET]);

impl Fingerprinter {
    /// That of a domain of the pool with this key.
    pub(crate) fn new(key: &Key, domain: &str) -> Self {
        let mut secret = [0; SECRET];
        let mut hasher = blake3::Hasher::new_keyed(&key.0);
        hasher.update(b"fingerprints of the domain ").update(domain.as_bytes());
        hasher.finalize_xof().fill(&mut secret);
        Self(secret)
    }

    /// The fingerprint of a block with this CRC-32C.
    pub(crate) fn fingerprint(&self, block: &[u8], checksum: u32) -> Fingerprint {
        let mut bytes = [0; 4 + WORDS * WORD];
        bytes[..4].copy_from_slice(&checksum.to_le_bytes());
        let words = block.chunks(block.len().div_ceil(WORDS).max(WORD));
        for (target, words) in bytes[4..].chunks_exact_mut(WORD).zip(words) {
            let length = words.len().min(WORD);
            target[..length].copy_from_slice(&words[..length]);
        }
        Fingerprint((xxh3_64_with_secret(&bytes, &self.0) >> (64 - BITS)).max(1))
    }
}

impl fmt::Debug for Fingerprinter {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Fingerprinter")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fingerprints_are_those_of_a_domain_of_a_pool() {
        let of = |key: u8, domain: &str, block: u8| {
            let block = [block; 4096];
            let checksum = crc32c::crc32c(&block);
            Fingerprinter::new(&Key([key; 32]), domain).fingerprint(&block, checksum)
        };
        assert_eq!(of(1, "a", 5), of(1, "a", 5));
        let all = [of(1, "a", 5), of(1, "a", 6), of(1, "b", 5), of(2, "a", 5)];
        for (index, one) in all.iter().enumerate() {
            assert!(all[index + 1..].iter().all(|other| other != one));
            assert_eq!(Fingerprint::from_bits(one.bits()), Some(*one));
        }
        assert_eq!(Fingerprint::from_bits(1 << BITS), None);
    }
}
