//! The engine: plans as dataflows, on one thread of one process or of several.
//!
//! A plan becomes [nodes](node), and each node an operator of timely dataflow. Operators exchange
//! [epochs](run::Epoch): all changes within an interval of event time, by column, as inserted and
//! deleted rows. The caller of [`Engine::advance`] decides how long an epoch is, and each operator
//! runs once for each epoch.
//!
//! Queries that are added together are one dataflow, in which common parts exist once. Queries
//! added later are another dataflow, over the same epochs.
//!
//! In a [cluster](crate::cluster) each process has its part of the rows, and rows are
//! [sent](exchange) to the process whose operators need them; the processes [agree](epochs) on the
//! ends of epochs.
//!
//! When a row comes, the instant at which it leaves its window is already known. Windows hold this
//! deletion back until then, so that the operators after them see only current changes.

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
use crate::columns::Column;
use crate::read::Condition;
use build::{Builder, Holds, Members};
use epochs::EpochBarrier;
use exchange::Member;
use input::Staged;
use results::{Results, Teller};
use run::Epoch;
use texts::Texts;

pub use results::Delta;

/// How long a process waits for the others before it checks again for work.
const WAIT: Duration = Duration::from_millis(1);

/// A row by itself: cheap to copy.
type Tuple = Rc<[Value]>;

/// What an engine has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineStatistics {
    /// Events that were taken.
    pub events: u64,
    /// Events that came after the end of their instant. They were dropped.
    pub late: u64,
    /// The largest lateness of such an event against the latest instant seen before it, in
    /// nanoseconds.
    pub late_ns: u64,
    /// Operators of all plans.
    pub operators: usize,
}

/// What an operator holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateSize {
    /// The first query that it works for, by its number.
    pub query: usize,
    /// What it does.
    pub operator: &'static str,
    /// How many rows, groups and values it holds.
    pub rows: usize,
}

/// The conditions on the rows of a source that plans use: each such row has, in some columns, the
/// texts of one of these. `None` /// if there are no conditions.
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
    /// For each output, the queries with this result; empty if all were removed.
    queries: Vec<Vec<usize>>,
    /// The number of queries added so far, including removed ones.
    numbers: usize,
    teller: Teller,
    /// All instants before this have ended.
    now_ns: u64,
    /// The latest instant that was seen.
    latest_ns: u64,
    /// Everything before this has been put into the dataflows.
    ended_ns: u64,
    statistics: EngineStatistics,
    /// In a cluster.
    barrier: Option<EpochBarrier>,
    members: Option<Members>,
    /// Dropped after everything that sends to the other processes.
    cluster: Option<Cluster>,
}

/// A dataflow: that of queries that were added together.
struct Flow {
    /// Its number among the worker's.
    number: usize,
    inputs: Vec<InputHandle<u64, Rc<Epoch>>>,
    probe: Handle<u64>,
    outputs: Range<usize>,
    operators: usize,
    states: Vec<(usize, &'static str, Rc<dyn Holds>)>,
}

/// Whether everything before an instant has gone through the dataflows.
fn is_done(flows: &[Flow], time_ns: u64) -> bool {
    flows.iter().all(|flow| !flow.probe.less_than(&time_ns))
}

impl Engine {
    /// An engine for `plans` over `sources` input streams.
    pub fn new(sources: usize, plans: &[Plan]) -> Self {
        Self::of(Allocator::Thread(Thread::default()), None, sources, plans)
    }

