//! Snapshots from before an encryption, which are held as soon as it is noticed.
//!
//! A thread does that, because a change of a pool waits for its device. It sleeps until a layer
//! reports that an encryption has begun, and exists only if a disk with the layer has a volume. A
//! guest can make this happen: so a few snapshots of a volume are held by it at most.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock, Weak};
use std::thread::{self, Thread};
use std::time::Duration;

use fathom_block::Clock;
use fathom_layers::Patterns;
use fathom_layers::patterns::EncryptionInProgress;
use fathom_layers::wal::Utc;
use fathom_store::{Pool, PoolError, PoolRefusal, Snapshot};
use parking_lot::Mutex;

use super::{cause, of};
use crate::daemon::status::unix_time_s;
use crate::daemon::{Daemon, Served};
use crate::stores::pools::Pools;

/// How long before the first verdict a snapshot should be: files are written for some time before
/// the layer knows that they are encrypted.
const MARGIN_S: u64 = 30;
/// The most snapshots of a volume that are held because of encryption.
const HELD_MAX: usize = 4;
/// The beginning of the reason of such a hold.
const REASON: &str = "encryption since ";

/// A snapshot from before an encryption.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Pin {
    pool: PathBuf,
    volume: String,
    snapshot: String,
    time_s: u64,
    /// Why it is not held, if so.
    failure: Option<String>,
}

/// An encryption of a disk's files: the disk, who encrypts, and when it began.
type Encryption = (String, String, u64);

/// The encryptions in progress that have been dealt with, and the thread.
#[derive(Default)]
pub(super) struct Pins {
    daemon: OnceLock<Weak<Daemon>>,
    thread: OnceLock<Option<Thread>>,
    known: Mutex<BTreeMap<Encryption, Option<Pin>>>,
}

impl Pins {
    /// The daemon, once it exists.
    pub(super) fn set(&self, daemon: &Arc<Daemon>) {
        let _ = self.daemon.set(Arc::downgrade(daemon));
    }

    /// Starts the thread if the disk has a volume.
    pub(super) fn begin(&self, served: &Served) {
        let Some(daemon) = self.daemon.get().filter(|_| place_of(served).is_some()) else { return };
        self.thread.get_or_init(|| {
            let daemon = Weak::clone(daemon);
            match thread::Builder::new().name("pins".into()).spawn(move || run(&daemon)) {
                Ok(handle) => Some(handle.thread().clone()),
                Err(error) => {
                    tracing::error!(%error, "no snapshots are held: a thread cannot be started");
                    None
                }
            }
        });
    }

    /// An encryption has begun.
    pub(super) fn wake(&self) {
        self.thread.get().into_iter().flatten().for_each(Thread::unpark);
    }

    /// The snapshot from before an encryption, if one has been looked for and found.
    pub(super) fn of(&self, disk: &str, cause: &str, begun_ns: u64) -> Option<Pin> {
        let key = (disk.to_owned(), cause.to_owned(), begun_ns);
        self.known.lock().get(&key).cloned().flatten()
    }
}

impl Pin {
    /// What it is, for the end of a message.
    pub(super) fn message(&self) -> String {
        let Self { snapshot, time_s, failure, .. } = self;
        let time = Utc(time_s.saturating_mul(1_000_000_000));
        match failure {
            None => format!("the snapshot {snapshot} of {time}, from before it began, is held"),
            Some(failure) => format!(
                "the snapshot {snapshot} of {time} is from before it began, and cannot be held: \
                 {failure}"
            ),
        }
    }

    /// The commands that bring files back.
    pub(super) fn remedy(&self) -> String {
        let Self { pool, volume, snapshot, .. } = self;
        let pool = pool.display();
        format!(
            "bring single files back from it (`fathom disk add rescue --store {pool} --volume \
             {volume}@{snapshot}`), or all with `fathom snapshot rollback {volume} {snapshot} \
             --store {pool}` while no disk uses the volume; then `fathom snapshot release`"
        )
    }
}

/// The pool and the volume of a disk.
fn place_of(served: &Served) -> Option<(PathBuf, String)> {
    let live = served.live();
    let definition = &live.definition;
    let volume = definition.volume.clone().filter(|volume| !volume.contains('@'))?;
    Some((definition.store.clone()?, volume))
}

/// The thread.
fn run(daemon: &Weak<Daemon>) {
    loop {
        let Some(strong) = daemon.upgrade().filter(|daemon| !daemon.is_stopping()) else { return };
        let is_known = strong.pin_all();
        drop(strong);
        if is_known {
            thread::park();
        } else {
            // Failed: tried again as long as the encryption goes on.
            thread::park_timeout(Duration::from_secs(5));
        }
    }
}

