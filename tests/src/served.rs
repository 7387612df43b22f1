//! A disk to be served by the daemon under test.

use std::fmt::Write;
use std::fs::File;
use std::path::Path;
use std::process::Command;

use crate::{Assets, Daemon, Error, Result};

/// A disk for [`Daemon::serve`](crate::Daemon::serve): the image `NAME.img` in the daemon's folder,
/// offered with two queues on `NAME.sock`.
#[derive(Debug, Clone)]
pub struct Served {
    name: String,
    /// The size of the image to make, in MiB; `None` for a copy of the root image.
    mib: Option<u64>,
    /// Whether it is a volume of the pool `pool` in the daemon's folder instead.
    is_volume: bool,
    lines: String,
}

impl Served {
    /// A disk with a sparse image of `mib` MiB.
    pub fn sparse(name: &str, mib: u64) -> Self {
        Self { name: name.to_owned(), mib: Some(mib), is_volume: false, lines: String::new() }
    }

    /// A disk with a copy of the guest's root image.
    pub fn root(name: &str) -> Self {
        Self { mib: None, ..Self::sparse(name, 0) }
    }

    /// A disk with a new volume of `mib` MiB, in a pool that all such disks share.
    pub fn volume(name: &str, mib: u64) -> Self {
        Self { is_volume: true, ..Self::sparse(name, mib) }
    }

    /// Makes the pool and the volume, if they do not exist.
    fn make_volume(&self, directory: &Path) -> Result<()> {
        let run = |words: &[&str]| -> Result<()> {
            let done =
                Command::new(Daemon::binary()?).current_dir(directory).args(words).output()?;
            if done.status.success() {
                Ok(())
            } else {
                Err(Error::new(format!("{words:?}: {done:?}")))
            }
        };
        if !directory.join("pool").exists() {
            run(&["store", "create", "pool", "2G"])?;
        }
        let made = directory.join(format!("{}.volume", self.name));
        if !made.exists() {
            let size = format!("{}M", self.mib.unwrap_or_default());
            run(&["store", "new", "pool", &self.name, &size])?;
            File::create(made)?;
        }
        Ok(())
    }

    /// Adds a line to the disk's table, such as `direct = true`.
    #[must_use]
    pub fn with(mut self, line: &str) -> Self {
        self.lines.push_str(line);
        self.lines.push('\n');
        self
    }

    /// Makes the image, if it does not exist, and returns the disk's part of the configuration.
    pub(crate) fn table(&self, directory: &Path) -> Result<String> {
        let name = &self.name;
        let image = directory.join(format!("{name}.img"));
        match self.mib {
            _ if self.is_volume => self.make_volume(directory)?,
            _ if image.exists() => {}
            Some(mib) => File::create(&image)?.set_len(mib << 20)?,
            None => Assets::get()?.copy_root(&image)?,
        }
        let store = if self.is_volume {
            format!("store = \"pool\"\nvolume = \"{name}\"")
        } else {
            format!("image = \"{name}.img\"")
        };
        let mut text = format!("[[disk]]\nname = \"{name}\"\n{store}\n");
        text.push_str(&self.lines);
        let _ = writeln!(text, "vhost_user = {{ socket = \"{name}.sock\", queues = 2 }}");
        Ok(text)
    }
}
