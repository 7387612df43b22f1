//! Plans of scripts.

mod common;

use common::{catalog, try_plan};
use fathom_cql::catalog::Column;
use fathom_cql::check::check;
use fathom_cql::plan::Output;
use fathom_cql::{
    Diagnostic, Parameters, ParseOptions, Planned, PlannedQuery, Type, explain, parse, plan_script,
};

fn plan(text: &str) -> Planned {
    match try_plan(text) {
        Ok(planned) => {
            for query in &planned.queries {
                assert_eq!(check(&query.plan, &planned.catalog), Ok(()), "{text}");
            }
            planned
        }
        Err(wrong) => panic!("{}", wrong.render(text)),
    }
}

/// The last query of a text.
fn last(text: &str) -> PlannedQuery {
    plan(text).queries.pop().unwrap()
}

/// The plan of the last query as text.
fn shape(text: &str) -> String {
    let mut planned = plan(text);
    let query = planned.queries.pop().unwrap();
    explain(&query.plan, &planned.catalog)
}

#[track_caller]
fn assert_shape(text: &str, expected: &[&str]) {
    let found = shape(text);
    let lines: Vec<&str> = found.lines().collect();
    assert_eq!(lines, expected, "\n{found}");
}

/// The places and messages of state that grows without bound.
fn unbounded(text: &str) -> Vec<(String, String)> {
    let place = |wrong: Diagnostic| {
        assert!(wrong.help.is_some());
        (text[wrong.span.range()].to_owned(), wrong.message)
    };
    last(text).unbounded.into_iter().map(place).collect()
}

fn is_stream(text: &str) -> bool {
    matches!(last(text).plan.output, Output::Stream(_))
}

fn columns(text: &str) -> Vec<(String, Type)> {
    last(text).plan.columns.into_iter().map(|Column { name, kind }| (name, kind)).collect()
}

#[test]
fn the_papers_queries_have_plans() {
    let texts = [
        include_str!("paper/query00.cql"),
        include_str!("paper/query01.cql"),
        include_str!("paper/query02.cql"),
        include_str!("paper/query03.cql"),
        include_str!("paper/query04.cql"),
        include_str!("paper/query05.cql"),
        include_str!("paper/query06.cql"),
        include_str!("paper/query07.cql"),
        include_str!("paper/query08.cql"),
        include_str!("paper/query09.cql"),
        include_str!("paper/query10.cql"),
        include_str!("paper/query10m.cql"),
    ];
    let mut with_ip = catalog();
    with_ip.streams[0].columns.push(Column { name: "IP".to_owned(), kind: Type::Integer });
    for text in texts {
        let script =
            parse(text, &ParseOptions { stream_compat: true, ..ParseOptions::default() }).unwrap();
        let planned = plan_script(&script, &with_ip, &Parameters::new());
        let planned = planned.unwrap_or_else(|wrong| panic!("{}", wrong.render(text)));
        for query in &planned.queries {
            check(&query.plan, &planned.catalog).unwrap();
            assert_eq!(query.warnings, []);
        }
    }
}

#[test]
fn query_0_and_8() {
    let schema = "stream (BlktapTS integer, Type text, IOOp text, ReqId integer, Sector integer, \
                  Size integer, VMName text, VDisk text, PDisk text, FtrTS integer, Path text, \
                  Kind text, Cgroup text)";
    let query0 = include_str!("paper/query00.cql");
    assert_shape(query0, &[schema, "  istream", "    window unbounded", "      stream IOstream"]);
    let query8 = include_str!("paper/query08.cql");
    let diff2 = [
        "project ReqId, BlktapTS' - BlktapTS as column2",
        "  join on ReqId = ReqId'",
        "    filter Type = 'Q'",
        "      window range 50000 min",
        "        stream IOstream",
        "    filter Type = 'R'",
        "      window range 50000 min",
        "        stream IOstream",
    ];
    let inner = |depth: usize| diff2.map(|line| format!("{:depth$}{line}", ""));
    let mut expected = vec![
        "relation (ReqId integer, column2 integer, Value integer)".to_owned(),
        "  project ReqId, sum(column2) / count(*) as column2, column2 as Value".to_owned(),
        "    join on ReqId = max(ReqId) and 4 * column2 >= 5 * (sum(column2) / count(*))"
            .to_owned(),
    ];
    expected.extend(inner(6));
    expected.push("      window unbounded".to_owned());
    expected.push("        istream".to_owned());
    expected.push("          aggregate sum(column2), count(*), max(ReqId)".to_owned());
    expected.extend(inner(12));
    let expected: Vec<&str> = expected.iter().map(String::as_str).collect();
    assert_shape(query8, &expected);
    let message = "keeps every row of `DiffAvg` for ever: \
                   rows to join with may arrive at any time";
    assert_eq!(unbounded(query8), [("DiffAvg".to_owned(), message.to_owned())]);
}

