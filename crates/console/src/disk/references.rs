//! Other files that an image names: backing files, data files, extents.
//!
//! The creator of an image chose these names, and the files become a part of the imported disk.
//! `qemu-img info` opens some of them, so this module looks for them first.
use std::{fs::File, path::Path};

use fathom_image::{FOREIGN_HEAD_LENGTH, ForeignFormat};

use super::image::read_up_to;

/// The longest file name shown, in bytes.
const NAME_MAX: usize = 1024;
/// The part of a VMDK image's descriptor that QEMU reads for the extents, in bytes.
const DESCRIPTOR_MAX: usize = 1 << 20;
/// The part of the descriptor that QEMU reads for the parent, in bytes.
const PARENT_MAX: usize = 20 * 512;
/// A sector, in bytes.
const SECTOR: u64 = 512;

/// The first file that the image `path` names, if `path` is a local file of such a format. `format`
/// is the format given by the caller.
pub(super) fn of(path: &Path, format: Option<&str>) -> Option<String> {
    // `qemu-img` opens anything but a regular file, and reports the names.
    std::fs::metadata(path).ok().filter(std::fs::Metadata::is_file)?;
    let file = File::open(path).ok()?;
    let head = read_up_to(&file, 0, FOREIGN_HEAD_LENGTH).ok()?;
    match (format, ForeignFormat::recognise(&head, &[])) {
        (None | Some("qcow2"), Some(ForeignFormat::Qcow2)) => qcow2(&file, &head),
        (None | Some("qcow"), Some(ForeignFormat::Qcow)) => backing(&file, &head, 8),
        (None | Some("qed"), Some(ForeignFormat::Qed)) => qed(&file, &head),
        (None | Some("vmdk"), Some(ForeignFormat::Vmdk)) => vmdk(&file, &head),
        (Some("vmdk"), _) | (None, Some(ForeignFormat::VmdkDescriptor)) => {
            descriptor(&read_up_to(&file, 0, DESCRIPTOR_MAX).ok()?, true)
        }
        _ => None,
    }
}

fn bytes<const N: usize>(head: &[u8], offset: usize) -> Option<[u8; N]> {
    head.get(offset..offset + N)?.try_into().ok()
}

fn name(file: &File, offset: u64, length: usize) -> String {
    let name = read_up_to(file, offset, length.min(NAME_MAX)).unwrap_or_default();
    String::from_utf8_lossy(&name).into_owned()
}

/// The backing file's name. Its position and length are a big-endian u64 and u32 at `offset`.
fn backing(file: &File, head: &[u8], offset: usize) -> Option<String> {
    let place = u64::from_be_bytes(bytes(head, offset)?);
    let length = u32::from_be_bytes(bytes(head, offset + 8)?);
    (place != 0).then(|| name(file, place, length as usize))
}

fn qcow2(file: &File, head: &[u8]) -> Option<String> {
    const EXTERNAL_DATA_FILE: u64 = 1 << 2;
    let version = u32::from_be_bytes(bytes(head, 4)?);
    if version >= 3 && u64::from_be_bytes(bytes(head, 72)?) & EXTERNAL_DATA_FILE != 0 {
        return Some("its data file".to_owned());
    }
    backing(file, head, 8)
}

fn qed(file: &File, head: &[u8]) -> Option<String> {
    const BACKING_FILE: u64 = 1;
    let features = u64::from_le_bytes(bytes(head, 16)?);
    let place = u32::from_le_bytes(bytes(head, 56)?);
    let length = u32::from_le_bytes(bytes(head, 60)?);
    (features & BACKING_FILE != 0).then(|| name(file, place.into(), length as usize))
}

fn vmdk(file: &File, head: &[u8]) -> Option<String> {
    if !head.starts_with(b"KDMV") {
        // An old extent; QEMU reads no descriptor from it.
        return None;
    }
    let capacity = u64::from_le_bytes(bytes(head, 12)?);
    let place = u64::from_le_bytes(bytes(head, 28)?);
    if place == 0 {
        return None;
    }
    // An image without a capacity of its own consists of the extents that its descriptor names.
    let extents = capacity == 0;
    let length = if extents { DESCRIPTOR_MAX } else { PARENT_MAX };
    let text = read_up_to(file, place.saturating_mul(SECTOR), length).ok()?;
    descriptor(&text, extents)
}

