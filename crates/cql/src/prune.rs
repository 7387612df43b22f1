//! Removes the columns of the inputs that no query uses.

use std::collections::BTreeSet;

use crate::ast::ToStream;
use crate::catalog::Catalog;
use crate::plan::{Aggregate, Expression, Join, OrderKey, Output, Plan, Relation, Stream, Window};
use crate::planner::{each_column, map_columns};

/// A set of columns, by position.
type Columns = BTreeSet<usize>;

/// For each original column, its new position; `None` if it was removed.
type Places = Vec<Option<usize>>;

/// Rewrites plans so that their inputs have only the columns that the plans use. Returns these
/// columns for each input of the catalogue, in order. The rows of the inputs must then have exactly
/// these columns.
pub fn prune(plans: &mut [Plan], catalog: &Catalog) -> Vec<Vec<usize>> {
    let widths: Vec<usize> = catalog.streams.iter().map(|stream| stream.columns.len()).collect();
    let mut pruner = Pruner {
        needed: vec![Columns::new(); widths.len()],
        places: widths.iter().map(|&width| (0..width).map(Some).collect()).collect(),
        widths,
    };
    // The first pass collects the columns of each input that the plans use.
    for plan in &mut *plans {
        pruner.plan(plan);
    }
    for (places, needed) in pruner.places.iter_mut().zip(&pruner.needed) {
        places.fill(None);
        for (new, &old) in needed.iter().enumerate() {
            if let Some(place) = places.get_mut(old) {
                *place = Some(new);
            }
        }
    }
    for plan in plans {
        plan.output = pruner.plan(plan);
    }
    pruner.needed.into_iter().map(|columns| columns.into_iter().collect()).collect()
}

struct Pruner {
    widths: Vec<usize>,
    needed: Vec<Columns>,
    places: Vec<Places>,
}

impl Pruner {
    fn plan(&mut self, plan: &Plan) -> Output {
        let all = (0..plan.columns.len()).collect();
        match &plan.output {
            Output::Stream(stream) => Output::Stream(self.stream(stream, &all).0),
            Output::Relation(relation) => Output::Relation(self.relation(relation, &all).0),
        }
    }

    /// The number of columns of a relation.
    fn width(&self, relation: &Relation) -> usize {
        match relation {
            Relation::Window(_, stream) => match &**stream {
                Stream::Source(source) => self.widths.get(*source).copied().unwrap_or(0),
                Stream::Of(_, relation) => self.width(relation),
            },
            Relation::Given(source) => self.widths.get(*source).copied().unwrap_or(0),
            Relation::Project(_, expressions) => expressions.len(),
            Relation::Join(join) => join.left_columns + join.right_columns,
            Relation::Aggregate(_, keys, aggregates) => keys.len() + aggregates.len(),
            Relation::Filter(input, _) | Relation::Distinct(input) | Relation::Top(input, ..) => {
                self.width(input)
            }
            Relation::Set { left, .. } => self.width(left),
        }
    }

    fn stream(&mut self, stream: &Stream, needed: &Columns) -> (Stream, Places) {
        match stream {
            Stream::Source(source) => (Stream::Source(*source), self.input(*source, needed)),
            Stream::Of(manner, relation) => {
                // Changes depend on whole rows, unless rows are never deleted.
                let grows = *manner == ToStream::Insertions && relation.only_grows();
                let all = (0..self.width(relation)).collect();
                let (relation, places) = self.relation(relation, if grows { needed } else { &all });
                (Stream::Of(*manner, Box::new(relation)), places)
            }
        }
    }

    fn input(&mut self, source: usize, needed: &Columns) -> Places {
        self.needed[source].extend(needed);
        self.places[source].clone()
    }

