//! Logs over images that QEMU serves: what was acknowledged is there after any kill.

use std::path::Path;
use std::process::Command;

use fathom_control::{DiskChange, LayerDefinition, ProblemKind};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::exports::{Content, connect, flush, problems, wait_until_served};
use crate::images::{check, compare, create, kill_storage_daemon, storage_daemons};
use crate::process::Daemon;

const WAL: &str = "{ kind = \"wal\", log = \"a.log\", size = \"4M\", age = \"20ms\" }";

fn configuration(layer: &str) -> String {
    format!(
        "[[disk]]\nname = \"a\"\nimage = \"a.qcow2\"\nformat = \"qcow2\"\nlayers = [{layer}]\n\
         [[disk]]\nname = \"b\"\nmemory = \"8M\"\n[[nbd]]\naddress = \"unix:nbd.sock\"\n"
    )
}

fn killed(daemon: Daemon) -> TempDir {
    daemon.signal(libc::SIGKILL);
    daemon.wait().1
}

/// Kills the storage daemon and the daemon, so that neither sees the end of the other.
fn both_killed(daemon: Daemon) -> TempDir {
    daemon.signal(libc::SIGSTOP);
    for id in storage_daemons(&daemon) {
        kill_process(Pid::from_raw(id).unwrap(), Signal::KILL).unwrap();
    }
    killed(daemon)
}

#[test]
fn a_log_over_an_image_keeps_what_was_acknowledged_after_every_kill() {
    let mut folder = tempfile::tempdir().unwrap();
    if create(folder.path(), "a.qcow2", "qcow2", &[]).is_none() {
        return;
    }
    let offload = "{ kind = \"offload\", log = \"a.log\", size = \"4M\" }";
    for (layer, is_whole) in [(WAL, true), (offload, false)] {
        let text = configuration(layer);
        let (mut content, mut chance) = (Content::new(), fastrand::Rng::with_seed(47));
        std::fs::remove_file(folder.path().join("a.qcow2")).unwrap();
        create(folder.path(), "a.qcow2", "qcow2", &[]).unwrap();
        for round in 0..8 {
            let daemon = Daemon::start_in(folder, &text);
            wait_until_served(&daemon);
            assert!(problems(&daemon).is_empty(), "{:?}", problems(&daemon));
            let mut nbd = connect(&daemon, "a");
            content.verify(|offset, bytes| {
                bytes.copy_from_slice(&nbd.read(offset, bytes.len() as u32));
            });
            let count = content.send(&mut nbd, &mut chance);
            if round % 4 == 1 {
                kill_storage_daemon(&daemon);
            }
            Content::finish(&mut nbd, count);
            // `offload` acknowledges what only the storage daemon has.
            if !is_whole {
                assert_eq!(flush(&mut nbd), 0);
            }
            drop(nbd);
            folder = match round % 4 {
                0 => daemon.end(),
                1 | 2 => killed(daemon),
                _ => both_killed(daemon),
            };
        }
        let daemon = Daemon::start_in(folder, &text);
        wait_until_served(&daemon);
        assert!(problems(&daemon).is_empty(), "{:?}", problems(&daemon));
        // The log is written home when its layer goes.
        let change = DiskChange { layers: Some(Vec::new()), ..DiskChange::default() };
        daemon.client().change_disk("a", &change).unwrap();
        folder = daemon.end();
        check(folder.path(), "a.qcow2");
        compare(folder.path(), "a.qcow2", &content);
        std::fs::remove_file(folder.path().join("a.log")).unwrap();
    }
}

/// Without the log, what is not flushed is lost with the storage daemon again.
#[test]
fn a_log_that_has_gone_covers_nothing() {
    let folder = tempfile::tempdir().unwrap();
    if create(folder.path(), "a.qcow2", "qcow2", &[]).is_none() {
        return;
    }
    let text = configuration("");
    let daemon = Daemon::start_in(folder, &text);
    wait_until_served(&daemon);
    let mut nbd = connect(&daemon, "a");
    assert_eq!(nbd.fill_block(1, 1), Some(0));
    let change = |layers: &[&str]| {
        let layers = layers.iter().map(|it| LayerDefinition::from_flag(it).unwrap());
        let change = DiskChange { layers: Some(layers.collect()), ..DiskChange::default() };
        daemon.client().change_disk("a", &change).unwrap();
    };
    let log = daemon.path("a.log");
    change(&[&format!("wal,log={},size=4M,age=20ms", log.display())]);
    assert_eq!((nbd.fill_block(2, 1), flush(&mut nbd)), (Some(0), 0));
    change(&[]);
    assert_eq!(nbd.fill_block(3, 1), Some(0));
    drop(nbd);
    let daemon = Daemon::start_in(both_killed(daemon), &text);
    wait_until_served(&daemon);
    let lost = |problem: &fathom_control::Problem| problem.kind == ProblemKind::WritesLost;
    assert!(problems(&daemon).iter().any(lost), "{}", daemon.log());
    let mut nbd = connect(&daemon, "a");
    assert_eq!((nbd.read_block(1), nbd.read_block(2)), (1, 1));
}

/// An older copy of the image does not fit its log, with its mark or without.
#[test]
fn an_image_that_was_rolled_back_is_refused() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    if create(folder.path(), "a.qcow2", "qcow2", &[]).is_none() {
        return;
    }
    let text = configuration(WAL);
    let write = |folder: TempDir, byte: u8| {
        let daemon = Daemon::start_in(folder, &text);
        wait_until_served(&daemon);
        let mut nbd = connect(&daemon, "a");
        assert_eq!((nbd.fill_block(1, byte), flush(&mut nbd)), (Some(0), 0));
        drop(nbd);
        both_killed(daemon)
    };
    let copy = |folder: &Path, words: &[&str]| {
        assert!(Command::new("cp").args(words).current_dir(folder).status().unwrap().success());
    };
    let folder = write(folder, 1);
    copy(folder.path(), &["-a", "a.qcow2", "old.qcow2"]);
    let mut folder = write(folder, 2);
    for words in [["-a", "old.qcow2", "a.qcow2"], ["--no-preserve=all", "old.qcow2", "a.qcow2"]] {
        std::fs::rename(folder.path().join("a.qcow2"), folder.path().join("now.qcow2")).unwrap();
        copy(folder.path(), &words);
        let daemon = Daemon::start_in(folder, &text);
        daemon.until("the refusal", || {
            let unserved = daemon.client().disks().unwrap().unserved;
            unserved.iter().any(|disk| disk.message.contains("log"))
        });
        folder = killed(daemon);
        std::fs::rename(folder.path().join("now.qcow2"), folder.path().join("a.qcow2")).unwrap();
    }
    let daemon = Daemon::start_in(folder, &text);
    wait_until_served(&daemon);
    assert_eq!(connect(&daemon, "a").read_block(1), 2);
}
