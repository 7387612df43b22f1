//! What the header of an image says about other files, and about what this program does not serve.
//!
//! The header is hostile: its writer may be a guest, or somebody who gave an image away. All
//! lengths are bounded, and what is not understood is refused, so that QEMU opens no file that this
//! module has not seen.

use std::fmt;
use std::io;

use super::ChainFormat;

/// The longest name of a backing file, in bytes: that of the format.
const NAME_LENGTH_MAX: usize = 1023;
/// The longest area of header extensions that is read, in bytes.
const EXTENSIONS_LENGTH_MAX: u64 = 64 << 10;
/// The most header extensions.
const EXTENSIONS_MAX: usize = 64;
/// The longest descriptor of a VMDK image, in bytes.
const DESCRIPTOR_LENGTH_MAX: u64 = 20 * 512;

/// The bits of qcow2's incompatible features.
mod incompatible {
    pub(super) const DIRTY: u64 = 1;
    pub(super) const CORRUPT: u64 = 1 << 1;
    pub(super) const EXTERNAL_DATA: u64 = 1 << 2;
    pub(super) const COMPRESSION: u64 = 1 << 3;
    pub(super) const EXTENDED_L2: u64 = 1 << 4;
    pub(super) const KNOWN: u64 = DIRTY | CORRUPT | EXTERNAL_DATA | COMPRESSION | EXTENDED_L2;
}

/// The types of qcow2's header extensions.
mod extension {
    pub(super) const END: u32 = 0;
    pub(super) const BACKING_FORMAT: u32 = 0xe279_2aca;
    pub(super) const EXTERNAL_DATA: u32 = 0x4441_5441;
    pub(super) const ENCRYPTION: u32 = 0x0537_be77;
}

/// The file beneath an image, as its header names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackingName {
    /// The name: a path, or what QEMU takes for the address of something else.
    pub name: String,
    /// The format, if the header has it.
    pub format: Option<String>,
}

/// Why a header is refused.
#[derive(Debug)]
#[non_exhaustive]
pub enum HeaderError {
    /// The image is not of this format.
    Foreign(ChainFormat),
    /// The header contradicts itself, or is cut off.
    Malformed(&'static str),
    /// The image has something that is not served.
    Unsupported(&'static str),
    /// The image is encrypted.
    Encrypted,
    /// The image is marked as corrupt.
    Corrupt,
    /// It cannot be read.
    Io(io::Error),
}

impl fmt::Display for HeaderError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Foreign(format) => write!(formatter, "it is no {format} image"),
            Self::Malformed(what) => write!(formatter, "its header is invalid: {what}"),
            Self::Unsupported(what) => write!(formatter, "it has {what}, which is not served"),
            Self::Encrypted => formatter.write_str("it is encrypted"),
            Self::Corrupt => formatter.write_str("it is marked as corrupt"),
            Self::Io(error) => error.fmt(formatter),
        }
    }
}

impl HeaderError {
    /// What the user can do.
    pub(super) fn remedy(&self, shown: &str) -> String {
        match self {
            Self::Foreign(_) => "correct `format`: `qemu-img info` shows the format".into(),
            Self::Malformed(_) => format!("`qemu-img check {shown}` shows the damage"),
            Self::Unsupported(_) | Self::Encrypted => {
                format!("convert it: `qemu-img convert -O qcow2 {shown} NEW.qcow2`")
            }
            Self::Corrupt => format!("repair it: `qemu-img check -r all {shown}`"),
            Self::Io(_) => "give the daemon's user access to it".into(),
        }
    }
}

impl From<io::Error> for HeaderError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// The bytes of an image.
pub(super) trait Source {
    /// Fills `bytes` from `offset` on, up to the end. Returns the number of bytes read.
    fn read(&self, offset: u64, bytes: &mut [u8]) -> io::Result<usize>;
}

/// The bytes from `offset` on, all of which have to be there.
fn exactly(source: &dyn Source, offset: u64, length: usize) -> Result<Vec<u8>, HeaderError> {
    let mut bytes = vec![0; length];
    if source.read(offset, &mut bytes)? < length {
        return Err(HeaderError::Malformed("it is cut off"));
    }
    Ok(bytes)
}

