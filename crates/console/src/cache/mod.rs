//! `fathom cache`: the caches of the daemon's disks, and caches that outlive the daemon.

mod attach;
mod check;
mod clear;
mod create;
mod curve;
mod give_up;
mod info;
mod list;
mod logs;
mod options;
mod picture;
mod top;
mod volume;

use clap::Subcommand;
use fathom_control::{CacheClass, CacheCounts, CacheCurve};

use crate::failure::CommandResult;
use options::{AttachOptions, CheckOptions, ClearOptions, CreateCacheOptions, DetachOptions};

/// The caches of the daemon's disks.
#[derive(Debug, Subcommand)]
pub enum CacheCommand {
    /// List the caches
    List(list::ListOptions),
    /// Show what caches do, and what other sizes would do, live
    Top(top::TopOptions),
    /// Show what the cache of a disk does, by class, container, database and file
    Info(info::InfoOptions),
    /// Show the hit ratio that each size of a disk's cache would have
    Curve(curve::CurveOptions),
    /// Make a cache on a file or a block device, which outlives the daemon
    #[command(after_help = "\
The space of a file is allocated now, so that the cache never fills its file system.

Examples:
  fathom cache create /nvme/cache --size 100G
  fathom cache create /dev/nvme0n1p3                  all of a partition
  fathom cache create /nvme/cache --size 1T --block-size 64K --disks 200
  fathom cache create /nvme/cache --size 100G --log 4G --logs 2   with logs of 2G for two disks")]
    Create(CreateCacheOptions),
    /// Examine a cache that is not in use
    #[command(after_help = "\
Pages that a crash has torn are no problem: their blocks are dropped at the next start.

Exit status: 0 no problem, 1 a problem was found, 2 invalid command line.

Examples:
  fathom cache check /nvme/cache          the superblock and all pages
  fathom cache check /nvme/cache --data   the content of all blocks too")]
    Check(CheckOptions),
    /// Empty a cache that is not in use
    #[command(after_help = "\
No data is lost: all blocks are on their disks. Logs stay as they are, unless one is given up: that of a disk
which will not be served again keeps its place for ever. `fathom cache check` shows the logs. What a log has
may not be in the disk's image, so that a log with changes is given up only with --force.

Examples:
  fathom cache clear /nvme/cache
  fathom cache clear /nvme/cache --log db             free the place of the log of the disk db
  fathom cache clear /nvme/cache --log db --force     although its changes are lost then")]
    Clear(ClearOptions),
    /// Give a disk a cache while a guest uses it
    #[command(after_help = "\
The change lasts until the daemon ends; the configuration keeps its own layers.

Examples:
  fathom cache attach db --store /nvme/cache
  fathom cache attach db --size 8G --name hosts       in memory, shared by disks with this name
  fathom cache attach db --store /nvme/cache --mode write-around
  fathom cache attach db --store /nvme/cache --mode write-back    changes are in its log first")]
    Attach(AttachOptions),
    /// Take a disk's cache away while a guest uses it
    #[command(after_help = "\
The disk stays in use. No data is lost: all blocks are on the disk. What only the log of a cache in the
mode write-back has is written back first.

Example:
  fathom cache detach db")]
    Detach(DetachOptions),
}

/// Carries out a command.
pub fn run(command: &CacheCommand) -> CommandResult {
    match command {
        CacheCommand::List(options) => list::run(options),
        CacheCommand::Top(options) => top::run(options),
        CacheCommand::Info(options) => info::run(options),
        CacheCommand::Curve(options) => curve::run(options),
        CacheCommand::Create(options) => create::run(options),
        CacheCommand::Check(options) => check::run(options),
        CacheCommand::Clear(options) => clear::run(options),
        CacheCommand::Attach(options) => attach::attach(options),
        CacheCommand::Detach(options) => attach::detach(options),
    }
}

/// A share, in percent; `–` if it is not known.
fn percent(share: Option<f64>) -> String {
    share.map_or_else(|| "–".into(), |share| format!("{:.1} %", share * 100.0))
}

/// The hit ratio of counts.
fn hits(counts: &CacheCounts) -> String {
    percent(counts.hit_ratio())
}

/// The change of the hit ratio with another size, in percentage points; `–` if it is not known.
fn gain(curve: &CacheCurve, size: u64) -> String {
    match curve.gain(size).map(|gain| gain * 100.0) {
        None => "–".into(),
        Some(points) if points.abs() < 0.05 => "0.0".into(),
        Some(points) => format!("{points:+.1}"),
    }
}

/// A time in words, without what does not matter: `41 s`, `12 min`, `1 h 30 min`.
fn span(nanoseconds: u64) -> String {
    let seconds = nanoseconds / 1_000_000_000;
    match (seconds / 3600, seconds / 60 % 60) {
        (0, 0) => format!("{seconds} s"),
        (0, minutes) => format!("{minutes} min"),
        (hours, 0) => format!("{hours} h"),
        (hours, minutes) => format!("{hours} h {minutes} min"),
    }
}

