//! A pool in a simulated device.

#![allow(dead_code, reason = "each test uses a part of it")]

pub mod hints;
pub mod pairs;
pub mod storm;

use std::sync::{Arc, OnceLock};

use fathom_block::{Backend, Disk, DiskOptions, Layer};
use fathom_persistence::Identity;
use fathom_sim::{OneRequest, SimBackend, SimOptions};
use fathom_store::{MakeOptions, Pool, PoolOptions, make};

/// The size of the device and of the volume, in bytes.
pub const DEVICE: u64 = 2 << 20;
pub const VOLUME: u64 = 256 << 10;

pub fn options() -> PoolOptions {
    PoolOptions {
        checkpoint_ns: 30_000,
        walk_pause_ns: 1000,
        cached_pages: 16,
        ..PoolOptions::default()
    }
}

/// A device with an empty pool.
pub fn blank() -> Vec<u8> {
    static IMAGE: OnceLock<Vec<u8>> = OnceLock::new();
    IMAGE.get_or_init(|| blank_of(DEVICE)).clone()
}

/// A device of `capacity` bytes with an empty pool.
pub fn blank_of(capacity: u64) -> Vec<u8> {
    let device = Arc::new(SimBackend::new(fast(capacity), 0));
    let identity = Identity(*b"identity of test");
    let options =
        MakeOptions { capacity_max: capacity, segment_blocks: 16, identity, key: [7; 32] };
    make(&(Arc::clone(&device) as Arc<dyn Backend>), &options, |_| {}).unwrap();
    device.image()
}

pub fn fast(capacity: u64) -> SimOptions {
    SimOptions { rounds_max: 0, ..SimOptions::new(capacity) }
}

/// Opens the pool in an image that a crash has left.
pub fn reopen(image: &[u8]) -> Pool {
    let device = SimBackend::with_image(fast(image.len() as u64), 0, image.to_vec());
    Pool::open(Arc::new(device), options()).expect("a pool that can be recovered")
}

pub fn disk(backend: Arc<dyn Backend>) -> Arc<Disk> {
    disk_under(Vec::new(), backend)
}

pub fn disk_under(layers: Vec<Arc<dyn Layer>>, backend: Arc<dyn Backend>) -> Arc<Disk> {
    Disk::new(DiskOptions::default(), layers, backend).unwrap()
}

/// The whole content of a back end.
pub fn content(backend: Arc<dyn Backend>) -> Vec<u8> {
    let capacity = backend.capacity();
    let mut queue = OneRequest::open(&disk(backend));
    let mut content = Vec::with_capacity(capacity as usize);
    for at in (0..capacity).step_by(64 << 10) {
        content.extend(queue.read(at, (capacity - at).min(64 << 10)).expect("a sound read"));
    }
    content
}
