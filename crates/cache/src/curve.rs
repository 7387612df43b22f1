//! Miss-ratio curves: the share of requests that miss an LRU cache, for every size of the cache,
//! from one pass over the keys in a fixed amount of memory.
//!
//! The method is SHARDS (Waldspurger and others, FAST 2015) with a fixed number of samples: only
//! keys whose hash is below a threshold are followed, and the threshold falls when there are too
//! many of them. The stack distance of a sampled request is the number of sampled keys since the
//! last request for its key, divided by the share of keys that are sampled. A Fenwick tree over the
//! order of the last requests counts them.

use crate::hash;

/// The samples of [`Curve::new`]: a curve takes less than 84 KiB.
const SAMPLES: usize = 2048;
/// The samples of [`Curve::precise`], at most.
const SAMPLES_MAX: usize = 1 << 18;
/// The buckets of distances for each power of two, at least and at most, and the samples for each
/// of them: with more samples, distances are known more exactly.
const STEPS_MIN: usize = 16;
const STEPS_MAX: usize = 1024;
const SAMPLES_OF_STEP: usize = 128;
/// The powers of two that distances have; greater distances count as the greatest.
const OCTAVES: u64 = 32;

/// The miss-ratio curve of a stream of requests for blocks.
///
/// A call of [`record`](Self::record) takes some nanoseconds on average, because few keys are
/// sampled.
#[derive(Clone, Debug)]
pub struct Curve {
    samples_max: usize,
    /// Keys with a hash below this one are sampled.
    threshold: u64,
    /// The hashes of the sampled keys (0: free), in a table with linear probing.
    hashes: Vec<u64>,
    /// For each place of the table, when its key was last requested: its position in the order.
    positions: Vec<u32>,
    /// For each place of the table, the requests for its key.
    counts: Vec<u16>,
    samples: usize,
    /// The Fenwick tree over the positions: 1 for the last request of each sampled key.
    tree: Vec<u32>,
    /// The next position.
    next: u32,
    ratios: MissRatios,
}

/// The miss ratios of a curve, without what is needed to continue it.
#[derive(Clone, Debug)]
pub struct MissRatios {
    scale: Scale,
    /// The requests by stack distance.
    distances: Vec<f64>,
    /// The least and the greatest distance in each bucket.
    spans: Vec<(u32, u32)>,
    /// The sampled requests, each with the requests that it stands for.
    weight: f64,
    /// How much the choice of the samples can change of `weight`: the variance, by stack distance,
    /// and in all. A key with many requests has a large part of it.
    variances: Vec<f32>,
    variance: f64,
    /// All requests.
    requests: f64,
}

impl Default for Curve {
    fn default() -> Self {
        Self::new()
    }
}

impl Curve {
    /// An empty curve of less than 84 KiB.
    pub fn new() -> Self {
        Self::with_samples(SAMPLES)
    }

    /// An empty curve that is exact to a 1024th of the size for up to 262,144 keys, and close to it
    /// for more. It takes up to 12 MiB.
    pub fn precise() -> Self {
        Self::with_samples(SAMPLES_MAX)
    }

    /// An empty curve that follows at most `samples` keys, from 16 to 262,144. More keys have a
    /// smaller error; see `docs/cache.md`.
    pub fn with_samples(samples: usize) -> Self {
        Self::with_share(samples, 1.0)
    }

    /// The same, but from the first request on only this share of the keys is followed, from 0 to
    /// 1. Most requests then cost a comparison.
    pub fn with_share(samples: usize, share: f64) -> Self {
        let samples_max = samples.clamp(16, SAMPLES_MAX);
        let places = (samples_max * 3 / 2).next_power_of_two();
        let steps = (samples_max / SAMPLES_OF_STEP).next_power_of_two();
        let steps = steps.clamp(STEPS_MIN, STEPS_MAX) as u64;
        let buckets = (steps * (OCTAVES + 1)) as usize;
        Self {
            samples_max,
            threshold: ((u64::MAX as f64 * share) as u64).max(1 << 32),
            hashes: vec![0; places],
            positions: vec![0; places],
            counts: vec![0; places],
            samples: 0,
            tree: vec![0; 2 * samples_max + 1],
            next: 0,
            ratios: MissRatios {
                scale: Scale(steps),
                distances: vec![0.0; buckets],
                spans: vec![(u32::MAX, 0); buckets],
                weight: 0.0,
                variances: vec![0.0; buckets],
                variance: 0.0,
                requests: 0.0,
            },
        }
    }

    /// Counts a request for the block of `key`.
    pub fn record(&mut self, key: u64) {
        self.count(1);
        self.sample(Self::hash(key), Touch::Request);
    }

