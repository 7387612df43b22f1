//! The signatures of what else may be on a volume: file systems, partition tables, members of
//! arrays and groups, encrypted volumes, swap space. The places and values are those that libblkid
//! looks for. No place with a signature is empty, however many zeroes surround it: btrfs leaves the
//! first 64 KiB, and an array of version 0.90 all but the end.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use fathom_persistence::bytes::u32_at;

/// The bytes at the start of a volume that are examined.
const HEAD_LENGTH: usize = 1 << 20;
/// The bytes at the end of a volume that are examined.
const TAIL_LENGTH: u64 = 256 << 10;
/// The place of a second label of a file system beyond the first MiB, in bytes.
const VMFS_AT: u64 = 2 << 20;

/// What a signature belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signature(
    /// Its usual name.
    pub &'static str,
);

/// Magic numbers from the start of a volume: their offset, their bytes, and the name of the
/// content. Longer magic numbers and those of containers come first.
const START: &[(usize, &[u8], &str)] = &[
    (0, b"LUKS\xba\xbe", "LUKS encrypted volume"),
    (0, b"SKUL\xba\xbe", "LUKS encrypted volume"),
    (3, b"-FVE-FS-", "BitLocker encrypted volume"),
    (0, b"HM\x01\0", "LVM physical volume"),
    (0, b"HM\x02\0", "LVM physical volume"),
    (0, b"LABELONE", "LVM physical volume"),
    (512, b"LABELONE", "LVM physical volume"),
    (1024, b"LABELONE", "LVM physical volume"),
    (1536, b"LABELONE", "LVM physical volume"),
    (0, b"\xfc\x4e\x2b\xa9", "Linux RAID member"),
    (4096, b"\xfc\x4e\x2b\xa9", "Linux RAID member"),
    (0, b"dmvdo001", "VDO volume"),
    (512, b"!Stra0tis\x86\xff\x02^\x41rh", "Stratis volume"),
    (0, b"bluestore block device", "Ceph BlueStore"),
    (32, b"ORCLDISK", "Oracle ASM disk"),
    (0x1018, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81", "bcache device"),
    (0x1018, b"\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef", "bcachefs"),
    (0, b"XFSB", "XFS"),
    (0, b"hsqs", "squashfs"),
    (0, b"sqsh", "squashfs"),
    (0, b"\x45\x3d\xcd\x28", "cramfs"),
    (0, b"-rom1fs-", "romfs"),
    (3, b"NTFS    ", "NTFS"),
    (3, b"EXFAT   ", "exFAT"),
    (54, b"FAT16   ", "FAT16"),
    (54, b"FAT12   ", "FAT12"),
    (82, b"FAT32   ", "FAT32"),
    (32, b"NXSB", "APFS"),
    (1024, b"\x10\x20\xf5\xf2", "F2FS"),
    (1024, b"\xe2\xe1\xf5\xe0", "EROFS"),
    (1024, b"BD", "HFS"),
    (1024, b"H+", "HFS+"),
    (1024, b"HX", "HFS+"),
    (0x406, b"\x34\x34", "NILFS2"),
    (0x410, b"\x7f\x13", "Minix"),
    (0x410, b"\x8f\x13", "Minix"),
    (0x410, b"\x68\x24", "Minix"),
    (0x410, b"\x78\x24", "Minix"),
    (0x418, b"\x5a\x4d", "Minix"),
    (1024, b"OCFSV2", "OCFS2"),
    (2048, b"OCFSV2", "OCFS2"),
    (4096, b"OCFSV2", "OCFS2"),
    (8192, b"OCFSV2", "OCFS2"),
    (4086, b"SWAPSPACE2", "swap space"),
    (4086, b"SWAP-SPACE", "swap space"),
    (8182, b"SWAPSPACE2", "swap space"),
    (16374, b"SWAPSPACE2", "swap space"),
    (32758, b"SWAPSPACE2", "swap space"),
    (65526, b"SWAPSPACE2", "swap space"),
    (8192 + 1372, b"\x54\x19\x01\0", "UFS"),
    (8192 + 1372, b"\x19\x01\x54\x19", "UFS"),
    (65536 + 1372, b"\x19\x01\x54\x19", "UFS"),
    (0x2034, b"ReIsEr", "ReiserFS"),
    (0x10034, b"ReIsEr", "ReiserFS"),
    (0x10000, b"ReIsEr4", "Reiser4"),
    (0x10000, b"\x01\x16\x19\x70", "GFS2"),
    (0x8000, b"JFS1", "JFS"),
    (0x8001, b"CD001", "ISO 9660"),
    (0x8001, b"BEA01", "UDF"),
    (0x8001, b"NSR0", "UDF"),
    (0x10040, b"_BHRfS_M", "Btrfs"),
];
/// The same of partition tables.
const TABLES: &[(usize, &[u8], &str)] = &[
    (512, b"EFI PART", "GPT partition table"),
    (4096, b"EFI PART", "GPT partition table"),
    (510, b"\x55\xaa", "MBR partition table"),
];

impl Signature {
    /// Recognises the content of a volume or partition that starts with `head`, but for partition
    /// tables.
    pub fn at_start(head: &[u8]) -> Option<Self> {
        let at =
            |offset: usize, magic: &[u8]| head.get(offset..).is_some_and(|b| b.starts_with(magic));
        if at(1024 + 56, b"\x53\xef") {
            return Some(Self(extended(head)));
        }
        let found = START.iter().find(|(offset, magic, _)| at(*offset, magic));
        // Uberblocks of ZFS, from 128 KiB of a label on.
        let is_zfs = || {
            (0..128).map(|index| (128 << 10) + (index << 10)).any(|offset| {
                at(offset, b"\x0c\xb1\xba\0\0\0\0\0") || at(offset, b"\0\0\0\0\0\xba\xb1\x0c")
            })
        };
        found.map(|(_, _, name)| Self(name)).or_else(|| is_zfs().then_some(Self("ZFS member")))
    }

    /// Recognises what is at the end of a volume of `size` bytes: members of arrays, the copy of a
    /// partition table. `tail` are its last bytes.
    fn at_end(tail: &[u8], size: u64) -> Option<Self> {
        let at = |offset: Option<u64>, magic: &[u8]| {
            let begin = size - tail.len() as u64;
            let offset = offset.and_then(|offset| offset.checked_sub(begin));
            let found = offset.and_then(|offset| tail.get(offset as usize..));
            found.is_some_and(|found| found.starts_with(magic))
        };
        let back = |bytes: u64| size.checked_sub(bytes);
        let raid = b"\xfc\x4e\x2b\xa9";
        let early = (size & !0xffff).checked_sub(0x10000);
        let late = back(8192).map(|offset| offset & !0xfff);
        let found = [
            (at(early, raid) || at(early, b"\xa9\x2b\x4e\xfc"), "Linux RAID member"),
            (at(late, raid), "Linux RAID member"),
            (at(back(512), b"EFI PART") || at(back(4096), b"EFI PART"), "GPT partition table"),
            (at(back(1024), b"Intel Raid ISM Cfg Sig. "), "Intel RAID member"),
            (at(back(512), b"\xde\x11\xde\x11"), "DDF RAID member"),
        ];
        found.into_iter().find(|(is_found, _)| *is_found).map(|(_, name)| Self(name))
    }

    /// Recognises what is on a volume of `size` bytes.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn of(file: &File, size: u64) -> io::Result<Option<Self>> {
        let head = read(file, 0, size.min(HEAD_LENGTH as u64))?;
        let table = TABLES.iter().find(|(offset, magic, _)| {
            head.get(*offset..).is_some_and(|found| found.starts_with(magic))
        });
        let found = Self::at_start(&head).or(table.map(|(_, _, name)| Self(name)));
        if found.is_some() {
            return Ok(found);
        }
        let tail = size.min(TAIL_LENGTH);
        if let Some(found) = Self::at_end(&read(file, size - tail, tail)?, size) {
            return Ok(Some(found));
        }
        for (offset, magic) in [(1 << 20, b"\x0d\xd0\x01\xc0"), (VMFS_AT, b"\x5e\xf1\xab\x2f")] {
            if size >= offset + 4 && read(file, offset, 4)? == magic {
                return Ok(Some(Self("VMFS")));
            }
        }
        Ok(None)
    }
}

