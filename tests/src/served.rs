//! A disk to be served by the daemon under test.

use std::fmt::Write;
use std::fs::File;
use std::path::Path;

use crate::{Assets, Result};

/// A disk for [`Daemon::serve`](crate::Daemon::serve): the image `NAME.img` in the daemon's folder,
/// offered with two queues on `NAME.sock`.
#[derive(Debug, Clone)]
pub struct Served {
    name: String,
    /// The size of the image to make, in MiB; `None` for a copy of the root image.
    mib: Option<u64>,
    lines: String,
}

impl Served {
    /// A disk with a sparse image of `mib` MiB.
    pub fn sparse(name: &str, mib: u64) -> Self {
        Self { name: name.to_owned(), mib: Some(mib), lines: String::new() }
    }

    /// A disk with a copy of the guest's root image.
    pub fn root(name: &str) -> Self {
        Self { mib: None, ..Self::sparse(name, 0) }
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
            _ if image.exists() => {}
            Some(mib) => File::create(&image)?.set_len(mib << 20)?,
            None => Assets::get()?.copy_root(&image)?,
        }
        let mut text = format!("[[disk]]\nname = \"{name}\"\nimage = \"{name}.img\"\n");
        text.push_str(&self.lines);
        let _ = writeln!(text, "vhost_user = {{ socket = \"{name}.sock\", queues = 2 }}");
        Ok(text)
    }
}
