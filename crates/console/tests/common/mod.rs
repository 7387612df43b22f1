//! What the console's tests share.
#![allow(dead_code, reason = "each test uses a part")]

use std::{
    io::{Read, Write},
    os::unix::net::UnixListener,
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::atomic::{AtomicU64, Ordering},
    thread,
};

use fathom_control::{DiskStatistics, Histogram, OperationStatistics, Statistics};

/// The example binary with the console's commands; `cargo test` builds it beside the tests.
pub fn console() -> Command {
    let mut path = std::env::current_exe().expect("a test has a path");
    path.pop();
    path.set_file_name("examples/console");
    assert!(path.exists(), "{} is not built: run `cargo test -p fathom-console`", path.display());
    let mut command = Command::new(path);
    command.env_remove("FATHOM_CONTROL").env("LC_ALL", "C").env("TZ", "UTC");
    command
}

/// Runs the console; exit status, standard output, standard error.
pub fn run(directory: &Path, arguments: &[&str]) -> (i32, String, String) {
    let output = console().current_dir(directory).args(arguments).output().expect("it starts");
    texts(&output)
}

/// An output as text.
pub fn texts(output: &Output) -> (i32, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code().unwrap_or(-1), text(&output.stdout), text(&output.stderr))
}

/// Whether a program is there; says so if a test is left out.
pub fn has(program: &str) -> bool {
    let found = Command::new(program).arg("--version").output().is_ok();
    if !found {
        eprintln!("left out: {program} is not installed");
    }
    found
}

/// A control server that knows one question: each sample is a second and a thousand reads later.
pub fn control_server(directory: &Path) -> PathBuf {
    static SAMPLES: AtomicU64 = AtomicU64::new(0);
    let path = directory.join("control.sock");
    let listener = UnixListener::bind(&path).expect("the socket is bound");
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.expect("a client");
            let mut request = [0; 4096];
            let length = stream.read(&mut request).expect("a request");
            let request = String::from_utf8_lossy(&request[..length]).into_owned();
            let (status, body) = if request.starts_with("GET /v1/statistics ") {
                let sample = statistics(SAMPLES.fetch_add(1, Ordering::Relaxed));
                ("200 OK", serde_json::to_string(&sample).expect("plain data"))
            } else {
                let text = r#"{"error":{"code":"not-found","message":"no","remedy":"ask less"}}"#;
                ("404 Not Found", text.to_owned())
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
