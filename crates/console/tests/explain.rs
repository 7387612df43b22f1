//! `fathom explain`: plans as text and as JSON, and its errors.
mod common;

use std::{fs, path::Path};

use common::run;

const GROUPED: &str =
    "select VDisk, count(*) as n from IOstream where Size > $least group by VDisk";

#[test]
fn a_plan_is_shown_with_its_columns_and_its_state() {
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

reads from IOstream: Size, VDisk
grows without bound:
  line 1, column 34: keeps one entry for each VDisk ever seen
      select VDisk, count(*) as n from IOstream where Size > $least group by VDisk
                                       ^^^^^^^^
  → remove old rows with a window, as in `IOstream [range 60 seconds]`

with many hosts:
each host, fragment 1: stream (VDisk text)
  istream
    project VDisk
      filter Size > 8
        window unbounded
          stream IOstream
centre: relation (VDisk text, n integer)
  aggregate count(*) by VDisk
    window unbounded
      stream fragment 1

an event has about 456 bytes
fragment 1 sends about 24 bytes for each event that passes
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
    assert!(stdout.contains("reads from IOstream: no column\n"), "{stdout}");
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
    let split = &report["split"];
    assert_eq!(
        (&split["event_bytes"], &split["events"]),
        (&456.0.into(), &serde_json::Value::Null)
    );
    let fragment = &split["fragments"][0];
    assert_eq!(fragment["columns"], serde_json::json!([{"name": "VDisk", "type": "text"}]));
    assert_eq!((&fragment["result"], &fragment["row_bytes"]), (&"stream".into(), &24.0.into()));
    assert!(split["centre"][0].as_str().expect("a text").contains("stream fragment 1"));
}

#[test]
fn the_bytes_that_would_be_sent_for_a_file_are_counted() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path();
    let events = "BlktapTS,Type,VDisk,Size\n1,Q,a,8\n2,Q,a,16\n2000000000,Q,bc,24\n";
    fs::write(path.join("events.csv"), events).expect("it is written");
    let replay = ["--replay", "events.csv"];
    let arguments = [&["explain", GROUPED, "--param", "least=8"][..], &replay].concat();
    let (status, stdout, stderr) = run(path, &arguments);
    assert_eq!(status, 0, "{stderr}");
    // Texts of 1 and 1, 1 and 1, 1 and 2 bytes; two numbers; 34 nulls. A row that is sent has its
    // instant in addition.
    let expected = "
3 events have 52.3 bytes each
fragment 1 sends 2 rows (66.7 % of the events), 6.3 bytes per event
6.3 bytes per event are sent, 12.1 % of the events' bytes
";
    assert!(stdout.ends_with(expected), "{stdout}");
    // A group's row is added at the first step and removed at the next, when the group is empty.
    let sliding = "select VDisk, count(*) from IOstream [tumbling 1 second] group by VDisk";
    let arguments = [&["explain", sliding, "--json"][..], &replay].concat();
    let (status, stdout, stderr) = run(path, &arguments);
    assert_eq!(status, 0, "{stderr}");
    let report: serde_json::Value = serde_json::from_str(&stdout).expect("it is JSON");
    let fragment = &report["split"]["fragments"][0];
    assert_eq!(fragment["result"], "relation");
    // `a` is added and removed, `bc` is added; each change has the instant, the sign and a number.
    assert_eq!((&fragment["rows"], &fragment["bytes"]), (&3.into(), &(3 * 17 + 4).into()));
    assert_eq!(report["split"]["events"], 3);
    let (status, _, stderr) = run(path, &["explain", sliding, "--replay", "missing.csv"]);
    assert!(status == 1 && stderr.contains("cannot read missing.csv"), "{stderr}");
}

#[test]
fn the_page_on_queries_shows_the_actual_split() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = fs::read_to_string(root.join("docs/queries.md")).expect("the page is there");
    let (_, rest) = page.split_once("\n## Many hosts\n").expect("a section on many hosts");
    let mut blocks = rest.split("\n```").skip(1).step_by(2);
    let mut block = |kind: &str| {
        let text = blocks.next().and_then(|block| block.strip_prefix(kind));
        text.unwrap_or_else(|| panic!("no block of {kind}")).to_owned() + "\n"
    };
    let (command, shown) = (block("sh\n"), block("text\n"));
    let words = shlex::split(&command.replace("\\\n", "")).expect("quotations are closed");
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    assert_eq!(words[0], "fathom");
    let (status, stdout, stderr) = run(&root, &words[1..]);
    assert_eq!(status, 0, "{stderr}");
    let (_, split) = stdout.split_once("\nwith many hosts:\n").expect("a split");
    assert_eq!(split, shown);
}

#[test]
fn probable_mistakes_are_warnings_and_invalid_queries_are_errors() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path();
    let (status, stdout, _) =
        run(path, &["explain", "select Size from IOstream where Path = null"]);
    assert!(status == 0 && stdout.contains("warnings:\n  line 1"), "{stdout}");
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
