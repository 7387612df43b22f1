//! The modelled disks beneath a simulated cache.

use std::collections::HashMap;

use clap::ValueEnum;
use fathom_backend::model::{HddParameters, Meter, SsdParameters};
use fathom_cache::SlowDisk;

/// The most disks that are modelled one by one. Further disks of a trace share them.
const DISKS_MAX: u32 = 1 << 14;

/// The model of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DiskModel {
    /// A hard disk
    Hdd,
    /// A solid-state disk
    Ssd,
}

impl DiskModel {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Hdd => "hdd",
            Self::Ssd => "ssd",
        }
    }
}

/// A modelled disk for each disk of a trace.
pub struct Disks {
    model: DiskModel,
    meters: HashMap<u32, Meter>,
}

impl Disks {
    /// No disks yet.
    pub fn new(model: DiskModel) -> Self {
        Self { model, meters: HashMap::new() }
    }
}

impl SlowDisk for Disks {
    fn transfer(
        &mut self,
        time_ns: u64,
        disk: u32,
        is_write: bool,
        offset: u64,
        length: u64,
    ) -> u64 {
        let disk = disk % DISKS_MAX;
        let model = self.model;
        let meter = self.meters.entry(disk).or_insert_with(|| match model {
            DiskModel::Hdd => Meter::hdd(HddParameters::default(), disk.into()),
            DiskModel::Ssd => Meter::ssd(SsdParameters::nvme(), disk.into()),
        });
        meter.transfer(time_ns, is_write, offset, length)
    }
}
