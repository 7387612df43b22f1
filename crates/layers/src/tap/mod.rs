//! Counters of a disk's requests, and events while a reader is attached.
//!
//! Each queue has a separate shard: [counters](TapSnapshot) and latency histograms, which are
//! always on, and a ring of [`Event`]s, which is filled while a [`TapReader`] is attached. Only the
//! queue's thread writes a shard, with plain stores. Two queues share no cache line that either of
//! them writes, and a slow or missing reader never delays a request. Without a reader, the events
//! cost a request one load.
//!
//! The clock is read at most once a round for all requests that arrive or complete together
//! ([`ObserverPosition::round_ns`]), and once again for a request that completes in the round in
//! which it arrived.

mod counters;
mod event;
mod snapshot;

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use fathom_block::{
    Capabilities, Layer, LayerPart, Observer, ObserverPosition, OpenContext, Outcome, Request,
};
use fathom_failure::Failure;
use fathom_insight::Ring;
use fathom_options::Key;
use parking_lot::{Mutex, MutexGuard};
use serde::{Deserialize, Serialize};

pub use counters::{SIZE_CLASSES, size_class, size_class_length_max};
pub use event::{EventType, operation_letter};
pub use fathom_insight::event::{Event, Labels};
pub use snapshot::{OperationSnapshot, SizeSnapshot, TapSnapshot};

use crate::kind::{LayerContext, LayerOptions, Rank};
use counters::{Counters, OPERATIONS};

/// The configuration of the layer `tap`. Only its position among the layers can be chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TapOptions {}

impl LayerOptions for TapOptions {
    const KIND: &'static str = "tap";
    const RANK: Rank = Rank::Count;
    const MEANING: &'static str = "counts and measures requests. By default it is above all layers but `classify`; name it to place it elsewhere";
    const KEYS: &'static [Key] = &[];
    const ONCE: Option<&'static str> = Some("it would count everything twice");

    fn make(&self, context: &LayerContext<'_>) -> Result<Option<Arc<dyn Layer>>, Failure> {
        Ok(context.shared(Self::KIND))
    }
}

/// The default capacity of a queue's ring, in events: 0.9 MiB, or a hundredth of a second
/// at 400,000 requests a second.
pub const RING_EVENTS: usize = 8192;

/// One queue's shard.
#[derive(Debug, Default)]
struct Shard {
    queue: u64,
    counters: Counters,
    /// Made when a reader is attached for the first time.
    ring: OnceLock<Ring<Event>>,
}

/// The shards of a disk.
#[derive(Debug, Default)]
struct Shards {
    open: Vec<Arc<Shard>>,
    /// Closed queues whose rings a reader has not yet emptied.
    closed: Vec<Arc<Shard>>,
    /// The counts of all closed queues.
    past: Counters,
    /// Events dropped by rings that no longer exist.
    dropped_past: u64,
    /// Events dropped by all rings before the current reader was attached.
    dropped_before: u64,
    attached: bool,
}

impl Shards {
    fn dropped(&self) -> u64 {
        let rings = self.open.iter().chain(&self.closed).filter_map(|shard| shard.ring.get());
        self.dropped_past + rings.map(Ring::dropped).sum::<u64>()
    }

    fn forget_closed(&mut self) {
        for shard in self.closed.drain(..) {
            self.dropped_past += shard.ring.get().map_or(0, Ring::dropped);
        }
    }
}

#[derive(Debug)]
struct Shared {
    /// Whether a reader is attached: the one word that each request loads.
    listening: AtomicBool,
    disk: u32,
    labels: Labels,
    ring_events: usize,
    shards: Mutex<Shards>,
}

impl Shared {
    fn shards(&self) -> MutexGuard<'_, Shards> {
        self.shards.lock()
    }
}

/// The layer that counts requests and emits events.
#[derive(Clone, Debug)]
pub struct Tap {
    shared: Arc<Shared>,
}

impl Tap {
    /// A tap whose events have the disk number `disk`, with rings of [`RING_EVENTS`].
    pub fn new(disk: u32, labels: Labels) -> Self {
        Self::with_ring(disk, labels, RING_EVENTS)
    }

    /// A tap with rings for at least `ring_events` events in each queue.
    pub fn with_ring(disk: u32, labels: Labels, ring_events: usize) -> Self {
        Self {
            shared: Arc::new(Shared {
                listening: AtomicBool::new(false),
                disk,
                labels,
                ring_events,
                shards: Mutex::default(),
            }),
        }
    }

    /// The disk number of the events.
    pub fn disk(&self) -> u32 {
        self.shared.disk
    }

    /// The labels of all events of the disk.
    pub fn labels(&self) -> &Labels {
        &self.shared.labels
    }

    /// Attaches a reader and begins to collect events; `None` while another reader is attached. A
    /// ring has only one reader, which copies the events if it serves several listeners.
    pub fn attach(&self) -> Option<TapReader> {
        let mut shards = self.shared.shards();
        if shards.attached {
            return None;
        }
        shards.attached = true;
        for ring in shards.open.iter().filter_map(|shard| shard.ring.get()) {
            ring.clear();
        }
        shards.dropped_before = shards.dropped();
        drop(shards);
        self.shared.listening.store(true, Ordering::Release);
        Some(TapReader { shared: Arc::clone(&self.shared) })
    }

    /// All counts since the tap was made. `now_ns` is the time by the clock of the stacks
    /// ([`Clock::System`](fathom_block::Clock) in the daemon).
    pub fn snapshot(&self, now_ns: u64) -> TapSnapshot {
        let mut snapshot = TapSnapshot { at_ns: now_ns, ..TapSnapshot::default() };
        let shards = self.shared.shards();
        snapshot.queues = shards.open.len();
        snapshot.add(&shards.past);
        let open = shards.open.clone();
        // A queue that closes after this is still counted once, because `open` holds its shard.
        drop(shards);
        for shard in open {
            snapshot.add(&shard.counters);
        }
        snapshot
    }

