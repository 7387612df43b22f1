//! Miss-ratio curves: the share of requests that miss an LRU cache, for every size of the cache,
//! from one pass over the keys in a fixed amount of memory.
//!
//! The method is SHARDS (Waldspurger and others, FAST 2015) with a fixed number of samples: only keys
//! whose hash is below a threshold are followed, and the threshold falls when there are too many of
//! them. The stack distance of a sampled request is the number of sampled keys since the last
//! request for its key, divided by the share of keys that are sampled. A Fenwick tree over the
//! order of the last requests counts them.

use crate::hash;

/// The samples of [`Curve::new`]: a curve takes less than 64 KiB.
const SAMPLES: usize = 2048;
/// The buckets of distances for each power of two.
const STEPS: u64 = 16;
/// The powers of two that distances have; greater distances count as the greatest.
const OCTAVES: u64 = 40;

/// The miss-ratio curve of a stream of requests for blocks.
///
/// A call of [`record`](Self::record) takes some nanoseconds on average, because few keys are sampled.
#[derive(Clone, Debug)]
pub struct Curve {
    samples_max: usize,
    /// Keys with a hash below this one are sampled.
    threshold: u64,
    /// The hashes of the sampled keys (0: free), in a table with linear probing.
    hashes: Vec<u64>,
    /// For each place of the table, when its key was last requested: its position in the order.
    positions: Vec<u32>,
    samples: usize,
    /// The Fenwick tree over the positions: 1 for the last request of each sampled key.
    tree: Vec<u16>,
    /// The next position.
    next: u32,
    /// The requests by stack distance.
    distances: Vec<f64>,
    /// The sampled requests, each with the requests that it stands for.
    weight: f64,
    /// All requests.
    requests: f64,
}

impl Default for Curve {
    fn default() -> Self {
        Self::new()
    }
}

impl Curve {
    /// An empty curve of less than 64 KiB.
    pub fn new() -> Self {
        Self::with_samples(SAMPLES)
    }

    /// An empty curve that follows at most `samples` keys, from 16 to 32768. More keys have a
    /// smaller error; see `docs/cache.md`.
    pub fn with_samples(samples: usize) -> Self {
        let samples_max = samples.clamp(16, 1 << 15);
        let places = (samples_max * 3 / 2).next_power_of_two();
        Self {
            samples_max,
            threshold: u64::MAX,
            hashes: vec![0; places],
            positions: vec![0; places],
            samples: 0,
            tree: vec![0; 2 * samples_max + 1],
            next: 0,
            distances: vec![0.0; (STEPS * (OCTAVES + 1)) as usize],
            weight: 0.0,
            requests: 0.0,
        }
    }

    /// Counts a request for the block of `key`.
    pub fn record(&mut self, key: u64) {
        self.requests += 1.0;
        let hash = hash(key).max(1);
        if hash < self.threshold {
            self.record_sample(hash);
        }
    }

    fn record_sample(&mut self, hash: u64) {
        if self.next as usize == self.tree.len() - 1 {
            self.renumber();
        }
        let weight = self.weight_of_sample();
        self.weight += weight;
        let place = self.place(hash);
        if self.hashes[place] == hash {
            let position = self.positions[place];
            let between = self.samples - self.count_up_to(position);
            self.distances[bucket((between as f64 * weight) as u64)] += weight;
            self.add(position, false);
        } else {
            self.hashes[place] = hash;
            self.samples += 1;
        }
        self.positions[place] = self.next;
        self.add(self.next, true);
        self.next += 1;
        if self.samples > self.samples_max {
            self.lower_threshold();
        }
    }

    /// The requests that a sampled one stands for.
    fn weight_of_sample(&self) -> f64 {
        u64::MAX as f64 / self.threshold as f64
    }

    /// The place of a hash in the table, or the free place for it.
    fn place(&self, hash: u64) -> usize {
        let mask = self.hashes.len() - 1;
        // The high bits of sampled hashes are all alike.
        let mut place = hash as usize & mask;
        while self.hashes[place] != 0 && self.hashes[place] != hash {
            place = (place + 1) & mask;
        }
        place
    }

    fn add(&mut self, position: u32, is_present: bool) {
        let mut index = position as usize + 1;
        while index < self.tree.len() {
            let count = &mut self.tree[index];
            *count = if is_present { count.wrapping_add(1) } else { count.wrapping_sub(1) };
            index += index & index.wrapping_neg();
        }
    }

