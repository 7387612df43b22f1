//! The served disks and listeners, and their changes.
//!
//! A disk has one change at a time (`changes`). A change may take long if the disk's storage hangs,
//! but it delays no other disk. The tables that readers use (`state`) are locked only for short
//! times, so status and metrics never wait for a change.

mod caches;
mod changes;
mod decision;
mod devices;
mod dirty;
mod disks;
mod edits;
mod events;
mod flush;
mod idle_flush;
mod lasting;
mod listeners;
mod monitor;
mod offload;
mod offload_history;
mod problems;
mod refresh;
mod reload;
mod resize;
mod restore;
mod start;
mod statistics;
mod status;
mod stop;
mod unserved;
mod usage;
mod withdrawal;
mod written;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::thread::Thread;
use std::time::{Instant, SystemTime};

use fathom_block::Disk;
use fathom_control::{DiskDefinition, ErrorBody, ErrorCode, ListenerDefinition};
use fathom_frontend::{nbd, vhost_user};

pub(crate) use devices::placement_within;
pub(crate) use status::unix_time_ns;
pub(crate) use usage::DiskGroups;

use changes::{Changes, Claims};
pub(crate) use disks::records_folder;
use problems::{Health, Problems};
use refresh::Content;
use unserved::Unserved;
use withdrawal::Withdrawal;

use crate::configuration::{Configuration, ConfigurationFile, DaemonOptions};
use crate::events::Events;
use crate::flush::{FlushCounts, Flusher};
use crate::introspection::{DiskGuest, Introspection};
use crate::log::Journal;
use crate::queries::Queries;
use crate::wiring::{Common, Watchers, refusal};

/// The daemon.
pub(crate) struct Daemon {
    /// The options of the daemon at its start.
    pub(crate) options: DaemonOptions,
    /// The configuration file, if there is one.
    file: Option<ConfigurationFile>,
    /// The daemon's log.
    pub(crate) journal: Arc<Journal>,
    /// The log volumes of the disks.
    pub(crate) common: Common,
    begun: Instant,
    begun_unix: SystemTime,
    ready_us: OnceLock<u64>,
    /// The TCP address of `/metrics`, once it is served.
    metrics: OnceLock<SocketAddr>,
    stopping: AtomicBool,
    /// The changes in progress.
    changes: Changes,
    state: RwLock<State>,
    /// The guests whose memory is read.
    introspection: Arc<Introspection>,
    /// The guests that may be made to write their dirty data.
    flusher: Flusher,
    /// The thread that flushes guests whose devices are idle, once there has been such a guest.
    idle_flusher: OnceLock<Option<Thread>>,
    /// The disks whose load is carried elsewhere.
    offloads: offload::Offloads,
    /// The disks of the configuration that are not served.
    unserved: Arc<Unserved>,
    /// What the daemon would listen at, but cannot yet.
    closed: Arc<listeners::Closed>,
    /// The records of changes in use, which outlive the daemon.
    lasting: lasting::Lasting,
    /// The listeners to the disks' events.
    events: Events,
    /// The kept queries.
    queries: Queries,
    /// The link to the centre, if one is configured.
    monitor: OnceLock<monitor::Monitor>,
    /// The memory of all NBD clients' requests.
    nbd_budget: Arc<nbd::Budget>,
    /// The current problems.
    problems: Problems,
    /// Numbers disks and taps, so that no two of them have the same number while the daemon runs.
    instances: AtomicU64,
}

#[derive(Default)]
struct State {
    disks: BTreeMap<String, Arc<Served>>,
    /// The claims of disks that are being opened, by number.
    opening: BTreeMap<u64, Claims>,
    listeners: Vec<Arc<Listening>>,
}

/// A disk that is served.
struct Served {
    disk: Arc<Disk>,
    guest: Arc<DiskGuest>,
    claims: Claims,
    health: Mutex<Health>,
    beneath: devices::Beneath,
    live: Mutex<Live>,
    /// Set once the disk is withdrawn.
    withdrawal: Mutex<Option<Arc<Withdrawal>>>,
}

