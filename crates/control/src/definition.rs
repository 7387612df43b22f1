//! The definition of a disk: in the configuration file, and when a disk is added to a running
//! daemon.

mod layer;

use std::path::PathBuf;

use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use fathom_options::{Bytes, Key, Nanoseconds, Section};

pub use layer::{LayerDefinition, ModelDefinition, ModelKind};

/// A disk to be served.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DiskDefinition {
    /// The name: unique within the daemon.
    pub name: String,
    /// The virtual machine that the disk belongs to.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub vm: String,
    /// The serial that guests see, at most 20 bytes; if empty, they see the name.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub serial: String,
    /// A raw image or block device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<PathBuf>,
    /// The image's format. Without it, the image is raw, and the daemon refuses one whose content
    /// looks like another format.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub format: Option<ImageFormat>,
    /// The folders, besides that of the image, in which backing files of the image may be.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub backing_folders: Vec<PathBuf>,
    /// A name for a block device that no other disk has, for its marks. Needed if the kernel knows
    /// no lasting name of the device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// A pool of the block store: a file or block device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub store: Option<PathBuf>,
    /// The volume of the pool, or `VOLUME@SNAPSHOT`, which is read-only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub volume: Option<String>,
    /// The URI of an NBD export that has the disk's blocks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nbd: Option<String>,
    /// How long a request to the NBD server is tried before it fails; the daemon's default if
    /// absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout: Option<Nanoseconds>,
    /// The size of a disk in memory. It is empty at the start, and its data is lost at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<Bytes>,
    /// The size of a disk that reads as zeroes and discards writes: for measurements.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub null: Option<Bytes>,
    /// Whether the host's page cache is bypassed (`O_DIRECT`).
    pub direct: bool,
    /// Whether writes are refused.
    pub read_only: bool,
    /// The treatment of writes while the file system of the image is full.
    #[serde(skip_serializing_if = "WhenFull::is_default")]
    pub when_full: WhenFull,
    /// The logical block size that guests see, from 512 to 4096 bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub block_size: Option<Bytes>,
    /// Whether the disk has a tap as its first layer.
    pub tap: bool,
    /// Whether the disk has the layer `classify`, which determines the meaning of a guest's
    /// requests. They are then counted by file, control group and process.
    pub classify: bool,
    /// The file sizes at which the I/O class changes, descending; the daemon's default if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub class_bounds: Option<Vec<Bytes>>,
    /// Further layers, from the front end down to the back end.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<LayerDefinition>,
    /// The disk model whose timing is simulated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<ModelDefinition>,
    /// The vhost-user socket for a guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vhost_user: Option<VhostUserDefinition>,
}