#[test]
fn monotonic_queries_are_streams() {
    assert!(is_stream("select Size from IOstream where Size > 3"));
    assert!(is_stream("select distinct Size from IOstream [unbounded]"));
    assert!(is_stream("select a.Size from IOstream a, IOstream b where a.ReqId = b.ReqId"));
    assert!(is_stream("select Size from IOstream union all select Sector from IOstream"));
    assert!(is_stream("create view V as select Size from IOstream; select * from V"));
    assert!(is_stream("Rstream(select * from IOstream [now])"));
    assert!(is_stream("(Istream(select * from IOstream [now]))"));
    assert!(!is_stream("select Size from IOstream [now]"));
    assert!(!is_stream("select count(*) from IOstream"));
    assert!(!is_stream("select Size from IOstream order by Size"));
    assert!(!is_stream("select Size from IOstream limit 3"));
    assert!(!is_stream("select Size from IOstream except select Sector from IOstream"));
    assert!(!is_stream("select a.Size from IOstream a left join IOstream b on a.Size = b.Size"));
}

#[test]
#[expect(clippy::too_many_lines, reason = "a flat list of cases")]
fn joins_are_ordered() {
    // `a` and `b` have no equality, so `l` is joined first. A projection restores the order of the
    // columns.
    assert_shape(
        "select a.x, b.y from (select ReqId as x from IOstream [now]) as a, \
         (select Size as y from IOstream [now]) as b, Load [now] as l \
         where b.y = cast(l.Host as integer) and a.x = l.Share and a.x > 3 and a.x + b.y <> 7",
        &[
            "relation (x integer, y integer)",
            "  project ReqId as x, Size as y",
            "    project ReqId, Size, Host, Share, Up",
            "      join on cast(Host as integer) = Size and ReqId + Size <> 7",
            "        join on cast(ReqId as float) = Share",
            "          filter ReqId > 3",
            "            project ReqId",
            "              window now",
            "                stream IOstream",
            "          window now",
            "            stream Load",
            "        project Size",
            "          window now",
            "            stream IOstream",
        ],
    );
    let project = "  project Size, Share";
    let from = "select Size, Share from IOstream [now] as a";
    let conditions =
        "on a.VMName = b.Host and b.Up and a.Size > 5 where a.Sector = 3 and b.Share > 2";
    let io = ["        window now", "          stream IOstream"];
    // The columns of the right side may become null: only conditions of `on` go below the join.
    let text = format!("{from} left join Load [now] as b {conditions}");
    assert_shape(
        &text,
        &[
            "relation (Size integer, Share float)",
            project,
            "    filter Share > 2.0",
            "      left join on VMName = Host and Size > 5",
            "        filter Sector = 3",
            "          window now",
            "            stream IOstream",
            "        filter Up",
            "          window now",
            "            stream Load",
        ],
    );
    let text = format!("{from} right join Load [now] as b {conditions}");
    assert_shape(
        &text,
        &[
            "relation (Size integer, Share float)",
            project,
            "    filter Sector = 3",
            "      right join on VMName = Host and Up",
            "        filter Size > 5",
            "          window now",
            "            stream IOstream",
            "        filter Share > 2.0",
            "          window now",
            "            stream Load",
        ],
    );
    let text = format!("{from} full join Load [now] as b {conditions}");
    assert_shape(
        &text,
        &[
            "relation (Size integer, Share float)",
            project,
            "    filter Sector = 3 and Share > 2.0",
            "      full join on VMName = Host and Up and Size > 5",
            io[0],
            io[1],
            "        window now",
            "          stream Load",
        ],
    );
    let text = format!("{from} join Load [now] as b {conditions}");
    assert_shape(
        &text,
        &[
            "relation (Size integer, Share float)",
            project,
            "    join on VMName = Host",
            "      filter Size > 5 and Sector = 3",
            io[0],
            io[1],
            "      filter Up and Share > 2.0",
            "        window now",
            "          stream Load",
        ],
    );
}

