//! Changes in use outlive the daemon, and the file wins when it is edited or reloaded.

use std::path::{Path, PathBuf};

use fathom_control::{
    Bytes, ClientError, DeviationKind, DiskChange, DiskDefinition, ErrorBody, LayerDefinition,
    RevertRequest,
};
use serde_json::{Value, json};

use crate::lost_marks::edit_record;
use crate::nbd::Nbd;
use crate::process::{Daemon, command, image};

const LISTENER: &str = "[[nbd]]\naddress = \"unix:nbd.sock\"\n";

/// Kills the daemon at once, and starts it again with `configuration`.
fn killed(daemon: Daemon, configuration: &str) -> Daemon {
    daemon.signal(libc::SIGKILL);
    let (_, folder) = daemon.wait();
    Daemon::start_in(folder, configuration)
}

fn layer(kind: &str, options: Value) -> DiskChange {
    let layer = LayerDefinition::new(kind, options);
    DiskChange { set_layer: Some(layer), ..DiskChange::default() }
}

fn without(kind: &str) -> DiskChange {
    DiskChange { remove_layer: Some(kind.into()), ..DiskChange::default() }
}

fn memory(name: &str, size: u64) -> DiskDefinition {
    DiskDefinition { name: name.into(), memory: Some(Bytes(size)), ..DiskDefinition::default() }
}

fn layers(daemon: &Daemon, disk: &str) -> Vec<String> {
    let layers = daemon.client().disk(disk).unwrap().layers;
    layers.into_iter().map(|layer| layer.name).collect()
}

fn names(daemon: &Daemon) -> Vec<String> {
    daemon.client().disks().unwrap().disks.into_iter().map(|disk| disk.name).collect()
}

fn connect(daemon: &Daemon, disk: &str) -> Nbd {
    Nbd::connect(&daemon.path("nbd.sock"), disk)
}

fn refused<T: std::fmt::Debug>(result: Result<T, ClientError>) -> ErrorBody {
    match result {
        Err(ClientError::Refused(body)) => body,
        other => panic!("expected a refusal: {other:?}"),
    }
}

/// The folder of the records, below the folder of the control socket.
pub fn records(folder: &Path) -> PathBuf {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let is_of_records =
        |path: &PathBuf| path.file_name().unwrap().to_str().unwrap().starts_with("live-f.toml-");
    entries.into_iter().find(is_of_records).unwrap()
}

#[test]
fn disks_are_as_they_were_changed_after_a_kill() {
    let configuration = format!(
        "{LISTENER}[[disk]]\nname = \"a\"\nmemory = \"1M\"\n[[disk]]\nname = \"b\"\nmemory = \"1M\"\n\
         layers = [{{ kind = \"limit\", total_iops_sec = 500 }}]\n[[disk]]\nname = \"c\"\nmemory = \"1M\"\n"
    );
    let daemon = Daemon::start(&configuration);
    assert!(daemon.client().configuration().unwrap().disks.is_empty());
    // Each kind of change, killed at once after its acknowledgement.
    daemon.client().add_disk(&memory("x", 2 << 20)).unwrap();
    let daemon = killed(daemon, &configuration);
    assert_eq!(names(&daemon), ["a", "b", "c", "x"]);
    daemon.client().remove_disk("c", false).unwrap();
    let daemon = killed(daemon, &configuration);
    assert_eq!(names(&daemon), ["a", "b", "x"]);
    let delay = layer("delay", json!({ "time": "1us" }));
    daemon.client().change_disk("a", &delay).unwrap();
    let off = DiskChange { tap: Some(false), classify: Some(false), ..DiskChange::default() };
    daemon.client().change_disk("b", &off).unwrap();
    let daemon = killed(daemon, &configuration);
    assert_eq!(layers(&daemon, "a"), ["classify", "tap", "delay"]);
    assert_eq!(layers(&daemon, "b"), ["limit"]);
    let larger = DiskChange { capacity: Some(Bytes(4 << 20)), ..DiskChange::default() };
    daemon.client().change_disk("x", &larger).unwrap();
    daemon.client().change_disk("b", &without("limit")).unwrap();
    let daemon = killed(daemon, &configuration);
    assert_eq!(daemon.client().disk("x").unwrap().capacity_bytes, 4 << 20);
    assert!(layers(&daemon, "b").is_empty());
    connect(&daemon, "x").write((4 << 20) - 512, &[1; 512]);

    let report = daemon.client().configuration().unwrap();
    let found: Vec<_> =
        report.disks.iter().map(|it| (it.disk.as_str(), it.kind, it.lasting)).collect();
    assert_eq!(
        found,
        [
            ("a", DeviationKind::Changed, true),
            ("b", DeviationKind::Changed, true),
            ("c", DeviationKind::Removed, true),
            ("x", DeviationKind::Added, true),
        ]
    );
    let keys: Vec<&str> = report.disks[1].keys.iter().map(|it| it.key.as_str()).collect();
    assert_eq!(keys, ["classify", "layers", "tap"]);
    // What is undone in use needs no record.
    daemon.client().change_disk("a", &without("delay")).unwrap();
    daemon.client().remove_disk("x", false).unwrap();
    daemon.client().add_disk(&memory("c", 1 << 20)).unwrap();
    let folder = records(&daemon.path(""));
    let left = std::fs::read_dir(&folder).unwrap().count();
    assert_eq!(left, 3, "the lock, the identity and the record of b");
    let daemon = killed(daemon, &configuration);
    assert_eq!(names(&daemon), ["a", "b", "c"]);
    daemon.end();
}

