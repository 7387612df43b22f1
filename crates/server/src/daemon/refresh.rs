//! What a reload takes from the host again although the configuration names the same: certificates
//! and keys that were renewed, and sockets whose paths were deleted.

use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Read;
use std::path::PathBuf;

use fathom_control::ReloadReport;
use fathom_layers::Log;

use super::Daemon;
use crate::process::group::admit;

/// The most bytes of a file with keys that are looked at.
const LENGTH_MAX: u64 = 1 << 20;

/// What tells the content of some files from another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Content(u64);

impl Content {
    /// That of the files. One that cannot be read counts as empty.
    pub(crate) fn of<'f>(files: impl IntoIterator<Item = &'f Option<PathBuf>>) -> Self {
        let mut hasher = DefaultHasher::new();
        for path in files.into_iter().flatten() {
            let mut bytes = Vec::new();
            if let Ok(file) = File::open(path) {
                // What has been read by an error counts.
                let _ = file.take(LENGTH_MAX).read_to_end(&mut bytes);
            }
            bytes.hash(&mut hasher);
        }
        Self(hasher.finish())
    }
}

impl Daemon {
    /// Makes deleted sockets of disks again, and opens renamed log files again.
    pub(crate) fn refresh(&self, report: &mut ReloadReport) {
        for served in self.served() {
            let name = served.disk.name();
            for layer in served.disk.layers() {
                match Log::of(&*layer).map(Log::open_again) {
                    Some(Ok(true)) => {
                        report.changed.push(format!(
                            "the disk {name:?} has another file for the lines of its log"
                        ));
                    }
                    Some(Err(error)) => report.refused.push(format!("the disk {name:?}: {error}")),
                    Some(Ok(false)) | None => {}
                }
            }
        }
        for served in self.served() {
            let (name, live) = (served.disk.name(), served.live());
            let (Some(server), Some(guest)) = (&live.server, &live.definition.vhost_user) else {
                continue;
            };
            let shown = guest.socket.display().to_string();
            let made = server.listen_again().and_then(|is_made| {
                let group = guest.group.as_ref().filter(|_| is_made);
                group.map_or(Ok(()), |group| admit(&guest.socket, group)).map(|()| is_made)
            });
            match made {
                Ok(true) => {
                    report
                        .changed
                        .push(format!("the socket {shown} of the disk {name:?} was made again"));
                }
                Ok(false) => {}
                Err(error) => {
                    let what = format!(
                        "the socket {shown} of the disk {name:?} cannot be made again: {error}"
                    );
                    report.refused.push(what);
                }
            }
        }
    }
}