    /// The number of sampled keys whose last request has this position or an earlier one.
    fn count_up_to(&self, position: u32) -> usize {
        let (mut index, mut count) = (position as usize + 1, 0);
        while index > 0 {
            count += usize::from(self.tree[index]);
            index &= index - 1;
        }
        count
    }

    /// Drops a quarter of the sampled keys.
    fn lower_threshold(&mut self) {
        self.threshold = self.threshold / 4 * 3;
        let kept: Vec<(u64, u32)> =
            self.entries().filter(|(hash, _)| *hash < self.threshold).collect();
        self.hashes.fill(0);
        self.samples = kept.len();
        for (hash, position) in kept {
            let place = self.place(hash);
            (self.hashes[place], self.positions[place]) = (hash, position);
        }
        self.renumber();
    }

    fn entries(&self) -> impl Iterator<Item = (u64, u32)> {
        let all = self.hashes.iter().copied().zip(self.positions.iter().copied());
        all.filter(|(hash, _)| *hash != 0)
    }

    /// Gives the sampled keys the first positions, in their order.
    fn renumber(&mut self) {
        let mut order: Vec<(u32, u64)> =
            self.entries().map(|(hash, position)| (position, hash)).collect();
        order.sort_unstable();
        self.tree.fill(0);
        self.next = 0;
        for (_, hash) in order {
            let place = self.place(hash);
            self.positions[place] = self.next;
            self.add(self.next, true);
            self.next += 1;
        }
    }

    /// The number of requests.
    pub fn requests(&self) -> f64 {
        self.requests
    }

    /// The share of requests that would miss an LRU cache of this number of blocks; 1 without any
    /// requests.
    pub fn miss_ratio(&self, blocks: u64) -> f64 {
        if self.requests == 0.0 || blocks == 0 {
            return 1.0;
        }
        let end = bucket(blocks);
        let mut hits: f64 = self.distances[..end].iter().sum();
        // A part of the bucket in which the size lies.
        let (low, high) = (lower_bound(end), lower_bound(end + 1));
        hits += self.distances[end] * (blocks - low) as f64 / (high - low).max(1) as f64;
        // The sampled keys have more or fewer requests than others. The difference belongs to keys
        // that are requested often, and so it has the smallest distance (SHARDS-adj).
        hits += self.requests - self.weight;
        (1.0 - hits / self.requests).clamp(0.0, 1.0)
    }

    /// The curve at each size at which it falls: the number of blocks, and the miss ratio.
    pub fn points(&self) -> Vec<(u64, f64)> {
        let filled = self.distances.iter().enumerate().filter(|(_, count)| **count > 0.0);
        let sizes = filled.map(|(index, _)| lower_bound(index + 1));
        std::iter::once(0).chain(sizes).map(|size| (size, self.miss_ratio(size))).collect()
    }

    /// Multiplies what was counted so far by `factor`, so that later requests weigh more. The order
    /// of the keys is kept.
    pub fn decay(&mut self, factor: f64) {
        let factor = factor.clamp(0.0, 1.0);
        self.distances.iter_mut().for_each(|count| *count *= factor);
        self.weight *= factor;
        self.requests *= factor;
    }

    /// The memory of the curve, in bytes.
    pub fn memory_bytes(&self) -> usize {
        size_of::<Self>()
            + size_of_val(&self.hashes[..])
            + size_of_val(&self.positions[..])
            + size_of_val(&self.tree[..])
            + size_of_val(&self.distances[..])
    }
}

/// The bucket of a distance.
fn bucket(distance: u64) -> usize {
    let distance = distance.min((1 << OCTAVES) - 1);
    if distance < STEPS {
        return distance as usize;
    }
    let shift = u64::from(distance.ilog2()) - u64::from(STEPS.ilog2());
    (STEPS * shift + (distance >> shift)) as usize
}

