//! What of queries runs where.

use fathom_cql::catalog::Catalog;
use fathom_cql::plan::{Output, Plan, Stream};

use crate::{Engine, Tuple};

/// What of some plans runs at each host, and what at the centre.
#[derive(Clone, Debug, PartialEq)]
pub struct Split {
    /// What every host computes and sends: each is an input of the centre, by its position.
    pub fragments: Vec<Plan>,
    /// What the centre computes of them, one for each plan that was split.
    pub centre: Vec<Plan>,
}

/// Splits plans: each host sends the columns that they look at, and the centre does the rest.
pub fn split(plans: &[Plan], catalog: &Catalog) -> Split {
    let whole = |(source, stream): (usize, &fathom_cql::catalog::StreamSchema)| Plan {
        output: Output::Stream(Stream::Source(source)),
        columns: stream.columns.clone(),
    };
    let fragments = catalog.streams.iter().enumerate().map(whole).collect();
    Split { fragments, centre: plans.to_vec() }
}

/// Tells the centre's engine of a change of an input. A stream's rows only come.
pub(super) fn change(engine: &mut Engine, input: usize, time_ns: u64, row: &Tuple, count: i64) {
    for _ in 0..count {
        engine.push(input, time_ns, Tuple::clone(row));
    }
}
