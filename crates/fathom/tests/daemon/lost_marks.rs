//! Images that have lost their mark, for example because they are copies without attributes, and
//! whose last changes are in a log that their definition does not have: the disk is refused with
//! that log, so that the operator decides.

use std::path::Path;

use fathom_control::{DiskChange, LayerDefinition};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::live::records;
use crate::nbd::Nbd;
use crate::process::{Daemon, command, image};

const PLAIN: &str =
    "[[disk]]\nname = \"a\"\nimage = \"a.img\"\n[[nbd]]\naddress = \"unix:nbd.sock\"\n";

/// The same disk with the log `logs`.
const LOGGED: &str = "[[disk]]\nname = \"a\"\nimage = \"a.img\"\n\
                      layers = [{ kind = \"wal\", log = \"logs\", size = \"1M\", age = \"1h\" }]\n\
                      [[nbd]]\naddress = \"unix:nbd.sock\"\n";

fn new_folder() -> TempDir {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    image(folder.path(), "a.img", 4 << 20);
    folder
}

fn connect(daemon: &Daemon) -> Nbd {
    Nbd::connect(&daemon.path("nbd.sock"), "a")
}

/// Writes block 3, which stays in the log, kills the daemon, and puts a copy without attributes in
/// the place of the image.
fn write_and_lose_mark(daemon: Daemon) -> TempDir {
    assert_eq!(connect(&daemon).fill_block(3, 7), Some(0));
    daemon.signal(libc::SIGKILL);
    let folder = daemon.wait().1;
    let path = folder.path().join("a.img");
    let content = std::fs::read(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, content).unwrap();
    folder
}

fn crc32c(bytes: &[u8]) -> u32 {
    let step = |crc: u32| if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
    !bytes.iter().fold(!0, |crc: u32, byte| (0..8).fold(crc ^ u32::from(*byte), |crc, _| step(crc)))
}

/// Edits the record of the change of the disk.
pub fn edit_record(folder: &Path, edit: impl FnOnce(&mut Value)) {
    let path = records(folder).join("a.change");
    let text = std::fs::read_to_string(&path).unwrap();
    let (first, body) = text.split_once('\n').unwrap();
    assert_eq!(first, format!("fathom 1 {:08x}", crc32c(body.as_bytes())));
    let mut record = serde_json::from_str(body).unwrap();
    edit(&mut record);
    let body = serde_json::to_string(&record).unwrap();
    std::fs::write(&path, format!("fathom 1 {:08x}\n{body}", crc32c(body.as_bytes()))).unwrap();
}

/// Requires that the disk is refused, decides, and returns what block 3 has then.
fn decided(folder: TempDir, configuration: &str, decision: &str) -> u8 {
    let daemon = Daemon::start_in(folder, configuration);
    let list = daemon.client().disks().unwrap();
    assert_eq!(list.unserved.len(), 1, "the disk is served without its log:\n{}", daemon.log());
    let unserved = &list.unserved[0];
    for part in ["`fathom log keep a`", "`fathom log discard a`"] {
        assert!(unserved.remedy.contains(part), "{} → {}", unserved.message, unserved.remedy);
    }
    let mut command = command(&daemon.path(""));
    command.args(["log", decision, "a", "--config", "f.toml", "--control", "control.sock"]);
    let output = command.output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    assert!(output.status.success() && text.contains("\"a\" is served"), "{text}");
    let content = connect(&daemon).read_block(3);
    let folder = daemon.end();
    // Whatever was decided is so without the log, too.
    let daemon = Daemon::start_in(folder, PLAIN);
    assert_eq!(connect(&daemon).read_block(3), content);
    daemon.end();
    content
}

/// A disk that was getting a log when the daemon was killed.
fn with_pending_log() -> TempDir {
    let daemon = Daemon::start_in(new_folder(), PLAIN);
    let log = daemon.path("logs").display().to_string();
    let layer = LayerDefinition::new("wal", json!({ "log": log, "size": "1M", "age": "1h" }));
    let change = DiskChange { set_layer: Some(layer), ..DiskChange::default() };
    daemon.client().change_disk("a", &change).unwrap();
    let folder = write_and_lose_mark(daemon);
    edit_record(folder.path(), |record| {
        record["state"] = json!("pending");
        record["before"] = record["entry"].clone();
    });
    folder
}

#[test]
fn a_log_that_was_being_added_is_not_forgotten() {
    assert_eq!(decided(with_pending_log(), PLAIN, "keep"), 7);
    assert_eq!(decided(with_pending_log(), PLAIN, "discard"), 0);
}

#[test]
fn a_log_that_was_being_removed_is_not_forgotten() {
    let folder = with_pending_log();
    edit_record(folder.path(), |record| {
        let log = record["after"].take();
        record["after"] = record["before"].take();
        record["before"] = log;
    });
    assert_eq!(decided(folder, PLAIN, "keep"), 7);
}

#[test]
fn a_log_of_a_disk_that_was_being_removed_is_not_forgotten() {
    let folder = with_pending_log();
    edit_record(folder.path(), |record| {
        let record = record.as_object_mut().unwrap();
        let log = record.remove("after").unwrap();
        record.insert("before".into(), log);
    });
    assert_eq!(decided(folder, PLAIN, "keep"), 7);
}

/// The file was edited while the daemon was dead. The log that the image needs is known from its
/// last opening.
#[test]
fn a_log_that_the_file_does_not_have_any_more_is_not_forgotten() {
    let folder = write_and_lose_mark(Daemon::start_in(new_folder(), LOGGED));
    assert_eq!(decided(folder, PLAIN, "keep"), 7);
    let folder = write_and_lose_mark(Daemon::start_in(new_folder(), LOGGED));
    assert_eq!(decided(folder, PLAIN, "discard"), 0);
    // A log without changes is not asked again, whatever becomes of it.
    let daemon = Daemon::start_in(new_folder(), LOGGED);
    assert_eq!(connect(&daemon).fill_block(3, 7), Some(0));
    let backup = std::fs::read(daemon.path("logs")).unwrap();
    let daemon = Daemon::start_in(daemon.end(), PLAIN);
    assert!(!records(&daemon.path("")).join("a.log").exists());
    let folder = daemon.end();
    std::fs::write(folder.path().join("logs"), backup).unwrap();
    let daemon = Daemon::start_in(folder, PLAIN);
    assert_eq!(connect(&daemon).read_block(3), 7);
    daemon.end();
}
