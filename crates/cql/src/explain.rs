//! Plans as text.

use std::fmt::Write as _;

use crate::aggregate::distinct::Precision;
use crate::aggregate::histogram::Buckets;
use crate::ast::{BinaryOperator, JoinKind, SetOperation, ToStream, UnaryOperator};
use crate::catalog::{Catalog, Column};
use crate::plan::{
    Aggregate, AggregateFunction, Expression, Function, Join, Output, Plan, Relation, Stage,
    Stream, Window,
};
use crate::planner::symbol;
use crate::value::Value;

/// A plan as a tree of operators, one on each line. The inputs of an operator are below it,
/// indented. The first line describes the result.
///
/// If both sides of a join have a column of the same name, the right one has an apostrophe:
/// `Size'`.
#[must_use]
pub fn explain(plan: &Plan, catalog: &Catalog) -> String {
    let what = match plan.output {
        Output::Stream(_) => "stream",
        Output::Relation(_) => "relation",
    };
    let columns: Vec<String> =
        plan.columns.iter().map(|column| format!("{} {}", column.name, column.kind)).collect();
    let mut tree = Tree { catalog, lines: Vec::new() };
    let wanted = Some(&plan.columns[..]);
    match &plan.output {
        Output::Stream(stream) => tree.stream(stream, 1, wanted),
        Output::Relation(relation) => tree.relation(relation, 1, wanted),
    };
    let mut text = format!("{what} ({})\n", columns.join(", "));
    for (depth, line) in tree.lines {
        let _ = writeln!(text, "{:width$}{line}", "", width = 2 * depth);
    }
    text
}

/// The names of a relation's columns, as [`explain`] shows them in the operator above.
pub(crate) fn names(relation: &Relation, catalog: &Catalog) -> Vec<String> {
    Tree { catalog, lines: Vec::new() }.relation(relation, 0, None)
}

/// The lines so far, each with its depth in the tree.
struct Tree<'a> {
    catalog: &'a Catalog,
    lines: Vec<(usize, String)>,
}

