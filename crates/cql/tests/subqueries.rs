//! Subqueries in expressions: their plans, and mistakes in them.

mod common;

use common::{assert_wrong, try_plan};
use fathom_cql::check::check;
use fathom_cql::{Hosts, PlannedQuery, explain, parse, split};

/// The last query of a text.
#[track_caller]
fn last(text: &str) -> PlannedQuery {
    let planned = try_plan(text).unwrap_or_else(|wrong| panic!("{}", wrong.render(text)));
    for query in &planned.queries {
        assert_eq!(check(&query.plan, &planned.catalog), Ok(()), "{text}");
    }
    planned.queries.into_iter().next_back().expect("a query")
}

/// The plan of the last query, without the line of its columns.
#[track_caller]
fn assert_shape(text: &str, expected: &[&str]) {
    let found = explain(&last(text).plan, &common::catalog());
    let lines: Vec<&str> = found.lines().skip(1).collect();
    assert_eq!(lines, expected, "\n{found}");
}

#[test]
fn values_are_joined_once() {
    assert_shape(
        "select ReqId, Size - (select avg(Size) from IOstream [rows 9]) as more,
                (select max(Share) from Load [now]) from IOstream [now]
         where Size > 2 * (select avg(Size) from IOstream [rows 9]) and Type = 'Q'",
        &[
            "  project ReqId, cast(Size as float) - avg(Size) as more, max(Share) as max",
            "    left join",
            "      join on cast(Size as float) > 2.0 * avg(Size)",
            "        filter Type = 'Q'",
            "          window now",
            "            stream IOstream",
            "        aggregate avg(Size)",
            "          window rows 9",
            "            stream IOstream",
            "      aggregate max(Share)",
            "        window now",
            "          stream Load",
        ],
    );
}

#[test]
fn an_equal_value_is_a_key_of_the_join() {
    assert_shape(
        "select a.ReqId from IOstream [now] as a, Load [range 1 second] as l
         where a.VDisk = l.Host and a.Size = (select max(Size) from IOstream [rows 9])",
        &[
            "  project ReqId",
            "    join on Size = max(Size)",
            "      join on VDisk = Host",
            "        window now",
            "          stream IOstream",
            "        window range 1 s",
            "          stream Load",
            "      aggregate max(Size)",
            "        window rows 9",
            "          stream IOstream",
        ],
    );
}

#[test]
fn a_value_joined_with_groups() {
    assert_shape(
        "select VDisk, count(*) as n from IOstream group by VDisk
         having count(*) > (select count(*) from Load [now]) or count(*) = 1",
        &[
            "  project VDisk, count(*) as n",
            "    filter count(*) > count(*)' or count(*) = 1",
            "      left join",
            "        aggregate count(*) by VDisk",
            "          window unbounded",
            "            stream IOstream",
            "        aggregate count(*)",
            "          window now",
            "            stream Load",
        ],
    );
}

#[test]
fn values_in_a_subquery() {
    let distinct = ["distinct", "  project Host", "    window range 5 s", "      stream Load"];
    let inside = |depth: usize| distinct.map(|line| format!("{:depth$}{line}", ""));
    let lines = |parts: &[&str]| parts.iter().map(ToString::to_string).collect::<Vec<_>>();
    let mut expected = lines(&[
        "  project ReqId",
        "    join on VDisk = Host",
        "      window now",
        "        stream IOstream",
    ]);
    expected.extend(inside(6));
    let expected: Vec<&str> = expected.iter().map(String::as_str).collect();
    let text = "select ReqId from IOstream [now]
                where VDisk in (select Host from Load [range 5 seconds])";
    assert_shape(text, &expected);

    let mut expected = lines(&[
        "  project ReqId",
        "    filter max(column1) is null or not max(column1) and not VDisk is null and Host is \
         null",
        "      left join",
        "        left join on VDisk = Host",
        "          window now",
        "            stream IOstream",
    ]);
    expected.extend(inside(10));
    expected.extend(lines(&[
        "        aggregate max(column1)",
        "          distinct",
        "            project Host is null as column1",
        "              project Host",
        "                window range 5 s",
        "                  stream Load",
    ]));
    let expected: Vec<&str> = expected.iter().map(String::as_str).collect();
    for condition in ["VDisk not in", "not VDisk in", "not (VDisk in"] {
        let close = if condition.contains('(') { ")" } else { "" };
        let text = format!(
            "select ReqId from IOstream [now]
             where {condition} (select Host from Load [range 5 seconds]){close}"
        );
        assert_shape(&text, &expected);
    }
}