impl Default for DiskDefinition {
    /// A disk with a tap and the layer `classify`, and nothing else.
    fn default() -> Self {
        Self {
            name: String::new(),
            vm: String::new(),
            serial: String::new(),
            image: None,
            format: None,
            backing_folders: Vec::new(),
            key: None,
            store: None,
            volume: None,
            nbd: None,
            timeout: None,
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

impl DiskDefinition {
    /// Whether both have the same store, named in the same way.
    pub fn has_store_of(&self, other: &Self) -> bool {
        let is_raw = |it: &Self| it.format.is_none_or(|format| format == ImageFormat::Raw);
        self.image == other.image
            && (self.format == other.format || is_raw(self) && is_raw(other))
            && self.store == other.store
            && self.volume == other.volume
            && self.nbd == other.nbd
            && self.memory.is_some() == other.memory.is_some()
            && self.null.is_some() == other.null.is_some()
    }

    /// The same disk with the store of `other`.
    #[must_use]
    pub fn with_store_of(self, other: &Self) -> Self {
        let DiskDefinition { image, format, backing_folders, key, store, volume, .. } =
            other.clone();
        let DiskDefinition { nbd, timeout, memory, null, direct, block_size, .. } = other.clone();
        let with = Self { image, format, backing_folders, key, store, volume, ..self };
        Self { nbd, timeout, memory, null, direct, block_size, ..with }
    }
}

impl Section for DiskDefinition {
    const KEYS: &'static [Key] = &[
        Key::new("name", "", "required: unique; also the name of its NBD export"),
        Key::new("vm", "\"\"", "the virtual machine of the disk, for metrics and events"),
        Key::new(
            "serial",
            "",
            "the serial that the guest sees, at most 20 bytes; by default the name",
        ),
        Key::new(
            "image",
            "",
            "a raw image or block device, or an image in another `format`; `fathom disk create` \
             creates raw images. The image is locked while the disk is served",
        ),
        Key::new(
            "format",
            "",
            "`\"raw\"`: the image is raw, even if its content looks like another format. `\"qcow2\"`, \
             `\"vmdk\"`, `\"vhdx\"`, `\"vdi\"`: QEMU's code serves it ([images.md](images.md)). Without \
             it, an image that looks like qcow2, VMDK, VHD, VHDX, VDI, QED, Parallels or DMG is \
             not served (see below)",
        ),
        Key::new(
            "backing_folders",
            "[]",
            "with a `format` other than raw: folders, besides that of the image, in which its backing \
             files may be",
        ),
        Key::new(
            "key",
            "",
            "a name for the block device `image` that no other disk has. Needed by the layers `wal` \
             and `offload` and by caches with a `store` if the kernel knows no lasting name of the \
             device (see [the marks of devices](wal.md#the-marks-of-block-devices))",
        ),
        Key::new(
            "store",
            "",
            "instead of `image`: a [pool of the block store](store.md), a file or block device; \
             `fathom store create` makes pools. Disks with volumes of one pool share it",
        ),
        Key::new(
            "volume",
            "",
            "the volume of the pool `store`, or `VOLUME@SNAPSHOT` for a snapshot, which is read-only",
        ),
        Key::new(
            "nbd",
            "",
            "instead of `image`: the URI of an [export of an NBD server](nbd.md#the-nbd-client), for \
             example `nbds://host/export?tls-certificates=/etc/fathom/tls`. The server determines the \
             size",
        ),
        Key::new(
            "timeout",
            "",
            "with `nbd` or a `format` other than raw: how long a request is tried before it fails, from \
             1s to 1h; by default 30s. Meanwhile the server may be started again",
        ),
        Key::new(
            "memory",
            "",
            "instead of `image`: a disk in memory of this size. It is empty at the start, and its \
             data is lost at the end",
        ),
        Key::new(
            "null",
            "",
            "instead of `image`: a disk of this size that reads as zeroes and discards writes, for \
             measurements",
        ),
        Key::new("direct", "false", "bypass the host's page cache"),
        Key::new("read_only", "false", "refuse writes. Several read-only disks can share an image"),
        Key::new(
            "when_full",
            "\"fail\"",
            "the treatment of writes while the image's file system, or the pool, is full: \
             `\"fail\"` gives the guest an error, `\"wait\"` keeps them until there is room, like \
             `werror=enospc`. Reads continue",
        ),
        Key::new(
            "block_size",
            "",
            "the logical block size that guests see, `512` or `\"4K\"`; by default the smallest \
             possible",
        ),
        Key::new(
            "tap",
            "true",
            "count and measure requests, above all layers but `classify`. Without it `fathom top` \
             and the metrics show nothing",
        ),
        Key::new(
            "classify",
            "true",
            "find the meaning of requests in the guest's memory, and count them by file, control \
             group and process. Without it Fathom reads only the requests in the guest's memory",
        ),
        Key::new(
            "class_bounds",
            "",
            "the file sizes at which the I/O class changes, descending. Files below the first are \
             of class 0, below the second of class 1, and so on. Metadata has a class above them \
             all. By default `[\"14M\", \"10M\", \"5M\", \"2M\", \"1M\"]`",
        ),
        Key::new("layers", "[]", "further layers, from the guest down to the image"),
        Key::new(
            "model",
            "",
            "the disk model whose timing the disk imitates; with `store`, that of the pool's device, of \
             the disk with which the pool is opened",
        ),
        Key::new("vhost_user", "", "the socket for a guest"),
    ];
}

/// The format of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ImageFormat {
    /// The bytes of the disk without any structure, even if they look like another format.
    Raw,
    /// QEMU's format, versions 2 and 3.
    Qcow2,
    /// `VMware`'s format, with all data in one file.
    Vmdk,
    /// Hyper-V's format.
    Vhdx,
    /// `VirtualBox`'s format.
    Vdi,
}

impl ImageFormat {
    const ALL: [Self; 5] = [Self::Raw, Self::Qcow2, Self::Vmdk, Self::Vhdx, Self::Vdi];

