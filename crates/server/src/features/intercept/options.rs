//! `[intercept]`: where interceptors of guests reach the daemon.

use std::path::PathBuf;

use fathom_options::{Check, Key, Problems, Section};
use serde::Deserialize;

use crate::configuration::{Extent, FeatureSection, Placed};

/// Where interceptors reach the daemon.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct InterceptOptions {
    /// The socket's path.
    pub socket: PathBuf,
}

impl Section for InterceptOptions {
    const KEYS: &'static [Key] = &[Key::new(
        "socket",
        "",
        "required: the path of the socket to which the plugin of a virtual machine connects",
    )];

    fn check(&self, _check: &mut Check<'_>) {}
}

impl FeatureSection for InterceptOptions {
    const NAME: &'static str = "intercept";
    const IS_LIST: bool = false;

    fn check_all(tables: &[Placed<Self>], _extent: Extent, problems: &mut Problems) {
        for Placed { definition, origins } in tables {
            if definition.socket.as_os_str().is_empty() {
                problems.add(
                    origins.of("socket"),
                    "[intercept] has no socket",
                    "add a line like `socket = \"/run/fathom/intercept.sock\"`",
                );
            }
        }
    }
}
