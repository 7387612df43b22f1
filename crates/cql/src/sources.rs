//! The inputs of plans.

use std::collections::BTreeSet;

use crate::plan::{Output, Plan, Relation, Stream};

/// The inputs that some plans read, by their positions in the catalogue.
pub fn sources(plans: &[Plan]) -> BTreeSet<usize> {
    let mut found = BTreeSet::new();
    for plan in plans {
        let mut plan = plan.clone();
        each(&mut plan.output, &mut |source| {
            found.insert(*source);
        });
    }
    found
}

/// Replaces the position of each input that some plans read by its place in `sources`, which has
/// all of them.
pub fn place_sources(plans: &mut [Plan], sources: &[usize]) {
    let place = |source| sources.iter().position(|of| *of == source).unwrap_or(0);
    for plan in plans {
        map_sources(plan, &place);
    }
}

/// Replaces the position of each input that a plan reads.
pub fn map_sources(plan: &mut Plan, place: &dyn Fn(usize) -> usize) {
    each(&mut plan.output, &mut |source| *source = place(*source));
}

fn each(output: &mut Output, visit: &mut dyn FnMut(&mut usize)) {
    match output {
        Output::Stream(of) => stream(of, visit),
        Output::Relation(of) => relation(of, visit),
    }
}

fn stream(of: &mut Stream, visit: &mut dyn FnMut(&mut usize)) {
    match of {
        Stream::Source(source) => visit(source),
        Stream::Of(_, of) => relation(of, visit),
    }
}

fn relation(of: &mut Relation, visit: &mut dyn FnMut(&mut usize)) {
    match of {
        Relation::Window(_, of) => stream(of, visit),
        Relation::Given(source) => visit(source),
        Relation::Filter(of, _)
        | Relation::Project(of, _)
        | Relation::Aggregate(of, ..)
        | Relation::Distinct(of)
        | Relation::Top(of, ..) => relation(of, visit),
        Relation::Join(join) => {
            relation(&mut join.left, visit);
            relation(&mut join.right, visit);
        }
        Relation::Set { left, right, .. } => {
            relation(left, visit);
            relation(right, visit);
        }
    }
}
