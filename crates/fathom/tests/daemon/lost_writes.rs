//! Writes that the kernel could not write back, through the whole daemon: no client gets a success
//! for them, not even from the next daemon.

use std::path::Path;
use std::sync::Barrier;

use fathom_control::{ClientError, DiskChange, ErrorCode, ProblemKind};
use fathom_sim::{DEVICE_BLOCK, FaultyDevice};

use crate::cache::succeeds;
use crate::nbd::{FLUSH, Nbd};
use crate::process::{Daemon, command, disk_over_nbd};

const IO_ERROR: u32 = 5;
const BAD: u64 = 17;

fn flush(nbd: &mut Nbd) -> u32 {
    assert!(nbd.send(FLUSH, 7, 0, 0, &[]));
    nbd.reply().expect("an answer").1
}

/// A write of one block, with FUA if `durable`.
fn write(nbd: &mut Nbd, block: u64, durable: bool) -> u32 {
    let data = [3; DEVICE_BLOCK as usize];
    let flags = u16::from(durable);
    assert!(nbd.send_with(flags, 1, 7, block * DEVICE_BLOCK, DEVICE_BLOCK as u32, &data));
    nbd.reply().expect("an answer").1
}

/// The output of `fathom disk info` for an image.
fn info(image: &Path, more: &[&str]) -> String {
    let mut command = command(&std::env::temp_dir());
    let output = command.args(["disk", "info"]).arg(image).args(more).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn lost_writes_are_errors_until_the_operator_recovers_the_disk() {
    let Some(device) = FaultyDevice::new() else { return };
    let image = device.image("a.img", 64);
    device.break_block(&image, BAD);
    let text = disk_over_nbd(&image, "");
    let daemon = Daemon::start(&text);
    let connect = |daemon: &Daemon| Nbd::connect(&daemon.path("nbd.sock"), "a");
    let mut clients: Vec<Nbd> = (0..4).map(|_| connect(&daemon)).collect();
    assert_eq!(write(&mut clients[0], BAD, false), 0, "into the cache");
    assert_eq!(daemon.client().disk("a").unwrap().problems, []);
    device.write_back();

    // Concurrent flushes and durable writes on four connections.
    let start = Barrier::new(clients.len());
    std::thread::scope(|scope| {
        for (index, nbd) in clients.iter_mut().enumerate() {
            let start = &start;
            scope.spawn(move || {
                start.wait();
                let error = if index % 2 == 0 { flush(nbd) } else { write(nbd, 0, true) };
                assert_eq!(error, IO_ERROR, "connection {index}");
            });
        }
    });
    for nbd in &mut clients {
        assert_eq!((flush(nbd), write(nbd, 1, false)), (IO_ERROR, IO_ERROR));
    }
    let client = daemon.client();
    let problems = client.disk("a").unwrap().problems;
    assert!(problems[0].message.contains("acknowledged writes may be lost"), "{problems:?}");
    assert_eq!(client.statistics().unwrap().disks[0].problems, problems);
    let metrics = client.metrics().unwrap();
    assert!(metrics.contains("fathom_disk_problems{disk=\"a\",vm=\"\"} 1"), "{metrics}");
    let lines = daemon.log();
    let reports: Vec<&str> = lines.lines().filter(|line| line.contains("may be lost")).collect();
    assert!(reports.len() == 1 && reports[0].contains(" a: "), "{lines}");

    // Stopped as by systemd, not killed: other flushes than the last must have failed as well.
    drop(clients);
    daemon.signal(libc::SIGTERM);
    let (status, folder) = daemon.wait();
    assert_eq!(status.code(), Some(1), "the end was not clean");
    // The record is shown also for an image that is not served.
    let shown = info(&image, &[]);
    assert!(shown.contains("writes-lost") && shown.contains("No space left on device"), "{shown}");
    let json: serde_json::Value = serde_json::from_str(&info(&image, &["--json"])).unwrap();
    assert_eq!(json["writes_lost"]["errno"], libc::ENOSPC, "{json}");
    let daemon = Daemon::start_in(folder, &text);
    let mut nbd = connect(&daemon);
    assert_eq!(flush(&mut nbd), IO_ERROR, "the next daemon reports it");
    assert_eq!(write(&mut nbd, 1, false), IO_ERROR);
    let problems = daemon.client().disk("a").unwrap().problems;
    assert!(problems[0].message.contains("an earlier daemon"), "{problems:?}");

    // The recovery.
    device.mend();
    daemon.client().recover_disk("a").unwrap();
    match daemon.client().recover_disk("a") {
        Err(ClientError::Refused(body)) => assert_eq!(body.code, ErrorCode::Conflict),
        other => panic!("there is nothing to recover from: {other:?}"),
    }
    assert_eq!((write(&mut nbd, BAD, false), flush(&mut nbd)), (0, 0));
    assert_eq!(daemon.client().disk("a").unwrap().problems, []);
    assert!(!info(&image, &[]).contains("writes-lost"));
    drop(nbd);
    let daemon = Daemon::start_in(daemon.end(), &text);
    let mut nbd = connect(&daemon);
    assert_eq!(nbd.read(BAD * DEVICE_BLOCK, DEVICE_BLOCK as u32), [3; DEVICE_BLOCK as usize]);
    assert_eq!(flush(&mut nbd), 0);
    daemon.end();
}

/// The write-back fails at the daemon's last flush, which only the log reports.
#[test]
fn the_last_flush_of_a_daemon_hides_no_loss() {
    let Some(device) = FaultyDevice::new() else { return };
    let image = device.image("a.img", 64);
    device.break_block(&image, BAD);
    let text = disk_over_nbd(&image, "");
    let daemon = Daemon::start(&text);
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    assert_eq!(write(&mut nbd, BAD, false), 0, "into the cache");
    drop(nbd);
    daemon.signal(libc::SIGTERM);
    let (status, folder) = daemon.wait();
    assert_eq!(status.code(), Some(1), "the end was not clean");
    let daemon = Daemon::start_in(folder, &text);
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    assert_eq!(flush(&mut nbd), IO_ERROR);
    daemon.signal(libc::SIGKILL);
    let (_, folder) = daemon.wait();
    let daemon = Daemon::start_in(folder, &text);
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    assert_eq!(flush(&mut nbd), IO_ERROR, "a killed daemon leaves the record, too");
}

#[test]
fn a_deleted_image_is_reported_in_status_and_log() {
    let folder = tempfile::tempdir().unwrap();
    crate::process::image(folder.path(), "a.img", 1 << 20);
    let text = "[[disk]]\nname = \"a\"\nimage = \"a.img\"\n[[nbd]]\naddress = \"unix:n\"\n";
    let daemon = Daemon::start_in(folder, text);
    std::fs::remove_file(daemon.path("a.img")).unwrap();
    daemon.until("the problem", || !daemon.client().disk("a").unwrap().problems.is_empty());
    daemon.until("the line", || daemon.log().contains("its file was deleted"));
    daemon.end();
}

/// The store of two disks' caches in the mode `write-back` loses acknowledged writes. Neither the
/// next daemon nor the one after it confirms a flush, for each disk until the operator has
/// recovered this one.
#[test]
fn a_loss_in_a_cache_is_reported_until_each_of_its_disks_is_recovered() {
    let Some(device) = FaultyDevice::new() else { return };
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    for image in ["a.img", "b.img"] {
        crate::process::image(folder.path(), image, 4 << 20);
    }
    let store = device.mount().join("cache");
    let shown = store.display().to_string();
    let make = ["create", &shown, "--size", "8M", "--log", "2M", "--logs", "2"];
    succeeds(folder.path(), &make);
    let disk = |name: &str| {
        format!(
            "[[disk]]\nname = \"{name}\"\nimage = \"{name}.img\"\nlayers = [{{ kind = \"cache\", store = \
             \"{shown}\", mode = \"write-back\", age = \"60s\" }}]\n"
        )
    };
    let text = format!("{}{}[[nbd]]\naddress = \"unix:nbd.sock\"\n", disk("a"), disk("b"));
    let daemon = Daemon::start_in(folder, &text);
    let connect = |daemon: &Daemon, disk| Nbd::connect(&daemon.path("nbd.sock"), disk);
    let mut a = connect(&daemon, "a");
    assert_eq!((write(&mut a, 1, false), flush(&mut a)), (0, 0));
    daemon.signal(libc::SIGKILL);
    let (_, folder) = daemon.wait();
    let check = succeeds(folder.path(), &["check", &shown, "--json"]);
    let check: serde_json::Value = serde_json::from_str(&check).unwrap();
    let logs = check["logs"].as_array().unwrap();
    let log = logs.iter().find(|log| log["disk"] == "a").unwrap()["offset"].as_u64().unwrap();
    // The places of the next records.
    let ring = log / DEVICE_BLOCK + 2;
    (2..10).for_each(|block| device.break_block(&store, ring + block));

    let daemon = Daemon::start_in(folder, &text);
    let (mut a, mut b) = (connect(&daemon, "a"), connect(&daemon, "b"));
    // The kernel may write the record of `a` back at any time, and fail: that of `b` is first.
    assert_eq!((write(&mut b, 2, false), write(&mut a, 2, false)), (0, 0));
    assert_eq!((flush(&mut a), flush(&mut b)), (IO_ERROR, IO_ERROR));
    match daemon.client().recover_disk("a") {
        Err(ClientError::Refused(body)) => assert!(body.remedy.contains("restart the daemon")),
        other => panic!("its log cannot be written again now: {other:?}"),
    }
    daemon.signal(libc::SIGKILL);
    let (_, folder) = daemon.wait();
    device.mend();

    let problem = |daemon: &Daemon, disk| {
        let problems = daemon.client().disk(disk).unwrap().problems;
        problems.iter().any(|problem| problem.kind == ProblemKind::WritesLost)
    };
    let daemon = Daemon::start_in(folder, &text);
    let (mut a, mut b) = (connect(&daemon, "a"), connect(&daemon, "b"));
    for nbd in [&mut a, &mut b] {
        assert_eq!((flush(nbd), write(nbd, 3, false), write(nbd, 3, true)), (5, 5, 5));
    }
    assert_eq!(a.read(DEVICE_BLOCK, DEVICE_BLOCK as u32), [3; DEVICE_BLOCK as usize]);
    assert!(problem(&daemon, "a") && problem(&daemon, "b"), "{}", daemon.log());
    let alone = DiskChange { layers: Some(Vec::new()), ..DiskChange::default() };
    assert!(daemon.client().change_disk("a", &alone).is_err(), "the log remembers the loss");
    daemon.client().recover_disk("a").unwrap();
    assert_eq!((write(&mut a, 3, false), flush(&mut a), flush(&mut b)), (0, 0, IO_ERROR));
    assert!(!problem(&daemon, "a") && problem(&daemon, "b"));
    drop((a, b));
    // An orderly end forgets nothing, either.
    daemon.signal(libc::SIGTERM);
    let (status, folder) = daemon.wait();
    assert_eq!(status.code(), Some(1), "the end was not clean");

    let daemon = Daemon::start_in(folder, &text);
    let (mut a, mut b) = (connect(&daemon, "a"), connect(&daemon, "b"));
    assert_eq!((write(&mut a, 4, false), flush(&mut a)), (0, 0));
    assert_eq!((flush(&mut b), write(&mut b, 4, false)), (IO_ERROR, IO_ERROR));
    daemon.client().recover_disk("b").unwrap();
    assert_eq!((write(&mut b, 4, false), flush(&mut b)), (0, 0));
    assert_eq!(b.read(4 * DEVICE_BLOCK, DEVICE_BLOCK as u32), [3; DEVICE_BLOCK as usize]);
    drop((a, b));
    let daemon = Daemon::start_in(daemon.end(), &text);
    for disk in ["a", "b"] {
        let mut nbd = connect(&daemon, disk);
        assert_eq!(nbd.read(4 * DEVICE_BLOCK, DEVICE_BLOCK as u32), [3; DEVICE_BLOCK as usize]);
        assert_eq!(flush(&mut nbd), 0);
    }
    daemon.end();
}
