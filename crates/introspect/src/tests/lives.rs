//! Files that were seen before.

use super::SyntheticGuest;
use crate::lives::FileState;
use crate::synthetic::Shape;

#[test]
fn a_file_that_was_seen_before_is_there_or_deleted_or_gone() {
    for shape in [Shape::default(), Shape::recent(), Shape::seven()] {
        let synthetic = SyntheticGuest::new(&shape);
        let guest = synthetic.guest();
        let kernel = guest.kernel().unwrap();
        let files = kernel.cached_files(&synthetic.names);
        let file = files.iter().map(|file| file.facts).find(|facts| facts.inode > 100).unwrap();
        let (address, number) = (file.inode_address, file.inode);
        let state = || kernel.file_state(address, number);
        let Some(FileState::Present(present)) = state() else { panic!("{:?}", state()) };
        assert_eq!(present.size, file.file_size);
        assert_eq!(present.generation, number as u32 ^ 0x5555);
        assert_eq!(kernel.file_state(address, number + 1), Some(FileState::Gone));
        assert_eq!(kernel.file_state(0, number), None);
        assert_eq!(kernel.file_state(address + 1, number), None);
        // Three seconds of 250 ticks.
        assert_eq!(kernel.dirty_for_ns(address), Some(3_000_000_000));
        let physical = |place: Option<u64>| kernel.physical(address + place.unwrap()).unwrap();
        let dirtied = physical(kernel.layout.inode_dirtied);
        let now = kernel.u64(kernel.places.ticks.unwrap()).unwrap();
        for (value, age) in
            [(now, Some(0)), (now + 1, None), (now - 250 * 3601, None), (u64::MAX, None)]
        {
            synthetic.store.write_u64(dirtied, value);
            assert_eq!(kernel.dirty_for_ns(address), age);
        }
        // The kernel evicts it from its memory.
        synthetic.store.write_u64(physical(kernel.layout.inode_hashed), 0);
        assert_eq!(state(), Some(FileState::Gone));
        synthetic.store.write(physical(kernel.layout.inode_links), &[0; 4]);
        assert_eq!(state(), Some(FileState::Deleted));
    }
}
