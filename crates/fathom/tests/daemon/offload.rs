//! The layer `offload` on real files: changes go to a log and come back, whatever kills the daemon.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use fathom_image::LogMark;
use fathom_valkey::local::{LocalCluster, LocalOptions};
use tempfile::TempDir;

use fathom_control::{OffloadAction, OffloadDisk, OffloadRequest, OffloadState};

use crate::nbd::Nbd;
use crate::overwrite::overwrite;
use crate::process::Daemon;

const SIZE: u64 = 8 << 20;
const BLOCK: u64 = 4096;
/// How long a change of state may take on a slow machine.
const PATIENCE: Duration = Duration::from_secs(60);

fn configuration(options: &str) -> String {
    format!(
        "[[disk]]\nname = \"a\"\nimage = \"a.img\"\n\
         layers = [{{ kind = \"offload\", log = \"elsewhere\", size = \"1M\", age = \"1ms\"{options} }}]\n\
         [[disk]]\nname = \"b\"\nimage = \"b.img\"\n\
         [[nbd]]\naddress = \"unix:nbd.sock\"\n"
    )
}

pub fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for image in ["a.img", "b.img"] {
        File::create(folder.path().join(image)).unwrap().set_len(SIZE).unwrap();
    }
    folder
}

/// The content of a block of the image, whatever the daemon has elsewhere.
fn home(daemon: &Daemon, block: u64) -> u8 {
    let mut bytes = [0; BLOCK as usize];
    let file = File::open(daemon.path("a.img")).unwrap();
    file.read_exact_at(&mut bytes, block * BLOCK).unwrap();
    bytes[0]
}

fn change(daemon: &Daemon, action: OffloadAction) -> bool {
    let request = OffloadRequest { action, dry_run: false };
    daemon.client().change_offload("a", request).unwrap().is_changed
}

fn disk(daemon: &Daemon) -> OffloadDisk {
    daemon.client().offload(Some("a")).unwrap().disks.remove(0)
}

