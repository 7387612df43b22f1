//! Subqueries in expressions. The expected results are computed directly: the rows of windows, and
//! SQL's three-valued logic over them.

#[path = "support/changes.rs"]
mod changes;

use std::collections::BTreeMap;

use changes::{Changes, engine};
use fathom_cql::catalog::{Catalog, StreamSchema};
use fathom_cql::generate::{Case, Generator};
use fathom_cql::oracle::{self, InputRow};
use fathom_cql::plan::{Output, Plan};
use fathom_cql::{Hosts, Parameters, ParseOptions, Row, Type, Value, parse, plan_script, split};
use fathom_monitor::Engine;

type Number = Option<i64>;

/// The number of random streams for each query.
const CASES: u64 = 60;
const UNTIL: i64 = 40;

fn catalog() -> Catalog {
    let a = StreamSchema::new("A", &[("k", Type::Integer), ("v", Type::Integer)]);
    let b = StreamSchema::new("B", &[("c", Type::Integer)]);
    Catalog { streams: vec![a, b] }
}

fn plan(text: &str) -> Plan {
    let script = parse(text, &ParseOptions::default()).unwrap_or_else(|wrong| panic!("{wrong}"));
    let planned = plan_script(&script, &catalog(), &Parameters::new());
    let planned = planned.unwrap_or_else(|wrong| panic!("{}", wrong.render(text)));
    planned.queries[0].plan.clone()
}

fn value(number: Number) -> Value {
    number.map_or(Value::Null, Value::Integer)
}

fn truth(of: Option<bool>) -> Value {
    of.map_or(Value::Null, Value::Boolean)
}

/// The results of a centre with three hosts, each of which has every third row.
fn centre(plan: &Plan, inputs: &[InputRow]) -> Changes {
    let parts = split(std::slice::from_ref(plan), &catalog(), Hosts::Many);
    let mut centre = Engine::new(parts.fragments.len(), &parts.centre);
    for host in 0..3 {
        let mut engine = Engine::new(2, &parts.fragments);
        for input in inputs.iter().skip(host).step_by(3) {
            engine.push(input.source, input.time_ns as u64, &input.row);
        }
        engine.advance(UNTIL as u64 + 1, &mut |sent| {
            for &fragment in sent.queries {
                centre.change(fragment, sent.time_ns, sent.row, sent.count);
            }
        });
    }
    let mut changes = BTreeMap::new();
    centre.advance(UNTIL as u64 + 1, &mut |delta| {
        *changes.entry((delta.time_ns as i64, delta.row.to_vec())).or_insert(0) += delta.count;
    });
    let changes = changes.into_iter().filter(|&(_, count)| count != 0);
    changes.map(|((time_ns, row), count)| (time_ns, row, count)).collect()
}

/// Checks the naive evaluator, the centre and the engine. The inputs are in order of time.
#[track_caller]
fn assert_gives(text: &str, inputs: &[InputRow], expected: &Changes) {
    let plan = plan(text);
    let deltas = oracle::run(&plan, inputs, UNTIL).into_iter();
    let deltas: Changes = deltas.map(|delta| (delta.time_ns, delta.row, delta.count)).collect();
    assert_eq!(deltas, *expected, "{text}: the oracle, with {inputs:?}");
    assert_eq!(centre(&plan, inputs), *expected, "{text}: the centre, with {inputs:?}");
    let case = Case { catalog: catalog(), plan, inputs: inputs.to_vec(), until_ns: UNTIL };
    for step_ns in [1, 7, 1000] {
        assert_eq!(engine(&case, step_ns), *expected, "{text}: the engine, {inputs:?}");
    }
}

/// The events up to an instant.
struct World<'a> {
    inputs: &'a [InputRow],
    now: i64,
}

impl World<'_> {
    fn window(&self, source: usize, length: i64) -> impl Iterator<Item = &Row> {
        let is_in = move |input: &&InputRow| {
            input.source == source && input.time_ns <= self.now && input.time_ns > self.now - length
        };
        self.inputs.iter().filter(is_in).map(|input| &input.row)
    }

    /// The rows of `A [range length]`.
    fn a(&self, length: i64) -> Vec<(Number, Number)> {
        self.window(0, length).map(|row| (number(&row[0]), number(&row[1]))).collect()
    }

    /// The values of `B [range length]`.
    fn b(&self, length: i64) -> Vec<Number> {
        self.window(1, length).map(|row| number(&row[0])).collect()
    }
}

