//! The back end: a storage daemon, and the client of its export.

use std::fmt::Write as _;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use fathom_block::{
    Backend, BackendOpenContext, BackendProblem, BackendQueue, Capabilities, ErrorKind, Figure,
    Geometry,
};
use fathom_failure::Failure;
use fathom_image::ChainLink;
use fathom_nbd::{NbdUri, RemoteDisk, RemoteOptions};

use super::super::kept::KeptExport;
use super::spawn::{EXPORT, Spawning};
use super::supervisor::StorageDaemon;

/// An image that QEMU serves.
pub(crate) struct QemuDisk {
    remote: RemoteDisk,
    daemon: StorageDaemon,
    /// What a later daemon has to know.
    record: Option<Arc<KeptExport>>,
}

impl QemuDisk {
    /// Starts the storage daemon and connects to it. `record` is for later daemons.
    pub(super) fn open(
        spawning: Spawning,
        timeout: Option<Duration>,
        record: Option<Arc<KeptExport>>,
    ) -> Result<Self, Failure> {
        let socket = spawning.socket.display().to_string();
        let uri = format!("nbd+unix:///{EXPORT}?{}", query("socket", &socket));
        let read_only = spawning.is_read_only;
        let mut options = RemoteOptions { read_only, ..RemoteOptions::new(NbdUri::parse(&uri)?) };
        options.timeout = timeout.unwrap_or(options.timeout);
        let daemon = StorageDaemon::start(spawning)?;
        let remote = RemoteDisk::open_recorded(&options, record.clone().map(|it| it as _))?;
        Ok(Self { remote, daemon, record })
    }

    /// The files, the image first.
    pub(crate) fn chain(&self) -> &[ChainLink] {
        &self.daemon.spawning().chain
    }

    /// From now on, changes do not go through a log any more.
    pub(crate) fn leave_log(&self) {
        if let Some(record) = &self.record {
            record.leave_log();
        }
    }

    /// The client of the export.
    pub(crate) fn remote(&self) -> &RemoteDisk {
        &self.remote
    }
}

/// A part of a URI, with what has a meaning in it escaped.
fn query(key: &str, value: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/-._~".contains(&byte);
    let mut text = format!("{key}=");
    for byte in value.bytes() {
        if is_plain(byte) {
            text.push(char::from(byte));
        } else {
            let _ = write!(text, "%{byte:02X}");
        }
    }
    text
}

impl Backend for QemuDisk {
    fn name(&self) -> &'static str {
        self.chain()[0].format.name()
    }

    fn capacity(&self) -> u64 {
        self.remote.capacity()
    }

    fn geometry(&self) -> Geometry {
        self.remote.geometry()
    }

    fn capabilities(&self) -> Capabilities {
        self.remote.capabilities()
    }

    fn open_queue(
        &self,
        context: &mut BackendOpenContext<'_>,
    ) -> io::Result<Box<dyn BackendQueue>> {
        self.remote.open_queue(context)
    }

    fn resize(&self, capacity: u64) -> Result<(), ErrorKind> {
        self.daemon.resize(capacity).map_err(|reason| {
            let image = self.chain()[0].path.display();
            tracing::warn!(image = %image, "the storage daemon does not resize an image: {reason}");
            ErrorKind::Io
        })?;
        self.remote.resize(capacity)
    }

    fn problems(&self) -> Vec<BackendProblem> {
        let mut problems = self.remote.problems();
        if let Some(text) = self.daemon.problem() {
            let is_other = |it: &BackendProblem| !matches!(it, BackendProblem::Unreachable { .. });
            problems.retain(is_other);
            problems.push(BackendProblem::Unreachable { text });
        }
        problems
    }

    fn figures(&self) -> Vec<Figure> {
        let meaning = "How often the storage daemon was started.";
        let mut figures = self.remote.figures();
        figures.push(Figure::counter("storage_daemon_starts_total", meaning, self.daemon.starts()));
        figures
    }

    fn losses(&self) -> u64 {
        self.remote.losses()
    }

    fn may_act_late(&self) -> bool {
        self.remote.may_act_late()
    }

    fn inspect(&self) {}

    fn recover(&self) -> io::Result<()> {
        self.remote.recover()
    }

    /// The storage daemon ends, which makes all of the image's metadata durable.
    fn save_state(&self, limit: Duration) -> io::Result<()> {
        self.remote.leave();
        self.daemon.end(limit);
        Ok(())
    }
}

impl Drop for QemuDisk {
    /// The client ends its connection before the storage daemon does.
    fn drop(&mut self) {
        self.remote.leave();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_with_signs_of_uris_is_the_same_path() {
        let path = "/run/a b&c=d%20+é/x";
        let uri = format!("nbd+unix:///disk?{}", query("socket", path));
        assert_eq!(NbdUri::parse(&uri).unwrap().server(), path);
    }
}
