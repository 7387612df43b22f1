//! The report on caches: counts, curves, and what other sizes would do.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use fathom_block::Clock;
use fathom_control::{
    CacheClass, CacheCurve, CacheDisk, CacheEstimate, CacheFile, CacheGroup, CacheInfo,
    CacheRefusals, CacheRemovals, CacheReport, DiskDefinition, ESTIMATES, ErrorBody, ErrorCode,
};
use fathom_layers::cache::CacheOptions;
use fathom_layers::cache::account::{CurveSnapshot, class_name};
use fathom_layers::classify::{Direction, UsageRow};
use fathom_layers::{Cache, Classify, LayerOptions as _};

use crate::daemon::stack::{KeyedLayer, refusal};
use crate::daemon::status::unix_time_ns;
use crate::daemon::{Daemon, Served};
use crate::features::log::DiskLog;

/// The most points of a curve in a report.
const POINTS_MAX: usize = 1000;
/// The most files of a disk in a report.
const FILES_MAX: usize = 1000;

/// How long the store of a cache may take for an answer.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(5);

/// A disk with a cache.
struct Cached {
    served: Arc<Served>,
    cache: Cache,
}

impl Daemon {
    /// The caches of the selected disks. Curves have at most `points` points, and each disk has at
    /// most `files` files.
    pub(crate) fn caches(
        &self,
        disk: Option<&str>,
        points: usize,
        files: usize,
    ) -> Result<CacheReport, ErrorBody> {
        let limits = (points.min(POINTS_MAX), files.min(FILES_MAX));
        let selected = match disk {
            Some(name) => vec![self.find(name)?],
            None => self.served(),
        };
        let now_ns = Clock::System.now_ns();
        // The disks of a cache are found by the address of its volume.
        let mut caches: BTreeMap<(String, usize), Vec<Cached>> = BTreeMap::new();
        for cached in selected.into_iter().filter_map(cached) {
            let shared = cached.cache.shared_name();
            let name = if shared.is_empty() { cached.served.disk.name() } else { shared };
            let address = Arc::as_ptr(cached.cache.volume()) as usize;
            caches.entry((name.to_owned(), address)).or_default().push(cached);
        }
        let info = |((name, _), disks): (_, Vec<Cached>)| cache_info(name, &disks, now_ns, limits);
        Ok(CacheReport {
            time_ns: now_ns,
            unix_time_ns: unix_time_ns(),
            caches: caches.into_iter().map(info).collect(),
        })
    }
}

impl Daemon {
    /// Gives a disk the layers of `definition`, in which another cache takes the place of `other`.
    /// A log of the disk in the store of `other` is written home first.
    pub(crate) fn replace_cache(
        &self,
        served: &Served,
        other: &str,
        definition: DiskDefinition,
        is_allowed: bool,
    ) -> Result<(), ErrorBody> {
        let name = served.disk.name();
        if !is_allowed {
            return Err(refusal(
                ErrorCode::Conflict,
                format!("the disk {name:?} has another cache already: {other}"),
                format!(
                    "run `fathom cache detach {name}` first, or let the new cache replace it with \
                     `fathom cache attach --replace`"
                ),
            ));
        }
        let (mut without, has_log) = {
            let live = served.live();
            let has_log = live.parts.get::<DiskLog>().is_some_and(|log| log.is_in_cache);
            (live.definition.clone(), has_log)
        };
        if !has_log {
            return self.restack(served, definition);
        }
        without.layers.retain(|layer| layer.kind != CacheOptions::KIND);
        self.restack(served, without)?;
        self.restack(served, definition).map_err(|error| ErrorBody {
            message: format!("{}. The disk has no cache now", error.message),
            ..error
        })
    }
}