#[test]
fn temporary_changes_end_with_the_daemon() {
    let configuration = format!("{LISTENER}[[disk]]\nname = \"a\"\nmemory = \"1M\"\n");
    let daemon = Daemon::start(&configuration);
    let run = |arguments: &[&str]| {
        let mut command = command(&daemon.path(""));
        command.env("FATHOM_CONTROL", daemon.path("control.sock"));
        let output = command.args(arguments).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    run(&["disk", "add", "x", "--memory", "1M", "--temporary"]);
    run(&["disk", "layer", "a", "delay,time=1us", "--temporary"]);
    let shown = run(&["config", "diff"]);
    assert!(shown.contains("added") && shown.contains("no") && !shown.contains("yes"), "{shown}");
    // A lasting change does not take a temporary one along.
    run(&["disk", "layer", "a", "limit,total_iops_sec=500"]);
    assert_eq!(layers(&daemon, "a"), ["classify", "tap", "delay", "limit"]);
    let daemon = killed(daemon, &configuration);
    assert_eq!((names(&daemon), layers(&daemon, "a").len()), (vec!["a".to_owned()], 3));
    let removal = daemon.client().remove_disk_for_now("a", false);
    removal.unwrap();
    assert!(names(&daemon).is_empty());
    let daemon = killed(daemon, &configuration);
    assert_eq!(layers(&daemon, "a"), ["classify", "tap", "limit"]);
    daemon.end();
}

/// What a file can say of a disk, `disk add` can.
#[test]
fn a_disk_that_is_added_has_layers_and_threads_also_after_a_kill() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    image(folder.path(), "a.img", 4 << 20);
    let daemon = Daemon::start_in(folder, LISTENER);
    let run = |daemon: &Daemon, arguments: &[&str]| {
        let mut command = command(&daemon.path(""));
        command.env("FATHOM_CONTROL", daemon.path("control.sock"));
        let output = command.args(arguments).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let added = format!(
        "disk add a --image a.img --socket a.sock --queues 3 --threads 2 --spin 0 --wait-when-full \
         --layer limit,total_iops_sec=5000 --layer wal,log={},size=1M,age=1h",
        daemon.path("logs").display()
    );
    run(&daemon, &added.split(' ').collect::<Vec<_>>());
    let check = |daemon: &Daemon| {
        assert_eq!(layers(daemon, "a"), ["classify", "tap", "limit", "wal", "wait-for-room"]);
        let saved = run(daemon, &["config", "save"]);
        for part in ["queues = 3", "threads = 2", "spin = ", "when_full = \"wait\""] {
            assert!(saved.contains(part), "{part} is missing:\n{saved}");
        }
    };
    check(&daemon);
    connect(&daemon, "a").write(0, &[1; 4096]);
    let daemon = killed(daemon, LISTENER);
    check(&daemon);
    assert_eq!(connect(&daemon, "a").read(0, 4096), [1; 4096]);
    daemon.end();
}

#[test]
fn a_log_that_was_changed_in_use_is_found_after_a_kill() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    image(folder.path(), "a.img", 4 << 20);
    let configuration = format!(
        "{LISTENER}[[disk]]\nname = \"a\"\nimage = \"a.img\"\n\
         layers = [{{ kind = \"wal\", log = \"logs\", size = \"1M\", age = \"1h\" }}]\n"
    );
    let daemon = Daemon::start_in(folder, &configuration);
    connect(&daemon, "a").write(0, &[1; 4096]);
    // Another size of the log.
    daemon.client().change_disk("a", &without("wal")).unwrap();
    let log = daemon.path("logs").display().to_string();
    let options = json!({ "log": log, "size": "2M", "age": "1h" });
    daemon.client().change_disk("a", &layer("wal", options)).unwrap();
    connect(&daemon, "a").write(4096, &[2; 4096]);
    let daemon = killed(daemon, &configuration);
    let mut nbd = connect(&daemon, "a");
    assert_eq!((nbd.read(0, 4096), nbd.read(4096, 4096)), (vec![1; 4096], vec![2; 4096]));
    nbd.write(8192, &[3; 4096]);
    drop(nbd);
    // The file is edited while the log has changes: it has no log any more. The log is written
    // home.
    let edited = format!("{LISTENER}[[disk]]\nname = \"a\"\nimage = \"a.img\"\n");
    let daemon = killed(daemon, &edited);
    let mut nbd = connect(&daemon, "a");
    assert_eq!(nbd.read(4096, 8192), [vec![2; 4096], vec![3; 4096]].concat());
    drop(nbd);
    daemon.until("the log to be home", || layers(&daemon, "a") == ["classify", "tap"]);
    let report = daemon.client().configuration().unwrap();
    assert_eq!((report.disks.len(), report.set_aside.len()), (0, 1));
    let daemon = killed(daemon, &edited);
    assert_eq!(connect(&daemon, "a").read(8192, 4096), [3; 4096]);
    let folder = daemon.end();
    let bytes = std::fs::read(folder.path().join("a.img")).unwrap();
    assert_eq!(bytes[..12288], [[1; 4096], [2; 4096], [3; 4096]].concat());
}

