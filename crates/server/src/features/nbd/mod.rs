//! NBD listeners and their exports. A listener that cannot listen is a state: a thread tries again
//! until it can.

pub(crate) mod feature;
mod listen;
mod metrics;

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use fathom_control::{ErrorBody, ErrorCode, ExportsDefinition, ListenerDefinition, ReloadReport};
use fathom_frontend::nbd;
use parking_lot::{Condvar, Mutex};

use crate::configuration::Configuration;
use crate::daemon::changes::stopping;
use crate::daemon::stack::refusal;
use crate::daemon::{Daemon, Listening, Served};
use crate::features::nbd::listen::{keys_of, start_listener};
use crate::features::pools::bitmaps::SnapshotBitmaps;
use crate::stores::pools::Pools;

/// The pause after the first attempt to listen that fails; each further one is longer by half.
const PAUSE: Duration = Duration::from_secs(1);
/// The longest pause between two attempts.
const PAUSE_MAX: Duration = Duration::from_secs(10);

/// What the daemon would listen at, but cannot yet.
#[derive(Default)]
pub(crate) struct Closed {
    attempts: Mutex<Attempts>,
    /// Ends the pause between two attempts.
    wake: Condvar,
    /// Why `/metrics` is not served over TCP, if it is to be.
    metrics: Mutex<Option<ErrorBody>>,
}

#[derive(Default)]
struct Attempts {
    has_thread: bool,
    is_stopping: bool,
}

impl Closed {
    /// Ends the attempts.
    pub(crate) fn stop(&self) {
        self.attempts.lock().is_stopping = true;
        self.wake.notify_all();
    }
}

impl Daemon {
    /// Listens for NBD clients.
    ///
    /// # Errors
    /// Why it cannot listen yet. [`retry_listeners`](Self::retry_listeners) tries again.
    pub(crate) fn serve_listener(&self, definition: &ListenerDefinition) -> Result<(), ErrorBody> {
        let listening = Arc::new(Listening::new(definition.clone()));
        let refused = self.with_state(|state| {
            if self.is_stopping() {
                return true;
            }
            state.listeners.push(Arc::clone(&listening));
            false
        });
        if refused {
            return Err(stopping());
        }
        // Before it listens, so that its first client finds all disks.
        for served in self.served() {
            export_to(&listening, &served, self.part());
        }
        self.open_listener(&listening)
    }

    /// Begins to listen, if it does not yet.
    pub(crate) fn open_listener(&self, listening: &Listening) -> Result<(), ErrorBody> {
        let _opening = listening.opening.lock();
        if listening.listener().is_some() {
            return Ok(());
        }
        let definition = listening.definition();
        // Before they are used: a later change is found.
        *listening.keys.lock() = keys_of(&definition);
        let opened =
            start_listener(&definition, &listening.exports, self.part::<Arc<nbd::RequestBudget>>());
        let refused = match opened {
            Ok(listener) => {
                let mut place = listening.listener();
                // Who closes it says so before it takes the listener.
                if !self.is_stopping() && !listening.is_leaving.load(Ordering::Acquire) {
                    *place = Some(listener);
                    *listening.refused.lock() = None;
                    return Ok(());
                }
                drop(place);
                drop(listener);
                stopping()
            }
            Err(refused) => refused,
        };
        *listening.refused.lock() = Some(refused.clone());
        self.wake_watch();
        Err(refused)
    }

    /// Lets a thread try again to listen where the daemon cannot yet, if there is such a place.
    pub(crate) fn retry_listeners(self: &Arc<Self>) {
        let is_closed = self.listening().iter().any(|listening| listening.is_to_be_opened());
        let mut attempts = self.part::<Arc<Closed>>().attempts.lock();
        if !is_closed || attempts.is_stopping || attempts.has_thread {
            return;
        }
        attempts.has_thread = true;
        drop(attempts);
        let (daemon, closed) = (Arc::downgrade(self), Arc::clone(self.part::<Arc<Closed>>()));
        let work = move || retry(&daemon, &closed);
        if let Err(error) = std::thread::Builder::new().name("listen".into()).spawn(work) {
            self.part::<Arc<Closed>>().attempts.lock().has_thread = false;
            tracing::error!(%error, "closed listeners are not opened: a thread cannot be started");
        }
    }

    /// Notes why `/metrics` is not served over TCP.
    pub(crate) fn refuse_metrics(&self, refused: Option<ErrorBody>) {
        *self.part::<Arc<Closed>>().metrics.lock() = refused;
        self.wake_watch();
    }

    /// The reasons why the daemon does not listen where it should.
    pub(crate) fn closed_listeners(&self) -> Vec<(String, ErrorBody)> {
        let of_metrics = self.part::<Arc<Closed>>().metrics.lock().clone();
        let mut reasons: Vec<(String, ErrorBody)> =
            of_metrics.into_iter().map(|reason| ("metrics".to_owned(), reason)).collect();
        for listening in self.listening() {
            if listening.listener().is_some() {
                continue;
            }
            let address = listening.address();
            let reason = match listening.refused() {
                Some(ErrorBody { code, message, remedy }) => {
                    let message = format!("the listener at {address} is closed: {message}");
                    refusal(code, message, remedy)
                }
                None => refusal(
                    ErrorCode::Failed,
                    format!("the listener at {address} is closed"),
                    String::new(),
                ),
            };
            reasons.push((address, reason));
        }
        reasons
    }

