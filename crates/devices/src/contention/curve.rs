//! How times grow with the load of a device: what was seen, and lines through it.
//!
//! The load is in requests that would be in service on average if none waited, the sum of λ·d over
//! the disks. A device with the parallelism n is saturated at the load n. Times are relative to d.

/// The greatest utilisation that a prediction is made for.
const UTILISATION_MAX: f64 = 0.98;
/// Bins for each doubling of the load.
const PER_OCTAVE: f64 = 6.0;
/// The load of the first bin.
const LOAD_MIN: f64 = 1.0 / 1024.0;
/// The parallelism that is searched for.
const PARALLELISM_MIN: f64 = 0.5;
pub(super) const PARALLELISM_MAX: f64 = 256.0;
/// The number of values that the search tries.
const TRIED: usize = 109;
const BINS: usize = 20 * PER_OCTAVE as usize;
/// The number of windows until one has half its weight.
const HALF_LIFE: f64 = 600.0;
/// A bin with less weight than this is not used.
const WEIGHT_MIN: f64 = 0.1;
/// The greatest weight of a bin: the load of most of the time does not outweigh the others.
const WEIGHT_MAX: f64 = 8.0;
/// The weight of the assumption that waiting is that of the paper's formula.
const PRIOR: f64 = 0.002;
/// The assumed slope of the 90th percentile, relative to that of the mean. Exponential times have
/// 2.3.
const P90_SLOPE: f64 = 2.0;

/// The waiting at a load, for each unit of service: u / (1 − u), bounded.
pub(super) fn waiting(load: f64, parallelism: f64) -> f64 {
    let utilisation = (load / parallelism).clamp(0.0, UTILISATION_MAX);
    utilisation / (1.0 - utilisation)
}

/// The averages of the windows with about the same load.
#[derive(Clone, Copy, Debug, Default)]
struct Bin {
    weight: f64,
    load: f64,
    mean: f64,
    p90: f64,
}

/// A window of a device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// The load of the device.
    pub load: f64,
    /// The mean time of a request, relative to that on an idle device.
    pub mean: f64,
    /// The 90th percentile of the times, relative to the same.
    pub p90: f64,
}

/// The windows of a device in bins by load, so that few windows with a high load count as much as
/// many with a low one.
#[derive(Clone, Debug)]
pub(super) struct Curve {
    bins: Vec<Bin>,
}

/// A line over the waiting: what a unit of it adds, and the time without any.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Line {
    pub offset: f64,
    pub slope: f64,
}

/// The curves of a device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Fit {
    pub parallelism: f64,
    pub mean: Line,
    pub p90: Line,
}

impl Curve {
    pub fn new() -> Self {
        Self { bins: vec![Bin::default(); BINS] }
    }

    /// Adds a window.
    pub fn add(&mut self, sample: Sample) {
        let Sample { load, mean, p90 } = sample;
        let is_valid = [load, mean, p90].iter().all(|it| it.is_finite() && *it > 0.0);
        if !is_valid {
            return;
        }
        let kept = (-1.0 / HALF_LIFE).exp2();
        for bin in &mut self.bins {
            bin.weight *= kept;
        }
        let octaves = (load / LOAD_MIN).log2().max(0.0);
        let bin = &mut self.bins[((octaves * PER_OCTAVE) as usize).min(BINS - 1)];
        bin.weight = (bin.weight + 1.0).min(WEIGHT_MAX * 4.0);
        let part = 1.0 / bin.weight;
        bin.load += (load - bin.load) * part;
        bin.mean += (mean - bin.mean) * part;
        bin.p90 += (p90 - bin.p90) * part;
    }

    fn used(&self) -> Vec<Bin> {
        let used = self.bins.iter().filter(|bin| bin.weight >= WEIGHT_MIN);
        used.map(|bin| Bin { weight: bin.weight.min(WEIGHT_MAX), ..*bin }).collect()
    }

    /// The parallelism for which the paper's formula, 1 / (1 − u), fits best; `None` without
    /// windows.
    pub fn parallelism(&self) -> Option<f64> {
        let bins = self.used();
        let error = |parallelism: f64| -> f64 {
            let errors = bins.iter().map(|bin| {
                let predicted = 1.0 + waiting(bin.load, parallelism);
                // Relative, so that a window of a saturated device does not outweigh all others.
                bin.weight * (predicted / bin.mean).ln().abs()
            });
            errors.sum()
        };
        (!bins.is_empty()).then(|| best(error))
    }

    /// The curves that fit best; `None` without windows.
    pub fn fit(&self) -> Option<Fit> {
        let bins = self.used();
        let lines = |parallelism: f64| {
            let line = |slope: f64, value: fn(&Bin) -> f64| {
                let point = |bin: &Bin| (waiting(bin.load, parallelism), value(bin), bin.weight);
                line(bins.iter().map(point), slope)
            };
            (line(1.0, |bin| bin.mean), line(P90_SLOPE, |bin| bin.p90))
        };
        let error = |parallelism: f64| -> f64 {
            let ((mean, mean_error), (p90, p90_error)) = lines(parallelism);
            let prior = mean.slope.ln().powi(2) + (p90.slope / mean.slope / P90_SLOPE).ln().powi(2);
            mean_error + p90_error + PRIOR * prior
        };
        if bins.is_empty() {
            return None;
        }
        let parallelism = best(error);
        let ((mean, _), (p90, _)) = lines(parallelism);
        Some(Fit { parallelism, mean, p90 })
    }
}

