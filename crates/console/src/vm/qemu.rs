//! Finds QEMU, and determines its version and the options that depend on it.
use std::{
    io,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use crate::failure::{CommandResult, Failure, reason};

/// A QEMU's version: major and minor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct QemuVersion(pub u32, pub u32);

/// The oldest QEMU version that works with Fathom's vhost-user-blk.
pub const VERSION_MIN: QemuVersion = QemuVersion(7, 2);

/// A system emulator.
#[derive(Clone, Debug)]
pub struct Qemu {
    /// The program.
    pub path: PathBuf,
    /// Its version.
    pub version: QemuVersion,
    /// The version as QEMU prints it.
    pub version_text: String,
}

impl Qemu {
    /// Finds the emulator for the host's architecture, or the given one.
    pub fn find(path: Option<&Path>) -> CommandResult<Self> {
        let path = path.map_or_else(
            || PathBuf::from(format!("qemu-system-{}", std::env::consts::ARCH)),
            Path::to_owned,
        );
        let output = Command::new(&path).arg("--version").stdin(Stdio::null()).output();
        let output = output.map_err(|error| {
            if error.kind() == io::ErrorKind::NotFound {
                Failure::new(format!("{} is not installed", path.display())).advise(
                    "install it: apt install qemu-system-x86 (Debian, Ubuntu), dnf install \
                     qemu-kvm (Fedora); or name another with --qemu",
                )
            } else {
                Failure::new(format!("{} does not start: {}", path.display(), reason(&error)))
            }
        })?;
        let text = String::from_utf8_lossy(&output.stdout);
        let line = text.lines().next().unwrap_or_default().to_owned();
        let version = parse_version(&line).ok_or_else(|| {
            Failure::new(format!("{} does not report a version of QEMU: {line:?}", path.display()))
        })?;
        Ok(Self { path, version, version_text: line })
    }

    /// Whether the emulator is for x86.
    pub fn is_x86(&self) -> bool {
        let name = self.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.contains("x86_64") || name.contains("i386") {
            return true;
        }
        // `qemu-kvm` and other names are emulators of the host's architecture.
        !name.starts_with("qemu-system-") && cfg!(target_arch = "x86_64")
    }

    /// The character device's option for a reconnection after one second.
    pub fn reconnect(&self) -> &'static str {
        reconnect(self.version)
    }
}

/// The option is in seconds up to QEMU 9.1, in milliseconds since 9.2.
fn reconnect(version: QemuVersion) -> &'static str {
    if version >= QemuVersion(9, 2) { "reconnect-ms=1000" } else { "reconnect=1" }
}

/// The version in a line like `QEMU emulator version 10.0.2 (Debian …)`.
pub fn parse_version(line: &str) -> Option<QemuVersion> {
    let number = line.split_once("version ")?.1;
    let mut parts = number.split(|c: char| !c.is_ascii_digit());
    Some(QemuVersion(parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_version_has_its_option() {
        let of = |line| parse_version(line).map(reconnect);
        assert_eq!(of("QEMU emulator version 7.2.9 (Debian 1:7.2+dfsg-7)"), Some("reconnect=1"));
        assert_eq!(of("QEMU emulator version 9.1.50"), Some("reconnect=1"));
        assert_eq!(of("QEMU emulator version 9.2.0"), Some("reconnect-ms=1000"));
        assert_eq!(of("QEMU emulator version 10.0.2 (Debian)"), Some("reconnect-ms=1000"));
        assert_eq!(of("something else"), None);
        assert_eq!(of("version x"), None);
    }
}
