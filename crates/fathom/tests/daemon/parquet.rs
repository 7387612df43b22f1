//! `fathom record` as Parquet: live, and as an export.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};
use std::time::{Duration, SystemTime};

use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::RowAccessor;

use crate::nbd::Nbd;
use crate::process::{Daemon, command, kill};

const ONE: &str = "[[disk]]\nname = \"a\"\nvm = \"web\"\nmemory = \"1M\"\n\
                   [[nbd]]\naddress = \"unix:nbd.sock\"\n";

/// The fields of an event that the test compares: time, `Type` and `IOOp`, the request's number and
/// its sector.
type Event = (i64, String, i64, i64);

/// The reads and writes of a Parquet file, and the number of events in its metadata.
fn events(path: &Path) -> (Vec<Event>, String) {
    let reader = SerializedFileReader::new(File::open(path).unwrap()).unwrap();
    let file = reader.metadata().file_metadata();
    let count = file.key_value_metadata().unwrap().iter();
    let count =
        count.filter(|pair| pair.key == "fathom.events").find_map(|pair| pair.value.clone());
    assert_eq!(count, Some(file.num_rows().to_string()));
    let rows = reader.get_row_iter(None).unwrap().map(Result::unwrap);
    let event = |row: parquet::record::Row| {
        let text = |column| row.get_string(column).unwrap().clone();
        let number = |column| row.get_long(column).unwrap();
        assert_eq!((text(6), text(7)), ("web".into(), "a".into()));
        (number(0), text(1) + &text(2), number(3), number(4))
    };
    let all = rows.filter(|row| "rw".contains(row.get_string(2).unwrap().as_str()));
    (all.map(event).collect(), count.unwrap())
}

fn part(folder: &Path) -> Option<PathBuf> {
    let mut all = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    all.find(|path| path.extension() == Some("part".as_ref()))
}

/// Starts `fathom record a -o a.parquet`, and waits until it records.
fn record(daemon: &Daemon) -> Child {
    let child = command(&daemon.path(""))
        .args(["record", "a", "-o", "a.parquet", "--control", "control.sock"])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    daemon.until("the recording begins", || part(&daemon.path("")).is_some());
    child
}

fn signal(child: &Child, signal: i32) {
    kill(child, signal);
}

fn write(daemon: &Daemon) {
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    for number in 0..50 {
        nbd.write(number * 4096, &[1; 4096]);
    }
    std::thread::sleep(Duration::from_millis(300));
}

fn check(events: &[Event]) {
    assert_eq!(events.len(), 100);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_nanos() as i64;
    for (number, pair) in events.chunks(2).enumerate() {
        let sector = number as i64 * 8;
        assert_eq!((pair[0].1.as_str(), pair[0].3), ("Qw", sector));
        assert_eq!((pair[1].1.as_str(), pair[1].3), ("Rw", sector));
        assert_eq!(pair[0].2, pair[1].2);
        assert!(pair[0].0 <= pair[1].0 && pair[1].0 <= now && now - pair[0].0 < 60_000_000_000);
    }
}

#[test]
fn live_events_become_parquet_when_they_end_in_order() {
    let daemon = Daemon::start(ONE);
    for number in [libc::SIGINT, libc::SIGTERM] {
        let child = record(&daemon);
        write(&daemon);
        let whole = daemon.path("a.parquet");
        assert!(!whole.exists());
        signal(&child, number);
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let (found, count) = events(&whole);
        check(&found);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(stderr.contains(&format!("{count} events, ")), "{stderr}");
        assert_eq!(part(&daemon.path("")), None);
        std::fs::remove_file(whole).unwrap();
    }
    daemon.end();
}

#[test]
fn events_before_the_death_of_the_daemon_are_kept() {
    let daemon = Daemon::start(ONE);
    let child = record(&daemon);
    write(&daemon);
    daemon.signal(libc::SIGKILL);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.contains("error: the events are cut off"), "{stderr}");
    check(&events(&daemon.path("a.parquet")).0);
}