/// The parallelism with the least error.
fn best(error: impl Fn(f64) -> f64) -> f64 {
    let factor = (PARALLELISM_MAX / PARALLELISM_MIN).ln() / (TRIED - 1) as f64;
    let tried = (0..TRIED).map(|index| PARALLELISM_MIN * (factor * index as f64).exp());
    let mut found = (f64::INFINITY, PARALLELISM_MAX);
    for parallelism in tried {
        let error = error(parallelism);
        if error < found.0 {
            found = (error, parallelism);
        }
    }
    found.1
}

/// The line through points with weights that has the least mean square of relative errors, and this
/// mean. Its slope is `usual` if the points do not tell.
fn line(points: impl Iterator<Item = (f64, f64, f64)> + Clone, usual: f64) -> (Line, f64) {
    const SLOPES: (f64, f64) = (0.05, 20.0);
    let (mut all, mut x_sum, mut y_sum, mut xx_sum, mut xy_sum) = (0.0, 0.0, 0.0, 0.0, 0.0);
    let relative = |y: f64, weight: f64| weight / (y * y).max(1e-12);
    for (x, y, weight) in points.clone() {
        let weight = relative(y, weight);
        all += weight;
        x_sum += weight * x;
        y_sum += weight * y;
        xx_sum += weight * x * x;
        xy_sum += weight * x * y;
    }
    let (x_mean, y_mean) = (x_sum / all, y_sum / all);
    let variance = xx_sum / all - x_mean * x_mean;
    let slope = if variance > 1e-9 { (xy_sum / all - x_mean * y_mean) / variance } else { usual };
    let slope = if slope.is_finite() { slope.clamp(SLOPES.0, SLOPES.1) } else { usual };
    // No request takes less than no time.
    let offset = (y_mean - slope * x_mean).max(0.05);
    let offset = if offset.is_finite() { offset } else { 1.0 };
    let (mut error, mut weights) = (0.0, 0.0);
    for (x, y, weight) in points {
        error += weight * ((offset + slope * x) / y.max(1e-6) - 1.0).powi(2);
        weights += weight;
    }
    (Line { offset, slope }, error / weights)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parallelism_of_a_device_is_found_from_noisy_windows() {
        for seed in 0..60 {
            let mut random = fastrand::Rng::with_seed(seed);
            let parallelism = 2_f64.powf(6.0 * random.f64());
            let (slope, offset) = (0.4 + random.f64(), 0.8 + 0.4 * random.f64());
            let (mut paper, mut curve) = (Curve::new(), Curve::new());
            for _ in 0..600 {
                let load = parallelism * (0.1 + 0.85 * random.f64());
                let noise = 0.9 + 0.2 * random.f64();
                let found = waiting(load, parallelism);
                let mean = 1.0 + found;
                paper.add(Sample { load, mean: mean * noise, p90: 2.3 * mean * noise });
                let mean = (offset + slope * found) * noise;
                let p90 = (1.5 + 2.0 * slope * found) * noise;
                curve.add(Sample { load, mean, p90 });
            }
            let found = paper.parallelism().unwrap() / parallelism;
            assert!((found - 1.0).abs() < 0.1, "seed {seed}: {found} of {parallelism}");
            let fit = curve.fit().unwrap();
            for utilisation in [0.3, 0.6, 0.85] {
                let load = utilisation * parallelism;
                let expected = offset + slope * waiting(load, parallelism);
                let predicted = fit.mean.offset + fit.mean.slope * waiting(load, fit.parallelism);
                let error = predicted / expected - 1.0;
                assert!(error.abs() < 0.25, "seed {seed}, {utilisation}: {error}, {fit:?}");
            }
        }
    }

    #[test]
    fn any_windows_give_finite_curves() {
        for seed in 0..200 {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut curve = Curve::new();
            assert_eq!((curve.parallelism(), curve.fit()), (None, None));
            for _ in 0..random.usize(1..40) {
                let mut number = || match random.u8(..8) {
                    0 => 0.0,
                    1 => f64::NAN,
                    2 => f64::INFINITY,
                    3 => -1.0,
                    4 => f64::MIN_POSITIVE,
                    _ => 2_f64.powf(80.0 * random.f64() - 40.0),
                };
                let (load, mean, p90) = (number(), number(), number());
                curve.add(Sample { load, mean, p90 });
                if let (Some(parallelism), Some(fit)) = (curve.parallelism(), curve.fit()) {
                    let bounds = PARALLELISM_MIN * 0.99..=PARALLELISM_MAX * 1.01;
                    assert!(bounds.contains(&parallelism) && bounds.contains(&fit.parallelism));
                    for line in [fit.mean, fit.p90] {
                        assert!(line.offset.is_finite() && line.offset > 0.0, "seed {seed}");
                        assert!(line.slope.is_finite() && line.slope > 0.0, "seed {seed}");
                    }
                }
            }
        }
    }
}
