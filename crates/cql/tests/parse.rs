//! The parser: valid scripts, and mistakes.

use fathom_cql::ast::{
    BinaryOperator, Declared, Expression, ExpressionKind, JoinKind, Query, Select, SelectItem,
    SetExpression, SetOperation, Statement, TableReference, ToStream, UnaryOperator, WindowKind,
};
use fathom_cql::{Diagnostic, ParseOptions, Type, Value, parse};

/// The listings of the monitoring paper: name, text and number of statements.
const PAPER: [(&str, &str, usize); 12] = [
    ("query00", include_str!("paper/query00.cql"), 1),
    ("query01", include_str!("paper/query01.cql"), 1),
    ("query02", include_str!("paper/query02.cql"), 1),
    ("query03", include_str!("paper/query03.cql"), 3),
    ("query04", include_str!("paper/query04.cql"), 1),
    ("query05", include_str!("paper/query05.cql"), 5),
    ("query06", include_str!("paper/query06.cql"), 5),
    ("query07", include_str!("paper/query07.cql"), 1),
    ("query08", include_str!("paper/query08.cql"), 3),
    ("query09", include_str!("paper/query09.cql"), 2),
    ("query10", include_str!("paper/query10.cql"), 4),
    ("query10m", include_str!("paper/query10m.cql"), 4),
];

const PLAIN: ParseOptions = ParseOptions { stream_compat: false, time_unit_ns: 0 };
const COMPAT: ParseOptions = ParseOptions { stream_compat: true, time_unit_ns: 0 };

/// The statements of a text without mistakes.
fn statements(text: &str) -> Vec<Statement> {
    match parse(text, &PLAIN) {
        Ok(script) => script.statements,
        Err(mistake) => panic!("{}", mistake.render(text)),
    }
}

/// The only query of a text.
fn query(text: &str) -> Query {
    match statements(text).pop() {
        Some(Statement::Query(query)) => query,
        other => panic!("{text}: {other:?}"),
    }
}

/// The only selection of a text.
fn select(text: &str) -> Select {
    match query(text).body {
        SetExpression::Select(select) => *select,
        other => panic!("{text}: {other:?}"),
    }
}

/// The only source of a `from`.
fn table(text: &str) -> TableReference {
    let mut from = select(&format!("select * from {text}")).from;
    assert_eq!(from.len(), 1, "{text}");
    from.remove(0)
}

fn expression(text: &str) -> Expression {
    select(&format!("select * from S where {text}")).selection.expect("a condition")
}

/// The condition of a query in square brackets, which are empty without one.
fn condition(query: &Query) -> String {
    let SetExpression::Select(select) = &query.body else { return "[]".to_owned() };
    format!("[{}]", select.selection.as_ref().map_or(String::new(), bracketed))
}