/// The first file that the text of a VMDK descriptor names: the parent, or an extent in another
/// file.
fn descriptor(text: &[u8], extents: bool) -> Option<String> {
    let text = String::from_utf8_lossy(text);
    if let Some((_, parent)) = text.split_once("parentFileNameHint") {
        return Some(quoted(parent));
    }
    let mut lines = text.split(['\n', '\r', '\0']).filter(|_| extents);
    let extent = lines.find(|line| {
        let access = line.split_whitespace().next();
        matches!(access, Some("RW" | "RDONLY" | "NOACCESS")) && line.contains('"')
    });
    extent.map(quoted)
}

/// The first quoted text.
fn quoted(line: &str) -> String {
    let name = line.split('"').nth(1).unwrap_or_default();
    name.chars().take(NAME_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reference(content: &[u8], format: Option<&str>) -> Option<String> {
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        std::fs::write(file.path(), content).expect("it is written");
        of(file.path(), format)
    }

    #[test]
    fn names_are_found_in_each_format() {
        let mut qcow2 = vec![0; 4096];
        qcow2[..8].copy_from_slice(b"QFI\xfb\0\0\0\x03");
        assert_eq!(reference(&qcow2, None), None);
        qcow2[72..80].copy_from_slice(&4u64.to_be_bytes());
        assert_eq!(reference(&qcow2, None).as_deref(), Some("its data file"));
        qcow2[72..80].fill(0);
        qcow2[8..16].copy_from_slice(&1024u64.to_be_bytes());
        qcow2[16..20].copy_from_slice(&11u32.to_be_bytes());
        qcow2[1024..1035].copy_from_slice(b"/etc/shadow");
        assert_eq!(reference(&qcow2, None).as_deref(), Some("/etc/shadow"));
        assert_eq!(reference(&qcow2, Some("qcow2")).as_deref(), Some("/etc/shadow"));
        assert_eq!(reference(&qcow2, Some("raw")), None);

        let text = b"# Disk DescriptorFile\nversion=1\ncreateType=\"monolithicFlat\"\n\
                     RW 8 FLAT \"/etc/shadow\" 0\n";
        assert_eq!(reference(text, None).as_deref(), Some("/etc/shadow"));
        let unmarked = b"version=1\ncreateType=\"monolithicFlat\"\nRW 8 FLAT \"/etc/shadow\" 0\n";
        assert_eq!(reference(unmarked, Some("vmdk")).as_deref(), Some("/etc/shadow"));
        assert_eq!(reference(unmarked, None).as_deref(), Some("/etc/shadow"));
        assert_eq!(reference(b"RW 8 FLAT \"/etc/shadow\" 0\n", None), None);

        let mut sparse = vec![0; 4096];
        sparse[..4].copy_from_slice(b"KDMV");
        sparse[12..20].copy_from_slice(&100u64.to_le_bytes());
        sparse[28..36].copy_from_slice(&1u64.to_le_bytes());
        let own = b"RW 100 SPARSE \"own.vmdk\"\n";
        sparse[512..512 + own.len()].copy_from_slice(own);
        assert_eq!(reference(&sparse, None), None);
        let parent = b"parentFileNameHint=\"/secret\"\n";
        sparse[600..600 + parent.len()].copy_from_slice(parent);
        assert_eq!(reference(&sparse, None).as_deref(), Some("/secret"));
        sparse[600..600 + parent.len()].fill(0);
        sparse[12..20].fill(0);
        assert_eq!(reference(&sparse, None).as_deref(), Some("own.vmdk"));

        let mut qed = vec![0; 4096];
        qed[..4].copy_from_slice(b"QED\0");
        qed[16] = 1;
        qed[56] = 100;
        qed[60] = 2;
        qed[100..102].copy_from_slice(b"up");
        assert_eq!(reference(&qed, None).as_deref(), Some("up"));
        assert_eq!(reference(&[], None), None);
    }
}