impl Tree<'_> {
    /// Adds an empty line for an operator, before the lines of its inputs. Returns the line's
    /// index.
    fn line(&mut self, depth: usize) -> usize {
        self.lines.push((depth, String::new()));
        self.lines.len() - 1
    }

    fn set(&mut self, line: usize, text: String) {
        self.lines[line].1 = text;
    }

    /// Adds the lines of a stream. Returns the names of its columns.
    fn stream(&mut self, stream: &Stream, depth: usize, wanted: Option<&[Column]>) -> Vec<String> {
        let line = self.line(depth);
        match stream {
            Stream::Source(at) => {
                let (name, columns) = self.input(*at);
                self.set(line, format!("stream {name}"));
                columns
            }
            Stream::Of(how, relation) => {
                let name = match how {
                    ToStream::Insertions => "istream",
                    ToStream::Deletions => "dstream",
                    ToStream::Whole => "rstream",
                };
                self.set(line, name.to_owned());
                self.relation(relation, depth + 1, wanted)
            }
        }
    }

    /// The name of an input, and the names of its columns.
    fn input(&self, at: usize) -> (String, Vec<String>) {
        let schema = self.catalog.streams.get(at);
        let name = schema.map_or("?", |schema| schema.name.as_str()).to_owned();
        let columns = schema.map_or(&[][..], |schema| &schema.columns[..]);
        (name, columns.iter().map(|column| column.name.clone()).collect())
    }

    /// Adds the lines of a relation. Returns the names of its columns.
    fn relation(
        &mut self,
        relation: &Relation,
        depth: usize,
        wanted: Option<&[Column]>,
    ) -> Vec<String> {
        let line = self.line(depth);
        match relation {
            Relation::Window(kind, stream) => {
                let names = self.stream(stream, depth + 1, None);
                self.set(line, window(kind, &names));
                names
            }
            Relation::Given(at) => {
                let (name, columns) = self.input(*at);
                self.set(line, format!("relation {name}"));
                columns
            }
            Relation::Filter(of, predicate) => {
                let names = self.relation(of, depth + 1, wanted);
                self.set(line, format!("filter {}", expression(predicate, &names)));
                names
            }
            Relation::Project(of, expressions) => {
                let below = self.relation(of, depth + 1, None);
                let (names, text) = projection(expressions, &below, wanted);
                self.set(line, text);
                names
            }
            Relation::Join(join) => self.join(join, line, depth),
            Relation::Aggregate(of, keys, aggregates) => {
                let below = self.relation(of, depth + 1, None);
                let (names, text) = aggregation(keys, aggregates, &below);
                self.set(line, text);
                names
            }
            Relation::Distinct(of) => {
                self.set(line, "distinct".to_owned());
                self.relation(of, depth + 1, wanted)
            }
            Relation::Set { operation, all, left, right } => {
                let name = match operation {
                    SetOperation::Union => "union",
                    SetOperation::Except => "except",
                    SetOperation::Intersect => "intersect",
                };
                self.set(line, format!("{name}{}", if *all { " all" } else { "" }));
                let names = self.relation(left, depth + 1, wanted);
                self.relation(right, depth + 1, wanted);
                names
            }
            Relation::Top(of, keys, limit) => {
                let names = self.relation(of, depth + 1, wanted);
                let keys: Vec<String> = keys
                    .iter()
                    .map(|key| {
                        let direction = if key.descending { " desc" } else { "" };
                        format!("{}{direction}", expression(&key.expression, &names))
                    })
                    .collect();
                let mut text = match limit {
                    Some(limit) => format!("first {limit}"),
                    None => "order".to_owned(),
                };
                if !keys.is_empty() {
                    let _ = write!(text, " by {}", keys.join(", "));
                }
                self.set(line, text);
                names
            }
        }
    }

    fn join(&mut self, join: &Join, line: usize, depth: usize) -> Vec<String> {
        let left = self.relation(&join.left, depth + 1, None);
        let right = self.relation(&join.right, depth + 1, None);
        let mut names = left;
        names.truncate(join.left_columns);
        let left_names = names.len();
        for mut name in right {
            while names[..left_names].contains(&name) {
                name.push('\'');
            }
            names.push(name);
        }
        let kind = match join.kind {
            JoinKind::Inner => "join",
            JoinKind::Left => "left join",
            JoinKind::Right => "right join",
            JoinKind::Full => "full join",
        };
        let right_names = names.get(left_names..).unwrap_or_default();
        let mut conditions: Vec<String> = join
            .equal
            .iter()
            .map(|(left, right)| {
                let left = operand(left, &names, precedence(BinaryOperator::Equal) + 1);
                let right = operand(right, right_names, precedence(BinaryOperator::Equal) + 1);
                format!("{left} = {right}")
            })
            .collect();
        if let Some(residual) = &join.residual {
            conditions.push(operand(residual, &names, precedence(BinaryOperator::And)));
        }
        let on = if conditions.is_empty() { "" } else { " on " };
        self.set(line, format!("{kind}{on}{}", conditions.join(" and ")));
        names
    }
}

/// The names of the columns of a projection, and its line. `wanted` are the columns of the result.
fn projection(
    expressions: &[Expression],
    below: &[String],
    wanted: Option<&[Column]>,
) -> (Vec<String>, String) {
    let mut names = Vec::with_capacity(expressions.len());
    let mut parts = Vec::with_capacity(expressions.len());
    for (at, value) in expressions.iter().enumerate() {
        let text = expression(value, below);
        let name = match wanted.and_then(|wanted| wanted.get(at)) {
            Some(column) => column.name.clone(),
            None if matches!(value, Expression::Column(_)) => text.clone(),
            None => format!("column{}", at + 1),
        };
        parts.push(if name == text { text } else { format!("{text} as {name}") });
        names.push(name);
    }
    let parts = if parts.is_empty() { "nothing".to_owned() } else { parts.join(", ") };
    (names, format!("project {parts}"))
}

