//! Which columns of a stream a plan reads.

use std::collections::BTreeSet;

use crate::ast::SetOperation;
use crate::catalog::Catalog;
use crate::check;
use crate::plan::{Expression, Join, Output, Plan, Relation, Stream, Window};
use crate::planner::each_column;

/// Positions of columns.
type Columns = BTreeSet<usize>;

/// The positions of the columns of a source that the result of a plan depends on, in their order.
///
/// What is in the other columns makes no difference, not even to how often a row comes.
#[must_use]
pub fn columns_read(plan: &Plan, catalog: &Catalog, source: usize) -> Vec<usize> {
    let mut reads = Reads { catalog, source, columns: Columns::new() };
    let all = (0..plan.columns.len()).collect();
    match &plan.output {
        Output::Stream(stream) => reads.stream(stream, all),
        Output::Relation(relation) => reads.relation(relation, all),
    }
    reads.columns.into_iter().collect()
}

struct Reads<'a> {
    catalog: &'a Catalog,
    source: usize,
    /// What has been found.
    columns: Columns,
}

/// Adds the columns that an expression uses.
fn add(columns: &mut Columns, expression: &Expression) {
    each_column(expression, &mut |column| {
        columns.insert(column);
    });
}

impl Reads<'_> {
    /// All columns of a relation.
    fn all(&self, relation: &Relation) -> Columns {
        let width = check::columns(relation, self.catalog).map_or(0, |columns| columns.len());
        (0..width).collect()
    }

    /// Of a stream some columns are wanted.
    fn stream(&mut self, stream: &Stream, wanted: Columns) {
        match stream {
            Stream::Source(source) if *source == self.source => self.columns.extend(wanted),
            Stream::Source(_) => {}
            // Whether a row is new is a question of all of it.
            Stream::Of(_, relation) => self.relation(relation, self.all(relation)),
        }
    }

    /// Of a relation some columns are wanted.
    fn relation(&mut self, relation: &Relation, mut wanted: Columns) {
        match relation {
            Relation::Window(window, stream) => {
                if let Window::Rows { by, .. } = window {
                    wanted.extend(by);
                }
                self.stream(stream, wanted);
            }
            Relation::Filter(of, predicate) => {
                add(&mut wanted, predicate);
                self.relation(of, wanted);
            }
            Relation::Project(of, expressions) => {
                let mut below = Columns::new();
                for at in wanted {
                    if let Some(expression) = expressions.get(at) {
                        add(&mut below, expression);
                    }
                }
                self.relation(of, below);
            }
            Relation::Join(join) => self.join(join, wanted),
            Relation::Aggregate(of, keys, aggregates) => {
                let mut below = Columns::new();
                // Without one of the keys there would be fewer groups.
                for key in keys {
                    add(&mut below, key);
                }
                for at in wanted.range(keys.len()..) {
                    let aggregate = aggregates.get(at - keys.len());
                    if let Some(argument) = aggregate.and_then(|found| found.argument.as_ref()) {
                        add(&mut below, argument);
                    }
                }
                self.relation(of, below);
            }
            Relation::Set { operation: SetOperation::Union, all: true, left, right } => {
                self.relation(left, wanted.clone());
                self.relation(right, wanted);
            }
            Relation::Set { left, right, .. } => {
                self.relation(left, self.all(left));
                self.relation(right, self.all(right));
            }
            Relation::Top(of, keys, None) => {
                for key in keys {
                    add(&mut wanted, &key.expression);
                }
                self.relation(of, wanted);
            }
            // Which rows are the first may be a question of all of them.
            Relation::Distinct(of) | Relation::Top(of, _, Some(_)) => {
                self.relation(of, self.all(of));
            }
        }
    }

    fn join(&mut self, join: &Join, mut wanted: Columns) {
        if let Some(residual) = &join.residual {
            add(&mut wanted, residual);
        }
        let right = wanted.split_off(&join.left_columns);
        let mut right: Columns = right.into_iter().map(|at| at - join.left_columns).collect();
        for (of_left, of_right) in &join.equal {
            add(&mut wanted, of_left);
            add(&mut right, of_right);
        }
        self.relation(&join.left, wanted);
        self.relation(&join.right, right);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::StreamSchema;
    use crate::{Parameters, ParseOptions, Type, parse, plan_script};

    fn reads(text: &str) -> String {
        let columns = [("a", Type::Integer), ("b", Type::Integer), ("c", Type::Text)];
        let catalog = Catalog { streams: vec![StreamSchema::new("S", &columns)] };
        let script = parse(text, &ParseOptions::default()).expect("it is a script");
        let planned = plan_script(&script, &catalog, &Parameters::new()).expect("it has a plan");
        let plan = &planned.queries[0].plan;
        let names = columns_read(plan, &planned.catalog, 0).into_iter();
        names.map(|at| columns[at].0).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn what_the_result_depends_on_is_read() {
        for (text, columns) in [
            ("select * from S", "a b c"),
            ("select a from S where b = 1", "a b"),
            ("select count(*) from S [range 1 second]", ""),
            ("select c, sum(a) from S group by c", "a c"),
            ("select n from (select c, count(*) as n, max(b) from S group by c) as T", "c"),
            ("select count(*) from S [partition by b rows 2]", "b"),
            ("select x.a from S [now] as x, S [now] as y where x.b = y.b", "a b"),
            ("select a from S union all select b from S", "a b"),
            ("select count(*) from (select distinct a, b from S) as T", "a b"),
            ("select a from S [now] order by b", "a b"),
            ("select count(*) from (select a, c from S order by a limit 2) as T", "a c"),
            ("select count(*) from (Istream(select a, b from S [now])) [now] as T", "a b"),
        ] {
            assert_eq!(reads(text), columns, "{text}");
        }
    }
}
