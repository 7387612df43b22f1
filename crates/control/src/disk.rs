//! The status of a disk and of its front ends.

use fathom_options::Bytes;
use serde::{Deserialize, Serialize};

use crate::client::{Client, ClientError};
use crate::daemon::Done;
use crate::definition::{DiskChange, DiskDefinition, LayerDefinition, ModelDefinition};
use crate::endpoint::{AnyEndpoint, AtOnce, Change, Endpoint, Query};
use crate::insight::InsightStatus;
use crate::moving::MoveStatus;
use crate::problem::Problem;

/// All disks.
pub const DISK_LIST: Endpoint<AtOnce, (), (), (), DiskList> =
    Endpoint::get("/v1/disks", "`disks`, and the [`unserved`](#disks-that-are-not-served) ones");

/// One disk.
pub const DISK_STATUS: Endpoint<AtOnce, String, (), (), DiskStatus> =
    Endpoint::get("/v1/disks/{name}", "size, layers, back end, guests and clients, problems");

/// Adds a disk.
pub const ADD_DISK: Endpoint<Change, (), AddQuery, DiskDefinition, DiskStatus> = Endpoint::post(
    "/v1/disks",
    "the new disk, with status 201. With `temporary`, the disk is removed when the daemon ends",
)
.with_status(201);

/// Changes a disk.
pub const CHANGE_DISK: Endpoint<Change, String, (), DiskChange, DiskStatus> =
    Endpoint::patch("/v1/disks/{name}", "the disk after the [change](#disks)");

/// Makes a disk that lost writes accept writes again.
pub const RECOVER_DISK: Endpoint<Change, String, (), (), DiskStatus> = Endpoint::post(
    "/v1/disks/{name}/recover",
    "a disk that lost writes accepts writes again ([durability.md](durability.md))",
);

/// Tries a disk that is not served.
pub const RETRY_DISK: Endpoint<Change, String, (), (), DiskStatus> = Endpoint::post(
    "/v1/disks/{name}/retry",
    "a disk that is [not served](#disks-that-are-not-served) is tried again at once. 409 if it is \
     served",
);

/// Removes a disk.
pub const REMOVE_DISK: Endpoint<Change, String, RemoveQuery, (), Done> = Endpoint::delete(
    "/v1/disks/{name}",
    "after all clients are disconnected and the disk is flushed. Without `force`, 409 while a VMM \
     or an NBD client is connected to the disk. With `temporary`, the next start serves it again",
);

pub(crate) const ENDPOINTS: &[&(dyn AnyEndpoint + Sync)] =
    &[&DISK_LIST, &DISK_STATUS, &ADD_DISK, &CHANGE_DISK, &RECOVER_DISK, &RETRY_DISK, &REMOVE_DISK];

/// How a disk is added.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AddQuery {
    /// Whether the disk is removed when the daemon ends.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub temporary: bool,
}

impl Query for AddQuery {
    const PARAMETERS: &'static [(&'static str, &'static str)] = &[("temporary", "true")];
}

/// How a disk is removed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RemoveQuery {
    /// Whether it is removed while a VMM or an NBD client uses it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub force: bool,
    /// Whether the next start serves it again.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub temporary: bool,
}

impl Query for RemoveQuery {
    const PARAMETERS: &'static [(&'static str, &'static str)] =
        &[("force", "true"), ("temporary", "true")];
}

/// All disks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DiskList {
    /// The disks that are served, in order of name.
    pub disks: Vec<DiskStatus>,
    /// The disks of the configuration that are not served, in order of name.
    #[serde(default)]
    pub unserved: Vec<UnservedDisk>,
}

/// A disk of the configuration that is not served. The daemon tries again until it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnservedDisk {
    /// The disk's name.
    pub name: String,
    /// The virtual machine that the disk belongs to; may be empty.
    pub vm: String,
    /// The path of the image, for a disk with an image.
    pub image: Option<String>,
    /// Whether the daemon tries to open the disk now.
    pub opening: bool,
    /// Why the last attempt failed; empty until the first has ended.
    pub message: String,
    /// What the user can do next; may be empty.
    #[serde(default)]
    pub remedy: String,
    /// The number of attempts that failed.
    pub attempts: u64,
    /// The time since which the disk is to be served, in nanoseconds since 1970.
    pub since_unix_time_ns: u64,
}

