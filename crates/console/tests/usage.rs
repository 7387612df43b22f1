//! The commands on who causes the I/O: `fathom top --by`, `fathom files` and `fathom explain-io`,
//! against a control server.
mod common;

use common::{control_server, run};
use serde_json::Value;

/// Runs a command that must succeed. Returns its standard output.
fn output(words: &[&str]) -> String {
    let directory = tempfile::tempdir().expect("a directory");
    let socket = control_server(directory.path());
    let socket = socket.to_str().expect("a path in UTF-8");
    let (status, stdout, stderr) = run(directory.path(), &[words, &["--control", socket]].concat());
    assert_eq!(status, 0, "{words:?}: {stderr}");
    stdout
}

fn lines(text: &str) -> Vec<&str> {
    text.lines().collect()
}

#[test]
fn top_prints_a_table_for_each_interval() {
    let text = output(&["top", "--by", "container", "--interval", "50ms", "--count", "2"]);
    let lines = lines(&text);
    assert_eq!(lines.len(), 14, "{text}");
    assert!(
        lines[0].ends_with(
            "1000 reads/s (3.91M/s), 350 writes/s (1.37M/s); web: Linux 6.1.0-56-cloud-amd64"
        ),
        "{text}"
    );
    assert!(lines[1].starts_with("CONTAINER") && lines[1].contains("WRITE B/S"), "{text}");
    assert!(lines[2].starts_with("/database") && lines[2].contains("/srv/table.dat"), "{text}");
    assert!(lines[3].starts_with("/web") && lines[3].contains(" 300 "), "{text}");
    assert!(lines[4].starts_with("/ ") && lines[5].starts_with("(flushes)"), "{text}");
    assert_eq!((lines[6], &lines[7][..2]), ("", "00"), "{text}");

    let text = output(&[
        "top", "--by", "file", "--limit", "1", "-n", "1", "-i", "50ms", "--filter", "WEB",
    ]);
    assert!(text.contains("and 3 more") || text.contains("/srv/table.dat"), "{text}");
    // A guest's text cannot control the terminal.
    let text = output(&["top", "--by", "file", "--since-start", "--sort", "written"]);
    assert!(text.contains("/srv/page\u{fffd}[2J.html") && !text.contains('\u{1b}'), "{text}");
    assert!(text.starts_with("since counting began") && text.contains("1 MiB"), "{text}");
    let hottest = text.lines().nth(2).expect("a line");
    assert!(hottest.starts_with("/srv/page"), "{text}");
}

#[test]
fn top_prints_json_objects() {
    let text = output(&["top", "--by", "file", "--json", "-n", "2", "-i", "50ms", "--vm", "web"]);
    let objects: Vec<Value> =
        text.lines().map(|line| serde_json::from_str(line).expect("an object a line")).collect();
    assert_eq!(objects.len(), 2);
    let sample = &objects[0];
    assert_eq!((sample["by"].as_str(), sample["seconds"].as_f64()), (Some("file"), Some(1.0)));
    assert_eq!(sample["total"]["per_second"].as_f64(), Some(1355.0));
    assert_eq!(sample["guests"][0]["insight"]["state"], "attached");
    let file = &sample["usage"][0];
    assert_eq!(file["path"], "/srv/table.dat");
    assert_eq!(
        (file["container"].as_str(), file["process_id"].as_u64()),
        (Some("/database"), Some(12))
    );
    assert_eq!(file["read"]["bytes_per_second"].as_f64(), Some(4_096_000.0));
    assert_eq!((file["latency_ns_mean"].as_u64(), &file["write"]), (Some(50_000), &Value::Null));
    let journal =
        sample["usage"].as_array().expect("a list").iter().find(|line| line["kind"] == "journal");
    assert!(journal.expect("it is there")["path"].is_null());
}

#[test]
fn files_and_their_kinds_are_reported() {
    let text = output(&["files", "root"]);
    assert!(text.starts_with("root of web: ") && text.contains("; Linux 6.1.0"), "{text}");
    assert!(text.contains("fio 12") && text.contains("journal of ext4 on vda"), "{text}");
    assert!(text.contains("KIND") && text.contains("85.7 %") && text.contains("14.3 %"), "{text}");
    let text = output(&["files", "root", "--interval", "50ms", "--json", "--limit", "1"]);
    let report: Value = serde_json::from_str(&text).expect("an object");
    assert_eq!(
        (report["seconds"].as_f64(), report["files_left_out"].as_u64()),
        (Some(1.0), Some(2))
    );
    assert_eq!(report["files"][0]["read"]["requests"], 1000);
    assert_eq!(report["kinds"].as_array().map(Vec::len), Some(4));
    assert_eq!(report["insight"]["release"], "6.1.0-56-cloud-amd64");
}

#[test]
fn slow_requests_are_explained() {
    let text = output(&["explain-io", "root"]);
    assert!(
        text.contains(
            "The slowest: A write of 4 KiB to /srv/page.html, for container /web, took 9.0 ms."
        ),
        "{text}"
    );
    assert!(text.contains("fathom explain-io root 1"), "{text}");
    let text = output(&["explain-io", "root", "--operation", "flush"]);
    assert!(text.contains("flush") && !text.contains("page.html"), "{text}");
    let text = output(&["explain-io", "root", "slowest"]);
    for part in
        ["00:00:00.000", "4 s ago", "from byte 8192", "sure: structures", "in flight at that time:"]
    {
        assert!(text.contains(part), "{part} is missing:\n{text}");
    }
    let text = output(&["explain-io", "root", "2", "--json"]);
    let request: Value = serde_json::from_str(&text).expect("an object");
    assert_eq!((request["id"].as_u64(), &request["beside"]), (Some(2), &serde_json::json!([1, 3])));
    assert!(request["text"].as_str().expect("a text").starts_with("A write of 4 KiB"));
}

#[test]
fn unknown_names_are_errors() {
    let directory = tempfile::tempdir().expect("a directory");
    let socket = control_server(directory.path());
    let socket = socket.to_str().expect("a path in UTF-8");
    for (words, message) in [
        (&["files", "data"][..], "serves no disk called data"),
        (&["files", "nothing"], "retry"),
        (&["explain-io", "data"], "serves no disk called data"),
        (&["explain-io", "root", "99"], "slow request 99"),
        (&["top", "--disk", "what"], "there is no disk \"what\""),
        (&["top", "--by", "vm", "--vm", "what"], "there is no disk of machine \"what\""),
    ] {
        let (status, stdout, stderr) =
            run(directory.path(), &[words, &["--control", socket]].concat());
        assert_eq!((status, stdout.as_str()), (1, ""), "{words:?}");
        assert!(stderr.contains(message) && stderr.contains('→'), "{words:?}: {stderr}");
    }
    let (status, _, stderr) = run(directory.path(), &["top", "--limit", "3"]);
    assert!(status == 2 && stderr.contains("--by"), "{stderr}");
    let (status, ..) = run(directory.path(), &["explain-io", "root", "it", "--control", socket]);
    assert_eq!(status, 2);
}
