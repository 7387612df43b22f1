//! Bounds on requests and bytes per second.
//!
//! A request that the limit does not admit waits until the limit admits it: the requests of all
//! queues of a disk in the order of arrival. Flushes never wait. When a ring stops or a client has
//! gone, its waiting requests are given back. When a queue is drained (the daemon ends), the layer
//! passes on all waiting requests and still charges their cost.
//!
//! - `bucket`: a leaky bucket with the rates and bursts of QEMU.
//! - `rates`: the buckets of a limit, and the cost of a request.
//! - `state`: which request is next: the order of arrival, and equal shares of disks.
//! - `group`: a limit, the disks that share it, and their queues.
//! - `queue`: the part in one queue.
//! - `options`: the configuration.

mod group;
mod options;
mod queue;
mod rates;
mod state;

use std::any::Any;
use std::collections::{BTreeSet, HashMap};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use fathom_block::{
    Capabilities, Figure, Kind, Layer, LayerPart, LayerReport, OpenContext, Request,
};
use fathom_insight::{Name, Names};
use parking_lot::Mutex;
use wildmatch::WildMatch;

use group::{Group, Place};
pub use options::LimitOptions;
use queue::LimitQueue;
use rates::Rates;

/// The most control groups of a guest with a limit of their own. Further control groups share one.
const EACH_MAX: usize = 256;
/// The most control groups for which a queue caches the match with the patterns.
const REMEMBERED_MAX: usize = 4096;

/// The limits shared by several disks, by name. A group exists while a disk uses it.
#[derive(Default)]
pub struct LimitGroups {
    groups: Mutex<HashMap<String, Weak<Group>>>,
}

impl LimitGroups {
    /// The group `name`. If `rates` limit anything, they become the rates of the whole group.
    fn group(&self, name: &str, rates: Rates) -> Arc<Group> {
        let mut groups = self.groups.lock();
        groups.retain(|_, group| group.strong_count() > 0);
        if let Some(group) = groups.get(name).and_then(Weak::upgrade) {
            if rates.is_limited() && group.rates() != rates {
                group.set_rates(rates);
            }
            return group;
        }
        let group = Arc::new(Group::new(rates));
        groups.insert(name.to_owned(), Arc::downgrade(&group));
        group
    }
}

/// Which requests a limit is for.
#[derive(Clone, Debug, Default, PartialEq)]
struct Scope {
    /// Patterns of control groups; empty for all requests.
    containers: Vec<String>,
    /// Whether each control group has its own limit.
    each: bool,
    /// The kinds of data; empty for all.
    kinds: BTreeSet<Kind>,
}

/// The groups of a limit.
enum Target {
    /// The disk's place in one group.
    One(Arc<Place>),
    /// A group for each control group of the guest.
    Each(Mutex<HashMap<Name, Arc<Place>>>),
}

/// The state that the queues of a disk share.
struct Inner {
    scope: Scope,
    /// The name of the group of disks; empty for none.
    group: String,
    rates: Mutex<Rates>,
    target: Target,
    names: Arc<Names>,
    /// The number of waiting requests, the number of requests that have waited, and the sum of
    /// their waiting times in nanoseconds.
    waiting: AtomicU64,
    held: AtomicU64,
    held_ns: AtomicU64,
}

impl Inner {
    fn each(&self) -> bool {
        matches!(self.target, Target::Each(_))
    }

    /// The place for requests without a control group of their own.
    fn place(&self) -> Arc<Place> {
        match &self.target {
            Target::One(place) => Arc::clone(place),
            Target::Each(_) => self.place_of(Name::NONE).1,
        }
    }

    /// The place of a control group, and its key. Control groups beyond [`EACH_MAX`] share one.
    fn place_of(&self, group: Name) -> (Name, Arc<Place>) {
        match &self.target {
            Target::One(place) => (Name::NONE, Arc::clone(place)),
            Target::Each(places) => {
                let mut places = places.lock();
                // A change of the rates also reaches the places that exist by then.
                let rates = *self.rates.lock();
                let is_new = !places.contains_key(&group);
                if is_new && places.len() > EACH_MAX {
                    // Control groups end, and queues drop their lanes.
                    places.retain(|_, place| Arc::strong_count(place) > 1);
                }
                let is_full = is_new && places.len() > EACH_MAX;
                let key = if is_full { Name::NONE } else { group };
                let new = || Arc::new(Group::new(rates)).join();
                (key, Arc::clone(places.entry(key).or_insert_with(new)))
            }
        }
    }

