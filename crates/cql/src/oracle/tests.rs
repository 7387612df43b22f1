use super::*;
use crate::ast::{BinaryOperator, ToStream};
use crate::plan::{Expression, Window};
use crate::value::Value;

mod operators;
mod paper;
mod windows;

/// Inputs of one column on stream 0: times and values.
fn numbers(inputs: &[(i64, i64)]) -> Vec<InputRow> {
    inputs.iter().map(|&(time, number)| input(0, time, &[number])).collect()
}

fn input(source: usize, time_ns: i64, numbers: &[i64]) -> InputRow {
    InputRow { source, time_ns, row: row(numbers), count: 1 }
}

/// The number that stands for null in a test's rows.
const NULL: i64 = -99;

fn row(numbers: &[i64]) -> Row {
    let value = |&number: &i64| {
        if number == NULL { Value::Null } else { Value::Integer(number) }
    };
    numbers.iter().map(value).collect()
}

fn column(position: usize) -> Expression {
    Expression::Column(position)
}

fn constant(number: i64) -> Expression {
    Expression::Literal(Value::Integer(number))
}

fn compare(operator: BinaryOperator, left: Expression, right: Expression) -> Expression {
    Expression::Binary(operator, Box::new(left), Box::new(right))
}

fn window(window: Window) -> Relation {
    Relation::Window(window, Box::new(Stream::Source(0)))
}

fn range(length_ns: u64) -> Window {
    Window::Range { length_ns, slide_ns: None }
}

fn rows(rows: u64) -> Window {
    Window::Rows { by: Vec::new(), rows }
}

/// All rows of a source so far.
fn all_of(position: usize) -> Relation {
    Relation::Window(Window::Unbounded, Box::new(Stream::Source(position)))
}

fn of(to_stream: ToStream, relation: Relation) -> Stream {
    Stream::Of(to_stream, Box::new(relation))
}

/// The result up to instant 100. It must be the same if every instant is evaluated.
fn result(output: Output, inputs: &[InputRow]) -> Vec<Delta> {
    let plan = Plan { output, columns: Vec::new() };
    let deltas = run(&plan, inputs, 100);
    let mut oracle = Oracle::new(inputs, 100, u64::MAX);
    oracle.every_instant = true;
    assert_eq!(oracle.output(&plan.output), deltas, "an instant was missed");
    deltas
}

/// Checks changes of a relation: time, count, row.
fn check(relation: Relation, inputs: &[InputRow], expected: &[(i64, i64, &[i64])]) {
    let expected: Vec<Delta> = expected
        .iter()
        .map(|&(time_ns, count, numbers)| Delta { time_ns, row: row(numbers), count })
        .collect();
    assert_eq!(result(Output::Relation(relation), inputs), expected);
}

/// Checks the rows of a stream: time, count, row.
fn check_stream(stream: Stream, inputs: &[InputRow], expected: &[(i64, i64, &[i64])]) {
    let expected: Vec<Delta> = expected
        .iter()
        .map(|&(time_ns, count, numbers)| Delta { time_ns, row: row(numbers), count })
        .collect();
    assert_eq!(result(Output::Stream(stream), inputs), expected);
}

#[test]
fn no_instant_is_missed() {
    for seed in 0..400 {
        let case = crate::generate::case(seed);
        let mut oracle = Oracle::new(&case.inputs, case.until_ns, u64::MAX);
        oracle.every_instant = true;
        let deltas = run(&case.plan, &case.inputs, case.until_ns);
        assert_eq!(oracle.output(&case.plan.output), deltas, "seed {seed}");
    }
}
