//! Builds dataflows from nodes. Nodes that two plans have in common are built once.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;

use fathom_cql::ast::ToStream;
use timely::container::CapacityContainerBuilder;
use timely::dataflow::channels::pact::Pipeline;
use timely::dataflow::operators::Capability;
use timely::dataflow::operators::generic::operator::Operator;
use timely::dataflow::{Scope, Stream};

use super::bag::Bag;
use super::exchange::{Destination, Member, exchange};
use super::groups::Groups;
use super::joins::Join;
use super::node::{Node, Selection};
use super::rows::ByInstant;
use super::run::{Epoch, Run};
use super::select::select;
use super::sets::{Combination, Top, distinct};
use super::windows::{LastRows, Range};

/// The output of an operator: one epoch after the other.
pub(super) type Epochs<G> = Stream<G, Rc<Epoch>>;

/// The state of an operator.
pub(super) trait Stateful {
    /// The number of rows, groups and values in the state.
    fn rows(&self) -> usize;
}

impl<T: Stateful> Stateful for RefCell<T> {
    fn rows(&self) -> usize {
        self.borrow().rows()
    }
}

/// The processes of an engine that runs in several.
#[derive(Clone)]
pub(super) struct Members {
    pub(super) member: Member,
    /// Whether each process reports its own part of the results.
    pub(super) own_results: bool,
    /// Called with the number of a process that sends invalid data.
    pub(super) wrong: Rc<dyn Fn(usize)>,
}

/// Builds the operators of plans over the same sources.
pub(super) struct Builder<G: Scope<Timestamp = u64>> {
    sources: Vec<Epochs<G>>,
    members: Option<Members>,
    /// The operators built so far, by their descriptions.
    built: HashMap<String, Epochs<G>>,
    /// The states of operators, each with the query that it was built for and the operator's name.
    states: Vec<(usize, &'static str, Rc<dyn Stateful>)>,
    query: usize,
}

impl<G: Scope<Timestamp = u64>> Builder<G> {
    pub(super) fn new(sources: Vec<Epochs<G>>, members: Option<Members>) -> Self {
        Self { sources, members, built: HashMap::new(), states: Vec::new(), query: 0 }
    }

    /// Builds the operators of a query. Process 0 has the results, unless each process reports its
    /// own.
    pub(super) fn build_for(&mut self, query: usize, node: &Node) -> Epochs<G> {
        self.query = query;
        if self.members.as_ref().is_some_and(|members| members.own_results) {
            return self.node(node);
        }
        self.at(node, &Destination::One(0))
    }

    pub(super) fn into_states(self) -> Vec<(usize, &'static str, Rc<dyn Stateful>)> {
        self.states
    }

    /// The number of operators built.
    pub(super) fn built(&self) -> usize {
        self.built.len()
    }

