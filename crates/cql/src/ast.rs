//! The syntax tree of a script.

use serde::{Deserialize, Serialize};

use crate::span::Span;
use crate::value::{Type, Value};

/// A name as written, without quotes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identifier {
    /// The text; names do not depend on case.
    pub text: String,
    /// The place in the text.
    pub span: Span,
}

/// A script: all statements of a text.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Script {
    /// The statements in the order of the text.
    pub statements: Vec<Statement>,
}

/// One statement.
#[derive(Clone, Debug, PartialEq)]
pub enum Statement {
    /// A query with results: `query : …;`, or just the query.
    Query(Query),
    /// A query with a name, for use in other queries: `vquery : …; vtable : register stream V(…);`,
    /// or `create view V(…) as …;`.
    View {
        /// The name.
        name: Identifier,
        /// The names of the columns, with their types if these are given; may be empty.
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

/// The kind of a registered name.
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
    /// The type, if it is given. `char(n)` is text, `byte` and `int` are integer.
    pub kind: Option<Type>,
}

/// A query, with the operator to a stream if there is one.
#[derive(Clone, Debug, PartialEq)]
pub struct Query {
    /// The selections.
    pub body: SetExpression,
    /// `order by …`.
    pub order_by: Vec<OrderItem>,
    /// `limit n`.
    pub limit: Option<u64>,
    /// `Istream(…)`, `Dstream(…)`, `Rstream(…)`.
    pub to_stream: Option<ToStream>,
    /// The place in the text.
    pub span: Span,
}

/// How a relation becomes a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ToStream {
    /// The rows that enter the relation.
    Insertions,
    /// The rows that leave the relation.
    Deletions,
    /// All rows of the relation, whenever it changes.
    Whole,
}

/// One selection, or several combined.
#[derive(Clone, Debug, PartialEq)]
pub enum SetExpression {
    /// `select …`.
    Select(Box<Select>),
    /// `(query)`.
    Query(Box<Query>),
    /// `left union right` and the like, of bags if `all` is set, otherwise of sets. `intersect`
    /// binds tighter than the others, which are left-associative.
    Operation {
        /// The operation.
        operation: SetOperation,
        /// Whether rows keep their counts.
        all: bool,
        /// The left operand.
        left: Box<SetExpression>,
        /// The right operand.
        right: Box<SetExpression>,
        /// The place in the text.
        span: Span,
    },
}

/// An operation that combines two relations with columns of the same types.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum SetOperation {
    /// The rows of either operand.
    Union,
    /// The rows of the left operand that are not in the right one.
    Except,
    /// The rows that are in both operands.
    Intersect,
}

/// `select … from … where … group by … having …`.
#[derive(Clone, Debug, PartialEq)]
pub struct Select {
    /// `select distinct`.
    pub distinct: bool,
    /// The selected expressions.
    pub items: Vec<SelectItem>,
    /// The sources, which are joined without a condition. There is at least one.
    pub from: Vec<TableReference>,
    /// `where …`.
    pub selection: Option<Expression>,
    /// `group by …`.
    pub group_by: Vec<Expression>,
    /// `having …`.
    pub having: Option<Expression>,
    /// The place in the text.
    pub span: Span,
}

/// One selected expression, or several by `*`.
#[derive(Clone, Debug, PartialEq)]
pub enum SelectItem {
    /// `*`.
    All(Span),
    /// `alias.*`.
    AllOf(Identifier),
    /// `expression as alias`.
    Expression {
        /// The expression.
        expression: Expression,
        /// The name of the column.
        alias: Option<Identifier>,
    },
}

/// One source of a selection.
#[derive(Clone, Debug, PartialEq)]
pub enum TableReference {
    /// `name [window] as alias`.
    Named {
        /// The stream or view.
        name: Identifier,
        /// The window.
        window: Option<Window>,
        /// Another name for the source.
        alias: Option<Identifier>,
    },
    /// `(query) [window] as alias`.
    Subquery {
        /// The query.
        query: Box<Query>,
        /// The window, if the query is a stream.
        window: Option<Window>,
        /// The name of the source.
        alias: Option<Identifier>,
    },
    /// `left join right on condition`.
    Join {
        /// The left operand.
        left: Box<TableReference>,
        /// The right operand.
        right: Box<TableReference>,
        /// The rows without a partner that the result has.
        kind: JoinKind,
        /// `on …`; `None` for `cross join`.
        on: Option<Expression>,
        /// The place in the text.
        span: Span,
    },
}