#[test]
fn the_size_of_a_log_may_be_edited_while_the_daemon_is_dead() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    image(folder.path(), "a.img", 4 << 20);
    let configuration = |size: &str| {
        format!(
            "{LISTENER}[[disk]]\nname = \"a\"\nimage = \"a.img\"\n\
             layers = [{{ kind = \"wal\", log = \"logs\", size = \"{size}\", age = \"1h\" }}]\n"
        )
    };
    let daemon = Daemon::start_in(folder, &configuration("1M"));
    connect(&daemon, "a").write(0, &[1; 4096]);
    let daemon = killed(daemon, &configuration("2M"));
    assert_eq!(connect(&daemon, "a").read(0, 4096), [1; 4096]);
    let size = || daemon.client().disk("a").unwrap().figure("wal", "size_bytes");
    daemon.until("the other log", || size().is_some_and(|size| size > 1 << 20));
    connect(&daemon, "a").write(4096, &[2; 4096]);
    let daemon = killed(daemon, &configuration("2M"));
    assert_eq!(connect(&daemon, "a").read(0, 8192), [[1; 4096], [2; 4096]].concat());
    daemon.end();
}

#[test]
fn a_switch_to_write_back_is_found_after_a_kill() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    image(folder.path(), "a.img", 4 << 20);
    let made = command(folder.path())
        .args(["cache", "create", "cache", "--size", "8M", "--log", "4M"])
        .output()
        .unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let configuration = format!(
        "{LISTENER}[[disk]]\nname = \"a\"\nimage = \"a.img\"\n\
         layers = [{{ kind = \"cache\", store = \"cache\" }}]\n"
    );
    let daemon = Daemon::start_in(folder, &configuration);
    let store = daemon.path("cache").display().to_string();
    let options = json!({ "store": store, "mode": "write-back", "age": "1h" });
    daemon.client().change_disk("a", &layer("cache", options)).unwrap();
    connect(&daemon, "a").write(0, &[5; 4096]);
    let daemon = killed(daemon, &configuration);
    assert_eq!(connect(&daemon, "a").read(0, 4096), [5; 4096]);
    assert_eq!(daemon.client().configuration().unwrap().disks.len(), 1);
    // Back to the file, with the changes of the log.
    let request = RevertRequest { disk: Some("a".into()), force: false };
    let report = daemon.client().revert(&request).unwrap();
    assert!(report.changed[0].contains("undone, the change of its `layers`"), "{report:?}");
    assert!(daemon.client().configuration().unwrap().disks.is_empty());
    let daemon = killed(daemon, &configuration);
    assert_eq!(connect(&daemon, "a").read(0, 4096), [5; 4096]);
    daemon.end();
}

