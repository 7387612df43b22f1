//! A layer that delays requests.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fathom_block::{
    Capabilities, Crossing, ErrorKind, Layer, LayerPart, LayerQueue, OpenContext, Operation,
    Outcome, Request,
};
use fathom_failure::Failure;
use fathom_options::{Key, Nanoseconds};
use serde::{Deserialize, Serialize};

use crate::generator;
use crate::kind::{LayerContext, LayerOptions, Operations, Rank};

/// The configuration of a layer that delays requests.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DelayOptions {
    /// The fixed delay of each request.
    pub time: Nanoseconds,
    /// The most additional delay, drawn evenly for each request.
    pub jitter: Nanoseconds,
    /// The delayed operations.
    #[serde(skip_serializing_if = "Operations::is_default")]
    pub operations: Operations,
    /// The seed of the random delays.
    pub seed: u64,
}

impl LayerOptions for DelayOptions {
    const KIND: &'static str = "delay";
    const RANK: Rank = Rank::Trial;
    const MEANING: &'static str = "delays requests";
    const KEYS: &'static [Key] = &[
        Key::new("time", "0", "the delay of each request"),
        Key::new("jitter", "0", "the most additional delay, drawn evenly for each request"),
        Key::new("operations", "[]", "the delayed operations; all by default"),
        Key::new("seed", "0", "the seed of the random delays"),
    ];

    fn make(&self, _: &LayerContext<'_>) -> Result<Option<Arc<dyn Layer>>, Failure> {
        let layer = Delay::new(self.seed);
        let time = DelayTime { fixed_ns: self.time.0, jitter_ns: self.jitter.0 };
        for operation in self.operations.selected() {
            layer.set(*operation, time);
        }
        Ok(Some(Arc::new(layer)))
    }
}

/// The delay of an operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DelayTime {
    /// The fixed delay, in nanoseconds.
    pub fixed_ns: u64,
    /// The most additional delay, drawn evenly by seed, in nanoseconds.
    pub jitter_ns: u64,
}

impl DelayTime {
    /// A fixed delay of `fixed_ns` nanoseconds.
    pub fn fixed(fixed_ns: u64) -> Self {
        Self { fixed_ns, jitter_ns: 0 }
    }
}

/// The delays of all operations, which can change while requests are in flight.
#[derive(Debug, Default)]
struct Times {
    fixed_ns: [AtomicU64; Operation::ALL.len()],
    jitter_ns: [AtomicU64; Operation::ALL.len()],
}

/// A layer that holds requests on their way down.
///
/// Delayed requests do not wait for each other, so with jitter they may reach the part below out of
/// order. That is permitted, because requests in flight at the same time have no order.
#[derive(Debug)]
pub struct Delay {
    times: Arc<Times>,
    seed: u64,
}

impl Delay {
    /// A layer without delays. `seed` determines all jitter.
    pub fn new(seed: u64) -> Self {
        Self { times: Arc::default(), seed }
    }

    /// A layer that delays all operations by `time`.
    pub fn every(time: DelayTime, seed: u64) -> Self {
        let delay = Self::new(seed);
        for operation in Operation::ALL {
            delay.set(operation, time);
        }
        delay
    }

    /// Delays `operation` by `time` after this call, in all queues.
    pub fn set(&self, operation: Operation, time: DelayTime) {
        self.times.fixed_ns[operation as usize].store(time.fixed_ns, Ordering::Relaxed);
        self.times.jitter_ns[operation as usize].store(time.jitter_ns, Ordering::Relaxed);
    }

    /// The delay of `operation`.
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

    fn withdraw_held(
        &mut self,
        request: Box<Request>,
        _: Option<Outcome>,
        next: &mut Crossing<'_>,
    ) -> Option<Box<Request>> {
        if request.flags.is_work_of_layers() {
            return Some(request);
        }
        next.complete(request, Err(ErrorKind::Withdrawn));
        None
    }
}