/// The rows without a partner that the result of a join has, with nulls for the missing columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum JoinKind {
    /// No rows.
    Inner,
    /// Those of the left side.
    Left,
    /// Those of the right side.
    Right,
    /// Those of both sides.
    Full,
}

/// A window: the part of a stream that is a relation.
#[derive(Clone, Debug, PartialEq)]
pub struct Window {
    /// The kind.
    pub kind: WindowKind,
    /// The place in the text.
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
    /// its length. Times are in nanoseconds, at least 1. The default unit is the second. (With the
    /// units of the monitoring paper, "second" is a microsecond.)
    Range {
        /// The length.
        length_ns: u64,
        /// The interval at which the window moves.
        slide_ns: Option<u64>,
    },
    /// `[rows 10]`.
    Rows(u64),
    /// `[partition by A, B rows 10]`.
    Partition {
        /// The columns that partition the stream.
        by: Vec<Identifier>,
        /// The number of rows in each partition.
        rows: u64,
    },
}

/// One key of an order.
#[derive(Clone, Debug, PartialEq)]
pub struct OrderItem {
    /// An expression, a column's name, or a column's number, counted from 1.
    pub expression: Expression,
    /// `desc`.
    pub descending: bool,
}

/// An expression and its place in the text.
#[derive(Clone, Debug, PartialEq)]
pub struct Expression {
    /// The kind.
    pub kind: ExpressionKind,
    /// The place in the text.
    pub span: Span,
}

/// The kinds of expressions.
#[derive(Clone, Debug, PartialEq)]
pub enum ExpressionKind {
    /// A constant: `5`, `2.5`, `"text"`, `'text'`, `true`, `null`.
    Literal(Value),
    /// `column` or `alias.column`.
    Column {
        /// The source of the column.
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
        /// The operand.
        operand: Box<Expression>,
        /// Whether it is negated with `not`.
        negated: bool,
    },
    /// `x between low and high`.
    Between {
        /// The operand.
        operand: Box<Expression>,
        /// The lower bound, inclusive.
        low: Box<Expression>,
        /// The upper bound, inclusive.
        high: Box<Expression>,
        /// Whether it is negated with `not`.
        negated: bool,
    },
    /// `x in (a, b)`.
    In {
        /// The operand.
        operand: Box<Expression>,
        /// The values to compare with.
        list: Vec<Expression>,
        /// Whether it is negated with `not`.
        negated: bool,
    },
    /// `x in (select a from …)`.
    InQuery {
        /// The operand.
        operand: Box<Expression>,
        /// A query of one column.
        query: Box<Query>,
        /// Whether it is negated with `not`.
        negated: bool,
    },
    /// `exists (select …)`.
    Exists(Box<Query>),
    /// `(select …)`: the value of a query of one column and at most one row.
    Query(Box<Query>),
    /// `x like 'a%'`: `%` is any text, `_` any character.
    Like {
        /// The operand.
        operand: Box<Expression>,
        /// The pattern.
        pattern: Box<Expression>,
        /// Whether it is negated with `not`.
        negated: bool,
    },
    /// `name(arguments)`: a function or an aggregate. `count(*)` has no arguments and `star`.
    Call {
        /// The function.
        name: Identifier,
        /// Whether the arguments are `distinct`.
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
        /// The value that each condition is compared with, if there is one.
        operand: Option<Box<Expression>>,
        /// Conditions and values.
        branches: Vec<(Expression, Expression)>,
        /// The value if no condition holds.
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
    /// `/`: integers are rounded towards zero; a division by zero is null.
    Divide,
    /// `%`.
    Remainder,
    /// `||`: the concatenation of texts.
    Concatenate,
}

impl BinaryOperator {
    /// Whether it compares two values of the same type.
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
