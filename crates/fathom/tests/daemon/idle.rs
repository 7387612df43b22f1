//! An idle daemon costs no processor time.

use std::time::Duration;

use crate::cache::succeeds;
use crate::nbd::{FLUSH, Nbd};
use crate::process::{Daemon, image};

/// How long an idle daemon is observed.
const TIME: Duration = Duration::from_secs(5);
/// How often its threads may wake in that time: images are examined once a minute.
const WAKES_MAX: u64 = 2;
/// How often it is observed until it is idle: what clients have left to do comes to its end.
const ATTEMPTS_MAX: usize = 6;

/// How often each thread has slept, with its name. Without the kernel's workers, which look once in
/// five seconds whether they are still needed.
fn sleeps(daemon: &Daemon) -> Vec<(String, u64)> {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", daemon.id())).unwrap();
    let read = |entry: std::io::Result<std::fs::DirEntry>| {
        let status = std::fs::read_to_string(entry.ok()?.path().join("status")).ok()?;
        let of = |key: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(key))?;
            Some(line.trim_start_matches(':').trim().to_owned())
        };
        Some((of("Name")? + " " + &of("Pid")?, of("voluntary_ctxt_switches")?.parse().ok()?))
    };
    let mut found: Vec<(String, u64)> = tasks.filter_map(read).collect();
    found.retain(|(name, _)| !name.starts_with("iou-wrk"));
    found.sort();
    found
}

/// Disks with logs, which are empty, and with a cache; each has a client that does nothing.
#[test]
fn an_idle_daemon_with_logs_sleeps() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    for name in ["a.img", "b.img", "c.img"] {
        image(folder.path(), name, 4 << 20);
    }
    succeeds(folder.path(), &["create", "store", "--size", "8M", "--log", "1M", "--logs", "1"]);
    let disk = |name: &str, layer: &str| {
        format!("[[disk]]\nname = \"{name}\"\nimage = \"{name}.img\"\nlayers = [{{ {layer} }}]\n")
    };
    let log =
        |kind: &str| format!("kind = \"{kind}\", log = \"{kind}\", size = \"1M\", age = \"100ms\"");
    let daemon = Daemon::start_in(
        folder,
        &[
            disk("a", &log("wal")),
            disk("b", &log("offload")),
            disk(
                "c",
                "kind = \"cache\", store = \"store\", mode = \"write-back\", age = \"100ms\"",
            ),
            "[[nbd]]\naddress = \"unix:nbd.sock\"\n".into(),
        ]
        .concat(),
    );
    let connect = |name: &&str| Nbd::connect(&daemon.path("nbd.sock"), name);
    let mut clients: Vec<_> = ["a", "b", "c"].iter().map(connect).collect();
    for client in &mut clients {
        assert_eq!(client.fill_block(1, 7), Some(0));
        assert!(client.send(FLUSH, 7, 0, 0, &[]) && client.reply() == Some((7, 0)));
    }
    let is_empty = |disk: &str| {
        let used = daemon.client().disk(disk).unwrap().figure("wal", "used_bytes");
        used.is_none_or(|used| used == 0)
    };
    daemon.until("the logs to be home", || ["a", "b", "c"].into_iter().all(is_empty));
    let count = |threads: &[(String, u64)]| threads.iter().map(|(_, count)| count).sum::<u64>();
    let is_idle = |attempt: usize| {
        let before = sleeps(&daemon);
        std::thread::sleep(TIME);
        let after = sleeps(&daemon);
        let wakes = count(&after).saturating_sub(count(&before));
        let woken: Vec<_> = after.iter().filter(|thread| !before.contains(thread)).collect();
        println!("{attempt}: {wakes} in {TIME:?}: {woken:?} of {before:?}");
        wakes <= WAKES_MAX
    };
    assert!((0..ATTEMPTS_MAX).any(is_idle), "threads wake without work");
    // The life of a daemon with changes is noted.
    let life = || std::fs::read_to_string(daemon.path("control.life")).unwrap();
    let noted = life();
    assert_eq!(clients[0].fill_block(1, 8), Some(0));
    daemon.until("its life to be noted", || life() != noted);
}
