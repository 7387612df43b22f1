//! The marks of block devices: every daemon finds them, and a device keeps its own when it gets
//! another number.

use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use fathom_control::{ClientError, DiskChange, DiskDefinition, LayerDefinition, ProblemKind};
use fathom_sim::{LoopDevice, run_command};
use serde_json::json;
use tempfile::TempDir;

use crate::cache::succeeds;
use crate::nbd::Nbd;
use crate::process::{Daemon, PATIENCE, command, image};

const SIZE: u64 = 16 << 20;
const LISTENER: &str = "[[nbd]]\naddress = \"unix:nbd.sock\"\n";

/// A folder on a disk: marks are not kept in memory.
fn folder() -> TempDir {
    tempfile::tempdir_in("/var/tmp").unwrap()
}

/// The marks of logs in the folder of all marks.
fn marks(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder.join("marks")).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    paths.filter(|path| path.extension().is_some_and(|end| end == "fathom-log")).collect()
}

fn plain(image: &Path) -> DiskDefinition {
    DiskDefinition { name: "d".into(), image: Some(image.to_owned()), ..DiskDefinition::default() }
}

fn logged(image: &Path, log: &Path) -> DiskDefinition {
    let options = json!({ "log": log, "size": "1M", "age": "1h" });
    DiskDefinition { layers: vec![LayerDefinition::new("wal", options)], ..plain(image) }
}

#[track_caller]
fn refused<T>(result: Result<T, ClientError>, text: &str) {
    let error = result.err().expect("it is refused");
    // The remedy is only in the second form.
    let error = format!("{error} {error:?}");
    assert!(error.contains(text), "{error}");
}

/// Writes a block that stays in the log, and kills the daemon.
fn write_and_kill(daemon: Daemon, definition: &DiskDefinition) -> TempDir {
    daemon.client().add_disk_for_now(definition).unwrap();
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "d");
    assert_eq!(nbd.fill_block(0, 0x11), Some(0));
    daemon.signal(libc::SIGKILL);
    daemon.wait().1
}

/// Attaches a file as the device at `path`, which may still be in use for a moment, also by another
/// test.
fn attach_at(path: &Path, file: &Path) -> LoopDevice {
    let begun = Instant::now();
    while run_command(Command::new("losetup").arg(path).arg(file)).is_err() {
        assert!(begun.elapsed() < PATIENCE, "{} stays in use", path.display());
        std::thread::sleep(Duration::from_millis(10));
    }
    LoopDevice(path.to_owned())
}

#[test]
fn a_device_keeps_its_mark_when_it_gets_another_number() {
    // A keepsake would keep the device, as nothing does when the host starts again.
    let listener = &format!("[daemon]\nkeepsakes = \"off\"\n{LISTENER}");
    let folder = folder();
    image(folder.path(), "back", SIZE);
    image(folder.path(), "other", SIZE);
    let Some(first) = LoopDevice::attach(&folder.path().join("back")) else { return };
    let path = first.0.clone();
    let log = folder.path().join("volume");
    let folder = write_and_kill(Daemon::start_in(folder, listener), &logged(&path, &log));
    // Another device gets the number, and this one another; its file has another name, too.
    drop(first);
    let innocent = attach_at(&path, &folder.path().join("other"));
    std::fs::rename(folder.path().join("back"), folder.path().join("moved")).unwrap();
    let device = LoopDevice::attach(&folder.path().join("moved")).unwrap();
    assert!(innocent.0 == path && device.0 != path);
    let daemon = Daemon::start_in(folder, listener);
    let client = daemon.client();
    refused(client.add_disk_for_now(&plain(&device.0)), "may be out of date");
    client.add_disk_for_now(&plain(&innocent.0)).unwrap();
    client.remove_disk("d", false).unwrap();
    client.add_disk_for_now(&logged(&device.0, &log)).unwrap();
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "d");
    assert_eq!(nbd.read_block(0), 0x11);
    drop(nbd);
    // All changes are at home, and the mark is gone.
    let folder = daemon.end();
    assert!(marks(folder.path()).is_empty());
    let daemon = Daemon::start_in(folder, listener);
    daemon.client().add_disk_for_now(&plain(&device.0)).unwrap();
    assert_eq!(Nbd::connect(&daemon.path("nbd.sock"), "d").read_block(0), 0x11);
}

