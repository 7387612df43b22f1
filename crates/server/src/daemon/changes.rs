//! The order of changes: a disk has one change at a time, and changes of different disks do not
//! wait for each other.
//!
//! A change may take long, if an image is on a file system that hangs. So the right to change is
//! held for each disk separately, and a disk's claims (its name, socket and image) are entered
//! before the disk is opened.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use fathom_control::{DiskDefinition, ErrorBody, ErrorCode};
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::Daemon;
use crate::configuration::{image_identity, normal_path};
use crate::daemon::stack::refusal;
use crate::stores::exports;

/// How long a change waits for an earlier change of the same disk.
const CHANGE_WAIT_MAX: Duration = Duration::from_secs(5);

/// The changes in progress.
#[derive(Default)]
pub(crate) struct ChangesInProgress {
    /// The disks that are being changed; the empty name stands for the configuration file.
    subjects: Mutex<BTreeSet<String>>,
    ended: Condvar,
}

/// The right to change a disk, held until it is dropped.
pub(crate) struct ChangeRight<'d> {
    changes: &'d ChangesInProgress,
    subject: String,
}

impl ChangesInProgress {
    fn subjects(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.subjects.lock()
    }
}

impl Drop for ChangeRight<'_> {
    fn drop(&mut self) {
        self.changes.subjects().remove(&self.subject);
        self.changes.ended.notify_all();
    }
}

impl Daemon {
    /// Waits for the right to change the disk `name`.
    pub(crate) fn change(&self, name: &str) -> Result<ChangeRight<'_>, ErrorBody> {
        self.change_within(name, CHANGE_WAIT_MAX)
    }

    /// Waits for the right to read the configuration file again.
    pub(crate) fn change_configuration(&self) -> Result<ChangeRight<'_>, ErrorBody> {
        self.change_within("", CHANGE_WAIT_MAX)
    }

    fn change_within(&self, subject: &str, limit: Duration) -> Result<ChangeRight<'_>, ErrorBody> {
        let mut subjects = self.changes.subjects();
        let is_held =
            |subjects: &mut BTreeSet<String>| subjects.contains(subject) && !self.is_stopping();
        let waited = self.changes.ended.wait_while_for(&mut subjects, is_held, limit);
        if self.is_stopping() {
            return Err(stopping());
        }
        if waited.timed_out() {
            let what = if subject.is_empty() {
                "the configuration is already being reloaded".to_owned()
            } else {
                format!("another change of the disk {subject:?} is in progress")
            };
            return Err(refusal(ErrorCode::Conflict, what, "try again when it has ended"));
        }
        subjects.insert(subject.to_owned());
        drop(subjects);
        Ok(ChangeRight { changes: &self.changes, subject: subject.to_owned() })
    }
}

/// The error of a change while the daemon shuts down.
pub(crate) fn stopping() -> ErrorBody {
    refusal(ErrorCode::ShuttingDown, "the daemon is shutting down", "")
}

/// The claims of a disk: no other disk may have the same.
#[derive(Clone)]
pub(crate) struct Claims {
    name: String,
    socket: Option<PathBuf>,
    /// The identity of the image in its file system when the disk was opened.
    image: Option<(u64, u64)>,
    /// The export of an NBD server that has the disk's blocks.
    export: Option<String>,
    /// The name that the operator has given to the image's device.
    key: Option<String>,
    read_only: bool,
}

impl Claims {
    /// The claims of `definition`. Queries file systems, which may take long.
    pub(crate) fn new(definition: &DiskDefinition) -> Self {
        Self {
            name: definition.name.clone(),
            socket: definition.vhost_user.as_ref().map(|guest| normal_path(&guest.socket)),
            image: definition.image.as_deref().and_then(image_identity),
            export: exports::place(definition),
            key: definition.key.clone(),
            read_only: definition.read_only,
        }
    }

    /// The identity of the image in its file system when the disk was opened.
    pub(crate) fn image(&self) -> Option<(u64, u64)> {
        self.image
    }

    /// Frees the name and the socket, of a disk that is not served after all. Its image is in use
    /// until the attempt to open it ends.
    pub(crate) fn release(&mut self) {
        self.name.clear();
        self.socket = None;
    }

    /// Checks these claims against the control socket and the claims of the `others`.
    pub(crate) fn check<'c>(
        &self,
        control: &Path,
        others: impl Iterator<Item = &'c Claims>,
    ) -> Result<(), ErrorBody> {
        let conflict =
            |message: String, remedy: &str| Err(refusal(ErrorCode::Conflict, message, remedy));
        if self.socket.as_deref() == Some(control) {
            return conflict("the socket is the control socket".into(), "choose another socket");
        }
        for other in others {
            if other.name == self.name {
                return conflict(
                    format!("there is a disk {:?} already", other.name),
                    "choose another name, or remove that disk first",
                );
            }
            if self.socket.is_some() && self.socket == other.socket {
                return conflict(
                    format!("the disk {:?} has this socket", other.name),
                    "choose another socket, or remove that disk first",
                );
            }
            let is_other = self.image != other.image;
            if self.key.is_some() && self.key == other.key && is_other {
                return conflict(
                    format!("the disk {:?} has this key for another device", other.name),
                    "choose another key",
                );
            }
            let shares = self.image.is_some() && self.image == other.image;
            let shares_export = self.export.is_some() && self.export == other.export;
            if (shares || shares_export) && !(self.read_only && other.read_only) {
                let what = if shares { "image" } else { "export" };
                return conflict(
                    format!(
                        "the disk {:?} has this {what}, and a writer cannot share it",
                        other.name
                    ),
                    &format!("choose another {what}, or make both disks read-only"),
                );
            }
        }
        Ok(())
    }
}
