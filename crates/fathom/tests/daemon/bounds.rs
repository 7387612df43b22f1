//! The resources that an idle daemon uses.

use std::fmt::Write as _;
use std::time::Duration;

use crate::process::{Daemon, image};

/// Ten disks, each with a socket and an export.
fn ten_disks() -> Daemon {
    let folder = tempfile::tempdir().unwrap();
    let mut text = String::from("[[nbd]]\naddress = \"unix:nbd.sock\"\n");
    for number in 0..10 {
        image(folder.path(), &format!("{number}.img"), 1 << 30);
        let _ = write!(
            text,
            "[[disk]]\nname = \"{number}\"\nimage = \"{number}.img\"\n\
             vhost_user.socket = \"{number}.sock\"\n"
        );
    }
    Daemon::start_in(folder, &text)
}

/// The processor time used by all threads of the daemon, in user space and kernel, in ticks.
fn ticks(daemon: &Daemon) -> u64 {
    let stat = daemon.proc("stat");
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

/// The number of times that the daemon's threads have slept. It detects wake-ups that are shorter
/// than a tick.
fn sleeps(daemon: &Daemon) -> u64 {
    let path = |thread: &str| format!("task/{thread}/status");
    let pid = daemon.proc("stat").split(' ').next().unwrap().to_owned();
    std::fs::read_dir(format!("/proc/{pid}/task"))
        .unwrap()
        .map(|entry| {
            let thread = entry.unwrap().file_name().into_string().unwrap();
            let status = daemon.proc(&path(&thread));
            let line = status.lines().find(|line| line.starts_with("voluntary_ctxt")).unwrap();
            line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
        })
        .sum()
}

#[test]
fn a_daemon_starts_fast_is_small_and_never_wakes_up_when_idle() {
    let daemon = ten_disks();
    let reported_us = daemon.client().daemon().unwrap().ready_us;
    println!(
        "ready in {:?} (process start to READY=1; {reported_us} us as reported by the daemon)",
        daemon.ready
    );
    // The load of a test host is unknown, so the figure is printed, and the bound is loose.
    assert!(daemon.ready < Duration::from_secs(5));
    // An idle thread for changes ends after a second.
    std::thread::sleep(Duration::from_millis(1500));
    let (before, slept_before) = (ticks(&daemon), sleeps(&daemon));
    std::thread::sleep(Duration::from_secs(3));
    let (after, slept_after) = (ticks(&daemon), sleeps(&daemon));
    assert_eq!(after, before, "an idle daemon uses no processor time");
    assert_eq!(slept_after, slept_before, "an idle daemon does not wake up");
    let status = daemon.proc("status");
    let resident_kb = |part: &str| -> u64 {
        let line = status.lines().find(|line| line.starts_with(part)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    let (whole, own) = (resident_kb("VmRSS:"), resident_kb("RssAnon:"));
    println!("ten idle disks: {whole} kB resident, {own} kB of them its own, {after} ticks used");
    // Most of the rest are pages of the binary, which is larger without optimisation.
    assert!(own < 12 << 10, "{own} kB");
    assert!(whole < 40 << 10, "{whole} kB");
    daemon.end();
}