/// An expression with brackets around every operator.
fn bracketed(expression: &Expression) -> String {
    let list = |list: &[Expression]| list.iter().map(bracketed).collect::<Vec<_>>().join(", ");
    let not = |negated: bool| if negated { "not " } else { "" };
    match &expression.kind {
        ExpressionKind::Literal(Value::Null) => "null".to_owned(),
        ExpressionKind::Literal(Value::Text(text)) => format!("'{text}'"),
        ExpressionKind::Literal(value) => value.to_string(),
        ExpressionKind::Column { qualifier: Some(of), name } => {
            format!("{}.{}", of.text, name.text)
        }
        ExpressionKind::Column { qualifier: None, name } => name.text.clone(),
        ExpressionKind::Parameter(name) => format!("${name}"),
        ExpressionKind::Unary(UnaryOperator::Not, of) => format!("(not {})", bracketed(of)),
        ExpressionKind::Unary(UnaryOperator::Negate, of) => format!("(- {})", bracketed(of)),
        ExpressionKind::Binary(operator, left, right) => {
            let sign = match operator {
                BinaryOperator::Or => "or",
                BinaryOperator::And => "and",
                BinaryOperator::Equal => "=",
                BinaryOperator::NotEqual => "<>",
                BinaryOperator::Less => "<",
                BinaryOperator::LessOrEqual => "<=",
                BinaryOperator::Greater => ">",
                BinaryOperator::GreaterOrEqual => ">=",
                BinaryOperator::Add => "+",
                BinaryOperator::Subtract => "-",
                BinaryOperator::Multiply => "*",
                BinaryOperator::Divide => "/",
                BinaryOperator::Remainder => "%",
                BinaryOperator::Concatenate => "||",
            };
            format!("({} {sign} {})", bracketed(left), bracketed(right))
        }
        ExpressionKind::IsNull { operand, negated } => {
            format!("({} is {}null)", bracketed(operand), not(*negated))
        }
        ExpressionKind::Between { operand, low, high, negated } => format!(
            "({} {}between {} and {})",
            bracketed(operand),
            not(*negated),
            bracketed(low),
            bracketed(high)
        ),
        ExpressionKind::In { operand, list: values, negated } => {
            format!("({} {}in ({}))", bracketed(operand), not(*negated), list(values))
        }
        ExpressionKind::InQuery { operand, query, negated } => {
            format!("({} {}in {})", bracketed(operand), not(*negated), condition(query))
        }
        ExpressionKind::Exists(query) => format!("exists {}", condition(query)),
        ExpressionKind::Query(query) => condition(query),
        ExpressionKind::Like { operand, pattern, negated } => {
            format!("({} {}like {})", bracketed(operand), not(*negated), bracketed(pattern))
        }
        ExpressionKind::Call { name, distinct, star, arguments } => format!(
            "{}({}{}{})",
            name.text,
            if *distinct { "distinct " } else { "" },
            if *star { "*" } else { "" },
            list(arguments)
        ),
        ExpressionKind::Cast(of, kind) => format!("cast({} as {kind})", bracketed(of)),
        ExpressionKind::Case { operand, branches, otherwise } => {
            let part = |word: &str, of: &Expression| format!("{word}{}", bracketed(of));
            let operand = operand.iter().map(|of| part(" ", of));
            let branch = |(when, then): &(Expression, Expression)| {
                part(" when ", when) + &part(" then ", then)
            };
            let otherwise = otherwise.iter().map(|of| part(" else ", of));
            let parts: String =
                operand.chain(branches.iter().map(branch)).chain(otherwise).collect();
            format!("(case{parts} end)")
        }
    }
}

#[test]
fn the_papers_queries_are_parsed() {
    for (name, text, count) in PAPER {
        for options in [PLAIN, COMPAT] {
            match parse(text, &options) {
                Ok(script) => assert_eq!(script.statements.len(), count, "{name}"),
                Err(mistake) => panic!("{name}: {}", mistake.render(text)),
            }
        }
    }
}

#[test]
fn the_papers_seconds_are_microseconds() {
    let text = PAPER[7].1;
    for (options, expected) in [(COMPAT, 60_000_000_000), (PLAIN, 60_000_000_000_000_000)] {
        let script = parse(text, &options).expect("a script");
        let Statement::Query(query) = &script.statements[0] else { panic!("no query") };
        let SetExpression::Select(select) = &query.body else { panic!("no selection") };
        let TableReference::Named { window: Some(window), .. } = &select.from[0] else {
            panic!("no window")
        };
        assert_eq!(window.kind, WindowKind::Range { length_ns: expected, slide_ns: None });
    }
    for text in ["3", "3 second", "3 seconds", "3 microseconds", "3 us"] {
        let text = format!("select * from S [range {text} slide 1]");
        let SetExpression::Select(select) = (match &parse(&text, &COMPAT).unwrap().statements[0] {
            Statement::Query(query) => query.body.clone(),
            other => panic!("{other:?}"),
        }) else {
            panic!("no selection")
        };
        let TableReference::Named { window: Some(window), .. } = &select.from[0] else {
            panic!("no window")
        };
        assert_eq!(window.kind, WindowKind::Range { length_ns: 3000, slide_ns: Some(1000) });
    }
}

