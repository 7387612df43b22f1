//! Whether bytes look random: Pearson's χ² test of the frequencies of byte values.
//!
//! Of n bytes, each value is expected n/256 times. For random bytes the statistic has a mean of 255
//! and a standard deviation of 22.6, whatever n is; for others it grows with n. So the test says
//! the more, the more bytes it gets: of 4 KiB of compressed data most pass, of 256 KiB few.

/// A page, in bytes.
pub(super) const PAGE: usize = 4096;
/// The greatest statistic of a page that may be random; above the mean by more than six standard
/// deviations.
const PAGE_MAX: u64 = 400;
/// The same for the first page of a file, which may begin with a header.
const START_MAX: u64 = 600;
/// The statistic that 99.9 % of random samples of any size do not exceed.
const SAMPLE_MAX: u64 = 331;
/// The fewest bytes about which the test says something.
const COUNT_MIN: u64 = 1024;

/// How often each value of a byte has occurred in a sample.
pub(super) struct Frequencies {
    counts: [u32; 256],
    total: u32,
}

impl Default for Frequencies {
    fn default() -> Self {
        Self { counts: [0; 256], total: 0 }
    }
}

impl Frequencies {
    /// The frequencies of `bytes`, without the zeroes at the end, which fill the last page of a
    /// file.
    pub fn of(bytes: &[u8]) -> Self {
        let end = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        let bytes = &bytes[..end];
        // Four tables: equal neighbours do not wait for each other.
        let mut tables = [[0_u32; 256]; 4];
        let mut fours = bytes.chunks_exact(4);
        for four in &mut fours {
            for (table, byte) in tables.iter_mut().zip(four) {
                table[usize::from(*byte)] += 1;
            }
        }
        for byte in fours.remainder() {
            tables[0][usize::from(*byte)] += 1;
        }
        let mut counts = [0; 256];
        for table in tables {
            for (count, more) in counts.iter_mut().zip(table) {
                *count += more;
            }
        }
        Self { counts, total: end as u32 }
    }

    /// Adds another sample.
    pub fn add(&mut self, other: &Self) {
        for (count, more) in self.counts.iter_mut().zip(other.counts) {
            *count = count.saturating_add(more);
        }
        self.total = self.total.saturating_add(other.total);
    }

    /// Empties the sample.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// The number of bytes.
    pub fn total(&self) -> u64 {
        self.total.into()
    }

    /// Pearson's statistic; `None` for too few bytes.
    fn statistic(&self) -> Option<u64> {
        let total = self.total();
        if total < COUNT_MIN {
            return None;
        }
        let squares: u64 = self.counts.iter().map(|count| u64::from(*count).pow(2)).sum();
        Some((squares.saturating_mul(256) / total).saturating_sub(total))
    }

    /// What a page looks like.
    pub fn look(&self) -> Look {
        match self.statistic() {
            None => Look::Unclear,
            Some(_) if self.counts.contains(&self.total) => Look::Unclear,
            Some(statistic) if statistic <= PAGE_MAX => Look::Random,
            Some(_) => Look::Plain,
        }
    }

    /// Whether the first page of a file may be random behind a header.
    pub fn may_start_random(&self) -> bool {
        self.statistic().is_some_and(|statistic| statistic <= START_MAX)
    }

    /// Whether a sample of many pages is random.
    pub fn is_random(&self) -> bool {
        self.statistic().is_some_and(|statistic| statistic <= SAMPLE_MAX)
    }
}

/// What some bytes look like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// Encrypted, compressed or random.
    Random,
    /// Neither.
    Plain,
    /// There are too few bytes, or all are equal.
    Unclear,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn random(seed: u64, length: usize) -> Vec<u8> {
        let mut random = fastrand::Rng::with_seed(seed);
        (0..length).map(|_| random.u8(..)).collect()
    }

    #[test]
    fn random_bytes_pass_and_others_do_not() {
        for seed in 0..200 {
            let page = Frequencies::of(&random(seed, PAGE));
            assert_eq!(page.look(), Look::Random);
            assert!(page.may_start_random());
        }
        let text = "The quick brown fox jumps over the lazy dog. ".repeat(100);
        assert_eq!(Frequencies::of(text.as_bytes()).look(), Look::Plain);
        // Base64 of random bytes uses 64 of 256 values.
        let base64: Vec<u8> = random(1, PAGE).iter().map(|byte| b'0' + byte % 64).collect();
        assert_eq!(Frequencies::of(&base64).look(), Look::Plain);
        assert_eq!(Frequencies::of(&[0; PAGE]).look(), Look::Unclear);
        assert_eq!(Frequencies::of(&[7; PAGE]).look(), Look::Unclear);
        assert_eq!(Frequencies::of(b"short").look(), Look::Unclear);
    }

    #[test]
    fn large_samples_decide_closely() {
        let mut passed = 0;
        for seed in 0..500 {
            let mut sample = Frequencies::default();
            for page in random(seed, 16 * PAGE).chunks(PAGE) {
                sample.add(&Frequencies::of(page));
            }
            passed += u32::from(sample.is_random());
        }
        // 99.9 % of random samples pass.
        assert!(passed >= 496, "{passed}");
        // Of the first 16 values, only the odd ones occur.
        let skewed: Vec<u8> = random(9, 64 * PAGE)
            .iter()
            .map(|byte| if *byte < 16 { byte | 1 } else { *byte })
            .collect();
        assert!(!Frequencies::of(&skewed).is_random());
        // The zeroes behind the end of a file do not count.
        let mut last = random(3, PAGE);
        last[2000..].fill(0);
        let last = Frequencies::of(&last);
        assert!(last.look() == Look::Random && last.total() <= 2000);
    }
}
