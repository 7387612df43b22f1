//! The kinds of layers, and the options of a disk's layers.

use std::path::Path;

use fathom_block::LAYERS_MAX;
use fathom_control::{DiskDefinition, ImageFormat, LayerDefinition};
use fathom_insight::ClassTable;
use fathom_layers::cache::CacheOptions;
use fathom_layers::{LayerKind, LayerOptions, Prepared};
use fathom_options::{Origin, Origins, Problems, Title, Written, suggestion};
use serde_json::Value;

use crate::features::FEATURES;
use crate::features::log::{OffloadDefinition, WalDefinition};
use crate::stores::qemu;

/// The kinds of layers with a log.
pub(crate) static LOG_KINDS: [&str; 2] = [WalDefinition::KIND, OffloadDefinition::KIND];

/// All kinds: those of the crate `layers`, and those that need resources of the daemon.
pub(crate) fn kinds() -> impl Iterator<Item = LayerKind> {
    let own = FEATURES.iter().flat_map(|feature| feature.layers());
    fathom_layers::KINDS.into_iter().chain(own)
}

/// The options of a layer as in the configuration.
struct Options<'a> {
    value: Value,
    title: String,
    path: String,
    origins: &'a Origins,
    folder: Option<&'a Path>,
}

impl<'a> Options<'a> {
    fn new(
        layer: &LayerDefinition,
        index: usize,
        origins: &'a Origins,
        folder: Option<&'a Path>,
    ) -> Self {
        let title = format!("the layer `{}`", layer.kind);
        let (value, path) = (Value::Object(layer.options.clone()), format!("layers.{index}"));
        Self { value, title, path, origins, folder }
    }

    fn written(&self) -> Written<'_> {
        let title = Title::Words(&self.title);
        let Self { value, path, origins, folder, .. } = self;
        Written { value, title, path, origins, folder: *folder }
    }
}

/// The kind of a layer. Adds a problem if there is no such kind.
fn kind_of(
    layer: &LayerDefinition,
    index: usize,
    origins: &Origins,
    problems: &mut Problems,
) -> Option<LayerKind> {
    let kind = kinds().find(|kind| kind.name == layer.kind);
    if kind.is_none() {
        let names: Vec<&str> = kinds().map(|kind| kind.name).collect();
        if layer.kind.is_empty() {
            let origin = origins.of(&format!("layers.{index}"));
            problems.add(origin, "a layer has no `kind`", "add `kind = \"delay\"`");
        } else {
            let shown: String = layer.kind.chars().take(60).collect();
            let origin = origins.of(&format!("layers.{index}.kind"));
            let message = format!("there is no kind of layer {shown:?}");
            problems.add(origin, message, suggestion(&shown, &names));
        }
    }
    kind
}

/// Replaces the options of each layer with all options, defaults included. Checks only the syntax
/// of the options.
pub(crate) fn complete(
    layers: &mut [LayerDefinition],
    origins: &Origins,
    folder: Option<&Path>,
    problems: &mut Problems,
) {
    for (index, layer) in layers.iter_mut().enumerate() {
        let Some(kind) = kind_of(layer, index, origins, problems) else { continue };
        let options = Options::new(layer, index, origins, folder);
        if let Some(complete) = kind.complete(&options.written(), problems) {
            *layer = LayerDefinition::new(kind.name, complete);
        }
    }
}

/// Prepares a layer that has been checked before.
///
/// # Errors
/// If it was not checked and is invalid.
pub(crate) fn prepare(layer: &LayerDefinition) -> Result<Box<dyn Prepared>, Problems> {
    let (origins, mut problems) = (Origins::default(), Problems::default());
    let kind = kind_of(layer, 0, &origins, &mut problems);
    let options = Options::new(layer, 0, &origins, None);
    let prepared = kind.and_then(|kind| kind.prepare(&options.written(), &mut problems));
    problems.none_or()?;
    prepared.ok_or_else(Problems::default)
}

/// The definition of a disk's write-ahead log, if it has one: that of its layer `wal` or `offload`,
/// or the log of its cache.
pub(crate) fn wal(disk: &DiskDefinition) -> Option<WalDefinition> {
    let of_wal = options_of(disk);
    of_wal.or_else(|| offload(disk).map(OffloadDefinition::log)).or_else(|| log_of_cache(disk))
}

/// The options of the layer `offload` of a disk, if it has one.
pub(crate) fn offload(disk: &DiskDefinition) -> Option<OffloadDefinition> {
    options_of(disk)
}

/// The options of the first layer of a kind that a disk lists. They have been checked.
fn options_of<O: LayerOptions>(disk: &DiskDefinition) -> Option<O> {
    disk.layers.iter().find_map(options)
}

/// The options of `layer`, if it is of their kind.
fn options<O: LayerOptions>(layer: &LayerDefinition) -> Option<O> {
    let options = (layer.kind == O::KIND).then(|| Value::Object(layer.options.clone()))?;
    serde_json::from_value(options).ok()
}

