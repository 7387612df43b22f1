//! `fathom replay`: a trace through the replacement of a cache, without data and without a disk.

mod disk;
mod report;
mod trace;

use std::path::PathBuf;
use std::time::Instant;

use clap::{Args, ValueEnum};
use fathom_cache::{
    Action, Curve, Policy, ReplacementOptions, SLOTS_MAX, Simulation, WriteMode, key,
};
use fathom_control::{Bytes, Nanoseconds};

use crate::{
    failure::{CommandResult, Failure},
    output::{self, Format},
    query::{Times, report_input},
};

use disk::Disks;
use report::{CurvePoint, Report, Row};
use trace::Trace;

/// Options of `fathom replay`.
#[derive(Debug, Args)]
#[command(after_help = "\
TRACE is a file that `fathom query --replay` reads: a recording of `fathom record`, CSV, the output of
blkparse, a log of fio, or a trace of CloudPhysics (vscsi), libCacheSim (oracleGeneral), Tencent, MSR
Cambridge, SPC, ARC, DiskSim or MQSim. Its requests pass through the replacement that
the layer `cache` uses. No data is kept, and no disk is used: the time of the slow disk is that of a
model, which carries out one request after the other. Without --disk each volume of the trace has a
modelled hard disk of its own.

Several sizes and policies are compared in one pass.

Examples:
  fathom replay shop.rec --cache 4G
  fathom replay shop.rec --cache 1G,2G,4G --policy none,sky,auto --disk ssd
  fathom replay trace.bz2 --cache 100M --block 4K --curve --json")]
pub struct ReplayOptions {
    /// The trace (-: from standard input)
    #[arg(value_name = "TRACE")]
    trace: PathBuf,
    /// The size of the cache; several are separated by commas
    #[arg(long, value_name = "SIZE", required = true, value_delimiter = ',')]
    cache: Vec<Bytes>,
    /// What decides which blocks are kept; several are separated by commas
    #[arg(long, value_enum, value_name = "POLICY", value_delimiter = ',', default_value = "auto")]
    policy: Vec<PolicyName>,
    /// The size of a block: a power of two from 4K to 64K
    #[arg(long, value_name = "SIZE", default_value = "16K", value_parser = block_size)]
    block: Bytes,
    /// What the cache does with writes
    #[arg(long, value_enum, value_name = "MODE", default_value = "through")]
    mode: ModeName,
    /// The model of the slow disk
    #[arg(long, value_enum, value_name = "MODEL", default_value = "hdd")]
    disk: disk::DiskModel,
    /// Do not count the requests of the first TIME, such as 90s or 5min: they only fill the cache
    #[arg(long, value_name = "TIME", default_value = "0")]
    warmup: Nanoseconds,
    /// Also print the miss ratio of an LRU cache of every size
    #[arg(long)]
    curve: bool,
    #[command(flatten)]
    times: Times,
    #[command(flatten)]
    format: Format,
}

/// What decides which blocks are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum PolicyName {
    /// The classes of blocks are ignored
    None,
    /// Blocks of higher classes are kept longer: metadata, then small files
    Sky,
    /// The cost of a miss, and how soon blocks are used again, are learned
    Auto,
}

impl PolicyName {
    fn policy(self) -> Policy {
        match self {
            Self::None => Policy::None,
            Self::Sky => Policy::Sky,
            Self::Auto => Policy::Auto,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Sky => "sky",
            Self::Auto => "auto",
        }
    }
}

/// What the cache does with writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ModeName {
    /// Writes go to the disk and into the cache
    Through,
    /// Writes go to the disk only
    Around,
}

/// The size of a block.
fn block_size(text: &str) -> Result<Bytes, String> {
    let size: Bytes = text.parse().map_err(|error| format!("{error}"))?;
    if size.0.is_power_of_two() && (4 << 10..=64 << 10).contains(&size.0) {
        Ok(size)
    } else {
        Err("a block has 4K, 8K, 16K, 32K or 64K".into())
    }
}

/// A cache of one size with one policy.
struct Candidate {
    size: Bytes,
    policy: PolicyName,
    simulation: Simulation<Disks>,
}

/// Carries out the command.
pub fn run(options: &ReplayOptions) -> CommandResult {
    let mut candidates = Vec::new();
    for size in &options.cache {
        let blocks = size.0 / options.block.0;
        if blocks == 0 {
            let message = format!("a cache of {size} has no block of {}", options.block);
            return Err(Failure::usage(message).advise("use a larger --cache or a smaller --block"));
        }
        let Ok(slots) = u32::try_from(blocks.min(u64::from(SLOTS_MAX))) else { continue };
        for policy in &options.policy {
            let replacement = ReplacementOptions { policy: policy.policy() };
            let mode = match options.mode {
                ModeName::Through => WriteMode::Through,
                ModeName::Around => WriteMode::Around,
            };
            let disks = Disks::new(options.disk);
            let simulation = Simulation::new(&replacement, slots, options.block.0, mode, disks);
            candidates.push(Candidate { size: *size, policy: *policy, simulation });
        }
    }
    let mut curve = options.curve.then(Curve::precise);
    let began = Instant::now();
    let mut trace = Trace::open(&options.trace, &options.times.options(false))?;
    let mut is_warm = options.warmup.0 == 0;
    while let Some(request) = trace.next()? {
        if !is_warm && trace.duration_ns() >= options.warmup.0 {
            is_warm = true;
            for one in &mut candidates {
                one.simulation.forget_counts();
            }
        }
        for candidate in &mut candidates {
            candidate.simulation.request(&request);
        }
        let has_blocks = request.action != Action::Discard && request.length > 0;
        if let Some(curve) = curve.as_mut().filter(|_| has_blocks) {
            let last = (request.offset.saturating_add(request.length) - 1) / options.block.0;
            for block in request.offset / options.block.0..=last {
                curve.record(key(request.disk, block));
            }
        }
    }
    report_input(trace.report());
    if trace.requests() == 0 {
        return Err(Failure::new(format!("{} has no requests", options.trace.display()))
            .advise("a recording contains requests only while guests use the disks"));
    }
    if !is_warm {
        let message =
            format!("{} ends before --warmup {}", options.trace.display(), options.warmup);
        return Err(Failure::usage(message).advise("use a shorter time: no request is counted"));
    }
    let report = Report {
        trace: options.trace.display().to_string(),
        requests: trace.requests(),
        disks: trace.disks(),
        duration_ns: trace.duration_ns(),
        block: options.block.0,
        disk: options.disk.name(),
        rows: candidates
            .iter()
            .map(|one| Row::new(one.size, one.policy.name(), one.simulation.counts()))
            .collect(),
        curve: curve.map(|curve| CurvePoint::all(&curve, options.block)),
        elapsed_ns: began.elapsed().as_nanos() as u64,
    };
    if options.format.json { output::json(&report) } else { report.print() }
}
