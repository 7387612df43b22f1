//! Measures the cost of the layer `cache` above a disk in memory: nanoseconds per request without it,
//! for hits, and for misses that insert their blocks.
//!
//! ```text
//! cargo run --release -p fathom-layers --example cache_cost
//! ```

mod support;

use std::io;
use std::sync::Arc;

use fathom_backend::Memory;
use fathom_block::{Backend, Layer};
use fathom_cache::Policy;
use fathom_layers::Passthrough;
use fathom_layers::cache::{
    Cache, CacheDisk, CacheMark, CacheMode, CacheTimes, CacheVolume, VolumeOptions,
};
use fathom_reactor::Reactor;

use support::{CAPACITY, Variant};

/// A cache in memory ends with the process.
struct NoMark;

impl CacheMark for NoMark {
    fn reject(&self) -> io::Result<()> {
        Ok(())
    }
}

fn cache(size: u64, policy: Policy, mode: CacheMode) -> Arc<Cache> {
    let options = VolumeOptions {
        identity: [0; 16],
        block_size: 16 << 10,
        disks: 2,
        bitmap_pages: 1,
        is_kept: false,
        policy,
        times: CacheTimes::default(),
    };
    let store = Arc::new(Memory::new(size));
    let volume = Arc::new(CacheVolume::open(store, &options).expect("a cache"));
    let (name, home) = ("disk".to_owned(), String::new());
    let disk = CacheDisk { name, home, capacity: CAPACITY, generation: 0, region_shift: 20 };
    Arc::new(Cache::new(&volume, &disk, mode, Arc::new(NoMark)).expect("a disk"))
}

fn main() {
    let mut reactor = Reactor::new(8).expect("an io_uring");
    let backend = Arc::new(Memory::new(CAPACITY)) as Arc<dyn Backend>;
    let (all, little) = (CAPACITY * 5 / 4, 1 << 20);
    let through = CacheMode::WriteThrough;
    let mut open = |name, layer: Option<Arc<dyn Layer>>| {
        Variant::new(name, layer.into_iter().collect(), &backend, None, &mut reactor)
    };
    let mut variants = [
        open("without", None),
        open("passthrough", Some(Arc::new(Passthrough))),
        open("hits, none", Some(cache(all, Policy::None, through))),
        open("hits, sky", Some(cache(all, Policy::Sky, through))),
        open("hits, auto", Some(cache(all, Policy::Auto, through))),
        open("misses, read-only", Some(cache(little, Policy::None, CacheMode::ReadOnly))),
        open("misses, none", Some(cache(little, Policy::None, through))),
        open("misses, auto", Some(cache(little, Policy::Auto, through))),
    ];
    support::compare(&*backend, &mut variants, &mut reactor);
}
