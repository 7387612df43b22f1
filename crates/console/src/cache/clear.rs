//! `fathom cache clear`: empties a cache. Its logs keep what they have.
use std::path::Path;

use fathom_cache::format::Superblock;
use serde::Serialize;

use super::{
    ClearOptions,
    volume::{Volume, identity},
};
use crate::{
    failure::{Failure, Outcome},
    output,
};

#[derive(Serialize)]
struct Cleared<'a> {
    path: &'a Path,
    blocks: u32,
}

pub(super) fn run(options: &ClearOptions) -> Outcome {
    let path = &options.path;
    let volume = Volume::open(path, true)?;
    let format = volume.superblock(path)?;
    // With another identity, it fits the marks of no image.
    let cache = identity().map_err(|error| Failure::new(format!("no random bytes: {error}")))?;
    volume
        .clear(&Superblock { cache, ..format }, options.format.json)
        .map_err(|error| Failure::io("write", path, &error))?;
    if options.format.json {
        return output::json(&Cleared { path, blocks: format.slots });
    }
    output::text_line(&format!("{}: the cache is empty", path.display()))
}
