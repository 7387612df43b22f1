//! The guest's kernel and images.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use crate::{Error, Result};

/// The project's folder.
pub fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the package is inside the project")
}

/// The paths of the guest's parts.
#[derive(Debug)]
pub struct Assets {
    /// The kernel.
    pub kernel: PathBuf,
    /// The initial file system; without `root=` it is a complete system.
    pub initrd: PathBuf,
    /// The root image. It must not be written to; tests use a [copy](Self::copy_root).
    pub root: PathBuf,
    /// The folder of these files.
    pub directory: PathBuf,
}

/// A kernel, and an initial file system that only mounts the root disk.
#[derive(Debug, Clone)]
pub struct Kernel {
    /// The kernel.
    pub image: PathBuf,
    /// The initial file system.
    pub initrd: PathBuf,
    /// The version.
    pub release: String,
}

impl Assets {
    /// The guest of `scripts/guest`, which is made if it does not exist.
    ///
    /// # Errors
    /// When it cannot be made; the script's messages are in the output of the test.
    pub fn get() -> Result<&'static Self> {
        static ASSETS: OnceLock<std::result::Result<Assets, String>> = OnceLock::new();
        let assets = ASSETS.get_or_init(|| Self::make().map_err(|error| error.to_string()));
        assets.as_ref().map_err(Error::new)
    }

    fn make() -> Result<Self> {
        let script = repository().join("scripts/guest");
        if !Command::new(&script).status()?.success() {
            return Err(Error::new("scripts/guest failed"));
        }
        let path = Command::new(&script).arg("--path").output()?;
        let directory = PathBuf::from(String::from_utf8_lossy(&path.stdout).trim_end());
        Ok(Self {
            kernel: directory.join("vmlinuz"),
            initrd: directory.join("initrd.img"),
            root: directory.join("root.ext4"),
            directory,
        })
    }

    /// A kernel of `scripts/guest-kernel` by its name, for guests with a root disk. `None`, with
    /// the reason on standard error, if it is not available.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn kernel(&self, name: &str) -> Result<Option<Kernel>> {
        if !Command::new(repository().join("scripts/guest")).arg(name).status()?.success() {
            return Err(Error::new(format!("scripts/guest {name} failed")));
        }
        let directory = self.directory.join(name);
        if let Ok(why) = std::fs::read_to_string(directory.join("absent")) {
            eprintln!("Skipped: there is no kernel {name}: {}", why.trim_end());
            return Ok(None);
        }
        let release = std::fs::read_to_string(directory.join("release"))?.trim_end().to_owned();
        let (image, initrd) = (directory.join("vmlinuz"), directory.join("boot.img"));
        Ok(Some(Kernel { image, initrd, release }))
    }

    /// A disk image with further programs and modules for guests: see `scripts/guest-tools`.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn tools(&self) -> Result<PathBuf> {
        if !Command::new(repository().join("scripts/guest-tools")).status()?.success() {
            return Err(Error::new("scripts/guest-tools failed"));
        }
        Ok(self.directory.join("tools/tools.ext4"))
    }

    /// Makes a sparse copy of the root image.
    ///
    /// # Errors
    /// When the copy fails, for example for lack of space.
    pub fn copy_root(&self, to: &Path) -> Result<()> {
        let status = Command::new("cp")
            .args(["--sparse=always", "--reflink=auto"])
            .arg(&self.root)
            .arg(to)
            .status()?;
        if status.success() { Ok(()) } else { Err(Error::new("cannot copy the root image")) }
    }
}
