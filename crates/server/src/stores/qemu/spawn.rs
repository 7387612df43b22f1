//! How a storage daemon is started.

use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use fathom_failure::Failure;
use fathom_image::ChainLink;
use serde_json::{Value, json};

use super::pids::PidFiles;
use crate::configuration::image_identity;

/// The program.
const PROGRAM: &str = "qemu-storage-daemon";
/// Where it is looked for if the daemon has no `PATH`.
const PATH_DEFAULT: &str = "/usr/local/bin:/usr/bin:/bin";
/// The name of the export.
pub(super) const EXPORT: &str = "disk";
/// The most connections: the client's, one that measures, and those that are about to end.
const CONNECTIONS_MAX: u32 = 16;
/// The longest path of a Unix socket, in bytes: `sun_path` without its terminator.
const SOCKET_PATH_MAX: usize = 107;

/// What a storage daemon is started with, each time.
pub(super) struct Spawning {
    pub(super) program: PathBuf,
    /// The files, the image first.
    pub(super) chain: Vec<ChainLink>,
    pub(super) is_read_only: bool,
    pub(super) is_direct: bool,
    /// The path at which it listens.
    pub(super) socket: PathBuf,
    /// The files that say whether it has ended in good order.
    pub(super) files: Arc<PidFiles>,
}

/// The path of the program.
pub(super) fn program() -> Result<PathBuf, Failure> {
    let path = std::env::var_os("PATH").unwrap_or_else(|| PATH_DEFAULT.into());
    let mut places = std::env::split_paths(&path).filter(|folder| folder.is_absolute());
    places.find_map(|folder| Some(folder.join(PROGRAM)).filter(|it| it.is_file())).ok_or_else(
        || {
            let message = format!("there is no {PROGRAM}, which serves images that are not raw");
            Failure::new(message).advise(
                "install it (Debian: package qemu-utils), or convert the image with `fathom \
             disk import`",
            )
        },
    )
}

/// The path of the socket for an image, in a folder that only this user may enter.
pub(super) fn socket(records: &Path, image: &Path) -> Result<PathBuf, Failure> {
    let folder = records.join("qemu");
    match std::fs::DirBuilder::new().mode(0o700).create(&folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error.into()),
        _ => {}
    }
    let (device, number) =
        image_identity(image).ok_or_else(|| Failure::new("the image cannot be examined"))?;
    let path = std::path::absolute(folder.join(format!("{device:x}-{number:x}")))?;
    if path.as_os_str().len() > SOCKET_PATH_MAX {
        let message = format!("the path of the socket is too long: {}", path.display());
        return Err(Failure::new(message).advise("choose a shorter folder for `control`"));
    }
    Ok(path)
}

impl Spawning {
    /// Starts the program, which serves at `listener` and is commanded at `commands`.
    pub(super) fn spawn(&self, listener: OwnedFd, commands: UnixStream) -> io::Result<Child> {
        let mut words: Vec<OsString> = vec!["confine".into(), "--parent".into()];
        words.push(std::process::id().to_string().into());
        for (index, link) in self.chain.iter().enumerate() {
            let is_written = index == 0 && !self.is_read_only;
            words.push(if is_written { "--write" } else { "--read" }.into());
            words.push(link.path.clone().into());
        }
        let file = self.files.next()?;
        words.extend(["--folder".into(), self.files.folder().into()]);
        words.extend([self.program.clone().into(), "--".into()]);
        words.extend(["--pidfile".into(), file.into()]);
        words.extend(self.arguments()?.into_iter().map(OsString::from));
        Command::new("/proc/self/exe")
            .arg0("fathom")
            .args(words)
            .stdin(Stdio::from(listener))
            .stdout(Stdio::from(OwnedFd::from(commands)))
            .stderr(Stdio::piped())
            .env_clear()
            .current_dir("/")
            .spawn()
    }

    /// The arguments: a node for each file, with all that QEMU would otherwise take from headers.
    fn arguments(&self) -> io::Result<Vec<String>> {
        let mut words = Vec::new();
        for (index, link) in self.chain.iter().enumerate().rev() {
            let is_read_only = index > 0 || self.is_read_only;
            let path = link.path.to_str().ok_or_else(|| {
                io::Error::other(format!("the path {} is not UTF-8", link.path.display()))
            })?;
            let is_device = std::fs::metadata(&link.path)?.file_type().is_block_device();
            let file = json!({
                "driver": if is_device { "host_device" } else { "file" },
                "node-name": format!("file{index}"),
                "filename": path,
                "locking": "on",
                "read-only": is_read_only,
                "auto-read-only": false,
                "discard": "unmap",
                "cache": { "direct": self.is_direct },
            });
            let mut node = json!({
                "driver": link.format.name(),
                "node-name": format!("image{index}"),
                "file": format!("file{index}"),
                "read-only": is_read_only,
                "auto-read-only": false,
                "discard": "unmap",
                "cache": { "direct": self.is_direct },
            });
            // Only these formats have files beneath them. QEMU would open the one of the header.
            if matches!(link.format.name(), "qcow2" | "vmdk") {
                let below = self.chain.get(index + 1).map(|_| format!("image{}", index + 1));
                node["backing"] = below.map_or(Value::Null, Value::from);
            }
            words.extend(["--blockdev".into(), file.to_string()]);
            words.extend(["--blockdev".into(), node.to_string()]);
        }
        let export = self.export();
        let rest: [String; 8] = [
            "--nbd-server".into(),
            // The listener is its standard input, and the commands come on its standard output.
            format!("addr.type=fd,addr.str=0,max-connections={CONNECTIONS_MAX}"),
            "--export".into(),
            export.to_string(),
            "--chardev".into(),
            "socket,id=commands,fd=1".into(),
            "--monitor".into(),
            "chardev=commands".into(),
        ];
        words.extend(rest);
        Ok(words)
    }

    /// The export.
    pub(super) fn export(&self) -> Value {
        json!({
            "type": "nbd",
            "id": EXPORT,
            "node-name": "image0",
            "name": EXPORT,
            "writable": !self.is_read_only,
        })
    }
}