/// The classes with most of `amount`, and their shares: `5 60 %, 0 30 %`.
fn shares(classes: &[CacheClass], amount: fn(&CacheClass) -> u64) -> String {
    let all: u64 = classes.iter().map(amount).sum();
    let mut classes: Vec<&CacheClass> = classes.iter().filter(|class| amount(class) > 0).collect();
    classes.sort_by_key(|class| std::cmp::Reverse(amount(class)));
    let share = |class: &&CacheClass| {
        format!("{} {:.0} %", class.class, amount(class) as f64 / all.max(1) as f64 * 100.0)
    };
    classes.iter().take(3).map(share).collect::<Vec<_>>().join(", ")
}

/// The meaning of a class, for a table of files' sizes as in the default configuration.
fn class_text(class: &str) -> String {
    match class {
        "unknown" => "data of unknown meaning".into(),
        "journal" => "journals of file systems".into(),
        "swap" => "swapped memory".into(),
        number => format!("class {number}"),
    }
}

#[cfg(test)]
mod tests {
    use fathom_control::{CacheDisk, CacheEstimate, CacheGroup, CacheInfo, CacheReport};

    use super::*;

    /// A cache of two disks, one of which has containers with strange names.
    pub fn report(sample: u64) -> CacheReport {
        let counts = CacheCounts {
            reads: 1000 * sample,
            hits: 750 * sample,
            read_bytes: 4_096_000 * sample,
            hit_bytes: 3_072_000 * sample,
            avoided_ns: 6_000_000_000 * sample,
            hit_ns: 1_000_000 * sample,
            miss_ns: 2_000_000_000 * sample,
        };
        let estimate = |percent: u64, miss_ratio| CacheEstimate {
            percent,
            size_bytes: (1 << 30) / 100 * percent,
            miss_ratio,
        };
        let curve = CacheCurve {
            window_ns: 3_600_000_000_000,
            accesses: 12_345,
            sampled: 0.01,
            size_bytes: 1 << 30,
            miss_ratio: 0.25,
            estimates: vec![
                estimate(50, 0.5),
                estimate(75, 0.375),
                estimate(125, 0.2),
                estimate(200, 0.1),
            ],
            points: vec![(0, 1.0), (1 << 29, 0.5), (1 << 30, 0.25), (1 << 31, 0.1)],
        };
        let class =
            |class: &str, used_bytes| CacheClass { class: class.into(), used_bytes, counts };
        let group =
            |cgroup: &str| CacheGroup { cgroup: cgroup.into(), counts, curve: curve.clone() };
        let disk = |name: &str, groups| CacheDisk {
            name: name.into(),
            mode: "write-through".into(),
            used_bytes: 1 << 29,
            counts,
            classes: vec![class("5", 0), class("unknown", 0)],
            groups,
            curve: curve.clone(),
            ..CacheDisk::default()
        };
        let strange = "/kube\u{1b}[2J/<b a=\"1\">&\u{202e}pods";
        let cache = CacheInfo {
            name: "hosts".into(),
            is_shared: true,
            policy: "auto".into(),
            block_size: 16 << 10,
            size_bytes: 1 << 30,
            used_bytes: 1 << 30,
            insertions: 70_000,
            classes: vec![class("5", 3 << 28), class("0", 1 << 28)],
            disks: vec![disk("db", vec![group("/shop"), group(strange)]), disk("web", Vec::new())],
            ..CacheInfo::default()
        };
        CacheReport { time_ns: sample * 2_000_000_000, unix_time_ns: 0, caches: vec![cache] }
    }

    #[test]
    fn times_are_rounded() {
        let spans = [0, 59, 60, 3599, 3600, 5400, 200_000].map(|time| span(time * 1_000_000_000));
        assert_eq!(spans, ["0 s", "59 s", "1 min", "59 min", "1 h", "1 h 30 min", "55 h 33 min"]);
    }

    #[test]
    fn shares_and_gains_are_short() {
        let report = report(1);
        let cache = &report.caches[0];
        assert_eq!(shares(&cache.classes, |class| class.used_bytes), "5 75 %, 0 25 %");
        let curve = &cache.disks[0].curve;
        assert_eq!((gain(curve, 50), gain(curve, 200)), ("-25.0".into(), "+15.0".into()));
        let level = CacheCurve { miss_ratio: 0.5001, ..curve.clone() };
        assert_eq!(gain(&level, 50), "0.0");
        assert_eq!((gain(curve, 3), hits(&CacheCounts::default())), ("–".into(), "–".into()));
    }
}