fn number(value: &Value) -> Number {
    match value {
        Value::Integer(number) => Some(*number),
        _ => None,
    }
}

/// `x in (…)` by its definition: `x = a or x = b or …`.
fn is_in(x: Number, values: &[Number]) -> Option<bool> {
    let equal: Vec<Option<bool>> = values.iter().map(|y| Some(x? == (*y)?)).collect();
    match () {
        () if equal.contains(&Some(true)) => Some(true),
        () if equal.contains(&None) => None,
        () => Some(false),
    }
}

fn average(values: &[Number]) -> Option<f64> {
    let known: Vec<i64> = values.iter().flatten().copied().collect();
    (!known.is_empty()).then(|| known.iter().sum::<i64>() as f64 / known.len() as f64)
}

fn is_greater(x: Number, than: Option<f64>) -> bool {
    x.zip(than).is_some_and(|(x, than)| x as f64 > than)
}

/// The number of values; null if there is no row, like the aggregates of no rows.
fn count(values: &[Number]) -> Number {
    (!values.is_empty()).then_some(values.len() as i64)
}

fn rows(of: Vec<(Number, Number)>, stays: impl Fn(Number, Number) -> bool) -> Vec<Row> {
    let stay = of.into_iter().filter(|&(k, v)| stays(k, v));
    stay.map(|(k, v)| vec![value(k), value(v)]).collect()
}

/// A query, and the function that computes its relation at an instant.
type Example = (&'static str, fn(&World<'_>) -> Vec<Row>);