#[test]
fn subqueries_with_exists() {
    let any = ["distinct", "  project true as column1", "    window now", "      stream Load"];
    let [any0, any1, any2, any3] = any.map(|line| format!("      {line}"));
    let rows = ["      window now", "        stream IOstream"];
    assert_shape(
        "select ReqId from IOstream [now] where exists (select * from Load [now])",
        &["  project ReqId", "    join", rows[0], rows[1], &any0, &any1, &any2, &any3],
    );
    let [any0, any1, any2, any3] = any.map(|line| format!("        {line}"));
    let rows = rows.map(|line| format!("  {line}"));
    assert_shape(
        "select ReqId from IOstream [now] where not exists (select * from Load [now])",
        &[
            "  project ReqId",
            "    filter column1 is null",
            "      left join",
            &rows[0],
            &rows[1],
            &any0,
            &any1,
            &any2,
            &any3,
        ],
    );
}

#[test]
fn hosts_send_each_value_once() {
    let query = last(
        "select ReqId from IOstream [now] where VDisk in (select Host from Load [range 5 seconds])",
    );
    let parts = split(&[query.plan], &common::catalog(), Hosts::Many);
    let sent: Vec<String> =
        parts.fragments.iter().map(|part| explain(part, &common::catalog())).collect();
    assert_eq!(sent.len(), 2);
    assert!(sent[1].starts_with("relation (Host text)\n  distinct\n"), "{}", sent[1]);
}

#[test]
fn names_and_types_of_values() {
    let query = last(
        "select (select max(Size) from IOstream [now]), (select Share as s from Load [rows 1]),
                (select max(Size) + 1 from IOstream [now]), exists (select 1 from Load),
                Size in (select Share from Load) as found, (select max(Up) from Load) as up
         from IOstream [now]",
    );
    let columns: Vec<String> = query
        .plan
        .columns
        .iter()
        .map(|column| format!("{} {}", column.name, column.kind))
        .collect();
    let expected = [
        "max integer",
        "s float",
        "column3 integer",
        "column4 boolean",
        "found boolean",
        "up boolean",
    ];
    assert_eq!(columns, expected);
}

#[test]
fn subqueries_with_at_most_one_row() {
    let one = [
        "select max(Size) from IOstream",
        "select a from (select max(Size) as a from IOstream) where a > 5",
        "select max(Size) from IOstream group by 'all'",
        "select Size from IOstream [rows 1]",
        "select Size from IOstream [range 1 second] order by Size limit 1",
        "select a from (select max(Size) as a from IOstream), (select min(Share) from Load)",
        "select max(Size) from IOstream except select min(Size) from IOstream",
        "select Size from IOstream [now] intersect select max(Size) from IOstream",
        "select Size from IOstream [rows 1] where Type = 'Q'",
        "select Size from IOstream [rows 1] where Size in (select Size from IOstream [rows 9])",
        "select count(*) from IOstream having 1 in (select Size from IOstream [rows 9])",
        "select max(Size) from IOstream having max(Size) not in (select Size from IOstream)",
    ];
    for query in one {
        let text = format!("select ({query}) as x from Load [now]");
        last(&text);
    }
    let message = "this subquery may have more than one row";
    let help = "an aggregate without `group by`, a query with `limit 1` and a stream `[rows 1]` \
                have at most one row";
    let many = [
        "select Size from IOstream [now]",
        "select max(Size) from IOstream group by VDisk",
        "select Size from IOstream [partition by VDisk rows 1]",
        "select Size from IOstream [rows 2]",
        "select Size from IOstream [rows 2] where Size in (select Size from IOstream [rows 9])",
        "select a.Size from IOstream [rows 1] as a, IOstream as b where a.Size = b.Size",
        "select Size from IOstream order by Size limit 2",
        "select max(Size) from IOstream union select min(Size) from IOstream",
        "select a.Size from IOstream [rows 1] as a full join IOstream [rows 1] as b on false",
        "Istream(select max(Size) from IOstream)",
    ];
    for query in many {
        let text = format!("select ({query}) as x from Load [now]");
        let wrong = try_plan(&text).expect_err(&text);
        assert_eq!((&wrong.message[..], wrong.help.as_deref()), (message, Some(help)), "{text}");
        assert_eq!(&text[wrong.span.range()], query);
    }
}

