//! Formats of images that are not raw.
//!
//! The guest of a raw image may write any bytes to it, including the beginning of another format. A
//! recognised format is therefore a reason to ask the operator, never proof.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// The number of bytes at an image's start that [`ForeignFormat::recognise`] examines.
pub const FOREIGN_HEAD_LENGTH: usize = 4096;

/// The unit in which an image is read, in bytes: its alignment satisfies direct I/O on any disk.
const UNIT: usize = 4096;
/// The length of the footer of a VHD or a DMG image, in bytes.
const FOOTER_LENGTH: usize = 512;

/// A format that is not raw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ForeignFormat {
    /// QEMU's format, versions 2 and 3.
    Qcow2,
    /// QEMU's first format.
    Qcow,
    /// QEMU's enhanced disk.
    Qed,
    /// `VMware`'s format: a sparse extent.
    Vmdk,
    /// `VMware`'s format: a text with the names of the data files.
    VmdkDescriptor,
    /// Hyper-V's format.
    Vhdx,
    /// Virtual PC's format. A fixed image has only a footer.
    Vhd,
    /// `VirtualBox`'s format.
    Vdi,
    /// Parallels' format.
    Parallels,
    /// Apple's format.
    Dmg,
}

impl ForeignFormat {
    /// Recognises a format by an image's first bytes and its last 512.
    pub fn recognise(head: &[u8], tail: &[u8]) -> Option<Self> {
        let at =
            |offset: usize, magic: &[u8]| head.get(offset..).is_some_and(|b| b.starts_with(magic));
        let found = match head {
            _ if at(0, b"QFI\xfb\0\0\0\x01") => Self::Qcow,
            _ if at(0, b"QFI\xfb") => Self::Qcow2,
            _ if at(0, b"QED\0") => Self::Qed,
            _ if at(0, b"KDMV") || at(0, b"COWD") => Self::Vmdk,
            _ if is_descriptor(head) => Self::VmdkDescriptor,
            _ if at(0, b"vhdxfile") => Self::Vhdx,
            _ if at(0, b"conectix") => Self::Vhd,
            _ if at(0x40, b"\x7f\x10\xda\xbe") => Self::Vdi,
            _ if at(0, b"WithoutFreeSpace") || at(0, b"WithouFreSpacExt") => Self::Parallels,
            _ if tail.starts_with(b"conectix") => Self::Vhd,
            _ if tail.starts_with(b"koly\0\0\0\x04") => Self::Dmg,
            _ => return None,
        };
        Some(found)
    }

    /// Reads an image's head and footer and recognises its format. The file may be open for direct
    /// I/O. `size` is the size of the image in bytes.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn of(file: &File, size: u64) -> io::Result<Option<Self>> {
        let mut buffer = vec![0; 2 * UNIT];
        let start = buffer.as_ptr().align_offset(UNIT);
        let unit = &mut buffer[start..start + UNIT];
        let length = read_up_to(file, unit, 0)?;
        if let Some(found) = Self::recognise(&unit[..length], &[]) {
            return Ok(Some(found));
        }
        let Some(footer) = size.checked_sub(FOOTER_LENGTH as u64) else { return Ok(None) };
        let offset = footer / UNIT as u64 * UNIT as u64;
        let length = read_up_to(file, unit, offset)?;
        // A footer lies within one unit. An image whose size is not a multiple of 512 has no
        // footer.
        let tail = unit[..length].get((footer - offset) as usize..).unwrap_or_default();
        Ok(Self::recognise(&[], tail))
    }

    /// The usual name of the format.
    pub fn name(self) -> &'static str {
        match self {
            Self::Qcow2 => "qcow2",
            Self::Qcow => "qcow",
            Self::Qed => "QED",
            Self::Vmdk | Self::VmdkDescriptor => "VMDK",
            Self::Vhdx => "VHDX",
            Self::Vhd => "VHD",
            Self::Vdi => "VDI",
            Self::Parallels => "Parallels",
            Self::Dmg => "DMG",
        }
    }

    /// The name of the format on the command lines of QEMU's programs.
    pub fn qemu_name(self) -> &'static str {
        match self {
            Self::Qcow2 => "qcow2",
            Self::Qcow => "qcow",
            Self::Qed => "qed",
            Self::Vmdk | Self::VmdkDescriptor => "vmdk",
            Self::Vhdx => "vhdx",
            Self::Vhd => "vpc",
            Self::Vdi => "vdi",
            Self::Parallels => "parallels",
            Self::Dmg => "dmg",
        }
    }
}

impl fmt::Display for ForeignFormat {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// Whether a text is the descriptor of a VMDK image, by QEMU's rule: after comments and blank lines
/// there is a version.
fn is_descriptor(head: &[u8]) -> bool {
    let mut lines = head.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii);
    let first = lines.find(|line| !line.is_empty() && !line.starts_with(b"#"));
    head.starts_with(b"# Disk DescriptorFile")
        || first.is_some_and(|line| matches!(line, b"version=1" | b"version=2" | b"version=3"))
}

/// Fills the buffer from `offset` on, up to the end of the file. Returns the number of bytes read.
fn read_up_to(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match file.read_at(&mut buffer[filled..], offset + filled as u64) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // A direct read after a partial unit fails: the partial unit was the last.
            Err(_) if filled > 0 => break,
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An image of `size` bytes with `bytes` at `offset`.
    fn image(size: u64, offset: u64, bytes: &[u8]) -> Option<ForeignFormat> {
        let file = tempfile::tempfile().unwrap();
        file.set_len(size).unwrap();
        file.write_at(bytes, offset).unwrap();
        ForeignFormat::of(&file, size).unwrap()
    }

    #[test]
    fn formats_are_recognised_by_head_and_footer() {
        use ForeignFormat::{Dmg, Parallels, Qcow, Qcow2, Qed, Vdi, Vhd, Vhdx, Vmdk};
        let size = 1 << 20;
        assert_eq!(image(size, 0, b""), None);
        assert_eq!(image(size, 0, b"QFI\xfb\0\0\0\x03"), Some(Qcow2));
        assert_eq!(image(size, 0, b"QFI\xfb\0\0\0\x01"), Some(Qcow));
        assert_eq!(image(size, 0, b"QED\0"), Some(Qed));
        assert_eq!(image(size, 0, b"KDMV\x01"), Some(Vmdk));
        assert_eq!(image(size, 0, b"vhdxfile"), Some(Vhdx));
        assert_eq!(image(size, 0x40, b"\x7f\x10\xda\xbe"), Some(Vdi));
        assert_eq!(image(size, 0, b"WithoutFreeSpace"), Some(Parallels));
        let text = b"# Disk DescriptorFile\nversion=1\n";
        let length = text.len() as u64;
        assert_eq!(image(length, 0, text), Some(ForeignFormat::VmdkDescriptor));
        // A fixed VHD has its data at the start and only a footer behind it.
        assert_eq!(image(size + 512, size, b"conectix"), Some(Vhd));
        assert_eq!(image(size, size - 512, b"koly\0\0\0\x04"), Some(Dmg));
        assert_eq!(image(size, 512, b"conectix"), None);
        assert_eq!(image(100, 0, b"conectix"), Some(Vhd));
        assert_eq!(image(0, 0, b""), None);
    }
}
