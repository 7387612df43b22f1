//! From nodes to dataflows. What two plans have in common is built once.

use std::collections::{HashMap, VecDeque};
use std::rc::Rc;

use fathom_cql::ast::ToStream;
use timely::container::CapacityContainerBuilder;
use timely::dataflow::channels::pact::Pipeline;
use timely::dataflow::operators::generic::operator::Operator;
use timely::dataflow::{Scope, Stream};

use super::bag::Bag;
use super::groups::Groups;
use super::joins::Join;
use super::node::Node;
use super::rows::ByInstant;
use super::run::{Epoch, Run};
use super::select::select;
use super::sets::{Combination, Top, distinct};
use super::windows::{LastRows, Range};

/// What an operator puts out: one epoch after the other.
pub(super) type Epochs<G> = Stream<G, Rc<Epoch>>;

/// Builds the operators of plans over the same sources.
pub(super) struct Builder<G: Scope<Timestamp = u64>> {
    sources: Vec<Epochs<G>>,
    /// What has been built, by what it is.
    built: HashMap<String, Epochs<G>>,
}

impl<G: Scope<Timestamp = u64>> Builder<G> {
    pub(super) fn new(sources: Vec<Epochs<G>>) -> Self {
        Self { sources, built: HashMap::new() }
    }

    /// How many operators have been built.
    pub(super) fn built(&self) -> usize {
        self.built.len()
    }

    pub(super) fn node(&mut self, node: &Node) -> Epochs<G> {
        if let Node::Source(source) = node {
            return self.sources[*source].clone();
        }
        let name = format!("{node:?}");
        if let Some(built) = self.built.get(&name) {
            return built.clone();
        }
        let built = self.build(node);
        self.built.insert(name, built.clone());
        built
    }

    fn build(&mut self, node: &Node) -> Epochs<G> {
        match node {
            Node::Source(source) => self.sources[*source].clone(),
            Node::Select(input, selection) => {
                let selection = selection.clone();
                unary(&self.node(input), "select", move |epoch| {
                    epoch.runs.iter().filter_map(|run| select(&selection, run)).collect()
                })
            }
            Node::Range { input, length_ns, slide_ns } => {
                let mut window = Range::new(*length_ns, *slide_ns);
                unary(&self.node(input), "range", move |epoch| window.epoch(epoch))
            }
            Node::Rows { input, by, rows } => {
                let mut window = LastRows::new(by.clone(), *rows);
                let mut instants = ByInstant::default();
                unary(&self.node(input), "rows", move |epoch| {
                    instants.each(&[&epoch.runs], |rows, results| {
                        for (_, row, count) in rows {
                            window.arrive(row, *count, results);
                        }
                    })
                })
            }
            Node::Join(left, right, matching) => {
                let mut join = Join::new(matching.clone());
                let (left, right) = (self.node(left), self.node(right));
                binary(&left, &right, "join", move |left, right| join.epoch(left, right))
            }
            Node::Groups { input, keys, aggregates } => {
                let mut groups = Groups::new(*keys, aggregates.clone());
                unary(&self.node(input), "groups", move |epoch| groups.epoch(&epoch.runs))
            }
            Node::Distinct(input) => {
                let mut counts = Bag::default();
                let mut instants = ByInstant::default();
                unary(&self.node(input), "distinct", move |epoch| {
                    instants.net(&[&epoch.runs], |rows, results| {
                        for (_, row, count) in rows {
                            distinct(&mut counts, row, *count, results);
                        }
                    })
                })
            }
            Node::Set { left, right, operation, all } => {
                let mut combination = Combination::new(*operation, *all);
                let mut instants = ByInstant::default();
                let (left, right) = (self.node(left), self.node(right));
                binary(&left, &right, "combine", move |left, right| {
                    instants.net(&[left, right], |rows, results| combination.change(rows, results))
                })
            }
            Node::Both(left, right) => {
                let (left, right) = (self.node(left), self.node(right));
                binary(&left, &right, "both", |left, right| [left, right].concat())
            }
            Node::Top { input, keys, limit } => {
                let mut top = Top::new(keys.clone(), *limit);
                let mut instants = ByInstant::default();
                unary(&self.node(input), "top", move |epoch| {
                    instants.net(&[&epoch.runs], |rows, results| top.change(rows, results))
                })
            }
            Node::Stream(manner, input) => to_stream(&self.node(input), *manner),
        }
    }
}

/// What of a relation is a stream. Within an instant its rows arrive in their order.
fn to_stream<G: Scope<Timestamp = u64>>(input: &Epochs<G>, manner: ToStream) -> Epochs<G> {
    let mut instants = ByInstant::default();
    let mut whole = Bag::default();
    unary(input, "stream", move |epoch| {
        instants.net(&[&epoch.runs], |rows, results| match manner {
            ToStream::Insertions => {
                let came = rows.iter().filter(|(_, _, count)| *count > 0);
                results.extend(came.map(|(_, row, count)| (row.clone(), *count)));
            }
            ToStream::Deletions => {
                let went = rows.iter().filter(|(_, _, count)| *count < 0);
                results.extend(went.map(|(_, row, count)| (row.clone(), -count)));
            }
            ToStream::Whole => {
                for (_, row, count) in rows {
                    whole.add(row.clone(), *count);
                }
                results.extend(whole.iter().map(|(row, count)| (row.clone(), count)));
            }
        })
    })
}

/// An operator that makes an epoch of an epoch.
fn unary<G, L>(input: &Epochs<G>, name: &str, mut logic: L) -> Epochs<G>
where
    G: Scope<Timestamp = u64>,
    L: FnMut(&Epoch) -> Vec<Run> + 'static,
{
    input.unary::<CapacityContainerBuilder<Vec<Rc<Epoch>>>, _, _, _>(Pipeline, name, |_, _| {
        move |input, output| {
            input.for_each(|time, epochs| {
                let mut session = output.session(&time);
                for epoch in epochs.drain(..) {
                    session.give(Rc::new(Epoch { end: epoch.end, runs: logic(&epoch) }));
                }
            });
        }
    })
}

/// An operator that makes an epoch of two of the same stretch of time.
fn binary<G, L>(left: &Epochs<G>, right: &Epochs<G>, name: &str, mut logic: L) -> Epochs<G>
where
    G: Scope<Timestamp = u64>,
    L: FnMut(&[Run], &[Run]) -> Vec<Run> + 'static,
{
    // Both sides get an epoch of each stretch of time, the one perhaps before the other.
    let mut waiting: [VecDeque<Rc<Epoch>>; 2] = Default::default();
    left.binary::<_, CapacityContainerBuilder<Vec<Rc<Epoch>>>, _, _, _, _>(
        right,
        Pipeline,
        Pipeline,
        name,
        |_, _| {
            move |left, right, output| {
                let mut latest = None;
                left.for_each(|time, epochs| {
                    waiting[0].extend(epochs.drain(..));
                    latest = Some(time.retain());
                });
                right.for_each(|time, epochs| {
                    waiting[1].extend(epochs.drain(..));
                    latest = Some(time.retain());
                });
                let [lefts, rights] = &mut waiting;
                while let (Some(left), Some(right), Some(time)) =
                    (lefts.front(), rights.front(), &latest)
                {
                    debug_assert_eq!(left.end, right.end, "both sides have the same stretches");
                    let runs = logic(&left.runs, &right.runs);
                    output.session(time).give(Rc::new(Epoch { end: left.end, runs }));
                    lefts.pop_front();
                    rights.pop_front();
                }
            }
        },
    )
}
