//! Whether a file that was seen before still exists, and since when its data is in memory.

use crate::kernel::Kernel;

/// The longest time for which data is believed to have been dirty, in nanoseconds: kernels write it
/// after half a minute, unless somebody has set another time.
const DIRTY_MAX_NS: u64 = 3_600_000_000_000;
/// The longest time between two ticks of a kernel's clock, and the shortest, in nanoseconds.
const TICK_NS: std::ops::RangeInclusive<u64> = 500_000..=20_000_000;

/// What has become of a file that was seen before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileState {
    /// It is in the guest's memory.
    Present(PresentFile),
    /// It has no name any more, and its kernel has freed it.
    Deleted,
    /// Its memory has been freed, or has another content. The file may still exist on its disk.
    Gone,
}

/// A file in the guest's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PresentFile {
    /// A number that distinguishes the files that had the same inode number one after the other.
    pub generation: u32,
    /// The subvolume of Btrfs, in which inode numbers are unique; 0 for other file systems.
    pub tree: u64,
    /// The size, in bytes.
    pub size: u64,
}

impl Kernel {
    /// What has become of the inode with this number at an address where it was seen before. `None`
    /// if the kernel's structures are not known, or the address is not one of memory.
    pub fn file_state(&self, address: u64, number: u64) -> Option<FileState> {
        let layout = &self.layout;
        if address == 0 || address % 8 != 0 {
            return None;
        }
        let window = self.memory.window(self.space.direct(address)?);
        let is_free = window.u64(layout.inode_hashed?)? == 0;
        let links = window.u32(layout.inode_links?)?;
        if window.u64(layout.inode_number)? != number {
            return Some(FileState::Gone);
        }
        if is_free {
            return Some(if links == 0 { FileState::Deleted } else { FileState::Gone });
        }
        Some(FileState::Present(PresentFile {
            generation: window.u32(layout.inode_generation)?,
            tree: self.btrfs_tree(address).unwrap_or(0),
            size: window.u64(layout.inode_size)?,
        }))
    }

    /// How long ago the inode at an address became dirty, in nanoseconds: no data that is written
    /// back now is older. `None` if that is not known.
    pub fn dirty_for_ns(&self, address: u64) -> Option<u64> {
        let begun = self.u64(address.checked_add(self.layout.inode_dirtied?)?)?;
        let now = self.u64(self.places.ticks?)?;
        let passed = now.checked_sub(begun)?.checked_mul(self.tick_ns()?)?;
        (passed <= DIRTY_MAX_NS).then_some(passed)
    }

    /// The time between two ticks of the kernel's clock, in nanoseconds: the clock that is made of
    /// nothing but ticks has it as its resolution.
    fn tick_ns(&self) -> Option<u64> {
        let source = self.places.tick_source?;
        let shift = self.u32(source.wrapping_add(self.layout.source_shift?))?;
        let factor = self.u32(source.wrapping_add(self.layout.source_factor?))?;
        Some(u64::from(factor.checked_shr(shift)?)).filter(|tick| TICK_NS.contains(tick))
    }

    /// The number of the Btrfs tree of the inode at an address; `None` for other file systems.
    fn btrfs_tree(&self, inode: u64) -> Option<u64> {
        let layout = &self.layout;
        let super_block = self.pointer(inode.wrapping_add(layout.inode_sb))?;
        let kind = self.pointer(super_block.wrapping_add(layout.sb_type))?;
        let name = self.pointer(kind.wrapping_add(layout.type_name))?;
        // `btrfs` and the end of the name.
        let letters = self.u64(name)? & 0xffff_ffff_ffff;
        if letters != u64::from_le_bytes(*b"btrfs\0\0\0") {
            return None;
        }
        let own = inode.wrapping_sub(layout.btrfs_inode_inode?);
        let root = self.pointer(own.wrapping_add(layout.btrfs_inode_root?))?;
        self.u64(root.wrapping_add(layout.btrfs_root_number?))
    }
}
