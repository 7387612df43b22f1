//! Reads partition tables (MBR and GPT), to show them and to detect tables that do not fit the
//! disk.
//!
//! Guests write these tables. Therefore no library is used: the crate `gpt` panics on some tables
//! and allocates as much memory as others specify, and `mbrman` follows chains of extended
//! partitions without a limit.
use std::{fs::File, io};

use fathom_persistence::bytes::{u32_at, u64_at};
use serde::Serialize;

use super::{image::read_up_to, signatures};

/// The most entries read from a GPT; tables have 128.
const ENTRIES_MAX: u32 = 1024;

/// A partition.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Partition {
    /// Its number, from 1.
    pub number: u32,
    /// Its first byte.
    pub start: u64,
    /// Its length in bytes.
    pub length: u64,
    /// Its name in the table, or its type.
    pub name: String,
    /// The recognised content, if any.
    pub content: Option<&'static str>,
}

/// A partition table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PartitionTable {
    /// `MBR` or `GPT`.
    pub kind: &'static str,
    /// The sector size of the table, in bytes.
    pub sector_size: u64,
    /// The partitions in use.
    pub partitions: Vec<Partition>,
    /// The problems of the table, a sentence each.
    pub problems: Vec<String>,
}

/// Reads a disk's partition table, if it has one.
pub fn read(file: &File, size: u64) -> io::Result<Option<PartitionTable>> {
    for sector_size in [512, 4096] {
        if let Some(mut table) = read_gpt(file, size, sector_size)? {
            finish(&mut table, file, size);
            return Ok(Some(table));
        }
    }
    let mut table = read_mbr(file)?;
    if let Some(table) = &mut table {
        finish(table, file, size);
    }
    Ok(table)
}

/// Recognises each partition's content, and reports partitions that do not fit the disk.
fn finish(table: &mut PartitionTable, file: &File, size: u64) {
    for partition in &mut table.partitions {
        let end = partition.start.saturating_add(partition.length);
        if end > size {
            let number = partition.number;
            table.problems.push(format!(
                "partition {number} ends at byte {end}, the disk at {size}: {} bytes are missing",
                end - size
            ));
        }
        let room = size.saturating_sub(partition.start).min(partition.length);
        let bytes = read_up_to(file, partition.start, room.min(signatures::LENGTH as u64) as usize);
        partition.content = bytes.ok().and_then(|bytes| signatures::recognise(&bytes));
    }
}

fn read_mbr(file: &File) -> io::Result<Option<PartitionTable>> {
    let sector = read_up_to(file, 0, 512)?;
    if sector.len() < 512 || sector[510..] != [0x55, 0xaa] {
        return Ok(None);
    }
    let mut partitions = Vec::new();
    for (number, entry) in (1..).zip(sector[446..510].chunks_exact(16)) {
        let (active, kind, start, length) =
            (entry[0], entry[4], u32_at(entry, 8), u32_at(entry, 12));
        // Boot sectors of FAT and NTFS have the same signature but code in place of the table.
        if active & 0x7f != 0 {
            return Ok(None);
        }
        if kind != 0 && length != 0 {
            partitions.push(Partition {
                number,
                start: u64::from(start) * 512,
                length: u64::from(length) * 512,
                name: format!("type {kind:#04x}"),
                content: None,
            });
        }
    }
    if partitions.is_empty() {
        return Ok(None);
    }
    Ok(Some(PartitionTable { kind: "MBR", sector_size: 512, partitions, problems: Vec::new() }))
}

/// A GPT's header; `valid` is whether its checksum is right.
struct Header {
    valid: bool,
    backup: u64,
    table: u64,
    count: u32,
    entry_size: u32,
    table_checksum: u32,
}

fn read_header(file: &File, offset: u64) -> io::Result<Option<Header>> {
    let bytes = read_up_to(file, offset, 512)?;
    if bytes.len() < 512 || !bytes.starts_with(b"EFI PART") {
        return Ok(None);
    }
    let length = (u32_at(&bytes, 12) as usize).clamp(92, 512);
    let mut summed = bytes[..length].to_vec();
    summed[16..20].fill(0);
    Ok(Some(Header {
        valid: crc32(&summed) == u32_at(&bytes, 16),
        backup: u64_at(&bytes, 32),
        table: u64_at(&bytes, 72),
        count: u32_at(&bytes, 80),
        entry_size: u32_at(&bytes, 84),
        table_checksum: u32_at(&bytes, 88),
    }))
}

