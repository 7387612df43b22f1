//! Disks on one modelled device, one of which has peaks, in simulated time: without the layer
//! `offload`, and while it carries reads, changes, or both. Prints lines of JSON, of which
//! `bench/offload` makes tables and pictures. Arguments: a text that the case has to contain, and
//! the seed.

#[allow(dead_code, reason = "the tests use the other parts")]
#[path = "../tests/support/replay.rs"]
mod replay;

#[allow(dead_code, reason = "the tests use the other parts")]
#[path = "../tests/support/consolidate.rs"]
mod consolidate;

#[path = "../tests/support/offloaded.rs"]
mod offloaded;

use std::cell::RefCell;
use std::io::{IsTerminal, stderr};

use consolidate::{Arrivals, Load, Peak, SECOND, merge};
use fathom_backend::model::{HddParameters, Model, SsdParameters};
use fathom_layers::offload::CarryKind;
use offloaded::{Completed, Moment, Rig, Sizes};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// The bytes of a disk.
const DISK: u64 = 64 * GIB;
/// The spindles of the array. The disks lie on the outer tenth of them.
const SPINDLES: u64 = 4;
const SPINDLE: u64 = 320 * GIB;
/// The peaks of a run, and the times of one: growing, staying, falling, and the pause after it.
const PEAKS: u64 = 4;
const RAMP_NS: u64 = 10 * SECOND;
const STAY_NS: u64 = 30 * SECOND;
const FALL_NS: u64 = 5 * SECOND;
const PAUSE_NS: u64 = 60 * SECOND;
/// How long after a peak the load counts as low again.
const SETTLE_NS: u64 = 30 * SECOND;

/// Loads on a device.
struct Case {
    name: &'static str,
    is_hdd: bool,
    /// That of the first disk, for which the figures are, has no peaks in most cases.
    loads: &'static [Load],
    /// The bytes of the log of each disk.
    log: u64,
    ways: &'static [Way],
    /// The time before the first peak, in which hot blocks get their copies.
    warmup_ns: u64,
}

const fn load(
    rates: [f64; 2],
    reads: f64,
    kib: u64,
    hot: f64,
    hot_bytes: u64,
    is_bursty: bool,
) -> Load {
    Load { rates, reads, length: kib * KIB, hot, hot_bytes, is_bursty }
}

const EXCHANGE: Load = load([40.0, 40.0], 0.3, 16, 0.6, 32 * MIB, true);
const FIO: Load = load([200.0, 560.0], 0.7, 8, 0.33, 64 * MIB, false);
/// One of many disks with the same load.
const EACH: Load = load([400.0, 900.0], 0.66, 64, 0.45, 64 * MIB, false);

const fn alike(name: &'static str, loads: &'static [Load]) -> Case {
    Case { name, is_hdd: false, loads, log: 2 * GIB, ways: &FEW_WAYS, warmup_ns: 120 * SECOND }
}

/// The loads of the paper: the mixes and hit rates are those of its section IV. A run takes minutes
/// instead of hours, so that the hot part is smaller than the paper's 4 to 8 GB by as much.
const CASES: &[Case] = &[
    Case {
        name: "exchange, hdd",
        is_hdd: true,
        loads: &[EXCHANGE, FIO],
        log: GIB,
        ways: &WAYS,
        warmup_ns: 600 * SECOND,
    },
    Case {
        name: "tpc-c, hdd",
        is_hdd: true,
        loads: &[load([60.0, 60.0], 0.66, 8, 0.33, 32 * MIB, false), FIO],
        log: GIB,
        ways: &WAYS,
        warmup_ns: 600 * SECOND,
    },
    Case {
        name: "exchange and web, hdd",
        is_hdd: true,
        loads: &[EXCHANGE, load([200.0, 560.0], 0.97, 16, 0.6, 64 * MIB, false)],
        log: GIB,
        ways: &WAYS,
        warmup_ns: 600 * SECOND,
    },
    Case {
        name: "exchange, ssd",
        is_hdd: false,
        loads: &[
            load([400.0, 400.0], 0.3, 32, 0.6, 64 * MIB, true),
            load([3700.0, 7400.0], 0.7, 64, 0.33, 128 * MIB, false),
        ],
        log: 8 * GIB,
        ways: &WAYS,
        warmup_ns: 120 * SECOND,
    },
    alike("1 disk, ssd", &[EACH; 1]),
    alike("2 disks, ssd", &[EACH; 2]),
    alike("4 disks, ssd", &[EACH; 4]),
    alike("6 disks, ssd", &[EACH; 6]),
    alike("8 disks, ssd", &[EACH; 8]),
];
const FEW_WAYS: [Way; 2] = [way(CarryKind::Off), way(CarryKind::Both)];
const WAYS: [Way; 6] = [
    way(CarryKind::Off),
    way(CarryKind::Reads),
    way(CarryKind::Writes),
    way(CarryKind::Both),
    Way { is_held: true, ..way(CarryKind::Both) },
    Way { is_ideal: true, ..way(CarryKind::Off) },
];