#[test]
fn groups() {
    assert_shape(
        "select VMName, 100*sum(Size)/count(*) as share from IOstream [range 3 seconds] \
         group by VMName having share > 1+1 order by count(*) desc, 2 limit 3",
        &[
            "relation (VMName text, share integer)",
            "  project VMName, column2 as share",
            "    first 3 by count(*) desc, column2",
            "      project VMName, 100 * sum(Size) / count(*) as column2, count(*)",
            "        filter 100 * sum(Size) / count(*) > 2",
            "          aggregate sum(Size), count(*) by VMName",
            "            window range 3 s",
            "              stream IOstream",
        ],
    );
    assert_shape(
        "select Size / 512 as blocks, max(ReqId) - min(ReqId), median(Size), percentile(Size, 99) \
         from IOstream [now] group by blocks order by 1",
        &[
            "relation (blocks integer, column2 integer, median integer, percentile integer)",
            "  order by blocks",
            "    project Size / 512 as blocks, max(ReqId) - min(ReqId) as column2, \
             percentile(Size, 50) as median, percentile(Size, 99) as percentile",
            "      aggregate max(ReqId), min(ReqId), percentile(Size, 50), percentile(Size, 99) \
             by Size / 512",
            "        window now",
            "          stream IOstream",
        ],
    );
    assert_shape(
        "select histogram(Size), histogram(Size, 8), histogram(Size, 0.5) as halves, \
         Top_K(Path, 3), approx_count_distinct(distinct Path, 12), \
         approx_count_distinct(Path, 2 * 4) from IOstream [now] having top_k(Path, 3) <> ''",
        &[
            "relation (histogram text, histogram2 text, halves text, top_k text, \
             approx_count_distinct integer, approx_count_distinct2 integer)",
            "  filter top_k(Path, 3) <> ''",
            "    aggregate histogram(Size), histogram(Size, 8), \
             histogram(cast(Size as float), 0.5), top_k(Path, 3), approx_count_distinct(Path), \
             approx_count_distinct(Path, 8)",
            "      window now",
            "        stream IOstream",
        ],
    );
    // A key inside an expression, and a sum of floats.
    let text = "select Up or false, (Up is null) = true, sum(Share), avg(Share) from Load [now] \
                group by Up is null, Up";
    let kinds: Vec<Type> = columns(text).into_iter().map(|(_, kind)| kind).collect();
    assert_eq!(kinds, [Type::Boolean, Type::Boolean, Type::Float, Type::Float]);
}

#[test]
fn columns_have_names_and_types() {
    let text = "select count(*), count(Size), Size + 1 as x, -Size, IOP, Size * 0.5, null, \
                case when Size > 1 then 1 else 1.5 end, coalesce(null, Type), sqrt(Size) \
                from IOstream [now] group by Size, IOp, Type";
    let expected = [
        ("count", Type::Integer),
        ("count2", Type::Integer),
        ("x", Type::Integer),
        ("column4", Type::Integer),
        ("IOOp", Type::Text),
        ("column6", Type::Float),
        ("column7", Type::Text),
        ("column8", Type::Float),
        ("coalesce", Type::Text),
        ("sqrt", Type::Float),
    ];
    assert_eq!(columns(text), expected.map(|(name, kind)| (name.to_owned(), kind)));
    let view = "create view V(a float, b) as select Size, Type from IOstream [now]; ";
    let expected = [("a".to_owned(), Type::Float), ("b".to_owned(), Type::Text)];
    assert_eq!(columns(&format!("{view} select * from V")), expected);
}

