//! `fathom disk recover`: accepts writes again after acknowledged ones were lost.
use std::path::Path;

use fathom_image::{ImageChange, Mark, MarkKind};
use rustix::fs::{Advice, fadvise};
use serde::Serialize;

use super::{RecoverOptions, claim::Claim, info::folders_of_daemons, is_path, resize::served_as};
use crate::{
    failure::{CommandResult, Failure},
    output,
};

/// What `--json` prints of an image.
#[derive(Serialize)]
struct Recovered<'a> {
    image: &'a Path,
    /// The kernel's error when writes were lost; absent if none were.
    #[serde(skip_serializing_if = "Option::is_none")]
    errno: Option<i32>,
    /// Whether it was a side of a move.
    moved: bool,
}

pub(super) fn run(options: &RecoverOptions) -> CommandResult {
    let client = options.control.client();
    let path = Path::new(&options.name);
    let mut name = options.name.clone();
    if is_path(&options.name, &client) {
        match served_as(&client, path) {
            Some(disk) => name = disk,
            None => return recover_image(path, options),
        }
    }
    let status = client.recover_disk(&name)?;
    if options.format.json {
        return output::json(&status);
    }
    output::text_line(&message(&name))
}

fn message(name: &str) -> String {
    format!(
        "{name} accepts writes again; check the guest's file systems: lost writes are not restored"
    )
}

/// Recovers an image that no daemon serves, in the steps of a daemon.
fn recover_image(path: &Path, options: &RecoverOptions) -> CommandResult {
    let folders = folders_of_daemons(&options.control.socket());
    let claim = Claim::take(path)?.with_folders(folders);
    let file = claim.file();
    let read = |kind: MarkKind| {
        let mark = kind.read(&claim.marked(path));
        mark.map_err(|error| Failure::io("examine", path, &error))
    };
    let (loss, moved) = (read(MarkKind::Loss)?, read(MarkKind::Move)?.is_some());
    let errno = match loss {
        Some(Mark::Loss(loss)) => Some(loss.errno),
        _ => None,
    };
    if errno.is_none() && !moved {
        return Err(Failure::new(format!("{} has no record of lost writes", path.display()))
            .advise("nothing is to be done; `fathom disk info` shows what an image has"));
    }
    // The first one may still report what the record reports.
    let _ = file.sync_data();
    file.sync_data().map_err(|error| {
        Failure::io("sync", path, &error).advise("repair the storage first, then try again")
    })?;
    // The page cache, and a cache that outlives daemons, may have what the storage has lost.
    let _ = fadvise(file, 0, None, Advice::DontNeed);
    claim.prepare(path, ImageChange::Recover)?;
    claim.finish(path, ImageChange::Recover)?;
    if options.format.json {
        return output::json(&Recovered { image: path, errno, moved });
    }
    if errno.is_none() {
        return output::text_line(&format!("{} can be served as it is", options.name));
    }
    output::text_line(&message(&options.name))
}
