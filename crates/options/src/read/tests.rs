use std::path::PathBuf;

use serde::Deserialize;
use serde_json::json;

use super::*;
use crate::{Bytes, Nanoseconds, Origin, fields};

#[derive(Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Options {
    name: String,
    size: Bytes,
    time: Option<Nanoseconds>,
    queues: u16,
    rate: f64,
    file: Option<PathBuf>,
    word: Word,
    inner: Option<Inner>,
    list: Vec<Inner>,
}

#[derive(Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Word {
    #[default]
    One,
    TwoWords,
}

#[derive(Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Inner {
    kind: String,
    #[serde(default)]
    on: bool,
}

fn read_options(value: &Value, folder: Option<&Path>) -> (Option<Options>, Vec<String>) {
    let origins = Origins::default();
    let title = Title::Table { name: "disk", is_list: true };
    let mut problems = Problems::default();
    let written = Written { value, title, path: "", origins: &origins, folder };
    let options = read(&written, &mut problems);
    let problem = |problem: Problem| format!("{} | {}", problem.message, problem.remedy);
    (options, problems.0.into_iter().map(problem).collect())
}

#[test]
fn valid_values_are_read_and_relative_paths_start_in_the_folder() {
    let value = json!({
        "name": "a", "size": "4K", "time": "5ns", "queues": 7, "rate": 1, "file": "b/c",
        "word": "two-words", "inner": { "kind": "x" }, "list": [{ "kind": "y", "on": true }],
    });
    let (options, problems) = read_options(&value, Some(Path::new("/etc")));
    assert_eq!(problems, [""; 0]);
    let expected = Options {
        name: "a".into(),
        size: Bytes(4096),
        time: Some(Nanoseconds(5)),
        queues: 7,
        rate: 1.0,
        file: Some("/etc/b/c".into()),
        word: Word::TwoWords,
        inner: Some(Inner { kind: "x".into(), on: false }),
        list: vec![Inner { kind: "y".into(), on: true }],
    };
    assert_eq!(options, Some(expected));
    let (options, _) = read_options(&json!({ "file": "b/c", "name": "b/c" }), None);
    assert_eq!(options.unwrap().file, Some("b/c".into()));
    for (text, expected) in [
        ("nbds+unix:///a?socket=/b", "nbds+unix:///a?socket=/b"),
        ("a/b://c", "/etc/a/b://c"),
        ("://c", "/etc/://c"),
    ] {
        let (options, _) = read_options(&json!({ "file": text }), Some(Path::new("/etc")));
        assert_eq!(options.unwrap().file, Some(expected.into()), "URIs stay as they are");
    }
}

#[test]
fn all_mistakes_are_found_and_the_rest_is_kept() {
    let value = json!({
        "name": 5, "size": "10GB", "time": true, "queues": 70_000, "rate": "x", "file": "",
        "wrod": 1, "word": "tow-words", "inner": { "on": true }, "list": [{ "kind": "y", "no": 1 }],
    });
    let (options, problems) = read_options(&value, None);
    let expected = [
        "`file` of [[disk]] is not a path | name a file, or leave the line out",
        "[disk.inner] has no `kind` | add `kind = …`",
        "there is no key `no` in [disk.list] | did you mean `on`?",
        "`name` of [[disk]] has to be a text, and is a whole number | write it like `name = \"…\"`",
        "`queues` of [[disk]] is out of range | choose a number from 0 to 65535",
        "`rate` of [[disk]] has to be a number, and is a text | write it like `rate = 0.01`",
        "`size` of [[disk]]: \"10GB\" is not a size | write it like 512, 64K, 1.5G or 2TiB",
        "`time` of [[disk]] has to be a time, and is true or false | write it like `time = \"5ms\"`",
        "`word` of [[disk]] cannot be \"tow-words\" | did you mean `two-words`?",
        "there is no key `wrod` in [[disk]] | did you mean `word`?",
    ];
    let mut problems = problems;
    problems.sort();
    let mut expected = expected.to_vec();
    expected.sort_unstable();
    assert_eq!(problems, expected);
    let kept = Options { list: vec![Inner { kind: "y".into(), on: false }], ..Options::default() };
    assert_eq!(options, Some(kept));
}

#[test]
fn a_value_of_another_type_gives_nothing() {
    for value in [json!(null), json!(7), json!(["a"]), json!("a")] {
        let (options, problems) = read_options(&value, None);
        assert_eq!((options, problems.len()), (None, 1), "{value}");
    }
}

#[test]
fn mistakes_are_bounded_and_in_the_order_of_their_places() {
    let entries = (0..1000).map(|number| (format!("k{number}"), json!(1)));
    let value = Value::Object(entries.collect());
    let (options, problems) = read_options(&value, None);
    assert_eq!((options, problems.len()), (None, MISTAKES_MAX));

    let mut origins = Origins::default();
    let at = |line| Origin::File { path: Path::new("f").into(), line, column: 1 };
    origins.note("layers.0.size", at(9));
    origins.note_key("layers.0.wrod", at(7));
    origins.note("layers.0.wrod", at(8));
    let value = json!({ "size": true, "wrod": 1, "time": -1 });
    let title = Title::Words("the layer");
    let written =
        Written { value: &value, title, path: "layers.0", origins: &origins, folder: None };
    let mut problems = Problems::default();
    read::<Options>(&written, &mut problems).unwrap();
    let lines: Vec<usize> = problems.0.iter().map(|found| found.origin.position().0).collect();
    assert_eq!(lines, [0, 7, 9]);
}

#[test]
fn the_fields_of_a_type_are_known() {
    assert_eq!(fields::<Inner>(), ["kind", "on"]);
    assert_eq!(fields::<u64>(), [""; 0]);
}
