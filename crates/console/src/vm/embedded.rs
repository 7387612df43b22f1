//! A daemon for one virtual machine: started with it, ended with it.
use std::{
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use fathom_control::{Client, DiskDefinition, VhostUserDefinition};

use super::{absolute, command::Disk, spawn_bound};
use crate::failure::{Failure, Outcome, reason};

/// How long the daemon may take to be there, and to end.
const LIMIT: Duration = Duration::from_secs(10);

struct ServedImage {
    image: PathBuf,
    socket: PathBuf,
    queues: u16,
}

/// The images that need a daemon of their own.
pub struct Embedded {
    directory: PathBuf,
    read_only: bool,
    images: Vec<ServedImage>,
}

/// A running daemon.
pub struct Daemon {
    client: Client,
    child: Child,
    directory: PathBuf,
}

impl Embedded {
    /// No images yet.
    pub fn new(machine: &str, read_only: bool) -> Self {
        let base = std::env::var_os("XDG_RUNTIME_DIR").filter(|path| !path.is_empty());
        let base = base.map_or_else(std::env::temp_dir, PathBuf::from);
        let directory = base.join(format!("fathom-vm-{machine}-{}", std::process::id()));
        Self { directory, read_only, images: Vec::new() }
    }

    /// Whether no daemon is needed.
    pub fn is_empty(&self) -> bool {
        self.images.is_empty()
    }

    /// Adds an image; the disk is there once the daemon is.
    pub fn add(&mut self, image: &Path, queues: u16) -> Outcome<Disk> {
        std::fs::metadata(image).map_err(|error| {
            Failure::io("open", image, &error)
                .advise(format!("make one with `fathom disk create {} 10G`", image.display()))
        })?;
        let socket = self.directory.join(format!("disk{}.sock", self.images.len()));
        self.images.push(ServedImage { image: absolute(image), socket: socket.clone(), queues });
        Ok(Disk { socket, queues })
    }

    fn control(&self) -> PathBuf {
        self.directory.join("control.sock")
    }

    /// The daemon's command line, if there is to be one. It serves the first image; the others are
    /// added once it runs.
    pub fn command(&self) -> Option<Vec<String>> {
        let first = self.images.first()?;
        let program = std::env::current_exe().unwrap_or_else(|_| "fathom".into());
        let queues = first.queues.to_string();
        let mut words = vec![program.display().to_string()];
        for word in ["serve", "--image", &first.image.to_string_lossy(), "--socket"] {
            words.push(word.to_owned());
        }
        words.push(first.socket.display().to_string());
        words.extend(["--queues".to_owned(), queues, "--control".to_owned()]);
        words.push(self.control().display().to_string());
        if self.read_only {
            words.push("--read-only".to_owned());
        }
        Some(words)
    }

    /// Starts the daemon, if one is needed, and waits until its disks are there.
    pub fn start(&self) -> Outcome<Option<Daemon>> {
        let Some(words) = self.command() else { return Ok(None) };
        std::fs::create_dir_all(&self.directory)
            .map_err(|error| Failure::io("create", &self.directory, &error))?;
        let mut command = Command::new(&words[0]);
        // A process group of its own: Ctrl-C in the terminal is for QEMU.
        command.args(&words[1..]).stdin(Stdio::null()).stdout(Stdio::null()).process_group(0);
        let child = spawn_bound(&mut command).map_err(|error| {
            Failure::new(format!("the daemon does not start: {}", reason(&error)))
        })?;
        let client = Client::new(self.control());
        let mut daemon = Daemon { client, child, directory: self.directory.clone() };
        match daemon.wait_until_ready().and_then(|()| self.add_others(&daemon.client)) {
            Ok(()) => Ok(Some(daemon)),
            Err(failure) => {
                daemon.end();
                Err(failure)
            }
        }
    }

    fn add_others(&self, client: &Client) -> Outcome {
        for (index, image) in self.images.iter().enumerate().skip(1) {
            client.add_disk(&DiskDefinition {
                name: format!("disk{index}"),
                image: Some(image.image.clone()),
                read_only: self.read_only,
                vhost_user: Some(VhostUserDefinition {
                    socket: image.socket.clone(),
                    queues: image.queues,
                    ..VhostUserDefinition::default()
                }),
                ..DiskDefinition::default()
            })?;
        }
        Ok(())
    }
}

impl Daemon {
    fn wait_until_ready(&mut self) -> Outcome {
        let started = Instant::now();
        while self.client.daemon().is_err() {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Err(Failure::new(format!("the images' daemon ended at once ({status})"))
                    .advise("what it said is above"));
            }
            if started.elapsed() > LIMIT {
                return Err(Failure::new("the images' daemon is not there after 10 seconds"));
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Has the daemon complete what it has and end.
    pub fn end(mut self) {
        // A daemon that does not answer any more is killed below.
        let _ = self.client.shutdown();
        let asked = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) {
            if asked.elapsed() > LIMIT {
                let _ = self.child.kill();
                let _ = self.child.wait();
                break;
            }
            thread::sleep(Duration::from_millis(10));
        }
        // What cannot be removed lies in a directory for such things.
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}
