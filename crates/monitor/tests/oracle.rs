//! Compares the engine with the naive evaluator, for random plans over random streams, by seed.

#[path = "support/changes.rs"]
mod changes;

use changes::{Changes, engine};
use fathom_cql::catalog::Catalog;
use fathom_cql::generate::{Case, case, shrink};
use fathom_cql::oracle;
use fathom_cql::{Parameters, ParseOptions, Value, parse, plan_script};
use fathom_monitor::{Delta, Engine, io_stream};

/// The number of cases of a test, by default 5000; `FATHOM_CASES` changes it.
fn cases() -> u64 {
    std::env::var("FATHOM_CASES").ok().and_then(|text| text.parse().ok()).unwrap_or(5000)
}

/// A limit for the evaluator. More steps admit more cases; a case beyond the limit is skipped.
const ORACLE_STEPS: u64 = 2_000_000;

fn expected(case: &Case) -> Option<Changes> {
    let deltas = oracle::run_within(&case.plan, &case.inputs, case.until_ns, ORACLE_STEPS)?;
    Some(deltas.into_iter().map(|delta| (delta.time_ns, delta.row, delta.count)).collect())
}

/// The same case with inputs that have only the columns that the plan needs.
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
fn the_engine_gives_the_results_of_the_naive_evaluator() {
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
    assert!(changes as u64 > cases(), "only {changes} changes");
}

/// Runs a case's plan as a query, adds the same query at one instant, and removes the first at
/// another. Returns the changes of both.
fn added_and_removed(case: &Case, added_ns: i64, removed_ns: i64) -> [Changes; 2] {
    let plans = std::slice::from_ref(&case.plan);
    let mut engine = Engine::new(case.catalog.streams.len(), plans);
    let mut changes = [Changes::new(), Changes::new()];
    let mut take = |delta: Delta<'_>| {
        for &query in delta.queries {
            changes[query].push((delta.time_ns as i64, delta.row.to_vec(), delta.count));
        }
    };
    let mut inputs: Vec<_> = case.inputs.iter().collect();
    inputs.sort_by_key(|input| input.time_ns);
    let mut inputs = inputs.into_iter().peekable();
    for now_ns in 0..=case.until_ns + 1 {
        engine.advance(now_ns as u64, &mut take);
        if now_ns == added_ns {
            assert_eq!(engine.add(plans), 1..2);
        }
        if now_ns == removed_ns {
            engine.remove(0);
            assert!(engine.state().all(|state| state.query == 1));
        }
        while let Some(input) = inputs.next_if(|input| input.time_ns == now_ns) {
            engine.push(input.source, now_ns as u64, &input.row);
        }
    }
    changes
}

#[test]
fn queries_are_added_and_removed_while_the_engine_runs() {
    let mut changes = 0;
    for seed in 0..cases() / 10 {
        let mut case = case(seed);
        case.until_ns = case.until_ns.min(150);
        let (added_ns, removed_ns) = (case.until_ns / 4, case.until_ns / 2);
        let Some(first) = expected(&case) else { continue };
        let mut later = case.clone();
        later.inputs.retain(|input| input.time_ns >= added_ns);
        let Some(second) = expected(&later) else { continue };
        let [is_first, is_second] = added_and_removed(&case, added_ns, removed_ns);
        let until = first.partition_point(|change| change.0 < removed_ns);
        assert_eq!(is_first, first[..until], "seed {seed}: the first");
        assert_eq!(is_second, second, "seed {seed}: the second");
        changes += second.len();
    }
    assert!(changes as u64 > cases() / 10, "only {changes} changes");
}

#[test]
fn the_state_of_operators_follows_the_windows() {
    let script =
        "select VDisk, max(Size), count(*) from IOstream [range 5 nanoseconds] group by VDisk;
        select A.Size from IOstream [rows 3] as A, IOstream [range 4 nanoseconds] as B
        where A.ReqId = B.ReqId;";
    let catalog = Catalog { streams: vec![io_stream()] };
    let script = parse(script, &ParseOptions::default()).unwrap();
    let planned = plan_script(&script, &catalog, &Parameters::default()).unwrap();
    let plans: Vec<_> = planned.queries.iter().map(|query| query.plan.clone()).collect();
    let mut engine = Engine::new(1, &plans);
    let schema = io_stream();
    for time in 0..10 {
        let mut row = vec![Value::Null; schema.columns.len()];
        row[schema.find("Size").unwrap()] = Value::Integer(time);
        row[schema.find("ReqId").unwrap()] = Value::Integer(time);
        row[schema.find("VDisk").unwrap()] = Value::text(["a", "b"][time as usize % 2]);
        engine.push(0, time as u64, &row);
    }
    let mut state = |time_ns| -> Vec<(usize, &str, usize)> {
        engine.advance(time_ns, &mut |_| ());
        engine.state().map(|state| (state.query, state.operator, state.rows)).collect()
    };
    assert_eq!(state(0), state(0));
    let full = [(0, "range", 5), (0, "groups", 7), (1, "rows", 3), (1, "range", 4), (1, "join", 7)];
    assert_eq!(state(10), full);
    let empty =
        [(0, "range", 0), (0, "groups", 0), (1, "rows", 3), (1, "range", 0), (1, "join", 3)];
    assert_eq!(state(100), empty);
}
