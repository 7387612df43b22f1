//! `fathom query`: its options and its errors.
mod common;

use std::fs;

use common::run;

const QUERY: &str = "select * from IOstream";

#[test]
fn invalid_options_and_inputs_are_errors() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path();
    let (status, _, stderr) = run(path, &["query", QUERY, "--control", "none.sock"]);
    assert!(status == 1 && stderr.contains("none.sock"), "{stderr}");
    assert_eq!(run(path, &["query", QUERY, "--disk", "d", "--replay", "x.csv"]).0, 2);
    assert_eq!(run(path, &["query", "--replay", "x.csv"]).0, 2);
    assert_eq!(run(path, &["query", QUERY, "--file", "x.cql", "--replay", "x.csv"]).0, 2);
    assert_eq!(run(path, &["query", QUERY, "--replay", "x.csv", "--json", "--csv"]).0, 2);
    assert_eq!(run(path, &["query", QUERY, "--replay", "x.csv", "--param", "x"]).0, 2);
    let (status, _, stderr) = run(path, &["query", "--list", "--control", "none.sock"]);
    assert!(status == 1 && stderr.contains("none.sock"), "{stderr}");
    assert_eq!(run(path, &["query", QUERY, "--list"]).0, 2);
    assert_eq!(run(path, &["query", "--list", "--replay", "x.csv"]).0, 2);
    let (status, _, stderr) = run(path, &["query", QUERY, "--replay", "x.csv"]);
    assert!(status == 1 && stderr.contains("cannot read x.csv: No such file"), "{stderr}");
    let (status, _, stderr) = run(path, &["query", "--file", "x.cql", "--replay", "x.csv"]);
    assert!(status == 1 && stderr.contains("cannot read x.cql"), "{stderr}");
    fs::write(path.join("x.csv"), "Sector,Size\n1,2\n").expect("it is written");
    let (status, _, stderr) = run(path, &["query", QUERY, "--replay", "x.csv"]);
    assert!(status == 1 && stderr.contains("→ name one with --time-column"), "{stderr}");
    let (status, _, stderr) = run(path, &["query", QUERY, "--replay", "x.csv", "--stream-compat"]);
    assert!(status == 1 && stderr.contains("no column FtrTS"), "{stderr}");
}

#[test]
fn skipped_lines_are_reported() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path();
    fs::write(path.join("x.csv"), "BlktapTS,Size\n1,2\n2,two\n").expect("it is written");
    let (status, _, stderr) = run(path, &["query", QUERY, "--replay", "x.csv", "--json"]);
    assert_eq!(status, 0, "{stderr}");
    assert!(stderr.contains("x.csv:3: Size is \"two\", which is not of type integer"), "{stderr}");
    assert!(stderr.contains("1 malformed line was skipped"), "{stderr}");
}