const EXAMPLES: [Example; 14] = [
    ("select k, v from A [range 4 ns] where v > (select avg(c) from B [range 5 ns])", |world| {
        let than = average(&world.b(5));
        rows(world.a(4), |_, v| is_greater(v, than))
    }),
    ("select k, v from A [range 4 ns] where v = (select max(c) from B [range 5 ns])", |world| {
        let most = world.b(5).into_iter().flatten().max();
        rows(world.a(4), |_, v| v.is_some() && v == most)
    }),
    (
        "select k, v from A [range 4 ns] where (select max(c) from B [range 3 ns]) is null",
        |world| {
            let most = world.b(3).into_iter().flatten().max();
            rows(world.a(4), |_, _| most.is_none())
        },
    ),
    ("select v, (select min(c) from B [range 3 ns]) as least from A [range 4 ns]", |world| {
        let least = world.b(3).into_iter().flatten().min();
        world.a(4).into_iter().map(|(_, v)| vec![value(v), value(least)]).collect()
    }),
    (
        "select k, v from A [range 4 ns] where v >= coalesce((select count(*) from B [range 2 ns]), 0)",
        |world| {
            let least = world.b(2).len() as i64;
            rows(world.a(4), |_, v| v.is_some_and(|v| v >= least))
        },
    ),
    ("select k, v from A [range 4 ns] where v in (select c from B [range 5 ns])", |world| {
        let values = world.b(5);
        rows(world.a(4), |_, v| is_in(v, &values) == Some(true))
    }),
    ("select k, v from A [range 4 ns] where v not in (select c from B [range 3 ns])", |world| {
        let values = world.b(3);
        rows(world.a(4), |_, v| is_in(v, &values) == Some(false))
    }),
    (
        "select k, v from A [range 4 ns] where not (v + 1 not in (select c * 1.0 from B [range 3 ns]) and k > 1)",
        |world| {
            let values = world.b(3);
            rows(world.a(4), |k, v| {
                let not_in = is_in(v.map(|v| v + 1), &values).map(|is| !is);
                not_in == Some(false) || k.is_some_and(|k| k <= 1)
            })
        },
    ),
    (
        "select v in (select c from B [range 3 ns]), v not in (select c from B [range 3 ns]) from A [range 4 ns]",
        |world| {
            let values = world.b(3);
            let both = |v| vec![truth(is_in(v, &values)), truth(is_in(v, &values).map(|is| !is))];
            world.a(4).into_iter().map(|(_, v)| both(v)).collect()
        },
    ),
    (
        "select k, v from A [range 4 ns] where exists (select * from B [range 3 ns] where c > 2) or k = 1",
        |world| {
            let any = world.b(3).into_iter().flatten().any(|c| c > 2);
            rows(world.a(4), |k, _| any || k == Some(1))
        },
    ),
    (
        "select k, v from A [range 4 ns] where not exists (select c from B [range 2 ns]) and k in (select c from B [range 9 ns])",
        |world| {
            let (any, values) = (!world.b(2).is_empty(), world.b(9));
            rows(world.a(4), |k, _| !any && is_in(k, &values) == Some(true))
        },
    ),
    (
        "select k, count(*) from A [range 6 ns] group by k having count(*) >= (select count(*) from B [range 2 ns]) or k not in (select c from B [range 4 ns])",
        |world| {
            let mut groups: BTreeMap<Number, i64> = BTreeMap::new();
            for (k, _) in world.a(6) {
                *groups.entry(k).or_default() += 1;
            }
            let (least, values) = (count(&world.b(2)), world.b(4));
            groups.retain(|k, count| {
                least.is_some_and(|least| *count >= least) || is_in(*k, &values) == Some(false)
            });
            groups.into_iter().map(|(k, count)| vec![value(k), Value::Integer(count)]).collect()
        },
    ),
    (
        "select k, v from A [range 4 ns] where v in (select c from B [range 5 ns] where c > (select avg(v) from A [range 3 ns]))",
        |world| {
            let than = average(&world.a(3).into_iter().map(|(_, v)| v).collect::<Vec<_>>());
            let values: Vec<Number> =
                world.b(5).into_iter().filter(|c| is_greater(*c, than)).collect();
            rows(world.a(4), |_, v| is_in(v, &values) == Some(true))
        },
    ),
    (
        "select x.k, y.v from A [range 3 ns] as x, A [range 2 ns] as y where x.k = y.k and x.v + y.v > (select avg(c) from B [range 5 ns]) and (select max(c) from B [range 2 ns]) not in (select c from B [range 1 ns])",
        |world| {
            let (than, values) = (average(&world.b(5)), world.b(1));
            let most = world.b(2).into_iter().flatten().max();
            let mut pairs = Vec::new();
            for (x, v) in world.a(3) {
                for (y, w) in world.a(2) {
                    let sum = v.zip(w).map(|(v, w)| v + w);
                    let fits = x.is_some() && x == y && is_greater(sum, than);
                    if fits && is_in(most, &values) == Some(false) {
                        pairs.push(vec![value(x), value(w)]);
                    }
                }
            }
            pairs
        },
    ),
];

/// The changes of a relation, computed from its rows at each instant.
fn changes(relation: impl Fn(i64) -> Vec<Row>) -> Changes {
    let bag = |now: i64| {
        let mut bag: BTreeMap<Row, i64> = BTreeMap::new();
        for row in relation(now) {
            *bag.entry(row).or_default() += 1;
        }
        bag
    };
    let mut changes = Changes::new();
    let mut before = BTreeMap::new();
    for now in 0..=UNTIL {
        let is = bag(now);
        let mut net = is.clone();
        for (row, count) in before {
            *net.entry(row).or_default() -= count;
        }
        let net = net.into_iter().filter(|&(_, count)| count != 0);
        changes.extend(net.map(|(row, count)| (now, row, count)));
        before = is;
    }
    changes
}

fn random_inputs(seed: u64) -> Vec<InputRow> {
    let mut generator = Generator::new(seed);
    let mut inputs = Vec::new();
    let mut time_ns = 0;
    // Many nulls, few nulls, or none.
    let null_in = [3, 12, 1000][seed as usize % 3];
    for _ in 0..5 + generator.below(30) {
        time_ns += [0, 0, 1, 1, 2, 6][generator.below(6)];
        let source = generator.below(2);
        let mut any = || match generator.below(null_in) {
            0 => Value::Null,
            other => Value::Integer(other as i64 % 5),
        };
        let row = if source == 0 { vec![any(), any()] } else { vec![any()] };
        inputs.push(InputRow { source, time_ns: time_ns.min(UNTIL), row, count: 1 });
    }
    inputs
}