    /// The counts since the tap was made. This costs far less than a [snapshot](Self::snapshot),
    /// which copies the distributions of latencies.
    pub fn counts(&self) -> TapCounts {
        let shards = self.shared.shards();
        let mut counts = TapCounts::default();
        counts.add(&shards.past);
        shards.open.iter().for_each(|shard| counts.add(&shard.counters));
        counts
    }
}

/// The counts of a tap without times and sizes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TapCounts {
    /// Requests in flight.
    pub in_flight: u64,
    /// Completed requests of each operation, including failed ones.
    pub completed: [u64; OPERATIONS],
    /// The bytes of successful requests of each operation.
    pub bytes: [u64; OPERATIONS],
}

impl TapCounts {
    /// Completed requests of all operations.
    pub fn total(&self) -> u64 {
        self.completed.iter().sum()
    }

    fn add(&mut self, counters: &Counters) {
        self.in_flight += counters.in_flight.load(Ordering::Relaxed);
        for index in 0..OPERATIONS {
            for cell in &counters.cells[index] {
                self.completed[index] += cell.count.load(Ordering::Relaxed);
                self.bytes[index] += cell.bytes.load(Ordering::Relaxed);
            }
            for errors in &counters.errors[index] {
                self.completed[index] += errors.load(Ordering::Relaxed);
            }
        }
    }
}

impl Layer for Tap {
    fn name(&self) -> &'static str {
        "tap"
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        below
    }

    fn open_queue(&self, context: &mut OpenContext<'_>) -> io::Result<LayerPart> {
        let shard = Arc::new(Shard { queue: context.queue(), ..Shard::default() });
        self.shared.shards().open.push(Arc::clone(&shard));
        Ok(LayerPart::observer(TapQueue { shared: Arc::clone(&self.shared), shard }))
    }
}

struct TapQueue {
    shared: Arc<Shared>,
    shard: Arc<Shard>,
}

impl TapQueue {
    fn has_reader(&self) -> bool {
        self.shared.listening.load(Ordering::Relaxed)
    }

    /// Puts an event into the ring. Not inlined, because usually no reader is attached.
    #[inline(never)]
    fn push_event(&self, request: &Request, outcome: Option<Outcome>, now_ns: u64) {
        let event = event::record(request, outcome, self.shared.disk, self.shard.queue, now_ns);
        self.shard.ring.get_or_init(|| Ring::new(self.shared.ring_events)).push(event);
    }
}

impl Drop for TapQueue {
    fn drop(&mut self) {
        let mut shards = self.shared.shards();
        shards.past.merge(&self.shard.counters);
        shards.open.retain(|shard| !Arc::ptr_eq(shard, &self.shard));
        shards.closed.push(Arc::clone(&self.shard));
        if !shards.attached {
            shards.forget_closed();
        }
    }
}

impl Observer for TapQueue {
    fn down(&mut self, requests: &mut [Box<Request>], place: ObserverPosition<'_>) {
        let now_ns = place.round_ns();
        self.shard.counters.begin(requests.len() as u64, now_ns);
        let has_reader = self.has_reader();
        for request in requests {
            *place.observe(request).word() = now_ns;
            if has_reader {
                self.push_event(request, None, now_ns);
            }
        }
    }

    /// Counts adjacent requests with equal keys in one step: requests that arrived together often
    /// have equal keys.
    fn up(&mut self, mut requests: &mut [(Box<Request>, Outcome)], place: ObserverPosition<'_>) {
        let mut now_ns = place.round_ns();
        while let Some((first, outcome)) = requests.first() {
            let key = |request: &Request| (place.word(request), request.length, request.operation);
            let (outcome, of_first) = (*outcome, key(first));
            let (start_ns, length, operation) = of_first;
            if now_ns == start_ns {
                now_ns = place.now_ns();
            }
            let alike =
                |each: &&(Box<Request>, Outcome)| key(&each.0) == of_first && each.1 == outcome;
            let count = 1 + requests[1..].iter().take_while(alike).count();
            self.shard.counters.end(count as u64, operation, length, outcome, start_ns, now_ns);
            let (done, rest) = requests.split_at_mut(count);
            if self.has_reader() {
                for (request, outcome) in done {
                    self.push_event(request, Some(*outcome), now_ns);
                }
            }
            requests = rest;
        }
    }
}

/// The only reader of a tap's events. Dropping it ends the collection.
#[derive(Debug)]
pub struct TapReader {
    shared: Arc<Shared>,
}

impl TapReader {
    /// Moves the events of all queues into `events`: queue by queue, in order within each queue. A
    /// caller that needs them in order of time has to merge them.
    ///
    /// A response may occur without its request, if the request was queued before the reader was
    /// attached, or if its event was dropped.
    pub fn drain(&mut self, events: &mut Vec<Event>) {
        let mut shards = self.shared.shards();
        for ring in shards.open.iter().chain(&shards.closed).filter_map(|shard| shard.ring.get()) {
            ring.drain(events);
        }
        shards.forget_closed();
    }

    /// The number of events dropped because of a full ring since the reader was attached.
    pub fn dropped(&self) -> u64 {
        let shards = self.shared.shards();
        shards.dropped() - shards.dropped_before
    }

    /// The labels of all events of the disk.
    pub fn labels(&self) -> &Labels {
        &self.shared.labels
    }
}

impl Drop for TapReader {
    fn drop(&mut self) {
        self.shared.listening.store(false, Ordering::Relaxed);
        let mut shards = self.shared.shards();
        shards.attached = false;
        shards.forget_closed();
    }
}
