//! The verification of pools in use, by rule and on demand.
//!
//! - `options`: the rules, from the configuration.
//! - `record`: what is known of the scrubs of a pool, also after the daemon has ended.
//!
//! The queues of a pool's volumes carry a scrub out (`fathom_store`). Each rule has a thread, which
//! sleeps until the next scrub is due, and looks after it. A scrub on demand has a thread while it
//! is in progress.

pub(crate) mod feature;
pub(crate) mod options;
mod record;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use fathom_control::{CHECK_PAUSE, ProblemKind, ScrubEntry, ScrubPhase, count};
use fathom_store::{Pool, ScrubOptions, ScrubReport, WeakPool};
use parking_lot::Mutex;

use crate::configuration::Placed;
use crate::daemon::problems::FoundProblem;
use crate::daemon::status::unix_time_s;
use crate::daemon::{Daemon, Served};
use crate::stores::pools::{Pools, pool_path};
use options::ScrubRule;
use record::ScrubRecord;

/// For how long a scrub by rule pauses after a step while the pool is used, in durations of that
/// step: it takes a tenth of the time.
const PAUSE: u32 = 9;
/// The interval between looks at a scrub in progress.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);
/// How often the record of a scrub in progress is written.
const SAVE_INTERVAL: Duration = Duration::from_secs(60);
/// The longest sleep of a rule, after which it looks at the clock again; and the time after which
/// it looks for its pool again.
const SLEEP_MAX: Duration = Duration::from_secs(3600);
const RETRY: Duration = Duration::from_secs(60);
/// The most damaged parts that a problem names.
const NAMED_MAX: usize = 3;
/// The most requests of a disk among which one for a damaged part is looked for.
const REQUESTS_MAX: usize = 128;

/// A rule that is carried out.
struct Worker {
    rule: ScrubRule,
    has_ended: AtomicBool,
}

/// What is known of a pool.
#[derive(Clone, Default)]
struct Known {
    identity: String,
    record: ScrubRecord,
    /// When the scrub in progress began, in seconds since 1970.
    begun_s: u64,
}

/// See the module.
#[derive(Default)]
pub(crate) struct Scrubs {
    rules: Mutex<Vec<(Arc<Worker>, Thread)>>,
    /// By the path of the pool.
    known: Mutex<BTreeMap<PathBuf, Known>>,
}

impl Daemon {
    /// Carries out these rules, and no others. Returns whether there was a change.
    fn set_scrub_rules(self: &Arc<Self>, rules: &[Placed<ScrubRule>]) -> bool {
        let mut workers = self.part::<Scrubs>().rules.lock();
        let before = workers.len();
        workers.retain(|(worker, thread)| {
            let is_kept = rules.iter().any(|placed| placed.definition == worker.rule);
            if !is_kept {
                worker.has_ended.store(true, Ordering::Release);
                thread.unpark();
            }
            is_kept
        });
        let mut is_changed = workers.len() != before;
        for Placed { definition: rule, .. } in rules {
            if workers.iter().any(|(worker, _)| worker.rule == *rule) {
                continue;
            }
            is_changed = true;
            let worker = Arc::new(Worker { rule: rule.clone(), has_ended: AtomicBool::new(false) });
            let (daemon, own) = (Arc::downgrade(self), Arc::clone(&worker));
            let begun = thread::Builder::new().name("scrub".into()).spawn(move || {
                run(&daemon, &own);
            });
            match begun {
                Ok(handle) => workers.push((worker, handle.thread().clone())),
                Err(error) => tracing::error!(
                    pool = %rule.store.display(), %error,
                    "the pool is not verified: a thread cannot be started"
                ),
            }
        }
        is_changed
    }

    /// Reads what is known of a pool that a disk uses now.
    fn load_scrubs(&self, path: &Path) {
        let Some(pool) = self.part::<Pools>().find(path) else { return };
        let (path, identity) = (pool_path(path), pool.identity().to_string());
        drop(pool);
        let mut known = self.part::<Scrubs>().known.lock();
        if known.get(&path).is_none_or(|known| known.identity != identity) {
            let record = ScrubRecord::read(&self.records_folder(), &identity);
            let is_damaged = record.worst().is_some();
            known.insert(path, Known { identity, record, begun_s: 0 });
            if is_damaged {
                self.wake_watch();
            }
        }
    }

    /// A pool is used by a disk: its scrub may be due.
    fn wake_scrub_rules(&self) {
        self.part::<Scrubs>().rules.lock().iter().for_each(|(_, thread)| thread.unpark());
    }

    /// Begins to verify a pool because somebody wants that, unless it is in progress.
    pub(crate) fn check_pool(self: &Arc<Self>, path: &Path, pool: &Pool, maps_only: bool) {
        let options = ScrubOptions { maps_only, pause: CHECK_PAUSE };
        let Some(number) = self.begin_scrub(path, pool, options, None) else { return };
        let (daemon, path, pool) = (Arc::downgrade(self), path.to_owned(), pool.downgrade());
        let watch = move || attend(&daemon, &path, &pool, number, &AtomicBool::new(false));
        if let Err(error) = thread::Builder::new().name("scrub".into()).spawn(watch) {
            tracing::warn!(%error, "what the check of a pool finds is not kept");
        }
    }

