//! Which log a mark names: the log's identity counts, because a device may have got another path.

use std::io;

use fathom_image::MarkedLog;
use fathom_layers::wal::identity_of_log;
use fathom_persistence::Identity;

use super::{WalDefinition, in_cache};

/// Whether a mark names the log of a definition. Takes no lock: the log may be in use.
///
/// A log elsewhere, and one that cannot be read, is known by its path only. Of a long path, the
/// mark has the end.
pub(crate) fn is_named(log: &WalDefinition, marked: &MarkedLog) -> bool {
    let found =
        if log.server().is_some() { Vec::new() } else { identities(log).unwrap_or_default() };
    if !found.is_empty() {
        return found.contains(&marked.identity);
    }
    let path = log.log.canonicalize().unwrap_or_else(|_| log.log.clone());
    !marked.path.is_empty() && path.display().to_string().ends_with(&marked.path)
}

/// The identities of the logs at the place of a definition: in a cache, those of other disks, too.
fn identities(log: &WalDefinition) -> io::Result<Vec<Identity>> {
    let at = |offset| identity_of_log(&log.log, offset);
    if !log.is_in_cache {
        return Ok(at(log.offset.0)?.into_iter().collect());
    }
    let format = in_cache::superblock(&log.log)?;
    let found = (0..format.logs).map(|number| at(format.log_offset(number)));
    Ok(found.collect::<io::Result<Vec<_>>>()?.into_iter().flatten().collect())
}
