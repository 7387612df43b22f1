//! The engine: plans as dataflows, on one thread.
//!
//! A plan becomes [nodes](node), and each node an operator of timely dataflow's. What travels
//! between operators are [epochs](run::Epoch): all that changes in a stretch of time, by column, as
//! rows that come and go in event time. Whoever calls [`Engine::advance`] says how long a stretch
//! is, and each operator works once for all of it.
//!
//! Queries that are added together are one dataflow, in which what they have in common is there
//! once. Others that are added later are another one, over the same epochs.
//!
//! A row that leaves a window is an update of the future, known when the row comes. Windows hold
//! it back until then, so that operators behind them see what is happening only.

mod bag;
mod build;
mod groups;
mod input;
mod joins;
mod node;
mod results;
mod rows;
mod run;
mod select;
mod sets;
mod state;
mod tallies;
mod vector;
mod windows;

use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;
use std::time::Instant;

use fathom_cql::Value;
use fathom_cql::plan::Plan;
use timely::WorkerConfig;
use timely::communication::allocator::thread::Thread;
use timely::dataflow::InputHandle;
use timely::dataflow::operators::probe::Handle;
use timely::dataflow::operators::{Input, Inspect, Probe};
use timely::worker::Worker;

use crate::columns::Column;
use crate::read::Condition;
use build::{Builder, Holds};
use input::Staged;
use results::{Results, Teller};
use run::Epoch;

pub use results::Delta;

/// A row by itself: cheap to copy.
type Tuple = Rc<[Value]>;

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

/// What is known of the rows of a source that plans look at: each has, in some columns, the texts
/// of one of these. `None` where nothing is known.
pub(crate) fn conditions(plans: &[Plan], source: usize) -> Option<Vec<Condition>> {
    let mut all = Vec::new();
    let mut known = |plan: &Plan| {
        node::conditions(&node::output(&plan.output), source, &mut |texts| all.push(texts))
    };
    plans.iter().all(&mut known).then_some(all)
}

/// Runs plans over events.
pub struct Engine {
    worker: Worker<Thread>,
    staged: Vec<Staged>,
    flows: Vec<Flow>,
    results: Results,
    /// The queries whose result is that of each output; none, where all were removed.
    queries: Vec<Vec<usize>>,
    /// How many queries there have ever been.
    numbers: usize,
    teller: Teller,
    /// Everything before this is over.
    now_ns: u64,
    statistics: EngineStatistics,
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

impl Engine {
    /// An engine for `plans` over `sources` input streams.
    pub fn new(sources: usize, plans: &[Plan]) -> Self {
        let mut engine = Self {
            worker: Worker::new(WorkerConfig::default(), Thread::default(), Some(Instant::now())),
            staged: (0..sources).map(|_| Staged::default()).collect(),
            flows: Vec::new(),
            results: Results::default(),
            queries: Vec::new(),
            numbers: 0,
            teller: Teller::default(),
            now_ns: 0,
            statistics: EngineStatistics::default(),
        };
        engine.add(plans);
        engine
    }

    /// Adds queries, and returns their numbers. They see the events of all instants that are not
    /// over yet. What they have in common is computed, and held, once.
    pub fn add(&mut self, plans: &[Plan]) -> Range<usize> {
        let first = self.numbers;
        self.numbers += plans.len();
        if plans.is_empty() {
            return first..first;
        }
        let number = self.worker.next_dataflow_index();
        let first_output = self.queries.len();
        let probe = Handle::new();
        let Self { worker, staged, queries, results, .. } = self;
        let (mut inputs, operators, states) = worker.dataflow::<u64, _, _>(|scope| {
            let (inputs, streams): (Vec<_>, Vec<_>) =
                staged.iter().map(|_| scope.new_input()).unzip();
            let mut builder = Builder::new(streams);
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
            input.advance_to(self.now_ns);
        }
        let outputs = first_output..self.queries.len();
        self.flows.push(Flow { number, inputs, probe, outputs, operators, states });
        first..self.numbers
    }

    /// Removes a query: it has no more results. What is held for those alone that were removed is
    /// given up once all that were added with it are.
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

    /// Where what comes at an instant goes, which is counted; nowhere, if the instant is over.
    fn staged(&mut self, source: usize, time_ns: u64) -> Option<&mut Staged> {
        let staged = self.staged.get_mut(source)?;
        if time_ns < self.now_ns {
            self.statistics.late += 1;
            return None;
        }
        self.statistics.events += 1;
        Some(staged)
    }

    /// Takes an event of a source at an instant, in nanoseconds. An event of an instant that is
    /// over is counted and left out.
    pub fn push(&mut self, source: usize, time_ns: u64, row: &[Value]) {
        if let Some(staged) = self.staged(source, time_ns) {
            staged.push(time_ns, 1, row);
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
            staged.push_columns(times_ns, columns);
        }
    }

    /// Takes a change of an input that is a relation: at an instant, in nanoseconds, a row is there
    /// so often more or, below 0, less. Rows of a stream may be given so too: within an instant
    /// they then arrive in the order of their values. What comes when its instant is over is
    /// counted and left out, as events are.
    ///
    /// The caller sees to it that no row is there less often than never at the end of an instant,
    /// and that counts, which a peer may have given, stay far from the limits of their type.
    pub fn change(&mut self, source: usize, time_ns: u64, row: &[Value], count: i64) {
        if let Some(staged) = self.staged(source, time_ns) {
            staged.change(time_ns, count, row);
        }
    }

    /// Ends all instants before `time_ns`, and calls `sink` for each change that results: those
    /// of one query in order of time, and within an instant in order of the rows.
    pub fn advance(&mut self, time_ns: u64, sink: &mut dyn FnMut(Delta<'_>)) {
        if time_ns <= self.now_ns {
            return;
        }
        self.now_ns = time_ns;
        for (source, staged) in self.staged.iter_mut().enumerate() {
            let epoch = Rc::new(Epoch { end: time_ns, runs: staged.take(time_ns) });
            for flow in &mut self.flows {
                flow.inputs[source].send(Rc::clone(&epoch));
                flow.inputs[source].advance_to(time_ns);
            }
        }
        while self.flows.iter().any(|flow| flow.probe.less_than(&time_ns)) {
            self.worker.step();
        }
        for (output, epoch) in self.results.take() {
            self.teller.tell(&epoch.runs, |time_ns, count, row| {
                for &query in &self.queries[output] {
                    sink(Delta { query, time_ns, count, row });
                }
            });
        }
    }

    /// What has been done.
    pub fn statistics(&self) -> EngineStatistics {
        let operators = self.flows.iter().map(|flow| flow.operators).sum();
        EngineStatistics { operators, ..self.statistics }
    }

    /// What each operator holds that holds anything from one instant to the next.
    pub fn state(&self) -> impl Iterator<Item = StateSize> {
        let states = self.flows.iter().flat_map(|flow| &flow.states);
        states.map(|&(query, operator, ref state)| StateSize {
            query,
            operator,
            rows: state.rows(),
        })
    }
}
