//! Common parts of the planner's tests.
#![allow(dead_code, reason = "each test uses part of it")]

use fathom_cql::catalog::{Catalog, StreamSchema};
use fathom_cql::{Diagnostic, Parameters, ParseOptions, Planned, Type, Value, parse, plan_script};

/// The streams of the tests.
pub fn catalog() -> Catalog {
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
    io.values.push(("Type".to_owned(), ["Q", "R"].map(str::to_owned).to_vec()));
    let load = StreamSchema::new("Load", &[("Host", Text), ("Share", Float), ("Up", Boolean)]);
    Catalog { streams: vec![io, load] }
}

/// The plans of a text, or its first mistake.
pub fn try_plan(text: &str) -> Result<Planned, Diagnostic> {
    let parameters = Parameters::from([
        ("limit".to_owned(), Value::Integer(4096)),
        ("vm".to_owned(), Value::text("web")),
    ]);
    let script = parse(text, &ParseOptions::default())?;
    plan_script(&script, &catalog(), &parameters)
}

/// Asserts that a text has a mistake with a place, a message and a help.
#[track_caller]
pub fn assert_wrong(text: &str, place: &str, message: &str, help: Option<&str>) {
    let wrong = try_plan(text).expect_err(text);
    assert_eq!(wrong.message, message, "{text}");
    assert_eq!(&text[wrong.span.range()], place, "{text}");
    assert_eq!(wrong.help.as_deref(), help, "{text}");
}
