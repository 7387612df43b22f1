//! Every predictor, on periods by seed and on extreme values.

use super::*;

const MS: u64 = 1_000_000;

/// The wait until a step may begin, as a caller that asks again experiences it; `None` if it takes
/// more than a minute.
fn begins_at(predictor: &dyn Predictor, step_ns: u64) -> Option<u64> {
    let mut idle_ns = 0;
    for _ in 0..1000 {
        let wait_ns = predictor.wait_ns(idle_ns, step_ns);
        if wait_ns == 0 {
            return Some(idle_ns);
        }
        idle_ns = idle_ns.saturating_add(wait_ns);
        if idle_ns > 60_000 * MS {
            return None;
        }
    }
    panic!("{} does not decide", predictor.name());
}

#[test]
fn every_predictor_ends_its_wait_whatever_the_periods_were() {
    for seed in 0..40 {
        for mut predictor in all_predictors() {
            let mut random = fastrand::Rng::with_seed(seed);
            for _ in 0..500 {
                let length_ns = match random.u8(..8) {
                    0 => 0,
                    1 => u64::MAX,
                    _ => 1 << random.u32(..40),
                };
                predictor.ended(length_ns);
                let (idle_ns, step_ns) = (1 << random.u32(..64), 1 << random.u32(..64));
                let wait_ns = predictor.wait_ns(idle_ns, step_ns);
                assert!(wait_ns < 1 << 62, "{}: {wait_ns}", predictor.name());
            }
            let _ = begins_at(&*predictor, 10 * MS);
        }
    }
}

#[test]
fn learned_predictors_wait_out_bursts_and_use_long_periods() {
    // Bursts of 50 requests a few milliseconds apart, then quiet for a second or more.
    for seed in 0..20 {
        let learned: [Box<dyn Predictor>; 4] = [
            Box::new(Quietest::new(SHARE)),
            Box::new(Survival::new(0.1)),
            Box::new(Arrivals::new(0.1)),
            Box::new(Quantile::new(0.95)),
        ];
        for mut predictor in learned {
            let mut random = fastrand::Rng::with_seed(seed);
            for _ in 0..40 {
                for _ in 0..50 {
                    predictor.ended(random.u64(MS..6 * MS));
                }
                predictor.ended(random.u64(1000 * MS..3000 * MS));
            }
            let begins_ns = begins_at(&*predictor, 10 * MS).unwrap();
            let name = predictor.name();
            assert!((3 * MS..100 * MS).contains(&begins_ns), "seed {seed}, {name}: {begins_ns}");
        }
    }
}

#[test]
fn a_step_avoids_the_instant_at_which_requests_come() {
    // Requests come every second, exact to 10 ms.
    let both: [Box<dyn Predictor>; 2] =
        [Box::new(Survival::new(0.1)), Box::new(Quietest::new(0.7))];
    for mut predictor in both {
        let mut random = fastrand::Rng::with_seed(1);
        for _ in 0..500 {
            predictor.ended(random.u64(995 * MS..1005 * MS));
        }
        assert_eq!(predictor.wait_ns(100 * MS, 20 * MS), 0, "{}", predictor.name());
        assert!(predictor.wait_ns(995 * MS, 20 * MS) > 0, "{}", predictor.name());
    }
}