impl UnservedDisk {
    /// The state in words: `opening` until the first attempt has ended.
    pub fn state(&self) -> &'static str {
        if self.message.is_empty() { "opening" } else { "not served" }
    }
}

/// One disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DiskStatus {
    /// The disk's name.
    pub name: String,
    /// The virtual machine that the disk belongs to; may be empty.
    pub vm: String,
    /// The serial that guests see; may be empty.
    pub serial: String,
    /// The size, in bytes.
    pub capacity_bytes: u64,
    /// Whether writes are refused.
    pub read_only: bool,
    /// The block sizes of the disk. They do not change.
    pub geometry: GeometryStatus,
    /// The capabilities that front ends can offer.
    pub capabilities: CapabilitiesStatus,
    /// The layers, from the front end down to the back end.
    pub layers: Vec<LayerStatus>,
    /// The store of the bytes.
    pub backend: BackendStatus,
    /// The move in progress, or the last one since the daemon started; `None` if there was none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moving: Option<MoveStatus>,
    /// The vhost-user socket and the NBD exports.
    pub frontends: Vec<FrontendStatus>,
    /// The state of the introspection of the disk's guest.
    #[serde(default)]
    pub insight: InsightStatus,
    /// The number of requests that a crossing between layers refused: out of range, not offered, or
    /// contradictory.
    pub refused: u64,
    /// The current problems; empty on a sound disk.
    pub problems: Vec<Problem>,
}

/// The block sizes of a disk, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GeometryStatus {
    /// The logical block size.
    pub block_size: u32,
    /// The unit in which the underlying disk writes.
    pub physical_block_size: u32,
    /// The request size with the best throughput; 0 if it is unknown.
    pub optimal_size: u32,
    /// The unit of which offsets and lengths must be multiples.
    pub alignment: u32,
}

/// The capabilities of a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CapabilitiesStatus {
    /// Writes.
    pub write: bool,
    /// Flushes that make writes durable.
    pub flush: bool,
    /// Writes that are durable at their completion.
    pub force_unit_access: bool,
    /// Discards that free storage.
    pub discard: bool,
    /// Writes of zeroes.
    pub write_zeroes: bool,
    /// Reports of the allocated extents.
    pub extents: bool,
    /// Whether seeks take time, as on a hard disk.
    pub rotational: bool,
}

/// One layer with its definition.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerStatus {
    /// The name of the layer's kind: `classify`, `tap`, `delay`, `fault`, `log`, `wal`, `model`,
    /// `wait-for-room`.
    pub name: String,
    /// The layer's options.
    pub definition: LayerDefinition,
    /// The layer's own figures, which the metrics export too.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub figures: Vec<LayerFigure>,
    /// The further stores of the layer that have figures: the volume of a log, for example.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stores: Vec<StoreStatus>,
}

/// A further store of a layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreStatus {
    /// The kind of the back end: `nbd`, `valkey`.
    pub name: String,
    /// Its own figures, which the metrics export too.
    pub figures: Vec<LayerFigure>,
}

/// The figures of a layer that has any.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerFigures {
    /// The layer's name.
    pub layer: String,
    /// The figures, in the layer's order.
    pub figures: Vec<LayerFigure>,
}

impl LayerFigures {
    /// The same figures with counters since the sample `before`. A counter without an earlier value
    /// counts from now on.
    #[must_use]
    pub fn since(&self, before: &[Self]) -> Self {
        let before = before.iter().find(|before| before.layer == self.layer);
        let mut difference = self.clone();
        for figure in difference.figures.iter_mut().filter(|figure| figure.is_counter()) {
            let earlier = before.iter().flat_map(|layer| &layer.figures);
            let earlier = earlier.filter(|one| one.name == figure.name).map(|one| one.value).next();
            figure.value = figure.value.saturating_sub(earlier.unwrap_or(figure.value));
        }
        difference
    }
}

