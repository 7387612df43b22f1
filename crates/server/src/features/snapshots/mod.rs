//! Snapshots by rule, and their thinning.
//!
//! - `options`: the rules, from the configuration.
//! - `instants`: when a rule is due.
//! - `thinning`: which of its snapshots it keeps.
//! - `names`: how they are called.
//!
//! Each rule has a thread, which sleeps until its next instant: a pool that hangs holds up no rule
//! of another pool. A snapshot that fails is a problem until one succeeds.

pub(crate) mod feature;
mod instants;
mod names;
pub(crate) mod options;
mod thinning;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::{self, Thread};

use fathom_control::ErrorBody;
use fathom_store::{Pool, PoolError, PoolRefusal, Snapshot};
use parking_lot::Mutex;

use crate::configuration::Placed;
use crate::daemon::Daemon;
use crate::daemon::status::unix_time_ns;
use crate::features::pools::refused;
use crate::features::pools::snapshot::SnapshotRequest;
use crate::stores::pools::pool_path;
use instants::Instants;
use options::SnapshotRule;

/// A rule that is carried out.
struct Worker {
    rule: SnapshotRule,
    has_ended: AtomicBool,
    /// Why its last snapshots were not taken, or the others not deleted.
    failure: Mutex<Option<ErrorBody>>,
}

/// The rules that are carried out, each with its thread.
#[derive(Default)]
pub(crate) struct SnapshotRules(Mutex<Vec<(Arc<Worker>, Thread)>>);

impl SnapshotRules {
    /// Why rules have failed: their names and the errors.
    fn failures(&self) -> Vec<(String, ErrorBody)> {
        let workers = self.0.lock();
        let failure =
            |worker: &Worker| Some((worker.rule.name.clone(), worker.failure.lock().clone()?));
        workers.iter().filter_map(|(worker, _)| failure(worker)).collect()
    }

    /// Ends the rules that are not among `kept`. A snapshot in progress goes on.
    fn end_others(&self, kept: &[Placed<SnapshotRule>]) {
        self.0.lock().retain(|(worker, thread)| {
            let is_kept = kept.iter().any(|placed| placed.definition == worker.rule);
            if !is_kept {
                worker.has_ended.store(true, Ordering::Release);
                thread.unpark();
            }
            is_kept
        });
    }
}

impl Daemon {
    /// Carries out these rules, and no others. Those that are carried out already go on. Returns
    /// whether there was a change.
    fn set_snapshot_rules(self: &Arc<Self>, rules: &[Placed<SnapshotRule>]) -> bool {
        let own = self.part::<SnapshotRules>();
        let before = own.0.lock().len();
        own.end_others(rules);
        let mut workers = own.0.lock();
        let mut is_changed = workers.len() != before;
        for Placed { definition: rule, .. } in rules {
            if workers.iter().any(|(worker, _)| worker.rule == *rule) {
                continue;
            }
            is_changed = true;
            let (has_ended, failure) = (AtomicBool::new(false), Mutex::default());
            let worker = Arc::new(Worker { rule: rule.clone(), has_ended, failure });
            let (daemon, own) = (Arc::downgrade(self), Arc::clone(&worker));
            let begun =
                thread::Builder::new().name("snapshots".into()).spawn(move || run(&daemon, &own));
            match begun {
                Ok(handle) => workers.push((worker, handle.thread().clone())),
                Err(error) => tracing::error!(
                    rule = rule.name, %error, "no snapshots are taken: a thread cannot be started"
                ),
            }
        }
        is_changed
    }

    /// Takes the snapshots of a rule, and deletes those that it does not keep.
    fn carry_out_rule(self: &Arc<Self>, rule: &SnapshotRule, now_ns: u64) -> Result<(), ErrorBody> {
        let path = &pool_path(&rule.store);
        let pool = &self.open_pool(path)?;
        let time_s = now_ns / 1_000_000_000;
        let snapshots = pool.snapshots();
        let is_taken = |name: &str| snapshots.iter().any(|snapshot| snapshot.name == name);
        let Some(name) = &names::name(&rule.name, time_s, is_taken) else {
            return Err(refused(PoolRefusal::NameTaken.into()));
        };
        let (volumes, freeze) = (&rule.volumes, rule.freeze);
        let taken =
            self.take_snapshot(&SnapshotRequest { path, pool, volumes, name, time_s, freeze });
        // Even if none was taken: the rule may keep fewer than before.
        let thinned = rule.volumes.iter().try_for_each(|volume| thin(rule, pool, volume));
        if let Some(warning) = taken? {
            tracing::warn!(rule = rule.name, snapshot = name, "{warning}");
        }
        thinned.map_err(refused)
    }
}

/// Deletes those of a rule's snapshots of a volume that it does not keep. Those that are held or
/// used by a disk stay until later.
fn thin(rule: &SnapshotRule, pool: &Pool, volume: &str) -> Result<(), PoolError> {
    let Some(id) = pool.volumes().into_iter().find(|it| it.name == volume).map(|it| it.id) else {
        return Err(PoolRefusal::NoVolume.into());
    };
    let is_own = |it: &Snapshot| it.volume == id && names::is_of(&rule.name, &it.name);
    let own: Vec<Snapshot> = pool.snapshots().into_iter().filter(is_own).collect();
    let times_s: Vec<u64> = own.iter().map(|snapshot| snapshot.time_s).collect();
    for index in rule.keep().superfluous(&times_s) {
        match pool.delete_snapshot(volume, &own[index].name) {
            // Also one that somebody has deleted meanwhile.
            Ok(())
            | Err(PoolError::Refused(
                PoolRefusal::InUse | PoolRefusal::Held | PoolRefusal::NoSnapshot,
            )) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The thread of a rule.
fn run(daemon: &Weak<Daemon>, worker: &Worker) {
    let rule = &worker.rule;
    let mut instants = Instants::new(rule.every.0, unix_time_ns());
    loop {
        thread::park_timeout(instants.wait(unix_time_ns()));
        let Some(daemon) = daemon.upgrade().filter(|daemon| !daemon.is_stopping()) else { return };
        if worker.has_ended.load(Ordering::Acquire) {
            return;
        }
        let now_ns = unix_time_ns();
        if !instants.is_due(now_ns) {
            continue;
        }
        let failure = daemon.carry_out_rule(rule, now_ns).err();
        if failure.is_some() || worker.failure.lock().is_some() {
            *worker.failure.lock() = failure;
            daemon.problem_waker()();
        }
    }
}

/// The problem of a rule that has failed, and its remedy.
fn problem(rule: &str, error: &ErrorBody) -> (String, String) {
    let message =
        format!("the rule {rule:?} has failed to take or delete snapshots: {}", error.message);
    let again = "it is tried again at the next instant of the rule";
    let remedy = match &*error.remedy {
        "" => again.to_owned(),
        remedy => format!("{remedy}; {again}"),
    };
    (message, remedy)
}
