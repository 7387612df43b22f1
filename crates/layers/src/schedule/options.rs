//! The configuration of the layer.

use std::collections::BTreeMap;
use std::sync::Arc;

use fathom_block::Layer;
use fathom_failure::Failure;
use fathom_options::{Bytes, Check, Key, Nanoseconds};
use serde::{Deserialize, Serialize};

use super::Schedule;
use super::state::WEIGHT;
use crate::kind::{LayerContext, LayerOptions, Rank};

/// The largest weight.
const WEIGHT_MAX: u32 = 10_000;
/// The most requests at a device.
const DEPTH_MAX: u32 = 65_536;
/// The longest time for which a request may be held, in nanoseconds.
const HOLD_MAX_NS: u64 = 30_000_000_000;
/// The longest name of a device and the longest pattern, in bytes.
const NAME_LENGTH_MAX: usize = 256;
/// The most patterns.
const LIST_MAX: usize = 64;

/// The configuration of a layer that decides which requests use a shared device first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ScheduleOptions {
    /// The name of the device; empty for the device on which the disk lies.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub device: String,
    /// The weight of the disk among the disks of the device.
    pub weight: u32,
    /// The weights of the guest's control groups by pattern; empty if they are not distinguished.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub weights: BTreeMap<String, u32>,
    /// The most requests at the device while disks or control groups compete for it.
    pub depth: u32,
    /// The longest time for which a background request is held back.
    pub hold_max: Nanoseconds,
    /// The most background requests of the disk that are held back.
    pub held_requests: u64,
    /// The most bytes of background requests of the disk that are held back.
    pub held_bytes: Bytes,
}

impl Default for ScheduleOptions {
    fn default() -> Self {
        Self {
            device: String::new(),
            weight: WEIGHT,
            weights: BTreeMap::new(),
            depth: 32,
            hold_max: Nanoseconds(2_000_000_000),
            held_requests: 64,
            held_bytes: Bytes(32 << 20),
        }
    }
}

impl LayerOptions for ScheduleOptions {
    const KIND: &'static str = "schedule";
    const RANK: Rank = Rank::Schedule;
    const MEANING: &'static str = "decides which requests use a shared device first";
    const ONCE: Option<&'static str> = Some("a request would wait for the device twice");
    const KEYS: &'static [Key] = &[
        Key::new(
            "device",
            "\"\"",
            "the name of the device, which disks with the same name share; by \
            default the modelled device of the disk, or the host's device of its image",
        ),
        Key::new("weight", "100", "the weight of the disk among those of the device"),
        Key::new(
            "weights",
            "{}",
            "the weights of the guest's control groups, by patterns with `*` and \
            `?`; 100 for others. By default they are not distinguished. Needs `classify`",
        ),
        Key::new(
            "depth",
            "32",
            "the most requests at the device while disks or control groups compete \
            for it; the last value that was set applies to all disks of the device",
        ),
        Key::new(
            "hold_max",
            "\"2s\"",
            "the longest time for which a background request is held back",
        ),
        Key::new(
            "held_requests",
            "64",
            "the most background requests of the disk that are held back",
        ),
        Key::new("held_bytes", "\"32M\"", "the most bytes of these requests"),
    ];

    fn check(&self, check: &mut Check<'_>) {
        let weights = self.weights.values().map(|weight| ("weights", weight));
        for (key, weight) in [("weight", &self.weight)].into_iter().chain(weights) {
            if *weight == 0 || *weight > WEIGHT_MAX {
                let message = format!("a weight is 1 to {WEIGHT_MAX}, not {weight}");
                check.problem(key, message, "the default is 100");
            }
        }
        if self.depth == 0 || self.depth > DEPTH_MAX {
            let message = format!("`depth` is 1 to {DEPTH_MAX}, not {}", self.depth);
            check.problem("depth", message, "leave it out for the default");
        }
        if self.hold_max.0 > HOLD_MAX_NS {
            let message = "`hold_max` is at most 30 s";
            check.problem(
                "hold_max",
                message,
                "a guest reports requests that take longer as stuck",
            );
        }
        let names = self.weights.keys().map(|pattern| ("weights", pattern));
        for (key, name) in names.chain([("device", &self.device)]) {
            if name.len() > NAME_LENGTH_MAX {
                let message = format!("a name in `{key}` has at most {NAME_LENGTH_MAX} bytes");
                check.problem(key, message, "shorten it");
            }
        }
        if self.weights.len() > LIST_MAX {
            let message = format!("`weights` has at most {LIST_MAX} entries");
            check.problem("weights", message, "use `*` for several, or leave some out");
        }
    }

    fn make(&self, context: &LayerContext<'_>) -> Result<Option<Arc<dyn Layer>>, Failure> {
        let own = format!("disk {}", context.disk);
        let candidates = [self.device.as_str(), context.device];
        let device = candidates.into_iter().find(|name| !name.is_empty()).unwrap_or(&own);
        let waiters = context.waiters.cloned();
        let layer = Schedule::new(self, device, context.devices, context.names, waiters);
        if let (true, Some(problem)) = (self.device.is_empty(), context.device_problem) {
            layer.note_missing_device(problem);
        }
        Ok(Some(Arc::new(layer)))
    }

    fn fits(&self, layer: &dyn Layer) -> bool {
        Schedule::of(layer).is_some_and(|schedule| schedule.is_for(self))
    }

    fn apply(&self, layer: &dyn Layer) {
        if let Some(schedule) = Schedule::of(layer) {
            schedule.set_options(self);
        }
    }
}