/// A figure of a layer or of a store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerFigure {
    /// The name, with the unit at the end: `used_bytes`. The name of a figure that only grows ends
    /// in `_total`.
    pub name: String,
    /// The meaning, in one sentence.
    pub meaning: String,
    /// The current value.
    pub value: u64,
}

impl LayerFigure {
    /// Whether the figure only grows.
    pub fn is_counter(&self) -> bool {
        self.name.ends_with("_total")
    }
}

impl DiskStatus {
    /// A figure of a layer of this disk; `None` if there is no such layer or figure.
    pub fn figure(&self, layer: &str, figure: &str) -> Option<u64> {
        let layer = self.layers.iter().find(|status| status.name == layer)?;
        layer.figures.iter().find(|one| one.name == figure).map(|one| one.value)
    }
}

/// The store of a disk's bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BackendStatus {
    /// `file`, `memory`, `null`, `nbd` or the name of another kind of store.
    pub name: String,
    /// The image, for `file` and for formats that QEMU serves.
    pub image: Option<String>,
    /// The pool of a disk with a volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store: Option<String>,
    /// The volume in the pool, or VOLUME@SNAPSHOT.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume: Option<String>,
    /// The files of an image that QEMU serves, the image first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub chain: Vec<ChainFile>,
    /// The URI of the export, for `nbd`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub server: Option<String>,
    /// Whether the host's page cache is bypassed.
    pub direct: bool,
    /// The disk model whose timing is simulated, if any.
    pub model: Option<ModelDefinition>,
    /// The store's own figures, which the metrics export too.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub figures: Vec<LayerFigure>,
}

impl BackendStatus {
    /// Where the bytes are, in words, as in the status of a move; `None` for a disk in memory.
    pub fn place(&self) -> Option<String> {
        match (&self.image, &self.store, &self.volume) {
            (Some(image), ..) => Some(image.clone()),
            (None, Some(store), Some(volume)) => Some(format!("volume {volume} of {store}")),
            _ => self.server.clone(),
        }
    }
}

/// A file of a chain of images.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChainFile {
    /// The path, without links.
    pub path: String,
    /// The format: `raw`, `qcow2`, `vmdk`, `vhdx` or `vdi`.
    pub format: String,
}

/// One front end of a disk.
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
    /// The path of the socket to which the VMM connects.
    pub socket: String,
    /// Whether a VMM is connected.
    pub connected: bool,
    /// The number of queues offered.
    pub queues_max: u16,
    /// The number of queues that the guest has started.
    pub queues_active: u16,
    /// The virtio features agreed on, by name.
    pub features: Vec<String>,
    /// The vhost-user protocol features agreed on, by name.
    pub protocol_features: Vec<String>,
    /// The number of connections since the start.
    pub connections: u64,
    /// The number of the guest's requests that were refused as malformed.
    pub refused: u64,
    /// The number of rings that were stopped because their contents were inconsistent.
    pub broken_queues: u64,
    /// The number of connections that ended with a protocol error.
    pub protocol_errors: u64,
    /// The number of connections that ended because shared memory of the VMM was lost.
    #[serde(default)]
    pub memory_losses: u64,
    /// The number of requests that were in flight when an earlier daemon died and that were
    /// repeated.
    pub recovered: u64,
    /// Whether the VMM keeps the requests in flight across a restart of the daemon.
    pub restart_safe: bool,
    /// Whether the VMM can be told of a new size of the disk.
    #[serde(default)]
    pub announces_sizes: bool,
    /// Whether the guest is migrating.
    pub migrating: bool,
    /// The mapped guest memory, in bytes.
    pub guest_memory_bytes: u64,
    /// Why the front end does not work, such as a failed queue and its error; `None` if it works.
    pub problem: Option<String>,
}