/// The state folders of daemons differ; the folder of the marks is that of the host.
#[test]
fn every_daemon_and_command_finds_the_mark() {
    let folder = folder();
    image(folder.path(), "back", SIZE);
    let Some(device) = LoopDevice::attach(&folder.path().join("back")) else { return };
    let log = folder.path().join("volume");
    let folder = write_and_kill(Daemon::start_in(folder, LISTENER), &logged(&device.0, &log));
    let output = command(folder.path())
        .env("STATE_DIRECTORY", folder.path().join("elsewhere"))
        .args(["bench", "--image"])
        .arg(&device.0)
        .args(["-t", "1s", "-d", "1"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && text.contains("may be out of date"), "{text}");
    // A folder in memory forgets marks.
    let memory = Path::new("/dev/shm");
    if memory.is_dir() {
        let memory = tempfile::tempdir_in(memory).unwrap();
        let mut serve = Command::new("timeout");
        serve.current_dir(folder.path()).args(["20", env!("CARGO_BIN_EXE_fathom")]);
        let output = serve
            .env("FATHOM_MARKS", memory.path())
            .args(["serve", "--nbd", "unix:n.sock", "--control", "m.sock", "--image"])
            .arg(&device.0)
            .args(["--layer", "wal,log=other,size=1M"])
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains("is in memory"), "{text}");
    }
    assert_eq!(marks(folder.path()).len(), 1);
}

#[test]
fn a_device_whose_name_another_has_needs_a_key() {
    let folder = folder();
    image(folder.path(), "back", SIZE);
    let Some(device) = LoopDevice::attach(&folder.path().join("back")) else { return };
    let Some(_twin) = LoopDevice::attach(&folder.path().join("back")) else { return };
    let log = folder.path().join("volume");
    let daemon = Daemon::start_in(folder, LISTENER);
    refused(daemon.client().add_disk_for_now(&logged(&device.0, &log)), "`key = ");
    let keyed = DiskDefinition { key: Some("db".into()), ..logged(&device.0, &log) };
    let folder = write_and_kill(daemon, &keyed);
    let daemon = Daemon::start_in(folder, LISTENER);
    let client = daemon.client();
    // With the key, and without.
    let without_log = DiskDefinition { layers: Vec::new(), ..keyed.clone() };
    refused(client.add_disk_for_now(&without_log), "may be out of date");
    refused(client.add_disk_for_now(&plain(&device.0)), "may be out of date");
    client.add_disk_for_now(&keyed).unwrap();
    assert_eq!(Nbd::connect(&daemon.path("nbd.sock"), "d").read_block(0), 0x11);
    daemon.signal(libc::SIGKILL);
    let folder = daemon.wait().1;
    // No disk is left. The mark of another name is not that of this device.
    let discard = |key: &str| {
        let mut command = command(folder.path());
        command.args(["log", "discard", "--control", "none.sock", "--key", key, "--image"]);
        command.arg(&device.0).output().unwrap()
    };
    let text = String::from_utf8_lossy(&discard("web").stderr).into_owned();
    assert!(text.contains("has no mark of a log") && marks(folder.path()).len() == 1, "{text}");
    let output = discard("db");
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && marks(folder.path()).is_empty(), "{text}");
}