/// Checks that the store of a disk's cache answers, if a log in it is to be written home.
pub(crate) fn check_answers(
    layers: &[KeyedLayer],
    disk: &str,
    log: Option<&DiskLog>,
) -> Result<(), ErrorBody> {
    let cache = log.filter(|log| log.is_in_cache).and_then(|_| cache_among(layers));
    match cache {
        Some(cache) if !cache.answers(ANSWER_TIME_MAX) => Err(refusal(
            ErrorCode::Failed,
            format!(
                "the disk {disk:?} has changes only in a log in the store of its cache, {}, which does not answer",
                cache.shared_name()
            ),
            "check the device beneath the store, then try again; the disk is served as before",
        )),
        _ => Ok(()),
    }
}

/// The cache of a disk, if it has one.
pub(crate) fn cache_of(served: &Served) -> Option<Cache> {
    cache_among(&served.live().layers.clone())
}

fn cache_among(layers: &[KeyedLayer]) -> Option<Cache> {
    layers.iter().find_map(|(_, layer)| Cache::of(&**layer).cloned())
}

/// The disk and its cache, if it has one.
fn cached(served: Arc<Served>) -> Option<Cached> {
    let cache = cache_of(&served)?;
    Some(Cached { served, cache })
}

/// The report on a cache with at least one disk.
fn cache_info(name: String, disks: &[Cached], now_ns: u64, limits: (usize, usize)) -> CacheInfo {
    let Some(first) = disks.first() else { return CacheInfo { name, ..CacheInfo::default() } };
    let (status, volume) = (first.cache.status(), first.cache.volume());
    let block = u64::from(volume.block_size());
    let (held, _) = first.cache.blocks_by_class();
    let classes = held.iter().enumerate().filter(|(_, blocks)| **blocks > 0);
    let mut disks: Vec<CacheDisk> = disks
        .iter()
        .map(|cached| cache_disk(cached, status.slots, status.mapped, block, now_ns, limits))
        .collect();
    disks.sort_by(|left, right| left.name.cmp(&right.name));
    CacheInfo {
        name,
        is_shared: !first.cache.shared_name().is_empty(),
        policy: first.cache.policy_name().into(),
        block_size: block,
        size_bytes: status.slots * block,
        used_bytes: status.mapped * block,
        insertions: status.blocks.insertions,
        removals: CacheRemovals {
            capacity: status.blocks.evictions,
            written: status.blocks.overwritten,
            discarded: status.blocks.discarded,
        },
        refusals: CacheRefusals { policy: status.blocks.refused, no_room: status.blocks.no_room },
        failure: status.failed.as_ref().map(ToString::to_string).unwrap_or_default(),
        classes: classes
            .map(|(class, blocks)| CacheClass {
                class: class_name(class),
                used_bytes: blocks * block,
                ..CacheClass::default()
            })
            .collect(),
        disks,
    }
}

fn cache_disk(
    cached: &Cached,
    slots: u64,
    mapped: u64,
    block: u64,
    now_ns: u64,
    (points, files): (usize, usize),
) -> CacheDisk {
    let Cached { served, cache } = cached;
    let snapshot = cache.ledger(now_ns);
    let (_, used) = cache.blocks_by_class();
    // Of a cache that disks share, a disk has the part that its blocks have now.
    let part = match mapped {
        0 => slots,
        _ if cache.shared_name().is_empty() => slots,
        _ => (u128::from(slots) * u128::from(used) / u128::from(mapped)) as u64,
    };
    let curve_of = |curve: &CurveSnapshot| curve_of(curve, part, block, now_ns, points);
    let classes = snapshot.classes.iter().enumerate().filter(|(_, counts)| counts.reads > 0);
    let log = served.part::<DiskLog>().filter(|log| log.is_in_cache);
    let log = log.map(|log| log.wal.status());
    let mut groups: Vec<CacheGroup> = snapshot
        .groups
        .iter()
        .map(|group| CacheGroup {
            cgroup: group.cgroup.to_string(),
            counts: group.counts,
            curve: curve_of(&group.curve),
        })
        .collect();
    groups.sort_by_key(|group| std::cmp::Reverse(group.counts.reads));
    let (files, databases) =
        if files == 0 { (Vec::new(), Vec::new()) } else { of_files(served, files) };
    CacheDisk {
        name: served.disk.name().into(),
        vm: served.disk.vm().into(),
        mode: cache.mode().name().into(),
        used_bytes: used * block,
        dirty_bytes: log.map_or(0, |log| log.used),
        log_bytes: log.map_or(0, |log| log.size),
        counts: snapshot.total(),
        classes: classes
            .map(|(class, counted)| CacheClass {
                class: class_name(class),
                used_bytes: 0,
                counts: *counted,
            })
            .collect(),
        groups,
        databases,
        files,
        curve: curve_of(&snapshot.curve),
        dropped: snapshot.dropped,
        curves_memory_bytes: snapshot.memory_bytes,
    }
}

