//! The engine at several hosts and at a centre, against what the semantics say of all events:
//! random plans over random streams, by seed.

use std::collections::{BTreeMap, BTreeSet};

use fathom_cql::generate::{Case, Generator, case, shrink};
use fathom_cql::oracle::{self, Input};
use fathom_cql::plan::Plan;
use fathom_cql::{Hosts, Row, Split, split};
use fathom_monitor::Engine;

/// How many cases a test runs; `FATHOM_CASES` says otherwise.
fn cases() -> u64 {
    std::env::var("FATHOM_CASES").ok().and_then(|text| text.parse().ok()).unwrap_or(2000)
}

const ORACLE_STEPS: u64 = 2_000_000;

type Changes = Vec<(i64, Row, i64)>;

/// One host, and the events that it has not yet seen.
struct Host<'a> {
    engine: Engine,
    inputs: Vec<&'a Input>,
}

impl Host<'_> {
    /// What it sends to an engine when time goes on to an instant.
    fn until(&mut self, time_ns: i64, centre: &mut Engine) {
        let come = self.inputs.partition_point(|input| input.time_ns < time_ns);
        for input in self.inputs.drain(..come) {
            self.engine.push(input.source, input.time_ns as u64, &input.row);
        }
        self.engine.advance(time_ns as u64, &mut |sent| {
            centre.change(sent.query, sent.time_ns, sent.row, sent.count);
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

/// What the centre says. The hosts go on in steps of `step_ns`, and it follows them all.
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

/// The order within an instant, which windows of rows see, is lost between hosts: of each stream
/// one row an instant stays where there is such a window over it.
fn without_ties(mut case: Case) -> Case {
    let text = format!("{:?}", case.plan);
    let mut windows = text.split("Window(Rows {").skip(1);
    if windows.any(|rest| rest.split_once("}, ").is_some_and(|(_, of)| of.starts_with("Source("))) {
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

#[test]
fn many_engines_and_one_say_what_the_semantics_say() {
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
    }
    assert!(compared * 10 >= cases() * 9, "only {compared} cases were small enough");
    assert!(relations > cases() / 20, "{relations} centres are given relations");
}
