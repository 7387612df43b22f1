//! Reduces failing cases.

use super::Case;
use crate::catalog::{Catalog, Column};
use crate::check;
use crate::plan::{Join, Output, Plan, Relation, Stream};
use crate::value::Type;

/// Removes inputs and operators from a case as long as it still fails.
pub fn shrink(mut case: Case, still_fails: &mut dyn FnMut(&Case) -> bool) -> Case {
    loop {
        let size = (case.inputs.len(), case.plan.clone());
        case = fewer_inputs(case, still_fails);
        case = smaller_plan(case, still_fails);
        if size == (case.inputs.len(), case.plan.clone()) {
            return case;
        }
    }
}

fn fewer_inputs(mut case: Case, still_fails: &mut dyn FnMut(&Case) -> bool) -> Case {
    let mut part = case.inputs.len().div_ceil(2);
    while part > 0 {
        let mut start = 0;
        while start < case.inputs.len() {
            let mut fewer = case.clone();
            let end = (start + part).min(case.inputs.len());
            fewer.inputs.drain(start..end);
            if still_fails(&fewer) {
                case = fewer;
            } else {
                start = end;
            }
        }
        part /= 2;
    }
    case
}

fn smaller_plan(mut case: Case, still_fails: &mut dyn FnMut(&Case) -> bool) -> Case {
    loop {
        let smaller = smaller_plans(&case.plan, &case.catalog).into_iter();
        let mut smaller = smaller.map(|plan| Case { plan, ..case.clone() });
        match smaller.find(|smaller| still_fails(smaller)) {
            Some(smaller) => case = smaller,
            None => return case,
        }
    }
}

/// Plans with one operator less.
fn smaller_plans(plan: &Plan, catalog: &Catalog) -> Vec<Plan> {
    let outputs: Vec<Output> = match &plan.output {
        Output::Stream(Stream::Source(_)) => Vec::new(),
        Output::Stream(Stream::Of(to_stream, relation)) => {
            let relations = smaller_relations(relation, catalog, true).into_iter();
            let streams = relations.map(|of| Output::Stream(Stream::Of(*to_stream, Box::new(of))));
            std::iter::once(Output::Relation((**relation).clone())).chain(streams).collect()
        }
        Output::Relation(relation) => {
            smaller_relations(relation, catalog, true).into_iter().map(Output::Relation).collect()
        }
    };
    let plan = |output| {
        let kinds = match &output {
            Output::Stream(stream) => check::stream_columns(stream, catalog),
            Output::Relation(relation) => check::columns(relation, catalog),
        };
        let column = |(position, kind): (usize, Option<Type>)| Column {
            name: format!("C{position}"),
            kind: kind.unwrap_or(Type::Integer),
        };
        let columns = kinds.unwrap_or_default().into_iter().enumerate().map(column).collect();
        Plan { output, columns }
    };
    outputs.into_iter().map(plan).collect()
}

/// Relations with one operator less; with the same columns, unless the columns are `free`.
fn smaller_relations(relation: &Relation, catalog: &Catalog, free: bool) -> Vec<Relation> {
    let columns = check::columns(relation, catalog);
    let mut copy = relation.clone();
    let children = children_mut(&mut copy).into_iter().map(|child| child.clone());
    let children: Vec<Relation> = children.collect();
    let mut smaller = children.clone();
    smaller.retain(|child| free || check::columns(child, catalog) == columns);
    for (position, child) in children.iter().enumerate() {
        for by in smaller_relations(child, catalog, false) {
            let mut with = relation.clone();
            if let Some(child) = children_mut(&mut with).into_iter().nth(position) {
                *child = by;
            }
            smaller.push(with);
        }
    }
    smaller
}

fn children_mut(relation: &mut Relation) -> Vec<&mut Relation> {
    match relation {
        Relation::Window(_, stream) => match &mut **stream {
            Stream::Source(_) => Vec::new(),
            Stream::Of(_, of) => vec![of],
        },
        Relation::Given(_) => Vec::new(),
        Relation::Filter(of, _)
        | Relation::Project(of, _)
        | Relation::Aggregate(of, _, _)
        | Relation::Distinct(of)
        | Relation::Top(of, _, _) => vec![of],
        Relation::Join(join) => {
            let Join { left, right, .. } = &mut **join;
            vec![left, right]
        }
        Relation::Set { left, right, .. } => vec![left, right],
    }
}