fn curve_of(
    curve: &CurveSnapshot,
    part: u64,
    block: u64,
    now_ns: u64,
    points: usize,
) -> CacheCurve {
    let estimate = |percent: u64| {
        let blocks = (u128::from(part) * u128::from(percent) / 100) as u64;
        CacheEstimate {
            percent,
            size_bytes: blocks.saturating_mul(block),
            miss_ratio: curve.ratios.at(blocks),
        }
    };
    let list = if points == 0 { Vec::new() } else { curve.ratios.points_within(points) };
    CacheCurve {
        window_ns: now_ns.saturating_sub(curve.begin_ns),
        accesses: curve.ratios.requests() as u64,
        sampled: curve.share,
        size_bytes: part.saturating_mul(block),
        miss_ratio: curve.ratios.at(part),
        estimates: ESTIMATES.into_iter().map(estimate).collect(),
        points: list
            .into_iter()
            .map(|(blocks, ratio)| (blocks.saturating_mul(block), ratio))
            .collect(),
    }
}

/// The files that a disk reads most, and its parts of databases: at most `count` of each.
fn of_files(served: &Served, count: usize) -> (Vec<CacheFile>, Vec<CacheFile>) {
    let Some(classify) = served.part::<Classify>() else {
        return (Vec::new(), Vec::new());
    };
    let rows = classify.usage().rows;
    let file = |row: &UsageRow| CacheFile {
        path: row.subject.path.as_deref().unwrap_or_default().to_owned(),
        inode: row.subject.inode,
        kind: row.subject.kind.name().into(),
        ..CacheFile::default()
    };
    let part = |row: &UsageRow| {
        let database = row.subject.database;
        CacheFile {
            database_system: database.system.name().into(),
            database_part: database.part.name().into(),
            database_index: database.index.into(),
            ..file(row)
        }
    };
    let is_part = |row: &&UsageRow| !row.subject.database.system.name().is_empty();
    (most(rows.iter(), file, count), most(rows.iter().filter(is_part), part, count))
}

/// The sums of the rows with the same subject: those with most reads.
fn most<'a>(
    rows: impl Iterator<Item = &'a UsageRow>,
    subject: impl Fn(&UsageRow) -> CacheFile,
    count: usize,
) -> Vec<CacheFile> {
    let mut sums = HashMap::new();
    for row in rows {
        let read = &row.accounts[Direction::Read as usize];
        if read.cache_requests == 0 {
            continue;
        }
        let file = subject(row);
        let (part, index) = (file.database_part.clone(), file.database_index);
        let device = row.subject.device.clone();
        let key = (file.path.clone(), file.inode, file.kind.clone(), device, part, index);
        let sum: &mut CacheFile = sums.entry(key).or_insert(file);
        sum.reads += read.cache_requests;
        sum.hits += read.cache_hits;
        sum.read_bytes += read.bytes;
    }
    let mut files: Vec<CacheFile> = sums.into_values().collect();
    files.sort_by(|left, right| (right.reads, &left.path).cmp(&(left.reads, &right.path)));
    files.truncate(count);
    files
}
