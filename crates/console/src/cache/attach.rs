//! `fathom cache attach` and `detach`: the layer of a disk that is in use.
use std::time::Instant;

use clap::ValueEnum;
use fathom_control::{DiskChange, LayerDefinition};
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::{AttachOptions, DetachOptions};
use crate::{
    disk::absolute,
    failure::{Failure, Outcome},
    output,
};

/// The kind of the layer.
const KIND: &str = "cache";

#[derive(Serialize)]
struct Changed<'a> {
    disk: &'a str,
    attached: bool,
    seconds: f64,
}

pub(super) fn attach(options: &AttachOptions) -> Outcome {
    let mut layer = Map::new();
    let name = |value: Option<clap::builder::PossibleValue>| {
        value.map(|value| value.get_name().to_owned()).unwrap_or_default()
    };
    layer.insert("mode".into(), name(options.mode.to_possible_value()).into());
    layer.insert("policy".into(), name(options.policy.to_possible_value()).into());
    if let Some(store) = &options.store {
        layer.insert("store".into(), absolute(store).display().to_string().into());
        layer.insert("exclusive".into(), options.exclusive.into());
    }
    if let Some(name) = &options.name {
        layer.insert("name".into(), name.clone().into());
    }
    if let Some(share) = &options.share {
        layer.insert("share".into(), share.clone().into());
    }
    let sizes = [
        ("size", options.size),
        ("block_size", options.block_size),
        ("read_ahead", options.read_ahead),
    ];
    for (key, value) in sizes {
        layer.extend(value.map(|value| (key.to_owned(), json!(value))));
    }
    let layer = LayerDefinition::new(KIND, Value::Object(layer));
    let change = DiskChange { set_layer: Some(layer), ..DiskChange::default() };
    let begun = Instant::now();
    options.control.client().change_disk(&options.disk, &change)?;
    show(&options.disk, true, begun, options.format.json)
}

pub(super) fn detach(options: &DetachOptions) -> Outcome {
    let client = options.control.client();
    let status = client.disk(&options.disk)?;
    if !status.layers.iter().any(|layer| layer.name == KIND) {
        return Err(Failure::new(format!("the disk {:?} has no cache", options.disk))
            .advise("`fathom disk list` shows the layers of all disks"));
    }
    let change = DiskChange { remove_layer: Some(KIND.into()), ..DiskChange::default() };
    let begun = Instant::now();
    client.change_disk(&options.disk, &change)?;
    show(&options.disk, false, begun, options.format.json)
}

fn show(disk: &str, attached: bool, begun: Instant, json: bool) -> Outcome {
    let seconds = begun.elapsed().as_secs_f64();
    if json {
        return output::json(&Changed { disk, attached, seconds });
    }
    let what = if attached { "uses the cache" } else { "does not use its cache any more" };
    output::text_line(&format!("{disk} {what}; the change took {seconds:.1} s"))
}
