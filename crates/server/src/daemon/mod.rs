//! The served disks and listeners, and their changes.
//!
//! A disk has one change at a time (`changes`). A change may take long if the disk's storage hangs,
//! but it delays no other disk. The tables that readers use (`state`) are locked only for short
//! times, so status and metrics never wait for a change.

pub(crate) mod change_log;
pub(crate) mod changes;
pub(crate) mod disks;
pub(crate) mod edits;
pub(crate) mod feature;
pub(crate) mod http;
pub(crate) mod lasting;
pub(crate) mod metrics;
pub(crate) mod overlay;
pub(crate) mod parts;
pub(crate) mod problems;
pub(crate) mod refresh;
pub(crate) mod reload;
pub(crate) mod resize;
pub(crate) mod stack;
pub(crate) mod start;
pub(crate) mod statistics;
pub(crate) mod status;
pub(crate) mod stop;
pub(crate) mod unserved;
pub(crate) mod view;
pub(crate) mod withdrawal;

use std::any::Any;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Instant, SystemTime};

use fathom_block::Disk;
use fathom_control::{DiskDefinition, ErrorBody, ErrorCode, ListenerDefinition};
use fathom_frontend::{nbd, vhost_user};
use parking_lot::{Mutex, MutexGuard, RwLock};
use tokio::sync::Notify;

pub(crate) use status::{unix_time_ns, unix_time_s};

use changes::{ChangesInProgress, Claims};
pub(crate) use disks::records_folder;
use problems::{Health, Problems};
use refresh::Content;
use unserved::Unserved;
use withdrawal::Withdrawal;

use crate::configuration::{Configuration, ConfigurationFile, DaemonOptions};
use crate::daemon::parts::Parts;
use crate::daemon::stack::{KeyedLayer, refusal};
use crate::features::FEATURES;
use crate::process::journal::Journal;

/// The daemon.
pub(crate) struct Daemon {
    /// The options of the daemon at its start.
    pub(crate) options: DaemonOptions,
    /// The configuration file, if there is one.
    pub(crate) file: Option<ConfigurationFile>,
    /// The daemon's log.
    pub(crate) journal: Arc<Journal>,
    /// What the features keep.
    pub(crate) parts: Parts,
    pub(crate) begun: Instant,
    pub(crate) begun_unix: SystemTime,
    pub(crate) ready_us: OnceLock<u64>,
    /// The TCP address of `/metrics`, once it is served.
    pub(crate) metrics: OnceLock<SocketAddr>,
    pub(crate) stopping: AtomicBool,
    /// Notified when a client asks for the end.
    pub(crate) end_wanted: Notify,
    /// The changes in progress.
    pub(crate) changes: ChangesInProgress,
    pub(crate) state: RwLock<DaemonRegistry>,
    /// The disks of the configuration that are not served.
    pub(crate) unserved: Arc<Unserved>,
    /// The records of changes in use, which outlive the daemon.
    pub(crate) lasting: lasting::Lasting,
    /// What has been changed, for those who listen.
    pub(crate) change_log: change_log::ChangeLog,
    /// The current problems.
    pub(crate) problems: Problems,
    /// Numbers disks and taps, so that no two of them have the same number while the daemon runs.
    pub(crate) instances: AtomicU64,
}

#[derive(Default)]
pub(crate) struct DaemonRegistry {
    pub(crate) disks: BTreeMap<String, Arc<Served>>,
    /// The claims of disks that are being opened, by number.
    pub(crate) opening: BTreeMap<u64, Claims>,
    pub(crate) listeners: Vec<Arc<Listening>>,
}

/// A disk that is served.
pub(crate) struct Served {
    pub(crate) disk: Arc<Disk>,
    /// Replaced when the disk gets another store.
    pub(crate) claims: Mutex<Claims>,
    pub(crate) health: Mutex<Health>,
    pub(crate) live: Mutex<Live>,
    /// Set once the disk is withdrawn.
    pub(crate) withdrawal: Mutex<Option<Arc<Withdrawal>>>,
}

/// The parts of a served disk that can change.
pub(crate) struct Live {
    /// The current definition.
    pub(crate) definition: DiskDefinition,
    /// The definition in the configuration file, for a disk from there.
    pub(crate) configured: Option<DiskDefinition>,
    /// What the features keep of it.
    pub(crate) parts: Parts,
    /// Its layers, the uppermost first.
    pub(crate) layers: Vec<KeyedLayer>,
    pub(crate) server: Option<vhost_user::Server>,
}

impl Served {
    /// What a feature keeps of the disk, by its type, if it has that.
    pub(crate) fn part<T: Any + Clone>(&self) -> Option<T> {
        self.live().parts.get()
    }

    pub(crate) fn claims(&self) -> Claims {
        self.claims.lock().clone()
    }

    pub(crate) fn live(&self) -> MutexGuard<'_, Live> {
        self.live.lock()
    }
}

/// An NBD listener.
pub(crate) struct Listening {
    pub(crate) exports: Arc<nbd::Exports>,
    pub(crate) definition: Mutex<ListenerDefinition>,
    pub(crate) listener: Mutex<Option<nbd::Listener>>,
    /// Why there is no listener.
    pub(crate) refused: Mutex<Option<ErrorBody>>,
    /// The content of the files with its keys.
    pub(crate) keys: Mutex<Content>,
    /// Held while it begins to listen.
    pub(crate) opening: Mutex<()>,
    /// Whether it is being closed for good.
    pub(crate) is_leaving: AtomicBool,
}

impl Listening {
    pub(crate) fn definition(&self) -> ListenerDefinition {
        self.definition.lock().clone()
    }

    /// The address in the definition, but with the actual port in place of port 0.
    pub(crate) fn address(&self) -> String {
        match self.listener().as_ref().map(nbd::Listener::address) {
            Some(nbd::Address::Tcp(address)) if self.definition().address.ends_with(":0") => {
                address.to_string()
            }
            _ => self.definition().address,
        }
    }

    pub(crate) fn listener(&self) -> MutexGuard<'_, Option<nbd::Listener>> {
        self.listener.lock()
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
            parts: Parts::of_features(Some(configuration)),
            begun,
            begun_unix: SystemTime::now(),
            ready_us: OnceLock::new(),
            metrics: OnceLock::new(),
            stopping: AtomicBool::new(false),
            end_wanted: Notify::new(),
            changes: ChangesInProgress::default(),
            state: RwLock::default(),
            unserved: Arc::default(),
            change_log: change_log::ChangeLog::default(),
            problems: Problems::default(),
            instances: AtomicU64::new(1),
        });
        daemon.allow_attempts();
        daemon.begin_lasting();
        for feature in FEATURES {
            feature.prepare(&daemon, configuration);
        }
        daemon
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

    pub(crate) fn find(&self, name: &str) -> Result<Arc<Served>, ErrorBody> {
        let state = self.state.read();
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

    pub(crate) fn served(&self) -> Vec<Arc<Served>> {
        let state = self.state.read();
        state.disks.values().cloned().collect()
    }

    pub(crate) fn listening(&self) -> Vec<Arc<Listening>> {
        let state = self.state.read();
        state.listeners.clone()
    }

    pub(crate) fn with_state<T>(&self, change: impl FnOnce(&mut DaemonRegistry) -> T) -> T {
        change(&mut self.state.write())
    }

    pub(crate) fn instance(&self) -> u64 {
        self.instances.fetch_add(1, Ordering::Relaxed)
    }
}