#[test]
fn constants_are_computed() {
    let filter = |condition: &str| {
        let text = shape(&format!("select Size from IOstream [now] where {condition}"));
        let line = text.lines().find(|line| line.contains("filter")).unwrap_or_default();
        line.trim().to_owned()
    };
    assert_eq!(filter("2 * 3 > 5 and Size > $LIMIT"), "filter Size > 4096");
    assert_eq!(filter("1 = 1"), "");
    assert_eq!(filter("Size > -(2 + 3)"), "filter Size > -5");
    assert_eq!(filter("Size > 9223372036854775807 + 1"), "filter Size > null");
    assert_eq!(filter("Size > 1 / 0 or VMName = $vm"), "filter Size > null or VMName = 'web'");
    assert_eq!(filter("Size between 1 and 2.5"), "filter Size >= 1 and cast(Size as float) <= 2.5");
    assert_eq!(filter("Size not in (1, 2)"), "filter not (Size = 1 or Size = 2)");
    assert_eq!(filter("Type || 'x' like 'a%'"), "filter Type || 'x' like 'a%'");
    assert_eq!(filter("2 - (Size - 1) = 0"), "filter 2 - (Size - 1) = 0");
}

#[test]
fn views_and_windows() {
    // A view that is a relation is used as a relation; with a window, its Istream is used.
    let view = "create view V as select Size as s from IOstream [range 2 seconds slide 1 second];";
    assert_shape(
        &format!("{view} select V.s from V, (select s from V) [partition by s rows 0] as w"),
        &[
            "relation (s integer)",
            "  project s",
            "    join",
            "      project Size as s",
            "        window range 2 s slide 1 s",
            "          stream IOstream",
            "      window rows 0 of each s",
            "        istream",
            "          project Size as s",
            "            window range 2 s slide 1 s",
            "              stream IOstream",
        ]
        .map(|line| line.replace("Size as s", "Size"))
        .map(|line| line.replace("of each s", "of each Size"))
        .each_ref()
        .map(|line| if line == "  project s" { "  project Size as s" } else { line.as_str() }),
    );
    // A view of `select *` may be declared with only its first columns.
    let first = "create view First(BlktapTS, Type, IOp) as select * from IOstream [now];";
    assert_eq!(columns(&format!("{first} select * from First")).len(), 3);
    let declared = "create stream S(a integer, b text); ";
    assert_eq!(columns(&format!("{declared} select b from s where A > 1")).len(), 1);
}

#[test]
fn unbounded_state_is_reported() {
    let messages = |text: &str| -> Vec<String> {
        unbounded(text).into_iter().map(|(place, message)| format!("{place}: {message}")).collect()
    };
    let none: [&str; 0] = [];
    assert_eq!(messages("select Size from IOstream where Size > 3"), none);
    assert_eq!(messages("select count(*), sum(Size), min(Size), stddev(Size) from IOstream"), none);
    assert_eq!(messages("select Size > 3, count(*) from IOstream group by Size > 3"), none);
    assert_eq!(
        messages("select Path, count(*) from IOstream [range 1 second] group by Path"),
        none
    );
    assert_eq!(messages("select Size from IOstream order by Size desc limit 10"), none);
    assert_eq!(
        messages("select Path, count(*) from IOstream group by Path"),
        ["IOstream: keeps one entry for each Path ever seen"]
    );
    assert_eq!(
        messages("select median(Size) from IOstream [unbounded] as io"),
        ["[unbounded]: keeps every row of `IOstream` for ever: a percentile needs all values"]
    );
    assert_eq!(
        messages("select top_k(Path, 3) from IOstream [unbounded] as io"),
        ["[unbounded]: keeps every row of `IOstream` for ever: `top_k` counts every value"]
    );
    // Sketches and buckets are bounded for any input.
    assert_eq!(messages("select approx_count_distinct(Path), histogram(Size) from IOstream"), none);
    assert_eq!(
        messages("select distinct Path from IOstream"),
        ["IOstream: keeps one entry for each different row ever seen"]
    );
    assert_eq!(
        messages("select count(distinct Path) from IOstream"),
        ["IOstream: keeps every row of `IOstream` for ever: `distinct` compares with all values"]
    );
    assert_eq!(
        messages("select a.Size from IOstream a, Load [now] l where a.Path = l.Host"),
        ["IOstream: keeps every row of `IOstream` for ever: rows to join with may arrive at any \
             time"]
    );
    assert_eq!(
        messages("select Size from IOstream union all select Size from IOstream [now]"),
        ["IOstream: keeps every row of `IOstream` for ever: the result holds all rows"]
    );
    assert_eq!(
        messages("select * from IOstream [partition by Path rows 2]"),
        ["[partition by Path rows 2]: keeps 2 rows for each Path ever seen"]
    );
}

