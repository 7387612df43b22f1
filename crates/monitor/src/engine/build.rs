//! From plans to dataflows. What two plans have in common is built once.

use std::collections::HashMap;

use differential_dataflow::VecCollection;
use fathom_cql::ast::ToStream;
use fathom_cql::eval::{evaluate, is_true};
use fathom_cql::plan::{Relation, Stream, Window};
use timely::dataflow::Scope;

use super::{Entry, Tuple, changes, groups, joins, sets, windows};

/// Builds the operators of plans over the same sources.
pub(super) struct Builder<G: Scope<Timestamp = u64>> {
    sources: Vec<VecCollection<G, Entry, isize>>,
    /// What has been built, by what it is.
    relations: HashMap<String, VecCollection<G, Tuple, isize>>,
    streams: HashMap<String, VecCollection<G, Entry, isize>>,
}

impl<G: Scope<Timestamp = u64>> Builder<G> {
    pub(super) fn new(sources: Vec<VecCollection<G, Entry, isize>>) -> Self {
        Self { sources, relations: HashMap::new(), streams: HashMap::new() }
    }

    /// How many operators have been built.
    pub(super) fn built(&self) -> usize {
        self.relations.len() + self.streams.len()
    }

    pub(super) fn stream(&mut self, stream: &Stream) -> VecCollection<G, Entry, isize> {
        let (manner, relation) = match stream {
            Stream::Source(source) => return self.sources[*source].clone(),
            Stream::Of(manner, relation) => (*manner, relation),
        };
        let name = format!("{stream:?}");
        if let Some(built) = self.streams.get(&name) {
            return built.clone();
        }
        let of = self.relation(relation);
        let built = if manner == ToStream::Insertions && only_grows(relation) {
            of.map(|row| (0, row))
        } else {
            changes::to_stream(&of, manner)
        };
        self.streams.insert(name, built.clone());
        built
    }

    pub(super) fn relation(&mut self, relation: &Relation) -> VecCollection<G, Tuple, isize> {
        let name = format!("{relation:?}");
        if let Some(built) = self.relations.get(&name) {
            return built.clone();
        }
        let built = match relation {
            Relation::Window(window, stream) => windows::window(&self.stream(stream), window),
            Relation::Given(source) => self.sources[*source].map(|(_, row)| row),
            Relation::Filter(input, predicate) => {
                let predicate = predicate.clone();
                self.relation(input).filter(move |row| is_true(&evaluate(&predicate, row)))
            }
            Relation::Project(input, expressions) => {
                let expressions = expressions.clone();
                self.relation(input)
                    .map(move |row| expressions.iter().map(|each| evaluate(each, &row)).collect())
            }
            Relation::Join(join) => {
                joins::join(&self.relation(&join.left), &self.relation(&join.right), join)
            }
            Relation::Aggregate(input, keys, aggregates) => {
                groups::aggregate(&self.relation(input), keys.clone(), aggregates.clone())
            }
            Relation::Distinct(input) => sets::distinct(&self.relation(input)),
            Relation::Set { operation, all, left, right } => {
                sets::combine(&self.relation(left), &self.relation(right), *operation, *all)
            }
            Relation::Top(input, _, None) => self.relation(input),
            Relation::Top(input, keys, Some(limit)) => {
                sets::top(&self.relation(input), keys.clone(), *limit)
            }
        };
        self.relations.insert(name, built.clone());
        built
    }
}

/// Whether rows that are in the relation never leave it, and each operator says so at once: then
/// its insertions are itself.
fn only_grows(relation: &Relation) -> bool {
    match relation {
        Relation::Window(Window::Unbounded, stream) => match &**stream {
            Stream::Source(_) => true,
            Stream::Of(ToStream::Insertions, relation) => only_grows(relation),
            Stream::Of(ToStream::Deletions | ToStream::Whole, _) => false,
        },
        Relation::Filter(input, _) | Relation::Project(input, _) => only_grows(input),
        _ => false,
    }
}
