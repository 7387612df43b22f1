//! The configuration of the layer `wal`.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use fathom_block::Layer;
use fathom_control::{Bytes, ModelDefinition, Nanoseconds};
use fathom_layers::{Key, LayerContext, LayerOptions};
use fathom_options::Check;
use serde::{Deserialize, Serialize};

use crate::configuration::check_model;

/// Where the log of a layer `wal` is, and how long changes stay in it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct WalDefinition {
    /// The log volume: a file, which is made where there is none, or a block device.
    #[serde(skip_serializing_if = "is_nowhere")]
    pub log: PathBuf,
    /// Where the log begins there.
    pub offset: Bytes,
    /// How much of it is the log's; all that is left where there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size: Option<Bytes>,
    /// How long a change may be in the log only.
    pub age: Nanoseconds,
    /// The disk whose timing the log volume is to have.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<ModelDefinition>,
}

#[expect(clippy::ptr_arg, reason = "serde calls it so")]
fn is_nowhere(path: &PathBuf) -> bool {
    path.as_os_str().is_empty()
}

impl Default for WalDefinition {
    /// Nowhere, for five seconds.
    fn default() -> Self {
        let age = Nanoseconds(5_000_000_000);
        Self { log: PathBuf::new(), offset: Bytes(0), size: None, age, model: None }
    }
}

impl LayerOptions for WalDefinition {
    const KIND: &'static str = "wal";
    const MEANING: &'static str = "makes changes durable in a log first and brings them home later";
    const KEYS: &'static [Key] = &[
        Key::new("log", "", "required: a file or block device"),
        Key::new("offset", "0", "where the log begins there, a multiple of 4 KiB"),
        Key::new("size", "", "how much of it is the log's; all that is left where there is none"),
        Key::new("age", "\"5s\"", "how long a change may be in the log only"),
        Key::new("model", "", "imitate the timing of another disk for the log"),
    ];
    const ONCE: Option<&'static str> = Some("a change is durable in one log");
    const NEEDS_IMAGE: bool = true;

    fn check(&self, check: &mut Check<'_>) {
        if self.log.as_os_str().is_empty() {
            let message = "the layer `wal` has no log volume";
            check.problem("log", message, "add `log`, a file or a block device");
        } else {
            check.new_file("log", &self.log, "there can be no log at");
        }
        if self.offset.0 % 4096 != 0 {
            let message = "the log begins at no multiple of 4 KiB";
            check.problem("offset", message, "correct `offset`");
        }
        if let Some(model) = &self.model {
            check_model(model, check);
        }
    }

    fn make(&self, context: &LayerContext<'_>) -> io::Result<Option<Arc<dyn Layer>>> {
        Ok(context.shared(Self::KIND))
    }
}
