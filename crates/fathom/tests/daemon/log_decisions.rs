//! Refused logs are kept or discarded by the running daemon, which serves its other disks
//! meanwhile.

use std::path::Path;
use std::time::Duration;

use fathom_control::{DiskChange, LogAnswer};
use tempfile::TempDir;

use crate::cache::succeeds;
use crate::nbd::Nbd;
use crate::process::{Daemon, command, image};

/// The time after which the blocks and the state of a quiet disk are durable in its cache.
const NOTED: Duration = Duration::from_millis(3500);

/// Two disks with their logs in one volume.
const PAIR: &str = "[[disk]]\nname = \"a\"\nimage = \"a.img\"\n\
                    layers = [{ kind = \"wal\", log = \"logs\", size = \"1M\", age = \"60s\" }]\n\
                    [[disk]]\nname = \"b\"\nimage = \"b.img\"\n\
                    layers = [{ kind = \"wal\", log = \"logs\", offset = \"1M\", size = \"1M\", age = \"60s\" }]\n\
                    [[nbd]]\naddress = \"unix:nbd.sock\"\n";

/// A disk whose cache holds what its log has.
const CACHED: &str = "[[disk]]\nname = \"a\"\nimage = \"a.img\"\nlayers = [\
                      { kind = \"cache\", store = \"cache\", mode = \"write-through\" }, \
                      { kind = \"wal\", log = \"logs\", size = \"1M\", age = \"600s\" }]\n\
                      [[nbd]]\naddress = \"unix:nbd.sock\"\n";

fn kill(daemon: Daemon) -> TempDir {
    daemon.signal(libc::SIGKILL);
    daemon.wait().1
}

/// Replaces an image with a copy that has no mark.
fn copy_without_mark(folder: &Path, name: &str) {
    let path = folder.join(name);
    let content = std::fs::read(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, content).unwrap();
}

/// Runs `fathom log` for a disk of the daemon. Returns whether it succeeded, and its output.
fn log(daemon: &Daemon, arguments: &[&str]) -> (bool, String) {
    let mut command = command(&daemon.path(""));
    command.arg("log").args(arguments).args(["--config", "f.toml", "--control", "control.sock"]);
    let output = command.output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&text).into_owned())
}

/// A daemon that refuses the log of `a`, which has changes, and serves `b` with a log in the same
/// volume.
fn refusing() -> Daemon {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    for name in ["a.img", "b.img"] {
        image(folder.path(), name, 8 << 20);
    }
    let daemon = Daemon::start_in(folder, PAIR);
    for (disk, content) in [("a", 1), ("b", 2)] {
        let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), disk);
        assert_eq!(nbd.fill_block(3, content), Some(0));
    }
    let folder = kill(daemon);
    copy_without_mark(folder.path(), "a.img");
    let daemon = Daemon::start_in(folder, PAIR);
    let list = daemon.client().disks().unwrap();
    assert_eq!(list.unserved.len(), 1, "{}", daemon.log());
    assert!(list.unserved[0].remedy.contains("`fathom log keep a`"), "{:?}", list.unserved);
    daemon
}

#[test]
fn a_refused_log_is_kept_while_another_disk_of_its_volume_is_served() {
    let daemon = refusing();
    let mut other = Nbd::connect(&daemon.path("nbd.sock"), "b");
    assert_eq!(other.fill_block(4, 5), Some(0));
    let (succeeded, text) = log(&daemon, &["keep", "a", "--json"]);
    assert!(succeeded, "{text}");
    let answer: LogAnswer = serde_json::from_str(&text).unwrap();
    assert!(answer.served && answer.found && answer.records == 1, "{text}");
    assert!(answer.bytes > 4096 && answer.first_unix_time_ns > 0, "{text}");
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    assert_eq!([3, 4].map(|block| nbd.read_block(block)), [1, 0]);
    assert_eq!(other.fill_block(5, 6), Some(0));
    assert_eq!([3, 4, 5].map(|block| other.read_block(block)), [2, 5, 6]);
    // Both are served: there is nothing to decide.
    for disk in ["a", "b"] {
        let (succeeded, text) = log(&daemon, &["discard", disk]);
        assert!(!succeeded && text.contains("is served"), "{text}");
    }
    let (succeeded, text) = log(&daemon, &["discard", "c"]);
    assert!(!succeeded && text.contains("has no disk \"c\""), "{text}");
    drop((nbd, other));
    // The pair fits from now on, and the other log was left alone.
    let daemon = Daemon::start_in(kill(daemon), PAIR);
    for (disk, contents) in [("a", [1, 0, 0]), ("b", [2, 5, 6])] {
        let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), disk);
        assert_eq!([3, 4, 5].map(|block| nbd.read_block(block)), contents, "{disk}");
    }
    daemon.end();
}

