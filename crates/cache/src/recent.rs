//! The miss-ratio curve of the recent past.
//!
//! A curve follows the blocks whose hashes are below a threshold, which only falls. So a curve of
//! months has samples of what was used in these months, and few of what is used now. Therefore
//! there are two generations. The younger one replaces the older one after a fixed time, or later
//! if it has few requests; and then a new one begins. The older one is the answer: it has seen one
//! to two of these times. A block that is requested again only after a longer time counts as one
//! that is new.

use crate::curve::{Curve, MissRatios, Touch};

/// The requests that a generation has at least before it is the answer.
const REQUESTS_MIN: f64 = 4096.0;

/// The curve of the last one to two generations.
#[derive(Clone, Debug)]
pub struct RecentCurve {
    samples: usize,
    share: f64,
    generation_ns: u64,
    /// The older generation, and when it began.
    older: Option<(Curve, u64)>,
    younger: Curve,
    younger_ns: u64,
}

impl RecentCurve {
    /// A curve that follows at most `samples` keys in each generation, at first this share of all;
    /// see [`Curve::with_share`]. A generation lasts `generation_ns`. The first one begins at
    /// `now_ns`, or if that is 0, with the first call of [`advance`](Self::advance).
    pub fn new(samples: usize, share: f64, generation_ns: u64, now_ns: u64) -> Self {
        let younger = Curve::with_share(samples, share);
        Self { samples, share, generation_ns, older: None, younger, younger_ns: now_ns }
    }

    /// Hashes from this one on are not followed.
    pub fn threshold(&self) -> u64 {
        let older = self.older.as_ref().map_or(0, |(older, _)| older.threshold());
        self.younger.threshold().max(older)
    }

    /// See [`Curve::count`].
    pub fn count(&mut self, requests: u64) {
        self.younger.count(requests);
        if let Some((older, _)) = &mut self.older {
            older.count(requests);
        }
    }

    /// See [`Curve::sample`].
    pub fn sample(&mut self, hash: u64, touch: Touch) {
        self.younger.sample(hash, touch);
        if let Some((older, _)) = &mut self.older {
            older.sample(hash, touch);
        }
    }

    /// Begins a new generation if it is time.
    pub fn advance(&mut self, now_ns: u64) {
        if self.younger_ns == 0 {
            self.younger_ns = now_ns;
        }
        let is_old = now_ns.saturating_sub(self.younger_ns) >= self.generation_ns;
        if is_old && self.younger.requests() >= REQUESTS_MIN {
            let new = Curve::with_share(self.samples, self.share);
            self.older = Some((std::mem::replace(&mut self.younger, new), self.younger_ns));
            self.younger_ns = now_ns;
        }
    }

    fn shown(&self) -> (&Curve, u64) {
        let younger = (&self.younger, self.younger_ns);
        self.older.as_ref().map_or(younger, |(older, begin_ns)| (older, *begin_ns))
    }

    /// The miss ratios.
    pub fn ratios(&self) -> &MissRatios {
        self.shown().0.ratios()
    }

    /// The share of the keys that is followed, from 0 to 1.
    pub fn share(&self) -> f64 {
        self.shown().0.share()
    }

    /// When the requests of the curve began, in nanoseconds.
    pub fn begin_ns(&self) -> u64 {
        self.shown().1
    }

    /// The memory, in bytes.
    pub fn memory_bytes(&self) -> usize {
        let older = self.older.as_ref().map_or(0, |(older, _)| older.memory_bytes());
        size_of::<Self>() + self.younger.memory_bytes() + older
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR_NS: u64 = 3_600_000_000_000;

    /// Requests at a steady rate from `from_ns` on; returns when they end.
    fn requests(curve: &mut RecentCurve, keys: impl Iterator<Item = u64>, from_ns: u64) -> u64 {
        let mut now_ns = from_ns;
        for key in keys {
            curve.count(1);
            curve.sample(Curve::hash(key), Touch::Request);
            now_ns += HOUR_NS / 20_000;
            curve.advance(now_ns);
        }
        now_ns
    }

    #[test]
    fn the_answer_is_that_of_the_last_generations_alone() {
        for seed in 0..10 {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut curve = RecentCurve::new(2048, 1.0, HOUR_NS, 1);
            let mut keys = Vec::new();
            let mut now_ns = 0;
            for part in 0..8 {
                let span = 300 + 200 * part;
                let more: Vec<u64> =
                    (0..random.usize(5000..30_000)).map(|_| random.u64(0..span)).collect();
                now_ns = requests(&mut curve, more.iter().copied(), now_ns);
                keys.extend(more);
                let begin = (curve.begin_ns() / (HOUR_NS / 20_000)) as usize;
                let age_ns = now_ns - curve.begin_ns();
                assert!(now_ns < HOUR_NS || (HOUR_NS..=2 * HOUR_NS).contains(&age_ns));
                let mut expected = Curve::with_samples(2048);
                for key in &keys[begin..] {
                    expected.record(*key);
                }
                for size in (10..2000).step_by(90) {
                    let (ratio, wanted) = (curve.ratios().at(size), expected.miss_ratio(size));
                    assert!((ratio - wanted).abs() < 1e-6, "{seed} {part} {size}");
                }
            }
        }
    }

    #[test]
    fn a_scan_of_long_ago_does_not_spoil_the_curve() {
        let mut curve = RecentCurve::new(1024, 1.0, HOUR_NS, 0);
        // A scan leaves few samples of the blocks that are used later.
        let now_ns = requests(&mut curve, (0..60_000).map(|key| 1_000_000 + key), 0);
        let mut random = fastrand::Rng::with_seed(4);
        let hot = (0..70_000).map(|_| random.u64(0..1000));
        requests(&mut curve, hot, now_ns);
        assert!((curve.share() - 1.0).abs() < 1e-9);
        assert!(curve.ratios().at(1100) < 0.05 && curve.ratios().at(500) > 0.4);
        assert!(curve.memory_bytes() < 100 << 10, "{}", curve.memory_bytes());
    }

    #[test]
    fn a_disk_with_few_requests_keeps_its_curve() {
        let mut curve = RecentCurve::new(256, 1.0, HOUR_NS, 1);
        for key in 0..1000 {
            curve.count(1);
            curve.sample(Curve::hash(key % 10), Touch::Request);
            curve.advance(key * HOUR_NS);
        }
        assert_eq!(curve.begin_ns(), 1);
        assert!((curve.ratios().at(11) - 0.01).abs() < 1e-9);
    }
}
