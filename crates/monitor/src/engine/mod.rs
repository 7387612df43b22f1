//! The engine: runs plans as dataflows, on one thread of a process, or of each process of a
//! cluster.
//!
//! A plan becomes [nodes](node), and each node an operator of timely dataflow. Operators exchange
//! [epochs](run::Epoch): all changes within an interval of event time, by column, as inserted and
//! deleted rows. The caller of [`Engine::advance`] decides how long an epoch is. Each operator runs
//! once for each epoch.
//!
//! Queries that are added together form one dataflow, which has common parts only once. Queries
//! added later form another dataflow, over the same epochs.
//!
//! In a [cluster](crate::cluster) each process has its part of the rows, and rows are
//! [sent](exchange) to the process whose operators need them; the processes [agree](epochs) on the
//! ends of epochs.
//!
//! When a row enters a window, the instant at which it leaves is already known. Windows hold the
//! deletion back until then, so that later operators receive current changes only.

mod bag;
mod build;
mod epochs;
mod exchange;
mod groups;
mod input;
mod joins;
mod node;
mod percentiles;
mod results;
mod rows;
mod run;
mod select;
mod sets;
mod state;
mod tallies;
mod texts;
mod vector;
mod windows;

use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;
use std::time::{Duration, Instant};

use fathom_cql::Value;
use fathom_cql::plan::Plan;
use timely::WorkerConfig;
use timely::communication::Allocator;
use timely::communication::allocator::{AllocateBuilder, Thread};
use timely::dataflow::InputHandle;
use timely::dataflow::operators::probe::Handle;
use timely::dataflow::operators::{Input, Inspect, Probe};
use timely::worker::Worker;

use crate::cluster::{Cluster, Loss};
use crate::columns::ColumnValues;
use crate::read::Condition;
use build::{Builder, Members, Stateful};
use epochs::EpochBarrier;
use exchange::Member;
pub(crate) use exchange::hash_sample;
use input::Staged;
use results::{Reporter, Results};
use run::Epoch;
use texts::Texts;

pub use results::Delta;

/// How long a process waits for the others before it checks again for work.
const WAIT: Duration = Duration::from_millis(1);

/// A single row, cheap to copy.
type Tuple = Rc<[Value]>;

/// The statistics of an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineStatistics {
    /// The number of events that were accepted.
    pub events: u64,
    /// The number of events that were dropped because their instant had ended.
    pub late: u64,
    /// The largest lateness of a dropped event relative to the latest instant before it, in
    /// nanoseconds.
    pub late_ns: u64,
    /// The number of operators of all plans.
    pub operators: usize,
}

/// The size of an operator's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateSize {
    /// The number of the first query that uses the operator.
    pub query: usize,
    /// The operator's name.
    pub operator: &'static str,
    /// The number of rows, groups and values in the state.
    pub rows: usize,
}

/// Conditions on the rows of a source: each row that the plans use meets all parts of at least one
/// condition. `None` if the plans have no such conditions.
pub(crate) fn conditions(plans: &[Plan], source: usize) -> Option<Vec<Condition>> {
    let mut all = Vec::new();
    let mut known = |plan: &Plan| {
        node::conditions(&node::output(&plan.output), source, &mut |texts| all.push(texts))
    };
    plans.iter().all(&mut known).then_some(all)
}

/// Runs plans over events.
pub struct Engine {
    worker: Worker<Allocator>,
    staged: Vec<Staged>,
    /// The long texts of all events.
    texts: RefCell<Texts>,
    flows: Vec<Flow>,
    results: Results,
    /// For each output, the queries with this result; empty if all of them have been removed.
    queries: Vec<Vec<usize>>,
    /// The number of queries added so far, including removed queries.
    numbers: usize,
    reporter: Reporter,
    /// All instants before this have ended.
    now_ns: u64,
    /// The latest instant of an event.
    latest_ns: u64,
    /// All events before this instant have been put into the dataflows.
    ended_ns: u64,
    statistics: EngineStatistics,
    /// The agreement on the ends of epochs; `None` outside of a cluster.
    barrier: Option<EpochBarrier>,
    members: Option<Members>,
    /// Dropped last, after all fields that send to other processes.
    cluster: Option<Cluster>,
}