/// The names of the columns of groups, and their line.
fn aggregation(
    keys: &[Expression],
    aggregates: &[Aggregate],
    below: &[String],
) -> (Vec<String>, String) {
    let mut names: Vec<String> = keys.iter().map(|key| expression(key, below)).collect();
    let values: Vec<String> = aggregates.iter().map(|value| aggregate(value, below)).collect();
    let mut text = "aggregate".to_owned();
    if !values.is_empty() {
        let _ = write!(text, " {}", values.join(", "));
    }
    if !names.is_empty() {
        let _ = write!(text, " by {}", names.join(", "));
    }
    names.extend(values);
    (names, text)
}

fn window(window: &Window, names: &[String]) -> String {
    match window {
        Window::Unbounded => "window unbounded".to_owned(),
        Window::Range { length_ns: 1, slide_ns: None } => "window now".to_owned(),
        Window::Range { length_ns, slide_ns } => {
            let slide = slide_ns.map(|slide| format!(" slide {}", duration(slide)));
            format!("window range {}{}", duration(*length_ns), slide.unwrap_or_default())
        }
        Window::Rows { by, rows } if by.is_empty() => format!("window rows {rows}"),
        Window::Rows { by, rows } => {
            let by: Vec<String> = by.iter().map(|by| column(*by, names)).collect();
            format!("window rows {rows} of each {}", by.join(", "))
        }
    }
}

/// A length of time, in the largest unit that gives a whole number.
fn duration(nanoseconds: u64) -> String {
    const UNITS: [(u64, &str); 5] = [
        (3_600_000_000_000, "h"),
        (60_000_000_000, "min"),
        (1_000_000_000, "s"),
        (1_000_000, "ms"),
        (1_000, "µs"),
    ];
    for (unit, name) in UNITS {
        if nanoseconds >= unit && nanoseconds % unit == 0 {
            return format!("{} {name}", nanoseconds / unit);
        }
    }
    format!("{nanoseconds} ns")
}

fn column(at: usize, names: &[String]) -> String {
    match names.get(at) {
        Some(name) if !name.is_empty() => name.clone(),
        _ => format!("#{}", at + 1),
    }
}

fn aggregate(aggregate: &Aggregate, names: &[String]) -> String {
    let name = match aggregate.function {
        AggregateFunction::Count => "count",
        AggregateFunction::Sum => "sum",
        AggregateFunction::Average => "avg",
        AggregateFunction::Minimum => "min",
        AggregateFunction::Maximum => "max",
        AggregateFunction::Variance => "variance",
        AggregateFunction::StandardDeviation => "stddev",
        AggregateFunction::Percentile(_) => "percentile",
        AggregateFunction::MostFrequent(_) => "top_k",
        AggregateFunction::ApproximateDistinct(_, Stage::Whole) => "approx_count_distinct",
        AggregateFunction::ApproximateDistinct(_, Stage::Part) => "registers",
        AggregateFunction::ApproximateDistinct(_, Stage::Merge) => "count_of_registers",
        AggregateFunction::Histogram(_, Stage::Whole | Stage::Part) => "histogram",
        AggregateFunction::Histogram(_, Stage::Merge) => "sum_of_histograms",
    };
    let argument = match &aggregate.argument {
        Some(argument) => expression(argument, names),
        None => "*".to_owned(),
    };
    let distinct = if aggregate.distinct { "distinct " } else { "" };
    let of = match aggregate.function {
        AggregateFunction::Percentile(percentage) => format!(", {percentage}"),
        AggregateFunction::MostFrequent(wanted) => format!(", {wanted}"),
        AggregateFunction::ApproximateDistinct(precision, _)
            if precision != Precision::default() =>
        {
            format!(", {}", precision.bits())
        }
        AggregateFunction::Histogram(Buckets::Integers(width), _) => format!(", {width}"),
        AggregateFunction::Histogram(Buckets::Floats(width), _) => format!(", {width:?}"),
        _ => String::new(),
    };
    format!("{name}({distinct}{argument}{of})")
}