#[test]
fn random_streams_give_the_results_of_sql() {
    for (text, relation) in EXAMPLES {
        let mut total = 0;
        for seed in 0..CASES {
            let inputs = random_inputs(seed);
            let expected = changes(|now| relation(&World { inputs: &inputs, now }));
            assert_gives(text, &inputs, &expected);
            total += expected.len();
        }
        assert!(total > 100, "{text}: only {total} changes");
    }
}

fn a(time_ns: i64, k: i64, v: Number) -> InputRow {
    InputRow { source: 0, time_ns, row: vec![Value::Integer(k), value(v)], count: 1 }
}

fn b(time_ns: i64, c: Number) -> InputRow {
    InputRow { source: 1, time_ns, row: vec![value(c)], count: 1 }
}

fn change(time_ns: i64, numbers: &[i64], count: i64) -> (i64, Row, i64) {
    (time_ns, numbers.iter().copied().map(Value::Integer).collect(), count)
}

#[test]
fn a_changing_average() {
    let text = "select k from A [range 20 ns] where v > (select avg(c) from B [range 10 ns])";
    let inputs = [a(1, 1, Some(5)), a(1, 2, Some(3)), b(2, Some(2)), b(4, Some(6)), b(6, None)];
    // The average is 2 from 2 on, 4 from 4 on, 6 from 12 on, and none from 14 on.
    let expected =
        vec![change(2, &[1], 1), change(2, &[2], 1), change(4, &[2], -1), change(12, &[1], -1)];
    assert_gives(text, &inputs, &expected);
}

#[test]
fn rows_of_now_are_compared_with_the_relation_at_their_instant() {
    let text = "Istream(select k from A [now] where v > (select avg(v) from A [range 10 ns]))";
    // The average includes the row itself.
    let inputs = [a(1, 1, Some(4)), a(3, 2, Some(5)), a(5, 3, Some(4)), a(20, 4, Some(9))];
    assert_gives(text, &inputs, &vec![change(3, &[2], 1)]);
    let Output::Stream(_) = plan(text).output else { panic!("it is a stream") };
}

#[test]
fn duplicates_are_kept() {
    let inputs =
        [b(1, Some(7)), b(1, Some(7)), a(2, 1, Some(7)), a(2, 1, Some(7)), a(2, 1, Some(8))];
    let twice = vec![change(2, &[1], 2)];
    assert_gives("select k from A [unbounded] where v in (select c from B)", &inputs, &twice);
    let once = vec![change(2, &[1], 1)];
    assert_gives("select k from A [unbounded] where v not in (select c from B)", &inputs, &once);
    let all = vec![change(2, &[1], 3)];
    assert_gives("select k from A [unbounded] where exists (select c from B)", &inputs, &all);
}

#[test]
fn empty_relations_and_nulls() {
    let not_in = "select k from A [unbounded] where v not in (select c from B [range 2 ns])";
    // No value, not even null, is in an empty relation.
    let inputs = [a(1, 1, None), a(1, 2, Some(5)), b(3, Some(4)), b(10, None)];
    let expected = vec![
        change(1, &[1], 1),
        change(1, &[2], 1),
        change(3, &[1], -1),
        change(5, &[1], 1),
        change(10, &[1], -1),
        change(10, &[2], -1),
        change(12, &[1], 1),
        change(12, &[2], 1),
    ];
    assert_gives(not_in, &inputs, &expected);
    let no_count = "select coalesce((select count(*) from B [range 2 ns]), -1) from A [unbounded]";
    let inputs = [a(1, 1, None), b(3, None)];
    let expected = vec![
        change(1, &[-1], 1),
        change(3, &[-1], -1),
        change(3, &[1], 1),
        change(5, &[-1], 1),
        change(5, &[1], -1),
    ];
    assert_gives(no_count, &inputs, &expected);
}
