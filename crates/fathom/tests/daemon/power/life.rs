//! The life of a daemon with one disk, "a": it is changed while it is used, ended, killed and started again.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fathom_control::{
    Client, DiskChange, DiskStatus, LayerDefinition, OffloadAction, OffloadRequest,
};
use serde_json::{Value, json};

use crate::nbd::Nbd;
use crate::process::kill;

/// How long a start, an end or a change may take.
const TIME_MAX: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_millis(5);

/// The layers of the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Layers {
    /// The mode of the cache.
    pub cache: Option<&'static str>,
    /// The kind of the layer with a log.
    pub log: Option<&'static str>,
}

impl Layers {
    /// Options of the layer `kind`.
    pub fn options(kind: &str, folder: &Path, mode: &str) -> Value {
        let path = |name: &str| folder.join(name).display().to_string();
        match kind {
            "cache" => json!({ "store": path("cache/store"), "mode": mode, "age": "300ms" }),
            "wal" => json!({ "log": path("log/wal"), "size": "1M", "age": "200ms" }),
            _ => json!({ "log": path("log/offload"), "size": "1M", "age": "200ms" }),
        }
    }

    /// The layers in the list of a status.
    fn of(disk: &DiskStatus) -> Self {
        let find = |kind: &str| disk.layers.iter().find(|layer| layer.name == kind);
        let mode = find("cache").map(|cache| {
            let mode = cache.definition.options["mode"].as_str().unwrap_or_default();
            MODES.into_iter().find(|known| *known == mode).expect("a mode that was set")
        });
        // The log of a cache is a layer, too.
        let has_own = mode != Some("write-back");
        Self { cache: mode, log: LOGS.into_iter().find(|kind| has_own && find(kind).is_some()) }
    }
}

/// The modes of a cache.
pub const MODES: [&str; 3] = ["write-through", "write-around", "write-back"];
/// The layers with a log.
pub const LOGS: [&str; 2] = ["wal", "offload"];

/// The configuration of the daemon: a disk without layers.
fn configuration(folder: &Path) -> String {
    format!(
        "[daemon]\nkeepsakes = \"off\"\n[[disk]]\nname = \"a\"\nimage = \"{}\"\n[[nbd]]\naddress = \"unix:nbd.sock\"\n",
        folder.join("home/a.img").display(),
    )
}

/// A running daemon.
pub struct Life {
    child: Child,
    folder: PathBuf,
}

impl Life {
    /// Starts the daemon in `folder`, and waits until it serves the disk.
    ///
    /// # Errors
    /// If it does not serve it: the daemon's log.
    pub fn start(folder: &Path) -> Result<Self, String> {
        std::fs::write(folder.join("f.toml"), configuration(folder)).unwrap();
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
        let mut life = Self { child, folder: folder.to_owned() };
        let begun = Instant::now();
        while Nbd::try_connect(&life.socket(), "a").is_err() {
            let has_ended = life.child.try_wait().unwrap().is_some();
            if has_ended || life.is_refused() || begun.elapsed() > TIME_MAX {
                let text = std::fs::read_to_string(folder.join("log.txt")).unwrap_or_default();
                return Err(text.get(before as usize..).unwrap_or_default().to_owned());
            }
            std::thread::sleep(PAUSE);
        }
        Ok(life)
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

    /// Gives the disk a layer, or other options of it.
    pub fn set_layer(&self, kind: &str, mode: &str) -> Result<(), String> {
        let layer = LayerDefinition::new(kind, Layers::options(kind, &self.folder, mode));
        self.change(&DiskChange { set_layer: Some(layer), ..DiskChange::default() })
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

    /// Ends the daemon: cleanly, or by SIGKILL.
    pub fn end(mut self, is_clean: bool) {
        kill(&self.child, if is_clean { libc::SIGTERM } else { libc::SIGKILL });
        let begun = Instant::now();
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            assert!(begun.elapsed() < TIME_MAX, "the daemon does not end");
            std::thread::sleep(PAUSE);
        };
        if is_clean {
            let log = std::fs::read_to_string(self.folder.join("log.txt")).unwrap_or_default();
            assert_eq!(status.code(), Some(0), "{log}");
        }
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