    /// The hash of a key, by which [`sample`](Self::sample) knows it.
    #[inline]
    pub fn hash(key: u64) -> u64 {
        hash(key).max(1)
    }

    /// Hashes from this one on are not followed. It only falls.
    pub fn threshold(&self) -> u64 {
        self.threshold
    }

    /// Counts requests, whether their keys are followed or not. Each request is counted once, and
    /// passed to [`sample`](Self::sample) if its hash is below the threshold.
    pub fn count(&mut self, requests: u64) {
        self.ratios.requests += requests as f64;
    }

    /// Notes what happens to the key with this hash, if it is followed.
    pub fn sample(&mut self, hash: u64, touch: Touch) {
        if hash >= self.threshold {
            return;
        }
        match touch {
            Touch::Request => self.touch(hash, true),
            Touch::Insertion => self.touch(hash, false),
            Touch::Removal => self.remove(hash),
        }
    }

    fn touch(&mut self, hash: u64, is_request: bool) {
        if self.next as usize == self.tree.len() - 1 {
            self.renumber();
        }
        let weight = self.weight_of_sample();
        let place = self.place(hash);
        let is_known = self.hashes[place] == hash;
        let count = if is_known { self.counts[place] } else { 0 };
        self.counts[place] = count.saturating_add(u16::from(is_request));
        let variance = weight * (weight - 1.0) * f64::from(self.counts[place]);
        if is_request {
            self.ratios.weight += weight;
            self.ratios.variance += variance;
        }
        if is_known {
            let position = self.positions[place];
            if is_request {
                let between = self.samples - self.count_up_to(position);
                self.ratios.hit((between as f64 * weight) as u64, weight, variance);
            }
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

    /// Forgets a key: its next request misses every cache.
    fn remove(&mut self, hash: u64) {
        let mut hole = self.place(hash);
        if self.hashes[hole] != hash {
            return;
        }
        self.add(self.positions[hole], false);
        self.samples -= 1;
        // Entries that would not be found any more behind the hole move into it.
        let mask = self.hashes.len() - 1;
        let mut place = hole;
        loop {
            place = (place + 1) & mask;
            let other = self.hashes[place];
            if other == 0 {
                break;
            }
            let way = place.wrapping_sub(other as usize) & mask;
            if way >= place.wrapping_sub(hole) & mask {
                self.hashes[hole] = other;
                self.positions[hole] = self.positions[place];
                self.counts[hole] = self.counts[place];
                hole = place;
            }
        }
        self.hashes[hole] = 0;
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
            count += self.tree[index] as usize;
            index &= index - 1;
        }
        count
    }

    /// Drops a quarter of the sampled keys.
    fn lower_threshold(&mut self) {
        self.threshold = self.threshold / 4 * 3;
        let kept: Vec<(u64, u32, u16)> =
            self.entries().filter(|(hash, ..)| *hash < self.threshold).collect();
        self.hashes.fill(0);
        self.samples = kept.len();
        for (hash, position, count) in kept {
            let place = self.place(hash);
            self.hashes[place] = hash;
            (self.positions[place], self.counts[place]) = (position, count);
        }
        self.renumber();
    }

    /// The sampled keys: the hash, the position, the requests.
    fn entries(&self) -> impl Iterator<Item = (u64, u32, u16)> {
        let places = self.hashes.iter().zip(&self.positions).zip(&self.counts);
        let all = places.map(|((hash, position), count)| (*hash, *position, *count));
        all.filter(|(hash, ..)| *hash != 0)
    }

    /// Gives the sampled keys the first positions, in their order.
    fn renumber(&mut self) {
        let mut order: Vec<(u32, u64)> =
            self.entries().map(|(hash, position, _)| (position, hash)).collect();
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
        self.ratios.requests
    }

    /// The share of the keys that is followed, from 0 to 1.
    pub fn share(&self) -> f64 {
        1.0 / self.weight_of_sample()
    }

    /// The miss ratios so far.
    pub fn ratios(&self) -> &MissRatios {
        &self.ratios
    }

    /// See [`MissRatios::at`].
    pub fn miss_ratio(&self, blocks: u64) -> f64 {
        self.ratios.at(blocks)
    }

    /// See [`MissRatios::points`].
    pub fn points(&self) -> Vec<(u64, f64)> {
        self.ratios.points()
    }

    /// Multiplies what was counted so far by `factor`, so that later requests weigh more. The order
    /// of the keys is kept.
    pub fn decay(&mut self, factor: f64) {
        let factor = factor.clamp(0.0, 1.0);
        self.ratios.distances.iter_mut().for_each(|count| *count *= factor);
        self.ratios.variances.iter_mut().for_each(|count| *count *= factor as f32);
        self.ratios.weight *= factor;
        self.ratios.variance *= factor;
        self.ratios.requests *= factor;
    }

    /// The memory of the curve, in bytes.
    pub fn memory_bytes(&self) -> usize {
        size_of::<Self>()
            + size_of_val(&self.hashes[..])
            + size_of_val(&self.positions[..])
            + size_of_val(&self.counts[..])
            + size_of_val(&self.tree[..])
            + size_of_val(&self.ratios.distances[..])
            + size_of_val(&self.ratios.spans[..])
            + size_of_val(&self.ratios.variances[..])
    }
}

impl MissRatios {
    /// Counts a sampled request with this distance.
    fn hit(&mut self, distance: u64, weight: f64, variance: f64) {
        let bucket = self.scale.bucket(distance);
        self.distances[bucket] += weight;
        self.variances[bucket] += variance as f32;
        let distance = u32::try_from(distance).unwrap_or(u32::MAX);
        let (least, greatest) = self.spans[bucket];
        self.spans[bucket] = (least.min(distance), greatest.max(distance));
    }

