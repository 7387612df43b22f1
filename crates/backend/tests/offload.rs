//! The layer `offload` relieves a device that two disks share, in simulated time: when the load of
//! one grows, the forecast starts it, and the times of the other are less than without.

#[allow(dead_code, reason = "the benchmarks use the other parts")]
#[path = "support/replay.rs"]
mod replay;

#[allow(dead_code, reason = "the benchmarks use the other parts")]
#[path = "support/consolidate.rs"]
mod consolidate;

#[allow(dead_code, reason = "the benchmarks use the other parts")]
#[path = "support/offloaded.rs"]
mod offloaded;

use consolidate::{Arrivals, Load, Peak, SECOND, merge};
use fathom_backend::model::{HddParameters, Model, SsdParameters};
use fathom_layers::offload::CarryKind;
use offloaded::{Moment, Rig, Sizes};

const PEAK: Peak =
    Peak { start_ns: 60 * SECOND, ramp_ns: 10 * SECOND, stay_ns: 20 * SECOND, fall_ns: 2 * SECOND };

/// The times of the requests of the disk without a peak while the other one's stays, sorted, in
/// nanoseconds; and what the control loop did.
fn run(carry: CarryKind) -> (Vec<u64>, Vec<Moment>) {
    let load = |rates, reads| Load {
        rates,
        reads,
        length: 8 << 10,
        hot: 0.0,
        hot_bytes: 64 << 20,
        is_bursty: false,
    };
    let loads = [load([40.0, 40.0], 0.6), load([120.0, 560.0], 0.3)];
    let model = |index| Model::hdd(HddParameters::spanning(1280 << 30), index);
    let devices: Vec<Model> = (0..4).map(model).collect();
    let sizes = Sizes { disk: 64 << 30, log: 256 << 20, copies: 0 };
    let log = Model::ssd(SsdParameters::nvme(), 1);
    let end_ns = PEAK.end_ns() + 60 * SECOND;
    let arrivals =
        (1..).zip(loads).map(|(seed, load)| Arrivals::new(load, vec![PEAK], seed, end_ns));
    let (mut times, mut moments) = (Vec::new(), Vec::new());
    let stays_ns = PEAK.start_ns + PEAK.ramp_ns;
    Rig::new(&devices, &log, 2, sizes, carry, &[]).run(
        merge(arrivals.collect()),
        |completed| {
            let is_within = (stays_ns..stays_ns + PEAK.stay_ns).contains(&completed.at_ns);
            if is_within && completed.disk == 0 {
                times.push(completed.took_ns);
            }
        },
        |moment| moments.push(moment),
    );
    times.sort_unstable();
    (times, moments)
}

#[test]
fn a_disk_is_relieved_while_its_neighbour_has_a_peak() {
    let (without, idle) = run(CarryKind::Off);
    let (with, carried) = run(CarryKind::Writes);
    assert_eq!(without.len(), with.len(), "both have the same requests");
    let p90 = |times: &[u64]| times[times.len() * 9 / 10];
    assert!(2 * p90(&with) < p90(&without), "{} ns, {} ns without", p90(&with), p90(&without));
    assert!(idle.iter().all(|moment| moment.carried == 0));
    // It is started while the load grows, and stopped after the peak.
    let begin = carried.iter().find(|moment| moment.carried != 0 && moment.now_ns > PEAK.start_ns);
    let begin_ns = begin.expect("a disk is carried").now_ns;
    assert!(begin_ns < PEAK.start_ns + PEAK.ramp_ns, "carried from {begin_ns} ns on");
    let after = |moment: &&Moment| moment.now_ns > PEAK.end_ns();
    assert!(carried.iter().filter(after).any(|moment| moment.carried == 0), "it stays carried");
    assert!(carried.iter().any(|moment| moment.returning != 0));
}
