//! How a disk is described: in the configuration file and when one is added to a running daemon.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::units::{Bytes, Nanoseconds};

/// A disk to be served.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DiskDefinition {
    /// The name: unique within the daemon.
    pub name: String,
    /// The virtual machine that it belongs to.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub vm: String,
    /// The serial that guests see, at most 20 bytes; the name where it is empty.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub serial: String,
    /// A raw image or block device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<PathBuf>,
    /// The image's format. Without it, an image whose content looks like another format than raw
    /// is refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub format: Option<ImageFormat>,
    /// A disk in memory of this size, empty at the start, gone at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<Bytes>,
    /// A disk of this size that reads as zeroes and forgets what is written: for measurements.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub null: Option<Bytes>,
    /// Whether the host's page cache is bypassed (`O_DIRECT`).
    pub direct: bool,
    /// Whether writes are refused.
    pub read_only: bool,
    /// What becomes of writes while the file system of the image is full.
    #[serde(skip_serializing_if = "WhenFull::is_default")]
    pub when_full: WhenFull,
    /// The logical block size that guests see, from 512 to 4096 bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub block_size: Option<Bytes>,
    /// Whether the disk has a tap as its first layer.
    pub tap: bool,
    /// Whether it is found out what a guest's requests mean, and they are accounted for by file,
    /// control group and process.
    pub classify: bool,
    /// The file sizes at which the I/O class changes, descending; the daemon's choice where there
    /// are none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub class_bounds: Option<Vec<Bytes>>,
    /// Further layers, from the front end down.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<LayerDefinition>,
    /// The disk whose timing is imitated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<ModelDefinition>,
    /// The socket for a guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vhost_user: Option<VhostUserDefinition>,
}

impl Default for DiskDefinition {
    /// Nothing but a tap and the layer that finds out what requests mean.
    fn default() -> Self {
        Self {
            name: String::new(),
            vm: String::new(),
            serial: String::new(),
            image: None,
            format: None,
            memory: None,
            null: None,
            direct: false,
            read_only: false,
            when_full: WhenFull::Fail,
            block_size: None,
            tap: true,
            classify: true,
            class_bounds: None,
            layers: Vec::new(),
            model: None,
            vhost_user: None,
        }
    }
}

/// The format of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ImageFormat {
    /// The disk's bytes as they are, whatever they look like.
    Raw,
}

impl std::str::FromStr for ImageFormat {
    type Err = ImageFormatError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "raw" { Ok(Self::Raw) } else { Err(ImageFormatError) }
    }
}

/// A format of images that is not served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageFormatError;

impl std::fmt::Display for ImageFormatError {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("only raw images are served; `fathom disk import` converts others")
    }
}

impl std::error::Error for ImageFormatError {}

/// What becomes of writes for which the storage has no room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WhenFull {
    /// They fail, and the guest sees an error.
    #[default]
    Fail,
    /// They wait until there is room, and the guest sees a slow disk.
    Wait,
}

impl WhenFull {
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// What keeps a disk's bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BackendDefinition {
    /// A raw image or block device.
    Image(PathBuf),
    /// Memory, in bytes.
    Memory(u64),
    /// Nothing, in bytes.
    Null(u64),
}

impl DiskDefinition {
    /// The log that its changes are durable in first, if it has one.
    pub fn wal(&self) -> Option<&WalDefinition> {
        self.layers.iter().find_map(|layer| match layer {
            LayerDefinition::Wal(wal) => Some(wal),
            _ => None,
        })
    }

    /// The one back end that is named, or `None` where there is none or more than one.
    pub fn backend(&self) -> Option<BackendDefinition> {
        match (&self.image, self.memory, self.null) {
            (Some(image), None, None) => Some(BackendDefinition::Image(image.clone())),
            (None, Some(size), None) => Some(BackendDefinition::Memory(size.0)),
            (None, None, Some(size)) => Some(BackendDefinition::Null(size.0)),
            _ => None,
        }
    }
}