fn u32_be(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).map_or(0, |it| u32::from_be_bytes(it.try_into().unwrap_or_default()))
}

fn u64_be(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).map_or(0, |it| u64::from_be_bytes(it.try_into().unwrap_or_default()))
}

fn u32_le(bytes: &[u8], at: usize) -> u32 {
    u32_be(bytes, at).swap_bytes()
}

fn u64_le(bytes: &[u8], at: usize) -> u64 {
    u64_be(bytes, at).swap_bytes()
}

/// Reads the header of an image of a format. Returns the file beneath it.
pub(super) fn read_header(
    format: ChainFormat,
    source: &dyn Source,
) -> Result<Option<BackingName>, HeaderError> {
    match format {
        ChainFormat::Raw => Ok(None),
        ChainFormat::Qcow2 => qcow2(source),
        ChainFormat::Vmdk => vmdk(source).map(|()| None),
        ChainFormat::Vhdx => vhdx(source).map(|()| None),
        ChainFormat::Vdi => vdi(source).map(|()| None),
    }
}

fn qcow2(source: &dyn Source) -> Result<Option<BackingName>, HeaderError> {
    use HeaderError::{Malformed, Unsupported};
    let mut header = [0; 112];
    let length = source.read(0, &mut header)?;
    if !header.starts_with(b"QFI\xfb") || !matches!(u32_be(&header, 4), 2 | 3) {
        return Err(HeaderError::Foreign(ChainFormat::Qcow2));
    }
    let is_old = u32_be(&header, 4) == 2;
    if length < if is_old { 72 } else { 104 } {
        return Err(Malformed("it is cut off"));
    }
    let cluster_bits = u32_be(&header, 20);
    if !(9..=21).contains(&cluster_bits) {
        return Err(Malformed("the size of its clusters"));
    }
    let cluster = 1_u64 << cluster_bits;
    if i64::try_from(u64_be(&header, 24)).is_err() {
        return Err(Malformed("its size"));
    }
    if u32_be(&header, 32) != 0 {
        return Err(HeaderError::Encrypted);
    }
    let (features, header_length) =
        if is_old { (0, 72) } else { (u64_be(&header, 72), u64::from(u32_be(&header, 100))) };
    if !is_old && !(104..=cluster).contains(&header_length) {
        return Err(Malformed("its length"));
    }
    if features & incompatible::CORRUPT != 0 {
        return Err(HeaderError::Corrupt);
    }
    if features & incompatible::EXTERNAL_DATA != 0 {
        return Err(Unsupported("its data in another file"));
    }
    if features & !incompatible::KNOWN != 0 {
        return Err(Unsupported("features of a later version"));
    }
    let (name_at, name_length) = (u64_be(&header, 8), u32_be(&header, 16) as usize);
    // Extensions end before the name, if there is one.
    let end = if name_at == 0 { cluster } else { name_at };
    let format = qcow2_extensions(source, header_length, end.min(cluster))?;
    if name_at == 0 || name_length == 0 {
        return Ok(None);
    }
    let is_within =
        name_at >= header_length && name_at.saturating_add(name_length as u64) <= cluster;
    if name_length > NAME_LENGTH_MAX || !is_within {
        return Err(Malformed("the place of the backing file's name"));
    }
    let name = String::from_utf8(exactly(source, name_at, name_length)?)
        .ok()
        .filter(|name| !name.contains('\0'));
    let name = name.ok_or(Malformed("the backing file's name"))?;
    Ok(Some(BackingName { name, format }))
}

