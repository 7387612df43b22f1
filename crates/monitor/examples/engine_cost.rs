//! What queries cost in the engine alone: events per second on one core, rows ready made.
//!
//! ```text
//! cargo run --release -p fathom-monitor --example engine_cost
//! ```

use std::time::Instant;

use fathom_cql::ast::{BinaryOperator, JoinKind, ToStream};
use fathom_cql::catalog::Column;
use fathom_cql::plan::{
    Aggregate, AggregateFunction, Expression, Join, Output, Plan, Relation, Stream, Window,
};
use fathom_cql::{Row, Type, Value};
use fathom_monitor::Engine;

const EVENTS: u64 = 300_000;
/// A request or a response every so many nanoseconds.
const STEP_NS: u64 = 5_000;

// Columns: time, type, operation, request, sector, size, machine, disk.
fn row(event: u64, texts: &[Value; 6]) -> Row {
    let (request, response) = (event / 2, event % 2);
    vec![
        Value::Integer((event * STEP_NS) as i64),
        texts[response as usize].clone(),
        texts[2 + (request % 3 == 0) as usize].clone(),
        Value::Integer(request as i64),
        Value::Integer((request * 7919 % 100_000) as i64),
        Value::Integer(8 * (1 + request % 4) as i64),
        texts[4 + (request % 2) as usize].clone(),
        Value::Integer((request % 8) as i64),
    ]
}

fn source() -> Box<Stream> {
    Box::new(Stream::Source(0))
}

fn equals(column: usize, text: &str) -> Expression {
    let literal = Expression::Literal(Value::text(text));
    Expression::Binary(
        BinaryOperator::Equal,
        Box::new(Expression::Column(column)),
        Box::new(literal),
    )
}

fn range(length_ns: u64) -> Relation {
    Relation::Window(Window::Range { length_ns, slide_ns: None }, source())
}

fn plan(output: Output) -> Plan {
    Plan { output, columns: vec![Column { name: "x".into(), kind: Type::Integer }] }
}

fn main() {
    let both = Expression::Binary(
        BinaryOperator::And,
        Box::new(equals(1, "Q")),
        Box::new(equals(6, "vm0")),
    );
    let filter = Relation::Filter(Box::new(Relation::Window(Window::Unbounded, source())), both);
    let filter = plan(Output::Stream(Stream::Of(ToStream::Insertions, Box::new(filter))));

    let size = || Some(Expression::Column(5));
    let of = |function, argument| Aggregate { function, argument, distinct: false };
    let requests = Relation::Filter(Box::new(range(3_000_000_000)), equals(1, "Q"));
    let groups = plan(Output::Relation(Relation::Aggregate(
        Box::new(requests),
        vec![Expression::Column(6), Expression::Column(7)],
        vec![
            of(AggregateFunction::Average, size()),
            of(AggregateFunction::Count, None),
            of(AggregateFunction::Sum, size()),
        ],
    )));

    let side = |letter| Relation::Filter(Box::new(range(3_000_000_000)), equals(1, letter));
    let id = || Expression::Column(3);
    let join = Relation::Join(Box::new(Join {
        left: side("Q"),
        right: side("R"),
        kind: JoinKind::Inner,
        equal: vec![(id(), id())],
        residual: None,
        left_columns: 8,
        right_columns: 8,
    }));
    let took = Expression::Binary(
        BinaryOperator::Subtract,
        Box::new(Expression::Column(8)),
        Box::new(Expression::Column(0)),
    );
    let join = plan(Output::Relation(Relation::Project(Box::new(join), vec![took])));

    let texts = ["Q", "R", "r", "w", "vm0", "vm1"].map(Value::text);
    for (name, plan) in [("filter", filter), ("groups", groups), ("join", join)] {
        let rows: Vec<Row> = (0..EVENTS).map(|event| row(event, &texts)).collect();
        let mut engine = Engine::new(1, &[plan]);
        let mut results = 0_u64;
        let start = Instant::now();
        for (event, row) in rows.into_iter().enumerate() {
            let time_ns = event as u64 * STEP_NS;
            engine.push(0, time_ns, row.into());
            if event % 1000 == 999 {
                engine.advance(time_ns, &mut |_| results += 1);
            }
        }
        engine.advance(EVENTS * STEP_NS, &mut |_| results += 1);
        let seconds = start.elapsed().as_secs_f64();
        println!(
            "{name:8} {:8.2} million events/s, {results} changes of the result",
            EVENTS as f64 / seconds / 1e6
        );
    }
}
