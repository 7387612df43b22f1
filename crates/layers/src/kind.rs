//! The kinds of layers that a configuration can name.
//!
//! The configuration of a kind is one type, in the layer's own file. serde reads it from TOML, JSON
//! and flags; [`LayerOptions`] checks it, documents it and makes the layer. [`LayerKind`] is the
//! same for any kind, without the type. To add a plain layer, write its file, its module in
//! `lib.rs` and a line in [`KINDS`].

use std::io;
use std::sync::Arc;

use fathom_block::{Backend, Layer, Operation};
use fathom_failure::Failure;
use fathom_insight::{Names, Waiters};
use fathom_options::{Check, Key, Problems, Written, read};
use serde::de::{DeserializeOwned, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

use crate::cache::{CacheHost, Caches};
use crate::{GuestSlot, LimitGroups, LogSink, ScheduleDevices};

/// The kinds that need only this crate.
pub const KINDS: [LayerKind; 11] = [
    LayerKind::of::<crate::tap::TapOptions>(),
    LayerKind::of::<crate::classify::ClassifyOptions>(),
    LayerKind::of::<crate::patterns::PatternsOptions>(),
    LayerKind::of::<crate::lifetimes::LifetimesOptions>(),
    LayerKind::of::<crate::swap_watch::SwapWatchOptions>(),
    LayerKind::of::<crate::delay::DelayOptions>(),
    LayerKind::of::<crate::fault::FaultOptions>(),
    LayerKind::of::<crate::limit::LimitOptions>(),
    LayerKind::of::<crate::schedule::ScheduleOptions>(),
    LayerKind::of::<crate::cache::CacheOptions>(),
    LayerKind::of::<crate::log::LogOptions>(),
];

/// The place of a kind of layer among those of other kinds. There is one order, for files, commands
/// and requests; `docs/configuration.md` has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rank {
    /// Sees requests as the guest sends them: what they mean.
    Meaning,
    /// Counts requests.
    Count,
    /// Sees what the guest reads and writes: what it does with its files.
    Pattern,
    /// Shows requests, or imitates a slow or broken disk.
    Trial,
    /// Limits what the guest may do.
    Limit,
    /// Decides which disk's requests use a device first.
    Schedule,
    /// Has copies of what is beneath.
    Cache,
    /// Has changes that home does not have yet.
    Log,
}

/// The configuration of a kind of layer.
pub trait LayerOptions: Default + Serialize + DeserializeOwned + 'static {
    /// The name of the kind, which is also [`Layer::name`].
    const KIND: &'static str;
    /// The effect of such a layer, as a predicate that follows its name.
    const MEANING: &'static str;
    /// All keys, in the order of the documentation.
    const KEYS: &'static [Key];
    /// Why a disk has at most one such layer; `None` if it may have several.
    const ONCE: Option<&'static str> = None;
    /// Whether the layer keeps changes of the disk, so that the disk must have a writable image.
    const NEEDS_IMAGE: bool = false;
    /// The place among layers of other kinds.
    const RANK: Rank;
    /// What is wrong if such a layer is beneath one of a later rank; `None` if it may be anywhere.
    const BENEATH: Option<&'static str> = None;
    /// Whether a disk may have several such layers for different requests.
    const HAS_SEVERAL: bool = false;

    /// Reports invalid values. It examines the metadata of files, but opens none.
    fn check(&self, _: &mut Check<'_>) {}

    /// Makes the layer; `None` if it is not part of this disk.
    ///
    /// # Errors
    /// If a resource that the layer needs is not available.
    fn make(&self, context: &LayerContext<'_>) -> Result<Option<Arc<dyn Layer>>, Failure>;

    /// Whether `layer`, which was made with other options, can change to these options in place and
    /// keep its state. Otherwise a new layer replaces it.
    fn fits(&self, layer: &dyn Layer) -> bool {
        let _ = layer;
        false
    }

    /// Changes `layer`, which [fits](Self::fits), to these options.
    fn apply(&self, layer: &dyn Layer) {
        let _ = layer;
    }
}

/// The disk's resources from which layers are made.
pub struct LayerContext<'a> {
    /// The disk's name.
    pub disk: &'a str,
    /// The texts of the insights of the disk's requests.
    pub names: &'a Arc<Names>,
    /// Makes a sink for lines in the daemon's log.
    pub log: &'a dyn Fn() -> LogSink,
    /// The limits shared by several disks.
    pub limits: &'a LimitGroups,
    /// The name of the device on which the disk lies; empty if it lies on none.
    pub device: &'a str,
    /// Why the devices on which the disk lies have not been found, if they have not.
    pub device_problem: Option<&'a str>,
    /// The devices that disks share.
    pub devices: &'a ScheduleDevices,
    /// The caches.
    pub caches: &'a Caches,
    /// What caches that outlive the daemon need of it.
    pub cache_host: &'a dyn CacheHost,
    /// Whether the disk is served already, and gets other layers.
    pub is_served: bool,
    /// Makes a store of so many bytes in memory.
    pub memory: &'a dyn Fn(u64) -> io::Result<Arc<dyn Backend>>,
    /// The size of the disk, in bytes.
    pub capacity: u64,
    /// Reports whether processes of the disk's guest wait for requests, if the disk's guest is
    /// examined.
    pub waiters: Option<&'a Arc<dyn Waiters>>,
    /// The place of the disk's guest, which is empty while its memory is not examined.
    pub guest: Option<&'a Arc<GuestSlot>>,
    /// The layers of the disk that other components use as well, which exist already.
    pub shared: &'a [Arc<dyn Layer>],
}

