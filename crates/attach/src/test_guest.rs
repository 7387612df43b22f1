//! A guest for tests: this process is its own VMM.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use fathom_guest_memory::{Mapping, MemoryFile};

use crate::memory::MappedMemory;
use crate::store::PAGE;
use crate::userfault::{self, MISSING_SHMEM, UserFault};

/// Memory in a file whose faults are reported.
pub(crate) struct TestGuest {
    pub file: File,
    /// The guest's own mapping.
    pub guest: Arc<Mapping>,
    pub faults: UserFault,
    pub memory: Vec<MappedMemory>,
    pub device: OwnedFd,
}

impl TestGuest {
    /// A guest whose pages begin with `content` of their numbers. `None` without the right.
    pub fn start(pages: u64, content: impl Fn(u64) -> Vec<u8>) -> Option<Self> {
        let Ok(device) = userfault::open_device() else {
            println!("Skipped: /dev/userfaultfd may not be opened");
            return None;
        };
        let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let file = File::from(file);
        file.set_len(pages * PAGE).unwrap();
        let guest = Arc::new(Mapping::new(&file, 0, pages * PAGE, &Arc::default()).unwrap());
        let start = guest.access().u8s()[0].as_ptr() as u64;
        for page in 0..pages {
            guest.access().write((page * PAGE) as usize, &content(page));
        }
        let faults = UserFault::own(device.as_fd(), MISSING_SHMEM).unwrap();
        let end = start + pages * PAGE;
        faults.register(&(start..end)).unwrap();
        let MemoryFile { device: number, inode } = MemoryFile::of(&file).unwrap();
        let memory = vec![MappedMemory { start, end, offset: 0, inode, device: number }];
        Some(Self { file, guest, faults, memory, device })
    }
}

/// How many tables of leases a folder has that were not put aside.
pub(crate) fn tables_in(folder: &Path) -> usize {
    let names = std::fs::read_dir(folder).unwrap().flatten().map(|entry| entry.file_name());
    names.filter(|name| !name.to_string_lossy().starts_with('.')).count()
}
