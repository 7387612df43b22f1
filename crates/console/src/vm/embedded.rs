//! A daemon for a few images, which runs only as long as a virtual machine or a measurement.
use std::{
    os::unix::{fs::DirBuilderExt, process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use fathom_control::{Client, DiskDefinition, ImageFormat, VhostUserDefinition};

use super::{absolute, command::QemuDisk};
use crate::failure::{CommandResult, Failure, reason};
use crate::process::spawn_bound;

/// The time limit for the daemon's start, and for its end.
const TIMEOUT: Duration = Duration::from_secs(10);

/// An image and how to serve it.
#[derive(Clone, Debug)]
pub struct ServedImage {
    /// The image.
    pub image: PathBuf,
    /// The number of queues offered.
    pub queues: u16,
    /// The declared format, if any.
    pub format: Option<ImageFormat>,
    /// Refuse writes.
    pub read_only: bool,
    /// Bypass the page cache.
    pub direct: bool,
    /// Count and measure requests.
    pub tap: bool,
}

/// The images for which a daemon is started.
pub struct Embedded {
    directory: PathBuf,
    images: Vec<ServedImage>,
}

/// A running daemon.
pub struct Daemon {
    client: Client,
    child: Child,
    directory: PathBuf,
}

impl Embedded {
    /// Without images; `purpose` is a part of the name of the daemon's directory.
    pub fn new(purpose: &str) -> Self {
        let base = std::env::var_os("XDG_RUNTIME_DIR").filter(|path| !path.is_empty());
        let base = base.map_or_else(std::env::temp_dir, PathBuf::from);
        let directory = base.join(format!("fathom-{purpose}-{}", std::process::id()));
        Self { directory, images: Vec::new() }
    }

    /// Whether there are no images, so that no daemon is needed.
    pub fn is_empty(&self) -> bool {
        self.images.is_empty()
    }

    /// Adds an image. Its disk exists once the daemon has started.
    pub fn add(&mut self, image: ServedImage) -> CommandResult<QemuDisk> {
        let path = &image.image;
        std::fs::metadata(path).map_err(|error| {
            Failure::io("open", path, &error)
                .advise(format!("create one with `fathom disk create {} 10G`", path.display()))
        })?;
        let disk = QemuDisk { socket: self.socket(self.images.len()), queues: image.queues };
        self.images.push(image);
        Ok(disk)
    }

    fn socket(&self, index: usize) -> PathBuf {
        self.directory.join(format!("disk{index}.sock"))
    }

    fn control(&self) -> PathBuf {
        self.directory.join("control.sock")
    }

    /// The daemon's command line; `None` without images. It serves the first image; the others are
    /// added once it runs.
    fn serve(&self) -> Option<Vec<String>> {
        let first = self.images.first()?;
        let program = std::env::current_exe().unwrap_or_else(|_| "fathom".into());
        let queues = first.queues.to_string();
        let mut words = vec![display(&program)];
        words.extend(["serve", "--name", "disk0", "--image"].map(str::to_owned));
        words.extend([display(&absolute(&first.image)), "--socket".into()]);
        words.extend([display(&self.socket(0)), "--queues".into(), queues]);
        words.extend(["--control".into(), display(&self.control())]);
        words.extend(["--log".into(), "warning".into()]);
        words.extend(flags(first));
        Some(words)
    }

    /// The commands that replace [`start`](Self::start). The first one has to keep running.
    pub fn commands(&self) -> Vec<Vec<String>> {
        let mut commands: Vec<Vec<String>> = self.serve().into_iter().collect();
        for (index, image) in self.images.iter().enumerate().skip(1) {
            let mut words = vec![commands[0][0].clone()];
            words.extend(["disk".into(), "add".into(), format!("disk{index}"), "--image".into()]);
            words.extend([display(&absolute(&image.image)), "--socket".into()]);
            words.extend([display(&self.socket(index)), "--queues".into()]);
            words.extend([image.queues.to_string(), "--control".into(), display(&self.control())]);
            words.extend(flags(image));
            commands.push(words);
        }
        commands
    }

    /// Starts the daemon, if one is needed, and waits until its disks exist.
    pub fn start(&self) -> CommandResult<Option<Daemon>> {
        let Some(words) = self.serve() else { return Ok(None) };
        // The directory must be new: in another user's directory the sockets would not be safe.
        std::fs::DirBuilder::new()
            .mode(0o700)
            .create(&self.directory)
            .map_err(|error| Failure::io("create", &self.directory, &error))?;
        let mut command = Command::new(&words[0]);
        // The daemon has a process group of its own, because Ctrl-C in the terminal is for QEMU.
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

    fn add_others(&self, client: &Client) -> CommandResult {
        for (index, image) in self.images.iter().enumerate().skip(1) {
            client.add_disk_for_now(&DiskDefinition {
                name: format!("disk{index}"),
                image: Some(absolute(&image.image)),
                format: image.format,
                read_only: image.read_only,
                direct: image.direct,
                tap: image.tap,
                vhost_user: Some(VhostUserDefinition {
                    socket: self.socket(index),
                    queues: image.queues,
                    ..VhostUserDefinition::default()
                }),
                ..DiskDefinition::default()
            })?;
        }
        Ok(())
    }
}

fn display(path: &Path) -> String {
    path.display().to_string()
}

fn flags(image: &ServedImage) -> impl Iterator<Item = String> {
    let format = image.format.map(|format| format!("--format={format}"));
    let flags =
        [(image.read_only, "--read-only"), (image.direct, "--direct"), (!image.tap, "--no-tap")];
    let flags = flags.into_iter().filter(|(wanted, _)| *wanted).map(|(_, flag)| flag.to_owned());
    flags.chain(format)
}

impl Daemon {
    fn wait_until_ready(&mut self) -> CommandResult {
        let started = Instant::now();
        while !self.client.daemon().is_ok_and(|daemon| daemon.ready_us > 0) {
            if let Ok(Some(status)) = self.child.try_wait() {
                let message = format!("the images' daemon ended during its start ({status})");
                return Err(Failure::new(message).advise("its messages are above"));
            }
            if started.elapsed() > TIMEOUT {
                return Err(Failure::new("the images' daemon did not start within 10 seconds"));
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Asks the daemon to complete its requests and end, and waits for its end.
    pub fn end(mut self) {
        // A daemon that does not answer is killed below.
        let _ = self.client.shutdown();
        let asked = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) {
            if asked.elapsed() > TIMEOUT {
                let _ = self.child.kill();
                let _ = self.child.wait();
                break;
            }
            thread::sleep(Duration::from_millis(10));
        }
        // If the removal fails, the directory remains in a folder for temporary files.
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}
