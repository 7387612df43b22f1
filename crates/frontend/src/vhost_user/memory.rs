//! The memory of a guest as one connection announced it.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::{Arc, LazyLock};

use fathom_guest_memory::{
    GuestAddress, GuestLeases, GuestMemory, LEASE_FOLDER, MemoryOwner, Region,
};

/// The memory that every VMM may announce, in bytes.
const ANNOUNCED_MIN: u64 = 1 << 40;
/// The most memory that a VMM may announce on the largest host, in bytes.
const ANNOUNCED_MAX: u64 = 16 << 40;

/// The most memory that one VMM may announce, in bytes. It is four times the host's memory within
/// fixed bounds, because address ranges for memory to be plugged in count too.
pub(super) static ANNOUNCED: LazyLock<u64> = LazyLock::new(|| {
    let info = rustix::system::sysinfo();
    let host = info.totalram.saturating_mul(u64::from(info.mem_unit));
    host.saturating_mul(4).clamp(ANNOUNCED_MIN, ANNOUNCED_MAX)
});

/// A region as the front end announced it.
#[derive(Clone, Copy, Debug)]
pub(super) struct RegionLayout {
    /// Its guest-physical address.
    pub guest_address: u64,
    /// Its length in bytes.
    pub length: u64,
    /// Its address in the front end's own process, in which ring addresses are given.
    pub user_address: u64,
    /// The offset in its file at which it begins, in bytes.
    pub file_offset: u64,
}

/// All of a guest's memory that one connection announced, with the addresses of the VMM. When the
/// VMM changes its table, a new object replaces this one.
#[derive(Clone, Default)]
pub(super) struct Memory {
    guest: GuestMemory,
    /// The addresses of the regions in the VMM's own process, and in the guest.
    places: Vec<RegionLayout>,
    /// The leases for the guest's pager, if it has one.
    leases: Option<Arc<GuestLeases>>,
}

impl Memory {
    /// The memory itself.
    pub(super) fn guest(&self) -> &GuestMemory {
        &self.guest
    }

    /// The leases that accesses take.
    pub(super) fn leases(&self) -> Option<&Arc<GuestLeases>> {
        self.leases.as_ref()
    }

    /// Takes leases for the guest's pager from now on, if it has one; without one, accesses need
    /// none. Returns whether this changes anything.
    ///
    /// # Errors
    /// When the pager's table cannot be used, or the memory not be mapped anew. It stays as it is.
    pub(super) fn renew_leases(&mut self) -> io::Result<bool> {
        let folder = Path::new(LEASE_FOLDER);
        let before = self.leases.as_ref().map(Arc::as_ptr);
        if let Some((guest, leases)) =
            GuestLeases::renew(folder, &self.guest, self.leases.as_ref())?
        {
            (self.guest, self.leases) = (guest, Some(leases));
        } else if self.leases.is_some() {
            (self.guest, self.leases) = (self.guest.without_pager()?, None);
        }
        Ok(self.leases.as_ref().map(Arc::as_ptr) != before)
    }

    /// Whether a region's file has been truncated.
    pub(super) fn is_truncated(&self) -> bool {
        self.guest.regions().iter().any(Region::is_truncated)
    }

    /// Adds a region; its file is mapped shared, for reading and writing. The loss of a page is
    /// reported to `owner`.
    pub(super) fn add(
        &mut self,
        layout: RegionLayout,
        file: File,
        owner: &Arc<MemoryOwner>,
    ) -> io::Result<()> {
        let RegionLayout { guest_address, length, user_address, file_offset } = layout;
        let invalid = |text: &str| io::Error::new(io::ErrorKind::InvalidInput, text.to_owned());
        if user_address.checked_add(length).is_none() {
            return Err(invalid("a memory region wraps around"));
        }
        if self.guest.length().saturating_add(length) > *ANNOUNCED {
            return Err(invalid(&format!(
                "a VMM may announce {} GiB of memory on this host, and this would be more",
                *ANNOUNCED >> 30
            )));
        }
        self.guest.add(guest_address, length, file, file_offset, owner)?;
        self.places.push(layout);
        Ok(())
    }

    /// Removes a region. Returns whether it existed.
    pub(super) fn remove(&mut self, guest_address: u64, length: u64) -> bool {
        self.places.retain(|place| (place.guest_address, place.length) != (guest_address, length));
        self.guest.remove(guest_address, length)
    }

    /// The guest-physical address of the byte at `user_address` in the front end's process.
    pub(super) fn guest_address(&self, user_address: u64) -> Option<GuestAddress> {
        self.places.iter().find_map(|place| {
            let offset = user_address.checked_sub(place.user_address)?;
            (offset < place.length).then(|| GuestAddress(place.guest_address + offset))
        })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A guest memory of `length` bytes at guest address 0 and front-end address `user_address`.
    pub(in crate::vhost_user) fn memory(length: u64, user_address: u64) -> Memory {
        let mut memory = Memory::default();
        let file = tempfile::tempfile().unwrap();
        file.set_len(length).unwrap();
        let layout = RegionLayout { guest_address: 0, length, user_address, file_offset: 0 };
        memory.add(layout, file, &Arc::default()).unwrap();
        memory
    }

    #[test]
    fn regions_have_addresses_of_the_vmm_and_of_the_guest() {
        let mut memory = memory(8192, 0x7000_0000);
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        let layout = RegionLayout {
            guest_address: 0x10_0000,
            length: 4096,
            user_address: 0x9000_0000,
            file_offset: 0,
        };
        let add = |memory: &mut Memory, layout| {
            memory.add(layout, file.try_clone().unwrap(), &Arc::default())
        };
        add(&mut memory, layout).unwrap();
        assert_eq!(memory.guest_address(0x9000_0010), Some(GuestAddress(0x10_0010)));
        assert_eq!(memory.guest_address(0x9000_1000), None);
        // A second region in the same place, and one that wraps around in the VMM.
        assert!(add(&mut memory, layout).is_err());
        let apart = RegionLayout { guest_address: 0x20_0000, ..layout };
        assert!(add(&mut memory, RegionLayout { user_address: u64::MAX - 100, ..apart }).is_err());
        assert_eq!(memory.guest().regions().len(), 2);
        assert!(memory.remove(0x10_0000, 4096));
        assert!(!memory.remove(0x10_0000, 4096));
        assert_eq!(memory.guest_address(0x9000_0010), None);
    }
}
