//! The verdicts on devices whose queues follow formulas, and on hostile numbers.

use super::forecast::{all_forecasts, default_forecast};
use super::*;

const MS: u64 = 1_000_000;
const STEP: u64 = 100 * MS;
/// The parallelism of the device in most tests, and the time of a request on it.
const PARALLELISM: f64 = 4.0;
const SERVICE_NS: f64 = 5e6;

/// A device on which times are those of the formula, with exponential times.
struct Device {
    contention: Contention,
    random: fastrand::Rng,
    now_ns: u64,
    parallelism: f64,
}

impl Device {
    fn new(forecast: Box<dyn Forecast>, seed: u64, disks: u64) -> Self {
        let mut contention = Contention::new(ContentionOptions::default(), forecast);
        assert!((0..disks).all(|disk| contention.open(disk)));
        contention.step(0);
        let random = fastrand::Rng::with_seed(seed);
        Self { contention, random, now_ns: 0, parallelism: PARALLELISM }
    }

    fn exponential(&mut self) -> f64 {
        -(1.0 - self.random.f64()).ln()
    }

    /// A number with a Poisson distribution, nearly.
    fn count(&mut self, mean: f64) -> u64 {
        let around = (self.random.f64() + self.random.f64() + self.random.f64() - 1.5) * 2.0;
        (mean + around * mean.sqrt()).round().max(0.0) as u64
    }

    /// A step with these rates of the disks.
    fn step(&mut self, rates: &[f64]) {
        let load: f64 = rates.iter().sum::<f64>() * SERVICE_NS / 1e9;
        let factor = 1.0 / (1.0 - (load / self.parallelism).min(0.97));
        for (disk, rate) in rates.iter().enumerate() {
            let mut batch = Batch::default();
            for request in 0..self.count(rate * 0.1) {
                let is_alone = self.random.f64() * factor < 0.8;
                let queue = if is_alone { 0 } else { (load * factor).round().max(1.0) as u64 };
                let waits = if is_alone { 1.0 } else { factor };
                let time_ns = SERVICE_NS * waits * (0.5 + 0.5 * self.exponential());
                batch.arrive(request % 2 == 0, queue);
                batch.complete(time_ns as u64, queue);
            }
            self.contention.record(disk as u64, &batch);
        }
        self.now_ns += STEP;
        assert!(self.contention.step(self.now_ns));
    }

    fn steps(&mut self, seconds: u64, rates: &[f64]) {
        for _ in 0..seconds * 10 {
            self.step(rates);
        }
    }

    fn state(&self) -> ContentionState {
        self.contention.verdict(0).unwrap().state
    }
}

#[test]
fn a_peak_is_foreseen_and_ends() {
    for seed in 0..20 {
        let mut device = Device::new(default_forecast(), seed, 2);
        device.steps(5, &[100.0, 200.0]);
        assert_eq!(device.state(), ContentionState::Learning);
        device.steps(175, &[100.0, 200.0]);
        assert_eq!(device.state(), ContentionState::Calm, "seed {seed}");
        // A first peak teaches the device's curve.
        device.steps(20, &[100.0, 640.0]);
        assert!(device.contention.is_peak(), "seed {seed}");
        device.steps(60, &[100.0, 200.0]);
        assert_eq!(device.state(), ContentionState::Calm, "seed {seed}");
        let mut first = None;
        for step in 0..100 {
            device.step(&[100.0, 200.0 + 4.4 * f64::from(step)]);
            if first.is_none() && device.contention.is_peak() {
                first = Some(device.contention.verdict(1).unwrap().state);
            }
        }
        assert_eq!(first, Some(ContentionState::Foreseen), "seed {seed}");
        device.steps(30, &[100.0, 200.0]);
        assert!(!device.contention.is_peak(), "seed {seed}");
    }
}

#[test]
fn a_steady_low_load_has_few_false_alarms() {
    let mut alarms = 0;
    for seed in 0..20 {
        let mut device = Device::new(default_forecast(), seed, 2);
        let mut was_peak = false;
        for _ in 0..6000 {
            device.step(&[100.0, 200.0]);
            alarms += u32::from(device.contention.is_peak() && !was_peak);
            was_peak = device.contention.is_peak();
        }
    }
    // In 3.3 hours.
    assert!(alarms <= 6, "{alarms}");
}

#[test]
fn peaks_with_a_short_queue_are_foreseen_each_time() {
    for seed in 0..10 {
        let mut device = Device::new(default_forecast(), seed, 2);
        device.steps(180, &[100.0, 100.0]);
        // The queue stays below the threshold of a low load.
        for peak in 0..8 {
            let found = (0..50).find(|step| {
                device.step(&[100.0, 100.0 + 4.0 * f64::from(*step)]);
                device.contention.is_peak()
            });
            assert!(found.is_some(), "seed {seed}, peak {peak}");
            device.steps(20, &[100.0, 300.0]);
            assert!(device.contention.queue() < 4.5 && device.contention.is_peak());
            device.steps(60, &[100.0, 100.0]);
            assert!(!device.contention.is_peak(), "seed {seed}, peak {peak}");
        }
    }
}

