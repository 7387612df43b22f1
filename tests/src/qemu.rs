//! The QEMU binaries that tests run with.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{Error, Result, repository};

/// A QEMU binary and its version.
#[derive(Debug, Clone)]
pub struct Qemu {
    binary: PathBuf,
    version: (u32, u32),
}

impl Qemu {
    /// The QEMU named by the environment variable `FATHOM_QEMU`, otherwise the QEMU on `PATH`.
    ///
    /// # Errors
    /// When there is none.
    pub fn current() -> Result<Self> {
        let binary = std::env::var_os("FATHOM_QEMU").unwrap_or_else(|| "qemu-system-x86_64".into());
        Self::at(Path::new(&binary))
    }

    /// QEMU 7.2, made available by `scripts/qemu72`; `None` on a release that does not have it.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn version_7_2() -> Result<Option<Self>> {
        if !Command::new(repository().join("scripts/qemu72")).status()?.success() {
            return Err(Error::new("scripts/qemu72 failed"));
        }
        let binary = repository().join("target/qemu72/qemu-system-x86_64");
        if binary.exists() { Self::at(&binary).map(Some) } else { Ok(None) }
    }

    /// The QEMU at a path.
    ///
    /// # Errors
    /// When it does not run.
    pub fn at(binary: &Path) -> Result<Self> {
        let output = Command::new(binary)
            .arg("--version")
            .output()
            .map_err(|error| Error::new(format!("cannot run {}: {error}", binary.display())))?;
        let text = String::from_utf8_lossy(&output.stdout);
        let version = text
            .strip_prefix("QEMU emulator version ")
            .and_then(|rest| {
                let mut numbers = rest.split(|character: char| !character.is_ascii_digit());
                Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
            })
            .ok_or_else(|| Error::new(format!("not a QEMU: {}", binary.display())))?;
        Ok(Self { binary: binary.to_owned(), version })
    }

    /// The program.
    pub fn binary(&self) -> &Path {
        &self.binary
    }

    /// Major and minor version.
    pub fn version(&self) -> (u32, u32) {
        self.version
    }

    /// The socket option that makes QEMU reconnect after a server has disconnected.
    pub fn reconnect_option(&self) -> &'static str {
        if self.version >= (9, 2) { "reconnect-ms=100" } else { "reconnect=1" }
    }
}
