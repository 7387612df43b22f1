//! Measures the cost of the layer `offload` at rest: nanoseconds per read with and without it.
//!
//! ```text
//! cargo run --release -p fathom-layers --example offload_cost
//! ```

mod support;

use std::sync::Arc;

use fathom_backend::Memory;
use fathom_block::{Backend, Layer};
use fathom_layers::Offload;
use fathom_layers::offload::OffloadOptions;
use fathom_layers::wal::{Completion, LogVolume, WalOptions};
use fathom_persistence::Identity;
use fathom_reactor::Reactor;

use support::{CAPACITY, Variant};

/// The bytes of the log.
const LOG: u64 = 16 << 20;

/// The layer at rest, with room for copies of so many bytes.
fn offload(copies: u64) -> Arc<dyn Layer> {
    let memory: Arc<dyn Backend> = Arc::new(Memory::new(LOG + copies));
    let options = WalOptions {
        name: "disk".into(),
        home: "image".into(),
        home_capacity: CAPACITY,
        home_alignment: 1,
        offset: 0,
        size: LOG,
        block_size: 4096,
        identity: Identity(*b"identity of test"),
        age_ns: u64::MAX,
        completion: Completion::Durable,
        expected: None,
        mark: None,
        times: None,
        home_store: fathom_layers::wal::HomeStore::default(),
        clock_start_ns: 0,
    };
    let settings = OffloadOptions { copies, ..OffloadOptions::default() };
    Arc::new(Offload::open(&Arc::new(LogVolume::new(memory)), &options, settings).expect("a log"))
}

fn main() {
    let mut reactor = Reactor::new(8).expect("an io_uring");
    for backend in support::backends() {
        let mut open = |name, layer: Option<Arc<dyn Layer>>| {
            Variant::new(name, layer.into_iter().collect(), &backend, None, &mut reactor)
        };
        let mut variants = [
            open("without", None),
            open("offload", Some(offload(0))),
            open("offload, with copies", Some(offload(16 << 20))),
        ];
        support::compare(&*backend, &mut variants, &mut reactor);
    }
}
