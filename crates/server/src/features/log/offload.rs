//! The configuration of the layer `offload`.

use std::path::PathBuf;
use std::sync::Arc;

use fathom_block::Layer;
use fathom_control::{Bytes, ModelDefinition, Nanoseconds};
use fathom_failure::Failure;
use fathom_layers::offload::{CarryKind, OffloadOptions};
use fathom_layers::{LayerContext, LayerOptions, Rank};
use fathom_options::{Check, Key};
use serde::{Deserialize, Serialize};

use crate::features::log::WalDefinition;
use crate::features::log::definition::is_nowhere;
use crate::stores::clusters::ClusterPlace;

/// What the daemon does when a peak of the disk's device is foreseen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum AutoKind {
    /// Nothing. The device is not observed.
    #[default]
    Off,
    /// It reports which disk's load it would carry.
    Report,
    /// It carries the load of the disk for which that is best.
    Act,
}

/// The place of the log and of the copies of a layer `offload`, and what it carries.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct OffloadDefinition {
    /// The log volume: a block device, a file, which is made if missing, or the URI of an NBD
    /// export.
    #[serde(skip_serializing_if = "is_nowhere")]
    pub log: PathBuf,
    /// The cluster that has the log volume, instead of a device or file.
    pub cluster: String,
    /// The name of the volume in the cluster.
    pub volume: String,
    /// The offset of the log in the volume.
    pub offset: Bytes,
    /// The length of the log; the rest of the volume by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size: Option<Bytes>,
    /// The bytes behind the log for copies of blocks that are read often.
    pub copies: Bytes,
    /// The time after which counts of reads are halved.
    pub window: Nanoseconds,
    /// What is carried.
    pub carry: CarryKind,
    /// What is done when a peak of the disk's device is foreseen.
    pub auto: AutoKind,
    /// How long changes may stay in the log after the end of carrying.
    pub age: Nanoseconds,
    /// The disk whose timing the log volume imitates.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<ModelDefinition>,
}

impl Default for OffloadDefinition {
    /// No volume, and no copies.
    fn default() -> Self {
        Self {
            log: PathBuf::new(),
            cluster: String::new(),
            volume: String::new(),
            offset: Bytes(0),
            size: None,
            copies: Bytes(0),
            window: Nanoseconds(OffloadOptions::default().window_ns),
            carry: CarryKind::default(),
            auto: AutoKind::default(),
            age: Nanoseconds(3_600_000_000_000),
            model: None,
        }
    }
}

impl OffloadDefinition {
    /// The volume in a cluster, if the log is there.
    fn place(&self) -> Option<ClusterPlace> {
        let (cluster, volume) = (self.cluster.clone(), self.volume.clone());
        (!cluster.is_empty()).then_some(ClusterPlace { cluster, volume })
    }

    /// Reports an invalid place in a cluster.
    fn check_cluster(&self, check: &mut Check<'_>) {
        if !is_nowhere(&self.log) {
            let message = "the layer `offload` has two log volumes";
            check.problem("log", message, "keep `log` or `cluster`");
        }
        if !fathom_valkey::is_name(&self.volume) {
            let message = format!("{:?} is not the name of a volume in a cluster", self.volume);
            let remedy = "add `volume`, for example the names of the host and the disk, of letters, digits, \
                          `.`, `_` and `-`";
            check.problem("volume", message, remedy);
        }
        if self.size.is_none() {
            let message = "a log in a cluster has no size";
            check.problem(
                "size",
                message,
                "add a `size`: its content is in the memory of the nodes",
            );
        }
        if self.offset.0 != 0 {
            check.problem("offset", "a log in a cluster begins at 0", "remove `offset`");
        }
        if self.model.is_some() {
            let message = "a log in a cluster has the timing of the cluster";
            check.problem("model", message, "remove `model`");
        }
    }

    /// The definition of the log.
    pub(crate) fn log(self) -> WalDefinition {
        let cluster = self.place();
        WalDefinition {
            log: cluster.as_ref().map_or(self.log, |place| place.path().into()),
            cluster,
            offset: self.offset,
            size: self.size,
            age: self.age,
            model: self.model,
            is_in_cache: false,
            offload: Some(OffloadOptions {
                carry: self.carry,
                copies: self.copies.0,
                window_ns: self.window.0,
                ..OffloadOptions::default()
            }),
        }
    }
}

impl LayerOptions for OffloadDefinition {
    const KIND: &'static str = "offload";
    const RANK: Rank = Rank::Log;
    const MEANING: &'static str =
        "carries changes and reads of a contended disk on another device, while it is switched on";
    const KEYS: &'static [Key] = &[
        Key::new(
            "log",
            "",
            "required, unless `cluster`: a file or block device on another device, or the URI of an NBD export",
        ),
        Key::new("cluster", "", "the name of a `[[cluster]]` that has the log instead"),
        Key::new(
            "volume",
            "",
            "the name of the log's volume in the cluster, different for each disk",
        ),
        Key::new("offset", "0", "the offset of the log in it, a multiple of 4 KiB"),
        Key::new("size", "", "the length of the log; the rest by default"),
        Key::new(
            "copies",
            "0",
            "the bytes behind the log for copies of blocks that are read often",
        ),
        Key::new("window", "\"10m\"", "the time after which counts of reads are halved"),
        Key::new("carry", "\"both\"", "what is carried: `off`, `reads`, `writes` or `both`"),
        Key::new(
            "auto",
            "\"off\"",
            "when a peak is foreseen: `act` carries the load, `report` only logs that it would",
        ),
        Key::new("age", "\"1h\"", "how long changes may stay in the log afterwards"),
        Key::new("model", "", "the disk whose timing the log imitates"),
    ];
    const ONCE: Option<&'static str> = Some("a change is durable in one log");
    const NEEDS_IMAGE: bool = true;

    fn check(&self, check: &mut Check<'_>) {
        if self.cluster.is_empty() {
            let model = self.model.as_ref();
            crate::features::log::definition::check_place(
                Self::KIND,
                &self.log,
                self.offset,
                model,
                check,
            );
        } else {
            self.check_cluster(check);
        }
        if self.copies.0 > 0 && self.size.is_none() {
            let message = "the layer `offload` has copies behind a log without an end";
            check.problem("copies", message, "add a `size` for the log");
        }
    }

    fn make(&self, context: &LayerContext<'_>) -> Result<Option<Arc<dyn Layer>>, Failure> {
        Ok(context.shared(Self::KIND))
    }
}
