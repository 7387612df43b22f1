//! A log volume fails, and works again: a device, an NBD export, a cluster. The logs on it are
//! recovered while their disks are used, and nothing that was acknowledged is lost.

use std::fs::File;

use fathom_control::{OffloadAction, OffloadRequest};
use fathom_sim::FaultyDevice;
use tempfile::TempDir;

use crate::nbd::Nbd;
use crate::offload;
use crate::process::Daemon;

const BLOCKS: u64 = 64;
const IO_ERROR: u32 = 5;

/// The disks "a" and "b", whose logs are both at `log`.
fn configuration(kind: &str, log: &str) -> String {
    let disk = |name: &str, offset: &str| {
        format!(
            "[[disk]]\nname = \"{name}\"\nimage = \"{name}.img\"\nlayers = [{{ kind = \"{kind}\", log = {log:?}, \
             offset = \"{offset}\", size = \"1M\", age = \"60s\" }}]\n"
        )
    };
    disk("a", "0") + &disk("b", "1M") + "[[nbd]]\naddress = \"unix:nbd.sock\"\n"
}

fn start(daemon: &Daemon, disk: &str) {
    let request = OffloadRequest { action: OffloadAction::Start, dry_run: false };
    daemon.until("a start", || {
        // After a failure, the store may need a moment.
        daemon.client().change_offload(disk, request).is_ok()
    });
}

/// Whether the log of `disk` has failed, or rejects changes until it is empty.
fn has_problem(daemon: &Daemon, disk: &str) -> bool {
    let problems = daemon.client().disk(disk).unwrap().problems;
    problems.iter().any(|problem| problem.message.contains("its log volume"))
}

/// Writes blocks until an error. Returns how many were acknowledged.
fn write_until_error(nbd: &mut Nbd, content: u8) -> u64 {
    let is_ok = |block: &u64| nbd.fill_block(*block, content) == Some(0);
    (0..BLOCKS).take_while(is_ok).count() as u64
}

/// Starts a daemon, and waits until it serves the disks.
fn start_daemon(folder: TempDir, configuration: &str) -> Daemon {
    let daemon = Daemon::start_in(folder, configuration);
    for disk in ["a", "b"] {
        offload::wait_until_exported(&daemon, disk);
    }
    daemon
}

/// `break_it` makes the log volume fail, and `mend` makes it work again. At the end, `end` ends the
/// daemon.
fn fails_and_is_recovered(
    configuration: &str,
    break_it: impl FnOnce(),
    mend: impl FnOnce(),
    end: impl FnOnce(Daemon) -> TempDir,
) {
    let folder = offload::folder();
    let is_carried = configuration.contains("kind = \"offload\"");
    let daemon = start_daemon(folder, configuration);
    let connect = |disk: &str| Nbd::connect(&daemon.path("nbd.sock"), disk);
    let (mut a, mut b) = (connect("a"), connect("b"));
    // From now on, each disk has a queue, which tries its log out.
    assert_eq!([a.read_block(0), b.read_block(0)], [0; 2]);
    if is_carried {
        for disk in ["a", "b"] {
            start(&daemon, disk);
        }
    }
    for block in 0..4 {
        assert_eq!([a.fill_block(block, 1), b.fill_block(block, 2)], [Some(0); 2]);
    }
    break_it();
    let written = write_until_error(&mut a, 3);
    assert!(written < BLOCKS, "the volume has failed");
    // What only the log has is rejected.
    assert_eq!(a.fill_block(0, 4), Some(IO_ERROR));
    daemon.until("the problem", || has_problem(&daemon, "a"));
    mend();
    for disk in ["a", "b"] {
        daemon.until("the end of the problem", || !has_problem(&daemon, disk));
    }
    for block in 0..BLOCKS {
        let found = a.read_block(block);
        match block {
            _ if block < written => assert_eq!(found, 3),
            // This one has failed: it may have been written or not.
            _ if block == written => assert!(found == 3 || found == u8::from(block < 4)),
            _ => assert_eq!(found, u8::from(block < 4)),
        }
        assert_eq!(b.read_block(block), if block < 4 { 2 } else { 0 });
    }
    // The log is used again.
    if is_carried {
        start(&daemon, "a");
    }
    for block in 0..BLOCKS {
        assert_eq!(a.fill_block(block, 5), Some(0), "block {block}");
    }
    drop((a, b));
    let daemon = start_daemon(end(daemon), configuration);
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    assert!((0..BLOCKS).all(|block| nbd.read_block(block) == 5));
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "b");
    assert!((0..4).all(|block| nbd.read_block(block) == 2));
}

