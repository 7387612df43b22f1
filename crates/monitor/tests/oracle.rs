//! The engine against the naive evaluator: random plans over random streams, by seed.

use fathom_cql::Row;
use fathom_cql::generate::{Case, case, shrink};
use fathom_cql::oracle;
use fathom_monitor::{Delta, Engine};

/// How many cases a test runs; `FATHOM_CASES` says otherwise.
fn cases() -> u64 {
    std::env::var("FATHOM_CASES").ok().and_then(|text| text.parse().ok()).unwrap_or(5000)
}

/// The more there is, the better; but a case whose oracle takes too long says nothing.
const ORACLE_STEPS: u64 = 2_000_000;

type Changes = Vec<(i64, Row, i64)>;

/// What the engine says, in its order, its time being led on in steps of `step_ns`.
fn engine(case: &Case, step_ns: i64) -> Changes {
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

fn expected(case: &Case) -> Option<Changes> {
    let deltas = oracle::run_within(&case.plan, &case.inputs, case.until_ns, ORACLE_STEPS)?;
    Some(deltas.into_iter().map(|delta| (delta.time_ns, delta.row, delta.count)).collect())
}

/// The same with inputs that have only the columns that make a difference.
fn pruned(case: &Case) -> Case {
    let mut case = case.clone();
    let columns = fathom_cql::prune(std::slice::from_mut(&mut case.plan), &case.catalog);
    for input in &mut case.inputs {
        input.row = columns[input.source].iter().map(|&c| input.row[c].clone()).collect();
    }
    case
}

fn differs(case: &Case) -> bool {
    let Some(expected) = expected(case) else { return false };
    [1, 7, 1000].iter().any(|&step_ns| engine(case, step_ns) != expected)
        || engine(&pruned(case), 7) != expected
}

#[test]
fn the_engine_says_what_the_semantics_say() {
    let (mut compared, mut changes) = (0, 0);
    for seed in 0..cases() {
        let case = case(seed);
        let Some(expected) = expected(&case) else { continue };
        compared += 1;
        changes += expected.len();
        if differs(&case) {
            let small = shrink(case, &mut differs);
            panic!(
                "seed {seed}:\n{:?}\ninputs: {:?}\nuntil {}\nexpected: {:?}\nis: {:?}",
                small.plan,
                small.inputs,
                small.until_ns,
                self::expected(&small),
                engine(&small, 1)
            );
        }
    }
    assert!(compared * 10 >= cases() * 9, "only {compared} cases were small enough");
    assert!(changes as u64 > cases(), "{changes} changes say little");
}
