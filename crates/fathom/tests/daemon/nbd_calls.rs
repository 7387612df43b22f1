//! The system calls of the daemon for a client that waits for each reply.

use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::nbd::Nbd;
use crate::process::{PATIENCE, command};

const CONFIGURATION: &str = "
[[disk]]
name = \"a\"
memory = \"16M\"
[[nbd]]
address = \"unix:a.sock\"
";

/// The number of system calls of a daemon whose client reads so many blocks, one after the other,
/// each after a pause.
fn calls(reads: u64, pause: Duration) -> u64 {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    std::fs::write(path("f.toml"), CONFIGURATION).unwrap();
    let fathom = command(folder.path());
    let mut traced = Command::new("strace");
    traced.args(["-f", "-c", "-o", "calls"]).arg(fathom.get_program());
    traced.args(["serve", "--config", "f.toml", "--control", "control.sock"]);
    traced.current_dir(folder.path());
    for (name, value) in fathom.get_envs() {
        traced.env(name, value.unwrap());
    }
    traced.stderr(std::fs::File::create(path("log")).unwrap());
    let mut strace = traced.spawn().expect("strace");
    let begun = Instant::now();
    let mut client = loop {
        match Nbd::try_connect(&path("a.sock"), "a") {
            Ok(client) => break client,
            Err(error) => assert!(begun.elapsed() < PATIENCE, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    for block in 0..reads {
        client.read_block(block % 4096);
        if !pause.is_zero() {
            std::thread::sleep(pause);
        }
    }
    drop(client);
    let children = format!("/proc/{0}/task/{0}/children", strace.id());
    let daemon = std::fs::read_to_string(children).unwrap().trim().parse().unwrap();
    kill_process(Pid::from_raw(daemon).unwrap(), Signal::TERM).unwrap();
    assert!(strace.wait().unwrap().success(), "{:?}", std::fs::read_to_string(path("log")));
    let table = std::fs::read_to_string(path("calls")).unwrap();
    let total =
        table.lines().find(|line| line.ends_with("total")).unwrap_or_else(|| panic!("{table}"));
    total.split_whitespace().nth(3).unwrap().parse().unwrap()
}

/// The number of system calls that each read takes.
fn calls_of_a_read(count: u64, pause: Duration) -> f64 {
    let (few, many) = (calls(100, pause), calls(100 + count, pause));
    many.saturating_sub(few) as f64 / count as f64
}

#[test]
fn a_request_of_a_waiting_client_costs_few_system_calls() {
    // While the thread polls: one to send and to begin the receipt, one to take what it has found.
    let each = calls_of_a_read(10_000, Duration::ZERO);
    assert!(each <= 2.1, "{each} system calls a request");
    // While it sleeps for each, both are one.
    let each = calls_of_a_read(1000, Duration::from_millis(1));
    assert!(each <= 1.2, "{each} system calls a request after a pause");
}
