//! Finds the meaning of each request, and accounts for requests by meaning.
//!
//! On a request's way down, the layer looks up the meaning of a guest's request in the guest's
//! memory ([`fathom_introspect::Resolver`]), and adds it to the request as its insight. On the way
//! up, it accounts for the request by file, control group, process and kind ([`UsageSnapshot`]). A
//! flush is given to the file whose writes it most likely ends (`flushes.rs`).
//!
//! Without a guest, or if its kernel is not known, a request costs a load and some counting. If a
//! resolver panics, its queue drops it, and the disk continues without insight.

mod cells;
mod databases;
mod flushes;
mod groups;
mod slow;
mod table;
mod usage;

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use fathom_block::{
    Buffers, Capabilities, GuestAddress, Layer, LayerPart, Observed, Observer, ObserverPosition,
    OpenContext, Operation, Outcome, Request, SECTOR_SIZE,
};
use fathom_failure::Failure;
use fathom_insight::{ClassTable, Insight, Names};
use fathom_introspect::{RequestView, Resolver};
use fathom_options::Key;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

pub use cells::{
    Account, Accounts, Direction, LATENCY_STEPS, TotalsSnapshot, latency_of_step, latency_step,
};
pub use groups::{GROUP_OTHER, GroupAccount, GroupSnapshot};
pub use slow::SlowRequest;
pub use table::{UsageRow, UsageSubject};
pub use usage::{UsageOptions, UsageSnapshot};

use crate::GuestSlot;
use crate::kind::{LayerContext, LayerOptions, Rank};
use databases::{DatabaseQueue, Databases};
use flushes::{FlushQueue, Writes};
use usage::{Usage, UsageQueue};

/// The configuration of the layer `classify`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ClassifyOptions {
    /// Whether pages of databases are recognised.
    pub databases: bool,
}

impl Default for ClassifyOptions {
    fn default() -> Self {
        Self { databases: true }
    }
}

impl LayerOptions for ClassifyOptions {
    const KIND: &'static str = "classify";
    const RANK: Rank = Rank::Meaning;
    const MEANING: &'static str = "finds out what requests mean. By default it is directly above the tap; name it to place it elsewhere. Layers above it do not learn what requests mean";
    const KEYS: &'static [Key] = &[Key::new(
        "databases",
        "true",
        "reads off the pages of databases which part they belong to: table, index or log",
    )];
    const ONCE: Option<&'static str> = Some("it would account for everything twice");

    fn make(&self, context: &LayerContext<'_>) -> Result<Option<Arc<dyn Layer>>, Failure> {
        Ok(context.shared(Self::KIND))
    }
}

/// The state that the queues of a disk share.
struct Shared {
    slot: Arc<GuestSlot>,
    table: Mutex<Arc<ClassTable>>,
    /// Resolvers that panicked and were dropped.
    failures: AtomicU64,
    usage: Arc<Usage>,
    /// Whether queues that are opened look for databases.
    finds_databases: AtomicBool,
    databases: Databases,
    writes: Writes,
}

/// The layer that finds out what requests mean.
#[derive(Clone)]
pub struct Classify {
    shared: Arc<Shared>,
}