#[test]
fn a_refused_log_is_discarded_while_another_disk_of_its_volume_is_served() {
    let daemon = refusing();
    let mut other = Nbd::connect(&daemon.path("nbd.sock"), "b");
    // A daemon with another disk of this name is not asked.
    let elsewhere = daemon.path("elsewhere.toml");
    std::fs::write(&elsewhere, PAIR.replace("a.img", "other.img")).unwrap();
    let mut command = command(&daemon.path(""));
    command.args(["log", "discard", "a", "--config", "elsewhere.toml"]);
    let output = command.args(["--control", "control.sock"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && text.contains("other.img"), "{text}");
    assert_eq!(daemon.client().disks().unwrap().unserved.len(), 1);

    let (succeeded, text) = log(&daemon, &["discard", "a"]);
    assert!(succeeded && text.starts_with("discarded: 1 record of changes"), "{text}");
    assert!(text.contains("\"a\" is served"), "{text}");
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    assert_eq!(nbd.read_block(3), 0);
    assert_eq!(nbd.fill_block(3, 9), Some(0));
    assert_eq!(other.read_block(3), 2);
    drop((nbd, other));
    let daemon = Daemon::start_in(kill(daemon), PAIR);
    assert_eq!(Nbd::connect(&daemon.path("nbd.sock"), "a").read_block(3), 9);
    assert_eq!(Nbd::connect(&daemon.path("nbd.sock"), "b").read_block(3), 2);
    daemon.end();
}

/// A decision that fails changes nothing, and the reason is told. The next one succeeds.
#[test]
fn a_decision_about_a_log_that_cannot_be_opened_is_refused() {
    let folder = kill(refusing());
    std::fs::rename(folder.path().join("a.img"), folder.path().join("away.img")).unwrap();
    let daemon = Daemon::start_in(folder, PAIR);
    let (succeeded, text) = log(&daemon, &["keep", "a"]);
    assert!(!succeeded && text.contains("a.img"), "{text}");
    std::fs::rename(daemon.path("away.img"), daemon.path("a.img")).unwrap();
    let (succeeded, text) = log(&daemon, &["keep", "a"]);
    assert!(succeeded && text.starts_with("kept: 1 record of changes"), "{text}");
    assert_eq!(Nbd::connect(&daemon.path("nbd.sock"), "a").read_block(3), 1);
    daemon.end();
}

/// The store of a cache has lost writes, and the image is a copy without its mark: whoever discards
/// the log has given up what it has lost, too; whoever keeps it has not.
#[test]
fn a_log_in_a_cache_that_has_lost_writes_is_kept_or_discarded() {
    let configuration = "[[disk]]\nname = \"a\"\nimage = \"a.img\"\nlayers = [{ kind = \"cache\", store = \"cache\", \
                         mode = \"write-back\", age = \"600s\" }]\n[[nbd]]\naddress = \"unix:nbd.sock\"\n";
    for decision in ["discard", "keep"] {
        let folder = tempfile::tempdir_in("/var/tmp").unwrap();
        image(folder.path(), "a.img", 8 << 20);
        succeeds(
            folder.path(),
            &["create", "cache", "--size", "12M", "--log", "2M", "--logs", "2"],
        );
        let daemon = Daemon::start_in(folder, configuration);
        assert_eq!(Nbd::connect(&daemon.path("nbd.sock"), "a").fill_block(3, 1), Some(0));
        let folder = kill(daemon);
        copy_without_mark(folder.path(), "a.img");
        let flags = rustix::fs::XattrFlags::empty();
        let store = folder.path().join("cache");
        rustix::fs::setxattr(&store, c"user.fathom.writes-lost", b"5 lost", flags).unwrap();
        let daemon = Daemon::start_in(folder, configuration);
        assert_eq!(daemon.client().disks().unwrap().unserved.len(), 1, "{}", daemon.log());
        let (succeeded, text) = log(&daemon, &[decision, "a"]);
        assert!(succeeded && text.contains("\"a\" is served"), "{text}\n{}", daemon.log());
        let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
        let is_kept = decision == "keep";
        assert_eq!(nbd.read_block(3), u8::from(is_kept));
        if is_kept {
            assert_ne!(nbd.fill_block(3, 9), Some(0));
            daemon.client().recover_disk("a").unwrap();
        }
        assert_eq!(nbd.fill_block(3, 9), Some(0));
        drop(nbd);
        let daemon = Daemon::start_in(kill(daemon), configuration);
        let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
        assert_eq!((nbd.read_block(3), nbd.fill_block(4, 9)), (9, Some(0)), "{decision}");
        drop(nbd);
        daemon.end();
    }
}

/// The cache of a disk keeps nothing of what its log has lost.
#[test]
fn a_cache_does_not_return_what_a_discarded_log_had() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    image(folder.path(), "a.img", 8 << 20);
    succeeds(folder.path(), &["create", "cache", "--size", "12M"]);
    let cache = "{ kind = \"cache\", store = \"cache\", mode = \"write-through\" }";
    let without = CACHED.replace(&format!("{cache}, "), "");
    let daemon = Daemon::start_in(folder, &without);
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    for block in [3, 100] {
        assert_eq!(nbd.fill_block(block, 1), Some(0));
    }
    // What is read from the log goes into the cache.
    let store = daemon.path("cache").display().to_string();
    let layer = serde_json::json!({ "kind": "cache", "store": store, "mode": "write-through" });
    let layer = Some(serde_json::from_value(layer).unwrap());
    let change = DiskChange { set_layer: layer, temporary: true, ..DiskChange::default() };
    daemon.client().change_disk("a", &change).unwrap();
    daemon.until("the cache has the block", || {
        assert_eq!(nbd.read_block(3), 1);
        daemon.client().disk("a").unwrap().figure("cache", "blocks").unwrap() > 0
    });
    drop(nbd);
    std::thread::sleep(NOTED);
    let folder = kill(daemon);
    // The first record is damaged: it was durable before the second one was written.
    let path = folder.path().join("logs");
    let mut content = std::fs::read(&path).unwrap();
    content[8192 + 40] ^= 1;
    std::fs::write(&path, content).unwrap();
    let daemon = Daemon::start_in(folder, CACHED);
    assert_eq!(daemon.client().disks().unwrap().unserved.len(), 1);
    let (succeeded, text) = log(&daemon, &["discard", "a"]);
    assert!(succeeded && text.contains("\"a\" is served"), "{text}");
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    // A cache is used once its tables have been loaded.
    for _ in 0..100 {
        assert_eq!(nbd.read_block(3), 0);
        std::thread::sleep(Duration::from_millis(10));
    }
    drop(nbd);
    daemon.end();
}
