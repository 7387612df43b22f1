//! Determines the accelerator that works on this host, by running a guest. The presence of a device
//! does not suffice.
//!
//! The probe is a whole machine with its firmware, which runs in real and protected mode and then
//! starts a boot sector of a few bytes. The boot sector counts down from 268 million, which takes a
//! processor a tenth of a second, and ends QEMU through its debug device with a distinctive status.
//! If `/dev/kvm` can be opened but guests stall or run very slowly, the probe does not end in time.
use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use clap::ValueEnum;
use serde::Serialize;

use super::qemu::Qemu;
use crate::failure::reason;

/// The time limit of the probe; with hardware support it takes a tenth of a second or two.
const PROBE_TIMEOUT: Duration = Duration::from_secs(4);

/// `mov ecx, 0x1000_0000; dec ecx; jnz` to the `dec`; `mov al, 0x15; out 0xf4, al; hlt; jmp` to the
/// `hlt`.
const BOOT_SECTOR: [u8; 17] = [
    0x66, 0xb9, 0x00, 0x00, 0x00, 0x10, 0x66, 0x49, 0x75, 0xfc, 0xb0, 0x15, 0xe6, 0xf4, 0xf4, 0xeb,
    0xfd,
];

/// QEMU's exit status after 0x15 is written to the debug device.
const STATUS: i32 = 0x15 << 1 | 1;

/// The accelerator that the user chose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum AcceleratorChoice {
    /// KVM where a guest runs under it, else TCG
    Auto,
    /// The processor's own virtualisation
    Kvm,
    /// Emulation
    Tcg,
}

/// The accelerator of guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Accelerator {
    /// The processor's own virtualisation.
    Kvm,
    /// Emulation.
    Tcg,
}

impl Accelerator {
    /// QEMU's accelerator and processor model.
    pub fn options(self) -> (&'static str, &'static str) {
        match self {
            Self::Kvm => ("kvm", "host"),
            Self::Tcg => ("tcg,thread=multi", "max"),
        }
    }
}

/// The result of the probe of KVM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kvm {
    /// A guest ran.
    Works,
    /// No guest ran, for this reason.
    Fails(String),
}

/// Chooses an accelerator. Returns the reason if KVM does not work.
pub fn choose(choice: AcceleratorChoice, qemu: &Qemu) -> (Accelerator, Option<String>) {
    match choice {
        AcceleratorChoice::Kvm => (Accelerator::Kvm, None),
        AcceleratorChoice::Tcg => (Accelerator::Tcg, None),
        AcceleratorChoice::Auto => match kvm(qemu) {
            Kvm::Works => (Accelerator::Kvm, None),
            Kvm::Fails(reason) => (Accelerator::Tcg, Some(reason)),
        },
    }
}

/// Whether guests run under KVM on this host. Probed once per boot of the host and emulator, then
/// cached.
pub fn kvm(qemu: &Qemu) -> Kvm {
    // Whether the device can be opened depends on the user, and is tested each time.
    if let Err(error) = fs::File::options().read(true).write(true).open("/dev/kvm") {
        return Kvm::Fails(match error.kind() {
            io::ErrorKind::NotFound => "there is no /dev/kvm".into(),
            io::ErrorKind::PermissionDenied => {
                "this user may not open /dev/kvm (is the user in the group kvm?)".into()
            }
            _ => format!("/dev/kvm: {}", reason(&error)),
        });
    }
    if !qemu.is_x86() {
        return Kvm::Fails("the probe is for x86 only; choose with --accel".into());
    }
    let note = note_path();
    let key = note_key(qemu);
    if let Some(found) = note.as_deref().and_then(|note| recall(note, &key)) {
        return found;
    }
    let found = try_kvm(qemu);
    if let Some(note) = note {
        // Without the cached result the next start probes again, which costs time only.
        let _ = remember(&note, &key, &found);
    }
    found
}

