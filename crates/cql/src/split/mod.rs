//! Divides a query into the part of the hosts that have the events and the part of the centre.
//!
//! The streams of a plan are the union of the streams of all hosts. A relation **distributes** if
//! it is the sum, as bags, of the same relation over each host's streams: windows by time, filters,
//! projections and `union all` distribute. For such a relation a host sends one of the following:
//!
//! - The rows that pass its filters, as a stream. The centre has the window over this stream, so
//!   that a row is sent once, when it arrives, and not again when it leaves.
//! - Groups, distinct rows or first rows, as a relation whose changes are sent. This needs an
//!   operator above that can be [computed from those of the hosts](partial) and whose result
//!   changes rarely.
//!
//! The centre computes the rest: windows of rows, joins, and the operators above them. Filters are
//! moved below these first ([`push`]). Only the columns that the centre uses are sent.
//!
//! Rows of different hosts have no order of arrival within an instant. A window of rows at the
//! centre uses the order in which the centre adds them.

mod partial;
mod push;

use crate::ast::{SetOperation, ToStream};
use crate::catalog::{Catalog, Column, StreamSchema};
use crate::check;
use crate::explain::names;
use crate::plan::{Expression, OrderKey, Output, Plan, Relation, Stream, Window};
use crate::prune::prune;
use crate::value::{Type, Value};

/// The number of hosts that have the events of the streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hosts {
    /// One host, which computes everything.
    One,
    /// Any number of hosts.
    Many,
}

/// The parts of some plans that run at each host and at the centre.
#[derive(Clone, Debug, PartialEq)]
pub struct Split {
    /// The plans whose results every host sends. Each is an input of the centre, by its position: a
    /// stream is a `Stream::Source`, a relation a `Relation::Given`.
    pub fragments: Vec<Plan>,
    /// The plans of the centre over the fragments, one for each plan that was split.
    pub centre: Vec<Plan>,
}

impl Split {
    /// The inputs of the centre, named `fragment 1` and so on.
    pub fn catalog(&self) -> Catalog {
        let schema = |(at, fragment): (usize, &Plan)| StreamSchema {
            name: format!("fragment {}", at + 1),
            columns: fragment.columns.clone(),
            aliases: Vec::new(),
            values: Vec::new(),
        };
        Catalog { streams: self.fragments.iter().enumerate().map(schema).collect() }
    }
}

/// Splits plans that [`check`](crate::check::check) accepts. The centre's result for each is that
/// of the plan over the events of all hosts. Data that several plans need is sent once.
pub fn split(plans: &[Plan], catalog: &Catalog, hosts: Hosts) -> Split {
    let mut splitter = Splitter { catalog, fragments: Vec::new() };
    let part = |plan: &Plan| match hosts {
        Hosts::One => splitter.whole(plan),
        Hosts::Many => splitter.plan(plan),
    };
    let centre = plans.iter().map(part).collect();
    let mut split = Split { fragments: splitter.fragments, centre };
    let inputs = split.catalog();
    let used = prune(&mut split.centre, &inputs);
    for (fragment, used) in split.fragments.iter_mut().zip(used) {
        narrow(fragment, &used);
    }
    split
}

struct Splitter<'a> {
    catalog: &'a Catalog,
    fragments: Vec<Plan>,
}