#[test]
fn the_file_does_not_exceed_the_limit() {
    let daemon = Daemon::start(ONE);
    let child = command(&daemon.path(""))
        .args(["record", "-o", "x", "--format", "parquet", "--limit", "100k", "--quiet"])
        .args(["--control", "control.sock"])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    daemon.until("the recording begins", || part(&daemon.path("")).is_some());
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    let mut number = 0;
    daemon.until("the file is full", || {
        for _ in 0..100 {
            number += 1;
            nbd.write(number % 256 * 4096, &[1; 512]);
        }
        daemon.path("x").exists()
    });
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    let length = daemon.path("x").metadata().unwrap().len();
    assert!((30_000..100 << 10).contains(&length), "{length}");
    assert!(events(&daemon.path("x")).0.len() > 1000);
    daemon.end();
}

fn export(folder: &Path, arguments: &[&str]) -> Output {
    command(folder).args(["record", "--export"]).args(arguments).output().unwrap()
}

#[test]
fn a_recording_becomes_parquet() {
    let daemon = Daemon::start(ONE);
    let mut child = command(&daemon.path(""))
        .args(["record", "a", "-o", "a.rec", "--control", "control.sock"])
        .spawn()
        .unwrap();
    daemon.until("the recording begins", || daemon.path("a.rec").exists());
    write(&daemon);
    signal(&child, libc::SIGINT);
    assert!(child.wait().unwrap().success());
    let folder = daemon.end();
    let folder = folder.path();
    for to in ["a.parquet", "x"] {
        let output = export(folder, &["a.rec", "-o", to, "--format", "parquet"]);
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
        check(&events(&folder.join(to)).0);
    }
    // Standard output has no name, and is written directly.
    let output = export(folder, &["a.rec", "-o", "-", "--format", "parquet"]);
    assert_eq!(output.stdout, std::fs::read(folder.join("a.parquet")).unwrap());
    // Text that queries read can be exported as well.
    assert!(export(folder, &["a.rec", "-o", "a.csv"]).status.success());
    assert!(export(folder, &["a.csv", "-o", "b.parquet"]).status.success());
    let times = |events: Vec<Event>| events.into_iter().map(|event| event.0).collect::<Vec<_>>();
    let (first, _) = events(&folder.join("a.parquet"));
    let (again, _) = events(&folder.join("b.parquet"));
    let (first, again) = (times(first), times(again));
    // CSV does not contain the start of its times.
    let offset = first[0] - again[0];
    assert_eq!(first, again.iter().map(|time| time + offset).collect::<Vec<_>>());
    for (arguments, code, message) in [
        (&["a.rec", "-o", "/dev/full", "--format", "parquet"][..], 1, "No space left on device"),
        (&["a.rec", "-o", "none/x.parquet"], 1, "cannot write none/x.parquet: No such file"),
        (&["a.rec", "-o", "y", "--format", "recording"], 2, "not exported as a recording"),
        (&["a.rec", "-o", "y"], 2, "y has no extension of a known format"),
    ] {
        let output = export(folder, arguments);
        assert_eq!(output.status.code(), Some(code), "{output:?}");
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(text.contains(message), "{text}");
    }
    assert_eq!(part(folder), None);
}

#[test]
fn an_export_that_is_interrupted_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    std::fs::write(folder.join("x.parquet"), "old").unwrap();
    let mut child = command(folder)
        .args(["record", "--export", "-", "-o", "x.parquet", "--force"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    let lines = "5,Q,8\n".repeat(10_000);
    input.write_all(format!("BlktapTS,Type,Size\n{lines}").as_bytes()).unwrap();
    let begun = std::time::Instant::now();
    while part(folder).is_none() {
        assert!(begun.elapsed() < crate::process::PATIENCE);
        std::thread::sleep(Duration::from_millis(5));
    }
    // The command handles signals soon after it has created the file.
    std::thread::sleep(Duration::from_millis(500));
    signal(&child, libc::SIGINT);
    std::thread::sleep(Duration::from_millis(100));
    drop(input);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(String::from_utf8(output.stderr).unwrap().contains("interrupted"));
    assert_eq!(part(folder), None);
    assert_eq!(std::fs::read(folder.join("x.parquet")).unwrap(), b"old");
}
