//! The tunables of write-back: read, and replaced only where they are certain.

use super::SyntheticGuest;
use crate::kernel::Kernel;
use crate::synthetic::Shape;
use crate::tunables::{TunableError, Tunables};

fn attached(guest: &SyntheticGuest, writable: bool) -> Kernel {
    let mut memory = guest.memory.clone();
    if !writable {
        memory = memory.read_only();
    }
    Kernel::attach(&memory, Some(guest.header())).unwrap()
}

/// The guest-physical address of `dirty_expire_interval`.
fn place(kernel: &Kernel) -> u64 {
    let [expire, _] = kernel.tunable_addresses().map(Option::unwrap);
    kernel.physical(expire).unwrap()
}

#[test]
fn the_time_is_replaced_only_where_it_has_the_expected_value() {
    let guest = SyntheticGuest::new(&Shape::default());
    let kernel = attached(&guest, true);
    let tunables = |dirty_expire| Some(Tunables { dirty_expire, dirty_writeback: 500 });
    assert_eq!(kernel.tunables(), tunables(3000));
    assert_eq!(kernel.replace_dirty_expire(2999, 1), Err(TunableError::Other(3000)));
    assert_eq!(kernel.tunables(), tunables(3000), "nothing was written");
    assert_eq!(kernel.replace_dirty_expire(3000, 1), Ok(()));
    assert_eq!(kernel.tunables(), tunables(1));
    assert_eq!(kernel.replace_dirty_expire(1, 3000), Ok(()));
    assert_eq!(kernel.tunables(), tunables(3000));
}

#[test]
fn memory_that_is_only_readable_is_not_written() {
    let guest = SyntheticGuest::new(&Shape::default());
    let kernel = attached(&guest, false);
    assert_eq!(kernel.replace_dirty_expire(3000, 1), Err(TunableError::Unknown));
    assert_eq!(kernel.tunables().unwrap().dirty_expire, 3000);
}

#[test]
fn an_implausible_value_and_a_lost_kernel_are_not_written() {
    let guest = SyntheticGuest::new(&Shape::default());
    let kernel = attached(&guest, true);
    let place = place(&kernel);
    guest.store.write_u64(place, 0x0100_0000);
    assert_eq!(kernel.tunables(), None);
    assert_eq!(kernel.replace_dirty_expire(0x0100_0000, 1), Err(TunableError::Unknown));
    guest.store.write_u64(place, 3000);
    assert!(kernel.tunables().is_some());
    // The guest has booted another kernel over the note.
    for address in (0..guest.memory.end()).step_by(4096) {
        if guest.memory.contains(address) {
            guest.store.write(address, &[0; 4096]);
        }
    }
    assert_eq!(kernel.tunables(), None);
    assert_eq!(kernel.replace_dirty_expire(0, 1), Err(TunableError::Unknown));
}