/// The kernel cannot write a block of the log back, and forgets it. After that the device is
/// repaired.
fn loses_writes(kind: &str) {
    let Some(device) = FaultyDevice::new() else { return };
    let log = device.mount().join("logs");
    // As large as the first opening would make it.
    device.image("logs", 512);
    let text = configuration(kind, log.to_str().unwrap());
    // The first block of a record: Linux's loop driver reports a write as successful if only its
    // first part was. (A layer `offload` begins with a record of one block, its trial.)
    let first = if kind == "offload" { 19 } else { 20 };
    let break_it = || device.break_block(&log, first);
    let kill = |daemon: Daemon| {
        daemon.signal(libc::SIGKILL);
        daemon.wait().1
    };
    fails_and_is_recovered(&text, break_it, || device.mend(), kill);
}

#[test]
fn a_log_that_has_lost_writes_is_recovered_when_its_device_works_again() {
    loses_writes("wal");
}

#[test]
fn a_carrying_log_that_has_lost_writes_is_recovered_when_its_device_works_again() {
    loses_writes("offload");
}

fn at_another_host(kind: &str) {
    let server_folder = tempfile::tempdir().unwrap();
    let Some(mut server) = offload::failing_server(server_folder.path()) else { return };
    let broken = server_folder.path().join("broken");
    let log = format!("nbd+unix:///?socket={}", server_folder.path().join("log.sock").display());
    let break_it = || drop(File::create(&broken).unwrap());
    let mend = || std::fs::remove_file(&broken).unwrap();
    // nbdkit 1.32 may abort if its client is killed.
    fails_and_is_recovered(&configuration(kind, &log), break_it, mend, Daemon::end);
    let _ = server.kill();
    let _ = server.wait();
}

#[test]
fn a_log_at_another_host_is_recovered() {
    at_another_host("wal");
}

#[test]
fn a_carrying_log_at_another_host_is_recovered() {
    at_another_host("offload");
}

/// All nodes of a cluster are gone for longer than requests wait.
#[test]
fn a_log_in_a_cluster_is_recovered() {
    let Some((_nodes, mut cluster, configuration)) = offload::cluster() else { return };
    let text = configuration.replacen("timeout = \"20s\"", "timeout = \"3s\"", 1);
    let daemon = Daemon::start_in(offload::folder(), &text);
    offload::wait_until_served(&daemon);
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    start(&daemon, "a");
    for block in 0..8 {
        assert_eq!(nbd.fill_block(block, 1), Some(0));
    }
    for node in 0..cluster.count() {
        cluster.signal(node, "KILL");
    }
    assert_eq!(nbd.fill_block(0, 2), Some(IO_ERROR));
    assert_ne!(nbd.read_error(1), 0);
    daemon.until("the problem", || has_problem(&daemon, "a"));
    // What the log has nothing of goes home.
    assert_eq!((nbd.fill_block(1024, 7), nbd.read_block(1024)), (Some(0), 7));
    for node in 0..cluster.count() {
        cluster.run(node).unwrap();
    }
    cluster.wait_until_ready().unwrap();
    daemon.until("the end of the problem", || !has_problem(&daemon, "a"));
    let status = daemon.client().disk("a").unwrap();
    let stores = status.layers.iter().flat_map(|layer| &layer.stores);
    let figures: Vec<_> = stores.flat_map(|store| &store.figures).collect();
    assert!(figures.iter().any(|one| one.name == "repeats_total" && one.value > 0), "{figures:?}");
    let contents: Vec<u8> = (0..8).map(|block| nbd.read_block(block)).collect();
    assert!(contents[0] == 1 || contents[0] == 2, "{contents:?}");
    assert_eq!(contents[1..], [1; 7]);
    // For a minute, nothing new is sent to nodes of which one did not answer.
    for block in 0..8 {
        assert_eq!((nbd.fill_block(block, 3), nbd.read_block(block)), (Some(0), 3));
    }
    daemon.signal(libc::SIGKILL);
    let daemon = Daemon::start_in(daemon.wait().1, &text);
    offload::wait_until_served(&daemon);
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    assert!((0..8).all(|block| nbd.read_block(block) == 3));
    start(&daemon, "a");
    assert_eq!((nbd.fill_block(0, 4), nbd.read_block(0)), (Some(0), 4));
}
