//! The configuration of the layer `wal`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use fathom_block::Layer;
use fathom_control::{Bytes, ModelDefinition, Nanoseconds};
use fathom_failure::Failure;
use fathom_layers::offload::OffloadOptions;
use fathom_layers::{LayerContext, LayerOptions, Rank};
use fathom_nbd::NbdUri;
use fathom_options::{Check, Key};
use serde::{Deserialize, Serialize};

use crate::configuration::check_model;
use crate::stores::clusters::ClusterPlace;

/// The place of the log of a layer `wal`, and how long changes stay in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct WalDefinition {
    /// The log volume: a block device, a file, which is made if missing, or the URI of an NBD
    /// export.
    #[serde(skip_serializing_if = "is_nowhere")]
    pub log: PathBuf,
    /// The offset of the log in the volume.
    pub offset: Bytes,
    /// The length of the log; the rest of the volume by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size: Option<Bytes>,
    /// How long a change may be only in the log.
    pub age: Nanoseconds,
    /// The disk whose timing the log volume imitates.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<ModelDefinition>,
    /// Whether the log is that of a cache in the mode `write-back`, and the volume the store of the
    /// cache.
    #[serde(skip)]
    pub is_in_cache: bool,
    /// The volume in a cluster that has the log, instead of a file or device.
    #[serde(skip)]
    pub cluster: Option<ClusterPlace>,
    /// What the layer `offload` carries, if the log is that of one.
    #[serde(skip)]
    pub offload: Option<OffloadOptions>,
}

impl WalDefinition {
    /// The NBD export that is the log volume, if it is one.
    pub(crate) fn export(&self) -> Option<Result<NbdUri, Failure>> {
        export(&self.log)
    }

    /// The server of another host that has the log, for messages: disks with logs at one server are
    /// served by one thread when it answers.
    pub(crate) fn server(&self) -> Option<String> {
        if let Some(place) = &self.cluster {
            return Some(format!("the cluster {:?}", place.cluster));
        }
        let export = self.export()?.ok()?;
        Some(format!("the NBD server {}", export.server()))
    }
}

/// The NBD export that `log` names instead of a path.
fn export(log: &Path) -> Option<Result<NbdUri, Failure>> {
    let text = log.to_str().filter(|text| NbdUri::is_meant(text))?;
    Some(NbdUri::parse(text))
}

#[expect(clippy::ptr_arg, reason = "serde calls it so")]
pub(crate) fn is_nowhere(path: &PathBuf) -> bool {
    path.as_os_str().is_empty()
}

/// Reports an invalid place of the log of a layer `kind`.
pub(crate) fn check_place(
    kind: &str,
    log: &Path,
    offset: Bytes,
    model: Option<&ModelDefinition>,
    check: &mut Check<'_>,
) {
    if log.as_os_str().is_empty() {
        let message = format!("the layer `{kind}` has no log volume");
        check.problem("log", message, "add `log`, a file or a block device");
    } else if let Some(export) = export(log) {
        if let Err(failure) = export {
            check.problem("log", failure.message, failure.remedy);
        }
        if model.is_some() {
            let message = "a log at another host has the timing of that host";
            check.problem("model", message, "remove `model`");
        }
    } else {
        check.new_file("log", log, "a log cannot be at");
    }
    if offset.0 % 4096 != 0 {
        let message = "the log does not begin at a multiple of 4 KiB";
        check.problem("offset", message, "correct `offset`");
    }
    if let Some(model) = model {
        check_model(model, check);
    }
}

impl Default for WalDefinition {
    /// No volume; changes stay for five seconds.
    fn default() -> Self {
        let age = Nanoseconds(5_000_000_000);
        Self {
            log: PathBuf::new(),
            offset: Bytes(0),
            size: None,
            age,
            model: None,
            is_in_cache: false,
            cluster: None,
            offload: None,
        }
    }
}

impl LayerOptions for WalDefinition {
    const KIND: &'static str = "wal";
    const RANK: Rank = Rank::Log;
    const MEANING: &'static str =
        "makes changes durable in a log first, and writes them back later";
    const KEYS: &'static [Key] = &[
        Key::new("log", "", "required: a file, a block device or the URI of an NBD export"),
        Key::new("offset", "0", "the offset of the log in it, a multiple of 4 KiB"),
        Key::new("size", "", "the length of the log; the rest by default"),
        Key::new("age", "\"5s\"", "how long a change may be only in the log"),
        Key::new("model", "", "the disk whose timing the log imitates"),
    ];
    const ONCE: Option<&'static str> = Some("a change is durable in one log");
    const NEEDS_IMAGE: bool = true;

    fn check(&self, check: &mut Check<'_>) {
        check_place(Self::KIND, &self.log, self.offset, self.model.as_ref(), check);
    }

    fn make(&self, context: &LayerContext<'_>) -> Result<Option<Arc<dyn Layer>>, Failure> {
        Ok(context.shared(Self::KIND))
    }
}