#[test]
fn probable_mistakes_are_reported() {
    let warnings = |text: &str| last(text).warnings;
    assert_eq!(warnings("select Size from IOstream where Size > 3"), []);
    let text = "select Size from IOstream where Path = null";
    assert_eq!(&text[warnings(text)[0].span.range()], "Path = null");
    assert_eq!(
        warnings("create view V as Dstream(select * from IOstream); select * from V").len(),
        1
    );
}

#[test]
fn orders_and_comparisons_without_effect_are_reported() {
    let warnings = |text: &str| {
        let part = |wrong: Diagnostic| format!("{}: {}", &text[wrong.span.range()], wrong.message);
        last(text).warnings.into_iter().map(part).collect::<Vec<_>>()
    };
    let none: [&str; 0] = [];
    assert_eq!(
        warnings("select Size from IOstream [now] order by Sector"),
        ["Sector: this key is not selected: the result is not shown in its order"]
    );
    assert_eq!(warnings("select Size from IOstream [now] order by Sector limit 3").len(), 1);
    assert_eq!(warnings("select Size from IOstream [now] order by Size limit 3"), none);
    let chosen = "select Size from IOstream [now] order by Sector limit 3";
    assert_eq!(warnings(&format!("select * from ({chosen}) [now] as a")), none);
    assert_eq!(warnings(&format!("create view V as {chosen}; select * from V")), none);
    assert_eq!(
        warnings("select Size from IOstream where \"Type\" = 'Q'"),
        ["\"Type\" = 'Q': this compares two constants: it is never true"]
    );
    let help = last("select Size from IOstream where \"Type\" = 'Q'").warnings.remove(0).help;
    assert!(help.unwrap().contains("the column is `Type`"));
    assert_eq!(
        warnings("select Size from IOstream where 1 <= 2"),
        ["1 <= 2: this compares two constants: it is always true"]
    );
    // A parameter may be compared with a constant.
    assert_eq!(warnings("select Size from IOstream where $limit > 3"), none);
    assert_eq!(
        warnings("select Size from IOstream where Type in ('Q', 'X') and IOOp = 'X'"),
        ["'X': `Type` is never 'X'"]
    );
    assert_eq!(
        warnings("create view V as select Type as T from IOstream; select 1 from V where 'q' <> T"),
        ["'q' <> T: `T` is never 'q'"]
    );
}

#[test]
fn a_stream_of_the_catalogue_may_be_declared_again() {
    let text = "table : register stream iostream(Stamp integer, IOOp char(1));
                query : select * from IOstream where IOp = 'r'";
    let planned = plan(text);
    assert_eq!(planned.declared, Some(0));
    let names = planned.catalog.streams[0].columns.iter().map(|column| &column.name[..]);
    assert_eq!(names.collect::<Vec<_>>(), ["Stamp", "IOOp"]);
    assert_eq!(planned.queries[0].plan.columns.len(), 2);
    assert_eq!(plan("select 1 from Load").declared, None);
    assert_eq!(plan("create stream S(a integer); select 1 from S").declared, Some(2));
    let twice = "create stream IOstream(a integer); create stream IOstream(a integer)";
    assert!(try_plan(twice).unwrap_err().message.contains("already"));
    let used = "select 1 from IOstream; create stream IOstream(a integer)";
    assert!(try_plan(used).unwrap_err().message.contains("already"));
}