    fn relation(&mut self, relation: &Relation, needed: &Columns) -> (Relation, Places) {
        match relation {
            Relation::Window(window, stream) => self.window(window, stream, needed),
            Relation::Given(source) => (Relation::Given(*source), self.input(*source, needed)),
            Relation::Filter(input, predicate) => {
                let mut needed = needed.clone();
                collect(predicate, &mut needed);
                let (input, places) = self.relation(input, &needed);
                let predicate = moved(predicate, &places);
                (Relation::Filter(Box::new(input), predicate), places)
            }
            Relation::Project(input, expressions) => {
                let mut of_input = Columns::new();
                let mut places: Places = vec![None; expressions.len()];
                let mut kept = 0;
                for (column, expression) in expressions.iter().enumerate() {
                    if needed.contains(&column) {
                        collect(expression, &mut of_input);
                        places[column] = Some(kept);
                        kept += 1;
                    }
                }
                let (input, of_input) = self.relation(input, &of_input);
                let is_kept = |(column, _): &(usize, &Expression)| places[*column].is_some();
                let kept = expressions.iter().enumerate().filter(is_kept);
                let expressions = kept.map(|(_, each)| moved(each, &of_input)).collect();
                (Relation::Project(Box::new(input), expressions), places)
            }
            Relation::Join(join) => self.join(join, needed),
            Relation::Aggregate(input, keys, aggregates) => {
                let mut of_input = Columns::new();
                let arguments = aggregates.iter().filter_map(|each| each.argument.as_ref());
                for expression in keys.iter().chain(arguments) {
                    collect(expression, &mut of_input);
                }
                let (input, places) = self.relation(input, &of_input);
                let keys: Vec<_> = keys.iter().map(|key| moved(key, &places)).collect();
                let moved_aggregate = |each: &Aggregate| Aggregate {
                    argument: each.argument.as_ref().map(|argument| moved(argument, &places)),
                    ..each.clone()
                };
                let aggregates: Vec<_> = aggregates.iter().map(moved_aggregate).collect();
                let own = (0..keys.len() + aggregates.len()).map(Some).collect();
                (Relation::Aggregate(Box::new(input), keys, aggregates), own)
            }
            Relation::Distinct(input) => {
                let (input, places) = self.whole(input);
                (Relation::Distinct(Box::new(input)), places)
            }
            Relation::Set { operation, all, left, right } => {
                let ((left, places), (right, _)) = (self.whole(left), self.whole(right));
                let (operation, all) = (*operation, *all);
                let (left, right) = (Box::new(left), Box::new(right));
                (Relation::Set { operation, all, left, right }, places)
            }
            Relation::Top(input, keys, limit) => {
                let (input, places) = self.whole(input);
                let moved_key = |key: &OrderKey| OrderKey {
                    expression: moved(&key.expression, &places),
                    descending: key.descending,
                };
                let keys = keys.iter().map(moved_key).collect();
                (Relation::Top(Box::new(input), keys, *limit), places)
            }
        }
    }

    fn window(&mut self, window: &Window, stream: &Stream, needed: &Columns) -> (Relation, Places) {
        let mut needed = needed.clone();
        if let Window::Rows { by, .. } = window {
            needed.extend(by);
            // Rows of one instant arrive in the order of all their values. Rows of an
            // input, filtered and projected or not, keep their order of arrival.
            match stream {
                Stream::Of(ToStream::Insertions, relation) if relation.only_grows() => {}
                Stream::Of(_, relation) => needed.extend(0..self.width(relation)),
                Stream::Source(_) => {}
            }
        }
        let (stream, places) = self.stream(stream, &needed);
        let window = match window {
            Window::Rows { by, rows } => {
                let by = by.iter().filter_map(|&column| places[column]).collect();
                Window::Rows { by, rows: *rows }
            }
            other => other.clone(),
        };
        (Relation::Window(window, Box::new(stream)), places)
    }

    /// A relation of which all columns are needed. They keep their positions.
    fn whole(&mut self, relation: &Relation) -> (Relation, Places) {
        let width = self.width(relation);
        self.relation(relation, &(0..width).collect())
    }

    fn join(&mut self, join: &Join, needed: &Columns) -> (Relation, Places) {
        let mut of_both = needed.clone();
        if let Some(residual) = &join.residual {
            collect(residual, &mut of_both);
        }
        let mut of_left: Columns = of_both.range(..join.left_columns).copied().collect();
        let mut of_right: Columns =
            of_both.range(join.left_columns..).map(|column| column - join.left_columns).collect();
        for (left, right) in &join.equal {
            collect(left, &mut of_left);
            collect(right, &mut of_right);
        }
        let (left, left_places) = self.relation(&join.left, &of_left);
        let (right, right_places) = self.relation(&join.right, &of_right);
        let left_columns = kept(&left_places);
        let right_columns = kept(&right_places);
        let shifted = right_places.iter().map(|place| place.map(|place| place + left_columns));
        let places: Places = left_places.iter().copied().chain(shifted).collect();
        let equal = join.equal.iter();
        let join = Join {
            left,
            right,
            kind: join.kind,
            equal: equal
                .map(|(left, right)| (moved(left, &left_places), moved(right, &right_places)))
                .collect(),
            residual: join.residual.as_ref().map(|residual| moved(residual, &places)),
            left_columns,
            right_columns,
        };
        (Relation::Join(Box::new(join)), places)
    }
}

/// The number of remaining columns.
fn kept(places: &Places) -> usize {
    places.iter().flatten().max().map_or(0, |last| last + 1)
}

/// Adds the columns that an expression uses.
fn collect(expression: &Expression, columns: &mut Columns) {
    each_column(expression, &mut |column| {
        columns.insert(column);
    });
}

/// The expression over the new positions of its columns.
fn moved(expression: &Expression, places: &Places) -> Expression {
    let mut expression = expression.clone();
    // All columns that the expression uses were requested, so they have a position.
    map_columns(&mut expression, &|column| places.get(column).copied().flatten().unwrap_or(column));
    expression
}
