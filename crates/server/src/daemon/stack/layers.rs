//! The layers of a disk, made from its definition.

use std::sync::Arc;

use fathom_backend::Memory;
use fathom_block::{Backend, ErrorKind, Layer};
use fathom_control::{DiskDefinition, ErrorBody, ErrorCode, LayerDefinition, ModelDefinition};
use fathom_devices::{MediumKind, Placement};
use fathom_layers::cache::Caches;
use fathom_layers::{
    LayerContext, LayerOptions as _, LimitGroups, LogSink, Prepared, Schedule, ScheduleDevices,
    ScheduleOptions,
};
use serde_json::{Map, Value};

use super::{Equipment, Fitted, Position, invalid, names_layer, refusal, too_many_layers};
use crate::configuration;
use crate::configuration::layers::LOG_KINDS;
use crate::configuration::order::Beside;
use crate::process::journal::REQUESTS;
use crate::stores::location::{SEARCH_TIME_MAX, placement_within};

/// The identity of a disk's layer: its definition.
#[derive(Clone, PartialEq)]
pub(crate) enum LayerKey {
    /// A listed layer.
    Listed(LayerDefinition),
    /// The log of a cache in the mode `write-back`, beneath the cache.
    Log,
    /// The layer that reports requests at a device with background work.
    Activity,
    /// The disk's model.
    Model(ModelDefinition),
    /// The layer in which writes wait for space.
    Room,
    /// The layer that notes changes while the disk moves.
    Move,
}

impl LayerKey {
    /// The key of a listed layer.
    pub(crate) fn listed(definition: &LayerDefinition) -> Self {
        // A disk has only one log, which stays while the log is the same, whatever its other
        // options.
        let is_log = LOG_KINDS.contains(&definition.kind.as_str());
        let options = if is_log { Map::new() } else { definition.options.clone() };
        Self::Listed(LayerDefinition { kind: definition.kind.clone(), options })
    }

    /// Whether the layer is a cache with a log beneath it.
    pub(crate) fn has_log(&self) -> bool {
        matches!(self, Self::Listed(definition) if configuration::layers::has_log(definition))
    }

    /// The definition in the status of a layer that is not listed.
    pub(crate) fn definition(&self) -> Option<LayerDefinition> {
        let options = match self {
            Self::Listed(_) | Self::Activity => return None,
            Self::Log => Value::Null,
            Self::Model(model) => serde_json::json!({ "model": model }),
            Self::Room | Self::Move => serde_json::Value::Null,
        };
        Some(LayerDefinition::new(self.name(), options))
    }

    /// The layer's name in the status.
    pub(crate) fn name(&self) -> &str {
        match self {
            Self::Listed(definition) => definition.name(),
            Self::Log => "wal",
            Self::Activity => "activity",
            Self::Model(_) => "model",
            Self::Room => "wait-for-room",
            Self::Move => "move",
        }
    }
}

/// A layer, and its identity.
pub(crate) type KeyedLayer = (LayerKey, Arc<dyn Layer>);

/// Puts `layer` into a definition. It replaces the layer in `made` that can take over its options,
/// or else the only layer of its kind. A new layer is put where `beside` or the rank of its kind
/// says. A layer that is replaced moves if `beside` names a place.
///
/// # Errors
/// If there is no such place, or the layer cannot be moved.
pub(crate) fn set_layer(
    definition: &mut DiskDefinition,
    layer: &LayerDefinition,
    beside: Beside<'_>,
    made: &[KeyedLayer],
) -> Result<(), ErrorBody> {
    let indexes = |is: &dyn Fn(&LayerDefinition) -> bool| -> Vec<usize> {
        let layers = definition.layers.iter().enumerate();
        layers
            .filter(|(_, other)| other.kind == layer.kind && is(other))
            .map(|(at, _)| at)
            .collect()
    };
    let prepared = configuration::layers::prepare(layer).ok();
    let fits = |other: &LayerDefinition| {
        let key = LayerKey::listed(other);
        let made = made.iter().find(|(made, _)| *made == key);
        prepared.as_ref().zip(made).is_some_and(|(options, (_, made))| options.fits(&**made))
    };
    let index = match (&indexes(&fits)[..], &indexes(&|_| true)[..]) {
        ([index, ..], _) => Some(*index),
        ([], [index]) if !prepared.as_ref().is_some_and(|options| options.has_several()) => {
            Some(*index)
        }
        _ => None,
    };
    match index {
        Some(index) if beside.is_none() => {
            definition.layers[index] = layer.clone();
            return Ok(());
        }
        // What it holds is beneath what the layers above it have seen.
        Some(_) if configuration::order::holds_data(layer) => {
            return Err(refusal(
                ErrorCode::Conflict,
                format!("the layer `{}` holds data and cannot move while it is in use", layer.kind),
                "remove it first, which writes its changes home, then add it at the other place",
            ));
        }
        Some(index) => drop(definition.layers.remove(index)),
        None => {}
    }
    configuration::order::insert(definition, layer, beside).map_err(|problems| invalid(&problems))
}

