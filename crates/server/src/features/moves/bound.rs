//! Layers with state elsewhere that belongs to the image: logs, and caches that outlive the daemon.
//!
//! They are taken off the disk before it is copied, which writes home what only they have, and set
//! again when the move has ended, in whatever way. Both are changes in use like any other: a record
//! says before and after what the next start serves. The record of the move has the definition with
//! these layers, so that a later daemon sets them again if this one does not come to it.

use std::sync::Arc;

use fathom_control::{DiskDefinition, ErrorBody, ErrorCode, LayerDefinition};
use fathom_insight::change::Author;
use fathom_layers::LayerOptions as _;
use fathom_layers::cache::CacheOptions;

use super::described;
use crate::configuration::layers;
use crate::daemon::stack::refusal;
use crate::daemon::{Daemon, Served};

/// Whether a layer has state elsewhere that belongs to the image.
pub(super) fn is_bound(layer: &LayerDefinition) -> bool {
    let store = layer.options.get("store").and_then(serde_json::Value::as_str);
    let is_kept_cache =
        layer.kind == CacheOptions::KIND && store.is_some_and(|store| !store.is_empty());
    layers::has_any_log(layer) || is_kept_cache
}

/// The bound layers of a disk, in words; empty if it has none.
pub(super) fn named(layers: &[LayerDefinition]) -> String {
    let bound = layers.iter().filter(|layer| is_bound(layer));
    bound.map(|layer| format!("`{}`", layer.kind)).collect::<Vec<_>>().join(" and ")
}

/// The command that removes a bound layer of a disk.
fn removal(name: &str, layer: &LayerDefinition) -> String {
    if layer.kind == CacheOptions::KIND {
        format!("`fathom cache detach {name}`")
    } else {
        format!("`fathom disk layer {name} {} --remove`", layer.kind)
    }
}

/// Layers `now`, with the bound ones of `before` that are not among them, each above the layer that
/// was beneath it.
fn restored(now: &[LayerDefinition], before: &[LayerDefinition]) -> Vec<LayerDefinition> {
    let mut layers = now.to_vec();
    for (index, layer) in before.iter().enumerate().filter(|(_, layer)| is_bound(layer)) {
        let place = |of: &LayerDefinition| layers.iter().position(|it| it.kind == of.kind);
        // A disk has one log.
        let is_second = layers::has_any_log(layer) && layers.iter().any(layers::has_any_log);
        if place(layer).is_none() && !is_second {
            let beneath = before[index + 1..].iter().find_map(place);
            layers.insert(beneath.unwrap_or(layers.len()), layer.clone());
        }
    }
    layers
}

impl Daemon {
    /// Refuses a disk that cannot move because of its bound layers: the target cannot have them, or
    /// they end with the daemon.
    pub(super) fn check_bound(
        &self,
        served: &Served,
        after: &DiskDefinition,
    ) -> Result<(), ErrorBody> {
        let (name, live) = (served.disk.name(), served.live().definition.clone());
        let bound: Vec<&LayerDefinition> = live.layers.iter().filter(|it| is_bound(it)).collect();
        let Some(first) = bound.first() else { return Ok(()) };
        if after.image.is_none() {
            return Err(refusal(
                ErrorCode::Conflict,
                format!(
                    "the layer `{}` of the disk {name:?} needs an image, and {} is none",
                    first.kind,
                    described(after)
                ),
                format!(
                    "take it away with {}, which writes its changes home, then move the disk",
                    removal(name, first)
                ),
            ));
        }
        let lasting = self.lasting.of(name).map(|it| it.layers).unwrap_or_default();
        if let Some(layer) = bound.iter().find(|layer| !lasting.contains(layer)) {
            return Err(refusal(
                ErrorCode::Conflict,
                format!(
                    "the layer `{}` of the disk {name:?} ends with the daemon, and would not be set \
                     again after the move",
                    layer.kind
                ),
                format!("take it away with {}, then move the disk", removal(name, layer)),
            ));
        }
        Ok(())
    }

    /// Whether a disk has a log that is written home because its definition does not have it.
    pub(super) fn is_drained(&self, served: &Served) -> bool {
        let lasting = self.lasting.of(served.disk.name()).map(|it| it.layers).unwrap_or_default();
        let live = served.live().definition.clone();
        live.layers.iter().any(|layer| is_bound(layer) && !lasting.contains(layer))
    }