#[test]
fn long_and_deep_texts() {
    let chain = vec!["Size"; 200].join(" + ");
    let text = format!("select sum({chain}) from IOstream [now] group by {chain} order by {chain}");
    assert!(try_plan(&text).is_ok());
    let deep = |count: usize| {
        let (open, close) = ("(select * from ".repeat(count), ")".repeat(count));
        try_plan(&format!("select * from {open} IOstream [now] {close}"))
    };
    assert!(deep(20).is_ok());
    assert!(deep(100).is_err());
    let set = vec!["select Size from IOstream"; 80].join(" union all ");
    assert!(try_plan(&set).is_ok());
    // Each view has twice as many operators as the one before.
    let mut views = "create view v0 as select Size from IOstream [now];".to_owned();
    for number in 1..64 {
        let of = number - 1;
        let view = format!(
            "create view v{number} as select a.Size from v{of} a, v{of} b where a.Size = b.Size;"
        );
        views.push_str(&view);
    }
    assert_eq!(try_plan(&views).unwrap_err().message, "the query is too large");
    let mut between = "Size > 0".to_owned();
    for _ in 0..40 {
        between = format!("({between}) between true and true");
    }
    let text = format!("select Size from IOstream where {between}");
    assert_eq!(try_plan(&text).unwrap_err().message, "the expression is too large");
}

/// Pieces of queries that often form valid queries.
const PIECES: [&str; 44] = [
    "select",
    "*",
    "count(*)",
    "sum(Size)",
    "Size",
    "Path",
    "io.Size",
    "from",
    "IOstream",
    "Load as io",
    "IOstream as io",
    "[now]",
    "[rows 2]",
    "[partition by Path rows 1]",
    "where",
    "and",
    "or",
    "not",
    "=",
    "<",
    "+",
    "/",
    "0",
    "1",
    "'x'",
    "null",
    "group by",
    "having",
    "order by",
    "limit 3",
    "union all",
    "except",
    "left join",
    "on",
    "(",
    ")",
    ",",
    "max(",
    "median(Size)",
    "distinct",
    "Istream(",
    "Share",
    "is null",
    "as x",
];

/// Pieces that can often replace each other.
const INTERCHANGEABLE: [&[&str]; 5] = [
    &["Size", "Path", "io.Size", "Share", "0", "1", "'x'", "null", "count(*)", "avg(Size)", "*"],
    &["=", "<", "+", "/", "and", "or", "||", "<>", "- 2 * Size >"],
    &["[now]", "[rows 2]", "[partition by Path rows 1]", "[range 2 seconds slide 1 second]"],
    &["union all", "union", "except all", "intersect", ","],
    &["left join", "join", "right join", "full join"],
];

#[test]
fn mutated_texts_are_planned_or_rejected() {
    let texts = [
        "select Size , count(*) from IOstream [now] as io where Size < 1 group by Size",
        "select io.Size , Share from IOstream as io , Load where Size = Share and Path = 'x'",
        "select distinct Size as x from IOstream [rows 2] union all select 1 from Load order by x",
        "select max( Size ) as x from IOstream as io left join Load on Size = 1 having x < 1",
        "Istream( select * from ( select Size , Path from IOstream [now] ) as io where Size = 0 )",
        "select Size from IOstream [now] where Size not in ( select Share from Load ) or exists \
         ( select 1 from Load )",
        "select ( select max( Size ) from IOstream ) as x from Load [now] where Share < 1",
    ];
    for text in texts {
        plan(text);
    }
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below as u64) as usize
    };
    let mut good = 0;
    for round in 0..14_000 {
        let mut words: Vec<&str> = texts[round % texts.len()].split(' ').collect();
        for _ in 0..=round % 2 {
            let at = random(words.len());
            match random(8) {
                0..6 => {
                    let alike = INTERCHANGEABLE.iter().find(|alike| alike.contains(&words[at]));
                    let pieces = alike.copied().unwrap_or(&PIECES);
                    words[at] = pieces[random(pieces.len())];
                }
                6 => words.insert(at, PIECES[random(PIECES.len())]),
                _ => drop(words.remove(at)),
            }
        }
        let text = words.join(" ");
        match try_plan(&text) {
            Ok(planned) => {
                good += 1;
                for query in &planned.queries {
                    let checked = check(&query.plan, &planned.catalog);
                    assert_eq!(checked, Ok(()), "{text}");
                    assert!(!explain(&query.plan, &planned.catalog).contains('#'), "{text}");
                }
            }
            Err(wrong) => assert!(text.get(wrong.span.range()).is_some(), "{text}: {wrong}"),
        }
    }
    assert!(good > 1000, "{good}");
}