    /// Begins a scrub. Returns its number; `None` if another one is in progress.
    fn begin_scrub(
        &self,
        path: &Path,
        pool: &Pool,
        options: ScrubOptions,
        earlier: Option<&ScrubEntry>,
    ) -> Option<u64> {
        let report = earlier.map(ScrubEntry::to_report);
        let mut known = self.part::<Scrubs>().known.lock();
        let (number, is_new) = pool.begin_scrub(options, report);
        if !is_new {
            return None;
        }
        if let Some(known) = known.get_mut(path) {
            known.begun_s = earlier.map_or_else(unix_time_s, |earlier| earlier.begun_s);
        }
        let begun = if earlier.is_some() { "goes on" } else { "begins" };
        tracing::info!(pool = %path.display(), "the verification of the pool {begun}");
        Some(number)
    }

    /// Notes how far a scrub has come, and writes that down if it `is_saved`.
    fn note_scrub(&self, path: &Path, report: &ScrubReport, is_saved: bool) {
        let known = &self.part::<Scrubs>().known;
        let Some(Known { identity, mut record, begun_s }) = known.lock().get(path).cloned() else {
            return;
        };
        let mut entry = ScrubEntry { begun_s, ..ScrubEntry::of(report) };
        let has_ended = entry.phase != ScrubPhase::Running;
        entry.ended_s = has_ended.then(unix_time_s);
        let before = record.worst().map(ScrubEntry::damage_count);
        record.take(entry);
        let is_other = record.worst().map(ScrubEntry::damage_count) != before;
        if is_saved || has_ended || is_other {
            if let Err(error) = record.write(&self.records_folder(), &identity) {
                tracing::warn!(%error, "what the verification of a pool has found is not recorded");
            }
        }
        // What is known is on record: a later daemon knows it as well.
        if let Some(known) = known.lock().get_mut(path) {
            known.record = record;
        }
        if is_other {
            self.problem_waker()();
        }
    }

    /// Writes down how far the scrubs in progress have come: the daemon ends.
    fn save_scrubs(&self) {
        for (_, thread) in self.part::<Scrubs>().rules.lock().drain(..) {
            thread.unpark();
        }
        for (path, pool) in self.part::<Pools>().open_pools() {
            let report =
                pool.scrub().filter(|_| self.part::<Scrubs>().known.lock().contains_key(&path));
            if let Some(report) = report {
                self.note_scrub(&path, &report, true);
            }
        }
    }

    /// The verification of a pool in progress, or the last one, with what is known of the damaged
    /// parts.
    pub(crate) fn scrub_of(&self, path: &Path, pool: &Pool) -> Option<ScrubEntry> {
        let known = self.part::<Scrubs>().known.lock().get(path).cloned().unwrap_or_default();
        let begun_s = known.begun_s;
        let now = pool.scrub().map(|report| ScrubEntry { begun_s, ..ScrubEntry::of(&report) });
        let is_it = |last: &&ScrubEntry| {
            let is_same =
                |now: &ScrubEntry| now.phase != ScrubPhase::Running && now.number == last.number;
            now.as_ref().is_none_or(is_same)
        };
        let last = known.record.last().filter(is_it).cloned();
        let mut entry = last.or(now)?;
        self.name_parts(path, &mut entry);
        Some(entry)
    }

    /// Completes damaged parts with the disk, and a file of its guest if one is known.
    fn name_parts(&self, path: &Path, entry: &mut ScrubEntry) {
        for part in &mut entry.damages {
            let volume = part.volume.as_deref().unwrap_or_default();
            let Some(served) = self.disk_of_volume(path, volume) else { continue };
            part.disk = Some(served.disk.name().to_owned());
            part.file = self.file_of(&served, part.offset, part.length);
        }
    }

    /// The file of a slow request for some bytes of a disk.
    fn file_of(&self, served: &Served, offset: u64, length: u64) -> Option<String> {
        let report = self.slow(Some(served.disk.name()), REQUESTS_MAX).ok()?;
        let end = offset.saturating_add(length);
        let requests = report.disks.into_iter().flat_map(|disk| disk.requests);
        requests
            .filter(|it| it.offset < end && it.offset.saturating_add(it.length) > offset)
            .map(|it| it.facts.path)
            .find(|path| !path.is_empty())
    }

    /// The verification of each pool in use, in progress or the last one.
    fn scrubs_of_pools(&self) -> Vec<(PathBuf, ScrubEntry)> {
        let open = self.part::<Pools>().open_pools();
        let found = open.into_iter().filter_map(|(path, pool)| {
            let entry = self.scrub_of(&path, &pool)?;
            Some((path, entry))
        });
        found.collect()
    }