/// The dataflow of the queries that were added together.
struct Flow {
    /// Its number in the worker.
    number: usize,
    inputs: Vec<InputHandle<u64, Rc<Epoch>>>,
    probe: Handle<u64>,
    outputs: Range<usize>,
    operators: usize,
    states: Vec<(usize, &'static str, Rc<dyn Stateful>)>,
}

/// Whether all epochs up to an instant have passed through the dataflows.
fn is_done(flows: &[Flow], time_ns: u64) -> bool {
    flows.iter().all(|flow| !flow.probe.less_than(&time_ns))
}

impl Engine {
    /// An engine for `plans` over `sources` input streams.
    pub fn new(sources: usize, plans: &[Plan]) -> Self {
        Self::of(Allocator::Thread(Thread::default()), None, sources, plans)
    }

    /// An engine of a cluster. Each process makes one for the same plans and passes its own events
    /// to it. The results are those of all processes' events; rows of one instant arrive in the
    /// order of their values. Process 0 reports the results, unless the cluster is configured so
    /// that each process reports its own.
    ///
    /// # Panics
    /// If the cluster has already been used for an engine.
    pub fn in_cluster(mut cluster: Cluster, sources: usize, plans: &[Plan]) -> Self {
        let builder = cluster.take_builder().expect("a cluster is used for one engine");
        Self::of(builder.build(), Some(cluster), sources, plans)
    }

    fn of(allocator: Allocator, cluster: Option<Cluster>, sources: usize, plans: &[Plan]) -> Self {
        let mut worker = Worker::new(WorkerConfig::default(), allocator, Some(Instant::now()));
        let barrier = cluster.as_ref().map(|_| EpochBarrier::new(&mut worker));
        let members = cluster.as_ref().map(|cluster| Members {
            member: Member { index: cluster.index, peers: cluster.processes() },
            own_results: cluster.own_results,
            wrong: Rc::new(cluster.wrong()),
        });
        let mut engine = Self {
            worker,
            staged: (0..sources).map(|_| Staged::default()).collect(),
            texts: RefCell::default(),
            flows: Vec::new(),
            results: Results::default(),
            queries: Vec::new(),
            numbers: 0,
            reporter: Reporter::default(),
            now_ns: 0,
            latest_ns: 0,
            ended_ns: 0,
            statistics: EngineStatistics::default(),
            barrier,
            members,
            cluster,
        };
        engine.add(plans);
        engine
    }

    /// Adds queries, and returns their numbers. They process the events of all instants that have
    /// not ended. Common parts are computed and held once. In a cluster all processes must add the
    /// same queries before time advances.
    pub fn add(&mut self, plans: &[Plan]) -> Range<usize> {
        let first = self.numbers;
        self.numbers += plans.len();
        if plans.is_empty() {
            return first..first;
        }
        let number = self.worker.next_dataflow_index();
        let first_output = self.queries.len();
        let probe = Handle::new();
        let members = self.members.clone();
        let Self { worker, staged, queries, results, .. } = self;
        let (mut inputs, operators, states) = worker.dataflow::<u64, _, _>(|scope| {
            let (inputs, streams): (Vec<_>, Vec<_>) =
                staged.iter().map(|_| scope.new_input()).unzip();
            let mut builder = Builder::new(streams, members);
            let mut outputs: HashMap<String, usize> = HashMap::new();
            for (query, plan) in (first..).zip(plans) {
                let node = node::output(&plan.output);
                let output = *outputs.entry(format!("{node:?}")).or_insert(queries.len());
                if output < queries.len() {
                    queries[output].push(query);
                    continue;
                }
                queries.push(vec![query]);
                let results = results.clone();
                builder
                    .build_for(query, &node)
                    .inspect(move |epoch| results.add(output, Rc::clone(epoch)))
                    .probe_with(&probe);
            }
            (inputs, builder.built(), builder.into_states())
        });
        for input in &mut inputs {
            input.advance_to(self.ended_ns);
        }
        let outputs = first_output..self.queries.len();
        self.flows.push(Flow { number, inputs, probe, outputs, operators, states });
        first..self.numbers
    }