#[test]
fn the_file_wins_when_it_is_reloaded_or_edited() {
    let configuration = format!(
        "{LISTENER}[[disk]]\nname = \"a\"\nmemory = \"1M\"\n[[disk]]\nname = \"b\"\nmemory = \"1M\"\n"
    );
    let daemon = Daemon::start(&configuration);
    let client = daemon.client();
    let delay = layer("delay", json!({ "time": "1us" }));
    client.change_disk("a", &delay).unwrap();
    client.remove_disk("b", false).unwrap();
    client.add_disk(&memory("x", 1 << 20)).unwrap();
    let report = client.reload().unwrap();
    let changed = report.changed.join("\n");
    for expected in [
        "the layers of the disk \"a\" were changed",
        "\"a\": undone, the change of its `layers`",
        "\"b\" was added",
        "\"b\": undone, its removal",
    ] {
        assert!(changed.contains(expected), "{expected}: {changed}");
    }
    assert!(!changed.contains("\"x\""), "{changed}");
    let report = client.configuration().unwrap();
    assert_eq!((report.disks.len(), report.set_aside.len()), (1, 2), "{report:?}");
    assert!(client.reload().unwrap().changed.is_empty());

    // The file gets what was changed in use.
    client.change_disk("a", &delay).unwrap();
    let saved = command(&daemon.path(""))
        .env("FATHOM_CONTROL", daemon.path("control.sock"))
        .args(["config", "save"])
        .output()
        .unwrap();
    let saved = String::from_utf8(saved.stdout).unwrap();
    let edited = format!("{LISTENER}{saved}[[disk]]\nname = \"b\"\nmemory = \"1M\"\n");
    std::fs::write(daemon.path("f.toml"), &edited).unwrap();
    let report = client.reload().unwrap();
    assert!(report.refused.is_empty() && report.changed.is_empty(), "{report:?}\n{saved}");
    assert!(client.configuration().unwrap().disks.is_empty());
    let daemon = killed(daemon, &edited);
    assert_eq!(names(&daemon), ["a", "b", "x"]);
    assert_eq!(layers(&daemon, "a"), ["classify", "tap", "delay"]);

    // An entry that was edited while the daemon was dead.
    daemon.client().change_disk("b", &delay).unwrap();
    let again = edited.replace("name = \"b\"", "name = \"b\"\nvm = \"web\"");
    let daemon = killed(daemon, &again);
    assert_eq!(layers(&daemon, "b"), ["classify", "tap"]);
    assert!(daemon.log().contains("set aside"), "{}", daemon.log());
    let aside = daemon.client().configuration().unwrap().set_aside;
    assert!(aside.iter().any(|it| it.disk == "b" && it.definition.is_some()), "{aside:?}");
    daemon.end();
}

#[test]
fn a_folder_that_cannot_be_written_allows_temporary_changes_only() {
    let configuration = format!("{LISTENER}[[disk]]\nname = \"a\"\nmemory = \"1M\"\n");
    let daemon = Daemon::start(&configuration);
    let client = daemon.client();
    let delay = layer("delay", json!({ "time": "1us" }));
    client.change_disk("a", &delay).unwrap();
    client.change_disk("a", &without("delay")).unwrap();
    let folder = records(&daemon.path(""));
    // Root can write into any folder, but not into one that is a file.
    let moved = daemon.path("moved");
    std::fs::rename(&folder, &moved).unwrap();
    std::fs::write(&folder, "").unwrap();
    let body = refused(client.change_disk("a", &delay));
    assert!(body.message.contains("would not outlive the daemon"), "{body:?}");
    assert!(body.remedy.contains("--temporary"), "{body:?}");
    assert_eq!(layers(&daemon, "a"), ["classify", "tap"]);
    assert!(client.add_disk(&memory("x", 1 << 20)).is_err());
    assert!(client.remove_disk("a", false).is_err());
    assert_eq!(names(&daemon), ["a"]);
    client.change_disk("a", &DiskChange { temporary: true, ..delay.clone() }).unwrap();
    assert_eq!(layers(&daemon, "a"), ["classify", "tap", "delay"]);
    std::fs::remove_file(&folder).unwrap();
    std::fs::rename(&moved, &folder).unwrap();
    client.add_disk(&memory("x", 1 << 20)).unwrap();
    daemon.end();
}