impl Splitter<'_> {
    /// A plan that the only host computes completely. The centre keeps the order of the result.
    fn whole(&mut self, plan: &Plan) -> Plan {
        let at = self.send(plan.output.clone(), Some(&plan.columns));
        let output = match &plan.output {
            Output::Stream(_) => Output::Stream(Stream::Source(at)),
            Output::Relation(relation) => {
                let given = Relation::Given(at);
                let order = order(relation, plan.columns.len());
                Output::Relation(if order.is_empty() {
                    given
                } else {
                    Relation::Top(Box::new(given), order, None)
                })
            }
        };
        Plan { output, columns: plan.columns.clone() }
    }

    fn plan(&mut self, plan: &Plan) -> Plan {
        let output = match &plan.output {
            Output::Stream(stream) => Output::Stream(self.stream(stream, &plan.columns)),
            Output::Relation(relation) => {
                let relation = push::filters(relation.clone());
                Output::Relation(self.relation(&relation, Some(&plan.columns)))
            }
        };
        Plan { output, columns: plan.columns.clone() }
    }

    fn stream(&mut self, stream: &Stream, wanted: &[Column]) -> Stream {
        match stream {
            Stream::Source(_) => Stream::Source(self.send_rows(&all_of(stream), Some(wanted))),
            Stream::Of(how, of) => {
                let of = push::filters((**of).clone());
                if distributes_stream(stream) {
                    return Stream::Source(self.send_rows(&of, Some(wanted)));
                }
                Stream::Of(*how, Box::new(self.relation(&of, Some(wanted))))
            }
        }
    }

    /// The part of a relation that the centre computes. `wanted` are the columns with the names to
    /// use.
    fn relation(&mut self, relation: &Relation, wanted: Option<&[Column]>) -> Relation {
        if distributes(relation) {
            return self.rows(relation, wanted);
        }
        match relation {
            Relation::Window(window, stream) => {
                let stream = match &**stream {
                    Stream::Of(how, of) => Stream::Of(*how, Box::new(self.relation(of, None))),
                    source @ Stream::Source(_) => {
                        Stream::Source(self.send_rows(&all_of(source), None))
                    }
                };
                Relation::Window(window.clone(), Box::new(stream))
            }
            Relation::Given(source) => Relation::Given(*source),
            Relation::Filter(of, predicate) => {
                Relation::Filter(Box::new(self.relation(of, wanted)), predicate.clone())
            }
            Relation::Project(of, expressions) => {
                Relation::Project(Box::new(self.relation(of, None)), expressions.clone())
            }
            Relation::Join(join) => {
                let mut join = join.clone();
                join.left = self.relation(&join.left, None);
                join.right = self.relation(&join.right, None);
                Relation::Join(join)
            }
            Relation::Aggregate(of, keys, aggregates) => {
                if let Some((sent, merge)) = partial::aggregates(of, keys, aggregates, self.catalog)
                {
                    return merge.over(self.given(&sent, None));
                }
                let of = Box::new(self.relation(of, None));
                Relation::Aggregate(of, keys.clone(), aggregates.clone())
            }
            Relation::Distinct(of) => Relation::Distinct(Box::new(self.each_once(of, wanted))),
            Relation::Set { operation, all, left, right } => {
                let mut sent = |side: &Relation| {
                    Box::new(if *all {
                        self.relation(side, wanted)
                    } else {
                        self.each_once(side, wanted)
                    })
                };
                let (left, right) = (sent(left), sent(right));
                Relation::Set { operation: *operation, all: *all, left, right }
            }
            Relation::Top(of, keys, limit) => {
                let of = if distributes(of) && partial::sends_first_rows(of, *limit) {
                    let first = Relation::Top(of.clone(), keys.clone(), *limit);
                    self.given(&first, wanted)
                } else {
                    self.relation(of, wanted)
                };
                Relation::Top(Box::new(of), keys.clone(), *limit)
            }
        }
    }

    /// A relation whose rows may be deduplicated.
    fn each_once(&mut self, relation: &Relation, wanted: Option<&[Column]>) -> Relation {
        if distributes(relation) && partial::sends_distinct(relation) {
            let distinct = Relation::Distinct(Box::new(relation.clone()));
            return self.given(&distinct, wanted);
        }
        self.relation(relation, wanted)
    }

    /// A relation that distributes, computed from the streams of its insertions.
    fn rows(&mut self, relation: &Relation, wanted: Option<&[Column]>) -> Relation {
        match bottom(relation) {
            Relation::Set { operation, all, left, right } => {
                let mut side =
                    |side: &Relation| Box::new(self.rows(&over(relation, side.clone()), wanted));
                let (left, right) = (side(left), side(right));
                Relation::Set { operation: *operation, all: *all, left, right }
            }
            Relation::Window(window, _) => {
                let at = self.send_rows(relation, wanted);
                let rows = Relation::Window(window.clone(), Box::new(Stream::Source(at)));
                self.with_nulls(relation, rows)
            }
            _ => self.given(relation, wanted),
        }
    }

    /// Sends a relation unchanged.
    fn given(&mut self, relation: &Relation, wanted: Option<&[Column]>) -> Relation {
        let at = self.send(Output::Relation(relation.clone()), wanted);
        self.with_nulls(relation, Relation::Given(at))
    }

    /// A sent relation in which the centre replaces the columns without a type by null.
    fn with_nulls(&self, relation: &Relation, sent: Relation) -> Relation {
        let kinds = check::columns(relation, self.catalog).unwrap_or_default();
        if kinds.iter().all(Option::is_some) {
            return sent;
        }
        let value = |(column, kind): (usize, &Option<Type>)| match kind {
            Some(_) => Expression::Column(column),
            None => Expression::Literal(Value::Null),
        };
        Relation::Project(Box::new(sent), kinds.iter().enumerate().map(value).collect())
    }

    /// Sends the insertions into a relation of filters and projections over a window, as a stream.
    /// Returns the position of the centre's input.
    fn send_rows(&mut self, relation: &Relation, wanted: Option<&[Column]>) -> usize {
        let rows = Box::new(all_rows(relation));
        self.send(Output::Stream(Stream::Of(ToStream::Insertions, rows)), wanted)
    }

    fn send(&mut self, output: Output, wanted: Option<&[Column]>) -> usize {
        let columns = columns(&output, self.catalog, wanted);
        let kinds = |columns: &[Column]| -> Vec<Type> { columns.iter().map(|c| c.kind).collect() };
        let same =
            |known: &Plan| known.output == output && kinds(&known.columns) == kinds(&columns);
        if let Some(known) = self.fragments.iter().position(same) {
            return known;
        }
        self.fragments.push(Plan { output, columns });
        self.fragments.len() - 1
    }
}