    fn node(&mut self, node: &Node) -> Epochs<G> {
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

    /// The rows of a node, sent to the processes of `place`. Rows are sent before windows by time,
    /// so that each row is sent once and leaves its window in the process to which it was sent.
    fn at(&mut self, node: &Node, place: &Destination) -> Epochs<G> {
        let Some(members) = self.members.clone() else { return self.node(node) };
        let name = format!("{node:?} at {place:?}");
        if let Some(built) = self.built.get(&name) {
            return built.clone();
        }
        let built = match (node, place) {
            (Node::Range { input, length_ns, slide_ns }, _) => {
                let input = self.at(input, place);
                self.range(&input, *length_ns, *slide_ns)
            }
            // The order includes all columns, so it is established after the selection.
            (Node::Select(input, selection), Destination::InOrder(_)) => {
                let input = self.at(input, place);
                selected(&input, selection)
            }
            _ => exchange(&self.node(node), members.member, place, &members.wrong),
        };
        self.built.insert(name, built.clone());
        built
    }

    /// The process that receives all rows of a node.
    fn one(&self, node: &Node) -> usize {
        self.members.as_ref().map_or(0, |members| members.member.of(&format!("{node:?}")))
    }

    fn build(&mut self, node: &Node) -> Epochs<G> {
        match node {
            Node::Source(source) => self.sources[*source].clone(),
            Node::Select(input, selection) => {
                let input = self.node(input);
                selected(&input, selection)
            }
            Node::Range { input, length_ns, slide_ns } => {
                let input = self.node(input);
                self.range(&input, *length_ns, *slide_ns)
            }
            Node::Rows { input, by, rows } => {
                let mut instants = ByInstant::default();
                let window = LastRows::new(by.clone(), *rows);
                let input = self.at(input, &Destination::InOrder(self.one(node)));
                self.unary(&input, "rows", window, move |window, epoch| {
                    instants.each(&[&epoch.runs], |rows, results| {
                        for (_, row, count) in rows {
                            window.arrive(row, *count, results);
                        }
                    })
                })
            }
            Node::Join(left, right, matching) => {
                let join = Join::new(matching.clone());
                let [left, right] = [left, right].map(Rc::clone);
                let places = matching.equal.clone().map(|equal| self.by(equal, node));
                let (left, right) = (self.at(&left, &places[0]), self.at(&right, &places[1]));
                self.binary(&left, &right, "join", join, Join::epoch)
            }
            Node::Groups { input, keys, aggregates } => {
                let is_range = matches!(**input, Node::Range { .. });
                let groups = Groups::new(*keys, aggregates.clone(), is_range);
                let place = self.by((0..*keys).collect(), node);
                let input = self.at(input, &place);
                self.unary(&input, "groups", groups, |groups, epoch| groups.epoch(&epoch.runs))
            }
            Node::Distinct(input) => {
                let mut instants = ByInstant::default();
                let input = self.at(input, &Destination::Row);
                self.unary(&input, "distinct", Bag::default(), move |counts, epoch| {
                    instants.net(&[&epoch.runs], |rows, results| {
                        for (_, row, count) in rows {
                            distinct(counts, row, *count, results);
                        }
                    })
                })
            }
            Node::Set { left, right, operation, all } => {
                let mut instants = ByInstant::default();
                let sets = Combination::new(*operation, *all);
                let [left, right] = [left, right].map(|of| self.at(of, &Destination::Row));
                self.binary(&left, &right, "combine", sets, move |sets, left, right| {
                    instants.net(&[left, right], |rows, results| sets.change(rows, results))
                })
            }
            Node::Both(left, right) => {
                let (left, right) = (self.node(left), self.node(right));
                binary(&left, &right, "both", |left, right| [left, right].concat())
            }
            Node::Top { input, keys, limit } => {
                let mut instants = ByInstant::default();
                let top = Top::new(keys.clone(), *limit);
                let input = self.at(input, &Destination::One(self.one(node)));
                self.unary(&input, "top", top, move |top, epoch| {
                    instants.net(&[&epoch.runs], |rows, results| top.change(rows, results))
                })
            }
            Node::Stream(ToStream::Whole, input) => {
                let input = self.at(input, &Destination::One(self.one(node)));
                self.whole(&input)
            }
            Node::Stream(manner, input) => {
                let input = self.at(input, &Destination::Row);
                changes(&input, if *manner == ToStream::Insertions { 1 } else { -1 })
            }
        }
    }

    /// All rows of a relation, whenever it changes.
    fn whole(&mut self, input: &Epochs<G>) -> Epochs<G> {
        let mut instants = ByInstant::default();
        self.unary(input, "stream", Bag::default(), move |whole, epoch| {
            instants.net(&[&epoch.runs], |rows, results| {
                for (_, row, count) in rows {
                    whole.add(row.clone(), *count);
                }
                results.extend(whole.iter().map(|(row, count)| (row.clone(), count)));
            })
        })
    }

    /// A window by time.
    fn range(&mut self, input: &Epochs<G>, length_ns: u64, slide_ns: u64) -> Epochs<G> {
        self.unary(input, "range", Range::new(length_ns, slide_ns), Range::epoch)
    }

    /// The place of the rows of a node that an operator groups by some columns.
    fn by(&self, columns: Vec<usize>, node: &Node) -> Destination {
        if columns.is_empty() { Destination::One(self.one(node)) } else { Destination::By(columns) }
    }

    /// An operator over one input with a state.
    fn unary<S: Stateful + 'static>(
        &mut self,
        input: &Epochs<G>,
        name: &'static str,
        state: S,
        mut logic: impl FnMut(&mut S, &Epoch) -> Vec<Run> + 'static,
    ) -> Epochs<G> {
        let state = self.hold(name, state);
        unary(input, name, move |epoch| logic(&mut state.borrow_mut(), epoch))
    }