#[test]
fn columns_of_the_outer_query() {
    let help = Some("put the subquery into `from`, and join with it");
    assert_wrong(
        "select * from Load [now] as l
         where Share > (select avg(Size) from IOstream [now] where VDisk = l.Host)",
        "l.Host",
        "a subquery cannot use `l.Host` of the outer query",
        help,
    );
    assert_wrong(
        "select * from Load [now] where exists (select 1 from IOstream [now] where VDisk = Host)",
        "Host",
        "a subquery cannot use `Host` of the outer query",
        help,
    );
    assert_wrong(
        "select (select max(a.Size) from IOstream as a where a.Size in
                 (select Size from IOstream as b join (select Sector from IOstream) as c
                  on b.Sector = Share))
         from Load [now]",
        "Share",
        "a subquery cannot use `Share` of the outer query",
        help,
    );
    // Names of the inner query have priority, and a query in `from` has no outer query.
    last(
        "select * from IOstream [now] where Size in (select Size as Share from IOstream [rows 5])",
    );
    assert_wrong(
        "select * from Load as l, (select Size from IOstream where VDisk = l.Host) as s",
        "l",
        "there is no source `l` in this `from`",
        None,
    );
    assert_wrong(
        "select * from Load [now] where exists (select 1 from IOstream where Hots = '')",
        "Hots",
        "there is no column `Hots`",
        None,
    );
}

#[test]
fn streams_of_queries_with_subqueries_need_windows() {
    let expected = |name: &str| {
        (
            format!("in a query with a subquery the stream `{name}` needs a window"),
            format!(
                "`{name} [now]` holds each row at its instant, `{name} [unbounded]` all rows so far"
            ),
        )
    };
    let (message, help) = expected("IOstream");
    let average = "(select avg(Size) from IOstream [range 10 seconds])";
    for text in [
        format!("select * from IOstream where Size > {average}"),
        format!("select {average} from Load [now] join IOstream as io on Up"),
        format!("select count(*) from IOstream where Size > {average} group by VDisk"),
    ] {
        assert_wrong(&text, "IOstream", &message, Some(&help));
    }
    let (message, help) = expected("Asked");
    let text = format!(
        "create view Asked as select Size from IOstream where Type = 'Q';
         select * from Asked as a where a.Size > {average}"
    );
    assert_wrong(&text, "Asked", &message, Some(&help));
    let (message, help) = expected("(select …)");
    let text = format!("select * from (select Size from IOstream) as a where Size > {average}");
    assert_wrong(&text, "select Size from IOstream", &message, Some(&help));

    last(&format!("select count(*), {average} from IOstream having count(*) > {average}"));
    let grown = last(&format!("select * from IOstream [unbounded] where Size > {average}"));
    assert_eq!(grown.unbounded.len(), 1);
    assert_eq!(last(&format!("select * from IOstream [now] where Size > {average}")).unbounded, []);
}

