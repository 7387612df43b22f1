//! Servers to be clients of.

#![allow(dead_code, reason = "each suite uses a part of it")]

use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fathom_block::{Backend, Disk, DiskOptions};
use fathom_failure::Failure;
use fathom_frontend::nbd::{Address, Exports, Listener, ListenerOptions};
use fathom_nbd::{NbdUri, RemoteDisk, RemoteOptions};
use fathom_sim::{Harness, HarnessOptions, Workload, WorkloadOptions};
use parking_lot::Mutex;

pub const MIB: u64 = 1 << 20;
/// The size of a test's export, in bytes.
pub const CAPACITY: u64 = 8 * MIB;

/// The time limit for what should happen soon.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// A folder in memory, so that no slow disk determines the time of a test.
pub fn in_memory() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < end, "{what} takes too long");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A program that serves an export on a Unix socket, which can be killed and started again.
pub struct Program {
    command: Vec<String>,
    socket: PathBuf,
    child: Option<Child>,
}

impl Program {
    /// `None` if this host does not have the program.
    pub fn start(command: &[&str], socket: &Path) -> Option<Self> {
        let command = command.iter().map(|word| (*word).to_owned()).collect();
        let mut program = Self { command, socket: socket.to_owned(), child: None };
        program.run().then_some(program)
    }

    /// Starts it again. Returns whether this host has it.
    pub fn run(&mut self) -> bool {
        let _ = std::fs::remove_file(&self.socket);
        let mut command = Command::new(&self.command[0]);
        match command.args(&self.command[1..]).stdin(Stdio::null()).spawn() {
            Ok(child) => self.child = Some(child),
            Err(error) => {
                eprintln!("{} cannot be started ({error}): skipped", self.command[0]);
                return false;
            }
        }
        until("the start of a server", || UnixStream::connect(&self.socket).is_ok());
        true
    }

    pub fn signal(&self, signal: &str) {
        let id = self.child.as_ref().unwrap().id().to_string();
        assert!(Command::new("kill").arg(format!("-{signal}")).arg(id).status().unwrap().success());
    }

    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.kill();
    }
}

/// `nbdkit` in the foreground on a socket.
pub fn nbdkit(socket: &Path, arguments: &[&str]) -> Option<Program> {
    let socket_name = socket.display().to_string();
    Program::start(&[&["nbdkit", "-f", "-U", &socket_name], arguments].concat(), socket)
}

/// Fathom's own server on a store that can be exchanged, behind a path that can be cut.
pub struct Fathom {
    folder: tempfile::TempDir,
    served: Option<(Arc<Exports>, Listener)>,
    /// The connections; `None` while no others are accepted.
    connections: Arc<Mutex<Option<Vec<UnixStream>>>>,
}

impl Fathom {
    pub fn start(store: Arc<dyn Backend>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let connections: Arc<Mutex<Option<Vec<UnixStream>>>> = Arc::default();
        let listener = UnixListener::bind(folder.path().join("path.sock")).unwrap();
        let (target, kept) = (folder.path().join("nbd.sock"), Arc::clone(&connections));
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let (Ok(client), Ok(server)) = (client, UnixStream::connect(&target)) else {
                    continue;
                };
                let mut kept = kept.lock();
                let Some(kept) = &mut *kept else { continue };
                for (from, to) in [(&client, &server), (&server, &client)] {
                    let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    std::thread::spawn(move || {
                        let mut bytes = vec![0; 1 << 16];
                        while let Ok(count @ 1..) = from.read(&mut bytes) {
                            if to.write_all(&bytes[..count]).is_err() {
                                break;
                            }
                        }
                        let _ = to.shutdown(Shutdown::Both);
                    });
                }
                kept.extend([client, server]);
            }
        });
        let mut fathom = Self { folder, served: None, connections };
        fathom.serve(store);
        fathom
    }

    /// Serves a store.
    pub fn serve(&mut self, store: Arc<dyn Backend>) {
        let exports = Arc::new(Exports::with_threads(1));
        let options = DiskOptions { name: "disk".into(), ..DiskOptions::default() };
        let disk = Disk::new(options, Vec::new(), store).unwrap();
        exports.add("disk", "", disk).unwrap();
        let options = ListenerOptions::new(Address::Unix(self.folder.path().join("nbd.sock")));
        let listener = Listener::new(options, Arc::clone(&exports)).unwrap();
        self.served = Some((exports, listener));
        *self.connections.lock() = Some(Vec::new());
    }

    /// Cuts all connections, until a store is served again.
    pub fn cut(&self) {
        for stream in self.connections.lock().take().into_iter().flatten() {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Ends the server.
    pub fn stop(&mut self) {
        if let Some((_, listener)) = self.served.take() {
            listener.shutdown();
        }
    }

    pub fn uri(&self) -> String {
        format!("nbd+unix:///disk?socket={}", self.folder.path().join("path.sock").display())
    }
}

pub fn open_within(uri: &str, timeout: Duration) -> Result<Arc<RemoteDisk>, Failure> {
    let options = RemoteOptions { timeout, ..RemoteOptions::new(NbdUri::parse(uri)?) };
    RemoteDisk::open(&options).map(Arc::new)
}

pub fn open(uri: &str) -> Arc<RemoteDisk> {
    open_within(uri, PATIENCE).unwrap()
}

pub fn on_socket(socket: &Path) -> String {
    format!("nbd+unix:///?socket={}", socket.display())
}

pub fn disk(remote: &Arc<RemoteDisk>) -> Arc<Disk> {
    let backend = Arc::clone(remote) as Arc<dyn Backend>;
    Disk::new(DiskOptions::default(), Vec::new(), backend).unwrap()
}

/// Requests in real time, in two queues.
pub fn harness(disk: &Arc<Disk>, depth: usize) -> Harness {
    let options = HarnessOptions { queues: 2, depth, simulated: false };
    Harness::new(disk, &options, 1)
}

pub fn workload(seed: u64, alignment: u64) -> Workload {
    let options =
        WorkloadOptions { alignment, length_max: 256 << 10, ..WorkloadOptions::new(CAPACITY) };
    Workload::new(options, seed)
}