    /// An operator over two inputs with a state.
    fn binary<S: Stateful + 'static>(
        &mut self,
        left: &Epochs<G>,
        right: &Epochs<G>,
        name: &'static str,
        state: S,
        mut logic: impl FnMut(&mut S, &[Run], &[Run]) -> Vec<Run> + 'static,
    ) -> Epochs<G> {
        let state = self.hold(name, state);
        binary(left, right, name, move |left, right| logic(&mut state.borrow_mut(), left, right))
    }

    fn hold<S: Stateful + 'static>(&mut self, name: &'static str, state: S) -> Rc<RefCell<S>> {
        let state = Rc::new(RefCell::new(state));
        self.states.push((self.query, name, Rc::clone(&state) as Rc<dyn Stateful>));
        state
    }
}

/// An operator that filters and projects.
fn selected<G: Scope<Timestamp = u64>>(input: &Epochs<G>, selection: &Selection) -> Epochs<G> {
    let selection = selection.clone();
    unary(input, "select", move |epoch| {
        epoch.runs.iter().filter_map(|run| select(&selection, run)).collect()
    })
}

/// The inserted rows of a relation, with the sign 1, or the deleted ones, with -1.
fn changes<G: Scope<Timestamp = u64>>(input: &Epochs<G>, sign: i64) -> Epochs<G> {
    let mut instants = ByInstant::default();
    unary(input, "stream", move |epoch| {
        // Within an instant, rows are in the order of their values.
        instants.net(&[&epoch.runs], |rows, results| {
            let signed = rows.iter().map(|(_, row, count)| (row, count * sign));
            let inserted = signed.filter(|&(_, count)| count > 0);
            results.extend(inserted.map(|(row, count)| (row.clone(), count)));
        })
    })
}

/// An operator that computes an output epoch from each input epoch.
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

/// An operator that computes an output epoch from two input epochs of the same interval.
fn binary<G, L>(left: &Epochs<G>, right: &Epochs<G>, name: &str, mut logic: L) -> Epochs<G>
where
    G: Scope<Timestamp = u64>,
    L: FnMut(&[Run], &[Run]) -> Vec<Run> + 'static,
{
    // Both sides get every epoch, one side perhaps before the other.
    let mut lefts: VecDeque<(Capability<u64>, Rc<Epoch>)> = VecDeque::new();
    let mut rights: VecDeque<Rc<Epoch>> = VecDeque::new();
    left.binary::<_, CapacityContainerBuilder<Vec<Rc<Epoch>>>, _, _, _, _>(
        right,
        Pipeline,
        Pipeline,
        name,
        |_, _| {
            move |left, right, output| {
                left.for_each(|time, epochs| {
                    let time = time.retain();
                    lefts.extend(epochs.drain(..).map(|epoch| (time.clone(), epoch)));
                });
                right.for_each(|_, epochs| rights.extend(epochs.drain(..)));
                while !lefts.is_empty() && !rights.is_empty() {
                    let Some(((time, left), right)) = lefts.pop_front().zip(rights.pop_front())
                    else {
                        return;
                    };
                    debug_assert_eq!(left.end, right.end, "both sides have the same epochs");
                    let runs = logic(&left.runs, &right.runs);
                    output.session(&time).give(Rc::new(Epoch { end: left.end, runs }));
                }
            }
        },
    )
}