/// What changes on a running disk; what is not named stays.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DiskChange {
    /// Another size.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capacity: Option<Bytes>,
    /// Whether the disk has a tap.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tap: Option<bool>,
    /// Whether it is found out what requests mean.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub classify: Option<bool>,
    /// Other layers below the tap.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layers: Option<Vec<LayerDefinition>>,
    /// Allow a smaller size: what lies behind the new end is lost.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub shrink: bool,
}

/// One layer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum LayerDefinition {
    /// Finds out what requests mean, and accounts for them.
    Classify,
    /// Counts, measures and records.
    Tap,
    /// Makes requests take longer.
    Delay(DelayDefinition),
    /// Makes requests fail, by seed.
    Fault(FaultDefinition),
    /// Writes requests to the log.
    Log(LogDefinition),
    /// Makes changes durable in a log first and brings them home later.
    Wal(WalDefinition),
}

impl LayerDefinition {
    /// The layer's word.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Classify => "classify",
            Self::Tap => "tap",
            Self::Delay(_) => "delay",
            Self::Fault(_) => "fault",
            Self::Log(_) => "log",
            Self::Wal(_) => "wal",
        }
    }
}

/// Makes requests take longer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DelayDefinition {
    /// How much longer each takes.
    pub time: Nanoseconds,
    /// How much longer still, at most: drawn evenly for each request.
    pub jitter: Nanoseconds,
    /// The operations that are delayed; all where it is empty.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub operations: Vec<String>,
    /// Makes the draws repeatable.
    pub seed: u64,
}

/// Makes requests fail, by seed, operation, range and count.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FaultDefinition {
    /// What happens to a request that is struck.
    pub effect: FaultEffect,
    /// The share of the requests that is struck, from 0 to 1.
    pub rate: f64,
    /// The operations that are meant; all where it is empty.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub operations: Vec<String>,
    /// Where the part of the disk that is meant begins.
    pub offset: Bytes,
    /// How long that part is; the whole disk, and requests without a range too, where it is 0.
    pub length: Bytes,
    /// How many requests pass before the first is struck.
    pub after: u64,
    /// How many are struck at most; any number where there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub strikes_max: Option<u64>,
    /// Makes the draws repeatable.
    pub seed: u64,
}

impl Default for FaultDefinition {
    /// Every request fails.
    fn default() -> Self {
        Self {
            effect: FaultEffect::Refused,
            rate: 1.0,
            operations: Vec::new(),
            offset: Bytes(0),
            length: Bytes(0),
            after: 0,
            strikes_max: None,
            seed: 0,
        }
    }
}

/// What happens to a request that is struck.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FaultEffect {
    /// It fails, and nothing of it reaches the disk.
    #[default]
    Refused,
    /// It is carried out, and fails all the same.
    Late,
    /// A prefix of what it modifies reaches the disk, and it fails.
    Short,
    /// Some of the sectors that it modifies reach the disk, and it fails.
    Torn,
}

/// Writes requests to the log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LogDefinition {
    /// How many lines are written in a second at most; any number where it is 0.
    pub lines_per_second_max: u64,
    /// The file that they are added to; the daemon's log where there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<PathBuf>,
}

impl Default for LogDefinition {
    /// A hundred lines a second, in the daemon's log.
    fn default() -> Self {
        Self { lines_per_second_max: 100, file: None }
    }
}

/// Makes changes durable in a log first and brings them home later.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct WalDefinition {
    /// The log volume: a file, which is made where there is none, or a block device.
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

impl Default for WalDefinition {
    /// Nowhere, for five seconds.
    fn default() -> Self {
        Self {
            log: PathBuf::new(),
            offset: Bytes(0),
            size: None,
            age: Nanoseconds(5_000_000_000),
            model: None,
        }
    }
}

/// A disk whose timing is imitated.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ModelDefinition {
    /// Which.
    pub kind: ModelKind,
    /// Makes the draws repeatable.
    pub seed: u64,
    /// Whether a hard disk's tracks are just those that the image needs, so that seeks are as long
    /// as on a full disk; otherwise the image lies at the outer edge of 1 TB.
    pub spanning: bool,
    /// What a hard disk takes of writes before they are on its tracks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub write_cache: Option<Bytes>,
    /// Whether a solid-state disk's buffer survives a loss of power, so that flushes cost nothing.
    pub power_loss_protected: bool,
}