    /// The number of requests.
    pub fn requests(&self) -> f64 {
        self.requests
    }

    /// The share of requests that would miss an LRU cache of this number of blocks; 1 without any
    /// requests.
    pub fn at(&self, blocks: u64) -> f64 {
        let end = self.scale.bucket(blocks);
        let below: f64 = (0..end).map(|index| self.hits(index)).sum();
        // In the bucket in which the size lies, distances count as evenly spread.
        let (least, greatest) = self.spans[end];
        let wanted = blocks.saturating_sub(least.into()) as f64;
        let width = f64::from(greatest.saturating_sub(least)) + 1.0;
        self.ratio(below + self.hits(end) * (wanted / width).min(1.0), blocks)
    }

    /// The requests whose distance lies in a bucket.
    ///
    /// The sampled keys have more or fewer requests than they stand for. The difference is most
    /// likely to belong where the choice of the samples matters most: each bucket, and the first
    /// requests, get the part of it that they have of the variance. What is missing beyond the
    /// standard deviation belongs to keys that are requested so often that none like them was
    /// sampled, and has the smallest distance. (SHARDS-adj gives all of the difference the smallest
    /// distance, which is wrong where most keys are requested rarely.)
    fn hits(&self, bucket: usize) -> f64 {
        let difference = self.requests - self.weight;
        // The counts of a key's requests are 1, 2, and so on: their sum is half of the square.
        let likely = difference.min((2.0 * self.variance).sqrt());
        let part = match self.variance {
            variance if variance > 0.0 => f64::from(self.variances[bucket]) / variance,
            _ => 0.0,
        };
        let rest = if bucket == 0 { difference - likely } else { 0.0 };
        (self.distances[bucket] + likely * part + rest).max(0.0)
    }

    /// The miss ratio of a size, given the hits.
    fn ratio(&self, hits: f64, blocks: u64) -> f64 {
        if self.requests <= 0.0 || blocks == 0 {
            return 1.0;
        }
        (1.0 - hits / self.requests).clamp(0.0, 1.0)
    }

    /// The curve at the sizes between which it falls evenly: the number of blocks, and the miss
    /// ratio.
    pub fn points(&self) -> Vec<(u64, f64)> {
        let mut points = vec![(0, 1.0)];
        let mut hits = 0.0;
        for (index, (least, greatest)) in self.spans.iter().enumerate() {
            let count = self.hits(index);
            if count <= 0.0 {
                continue;
            }
            let (least, end) =
                (u64::from(*least).min((*greatest).into()), u64::from(*greatest) + 1);
            if points.last().is_some_and(|(size, _)| *size < least) {
                points.push((least, self.ratio(hits, least)));
            }
            hits += count;
            points.push((end, self.ratio(hits, end)));
        }
        points
    }

