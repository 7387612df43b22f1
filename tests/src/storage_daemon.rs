//! qemu-storage-daemon as the server of a disk, to compare Fathom with.

use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::process::Process;
use crate::{Result, patience, until};

/// A running qemu-storage-daemon with one image, served over vhost-user-blk.
#[derive(Debug)]
pub struct StorageDaemon {
    process: Process,
    socket: PathBuf,
    _directory: TempDir,
}

impl StorageDaemon {
    /// Serves a raw image, writable, with this number of queues.
    ///
    /// # Errors
    /// When it does not start.
    pub fn start(image: &Path, queues: u32) -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let socket = directory.path().join("disk.sock");
        let blockdev = format!(
            "driver=file,node-name=disk,filename={},cache.direct=off,discard=unmap",
            image.display()
        );
        let export = format!(
            "type=vhost-user-blk,id=disk,node-name=disk,writable=on,num-queues={queues},\
             addr.type=unix,addr.path={}",
            socket.display()
        );
        let arguments = ["--blockdev", &blockdev, "--export", &export].map(str::to_owned);
        let process = Process::start(
            Path::new("qemu-storage-daemon"),
            &arguments,
            &directory.path().join("log"),
        )?;
        until("qemu-storage-daemon's socket", patience(20), || {
            process.expect_running()?;
            Ok(socket.exists().then_some(()))
        })?;
        Ok(Self { process, socket, _directory: directory })
    }

    /// The path of its socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The process.
    pub fn process(&self) -> &Process {
        &self.process
    }
}
