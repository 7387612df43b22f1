//! The cases in which contention is foreseen: a load of the paper beside one that has peaks.

use fathom_backend::model::{HddParameters, Model, SsdParameters};

use crate::consolidate::{Arrivals, Consolidation, Load, Peak, SECOND, merge, peaks};
use crate::judge::{Judge, Record};

/// The peaks of a run.
pub const PEAKS: usize = 12;
/// The time before the first peak.
const FIRST_NS: u64 = 120 * SECOND;
/// The bytes of the hot part of a load.
const HOT_BYTES: u64 = 4 << 30;
/// The bytes of a disk.
const DISK_BYTES: u64 = 64 << 30;
/// The spindles of the array of hard disks, and the bytes of each. The disks lie on the outer tenth
/// of them.
const SPINDLES: u64 = 4;
const SPINDLE_BYTES: u64 = 320 << 30;

/// Two loads on a device.
pub struct Case {
    pub name: &'static str,
    /// Whether the device is the array of hard disks.
    is_hdd: bool,
    load: Load,
    beside: Load,
}

const fn load(rate: f64, reads: f64, kib: u64, hot: f64, is_bursty: bool) -> Load {
    Load { rates: [rate, rate], reads, length: kib << 10, hot, hot_bytes: HOT_BYTES, is_bursty }
}

const fn beside(rates: [f64; 2], kib: u64) -> Load {
    Load { rates, reads: 0.7, length: kib << 10, hot: 0.0, hot_bytes: HOT_BYTES, is_bursty: false }
}

/// The rates on the array are those of the paper. Those on the SSD are a half and nearly all of
/// what the model of the SATA class transfers: its link limits it to 8,400 requests of 64 KiB a
/// second.
pub const CASES: &[Case] = &[
    Case {
        name: "exchange, hdd",
        is_hdd: true,
        load: load(40.0, 0.3, 16, 0.6, true),
        beside: beside([200.0, 400.0], 8),
    },
    Case {
        name: "tpc-c, hdd",
        is_hdd: true,
        load: load(60.0, 0.66, 8, 0.33, false),
        beside: beside([200.0, 400.0], 8),
    },
    Case {
        name: "web, hdd",
        is_hdd: true,
        load: load(60.0, 0.97, 16, 0.6, false),
        beside: beside([200.0, 400.0], 8),
    },
    Case {
        name: "exchange, ssd",
        is_hdd: false,
        load: load(400.0, 0.3, 32, 0.6, true),
        beside: beside([3700.0, 7400.0], 64),
    },
    Case {
        name: "tpc-c, ssd",
        is_hdd: false,
        load: load(800.0, 0.66, 16, 0.33, false),
        beside: beside([3700.0, 7400.0], 64),
    },
    Case {
        name: "web, ssd",
        is_hdd: false,
        load: load(800.0, 0.97, 16, 0.6, false),
        beside: beside([3700.0, 7400.0], 64),
    },
];

/// Runs a case with some peaks.
pub fn run(
    case: &Case,
    seed: u64,
    count: usize,
    mut judge: Judge,
    step_ns: u64,
) -> (Record, Vec<Peak>) {
    let peaks = peaks(seed, count, FIRST_NS);
    let end_ns = peaks.last().map_or(FIRST_NS, Peak::end_ns) + 60 * SECOND;
    let devices: Vec<Model> = if case.is_hdd {
        let model =
            |index| Model::hdd(HddParameters::spanning(SPINDLE_BYTES), seed * SPINDLES + index);
        (0..SPINDLES).map(model).collect()
    } else {
        vec![Model::ssd(SsdParameters::sata(), seed)]
    };
    let disks = [case.load, case.beside]
        .into_iter()
        .enumerate()
        .map(|(disk, load)| Arrivals::new(load, peaks.clone(), 1000 * seed + disk as u64, end_ns));
    Consolidation::new(&devices, 2, DISK_BYTES).run(
        merge(disks.collect()),
        step_ns,
        |now_ns, batches| judge.step(now_ns, batches),
    );
    (judge.end(), peaks)
}