/// Reads the header extensions between two places. Returns the format of the backing file.
fn qcow2_extensions(
    source: &dyn Source,
    from: u64,
    end: u64,
) -> Result<Option<String>, HeaderError> {
    use HeaderError::{Malformed, Unsupported};
    let end = end.min(from.saturating_add(EXTENSIONS_LENGTH_MAX));
    let mut bytes = vec![0; end.saturating_sub(from) as usize];
    let length = source.read(from, &mut bytes)?;
    bytes.truncate(length);
    let (mut at, mut format) = (0, None);
    for _ in 0..EXTENSIONS_MAX {
        if at + 8 > bytes.len() {
            return Ok(format);
        }
        let (kind, length) = (u32_be(&bytes, at), u32_be(&bytes, at + 4) as usize);
        if kind == extension::END {
            return Ok(format);
        }
        let data = bytes.get(at + 8..).and_then(|rest| rest.get(..length));
        let data = data.ok_or(Malformed("an extension of it is too long"))?;
        match kind {
            extension::BACKING_FORMAT => {
                let text = String::from_utf8(data.to_vec());
                format = Some(text.map_err(|_| Malformed("the backing file's format"))?);
            }
            extension::EXTERNAL_DATA => return Err(Unsupported("its data in another file")),
            extension::ENCRYPTION => return Err(HeaderError::Encrypted),
            // Names of features, bitmaps, and what later versions may add compatibly.
            _ => {}
        }
        at += 8 + length.next_multiple_of(8);
    }
    Err(Malformed("it has too many extensions"))
}

fn vmdk(source: &dyn Source) -> Result<(), HeaderError> {
    use HeaderError::{Malformed, Unsupported};
    let mut header = [0; 80];
    let length = source.read(0, &mut header)?;
    if header.starts_with(b"COWD") {
        return Err(Unsupported("the format of an ESX server"));
    }
    if !header.starts_with(b"KDMV") {
        // A text names the files with the data.
        let is_text = header.starts_with(b"# Disk DescriptorFile");
        return Err(if is_text {
            Unsupported("its data in other files")
        } else {
            HeaderError::Foreign(ChainFormat::Vmdk)
        });
    }
    if length < header.len() {
        return Err(Malformed("it is cut off"));
    }
    // QEMU takes such a header for that of a text, which names files.
    if u64_le(&header, 12) == 0 {
        return Err(Unsupported("its data in other files"));
    }
    let (at, sectors) = (u64_le(&header, 28), u64_le(&header, 36));
    if at == 0 {
        return Err(Unsupported("no description of its own"));
    }
    let place = at.checked_mul(512).filter(|place| i64::try_from(*place).is_ok());
    let place = place.ok_or(Malformed("the place of its description"))?;
    let length = sectors.saturating_mul(512).min(DESCRIPTOR_LENGTH_MAX) as usize;
    let mut text = vec![0; length];
    let length = source.read(place, &mut text)?;
    text.truncate(length);
    let text = String::from_utf8_lossy(&text);
    let text = text.split('\0').next().unwrap_or_default();
    let (mut parent, mut kind) = (None, None);
    for line in text.lines().map(str::trim) {
        let Some((key, value)) = line.split_once('=') else { continue };
        let value = value.trim().trim_matches('"');
        match key.trim().to_ascii_lowercase().as_str() {
            "parentfilenamehint" => return Err(Unsupported("a parent")),
            "parentcid" => parent = Some(value.to_ascii_lowercase()),
            "createtype" => kind = Some(value.to_owned()),
            _ => {}
        }
    }
    if parent.is_some_and(|parent| parent != "ffffffff") {
        return Err(Unsupported("a parent"));
    }
    match kind.as_deref() {
        Some("monolithicSparse" | "streamOptimized") => Ok(()),
        _ => Err(Unsupported("its data in other files")),
    }
}

/// QEMU refuses those that need another file.
fn vhdx(source: &dyn Source) -> Result<(), HeaderError> {
    let mut header = [0; 8];
    source.read(0, &mut header)?;
    if &header == b"vhdxfile" { Ok(()) } else { Err(HeaderError::Foreign(ChainFormat::Vhdx)) }
}

fn vdi(source: &dyn Source) -> Result<(), HeaderError> {
    let mut header = [0; 512];
    let length = source.read(0, &mut header)?;
    if u32_le(&header, 0x40) != 0xbeda_107f {
        return Err(HeaderError::Foreign(ChainFormat::Vdi));
    }
    if length < header.len() {
        return Err(HeaderError::Malformed("it is cut off"));
    }
    // Growing and fixed images; the others are differences.
    if !matches!(u32_le(&header, 0x4c), 1 | 2) || header[0x1a8..0x1c8].iter().any(|it| *it != 0) {
        return Err(HeaderError::Unsupported("a parent"));
    }
    Ok(())
}
