//! The engine: plans as dataflows, on one thread.
//!
//! A plan becomes [nodes](node), and each node an operator of timely dataflow's. What travels
//! between operators are [epochs](run::Epoch): all that changes in a stretch of time, by column, as
//! rows that come and go in event time. Whoever calls [`Engine::advance`] says how long a stretch
//! is, and each operator works once for all of it.
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
mod vector;
mod windows;

use std::collections::HashMap;
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
use build::Builder;
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
    inputs: Vec<InputHandle<u64, Rc<Epoch>>>,
    staged: Vec<Staged>,
    probe: Handle<u64>,
    results: Results,
    /// The queries whose result is that of each output.
    queries: Vec<Vec<usize>>,
    teller: Teller,
    /// Everything before this is over.
    now_ns: u64,
    statistics: EngineStatistics,
}

impl Engine {
    /// An engine for `plans` over `sources` input streams.
    pub fn new(sources: usize, plans: &[Plan]) -> Self {
        let mut worker =
            Worker::new(WorkerConfig::default(), Thread::default(), Some(Instant::now()));
        let results = Results::default();
        let probe = Handle::new();
        let mut queries: Vec<Vec<usize>> = Vec::new();
        let (inputs, operators) = worker.dataflow::<u64, _, _>(|scope| {
            let (inputs, streams): (Vec<_>, Vec<_>) =
                (0..sources).map(|_| scope.new_input()).unzip();
            let mut builder = Builder::new(streams);
            let mut outputs: HashMap<String, usize> = HashMap::new();
            for (query, plan) in plans.iter().enumerate() {
                let node = node::output(&plan.output);
                let output = *outputs.entry(format!("{node:?}")).or_insert(queries.len());
                if output < queries.len() {
                    queries[output].push(query);
                    continue;
                }
                queries.push(vec![query]);
                let results = results.clone();
                let stream = builder.node(&node);
                stream
                    .inspect(move |epoch| results.add(output, Rc::clone(epoch)))
                    .probe_with(&probe);
            }
            (inputs, builder.built())
        });
        let staged = inputs.iter().map(|_| Staged::default()).collect();
        let statistics = EngineStatistics { operators, ..EngineStatistics::default() };
        let teller = Teller::default();
        Self { worker, inputs, staged, probe, results, queries, teller, now_ns: 0, statistics }
    }

    /// Takes an event of a source at an instant, in nanoseconds. An event of an instant that is
    /// over is counted and left out.
    pub fn push(&mut self, source: usize, time_ns: u64, row: &[Value]) {
        let Some(staged) = self.staged.get_mut(source) else { return };
        if time_ns < self.now_ns {
            self.statistics.late += 1;
            return;
        }
        staged.push(time_ns, 1, row);
        self.statistics.events += 1;
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

    /// Ends all instants before `time_ns`, and calls `sink` for each change that results: those
    /// of one query in order of time, and within an instant in order of the rows.
    pub fn advance(&mut self, time_ns: u64, sink: &mut dyn FnMut(Delta<'_>)) {
        if time_ns <= self.now_ns {
            return;
        }
        self.now_ns = time_ns;
        for (input, staged) in self.inputs.iter_mut().zip(&mut self.staged) {
            input.send(Rc::new(Epoch { end: time_ns, runs: staged.take(time_ns) }));
            input.advance_to(time_ns);
            input.flush();
        }
        while self.probe.less_than(&time_ns) {
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
        self.statistics
    }
}