/// Whether a relation is the sum of the same relation over each host's streams.
fn distributes(relation: &Relation) -> bool {
    match relation {
        Relation::Window(Window::Unbounded | Window::Range { .. }, stream) => {
            distributes_stream(stream)
        }
        Relation::Given(_) => true,
        Relation::Filter(of, _) | Relation::Project(of, _) => distributes(of),
        Relation::Set { operation: SetOperation::Union, all: true, left, right } => {
            distributes(left) && distributes(right)
        }
        Relation::Window(Window::Rows { .. }, _)
        | Relation::Set { .. }
        | Relation::Join(_)
        | Relation::Aggregate(..)
        | Relation::Distinct(_)
        | Relation::Top(..) => false,
    }
}

/// Whether a stream is the sum of the same stream over each host's streams: the insertions into a
/// relation from which no row is deleted.
fn distributes_stream(stream: &Stream) -> bool {
    match stream {
        Stream::Source(_) => true,
        Stream::Of(ToStream::Insertions, of) => match bottom(of) {
            Relation::Window(Window::Unbounded, stream) => distributes_stream(stream),
            _ => false,
        },
        Stream::Of(ToStream::Deletions | ToStream::Whole, _) => false,
    }
}

/// The operator below filters and projections.
fn bottom(relation: &Relation) -> &Relation {
    match relation {
        Relation::Filter(of, _) | Relation::Project(of, _) => bottom(of),
        other => other,
    }
}

/// The filters and projections of a relation, over another.
fn over(relation: &Relation, other: Relation) -> Relation {
    match relation {
        Relation::Filter(of, predicate) => {
            Relation::Filter(Box::new(over(of, other)), predicate.clone())
        }
        Relation::Project(of, expressions) => {
            Relation::Project(Box::new(over(of, other)), expressions.clone())
        }
        _ => other,
    }
}

/// The filters and projections of a relation over a window, applied to all rows of the window's
/// stream.
fn all_rows(relation: &Relation) -> Relation {
    let all = match bottom(relation) {
        Relation::Window(_, stream) => match &**stream {
            Stream::Of(_, of) => all_rows(of),
            source @ Stream::Source(_) => all_of(source),
        },
        other => other.clone(),
    };
    over(relation, all)
}

fn all_of(stream: &Stream) -> Relation {
    Relation::Window(Window::Unbounded, Box::new(stream.clone()))
}

/// The columns by which a plan's result is ordered, if it is ordered.
fn order(relation: &Relation, columns: usize) -> Vec<OrderKey> {
    let stays = |(at, value): (usize, &Expression)| *value == Expression::Column(at);
    let keys = match relation {
        Relation::Top(_, keys, _) => keys,
        // A last projection removes keys that are not selected.
        Relation::Project(of, values) if values.iter().enumerate().all(stays) => match &**of {
            Relation::Top(_, keys, _) => keys,
            _ => return Vec::new(),
        },
        _ => return Vec::new(),
    };
    let selected =
        |key: &&OrderKey| matches!(key.expression, Expression::Column(at) if at < columns);
    keys.iter().take_while(selected).cloned().collect()
}

/// The columns of a fragment. Columns that can only be null have the wanted type, or any.
fn columns(output: &Output, catalog: &Catalog, wanted: Option<&[Column]>) -> Vec<Column> {
    let of = |relation: &Relation| {
        let kinds = check::columns(relation, catalog).unwrap_or_default();
        if let Some(wanted) = wanted.filter(|wanted| wanted.len() == kinds.len()) {
            return wanted.to_vec();
        }
        let named = names(relation, catalog).into_iter().zip(kinds);
        named.map(|(name, kind)| Column { name, kind: kind.unwrap_or(Type::Integer) }).collect()
    };
    match output {
        Output::Stream(Stream::Of(_, relation)) => of(relation),
        Output::Stream(source @ Stream::Source(_)) => of(&all_of(source)),
        Output::Relation(relation) => of(relation),
    }
}

/// Removes the columns of a fragment that are not in `used`.
fn narrow(fragment: &mut Plan, used: &[usize]) {
    if used.len() == fragment.columns.len() {
        return;
    }
    let relation = match &mut fragment.output {
        Output::Stream(Stream::Of(_, relation)) => &mut **relation,
        Output::Relation(relation) => relation,
        // A fragment that is a whole plan keeps all columns.
        Output::Stream(Stream::Source(_)) => return,
    };
    match relation {
        Relation::Project(_, values) => {
            *values = used.iter().map(|&column| values[column].clone()).collect();
        }
        other => {
            let all = std::mem::replace(other, Relation::Given(0));
            let values = used.iter().map(|&column| Expression::Column(column)).collect();
            *other = Relation::Project(Box::new(all), values);
        }
    }
    fragment.columns = used.iter().map(|&column| fragment.columns[column].clone()).collect();
}