#[test]
fn a_damaged_record_keeps_one_disk_from_being_served() {
    let configuration = format!(
        "{LISTENER}[[disk]]\nname = \"a\"\nmemory = \"1M\"\n[[disk]]\nname = \"b\"\nmemory = \"1M\"\n"
    );
    let daemon = Daemon::start(&configuration);
    for disk in ["a", "b"] {
        daemon.client().change_disk(disk, &layer("delay", json!({ "time": "1us" }))).unwrap();
    }
    let record = records(&daemon.path("")).join("a.change");
    let text = std::fs::read_to_string(&record).unwrap();
    std::fs::write(&record, text.replace("fathom 1 ", "fathom 9 ")).unwrap();
    let daemon = killed(daemon, &configuration);
    let client = daemon.client();
    assert_eq!((names(&daemon), layers(&daemon, "b").len()), (vec!["b".to_owned()], 3));
    let reason = client.disk("a").unwrap_err().to_string();
    assert!(reason.contains("version 9") && reason.contains("a.change"), "{reason}");
    client.revert(&RevertRequest { disk: Some("a".into()), force: false }).unwrap();
    daemon.until("the disk to be served", || client.disk("a").is_ok());
    assert_eq!(layers(&daemon, "a"), ["classify", "tap"]);
    let daemon = killed(daemon, &configuration);
    assert_eq!(names(&daemon), ["a", "b"]);
    daemon.end();
}

/// A log is added and removed again and again, and the daemon is killed at any instant of that.
#[test]
fn a_kill_in_the_middle_of_a_change_leaves_one_of_two_states() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    image(folder.path(), "a.img", 4 << 20);
    let configuration = format!("{LISTENER}[[disk]]\nname = \"a\"\nimage = \"a.img\"\n");
    let mut daemon = Daemon::start_in(folder, &configuration);
    let logs = daemon.path("logs").display().to_string();
    let adds = layer("wal", json!({ "log": logs, "size": "1M", "age": "1h" }));
    let mut has_log = false;
    let mut written = 0_u64;
    for round in 0..8 {
        let mut nbd = connect(&daemon, "a");
        let (before, after) = std::thread::scope(|scope| {
            let (client, adds, first) = (daemon.client(), &adds, written);
            let changing = scope.spawn(move || {
                let (mut has_log, mut count) = (has_log, first);
                // An acknowledged write before each change.
                while nbd.fill_block(count, count as u8) == Some(0) {
                    count += 1;
                    let change = if has_log { without("wal") } else { adds.clone() };
                    if client.change_disk("a", &change).is_err() {
                        return (has_log, !has_log, count);
                    }
                    has_log = !has_log;
                }
                (has_log, has_log, count)
            });
            std::thread::sleep(std::time::Duration::from_millis(20 + round * 37));
            daemon.signal(libc::SIGKILL);
            let (before, after, count) = changing.join().unwrap();
            written = count;
            (before, after)
        });
        daemon = killed(daemon, &configuration);
        has_log = layers(&daemon, "a").contains(&"wal".to_owned());
        assert!(has_log == before || has_log == after, "round {round}: {before} {after} {has_log}");
        let mut nbd = connect(&daemon, "a");
        for block in 0..written {
            assert_eq!(nbd.read_block(block), block as u8, "round {round}, block {block}");
        }
    }
    assert!(written > 0, "no change was made");
    let folder = daemon.end();
    let bytes = std::fs::read(folder.path().join("a.img")).unwrap();
    for block in 0..written {
        assert_eq!(bytes[(block * 4096) as usize], block as u8, "block {block} of the image");
    }
}

/// A change that was in progress at a kill, and whose record cannot be completed at the next start,
/// is not part of the changes after it.
#[test]
fn a_change_that_did_not_take_effect_does_not_come_back_with_another() {
    let configuration = format!("{LISTENER}[[disk]]\nname = \"a\"\nmemory = \"1M\"\n");
    let daemon = Daemon::start(&configuration);
    let limit = layer("limit", json!({ "total_iops_sec": 500 }));
    daemon.client().change_disk("a", &limit).unwrap();
    daemon.signal(libc::SIGKILL);
    let (_, folder) = daemon.wait();
    edit_record(folder.path(), |record| {
        record["state"] = json!("pending");
        record["before"] = record["after"].clone();
        let layers = record["after"]["layers"].as_array_mut().unwrap();
        layers.push(json!({ "kind": "delay", "time": "1us" }));
    });
    // No record can be written.
    let draft = records(folder.path()).join("a.new");
    std::fs::create_dir(&draft).unwrap();
    let daemon = Daemon::start_in(folder, &configuration);
    assert_eq!(layers(&daemon, "a"), ["classify", "tap", "limit"]);
    let error = refused(daemon.client().change_disk("a", &without("limit")));
    assert!(error.message.contains("no record can be written"), "{error:?}");
    std::fs::remove_dir(&draft).unwrap();
    daemon.client().change_disk("a", &layer("limit", json!({ "total_iops_sec": 400 }))).unwrap();
    let daemon = killed(daemon, &configuration);
    assert_eq!(layers(&daemon, "a"), ["classify", "tap", "limit"]);
    daemon.end();
}
