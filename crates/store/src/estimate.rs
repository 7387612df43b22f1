//! What a pool would save of existing images, before they are moved into one.
//!
//! All data is read, and the blocks are counted whose fingerprint has some low bits of 0: the less
//! of them, the more data there is, so that memory is bounded. A sample by content has all copies
//! of a block or none, so that the share of different blocks in it is that of the whole, apart from
//! chance.

use std::io;
use std::sync::Arc;

use fathom_block::{Allocation, Backend, StoreAccess};
use hashbrown::HashMap;

use crate::fingerprint::{Fingerprint, Fingerprinter};
use crate::layout::{BLOCK, BLOCK_BYTES};
use crate::seal::Key;

/// The most different blocks of the sample.
const SAMPLE_MAX: usize = 1 << 20;
/// The bytes of a read.
const READ_LENGTH: u64 = 1 << 20;

/// What images have in common.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Estimate {
    /// The bytes of the images.
    pub bytes: u64,
    /// Those of blocks that are not zeroes.
    pub data_bytes: u64,
    /// Those of different blocks, about.
    pub different_bytes: u64,
    /// The bytes by which the latter are wrong at most, in 19 of 20 cases. 0 if all blocks were
    /// counted.
    pub error_bytes: u64,
}

/// Counts equal blocks of images.
pub struct Estimator {
    fingerprinter: Fingerprinter,
    /// How often each block of the sample was found.
    sample: HashMap<Fingerprint, u32>,
    sample_max: usize,
    /// Fingerprints with so many low bits of 0 are in the sample.
    sampling: u32,
    bytes: u64,
    blocks: u64,
}

impl Default for Estimator {
    fn default() -> Self {
        Self::new(SAMPLE_MAX)
    }
}

impl Estimator {
    fn new(sample_max: usize) -> Self {
        Self {
            // Nothing that is found by it is kept.
            fingerprinter: Fingerprinter::new(&Key([0; 32]), "estimate"),
            sample: HashMap::new(),
            sample_max,
            sampling: 0,
            bytes: 0,
            blocks: 0,
        }
    }

    /// Counts the blocks of an image. `progress` is called with the bytes that have been looked at.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn add(
        &mut self,
        image: &Arc<dyn Backend>,
        mut progress: impl FnMut(u64),
    ) -> io::Result<()> {
        let mut access = StoreAccess::open(image)?;
        let capacity = image.capacity();
        let mut at = 0;
        while at < capacity {
            for extent in access.extents(at, capacity - at)? {
                let end = extent.offset + extent.length;
                while at < end {
                    let length = READ_LENGTH.min(end - at);
                    if extent.allocation == Allocation::Data {
                        let bytes = access.read(at, length)?;
                        bytes.chunks(BLOCK_BYTES).for_each(|block| self.count(block));
                    }
                    at += length;
                    progress(at);
                }
            }
        }
        self.bytes += capacity;
        Ok(())
    }

    /// Counts a block; the last one of an image may be short.
    fn count(&mut self, block: &[u8]) {
        if block.iter().all(|byte| *byte == 0) {
            return;
        }
        self.blocks += 1;
        let fingerprint = self.fingerprinter.fingerprint(block, crc32c::crc32c(block));
        if fingerprint.bits().trailing_zeros() < self.sampling {
            return;
        }
        *self.sample.entry(fingerprint).or_default() += 1;
        while self.sample.len() > self.sample_max {
            self.sampling += 1;
            let sampling = self.sampling;
            self.sample.retain(|fingerprint, _| fingerprint.bits().trailing_zeros() >= sampling);
        }
    }

    /// What has been found so far.
    pub fn estimate(&self) -> Estimate {
        let all: u64 = self.sample.values().map(|count| u64::from(*count)).sum();
        let share = self.sample.len() as f64 / all.max(1) as f64;
        let data = (self.blocks * BLOCK) as f64;
        // The error of a ratio of sums over a sample of blocks.
        let residuals = self.sample.values().map(|count| (1.0 - share * f64::from(*count)).powi(2));
        let left = if self.sampling == 0 { 0.0 } else { 1.0 };
        let error = 2.0 * left * residuals.sum::<f64>().sqrt() / all.max(1) as f64;
        Estimate {
            bytes: self.bytes,
            data_bytes: self.blocks * BLOCK,
            different_bytes: (share * data) as u64,
            error_bytes: (error * data) as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(number: u64) -> Vec<u8> {
        let mut bytes = vec![0; BLOCK_BYTES];
        fastrand::Rng::with_seed(number + 1).fill(&mut bytes);
        bytes
    }

    #[test]
    fn a_small_number_of_blocks_is_counted_exactly() {
        let mut estimator = Estimator::default();
        for number in 0..300 {
            estimator.count(&block(number % 200));
            estimator.count(&[0; BLOCK_BYTES]);
        }
        let found = estimator.estimate();
        assert_eq!((found.data_bytes, found.different_bytes), (300 * BLOCK, 200 * BLOCK));
        assert_eq!(found.error_bytes, 0);
    }

    #[test]
    fn a_sample_is_as_near_as_it_says() {
        let (mut wrong, runs) = (0, 10);
        for run in 0..runs {
            let mut estimator = Estimator::new(400);
            let mut random = fastrand::Rng::with_seed(run);
            let mut different = std::collections::BTreeSet::new();
            for _ in 0..12_000 {
                // Some blocks are frequent.
                let most = 1 + random.u64(..20_000);
                let number = run << 32 | random.u64(..most);
                different.insert(number);
                estimator.count(&block(number));
            }
            let found = estimator.estimate();
            assert!(estimator.sampling > 2 && found.error_bytes > 0);
            let exact = different.len() as u64 * BLOCK;
            assert!(found.different_bytes.abs_diff(exact) < 3 * found.error_bytes);
            wrong += u32::from(found.different_bytes.abs_diff(exact) > found.error_bytes);
        }
        assert!(wrong <= 3, "{wrong} of {runs}");
    }
}