fn wait_for(daemon: &Daemon, state: OffloadState) {
    let begun = Instant::now();
    while disk(daemon).state != state {
        assert!(begun.elapsed() < PATIENCE, "{:?}", disk(daemon));
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_disk_is_carried_by_hand_and_comes_home() {
    let daemon = Daemon::start_in(folder(), &configuration(""));
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    assert_eq!(nbd.fill_block(1, 1), Some(0));
    assert_eq!((home(&daemon, 1), disk(&daemon).state), (1, OffloadState::Resting));
    let dry = OffloadRequest { action: OffloadAction::Start, dry_run: true };
    let answer = daemon.client().change_offload("a", dry).unwrap();
    assert!(answer.is_changed && answer.dry_run && answer.disk.state == OffloadState::Resting);
    assert!(change(&daemon, OffloadAction::Start) && !change(&daemon, OffloadAction::Start));
    for block in 1..4 {
        assert_eq!(nbd.fill_block(block, 7), Some(0));
    }
    let carried = disk(&daemon);
    assert_eq!((carried.state, carried.by.as_str()), (OffloadState::Carrying, "hand"));
    assert!(carried.log_used_bytes >= 3 * BLOCK && carried.carried == 3, "{carried:?}");
    // The image has the old content; the disk has the new one.
    assert_eq!([1, 2, 3].map(|block| home(&daemon, block)), [1, 0, 0]);
    assert_eq!([1, 2, 3].map(|block| nbd.read_block(block)), [7; 3]);
    assert!(change(&daemon, OffloadAction::Stop));
    wait_for(&daemon, OffloadState::Resting);
    assert_eq!([1, 2, 3].map(|block| home(&daemon, block)), [7; 3]);
    assert_eq!(disk(&daemon).log_used_bytes, 0);
    // At rest again, changes go straight home.
    assert_eq!(nbd.fill_block(2, 9), Some(0));
    assert_eq!((home(&daemon, 2), disk(&daemon).carried), (9, 3));
    let error = daemon.client().change_offload("b", dry).unwrap_err().to_string();
    assert!(error.contains("has no layer `offload`"), "{error}");
    assert!(daemon.client().offload(Some("b")).is_err());
    assert!(daemon.client().offload(None).unwrap().disks.len() == 1);
}

/// A log volume that is known to be broken gets no changes: nobody is carried, and no write fails.
#[test]
fn a_log_that_is_not_fit_is_not_used() {
    let daemon = Daemon::start_in(folder(), &configuration(""));
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    assert_eq!(nbd.fill_block(1, 1), Some(0));
    File::options().write(true).open(daemon.path("elsewhere")).unwrap().set_len(4096).unwrap();
    daemon.until("the problem to be found", || {
        let problems = daemon.client().disk("a").unwrap().problems;
        problems.iter().any(|problem| problem.message.contains("truncated"))
    });
    let request = OffloadRequest { action: OffloadAction::Start, dry_run: false };
    let error = daemon.client().change_offload("a", request).unwrap_err().to_string();
    assert!(error.contains("takes no changes"), "{error}");
    assert_eq!(disk(&daemon).state, OffloadState::Resting);
    assert_eq!(nbd.fill_block(1, 2), Some(0));
    assert_eq!((nbd.read_block(1), home(&daemon, 1)), (2, 2));
}

/// A server at the socket `log.sock` in `folder`, whose requests fail while the file `broken` is
/// there; `None` without nbdkit.
pub fn failing_server(folder: &Path) -> Option<Child> {
    let server = Command::new("nbdkit")
        .args(["--foreground", "--exit-with-parent", "--filter=error", "--unix"])
        .arg(folder.join("log.sock"))
        .args(["memory", "8M", "error-rate=100%"])
        .arg(format!("error-file={}", folder.join("broken").display()))
        .spawn();
    let Ok(server) = server else {
        eprintln!("SKIPPED: this needs nbdkit");
        return None;
    };
    let begun = Instant::now();
    while !folder.join("log.sock").exists() {
        assert!(begun.elapsed() < PATIENCE, "nbdkit does not listen");
        std::thread::sleep(Duration::from_millis(5));
    }
    Some(server)
}

/// The log volume breaks without a sign. A start finds that out before it carries a change.
#[test]
fn a_log_that_has_died_unnoticed_fails_no_write() {
    let folder = folder();
    let (socket, broken) = (folder.path().join("log.sock"), folder.path().join("broken"));
    let Some(mut server) = failing_server(folder.path()) else { return };
    let log = format!("log = \"nbd+unix:///?socket={}\"", socket.display());
    let text = configuration("").replacen("log = \"elsewhere\"", &log, 1);
    let daemon = Daemon::start_in(folder, &text);
    wait_until_served(&daemon);
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    for round in 1..5 {
        assert!(change(&daemon, OffloadAction::Start));
        assert_eq!(disk(&daemon).state, OffloadState::Carrying);
        assert_eq!(nbd.fill_block(1, round), Some(0));
        assert!(change(&daemon, OffloadAction::Stop));
        wait_for(&daemon, OffloadState::Resting);
    }
    File::create(broken).unwrap();
    let request = OffloadRequest { action: OffloadAction::Start, dry_run: false };
    let error = daemon.client().change_offload("a", request).unwrap_err().to_string();
    assert!(error.contains("takes no changes"), "{error}");
    assert_eq!((disk(&daemon).state, disk(&daemon).by.as_str()), (OffloadState::Resting, ""));
    for round in 6..9 {
        assert_eq!(nbd.fill_block(1, round), Some(0));
        assert_eq!((nbd.read_block(1), home(&daemon, 1)), (round, round));
    }
    drop(nbd);
    // Nothing is in the log, so that the image needs it no more.
    let folder = daemon.end();
    let _ = server.kill();
    let _ = server.wait();
    let daemon = Daemon::start_in(folder, &configuration("").replacen("layers", "# layers", 1));
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    assert_eq!(nbd.read_block(1), 8);
}

/// Waits until the disk "a" is served and exported. A cluster may need a moment after the death of
/// a node.
pub fn wait_until_served(daemon: &Daemon) {
    wait_until_exported(daemon, "a");
}

/// As [`wait_until_served`], for the disk `disk`.
pub fn wait_until_exported(daemon: &Daemon, disk: &str) {
    let begun = Instant::now();
    while !daemon.client().disk(disk).is_ok_and(|status| !status.frontends.is_empty()) {
        assert!(begun.elapsed() < PATIENCE, "{:?}", daemon.client().disk(disk));
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Kills a daemon in all states, several times. Returns the folder. `disturb` is called in each
/// life.
fn kill_in_every_state(
    mut folder: TempDir,
    configuration: &str,
    mut disturb: impl FnMut(u8),
) -> TempDir {
    let mut expected = [[0; 64], [0; 64]];
    for life in 0..6_u8 {
        let daemon = Daemon::start_in(folder, configuration);
        wait_until_served(&daemon);
        disturb(life);
        let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
        for (block, content) in expected[0].iter().enumerate() {
            assert_eq!(nbd.read_block(block as u64), *content, "life {life}, block {block}");
        }
        let write = |nbd: &mut Nbd, block, content| {
            // In the course of a life, the disk is carried, returns and rests, often.
            if block % 9 == 0 {
                let action =
                    if content % 2 == 0 { OffloadAction::Start } else { OffloadAction::Stop };
                let request = OffloadRequest { action, dry_run: false };
                // The daemon may have been killed.
                let _ = daemon.client().change_offload("a", request);
            }
            assert_eq!(nbd.fill_block(block, content), Some(0));
        };
        overwrite(&daemon, life, Duration::from_millis(300), BLOCK, write, &mut expected);
        daemon.signal(libc::SIGKILL);
        folder = daemon.wait().1;
    }
    // An orderly stop brings everything home, and the image is used without the layer.
    let daemon = Daemon::start_in(folder, configuration);
    wait_until_served(&daemon);
    folder = daemon.end();
    let alone = configuration.replacen("layers", "# layers", 1);
    let daemon = Daemon::start_in(folder, &alone);
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    for (block, content) in expected[0].iter().enumerate() {
        assert_eq!(nbd.read_block(block as u64), *content, "block {block}");
    }
    daemon.end()
}

#[test]
fn acknowledged_writes_survive_a_kill_in_every_state() {
    kill_in_every_state(folder(), &configuration(""), |_| {});
}

/// A cluster of this host, and a configuration that has the log of the disk `a` there; `None`
/// without Valkey.
pub fn cluster() -> Option<(TempDir, LocalCluster, String)> {
    if std::process::Command::new("valkey-server").arg("--version").output().is_err() {
        eprintln!("valkey-server is absent: skipped");
        return None;
    }
    let folder = tempfile::tempdir().unwrap();
    let cluster = LocalCluster::start(&LocalOptions::new(folder.path())).unwrap();
    let configuration = configuration("").replacen(
        "log = \"elsewhere\"",
        "cluster = \"peaks\", volume = \"host1-a\"",
        1,
    ) + &format!(
        "[[cluster]]\nname = \"peaks\"\nnodes = {:?}\nplain_allowed = true\ntimeout = \"20s\"\n",
        cluster.addresses()
    );
    Some((folder, cluster, configuration))
}

#[test]
fn a_log_in_a_cluster_survives_kills_of_the_daemon_and_of_nodes() {
    let Some((_nodes, mut cluster, configuration)) = cluster() else { return };
    let folder = kill_in_every_state(folder(), &configuration, |life| {
        // A node dies and comes back, or hangs until its replica has taken over.
        let node = usize::from(life);
        if life % 2 == 0 {
            cluster.signal(node, "KILL");
            cluster.run(node).unwrap();
        } else {
            cluster.signal(node, "STOP");
            std::thread::sleep(Duration::from_secs(4));
            cluster.signal(node, "CONT");
        }
    });
    // The daemon has no log any more, and the volume can be removed.
    let daemon = Daemon::start_in(folder, &configuration);
    wait_until_served(&daemon);
    let used = daemon.client().forget_volume("peaks", "host1-a").unwrap_err().to_string();
    assert!(used.contains("has its log in cluster:peaks/host1-a"), "{used}");
    let folder = daemon.end();
    let daemon = Daemon::start_in(folder, &configuration.replacen("layers", "# layers", 1));
    let done = daemon.client().forget_volume("peaks", "host1-a").unwrap();
    assert!(done.message.contains("was removed, with"), "{done:?}");
    assert!(daemon.client().forget_volume("peak", "host1-a").is_err());
    let left = (0..cluster.count()).filter_map(|node| cluster.ask(node, &["DBSIZE"]));
    assert!(left.into_iter().all(|size| size.trim() == "0"));
}

/// What a log has used in a cluster is given back when the log is empty.
#[test]
fn an_empty_log_takes_little_memory_of_a_cluster() {
    let Some((_nodes, cluster, configuration)) = cluster() else { return };
    let stored = || {
        let mut bytes = 0_usize;
        for node in (0..cluster.count()).filter(|node| cluster.is_primary(*node)) {
            let keys = cluster.ask(node, &["KEYS", "fathom:*"]).unwrap();
            for key in keys.lines() {
                // Keys of a volume and of a shard are hashes.
                let length = cluster.ask(node, &["STRLEN", key]).unwrap_or_default();
                bytes += length.trim().parse::<usize>().unwrap_or(0);
            }
        }
        bytes
    };
    let daemon = Daemon::start_in(folder(), &configuration);
    wait_until_served(&daemon);
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    change(&daemon, OffloadAction::Start);
    for block in 0..40 {
        assert_eq!(nbd.fill_block(block, 7), Some(0));
    }
    assert!(stored() > 40 * 4096);
    assert!(change(&daemon, OffloadAction::Stop));
    wait_for(&daemon, OffloadState::Resting);
    let begun = Instant::now();
    // The superblocks stay, and a few bytes of each block.
    while stored() > 40_000 {
        assert!(begun.elapsed() < PATIENCE, "{} bytes", stored());
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!((0..40).all(|block| nbd.read_block(block) == 7));
    change(&daemon, OffloadAction::Start);
    assert_eq!(nbd.fill_block(1, 8), Some(0));
    assert_eq!([0, 1].map(|block| nbd.read_block(block)), [7, 8]);
}

#[test]
fn the_older_of_two_daemons_with_one_volume_gets_errors_and_no_old_data() {
    let Some((_nodes, _cluster, configuration)) = cluster() else { return };
    let first = Daemon::start_in(folder(), &configuration);
    wait_until_served(&first);
    let mut nbd = Nbd::connect(&first.path("nbd.sock"), "a");
    change(&first, OffloadAction::Start);
    assert_eq!(nbd.fill_block(5, 3), Some(0));
    // The image, and its mark, at the same path of another host: shared storage, or a copy.
    let path = first.path("a.img").parent().unwrap().to_owned();
    let (parent, name) = (path.parent().unwrap(), path.file_name().unwrap());
    let moved = path.with_extension("moved");
    std::fs::rename(&path, &moved).unwrap();
    let folder = tempfile::Builder::new().prefix(name).rand_bytes(0).tempdir_in(parent).unwrap();
    let (image, copy) = (moved.join("a.img"), path.join("a.img"));
    std::fs::copy(&image, &copy).unwrap();
    File::create(path.join("b.img")).unwrap().set_len(SIZE).unwrap();
    let mark = LogMark::open(&image, folder.path()).unwrap().read().unwrap().unwrap();
    LogMark::open(&copy, folder.path()).unwrap().write(&mark).unwrap();
    let second = Daemon::start_in(folder, &configuration);
    wait_until_served(&second);
    let mut other = Nbd::connect(&second.path("nbd.sock"), "a");
    assert_eq!(other.read_block(5), 3);
    assert_eq!(other.fill_block(5, 4), Some(0));
    // The first daemon cannot write to the log any more, nor read what is only there.
    assert_ne!(nbd.fill_block(5, 9), Some(0));
    assert_ne!(nbd.read_error(5), 0);
    assert_eq!(other.read_block(5), 4);
    drop(second);
    std::fs::rename(&moved, &path).unwrap();
    let text = format!("{:?}", first.client().disk("a").unwrap());
    assert!(text.contains("another daemon has opened the volume"), "{text}");
}

#[test]
fn a_kill_while_changes_are_only_in_the_log_loses_nothing() {
    let daemon = Daemon::start_in(folder(), &configuration(", carry = \"writes\""));
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    change(&daemon, OffloadAction::Start);
    assert_eq!((nbd.fill_block(5, 3), home(&daemon, 5)), (Some(0), 0));
    daemon.signal(libc::SIGKILL);
    let folder = daemon.wait().1;
    let daemon = Daemon::start_in(folder, &configuration(""));
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    assert_eq!(nbd.read_block(5), 3);
    // Nobody carries it any more, so it returns.
    wait_for(&daemon, OffloadState::Resting);
    assert_eq!(home(&daemon, 5), 3);
}

#[test]
fn a_cluster_that_does_not_answer_keeps_no_other_disk_from_being_served() {
    let Some((_nodes, mut cluster, configuration)) = cluster() else { return };
    for node in 0..cluster.count() {
        cluster.signal(node, "KILL");
    }
    let daemon = Daemon::start_in(folder(), &configuration);
    let mut other = Nbd::connect(&daemon.path("nbd.sock"), "b");
    assert_eq!(other.fill_block(1, 5), Some(0));
    let error = daemon.client().disk("a").unwrap_err().to_string();
    assert!(error.contains("no node answers"), "{error}");
    for node in 0..cluster.count() {
        cluster.run(node).unwrap();
    }
    cluster.wait_until_ready().unwrap();
    wait_until_served(&daemon);
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    assert!(change(&daemon, OffloadAction::Start));
    assert_eq!((nbd.fill_block(1, 6), other.read_block(1)), (Some(0), 5));
}

/// Another host's daemon, which serves a disk over NBD with TLS, and the configuration of a daemon
/// with its log there.
fn other_host() -> Option<(Daemon, String, String)> {
    let folder = tempfile::tempdir().unwrap();
    if !fathom_sim::certificates(folder.path()) {
        return None;
    }
    File::create(folder.path().join("log.img")).unwrap().set_len(SIZE).unwrap();
    let served = "[[disk]]\nname = \"log\"\nimage = \"log.img\"\n\
                  [[nbd]]\naddress = \"unix:nbd.sock\"\n[nbd.tls]\ncertificate = \"server-cert.pem\"\n\
                  key = \"server-key.pem\"\nclient_ca = \"ca-cert.pem\"\n";
    let uri = format!(
        "nbds+unix:///log?socket={place}/nbd.sock&tls-certificates={place}",
        place = folder.path().display()
    );
    let configuration = configuration("").replacen("elsewhere", &uri, 1);
    Some((Daemon::start_in(folder, served), served.to_owned(), configuration))
}

#[test]
fn a_log_at_another_host_survives_kills_of_both_daemons() {
    let Some((peer, served, configuration)) = other_host() else { return };
    let mut peer = Some(peer);
    std::thread::scope(|scope| {
        let mut restart = None;
        kill_in_every_state(folder(), &configuration, |_| {
            // The other host's daemon is killed in the middle of the writes, and started again.
            let killed = restart.take().map_or_else(
                || peer.take().unwrap(),
                |restart: std::thread::ScopedJoinHandle<'_, Daemon>| restart.join().unwrap(),
            );
            let served = served.clone();
            restart = Some(scope.spawn(move || {
                std::thread::sleep(Duration::from_millis(100));
                killed.signal(libc::SIGKILL);
                Daemon::start_in(killed.wait().1, &served)
            }));
        });
    });
}

#[test]
fn a_host_that_is_gone_keeps_no_other_disk_from_being_served() {
    let Some((peer, served, configuration)) = other_host() else { return };
    let peer_folder = peer.end();
    let daemon = Daemon::start_in(folder(), &configuration);
    let mut other = Nbd::connect(&daemon.path("nbd.sock"), "b");
    assert_eq!(other.fill_block(1, 5), Some(0));
    let error = daemon.client().disk("a").unwrap_err().to_string();
    assert!(error.contains("No such file") || error.contains("Connection refused"), "{error}");
    let peer = Daemon::start_in(peer_folder, &served);
    wait_until_served(&daemon);
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    assert!(change(&daemon, OffloadAction::Start));
    assert_eq!(nbd.fill_block(1, 6), Some(0));
    // The host goes away and comes back, with the same content. Requests wait.
    peer.signal(libc::SIGKILL);
    let peer_folder = peer.wait().1;
    daemon.until("the problem", || {
        format!("{:?}", daemon.client().disk("a")).contains("does not carry out requests")
    });
    assert_eq!((other.fill_block(2, 8), other.read_block(1)), (Some(0), 5));
    let peer = Daemon::start_in(peer_folder, &served);
    assert_eq!((nbd.read_block(1), nbd.fill_block(3, 7), home(&daemon, 3)), (6, Some(0), 0));
    let is_well = || !format!("{:?}", daemon.client().disk("a")).contains("does not carry out");
    daemon.until("the end of the problem", is_well);
    daemon.end();
    drop(peer);
}
