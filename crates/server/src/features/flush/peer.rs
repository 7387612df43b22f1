//! Peers on a Unix socket, for tests of clients: one with prepared answers, and a small QEMU.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::Mutex;
use serde_json::{Value, json};

/// See the module.
pub(super) struct Peer {
    path: PathBuf,
    thread: Option<JoinHandle<Vec<u8>>>,
    _folder: tempfile::TempDir,
}

impl Peer {
    /// Accepts one client, and sends each of `answers` after a message of the client; the first one
    /// at once if `greets`. Then it disconnects.
    pub(super) fn start(greets: bool, answers: &'static [&'static [u8]]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("peer");
        let listener = UnixListener::bind(&path).unwrap();
        let thread = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut received = Vec::new();
            let mut piece = [0; 4096];
            let mut waits = !greets;
            for answer in answers {
                if waits {
                    match stream.read(&mut piece) {
                        Ok(count) if count > 0 => received.extend_from_slice(&piece[..count]),
                        _ => break,
                    }
                }
                waits = true;
                if stream.write_all(answer).is_err() {
                    break;
                }
            }
            received
        });
        Self { path, thread: Some(thread), _folder: folder }
    }

    /// The socket.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// What the client has sent, once it has disconnected.
    pub(super) fn received(mut self) -> String {
        let received = self.thread.take().unwrap().join().unwrap();
        String::from_utf8_lossy(&received).into_owned()
    }
}

/// A QEMU with a memory balloon. Its guest never follows the orders.
pub(super) struct Qemu {
    path: PathBuf,
    state: Arc<Mutex<State>>,
    _folder: tempfile::TempDir,
}

struct State {
    /// The memory that the guest reports, in bytes.
    memory: u64,
    /// The orders so far.
    orders: Vec<u64>,
    /// Whether orders are refused.
    refuses: bool,
}

impl Qemu {
    /// A QEMU whose guest has `memory` bytes. It serves one client after the other.
    pub(super) fn start(memory: u64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("qmp");
        let listener = UnixListener::bind(&path).unwrap();
        let state = Arc::new(Mutex::new(State { memory, orders: Vec::new(), refuses: false }));
        let for_thread = Arc::clone(&state);
        std::thread::spawn(move || {
            while let Ok((stream, _)) = listener.accept() {
                let _ = serve(&stream, &for_thread);
            }
        });
        Self { path, state, _folder: folder }
    }

    /// The socket.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The orders so far.
    pub(super) fn orders(&self) -> Vec<u64> {
        self.state.lock().orders.clone()
    }

    /// Sets the memory that the guest reports.
    pub(super) fn set_memory(&self, memory: u64) {
        self.state.lock().memory = memory;
    }

    /// Sets whether orders are refused.
    pub(super) fn set_refuses(&self, refuses: bool) {
        self.state.lock().refuses = refuses;
    }
}

/// Answers the commands of a client.
fn serve(mut stream: &UnixStream, state: &Mutex<State>) -> std::io::Result<()> {
    stream.write_all(b"{\"QMP\": {}}\n")?;
    for line in BufReader::new(stream).lines() {
        let command: Value = serde_json::from_str(&line?)?;
        let mut state = state.lock();
        let mut result = match command["execute"].as_str() {
            Some("query-balloon") => json!({ "return": { "actual": state.memory } }),
            Some("balloon") if state.refuses => json!({ "error": { "desc": "not now" } }),
            Some("balloon") => {
                state.orders.extend(command["arguments"]["value"].as_u64());
                json!({ "return": {} })
            }
            _ => json!({ "return": {} }),
        };
        drop(state);
        result["id"] = command["id"].clone();
        stream.write_all(format!("{result}\n").as_bytes())?;
    }
    Ok(())
}

/// A guest agent that freezes and thaws.
pub(super) struct Agent {
    path: PathBuf,
    is_frozen: Arc<Mutex<bool>>,
    _folder: tempfile::TempDir,
}

impl Agent {
    /// It serves one client after the other.
    pub(super) fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("agent");
        let listener = UnixListener::bind(&path).unwrap();
        let is_frozen = Arc::new(Mutex::new(false));
        let for_thread = Arc::clone(&is_frozen);
        std::thread::spawn(move || {
            while let Ok((stream, _)) = listener.accept() {
                let _ = serve_agent(&stream, &for_thread);
            }
        });
        Self { path, is_frozen, _folder: folder }
    }

    /// The socket.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the guest is frozen.
    pub(super) fn is_frozen(&self) -> bool {
        *self.is_frozen.lock()
    }
}

fn serve_agent(mut stream: &UnixStream, is_frozen: &Mutex<bool>) -> std::io::Result<()> {
    for line in BufReader::new(stream).split(b'\n') {
        let line = line?;
        let begin = line.iter().take_while(|byte| **byte == 0xff).count();
        let command: Value = serde_json::from_slice(&line[begin..])?;
        let mut is_frozen = is_frozen.lock();
        let result = match command["execute"].as_str() {
            Some("guest-sync-delimited") => {
                stream.write_all(&[0xff])?;
                command["arguments"]["id"].clone()
            }
            Some("guest-fsfreeze-status") => {
                json!(if *is_frozen { "frozen" } else { "thawed" })
            }
            what => {
                *is_frozen = what == Some("guest-fsfreeze-freeze");
                json!(1)
            }
        };
        drop(is_frozen);
        stream.write_all(format!("{}\n", json!({ "return": result })).as_bytes())?;
    }
    Ok(())
}