/// The parts of a served disk that can change.
struct Live {
    /// The current definition.
    definition: DiskDefinition,
    /// The definition in the configuration file, for a disk from there.
    configured: Option<DiskDefinition>,
    watchers: Watchers,
    /// The number of the tap.
    instance: u64,
    /// The number of the accounts of `classify`.
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
    /// Why there is no listener.
    refused: Mutex<Option<ErrorBody>>,
    /// The content of the files with its keys.
    keys: Mutex<Content>,
    /// Held while it begins to listen.
    opening: Mutex<()>,
    /// Whether it is being closed for good.
    is_leaving: AtomicBool,
}

impl Listening {
    fn definition(&self) -> ListenerDefinition {
        self.definition.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The address in the definition, but with the actual port in place of port 0.
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
    /// A daemon that serves nothing yet.
    pub(crate) fn new(
        configuration: &Configuration,
        file: Option<ConfigurationFile>,
        journal: Arc<Journal>,
        begun: Instant,
    ) -> Arc<Self> {
        let daemon = Arc::new(Self {
            options: configuration.daemon.definition.clone(),
            lasting: lasting::Lasting::open(configuration, file.as_ref()),
            file,
            journal,
            common: Common::default(),
            begun,
            begun_unix: SystemTime::now(),
            ready_us: OnceLock::new(),
            metrics: OnceLock::new(),
            stopping: AtomicBool::new(false),
            changes: Changes::default(),
            state: RwLock::default(),
            introspection: Introspection::new(configuration.daemon.definition.metrics_cgroups_max),
            flusher: Flusher::new(
                &configuration.guests,
                records_folder(&configuration.daemon.definition.control),
                &configuration.daemon.definition.control,
            ),
            idle_flusher: OnceLock::new(),
            offloads: offload::Offloads::default(),
            unserved: Arc::default(),
            closed: Arc::default(),
            events: Events::default(),
            queries: Queries::default(),
            monitor: OnceLock::new(),
            nbd_budget: Arc::new(nbd::Budget::new(
                configuration.daemon.definition.nbd_memory.0,
                configuration.daemon.definition.nbd_client_memory.0,
            )),
            problems: Problems::default(),
            instances: AtomicU64::new(1),
        });
        daemon.allow_attempts();
        daemon.begin_lasting();
        let restoring = Arc::downgrade(&daemon);
        daemon.introspection.on_attached(move || {
            if let Some(daemon) = restoring.upgrade() {
                daemon.restore_all_tunables();
            }
        });
        daemon.common.background.set_options(daemon.options.idle());
        daemon.common.clusters.set(&configuration.clusters);
        daemon.common.logs.know(configuration.disks.iter().map(|disk| &disk.definition));
        daemon.common.logs.lives.begin(&daemon.options.control);
        let observing = Arc::downgrade(&daemon);
        daemon.common.background.on_begin(move || {
            let observing = observing.clone();
            let observe = move || observing.upgrade().iter().for_each(|it| it.observe_disks());
            if let Err(error) = std::thread::Builder::new().name("observe".into()).spawn(observe) {
                tracing::warn!(%error, "disks beside background work are not observed");
            }
        });
        daemon
    }

    /// The kept queries.
    pub(crate) fn queries(&self) -> &Queries {
        &self.queries
    }

    /// The counts of flushes by virtual machine.
    pub(crate) fn flush_counts(&self) -> BTreeMap<String, FlushCounts> {
        self.flusher.counts()
    }

    /// The path of the control socket.
    pub(crate) fn control_socket(&self) -> &std::path::Path {
        &self.options.control
    }

    /// Sets the TCP address of `/metrics`.
    pub(crate) fn set_metrics(&self, address: SocketAddr) {
        let _ = self.metrics.set(address);
    }

    /// Whether the daemon is shutting down.
    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    fn find(&self, name: &str) -> Result<Arc<Served>, ErrorBody> {
        let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
        state.disks.get(name).cloned().ok_or_else(|| {
            if let Some(reason) = self.unserved.reason(name) {
                let message = format!("the disk {name:?} is not served: {}", reason.message);
                return refusal(ErrorCode::NotFound, message, reason.remedy);
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
