//! Common parts of the console's tests.
#![allow(dead_code, reason = "each test uses a part")]

use std::{
    io::{Read, Write},
    os::unix::net::UnixListener,
    path::{Path, PathBuf},
    process::{Command, Output},
    thread,
};

use fathom_control::{
    DiskSlow, DiskStatistics, DiskUsage, FactsStatus, GuestInfo, GuestList, Histogram,
    InsightState, OperationStatistics, SlowReport, SlowRequest, Statistics, UsageCount,
    UsageCounts, UsageReport, UsageRow,
};

/// The example binary with the console's commands; `cargo test` builds it beside the tests.
pub fn console() -> Command {
    let mut path = std::env::current_exe().expect("a test has a path");
    path.pop();
    path.set_file_name("examples/console");
    assert!(path.exists(), "{} is not built: run `cargo test -p fathom-console`", path.display());
    // If a shell runs the tests in the background, they ignore interrupts; `env` restores the
    // default.
    let mut command = Command::new("/usr/bin/env");
    command.arg("--default-signal=INT,TERM,HUP").arg(path);
    command.env_remove("FATHOM_CONTROL").env("LC_ALL", "C").env("TZ", "UTC");
    command
}

/// Runs the console. Returns its exit status, standard output and standard error.
pub fn run(directory: &Path, arguments: &[&str]) -> (i32, String, String) {
    let output = console().current_dir(directory).args(arguments).output().expect("it starts");
    texts(&output)
}

/// The exit status of an output, and its texts.
pub fn texts(output: &Output) -> (i32, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code().unwrap_or(-1), text(&output.stdout), text(&output.stderr))
}

/// Whether a program is installed; reports that a test is skipped if not.
pub fn has(program: &str) -> bool {
    let found = Command::new(program).arg("--version").output().is_ok();
    if !found {
        eprintln!("SKIPPED: {program} is not installed");
    }
    found
}

/// A control server with statistics, usage and slow requests. Each sample is one second and a
/// thousand reads after the previous one.
pub fn control_server(directory: &Path) -> PathBuf {
    let mut samples = 0;
    let mut sample = move || {
        samples += 1;
        samples
    };
    let path = directory.join("control.sock");
    let listener = UnixListener::bind(&path).expect("the socket is bound");
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.expect("a client");
            let mut request = [0; 4096];
            let length = stream.read(&mut request).expect("a request");
            let request = String::from_utf8_lossy(&request[..length]).into_owned();
            let path = request.split(' ').nth(1).unwrap_or_default();
            let body = match path.split('?').next().unwrap_or_default() {
                "/v1/statistics" => serde_json::to_string(&statistics(sample())),
                "/v1/usage" if !path.contains("disk=nothing") => {
                    serde_json::to_string(&usage(sample()))
                }
                "/v1/slow" => serde_json::to_string(&slow()),
                "/v1/guests" => serde_json::to_string(&guests()),
                _ => Ok(String::new()),
            };
            let body = body.expect("plain data");
            let (status, body) = if body.is_empty() {
                let text = r#"{"error":{"code":"not-found","message":"no","remedy":"retry"}}"#;
                ("404 Not Found", text.to_owned())
            } else {
                ("200 OK", body)
            };
            let length = body.len();
            write!(stream, "HTTP/1.1 {status}\r\nContent-Length: {length}\r\n\r\n{body}")
                .expect("the answer is sent");
        }
    });
    path
}

fn statistics(sample: u64) -> Statistics {
    let operation = |name: &str, count: u64| {
        let mut latency = Histogram::default();
        latency.record(50_000, count);
        OperationStatistics {
            operation: name.into(),
            count,
            bytes: count * 4096,
            errors: sample,
            latency_sum_ns: count * 50_000,
            latency,
            ..OperationStatistics::default()
        }
    };
    let disk = |name: &str, vm: &str, factor: u64| DiskStatistics {
        name: name.into(),
        vm: vm.into(),
        capacity_bytes: 1 << 30,
        instance: 1,
        counted: true,
        depth_ns: sample * factor * 50_000_000,
        operations: vec![operation("read", sample * factor * 1000)],
        ..DiskStatistics::default()
    };
    Statistics {
        time_ns: sample * 1_000_000_000,
        unix_time_ns: sample * 1_000_000_000,
        disks: vec![disk("data", "web", 1), disk("root", "web", 2)],
    }
}

/// Two containers: one reads a file through a known process, the other writes a file.
fn usage(sample: u64) -> UsageReport {
    let count = |requests: u64| {
        let mut latency = Histogram::default();
        latency.record(50_000, requests);
        UsageCount {
            requests,
            bytes: requests * 4096,
            latency_sum_ns: requests * 50_000,
            latency_max_ns: 60_000,
            latency,
            ..UsageCount::default()
        }
    };
    let reads = |requests| UsageCounts { read: count(requests), ..UsageCounts::default() };
    let writes = |requests| UsageCounts { write: count(requests), ..UsageCounts::default() };
    let row = |kind: &str, cgroup: &str, path: &str, counts| UsageRow {
        kind: kind.into(),
        cgroup: cgroup.into(),
        path: path.into(),
        file_system: "ext4".into(),
        device: "vda".into(),
        counts,
        ..UsageRow::default()
    };
    let table = UsageRow {
        process: "fio".into(),
        process_id: 12,
        inode: 7,
        file_size_bytes: 1 << 20,
        ..row("direct", "/database", "/srv/table.dat", reads(sample * 1000))
    };
    let mut total = reads(sample * 1000);
    total.merge(&writes(sample * 350));
    total.flush = count(sample * 5);
    let disk = DiskUsage {
        name: "root".into(),
        vm: "web".into(),
        instance: 1,
        counted: true,
        total,
        unknown: UsageCounts { flush: count(sample * 5), ..UsageCounts::default() },
        rows: vec![
            table,
            row("data", "/web", "/srv/page\u{1b}[2J.html", writes(sample * 300)),
            row("journal", "/", "", writes(sample * 50)),
        ],
        ..DiskUsage::default()
    };
    UsageReport {
        time_ns: sample * 1_000_000_000,
        unix_time_ns: sample * 1_000_000_000,
        disks: vec![disk],
    }
}

fn slow() -> SlowReport {
    let facts = FactsStatus {
        kind: "data".into(),
        source: "bio".into(),
        confidence: "sure".into(),
        path: "/srv/page.html".into(),
        cgroup: "/web".into(),
        ..FactsStatus::default()
    };
    let request = |id, latency_ns| SlowRequest {
        id,
        operation: "write".into(),
        offset: 8192,
        length: 4096,
        start_ns: 1_000_000_000,
        latency_ns,
        facts: facts.clone(),
        ..SlowRequest::default()
    };
    let flush = SlowRequest {
        operation: "flush".into(),
        length: 0,
        facts: FactsStatus::default(),
        ..request(3, 1_000_000)
    };
    let requests = vec![request(1, 9_000_000), request(2, 2_000_000), flush];
    let disk = DiskSlow { name: "root".into(), vm: "web".into(), requests };
    SlowReport { time_ns: 5_000_000_000, unix_time_ns: 5_000_000_000, disks: vec![disk] }
}

fn guests() -> GuestList {
    let mut guest =
        GuestInfo { vm: "web".into(), disks: vec!["root".into()], ..GuestInfo::default() };
    guest.insight.state = InsightState::Attached;
    guest.insight.release = "6.1.0-56-cloud-amd64".into();
    GuestList { guests: vec![guest], ..GuestList::default() }
}