fn read_gpt(file: &File, size: u64, sector_size: u64) -> io::Result<Option<PartitionTable>> {
    let Some(header) = read_header(file, sector_size)? else { return Ok(None) };
    let mut table =
        PartitionTable { kind: "GPT", sector_size, partitions: vec![], problems: vec![] };
    let mut problem = |text: String| table.problems.push(text);
    if !header.valid {
        problem("the GPT header's checksum is wrong".into());
    }
    let backup = header.backup.saturating_mul(sector_size);
    if backup.saturating_add(sector_size) > size {
        problem(format!(
            "the backup GPT should be at byte {backup}, but the disk ends at {size}: it was cut short"
        ));
    } else {
        match read_header(file, backup)? {
            Some(header) if header.valid => {}
            _ => problem("the backup GPT is missing or damaged".into()),
        }
        if backup + sector_size < size {
            problem(
                "the backup GPT is not at the disk's end: the disk has grown; in the guest, \
                 `sgdisk --move-second-header` moves it"
                    .into(),
            );
        }
    }
    if !(128..=4096).contains(&header.entry_size) || header.count > ENTRIES_MAX {
        problem("the GPT's entries have an impossible size or number".into());
        return Ok(Some(table));
    }
    let length = header.entry_size as usize * header.count as usize;
    let bytes = read_up_to(file, header.table.saturating_mul(sector_size), length)?;
    if bytes.len() != length || crc32(&bytes) != header.table_checksum {
        problem("the checksum of the GPT's entries is wrong".into());
    }
    for (number, entry) in (1..).zip(bytes.chunks_exact(header.entry_size as usize)) {
        if entry[..16].iter().all(|&byte| byte == 0) {
            continue;
        }
        let (first, last) = (u64_at(entry, 32), u64_at(entry, 40));
        let units =
            entry[56..128].chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]]));
        let units: Vec<u16> = units.take_while(|&unit| unit != 0).collect();
        table.partitions.push(Partition {
            number,
            start: first.saturating_mul(sector_size),
            length: last.saturating_sub(first).saturating_add(1).saturating_mul(sector_size),
            name: String::from_utf16_lossy(&units),
            content: None,
        });
    }
    Ok(Some(table))
}

/// The CRC-32 checksum of GPT and Ethernet.
fn crc32(bytes: &[u8]) -> u32 {
    let step = |sum: u32| if sum & 1 == 1 { (sum >> 1) ^ 0xedb8_8320 } else { sum >> 1 };
    !bytes.iter().fold(!0, |sum, &byte| (0..8).fold(sum ^ u32::from(byte), |sum, _| step(sum)))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn the_checksum_is_the_usual_one() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
    }

    #[test]
    fn an_mbr_beyond_the_end_is_a_problem() {
        let mut sector = vec![0u8; 512];
        sector[450] = 0x83;
        sector[454..458].copy_from_slice(&2048u32.to_le_bytes());
        sector[458..462].copy_from_slice(&4096u32.to_le_bytes());
        sector[510..].copy_from_slice(&[0x55, 0xaa]);
        let file = tempfile::tempfile().expect("a temporary file");
        file.write_at(&sector, 0).expect("the sector is written");
        for (sectors, problems) in [(6144, 0), (6143, 1)] {
            file.set_len(sectors * 512).expect("a size");
            let table = read(&file, sectors * 512).expect("it reads").expect("there is a table");
            assert_eq!((table.kind, table.partitions[0].start), ("MBR", 1 << 20));
            assert_eq!(table.problems.len(), problems, "{:?}", table.problems);
        }
    }

    #[test]
    fn invalid_tables_are_survived() {
        let mut random = crate::random::Random::new(5);
        let mut bytes = vec![0u8; 34 * 512];
        for round in 0..2000 {
            bytes.fill_with(|| random.next() as u8);
            bytes[510..520].copy_from_slice(b"\x55\xaaEFI PART");
            if round % 2 == 0 {
                // Plausible enough to reach the entries.
                bytes[512 + 72..512 + 92]
                    .copy_from_slice(b"\x02\0\0\0\0\0\0\0\x80\0\0\0\x80\0\0\0\0\0\0\0");
            }
            let file = tempfile::tempfile().expect("a temporary file");
            file.write_at(&bytes, 0).expect("it is written");
            read(&file, bytes.len() as u64).expect("it reads");
        }
    }
}