/// An export of an NBD listener.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NbdStatus {
    /// The address of the listener.
    pub address: String,
    /// The name of the export.
    pub export: String,
    /// The number of current connections to this export.
    pub connections: u64,
}

impl Client {
    /// The status of all disks.
    ///
    /// # Errors
    /// When there is no answer.
    pub fn disks(&self) -> Result<DiskList, ClientError> {
        self.ask(&DISK_LIST, &(), &(), &())
    }

    /// The status of one disk.
    ///
    /// # Errors
    /// When there is no answer, or no disk of this name.
    pub fn disk(&self, name: &str) -> Result<DiskStatus, ClientError> {
        self.ask(&DISK_STATUS, &name.to_owned(), &(), &())
    }

    /// Adds a disk to the running daemon.
    ///
    /// # Errors
    /// When there is no answer, or the disk cannot be served.
    pub fn add_disk(&self, definition: &DiskDefinition) -> Result<DiskStatus, ClientError> {
        self.ask(&ADD_DISK, &(), &AddQuery::default(), definition)
    }

    /// Adds a disk to the running daemon until the daemon ends.
    ///
    /// # Errors
    /// When there is no answer, or the disk cannot be served.
    pub fn add_disk_for_now(&self, definition: &DiskDefinition) -> Result<DiskStatus, ClientError> {
        self.ask(&ADD_DISK, &(), &AddQuery { temporary: true }, definition)
    }

    /// Changes a disk that is in use.
    ///
    /// # Errors
    /// When there is no answer, no disk of this name, or the change is not possible.
    pub fn change_disk(&self, name: &str, change: &DiskChange) -> Result<DiskStatus, ClientError> {
        self.ask(&CHANGE_DISK, &name.to_owned(), &(), change)
    }

    /// Changes the size of a disk. A smaller size is refused unless `shrink`.
    ///
    /// # Errors
    /// When there is no answer, no disk of this name, or the size of the back end cannot be
    /// changed.
    pub fn resize_disk(
        &self,
        name: &str,
        capacity_bytes: u64,
        shrink: bool,
    ) -> Result<DiskStatus, ClientError> {
        let change =
            DiskChange { capacity: Some(Bytes(capacity_bytes)), shrink, ..DiskChange::default() };
        self.change_disk(name, &change)
    }

    /// Makes a disk accept writes again after it stopped because acknowledged writes may be lost.
    /// Lost writes stay lost.
    ///
    /// # Errors
    /// When there is no answer, no disk of this name, nothing to recover from, or the store still
    /// fails.
    pub fn recover_disk(&self, name: &str) -> Result<DiskStatus, ClientError> {
        self.ask(&RECOVER_DISK, &name.to_owned(), &(), &())
    }

    /// Tries at once to serve a disk of the configuration that is not served.
    ///
    /// # Errors
    /// When there is no answer, no disk of this name, nothing to try, or the disk still cannot be
    /// served.
    pub fn retry_disk(&self, name: &str) -> Result<DiskStatus, ClientError> {
        self.ask(&RETRY_DISK, &name.to_owned(), &(), &())
    }

    /// Removes a disk from the running daemon; with `force` also while a VMM or an NBD client uses
    /// it.
    ///
    /// # Errors
    /// When there is no answer, or no disk of this name; without `force`, [`ErrorCode::Conflict`]
    /// for a disk in use.
    ///
    /// [`ErrorCode::Conflict`]: crate::ErrorCode::Conflict
    pub fn remove_disk(&self, name: &str, force: bool) -> Result<Done, ClientError> {
        let query = RemoveQuery { force, temporary: false };
        self.ask(&REMOVE_DISK, &name.to_owned(), &query, &())
    }

    /// Removes a disk from the running daemon until the daemon ends.
    ///
    /// # Errors
    /// The same as those of [`Self::remove_disk`].
    pub fn remove_disk_for_now(&self, name: &str, force: bool) -> Result<Done, ClientError> {
        let query = RemoveQuery { force, temporary: true };
        self.ask(&REMOVE_DISK, &name.to_owned(), &query, &())
    }
}