    /// Takes the bound layers off a disk, and gives it the layer that notes changes. The caller has
    /// the right to change the disk.
    pub(super) fn take_off(&self, served: &Served) -> Result<(), ErrorBody> {
        let live = served.live().definition.clone();
        if live.layers.iter().any(is_bound) {
            self.edit_bound(served, |layers| layers.retain(|layer| !is_bound(layer)))
        } else {
            self.restack(served, live)
        }
    }

    /// Sets the bound layers of `before` again that a disk lacks. The caller has the right to
    /// change the disk.
    pub(super) fn put_back(
        &self,
        served: &Served,
        before: &DiskDefinition,
    ) -> Result<(), ErrorBody> {
        // A disk that was removed, perhaps to be served by others, keeps what it has.
        let is_served =
            self.find(served.disk.name()).is_ok_and(|now| std::ptr::eq(Arc::as_ptr(&now), served));
        if !is_served || served.withdrawal().is_some() {
            return Ok(());
        }
        let live = served.live().definition.clone();
        let lasting = self.lasting.of(served.disk.name());
        let lacks = |it: &DiskDefinition| restored(&it.layers, &before.layers) != it.layers;
        if !lacks(&live) && !lasting.as_ref().is_some_and(lacks) {
            return Ok(());
        }
        let put_back = self.edit_bound(served, |layers| *layers = restored(layers, &before.layers));
        put_back.map_err(|refused| {
            let (name, bound) = (served.disk.name(), named(&before.layers));
            let message = format!("the disk {name:?} is without its {bound}: {}", refused.message);
            ErrorBody { message, ..refused }
        })
    }

    fn edit_bound(
        &self,
        served: &Served,
        edit: impl Fn(&mut Vec<LayerDefinition>),
    ) -> Result<(), ErrorBody> {
        let (name, before) = (served.disk.name(), served.live().definition.clone());
        let edited = |mut definition: DiskDefinition| {
            edit(&mut definition.layers);
            definition
        };
        let lasting = self.lasting.of(name).map(edited);
        let image = served.claims().image();
        let recording = self.lasting.begin(name, image, lasting.as_ref(), lasting.is_none())?;
        self.restack(served, edited(before.clone()))?;
        self.note_layers(served, &before, Author::Control);
        recording.done()
    }
}

/// The definition of a disk with the bound layers of `before` that it lacks.
pub(super) fn with_bound(now: &DiskDefinition, before: &DiskDefinition) -> DiskDefinition {
    DiskDefinition { layers: restored(&now.layers, &before.layers), ..now.clone() }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn layers(kinds: &[&str]) -> Vec<LayerDefinition> {
        let options = |kind: &&str| match *kind {
            "cache" => json!({ "store": "/cache" }),
            "wal" => json!({ "log": "/log", "size": "1M" }),
            _ => json!({}),
        };
        kinds.iter().map(|kind| LayerDefinition::new(kind, options(kind))).collect()
    }

    #[test]
    fn bound_layers_get_their_former_places() {
        let restored = |now: &[&str], before: &[&str]| -> Vec<String> {
            let layers = restored(&layers(now), &layers(before));
            layers.into_iter().map(|layer| layer.kind).collect()
        };
        assert_eq!(
            restored(&["limit", "delay"], &["limit", "cache", "wal", "delay"]),
            ["limit", "cache", "wal", "delay"]
        );
        assert_eq!(restored(&[], &["cache", "wal"]), ["cache", "wal"]);
        assert_eq!(restored(&["limit"], &["limit", "wal"]), ["limit", "wal"]);
        // A layer that somebody has set meanwhile, and one that has gone.
        assert_eq!(restored(&["fault"], &["wal", "delay"]), ["fault", "wal"]);
        assert_eq!(restored(&["wal"], &["cache", "wal"]), ["cache", "wal"]);
        assert_eq!(restored(&["limit", "delay"], &["limit", "delay"]), ["limit", "delay"]);
        // Somebody has set another log in the file.
        assert_eq!(restored(&["offload"], &["wal", "delay"]), ["offload"]);
    }

    #[test]
    fn only_state_that_belongs_to_the_image_binds() {
        assert_eq!(named(&layers(&["limit", "cache", "wal"])), "`cache` and `wal`");
        let in_memory = LayerDefinition::new("cache", json!({ "size": "1M", "store": "" }));
        assert!(!is_bound(&in_memory));
    }
}
