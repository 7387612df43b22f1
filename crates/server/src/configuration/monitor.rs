//! `[monitor]`: the centre that this host answers queries of.

use std::path::PathBuf;

use fathom_monitor::HELD_MAX;
use fathom_monitor::link::BUFFER_MAX;
use fathom_tls::Certificates;

use super::check::{Address, parse_address, plain};
use super::table::{HELD_RANGE, Table};
use fathom_options::{Places, Problems};

/// The least and the most bytes that may wait for the centre.
const BUFFER_RANGE: std::ops::RangeInclusive<u64> = 64 << 10..=1 << 30;
/// The longest name of a host, in bytes.
const NAME_MAX: usize = 253;

/// Where the centre is, and who this host is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MonitorOptions {
    /// Where the centre listens, `host:port`.
    pub address: String,
    /// The name that the centre's certificate has to have; the host of the address by default.
    pub centre_name: Option<String>,
    /// This host's name; by default that of its certificate, or the host's own in plain text.
    pub name: Option<String>,
    /// The host's certificate, as a PEM file.
    pub certificate: Option<PathBuf>,
    /// Its private key.
    pub key: Option<PathBuf>,
    /// The authority that the centre's certificate must be signed by.
    pub authority: Option<PathBuf>,
    /// Whether the connection may be in plain text.
    pub plain_allowed: bool,
    /// The most bytes that wait for the centre.
    pub buffer_bytes: u64,
    /// The most rows, groups and values that the centre's queries may hold here.
    pub held_max: u64,
}

impl MonitorOptions {
    /// The files of TLS; `None` for plain text.
    pub fn files(&self) -> Option<Certificates> {
        let (certificate, key) = (self.certificate.clone()?, self.key.clone()?);
        Some(Certificates { certificate, key, authority: Some(self.authority.clone()?) })
    }
}

pub(super) fn monitor(table: Table<'_>) -> (MonitorOptions, Places) {
    let mut table = table.without_prefix();
    let options = MonitorOptions {
        address: table.string("address").unwrap_or_default(),
        centre_name: table.string("centre_name"),
        name: table.string("name"),
        certificate: table.path("certificate"),
        key: table.path("key"),
        authority: table.path("authority"),
        plain_allowed: table.boolean("plain_allowed").unwrap_or(false),
        buffer_bytes: table.bytes("buffer").unwrap_or(BUFFER_MAX as u64),
        held_max: table.integer("held_max", HELD_RANGE).unwrap_or(HELD_MAX),
    };
    (options, table.finish())
}

/// Checks what the reader of the table cannot see.
pub(super) fn check(options: &MonitorOptions, places: &Places, problems: &mut Problems) {
    if options.address.is_empty() {
        problems.add(
            places.of("address"),
            "[monitor] does not say where the centre is",
            "add a line like `address = \"monitor.example:10810\"`",
        );
    } else if !matches!(parse_address(&options.address), Some(Address::Tcp(_))) {
        problems.add(
            places.of("address"),
            format!("{:?} is no address of a centre", options.address),
            "write it like `address = \"monitor.example:10810\"`",
        );
    }
    for (key, name) in [("name", &options.name), ("centre_name", &options.centre_name)] {
        let wrong = |name: &&String| {
            let odd = |c: char| c.is_control() || c.is_whitespace();
            name.is_empty() || name.len() > NAME_MAX || name.contains(odd)
        };
        if let Some(name) = name.as_ref().filter(wrong) {
            problems.add(
                places.of(key),
                format!("{name:?} is no name of a host"),
                format!("choose one of at most {NAME_MAX} bytes, without spaces"),
            );
        }
    }
    if !BUFFER_RANGE.contains(&options.buffer_bytes) {
        problems.add(
            places.of("buffer"),
            "the buffer of [monitor] cannot have this size",
            "choose a size from 64K to 1G",
        );
    }
    check_files(options, places, problems);
}

fn check_files(options: &MonitorOptions, places: &Places, problems: &mut Problems) {
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
                places.whole(),
                "[monitor] would send events in plain text",
                "add `certificate`, `key` and `authority`, or `plain_allowed = true` where the \
                 network is trusted",
            );
        }
    } else if !missing.is_empty() {
        problems.add(
            places.whole(),
            format!("[monitor] has no `{}`", missing.join("` and no `")),
            "name all of `certificate`, `key` and `authority`, or none",
        );
    }
    for (key, path) in files {
        let Some(path) = path else { continue };
        if let Err(error) = std::fs::metadata(path) {
            problems.add(
                places.of(key),
                format!("{}: {}", path.display(), plain(&error)),
                "name a file that the daemon may read",
            );
        }
    }
}
