//! A script as it is written.

use serde::{Deserialize, Serialize};

use crate::span::Span;
use crate::value::{Type, Value};

/// A name as it is written, without quotes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identifier {
    /// The text; names do not depend on case.
    pub text: String,
    /// Where.
    pub span: Span,
}

/// A whole text.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Script {
    /// In the order in which they are written.
    pub statements: Vec<Statement>,
}

/// One statement.
#[derive(Clone, Debug, PartialEq)]
pub enum Statement {
    /// A query whose results are wanted: `query : …;`, or just the query.
    Query(Query),
    /// A query with a name for others to use: `vquery : …; vtable : register stream V(…);`,
    /// or `create view V(…) as …;`.
    View {
        /// The name.
        name: Identifier,
        /// The names of the columns, with the types where they are given; may be empty.
        columns: Vec<ColumnDeclaration>,
        /// Whether it was declared as a stream or a relation (`None`: `create view`).
        declared: Option<Declared>,
        /// The query.
        query: Query,
    },
    /// An input stream: `table : register stream S(…);`, or `create stream S(…);`.
    Stream {
        /// The name.
        name: Identifier,
        /// The columns.
        columns: Vec<ColumnDeclaration>,
    },
}

/// What a `register` says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Declared {
    /// `register stream`.
    Stream,
    /// `register relation`.
    Relation,
}

/// `Name type`.
#[derive(Clone, Debug, PartialEq)]
pub struct ColumnDeclaration {
    /// The name.
    pub name: Identifier,
    /// The type, where it is given. `char(n)` is text, `byte` and `int` are integer.
    pub kind: Option<Type>,
}

/// A query: relational, or made a stream.
#[derive(Clone, Debug, PartialEq)]
pub struct Query {
    /// What is asked.
    pub body: SetExpression,
    /// `order by …`.
    pub order_by: Vec<OrderItem>,
    /// `limit n`.
    pub limit: Option<u64>,
    /// `Istream(…)`, `Dstream(…)`, `Rstream(…)`.
    pub to_stream: Option<ToStream>,
    /// Where.
    pub span: Span,
}

/// How a relation becomes a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ToStream {
    /// What enters the relation.
    Insertions,
    /// What leaves it.
    Deletions,
    /// All of it, whenever it changes.
    Whole,
}

/// Selections, combined.
#[derive(Clone, Debug, PartialEq)]
pub enum SetExpression {
    /// `select …`.
    Select(Box<Select>),
    /// `(query)`.
    Query(Box<Query>),
    /// `left union right` and the like. All are of bags where `all` is set, of sets otherwise;
    /// `intersect` binds tighter than the others, which go from left to right.
    Operation {
        /// Which.
        operation: SetOperation,
        /// Whether rows keep their counts.
        all: bool,
        /// On the left.
        left: Box<SetExpression>,
        /// On the right.
        right: Box<SetExpression>,
        /// Where.
        span: Span,
    },
}

/// A way to combine two relations of the same columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum SetOperation {
    /// What is in either.
    Union,
    /// What is on the left and not on the right.
    Except,
    /// What is in both.
    Intersect,
}

/// `select … from … where … group by … having …`.
#[derive(Clone, Debug, PartialEq)]
pub struct Select {
    /// `select distinct`.
    pub distinct: bool,
    /// What is selected.
    pub items: Vec<SelectItem>,
    /// From what; the parts are joined without a condition. At least one.
    pub from: Vec<TableReference>,
    /// `where …`.
    pub selection: Option<Expression>,
    /// `group by …`.
    pub group_by: Vec<Expression>,
    /// `having …`.
    pub having: Option<Expression>,
    /// Where.
    pub span: Span,
}

/// One thing that is selected.
#[derive(Clone, Debug, PartialEq)]
pub enum SelectItem {
    /// `*`.
    All(Span),
    /// `alias.*`.
    AllOf(Identifier),
    /// `expression as alias`.
    Expression {
        /// What.
        expression: Expression,
        /// Under which name.
        alias: Option<Identifier>,
    },
}

/// One thing that is selected from.
#[derive(Clone, Debug, PartialEq)]
pub enum TableReference {
    /// `name [window] as alias`.
    Named {
        /// The stream or view.
        name: Identifier,
        /// The window.
        window: Option<Window>,
        /// Another name.
        alias: Option<Identifier>,
    },
    /// `(query) [window] as alias`.
    Subquery {
        /// The query.
        query: Box<Query>,
        /// The window, where the query makes a stream.
        window: Option<Window>,
        /// The name.
        alias: Option<Identifier>,
    },
    /// `left join right on condition`.
    Join {
        /// On the left.
        left: Box<TableReference>,
        /// On the right.
        right: Box<TableReference>,
        /// Which rows without a partner stay.
        kind: JoinKind,
        /// `on …`; `None` for `cross join`.
        on: Option<Expression>,
        /// Where.
        span: Span,
    },
}

/// Which rows without a partner stay, filled up with nulls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum JoinKind {
    /// None.
    Inner,
    /// Those on the left.
    Left,
    /// Those on the right.
    Right,
    /// Both.
    Full,
}

