//! The life of a daemon with one disk, "a": it is changed while it is used, ended, killed and
//! started again.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use fathom_control::{
    Client, ClientError, DiskChange, DiskStatus, LayerDefinition, OffloadAction, OffloadRequest,
    ProblemKind,
};

use super::setup::Setup;
use crate::nbd::Nbd;
use crate::process::kill;

/// How long a start, an end or a change may take.
const TIME_MAX: Duration = Duration::from_secs(60);
/// How long a disk may stay refused after its log was kept.
const RETRY_TIME_MAX: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(5);
/// The error of a start whose daemon does not have the disk, because it was removed in use.
pub const ABSENT: &str = "the disk is absent";

/// The layers of the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Layers {
    /// The mode of the cache.
    pub cache: Option<&'static str>,
    /// The index of its store; 0 without one.
    pub store: usize,
    /// The kind of the layer with a log.
    pub log: Option<&'static str>,
    pub is_limited: bool,
}

impl Layers {
    /// Whether there is a log, also that of a cache.
    pub fn has_log(&self) -> bool {
        self.log.is_some() || self.cache == Some("write-back")
    }

    /// The layers in the list of a status.
    fn of(disk: &DiskStatus) -> Self {
        let find = |kind: &str| disk.layers.iter().find(|layer| layer.name == kind);
        let mode = find("cache").map(|cache| {
            let mode = cache.definition.options["mode"].as_str().unwrap_or_default();
            MODES.into_iter().find(|known| *known == mode).expect("a mode that was set")
        });
        let is_other = |cache: &fathom_control::LayerStatus| {
            let store = cache.definition.options["store"].as_str();
            store.is_some_and(|store| store.ends_with(Setup::STORES[1]))
        };
        let store = usize::from(find("cache").is_some_and(is_other));
        // The log of a cache is a layer, too.
        let has_own = mode != Some("write-back");
        let log = LOGS.into_iter().find(|kind| has_own && find(kind).is_some());
        Self { cache: mode, store, log, is_limited: find("limit").is_some() }
    }
}

/// The modes of a cache.
pub const MODES: [&str; 3] = ["write-through", "write-around", "write-back"];
/// The layers with a log.
pub const LOGS: [&str; 2] = ["wal", "offload"];

/// A running daemon.
pub struct Life {
    child: Child,
    folder: PathBuf,
    setup: Setup,
}