    /// An engine of several processes, each of which makes one for the same plans. Each takes
    /// events of its own, and the results are those of all events together; rows of one instant
    /// arrive in the order of their values. Process 0 gives the results, unless the cluster is
    /// configured so that each process gives its own.
    ///
    /// # Panics
    /// When an engine has been made of the cluster before.
    pub fn in_cluster(mut cluster: Cluster, sources: usize, plans: &[Plan]) -> Self {
        let builder = cluster.take_builder().expect("one engine is made of a cluster");
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
            teller: Teller::default(),
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

    /// Adds queries, and returns their numbers. They see the events of all instants that have not
    /// ended. Common parts are computed /// and held once. In a cluster all processes add the same
    /// queries, before time advances.
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
    /// queries that were added together have /// been removed.
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

    /// The input for an event at an instant, and counts the event; `None` if the instant has ended.
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
    pub(crate) fn saw(&mut self, time_ns: u64) {
        self.latest_ns = self.latest_ns.max(time_ns);
    }

    /// Takes an event of a source at an instant, in nanoseconds. An event whose instant has ended
    /// is counted and dropped.
    pub fn push(&mut self, source: usize, time_ns: u64, row: &[Value]) {
        if let Some(staged) = self.staged(source, time_ns) {
            staged.push(time_ns, 1, row);
            self.texts.get_mut().note(row);
        }
    }

    /// Takes events of a source, by column, each at its instant, in nanoseconds; see
    /// [`push`](Self::push). All columns are as long as there are instants.
    pub fn push_columns(&mut self, source: usize, times_ns: Vec<u64>, columns: Vec<Column>) {
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

    /// Takes a change of an input that is a relation: at an instant, in nanoseconds, the count of a
    /// row changes by `count`. Rows of a /// stream may be given in this way too: within an instant
    /// they then arrive in the order of their values. A change whose instant /// has ended is
    /// counted and dropped, as events are. The caller ensures that no row has a negative count at
    /// the end of an instant, and that counts, which a peer may have given, stay /// far from the
    /// limits of their type.
    pub fn change(&mut self, source: usize, time_ns: u64, row: &[Value], count: i64) {
        if let Some(staged) = self.staged(source, time_ns) {
            staged.change(time_ns, count, row);
            self.texts.get_mut().note(row);
        }
    }

    /// Ends all instants before `time_ns`, and calls `sink` for each change that results: those of
    /// one query in order of time, and within an instant in order of the rows. In a cluster it does
    /// not wait for the other processes: the results come when these have ended the same instants,
    /// in a later call /// that need not advance time.
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
            self.teller.tell(&epoch.runs, |time_ns, count, row| {
                for &query in &self.queries[output] {
                    sink(Delta { query, time_ns, count, row });
                }
            });
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

    /// Ends an epoch: puts everything before `end` into the dataflows.
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

    /// Ends all instants before `time_ns`, after which no events come; see
    /// [`advance`](Self::advance). In a cluster it waits until all /// processes have ended theirs.
    ///
    /// # Errors
    /// When a process of the cluster is lost before that.
    pub fn finish(&mut self, time_ns: u64, sink: &mut dyn FnMut(Delta<'_>)) -> Result<(), Loss> {
        self.advance(time_ns, sink);
        while let Some(barrier) = &mut self.barrier {
            if self.ended_ns >= self.now_ns {
                barrier.leave();
            }
            if barrier.is_over() && is_done(&self.flows, self.ended_ns) {
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

    /// Whether it is one of several engines that answer together.
    pub(crate) fn is_in_cluster(&self) -> bool {
        self.barrier.is_some()
    }

    /// In a cluster, waits for a message of another process, for at most `most`.
    pub fn wait(&mut self, most: Duration) {
        if self.barrier.is_some() {
            self.worker.step_or_park(Some(most));
        }
    }

    /// The lost process of the cluster, if there is one: there are no more results then. It is
    /// reported a second after the loss, when its /// last messages have been processed.
    pub fn loss(&self) -> Option<Loss> {
        self.cluster.as_ref().and_then(Cluster::loss)
    }

    /// The instant before which everything has been put into the dataflows, in nanoseconds.
    pub fn ended_ns(&self) -> u64 {
        self.ended_ns
    }

    /// What has been done.
    pub fn statistics(&self) -> EngineStatistics {
        let operators = self.flows.iter().map(|flow| flow.operators).sum();
        EngineStatistics { operators, ..self.statistics }
    }

    /// The state of each operator that keeps one from one instant to the next.
    pub fn state(&self) -> impl Iterator<Item = StateSize> {
        let states = self.flows.iter().flat_map(|flow| &flow.states);
        states.map(|&(query, operator, ref state)| StateSize {
            query,
            operator,
            rows: state.rows(),
        })
    }

    /// How many rows, groups and values the operators hold. The call takes time in proportion to
    /// the size of some states.
    pub fn held(&self) -> usize {
        self.state().map(|state| state.rows).sum()
    }

    /// The bytes of long texts that are held, including those of waiting events and of results.
    /// Each counts once. The call takes time in /// proportion to their number.
    pub fn text_bytes(&self) -> usize {
        self.texts.borrow_mut().bytes()
    }

    /// How many events wait for the ends of their instants.
    pub fn waiting(&self) -> usize {
        self.staged.iter().map(Staged::len).sum()
    }
}