#[test]
fn a_load_that_stays_becomes_usual() {
    let mut device = Device::new(default_forecast(), 13, 2);
    device.steps(600, &[50.0, 100.0]);
    device.steps(60, &[50.0, 250.0]);
    assert!(device.contention.is_peak());
    device.steps(900, &[50.0, 250.0]);
    let calm = (0..600).filter(|_| {
        device.step(&[50.0, 250.0]);
        !device.contention.is_peak()
    });
    assert!(calm.count() > 550);
}

#[test]
fn the_parallelism_is_fitted_and_that_of_the_paper_stays() {
    for parallelism in [2.0, 4.0, 24.0] {
        let mut device = Device::new(Box::new(forecast::Queue::new(None)), 1, 1);
        device.parallelism = parallelism;
        // The load has to be low at first.
        device.steps(60, &[0.08 * parallelism / SERVICE_NS * 1e9]);
        for round in 0..150 {
            let utilisation = 0.3 + 0.6 * f64::from(round % 10) / 10.0;
            device.steps(2, &[utilisation * parallelism / SERVICE_NS * 1e9]);
        }
        let found = device.contention.parallelism().unwrap();
        assert!((found / parallelism).ln().abs() < 0.3, "{found} of {parallelism}");
    }
    let fixed = forecast::Queue::new(Some(16.0));
    assert_eq!((fixed.parallelism(), fixed.name().as_str()), (Some(16.0), "queue, n = 16"));
}

#[test]
fn a_bad_model_is_not_used_and_the_verdict_reports_it() {
    /// Predicts ten times too much.
    struct Bad(Box<dyn Forecast>);
    impl Forecast for Bad {
        fn name(&self) -> String {
            "bad".into()
        }
        fn step(&mut self, load: f64, seconds: f64) {
            self.0.step(load, seconds);
        }
        fn learn(&mut self, sample: Sample, service_ns: f64) {
            self.0.learn(sample, service_ns);
        }
        fn predict(&self, base: &Base, headroom: f64) -> Option<Prediction> {
            let found = self.0.predict(base, headroom)?;
            Some(Prediction { mean_ns: found.mean_ns, p90_ns: 10.0 * found.p90_ns })
        }
        fn parallelism(&self) -> Option<f64> {
            None
        }
    }
    use forecast::{Base, Prediction};
    let mut device = Device::new(Box::new(Bad(default_forecast())), 3, 1);
    device.steps(120, &[300.0]);
    let verdict = *device.contention.verdict(0).unwrap();
    assert_eq!(
        (verdict.source, verdict.state),
        (VerdictBasis::Observed, ContentionState::Calm),
        "{verdict:?}"
    );
    assert!(verdict.errors.p90 > 0.6);
    // What is observed still counts.
    device.steps(20, &[720.0]);
    assert_eq!(device.state(), ContentionState::Contended);
}

#[test]
fn a_quiet_queue_contradicts_a_high_rate() {
    // Requests that follow each other: ten times as many, each in a tenth of the time.
    let mut device = Device::new(default_forecast(), 5, 1);
    device.steps(120, &[300.0]);
    for _ in 0..100 {
        let mut batch = Batch::default();
        for _ in 0..150 {
            batch.arrive(true, 0);
            batch.complete(300_000, 0);
        }
        device.contention.record(0, &batch);
        device.now_ns += STEP;
        device.contention.step(device.now_ns);
        assert_eq!(device.state(), ContentionState::Calm);
    }
}

#[test]
fn a_full_queue_is_a_peak_although_all_requests_take_equally_long() {
    let mut device = Device::new(default_forecast(), 11, 1);
    device.steps(120, &[300.0]);
    for _ in 0..40 {
        let mut batch = Batch::default();
        for request in 0..40 {
            batch.arrive(request % 2 == 0, 32);
            batch.complete(80 * MS, 32);
        }
        device.contention.record(0, &batch);
        device.now_ns += STEP;
        device.contention.step(device.now_ns);
    }
    assert_eq!(device.state(), ContentionState::Contended);
}

#[test]
fn what_is_carried_keeps_the_peak() {
    let mut device = Device::new(default_forecast(), 7, 2);
    device.steps(120, &[100.0, 200.0]);
    device.steps(20, &[100.0, 640.0]);
    assert!(device.contention.is_peak());
    // The second disk's load is carried elsewhere: the device is quiet.
    for _ in 0..600 {
        device.contention.record(1, &Batch { carried: 64, ..Batch::default() });
        device.step(&[100.0, 0.0]);
    }
    assert!(device.contention.is_peak(), "without redirection there would be a peak");
    // The peak ends, whether another one is foreseen by chance or not.
    let calm = (0..300).filter(|_| {
        device.step(&[100.0, 200.0]);
        !device.contention.is_peak()
    });
    assert!(calm.count() > 100);
}

