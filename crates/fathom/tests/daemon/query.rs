//! Live queries: `fathom query` over the events of a daemon's disks.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use fathom_console::load::{LoadOptions, load};
use fathom_control::DiskStatistics;

use crate::nbd::Nbd;
use crate::process::{Daemon, PATIENCE, command};

/// A disk under load, slow enough that no ring overflows, and another disk.
const TWO: &str = "[[disk]]\nname = \"a\"\nvm = \"web\"\nmemory = \"1M\"\n\
                   layers = [{ kind = \"delay\", time = \"1ms\" }]\n\
                   vhost_user = { socket = \"a.sock\" }\n\
                   [[disk]]\nname = \"b\"\nmemory = \"1M\"\n\
                   [[nbd]]\naddress = \"unix:nbd.sock\"\n";

/// A running query; its results are written to a file.
struct Query<'a> {
    daemon: &'a Daemon,
    child: Child,
    output: String,
}

impl<'a> Query<'a> {
    fn start(daemon: &'a Daemon, name: &str, arguments: &[&str]) -> Self {
        let output = format!("{name}.out");
        let child = command(&daemon.path(""))
            .args(["query", "--control", "control.sock"])
            .args(arguments)
            .stdout(File::create(daemon.path(&output)).unwrap())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        Self { daemon, child, output }
    }

    fn printed(&self) -> String {
        std::fs::read_to_string(self.daemon.path(&self.output)).unwrap()
    }