impl LayerContext<'_> {
    /// The shared layer with a name.
    pub fn shared(&self, name: &str) -> Option<Arc<dyn Layer>> {
        self.shared.iter().find(|layer| layer.name() == name).map(Arc::clone)
    }
}

/// Valid options of a layer.
pub trait Prepared {
    /// All options as JSON, defaults included.
    fn complete(&self) -> Value;
    /// See [`LayerOptions::make`].
    ///
    /// # Errors
    /// If a resource that the layer needs is not available.
    fn make(&self, context: &LayerContext<'_>) -> Result<Option<Arc<dyn Layer>>, Failure>;
    /// See [`LayerOptions::HAS_SEVERAL`].
    fn has_several(&self) -> bool;
    /// See [`LayerOptions::fits`].
    fn fits(&self, layer: &dyn Layer) -> bool;
    /// See [`LayerOptions::apply`].
    fn apply(&self, layer: &dyn Layer);
}

impl<O: LayerOptions> Prepared for O {
    fn complete(&self) -> Value {
        serde_json::to_value(self).unwrap_or_default()
    }

    fn make(&self, context: &LayerContext<'_>) -> Result<Option<Arc<dyn Layer>>, Failure> {
        LayerOptions::make(self, context)
    }

    fn has_several(&self) -> bool {
        O::HAS_SEVERAL
    }

    fn fits(&self, layer: &dyn Layer) -> bool {
        LayerOptions::fits(self, layer)
    }

    fn apply(&self, layer: &dyn Layer) {
        LayerOptions::apply(self, layer);
    }
}

/// A kind of layer.
#[derive(Clone, Copy, Debug)]
pub struct LayerKind {
    /// See [`LayerOptions::KIND`].
    pub name: &'static str,
    /// See [`LayerOptions::MEANING`].
    pub meaning: &'static str,
    /// See [`LayerOptions::KEYS`].
    pub keys: &'static [Key],
    /// See [`LayerOptions::ONCE`].
    pub once: Option<&'static str>,
    /// See [`LayerOptions::NEEDS_IMAGE`].
    pub needs_image: bool,
    /// See [`LayerOptions::RANK`].
    pub rank: Rank,
    /// See [`LayerOptions::BENEATH`].
    pub beneath: Option<&'static str>,
    read: fn(&Written<'_>, &mut Problems) -> Option<Box<dyn Prepared>>,
    prepare: fn(&Written<'_>, &mut Problems) -> Option<Box<dyn Prepared>>,
    complete_default: fn() -> Value,
    fields: fn() -> &'static [&'static str],
}

impl LayerKind {
    /// The kind with options of type `O`.
    pub const fn of<O: LayerOptions>() -> Self {
        Self {
            name: O::KIND,
            meaning: O::MEANING,
            keys: O::KEYS,
            once: O::ONCE,
            needs_image: O::NEEDS_IMAGE,
            rank: O::RANK,
            beneath: O::BENEATH,
            read: |written, problems| Some(Box::new(read::<O>(written, problems)?)),
            prepare: prepare::<O>,
            complete_default: || O::default().complete(),
            fields: fathom_options::fields::<O>,
        }
    }

