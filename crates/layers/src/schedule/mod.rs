//! The order in which the requests of many disks use one device.
//!
//! Requests that a process waits for are first; background requests are held back while such
//! requests are at the device, within a bound of time and of amount. Disks, and control groups of a
//! guest, share the device by their weights. `docs/shared-disks.md` describes the rules.
//!
//! - `need`: whether a process waits for a request.
//! - `guard`: how much lighter disks may delay a heavier one.
//! - `held`: held requests, and what releases them before their time.
//! - `think`: how long a quiet device stays quiet.
//! - `pace`: how long background work keeps a device busy.
//! - `device`: a device, the disks on it and their queues.
//! - `state`: the rules that the disks of a device share.
//! - `order`: which lane is next.
//! - `pieces`: large requests, which are passed on in pieces.
//! - `rank`: the disk with the least tag, of many.
//! - `requests`: the requests of a queue that are not at the device.
//! - `queue`: the part in one queue.
//! - `options`: the configuration.

mod device;
mod guard;
mod held;
mod need;
mod options;
mod order;
mod pace;
mod pieces;
mod queue;
mod rank;
mod requests;
mod sent;
mod state;
mod think;

use std::any::Any;
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use fathom_block::{
    Capabilities, Figure, HeldBy, Layer, LayerCause, LayerPart, LayerProblem, LayerReport,
    OpenContext, Request,
};
use fathom_insight::{Name, Names, Waiters};
use parking_lot::Mutex;
use wildmatch::WildMatch;

use device::{Device, Place};
use held::{Index, Release};
pub use options::ScheduleOptions;
use queue::ScheduleQueue;
use sent::Sent;
use state::{Flow, WEIGHT};

/// The most control groups whose weights a queue caches.
const REMEMBERED_MAX: usize = 4096;

/// The devices on which disks lie, by name. A device exists while a disk uses it.
#[derive(Default)]
pub struct ScheduleDevices {
    devices: Mutex<HashMap<String, Weak<Device>>>,
}

impl ScheduleDevices {
    /// The device `name`. `depth` becomes the depth of the device for all its disks.
    fn device(&self, name: &str, depth: u32) -> Arc<Device> {
        let mut devices = self.devices.lock();
        devices.retain(|_, device| device.strong_count() > 0);
        if let Some(device) = devices.get(name).and_then(Weak::upgrade) {
            device.set_depth(depth);
            return device;
        }
        let device = Arc::new(Device::new(depth));
        devices.insert(name.to_owned(), Arc::downgrade(&device));
        device
    }
}

/// The state that the queues of a disk share.
struct Inner {
    /// The name of the device that the configuration has; empty for the device on which the disk
    /// lies.
    named: String,
    /// Why the device of the disk was not found, if it was not: the disk then has one of its own.
    missing: OnceLock<String>,
    place: Arc<Place>,
    weights: BTreeMap<String, u32>,
    names: Arc<Names>,
    waiters: Option<Arc<dyn Waiters>>,
    index: Index,
    sent: Sent,
    /// The bounds on held requests: a time in nanoseconds, a number, and a number of bytes.
    hold_max_ns: AtomicU64,
    requests_max: AtomicU64,
    bytes_max: AtomicU64,
    /// The held requests, and their bytes.
    held: AtomicU64,
    held_bytes: AtomicU64,
    /// The requests that wait for the disk's share of the device.
    waiting: AtomicU64,
    counters: Counters,
}

/// Counts since the layer was made.
#[derive(Default)]
struct Counters {
    /// Held requests that were passed on, by the reason.
    released: [AtomicU64; Release::COUNT],
    held_ns: AtomicU64,
    /// Requests that have waited for the disk's share of the device.
    waited: AtomicU64,
    waited_ns: AtomicU64,
}

impl Counters {
    /// A request is no longer held, after `held_ns` nanoseconds.
    fn note_release(&self, release: Release, held_ns: u64, request: &mut Request) {
        self.released[release as usize].fetch_add(1, Ordering::Relaxed);
        self.held_ns.fetch_add(held_ns, Ordering::Relaxed);
        request.course.hold(HeldBy::Schedule, held_ns);
    }
}

impl Inner {
    /// Whether the disk holds more than it may.
    fn has_surplus(&self) -> bool {
        self.held.load(Ordering::Relaxed) > self.requests_max.load(Ordering::Relaxed)
            || self.held_bytes.load(Ordering::Relaxed) > self.bytes_max.load(Ordering::Relaxed)
    }

    fn set_bounds(&self, options: &ScheduleOptions) {
        self.hold_max_ns.store(options.hold_max.0, Ordering::Relaxed);
        self.requests_max.store(options.held_requests, Ordering::Relaxed);
        self.bytes_max.store(options.held_bytes.0, Ordering::Relaxed);
    }
}

/// A layer that decides which requests use a shared device first.
pub struct Schedule {
    inner: Arc<Inner>,
}

impl Schedule {
    /// A layer of a disk on the device with the name `device`. `names` has the texts of control
    /// groups, and `waiters` reports whether a process waits for a held request.
    pub fn new(
        options: &ScheduleOptions,
        device: &str,
        devices: &ScheduleDevices,
        names: &Arc<Names>,
        waiters: Option<Arc<dyn Waiters>>,
    ) -> Self {
        let inner = Inner {
            named: options.device.clone(),
            missing: OnceLock::new(),
            place: Arc::new(devices.device(device, options.depth).join(options.weight)),
            weights: options.weights.clone(),
            names: Arc::clone(names),
            waiters,
            index: Index::default(),
            sent: Sent::default(),
            hold_max_ns: AtomicU64::default(),
            requests_max: AtomicU64::default(),
            bytes_max: AtomicU64::default(),
            held: AtomicU64::default(),
            held_bytes: AtomicU64::default(),
            waiting: AtomicU64::default(),
            counters: Counters::default(),
        };
        inner.set_bounds(options);
        Self { inner: Arc::new(inner) }
    }

