//! Measures the cost of the layer `cache` above a disk in memory: nanoseconds per request without
//! it, for hits, and for misses that insert their blocks.
//!
//! ```text
//! cargo run --release -p fathom-layers --example cache_cost
//! ```

mod support;

use std::sync::Arc;

use fathom_backend::Memory;
use fathom_block::{Backend, Clock, Disk, DiskOptions, Layer, Operation};
use fathom_cache::Policy;
use fathom_layers::Passthrough;
use fathom_layers::cache::{
    Cache, CacheDisk, CacheMode, CacheTimes, CacheVolume, NoMark, VolumeOptions,
};
use fathom_persistence::Identity;
use fathom_reactor::Reactor;

use support::{CAPACITY, Variant};

fn cache(size: u64, policy: Policy, mode: CacheMode) -> Arc<Cache> {
    let options = VolumeOptions {
        identity: Some(Identity([0; 16])),
        block_size: 16 << 10,
        disks: 2,
        bitmap_pages: 1,
        is_kept: false,
        policy,
        times: CacheTimes::default(),
    };
    let store = Arc::new(Memory::new(size));
    let volume = Arc::new(CacheVolume::open(store, &options).expect("a cache"));
    let disk = CacheDisk::in_memory("disk", CAPACITY);
    Arc::new(Cache::new(&volume, &disk, mode, Arc::new(NoMark)).expect("a disk"))
}

/// Writes the disk, because memory that was never written is read faster.
fn write(backend: &Arc<dyn Backend>, reactor: &mut Reactor) {
    let disk = Disk::new(DiskOptions::default(), Vec::new(), Arc::clone(backend));
    let disk = disk.expect("no layers");
    let mut stack = disk.open_queue(reactor, Clock::System).expect("a queue");
    for offset in (0..CAPACITY).step_by(1 << 20) {
        let mut request = stack.request();
        (request.operation, request.offset, request.length) = (Operation::Write, offset, 1 << 20);
        request.buffers.allocate(1 << 20);
        if let Some(bytes) = request.buffers.owned_mut() {
            bytes.fill(0x5a);
        }
        stack.submit(request, reactor);
        while let Some((request, outcome)) = stack.completed() {
            outcome.expect("a write");
            stack.recycle(request);
        }
    }
}

fn main() {
    let mut reactor = Reactor::new(8).expect("an io_uring");
    let [_, backend, _] = support::backends();
    write(&backend, &mut reactor);
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
