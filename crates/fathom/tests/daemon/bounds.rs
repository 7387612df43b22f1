//! What an idle daemon costs.

use std::fmt::Write as _;
use std::time::Duration;

use crate::process::{Daemon, image};

/// Ten disks, a socket and an export each.
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

/// The processor time used by the daemon, in ticks: all threads, in user and kernel.
fn ticks(daemon: &Daemon) -> u64 {
    let stat = daemon.proc("stat");
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

/// How often the daemon's threads have slept, which finds wake-ups too short for a tick.
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
fn ready_soon_small_and_idle_without_a_tick() {
    let daemon = ten_disks();
    let said = daemon.client().daemon().unwrap().ready_us;
    println!(
        "ready in {:?} (process start to READY=1; by the daemon's own count {said} us)",
        daemon.ready
    );
    // What a test host does meanwhile is anybody's guess: the figure is printed, the bound loose.
    assert!(daemon.ready < Duration::from_secs(5));
    // A thread for changes that has nothing to do ends after a second.
    std::thread::sleep(Duration::from_millis(1500));
    let (before, slept_before) = (ticks(&daemon), sleeps(&daemon));
    std::thread::sleep(Duration::from_secs(3));
    let (after, slept_after) = (ticks(&daemon), sleeps(&daemon));
    assert_eq!(after, before, "an idle daemon uses no processor time");
    assert_eq!(slept_after, slept_before, "an idle daemon does not wake up");
    let status = daemon.proc("status");
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    let resident_kb: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    println!("ten idle disks: {resident_kb} kB resident, {after} ticks used in all");
    assert!(resident_kb < 30 << 10, "{resident_kb} kB");
    daemon.end();
}
