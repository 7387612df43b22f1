//! The vhost-user-blk front end against a client that implements the protocol itself.

#![allow(unsafe_code)]
#![allow(missing_docs, clippy::undocumented_unsafe_blocks, reason = "test code")]

mod absent;
mod client;
mod fuzz;
#[path = "../common/hanging.rs"]
mod hanging;
mod held;
#[path = "../common/holding.rs"]
mod holding;
mod hostile;
mod hostile_vmm;
mod loss;
mod lost_writes;
mod observer;
mod private_memory;
mod protocol;
mod requests;
mod sharing;

use std::path::PathBuf;
use std::sync::Arc;

use fathom_backend::{FileBackend, FileOptions, Memory};
use fathom_block::{Backend, Disk, DiskOptions, Layer};
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
    serve_backend(Arc::new(Memory::new(CAPACITY)), layers, read_only)
}

/// The same on an image in a file.
pub fn serve_file() -> Served {
    let image = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    image.as_file().set_len(CAPACITY).unwrap();
    let options = FileOptions { path: image.path().into(), ..FileOptions::default() };
    let backend = FileBackend::open(&options).unwrap();
    // The file stays open after its name is removed.
    serve_backend(Arc::new(backend), Vec::new(), false)
}

pub fn serve_backend(
    backend: Arc<dyn Backend>,
    layers: Vec<Arc<dyn Layer>>,
    read_only: bool,
) -> Served {
    // One thread serves all rings: the harder case, and the same on every machine.
    serve_options(backend, layers, read_only, Some(1), "test")
}

/// The same with `threads` threads.
pub fn serve_threads(
    backend: Arc<dyn Backend>,
    layers: Vec<Arc<dyn Layer>>,
    threads: Option<u16>,
    name: &str,
) -> Served {
    serve_options(backend, layers, false, threads, name)
}

fn serve_options(
    backend: Arc<dyn Backend>,
    layers: Vec<Arc<dyn Layer>>,
    read_only: bool,
    threads: Option<u16>,
    name: &str,
) -> Served {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("disk.sock");
    let options = DiskOptions {
        name: name.into(),
        serial: "serial-of-the-disk".into(),
        read_only,
        ..DiskOptions::default()
    };
    let disk = Disk::new(options, layers, backend).unwrap();
    let mut options = VhostUserOptions::new(&socket);
    options.threads = threads;
    let server = Server::start(options, Arc::clone(&disk)).unwrap();
    Served { disk, server, socket, _directory: directory }
}

pub fn serve() -> Served {
    serve_with(Vec::new(), false)
}