#[test]
fn statements_of_every_form() {
    let all = statements(
        "query : select * from A; ;
         vquery : select * from B; vtable : register stream V(X integer, Type char(2));
         VQUERY : select * from B vtable : register relation W(X);
         table : register stream S(Time bigint, Size double precision, `a b` varchar(9), `Ok` bool);
         create stream T(select int);
         create view U(A, B float) as select * from S;
         create view R as Rstream(select * from S [now]);
         select * from C",
    );
    assert_eq!(all.len(), 8);
    let Statement::View { name, columns, declared, .. } = &all[1] else { panic!("{:?}", all[1]) };
    assert_eq!((name.text.as_str(), *declared), ("V", Some(Declared::Stream)));
    assert_eq!(columns[1].name.text, "Type");
    assert_eq!(columns[1].kind, Some(Type::Text));
    let Statement::View { columns, declared, .. } = &all[2] else { panic!("{:?}", all[2]) };
    assert_eq!((columns[0].kind, *declared), (None, Some(Declared::Relation)));
    let Statement::Stream { name, columns } = &all[3] else { panic!("{:?}", all[3]) };
    let kinds: Vec<_> = columns.iter().map(|c| (c.name.text.as_str(), c.kind.unwrap())).collect();
    let expected = [
        ("Time", Type::Integer),
        ("Size", Type::Float),
        ("a b", Type::Text),
        ("Ok", Type::Boolean),
    ];
    assert_eq!((name.text.as_str(), kinds.as_slice()), ("S", &expected[..]));
    let Statement::View { columns, declared: None, .. } = &all[5] else { panic!("{:?}", all[5]) };
    assert_eq!(columns.iter().map(|c| c.kind).collect::<Vec<_>>(), [None, Some(Type::Float)]);
    let Statement::View { query, .. } = &all[6] else { panic!("{:?}", all[6]) };
    assert_eq!(query.to_stream, Some(ToStream::Whole));
    assert!(statements(" # nothing\n ;; ").is_empty());
}

#[test]
fn expressions_by_precedence() {
    for (text, expected) in [
        ("a or b and not c = d + e * -f", "(a or (b and (not (c = (d + (e * (- f)))))))"),
        ("a - b - c * d / e % f", "((a - b) - (((c * d) / e) % f))"),
        ("a || b + c < d", "(((a || b) + c) < d)"),
        ("(a or b) and c", "((a or b) and c)"),
        ("not a is null and b is not null", "((not (a is null)) and (b is not null))"),
        ("not not a", "(not (not a))"),
        ("a between 1 and 2 and b", "((a between 1 and 2) and b)"),
        ("a not between b + 1 and 2 or c", "((a not between (b + 1) and 2) or c)"),
        ("a in (1, 'x', b) or c not in (null)", "((a in (1, 'x', b)) or (c not in (null)))"),
        ("a like 'x%' and b not like \"y_\"", "((a like 'x%') and (b not like 'y_'))"),
        ("a <> b and a != b", "((a <> b) and (a <> b))"),
        ("a <= b and c >= d and e > f", "(((a <= b) and (c >= d)) and (e > f))"),
        ("4*(D2.Value) >= 5*(A.S/A.C)", "((4 * D2.Value) >= (5 * (A.S / A.C)))"),
        ("count(*) > count(distinct x)", "(count(*) > count(distinct x))"),
        ("now() = coalesce(a, -1, $p)", "(now() = coalesce(a, (- 1), $p))"),
        ("cast(x as float) = cast(a + b as char(3))", "(cast(x as float) = cast((a + b) as text))"),
        ("case when a then b end", "(case when a then b end)"),
        (
            "case x when 1 then a when 2 then b else c end = d",
            "((case x when 1 then a when 2 then b else c end) = d)",
        ),
        ("- -9223372036854775808", "(- -9223372036854775808)"),
        ("2.5e3 < .5 or TRUE", "((2500 < 0.5) or true)"),
        ("\"a\"\"b\" = 'it''s'", "('a\"b' = 'it's')"),
        ("Type = Size and Kind = Class", "((Type = Size) and (Kind = Class))"),
        ("Range + Rows - Second * Value", "((Range + Rows) - (Second * Value))"),
        ("Time < Count or Path = Limit", "((Time < Count) or (Path = Limit))"),
        ("Left.Right = S.from", "(Left.Right = S.from)"),
        ("`select` = S.`a``b`", "(select = S.a`b)"),
        ("now = Stream and view = query", "((now = Stream) and (view = query))"),
        (
            "a > (select b from T) + 1 and c not in (select d from T where d = e)",
            "((a > ([] + 1)) and (c not in [(d = e)]))",
        ),
        (
            "not exists (select * from T where a) or ((select b from T)) = 5",
            "((not exists [a]) or ([] = 5))",
        ),
        ("a in ((select b from T), 5) and b", "((a in ([], 5)) and b)"),
        ("a in (Istream(select b from T))", "(a in [])"),
        ("exists ((select b from T) union select c from T)", "exists []"),
        ("exists and `exists`(a) and S.exists", "((exists and exists(a)) and S.exists)"),
    ] {
        assert_eq!(bracketed(&expression(text)), expected, "{text}");
    }
}

