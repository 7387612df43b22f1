//! A cache that outlives its daemon: the mark of its image, and the load on its disk.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fathom_block::Disk;
use fathom_layers::cache::{CacheDisk, CacheMark};
use fathom_persistence::{Identity, Stamp};
use fathom_sim::{Harness, HarnessOptions};

/// The identity of the cache.
pub const IDENTITY: Identity = Identity(*b"identity of test");

/// The size of a region, as its binary logarithm.
pub const REGION_SHIFT: u8 = 15;

/// A disk of the cache with a log of this identity, or [`Identity::NONE`].
/// Its image has the generation 7, as the cache has.
pub fn disk(capacity: u64, log: Identity) -> CacheDisk {
    CacheDisk {
        name: "disk".into(),
        home: "image".into(),
        capacity,
        expected: Some(7),
        modified_ns: None,
        generation: 7,
        log,
        changes: Vec::new(),
        region_shift: REGION_SHIFT,
    }
}

/// The state of the image that the cache belongs to.
pub struct Mark(pub AtomicU64);

impl CacheMark for Mark {
    fn read(&self) -> io::Result<Option<Stamp>> {
        let generation = self.0.load(Ordering::Relaxed);
        Ok(Some(Stamp { identity: IDENTITY, age: generation }))
    }

    fn write(&self, state: &Stamp) -> io::Result<()> {
        self.0.store(state.age, Ordering::Relaxed);
        Ok(())
    }

    fn modified_ns(&self) -> io::Result<u64> {
        Ok(0)
    }

    fn reject(&self) -> io::Result<()> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

/// One to four queues of `disk`, by seed, in simulated time.
pub fn harness(disk: &Arc<Disk>, seed: u64) -> Harness {
    let (queues, depth) = (1 + seed as usize % 4, 1 + (seed as usize * 5) % 16);
    Harness::new(disk, &HarnessOptions { queues, depth, simulated: true }, seed)
}
