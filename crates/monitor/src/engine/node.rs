//! Translates plans into nodes. Rows are filtered and projected as early as possible.
//!
//! A window by time keeps the output of a selection. So it holds only the rows and values that the
//! query needs, and each value is computed once, although its row is inserted and deleted.

use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use fathom_cql::Value;
use fathom_cql::ast::{BinaryOperator, JoinKind, SetOperation, ToStream};
use fathom_cql::plan::{Aggregate, Expression, Join, OrderKey, Output, Relation, Stream, Window};
use fathom_cql::walk::{combine, conjuncts, each_column, substitute};

use crate::read::Condition;

/// An operator and its inputs.
#[derive(Debug)]
pub(super) enum Node {
    /// An input.
    Source(usize),
    /// Filtered and projected rows.
    Select(Rc<Node>, Selection),
    /// A window by time.
    Range { input: Rc<Node>, length_ns: u64, slide_ns: u64 },
    /// A window of the last rows, for each combination of values in some columns.
    Rows { input: Rc<Node>, by: Vec<usize>, rows: usize },
    /// The pairs of matching rows.
    Join(Rc<Node>, Rc<Node>, Matching),
    /// Groups. The input's columns are the keys, then the argument of each aggregate that has one.
    Groups { input: Rc<Node>, keys: usize, aggregates: Vec<Aggregate> },
    /// The distinct rows.
    Distinct(Rc<Node>),
    /// A set operation on two relations, except `union all`.
    Set { left: Rc<Node>, right: Rc<Node>, operation: SetOperation, all: bool },
    /// The rows of both inputs.
    Both(Rc<Node>, Rc<Node>),
    /// The first rows.
    Top { input: Rc<Node>, keys: Vec<OrderKey>, limit: u64 },
    /// The changes of a relation, as a stream.
    Stream(ToStream, Rc<Node>),
}

/// A filter and a projection of single rows.
#[derive(Clone, Debug, Default)]
pub(super) struct Selection {
    /// The condition of the filter.
    pub(super) predicate: Option<Expression>,
    /// The projection; `None` keeps the row.
    pub(super) outputs: Option<Vec<Expression>>,
}

/// The matching of two rows, and the columns of a pair.
#[derive(Clone, Debug)]
pub(super) struct Matching {
    pub(super) kind: JoinKind,
    /// The columns of the left and of the right side that must be equal.
    pub(super) equal: [Vec<usize>; 2],
    /// A further condition over the columns of both sides.
    pub(super) residual: Option<Expression>,
    /// The number of columns of each side.
    pub(super) widths: [usize; 2],
    /// The columns of a pair, numbered through both sides.
    pub(super) outputs: Vec<usize>,
}

/// The node of a relation.
fn relation(relation: &Relation) -> Rc<Node> {
    selected(relation, Selection::default())
}

/// The node of a plan's result.
pub(super) fn output(of: &Output) -> Rc<Node> {
    match of {
        Output::Stream(of) => stream(of),
        Output::Relation(of) => relation(of),
    }
}

/// The node of a stream.
fn stream(of: &Stream) -> Rc<Node> {
    selected_stream(of, Selection::default())
}

/// Adds the conditions on the rows of a source that a node uses. Each such row meets at least one
/// condition, that is, its columns have the texts of all parts of the condition. Returns false if
/// there are no conditions.
pub(super) fn conditions(node: &Node, source: usize, add: &mut impl FnMut(Condition)) -> bool {
    match node {
        Node::Source(of) => *of != source,
        Node::Select(input, selection) => match (&**input, &selection.predicate) {
            (Node::Source(of), Some(predicate)) if *of == source => {
                let parts = conjuncts(predicate.clone()).into_iter();
                let texts: Vec<_> = parts.filter_map(|part| equal_text(&part)).collect();
                let known = !texts.is_empty();
                add(texts);
                known
            }
            _ => conditions(input, source, add),
        },
        Node::Range { input, .. }
        | Node::Rows { input, .. }
        | Node::Groups { input, .. }
        | Node::Distinct(input)
        | Node::Top { input, .. }
        | Node::Stream(_, input) => conditions(input, source, add),
        Node::Join(left, right, _) | Node::Set { left, right, .. } | Node::Both(left, right) => {
            conditions(left, source, add) && conditions(right, source, add)
        }
    }
}