#[test]
fn places_without_subqueries() {
    let help = "it is allowed in `where`, in `having` and in selected expressions, but not in an \
                aggregate; elsewhere put it into `from`, and join with it";
    let query = "select max(Share) from Load";
    for text in [
        format!(
            "select a.Size from IOstream [now] as a join IOstream [now] as b on a.Size > ({query})"
        ),
        format!("select count(*) from IOstream [now] group by Size > ({query})"),
        format!("select Size from IOstream [now] order by Size - ({query})"),
        format!("select sum(Size - ({query})) from IOstream [now]"),
        format!("select count(*), Size - ({query}) as d from IOstream [now] group by d"),
        format!(
            "select Size from IOstream [now] union select Size from IOstream order by ({query})"
        ),
        format!(
            "select a.Size from IOstream [now] as a join IOstream [now] as b on exists ({query})"
        ),
        format!("select count(*) from IOstream [now] group by Size in ({query})"),
    ] {
        assert_wrong(&text, query, "a subquery is not allowed here", Some(help));
    }
}

#[test]
fn views_and_declared_streams() {
    last(
        "create stream S (a integer, b float, c text, d boolean);
         create view V (x, y) as select a, b from S [rows 9] where d;
         select exists (select * from S) as e,
                (select max(a) from S [now] where c in (select c from S)) as m,
                a not in (select b from S [rows 2]) as n
         from S [now] where not exists (select 1 from V) or b = (select y from V [rows 1])",
    );
    assert_wrong(
        "create view V as select Size from IOstream [now] where Size in (select Share from Load);
         select * from Load [now] where Share > (select max(Up) from V)",
        "Up",
        "a subquery cannot use `Up` of the outer query",
        Some("put the subquery into `from`, and join with it"),
    );
}

#[test]
fn nulls_without_a_type() {
    for condition in [
        "null in (select Share from Load)",
        "Share in (select null from Load)",
        "null not in (select null from Load)",
        "(select null from Load [rows 1]) > 5",
        "coalesce((select null from Load [rows 1]), Share) not in (select 1 from Load [rows 2])",
    ] {
        last(&format!("select {condition} as x, Host from Load [now] where {condition}"));
    }
}

#[test]
fn columns_and_types() {
    assert_wrong(
        "select Size in (select Size, Sector from IOstream) from IOstream [now]",
        "select Size, Sector from IOstream",
        "this subquery has 2 columns, not one",
        None,
    );
    assert_wrong(
        "select (select * from Load [rows 1]) as x from IOstream [now]",
        "select * from Load [rows 1]",
        "this subquery has 3 columns, not one",
        None,
    );
    assert_wrong(
        "select * from IOstream [now] where not Size in (select Host from Load)",
        "Size in (select Host from Load",
        "`in` needs values of the same type, not integer and text",
        None,
    );
    assert_wrong(
        "select * from IOstream [now] where VDisk > (select max(Size) from IOstream)",
        "VDisk > (select max(Size) from IOstream)",
        "`>` needs two values of the same type, not text and integer",
        None,
    );
    assert_wrong(
        "select * from IOstream [now] where (select max(Size) from IOstream)",
        "(select max(Size) from IOstream)",
        "expected boolean for a condition, found integer",
        None,
    );
}

#[test]
fn large_and_deep_texts() {
    let mut text = "select Size from IOstream [now]".to_owned();
    for _ in 0..20 {
        text = format!("select Size from IOstream [now] where Size not in ({text})");
    }
    let wrong = try_plan(&text).expect_err("it doubles with each level");
    assert_eq!(wrong.message, "the query is too large");

    for (open, close) in [
        ("select max(Size) + (", ") from IOstream"),
        ("select max(Size) from IOstream [now] where Size in (", ")"),
    ] {
        let nested = |depth: usize| {
            let core = "select max(Size) from IOstream";
            format!("{}{core}{}", open.repeat(depth), close.repeat(depth))
        };
        last(&nested(17));
        let wrong = try_plan(&nested(40)).expect_err("it is deep");
        assert_eq!(wrong.message, "this is nested too deeply");
    }
    let deep = "(select ".repeat(10_000);
    let wrong = parse(&format!("select {deep}"), &fathom_cql::ParseOptions::default());
    assert_eq!(wrong.expect_err("it is deep").message, "this is nested too deeply");

    let values = vec!["(select max(Size) from IOstream)"; 65].join(", ");
    let wrong = try_plan(&format!("select {values} from Load [now]")).expect_err("they are many");
    assert_eq!(wrong.message, "the query is too large");
}