#[test]
fn the_disk_with_the_greatest_deviation_and_the_most_hits_is_chosen() {
    let mut device = Device::new(default_forecast(), 9, 3);
    let with_hits = |reads: f64| Carriable { reads, writes: 1.0 };
    assert_eq!(device.contention.choose(|_| with_hits(1.0)), None);
    device.steps(120, &[100.0, 100.0, 100.0]);
    device.steps(20, &[240.0, 240.0, 240.0]);
    let contention = &device.contention;
    // Half of the requests are writes, which can be carried.
    let choice = contention.choose(|disk| with_hits([0.0, 1.0, 0.3][disk as usize])).unwrap();
    assert!(choice.disk == 1 && choice.share > 0.9 && choice.excess_ns > 0, "{choice:?}");
    assert!((0.2..0.5).contains(&choice.relief), "{choice:?}");
    let choice = contention.choose(|disk| with_hits([0.0, f64::NAN, 0.9][disk as usize])).unwrap();
    assert!(choice.disk == 2 && choice.share < 1.0, "{choice:?}");
    // Only the disks that can be carried are chosen.
    let only = |disk| if disk == 0 { with_hits(0.0) } else { Carriable::default() };
    assert_eq!(contention.choose(only).unwrap().disk, 0);
    assert_eq!(contention.choose(|_| Carriable::default()), None);
}

#[test]
fn hostile_numbers_and_clocks_leave_finite_verdicts() {
    for seed in 0..60 {
        for forecast in all_forecasts() {
            let mut random = fastrand::Rng::with_seed(seed);
            let options = ContentionOptions {
                headroom: [0.1, f64::NAN, f64::INFINITY][random.usize(..3)],
                window_ns: random.u64(..) >> random.u32(..64),
                step_ns: random.u64(..) >> random.u32(..64),
                ..ContentionOptions::default()
            };
            let mut contention = Contention::new(options, forecast);
            let mut now_ns = random.u64(..) >> random.u32(..64);
            for _ in 0..120 {
                let disk = random.u64(..4);
                match random.u8(..16) {
                    0 => contention.close(disk),
                    1 | 2 => assert!(contention.open(disk)),
                    _ => {}
                }
                let mut number = || random.u64(..) >> random.u32(..64);
                let mut batch = Batch {
                    reads: number(),
                    writes: number(),
                    carried: number(),
                    queue_sum: number(),
                    time_sum_ns: number(),
                    alone: number(),
                    alone_sum_ns: number(),
                    ..Batch::default()
                };
                for _ in 0..4 {
                    batch.times_ns.record(number(), number());
                }
                contention.record(disk, &batch);
                now_ns = match number() % 8 {
                    0 => number(),
                    1 => now_ns,
                    _ => now_ns.saturating_add(number() % (10 * STEP)),
                };
                contention.step(now_ns);
                assert!(contention.load().is_finite() && contention.queue().is_finite());
                for (_, verdict) in contention.verdicts() {
                    let errors = [verdict.errors, verdict.totals];
                    assert!(errors.iter().all(|it| it.mean.is_finite() && it.p90.is_finite()));
                    assert!(
                        verdict.predicted.is_none_or(|times| times.p90_ns <= 3_600_000_000_000)
                    );
                }
                let hits = [0.5, f64::NAN, -1.0][(number() % 3) as usize];
                if let Some(choice) = contention.choose(|_| Carriable { reads: hits, writes: hits })
                {
                    assert!((0.0..=1.0).contains(&choice.share), "{choice:?}");
                    assert!((0.0..=1.0).contains(&choice.relief), "{choice:?}");
                }
            }
        }
    }
}

#[test]
fn a_million_disks_are_limited() {
    let mut contention = Contention::new(ContentionOptions::default(), default_forecast());
    let opened = (0..1_000_000).filter(|disk| contention.open(*disk)).count();
    assert_eq!(opened, DISKS_MAX);
    assert!(contention.open(0) && !contention.open(1_000_000));
    contention.record(1_000_000, &Batch::default());
    contention.close(0);
    assert!(contention.open(1_000_000));
    contention.step(0);
    assert!(contention.step(STEP));
    assert_eq!(contention.verdicts().count(), DISKS_MAX);
}

#[test]
fn time_that_stands_still_makes_no_step() {
    let mut contention = Contention::new(ContentionOptions::default(), default_forecast());
    assert!(contention.open(1) && !contention.step(5 * STEP));
    let mut batch = Batch::default();
    batch.arrive(true, 0);
    contention.record(1, &batch);
    for _ in 0..1000 {
        assert!(!contention.step(5 * STEP));
    }
    // The clock goes back: time begins again.
    assert!(!contention.step(STEP) && !contention.step(STEP + 1));
    assert!(contention.step(2 * STEP));
    assert_eq!(contention.verdict(1).unwrap().state, ContentionState::Learning);
}
