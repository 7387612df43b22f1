//! What a reload takes from the host again although the configuration names the same: certificates and keys that were
//! renewed, and sockets whose paths were deleted.

use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Read;
use std::path::PathBuf;

use fathom_control::{ErrorBody, ListenerDefinition, ReloadReport};
use fathom_layers::Log;

use super::{Daemon, Listening};
use crate::configuration::{Address, parse_address};
use crate::daemon::stack::make_tls;
use crate::lock;
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

    /// That of the files with the keys of a listener.
    pub(crate) fn of_keys(definition: &ListenerDefinition) -> Self {
        let tls = definition.tls.iter();
        Self::of(tls.flat_map(|tls| [&tls.certificate, &tls.key, &tls.client_ca, &tls.psk]))
    }
}

impl Daemon {
    /// Reads the keys of listeners again, makes deleted sockets again, and opens renamed log files again.
    pub(crate) fn refresh(&self, report: &mut ReloadReport) {
        for listening in self.listening() {
            let address = listening.address();
            let mut note = |outcome: Result<bool, ErrorBody>, what: String| match outcome {
                Ok(true) => report.changed.push(what),
                Ok(false) => {}
                Err(refused) => report.refused.push(refused.to_string()),
            };
            note(refresh_keys(&listening), format!("the listener at {address} has other keys"));
            note(
                make_again(&listening),
                format!("the socket of the listener at {address} was made again"),
            );
        }
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

/// Reads the keys of a listener again if its files differ. It keeps those that it has if they cannot be used.
fn refresh_keys(listening: &Listening) -> Result<bool, ErrorBody> {
    let definition = listening.definition();
    let (Some(tls), mut keys) = (&definition.tls, lock(&listening.keys)) else { return Ok(false) };
    let new = Content::of_keys(&definition);
    if *keys == new {
        return Ok(false);
    }
    let tls = make_tls(tls).map_err(|mut refused| {
        refused.message += "; the listener keeps the keys that it has";
        refused
    })?;
    let listener = listening.listener();
    let Some(listener) = &*listener else { return Ok(false) };
    listener.set_tls(tls);
    *keys = new;
    Ok(true)
}

/// Makes the socket of a listener again if its path was deleted.
fn make_again(listening: &Listening) -> Result<bool, ErrorBody> {
    let definition = listening.definition();
    let listener = listening.listener();
    let Some(listener) = &*listener else { return Ok(false) };
    let refused = |error| crate::daemon::stack::socket_refusal(&definition.address, &error);
    let is_made = listener.listen_again().map_err(refused)?;
    if let (true, Some(Address::Unix(path)), Some(group)) =
        (is_made, parse_address(&definition.address), &definition.group)
    {
        admit(&path, group).map_err(refused)?;
    }
    Ok(is_made)
}