#[test]
fn expressions_have_places() {
    let text = "select * from S where (a + 1) * b is null";
    let condition = select(text).selection.unwrap();
    assert_eq!(&text[condition.span.range()], "(a + 1) * b is null");
    let ExpressionKind::IsNull { operand, .. } = condition.kind else { panic!("no `is null`") };
    assert_eq!(&text[operand.span.range()], "(a + 1) * b");
    let ExpressionKind::Binary(_, left, right) = operand.kind else { panic!("no product") };
    assert_eq!((&text[left.span.range()], &text[right.span.range()]), ("(a + 1)", "b"));
}

#[test]
fn selections() {
    let all = select(
        "select distinct a, S.*, *, b as Range, c d, `e` `f g` from S, T as U, V W
         where a = 1 group by a, b + 1 having count(*) > 2",
    );
    assert!(all.distinct && all.selection.is_some() && all.having.is_some());
    assert_eq!(all.group_by.len(), 2);
    let names: Vec<_> = all
        .items
        .iter()
        .map(|item| match item {
            SelectItem::All(_) => "*".to_owned(),
            SelectItem::AllOf(name) => format!("{}.*", name.text),
            SelectItem::Expression { alias: Some(alias), .. } => alias.text.clone(),
            SelectItem::Expression { expression, .. } => bracketed(expression),
        })
        .collect();
    assert_eq!(names, ["a", "S.*", "*", "Range", "d", "f g"]);
    let aliases: Vec<_> = all
        .from
        .iter()
        .map(|part| match part {
            TableReference::Named { alias, .. } => alias.as_ref().map(|alias| alias.text.as_str()),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(aliases, [None, Some("U"), Some("W")]);
    let ordered = query("select a from S order by a desc, 2 asc, b + 1 limit 10");
    let orders: Vec<_> = ordered.order_by.iter().map(|item| item.descending).collect();
    assert_eq!((orders.as_slice(), ordered.limit), (&[true, false, false][..], Some(10)));
}

#[test]
fn windows() {
    let second = 1_000_000_000;
    let range = |length_ns, slide_ns| WindowKind::Range { length_ns, slide_ns };
    for (text, expected) in [
        ("now", WindowKind::Now),
        ("Unbounded", WindowKind::Unbounded),
        ("range unbounded", WindowKind::Unbounded),
        ("rows unbounded", WindowKind::Unbounded),
        ("rows 10", WindowKind::Rows(10)),
        ("range 3 seconds", range(3 * second, None)),
        ("range 3", range(3 * second, None)),
        ("range 0.5 second", range(second / 2, None)),
        ("range 1e-3 s slide 100 us", range(1_000_000, Some(100_000))),
        ("range 5ms slide 7 nanoseconds", range(5_000_000, Some(7))),
        ("range 2 minutes slide 1", range(120 * second, Some(second))),
        ("range 1 hour", range(3600 * second, None)),
        ("range 1 day", range(86_400 * second, None)),
        ("tumbling 10 seconds", range(10 * second, Some(10 * second))),
    ] {
        let TableReference::Named { window, alias, .. } = table(&format!("S [{text}] as W")) else {
            panic!("{text}")
        };
        assert_eq!(window.expect("a window").kind, expected, "{text}");
        assert_eq!(alias.expect("an alias").text, "W");
    }
    let TableReference::Named { window, .. } = table("S [partition by A, `B c` rows 3]") else {
        panic!("no stream")
    };
    let WindowKind::Partition { by, rows } = window.unwrap().kind else { panic!("no partition") };
    assert_eq!(by.iter().map(|name| name.text.as_str()).collect::<Vec<_>>(), ["A", "B c"]);
    assert_eq!(rows, 3);
}

#[test]
fn joins_and_subqueries() {
    let TableReference::Join { left, kind, on, .. } =
        table("A a left outer join B on a.x = B.x full join C on true cross join D")
    else {
        panic!("no join")
    };
    assert!(kind == JoinKind::Inner && on.is_none());
    let TableReference::Join { left, kind, .. } = *left else { panic!("no join") };
    assert_eq!(kind, JoinKind::Full);
    let TableReference::Join { kind, on, .. } = *left else { panic!("no join") };
    assert!(kind == JoinKind::Left && on.is_some());
    let nested = table("A join (B inner join C on b = c) on a = b");
    let TableReference::Join { right, .. } = nested else { panic!("no join") };
    assert!(matches!(*right, TableReference::Join { .. }));
    let subquery = table("(Istream(select * from S)) [rows 1] as X");
    let TableReference::Subquery { query, window, alias } = subquery else { panic!("no query") };
    assert_eq!(query.to_stream, Some(ToStream::Insertions));
    assert!(window.is_some() && alias.is_some());
    let both = table("((select * from S) union (select * from T)) X");
    assert!(matches!(both, TableReference::Subquery { .. }));
}

#[test]
fn set_operations() {
    let s = "select * from S";
    let SetExpression::Operation { operation, all, left, right, .. } =
        query(&format!("{s} union all {s} minus {s} intersect {s} limit 3")).body
    else {
        panic!("no operation")
    };
    assert_eq!((operation, all), (SetOperation::Except, false));
    let SetExpression::Operation { operation, all, .. } = *left else { panic!("no operation") };
    assert_eq!((operation, all), (SetOperation::Union, true));
    let SetExpression::Operation { operation, .. } = *right else { panic!("no operation") };
    assert_eq!(operation, SetOperation::Intersect);
    let grouped = query(&format!("Dstream(({s} except {s}) union {s} order by 1)"));
    assert_eq!((grouped.to_stream, grouped.order_by.len()), (Some(ToStream::Deletions), 1));
    assert_eq!(query(&format!("(({s}))")).to_stream, None);
    let streams = query(&format!("Istream({s}) union Rstream({s})"));
    assert_eq!(streams.to_stream, None);
    let twice = query(&format!("Istream(Dstream({s}))"));
    assert_eq!(twice.to_stream, Some(ToStream::Insertions));
    assert!(matches!(twice.body, SetExpression::Query(_)));
}

/// The mistake in a text.
fn mistake(text: &str, options: &ParseOptions) -> Diagnostic {
    match parse(text, options) {
        Err(mistake) => mistake,
        Ok(script) => panic!("{text}: {script:?}"),
    }
}

/// Checks a mistake, whose place in the text is between `«` and `»`.
fn check(marked: &str, message: &str, help: Option<&str>, options: &ParseOptions) {
    let text = marked.replace(['«', '»'], "");
    let start = marked.find('«').expect("a place");
    let end = marked.find('»').expect("a place") - '«'.len_utf8();
    let mistake = mistake(&text, options);
    let shown = mistake.render(&text);
    assert_eq!(mistake.message, message, "{shown}");
    assert_eq!(mistake.span.range(), start..end, "{shown}");
    assert_eq!(mistake.help.as_deref(), help, "{shown}");
}

#[test]
#[expect(clippy::too_many_lines, reason = "a flat list of cases")]
fn mistakes_are_reported_with_their_place() {
    let end = "found the end of the text";
    for (marked, message, help) in [
        ("«selct» * from S", "expected a statement, found `selct`", "did you mean `select`?"),
        ("select a «form» S", "expected `from`, found `form`", "did you mean `from`?"),
        ("select * «fron» S", "expected `,` or `from`, found `fron`", "did you mean `from`?"),
        ("select * from S «wher» a = 1", "expected `where`, found `wher`", "did you mean `where`?"),
        ("select * from S where a = 1 «adn» b", "expected `;`, found `adn`", "did you mean `and`?"),
        ("select a, «from» S", "expected an expression, found `from`", "leave out the last `,`"),
        ("select * from S where a «==» 1", "`==` is not an operator", "equality is written `=`"),
        ("select * from S where Type = «\"Q»\n and x", "this text has no end", "end it with `\"`"),
        (
            "select * from S «range» 3 seconds as T",
            "expected `[` before a window, found `range`",
            "a window is written in square brackets: `[range 3 seconds]`",
        ),
        (
            "select * from S «now» where a",
            "expected `[` before a window, found `now`",
            "a window is written in square brackets: `[now]`",
        ),
        (
            "select * from S [range 3 seconds «where» a",
            "expected `]`, found `where`",
            "a window ends with `]`",
        ),
        (
            "select * from S [range 3 «secnods»]",
            "expected a unit of time or `]`, found `secnods`",
            "did you mean `seconds`?",
        ),
        (
            "select * from S [«rnage» 3]",
            "expected `now`, `unbounded`, `range`, `rows`, `partition` or `tumbling`, \
             found `rnage`",
            "did you mean `range`?",
        ),
        (
            "select * from S as T «[»now]",
            "the window is in the wrong place",
            "a window directly follows the stream's name, before `as`",
        ),
        (
            "select * from S [range «0 seconds»]",
            "the length and the slide of a window cannot be 0",
            "`[now]` is the window of the current instant",
        ),
        (
            "select * from S [range «1e6 days»]",
            "this is too long: a window has at most 292 years",
            "`[unbounded]` holds all rows so far",
        ),
        (
            "select * from S [partition by S«.»A rows 1]",
            "expected `,` or `rows`, found `.`",
            "these are columns of the stream itself: leave out the name before `.`",
        ),
        (
            "select * from S where a < b «<» c",
            "comparisons cannot be chained",
            "join comparisons with `and`, or put one of them in brackets",
        ),
        (
            "select * from S where a = «not» b",
            "expected an expression, found `not`",
            "put it in brackets: `(not …)`",
        ),
        (
            "select * from S where a > «select» b from T",
            "a query in an expression must be in brackets",
            "put it in brackets: `(select …)`",
        ),
        (
            "select a as «order» from S",
            "expected a name after `as`, found `order`",
            "`order` is a keyword: to use it as a name, put it in backticks",
        ),
        (
            "Istream «select» * from S",
            "expected `(`, found `select`",
            "put the query in brackets: `Istream(select …)`",
        ),
        (
            "table : register «relation» R(a int);",
            "an input cannot be a relation, only a stream",
            "register a stream: a window makes a relation from it",
        ),
        (
            "«vtable» : register stream V(a int);",
            "this `vtable` has no `vquery` before it",
            "a view is `vquery : …; vtable : register stream Name(column type, …);`",
        ),
        (
            "«vquery» : select * from S; query : select * from T;",
            "this `vquery` has no `vtable` after it",
            "name it: `vtable : register stream Name(column type, …);`, or write `query :` if no \
             other query uses it",
        ),
        (
            "«qurey» : select * from S",
            "expected `query`, `vquery`, `vtable` or `table`, found `qurey`",
            "did you mean `query`?",
        ),
        (
            "create stream S(a «intger»)",
            "expected a type, found `intger`",
            "did you mean `integer`?",
        ),
        (
            "create stream S(a«)»",
            "expected a type, found `)`",
            "the types are `integer`, `float`, `text` and `boolean`",
        ),
        (
            "select * from A join B «using» (x)",
            "expected `on`, found `using`",
            "write the condition out: `on a.x = b.x`",
        ),
        (
            "select * from S where a = «9223372036854775808»",
            "this number is too large",
            "integers have 64 bits: write it with `.0` for a float",
        ),
        ("«query» select * from S", "expected a statement, found `query`", "write `query : …`"),
        (
            "select * from S [rows 3 «seconds»]",
            "expected `]`, found `seconds`",
            "a length of time follows `range`",
        ),
        (
            "select «order» from S",
            "expected an expression, found `order`",
            "`order` is a keyword: to use it as a name, put it in backticks",
        ),
        (
            "select * from S [range 1 slide 300 days«»  ",
            "expected `]`, found the end of the text",
            "a window ends with `]`",
        ),
    ] {
        check(marked, message, Some(help), &PLAIN);
    }
    let expression = format!("expected an expression, {end}");
    for (marked, message) in [
        ("select * from S where a = 1 and«»", expression.as_str()),
        ("select * from S where a = 1 and«»  # more\n\n", expression.as_str()),
        ("select * from S where (a = 1«;»", "expected `)`, found `;`"),
        ("select * from S where a = «3x»", "a number must be separated from the next word"),
        ("select * from S where a = «1e999»", "this number is too large"),
        ("select * from S «select» * from T", "expected `;`, found `select`"),
        ("query : select * from S\n«query» : select * from T", "expected `;`, found `query`"),
        ("select * from S limit «2.5»", "expected a limit, a whole number, found the number 2.5"),
        ("select * from S [range «0.5 ns»]", "this is not a whole number of nanoseconds"),
        ("select * from S where a is «true»", "expected `null` or `not null`, found `true`"),
        ("select * from S where case a «end» = 1", "expected `when`, found `end`"),
        ("select * from S where a or «or» b", "expected an expression, found `or`"),
        ("select * from S where a = «order» by b", "expected an expression, found `order`"),
        (
            "vquery : select * from S; vtable «register» stream V(a);",
            "expected `:`, found `register`",
        ),
        ("select * from S where exists («a»)", "expected a query in `exists (…)`, found `a`"),
        ("select * from S where a in (select b from T limit 1«,» 1)", "expected `)`, found `,`"),
        ("select f(a«;»", "expected `,` or `)`, found `;`"),
        ("select * from «'S'»", "expected the name of a stream or view, found the text 'S'"),
        ("select * from S where a = «\u{1}»", "unexpected character `\\u{1}`"),
    ] {
        check(marked, message, None, &PLAIN);
    }
    check(
        "select * from S [range 3 «minutes»]",
        "`minutes` cannot be used where a second means a microsecond, as in the monitoring paper",
        Some("give the length in microseconds, or turn off the paper's units"),
        &COMPAT,
    );
}

#[test]
fn the_first_mistake_is_reported() {
    // The text that is not closed comes after the first mistake.
    check(
        "select * «fron» S where a = \"",
        "expected `,` or `from`, found `fron`",
        Some("did you mean `from`?"),
        &PLAIN,
    );
    check("select * from S; «\"x»", "this text has no end", Some("end it with `\"`"), &PLAIN);
    check(
        "select * from S [range 3 seconds «{»",
        "unexpected character `{`",
        Some("use `(` and `)`, and `[` and `]` for windows"),
        &PLAIN,
    );
}

#[test]
fn texts_are_bounded() {
    let nested = |count: usize, open: &str, core: &str, close: &str| {
        format!("{}{core}{}", open.repeat(count), close.repeat(count))
    };
    let select = |condition: &str| format!("select * from S where {condition}");
    let deep = "this is nested too deeply";
    let long = "too many operators in a row";
    let core = "select * from S";
    for (text, message) in [
        (select(&nested(20_000, "(", "a", ")")), deep),
        (select(&nested(20_000, "not ", "a", "")), deep),
        (select(&nested(20_000, "- ", "a", "")), deep),
        (select(&nested(20_000, "f(", "a", ")")), deep),
        (select(&nested(20_000, "case when ", "a", " then b end")), deep),
        (select(&nested(20_000, "a in (", "a", ")")), deep),
        (select(&nested(20_000, "(select a from S where ", "a", ")")), deep),
        (select(&nested(20_000, "a in (select a from S where ", "a", ")")), deep),
        (select(&nested(20_000, "exists (select a from S where ", "a", ")")), deep),
        (nested(20_000, "(", core, ")"), deep),
        (nested(20_000, "Istream(", core, ")"), deep),
        (nested(20_000, "select * from (", core, ") x"), deep),
        (format!("select * from {}", nested(20_000, "(", "S", ")")), deep),
        (select(&format!("a{}", " or a".repeat(20_000))), long),
        (select(&format!("a{}", "+a".repeat(20_000))), long),
        (format!("{core}{}", " union select * from S".repeat(20_000)), long),
        (format!("{core}{}", " intersect select * from S".repeat(20_000)), long),
        (format!("{core}{}", " cross join S".repeat(20_000)), long),
        (" ".repeat((1 << 20) + 1), "the text is longer than 1 MiB"),
    ] {
        assert_eq!(mistake(&text, &PLAIN).message, message, "{}", &text[..40]);
    }
    // The bound also holds for chains within brackets within chains.
    let chained = nested(100, "(", "a", " + a + a + a + a + a)");
    assert_eq!(mistake(&select(&chained), &PLAIN).message, long);
    // Texts within the bounds are parsed and can be traversed.
    for text in [
        select(&nested(120, "(", "a", ")")),
        select(&format!("a{}", " or a".repeat(250))),
        nested(31, "select * from (", core, ") x"),
        nested(31, "(", core, ")"),
        select(&nested(20, "a in (select a from S where ", "a", ")")),
        format!("{core}{}", " cross join S".repeat(250)),
        select(&format!("a in (1{})", ", 1".repeat(20_000))),
    ] {
        let script = parse(&text, &PLAIN).expect("a script");
        assert_eq!(script.clone(), script);
        assert!(!format!("{script:?}").is_empty());
    }
}

/// Xorshift.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound as u64) as usize
    }
}

