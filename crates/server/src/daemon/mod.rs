//! The disks and listeners that are served, and how they change.
//!
//! A disk is changed by one at a time (`changes`), which may take long where its storage hangs;
//! nobody else waits for that. The tables that readers see (`state`) are locked for moments only,
//! so status and metrics never wait for a change.

mod changes;
mod disks;
mod events;
mod listeners;
mod monitor;
mod problems;
mod reload;
mod statistics;
mod status;
mod stop;
mod usage;
mod withdrawal;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::time::{Instant, SystemTime};

use fathom_block::Disk;
use fathom_control::{DiskDefinition, ErrorBody, ErrorCode, ListenerDefinition};
use fathom_frontend::{nbd, vhost_user};

pub(crate) use status::unix_time_ns;
pub(crate) use usage::DiskGroups;

use changes::{Changes, Claims};
use problems::{Health, Problems};
use withdrawal::Withdrawal;

use crate::configuration::{Configuration, ConfigurationFile, DaemonOptions};
use crate::events::Events;
use crate::introspection::{DiskGuest, Introspection};
use crate::log::Journal;
use crate::logs::LogVolumes;
use crate::queries::Queries;
use crate::wiring::{Watchers, refusal};

/// What serves.
pub(crate) struct Daemon {
    /// The daemon itself, as it was configured at the start.
    pub(crate) options: DaemonOptions,
    /// The configuration file, where there is one.
    file: Option<ConfigurationFile>,
    /// Its log.
    pub(crate) journal: Arc<Journal>,
    /// The log volumes of its disks.
    pub(crate) logs: LogVolumes,
    begun: Instant,
    begun_unix: SystemTime,
    ready_us: OnceLock<u64>,
    /// Where `/metrics` is had over TCP, once it is.
    metrics: OnceLock<SocketAddr>,
    stopping: AtomicBool,
    /// Who changes what is served.
    changes: Changes,
    state: RwLock<State>,
    /// The guests whose memory is read.
    introspection: Arc<Introspection>,
    /// Who listens to the disks' events.
    events: Events,
    /// The queries that are kept.
    queries: Queries,
    /// The link to the centre, where one is configured.
    monitor: OnceLock<monitor::Monitor>,
    /// The memory of all NBD clients' requests.
    nbd_budget: Arc<nbd::Budget>,
    /// What does not work now.
    problems: Problems,
    /// Counts disks and taps up, so that no two of a daemon's life are taken for one.
    instances: AtomicU64,
}

#[derive(Default)]
struct State {
    disks: BTreeMap<String, Arc<Served>>,
    /// What disks occupy that are being opened.
    opening: Vec<Claims>,
    /// Disks of the configuration that could not be served, and why.
    left_out: BTreeMap<String, ErrorBody>,
    listeners: Vec<Arc<Listening>>,
}

/// A disk that is served.
struct Served {
    disk: Arc<Disk>,
    guest: Arc<DiskGuest>,
    claims: Claims,
    health: Mutex<Health>,
    live: Mutex<Live>,
    /// Set once the disk is to be served no more.
    withdrawal: Mutex<Option<Arc<Withdrawal>>>,
}

/// What can change about a disk that is served.
struct Live {
    /// How it is now.
    definition: DiskDefinition,
    /// How the configuration file has it, for a disk that is from there.
    configured: Option<DiskDefinition>,
    watchers: Watchers,
    /// Of the tap.
    instance: u64,
    /// Of the accounts that `classify` keeps.
    usage_instance: u64,
    server: Option<vhost_user::Server>,
}

