//! What caches do for their disks.
//!
//! All counts start when the disk got its cache, and only grow. A reader that needs an interval
//! takes the difference of two samples ([`CacheCounts::since`]).

use crate::client::{Client, ClientError};
use crate::endpoint::{AnyEndpoint, Blocking, Endpoint, Query};
pub use fathom_cache::CacheCounts;
use serde::{Deserialize, Serialize};

/// What caches do for their disks.
pub const CACHES: Endpoint<Blocking, (), CacheQuery, (), CacheReport> =
    Endpoint::get("/v1/caches", "the [caches](#caches) of all disks, or that of one");

pub(crate) const ENDPOINTS: &[&(dyn AnyEndpoint + Sync)] = &[&CACHES];

/// Which caches are reported, and what of them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct CacheQuery {
    /// Only the cache of this disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
    /// The most points of a curve.
    pub points: usize,
    /// The most files of a disk.
    pub files: usize,
}

impl Query for CacheQuery {
    const PARAMETERS: &'static [(&'static str, &'static str)] =
        &[("disk", "NAME"), ("points", "N"), ("files", "N")];
}

/// The other sizes of a cache for which miss ratios are estimated, in percent of the present size.
pub const ESTIMATES: [u64; 4] = [50, 75, 125, 200];

/// A sample of caches, taken at one time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct CacheReport {
    /// The time of the sample, by the host's monotonic clock, in nanoseconds: for intervals.
    pub time_ns: u64,
    /// The time of the sample, in nanoseconds since 1970: for display.
    pub unix_time_ns: u64,
    /// The caches: those that disks share by name, and the disks' own by the name of the disk.
    pub caches: Vec<CacheInfo>,
}

/// A cache.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct CacheInfo {
    /// Its name; for the own cache of a disk, that of the disk.
    pub name: String,
    /// Whether several disks can use it.
    pub is_shared: bool,
    /// What decides which blocks are kept: `auto`, `sky` or `none`.
    pub policy: String,
    /// The size of a block, in bytes.
    pub block_size: u64,
    /// The size of the cache, in bytes.
    pub size_bytes: u64,
    /// The part of it that has blocks, in bytes.
    pub used_bytes: u64,
    /// Blocks put into the cache.
    pub insertions: u64,
    /// Blocks that have left the cache.
    pub removals: CacheRemovals,
    /// Blocks that were not put into the cache.
    pub refusals: CacheRefusals,
    /// Why the cache is out of service; empty if it is not.
    pub failure: String,
    /// The blocks that it has, by class.
    pub classes: Vec<CacheClass>,
    /// Its disks, in order of name.
    pub disks: Vec<CacheDisk>,
}

/// Blocks that have left a cache.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct CacheRemovals {
    /// To make room for others.
    pub capacity: u64,
    /// Because they were written.
    pub written: u64,
    /// Because they were discarded or filled with zeroes, or because their disk shrank or left.
    pub discarded: u64,
}

/// Blocks that were not put into a cache.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct CacheRefusals {
    /// Because the policy did not admit them.
    pub policy: u64,
    /// Because no slot was free.
    pub no_room: u64,
}

/// The blocks of a class.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct CacheClass {
    /// The class: a number, `swap`, `journal` or `unknown`.
    pub class: String,
    /// The part of the cache with blocks of the class, in bytes; 0 in the counts of a disk.
    #[serde(skip_serializing_if = "is_zero")]
    pub used_bytes: u64,
    /// The reads of the class; empty in the counts of a cache.
    #[serde(flatten)]
    pub counts: CacheCounts,
}

/// What a cache does for a disk.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct CacheDisk {
    /// The disk's name.
    pub name: String,
    /// The virtual machine that the disk belongs to; may be empty.
    pub vm: String,
    /// What goes into the cache: `write-through`, `write-around`, `read-only` or `write-back`.
    pub mode: String,
    /// The part of the cache with blocks of the disk, in bytes.
    pub used_bytes: u64,
    /// The part of the disk's log in the cache with changes that may not be on the disk yet, in
    /// bytes; 0 without such a log.
    pub dirty_bytes: u64,
    /// The size of the disk's log in the cache, in bytes; 0 if there is none.
    pub log_bytes: u64,
    /// All its reads.
    pub counts: CacheCounts,
    /// Its reads by class.
    pub classes: Vec<CacheClass>,
    /// The control groups that read most, as far as they are known.
    pub groups: Vec<CacheGroup>,
    /// The parts of databases that read most, as far as they are known.
    pub databases: Vec<CacheFile>,
    /// The files that were read most, as far as they are known.
    pub files: Vec<CacheFile>,
    /// The miss-ratio curve of the disk.
    pub curve: CacheCurve,
    /// Blocks that are missing in the curves, because the daemon had no time to note them.
    pub dropped: u64,
    /// The memory of the curves, in bytes.
    pub curves_memory_bytes: u64,
}

/// The reads of a control group.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct CacheGroup {
    /// The path of the control group.
    pub cgroup: String,
    /// Its reads since it is followed.
    pub counts: CacheCounts,
    /// Its miss-ratio curve.
    pub curve: CacheCurve,
}

