//! A query of the monitoring paper: response times, by joining requests and responses.

use super::*;
use crate::ast::JoinKind;
use crate::plan::Join;

/// Table 3.5: the tap's time, the type, the request and the filter's time. Times are in
/// microseconds.
const EVENTS: [(i64, &str, i64, i64); 10] = [
    (21_128_269, "Q", 784, 3_658_847),
    (21_142_381, "R", 784, 3_674_820),
    (21_142_535, "Q", 785, 3_674_827),
    (21_142_544, "Q", 786, 3_674_832),
    (21_142_550, "Q", 787, 3_674_837),
    (21_159_268, "R", 785, 3_690_820),
    (21_159_277, "R", 786, 3_690_827),
    (21_159_283, "R", 787, 3_690_831),
    (21_159_360, "Q", 788, 3_690_836),
    (21_165_320, "R", 788, 3_698_819),
];

/// Table 3.6: the response time in microseconds, and the request.
const TIMES: [(i64, i64); 5] =
    [(14112, 784), (16733, 785), (16733, 786), (16733, 787), (5960, 788)];

/// Requests or responses of the last three seconds.
fn events(kind: &str) -> Relation {
    let kind = Expression::Literal(Value::text(kind));
    let all = window(range(3_000_000_000));
    Relation::Filter(Box::new(all), compare(BinaryOperator::Equal, column(1), kind))
}

fn response_times() -> Relation {
    let join = Join {
        left: events("Q"),
        right: events("R"),
        kind: JoinKind::Inner,
        equal: vec![(column(2), column(2))],
        residual: None,
        left_columns: 3,
        right_columns: 3,
    };
    let time = compare(BinaryOperator::Subtract, column(3), column(0));
    Relation::Project(Box::new(Relation::Join(Box::new(join))), vec![time, column(2)])
}

#[test]
fn response_times_of_the_sample() {
    let event = |&(tap, kind, request, filter): &(i64, &str, i64, i64)| InputRow {
        source: 0,
        time_ns: filter * 1000,
        row: vec![Value::Integer(tap), Value::text(kind), Value::Integer(request)],
        count: 1,
    };
    let inputs: Vec<InputRow> = EVENTS.iter().map(event).collect();
    let arrives = |wanted: i64| {
        let of =
            |&&(_, kind, request, _): &&(i64, &str, i64, i64)| kind == "R" && request == wanted;
        EVENTS.iter().find(of).unwrap().3 * 1000
    };
    let leaves = |wanted: i64| {
        let of =
            |&&(_, kind, request, _): &&(i64, &str, i64, i64)| kind == "Q" && request == wanted;
        EVENTS.iter().find(of).unwrap().3 * 1000 + 3_000_000_000
    };
    let insertions = TIMES.map(|(time, request)| Delta {
        time_ns: arrives(request),
        row: row(&[time, request]),
        count: 1,
    });
    let deletions = TIMES.map(|(time, request)| Delta {
        time_ns: leaves(request),
        row: row(&[time, request]),
        count: -1,
    });
    let plan = |output| Plan { output, columns: Vec::new() };

    let stream = plan(Output::Stream(of(ToStream::Insertions, response_times())));
    assert_eq!(run(&stream, &inputs, i64::MAX), insertions);
    let relation = plan(Output::Relation(response_times()));
    assert_eq!(run(&relation, &inputs, 3_700_000_000), insertions);
    assert_eq!(run(&relation, &inputs, i64::MAX), [insertions, deletions].concat());
}