/// The definition of the log that a cache in the mode `write-back` has.
fn log_of_cache(disk: &DiskDefinition) -> Option<WalDefinition> {
    let cache = disk.layers.iter().find_map(cache_with_log)?;
    Some(WalDefinition {
        log: cache.store,
        age: cache.age,
        is_in_cache: true,
        ..WalDefinition::default()
    })
}

/// The options of `layer`, if it is a cache with a log beneath it.
fn cache_with_log(layer: &LayerDefinition) -> Option<CacheOptions> {
    options(layer).filter(CacheOptions::has_log)
}

/// Whether `layer` is a cache with a log beneath it.
pub(crate) fn has_log(layer: &LayerDefinition) -> bool {
    cache_with_log(layer).is_some()
}

/// Whether `layer` has a log, or has one beneath it.
pub(crate) fn has_any_log(layer: &LayerDefinition) -> bool {
    LOG_KINDS.contains(&layer.kind.as_str()) || has_log(layer)
}

/// Whether a disk has an image that may be written and can have the mark of a log: a raw one, or
/// one in qcow2.
fn can_have_log(disk: &DiskDefinition) -> bool {
    let is_qcow2 = disk.format == Some(ImageFormat::Qcow2);
    has_raw_image(disk) || is_qcow2 && disk.image.is_some() && !disk.read_only
}

/// Whether a disk has a raw image that may be written.
fn has_raw_image(disk: &DiskDefinition) -> bool {
    disk.image.is_some() && !disk.read_only && qemu::format(disk).is_none()
}

/// Checks a disk with a cache in the mode `write-back`.
fn check_log_of_cache(disk: &DiskDefinition, origin: &Origin, problems: &mut Problems) {
    if let Some(layer) = disk.layers.iter().find(|layer| LOG_KINDS.contains(&layer.kind.as_str())) {
        let message = format!(
            "the disk {:?} has a cache in the mode `write-back`, which has a log, and a layer `{}`",
            disk.name, layer.kind
        );
        problems.add(origin.clone(), message, "keep one: a change is durable in one log");
    }
    if !has_raw_image(disk) {
        let message = format!(
            "the disk {:?} has a cache in the mode `write-back`, but no writable raw image",
            disk.name
        );
        problems.add(origin.clone(), message, "choose another `mode`, or add an `image`");
    }
}

pub(super) fn check_layers(disk: &DiskDefinition, origins: &Origins, problems: &mut Problems) {
    if let Some(bounds) = &disk.class_bounds {
        if let Err(error) = ClassTable::new(bounds.iter().map(|bound| bound.0).collect()) {
            problems.add(
                origins.of("class_bounds"),
                format!("these are not valid bounds of classes: {error}"),
                "write them like `class_bounds = [\"14M\", \"10M\", \"5M\", \"2M\", \"1M\"]`",
            );
        }
    }
    let named = |name: &str| disk.layers.iter().filter(|layer| layer.kind == name).count();
    let implied = |is: bool, name: &str| usize::from(is && named(name) == 0);
    let with_log = disk.layers.iter().position(has_log);
    let count = disk.layers.len()
        + implied(disk.tap, "tap")
        + implied(disk.classify, "classify")
        + usize::from(with_log.is_some());
    if count > LAYERS_MAX {
        problems.add(
            origins.of("layers"),
            format!("the disk {:?} has {count} layers", disk.name),
            format!("keep at most {LAYERS_MAX}, including `tap` and `classify`"),
        );
    }
    for kind in kinds() {
        let count = named(kind.name);
        if let Some(reason) = kind.once.filter(|_| count > 1) {
            let message = format!("the disk {:?} has {count} layers `{}`", disk.name, kind.name);
            problems.add(origins.of("layers"), message, format!("keep one: {reason}"));
        }
        if kind.needs_image && count > 0 && !can_have_log(disk) {
            let name = kind.name;
            let message = format!(
                "the disk {:?} has a layer `{name}`, but no writable image that can be marked as having changes \
                 elsewhere",
                disk.name
            );
            let remedy = "leave the layer out, or use a raw image or one in qcow2: `fathom disk move` and \
                          `fathom disk import` make one";
            problems.add(origins.of("layers"), message, remedy);
        }
    }
    if named(WalDefinition::KIND) > 0 && named(OffloadDefinition::KIND) > 0 {
        let message = format!("the disk {:?} has layers `wal` and `offload`", disk.name);
        problems.add(origins.of("layers"), message, "keep one: a change is durable in one log");
    }
    if let Some(index) = with_log {
        check_log_of_cache(disk, &origins.of(&format!("layers.{index}.mode")), problems);
    }
    for (index, layer) in disk.layers.iter().enumerate() {
        if let Some(kind) = kind_of(layer, index, origins, problems) {
            let options = Options::new(layer, index, origins, None);
            // The layers are made later.
            let _ = kind.prepare(&options.written(), problems);
        }
    }
}

#[cfg(test)]
mod tests;
