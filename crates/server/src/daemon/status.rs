//! The status of the daemon, its disks and its listeners.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use fathom_block::{Backend, Figure, Layer};
use fathom_control::{
    BackendStatus, CapabilitiesStatus, DaemonInfo, DaemonState, DiskList, DiskStatus, ErrorBody,
    FrontendStatus, GeometryStatus, InsightStatus, LayerDefinition, LayerFigure, LayerFigures,
    LayerStatus, ListenerStatus, NbdStatus, Problem, StoreStatus, TlsDefinition, VERSION,
    VhostUserDefinition, VhostUserStatus, count,
};
use fathom_frontend::{nbd, vhost_user};

use super::{Daemon, Listening, Served};
use crate::daemon::stack::{self, KeyedLayer, LayerKey};
use crate::features::FEATURES;

/// The state of a listener at one time, shared by the status of all disks.
struct ListenerSnapshot {
    address: String,
    exports: Vec<String>,
    /// The export of each connection that has selected one.
    connected: Vec<String>,
}

impl Daemon {
    /// The status of the daemon.
    pub(crate) fn info(&self) -> DaemonInfo {
        let started = self.begun_unix.duration_since(UNIX_EPOCH).unwrap_or_default();
        DaemonInfo {
            version: env!("CARGO_PKG_VERSION").into(),
            interface: VERSION,
            process_id: std::process::id(),
            started_unix_time_ns: u64::try_from(started.as_nanos()).unwrap_or(u64::MAX),
            ready_us: self.ready_us.get().copied().unwrap_or(0),
            state: if self.is_stopping() { DaemonState::Stopping } else { DaemonState::Running },
            configuration: self.file.as_ref().map(|file| {
                let path = std::path::absolute(&file.path).unwrap_or_else(|_| file.path.clone());
                path.display().to_string()
            }),
            metrics_address: self.metrics.get().map(ToString::to_string),
            disks: self.served().len() as u64,
            disks_unserved: self.unserved.count(),
            failed_threads: crate::process::run::failed_threads(),
            log_lines_dropped: crate::process::journal::dropped_lines(),
            problems: self.problems.of(None),
            listeners: self
                .listening()
                .iter()
                .map(|listening| listener_status(listening))
                .collect(),
        }
    }

    /// The status of all disks.
    pub(crate) fn disk_list(&self) -> DiskList {
        let listeners = self.listener_snapshots();
        let disk =
            |served: &Arc<Served>| status(served, &listeners, self.problems_of(served.disk.name()));
        DiskList { disks: self.served().iter().map(disk).collect(), unserved: self.unserved.list() }
    }

    /// The status of one disk.
    pub(crate) fn disk_status(&self, name: &str) -> Result<DiskStatus, ErrorBody> {
        Ok(status(&*self.find(name)?, &self.listener_snapshots(), self.problems_of(name)))
    }

    fn listener_snapshots(&self) -> Vec<ListenerSnapshot> {
        self.listening().iter().map(|listening| listener_snapshot(listening)).collect()
    }
}

/// The time now, in seconds since 1970.
pub(crate) fn unix_time_s() -> u64 {
    unix_time_ns() / 1_000_000_000
}

/// Nanoseconds since 1970.
pub(crate) fn unix_time_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

fn listener_snapshot(listening: &Listening) -> ListenerSnapshot {
    let connections =
        listening.listener().as_ref().map(nbd::Listener::connections).unwrap_or_default();
    ListenerSnapshot {
        address: listening.address(),
        exports: listening.exports.list().into_iter().map(|(name, _)| name).collect(),
        connected: connections.into_iter().filter_map(|connection| connection.export).collect(),
    }
}

fn listener_status(listening: &Listening) -> ListenerStatus {
    let definition = listening.definition();
    let address = listening.address();
    let listener = listening.listener();
    let connections = listener.as_ref().map_or(0, |listener| listener.connections().len());
    let counters = listener.as_ref().map(nbd::Listener::counters).unwrap_or_default();
    let problem = listener.is_none().then(|| match listening.refused() {
        Some(refused) => refused.message,
        None => "it is closed".to_owned(),
    });
    drop(listener);
    ListenerStatus {
        address,
        exports: listening.exports.list().into_iter().map(|(name, _)| name).collect(),
        tls: match &definition.tls {
            None => "none".into(),
            Some(TlsDefinition { psk: Some(_), .. }) => "psk".into(),
            Some(_) => "certificate".into(),
        },
        connections: connections as u64,
        connections_total: counters.accepted,
        refused: counters.refused,
        protocol_errors: counters.protocol_errors,
        problem,
    }
}

