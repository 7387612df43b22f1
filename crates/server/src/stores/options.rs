//! `[[cluster]]`: Valkey clusters in which logs can be.

use std::path::PathBuf;
use std::time::Duration;

use fathom_control::Nanoseconds;
use fathom_options::{Check, Key, Problems, Section};
use fathom_valkey::{ClusterOptions, ClusterTls};
use serde::Deserialize;

use crate::configuration::{Address, Extent, FeatureSection, Placed, check_files, parse_address};

/// The most replicas that a write can wait for.
const COPIES_MAX: u32 = 8;
/// The time limits that a request can have, in nanoseconds: a log's opening waits for a minute.
const TIMEOUT_RANGE: std::ops::RangeInclusive<u64> = 1_000_000_000..=45_000_000_000;

/// A Valkey cluster, and how it is reached.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ClusterDefinition {
    /// The name that layers use.
    pub name: String,
    /// The addresses of some nodes.
    pub nodes: Vec<String>,
    /// The user of the nodes' access control lists.
    pub user: Option<String>,
    /// The file with the user's password.
    pub password_file: Option<PathBuf>,
    /// The file with the authority that has signed the nodes' certificates (PEM).
    pub authority: Option<PathBuf>,
    /// The file with this host's certificate (PEM).
    pub certificate: Option<PathBuf>,
    /// The file with the certificate's private key (PEM).
    pub key: Option<PathBuf>,
    /// Whether the connections may be in plain text.
    pub plain_allowed: bool,
    /// The replicas that have a write before it completes.
    pub copies: u32,
    /// How long a request is tried.
    pub timeout: Nanoseconds,
}

impl Default for ClusterDefinition {
    /// No nodes; each write has one copy.
    fn default() -> Self {
        let ClusterOptions { copies, timeout, .. } = ClusterOptions::default();
        Self {
            name: String::new(),
            nodes: Vec::new(),
            user: None,
            password_file: None,
            authority: None,
            certificate: None,
            key: None,
            plain_allowed: false,
            copies,
            timeout: Nanoseconds(timeout.as_nanos() as u64),
        }
    }
}

impl Section for ClusterDefinition {
    const KEYS: &'static [Key] = &[
        Key::new("name", "", "required: the name that layers use"),
        Key::new(
            "nodes",
            "[]",
            "required: the addresses of some nodes, `host:port`. The others are found through them",
        ),
        Key::new(
            "user",
            "",
            "the user of the nodes' access control lists; the default user if absent",
        ),
        Key::new("password_file", "", "a file with the user's password in its first line"),
        Key::new(
            "authority",
            "",
            "required, unless `plain_allowed`: the authority that has signed the nodes' certificates (PEM)",
        ),
        Key::new("certificate", "", "this host's certificate (PEM), if the nodes require one"),
        Key::new("key", "", "its private key (PEM)"),
        Key::new(
            "plain_allowed",
            "false",
            "work without TLS: the disks' data crosses the network in plain text",
        ),
        Key::new(
            "copies",
            "1",
            "the replicas that have a write before it completes. Set it to the number of replicas of each \
             primary",
        ),
        Key::new("timeout", "\"30s\"", "how long a request is tried before it fails"),
    ];

    fn check(&self, check: &mut Check<'_>) {
        for node in &self.nodes {
            if !matches!(parse_address(node), Some(Address::Tcp(_))) {
                check.problem(
                    "nodes",
                    format!("{node:?} is not the address of a node"),
                    "write it like `nodes = [\"10.0.0.1:6379\"]`",
                );
            }
        }
        if self.copies > COPIES_MAX {
            let message = format!("a write cannot wait for {} copies", self.copies);
            check.problem("copies", message, format!("choose at most {COPIES_MAX}"));
        }
        if !TIMEOUT_RANGE.contains(&self.timeout.0) {
            let message = "a request to a cluster cannot have this time limit";
            check.problem("timeout", message, "choose one from 1s to 45s");
        }
        if self.certificate.is_some() != self.key.is_some() {
            let message = "a certificate needs its private key";
            check.problem("certificate", message, "name both `certificate` and `key`, or none");
        }
        if self.authority.is_none() && !self.plain_allowed {
            check.problem(
                "authority",
                "the disks' data would cross the network in plain text",
                "add `authority`, or `plain_allowed = true` if the network is trusted",
            );
        }
    }
}

impl ClusterDefinition {
    /// What the client needs.
    pub fn options(&self) -> ClusterOptions {
        let own = self.certificate.clone().zip(self.key.clone());
        let tls = self.authority.clone().map(|authority| ClusterTls { authority, own });
        ClusterOptions {
            nodes: self.nodes.clone(),
            user: self.user.clone(),
            password: self.password_file.clone(),
            tls,
            copies: self.copies,
            timeout: Duration::from_nanos(self.timeout.0),
        }
    }
}

impl FeatureSection for ClusterDefinition {
    const NAME: &'static str = "cluster";
    const IS_LIST: bool = true;

    fn check_all(clusters: &[Placed<Self>], extent: Extent, problems: &mut Problems) {
        check_clusters(clusters, extent, problems);
    }
}

/// Finds missing and duplicate names, and files that cannot be read.
fn check_clusters(clusters: &[Placed<ClusterDefinition>], extent: Extent, problems: &mut Problems) {
    for (index, Placed { definition, origins }) in clusters.iter().enumerate() {
        let is_same = |other: &Placed<ClusterDefinition>| other.definition.name == definition.name;
        if !fathom_valkey::is_name(&definition.name) {
            let message = format!("{:?} is not the name of a cluster", definition.name);
            problems.add(origins.of("name"), message, "use letters, digits, `.`, `_` and `-`");
        } else if clusters[..index].iter().any(is_same) {
            let message = format!("there are two clusters {:?}", definition.name);
            problems.add(origins.of("name"), message, "give each a different name");
        }
        if definition.nodes.is_empty() {
            let message = format!("the cluster {:?} has no nodes", definition.name);
            problems.add(
                origins.of("nodes"),
                message,
                "add a line like `nodes = [\"10.0.0.1:6379\"]`",
            );
        }
        let files = [
            ("password_file", &definition.password_file),
            ("authority", &definition.authority),
            ("certificate", &definition.certificate),
            ("key", &definition.key),
        ];
        check_files(&files, origins, extent, problems);
    }
}
