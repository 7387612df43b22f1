//! Compares engines at several hosts and a centre with the naive evaluator over all events, for
//! random plans over random streams, by seed.

use std::collections::{BTreeMap, BTreeSet};

use fathom_cql::aggregate::distinct::Precision;
use fathom_cql::aggregate::histogram::Buckets;
use fathom_cql::catalog::Column;
use fathom_cql::generate::{Case, Generator, case, shrink};
use fathom_cql::oracle::{self, InputRow};
use fathom_cql::plan::{
    Aggregate, AggregateFunction as Of, Expression, Output, Plan, Relation, Stage, Stream, Window,
};
use fathom_cql::{Hosts, Row, Split, Type, split};
use fathom_monitor::Engine;

/// The number of cases of a test, by default 2000; `FATHOM_CASES` changes it.
fn cases() -> u64 {
    std::env::var("FATHOM_CASES").ok().and_then(|text| text.parse().ok()).unwrap_or(2000)
}

const ORACLE_STEPS: u64 = 2_000_000;

type Changes = Vec<(i64, Row, i64)>;

/// A host, and the events that it has not processed yet.
struct Host<'a> {
    engine: Engine,
    inputs: Vec<&'a InputRow>,
}

impl Host<'_> {
    /// Advances the host to an instant, and passes its results to the centre's engine.
    fn until(&mut self, time_ns: i64, centre: &mut Engine) {
        let come = self.inputs.partition_point(|input| input.time_ns < time_ns);
        for input in self.inputs.drain(..come) {
            self.engine.push(input.source, input.time_ns as u64, &input.row);
        }
        self.engine.advance(time_ns as u64, &mut |sent| {
            for &fragment in sent.queries {
                centre.change(fragment, sent.time_ns, sent.row, sent.count);
            }
        });
        assert_eq!(self.engine.statistics().late, 0);
    }
}

fn hosts<'a>(case: &'a Case, parts: &Split, seed: u64, count: usize) -> Vec<Host<'a>> {
    let streams = case.catalog.streams.len();
    let mut generator = Generator::new(seed);
    let mut inputs = vec![Vec::new(); count];
    for input in &case.inputs {
        inputs[generator.below(count)].push(input);
    }
    let host = |inputs| Host { engine: Engine::new(streams, &parts.fragments), inputs };
    inputs.into_iter().map(host).collect()
}

/// The results of the centre. The hosts advance in steps of `step_ns`, and the centre follows them.
fn centre(case: &Case, seed: u64, step_ns: i64) -> Changes {
    let parts = split(std::slice::from_ref(&case.plan), &case.catalog, Hosts::Many);
    let mut hosts = hosts(case, &parts, seed, 1 + (seed % 4) as usize);
    let mut engine = Engine::new(parts.fragments.len(), &parts.centre);
    let mut changes = BTreeMap::new();
    let mut now_ns = 0;
    while now_ns <= case.until_ns {
        now_ns = (now_ns + step_ns).min(case.until_ns + 1);
        for host in &mut hosts {
            host.until(now_ns, &mut engine);
        }
        engine.advance(now_ns as u64, &mut |delta| {
            let at = (delta.time_ns as i64, delta.row.to_vec());
            *changes.entry(at).or_insert(0) += delta.count;
        });
    }
    assert_eq!(engine.statistics().late, 0);
    let changes = changes.into_iter().filter(|&(_, count)| count != 0);
    changes.map(|((time_ns, row), count)| (time_ns, row, count)).collect()
}

fn expected(case: &Case) -> Option<Changes> {
    let deltas = oracle::run_within(&case.plan, &case.inputs, case.until_ns, ORACLE_STEPS)?;
    Some(deltas.into_iter().map(|delta| (delta.time_ns, delta.row, delta.count)).collect())
}

/// Hosts lose the order of rows within an instant, which windows of rows depend on. If the plan has
/// such a window over a stream, keeps only one row per instant of each stream.
fn without_ties(mut case: Case) -> Case {
    let text = format!("{:?}", case.plan);
    let mut windows = text.split("Window(Rows {").skip(1);
    let arrives = |of: &str| of.starts_with("Source(") || of.starts_with("Of(Insertions");
    if windows.any(|rest| rest.split_once("}, ").is_some_and(|(_, of)| arrives(of))) {
        let mut seen = BTreeSet::new();
        case.inputs.retain(|input| seen.insert((input.source, input.time_ns)));
    }
    case
}