    /// Serves new listeners, and gives others the exports of a configuration.
    pub(crate) fn reload_listeners(
        self: &Arc<Self>,
        new: &Configuration,
        report: &mut ReloadReport,
    ) {
        for listener in &new.listeners {
            let definition = &listener.definition;
            let address = &definition.address;
            let listening = self.listening();
            let Some(old) = listening.iter().find(|old| old.definition().address == *address)
            else {
                match self.serve_listener(definition) {
                    Ok(()) => report.changed.push(format!("a listener at {address} was added")),
                    Err(refused) => report.refused.push(refused.to_string()),
                }
                continue;
            };
            let before = old.definition();
            if old.refused().is_some() && before == *definition {
                match self.open_listener(old) {
                    Ok(()) => report.changed.push(format!("a listener at {address} was added")),
                    Err(refused) => report.refused.push(refused.to_string()),
                }
                continue;
            }
            if before.exports != definition.exports {
                self.change_exports(old, definition.exports.clone());
                report.changed.push(format!("the listener at {address} has other exports"));
            }
            let mut same = definition.clone();
            same.exports = before.exports.clone();
            if before != same {
                report.refused.push(format!(
                    "the listener at {address} cannot change its TLS or group while it listens: \
                     restart the daemon"
                ));
            }
        }
        self.retry_listeners();
    }

    /// Offers a new disk on all listeners that export it.
    pub(crate) fn export_disk(&self, served: &Served) {
        for listening in self.listening() {
            export_to(&listening, served, self.part());
        }
    }

    /// Changes the exports of a listener.
    pub(crate) fn change_exports(&self, listening: &Listening, exports: ExportsDefinition) {
        let mut definition = listening.definition();
        definition.exports = exports;
        *listening.definition.lock() = definition.clone();
        let offered = listening.exports.list();
        for (name, _) in &offered {
            if !is_exported(&definition, name) {
                // Its clients are disconnected after their requests in flight; there is no need to
                // wait for that.
                listening.exports.withdraw(name);
            }
        }
        for served in self.served() {
            export_to(listening, &served, self.part());
        }
    }
}

/// The thread that tries to listen, until nothing is closed.
fn retry(daemon: &Weak<Daemon>, closed: &Closed) {
    let mut pause = PAUSE;
    loop {
        let mut attempts = closed.attempts.lock();
        closed.wake.wait_while_for(&mut attempts, |it| !it.is_stopping, pause);
        if attempts.is_stopping {
            return;
        }
        drop(attempts);
        pause = (pause * 3 / 2).min(PAUSE_MAX);
        let Some(daemon) = daemon.upgrade() else { return };
        for listening in daemon.listening().iter().filter(|listening| listening.is_to_be_opened()) {
            if daemon.open_listener(listening).is_ok() {
                tracing::info!("listens at {}", listening.address());
                daemon.wake_watch();
            }
        }
        let mut attempts = closed.attempts.lock();
        if !daemon.listening().iter().any(|listening| listening.is_to_be_opened()) {
            attempts.has_thread = false;
            return;
        }
    }
}

impl Listening {
    fn new(definition: ListenerDefinition) -> Self {
        Self {
            exports: Arc::new(nbd::Exports::new()),
            definition: Mutex::new(definition),
            listener: Mutex::default(),
            refused: Mutex::default(),
            keys: Mutex::default(),
            opening: Mutex::default(),
            is_leaving: false.into(),
        }
    }

    /// Why it does not listen.
    pub(crate) fn refused(&self) -> Option<ErrorBody> {
        self.refused.lock().clone()
    }

    /// Whether it is closed because it could not listen.
    fn is_to_be_opened(&self) -> bool {
        !self.is_leaving.load(Ordering::Acquire)
            && self.listener().is_none()
            && self.refused.lock().is_some()
    }

    /// Takes the listener, for its end.
    pub(crate) fn take_listener(&self) -> Option<nbd::Listener> {
        self.is_leaving.store(true, Ordering::Release);
        self.listener().take()
    }
}

/// Offers a disk on a listener, if the listener exports it and does not offer it yet.
fn export_to(listening: &Listening, served: &Served, pools: &Pools) {
    let name = served.disk.name();
    if !is_exported(&listening.definition(), name)
        || listening.exports.list().iter().any(|(other, _)| other == name)
    {
        return;
    }
    if let Err(refused) = offer(&listening.exports, served, pools) {
        tracing::error!(disk = name, "{}", refused.message);
    }
}

fn is_exported(definition: &ListenerDefinition, name: &str) -> bool {
    match &definition.exports {
        ExportsDefinition::All => true,
        ExportsDefinition::Named(names) => names.iter().any(|other| other == name),
    }
}

fn offer(exports: &nbd::Exports, served: &Served, pools: &Pools) -> Result<(), ErrorBody> {
    let disk = &served.disk;
    let text = if disk.vm().is_empty() { String::new() } else { format!("of {}", disk.vm()) };
    let bitmaps = SnapshotBitmaps::of(&served.live().definition, disk, pools);
    match exports.add_with_bitmaps(disk.name(), &text, Arc::clone(disk), bitmaps) {
        Ok(()) => {}
        Err(nbd::NameError::Taken) if exports.list().iter().any(|(_, d)| Arc::ptr_eq(d, disk)) => {}
        Err(error) => {
            let message = format!("the disk {:?} cannot be exported: {error}", disk.name());
            return Err(refusal(ErrorCode::Conflict, message, "choose another name"));
        }
    }
    // A withdrawal that began earlier has not seen this export.
    if served.withdrawal().is_some() {
        exports.withdraw(disk.name());
    }
    Ok(())
}
