//! The vhost-user-blk front end against a client that speaks the protocol itself.
#![allow(missing_docs, clippy::undocumented_unsafe_blocks, reason = "test code")]

mod client;
mod fuzz;
mod hostile;
mod lost_writes;
mod observer;
mod protocol;
mod requests;

use std::path::PathBuf;
use std::sync::Arc;

use fathom_backend::Memory;
use fathom_block::{Disk, DiskOptions, Layer};
use fathom_frontend::vhost_user::{Server, VhostUserOptions};

/// A disk in memory with its server.
pub struct Served {
    pub disk: Arc<Disk>,
    pub server: Server,
    pub socket: PathBuf,
    _directory: tempfile::TempDir,
}

pub const CAPACITY: u64 = 16 << 20;

pub fn serve_with(layers: Vec<Arc<dyn Layer>>, read_only: bool) -> Served {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("disk.sock");
    let options = DiskOptions {
        name: "test".into(),
        serial: "serial-of-the-disk".into(),
        read_only,
        ..DiskOptions::default()
    };
    let disk = Disk::new(options, layers, Arc::new(Memory::new(CAPACITY))).unwrap();
    let server = Server::start(VhostUserOptions::new(&socket), Arc::clone(&disk)).unwrap();
    Served { disk, server, socket, _directory: directory }
}

pub fn serve() -> Served {
    serve_with(Vec::new(), false)
}