impl Served {
    fn live(&self) -> MutexGuard<'_, Live> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An NBD listener.
struct Listening {
    exports: Arc<nbd::Exports>,
    definition: Mutex<ListenerDefinition>,
    listener: Mutex<Option<nbd::Listener>>,
}

impl Listening {
    fn definition(&self) -> ListenerDefinition {
        self.definition.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Where it listens: as it was written, but with the port that port 0 became.
    fn address(&self) -> String {
        match self.listener().as_ref().map(nbd::Listener::address) {
            Some(nbd::Address::Tcp(address)) if self.definition().address.ends_with(":0") => {
                address.to_string()
            }
            _ => self.definition().address,
        }
    }

    fn listener(&self) -> MutexGuard<'_, Option<nbd::Listener>> {
        self.listener.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Daemon {
    /// Opens and serves everything that `configuration` names.
    ///
    /// # Errors
    /// Everything that could not be opened or served. What was, is closed again.
    pub(crate) fn start(
        configuration: &Configuration,
        file: Option<ConfigurationFile>,
        journal: Arc<Journal>,
        begun: Instant,
    ) -> Result<Arc<Self>, Vec<ErrorBody>> {
        let daemon = Arc::new(Self {
            options: configuration.daemon.clone(),
            file,
            journal,
            logs: LogVolumes::default(),
            begun,
            begun_unix: SystemTime::now(),
            ready_us: OnceLock::new(),
            metrics: OnceLock::new(),
            stopping: AtomicBool::new(false),
            changes: Changes::default(),
            state: RwLock::default(),
            introspection: Introspection::new(configuration.daemon.metrics_cgroups_max),
            events: Events::default(),
            queries: Queries::default(),
            monitor: OnceLock::new(),
            nbd_budget: Arc::new(nbd::Budget::new(
                configuration.daemon.nbd_memory,
                configuration.daemon.nbd_client_memory,
            )),
            problems: Problems::default(),
            instances: AtomicU64::new(1),
        });
        let (mut refusals, mut left_out) = (Vec::new(), Vec::new());
        for disk in &configuration.disks {
            match daemon.serve_configured(&disk.definition) {
                Ok(()) => {}
                // A guest can write what another format begins with: that must not keep the disks
                // of others from being served.
                Err(refused) if refused.code == ErrorCode::ForeignFormat => left_out.push(refused),
                Err(refused) => refusals.push(refused),
            }
        }
        if left_out.len() == configuration.disks.len() {
            refusals.append(&mut left_out);
        }
        for listener in &configuration.listeners {
            if let Err(refused) = daemon.serve_listener(&listener.definition) {
                refusals.push(refused);
            }
        }
        if refusals.is_empty() {
            daemon.name_the_unreachable();
            return Ok(daemon);
        }
        daemon.stop();
        Err(refusals)
    }

    /// A disk that nobody can reach is no mistake, but seldom what was meant.
    fn name_the_unreachable(&self) {
        let listening = self.listening();
        for served in self.served() {
            let name = served.disk.name();
            let exported = listening
                .iter()
                .any(|listening| listening.exports.list().iter().any(|(other, _)| other == name));
            if !exported && served.live().server.is_none() {
                tracing::warn!(
                    disk = name,
                    "nobody can reach it: it has no [disk.vhost_user], and no [[nbd]] exports it"
                );
            }
        }
    }

    /// Notes that everything is served now. Gives the time that it took, in microseconds.
    pub(crate) fn ready(&self) -> u64 {
        *self.ready_us.get_or_init(|| self.begun.elapsed().as_micros() as u64)
    }

    /// The queries that are kept.
    pub(crate) fn queries(&self) -> &Queries {
        &self.queries
    }

    /// Where the control interface is.
    pub(crate) fn control_socket(&self) -> &std::path::Path {
        &self.options.control
    }

    /// Notes where `/metrics` is had over TCP.
    pub(crate) fn set_metrics(&self, address: SocketAddr) {
        let _ = self.metrics.set(address);
    }

    /// Whether the daemon is about to end.
    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    fn find(&self, name: &str) -> Result<Arc<Served>, ErrorBody> {
        let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
        state.disks.get(name).cloned().ok_or_else(|| {
            if let Some(reason) = state.left_out.get(name) {
                let message = format!("the disk {name:?} is not served: {}", reason.message);
                return refusal(ErrorCode::NotFound, message, reason.remedy.clone());
            }
            let remedy = if state.disks.is_empty() {
                "this daemon serves no disk".to_owned()
            } else {
                let names: Vec<&str> = state.disks.keys().map(String::as_str).take(20).collect();
                format!("choose among: {}", names.join(", "))
            };
            refusal(ErrorCode::NotFound, format!("there is no disk {name:?}"), remedy)
        })
    }

    fn served(&self) -> Vec<Arc<Served>> {
        let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
        state.disks.values().cloned().collect()
    }

    fn listening(&self) -> Vec<Arc<Listening>> {
        let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
        state.listeners.clone()
    }

    fn with_state<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        change(&mut self.state.write().unwrap_or_else(PoisonError::into_inner))
    }

    fn instance(&self) -> u64 {
        self.instances.fetch_add(1, Ordering::Relaxed)
    }
}
