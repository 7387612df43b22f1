//! What a miss costs: the mean time of the slow disk's requests, by their length and by whether
//! they continue the request before them.

/// The lengths of requests are told apart by powers of two of blocks, up to this number of them.
const LENGTHS: usize = 12;
/// The share of a new observation in a mean.
const STEP: f64 = 1.0 / 32.0;

/// The mean times of a disk's requests, learned from observations.
#[derive(Clone, Debug, Default)]
pub struct MissCost {
    /// The mean times, in nanoseconds, of requests that continue the one before them and of others.
    means_ns: [[f64; LENGTHS]; 2],
    /// What requests of each length are expected to take, in nanoseconds.
    expected_ns: [[u64; LENGTHS]; 2],
    /// The length whose mean that is.
    nearest: [[u8; LENGTHS]; 2],
}

impl MissCost {
    /// Without observations.
    pub fn new() -> Self {
        Self::default()
    }

    /// A request for `blocks` blocks took `time_ns` of the slow disk's time.
    pub fn observe(&mut self, is_sequential: bool, blocks: u64, time_ns: u64) {
        let (row, length) = (usize::from(is_sequential), length(blocks));
        let mean_ns = &mut self.means_ns[row][length];
        let time_ns = time_ns as f64;
        let is_first = *mean_ns == 0.0;
        *mean_ns += if is_first { time_ns } else { (time_ns - *mean_ns) * STEP };
        let expected = *mean_ns as u64;
        if is_first {
            self.find_nearest(row);
        }
        for (expected_ns, nearest) in self.expected_ns[row].iter_mut().zip(self.nearest[row]) {
            if usize::from(nearest) == length {
                *expected_ns = expected;
            }
        }
    }

    /// A length without observations is expected to take as long as the nearest one that has some.
    fn find_nearest(&mut self, row: usize) {
        let means_ns = &self.means_ns[row];
        for wanted in 0..LENGTHS {
            let known = (0..LENGTHS).filter(|length| means_ns[*length] > 0.0);
            let Some(nearest) = known.min_by_key(|length| length.abs_diff(wanted)) else { return };
            self.nearest[row][wanted] = nearest as u8;
            self.expected_ns[row][wanted] = means_ns[nearest] as u64;
        }
    }

    /// The expected time of each block of a request for `blocks` blocks, in nanoseconds. A length
    /// without observations costs as much as the next one that has some.
    pub fn block_ns(&self, is_sequential: bool, blocks: u64) -> u32 {
        share(self.expected_ns[usize::from(is_sequential)][length(blocks)], blocks)
    }
}

/// The part of each of `blocks` blocks in `time_ns`.
pub(crate) fn share(time_ns: u64, blocks: u64) -> u32 {
    u32::try_from(time_ns / blocks.max(1)).unwrap_or(u32::MAX)
}

fn length(blocks: u64) -> usize {
    (blocks.max(1).ilog2() as usize).min(LENGTHS - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cost_of_a_length_is_the_mean_of_its_observations() {
        let mut cost = MissCost::new();
        assert_eq!(cost.block_ns(false, 4), 0);
        for _ in 0..1000 {
            cost.observe(false, 1, 10_000_000);
            cost.observe(false, 64, 12_800_000);
            cost.observe(true, 64, 1_280_000);
        }
        assert_eq!(cost.block_ns(false, 1), 10_000_000);
        assert_eq!(cost.block_ns(false, 64), 200_000);
        assert_eq!(cost.block_ns(true, 64), 20_000);
        // Lengths that were not observed cost as much as their neighbours.
        assert_eq!(cost.block_ns(false, 2), 5_000_000);
        assert_eq!((cost.block_ns(false, 1024), cost.block_ns(true, 1)), (12_500, 1_280_000));
        cost.observe(false, 2, 20_000_000);
        assert_eq!((cost.block_ns(false, 1), cost.block_ns(false, 2)), (10_000_000, 10_000_000));
        assert_eq!(cost.block_ns(false, 4), 5_000_000);
        (0..1000).for_each(|_| cost.observe(false, 1, 1_000_000));
        assert!(cost.block_ns(false, 1) < 1_010_000);
    }
}