impl Daemon {
    /// Holds a snapshot for each encryption in progress. Returns whether all could be held.
    fn pin_all(&self) -> bool {
        let pins = self.part::<Arc<Pins>>();
        let now_ns = Clock::System.now_ns();
        let mut current = Vec::new();
        let mut is_complete = true;
        for served in self.served() {
            let (Some(layer), Some(place)) = (of(&served), place_of(&served)) else { continue };
            for state in layer.in_progress(now_ns) {
                let name = served.disk.name().to_owned();
                let key = (name, cause(&state.actor, layer.names()), state.begun_ns);
                current.push(key.clone());
                let known = pins.known.lock().get(&key).cloned();
                if known.is_some_and(|pin| pin.is_none_or(|pin| pin.failure.is_none())) {
                    continue;
                }
                let pin = self.pin(&key.0, &place, &layer, &state, now_ns);
                is_complete &= pin.as_ref().is_none_or(|pin| pin.failure.is_none());
                pins.known.lock().insert(key, pin);
                self.problem_waker()();
            }
        }
        pins.known.lock().retain(|key, _| current.contains(key));
        is_complete
    }

    /// Holds the snapshot of a disk from before an encryption.
    fn pin(
        &self,
        disk: &str,
        (path, volume): &(PathBuf, String),
        layer: &Patterns,
        state: &EncryptionInProgress,
        now_ns: u64,
    ) -> Option<Pin> {
        let pool = self.part::<Pools>().find(path)?;
        let age_s = now_ns.saturating_sub(state.begun_ns).div_ceil(1_000_000_000);
        let begun_s = unix_time_s().saturating_sub(age_s);
        let id = pool.volumes().into_iter().find(|it| it.name == *volume)?.id;
        let snapshots: Vec<Snapshot> =
            pool.snapshots().into_iter().filter(|it| it.volume == id).collect();
        let times_s: Vec<u64> = snapshots.iter().map(|snapshot| snapshot.time_s).collect();
        let Some(chosen) = choose(&times_s, begun_s).map(|index| &snapshots[index]) else {
            tracing::warn!(disk, "files are encrypted, and no snapshot is from before that");
            return None;
        };
        let reason = format!("{REASON}{}", Utc(begun_s.saturating_mul(1_000_000_000)));
        let failure = hold(&pool, volume, chosen, &snapshots, &reason).err();
        let pin = Pin {
            pool: path.clone(),
            volume: volume.clone(),
            snapshot: chosen.name.clone(),
            time_s: chosen.time_s,
            failure,
        };
        let who = super::who(&state.actor, layer.names());
        tracing::warn!(disk, "{who} encrypts files; {}; {}", pin.message(), pin.remedy());
        Some(pin)
    }
}

/// The last snapshot from before an encryption that began at `begun_s`: if possible, from some time
/// before. The times of the snapshots are in the order in which they were taken.
fn choose(times_s: &[u64], begun_s: u64) -> Option<usize> {
    let before = |limit: u64| times_s.iter().rposition(|time_s| *time_s <= limit);
    before(begun_s.saturating_sub(MARGIN_S)).or_else(|| before(begun_s.saturating_sub(1)))
}

/// Holds a snapshot, unless it is held already, or many are because of encryption.
fn hold(
    pool: &Pool,
    volume: &str,
    chosen: &Snapshot,
    snapshots: &[Snapshot],
    reason: &str,
) -> Result<(), String> {
    if chosen.hold.is_some() {
        return Ok(());
    }
    let is_ours = |it: &&Snapshot| it.hold.as_deref().is_some_and(|hold| hold.starts_with(REASON));
    if snapshots.iter().filter(is_ours).count() >= HELD_MAX {
        return Err(format!("{HELD_MAX} snapshots of the volume are held because of encryption"));
    }
    match pool.hold_snapshot(volume, &chosen.name, reason) {
        Err(PoolError::Refused(PoolRefusal::NoSnapshot)) => Err("it was just deleted".into()),
        done => done.map_err(|error| error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_snapshot_from_before_is_chosen() {
        for (times_s, expected) in [
            (&[][..], None),
            (&[1000, 1001], None),
            (&[100, 969, 970, 971, 999, 1000, 2000], Some(2)),
            (&[971, 999, 1000], Some(1)),
            // The clock was set back meanwhile.
            (&[100, 5000, 200, 1000], Some(2)),
        ] {
            assert_eq!(choose(times_s, 1000), expected, "{times_s:?}");
        }
    }

    #[test]
    fn the_commands_name_pool_volume_and_snapshot() {
        let pin = Pin {
            pool: "/srv/pool".into(),
            volume: "web".into(),
            snapshot: "auto.web.20261129T120000Z".into(),
            time_s: 1_795_953_600,
            failure: None,
        };
        let message = "the snapshot auto.web.20261129T120000Z of 2026-11-29 12:00:00 UTC, from before \
            it began, is held";
        assert_eq!(pin.message(), message);
        let remedy = pin.remedy();
        for part in [
            "--store /srv/pool --volume web@auto.web.20261129T120000Z`",
            "`fathom snapshot rollback web auto.web.20261129T120000Z --store /srv/pool`",
        ] {
            assert!(remedy.contains(part), "{remedy}");
        }
        let failed = Pin { failure: Some("the pool is full".into()), ..pin };
        assert!(failed.message().ends_with("cannot be held: the pool is full"));
    }
}
