//! A slower disk.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fathom_block::{
    Capabilities, Crossing, Layer, LayerPart, LayerQueue, OpenContext, Operation, Outcome, Request,
};
use fathom_options::Nanoseconds;
use serde::{Deserialize, Serialize};

use crate::generator;
use crate::kind::{Key, LayerContext, LayerOptions, Operations};

/// The configuration of a layer that makes requests take longer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DelayOptions {
    /// How much longer each takes.
    pub time: Nanoseconds,
    /// How much longer still, at most: drawn evenly for each request.
    pub jitter: Nanoseconds,
    /// The operations that are delayed.
    #[serde(skip_serializing_if = "Operations::is_default")]
    pub operations: Operations,
    /// Makes the draws repeatable.
    pub seed: u64,
}

impl LayerOptions for DelayOptions {
    const KIND: &'static str = "delay";
    const MEANING: &'static str = "makes requests take longer";
    const KEYS: &'static [Key] = &[
        Key::new("time", "0", "how much longer each takes"),
        Key::new("jitter", "0", "up to how much longer still, drawn evenly"),
        Key::new("operations", "[]", "the operations that are delayed; all where none is named"),
        Key::new("seed", "0", "makes the draws repeatable"),
    ];

    fn make(&self, _: &LayerContext<'_>) -> io::Result<Option<Arc<dyn Layer>>> {
        let layer = Delay::new(self.seed);
        let time = DelayTime { fixed_ns: self.time.0, jitter_ns: self.jitter.0 };
        for operation in self.operations.meant() {
            layer.set(*operation, time);
        }
        Ok(Some(Arc::new(layer)))
    }
}

/// How much time an operation loses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DelayTime {
    /// What every request waits, in nanoseconds.
    pub fixed_ns: u64,
    /// Up to how much more it waits, evenly distributed by seed, in nanoseconds.
    pub jitter_ns: u64,
}

impl DelayTime {
    /// A wait of `fixed_ns` nanoseconds, always.
    pub fn fixed(fixed_ns: u64) -> Self {
        Self { fixed_ns, jitter_ns: 0 }
    }
}

/// The times of all operations, which can change while requests are under way.
#[derive(Debug, Default)]
struct Times {
    fixed_ns: [AtomicU64; Operation::ALL.len()],
    jitter_ns: [AtomicU64; Operation::ALL.len()],
}

/// A layer that lets requests wait on their way down.
///
/// Requests that wait do not wait for each other, so with jitter they reach the part below in
/// another order than they came: whatever a guest has in flight at once has no order.
#[derive(Debug)]
pub struct Delay {
    times: Arc<Times>,
    seed: u64,
}

impl Delay {
    /// A layer that delays nothing yet. `seed` determines all jitter.
    pub fn new(seed: u64) -> Self {
        Self { times: Arc::default(), seed }
    }

    /// A layer that delays every operation by `time`.
    pub fn every(time: DelayTime, seed: u64) -> Self {
        let delay = Self::new(seed);
        for operation in Operation::ALL {
            delay.set(operation, time);
        }
        delay
    }

    /// Delays `operation` by `time` from now on, on all queues.
    pub fn set(&self, operation: Operation, time: DelayTime) {
        self.times.fixed_ns[operation as usize].store(time.fixed_ns, Ordering::Relaxed);
        self.times.jitter_ns[operation as usize].store(time.jitter_ns, Ordering::Relaxed);
    }

    /// By how much `operation` is delayed.
    pub fn time(&self, operation: Operation) -> DelayTime {
        DelayTime {
            fixed_ns: self.times.fixed_ns[operation as usize].load(Ordering::Relaxed),
            jitter_ns: self.times.jitter_ns[operation as usize].load(Ordering::Relaxed),
        }
    }
}

impl Layer for Delay {
    fn name(&self) -> &'static str {
        "delay"
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        below
    }

    fn open_queue(&self, context: &mut OpenContext<'_>) -> io::Result<LayerPart> {
        let random = generator(self.seed, context.queue());
        Ok(LayerPart::queue(DelayQueue { times: Arc::clone(&self.times), random }))
    }
}

struct DelayQueue {
    times: Arc<Times>,
    random: fastrand::Rng,
}

impl LayerQueue for DelayQueue {
    fn submit(&mut self, request: Box<Request>, next: &mut Crossing<'_>) {
        let operation = request.operation as usize;
        let mut wait_ns = self.times.fixed_ns[operation].load(Ordering::Relaxed);
        let jitter_ns = self.times.jitter_ns[operation].load(Ordering::Relaxed);
        if jitter_ns > 0 {
            wait_ns = wait_ns.saturating_add(self.random.u64(0..=jitter_ns));
        }
        if wait_ns == 0 {
            next.submit(request);
        } else {
            let deadline_ns = next.now_ns().saturating_add(wait_ns);
            next.hold(request, None, deadline_ns);
        }
    }

    fn complete(&mut self, request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        next.complete(request, outcome);
    }
}