#[test]
fn mutated_texts_are_parsed_or_rejected() {
    const PIECES: [&str; 40] = [
        "(",
        ")",
        "[",
        "]",
        ";",
        ",",
        ".",
        ":",
        "*",
        "-",
        "=",
        "<",
        "\"",
        "'",
        "`",
        "$",
        "#",
        "/*",
        " select ",
        " from ",
        " as ",
        " where ",
        " range ",
        " rows ",
        " partition by ",
        " not ",
        " case ",
        " when ",
        " end ",
        " union ",
        " join ",
        " istream(",
        " 0 ",
        "1e9",
        "é",
        "\u{301}",
        "\t",
        "\n",
        " vtable : ",
        "\0",
    ];
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut parsed = 0;
    for round in 0..10_000 {
        let mut text = PAPER[random.below(PAPER.len())].1.to_owned();
        // Mostly without the comments, so that mutations change the statements.
        if random.below(4) > 0 {
            let lines = text.lines().filter(|line| !line.starts_with('#'));
            text = lines.collect::<Vec<_>>().join("\n");
        }
        for _ in 0..=random.below(4) {
            let mut place = |text: &str| {
                let mut place = random.below(text.len() + 1);
                while !text.is_char_boundary(place) {
                    place -= 1;
                }
                place
            };
            let (from, to) = (place(&text), place(&text));
            let next = text[from..].chars().next().map_or(0, char::len_utf8);
            let one = from..from + next;
            match random.below(5) {
                0 => text.insert_str(from, PIECES[random.below(PIECES.len())]),
                1 => text.replace_range(one, ""),
                2 => text.truncate(from.max(to)),
                3 => {
                    let copied = text[from.min(to)..from.max(to)].to_owned();
                    text.insert_str(random.below(2) * from, &copied);
                }
                _ => {
                    let piece = PIECES[random.below(PIECES.len())];
                    text.replace_range(one, piece);
                }
            }
        }
        let options = ParseOptions { stream_compat: round % 2 == 0, time_unit_ns: round % 3 };
        match parse(&text, &options) {
            Ok(_) => parsed += 1,
            Err(mistake) => {
                let range = mistake.span.range();
                assert!(range.start <= range.end && range.end <= text.len(), "{text}");
                assert!(text.is_char_boundary(range.start), "{text}");
                assert!(text.is_char_boundary(range.end), "{text}");
                let shown = mistake.render(&text);
                assert!(shown.starts_with("line ") && shown.contains('^'), "{shown}");
            }
        }
    }
    assert!((500..9500).contains(&parsed), "{parsed}");
}

#[test]
fn now_has_the_length_of_the_inputs_unit() {
    let kind = |options: &ParseOptions| {
        let script = parse("select * from S [now]", options).unwrap();
        let Some(Statement::Query(query)) = script.statements.into_iter().next() else { panic!() };
        let SetExpression::Select(select) = query.body else { panic!() };
        match &select.from[..] {
            [TableReference::Named { window: Some(window), .. }] => window.kind.clone(),
            other => panic!("{other:?}"),
        }
    };
    let microsecond = WindowKind::Range { length_ns: 1000, slide_ns: None };
    assert_eq!(kind(&PLAIN), WindowKind::Now);
    assert_eq!(kind(&COMPAT), microsecond);
    assert_eq!(kind(&ParseOptions { stream_compat: false, time_unit_ns: 1000 }), microsecond);
}