fn status(served: &Served, listeners: &[ListenerSnapshot], problems: Vec<Problem>) -> DiskStatus {
    let disk = &served.disk;
    let (geometry, capabilities) = (disk.geometry(), disk.capabilities());
    let live = served.live();
    let definition = live.definition.clone();
    let guest = live.server.as_ref().map(vhost_user::Server::status);
    let made = live.layers.clone();
    drop(live);
    let mut frontends = Vec::new();
    if let (Some(vhost_user), Some(guest)) = (&definition.vhost_user, guest) {
        frontends.push(FrontendStatus::VhostUser(guest_status(vhost_user, &guest)));
    }
    for listener in listeners {
        if listener.exports.iter().any(|name| name == disk.name()) {
            let connected = listener.connected.iter().filter(|name| *name == disk.name());
            frontends.push(FrontendStatus::Nbd(NbdStatus {
                address: listener.address.clone(),
                export: disk.name().to_owned(),
                connections: connected.count() as u64,
            }));
        }
    }
    let mut status = DiskStatus {
        name: disk.name().to_owned(),
        vm: disk.vm().to_owned(),
        serial: serial(disk.serial()),
        capacity_bytes: disk.capacity(),
        read_only: definition.read_only,
        geometry: GeometryStatus {
            block_size: geometry.block_size,
            physical_block_size: geometry.physical_block_size,
            optimal_size: geometry.optimal_size,
            alignment: geometry.alignment,
        },
        capabilities: CapabilitiesStatus {
            write: capabilities.write,
            flush: capabilities.flush,
            force_unit_access: capabilities.force_unit_access,
            discard: capabilities.discard,
            write_zeroes: capabilities.write_zeroes,
            extents: capabilities.extents,
            rotational: capabilities.rotational,
        },
        layers: layers(&definition, &made),
        backend: BackendStatus {
            name: disk.backend().name().into(),
            image: definition.image.as_ref().map(|path| path.display().to_string()),
            store: definition.store.as_ref().map(|path| path.display().to_string()),
            volume: definition.volume.clone(),
            chain: Vec::new(),
            server: definition.nbd.clone(),
            direct: definition.direct,
            model: definition.model.clone(),
            figures: figures_of(&disk.backend().figures()),
        },
        moving: None,
        frontends,
        insight: InsightStatus::default(),
        refused: disk.counters().refused.load(std::sync::atomic::Ordering::Relaxed),
        problems,
    };
    for feature in FEATURES {
        feature.status(served, &mut status);
    }
    status
}

fn guest_problem(guest: &vhost_user::VhostUserStatus) -> Option<String> {
    (guest.panics > 0).then(|| {
        let lost = count(guest.panics, "queue thread");
        format!("it has lost {lost} because of a bug: see the log, and restart the guest")
    })
}

/// The layers in the order in which requests cross them, each with its figures.
fn layers(definition: &fathom_control::DiskDefinition, made: &[KeyedLayer]) -> Vec<LayerStatus> {
    let mut made = made.to_vec();
    let mut take = |key: &LayerKey| {
        let index = made.iter().position(|(other, _)| other == key)?;
        Some(made.remove(index).1)
    };
    let implied = [(definition.classify, "classify"), (definition.tap, "tap")];
    let implied = implied
        .into_iter()
        .filter(|(wanted, name)| *wanted && !stack::names_layer(definition, name))
        .map(|(_, name)| LayerDefinition::new(name, serde_json::Value::Null));
    let mut layers = Vec::new();
    for definition in implied.chain(definition.layers.iter().cloned()) {
        let key = LayerKey::listed(&definition);
        layers.push(layer_status(definition.name(), &definition, take(&key).as_deref()));
        if let Some(layer) = key.has_log().then(|| take(&LayerKey::Log)).flatten() {
            let name = LayerKey::Log.name();
            let definition = LayerDefinition::new(name, serde_json::Value::Null);
            layers.push(layer_status(name, &definition, Some(&*layer)));
        }
    }
    // The layers of other keys of the disk are the lowest.
    layers.extend(made.iter().filter_map(|(key, layer)| {
        Some(layer_status(key.name(), &key.definition()?, Some(&**layer)))
    }));
    layers
}

fn layer_status(
    name: &str,
    definition: &LayerDefinition,
    layer: Option<&dyn Layer>,
) -> LayerStatus {
    let stores = layer.map(Layer::stores).unwrap_or_default();
    let store = |store: &Arc<dyn Backend>| StoreStatus {
        name: store.name().into(),
        figures: figures_of(&store.figures()),
    };
    LayerStatus {
        name: name.into(),
        definition: definition.clone(),
        figures: layer.map(|layer| figures_of(&layer.status().figures)).unwrap_or_default(),
        stores: stores.iter().map(store).filter(|store| !store.figures.is_empty()).collect(),
    }
}

fn figures_of(figures: &[Figure]) -> Vec<LayerFigure> {
    let figure = |figure: &Figure| LayerFigure {
        name: figure.name.into(),
        meaning: figure.meaning.into(),
        value: figure.value,
    };
    figures.iter().map(figure).collect()
}

/// The figures of layers, without the layers that have none.
pub(crate) fn figures(made: &[KeyedLayer]) -> Vec<LayerFigures> {
    made.iter()
        .map(|(key, layer)| LayerFigures {
            layer: key.name().into(),
            figures: figures_of(&layer.status().figures),
        })
        .filter(|layer| !layer.figures.is_empty())
        .collect()
}

fn serial(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

fn guest_status(
    definition: &VhostUserDefinition,
    guest: &vhost_user::VhostUserStatus,
) -> VhostUserStatus {
    let problem = guest_problem(guest);
    VhostUserStatus {
        socket: definition.socket.display().to_string(),
        connected: guest.connected,
        queues_max: definition.queues,
        queues_active: guest.running_queues,
        features: vhost_user::virtio_features(guest.features),
        protocol_features: vhost_user::protocol_features(guest.protocol_features),
        connections: guest.connections,
        refused: guest.refused,
        broken_queues: guest.broken_rings,
        protocol_errors: guest.protocol_errors,
        memory_losses: guest.lost,
        recovered: guest.recovered,
        restart_safe: guest.inflight,
        announces_sizes: guest.announces_sizes,
        migrating: guest.logging,
        guest_memory_bytes: guest.memory,
        problem,
    }
}