/// The peaks of a run.
fn peaks(warmup_ns: u64) -> Vec<Peak> {
    let each = RAMP_NS + STAY_NS + FALL_NS + PAUSE_NS;
    let peak = |number| Peak {
        start_ns: warmup_ns + number * each,
        ramp_ns: RAMP_NS,
        stay_ns: STAY_NS,
        fall_ns: FALL_NS,
    };
    (0..PEAKS).map(peak).collect()
}

/// What a time of the run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Low,
    Peak,
    /// After a peak, while content may return.
    After,
    Other,
}

fn phase(peaks: &[Peak], warmup_ns: u64, at_ns: u64) -> Phase {
    for peak in peaks {
        let stays_ns = peak.start_ns + peak.ramp_ns;
        if (stays_ns..stays_ns + peak.stay_ns).contains(&at_ns) {
            return Phase::Peak;
        }
        if (peak.start_ns..peak.end_ns()).contains(&at_ns) {
            return Phase::Other;
        }
        if (peak.end_ns()..peak.end_ns() + SETTLE_NS).contains(&at_ns) {
            return Phase::After;
        }
    }
    if at_ns >= warmup_ns.saturating_sub(60 * SECOND) { Phase::Low } else { Phase::Other }
}

/// The times of requests.
#[derive(Default)]
struct Times(Vec<u64>);

impl Times {
    fn at(&self, share: f64) -> f64 {
        let index = ((self.0.len() as f64 * share) as usize).min(self.0.len().saturating_sub(1));
        self.0.get(index).copied().unwrap_or_default() as f64 / 1e3
    }

    fn json(&mut self) -> String {
        self.0.sort_unstable();
        let mean = self.0.iter().sum::<u64>() as f64 / self.0.len().max(1) as f64 / 1e3;
        format!(
            "{{\"requests\":{},\"mean_us\":{mean:.1},\"p90_us\":{:.1},\"p95_us\":{:.1},\"p99_us\":{:.1}}}",
            self.0.len(),
            self.at(0.9),
            self.at(0.95),
            self.at(0.99)
        )
    }
}

/// What is measured in a run.
struct Record {
    peaks: Vec<Peak>,
    warmup_ns: u64,
    /// By disk and phase: low, peak, after.
    times: Vec<[Times; 3]>,
    moments: Vec<Moment>,
    /// The times of the first disk in each second: the number, the sum, and all.
    seconds: Vec<Times>,
}

impl Record {
    fn done(&mut self, completed: Completed) {
        let phase = match phase(&self.peaks, self.warmup_ns, completed.at_ns) {
            Phase::Low => 0,
            Phase::Peak => 1,
            Phase::After => 2,
            Phase::Other => 3,
        };
        if let Some(times) = self.times[completed.disk].get_mut(phase) {
            times.0.push(completed.took_ns);
        }
        let begin_ns = self.warmup_ns - 60 * SECOND;
        if completed.disk == 0 && completed.at_ns >= begin_ns {
            let second = ((completed.at_ns - begin_ns) / SECOND) as usize;
            self.seconds.resize_with((second + 1).max(self.seconds.len()), Times::default);
            self.seconds[second].0.push(completed.took_ns);
        }
    }

    /// For each peak: when the first disk was carried after its begin, in milliseconds; none if it
    /// was not.
    fn delays(&self) -> Vec<Option<i64>> {
        let first = |peak: &Peak| {
            let mut moments = self.moments.iter();
            let carried = moments.find(|moment| {
                (peak.start_ns..peak.end_ns()).contains(&moment.now_ns) && moment.carried != 0
            })?;
            Some((carried.now_ns - peak.start_ns) as i64 / 1_000_000)
        };
        self.peaks.iter().map(first).collect()
    }

    /// The share of the time outside of peaks in which a disk was carried.
    fn needless(&self) -> f64 {
        let outside =
            |moment: &&Moment| phase(&self.peaks, self.warmup_ns, moment.now_ns) == Phase::Low;
        let all = self.moments.iter().filter(outside).count().max(1);
        let carried = self.moments.iter().filter(outside).filter(|moment| moment.carried != 0);
        carried.count() as f64 / all as f64
    }

