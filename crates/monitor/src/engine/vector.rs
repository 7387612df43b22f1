//! Expressions over many rows at once.
//!
//! The usual shapes have loops of their own over columns; everything else is evaluated row by row.
//! The meaning is that of [`evaluate`] always.

use std::cmp::Ordering;
use std::rc::Rc;

use fathom_cql::Value;
use fathom_cql::ast::BinaryOperator;
use fathom_cql::eval::{evaluate, is_true};
use fathom_cql::plan::Expression;
use fathom_cql::walk::each_column;

use super::run::Run;
use crate::columns::Column;

/// Leaves the rows in `rows` for which a predicate is true.
pub(super) fn filter(predicate: &Expression, run: &Run, rows: &mut Vec<u32>) {
    if rows.is_empty() {
        return;
    }
    if let Expression::Binary(operator, left, right) = predicate {
        if *operator == BinaryOperator::And {
            filter(left, run, rows);
            return filter(right, run, rows);
        }
        if let (Expression::Column(column), Expression::Literal(literal)) = (&**left, &**right) {
            if let (Some(column), Some(test)) = (run.column(*column), comparison(*operator)) {
                return compare(column, literal, test, rows);
            }
        }
    }
    let mut scratch = Scratch::new(predicate);
    rows.retain(|&row| is_true(&scratch.value(predicate, run, row)));
}

/// Whether an order is the one that an operator asks for.
type Test = fn(Ordering) -> bool;

fn comparison(operator: BinaryOperator) -> Option<Test> {
    Some(match operator {
        BinaryOperator::Equal => Ordering::is_eq,
        BinaryOperator::NotEqual => Ordering::is_ne,
        BinaryOperator::Less => Ordering::is_lt,
        BinaryOperator::LessOrEqual => Ordering::is_le,
        BinaryOperator::Greater => Ordering::is_gt,
        BinaryOperator::GreaterOrEqual => Ordering::is_ge,
        _ => return None,
    })
}

/// Leaves the rows that compare with a literal of their own type, and are not null, as is asked.
fn compare(column: &Column, literal: &Value, test: Test, rows: &mut Vec<u32>) {
    match (column, literal) {
        (Column::Integers(integers), Value::Integer(literal)) => {
            rows.retain(|&row| test(integers[row as usize].cmp(literal)));
        }
        (Column::Values(values), literal) if !literal.is_null() => rows.retain(|&row| {
            let value = &values[row as usize];
            value.kind() == literal.kind() && test(value.cmp(literal))
        }),
        _ => rows.clear(),
    }
}

/// The values of an expression for the rows of a run: for `selected` ones, one behind the other,
/// or, where that is `None`, for all rows of its columns, each at its place.
pub(super) fn column(
    expression: &Expression,
    run: &Run,
    selected: Option<&[u32]>,
    length: usize,
) -> Rc<Column> {
    if let Expression::Column(at) = expression {
        return match (run.column(*at), selected) {
            (Some(column), None) => Rc::clone(column),
            (Some(column), Some(rows)) => Rc::new(column.gather(rows)),
            (None, selected) => nulls(selected.map_or(length, <[u32]>::len)),
        };
    }
    if let Some(column) = of_integers(expression, run, selected) {
        return Rc::new(column);
    }
    let mut scratch = Scratch::new(expression);
    let mut value = |row| scratch.value(expression, run, row);
    Rc::new(match selected {
        Some(rows) => rows.iter().map(|&row| value(row)).collect(),
        None => {
            // What is before the rows that count is looked at by nobody.
            let before = std::iter::repeat_with(|| Value::Null).take(run.rows().start);
            before.chain(run.rows().map(|row| value(row as u32))).collect()
        }
    })
}

fn nulls(length: usize) -> Rc<Column> {
    Rc::new(Column::Values(std::iter::repeat_with(|| Value::Null).take(length).collect()))
}

/// Sums, differences and products of two columns of integers, if none overflows.
fn of_integers(expression: &Expression, run: &Run, selected: Option<&[u32]>) -> Option<Column> {
    let Expression::Binary(operator, left, right) = expression else { return None };
    let apply = match operator {
        BinaryOperator::Add => i64::checked_add,
        BinaryOperator::Subtract => i64::checked_sub,
        BinaryOperator::Multiply => i64::checked_mul,
        _ => return None,
    };
    let (Expression::Column(left), Expression::Column(right)) = (&**left, &**right) else {
        return None;
    };
    let (Column::Integers(left), Column::Integers(right)) =
        (&**run.column(*left)?, &**run.column(*right)?)
    else {
        return None;
    };
    let value = |row: usize| apply(left[row], right[row]);
    match selected {
        Some(rows) => rows.iter().map(|&row| value(row as usize)).collect::<Option<_>>(),
        None => {
            let before = std::iter::repeat_n(Some(0), run.rows().start);
            before.chain(run.rows().map(value)).collect()
        }
    }
    .map(Column::Integers)
}

/// A row with the columns that an expression looks at; the others are null.
struct Scratch {
    row: Vec<Value>,
    columns: Vec<usize>,
}

impl Scratch {
    fn new(expression: &Expression) -> Self {
        let mut columns = Vec::new();
        each_column(expression, &mut |column| columns.push(column));
        columns.sort_unstable();
        columns.dedup();
        Self { row: Vec::new(), columns }
    }

    fn value(&mut self, expression: &Expression, run: &Run, row: u32) -> Value {
        self.row.resize_with(run.columns().len(), || Value::Null);
        for &at in &self.columns {
            if let (Some(place), Some(column)) = (self.row.get_mut(at), run.column(at)) {
                *place = column.value(row as usize);
            }
        }
        evaluate(expression, &self.row)
    }
}
