//! Lost pages, limits, and what is refused.

use super::*;
use std::os::unix::fs::FileExt;

use rustix::fs::MemfdFlags;

fn memory_file(length: u64, flags: MemfdFlags) -> File {
    let flags = MemfdFlags::CLOEXEC | flags;
    let file = File::from(rustix::fs::memfd_create(c"test", flags).unwrap());
    file.set_len(length).unwrap();
    file
}

fn read(mapping: &Mapping, at: usize) -> u8 {
    mapping.access().bytes::<1>(at)[0]
}

#[test]
fn a_truncated_page_reads_as_zeroes_and_marks_only_its_owner() {
    let (file, other) =
        (memory_file(64 << 10, MemfdFlags::empty()), memory_file(64 << 10, MemfdFlags::empty()));
    let (owner, neighbour) = (Arc::new(MemoryOwner::default()), Arc::new(MemoryOwner::default()));
    let mapping = Mapping::new(&file, 0, 64 << 10, &owner).unwrap();
    let beside = Mapping::new(&other, 0, 64 << 10, &neighbour).unwrap();
    file.write_all_at(&vec![7; 64 << 10], 0).unwrap();
    assert_eq!((read(&mapping, 5000), owner.cause(), faults()), (7, None, 0));
    file.set_len(8192).unwrap();
    assert_eq!((read(&mapping, 8191), owner.is_lost()), (7, false));
    assert_eq!((read(&mapping, 8192), owner.cause()), (0, Some(LossCause::Absent)));
    assert_eq!((read(&mapping, 4096), faults()), (7, 1));
    // Faults of further pages, until the whole mapping is replaced.
    for at in (8192..64 << 10).step_by(4096) {
        assert_eq!(read(&mapping, at), 0);
    }
    assert_eq!(u64::from(FAULTS_MAX) + 1, faults());
    assert_eq!((read(&mapping, 0), read(&beside, 0), neighbour.is_lost()), (0, 0, false));
}

#[test]
fn a_part_that_begins_within_a_page_is_mapped() {
    let file = memory_file(16 << 10, MemfdFlags::empty());
    file.write_all_at(b"part", 5000).unwrap();
    let mapping = Mapping::new(&file, 5000, 4, &Arc::default()).unwrap();
    assert_eq!((read(&mapping, 0), read(&mapping, 3), mapping.length()), (b'p', b't', 4));
    let map = |offset, length| Mapping::new(&file, offset, length, &Arc::default());
    assert!(map(0, 0).is_err() && map(16 << 10, 1).is_err() && map(u64::MAX, 2).is_err());
    let null = File::options().read(true).write(true).open("/dev/null").unwrap();
    assert!(Mapping::new(&null, 0, 4096, &Arc::default()).is_err());
    let directory = File::open("/tmp").unwrap();
    assert!(Mapping::new(&directory, 0, 1, &Arc::default()).is_err());
}

#[test]
fn a_file_that_can_be_sealed_is() {
    let file = memory_file(8192, MemfdFlags::ALLOW_SEALING);
    let _mapping = Mapping::new(&file, 0, 8192, &Arc::default()).unwrap();
    assert!(file.set_len(4096).is_err());
    file.set_len(16384).unwrap();
}

#[test]
fn mappings_are_excluded_from_core_dumps() {
    let file = memory_file(8192, MemfdFlags::empty());
    let mapping = Mapping::new(&file, 0, 8192, &Arc::default()).unwrap();
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let start = format!("{:x}-", mapping.base() as usize);
    let (_, from) = maps.split_once(&start).expect("the mapping has a line");
    let flags = from.lines().find(|line| line.starts_with("VmFlags:")).unwrap();
    assert!(flags.split_whitespace().any(|flag| flag == "dd"), "{flags}");
}

#[test]
fn a_budget_is_kept_and_given_back() {
    let file = memory_file(64 << 10, MemfdFlags::empty());
    let owner = Arc::new(MemoryOwner::new(None, Some(Arc::new(MappingBudget::new(96 << 10)))));
    let first = Mapping::new(&file, 0, 64 << 10, &owner).unwrap();
    assert!(Mapping::new(&file, 0, 64 << 10, &owner).is_err());
    let second = Mapping::new(&file, 0, 32 << 10, &owner).unwrap();
    drop((first, second));
    assert!(Mapping::new(&file, 0, 64 << 10, &owner).is_ok());
    // A file may claim any length; a mapping larger than the limit is refused.
    let huge = memory_file(1 << 50, MemfdFlags::empty());
    assert!(Mapping::new(&huge, 0, 127 << 40, &Arc::default()).is_err());
}
