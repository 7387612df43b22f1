//! Disks whose blocks an NBD server has.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::Duration;

use fathom_block::{Backend, Disk};
use fathom_control::{DiskDefinition, ErrorBody, ErrorCode};
use fathom_failure::Failure;
use fathom_nbd::{NbdUri, RemoteDisk, RemoteOptions};
use parking_lot::Mutex;

use super::kept::{KeptExport, NotesFolder};
use crate::daemon::parts::Parts;

/// The exports of the disks that are being opened, by the disks' names.
#[derive(Clone, Default)]
pub(crate) struct OpenExports(Arc<Mutex<BTreeMap<String, Weak<RemoteDisk>>>>);

impl OpenExports {
    /// The daemon looks for the problems of a new disk as soon as its server is away or answers
    /// again.
    pub(crate) fn attend(&self, disk: &Arc<Disk>) {
        let Some(remote) = self.0.lock().remove(disk.name()) else { return };
        let Some(remote) = remote.upgrade() else { return };
        attend(&remote, disk);
    }
}

/// The daemon looks for the problems of a disk when the server of its export goes away or answers
/// again.
pub(super) fn attend(remote: &RemoteDisk, disk: &Arc<Disk>) {
    let disk = Arc::downgrade(disk);
    remote.watch(move || {
        if let Some(disk) = disk.upgrade() {
            disk.failures().call();
        }
    });
}

/// The URI of a disk's export.
fn uri(definition: &DiskDefinition) -> Option<NbdUri> {
    NbdUri::parse(definition.nbd.as_deref()?).ok()
}

/// The server and the name of a disk's export, which tell it from others.
pub(crate) fn place(definition: &DiskDefinition) -> Option<String> {
    uri(definition).map(|uri| uri.place())
}

/// The server that has a disk's blocks.
pub(crate) fn server(definition: &DiskDefinition) -> Option<String> {
    uri(definition).map(|uri| uri.server())
}

/// Opens the export of a disk. Blocks, for at most 10 s.
pub(crate) fn open_export(
    definition: &DiskDefinition,
    records: &Path,
    shared: &Parts,
) -> Result<Arc<dyn Backend>, ErrorBody> {
    let (name, text) = (&definition.name, definition.nbd.as_deref().unwrap_or_default());
    let failed = |failure: Failure| {
        let what = format!("the export {text} for the disk {name:?}");
        ErrorBody::new(ErrorCode::Failed, failure.about(what))
    };
    let uri = NbdUri::parse(text).map_err(failed)?;
    let mut options = RemoteOptions { read_only: definition.read_only, ..RemoteOptions::new(uri) };
    if let Some(timeout) = definition.timeout {
        options.timeout = Duration::from_nanos(timeout.0);
    }
    let record = (!definition.read_only).then(|| {
        let folder = shared.of::<NotesFolder>();
        KeptExport::of_export(name, options.uri.place(), folder, records) as _
    });
    let remote = RemoteDisk::open_recorded(&options, record).map_err(failed)?;
    if !definition.read_only && !remote.capabilities().write {
        let refused = Failure::new("it is read-only");
        return Err(failed(refused.advise("make it writable, or add `read_only = true`")));
    }
    let remote = Arc::new(remote);
    shared.of::<OpenExports>().0.lock().insert(name.clone(), Arc::downgrade(&remote));
    Ok(remote)
}
