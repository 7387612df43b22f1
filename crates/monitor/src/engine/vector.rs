//! The evaluation of expressions over many rows.
//!
//! Common expressions have specialised loops over columns; all others are evaluated row by row. The
//! results are always those of [`evaluate`].

use std::cmp::Ordering;
use std::rc::Rc;

use fathom_cql::Value;
use fathom_cql::ast::BinaryOperator;
use fathom_cql::eval::{evaluate, is_true};
use fathom_cql::plan::Expression;
use fathom_cql::walk::each_column;

use super::run::Run;
use crate::columns::ColumnValues;

/// Keeps the rows in `rows` for which a predicate is true.
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
            if let (Some(column), true) = (run.column(*column), operator.is_comparison()) {
                return compare(column, *operator, literal, rows);
            }
        }
    }
    let mut scratch = Scratch::new(predicate);
    keep(rows, |row| is_true(&scratch.value(predicate, run, row)));
}

/// Keeps the rows that pass a test, without a branch on its result.
fn keep(rows: &mut Vec<u32>, mut test: impl FnMut(usize) -> bool) {
    let mut kept = 0;
    for at in 0..rows.len() {
        let row = rows[at];
        rows[kept] = row;
        kept += usize::from(test(row as usize));
    }
    rows.truncate(kept);
}

/// Keeps the rows whose values are not null, have the literal's type, and compare with the literal
/// as required.
fn compare(column: &ColumnValues, operator: BinaryOperator, literal: &Value, rows: &mut Vec<u32>) {
    use BinaryOperator as Operator;
    match (column, literal) {
        (ColumnValues::Integers(of), &Value::Integer(literal)) => match operator {
            Operator::Equal => keep(rows, |row| of[row] == literal),
            Operator::NotEqual => keep(rows, |row| of[row] != literal),
            Operator::Less => keep(rows, |row| of[row] < literal),
            Operator::LessOrEqual => keep(rows, |row| of[row] <= literal),
            Operator::Greater => keep(rows, |row| of[row] > literal),
            _ => keep(rows, |row| of[row] >= literal),
        },
        (ColumnValues::Floats(of), literal @ Value::Float(_)) => {
            let test = test(operator);
            keep(rows, |row| test(Value::Float(of[row]).cmp(literal)));
        }
        (ColumnValues::Values(_), Value::Text(_)) if operator == Operator::Equal => {
            keep(rows, |row| column.is(row, literal));
        }
        (ColumnValues::Values(values), literal) if !literal.is_null() => {
            let test = test(operator);
            let kind = literal.kind();
            keep(rows, |row| values[row].kind() == kind && test(values[row].cmp(literal)));
        }
        (ColumnValues::Indexed(of, at), literal) => {
            // Each distinct value is compared once.
            let mut holds: Vec<u32> = (0..of.len() as u32).collect();
            compare(of, operator, literal, &mut holds);
            let mut is_one = vec![false; of.len()];
            for row in holds {
                is_one[row as usize] = true;
            }
            keep(rows, |row| is_one[at[row] as usize]);
        }
        _ => rows.clear(),
    }
}

/// The test of an order by which a comparison is true.
fn test(operator: BinaryOperator) -> fn(Ordering) -> bool {
    match operator {
        BinaryOperator::Equal => Ordering::is_eq,
        BinaryOperator::NotEqual => Ordering::is_ne,
        BinaryOperator::Less => Ordering::is_lt,
        BinaryOperator::LessOrEqual => Ordering::is_le,
        BinaryOperator::Greater => Ordering::is_gt,
        _ => Ordering::is_ge,
    }
}

/// The values of an expression for rows of a run: for the `selected` rows, consecutively; or, if
/// `selected` is `None`, for all rows of the run's columns, each at its position.
pub(super) fn column(
    expression: &Expression,
    run: &Run,
    selected: Option<&[u32]>,
    length: usize,
) -> Rc<ColumnValues> {
    if let Expression::Column(at) = expression {
        return match (run.column(*at), selected) {
            (Some(column), None) => Rc::clone(column),
            (Some(column), Some(rows)) => Rc::new(column.gather(rows)),
            (None, selected) => Rc::new(ColumnValues::Nulls(selected.map_or(length, <[u32]>::len))),
        };
    }
    if let Some(column) = of_integers(expression, run, selected) {
        return Rc::new(column);
    }
    let mut scratch = Scratch::new(expression);
    let mut value = |row| scratch.value(expression, run, row);
    Rc::new(if let Some(rows) = selected {
        rows.iter().map(|&row| value(row as usize)).collect()
    } else {
        // Rows before the first valid one are ignored.
        let before = std::iter::repeat_with(|| Value::Null).take(run.rows().start);
        before.chain(run.rows().map(value)).collect()
    })
}

/// The sums, differences or products of two columns of integers; `None` if one overflows.
fn of_integers(
    expression: &Expression,
    run: &Run,
    selected: Option<&[u32]>,
) -> Option<ColumnValues> {
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
    let (ColumnValues::Integers(left), ColumnValues::Integers(right)) =
        (&**run.column(*left)?, &**run.column(*right)?)
    else {
        return None;
    };
    let value = |row: usize| apply(left[row], right[row]);
    let values: Option<Vec<i64>> = if let Some(rows) = selected {
        rows.iter().map(|&row| value(row as usize)).collect()
    } else {
        let before = std::iter::repeat_n(Some(0), run.rows().start);
        before.chain(run.rows().map(value)).collect()
    };
    values.map(ColumnValues::Integers)
}

/// A row with the columns that an expression uses. Its other columns are null.
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

    fn value(&mut self, expression: &Expression, run: &Run, row: usize) -> Value {
        self.row.resize_with(run.columns().len(), || Value::Null);
        for &at in &self.columns {
            if let (Some(place), Some(column)) = (self.row.get_mut(at), run.column(at)) {
                *place = column.value(row);
            }
        }
        evaluate(expression, &self.row)
    }
}