    /// Removes a query: it has no more results. The state of removed queries is freed once all
    /// queries that were added together have been removed.
    pub fn remove(&mut self, query: usize) {
        for queries in &mut self.queries {
            queries.retain(|&other| other != query);
        }
        let Self { queries, flows, worker, .. } = self;
        flows.retain(|flow| {
            let wanted = queries[flow.outputs.clone()].iter().any(|queries| !queries.is_empty());
            if !wanted {
                worker.drop_dataflow(flow.number);
            }
            wanted
        });
    }

    /// Counts an event, and returns the input for it; `None` if the event's instant has ended.
    fn staged(&mut self, source: usize, time_ns: u64) -> Option<&mut Staged> {
        let staged = self.staged.get_mut(source)?;
        if time_ns < self.now_ns {
            self.statistics.late += 1;
            let late_ns = self.latest_ns.max(self.now_ns) - time_ns;
            self.statistics.late_ns = self.statistics.late_ns.max(late_ns);
            return None;
        }
        self.statistics.events += 1;
        self.latest_ns = self.latest_ns.max(time_ns);
        Some(staged)
    }

    /// Notes the instant of an event that no query needs, in nanoseconds.
    pub(crate) fn note_instant(&mut self, time_ns: u64) {
        self.latest_ns = self.latest_ns.max(time_ns);
    }

    /// Accepts an event of a source at an instant, in nanoseconds. An event whose instant has ended
    /// is counted and dropped.
    pub fn push(&mut self, source: usize, time_ns: u64, row: &[Value]) {
        if let Some(staged) = self.staged(source, time_ns) {
            staged.push(time_ns, 1, row);
            self.texts.get_mut().note(row);
        }
    }

    /// Accepts events of a source, by column, each at its instant, in nanoseconds; see
    /// [`push`](Self::push). All columns have one value per instant.
    pub fn push_columns(&mut self, source: usize, times_ns: Vec<u64>, columns: Vec<ColumnValues>) {
        let is_late = |time_ns: &u64| *time_ns < self.now_ns;
        if times_ns.iter().any(is_late) {
            let mut row = Vec::new();
            for (at, &time_ns) in times_ns.iter().enumerate() {
                row.clear();
                row.extend(columns.iter().map(|column| column.value(at)));
                self.push(source, time_ns, &row);
            }
        } else if let Some(staged) = self.staged.get_mut(source) {
            self.statistics.events += times_ns.len() as u64;
            self.latest_ns = times_ns.iter().copied().fold(self.latest_ns, u64::max);
            for column in &columns {
                self.texts.get_mut().note_column(column);
            }
            staged.push_columns(times_ns, columns);
        }
    }

    /// Changes the count of a row of an input by `count`, at an instant in nanoseconds. The input
    /// may be a relation or a stream; rows of one instant arrive in the order of their values. A
    /// change whose instant has ended is counted and dropped, as events are. The caller ensures
    /// that no row has a negative count at the end of an instant, and that counts from a peer stay
    /// far from the limits of their type.
    pub fn change(&mut self, source: usize, time_ns: u64, row: &[Value], count: i64) {
        if let Some(staged) = self.staged(source, time_ns) {
            staged.change(time_ns, count, row);
            self.texts.get_mut().note(row);
        }
    }