    /// The name, which is also QEMU's.
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
            Self::Vmdk => "vmdk",
            Self::Vhdx => "vhdx",
            Self::Vdi => "vdi",
        }
    }
}

impl std::fmt::Display for ImageFormat {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(self.name())
    }
}

impl std::str::FromStr for ImageFormat {
    type Err = ImageFormatError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|format| format.name() == text).ok_or(ImageFormatError)
    }
}

/// The error for an image format that is not supported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageFormatError;

impl std::fmt::Display for ImageFormatError {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(
            "images in raw, qcow2, vmdk, vhdx and vdi are served; `fathom disk import` converts others",
        )
    }
}

impl std::error::Error for ImageFormatError {}

/// The treatment of writes for which the storage has no room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WhenFull {
    /// Such writes fail, and the guest sees an error.
    #[default]
    Fail,
    /// Such writes wait until there is room, and the guest sees a slow disk.
    Wait,
}

impl WhenFull {
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it so")]
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// The changes to a running disk. An absent setting stays as it is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DiskChange {
    /// The new size.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capacity: Option<Bytes>,
    /// Whether the disk has a tap.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tap: Option<bool>,
    /// Whether the disk has the layer `classify`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub classify: Option<bool>,
    /// The new layers below the tap.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layers: Option<Vec<LayerDefinition>>,
    /// A layer with other options than now. It replaces the layer that can take over its options,
    /// or else the only layer of its kind; a disk without such a layer gets it at the place of its
    /// kind in the order of layers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub set_layer: Option<LayerDefinition>,
    /// Puts the layer of `set_layer` above the first layer of this kind instead.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub above: Option<String>,
    /// Puts the layer of `set_layer` below the last layer of this kind instead.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub below: Option<String>,
    /// Whether a cache in `set_layer` may replace another cache of the disk.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub replace: bool,
    /// The kind of the layers to remove.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remove_layer: Option<String>,
    /// Whether a smaller size is allowed. The data beyond the new end is then lost.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub shrink: bool,
    /// Whether the change ends with the daemon. Otherwise the next start serves the disk as it was
    /// changed.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub temporary: bool,
}

/// The socket of a virtio-blk device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct VhostUserDefinition {
    /// The path of the socket to which the VMM connects.
    pub socket: PathBuf,
    /// The most queues that the VMM can use. The VMM chooses their length.
    pub queues: u16,
    /// The number of threads that serve the queues. The default is the number of processors that
    /// the daemon may use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threads: Option<u16>,
    /// The longest time for which a thread polls its rings before it sleeps; 0 disables polling. If
    /// absent, the daemon chooses.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spin: Option<Nanoseconds>,
    /// A group whose members may connect too (mode 0660). Without it, only the daemon's user may
    /// connect (mode 0600).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
}

impl Default for VhostUserDefinition {
    /// Four queues, without a socket path.
    fn default() -> Self {
        Self { socket: PathBuf::new(), queues: 4, threads: None, spin: None, group: None }
    }
}

