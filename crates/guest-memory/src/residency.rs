//! How much of a guest's memory the host's kernel has in memory, and how much it has swapped out.
//!
//! The kernel counts the pages of the memory's file (`cachestat`, Linux 6.5): of a file in memory,
//! an evicted page is one that lies in swap. The count looks at the kernel's index of the file
//! alone. It brings no page in, touches none, and does not make one look used. The counts of Linux
//! 6.18 equal those of `/proc/PID/smaps` to the page. `mincore` is no substitute: it counts pages
//! whose copy is still, or already, in the cache of the swap device, and which a guest's access
//! has to bring in.

use std::fmt;
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;

use crate::memory::GuestMemory;

/// The number of the system call on x86-64, and on all architectures that came to it since.
const CACHESTAT: libc::c_long = 451;
/// The magic number of tmpfs, which is also that of memory files.
const TMPFS: i64 = 0x0102_1994;

/// The pages of a range of a guest's memory, in bytes. Pages that nobody has touched yet are
/// neither.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Residency {
    /// What is in the host's memory.
    pub resident: u64,
    /// What the host's kernel has swapped out. An access to it brings it in, from the swap device
    /// or from the cache of the swap device.
    pub swapped: u64,
}

/// Why it is not known what is swapped out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResidencyError {
    /// The kernel is older than Linux 6.5.
    NoCount,
    /// The kernel does not let this process count the pages of the file.
    NotAllowed,
    /// The memory lies in a file system whose pages are not swapped: huge pages, or a file of a
    /// disk's file system.
    NoMemoryFile,
    /// The kernel has refused for another reason: the number of the error.
    Failed(i32),
}

impl fmt::Display for ResidencyError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoCount => formatter.write_str("the host's kernel is older than Linux 6.5"),
            Self::NotAllowed => {
                formatter.write_str("the host's kernel does not allow to count the guest's pages")
            }
            Self::NoMemoryFile => formatter
                .write_str("the guest's memory is in huge pages or in a file of a file system"),
            Self::Failed(number) => {
                write!(formatter, "cachestat: {}", io::Error::from_raw_os_error(*number))
            }
        }
    }
}

impl std::error::Error for ResidencyError {}

impl GuestMemory {
    /// Counts the pages of `length` bytes at an address: whole pages, also if the range begins or
    /// ends within one. Parts outside the memory count nothing. Takes less than a microsecond for a
    /// page, and about 8 ms for each GiB.
    ///
    /// # Errors
    /// When the kernel cannot count them. [`can_count`](Self::can_count) finds out for good.
    pub fn residency(&self, address: u64, length: u64) -> Result<Residency, ResidencyError> {
        let mut found = Residency::default();
        let end = address.saturating_add(length);
        for region in self.regions() {
            let (from, to) = (address.max(region.start), end.min(region.end()));
            if from >= to {
                continue;
            }
            let offset = region.file_offset + (from - region.start);
            let part = count(&region.file, offset, to - from)?;
            found.resident += part.resident;
            found.swapped += part.swapped;
        }
        Ok(found)
    }

    /// Whether the kernel can count the pages of this memory.
    ///
    /// # Errors
    /// Why it cannot.
    pub fn can_count(&self) -> Result<(), ResidencyError> {
        for region in self.regions() {
            let found = rustix::fs::fstatfs(&region.file)
                .map_err(|error| ResidencyError::Failed(error.raw_os_error()))?;
            if found.f_type != TMPFS {
                return Err(ResidencyError::NoMemoryFile);
            }
            count(&region.file, region.file_offset, 1)?;
        }
        Ok(())
    }
}

/// The kernel's `struct cachestat_range`.
#[repr(C)]
struct Range {
    offset: u64,
    length: u64,
}