    /// Waits for the end. Returns the exit status, the results and the messages.
    fn end(mut self) -> (ExitStatus, String, String) {
        let begun = Instant::now();
        while self.child.try_wait().unwrap().is_none() {
            assert!(begun.elapsed() < PATIENCE, "the query does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
        let mut stderr = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
        (self.child.wait().unwrap(), self.printed(), stderr)
    }
}

impl Drop for Query<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Writes to disk `b` until each query has printed a result: from then on no query misses an event.
fn wait_until_all_listen(daemon: &Daemon, queries: &[&Query<'_>]) {
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "b");
    daemon.until("the queries listen", || {
        nbd.write(0, &[1; 512]);
        queries.iter().all(|query| !query.printed().is_empty())
    });
}

/// Requests and sectors, by the letter of the operation.
type Counts = BTreeMap<String, (u64, u64)>;

/// The daemon's own counts, without flushes.
fn counted(disk: &DiskStatistics) -> Counts {
    let letter = |operation: &str| match operation {
        "write-zeroes" => "z".to_owned(),
        "extents" => "x".to_owned(),
        other => other[..1].to_owned(),
    };
    let of = disk.operations.iter().filter(|of| of.operation != "flush");
    of.map(|of| (letter(&of.operation), (of.count, of.bytes / 512))).collect()
}

/// The final rows of a relation for disk `a`, from its changes printed as CSV.
fn held(text: &str) -> Counts {
    let mut held = Counts::new();
    for line in text.lines().skip(1) {
        let fields: Vec<&str> = line.split(',').collect();
        let [_, _, sign, disk, operation, requests, sectors] = fields[..] else { panic!("{line}") };
        if disk == "a" && sign == "+" {
            let row = (requests.parse().unwrap(), sectors.parse().unwrap());
            held.insert(operation.to_owned(), row);
        }
    }
    held
}

#[test]
fn a_query_counts_what_the_tap_counts() {
    let daemon = Daemon::start(TWO);
    // Disks are flushed when they are removed, which is no request of a client.
    let grouped = "select VDisk, IOOp, count(*) as requests, sum(Size) as sectors \
                   from IOstream where Type = 'R' and IOOp <> 'f' group by VDisk, IOOp";
    // On a busy host a queue's thread may be delayed before it passes on its events.
    let patient = ["--limit-lateness", "5s"];
    let both = [&["--disk", "a", "--disk", "b"], &patient[..]].concat();
    let csv = Query::start(&daemon, "csv", &[&[grouped, "--csv"], &both[..]].concat());
    let rows = "select VDisk, IOOp, ReqId, Size from IOstream where Type = 'R' and IOOp <> 'f'";
    let json = Query::start(&daemon, "json", &[&[rows, "--json"], &patient[..]].concat());
    let requests = "select VDisk, IOOp, ReqId, Size from IOstream where Type = 'Q' and IOOp <> 'f'";
    let issued = Query::start(&daemon, "issued", &[&[requests, "--csv"], &both[..]].concat());
    wait_until_all_listen(&daemon, &[&csv, &json, &issued]);

    let mut options = LoadOptions::new(daemon.path("a.sock"));
    (options.read_percent, options.depth) = (60, 4);
    (options.warmup, options.duration) = (Duration::ZERO, Duration::from_millis(400));
    let report = load(&options).unwrap();

    let client = daemon.client();
    let statistics = client.statistics().unwrap();
    let metrics = client.metrics().unwrap();
    let expected = counted(statistics.disks.iter().find(|disk| disk.name == "a").unwrap());
    let done = report.reads.requests + report.writes.requests;
    assert!(expected["r"].0 > 20 && expected["w"].0 > 20, "{expected:?}");
    assert!(expected["r"].0 + expected["w"].0 >= done, "{expected:?} {done}");
    // A query over removed disks ends, and has all events.
    client.remove_disk("a", true).unwrap();
    client.remove_disk("b", true).unwrap();
    let (status, printed, stderr) = csv.end();
    assert!(status.success(), "{stderr}");
    assert!(stderr.starts_with("line 1, column ") && !stderr.contains("missing"), "{stderr}");
    assert!(printed.starts_with("@time,@ts,@sign,VDisk,IOOp,requests,sectors\n"), "{printed}");
    assert_eq!(held(&printed), expected);
    for (letter, operation) in [("r", "read"), ("w", "write")] {
        let name = "fathom_disk_request_seconds_count";
        let count = expected[letter].0;
        let line = format!("{name}{{disk=\"a\",vm=\"web\",operation=\"{operation}\"}} {count}\n");
        assert!(metrics.contains(&line), "{line}{metrics}");
    }
    let (status, printed, stderr) = issued.end();
    assert!(status.success() && stderr.is_empty(), "{stderr}");
    let of_a: Vec<&str> = printed.lines().filter(|line| line.starts_with("a,")).collect();
    assert_eq!(of_a.len() as u64, expected.values().map(|(requests, _)| requests).sum::<u64>());
    let different: BTreeSet<&str> = of_a.iter().copied().collect();
    assert_eq!(different.len(), of_a.len(), "a request is reported twice");

    // A query over all disks ends with the daemon.
    daemon.signal(libc::SIGTERM);
    let (status, printed, stderr) = json.end();
    assert!(status.success() && stderr.is_empty(), "{stderr}");
    let mut counts = Counts::new();
    for line in printed.lines() {
        let row: serde_json::Value = serde_json::from_str(line).unwrap();
        if row["VDisk"] == "a" {
            let of = counts.entry(row["IOOp"].as_str().unwrap().to_owned()).or_default();
            *of = (of.0 + 1, of.1 + row["Size"].as_u64().unwrap());
        }
    }
    assert_eq!(counts, expected);
    assert_eq!(daemon.wait().0.code(), Some(0));
}

#[test]
fn a_daemon_that_is_killed_fails_the_query() {
    let daemon = Daemon::start(TWO);
    let query = Query::start(&daemon, "x", &["select VDisk, Size from IOstream", "--csv"]);
    wait_until_all_listen(&daemon, &[&query]);
    daemon.signal(libc::SIGKILL);
    let (status, printed, stderr) = query.end();
    assert_eq!(status.code(), Some(1), "{stderr}");
    assert!(printed.starts_with("VDisk,Size\nb,"), "{printed}");
    assert!(stderr.starts_with("error: ") && stderr.contains("cut off"), "{stderr}");
}

#[test]
fn a_query_ends_in_time_and_reports_errors() {
    let daemon = Daemon::start(TWO);
    let query = |arguments: &[&str]| {
        let (status, printed, stderr) = Query::start(&daemon, "x", arguments).end();
        (status.code().unwrap(), printed, stderr)
    };
    let (status, printed, stderr) = query(&["select * from IOstream", "--disk", "c"]);
    assert_eq!((status, printed.as_str()), (1, ""), "{stderr}");
    assert!(stderr.starts_with("error: ") && stderr.contains("\"c\""), "{stderr}");
    // There are no requests, so a relation of groups stays empty.
    let idle = "select count(*) as n from IOstream where VDisk = 'a'";
    for form in [&["--json"][..], &["--csv"], &[]] {
        let (status, printed, stderr) =
            query(&[&[idle, "--disk", "a", "--for", "100ms"], form].concat());
        assert_eq!((status, stderr.as_str()), (0, ""));
        assert!(!printed.contains('1'), "{printed}");
    }
    // State that grows without bound is reported with its place.
    let growing = "select Path, count(*) from IOstream group by Path";
    let (status, _, stderr) = query(&[growing, "--disk", "a", "--for", "100ms"]);
    assert_eq!(status, 0, "{stderr}");
    assert!(stderr.starts_with("line 1, column ") && stderr.contains("^^^^\n→ "), "{stderr}");
    daemon.end();
}

#[test]
fn a_query_for_a_time_delivers_all_events_of_its_time() {
    let daemon = Daemon::start(TWO);
    let begun = Instant::now();
    let time = ["--csv", "--for", "8s"];
    let writes = "from IOstream where Type = 'Q' and IOOp = 'w'";
    let sectors = format!("select Sector {writes}");
    let rows = format!("select Sector, '{}' as Filler {writes}", "x".repeat(300));
    let patience = ["--limit-lateness", "3s"];
    let patient =
        Query::start(&daemon, "patient", &[&[&sectors[..]], &time[..], &patience].concat());
    // Of this query's output only the first line is read before its time is over.
    let mut blocked = command(&daemon.path(""))
        .args(["query", "--control", "control.sock", &rows])
        .args(time)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = BufReader::new(blocked.stdout.take().unwrap());
    let (listens, has_begun) = mpsc::channel();
    let (may_read, is_over) = mpsc::channel::<()>();
    let reader = std::thread::spawn(move || {
        output.read_line(&mut String::new()).unwrap();
        listens.send(()).unwrap();
        is_over.recv().unwrap();
        output.lines().filter(|line| line.as_ref().unwrap().starts_with("8,")).count()
    });
    wait_until_all_listen(&daemon, &[&patient]);
    has_begun.recv_timeout(PATIENCE).unwrap();
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "b");
    let mut written = 0;
    while written < 2000 && begun.elapsed() < Duration::from_secs(7) {
        nbd.write(4096, &[1; 512]);
        written += 1;
    }
    // The rows are more than the pipe and its buffers can take.
    assert!(written > 800, "{written} writes in {:?}", begun.elapsed());
    let (status, printed, stderr) = patient.end();
    assert!(status.success() && stderr.is_empty(), "{stderr}");
    assert_eq!(printed.lines().filter(|line| *line == "8").count(), written);
    std::thread::sleep(Duration::from_millis(9500).saturating_sub(begun.elapsed()));
    assert!(blocked.try_wait().unwrap().is_none(), "its rows are not read yet");
    may_read.send(()).unwrap();
    assert_eq!(reader.join().unwrap(), written);
    assert!(blocked.wait().unwrap().success());
    daemon.end();
}

#[test]
fn a_query_for_a_time_ends_although_the_daemon_hangs() {
    let daemon = Daemon::start(TWO);
    let requests = "select ReqId from IOstream where Type = 'Q'";
    let query = Query::start(&daemon, "x", &[requests, "--csv", "--for", "3s"]);
    wait_until_all_listen(&daemon, &[&query]);
    daemon.signal(libc::SIGSTOP);
    let (status, printed, stderr) = query.end();
    daemon.signal(libc::SIGCONT);
    assert_eq!(status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("it has sent nothing for 5 s"), "{stderr}");
    assert!(printed.lines().count() > 1, "the events before are delivered: {printed}");
    daemon.end();
}

#[test]
fn a_query_over_its_limit_ends_with_an_error() {
    let daemon = Daemon::start(TWO);
    let grouped = "select VDisk, count(*) as n from IOstream [range 1 hour] group by VDisk";
    let query = Query::start(&daemon, "x", &[grouped, "--csv", "--limit-held", "20"]);
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "b");
    let begun = Instant::now();
    let mut query = query;
    while query.child.try_wait().unwrap().is_none() {
        nbd.write(0, &[1; 512]);
        assert!(begun.elapsed() < PATIENCE, "the query does not end");
    }
    let (status, printed, stderr) = query.end();
    assert_eq!(status.code(), Some(1), "{stderr}");
    assert!(printed.starts_with("@time,@ts,"), "{printed}");
    assert!(stderr.contains("most in the operator `range`: more than 20\n"), "{stderr}");
    assert!(stderr.contains("--limit-held"), "{stderr}");