    fn set_rates(&self, rates: Rates) {
        *self.rates.lock() = rates;
        if !self.group.is_empty() && !rates.is_limited() {
            // A disk without rates only joins the group.
            return;
        }
        match &self.target {
            Target::One(place) => place.group().set_rates(rates),
            Target::Each(places) => {
                let places = places.lock();
                places.values().for_each(|place| place.group().set_rates(rates));
            }
        }
    }
}

/// A layer that limits requests and bytes per second.
pub struct Limit {
    inner: Arc<Inner>,
}

impl Limit {
    /// A limit with `options`. `names` has the texts of control groups, `groups` the limits of
    /// named groups.
    pub fn new(options: &LimitOptions, names: &Arc<Names>, groups: &LimitGroups) -> Self {
        let (scope, rates) = (options.scope(), options.rates());
        let target = if scope.each {
            Target::Each(Mutex::default())
        } else if options.group.is_empty() {
            Target::One(Arc::new(Group::new(rates)).join())
        } else {
            Target::One(groups.group(&options.group, rates).join())
        };
        let inner = Inner {
            scope,
            group: options.group.clone(),
            rates: Mutex::new(rates),
            target,
            names: Arc::clone(names),
            waiting: AtomicU64::new(0),
            held: AtomicU64::new(0),
            held_ns: AtomicU64::new(0),
        };
        Self { inner: Arc::new(inner) }
    }

    /// Whether `options` select the same requests as this limit.
    fn is_for(&self, options: &LimitOptions) -> bool {
        options.scope() == self.inner.scope && options.group == self.inner.group
    }

    /// Sets the rates of `options`. The buckets keep their levels.
    pub fn set_rates(&self, options: &LimitOptions) {
        self.inner.set_rates(options.rates());
    }
}

impl Layer for Limit {
    fn name(&self) -> &'static str {
        "limit"
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        below
    }

    fn status(&self) -> LayerReport {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let inner = &self.inner;
        LayerReport {
            figures: vec![
                Figure::gauge("waiting", "Requests that wait for the limit.", of(&inner.waiting)),
                Figure::counter(
                    "held_total",
                    "Requests that have waited for the limit.",
                    of(&inner.held),
                ),
                Figure::counter(
                    "held_nanoseconds_total",
                    "Time for which requests have waited for the limit.",
                    of(&inner.held_ns),
                ),
            ],
            ..LayerReport::default()
        }
    }

    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }

    fn open_queue(&self, context: &mut OpenContext<'_>) -> io::Result<LayerPart> {
        let waker = context.waker()?;
        Ok(LayerPart::queue(LimitQueue::new(Arc::clone(&self.inner), waker)))
    }
}

/// The selection of requests of a limit, with one queue's cache of matching control groups.
struct Selection {
    patterns: Vec<WildMatch>,
    /// A bit for each kind; 0 for all.
    kinds: u32,
    names: Arc<Names>,
    remembered: HashMap<Name, bool>,
}

impl Selection {
    /// The selection of a limit; `None` for all requests.
    fn of(inner: &Inner) -> Option<Self> {
        let scope = &inner.scope;
        (!scope.containers.is_empty() || !scope.kinds.is_empty()).then(|| Self {
            patterns: scope.containers.iter().map(|pattern| WildMatch::new(pattern)).collect(),
            kinds: scope.kinds.iter().fold(0, |bits, kind| bits | 1 << *kind as u32),
            names: Arc::clone(&inner.names),
            remembered: HashMap::new(),
        })
    }

    fn includes(&mut self, request: &Request) -> bool {
        let facts = &request.insight.facts;
        if self.kinds != 0 && self.kinds & 1 << facts.kind as u32 == 0 {
            return false;
        }
        if self.patterns.is_empty() {
            return true;
        }
        if !facts.cgroup.is_some() {
            return false;
        }
        if let Some(is_included) = self.remembered.get(&facts.cgroup) {
            return *is_included;
        }
        let text = self.names.text(facts.cgroup);
        let matches = |text: &str| self.patterns.iter().any(|pattern| pattern.matches(text));
        let is_included = text.is_some_and(|text| matches(&text));
        if self.remembered.len() >= REMEMBERED_MAX {
            self.remembered.clear();
        }
        self.remembered.insert(facts.cgroup, is_included);
        is_included
    }
}
