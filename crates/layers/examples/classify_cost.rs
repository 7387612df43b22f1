//! Measures the cost of the layer `classify` without a known guest, and the additional cost of
//! accounting, in nanoseconds per request. (The crate `introspect` measures the cost of reading a
//! guest's memory.)
//!
//! ```text
//! cargo run --release -p fathom-layers --example classify_cost
//! ```

mod support;

use std::io;
use std::sync::Arc;

use fathom_block::{
    Capabilities, Crossing, Facts, GuestAddress, Kind, Layer, LayerPart, LayerQueue, OpenContext,
    Outcome, Part, Request,
};
use fathom_insight::ClassTable;
use fathom_layers::classify::UsageOptions;
use fathom_layers::tap::Labels;
use fathom_layers::{Classify, GuestSlot, Tap};
use fathom_reactor::Reactor;

use support::Variant;

/// A layer that sets the file of each request, or a file for each half of it. The files rotate
/// through `files` numbers.
#[derive(Clone, Copy)]
struct Oracle {
    files: u64,
    halves: bool,
    next: u64,
}

impl Oracle {
    fn layer(files: u64, halves: bool) -> Arc<dyn Layer> {
        Arc::new(Self { files, halves, next: 0 })
    }

    fn facts(&mut self) -> Facts {
        self.next += 1;
        Facts { kind: Kind::Data, inode: 1 + self.next % self.files, ..Facts::default() }
    }
}

impl Layer for Oracle {
    fn name(&self) -> &'static str {
        "oracle"
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        below
    }

    fn open_queue(&self, _context: &mut OpenContext<'_>) -> io::Result<LayerPart> {
        Ok(LayerPart::queue(*self))
    }
}

impl LayerQueue for Oracle {
    fn submit(&mut self, mut request: Box<Request>, next: &mut Crossing<'_>) {
        // Requests of a guest have a header.
        request.header = Some(GuestAddress(4096));
        if self.files > 0 {
            request.insight.facts = self.facts();
            if self.halves {
                let half = request.length / 2;
                for offset in [0, half] {
                    let facts = self.facts();
                    request.insight.parts.push(Part {
                        offset,
                        length: half,
                        facts,
                        file_offset: None,
                    });
                }
            }
        }
        next.submit(request);
    }

    fn complete(&mut self, request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        next.complete(request, outcome);
    }
}

fn classify() -> Arc<dyn Layer> {
    let slot = Arc::new(GuestSlot::new());
    let options = UsageOptions::default();
    Arc::new(Classify::new(slot, ClassTable::default(), Arc::default(), options))
}

fn main() {
    let mut reactor = Reactor::new(8).expect("an io_uring");
    for backend in support::backends() {
        let mut open = |name, layers| Variant::new(name, layers, &backend, None, &mut reactor);
        let tap = || -> Arc<dyn Layer> { Arc::new(Tap::new(0, Labels::default())) };
        let nothing = || Oracle::layer(0, false);
        let mut variants = [
            open("without", vec![nothing()]),
            open("classify", vec![nothing(), classify()]),
            open("tap", vec![nothing(), tap()]),
            open("classify and tap", vec![nothing(), classify(), tap()]),
            open("and a file", vec![Oracle::layer(1, false), classify(), tap()]),
            open("and a thousand files", vec![Oracle::layer(1000, false), classify(), tap()]),
            open("and ever new files", vec![Oracle::layer(u64::MAX, false), classify(), tap()]),
            open("and two files in each", vec![Oracle::layer(1000, true), classify(), tap()]),
        ];
        support::compare(&*backend, &mut variants, &mut reactor);
    }
}