fn try_kvm(qemu: &Qemu) -> Kvm {
    let sector = match boot_sector() {
        Ok(sector) => sector,
        Err(error) => return Kvm::Fails(format!("no room for the probe: {}", reason(&error))),
    };
    let drive = format!("file={},format=raw,if=ide,snapshot=on", sector.path().display());
    let child = Command::new(&qemu.path)
        .args(["-accel", "kvm", "-cpu", "host", "-machine", "pc", "-m", "64M"])
        .args(["-nodefaults", "-no-user-config", "-display", "none", "-drive", &drive])
        .args(["-device", "isa-debug-exit,iobase=0xf4,iosize=4"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = match child {
        Ok(child) => child,
        Err(error) => return Kvm::Fails(format!("QEMU does not start: {}", reason(&error))),
    };
    let started = Instant::now();
    while started.elapsed() < PROBE_TIMEOUT {
        match child.try_wait() {
            Ok(None) => thread::sleep(Duration::from_millis(10)),
            Ok(Some(status)) if status.code() == Some(STATUS) => return Kvm::Works,
            Ok(Some(_)) => return Kvm::Fails(last_line(child)),
            Err(error) => return Kvm::Fails(reason(&error)),
        }
    }
    // The process may have ended already; in both cases it is waited for.
    let _ = child.kill();
    let _ = child.wait();
    Kvm::Fails(format!(
        "/dev/kvm can be opened, but a guest did not complete its boot sector in {} seconds",
        PROBE_TIMEOUT.as_secs()
    ))
}

fn last_line(child: std::process::Child) -> String {
    let text = child.wait_with_output().map(|output| output.stderr).unwrap_or_default();
    let text = String::from_utf8_lossy(&text).trim().to_owned();
    let line = text.lines().next_back().unwrap_or("QEMU ended without a message");
    line.trim().to_owned()
}

/// A small disk that holds the boot sector.
fn boot_sector() -> io::Result<tempfile::NamedTempFile> {
    let mut file = tempfile::NamedTempFile::new()?;
    let mut sector = [0; 512];
    sector[..BOOT_SECTOR.len()].copy_from_slice(&BOOT_SECTOR);
    sector[510..].copy_from_slice(&[0x55, 0xaa]);
    file.write_all(&sector)?;
    file.as_file().set_len(1 << 20)?;
    Ok(file)
}

fn note_path() -> Option<PathBuf> {
    let base = std::env::var_os("XDG_CACHE_HOME")
        .filter(|path| !path.is_empty())
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache")))?;
    base.is_absolute().then(|| base.join("fathom/accelerator"))
}

fn note_key(qemu: &Qemu) -> String {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    // The number is the version of the probe, because another version may have another result.
    format!("2 {} {} {}", boot.trim(), qemu.path.display(), qemu.version_text)
}

/// Reads the cached result. The file has two lines: the key and the result.
fn recall(note: &Path, key: &str) -> Option<Kvm> {
    let text = fs::read_to_string(note).ok()?;
    let (noted, found) = text.trim_end().split_once('\n')?;
    if noted != key {
        return None;
    }
    match found.split_once(' ').unwrap_or((found, "")) {
        ("works", _) => Some(Kvm::Works),
        ("fails", reason) => Some(Kvm::Fails(reason.to_owned())),
        _ => None,
    }
}

fn remember(note: &Path, key: &str, found: &Kvm) -> io::Result<()> {
    let directory = note.parent().ok_or(io::ErrorKind::InvalidInput)?;
    fs::create_dir_all(directory)?;
    let text = match found {
        Kvm::Works => "works".to_owned(),
        Kvm::Fails(reason) => format!("fails {reason}"),
    };
    // The file is replaced by renaming, because another process may read it.
    let mut file = tempfile::NamedTempFile::new_in(directory)?;
    writeln!(file, "{key}\n{text}")?;
    file.persist(note)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_is_cached_for_its_key_only() {
        let directory = tempfile::tempdir().expect("a directory");
        let note = directory.path().join("fathom/accelerator");
        assert_eq!(recall(&note, "boot 1"), None);
        for found in [Kvm::Works, Kvm::Fails("no guest ran".into())] {
            remember(&note, "boot 1", &found).expect("it is noted");
            assert_eq!(recall(&note, "boot 1"), Some(found));
            assert_eq!(recall(&note, "boot 2"), None);
        }
    }
}