    fn print(&mut self, case: &str, way: Way, seed: u64) {
        let delays: Vec<String> = self
            .delays()
            .into_iter()
            .map(|delay| delay.map_or("null".into(), |delay| delay.to_string()))
            .collect();
        let needless = self.needless();
        let returning =
            self.moments.iter().filter(|moment| moment.returning != 0).count() as f64 / 10.0;
        let names = ["low", "peak", "after"];
        let disks: Vec<String> = self
            .times
            .iter_mut()
            .map(|phases| {
                let texts: Vec<String> = names
                    .iter()
                    .zip(phases)
                    .map(|(name, times)| format!("\"{name}\":{}", times.json()))
                    .collect();
                format!("{{{}}}", texts.join(","))
            })
            .collect();
        let seconds: Vec<String> = self.seconds.iter_mut().map(Times::json).collect();
        println!(
            "{{\"case\":\"{case}\",\"carry\":\"{}\",\"seed\":{seed},\"delays_ms\":[{}],\"needless\":{needless:.4},\
             \"returning_s\":{returning:.1},\"disks\":[{}],\"seconds\":[{}]}}",
            way.name(),
            delays.join(","),
            disks.join(","),
            seconds.join(",")
        );
    }
}

/// How the load of disks is carried.
#[derive(Clone, Copy, Debug)]
struct Way {
    kind: CarryKind,
    /// Whether nothing returns in the time after a peak.
    is_held: bool,
    /// Whether all changes and all hot reads take no time, so that the device has only what no
    /// layer could carry.
    is_ideal: bool,
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Self { is_held: true, .. } => "held",
            Self { is_ideal: true, .. } => "ideal",
            Self { kind, .. } => kind.name(),
        }
    }
}

const fn way(kind: CarryKind) -> Way {
    Way { kind, is_held: false, is_ideal: false }
}

/// Runs a case.
fn run(case: &Case, way: Way, seed: u64) -> Record {
    let Case { loads, warmup_ns, .. } = *case;
    let devices: Vec<Model> = if case.is_hdd {
        let parameters = || HddParameters::spanning(SPINDLES * SPINDLE);
        (0..SPINDLES).map(|index| Model::hdd(parameters(), seed * SPINDLES + index)).collect()
    } else {
        vec![Model::ssd(SsdParameters::sata(), seed)]
    };
    // A flush need not wait for cells of a device of the server class.
    let log = SsdParameters { power_loss_protected: true, ..SsdParameters::nvme() };
    let log = Model::ssd(log, seed);
    let copies = 256 * MIB;
    let sizes = Sizes { disk: DISK, log: case.log, copies };
    let peaks = peaks(warmup_ns);
    let end_ns = peaks.last().map_or(warmup_ns, |peak| peak.end_ns() + PAUSE_NS);
    let record = Record {
        peaks: peaks.clone(),
        warmup_ns,
        times: loads.iter().map(|_| Default::default()).collect(),
        moments: Vec::new(),
        seconds: Vec::new(),
    };
    let disks = loads
        .iter()
        .enumerate()
        .map(|(disk, load)| Arrivals::new(*load, peaks.clone(), 1000 * seed + disk as u64, end_ns));
    let mut moments = Vec::new();
    let after = |peak: &Peak| peak.end_ns()..peak.end_ns() + SETTLE_NS;
    let held: Vec<_> = peaks.iter().filter(|_| way.is_held).map(after).collect();
    let record = RefCell::new(record);
    let arrivals = merge(disks.collect()).filter(|(disk, arrival)| {
        let is_carried = arrival.is_write || arrival.offset < loads[*disk].hot_bytes;
        if way.is_ideal && is_carried {
            let at_ns = arrival.at_ns;
            record.borrow_mut().done(Completed { disk: *disk, at_ns, took_ns: 0 });
        }
        !way.is_ideal || !is_carried
    });
    Rig::new(&devices, &log, loads.len(), sizes, way.kind, &held).run(
        arrivals,
        |completed| record.borrow_mut().done(completed),
        |moment| moments.push(moment),
    );
    Record { moments, ..record.into_inner() }
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let only = arguments.next().unwrap_or_default();
    let seed = arguments.next().map_or(1, |seed| seed.parse().expect("a seed"));
    for case in CASES {
        for way in case.ways.iter().copied() {
            let name = format!("{}, {}", case.name, way.name());
            if !name.contains(&only) {
                continue;
            }
            if stderr().is_terminal() {
                eprint!("\r\x1b[K{name}");
            }
            run(case, way, seed).print(case.name, way, seed);
        }
    }
}
