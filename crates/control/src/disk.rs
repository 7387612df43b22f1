//! What a disk is and who is connected to it.

use serde::{Deserialize, Serialize};

use crate::definition::{LayerDefinition, ModelDefinition};
use crate::insight::InsightStatus;
use crate::problem::Problem;

/// All disks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DiskList {
    /// In order of name.
    pub disks: Vec<DiskStatus>,
}

/// One disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DiskStatus {
    /// The disk's name.
    pub name: String,
    /// The virtual machine that it belongs to; may be empty.
    pub vm: String,
    /// The serial that guests see; may be empty.
    pub serial: String,
    /// The size, in bytes.
    pub capacity_bytes: u64,
    /// Whether writes are refused.
    pub read_only: bool,
    /// The sizes that do not change.
    pub geometry: GeometryStatus,
    /// What front ends are offered.
    pub capabilities: CapabilitiesStatus,
    /// From the front end down.
    pub layers: Vec<LayerStatus>,
    /// What keeps the bytes.
    pub backend: BackendStatus,
    /// The vhost-user socket and the NBD exports.
    pub frontends: Vec<FrontendStatus>,
    /// How far the disk's guest has been understood.
    #[serde(default)]
    pub insight: InsightStatus,
    /// Requests that a crossing refused: out of range, not offered, contradictory.
    pub refused: u64,
    /// What does not work now; empty on a sound disk.
    pub problems: Vec<Problem>,
}

/// Sizes, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GeometryStatus {
    /// The logical block size.
    pub block_size: u32,
    /// What the disk beneath writes at once.
    pub physical_block_size: u32,
    /// What is best for throughput, or 0.
    pub optimal_size: u32,
    /// What offsets and lengths must be multiples of.
    pub alignment: u32,
}

/// What a disk offers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CapabilitiesStatus {
    /// Writes.
    pub write: bool,
    /// Flushes that make writes durable.
    pub flush: bool,
    /// Writes that are durable at their completion.
    pub force_unit_access: bool,
    /// Discards that give room back.
    pub discard: bool,
    /// Writes of zeroes.
    pub write_zeroes: bool,
    /// Knowledge of what is allocated.
    pub extents: bool,
    /// Whether seeks cost time.
    pub rotational: bool,
}

/// One layer, as it was defined.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerStatus {
    /// The layer's word: `classify`, `tap`, `delay`, `fault`, `log`, `wal`.
    pub name: String,
    /// How it is set.
    pub definition: LayerDefinition,
    /// Figures of its own, by name: what each is, the metrics say.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub figures: Vec<LayerFigure>,
}

/// A figure of a layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerFigure {
    /// Its name, with the unit at the end: `used_bytes`. One that only grows ends with `_total`.
    pub name: String,
    /// What it is, in a sentence.
    pub meaning: String,
    /// Its value.
    pub value: u64,
}

impl DiskStatus {
    /// A figure of a layer of this disk.
    pub fn figure(&self, layer: &str, figure: &str) -> Option<u64> {
        let layer = self.layers.iter().find(|status| status.name == layer)?;
        layer.figures.iter().find(|one| one.name == figure).map(|one| one.value)
    }
}

/// What keeps a disk's bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BackendStatus {
    /// `file`, `memory` or `null`.
    pub name: String,
    /// The image, for `file`.
    pub image: Option<String>,
    /// Whether the host's page cache is bypassed.
    pub direct: bool,
    /// The disk whose timing is imitated, where one is.
    pub model: Option<ModelDefinition>,
}

/// One way to a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum FrontendStatus {
    /// A virtio-blk device for one guest.
    VhostUser(VhostUserStatus),
    /// An export of an NBD listener.
    Nbd(NbdStatus),
}

/// A vhost-user socket and its guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VhostUserStatus {
    /// Where the VMM connects.
    pub socket: String,
    /// Whether one is connected.
    pub connected: bool,
    /// Queues offered.
    pub queues_max: u16,
    /// Queues that the guest has started.
    pub queues_active: u16,
    /// The virtio features agreed on, by name.
    pub features: Vec<String>,
    /// The vhost-user protocol features agreed on, by name.
    pub protocol_features: Vec<String>,
    /// Connections since the start.
    pub connections: u64,
    /// Requests of the guest that were refused as malformed.
    pub refused: u64,
    /// Rings that contradicted themselves and were stopped.
    pub broken_queues: u64,
    /// Connections that ended with a protocol error.
    pub protocol_errors: u64,
    /// Connections that ended because memory that the VMM shares was lost.
    #[serde(default)]
    pub memory_losses: u64,
    /// Requests in flight at the death of an earlier daemon that were repeated.
    pub recovered: u64,
    /// Whether the VMM keeps what is in flight across a restart of the daemon.
    pub restart_safe: bool,
    /// Whether the guest is migrating.
    pub migrating: bool,
    /// Guest memory that is mapped, in bytes.
    pub guest_memory_bytes: u64,
    /// Why it does not work, where it does not: a queue that died and why.
    pub problem: Option<String>,
}

/// An export of an NBD listener.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NbdStatus {
    /// Where the listener is.
    pub address: String,
    /// The export's name.
    pub export: String,
    /// Connections to this export now.
    pub connections: u64,
}