/// The layers that a definition need not list, from above. `classify` is above all others, so that
/// they have its insights.
const IMPLIED: [&str; 2] = ["classify", "tap"];

/// The new layers of a disk.
#[derive(Default)]
pub(crate) struct NewLayers {
    /// All layers, the uppermost first.
    pub layers: Vec<KeyedLayer>,
    /// The layers that stay and get other options.
    adoptions: Vec<(Box<dyn Prepared>, Arc<dyn Layer>)>,
}

impl NewLayers {
    /// The layers without their keys.
    pub(crate) fn list(&self) -> Vec<Arc<dyn Layer>> {
        self.layers.iter().map(|(_, layer)| Arc::clone(layer)).collect()
    }

    /// Gives the layers that stay their new options. Called after the change of the disk's layers.
    pub(crate) fn apply(&self) {
        for (options, layer) in &self.adoptions {
            options.apply(&**layer);
        }
    }
}

/// The devices on which a disk lies, for its layer `schedule`.
#[derive(Default)]
struct DeviceFound {
    /// Their names; empty if the disk shares its devices with no other disk, or if they cannot be
    /// found.
    name: String,
    /// Why they cannot be found.
    problem: Option<String>,
}

/// The devices of a disk with the layer `schedule`.
fn device(definition: &DiskDefinition) -> DeviceFound {
    if names_layer(definition, ScheduleOptions::KIND) {
        device_of(placement_within(definition, SEARCH_TIME_MAX))
    } else {
        DeviceFound::default()
    }
}

/// Whether the devices of a disk that lacked them for its layer `schedule` can be found by now.
/// Waits for a limited time.
pub(crate) fn finds_device(definition: &DiskDefinition) -> bool {
    device(definition).problem.is_none()
}

/// Whether the layer `schedule` of a disk lacks its devices.
pub(crate) fn lacks_device(layer: &dyn Layer) -> bool {
    Schedule::of(layer).is_some_and(Schedule::lacks_device)
}

impl DeviceFound {
    /// Whether a layer of the disk stays: it does not lack devices that have been found.
    fn keeps(&self, layer: &dyn Layer) -> bool {
        self.problem.is_some() || !lacks_device(layer)
    }
}

fn device_of(placement: Placement) -> DeviceFound {
    let media: Vec<String> = placement
        .media
        .iter()
        .filter(|medium| !matches!(medium.kind, MediumKind::Memory | MediumKind::Unknown))
        .map(|medium| format!("{} {}", medium.kind.name(), medium.name))
        .collect();
    let problem = placement.problem.filter(|_| media.is_empty());
    DeviceFound { name: media.join(", "), problem }
}