fn differs(case: &Case, seed: u64) -> bool {
    let Some(expected) = expected(case) else { return false };
    let step_ns = [1, 9, 1000][(seed / 4 % 3) as usize];
    centre(case, seed, step_ns) != expected
}

fn fail(case: Case, seed: u64) -> ! {
    let small = shrink(case, &mut |case| differs(&without_ties(case.clone()), seed));
    let small = without_ties(small);
    panic!(
        "seed {seed}:\n{:?}\ninputs: {:?}\nuntil {}\nexpected: {:?}\nis: {:?}",
        small.plan,
        small.inputs,
        small.until_ns,
        expected(&small),
        centre(&small, seed, 1)
    );
}

#[test]
fn hosts_and_a_centre_give_the_results_of_the_naive_evaluator() {
    let (mut compared, mut relations) = (0, 0);
    for seed in 0..cases() {
        let case = without_ties(case(seed));
        if expected(&case).is_none() {
            continue;
        }
        compared += 1;
        let plans = std::slice::from_ref(&case.plan);
        let given = |plan: &Plan| format!("{plan:?}").contains("Given(");
        relations += u64::from(split(plans, &case.catalog, Hosts::Many).centre.iter().any(given));
        if differs(&case, seed) {
            fail(case, seed);
        }
    }
    assert!(compared * 10 >= cases() * 9, "only {compared} cases were small enough");
    assert!(relations > cases() / 20, "only {relations} centres receive relations");
}

/// A plan with histograms and approximate counts over a sliding window, of which hosts send parts.
fn with_sketches(mut case: Case, seed: u64) -> Case {
    let mut generator = Generator::new(seed ^ 0x5ce7);
    // The first stream has an integer to group by, another integer, a float, and a text.
    let length_ns = 1 + generator.below(12) as u64;
    let window = Window::Range { length_ns, slide_ns: Some(2 + generator.below(5) as u64) };
    let below = Relation::Window(window, Box::new(Stream::Source(0)));
    let precision = Precision::new(4 + generator.below(3) as u8).unwrap();
    let count = Of::ApproximateDistinct(precision, Stage::Whole);
    let of = |function, column| Aggregate {
        function,
        argument: Some(Expression::Column(column)),
        distinct: false,
    };
    let mut aggregates = vec![of(count, 1), of(count, 2), of(count, 3)];
    let mut kinds = vec![Type::Integer; 3];
    if generator.chance(70) {
        let by = [Buckets::PowersOfTwo, Buckets::Floats(0.3)][generator.below(2)];
        let powers = Of::Histogram(Buckets::PowersOfTwo, Stage::Whole);
        aggregates.extend([of(powers, 1), of(Of::Histogram(by, Stage::Whole), 2)]);
        kinds.extend([Type::Text; 2]);
    }
    let mut keys = Vec::new();
    if generator.chance(70) {
        keys.push(Expression::Column(0));
        kinds.insert(0, Type::Integer);
    }
    let output = Output::Relation(Relation::Aggregate(Box::new(below), keys, aggregates));
    let column = |(at, kind)| Column { name: format!("C{at}"), kind };
    case.plan = Plan { output, columns: kinds.into_iter().enumerate().map(column).collect() };
    case
}

#[test]
fn merged_parts_of_sketches_equal_the_whole() {
    let mut changes = 0;
    for seed in 0..cases() / 2 {
        let case = with_sketches(case(seed), seed);
        let parts = split(std::slice::from_ref(&case.plan), &case.catalog, Hosts::Many);
        let text = format!("{:?} {:?}", parts.fragments, parts.centre);
        assert!(text.contains(", Part)") && text.contains(", Merge)"), "{text}");
        changes += expected(&case).map_or(0, |changes| changes.len() as u64);
        if differs(&case, seed) {
            fail(case, seed);
        }
    }
    assert!(changes > cases(), "only {changes} changes");
}
