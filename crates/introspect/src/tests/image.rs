//! Images of memory in files.

use std::fs;
use std::io::Write;
use std::path::Path;

use fathom_guest_memory::GuestMemory;
use fathom_insight::Names;

use super::SyntheticGuest;
use crate::image::open_image;
use crate::kernel::Kernel;
use crate::synthetic::Shape;

fn file(bytes: &[u8]) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    file
}

fn open(bytes: &[u8], low: u64) -> std::io::Result<GuestMemory> {
    open_image(file(bytes).path(), low)
}

fn layout(memory: &GuestMemory) -> Vec<(u64, u64)> {
    memory.regions().iter().map(|region| (region.start, region.length)).collect()
}

/// An ELF core with these parts: kind, offset in the file, address, length in the file.
fn core(programs: &[(u32, u64, u64, u64)], content: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; 64];
    bytes[..4].copy_from_slice(b"\x7fELF");
    bytes[32..40].copy_from_slice(&64_u64.to_le_bytes());
    bytes[56..58].copy_from_slice(&(programs.len() as u16).to_le_bytes());
    for (kind, offset, address, length) in programs {
        bytes.extend_from_slice(&kind.to_le_bytes());
        bytes.extend_from_slice(&7_u32.to_le_bytes());
        for word in [*offset, 0, *address, *length, *length, 0] {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
    }
    bytes.extend_from_slice(content);
    bytes
}

#[test]
fn raw_files_have_a_hole_below_four_gigabytes() {
    let bytes: Vec<u8> = (0..20_000_u32).map(|place| (place / 100) as u8).collect();
    let memory = open(&bytes, 8192).unwrap();
    assert_eq!(layout(&memory), [(0, 8192), (4 << 30, 20_000 - 8192)]);
    assert_eq!(memory.u16((4 << 30) + 8), Some(u16::from_le_bytes([82, 82])));
    let whole = open(&bytes, 1 << 30).unwrap();
    assert_eq!(layout(&whole), [(0, 20_000)]);
    assert_eq!(layout(&open(&bytes, 20_000).unwrap()), [(0, 20_000)]);
    assert_eq!(layout(&open(&bytes, 0).unwrap()), [(4 << 30, 20_000)]);
    assert!(open(&[], 1 << 30).is_err());
    assert!(open_image(Path::new("/nowhere/at/all"), 1).is_err());
    assert!(open_image(Path::new("/"), 1).is_err());
}

#[test]
fn the_headers_of_a_core_have_its_layout() {
    let head = 64 + 3 * 56;
    let bytes = core(
        &[(4, head, 0, 4), (1, head + 4, 0x1000, 8), (1, head + 12, 1 << 32, 4)],
        b"noteabcdefghwxyz",
    );
    let memory = open(&bytes, 0).unwrap();
    assert_eq!(layout(&memory), [(0x1000, 8), (1 << 32, 4)]);
    assert_eq!(memory.u64(0x1000), Some(u64::from_le_bytes(*b"abcdefgh")));
    assert_eq!(memory.u32(1 << 32), Some(u32::from_le_bytes(*b"wxyz")));
}

#[test]
fn broken_cores_are_refused() {
    let good = core(&[(1, 64 + 56, 0, 16)], &[0; 16]);
    assert!(open(&good, 0).is_ok());
    let broken = [
        core(&[], &[0; 16]),
        core(&[(4, 120, 0, 16)], &[0; 16]),
        core(&[(1, 120, 0, 17)], &[0; 16]),
        core(&[(1, u64::MAX, 0, 16)], &[0; 16]),
        core(&[(1, 120, 0, u64::MAX)], &[0; 16]),
        core(&[(1, 120, u64::MAX - 7, 16)], &[0; 16]),
        core(&[(1, 120, 0, 0)], &[0; 16]),
    ];
    for bytes in broken {
        assert!(open(&bytes, 0).is_err(), "{:x?}", &bytes[64..]);
    }
    for length in 4..good.len() {
        assert!(open(&good[..length], 0).is_err(), "{length}");
    }
    let mut far = good.clone();
    far[32..40].copy_from_slice(&(u64::MAX - 10).to_le_bytes());
    assert!(open(&far, 0).is_err());
    let mut many = good;
    many[56..58].copy_from_slice(&u16::MAX.to_le_bytes());
    assert!(open(&many, 0).is_err());
}

#[test]
fn manipulated_headers_never_lead_out_of_the_file() {
    let good = core(&[(1, 176, 0, 16), (1, 192, 64, 16)], &[5; 32]);
    let file = file(&good);
    for seed in 0..3000 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut bytes = good.clone();
        for _ in 0..random.usize(1..4) {
            let place = random.usize(32..176);
            let any = random.u8(..);
            bytes[place] = random.choice([0, 1, 0x7f, 0xff, any]).unwrap();
        }
        fs::write(file.path(), &bytes).unwrap();
        let Ok(memory) = open_image(file.path(), 0) else { continue };
        assert!(memory.length() <= 2 * bytes.len() as u64, "seed {seed}");
        for region in memory.regions() {
            // Reads each part to its last byte.
            let mut content = vec![0; region.length as usize];
            let _ = memory.read(region.start, &mut content);
            let _ = region.touched(0).collect::<Vec<_>>();
        }
        assert!(Kernel::attach(&memory, None).is_err(), "seed {seed}");
    }
}

#[test]
fn a_kernel_is_found_in_images_of_both_kinds() {
    let guest = SyntheticGuest::new(&Shape::default());
    let (low, high) =
        (guest.store.content(0).unwrap(), guest.store.content(guest.linux.used.0).unwrap());
    let head = 64 + 2 * 56;
    let at = head + low.len() as u64;
    let parts = [(1, head, 0, low.len() as u64), (1, at, guest.linux.used.0, high.len() as u64)];
    let elf = open(&core(&parts, &[low.clone(), high.clone()].concat()), 0).unwrap();
    let mut raw = low;
    raw.resize(guest.linux.used.0 as usize, 0);
    raw.extend_from_slice(&high);
    let raw = open(&raw, 1 << 30).unwrap();
    for memory in [elf, raw] {
        let kernel = Kernel::attach(&memory, Some(guest.header())).unwrap();
        assert_eq!(kernel.release(), "6.1.0-synthetic");
        assert_eq!(kernel.tasks().len(), 3);
        assert!(!kernel.cached_files(&Names::default()).is_empty());
    }
}
