//! Plans of scripts, and what is wrong with scripts.

use fathom_cql::catalog::{Catalog, Column, StreamSchema};
use fathom_cql::plan::{Output, Stream};
use fathom_cql::{
    Diagnostic, Parameters, ParseOptions, Planned, PlannedQuery, Type, Value, explain, parse,
    plan_script,
};

fn catalog() -> Catalog {
    use Type::{Boolean, Float, Integer, Text};
    let mut io = StreamSchema::new(
        "IOstream",
        &[
            ("BlktapTS", Integer),
            ("Type", Text),
            ("IOOp", Text),
            ("ReqId", Integer),
            ("Sector", Integer),
            ("Size", Integer),
            ("VMName", Text),
            ("VDisk", Text),
            ("PDisk", Text),
            ("FtrTS", Integer),
            ("Path", Text),
            ("Kind", Text),
            ("Cgroup", Text),
        ],
    );
    for alias in ["IOp", "IOPp", "IOP"] {
        io.aliases.push((alias.to_owned(), "IOOp".to_owned()));
    }
    let load = StreamSchema::new("Load", &[("Host", Text), ("Share", Float), ("Up", Boolean)]);
    Catalog { streams: vec![io, load] }
}

fn try_plan(text: &str) -> Result<Planned, Diagnostic> {
    let parameters = Parameters::from([
        ("limit".to_owned(), Value::Integer(4096)),
        ("vm".to_owned(), Value::text("web")),
    ]);
    let script = parse(text, &ParseOptions::default())?;
    plan_script(&script, &catalog(), &parameters)
}

fn plan(text: &str) -> Planned {
    match try_plan(text) {
        Ok(planned) => planned,
        Err(wrong) => panic!("{}", wrong.render("text", text, false)),
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

/// What is wrong, with the text at its place and the help.
#[track_caller]
fn assert_wrong(text: &str, place: &str, message: &str, help: Option<&str>) {
    let wrong = try_plan(text).expect_err(text);
    assert_eq!(wrong.message, message, "{text}");
    assert_eq!(&text[wrong.span.range()], place, "{text}");
    assert_eq!(wrong.help.as_deref(), help, "{text}");
}

/// The places and messages of what grows.
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
        let script = parse(text, &ParseOptions { stream_compat: true }).unwrap();
        let planned = plan_script(&script, &with_ip, &Parameters::new());
        let planned = planned.unwrap_or_else(|wrong| panic!("{}", wrong.render("", text, false)));
        for query in &planned.queries {
            println!("{}", explain(&query.plan, &planned.catalog));
            for d in query.unbounded.iter().chain(&query.warnings) {
                println!("{}", d.render("", text, false));
            }
        }
    }
}

#[test]
fn probe() {
    for text in [
        "select a.x, b.y from (select ReqId as x from IOstream[now]) as a, (select Size as y from IOstream[now]) as b, Load[now] as l where b.y = cast(l.Host as integer) and a.x = l.Share and a.x > 3",
        "select * from IOstream [now] as a left join Load[now] as b on a.VMName = b.Host and b.Up and a.Size > 5 where a.Sector = 3 and b.Share > 2",
        "select VMName, 100*sum(Size)/count(*) as share from IOstream[range 3 seconds] group by VMName having share > 1+1 order by count(*) desc, 2 limit 3",
        "select Size from IOstream union select Share from Load",
    ] {
        println!("{text}\n{}", shape(text));
    }
    println!("{:?}", columns("select count(*), count(Size), Size + 1 as x, -Size, IOP from IOstream[now] group by Size, IOp"));
}
