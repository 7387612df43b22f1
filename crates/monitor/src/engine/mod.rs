//! The engine: plans as dataflows, on one thread.
//!
//! Each operator of a plan is one of timely dataflow's, over collections of rows that change in
//! event time, as differential dataflow has them: a row that leaves a window is an update of the
//! future, known when the row comes. Operators with a state of their own see one instant after the
//! other, with all that changes at it ([`instants`]); joins are differential dataflow's.

mod agenda;
mod build;
mod changes;
mod groups;
mod instants;
mod joins;
mod sets;
mod windows;

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use differential_dataflow::VecCollection;
use differential_dataflow::input::{Input, InputSession};
use fathom_cql::Value;
use fathom_cql::plan::{Output, Plan};
use timely::WorkerConfig;
use timely::communication::allocator::thread::Thread;
use timely::dataflow::operators::probe::Handle;
use timely::worker::Worker;

use build::Builder;
use instants::by_instant;

/// A row as it travels between operators: cheap to copy.
pub type Tuple = Arc<[Value]>;

/// A row of a stream, led by its place in the order of arrival within its instant.
type Entry = (u64, Tuple);

/// The values of some columns.
fn key(row: &Tuple, columns: &[usize]) -> Tuple {
    columns.iter().map(|&column| row.get(column).cloned().unwrap_or(Value::Null)).collect()
}

/// A change of a query's result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delta {
    /// The query's number: its place among the plans.
    pub query: usize,
    /// The instant, in nanoseconds.
    pub time_ns: u64,
    /// How often more the row is there; less, where it is negative. Of a stream, how often it
    /// comes.
    pub count: i64,
    /// The row.
    pub row: Tuple,
}

/// What an engine has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineStatistics {
    /// Events that were taken.
    pub events: u64,
    /// Events that came when their instant was already over. They were left out.
    pub late: u64,
    /// Operators of all plans.
    pub operators: usize,
}

/// Runs plans over events.
pub struct Engine {
    worker: Worker<Thread>,
    inputs: Vec<InputSession<u64, Entry, isize>>,
    probe: Handle<u64>,
    results: Rc<RefCell<Vec<Delta>>>,
    /// Everything before this is over.
    now_ns: u64,
    arrivals: u64,
    statistics: EngineStatistics,
}

impl Engine {
    /// An engine for `plans` over `sources` input streams.
    pub fn new(sources: usize, plans: &[Plan]) -> Self {
        let mut worker =
            Worker::new(WorkerConfig::default(), Thread::default(), Some(Instant::now()));
        let results = Rc::new(RefCell::new(Vec::new()));
        let mut probe = Handle::new();
        let (inputs, operators) = worker.dataflow::<u64, _, _>(|scope| {
            let (inputs, collections): (Vec<_>, Vec<_>) =
                (0..sources).map(|_| scope.new_collection::<Entry, isize>()).unzip();
            let mut builder = Builder::new(collections);
            for (query, plan) in plans.iter().enumerate() {
                match &plan.output {
                    Output::Stream(stream) => {
                        let rows = builder.stream(stream).map(|(_, row)| row);
                        Self::collect(&rows, query, &results, &mut probe);
                    }
                    Output::Relation(relation) => {
                        let rows = builder.relation(relation);
                        Self::collect(&rows, query, &results, &mut probe);
                    }
                }
            }
            (inputs, builder.built())
        });
        let statistics = EngineStatistics { operators, ..EngineStatistics::default() };
        Self { worker, inputs, probe, results, now_ns: 0, arrivals: 0, statistics }
    }

    fn collect<G: timely::dataflow::Scope<Timestamp = u64>>(
        rows: &VecCollection<G, Tuple, isize>,
        query: usize,
        results: &Rc<RefCell<Vec<Delta>>>,
        probe: &mut Handle<u64>,
    ) {
        let results = Rc::clone(results);
        let done =
            by_instant(rows, "results", move |time_ns, changes, _: &mut Vec<((), isize)>| {
                let deltas = changes.drain(..).map(|(row, count)| Delta {
                    query,
                    time_ns,
                    count: count as i64,
                    row,
                });
                results.borrow_mut().extend(deltas);
            });
        done.probe_with(probe);
    }

    /// Takes an event of a source at an instant, in nanoseconds. An event of an instant that is
    /// over is counted and left out.
    pub fn push(&mut self, source: usize, time_ns: u64, row: Tuple) {
        let Some(input) = self.inputs.get_mut(source) else { return };
        if time_ns < self.now_ns {
            self.statistics.late += 1;
            return;
        }
        input.update_at((self.arrivals, row), time_ns, 1);
        self.arrivals += 1;
        self.statistics.events += 1;
    }

    /// Takes a change of an input that is a relation: at an instant, in nanoseconds, a row is there
    /// so often more or, below 0, less. Rows of a stream may be given so too: within an instant
    /// they then arrive in the order of their values. What comes when its instant is over is
    /// counted and left out, as events are.
    ///
    /// The caller sees to it that no row is there less often than never at the end of an instant,
    /// and that counts, which a peer may have given, stay far from the limits of their type.
    pub fn change(&mut self, source: usize, time_ns: u64, row: Tuple, count: isize) {
        let Some(input) = self.inputs.get_mut(source) else { return };
        if time_ns < self.now_ns {
            self.statistics.late += 1;
            return;
        }
        input.update_at((0, row), time_ns, count);
        self.statistics.events += 1;
    }

    /// Ends all instants before `time_ns`, and calls `sink` for each change that results: those
    /// of one query in order of time, and within an instant in order of the rows.
    pub fn advance(&mut self, time_ns: u64, sink: &mut dyn FnMut(Delta)) {
        self.now_ns = self.now_ns.max(time_ns);
        for input in &mut self.inputs {
            input.advance_to(self.now_ns);
            input.flush();
        }
        while self.probe.less_than(&self.now_ns) {
            self.worker.step();
        }
        for delta in self.results.borrow_mut().drain(..) {
            sink(delta);
        }
    }

    /// What has been done.
    pub fn statistics(&self) -> EngineStatistics {
        self.statistics
    }
}
