//! Processes that wait for pages in write-back.

use super::SyntheticGuest;
use crate::synthetic::Shape;

#[test]
fn a_process_that_waits_for_write_back_is_found() {
    for shape in [Shape::default(), Shape::recent(), Shape::seven()] {
        let synthetic = SyntheticGuest::new(&shape);
        let guest = synthetic.guest();
        let kernel = guest.kernel().unwrap();
        let page = synthetic.linux.request("data").pieces[0].0;
        let flags = kernel.layout.page_flags;
        let structure = kernel.space.walk(&kernel.memory, kernel.page_of(page)).unwrap() + flags;
        let clean = kernel.memory.u64(structure).unwrap();
        let set = |bits: u64| synthetic.store.write_u64(structure, bits);
        let (writeback, waiters) =
            (kernel.places.writeback_bit.unwrap(), kernel.places.waiters_bit.unwrap());
        let others = [page ^ 4096, 1 << 60, u64::MAX];
        let is_awaited = || guest.is_awaited(&mut others.into_iter().chain([page + 512]));
        assert!(!is_awaited());
        set(clean | 1 << writeback | 1 << waiters);
        assert!(is_awaited());
        // A process may also wait for the lock of a page.
        set((clean | 1 << waiters) & !(1 << writeback));
        assert!(!is_awaited());
        set((clean | 1 << writeback) & !(1 << waiters));
        assert!(!is_awaited());
    }
}
