//! `fathom cache clear`: empties a cache, whose logs keep what they have, or gives up one of its
//! logs.
use std::path::Path;

use fathom_cache::format::Superblock;
use fathom_persistence::Identity;
use serde::Serialize;

use super::{ClearOptions, give_up, volume::Volume};
use crate::{
    failure::{CommandResult, Failure},
    output,
};

#[derive(Serialize)]
struct Cleared<'a> {
    path: &'a Path,
    blocks: u32,
}

pub(super) fn run(options: &ClearOptions) -> CommandResult {
    let path = &options.path;
    let volume = Volume::open(path, true)?;
    let format = volume.superblock(path)?;
    if options.log.is_some() || options.log_at.is_some() {
        return give_up::run(options, &volume, &format);
    }
    // With another identity, it fits the marks of no image.
    let cache =
        Identity::draw().map_err(|error| Failure::new(format!("no random bytes: {error}")))?;
    volume
        .clear(&Superblock { cache, ..format }, options.format.json)
        .map_err(|error| Failure::io("write", path, &error))?;
    if options.format.json {
        return output::json(&Cleared { path, blocks: format.slots });
    }
    output::text_line(&format!("{}: the cache is empty", path.display()))
}