impl Section for VhostUserDefinition {
    const KEYS: &'static [Key] = &[
        Key::new(
            "socket",
            "",
            "required: the socket to which the VMM connects. A socket file without a listener is \
             replaced",
        ),
        Key::new(
            "queues",
            "4",
            "the most queues that the guest can use, up to 256. The VMM chooses their length",
        ),
        Key::new(
            "threads",
            "",
            "the number of threads that serve the queues, each queue by one thread; at most the \
             number of queues. A disk that hangs does not delay the other queues of its thread; by \
             default one for each processor that the daemon may use",
        ),
        Key::new(
            "spin",
            "",
            "the longest time for which a thread polls its rings before it sleeps, at most \
             `\"1ms\"`; `0` disables polling; by default the daemon's choice",
        ),
        Key::new(
            "group",
            "",
            "a group whose members may connect too. The socket's mode is then 0660, otherwise 0600",
        ),
    ];
}

/// One NBD listener.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ListenerDefinition {
    /// The address: `unix:/path` or `host:port`.
    pub address: String,
    /// The disks that the listener offers.
    pub exports: ExportsDefinition,
    /// TLS. Without it, a TCP address is refused unless `plain_allowed`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls: Option<TlsDefinition>,
    /// Whether connections without TLS are allowed, over TCP and where TLS is configured.
    pub plain_allowed: bool,
    /// A group whose members may connect to a Unix socket too (mode 0660). Without it, only the
    /// daemon's user may connect (mode 0600).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
}

impl Section for ListenerDefinition {
    const KEYS: &'static [Key] = &[
        Key::new("address", "", "required: `\"unix:/path\"`, or `\"host:port\"` for TCP"),
        Key::new(
            "exports",
            "\"all\"",
            "a list of disks, or `\"all\"`, which includes disks that are added later. If there is \
             only one export, clients can also select it with the empty name",
        ),
        Key::new("tls", "", "the encryption of connections"),
        Key::new(
            "plain_allowed",
            "false",
            "accept clients without TLS: over TCP without `[nbd.tls]`, and beside clients with TLS",
        ),
        Key::new("group", "", "a group whose members may connect to the Unix socket too"),
    ];
}

/// The disks that an NBD listener offers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ExportsDefinition {
    /// All disks, including those added later.
    #[default]
    All,
    /// The disks with these names.
    Named(Vec<String>),
}

impl Serialize for ExportsDefinition {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::All => serializer.serialize_str("all"),
            Self::Named(names) => names.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for ExportsDefinition {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Exports;

        impl<'de> Visitor<'de> for Exports {
            type Value = ExportsDefinition;

            fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                formatter.write_str("a list of names")
            }

            fn visit_str<E: serde::de::Error>(self, word: &str) -> Result<Self::Value, E> {
                Ok(ExportsDefinition::of(vec![word.to_owned()]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut names: A) -> Result<Self::Value, A::Error> {
                let mut named = Vec::new();
                while let Some(name) = names.next_element()? {
                    named.push(name);
                }
                Ok(ExportsDefinition::of(named))
            }
        }

        deserializer.deserialize_any(Exports)
    }
}

impl ExportsDefinition {
    fn of(names: Vec<String>) -> Self {
        if names == ["all"] { Self::All } else { Self::Named(names) }
    }
}

/// The credentials of an NBD listener, and the clients that it trusts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TlsDefinition {
    /// The server's certificate chain (PEM).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub certificate: Option<PathBuf>,
    /// The server's private key (PEM).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<PathBuf>,
    /// The authority that has to have signed a client's certificate (PEM). Without it, any client
    /// is accepted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_ca: Option<PathBuf>,
    /// A file of `name:key` lines, in place of certificates.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub psk: Option<PathBuf>,
}

impl Section for TlsDefinition {
    const KEYS: &'static [Key] = &[
        Key::new("certificate", "", "the server's certificate (PEM)"),
        Key::new("key", "", "its private key (PEM)"),
        Key::new(
            "client_ca",
            "",
            "the authority that must have signed the clients' certificates (PEM); by default any \
             client is accepted",
        ),
        Key::new(
            "psk",
            "",
            "instead of certificates: a file of `user:key` lines in the format of GnuTLS' \
             `psktool`",
        ),
    ];
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