/// How tightly an operator binds.
fn precedence(operator: BinaryOperator) -> u8 {
    use BinaryOperator as Operator;
    match operator {
        Operator::Or => 1,
        Operator::And => 2,
        Operator::Equal
        | Operator::NotEqual
        | Operator::Less
        | Operator::LessOrEqual
        | Operator::Greater
        | Operator::GreaterOrEqual => 4,
        Operator::Concatenate => 5,
        Operator::Add | Operator::Subtract => 6,
        Operator::Multiply | Operator::Divide | Operator::Remainder => 7,
    }
}

fn expression(value: &Expression, names: &[String]) -> String {
    operand(value, names, 0)
}

/// An expression, in parentheses if it binds less tightly than the operator around it.
fn operand(value: &Expression, names: &[String], around: u8) -> String {
    let (text, binds) = match value {
        Expression::Column(at) => (column(*at, names), 9),
        Expression::Literal(value) => (literal(value), 9),
        Expression::Unary(UnaryOperator::Not, of) => (format!("not {}", operand(of, names, 3)), 3),
        Expression::Unary(UnaryOperator::Negate, of) => (format!("-{}", operand(of, names, 9)), 8),
        Expression::Binary(operator, left, right) => {
            let binds = precedence(*operator);
            // These are associative.
            let joins = matches!(operator, BinaryOperator::And | BinaryOperator::Or);
            let left = operand(left, names, if binds == 4 { 5 } else { binds });
            let right = operand(right, names, if joins { binds } else { binds + 1 });
            (format!("{left} {} {right}", symbol(*operator)), binds)
        }
        Expression::IsNull(of) => (format!("{} is null", operand(of, names, 5)), 4),
        Expression::Like(text, pattern) => {
            let (text, pattern) = (operand(text, names, 5), operand(pattern, names, 5));
            (format!("{text} like {pattern}"), 4)
        }
        Expression::Cast(of, to) => (format!("cast({} as {to})", expression(of, names)), 9),
        Expression::Case(branches, otherwise) => {
            let mut text = "case".to_owned();
            for (when, then) in branches {
                let (when, then) = (expression(when, names), expression(then, names));
                let _ = write!(text, " when {when} then {then}");
            }
            if let Some(otherwise) = otherwise {
                let _ = write!(text, " else {}", expression(otherwise, names));
            }
            (format!("{text} end"), 9)
        }
        Expression::Call(of, arguments) => {
            let arguments: Vec<String> =
                arguments.iter().map(|argument| expression(argument, names)).collect();
            (format!("{}({})", function(*of), arguments.join(", ")), 9)
        }
    };
    if binds < around { format!("({text})") } else { text }
}

fn literal(value: &Value) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Text(text) => format!("'{}'", text.replace('\'', "''")),
        Value::Float(number) => format!("{number:?}"),
        other => other.to_string(),
    }
}

fn function(function: Function) -> &'static str {
    match function {
        Function::Lower => "lower",
        Function::Upper => "upper",
        Function::Length => "length",
        Function::Substring => "substring",
        Function::Position => "position",
        Function::StartsWith => "starts_with",
        Function::EndsWith => "ends_with",
        Function::Replace => "replace",
        Function::SplitPart => "split_part",
        Function::Trim => "trim",
        Function::Absolute => "abs",
        Function::Floor => "floor",
        Function::Ceiling => "ceil",
        Function::Round => "round",
        Function::SquareRoot => "sqrt",
        Function::Logarithm => "ln",
        Function::Power => "power",
        Function::Greatest => "greatest",
        Function::Least => "least",
        Function::Coalesce => "coalesce",
    }
}