/// The column and the text of a comparison for equality.
fn equal_text(part: &Expression) -> Option<(usize, Arc<str>)> {
    let Expression::Binary(BinaryOperator::Equal, left, right) = part else { return None };
    match (&**left, &**right) {
        (Expression::Column(column), Expression::Literal(Value::Text(text)))
        | (Expression::Literal(Value::Text(text)), Expression::Column(column)) => {
            Some((*column, Arc::clone(text)))
        }
        _ => None,
    }
}

/// The node of a relation's rows, filtered and projected.
fn selected(relation: &Relation, selection: Selection) -> Rc<Node> {
    match relation {
        Relation::Filter(input, predicate) => {
            selected(input, selection.after_filter(predicate.clone()))
        }
        Relation::Project(input, expressions) => match selection.after(expressions) {
            Ok(all) => selected(input, all),
            Err(selection) => {
                let outputs = Some(expressions.clone());
                on(selected(input, Selection { predicate: None, outputs }), selection)
            }
        },
        Relation::Given(source) => on(Rc::new(Node::Source(*source)), selection),
        Relation::Window(Window::Unbounded, of) => selected_stream(of, selection),
        Relation::Window(Window::Range { length_ns, slide_ns }, of) => Rc::new(Node::Range {
            input: selected_stream(of, selection),
            length_ns: *length_ns,
            slide_ns: slide_ns.unwrap_or(1),
        }),
        Relation::Window(Window::Rows { by, rows }, of) => {
            let input = stream(of);
            let (by, rows) = (by.clone(), *rows as usize);
            on(Rc::new(Node::Rows { input, by, rows }), selection)
        }
        Relation::Join(of) => join(of, selection),
        Relation::Aggregate(input, keys, aggregates) => {
            let arguments = aggregates.iter().filter_map(|each| each.argument.as_ref());
            let outputs = Some(keys.iter().chain(arguments).cloned().collect());
            let input = selected(input, Selection { predicate: None, outputs });
            let (keys, aggregates) = (keys.len(), aggregates.clone());
            on(Rc::new(Node::Groups { input, keys, aggregates }), selection)
        }
        Relation::Distinct(input) => on(Rc::new(Node::Distinct(self::relation(input))), selection),
        Relation::Set { operation: SetOperation::Union, all: true, left, right } => {
            let (left, right) = (selected(left, selection.clone()), selected(right, selection));
            Rc::new(Node::Both(left, right))
        }
        Relation::Set { operation, all, left, right } => {
            let (left, right) = (self::relation(left), self::relation(right));
            on(Rc::new(Node::Set { left, right, operation: *operation, all: *all }), selection)
        }
        Relation::Top(input, _, None) => selected(input, selection),
        Relation::Top(input, keys, Some(limit)) => {
            let (input, keys, limit) = (self::relation(input), keys.clone(), *limit);
            on(Rc::new(Node::Top { input, keys, limit }), selection)
        }
    }
}