fn read(file: &File, offset: u64, length: u64) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; length as usize];
    file.read_exact_at(&mut bytes, offset)?;
    Ok(bytes)
}

/// The version of an ext file system, by the features that each version introduced.
fn extended(bytes: &[u8]) -> &'static str {
    const HAS_JOURNAL: u32 = 0x4;
    const EXTENTS: u32 = 0x40;
    const FLEX_BG: u32 = 0x200;
    let word = |offset: usize| u32_at(bytes, 1024 + offset);
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
        let mut bytes = vec![0; HEAD_LENGTH];
        let name = |bytes: &[u8]| Signature::at_start(bytes).map(|found| found.0);
        assert_eq!(name(&bytes), None);
        bytes[1080..1082].copy_from_slice(b"\x53\xef");
        assert_eq!(name(&bytes), Some("ext2"));
        bytes[1024 + 96] = 0x40;
        assert_eq!(name(&bytes), Some("ext4"));
        bytes.fill(0);
        bytes[0x10040..0x10048].copy_from_slice(b"_BHRfS_M");
        assert_eq!(name(&bytes), Some("Btrfs"));
        for length in [0, 1, 511, 4096, 0x10041] {
            assert_eq!(name(&bytes[..length]), None);
        }
    }

    #[test]
    fn each_signature_is_found_where_it_is() {
        let file = tempfile::tempfile().unwrap();
        for size in [1 << 20, (5 << 20) + 512, 64 << 20] {
            for (offset, magic, _) in START.iter().chain(TABLES) {
                file.set_len(0).unwrap();
                file.set_len(size).unwrap();
                file.write_all_at(magic, *offset as u64).unwrap();
                assert!(Signature::of(&file, size).unwrap().is_some(), "{magic:?} at {offset}");
            }
            for (offset, magic) in [
                ((size & !0xffff) - 0x10000, &b"\xfc\x4e\x2b\xa9"[..]),
                ((size - 8192) & !0xfff, b"\xfc\x4e\x2b\xa9"),
                (size - 512, b"EFI PART"),
                (128 << 10, b"\x0c\xb1\xba\0\0\0\0\0"),
            ] {
                file.set_len(0).unwrap();
                file.set_len(size).unwrap();
                assert_eq!(Signature::of(&file, size).unwrap(), None);
                file.write_all_at(magic, offset).unwrap();
                assert!(Signature::of(&file, size).unwrap().is_some(), "{magic:?} at {offset}");
            }
        }
        file.set_len(0).unwrap();
        assert_eq!(Signature::of(&file, 0).unwrap(), None);
    }
}