    /// Ends all instants before `time_ns` (in nanoseconds), and calls `sink` for each change of the
    /// results. The changes of one query are in order of time, and within an instant in order of
    /// the rows. In a cluster this call does not wait for the other processes: the results come in
    /// a later call, which need not advance time, when the others have ended the same instants.
    pub fn advance(&mut self, time_ns: u64, sink: &mut dyn FnMut(Delta<'_>)) {
        if self.barrier.is_some() {
            self.now_ns = self.now_ns.max(time_ns);
            self.advance_in_cluster();
        } else if time_ns > self.now_ns {
            self.now_ns = time_ns;
            self.end(time_ns);
            while !is_done(&self.flows, time_ns) {
                self.worker.step();
            }
        }
        for (output, epoch) in self.results.take() {
            let queries = &self.queries[output];
            if !queries.is_empty() {
                self.reporter.report(&epoch.runs, |time_ns, count, row| {
                    sink(Delta { queries, time_ns, count, row });
                });
            }
        }
    }

    /// Processes the epochs whose ends have been announced.
    fn advance_in_cluster(&mut self) {
        loop {
            let Some(barrier) = &mut self.barrier else { return };
            barrier.report(self.now_ns, self.ended_ns);
            let flows = &self.flows;
            barrier.announce(&|end| is_done(flows, end));
            let next = barrier.next();
            if let Some(end) = next {
                self.end(end);
            }
            self.worker.step();
            if next.is_none() {
                return;
            }
        }
    }

    /// Ends an epoch: puts all events before `end` into the dataflows.
    fn end(&mut self, end: u64) {
        self.ended_ns = end;
        for (source, staged) in self.staged.iter_mut().enumerate() {
            let epoch = Rc::new(Epoch { end, runs: staged.take(end) });
            for flow in &mut self.flows {
                flow.inputs[source].send(Rc::clone(&epoch));
                flow.inputs[source].advance_to(end);
            }
        }
    }

    /// Ends all instants before `time_ns` (in nanoseconds), when no more events follow; see
    /// [`advance`](Self::advance). In a cluster it waits until all processes have ended their
    /// instants.
    ///
    /// # Errors
    /// If a process of the cluster is lost before that.
    pub fn finish(&mut self, time_ns: u64, sink: &mut dyn FnMut(Delta<'_>)) -> Result<(), Loss> {
        self.advance(time_ns, sink);
        while let Some(barrier) = &mut self.barrier {
            if self.ended_ns >= self.now_ns {
                barrier.end_reports();
            }
            if barrier.is_finished() && is_done(&self.flows, self.ended_ns) {
                break;
            }
            self.wait(WAIT);
            self.advance(time_ns, sink);
            if let Some(loss) = self.loss() {
                return Err(loss);
            }
        }
        Ok(())
    }

    /// Whether it is an engine of a cluster.
    pub(crate) fn is_in_cluster(&self) -> bool {
        self.barrier.is_some()
    }

    /// In a cluster, waits for a message of another process, at most for `limit`.
    pub fn wait(&mut self, limit: Duration) {
        if self.barrier.is_some() {
            self.worker.step_or_park(Some(limit));
        }
    }

    /// The lost process of the cluster, if there is one. Then there are no more results. The loss
    /// is reported a second after it happened, when the process's last messages have been
    /// processed.
    pub fn loss(&self) -> Option<Loss> {
        self.cluster.as_ref().and_then(Cluster::loss)
    }

    /// The instant before which all events have been put into the dataflows, in nanoseconds.
    pub fn ended_ns(&self) -> u64 {
        self.ended_ns
    }

    /// The statistics so far.
    pub fn statistics(&self) -> EngineStatistics {
        let operators = self.flows.iter().map(|flow| flow.operators).sum();
        EngineStatistics { operators, ..self.statistics }
    }

    /// The size of the state of each operator that has one.
    pub fn state(&self) -> impl Iterator<Item = StateSize> {
        let states = self.flows.iter().flat_map(|flow| &flow.states);
        states.map(|&(query, operator, ref state)| StateSize {
            query,
            operator,
            rows: state.rows(),
        })
    }

    /// The number of rows, groups and values that the operators hold. The call takes time in
    /// proportion to the size of some states.
    pub fn held(&self) -> usize {
        self.state().map(|state| state.rows).sum()
    }

    /// The bytes of the long texts in memory, including those of waiting events and of results.
    /// Each text counts once. The call takes time in proportion to their number.
    pub fn text_bytes(&self) -> usize {
        self.texts.borrow_mut().bytes()
    }

    /// The number of events that wait for the ends of their instants.
    pub fn waiting(&self) -> usize {
        self.staged.iter().map(Staged::len).sum()
    }

    /// The instants before `end_ns` of the events that wait, in order, each once for each event; in
    /// nanoseconds.
    pub(crate) fn waiting_before(&self, end_ns: u64) -> Vec<u64> {
        let mut times: Vec<u64> =
            self.staged.iter().flat_map(|staged| staged.times_before(end_ns)).collect();
        times.sort_unstable();
        times
    }
}