/// The layers of a disk, the uppermost first. Its `classify` and `tap` are uppermost, unless the
/// definition lists them elsewhere. Layers that it had with the same definition are reused with
/// their state.
pub(crate) fn make_layers(equipment: &Equipment<'_>) -> Result<NewLayers, ErrorBody> {
    let (definition, shared) = (equipment.definition, equipment.shared);
    let mut kept = equipment.before.as_ref().map(|it| it.layers.clone()).unwrap_or_default();
    let mut made = NewLayers::default();
    let implied = equipment
        .named
        .iter()
        .map(|layer| layer.name())
        .filter(|name| IMPLIED.contains(name) && !names_layer(definition, name))
        .map(|name| LayerDefinition::new(name, Value::Null));
    let disk = definition.name.clone();
    let log = || -> LogSink {
        let disk = disk.clone();
        Box::new(move |line: &str| {
            tracing::info!(target: REQUESTS, disk = disk.as_str(), "{}", line.trim_start());
        })
    };
    let device = device(definition);
    let Some(cache_host) = &equipment.cache_host else {
        return Err(refusal(ErrorCode::Unsupported, "this daemon has no caches", ""));
    };
    let context = LayerContext {
        disk: &definition.name,
        names: &equipment.names,
        log: &log,
        limits: shared.of::<LimitGroups>(),
        device: &device.name,
        device_problem: device.problem.as_deref(),
        devices: shared.of::<ScheduleDevices>(),
        caches: shared.of::<Caches>(),
        cache_host: &**cache_host,
        is_served: equipment.before.is_some(),
        memory: &|size| Ok(Arc::new(Memory::open_large(size)?) as Arc<dyn Backend>),
        capacity: equipment.home.capacity(),
        waiters: equipment.waiters.as_ref(),
        guest: equipment.guest.as_ref(),
        shared: &equipment.named,
    };
    let listed: Vec<LayerDefinition> = implied.chain(definition.layers.iter().cloned()).collect();
    let keys: Vec<LayerKey> = listed.iter().map(LayerKey::listed).collect();
    for (layer, key) in listed.iter().zip(&keys) {
        let stays = |(other, old): &KeyedLayer| other == key && device.keeps(&**old);
        if let Some(index) = kept.iter().position(stays) {
            made.layers.push((key.clone(), kept.remove(index).1));
            continue;
        }
        let prepared = configuration::layers::prepare(layer)
            .map_err(|problems| refusal(ErrorCode::Invalid, problems.to_string(), ""))?;
        // A layer that stays and takes over other options.
        let fits = |(other, old): &KeyedLayer| {
            !keys.contains(other) && old.name() == layer.kind && prepared.fits(&**old)
        };
        if let Some(index) = kept.iter().position(fits) {
            let old = kept.remove(index).1;
            made.layers.push((key.clone(), Arc::clone(&old)));
            made.adoptions.push((prepared, old));
            continue;
        }
        let new = prepared.make(&context)?;
        made.layers.extend(new.map(|new| (key.clone(), new)));
    }
    fit_layers(equipment, &mut kept, &mut made.layers)?;
    Ok(made)
}

/// Adds the layers that features fit into the disk's own ones, `layers`. Those among `kept` are
/// reused.
fn fit_layers(
    equipment: &Equipment<'_>,
    kept: &mut Vec<KeyedLayer>,
    layers: &mut Vec<KeyedLayer>,
) -> Result<(), ErrorBody> {
    let mut fit = |fitted: &Fitted<'_>| -> Result<KeyedLayer, ErrorBody> {
        match kept.iter().position(|(key, _)| *key == fitted.key) {
            Some(index) => Ok(kept.remove(index)),
            None => Ok((fitted.key.clone(), (fitted.make)()?)),
        }
    };
    let (mut device_layers, mut lowest) = (Vec::new(), Vec::new());
    for fitted in &equipment.fitted {
        let layer = fit(fitted)?;
        match fitted.position {
            // It has the newest content.
            Position::Cache => {
                let cache = layers.iter().position(|(key, _)| key.has_log());
                let below = cache.map_or(layers.len(), |cache| cache + 1);
                layers.insert(below, layer);
            }
            Position::Device => device_layers.push(layer),
            Position::Lowest => lowest.push(layer),
        }
    }
    let above = layers.len();
    layers.extend(lowest);
    // Without them, the requests are seen like those of other programs.
    if layers.len() < fathom_block::LAYERS_MAX {
        layers.splice(above..above, device_layers);
    }
    if layers.len() > fathom_block::LAYERS_MAX {
        return Err(too_many_layers(ErrorKind::TooLong));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use fathom_devices::Medium;
    use fathom_insight::Names;
    use fathom_layers::ScheduleDevices;

    use super::*;

    #[test]
    fn a_layer_that_lacks_its_devices_is_replaced_when_they_are_found() {
        let hangs = device_of(Placement::unknown("its file system does not answer"));
        assert_eq!((hangs.name.as_str(), hangs.problem.is_some()), ("", true));
        let memory = device_of(Placement::on(Medium::memory()));
        assert_eq!((memory.name.as_str(), memory.problem.is_some()), ("", false));
        let found = device_of(Placement::on(Medium::new(MediumKind::Device, "sda")));
        assert_eq!((found.name.as_str(), found.problem.is_some()), ("device sda", false));

        let make = || {
            let (devices, names) = (ScheduleDevices::default(), Arc::new(Names::default()));
            Schedule::new(&ScheduleOptions::default(), "disk a", &devices, &names, None)
        };
        let whole = make();
        assert!([&hangs, &memory, &found].iter().all(|device| device.keeps(&whole)));
        assert!(whole.status().problems.is_empty());
        let lacking = make();
        lacking.note_missing_device("its file system does not answer");
        assert!(hangs.keeps(&lacking) && !memory.keeps(&lacking) && !found.keeps(&lacking));
        let problems = lacking.status().problems;
        assert!(problems[0].message.contains("does not answer"), "{:?}", problems[0].message);
        assert!(problems[0].remedy.contains("`device`"), "{:?}", problems[0].remedy);
    }
}