/// The kernel's `struct cachestat`, in pages.
#[repr(C)]
struct Counts {
    cache: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// Counts the pages of a part of a file, which is not empty.
fn count(file: &File, offset: u64, length: u64) -> Result<Residency, ResidencyError> {
    let range = Range { offset, length };
    let mut counts = MaybeUninit::<Counts>::zeroed();
    // SAFETY: both structures have the kernel's layout and outlive the call, which reads the first
    // and writes the second.
    let result = unsafe {
        libc::syscall(CACHESTAT, file.as_raw_fd(), &raw const range, counts.as_mut_ptr(), 0_u32)
    };
    if result != 0 {
        return Err(match io::Error::last_os_error().raw_os_error().unwrap_or(0) {
            libc::ENOSYS => ResidencyError::NoCount,
            libc::EPERM | libc::EACCES => ResidencyError::NotAllowed,
            libc::EOPNOTSUPP => ResidencyError::NoMemoryFile,
            number => ResidencyError::Failed(number),
        });
    }
    // SAFETY: five numbers, which were zeroes before the kernel wrote them.
    let counts = unsafe { counts.assume_init() };
    let page = rustix::param::page_size() as u64;
    Ok(Residency { resident: counts.cache * page, swapped: counts.evicted * page })
}

/// The swap space of the host, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostSwap {
    /// The size of all swap devices.
    pub total: u64,
    /// What is used of them.
    pub used: u64,
}

impl HostSwap {
    /// The swap space now: one system call. Zeroes if the kernel does not say.
    pub fn now() -> Self {
        let mut info = MaybeUninit::<libc::sysinfo>::zeroed();
        // SAFETY: the structure outlives the call.
        if unsafe { libc::sysinfo(info.as_mut_ptr()) } != 0 {
            return Self::default();
        }
        // SAFETY: numbers, which were zeroes before the kernel wrote them.
        let info = unsafe { info.assume_init() };
        let unit = u64::from(info.mem_unit).max(1);
        let used = info.totalswap.saturating_sub(info.freeswap);
        Self { total: info.totalswap.saturating_mul(unit), used: used.saturating_mul(unit) }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;
    use crate::{MemoryOwner, Purpose};

    const MIB: u64 = 1 << 20;

    /// A memory of two regions in one file, with a gap between them.
    fn memory() -> GuestMemory {
        let file = File::from(memfd_create("memory", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(3 * MIB).unwrap();
        let owner = Arc::new(MemoryOwner::new(None, None));
        let mut memory = GuestMemory::default();
        memory.add(0, MIB, file.try_clone().unwrap(), 0, &owner).unwrap();
        memory.add(4 * MIB, 2 * MIB, file, MIB, &owner).unwrap();
        memory
    }

    #[test]
    fn pages_count_once_they_are_touched_and_a_count_touches_none() {
        let memory = memory();
        if let Err(error) = memory.can_count() {
            assert_eq!(error, ResidencyError::NoCount);
            println!("Skipped: {error}");
            return;
        }
        let resident = |address, length| {
            let found = memory.residency(address, length).unwrap();
            assert_eq!(found.swapped, 0);
            found.resident
        };
        for _ in 0..2 {
            assert_eq!(resident(0, 6 * MIB), 0);
        }
        for address in [4095, 8192, 4 * MIB, 6 * MIB - 1] {
            memory.access(address, 1, Purpose::Write).unwrap().write(0, &[1]);
        }
        assert_eq!(resident(0, 6 * MIB), 4 * 4096);
        assert_eq!((resident(0, 1), resident(4095, 2), resident(4096, 4096)), (4096, 4096, 0));
        // A range that begins in one region and ends in the other; the gap counts nothing.
        assert_eq!(resident(8191, 4 * MIB), 2 * 4096);
        assert_eq!((resident(MIB, 3 * MIB), resident(u64::MAX, 9), resident(8192, 0)), (0, 0, 0));
    }

    #[test]
    fn the_pages_of_a_file_of_a_file_system_are_not_swapped() {
        // The folder of the build is on a file system with a device.
        let folder = std::env::current_exe().unwrap();
        let file = tempfile::tempfile_in(folder.parent().unwrap()).unwrap();
        if rustix::fs::fstatfs(&file).unwrap().f_type == TMPFS {
            println!("Skipped: the build lies in memory");
            return;
        }
        file.set_len(MIB).unwrap();
        let mut memory = GuestMemory::default();
        memory.add(0, MIB, file, 0, &Arc::new(MemoryOwner::new(None, None))).unwrap();
        assert_eq!(memory.can_count(), Err(ResidencyError::NoMemoryFile));
    }

    #[test]
    fn swap_space_in_use_is_a_part_of_it() {
        let HostSwap { total, used } = HostSwap::now();
        assert!(used <= total);
        let text = std::fs::read_to_string("/proc/meminfo").unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("SwapTotal:")).unwrap();
        let kib: u64 = line.trim().trim_end_matches(" kB").parse().unwrap();
        assert_eq!(kib == 0, total == 0);
    }
}
