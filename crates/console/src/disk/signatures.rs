//! Recognises the content of a disk or partition by magic numbers.

/// The number of bytes at the start that [`recognise`] examines.
pub const LENGTH: usize = 72 << 10;

/// Magic numbers: their offset, their bytes, and the name of the content.
const MAGICS: &[(usize, &[u8], &str)] = &[
    (0, b"LUKS\xba\xbe", "LUKS encrypted volume"),
    (0, b"XFSB", "XFS"),
    (0, b"hsqs", "squashfs"),
    (3, b"NTFS    ", "NTFS"),
    (3, b"EXFAT   ", "exFAT"),
    (54, b"FAT16   ", "FAT16"),
    (54, b"FAT12   ", "FAT12"),
    (82, b"FAT32   ", "FAT32"),
    (512, b"LABELONE", "LVM physical volume"),
    (1024, b"\x10\x20\xf5\xf2", "F2FS"),
    (4086, b"SWAPSPACE2", "swap space"),
    (4096, b"\xfc\x4e\x2b\xa9", "Linux RAID member"),
    (32769, b"CD001", "ISO 9660"),
    (0x10040, b"_BHRfS_M", "Btrfs"),
];

/// The content of a volume that starts with `bytes`; `None` if unknown.
pub fn recognise(bytes: &[u8]) -> Option<&'static str> {
    let at =
        |offset: usize, magic: &[u8]| bytes.get(offset..).is_some_and(|b| b.starts_with(magic));
    if at(1024 + 56, b"\x53\xef") {
        return Some(extended(bytes));
    }
    MAGICS.iter().find(|(offset, magic, _)| at(*offset, magic)).map(|(_, _, name)| *name)
}

/// The version of an ext file system, by the features that each version introduced.
fn extended(bytes: &[u8]) -> &'static str {
    const HAS_JOURNAL: u32 = 0x4;
    const EXTENTS: u32 = 0x40;
    const FLEX_BG: u32 = 0x200;
    let word = |offset: usize| {
        let bytes = bytes.get(1024 + offset..1024 + offset + 4);
        bytes.map_or(0, |b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
    };
    if word(96) & (EXTENTS | FLEX_BG) != 0 {
        "ext4"
    } else if word(92) & HAS_JOURNAL != 0 {
        "ext3"
    } else {
        "ext2"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_systems_are_distinguished() {
        let mut bytes = vec![0; LENGTH];
        assert_eq!(recognise(&bytes), None);
        bytes[1080..1082].copy_from_slice(b"\x53\xef");
        assert_eq!(recognise(&bytes), Some("ext2"));
        bytes[1024 + 96] = 0x40;
        assert_eq!(recognise(&bytes), Some("ext4"));
        let mut bytes = vec![0; LENGTH];
        bytes[0x10040..0x10048].copy_from_slice(b"_BHRfS_M");
        assert_eq!(recognise(&bytes), Some("Btrfs"));
    }
}