    /// The curve as at most `count` points (at least two): those between which a straight line is
    /// closest to it.
    pub fn points_within(&self, count: usize) -> Vec<(u64, f64)> {
        simplify(&self.points(), count.max(2))
    }
}

/// At most `count` of the points. From the ends on, the point is added that is farthest from the
/// line between its neighbours.
fn simplify(points: &[(u64, f64)], count: usize) -> Vec<(u64, f64)> {
    if points.len() <= count {
        return points.to_vec();
    }
    // The greatest error between two chosen points, and its place.
    let farthest = |from: usize, to: usize| -> (f64, usize) {
        let ((x0, y0), (x1, y1)) = (points[from], points[to]);
        let slope = (y1 - y0) / (x1.saturating_sub(x0)).max(1) as f64;
        let error = |at: usize| (points[at].1 - y0 - slope * (points[at].0 - x0) as f64).abs();
        let places = (from + 1..to).map(|at| (error(at), at));
        places.max_by(|left, right| left.0.total_cmp(&right.0)).unwrap_or((0.0, from))
    };
    let last = points.len() - 1;
    let mut chosen = vec![(0, farthest(0, last)), (last, (0.0, last))];
    while chosen.len() < count {
        let by_error = |left: &usize, right: &usize| {
            let error = |index: usize| (chosen[index].1).0;
            error(*left).total_cmp(&error(*right))
        };
        let Some(index) = (0..chosen.len() - 1).max_by(by_error) else { break };
        let (from, (error, at)) = chosen[index];
        if error <= 0.0 {
            break;
        }
        let to = chosen[index + 1].0;
        chosen[index].1 = farthest(from, at);
        chosen.insert(index + 1, (at, farthest(at, to)));
    }
    chosen.into_iter().map(|(at, _)| points[at]).collect()
}

/// What happens to a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Touch {
    /// It is requested.
    Request,
    /// It comes into the cache without a request that could hit, as by a write.
    Insertion,
    /// It leaves any cache, as by a discard.
    Removal,
}

/// The buckets of distances: so many for each power of two, which is a power of two, too.
#[derive(Clone, Copy, Debug)]
struct Scale(u64);

