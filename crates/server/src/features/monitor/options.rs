//! `[monitor]`: the centre whose queries this host helps to answer.

use std::num::NonZeroU64;
use std::path::PathBuf;

use fathom_control::Bytes;
use fathom_monitor::link::BUFFER_MAX;
use fathom_options::{Check, Key, Origins, Problems, Section};
use fathom_tls::Certificates;
use serde::Deserialize;

use crate::configuration::{
    Address, Extent, FeatureSection, HELD_MAX, Placed, check_files as check_readable, parse_address,
};

/// The least and the most bytes that may wait for the centre.
const BUFFER_RANGE: std::ops::RangeInclusive<u64> = 64 << 10..=1 << 30;
/// The longest name of a host, in bytes.
const NAME_MAX: usize = 253;

/// The address of the centre, and the name of this host.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MonitorOptions {
    /// The centre's address, `host:port`.
    pub address: String,
    /// The name in the centre's certificate; by default the host of the address.
    pub centre_name: Option<String>,
    /// This host's name; by default that of its certificate, or, in plain text, the host name.
    pub name: Option<String>,
    /// The file with the host's certificate (PEM).
    pub certificate: Option<PathBuf>,
    /// The file with the certificate's private key (PEM).
    pub key: Option<PathBuf>,
    /// The file with the authority that has signed the centre's certificate (PEM).
    pub authority: Option<PathBuf>,
    /// Whether the connection may be in plain text.
    pub plain_allowed: bool,
    /// The most bytes that wait for the centre.
    pub buffer: Bytes,
    /// The most rows, groups and values that the centre's queries may hold on this host.
    pub held_max: NonZeroU64,
}

impl Default for MonitorOptions {
    /// No centre.
    fn default() -> Self {
        Self {
            address: String::new(),
            centre_name: None,
            name: None,
            certificate: None,
            key: None,
            authority: None,
            plain_allowed: false,
            buffer: Bytes(BUFFER_MAX as u64),
            held_max: HELD_MAX,
        }
    }
}

impl Section for MonitorOptions {
    const KEYS: &'static [Key] = &[
        Key::new("address", "", "required: the address at which the centre listens, `host:port`"),
        Key::new(
            "centre_name",
            "",
            "the name that the centre's certificate has to have; by default the host of `address`",
        ),
        Key::new(
            "name",
            "",
            "this host's name at the centre; by default that of its certificate, or without \
             certificates the host name",
        ),
        Key::new(
            "certificate",
            "",
            "required, unless `plain_allowed`: this host's certificate (PEM)",
        ),
        Key::new("key", "", "required, unless `plain_allowed`: its private key (PEM)"),
        Key::new(
            "authority",
            "",
            "required, unless `plain_allowed`: the authority that has signed the centre's \
             certificate (PEM)",
        ),
        Key::new(
            "plain_allowed",
            "false",
            "work without certificates: events are sent in plain text, to any program at the \
             address",
        ),
        Key::new(
            "buffer",
            "\"8M\"",
            "the most data that waits for the centre; beyond it the oldest rows are dropped, and \
             counted",
        ),
        Key::new(
            "held_max",
            "10000000",
            "the most rows, groups and values that all of the centre's queries may hold in this \
             daemon. Beyond it the daemon ends them and refuses them, and the centre shows the \
             reason",
        ),
    ];

    fn check(&self, check: &mut Check<'_>) {
        let is_centre = matches!(parse_address(&self.address), Some(Address::Tcp(_)));
        if !self.address.is_empty() && !is_centre {
            check.problem(
                "address",
                format!("{:?} is not an address of a centre", self.address),
                "write it like `address = \"monitor.example:10810\"`",
            );
        }
        for (key, name) in [("name", &self.name), ("centre_name", &self.centre_name)] {
            let wrong = |name: &&String| {
                let odd = |c: char| c.is_control() || c.is_whitespace();
                name.is_empty() || name.len() > NAME_MAX || name.contains(odd)
            };
            if let Some(name) = name.as_ref().filter(wrong) {
                check.problem(
                    key,
                    format!("{name:?} is not a valid name of a host"),
                    format!("choose one of at most {NAME_MAX} bytes, without spaces"),
                );
            }
        }
        if !BUFFER_RANGE.contains(&self.buffer.0) {
            check.problem(
                "buffer",
                "the buffer of [monitor] cannot have this size",
                "choose a size from 64K to 1G",
            );
        }
    }
}

impl MonitorOptions {
    /// The files of TLS; `None` for plain text.
    pub fn files(&self) -> Option<Certificates> {
        let (certificate, key) = (self.certificate.clone()?, self.key.clone()?);
        Some(Certificates { certificate, key, authority: Some(self.authority.clone()?) })
    }
}

impl FeatureSection for MonitorOptions {
    const NAME: &'static str = "monitor";
    const IS_LIST: bool = false;

    fn check_all(tables: &[Placed<Self>], extent: Extent, problems: &mut Problems) {
        for Placed { definition, origins } in tables {
            check_files(definition, origins, extent, problems);
        }
    }
}

/// Finds missing keys, and checks the files.
fn check_files(
    options: &MonitorOptions,
    origins: &Origins,
    extent: Extent,
    problems: &mut Problems,
) {
    if options.address.is_empty() {
        problems.add(
            origins.of("address"),
            "[monitor] has no address of the centre",
            "add a line like `address = \"monitor.example:10810\"`",
        );
    }
    let files = [
        ("certificate", &options.certificate),
        ("key", &options.key),
        ("authority", &options.authority),
    ];
    let missing: Vec<&str> =
        files.iter().filter(|(_, path)| path.is_none()).map(|(key, _)| *key).collect();
    if missing.len() == files.len() {
        if !options.plain_allowed {
            problems.add(
                origins.whole(),
                "[monitor] would send events in plain text",
                "add `certificate`, `key` and `authority`, or `plain_allowed = true` if the \
                 network is trusted",
            );
        }
    } else if !missing.is_empty() {
        problems.add(
            origins.whole(),
            format!("[monitor] has no `{}`", missing.join("` and no `")),
            "name all of `certificate`, `key` and `authority`, or none",
        );
    }
    check_readable(&files, origins, extent, problems);
}
