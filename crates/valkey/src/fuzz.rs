//! Reads arbitrary bytes as the value of a block: for the fuzzer, and for tests with seeded inputs.

use fathom_persistence::Identity;
use fathom_persistence::bytes::{array, u64_at};

use crate::format::{BLOCK, HEADER, decode, encode};

/// Reads `data` as the value of a block, and panics if the reader breaks a promise. If the first
/// byte is odd, the checksum is corrected first, so that the input reaches the checks behind it.
pub fn fuzz_value(data: &[u8]) {
    let Some((how, data)) = data.split_first() else { return };
    let mut value = data.to_vec();
    if how & 1 == 1 && value.len() >= HEADER {
        let sum = crc32c::crc32c(&value[12..]);
        value[8..12].copy_from_slice(&sum.to_le_bytes());
    }
    let (volume, block) = (Identity(array(&value, 40)), u64_at(&value, 32));
    let Ok((version, bytes)) = decode(volume, block, &value) else { return };
    assert!(bytes.len() as u64 <= BLOCK);
    assert!(decode(volume, block ^ 1, &value).is_err(), "the value of two blocks");
    let again = encode(volume, block, version, bytes);
    // Zeroes at the end may have been written out.
    assert_eq!(decode(volume, block, &again).map(|(version, _)| version), Ok(version));
    assert!(again.len() <= value.len());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::BlockVersion;

    #[test]
    fn no_value_breaks_the_reader() {
        let mut chance = fastrand::Rng::with_seed(2);
        for round in 0..200_000_u64 {
            let mut bytes = vec![0; chance.usize(..=64)];
            chance.fill(&mut bytes);
            let version = BlockVersion { epoch: chance.u64(..), sequence: chance.u64(..) };
            let mut input = vec![(round % 2) as u8];
            input.extend(encode(Identity([3; 16]), chance.u64(..100), version, &bytes));
            for _ in 0..chance.usize(..4) {
                let at = chance.usize(..input.len());
                input[at] = chance.u8(..);
            }
            input.truncate(chance.usize(input.len().saturating_sub(3)..=input.len()));
            fuzz_value(&input);
        }
    }
}
