//! Mistakes in scripts, and their places.

mod common;

use common::{assert_wrong, try_plan};

#[test]
#[expect(clippy::too_many_lines, reason = "a flat list of cases")]
fn names() {
    assert_wrong(
        "select * from I0stream",
        "I0stream",
        "there is no stream or view `I0stream`",
        Some("did you mean `IOstream`?"),
    );
    assert_wrong(
        "create view V as select * from v; select 1 from V",
        "v",
        "there is no stream or view `v`",
        Some("a view cannot use itself"),
    );
    assert_wrong(
        "create view V as select * from W; create view W as select * from IOstream",
        "W",
        "there is no stream or view `W`",
        Some("it is defined later: move its definition before its use"),
    );
    assert_wrong(
        "create view Load as select * from IOstream",
        "Load",
        "there is a stream `Load` already",
        Some("give it another name"),
    );
    assert_wrong(
        "create view V as select * from Load; create stream V(a integer)",
        "V",
        "there is a view `V` already",
        Some("give it another name"),
    );
    assert_wrong(
        "select Sectr from IOstream",
        "Sectr",
        "there is no column `Sectr`",
        Some("did you mean `Sector`?"),
    );
    assert_wrong(
        "select io.Host from IOstream as io, Load",
        "Host",
        "`io` has no column `Host`",
        None,
    );
    assert_wrong(
        "select x.Size from IOstream as io",
        "x",
        "there is no source `x` in this `from`",
        None,
    );
    assert_wrong(
        "select Size from IOstream as a, IOstream as b",
        "Size",
        "`Size` is the name of several columns",
        Some("write `a.Size` or `b.Size`"),
    );
    assert_wrong(
        "select IOstream.Size from IOstream as a, IOstream as b",
        "IOstream",
        "`IOstream` is the name of several sources",
        Some("use the alias"),
    );
    assert_wrong(
        "select 1 from IOstream as a, Load as A",
        "A",
        "there are two sources `A` in this `from`",
        Some("give each another name with `as`"),
    );
    assert_wrong(
        "select x from (select Size as x, Sector as x from IOstream)",
        "x",
        "`x` is the name of several columns",
        Some("give the columns different names with `as`"),
    );
    assert_wrong(
        "select Size > $limt from IOstream",
        "$limt",
        "there is no parameter `$limt`",
        Some("did you mean `limit`?"),
    );
    assert_wrong(
        "select lowr(Path) from IOstream",
        "lowr",
        "there is no function `lowr`",
        Some("did you mean `lower`?"),
    );
    assert_wrong(
        "select * from IOstream [partition by Pth rows 1]",
        "Pth",
        "there is no column `Pth`",
        Some("did you mean `Path`?"),
    );
    // `on` cannot use a source that is joined later.
    assert_wrong(
        "select 1 from Load a join Load b on a.Host = c.Host join Load c on true",
        "c",
        "there is no source `c` in this `from`",
        Some("did you mean `a`?"),
    );
}

#[test]
fn types() {
    let wrong = |condition: &str, place: &str, message: &str| {
        let text = format!("select Size from IOstream where {condition}");
        let wrong = try_plan(&text).expect_err(&text);
        assert_eq!(wrong.message, message, "{text}");
        assert_eq!(&text[wrong.span.range()], place, "{text}");
    };
    wrong("Size", "Size", "expected boolean for a condition, found integer");
    wrong(
        "Size = 'x'",
        "Size = 'x'",
        "`=` needs two values of the same type, not integer and text",
    );
    wrong("Type + 1 = 2", "Type + 1", "`+` needs numbers, not text and integer");
    wrong("true + true = 1", "true + true", "`+` needs numbers, not boolean and boolean");
    wrong("Size || 'x' = ''", "Size || 'x'", "`||` needs texts, not integer and text");
    wrong("not Size", "Size", "expected boolean for `not`, found integer");
    wrong("-Type = 1", "Type", "expected a number for `-`, found text");
    wrong("Type = 'a' and Size", "Size", "expected boolean for `and`, found integer");
    wrong("Size like 'x'", "Size", "expected text for `like`, found integer");
    wrong("Size in (1, 'x')", "'x'", "`=` needs two values of the same type, not integer and text");
    wrong(
        "case when true then 1 else 'x' end = 1",
        "'x'",
        "the branches of `case` have different types: integer and text",
    );
    wrong("lower(Size) = 'x'", "Size", "expected text for `lower`, found integer");
    wrong("sqrt(Type) > 1", "Type", "expected a number for `sqrt`, found text");
    wrong("lower() = 'x'", "lower()", "`lower` takes one argument, not 0");
    wrong("substring(Type) = 'x'", "substring(Type)", "`substring` takes 2 or 3 arguments, not 1");
    wrong(
        "coalesce(Size, Type) = 1",
        "Type",
        "the arguments of `coalesce` must have the same type, but this is text, not integer",
    );
}