impl Life {
    /// Starts the daemon in `folder`, and waits until it serves the disk.
    ///
    /// # Errors
    /// If it does not serve it: the daemon's log.
    pub fn start(folder: &Path, setup: &Setup, has_keepsakes: bool) -> Result<Self, String> {
        let configuration = setup.configuration(folder, has_keepsakes);
        std::fs::write(folder.join("f.toml"), configuration).unwrap();
        for socket in ["nbd.sock", "control.sock"] {
            let _ = std::fs::remove_file(folder.join(socket));
        }
        let log = File::options().create(true).append(true).open(folder.join("log.txt")).unwrap();
        let before = log.metadata().unwrap().len();
        let child = Command::new(env!("CARGO_BIN_EXE_fathom"))
            .current_dir(folder)
            .args(["serve", "--config", "f.toml", "--control", "control.sock"])
            .env("STATE_DIRECTORY", folder.join("state"))
            .env("FATHOM_MARKS", folder.join("state/marks"))
            .stdin(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap();
        let mut life = Self { child, folder: folder.to_owned(), setup: *setup };
        let begun = Instant::now();
        let mut kept = None;
        while Nbd::try_connect(&life.socket(), "a").is_err() {
            let mut is_refused = life.is_refused();
            if setup.keeps_log && is_refused {
                // Then the daemon tries again.
                let kept = kept.get_or_insert_with(|| (life.keep_log(), Instant::now()));
                kept.0.clone()?;
                is_refused = kept.1.elapsed() > RETRY_TIME_MAX;
            }
            let has_ended = life.child.try_wait().unwrap().is_some();
            let text = std::fs::read_to_string(folder.join("log.txt")).unwrap_or_default();
            let text = text.get(before as usize..).unwrap_or_default();
            if text.contains(" ready in ") && life.is_absent() {
                return Err(ABSENT.into());
            }
            if has_ended || is_refused || begun.elapsed() > TIME_MAX {
                return Err(text.to_owned());
            }
            std::thread::sleep(PAUSE);
        }
        Ok(life)
    }

    /// Runs `fathom log keep`.
    fn keep_log(&self) -> Result<(), String> {
        let output = Command::new(env!("CARGO_BIN_EXE_fathom"))
            .current_dir(&self.folder)
            .args(["log", "keep", "a", "--config", "f.toml", "--control", "control.sock"])
            .env("STATE_DIRECTORY", self.folder.join("state"))
            .env("FATHOM_MARKS", self.folder.join("state/marks"))
            .output()
            .unwrap();
        if output.status.success() {
            return Ok(());
        }
        let log = std::fs::read_to_string(self.folder.join("log.txt")).unwrap_or_default();
        let lines: Vec<_> = log.lines().collect();
        let last = lines[lines.len().saturating_sub(6)..].join("\n");
        Err(format!("log keep: {}\n{last}", String::from_utf8_lossy(&output.stderr)))
    }

    /// Whether the daemon does not have the disk.
    fn is_absent(&self) -> bool {
        let list = self.client().disks();
        list.is_ok_and(|list| list.disks.is_empty() && list.unserved.is_empty())
    }

    /// Removes the disk while it is used, and adds it again.
    pub fn replace(&self, layers: Layers) -> Result<(), String> {
        let definition = self.setup.definition(&self.folder, layers);
        let text = |error: ClientError| error.to_string();
        self.client().remove_disk("a", true).map_err(text)?;
        self.client().add_disk(&definition).map_err(text)?;
        if self.layers() == layers { Ok(()) } else { Err(format!("it has {:?}", self.layers())) }
    }

    /// Gives the disk another size. Returns an error if it is refused.
    pub fn resize(&self, size: u64) -> Result<(), String> {
        self.client().resize_disk("a", size, true).map(drop).map_err(|error| error.to_string())
    }

    /// Whether the daemon has a reason not to serve the disk.
    fn is_refused(&self) -> bool {
        self.client().disks().is_ok_and(|list| list.unserved.iter().any(|disk| disk.attempts > 0))
    }

    /// The layers that the disk has.
    pub fn layers(&self) -> Layers {
        Layers::of(&self.client().disk("a").unwrap())
    }

    /// The socket of its NBD server.
    pub fn socket(&self) -> PathBuf {
        self.folder.join("nbd.sock")
    }

    pub fn client(&self) -> Client {
        Client::new(self.folder.join("control.sock")).with_limit(TIME_MAX)
    }

    /// Has the daemon read its configuration again, in which the disk has no layers.
    pub fn reload(&self) -> Result<(), String> {
        let report = self.client().reload().map_err(|error| error.to_string())?;
        if report.refused.is_empty() { Ok(()) } else { Err(report.refused.join("; ")) }
    }

    /// Gives the disk a layer, or other options of it; see [`Setup::options`].
    pub fn set_layer(&self, kind: &str, cache: (&str, usize)) -> Result<(), String> {
        let layer = LayerDefinition::new(kind, self.setup.options(kind, &self.folder, cache));
        // A cache with another store is refused without it.
        let replace = kind == "cache";
        self.change(&DiskChange { set_layer: Some(layer), replace, ..DiskChange::default() })
    }

    pub fn remove_layer(&self, kind: &str) -> Result<(), String> {
        self.change(&DiskChange { remove_layer: Some(kind.into()), ..DiskChange::default() })
    }

    fn change(&self, change: &DiskChange) -> Result<(), String> {
        self.client().change_disk("a", change).map(drop).map_err(|error| error.to_string())
    }

    pub fn offload(&self, action: OffloadAction) -> Result<(), String> {
        let request = OffloadRequest { action, dry_run: false };
        self.client().change_offload("a", request).map(drop).map_err(|error| error.to_string())
    }

    /// Whether acknowledged writes may be lost, as the daemon says.
    pub fn has_lost_writes(&self) -> bool {
        let problems = self.client().disk("a").unwrap().problems;
        problems.iter().any(|problem| problem.kind == ProblemKind::WritesLost)
    }

    /// Has the disk accept writes again after a loss.
    ///
    /// # Errors
    /// The reason, and whether the daemon has to be restarted first.
    pub fn recover(&self) -> Result<(), (String, bool)> {
        match self.client().recover_disk("a") {
            Ok(_) => Ok(()),
            Err(ClientError::Refused(body)) => {
                Err((body.message.clone(), body.remedy.contains("restart the daemon")))
            }
            Err(error) => Err((error.to_string(), false)),
        }
    }

    /// Ends the daemon: cleanly, or by SIGKILL.
    pub fn end(self, is_clean: bool) {
        let folder = self.folder.clone();
        let status = self.signal(if is_clean { libc::SIGTERM } else { libc::SIGKILL });
        if is_clean {
            let log = std::fs::read_to_string(folder.join("log.txt")).unwrap_or_default();
            assert_eq!(status.code(), Some(0), "{log}");
        }
    }

    /// Ends the daemon by a signal.
    pub fn signal(mut self, signal: i32) -> ExitStatus {
        kill(&self.child, signal);
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(begun.elapsed() < TIME_MAX, "the daemon does not end");
            std::thread::sleep(PAUSE);
        }
    }
}

/// Kills the holders of keepsakes of the daemons in `folder`, which would not outlive a power loss.
pub fn kill_keepers(folder: &Path) {
    let socket = folder.join("control.sock.keep");
    let find = || {
        let entries = std::fs::read_dir("/proc").unwrap().flatten();
        let mut found = entries.filter(|entry| {
            let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let line = String::from_utf8_lossy(&line).into_owned();
            line.starts_with("fathom\0keep\0") && line.contains(&*socket.to_string_lossy())
        });
        found.find_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok())
    };
    while let Some(id) = find() {
        let pid = rustix::process::Pid::from_raw(id).unwrap();
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        std::thread::sleep(PAUSE);
    }
    let _ = std::fs::remove_file(socket);
}

impl Drop for Life {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
