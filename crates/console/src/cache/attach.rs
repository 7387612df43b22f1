//! `fathom cache attach` and `detach`: the layer of a disk that is in use.
use std::time::Instant;

use clap::ValueEnum;
use fathom_control::{Bytes, DiskChange, LayerDefinition};
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::{AttachOptions, DetachOptions};
use crate::{
    disk::absolute,
    failure::{CommandResult, Failure},
    output,
};

/// The kind of the layer.
const KIND: &str = "cache";

#[derive(Serialize)]
struct Changed<'a> {
    disk: &'a str,
    attached: bool,
    seconds: f64,
    /// The bytes of the log when the change began, which were written back; none without a log.
    #[serde(skip_serializing_if = "Option::is_none")]
    written_back_bytes: Option<u64>,
}

pub(super) fn attach(options: &AttachOptions) -> CommandResult {
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
    layer.extend(options.age.map(|age| ("age".to_owned(), json!(age))));
    let layer = LayerDefinition::new(KIND, Value::Object(layer));
    let change =
        DiskChange { set_layer: Some(layer), replace: options.replace, ..DiskChange::default() };
    let begun = Instant::now();
    options.control.client().change_disk(&options.disk, &change)?;
    show(&options.disk, true, begun, None, options.format.json)
}

pub(super) fn detach(options: &DetachOptions) -> CommandResult {
    let client = options.control.client();
    let status = client.disk(&options.disk)?;
    if !status.layers.iter().any(|layer| layer.name == KIND) {
        return Err(Failure::new(format!("the disk {:?} has no cache", options.disk))
            .advise("`fathom disk list` shows the layers of all disks"));
    }
    let report = client.caches(Some(&options.disk), 0, 0)?;
    let found = report.of_disk(&options.disk).map(|(_, disk)| disk);
    let dirty = found.filter(|disk| disk.log_bytes > 0).map(|disk| disk.dirty_bytes);
    let change = DiskChange { remove_layer: Some(KIND.into()), ..DiskChange::default() };
    let begun = Instant::now();
    client.change_disk(&options.disk, &change)?;
    show(&options.disk, false, begun, dirty, options.format.json)
}

/// `dirty` are the bytes of a log that were written back.
fn show(
    disk: &str,
    attached: bool,
    begun: Instant,
    dirty: Option<u64>,
    json: bool,
) -> CommandResult {
    let seconds = begun.elapsed().as_secs_f64();
    if json {
        return output::json(&Changed { disk, attached, seconds, written_back_bytes: dirty });
    }
    let what = if attached { "uses the cache" } else { "does not use its cache any more" };
    let written_back = dirty.map_or_else(String::new, |dirty| {
        format!(", with the write-back of what its log had ({})", Bytes(dirty))
    });
    output::text_line(&format!("{disk} {what}; the change took {seconds:.1} s{written_back}"))
}
