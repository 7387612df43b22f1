//! The definition of a layer, and of a disk model.

use fathom_options::{Bytes, Key, Section};
use serde::ser::SerializeMap as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};

/// One layer: its kind, and its options, which only the daemon interprets
/// (`docs/configuration.md`).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerDefinition {
    /// The name of the kind, such as `delay`.
    pub kind: String,
    /// The options, in the form in which they are written beside the kind.
    pub options: Map<String, Value>,
}

impl LayerDefinition {
    /// A layer of a kind with the options of a JSON object. Any other JSON value gives no options.
    pub fn new(kind: &str, options: Value) -> Self {
        let options = match options {
            Value::Object(options) => options,
            _ => Map::new(),
        };
        Self { kind: kind.to_owned(), options }
    }

    /// A layer of the command line: its kind, and options like `rate=0.01`. A value in brackets is
    /// a list. A value with the syntax of an integer, a number, `true` or `false` is one; any other
    /// value is a text.
    ///
    /// # Errors
    /// If an option is not of the form `KEY=VALUE`, or is given twice.
    pub fn from_flag(text: &str) -> Result<Self, String> {
        let mut parts = Vec::new();
        let (mut begin, mut depth) = (0, 0_usize);
        for (at, byte) in text.bytes().enumerate() {
            match byte {
                b'[' => depth += 1,
                b']' => depth = depth.saturating_sub(1),
                b',' if depth == 0 => {
                    parts.push(&text[begin..at]);
                    begin = at + 1;
                }
                _ => {}
            }
        }
        parts.push(&text[begin..]);
        let mut options = Map::new();
        for part in &parts[1..] {
            let (key, value) = part
                .split_once('=')
                .ok_or_else(|| format!("{part:?} is not of the form KEY=VALUE"))?;
            if options.insert(key.to_owned(), flag_value(value)).is_some() {
                return Err(format!("`{key}` is given twice"));
            }
        }
        Ok(Self { kind: parts[0].to_owned(), options })
    }

    /// The name of the layer's kind.
    pub fn name(&self) -> &str {
        &self.kind
    }
}

/// Converts a value of the command line to JSON.
fn flag_value(text: &str) -> Value {
    if let Some(items) = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')) {
        let items = items.split(',').map(str::trim).filter(|item| !item.is_empty());
        return items.map(flag_value).collect();
    }
    match (text.parse::<i64>(), text.parse::<f64>()) {
        (Ok(number), _) => Value::from(number),
        (_, Ok(number)) if number.is_finite() => Value::from(number),
        _ if text == "true" || text == "false" => Value::Bool(text == "true"),
        _ => Value::from(text),
    }
}

impl Serialize for LayerDefinition {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut entries = serializer.serialize_map(Some(1 + self.options.len()))?;
        entries.serialize_entry("kind", &self.kind)?;
        for (key, value) in self.options.iter().filter(|(key, _)| *key != "kind") {
            entries.serialize_entry(key, value)?;
        }
        entries.end()
    }
}

impl<'de> Deserialize<'de> for LayerDefinition {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut options = Map::<String, Value>::deserialize(deserializer)?;
        let kind = match options.remove("kind") {
            Some(Value::String(kind)) => kind,
            Some(_) => {
                return Err(serde::de::Error::custom("the `kind` of a layer has to be a text"));
            }
            None => String::new(),
        };
        Ok(Self { kind, options })
    }
}

/// A disk model whose timing is simulated.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelDefinition {
    /// The kind of the disk.
    pub kind: ModelKind,
    /// The seed of the random numbers: with the same seed, they are the same.
    #[serde(default)]
    pub seed: u64,
    /// Whether the image fills a hard disk, so that seeks are as long as on a full disk. Otherwise
    /// the image lies at the outer edge of a disk of 1 TB.
    #[serde(default)]
    pub spanning: bool,
    /// The size of a hard disk's cache for writes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub write_cache: Option<Bytes>,
    /// Whether a solid-state disk's buffer survives a power failure, so that flushes take no time.
    #[serde(default)]
    pub power_loss_protected: bool,
    /// The name of the modelled device on which the disk lies, and which it shares with other
    /// disks; empty for a device of its own.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub device: String,
    /// The offset of the disk on that device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub offset: Option<Bytes>,
    /// The size of the modelled device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<Bytes>,
}

impl Section for ModelDefinition {
    const KEYS: &'static [Key] = &[
        Key::new("kind", "", "required: `hdd`, `ssd` (NVMe) or `sata-ssd`"),
        Key::new("seed", "0", "the seed of the random times"),
        Key::new(
            "spanning",
            "false",
            "for `hdd`: the image uses all tracks, so that seeks are as long as on a full disk",
        ),
        Key::new(
            "write_cache",
            "",
            "for `hdd`: the size of the disk's cache for writes; no cache by default",
        ),
        Key::new(
            "power_loss_protected",
            "false",
            "for `ssd` and `sata-ssd`: the disk's buffer survives a power failure, so that flushes \
             take no time",
        ),
        Key::new(
            "device",
            "",
            "the name of a modelled device that several disks share: their requests wait for each \
             other. All disks of a device have the same `model`; only `offset` may differ. By \
             default the disk has a device of its own",
        ),
        Key::new(
            "offset",
            "",
            "the offset of the disk on the shared device; by default the end of the disks that the \
             device already has",
        ),
        Key::new(
            "size",
            "",
            "the size of the modelled device; by default 1 TB for `hdd`, or with `spanning` the size \
             of the image",
        ),
    ];
}

/// The kinds of simulated disks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ModelKind {
    /// A hard disk: seeks, rotation and transfer, with one head.
    #[default]
    Hdd,
    /// An `NVMe` solid-state disk: channels, with programs and erases that delay reads.
    Ssd,
    /// A SATA solid-state disk: otherwise the same.
    SataSsd,
}