#[test]
#[expect(clippy::too_many_lines, reason = "a flat list of cases")]
fn groups() {
    assert_wrong(
        "select Path, count(*) from IOstream group by VMName",
        "Path",
        "`Path` is neither in `group by` nor in an aggregate",
        Some("add it to `group by`, or use an aggregate: `max(Path)`"),
    );
    assert_wrong(
        "select * from IOstream group by Path",
        "*",
        "`*` cannot be selected from groups",
        Some("select expressions of `group by`, and aggregates"),
    );
    assert_wrong(
        "select sum(max(Size)) from IOstream",
        "max(Size)",
        "the aggregate `max` is not allowed here",
        Some("aggregates cannot be nested: use a subquery or a view"),
    );
    assert_wrong(
        "select Size from IOstream where count(*) > 1",
        "count(*)",
        "the aggregate `count` is not allowed here",
        Some("write conditions on aggregates in `having`"),
    );
    assert_wrong(
        "select 1 from IOstream group by max(Size)",
        "max(Size)",
        "the aggregate `max` is not allowed here",
        Some("aggregates are values of groups: they cannot be in `group by`"),
    );
    let wrong = [
        ("sum(Type)", "Type", "expected a number for `sum`, found text"),
        ("sum(*)", "sum(*)", "only `count` takes `*`, not `sum`"),
        ("sum(Size, 1)", "sum(Size, 1)", "`sum` takes one argument, not 2"),
        ("percentile(Size)", "percentile(Size)", "`percentile` takes 2 arguments, not 1"),
        ("percentile(Size, 101)", "101", "a percentile is a number from 0 to 100"),
        ("percentile(Size, Size)", "Size", "the percentile must be a constant"),
        ("top_k(Size)", "top_k(Size)", "`top_k` takes 2 arguments, not 1"),
        ("top_k(*)", "top_k(*)", "only `count` takes `*`, not `top_k`"),
        ("top_k(Size, 0)", "0", "`top_k` gives 1 to 1000 values"),
        ("top_k(Size, -1)", "-1", "`top_k` gives 1 to 1000 values"),
        ("top_k(Size, 65537)", "65537", "`top_k` gives 1 to 1000 values"),
        ("top_k(Size, null)", "null", "`top_k` gives 1 to 1000 values"),
        (
            "top_k(Size, 2.0)",
            "2.0",
            "expected integer for the number of values of `top_k`, found float",
        ),
        ("top_k(Size, Sector)", "Sector", "the number of values of `top_k` must be a constant"),
        ("histogram(Type)", "Type", "expected a number for `histogram`, found text"),
        ("histogram(Type, 4)", "Type", "expected a number for `histogram`, found text"),
        ("histogram()", "histogram()", "`histogram` takes 1 or 2 arguments, not 0"),
        (
            "histogram(Size, 1, 2)",
            "histogram(Size, 1, 2)",
            "`histogram` takes 1 or 2 arguments, not 3",
        ),
        ("histogram(Size, 0)", "0", "a width is a number from 0.000001 to 10¹⁵"),
        ("histogram(Size, -8)", "-8", "a width is a number from 0.000001 to 10¹⁵"),
        ("histogram(Size, 1e-7)", "1e-7", "a width is a number from 0.000001 to 10¹⁵"),
        (
            "histogram(Size, 1000000000000001)",
            "1000000000000001",
            "a width is a number from 0.000001 to 10¹⁵",
        ),
        ("histogram(Size, null)", "null", "a width is a number from 0.000001 to 10¹⁵"),
        ("histogram(Size, 'x')", "'x'", "expected a number for the width of buckets, found text"),
        ("histogram(Size, Sector)", "Sector", "the width of buckets must be a constant"),
        ("approx_count_distinct(Path, 3)", "3", "a precision is an integer from 4 to 16"),
        ("approx_count_distinct(Path, 17)", "17", "a precision is an integer from 4 to 16"),
        ("approx_count_distinct(Path, 268)", "268", "a precision is an integer from 4 to 16"),
        (
            "approx_count_distinct(Path, '9')",
            "'9'",
            "expected integer for the precision, found text",
        ),
        ("approx_count_distinct(Path, Size)", "Size", "the precision must be a constant"),
    ];
    for (item, place, message) in wrong {
        let text = format!("select {item} from IOstream");
        let wrong = try_plan(&text).expect_err(&text);
        assert_eq!(wrong.message, message, "{text}");
        assert_eq!(&text[wrong.span.range()], place, "{text}");
    }
}