/// Which part of a stream is a relation.
#[derive(Clone, Debug, PartialEq)]
pub struct Window {
    /// Which.
    pub kind: WindowKind,
    /// Where.
    pub span: Span,
}

/// The kinds of windows.
#[derive(Clone, Debug, PartialEq)]
pub enum WindowKind {
    /// `[now]`.
    Now,
    /// `[unbounded]`, `[range unbounded]`, `[rows unbounded]`.
    Unbounded,
    /// `[range 3 seconds]`, `[range 3 seconds slide 1 second]`; `[tumbling 3 seconds]` slides by
    /// its length. In nanoseconds, at least 1. Without a unit the number is of seconds. (With
    /// the units of the monitoring paper, "second" is a microsecond.)
    Range {
        /// How far back.
        length_ns: u64,
        /// How often it moves.
        slide_ns: Option<u64>,
    },
    /// `[rows 10]`.
    Rows(u64),
    /// `[partition by A, B rows 10]`.
    Partition {
        /// By which columns.
        by: Vec<Identifier>,
        /// How many of each.
        rows: u64,
    },
}

/// One key of an order.
#[derive(Clone, Debug, PartialEq)]
pub struct OrderItem {
    /// By what: an expression, a column's name, or a column's number from 1 on.
    pub expression: Expression,
    /// `desc`.
    pub descending: bool,
}

/// An expression and its place.
#[derive(Clone, Debug, PartialEq)]
pub struct Expression {
    /// What.
    pub kind: ExpressionKind,
    /// Where.
    pub span: Span,
}

/// The kinds of expressions.
#[derive(Clone, Debug, PartialEq)]
pub enum ExpressionKind {
    /// A constant: `5`, `2.5`, `"text"`, `'text'`, `true`, `null`.
    Literal(Value),
    /// `column` or `alias.column`.
    Column {
        /// Of what.
        qualifier: Option<Identifier>,
        /// The column.
        name: Identifier,
    },
    /// `$name`: a parameter.
    Parameter(String),
    /// `not x`, `-x`.
    Unary(UnaryOperator, Box<Expression>),
    /// `x + y` and the like.
    Binary(BinaryOperator, Box<Expression>, Box<Expression>),
    /// `x is null`, `x is not null`.
    IsNull {
        /// What.
        operand: Box<Expression>,
        /// Whether `not` is there.
        negated: bool,
    },
    /// `x between low and high`.
    Between {
        /// What.
        operand: Box<Expression>,
        /// From.
        low: Box<Expression>,
        /// To, inclusive.
        high: Box<Expression>,
        /// Whether `not` is there.
        negated: bool,
    },
    /// `x in (a, b)`.
    In {
        /// What.
        operand: Box<Expression>,
        /// In what.
        list: Vec<Expression>,
        /// Whether `not` is there.
        negated: bool,
    },
    /// `x in (select a from …)`.
    InQuery {
        /// What.
        operand: Box<Expression>,
        /// In what: a query of one column.
        query: Box<Query>,
        /// Whether `not` is there.
        negated: bool,
    },
    /// `exists (select …)`.
    Exists(Box<Query>),
    /// `(select …)`: the value of a query of one column and at most one row.
    Query(Box<Query>),
    /// `x like 'a%'`: `%` is any text, `_` any character.
    Like {
        /// What.
        operand: Box<Expression>,
        /// Like what.
        pattern: Box<Expression>,
        /// Whether `not` is there.
        negated: bool,
    },
    /// `name(arguments)`: a function or an aggregate. `count(*)` has no arguments and `star`.
    Call {
        /// The function.
        name: Identifier,
        /// Whether `distinct` is there.
        distinct: bool,
        /// Whether the argument is `*`.
        star: bool,
        /// The arguments.
        arguments: Vec<Expression>,
    },
    /// `cast(x as type)`.
    Cast(Box<Expression>, Type),
    /// `case when a then b else c end`, `case x when a then b end`.
    Case {
        /// What is compared with each condition.
        operand: Option<Box<Expression>>,
        /// Conditions and values.
        branches: Vec<(Expression, Expression)>,
        /// Otherwise.
        otherwise: Option<Box<Expression>>,
    },
}

/// Operators of one operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum UnaryOperator {
    /// `not`.
    Not,
    /// `-`.
    Negate,
}

/// Operators of two operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum BinaryOperator {
    /// `or`.
    Or,
    /// `and`.
    And,
    /// `=`.
    Equal,
    /// `<>`, `!=`.
    NotEqual,
    /// `<`.
    Less,
    /// `<=`.
    LessOrEqual,
    /// `>`.
    Greater,
    /// `>=`.
    GreaterOrEqual,
    /// `+`.
    Add,
    /// `-`.
    Subtract,
    /// `*`.
    Multiply,
    /// `/`: of integers, toward zero; by zero it is null.
    Divide,
    /// `%`.
    Remainder,
    /// `||`: texts one after the other.
    Concatenate,
}

impl BinaryOperator {
    /// Whether it compares two values of one type.
    pub fn is_comparison(self) -> bool {
        matches!(
            self,
            Self::Equal
                | Self::NotEqual
                | Self::Less
                | Self::LessOrEqual
                | Self::Greater
                | Self::GreaterOrEqual
        )
    }
}
