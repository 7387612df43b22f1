//! `[intercept]`: where interceptors of guests reach the daemon.

use std::path::PathBuf;

use fathom_intercept::PATTERNS_MAX;
use fathom_options::{Check, Key, Problems, Section};
use serde::Deserialize;

use super::choice::{Choice, ProcessPattern};
use crate::configuration::{Extent, FeatureSection, Placed};

/// The most stops of a guest at a hook in a second: more than programs reach that do something
/// with each call, and less than a loop of calls reaches (docs/interception.md).
const STOPS_MAX: u64 = 1_000_000;
/// Below that, the beginning of a program would be too much.
const STOPS_MAX_MIN: u64 = 1000;

/// Where interceptors reach the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct InterceptOptions {
    /// The socket's path.
    pub socket: PathBuf,
    /// The processes whose system calls are noted.
    pub calls: Vec<String>,
    /// The most stops of a guest at a hook in a second.
    pub stops_max: u64,
}

impl Default for InterceptOptions {
    fn default() -> Self {
        Self { socket: PathBuf::new(), calls: Vec::new(), stops_max: STOPS_MAX }
    }
}

impl InterceptOptions {
    /// The processes whose system calls are noted.
    pub(crate) fn choice(&self) -> Choice {
        Choice::new(self.calls.iter().filter_map(|text| ProcessPattern::new(text)))
    }
}

impl Section for InterceptOptions {
    const KEYS: &'static [Key] = &[
        Key::new(
            "socket",
            "",
            "required: the path of the socket to which the plugin of a virtual machine connects",
        ),
        Key::new(
            "calls",
            "[]",
            "the processes whose system calls are noted ([Syscalls](syscalls.md)): at most 16 \
             patterns with `*` and `?`, of commands (16 bytes), of control groups (`cgroup:…`) and of \
             the paths of programs (`path:…`)",
        ),
        Key::new(
            "stops_max",
            "1000000",
            "the most stops of a guest in a second where pages become dirty, and likewise at system \
             calls, of which each has two, at least 1000. At more, the interceptor \
             [takes the hook away](interception.md#the-bound) for a while",
        ),
    ];

    fn check(&self, check: &mut Check<'_>) {
        if self.calls.len() > PATTERNS_MAX {
            let message = format!("`calls` has {} patterns", self.calls.len());
            check.problem("calls", message, "use at most 16, such as \"postgres*\"");
        }
        if self.stops_max < STOPS_MAX_MIN {
            let message = format!("`stops_max` is {}", self.stops_max);
            check.problem("stops_max", message, "use 1000 or more, or remove the line");
        }
        for text in &self.calls {
            if ProcessPattern::new(text).is_none() {
                let message = format!("{text:?} in `calls` is not a pattern of processes");
                let remedy = "use a command of 1 to 16 bytes, such as \"postgres*\", a control group, \
                              such as \"cgroup:/system.slice/*\", or a program, such as \"path:/usr/bin/*\"";
                check.problem("calls", message, remedy);
            }
        }
    }
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