#[test]
fn orders_and_sets() {
    let message = "there is no selected expression number 2";
    assert_wrong("select Size from IOstream order by 2", "2", message, None);
    assert_wrong("select Size from IOstream [now] group by 2", "2", message, None);
    assert_wrong(
        "select distinct Size from IOstream order by Path",
        "Path",
        "`select distinct` can be ordered by selected expressions only",
        None,
    );
    assert_wrong(
        "select Size from Load union select Share from Load",
        "Size",
        "there is no column `Size`",
        None,
    );
    assert_wrong(
        "select Size, Path from IOstream union select Share from Load",
        "select Size, Path from IOstream union select Share from Load",
        "the left side has 2 columns and the right side 1 column",
        None,
    );
    assert_wrong(
        "select Path from IOstream except select Share from Load",
        "select Path from IOstream except select Share from Load",
        "column 1 is text on the left and float on the right",
        None,
    );
}

#[test]
fn declarations() {
    assert_wrong(
        "create view V(a, b) as select Size from IOstream",
        "V",
        "`V` is declared with 2 columns, but its query gives 1 column",
        None,
    );
    assert_wrong(
        "create view V(a) as select * from Load",
        "V",
        "`V` is declared with 1 column, but its query gives 3 columns",
        None,
    );
    assert_wrong(
        "create view V(a integer) as select avg(Size) from IOstream",
        "a",
        "column `a` is declared integer, but the query gives float",
        Some("declare it float, or use `cast(… as integer)`"),
    );
    assert_wrong(
        "create view V(a, A) as select Size, Size from IOstream",
        "A",
        "there are two columns `A`",
        None,
    );
    assert_wrong(
        "vquery : Istream(select Size from IOstream); vtable : register relation V(a integer);",
        "V",
        "`V` is declared as a relation, but its query gives a stream",
        Some("write `register stream`"),
    );
}

/// Words of other systems get help with the equivalent in this language.
#[test]
fn words_of_other_systems() {
    for (text, place, here) in [
        ("with recursive a as (select 1 from IOstream) select 1 from a", "recursive", "rows 2"),
        (
            "select 1 from (with a as (select 1 from IOstream) select 1 from a) as b",
            "with",
            "before the first `select`",
        ),
        ("subscribe to IOstream", "subscribe", "--deltas"),
        ("insert into x select * from IOstream", "insert", "create view"),
        ("create table t (a integer)", "table", "create stream"),
        ("create materialized view v as select 1 from IOstream", "materialized", "create view"),
        (
            "select count(*) from IOstream group by tumble(BlktapTS, interval '5' second)",
            "tumble",
            "[tumbling 5 seconds]",
        ),
        (
            "select 1 from tumble(IOstream, BlktapTS, interval '5' second)",
            "BlktapTS",
            "tumble(IOstream, SIZE)",
        ),
        (
            "select 1 from table(hop(table IOstream, descriptor(BlktapTS), interval '1' second))",
            "descriptor",
            "hop(IOstream, SLIDE, SIZE)",
        ),
        ("select 1 from tumble(IOstream, 5, 1)", ",", "whole multiples"),
        ("select 1 from session(IOstream, 5)", "session", "[range 10 seconds]"),
        (
            "select window_start, count(*) from tumble(IOstream, 5) group by VDisk",
            "window_start",
            "min(BlktapTS)",
        ),
        ("select 1 from IOstream [range interval 'five' second]", "'five'", "interval '5' seconds"),
        ("select 1 from IOstream [range interval '5 eons']", "interval '5 eons'", "minutes"),
        (
            "select VDisk, Size from IOstream qualify row_number() over (partition by VDisk) = 1",
            "row_number",
            "[partition by VDisk rows 1]",
        ),
        ("select rank() over (order by Size) from IOstream", "rank", "[partition by VDisk rows 1]"),
        ("select time_bucket('5s', BlktapTS) from IOstream", "time_bucket", "[tumbling 5 seconds]"),
        ("select avg(Size) over (partition by VDisk) from IOstream", "over", "[rows 10]"),
        ("select lag(Size) from IOstream", "lag", "partition by VDisk rows 2"),
        ("select abs(Size) filter (where Size > 8) from IOstream", "filter", "case when"),
        ("select Size::json from IOstream", "json", "integer"),
        ("select 1 from IOstream emit changes", "changes", ""),
        ("select 1 from IOstream [now] limit 3 offset 2", "offset", "limit 10"),
        ("select substr(Path, 1) from IOstream", "substr", "substring"),
        ("select quantile(Size, 9) from IOstream", "quantile", "percentile(x, 99)"),
        ("select fancy_thing(Size) from IOstream", "fancy_thing", "approx_count_distinct"),
        ("select uper(Path) from IOstream", "uper", "did you mean `upper`?"),
    ] {
        let wrong = try_plan(text).expect_err(text);
        assert_eq!(&text[wrong.span.range()], place, "{text}: {wrong:?}");
        let help = wrong.help.unwrap_or_default();
        assert!(help.contains(here), "{text}: {help}");
    }
    // They may be used as names.
    for text in [
        "select Size as over, Size as filter from IOstream as window",
        "select Size as interval, Size as tumble from IOstream",
    ] {
        assert!(try_plan(text).is_ok(), "{text}: {:?}", try_plan(text));
    }
}