    /// `layer`, if it is of this kind.
    pub fn of(layer: &dyn Layer) -> Option<&Self> {
        layer.as_any()?.downcast_ref()
    }

    /// Notes that the device of the disk was not found, so that the layer was made for a device
    /// that no other disk has. That is a problem until another layer replaces this one.
    pub fn note_missing_device(&self, reason: &str) {
        self.inner.missing.get_or_init(|| reason.to_owned());
    }

    /// Whether the device of the disk was not found.
    pub fn lacks_device(&self) -> bool {
        self.inner.missing.get().is_some()
    }

    /// Takes over other options; the device and the weights of control groups stay.
    pub fn set_options(&self, options: &ScheduleOptions) {
        self.inner.place.device().set_depth(options.depth);
        self.inner.place.set_weight(options.weight);
        self.inner.set_bounds(options);
    }

    /// Whether `options` name the same device, and the same weights of control groups.
    fn is_for(&self, options: &ScheduleOptions) -> bool {
        options.device == self.inner.named && options.weights == self.inner.weights
    }
}

/// The names and the meanings of the counts of released requests, by [`Release`].
const RELEASES: [(&str, &str); Release::COUNT] = [
    ("quiet_total", "Held requests that were passed on while no process waited for the device."),
    ("due_total", "Held requests that were passed on after the longest time."),
    ("surplus_total", "Held requests that were passed on because the disk held too many."),
    ("flush_total", "Held requests that were passed on because of a flush."),
    ("overlap_total", "Held requests that were passed on because of a request for the same bytes."),
    ("file_total", "Held requests that were passed on because a process writes the same file."),
    ("waiter_total", "Held requests that were passed on because a process waits for their pages."),
    ("drain_total", "Held requests that were passed on because their queue was drained."),
];

impl Layer for Schedule {
    fn name(&self) -> &'static str {
        "schedule"
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        below
    }

    fn status(&self) -> LayerReport {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let (inner, counters) = (&self.inner, &self.inner.counters);
        let mut figures = vec![
            Figure::gauge("held", "Background requests that are held back.", of(&inner.held)),
            Figure::gauge("held_bytes", "Bytes of these requests.", of(&inner.held_bytes)),
            Figure::counter(
                "held_nanoseconds_total",
                "Time for which background requests were held back.",
                of(&counters.held_ns),
            ),
        ];
        let releases = RELEASES.iter().zip(&counters.released);
        figures.extend(
            releases.map(|((name, meaning), count)| Figure::counter(name, meaning, of(count))),
        );
        figures.extend([
            Figure::gauge(
                "waiting",
                "Requests that wait for the disk's share of the device.",
                of(&inner.waiting),
            ),
            Figure::counter(
                "waited_total",
                "Requests that have waited for the disk's share of the device.",
                of(&counters.waited),
            ),
            Figure::counter(
                "waited_nanoseconds_total",
                "Time for which requests have waited for the disk's share.",
                of(&counters.waited_ns),
            ),
            Figure::counter(
                "stuck_total",
                "Times at which the requests of a queue at the device ceased to count, because none \
                 completed.",
                inner.place.device().stuck_total(),
            ),
        ]);
        let problem = |reason: &String| {
            LayerProblem {
 cause: LayerCause::DevicesUnknown,
            message: format!(
                "the devices beneath it were not found ({reason}): its layer `schedule` shares none with other \
                 disks"
            ),
            remedy: "they are looked for again until they are found; otherwise set `device` of the layer".into(),
        }
        };
        LayerReport { figures, problems: inner.missing.get().map(problem).into_iter().collect() }
    }

    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }

    fn open_queue(&self, context: &mut OpenContext<'_>) -> io::Result<LayerPart> {
        let (waker, number) = (context.waker()?, context.queue());
        Ok(LayerPart::queue(ScheduleQueue::new(&self.inner, number, waker)))
    }
}

/// The weights of control groups, with one queue's cache.
struct Weights {
    patterns: Vec<(WildMatch, u32)>,
    names: Arc<Names>,
    remembered: HashMap<Name, u32>,
}

impl Weights {
    /// The weights of a disk; `None` if its control groups are not distinguished.
    fn of(inner: &Inner) -> Option<Self> {
        let patterns = inner.weights.iter();
        (!inner.weights.is_empty()).then(|| Self {
            patterns: patterns.map(|(text, weight)| (WildMatch::new(text), *weight)).collect(),
            names: Arc::clone(&inner.names),
            remembered: HashMap::new(),
        })
    }

    /// The flow of a request. If several patterns match, the longest decides.
    fn flow(&mut self, request: &Request) -> Flow {
        let group = request.insight.facts.cgroup;
        if !group.is_some() {
            return Flow::WHOLE;
        }
        if let Some(weight) = self.remembered.get(&group) {
            return Flow { key: group.0, weight: *weight };
        }
        let text = self.names.text(group).unwrap_or_default();
        let matching = self.patterns.iter().filter(|(pattern, _)| pattern.matches(&text));
        let longest = matching.max_by_key(|(pattern, _)| pattern.pattern().len());
        let weight = longest.map_or(WEIGHT, |(_, weight)| *weight);
        if self.remembered.len() >= REMEMBERED_MAX {
            self.remembered.clear();
        }
        self.remembered.insert(group, weight);
        Flow { key: group.0, weight }
    }
}