/// The disks that can be imitated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ModelKind {
    /// Seek, rotation, transfer, one head.
    #[default]
    Hdd,
    /// Channels; programs and erases that stand in the way of reads. An `NVMe` disk.
    Ssd,
    /// The same behind SATA.
    SataSsd,
}

/// The socket of a virtio-blk device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct VhostUserDefinition {
    /// Where the VMM connects.
    pub socket: PathBuf,
    /// The most queues that it can use. How long they are is the VMM's choice.
    pub queues: u16,
    /// How many threads serve the queues; as many as the daemon may use processors where there is
    /// none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads: Option<u16>,
    /// The longest that a ring is watched before its thread sleeps; the daemon's choice where there
    /// is none, never where it is 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spin: Option<Nanoseconds>,
    /// The group whose members may connect too (mode 0660); only the daemon's user where there is
    /// none (mode 0600).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
}

impl Default for VhostUserDefinition {
    /// Four queues, at no place.
    fn default() -> Self {
        Self { socket: PathBuf::new(), queues: 4, threads: None, spin: None, group: None }
    }
}

/// One NBD listener.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ListenerDefinition {
    /// `unix:/path` or `host:port`.
    pub address: String,
    /// The disks that can be had here.
    pub exports: ExportsDefinition,
    /// TLS, without which TCP is refused unless `plain_allowed`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls: Option<TlsDefinition>,
    /// Whether connections without TLS are served over TCP, and beside TLS.
    pub plain_allowed: bool,
    /// The group whose members may connect to a Unix socket too (mode 0660); only the daemon's user
    /// where there is none (mode 0600).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
}

/// The disks that an NBD listener offers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "ExportsWritten", into = "ExportsWritten")]
pub enum ExportsDefinition {
    /// All, also those added later.
    #[default]
    All,
    /// Those named.
    Named(Vec<String>),
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum ExportsWritten {
    Word(String),
    Names(Vec<String>),
}

impl From<ExportsWritten> for ExportsDefinition {
    fn from(written: ExportsWritten) -> Self {
        match written {
            ExportsWritten::Word(word) if word == "all" => Self::All,
            ExportsWritten::Word(name) => Self::Named(vec![name]),
            ExportsWritten::Names(names) => Self::Named(names),
        }
    }
}

impl From<ExportsDefinition> for ExportsWritten {
    fn from(exports: ExportsDefinition) -> Self {
        match exports {
            ExportsDefinition::All => Self::Word("all".into()),
            ExportsDefinition::Named(names) => Self::Names(names),
        }
    }
}

/// How an NBD listener proves itself and whom it trusts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TlsDefinition {
    /// The server's certificate chain (PEM).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub certificate: Option<PathBuf>,
    /// Its private key (PEM).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<PathBuf>,
    /// The authority whose clients are let in (PEM); any client where there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_ca: Option<PathBuf>,
    /// A file of `name:key` lines, in place of certificates.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub psk: Option<PathBuf>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_definition_survives_json_and_unknown_fields_are_refused() {
        let text = r#"{"name": "root", "image": "/a.img",
            "layers": [{"kind": "delay", "time": "5ms"}, {"kind": "tap"}],
            "vhost_user": {"socket": "/run/a.sock"}}"#;
        let disk: DiskDefinition = serde_json::from_str(text).unwrap();
        assert!(disk.tap);
        assert_eq!(disk.vhost_user.as_ref().unwrap().queues, 4);
        let again = serde_json::from_str(&serde_json::to_string(&disk).unwrap()).unwrap();
        assert_eq!(disk, again);
        assert!(serde_json::from_str::<DiskDefinition>(r#"{"name": "a", "imgae": "b"}"#).is_err());
    }

    #[test]
    fn exports_are_a_word_or_a_list() {
        let read = |text| serde_json::from_str::<ExportsDefinition>(text).unwrap();
        assert_eq!(read("\"all\""), ExportsDefinition::All);
        assert_eq!(read("[\"a\"]"), ExportsDefinition::Named(vec!["a".into()]));
        assert_eq!(serde_json::to_string(&ExportsDefinition::All).unwrap(), "\"all\"");
    }
}
