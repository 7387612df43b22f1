//! `fathom record` as text: CSV and a JSON object per line, by the file's name or `--format`.

use std::path::Path;
use std::process::Child;
use std::time::Duration;

use crate::nbd::Nbd;
use crate::process::{Daemon, command, kill};

const ONE: &str = "[[disk]]\nname = \"a\"\nvm = \"web, \\\"shop\\\"\"\nmemory = \"1M\"\n\
                   [[nbd]]\naddress = \"unix:nbd.sock\"\n";

fn record(daemon: &Daemon, arguments: &[&str]) -> Child {
    let child = command(&daemon.path(""))
        .args(["record", "a", "--quiet", "--control", "control.sock", "-o"])
        .args(arguments)
        .spawn()
        .unwrap();
    daemon.until("the recording begins", || daemon.path(arguments[0]).exists());
    child
}

/// The lines of a file about reads and writes, without their times, which count from the file's
/// start.
fn requests(path: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(path).unwrap();
    // The time as people read it comes before the instant, if the clock is known.
    let times = if text.starts_with("@time,") { 2 } else { 1 };
    let lines = text.lines().filter(|line| line.contains(",w,"));
    lines.map(|line| line.splitn(times + 1, ',').nth(times).unwrap().to_owned()).collect()
}

#[test]
fn live_events_become_text_by_the_name_of_the_file() {
    let daemon = Daemon::start(ONE);
    let files: [&[&str]; 4] = [&["a.rec"], &["a.csv"], &["a.jsonl"], &["a.txt", "--format", "csv"]];
    let children = files.map(|arguments| record(&daemon, arguments));
    // All of them have subscribed when each has its header or its first bytes.
    let length = |name| std::fs::metadata(daemon.path(name)).map_or(0, |file| file.len());
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    std::thread::sleep(Duration::from_millis(300));
    for number in 0..50 {
        nbd.write(number * 4096, &[1; 4096]);
    }
    // The file can be read while it is written.
    daemon.until("the events are in the file", || {
        length("a.csv") > 0 && requests(&daemon.path("a.csv")).len() == 100
    });
    std::thread::sleep(Duration::from_millis(300));
    for mut child in children {
        kill(&child, libc::SIGINT);
        assert!(child.wait().unwrap().success());
    }
    let folder = daemon.end();
    let path = |name: &str| folder.path().join(name);
    let export = command(folder.path())
        .args(["record", "--export", "a.rec", "-o", "b.csv"])
        .output()
        .unwrap();
    assert!(export.status.success(), "{export:?}");
    let expected = requests(&path("b.csv"));
    assert_eq!(expected.len(), 100);
    assert!(expected[0].contains("\"web, \"\"shop\"\"\""), "{}", expected[0]);
    assert_eq!(requests(&path("a.csv")), expected);
    assert_eq!(requests(&path("a.txt")), expected);
    let head = |name: &str| {
        std::fs::read_to_string(path(name)).unwrap().lines().next().unwrap().to_owned()
    };
    assert_eq!(head("a.csv"), head("b.csv"));
    let json = std::fs::read_to_string(path("a.jsonl")).unwrap();
    let rows = json.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let rows: Vec<_> = rows.filter(|row| row["IOOp"] == "w").collect();
    assert_eq!(rows.len(), 100);
    assert!(rows.iter().all(|row| row["VMName"] == "web, \"shop\""), "{}", rows[0]);
    // Each row has its time by ISO 8601 before its instant, and both go on alike.
    let nanoseconds = |row: &serde_json::Value| {
        let time = row["@time"].as_str().unwrap();
        assert!(time.len() == 35 && &time[10..11] == "T" && &time[19..20] == ".", "{time}");
        let fraction = time[20..29].parse::<i64>().unwrap();
        (fraction - row["BlktapTS"].as_i64().unwrap()).rem_euclid(1_000_000_000)
    };
    assert!(rows.iter().all(|row| nanoseconds(row) == nanoseconds(&rows[0])), "{}", rows[0]);
    assert!(head("a.csv").starts_with("@time,BlktapTS,"), "{}", head("a.csv"));
    // What was recorded as text can be read again.
    let export = command(folder.path())
        .args(["record", "--export", "a.csv", "-o", "c.csv"])
        .output()
        .unwrap();
    assert!(export.status.success(), "{export:?}");
    assert_eq!(requests(&path("c.csv")), expected);
}

#[test]
fn text_ends_at_its_limit_and_with_its_disk() {
    let daemon = Daemon::start(ONE);
    let mut child = record(&daemon, &["a.csv", "--limit", "4K"]);
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    daemon.until("the limit", || {
        nbd.write(0, &[1; 512]);
        child.try_wait().unwrap().is_some()
    });
    let length = std::fs::metadata(daemon.path("a.csv")).unwrap().len();
    assert!((4 << 10..64 << 10).contains(&length), "{length} bytes");
    let output = command(&daemon.path(""))
        .args(["record", "-o", "/dev/full", "--format", "csv", "--for", "300ms"])
        .args(["--control", "control.sock"])
        .output()
        .unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && text.contains("No space left"), "{text}");
    // An existing file is kept.
    let output = command(&daemon.path(""))
        .args(["record", "-o", "a.csv", "--for", "100ms", "--control", "control.sock"])
        .output()
        .unwrap();
    assert!(!output.status.success() && daemon.path("a.csv").metadata().unwrap().len() == length);
}
