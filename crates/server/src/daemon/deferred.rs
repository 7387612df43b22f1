//! Disks whose logs are at other hosts: in a cluster, or in an NBD export. Their servers may not answer, above all while
//! hosts start after a power failure. That must not keep other disks from being served, so a thread for each server or
//! cluster opens these disks, and tries again while it does not answer.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, OnceLock, Weak, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use fathom_control::{DiskDefinition, ErrorCode};

use super::Daemon;
use crate::configuration::layers;
use crate::lock;
use crate::wiring::refusal;

/// How long the daemon's start waits for the first attempts.
const START_TIME_MAX: Duration = Duration::from_secs(10);
/// The time between two attempts: at first as long as a failover takes, and at most.
const INTERVAL: Duration = Duration::from_secs(1);
const INTERVAL_MAX: Duration = Duration::from_secs(10);
/// The time between two looks at whether the daemon ends.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);

/// The disks that are to be served when the servers of their logs answer.
#[derive(Default)]
pub(super) struct Deferred {
    daemon: OnceLock<Weak<Daemon>>,
    /// Those that are not served yet, by name.
    waiting: Mutex<BTreeMap<String, DiskDefinition>>,
    /// The servers with a thread.
    threads: Mutex<BTreeSet<String>>,
}

impl Deferred {
    /// Whether a disk waits for a server.
    fn waits_for(&self, server: &str) -> bool {
        lock(&self.waiting).values().any(|it| server_of(it).as_deref() == Some(server))
    }
}

/// The first attempts to serve disks, which threads make.
pub(super) struct FirstAttempts(mpsc::Receiver<()>);

impl FirstAttempts {
    /// Waits until each has been made, for a limited time.
    pub(super) fn wait(&self) {
        // Each thread drops its sender after its first attempts.
        let _ = self.0.recv_timeout(START_TIME_MAX);
    }
}

/// The server or cluster that has the log of a disk.
fn server_of(definition: &DiskDefinition) -> Option<String> {
    layers::wal(definition)?.server()
}

/// Whether a disk has its log at another host.
pub(super) fn is_remote(definition: &DiskDefinition) -> bool {
    server_of(definition).is_some()
}

impl Daemon {
    /// Begins to serve disks of the configuration with logs at other hosts.
    pub(super) fn serve_remote(
        &self,
        daemon: Weak<Self>,
        disks: &[&DiskDefinition],
    ) -> FirstAttempts {
        let _ = self.deferred.daemon.set(daemon);
        let (attempted, waiting) = mpsc::channel();
        for definition in disks {
            let name = definition.name.clone();
            let server = server_of(definition).unwrap_or_default();
            let message =
                format!("{server} with the log of the disk {name:?} has not answered yet");
            let refused = refusal(ErrorCode::Failed, message, "wait, or repair it");
            self.with_state(|state| state.unserved.insert(name, refused));
            self.defer(definition, &attempted);
        }
        FirstAttempts(waiting)
    }

    /// Serves a disk that could not be served when the server of its log answers.
    pub(super) fn serve_later(&self, definition: &DiskDefinition) {
        self.defer(definition, &mpsc::channel().0);
    }

    fn defer(&self, definition: &DiskDefinition, attempted: &mpsc::Sender<()>) {
        let Some(server) = server_of(definition) else { return };
        lock(&self.deferred.waiting).insert(definition.name.clone(), definition.clone());
        let Some(daemon) = self.deferred.daemon.get().cloned() else { return };
        if !lock(&self.deferred.threads).insert(server.clone()) {
            return;
        }
        let attempted = attempted.clone();
        let work = move || run(&daemon, &server, attempted);
        if let Err(error) = thread::Builder::new().name("remote-logs".into()).spawn(work) {
            lock(&self.deferred.threads).clear();
            tracing::error!(%error, "disks with logs at other hosts are not served: a thread cannot be started");
        }
    }

    /// Tries to serve the disks that wait for a server. Returns whether some still wait.
    fn try_deferred(&self, server: &str) -> bool {
        let waiting: Vec<DiskDefinition> = lock(&self.deferred.waiting).values().cloned().collect();
        for definition in waiting.iter().filter(|it| server_of(it).as_deref() == Some(server)) {
            let name = &definition.name;
            let Ok(_change) = self.change(name) else { continue };
            // A request or a reload may have served or removed it, or given it another definition.
            let is_same = lock(&self.deferred.waiting).get(name) == Some(definition);
            let is_wanted = self.with_state(|state| state.unserved.contains_key(name));
            if !is_same || !is_wanted {
                if is_same {
                    lock(&self.deferred.waiting).remove(name);
                }
                continue;
            }
            match self.serve_disk(definition.clone(), Some(definition.clone())) {
                Ok(()) => {
                    lock(&self.deferred.waiting).remove(name);
                    tracing::info!(disk = name.as_str(), "is served");
                }
                Err(refused) => {
                    self.with_state(|state| state.unserved.insert(name.clone(), refused));
                    self.wake_watch();
                }
            }
        }
        self.deferred.waits_for(server)
    }
}

/// The thread of a server: until no disk waits for it.
fn run(daemon: &Weak<Daemon>, server: &str, attempted: mpsc::Sender<()>) {
    let (mut attempted, mut interval) = (Some(attempted), INTERVAL);
    loop {
        let Some(strong) = daemon.upgrade() else { return };
        let is_waiting = strong.try_deferred(server);
        drop(attempted.take());
        if !is_waiting {
            // Who defers a disk from now on starts a thread; one that was deferred meanwhile is seen here.
            lock(&strong.deferred.threads).remove(server);
            let is_late = strong.deferred.waits_for(server);
            if !is_late || !lock(&strong.deferred.threads).insert(server.to_owned()) {
                return;
            }
        }
        drop(strong);
        let end = Instant::now() + interval;
        interval = (interval * 3 / 2).min(INTERVAL_MAX);
        while Instant::now() < end {
            thread::sleep(LOOK_INTERVAL);
            if daemon.upgrade().is_none_or(|daemon| daemon.is_stopping()) {
                return;
            }
        }
    }
}