/// Forms of other systems are the language's own forms, written otherwise.
#[test]
fn forms_of_other_systems() {
    for (text, own) in [
        (
            "with Slow (Disk, Place) as (select VDisk, Sector from IOstream where Size > 8),
             Twice as (select Disk, Place from Slow) select count(*) from Twice",
            "create view Slow (Disk, Place) as select VDisk, Sector from IOstream where Size > 8;
             create view Twice as select Disk, Place from Slow; select count(*) from Twice",
        ),
        (
            "create view A as with B as (select Size from IOstream) select Size from B;
             select count(*) from A",
            "create view B as select Size from IOstream; create view A as select Size from B;
             select count(*) from A",
        ),
        (
            "query : with B as (select Size from IOstream) select max(Size) from B;",
            "create view B as select Size from IOstream; query : select max(Size) from B;",
        ),
        (
            "select count(*) from tumble(IOstream, interval '5' second) as w group by w.VDisk",
            "select count(*) from IOstream [tumbling 5 seconds] as w group by w.VDisk",
        ),
        (
            "select count(*) from table(tumble(table IOstream, interval '1 minute'))",
            "select count(*) from IOstream [tumbling 60 seconds]",
        ),
        (
            "select count(*) from hop(IOstream, interval '2' seconds, interval '10' seconds)",
            "select count(*) from IOstream [range 10 seconds slide 2 seconds]",
        ),
        (
            "select count(*) from hop((select Size from IOstream), 2 seconds, 10 seconds) as w",
            "select count(*) from (select Size from IOstream) [range 10 seconds slide 2 seconds] as w",
        ),
        (
            "select 1 from IOstream [range interval '0.5' seconds slide interval '100 ms']",
            "select 1 from IOstream [range 0.5 seconds slide 0.1 seconds]",
        ),
        (
            "select 1 from IOstream where BlktapTS - interval '2' minutes > 0",
            "select 1 from IOstream where BlktapTS - 120000000000 > 0",
        ),
        (
            "select count(*) filter (where Type = 'E'), sum(Size) filter (where IOOp = 'r'),
             count(distinct VDisk) filter (where Size > 8), top_k(Path, 3) filter (where Size > 8)
             from IOstream",
            "select count(case when Type = 'E' then 1 end), sum(case when IOOp = 'r' then Size end),
             count(distinct case when Size > 8 then VDisk end),
             top_k(case when Size > 8 then Path end, 3) from IOstream",
        ),
        (
            "select -Size::float * 2, Type::text from IOstream",
            "select -cast(Size as float) * 2, cast(Type as text) from IOstream",
        ),
    ] {
        assert_eq!(explained(text), explained(own), "{text}");
    }
    // The names are names elsewhere.
    for text in [
        "select Size as tumble, Size as hop from IOstream as with_all",
        "create view hop as select Size from IOstream; select * from hop [range 5 seconds]",
        "select filter.Size from IOstream as filter",
    ] {
        assert!(try_plan(text).is_ok(), "{text}: {:?}", try_plan(text));
    }
}

/// The plans of all queries of a script as text.
fn explained(text: &str) -> Vec<String> {
    let plans = try_plan(text).unwrap_or_else(|error| panic!("{text}: {error:?}"));
    plans.queries.iter().map(|query| format!("{:?}", query.plan.output)).collect()
}