/// The least distance of a bucket.
fn lower_bound(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    if bucket < 2 * STEPS {
        return bucket;
    }
    let shift = bucket / STEPS - 1;
    (STEPS + bucket % STEPS) << shift
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    /// The exact miss ratios of LRU caches of all sizes: a request's distance is counted in a plain
    /// list of flags.
    struct Exact {
        distances: Vec<u64>,
        requests: u64,
    }

    impl Exact {
        fn of(keys: &[u64]) -> Self {
            let mut last: HashMap<u64, usize> = HashMap::new();
            let mut tree = vec![0_i64; keys.len() + 1];
            let mut distances = vec![0; keys.len() + 1];
            let add = |tree: &mut Vec<i64>, index: usize, count: i64| {
                let mut index = index + 1;
                while index < tree.len() {
                    tree[index] += count;
                    index += index & index.wrapping_neg();
                }
            };
            for (time, key) in keys.iter().enumerate() {
                if let Some(before) = last.insert(*key, time) {
                    let (mut index, mut count) = (before + 1, 0);
                    while index > 0 {
                        count += tree[index];
                        index &= index - 1;
                    }
                    distances[last.len() - count as usize] += 1;
                    add(&mut tree, before, -1);
                }
                add(&mut tree, time, 1);
            }
            Self { distances, requests: keys.len() as u64 }
        }

        fn miss_ratio(&self, blocks: u64) -> f64 {
            let hits: u64 = self.distances.iter().take(blocks as usize).sum();
            1.0 - hits as f64 / self.requests as f64
        }
    }

    /// Keys with a skew, and now and then a scan or a loop.
    fn workload(seed: u64, requests: usize, keys: u64) -> Vec<u64> {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut result = Vec::new();
        while result.len() < requests {
            if random.u32(0..2000) == 0 {
                let start = random.u64(0..keys);
                result.extend(start..start + random.u64(1..keys / 5));
            }
            result.push((keys as f64 * random.f64().powi(4)) as u64);
        }
        result
    }

    #[test]
    fn a_curve_of_all_keys_is_exact() {
        for seed in 0..20 {
            let keys = workload(seed, 20_000, 400);
            let mut curve = Curve::new();
            for key in &keys {
                curve.record(*key);
            }
            let exact = Exact::of(&keys);
            for blocks in 1..2 * STEPS {
                let (expected, ratio) = (exact.miss_ratio(blocks), curve.miss_ratio(blocks));
                assert!((expected - ratio).abs() < 1e-9, "{seed}, {blocks}: {expected} {ratio}");
            }
        }
    }

    #[test]
    fn a_curve_of_samples_is_close_in_bounded_memory() {
        let mut worst: f64 = 0.0;
        let mut sum = 0.0;
        for seed in 0..8 {
            let keys = workload(seed, 600_000, 100_000);
            let mut curve = Curve::new();
            for key in &keys {
                curve.record(*key);
            }
            assert!(curve.memory_bytes() <= 64 << 10, "{}", curve.memory_bytes());
            let exact = Exact::of(&keys);
            let sizes: Vec<u64> = (1..=50).map(|step| step * 2500).collect();
            let errors =
                sizes.iter().map(|size| (exact.miss_ratio(*size) - curve.miss_ratio(*size)).abs());
            let (mean, most) = errors.fold((0.0, 0.0_f64), |(sum, most), error| {
                (sum + error / sizes.len() as f64, most.max(error))
            });
            worst = worst.max(most);
            sum += mean;
        }
        println!("mean error {:.4}, greatest error {worst:.4}", sum / 8.0);
        assert!(sum / 8.0 < 0.02 && worst < 0.06, "{} {worst}", sum / 8.0);
    }

    #[test]
    fn the_curve_falls_and_ends_at_the_first_requests_of_keys() {
        let mut curve = Curve::new();
        for round in 0..10 {
            (0..1000).for_each(|key| curve.record(key));
            assert!((curve.requests() - f64::from(round + 1) * 1000.0).abs() < 1e-9);
        }
        assert!((curve.miss_ratio(1100) - 0.1).abs() < 1e-9);
        assert!((curve.miss_ratio(900) - 1.0).abs() < 1e-9);
        let points = curve.points();
        assert!(points.windows(2).all(|pair| pair[0].0 < pair[1].0 && pair[0].1 >= pair[1].1));
        curve.decay(0.5);
        assert!((curve.requests() - 5000.0).abs() < 1e-9);
        assert!((curve.miss_ratio(1100) - 0.1).abs() < 1e-9);
    }

    #[test]
    fn buckets_are_in_order() {
        for distance in (0..10_000).chain((10..OCTAVES).map(|shift| (1 << shift) + 7)) {
            let bucket = bucket(distance);
            assert!(lower_bound(bucket) <= distance && distance < lower_bound(bucket + 1));
        }
        assert!(bucket(u64::MAX) < (STEPS * (OCTAVES + 1)) as usize);
    }
}
