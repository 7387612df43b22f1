//! `fathom explain`: plans as text and as JSON, and how it fails.
mod common;

use std::fs;

use common::run;

const GROUPED: &str =
    "select VDisk, count(*) as n from IOstream where Size > $least group by VDisk";

#[test]
fn a_plan_is_shown_with_what_it_reads_and_keeps() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path();
    let (status, stdout, stderr) = run(path, &["explain", GROUPED, "--param", "least=8"]);
    assert_eq!(status, 0, "{stderr}");
    let expected = "\
relation (VDisk text, n integer)
  aggregate count(*) by VDisk
    filter Size > 8
      window unbounded
        stream IOstream

reads of IOstream: Size, VDisk
grows without bound:
  line 1, column 34: keeps one entry for each VDisk ever seen
      select VDisk, count(*) as n from IOstream where Size > $least group by VDisk
                                       ^^^^^^^^
  → let go of old rows with a window, as in `IOstream [range 60 seconds]`
";
    assert_eq!(stdout, expected);
}

#[test]
fn each_query_of_a_file_has_a_number() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path();
    let text = "select Size from IOstream;\nselect count(*) from IOstream [range 3 seconds];";
    fs::write(path.join("two.cql"), text).expect("it is written");
    let (status, stdout, stderr) = run(path, &["explain", "--file", "two.cql", "--stream-compat"]);
    assert_eq!(status, 0, "{stderr}");
    assert!(stdout.contains("query 1: stream (Size integer)\n  istream\n"), "{stdout}");
    assert!(stdout.contains("\nquery 2: relation (count integer)\n"), "{stdout}");
    assert!(stdout.contains("window range 3 µs"), "{stdout}");
    assert!(stdout.contains("reads of IOstream: no column\n"), "{stdout}");
    assert_eq!(stdout.matches("nothing grows without bound\n").count(), 2, "{stdout}");
}

#[test]
fn json_has_the_same() {
    let directory = tempfile::tempdir().expect("a directory");
    let arguments = ["explain", GROUPED, "--param", "least=8", "--json"];
    let (status, stdout, stderr) = run(directory.path(), &arguments);
    assert_eq!(status, 0, "{stderr}");
    let report: serde_json::Value = serde_json::from_str(&stdout).expect("it is JSON");
    let query = &report["queries"][0];
    assert_eq!(query["result"], "relation");
    assert_eq!(query["columns"][1], serde_json::json!({"name": "n", "type": "integer"}));
    assert_eq!(query["stream"], "IOstream");
    assert_eq!(query["reads"], serde_json::json!(["Size", "VDisk"]));
    assert!(query["plan"].as_str().expect("a text").contains("window unbounded"));
    let unbounded = &query["unbounded"][0];
    assert!(unbounded["message"].as_str().expect("a text").contains("each VDisk"), "{unbounded}");
    assert_eq!(query["warnings"], serde_json::json!([]));
}

#[test]
fn what_is_odd_is_told_and_what_is_wrong_is_an_error() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path();
    let (status, stdout, _) =
        run(path, &["explain", "select Size from IOstream where Path = null"]);
    assert!(status == 0 && stdout.contains("odd:\n  line 1"), "{stdout}");
    assert!(stdout.contains("→ use `is null` or `is not null`"), "{stdout}");
    let (status, _, stderr) = run(path, &["explain", "select Sizes from IOstream"]);
    assert!(status == 1 && stderr.contains("line 1, column 8"), "{stderr}");
    assert!(stderr.contains("did you mean `Size`?"), "{stderr}");
    let (status, _, stderr) = run(path, &["explain", GROUPED]);
    assert!(status == 1 && stderr.contains("no parameter `$least`"), "{stderr}");
    assert_eq!(run(path, &["explain"]).0, 2);
    assert_eq!(run(path, &["explain", GROUPED, "--file", "x.cql"]).0, 2);
    let (status, _, stderr) = run(path, &["explain", "--file", "x.cql"]);
    assert!(status == 1 && stderr.contains("cannot read x.cql"), "{stderr}");
}
