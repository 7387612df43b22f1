//! The results of an engine over the events of a case.

use fathom_cql::Row;
use fathom_cql::generate::Case;
use fathom_monitor::{Delta, Engine};

/// Changes of a result: the instant, the row, and the change of its count.
pub type Changes = Vec<(i64, Row, i64)>;

/// The changes of the result in the engine's order. Time advances in steps of `step_ns`.
pub fn engine(case: &Case, step_ns: i64) -> Changes {
    let mut engine = Engine::new(case.catalog.streams.len(), std::slice::from_ref(&case.plan));
    let mut changes = Vec::new();
    let mut take = |delta: Delta<'_>| {
        changes.push((delta.time_ns as i64, delta.row.to_vec(), delta.count));
    };
    let mut inputs: Vec<_> = case.inputs.iter().collect();
    inputs.sort_by_key(|input| input.time_ns);
    let mut now_ns = 0;
    for input in inputs {
        while input.time_ns - now_ns >= step_ns {
            now_ns += step_ns;
            engine.advance(now_ns as u64, &mut take);
        }
        engine.push(input.source, input.time_ns as u64, &input.row);
    }
    engine.advance(case.until_ns as u64 + 1, &mut take);
    assert_eq!(engine.statistics().late, 0);
    changes
}
