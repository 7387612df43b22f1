//! Logs whose disks nobody uses: what they have comes home by their rules, and no sooner.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use fathom_control::{DiskChange, OffloadAction, OffloadRequest};
use tempfile::TempDir;

use crate::cache::succeeds;
use crate::nbd::Nbd;
use crate::process::Daemon;

const SIZE: u64 = 8 << 20;
const BLOCK: u64 = 4096;
/// The age of logs that must not come home in a test.
const LONG: &str = "3h";

/// The configuration of a disk with a log of the kind `kind`.
fn configuration(kind: &str, age: &str) -> String {
    let layer = match kind {
        "cache" => format!(
            "{{ kind = \"cache\", store = \"cache\", exclusive = true, mode = \"write-back\", age = \"{age}\" }}"
        ),
        _ => {
            format!("{{ kind = \"{kind}\", log = \"elsewhere\", size = \"1M\", age = \"{age}\" }}")
        }
    };
    format!(
        "[[disk]]\nname = \"a\"\nimage = \"a.img\"\nlayers = [{layer}]\n\
         [[nbd]]\naddress = \"unix:nbd.sock\"\n"
    )
}

/// A folder with an image and a cache that has a log. Its file system has extended attributes.
fn folder() -> TempDir {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    File::create(folder.path().join("a.img")).unwrap().set_len(SIZE).unwrap();
    succeeds(folder.path(), &["create", "cache", "--size", "8M", "--log", "2M", "--logs", "1"]);
    folder
}

/// The content of the first blocks of the image, whatever the daemon has elsewhere.
fn home(folder: &std::path::Path) -> [u8; 3] {
    let file = File::open(folder.join("a.img")).unwrap();
    [0, 1, 2].map(|block| {
        let mut bytes = [0; BLOCK as usize];
        file.read_exact_at(&mut bytes, block * BLOCK).unwrap();
        bytes[0]
    })
}

/// Whether the daemon has a thread with a queue that no client has.
fn is_attended(daemon: &Daemon) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", daemon.id())).unwrap();
    let mut names =
        tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.any(|name| name.trim() == "attend-a")
}

fn carry(daemon: &Daemon, action: OffloadAction) {
    let request = OffloadRequest { action, dry_run: false };
    daemon.client().change_offload("a", request).unwrap();
}

/// A client writes and goes away.
fn visit(daemon: &Daemon, content: u8) {
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    for block in 0..3 {
        assert_eq!(nbd.fill_block(block, content), Some(0));
    }
}

#[test]
fn a_log_comes_home_after_the_last_client_has_gone() {
    for kind in ["wal", "cache"] {
        let daemon = Daemon::start_in(folder(), &configuration(kind, "1s"));
        for content in 1..3 {
            visit(&daemon, content);
            daemon.until(kind, || home(&daemon.path("")) == [content; 3]);
            daemon.until("its thread ends", || !is_attended(&daemon));
        }
    }
}

#[test]
fn what_was_carried_comes_home_after_the_last_client_has_gone() {
    let daemon = Daemon::start_in(folder(), &configuration("offload", LONG));
    for content in 1..3 {
        carry(&daemon, OffloadAction::Start);
        visit(&daemon, content);
        // It stays where it is as long as the disk is carried.
        daemon.until("a thread for it", || is_attended(&daemon));
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(home(&daemon.path("")), [content - 1; 3]);
        carry(&daemon, OffloadAction::Stop);
        daemon.until("offload", || home(&daemon.path("")) == [content; 3]);
        daemon.until("its thread ends", || !is_attended(&daemon));
    }
}

#[test]
fn a_log_that_a_start_finds_comes_home_without_a_client() {
    for kind in ["wal", "cache", "offload"] {
        let daemon = Daemon::start_in(folder(), &configuration(kind, LONG));
        if kind == "offload" {
            carry(&daemon, OffloadAction::Start);
        }
        visit(&daemon, 5);
        assert_eq!(home(&daemon.path("")), [0; 3], "{kind}");
        daemon.signal(libc::SIGKILL);
        let folder = daemon.wait().1;
        let daemon = Daemon::start_in(folder, &configuration(kind, "1s"));
        daemon.until(kind, || home(&daemon.path("")) == [5; 3]);
    }
}

/// While a log is attended, its disk is used and left again, its layers change, and it is removed.
#[test]
fn an_attended_log_hinders_nothing() {
    for kind in ["wal", "cache"] {
        let daemon = Daemon::start_in(folder(), &configuration(kind, LONG));
        for content in 1..6 {
            visit(&daemon, content);
            daemon.until("a thread for it", || is_attended(&daemon));
            let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
            assert_eq!(nbd.read_block(2), content);
        }
        assert_eq!(home(&daemon.path("")), [0; 3], "{kind}");
        // Without its log.
        let change =
            DiskChange { layers: Some(Vec::new()), temporary: true, ..DiskChange::default() };
        daemon.client().change_disk("a", &change).unwrap();
        assert_eq!(home(&daemon.path("")), [5; 3], "{kind}");
        daemon.until("its thread ends", || !is_attended(&daemon));
        let folder = daemon.end();
        // A removal and a stop of the daemon write it back, too.
        let daemon = Daemon::start_in(folder, &configuration(kind, LONG));
        visit(&daemon, 7);
        daemon.until("a thread for it", || is_attended(&daemon));
        daemon.client().remove_disk_for_now("a", false).unwrap();
        assert_eq!(home(&daemon.path("")), [7; 3], "{kind}");
        assert!(!is_attended(&daemon));
        let folder = daemon.end();
        let daemon = Daemon::start_in(folder, &configuration(kind, LONG));
        visit(&daemon, 8);
        daemon.until("a thread for it", || is_attended(&daemon));
        let folder = daemon.end();
        assert_eq!(home(folder.path()), [8; 3], "{kind}");
    }
}

/// The store beneath a disk that nobody uses does not answer while its log is written back: another
/// disk, the control interface and the end of the daemon do not wait for it, and the changes are in
/// the log afterwards.
#[test]
fn a_home_that_does_not_answer_without_a_client_harms_nobody() {
    let folder = folder();
    File::create(folder.path().join("b.img")).unwrap().set_len(SIZE).unwrap();
    let text = "[daemon]\nshutdown_time_max = \"3s\"\n".to_owned()
        + &configuration("wal", "300ms")
        + "[[disk]]\nname = \"b\"\nimage = \"b.img\"\n";
    let hung = ", { kind = \"delay\", time = \"1h\", operations = [\"write\"] }]\n";
    let daemon =
        Daemon::start_in(folder, &text.replacen("]\n[[nbd]]", &(hung.to_owned() + "[[nbd]]"), 1));
    visit(&daemon, 3);
    daemon.until("a thread for it", || is_attended(&daemon));
    // Write-back begins within the age.
    std::thread::sleep(Duration::from_secs(1));
    assert_eq!(home(&daemon.path("")), [0; 3]);
    let begun = Instant::now();
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "b");
    for block in 0..100 {
        assert_eq!(nbd.fill_block(block, 1), Some(0));
    }
    assert_eq!(daemon.client().disks().unwrap().disks.len(), 2);
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
    drop(nbd);
    let begun = Instant::now();
    daemon.signal(libc::SIGTERM);
    let (_, folder) = daemon.wait();
    assert!(begun.elapsed() < Duration::from_secs(40), "{:?}", begun.elapsed());
    let daemon = Daemon::start_in(folder, &text);
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    assert_eq!([0, 1, 2].map(|block| nbd.read_block(block)), [3; 3]);
    drop(nbd);
    daemon.end();
}