impl Classify {
    /// A layer that resolves requests in the memory of the guest in `slot`, and assigns classes by
    /// `table`. `names` has the texts of the guest's insights.
    pub fn new(
        slot: Arc<GuestSlot>,
        table: ClassTable,
        names: Arc<Names>,
        options: UsageOptions,
    ) -> Self {
        let shared = Shared {
            slot,
            table: Mutex::new(Arc::new(table)),
            failures: AtomicU64::new(0),
            usage: Arc::new(Usage::new(names, options)),
            finds_databases: AtomicBool::new(true),
            databases: Databases::new(),
            writes: Writes::default(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Assigns classes by another table, in queues opened after this call.
    pub fn set_table(&self, table: ClassTable) {
        *self.shared.table.lock() = Arc::new(table);
    }

    /// Looks for databases or not, in queues opened after this call.
    pub fn set_databases(&self, are_found: bool) {
        self.shared.finds_databases.store(are_found, Ordering::Relaxed);
    }

    /// The number of queues that lost their insight because of a bug.
    pub fn failures(&self) -> u64 {
        self.shared.failures.load(Ordering::Relaxed)
    }

    /// The accounts of all requests since the layer was made.
    pub fn usage(&self) -> UsageSnapshot {
        self.shared.usage.snapshot()
    }

    /// The totals, and the accounts by control group and kind. They are few, and their counts never
    /// decrease.
    pub fn groups(&self) -> (TotalsSnapshot, Vec<GroupSnapshot>) {
        self.shared.usage.groups()
    }

    /// The slowest requests of the last one to two minutes before `now_ns` (by the stacks' clock):
    /// at most `count`, the slowest first.
    pub fn slow(&self, now_ns: u64, count: usize) -> Vec<SlowRequest> {
        self.shared.usage.slow(now_ns, count)
    }

    /// The texts of the insights.
    pub fn names(&self) -> &Arc<Names> {
        self.shared.usage.names()
    }
}

impl Layer for Classify {
    fn name(&self) -> &'static str {
        "classify"
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        below
    }

    fn open_queue(&self, context: &mut OpenContext<'_>) -> io::Result<LayerPart> {
        let table = self.shared.table.lock();
        Ok(LayerPart::observer(ClassifyQueue {
            table: Arc::clone(&table),
            shared: Arc::clone(&self.shared),
            usage: UsageQueue::open(Arc::clone(&self.shared.usage), context.queue()),
            resolver: None,
            generation: 0,
            databases: self
                .shared
                .finds_databases
                .load(Ordering::Relaxed)
                .then(|| Box::new(DatabaseQueue::new())),
            flushes: FlushQueue::default(),
        }))
    }
}

struct ClassifyQueue {
    shared: Arc<Shared>,
    table: Arc<ClassTable>,
    usage: UsageQueue,
    resolver: Option<Resolver>,
    /// The generation of the slot's guest that the resolver belongs to.
    generation: u64,
    databases: Option<Box<DatabaseQueue>>,
    flushes: FlushQueue,
}

impl ClassifyQueue {
    /// Adds the parts of databases to the insight of `request`. The buffers have its data if
    /// `has_data`.
    #[inline]
    fn find_databases(&mut self, request: &mut Observed<'_>, has_data: bool) {
        let Some(databases) = &mut self.databases else { return };
        let (offset, length) = (request.offset, request.length);
        let (buffers, insight) = request.buffers_and_insight();
        if insight.facts.inode == 0 && insight.parts.is_empty() {
            return;
        }
        let subject = databases::Subject { offset, length, data: has_data.then_some(buffers) };
        let (shared, table) = (&*self.shared, &*self.table);
        let names = shared.usage.names();
        let examined = catch_unwind(AssertUnwindSafe(|| {
            databases.examine(&shared.databases, names, table, &subject, insight);
        }));
        if examined.is_err() {
            insight.parts.clear();
            self.databases = None;
            self.shared.failures.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Changes to the guest in the slot. If another thread is changing the slot now, the next
    /// request changes to the new guest.
    #[cold]
    fn follow(&mut self) {
        if let Some((generation, guest)) = self.shared.slot.try_guest() {
            self.resolver =
                guest.map(|guest| guest.resolver_of(Arc::clone(self.shared.slot.object())));
            self.generation = generation;
        } else {
            self.resolver = None;
        }
    }

    /// Resolves the meaning of `request`, whose header is at the address `header`.
    fn resolve(&mut self, request: &mut Observed<'_>, header: GuestAddress, now_ns: u64) {
        if self.shared.slot.generation() != self.generation {
            self.follow();
        }
        let Some(resolver) = &mut self.resolver else { return };
        let view = view(request, header, now_ns);
        let (buffers, insight) = request.buffers_and_insight();
        let table = &self.table;
        let resolved = catch_unwind(AssertUnwindSafe(|| {
            resolver.resolve(&view, pages(buffers), table, insight);
        }));
        if resolved.is_err() {
            self.fail(insight);
        }
    }

    /// Adds the processes that wait for a request, which has been carried out.
    fn find_waiters(&mut self, request: &mut Observed<'_>, now_ns: u64) {
        let Some(header) = request.header else { return };
        if self.shared.slot.generation() != self.generation {
            return;
        }
        let Some(resolver) = &mut self.resolver else { return };
        let view = view(request, header, now_ns);
        let (buffers, insight) = request.buffers_and_insight();
        let found = catch_unwind(AssertUnwindSafe(|| {
            resolver.find_waiters(&view, pages(buffers), insight);
        }));
        if found.is_err() {
            self.fail(insight);
        }
    }

    /// Continues without a resolver after its panic.
    #[cold]
    fn fail(&mut self, insight: &mut Insight) {
        let io_priority = insight.io_priority;
        insight.clear();
        insight.io_priority = io_priority;
        self.resolver = None;
        self.shared.failures.fetch_add(1, Ordering::Relaxed);
    }
}

/// The disk's view of a request with a header.
fn view(request: &Request, header: GuestAddress, now_ns: u64) -> RequestView {
    RequestView {
        header: header.0,
        sector: request.offset / SECTOR_SIZE,
        length: request.length,
        carries_data: request.operation.carries_data(),
        is_write: request.operation.modifies(),
        now_ns,
    }
}

/// The guest-physical addresses and the lengths of a request's memory.
fn pages(buffers: &Buffers) -> impl Iterator<Item = (u64, u64)> + Clone + '_ {
    buffers
        .addresses()
        .iter()
        .zip(buffers.segments())
        .filter_map(|(address, segment)| Some((address.as_ref()?.0, segment.iov_len as u64)))
}

impl Observer for ClassifyQueue {
    fn refresh(&mut self) {
        if self.shared.slot.generation() != self.generation {
            self.follow();
        }
    }

    fn down(&mut self, requests: &mut [Box<Request>], place: ObserverPosition<'_>) {
        let now_ns = place.round_ns();
        for request in requests {
            let mut request = place.observe(request);
            *request.word() = now_ns;
            if let Some(header) = request.header {
                self.resolve(&mut request, header, now_ns);
            }
            if request.operation.carries_data() {
                let has_data = request.operation == Operation::Write;
                self.find_databases(&mut request, has_data);
            } else if request.operation == Operation::Flush {
                self.flushes.begin(&self.shared.writes, request.id);
            }
        }
    }

    fn arrive(&mut self, requests: &mut [(Box<Request>, Outcome)], place: ObserverPosition<'_>) {
        if self.databases.is_none() && self.resolver.is_none() {
            return;
        }
        let now_ns = place.round_ns();
        for (request, outcome) in requests {
            let is_awaited =
                matches!(request.operation, Operation::Read | Operation::Write | Operation::Flush);
            if outcome.is_ok() && is_awaited {
                let mut request = place.observe(request);
                self.find_waiters(&mut request, now_ns);
                let (id, length) = (request.id, request.length);
                match request.operation {
                    Operation::Read => self.find_databases(&mut request, true),
                    Operation::Write => self.shared.writes.note(&request.insight, length),
                    Operation::Flush => {
                        let (_, insight) = request.buffers_and_insight();
                        self.flushes.end(&self.shared.writes, id, insight);
                    }
                    Operation::Discard
                    | Operation::WriteZeroes
                    | Operation::GetId
                    | Operation::Extents => {}
                }
            } else if request.operation == Operation::Flush {
                self.flushes.forget(request.id);
            }
        }
    }

    fn up(&mut self, requests: &mut [(Box<Request>, Outcome)], place: ObserverPosition<'_>) {
        let mut now_ns = place.round_ns();
        for (request, outcome) in requests {
            let start_ns = place.word(request);
            if now_ns == start_ns {
                now_ns = place.now_ns();
            }
            self.usage.add(request, *outcome, start_ns, now_ns);
        }
    }
}