/// The reads of a file, or of a part of a database.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct CacheFile {
    /// The file's path from the root of its file system; empty if it is unknown.
    pub path: String,
    /// The file's inode number.
    pub inode: u64,
    /// The kind of data, as in the usage.
    pub kind: String,
    /// The database system; empty if there is none.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub database_system: String,
    /// The part of the database: `table`, `index`, `log` or `other`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub database_part: String,
    /// The number of the table or index within its database.
    #[serde(skip_serializing_if = "is_zero")]
    pub database_index: u64,
    /// Reads. A read of several parts counts in each.
    pub reads: u64,
    /// Reads that the cache had wholly.
    pub hits: u64,
    /// Bytes read.
    pub read_bytes: u64,
}

/// The miss-ratio curve of the last one to two hours: the share of the accesses to blocks that
/// would miss an LRU cache of each size. It is estimated from a sample of the blocks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct CacheCurve {
    /// The time that it covers, in nanoseconds.
    pub window_ns: u64,
    /// The accesses to blocks in this time.
    pub accesses: u64,
    /// The share of the blocks that is followed, from 0 to 1.
    pub sampled: f64,
    /// The size to which the estimates refer, in bytes: the cache's size, or of a cache that disks
    /// share the disk's part.
    pub size_bytes: u64,
    /// The miss ratio of this size, from 0 to 1.
    pub miss_ratio: f64,
    /// The miss ratios of other sizes.
    pub estimates: Vec<CacheEstimate>,
    /// The curve: sizes in bytes, and miss ratios. Between two points it is a straight line, and
    /// after the last one it is level.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub points: Vec<(u64, f64)>,
}

/// The miss ratio of another size.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct CacheEstimate {
    /// The size, in percent of the present one.
    pub percent: u64,
    /// The size, in bytes.
    pub size_bytes: u64,
    /// The miss ratio, from 0 to 1.
    pub miss_ratio: f64,
}

impl CacheCurve {
    /// The change of the hit ratio with a size of so many percent of the present one, from -1 to 1;
    /// `None` if it was not estimated, or without accesses.
    pub fn gain(&self, percent: u64) -> Option<f64> {
        let estimate = self.estimates.iter().find(|estimate| estimate.percent == percent)?;
        (self.accesses > 0).then_some(self.miss_ratio - estimate.miss_ratio)
    }
}

impl CacheReport {
    /// The cache of the disk called `name`, and what it does for the disk.
    pub fn of_disk(&self, name: &str) -> Option<(&CacheInfo, &CacheDisk)> {
        let disks =
            self.caches.iter().flat_map(|cache| cache.disks.iter().map(move |d| (cache, d)));
        { disks }.find(|(_, disk)| disk.name == name)
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl Client {
    /// The caches: of all disks, or that of the disk `disk`. Curves have at most `points` points,
    /// and each disk at most `files` files.
    ///
    /// # Errors
    /// When there is no answer, or no disk of this name.
    pub fn caches(
        &self,
        disk: Option<&str>,
        points: usize,
        files: usize,
    ) -> Result<CacheReport, ClientError> {
        let query = CacheQuery { disk: disk.map(str::to_owned), points, files };
        self.ask(&CACHES, &(), &query, &())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gains_are_differences_of_miss_ratios() {
        let estimate = |percent, miss_ratio| CacheEstimate { percent, size_bytes: 0, miss_ratio };
        let curve = CacheCurve {
            accesses: 10,
            miss_ratio: 0.5,
            estimates: vec![estimate(50, 0.75), estimate(200, 0.25)],
            ..CacheCurve::default()
        };
        assert_eq!((curve.gain(50), curve.gain(200)), (Some(-0.25), Some(0.25)));
        assert_eq!(curve.gain(125), None);
        assert_eq!(CacheCurve { accesses: 0, ..curve }.gain(200), None);
    }

    #[test]
    fn a_report_survives_json() {
        let counts =
            CacheCounts { reads: 4, hits: 3, avoided_ns: 9, hit_ns: 2, ..CacheCounts::default() };
        assert_eq!((counts.hit_ratio(), counts.saved_ns()), (Some(0.75), 7));
        let curve = CacheCurve { points: vec![(0, 1.0), (4096, 0.5)], ..CacheCurve::default() };
        let class = CacheClass { class: "5".into(), counts, ..CacheClass::default() };
        let disk = CacheDisk {
            name: "a".into(),
            counts,
            classes: vec![class],
            curve,
            ..CacheDisk::default()
        };
        let cache = CacheInfo { name: "x".into(), disks: vec![disk], ..CacheInfo::default() };
        let report = CacheReport { caches: vec![cache], ..CacheReport::default() };
        let text = serde_json::to_string(&report).unwrap();
        assert_eq!(serde_json::from_str::<CacheReport>(&text).unwrap(), report);
        assert!(report.of_disk("a").is_some() && report.of_disk("b").is_none());
    }
}