/// Earlier versions had the marks in the folder of the daemon, by path.
#[test]
fn a_mark_of_an_earlier_version_is_found_and_moved() {
    let folder = folder();
    image(folder.path(), "back", SIZE);
    let Some(device) = LoopDevice::attach(&folder.path().join("back")) else { return };
    let log = folder.path().join("volume");
    let folder = write_and_kill(Daemon::start_in(folder, LISTENER), &logged(&device.0, &log));
    let new = marks(folder.path()).remove(0);
    let back = folder.path().join("back").canonicalize().unwrap();
    let text = std::fs::read_to_string(&new).unwrap();
    let (text, _) = text.rsplit_once("\nimage:").unwrap();
    std::fs::remove_file(&new).unwrap();
    // The device has had another number: the identity in the mark counts.
    let old = folder.path().join("device-dev-other.fathom-log");
    std::fs::write(&old, format!("{text}\nimage: backing={}", back.display())).unwrap();
    let daemon = Daemon::start_in(folder, LISTENER);
    let client = daemon.client();
    refused(client.add_disk_for_now(&plain(&device.0)), "may be out of date");
    client.add_disk_for_now(&logged(&device.0, &log)).unwrap();
    assert!(new.exists() && !daemon.path("device-dev-other.fathom-log").exists());
    assert_eq!(Nbd::connect(&daemon.path("nbd.sock"), "d").read_block(0), 0x11);
}

/// A log knows its device, too.
#[test]
fn a_device_whose_mark_is_lost_is_not_served_without_its_log() {
    let folder = folder();
    image(folder.path(), "back", SIZE);
    let Some(device) = LoopDevice::attach(&folder.path().join("back")) else { return };
    let log = folder.path().join("volume");
    let folder = write_and_kill(Daemon::start_in(folder, LISTENER), &logged(&device.0, &log));
    std::fs::remove_dir_all(folder.path().join("marks")).unwrap();
    let daemon = Daemon::start_in(folder, LISTENER);
    // The log is known from a definition, although the disk is refused: which of both is older
    // nobody knows.
    refused(daemon.client().add_disk_for_now(&logged(&device.0, &log)), "has no mark of it");
    refused(
        daemon.client().add_disk_for_now(&plain(&device.0)),
        "has changes of it, for the disk \"d\"",
    );
}

/// A log's device has another number after a restart of the host, and the log is known by its
/// identity.
#[test]
fn a_log_that_the_file_does_not_have_is_found_on_a_device_with_another_number() {
    let folder = folder();
    let path = folder.path().to_owned();
    image(&path, "a.img", SIZE);
    image(&path, "volume", SIZE);
    image(&path, "other", SIZE);
    // The name that does not change.
    let link = |device: &LoopDevice| {
        let _ = std::fs::remove_file(path.join("log-device"));
        std::os::unix::fs::symlink(&device.0, path.join("log-device")).unwrap();
    };
    let Some(device) = LoopDevice::attach(&path.join("volume")) else { return };
    link(&device);
    let made = command(&path).args(["log", "create", "log-device"]).status().unwrap();
    assert!(made.success());
    let text = format!("[[disk]]\nname = \"d\"\nimage = \"{}/a.img\"\n{LISTENER}", path.display());
    let daemon = Daemon::start_in(folder, &text);
    let wal = json!({ "log": path.join("log-device"), "size": "1M", "age": "1h" });
    let change = DiskChange {
        set_layer: Some(LayerDefinition::new("wal", wal)),
        temporary: true,
        ..DiskChange::default()
    };
    daemon.client().change_disk("d", &change).unwrap();
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "d");
    assert_eq!(nbd.fill_block(0, 0x11), Some(0));
    daemon.signal(libc::SIGKILL);
    let (_, folder) = daemon.wait();
    drop(device);
    let _other = LoopDevice::attach(&path.join("other")).unwrap();
    let device = LoopDevice::attach(&path.join("volume")).unwrap();
    link(&device);
    let daemon = Daemon::start_in(folder, &text);
    let problems = || daemon.client().disks().unwrap().unserved;
    assert!(problems().is_empty(), "{:?}", problems());
    assert_eq!(Nbd::connect(&daemon.path("nbd.sock"), "d").read_block(0), 0x11);
    let has_log = || {
        let layers = daemon.client().disk("d").unwrap().layers;
        layers.iter().any(|layer| layer.name == "wal")
    };
    daemon.until("the log is removed", || !has_log());
}