    /// The problems of pools that are damaged.
    fn scrub_problems(&self) -> Vec<FoundProblem> {
        let known = self.part::<Scrubs>().known.lock().clone();
        if known.values().all(|known| known.record.worst().is_none()) {
            return Vec::new();
        }
        let open = self.part::<Pools>().open_pools();
        let damaged = open.into_iter().filter_map(|(path, _)| {
            let mut entry = known.get(&path)?.record.worst()?.clone();
            entry.damages.truncate(NAMED_MAX);
            self.name_parts(&path, &mut entry);
            Some((path, entry))
        });
        damaged.map(|(path, entry)| problem(&path, &entry)).collect()
    }
}

/// The problem of a damaged pool, and its remedy.
fn problem(path: &Path, entry: &ScrubEntry) -> FoundProblem {
    let mut what = Vec::new();
    if entry.damaged_blocks > 0 {
        what.push(count(entry.damaged_blocks, "damaged block"));
    }
    if entry.damaged_pages > 0 {
        what.push(count(entry.damaged_pages, "damaged page") + " of maps");
    }
    let named: Vec<String> = entry
        .damages
        .iter()
        .map(|part| match &part.disk {
            Some(disk) => format!("disk {disk}, {}", part.text()),
            None => part.text(),
        })
        .collect();
    let message =
        format!("the pool {} has {}: {}", path.display(), what.join(" and "), named.join("; "));
    let remedy = format!(
        "`fathom store list {} --json` names more of it. Write the content anew from a backup or an \
         older snapshot, or delete what has it; then `fathom store check {}` ends this problem",
        path.display(),
        path.display()
    );
    let cause = path.display().to_string();
    FoundProblem { cause, ..FoundProblem::new(ProblemKind::PoolDamaged, message, remedy) }
}

/// Looks after a scrub until it has ended, or the pool is closed.
fn attend(
    daemon: &Weak<Daemon>,
    path: &Path,
    pool: &WeakPool,
    number: u64,
    has_ended: &AtomicBool,
) {
    let mut saved = Instant::now();
    loop {
        thread::park_timeout(LOOK_INTERVAL);
        let Some(daemon) = daemon.upgrade() else { return };
        let Some(pool) = pool.upgrade() else { break };
        if has_ended.load(Ordering::Acquire) && !daemon.is_stopping() {
            pool.end_scrub(number);
        }
        let Some(report) = pool.scrub().filter(|report| report.number == number) else { return };
        drop(pool);
        let is_saved = saved.elapsed() >= SAVE_INTERVAL;
        if is_saved {
            saved = Instant::now();
        }
        daemon.note_scrub(path, &report, is_saved);
        let entry = ScrubEntry::of(&report);
        if entry.phase != ScrubPhase::Running {
            let (phase, damaged) = (entry.phase, entry.damage_count());
            let verified = entry.verified_blocks;
            tracing::info!(
                pool = %path.display(), ?phase, verified, damaged, mended = entry.mended_pages,
                "the verification of the pool has ended"
            );
            return;
        }
    }
    // The last disk of the pool has gone: one by rule goes on when there is one again.
    if let Some(daemon) = daemon.upgrade() {
        let mut all = daemon.part::<Scrubs>().known.lock();
        let Some(known) = all.get_mut(path) else { return };
        let latest = known.record.latest.as_mut();
        if let Some(latest) = latest.filter(|latest| latest.phase == ScrubPhase::Running) {
            (latest.phase, latest.number) = (ScrubPhase::Interrupted, 0);
            if let Err(error) = known.record.write(&daemon.records_folder(), &known.identity) {
                tracing::warn!(%error, "what the verification of a pool has found is not recorded");
            }
        }
    }
}

/// The thread of a rule.
fn run(daemon: &Weak<Daemon>, worker: &Worker) {
    let every_s = worker.rule.every.0 / 1_000_000_000;
    let path = pool_path(&worker.rule.store);
    let mut sleep = Duration::ZERO;
    loop {
        thread::park_timeout(sleep);
        let Some(daemon_now) = daemon.upgrade().filter(|daemon| !daemon.is_stopping()) else {
            return;
        };
        if worker.has_ended.load(Ordering::Acquire) {
            return;
        }
        daemon_now.load_scrubs(&path);
        let Some(pool) = daemon_now.part::<Pools>().find(&path) else {
            sleep = RETRY;
            continue;
        };
        let known = daemon_now.part::<Scrubs>().known.lock().get(&path).cloned();
        let record = known.unwrap_or_default().record;
        let now = unix_time_s();
        let (due_s, earlier) = record.next(every_s, now);
        if due_s > now {
            sleep = SLEEP_MAX.min(Duration::from_secs(due_s - now));
            continue;
        }
        let options = ScrubOptions { maps_only: false, pause: PAUSE };
        let begun = daemon_now.begin_scrub(&path, &pool, options, earlier);
        let weak = pool.downgrade();
        drop((pool, daemon_now));
        sleep = RETRY;
        if let Some(number) = begun {
            attend(daemon, &path, &weak, number, &worker.has_ended);
            sleep = Duration::ZERO;
        }
    }
}