    /// Reads options. Returns all options, defaults included.
    pub fn complete(&self, written: &Written<'_>, problems: &mut Problems) -> Option<Value> {
        (self.read)(written, problems).map(|options| options.complete())
    }

    /// Reads and checks options. Adds errors to `problems`; returns `None` if the options cannot be
    /// read.
    pub fn prepare(
        &self,
        written: &Written<'_>,
        problems: &mut Problems,
    ) -> Option<Box<dyn Prepared>> {
        (self.prepare)(written, problems)
    }

    /// The defaults of all options.
    pub fn complete_default(&self) -> Value {
        (self.complete_default)()
    }

    /// The names of all options in configurations.
    pub fn fields(&self) -> &'static [&'static str] {
        (self.fields)()
    }
}

fn prepare<O: LayerOptions>(
    written: &Written<'_>,
    problems: &mut Problems,
) -> Option<Box<dyn Prepared>> {
    let options: O = read(written, problems)?;
    options.check(&mut Check::new(written.origins, written.path, problems));
    Some(Box::new(options))
}

/// The operations that a layer applies to; an empty list stands for all. Configurations have a list
/// of names, or one name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Operations(Vec<Operation>);

impl Operations {
    /// Whether the list is empty, which stands for all.
    pub fn is_default(&self) -> bool {
        self.0.is_empty()
    }

    /// The listed operations.
    pub fn named(&self) -> &[Operation] {
        &self.0
    }

    /// The operations that the list stands for.
    pub fn selected(&self) -> &[Operation] {
        if self.0.is_empty() { &Operation::ALL } else { &self.0 }
    }
}

impl Serialize for Operations {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.iter().map(|operation| operation.name()))
    }
}

impl<'de> Deserialize<'de> for Operations {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Names;

        impl<'de> Visitor<'de> for Names {
            type Value = Operations;

            fn expecting(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                formatter.write_str("a list of operations")
            }

            fn visit_str<E: serde::de::Error>(self, name: &str) -> Result<Operations, E> {
                Ok(Operations(vec![operation(name)?]))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut names: A) -> Result<Operations, A::Error> {
                let mut operations = Vec::new();
                while let Some(name) = names.next_element::<String>()? {
                    let operation = operation(&name)?;
                    if !operations.contains(&operation) {
                        operations.push(operation);
                    }
                }
                Ok(Operations(operations))
            }
        }

        deserializer.deserialize_any(Names)
    }
}

/// The operation with a name.
fn operation<E: serde::de::Error>(name: &str) -> Result<Operation, E> {
    const NAMES: &[&str] = &{
        let mut names = [""; Operation::ALL.len()];
        let mut index = 0;
        while index < names.len() {
            names[index] = Operation::ALL[index].name();
            index += 1;
        }
        names
    };
    let found = Operation::ALL.into_iter().find(|operation| operation.name() == name);
    found.ok_or_else(|| E::unknown_variant(name, NAMES))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_a_name_or_a_list_of_names() {
        let read = |text| serde_json::from_str::<Operations>(text);
        assert_eq!(read("\"read\"").unwrap().selected(), [Operation::Read]);
        let both = read("[\"read\", \"flush\", \"read\"]").unwrap();
        assert_eq!(both.named(), [Operation::Read, Operation::Flush]);
        assert_eq!(serde_json::to_string(&both).unwrap(), "[\"read\",\"flush\"]");
        assert_eq!(read("[]").unwrap().selected(), Operation::ALL);
        assert!(read("[\"reed\"]").is_err() && read("7").is_err());
    }
}