/// The node of a join's pairs, filtered and projected. Each side has the needed columns, then the
/// values of its keys.
fn join(join: &Join, selection: Selection) -> Rc<Node> {
    let width = join.left_columns + join.right_columns;
    let mark = |expressions: &mut dyn Iterator<Item = &Expression>, needed: &mut Vec<bool>| {
        for expression in expressions {
            each_column(expression, &mut |column| {
                if let Some(place) = needed.get_mut(column) {
                    *place = true;
                }
            });
        }
    };
    let mut shown = vec![selection.outputs.is_none(); width];
    mark(&mut selection.expressions(), &mut shown);
    let mut needed = shown.clone();
    mark(&mut join.residual.iter(), &mut needed);

    // The needed columns of each side, and the selection of each side.
    let columns = |of: Range<usize>| of.filter(|&column| needed[column]).collect::<Vec<_>>();
    let sides = [columns(0..join.left_columns), columns(join.left_columns..width)];
    let only = |first: usize, columns: &[usize], keys: &mut dyn Iterator<Item = &Expression>| {
        let columns = columns.iter().map(|column| Expression::Column(column - first));
        let outputs = Some(columns.chain(keys.cloned()).collect());
        Selection { predicate: None, outputs }
    };
    let left = only(0, &sides[0], &mut join.equal.iter().map(|(left, _)| left));
    let right = only(join.left_columns, &sides[1], &mut join.equal.iter().map(|(_, right)| right));

    let keys = join.equal.len();
    let widths = [sides[0].len() + keys, sides[1].len() + keys];
    let [mine, theirs] = &sides;
    // The position of a column of the join among the needed columns.
    let place = |column: usize| {
        let of = |side: &[usize]| side.iter().position(|&other| other == column);
        of(mine).or_else(|| of(theirs).map(|at| widths[0] + at))
    };
    let shown: Vec<usize> = (0..width).filter(|&column| shown[column]).collect();
    let matching = Matching {
        kind: join.kind,
        equal: [(mine.len()..widths[0]).collect(), (theirs.len()..widths[1]).collect()],
        residual: join
            .residual
            .clone()
            .map(|residual| moved(residual, &|column| place(column).map(Expression::Column))),
        widths,
        outputs: shown.iter().filter_map(|&column| place(column)).collect(),
    };
    let (left, right) = (selected(&join.left, left), selected(&join.right, right));
    let pairs = Rc::new(Node::Join(left, right, matching));
    let among = |column| shown.iter().position(|&other| other == column).map(Expression::Column);
    on(pairs, selection.moved(&among))
}

fn selected_stream(stream: &Stream, selection: Selection) -> Rc<Node> {
    match stream {
        Stream::Source(source) => on(Rc::new(Node::Source(*source)), selection),
        Stream::Of(ToStream::Insertions, of) if of.only_grows() => selected(of, selection),
        Stream::Of(manner, of) => on(Rc::new(Node::Stream(*manner, relation(of))), selection),
    }
}

/// A node, followed by a selection unless the selection is empty.
fn on(node: Rc<Node>, selection: Selection) -> Rc<Node> {
    if selection.predicate.is_none() && selection.outputs.is_none() {
        node
    } else {
        Rc::new(Node::Select(node, selection))
    }
}

/// Replaces the columns of an expression by other expressions. A column without one becomes null.
fn moved(mut expression: Expression, to: &dyn Fn(usize) -> Option<Expression>) -> Expression {
    substitute(&mut expression, &mut |column| {
        to(column).unwrap_or(Expression::Literal(Value::Null))
    });
    expression
}

impl Selection {
    fn expressions(&self) -> impl Iterator<Item = &Expression> {
        self.predicate.iter().chain(self.outputs.iter().flatten())
    }

    fn each_column(&self, visit: &mut dyn FnMut(usize)) {
        for expression in self.expressions() {
            each_column(expression, visit);
        }
    }

    /// Replaces the columns of the selection by other expressions.
    fn moved(self, to: &dyn Fn(usize) -> Option<Expression>) -> Self {
        let moved = |expression| moved(expression, to);
        Self {
            predicate: self.predicate.map(moved),
            outputs: self.outputs.map(|outputs| outputs.into_iter().map(moved).collect()),
        }
    }

    /// A filter, followed by this selection.
    fn after_filter(self, predicate: Expression) -> Self {
        let mut parts = conjuncts(predicate);
        parts.extend(self.predicate.into_iter().flat_map(conjuncts));
        Self { predicate: Some(combine(BinaryOperator::And, parts)), outputs: self.outputs }
    }

    /// A projection, followed by this selection, as a single selection. Returns this selection
    /// unchanged if a value would be computed more than once.
    fn after(self, expressions: &[Expression]) -> Result<Self, Self> {
        let mut uses = vec![0; expressions.len()];
        self.each_column(&mut |column| {
            if let Some(uses) = uses.get_mut(column) {
                *uses += 1;
            }
        });
        let plain =
            |each: &Expression| matches!(each, Expression::Column(_) | Expression::Literal(_));
        if expressions.iter().zip(&uses).any(|(each, &uses)| uses > 1 && !plain(each)) {
            return Err(self);
        }
        let all = self.moved(&|column| expressions.get(column).cloned());
        Ok(Self { outputs: all.outputs.or_else(|| Some(expressions.to_vec())), ..all })
    }
}