impl Scale {
    /// The bucket of a distance.
    fn bucket(self, distance: u64) -> usize {
        let Self(steps) = self;
        let distance = distance.min((1 << OCTAVES) - 1);
        if distance < steps {
            return distance as usize;
        }
        let shift = u64::from(distance.ilog2()) - u64::from(steps.ilog2());
        (steps * shift + (distance >> shift)) as usize
    }
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
            for blocks in 1..2 * STEPS_MIN as u64 {
                let (expected, ratio) = (exact.miss_ratio(blocks), curve.miss_ratio(blocks));
                assert!((expected - ratio).abs() < 1e-9, "{seed}, {blocks}: {expected} {ratio}");
            }
        }
    }

    /// The keys in the order of their last requests, and the distances of the requests.
    #[derive(Default)]
    struct Stack {
        keys: Vec<u64>,
        distances: Vec<usize>,
        requests: u64,
    }

    impl Stack {
        fn touch(&mut self, key: u64, touch: Touch) {
            let place = self.keys.iter().position(|other| *other == key);
            place.map(|place| self.keys.remove(place));
            if touch == Touch::Request {
                self.requests += 1;
                self.distances.extend(place);
            }
            if touch != Touch::Removal {
                self.keys.insert(0, key);
            }
        }

        fn miss_ratio(&self, blocks: u64) -> f64 {
            let hits = self.distances.iter().filter(|distance| **distance < blocks as usize);
            1.0 - hits.count() as f64 / self.requests as f64
        }
    }

    #[test]
    fn insertions_and_removals_are_as_in_a_plain_stack() {
        for seed in 0..40 {
            let mut random = fastrand::Rng::with_seed(seed);
            let (mut curve, mut stack) = (Curve::with_samples(64), Stack::default());
            let keys = 8 << (seed % 4);
            for _ in 0..4000 {
                let key = random.u64(0..keys);
                let touch = match random.u32(0..10) {
                    0 => Touch::Removal,
                    1 | 2 => Touch::Insertion,
                    _ => Touch::Request,
                };
                stack.touch(key, touch);
                curve.count(u64::from(touch == Touch::Request));
                curve.sample(Curve::hash(key), touch);
                assert_eq!(curve.samples, stack.keys.len());
            }
            for blocks in 1..2 * STEPS_MIN as u64 {
                let (expected, ratio) = (stack.miss_ratio(blocks), curve.miss_ratio(blocks));
                assert!((expected - ratio).abs() < 1e-9, "{seed}, {blocks}: {expected} {ratio}");
            }
        }
    }

    #[test]
    fn a_share_of_the_keys_is_followed_from_the_start() {
        for (samples, mean_max, most_max) in [(2048, 0.015, 0.06), (1024, 0.03, 0.08)] {
            let mut errors = Vec::new();
            for seed in 0..8 {
                let keys = workload(seed, 300_000, 40_000);
                let mut curve = Curve::with_share(samples, samples as f64 / 2.0 / 16_384.0);
                for key in &keys {
                    curve.record(*key);
                }
                let exact = Exact::of(&keys);
                let sizes = (4..40).map(|step| step * 1024);
                let error = |size| (exact.miss_ratio(size) - curve.miss_ratio(size)).abs();
                errors.extend(sizes.map(error));
            }
            let mean = errors.iter().sum::<f64>() / errors.len() as f64;
            let most = errors.into_iter().fold(0.0, f64::max);
            println!("{samples} samples: mean error {mean:.4}, greatest error {most:.4}");
            assert!(mean < mean_max && most < most_max, "{samples}: {mean} {most}");
        }
    }

    #[test]
    fn few_points_are_close_to_all() {
        let keys = workload(3, 100_000, 20_000);
        let mut curve = Curve::new();
        for key in &keys {
            curve.record(*key);
        }
        let (all, few) = (curve.points(), curve.ratios().points_within(48));
        assert!(all.len() > 100 && few.len() == 48, "{} {}", all.len(), few.len());
        assert!(few.first() == all.first() && few.last() == all.last());
        for (size, ratio) in &all {
            let at = few.partition_point(|(other, _)| other < size);
            let ((x1, y1), (x0, y0)) = (few[at], few[at.saturating_sub(1)]);
            let part = (size - x0) as f64 / (x1 - x0).max(1) as f64;
            assert!((y0 + (y1 - y0) * part - ratio).abs() < 0.01, "{size}: {ratio}");
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
            assert!(curve.memory_bytes() <= 84 << 10, "{}", curve.memory_bytes());
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
        let sizes: Vec<u64> = points.iter().map(|(size, _)| *size).collect();
        assert_eq!(sizes, [0, 999, 1000]);
        curve.decay(0.5);
        assert!((curve.requests() - 5000.0).abs() < 1e-9);
        assert!((curve.miss_ratio(1100) - 0.1).abs() < 1e-9);
    }

    /// The least distance of a bucket.
    fn lower_bound(steps: u64, bucket: usize) -> u64 {
        let bucket = bucket as u64;
        if bucket < 2 * steps {
            return bucket;
        }
        let shift = bucket / steps - 1;
        (steps + bucket % steps) << shift
    }

    #[test]
    fn buckets_are_in_order() {
        for steps in [STEPS_MIN as u64, STEPS_MAX as u64] {
            let scale = Scale(steps);
            for distance in (0..10_000).chain((10..OCTAVES).map(|shift| (1 << shift) + 7)) {
                let bucket = scale.bucket(distance);
                let bounds = lower_bound(steps, bucket)..lower_bound(steps, bucket + 1);
                assert!(bounds.contains(&distance), "{distance}");
            }
            assert!(scale.bucket(u64::MAX) < (steps * (OCTAVES + 1)) as usize);
        }
    }

    /// Nearly all blocks are requested once or twice, far apart: if few of these are sampled, the
    /// rest are no hits of small caches.
    #[test]
    fn blocks_that_are_requested_rarely_are_no_hits_of_small_caches() {
        let mut errors = Vec::new();
        for seed in 0..20 {
            let mut random = fastrand::Rng::with_seed(seed);
            let keys: Vec<u64> =
                (0..150_000).map(|_| seed << 40 | random.u64(0..100_000)).collect();
            let mut curve = Curve::new();
            for key in &keys {
                curve.record(*key);
            }
            let exact = Exact::of(&keys);
            for size in (1..40).map(|percent| percent * 1000) {
                errors.push((exact.miss_ratio(size) - curve.miss_ratio(size)).abs());
            }
        }
        let most = errors.iter().copied().fold(0.0, f64::max);
        let mean = errors.iter().sum::<f64>() / errors.len() as f64;
        println!("mean error {mean:.4}, greatest error {most:.4}");
        assert!(mean < 0.008 && most < 0.04, "{mean} {most}");
    }

    #[test]
    fn a_precise_curve_is_close_at_every_size() {
        // A loop, whose curve falls at one size, and scans among requests with a skew.
        for keys in [
            (0..300_000).map(|number| number % 60_000).collect(),
            workload(3, 400_000, 80_000),
            workload(5, 600_000, 400_000),
        ] {
            let mut curve = Curve::precise();
            for key in &keys {
                curve.record(*key);
            }
            assert!(curve.memory_bytes() < 12 << 20, "{}", curve.memory_bytes());
            let exact = Exact::of(&keys);
            let distinct = keys.iter().collect::<std::collections::HashSet<_>>().len() as u64;
            for size in (1..=100).map(|percent| distinct * percent / 100) {
                let (ratio, expected) = (curve.miss_ratio(size), exact.miss_ratio(size));
                assert!((ratio - expected).abs() < 0.01, "{size}: {ratio} {expected}");
            }
        }
    }
}