    let rows: Vec<String> = (0..100).map(|time| format!("{time},a\n")).collect();
    std::fs::write(daemon.path("events.csv"), format!("BlktapTS,VDisk\n{}", rows.concat()))
        .unwrap();
    let replayed = |limit: &[&str]| {
        let arguments = ["query", grouped, "--replay", "events.csv", "--csv"];
        let output = command(&daemon.path("")).args(arguments).args(limit).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (output.status.code(), text(output.stdout), text(output.stderr))
    };
    let whole = (Some(0), "VDisk,n\na,100\n".to_owned(), String::new());
    assert_eq!(replayed(&[]), whole);
    // The rows, the group, and the row of the result.
    assert_eq!(replayed(&["--limit-held", "101"]), whole);
    let (code, _, stderr) = replayed(&["--limit-held", "99"]);
    assert_eq!(code, Some(1), "{stderr}");
    assert!(stderr.starts_with("error: ") && stderr.contains("more than 99"), "{stderr}");
    assert_eq!(replayed(&["--limit-held", "0"]).0, Some(2));
    daemon.end();
}

/// Runs `fathom query` over events from a file or from standard input. Returns the exit status, the
/// results and the messages.
fn replayed(text: &str, events: &str, arguments: &[&str], is_pipe: bool) -> (i32, String, String) {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("events.csv");
    std::fs::write(&file, events).unwrap();
    let mut child = command(directory.path())
        .args(["query", text, "--csv", "--replay", if is_pipe { "-" } else { "events.csv" }])
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    if is_pipe {
        let _ = input.write_all(events.as_bytes());
    }
    drop(input);
    let output = child.wait_with_output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

#[test]
fn a_replay_loses_no_event_of_a_file_and_reports_those_of_a_pipe() {
    // A row is ten seconds late, after more rows than a reader returns at once.
    let mut events = "BlktapTS,Size\n".to_owned();
    for number in 0..10_000_u64 {
        let late = if number == 4999 { 10_000_000_000 } else { 0 };
        let time = 20_000_000_000 + number * 1_000_000 - late;
        writeln!(events, "{time},8").unwrap();
    }
    let count = "select count(*) as n from IOstream";
    let (status, printed, stderr) = replayed(count, &events, &[], false);
    assert_eq!((status, &printed[..], &stderr[..]), (0, "n\n10000\n", ""));
    let (status, printed, stderr) = replayed(count, &events, &[], true);
    assert_eq!((status, &printed[..]), (1, "n\n9999\n"), "{stderr}");
    assert!(stderr.contains("1 event arrived too late"), "{stderr}");
    assert!(
        stderr.contains("--limit-lateness 9999ms") && stderr.contains("use a file"),
        "{stderr}"
    );
    for limit in ["1h", "11s", "0.5 hours"] {
        let (status, printed, stderr) =
            replayed(count, &events, &["--limit-lateness", limit], true);
        assert_eq!((status, &printed[..], &stderr[..]), (0, "n\n10000\n", ""), "{limit}");
    }
    // With a given lateness the loss is no failure, but it is reported.
    let (status, printed, stderr) = replayed(count, &events, &["--limit-lateness", "0"], false);
    assert_eq!((status, &printed[..]), (0, "n\n9999\n"), "{stderr}");
    assert!(stderr.contains("1 event arrived too late"), "{stderr}");
}

#[test]
fn a_probable_mistake_is_a_warning_and_the_query_runs() {
    let odd = "select Size from IOstream where Type = 'X'";
    let (status, printed, stderr) = replayed(odd, "BlktapTS,Type,Size\n1,Q,8\n", &[], false);
    assert_eq!((status, &printed[..]), (0, "Size\n"), "{stderr}");
    assert!(stderr.starts_with("warning: ") && stderr.contains("`Type` is never 'X'"), "{stderr}");
}
