//! Measures the cost of the tap: nanoseconds per request with and without it.
//!
//! ```text
//! cargo run --release -p fathom-layers --example tap_cost
//! ```

mod support;

use std::sync::Arc;

use fathom_block::Layer;
use fathom_layers::tap::Labels;
use fathom_layers::{Passthrough, Tap};
use fathom_reactor::Reactor;

use support::Variant;

fn main() {
    let mut reactor = Reactor::new(8).expect("an io_uring");
    for backend in support::backends() {
        let mut open = |name, layer: Option<Arc<dyn Layer>>, reader| {
            Variant::new(name, layer.into_iter().collect(), &backend, reader, &mut reactor)
        };
        let tap = Arc::new(Tap::new(0, Labels::default()));
        let with_reader = Arc::new(Tap::new(0, Labels::default()));
        let reader = with_reader.attach();
        let mut variants = [
            open("without", None, None),
            open("passthrough", Some(Arc::new(Passthrough)), None),
            open("tap", Some(tap), None),
            open("tap, with a reader", Some(with_reader), reader),
        ];
        support::compare(&*backend, &mut variants, &mut reactor);
    }
}