/// An NBD server for the file `volume`, at the socket `log.sock`; `None` without nbdkit.
fn serve_volume(folder: &Path) -> Option<Child> {
    let socket = folder.join("log.sock");
    let _ = std::fs::remove_file(&socket);
    let server = Command::new("nbdkit")
        .args(["--foreground", "--exit-with-parent", "--unix"])
        .arg(&socket)
        .arg("file")
        .arg(folder.join("volume"))
        .spawn();
    let Ok(server) = server else {
        eprintln!("SKIPPED: this needs nbdkit");
        return None;
    };
    while !socket.exists() {
        std::thread::sleep(Duration::from_millis(5));
    }
    Some(server)
}

fn end(mut server: Child) {
    server.kill().unwrap();
    server.wait().unwrap();
}

/// The message and the remedy of the problem of a disk whose log has not answered.
fn doubt(daemon: &Daemon) -> Option<String> {
    let problems = daemon.client().disk("d").unwrap().problems;
    let doubt = problems.into_iter().find(|it| it.kind == ProblemKind::LogUnknown)?;
    Some(format!("{} → {}", doubt.message, doubt.remedy))
}

/// A log at another host is asked, too. While it does not answer, the device is served, with a
/// problem.
#[test]
fn a_log_at_a_server_is_asked_for_a_device_whose_mark_is_lost() {
    let folder = folder();
    image(folder.path(), "back", SIZE);
    image(folder.path(), "volume", 1 << 20);
    let Some(device) = LoopDevice::attach(&folder.path().join("back")) else { return };
    let Some(server) = serve_volume(folder.path()) else { return };
    let log = format!("nbd+unix:///?socket={}", folder.path().join("log.sock").display());
    let logged = logged(&device.0, Path::new(&log));
    let folder = write_and_kill(Daemon::start_in(folder, LISTENER), &logged);
    end(server);
    std::fs::remove_dir_all(folder.path().join("marks")).unwrap();
    let daemon = Daemon::start_in(folder, LISTENER);
    let client = daemon.client();
    assert!(client.add_disk_for_now(&logged).is_err());
    client.add_disk_for_now(&plain(&device.0)).unwrap();
    let text = doubt(&daemon).unwrap();
    assert!(text.contains("is not known") && text.contains("log.sock"), "{text}");
    // It answers, and has changes of the device.
    let server = serve_volume(&daemon.path("")).unwrap();
    daemon.until("the log has answered", || doubt(&daemon).unwrap().contains("has changes of it"));
    client.remove_disk("d", false).unwrap();
    refused(client.add_disk_for_now(&plain(&device.0)), "has changes of it, for the disk \"d\"");
    // An empty log that answers ends the doubt.
    end(server);
    std::fs::write(daemon.path("volume"), vec![0; 1 << 20]).unwrap();
    client.add_disk_for_now(&plain(&device.0)).unwrap();
    assert!(doubt(&daemon).is_some());
    let server = serve_volume(&daemon.path("")).unwrap();
    daemon.until("the doubt ends", || doubt(&daemon).is_none());
    end(server);
}

/// So is a log in a cache.
#[test]
fn a_log_in_a_cache_is_asked_for_a_device_whose_mark_is_lost() {
    let folder = folder();
    image(folder.path(), "back", SIZE);
    let Some(device) = LoopDevice::attach(&folder.path().join("back")) else { return };
    succeeds(folder.path(), &["create", "cache", "--size", "12M", "--log", "2M", "--logs", "2"]);
    let store = folder.path().join("cache");
    let options = json!({ "store": store, "mode": "write-back", "age": "1h" });
    let cached =
        DiskDefinition { layers: vec![LayerDefinition::new("cache", options)], ..plain(&device.0) };
    let folder = write_and_kill(Daemon::start_in(folder, LISTENER), &cached);
    std::fs::remove_dir_all(folder.path().join("marks")).unwrap();
    let daemon = Daemon::start_in(folder, LISTENER);
    refused(daemon.client().add_disk_for_now(&cached), "has no mark of it");
    refused(
        daemon.client().add_disk_for_now(&plain(&device.0)),
        "has changes of it, for the disk \"d\"",
    );
}
