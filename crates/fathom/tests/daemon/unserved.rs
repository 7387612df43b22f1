//! Disks that cannot be served keep no other from being served, and are served when that is
//! possible.

use std::fs::{File, OpenOptions};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;

use fathom_control::{Client, ClientError, DiskList, ProblemKind};
use rustix::fs::{FlockOperation, fcntl_lock};
use tempfile::TempDir;

use crate::cache::succeeds;
use crate::nbd::Nbd;
use crate::process::{Daemon, command, image};
use crate::stuck::Stuck;

const SIZE: u64 = 1 << 20;

/// The disks of the first test: a name, an image, and further lines.
const DISKS: [(&str, &str, &str); 7] = [
    ("missing", "missing.img", ""),
    ("short", "short.img", ""),
    ("locked", "locked.img", ""),
    ("folder", "folder.img", ""),
    (
        "logged",
        "logged.img",
        "layers = [{ kind = \"wal\", log = \"changes\", size = \"1M\", age = \"60s\" }]\n",
    ),
    (
        "cached",
        "cached.img",
        "layers = [{ kind = \"cache\", store = \"cache\", exclusive = true, mode = \"write-back\", age = \"60s\" }]\n",
    ),
    ("good", "good.img", ""),
];

fn table(name: &str, image: &str, lines: &str) -> String {
    format!("[[disk]]\nname = \"{name}\"\nimage = \"{image}\"\n{lines}")
}

fn reason(list: &DiskList, name: &str) -> Option<String> {
    let disk = list.unserved.iter().find(|disk| disk.name == name)?;
    Some(format!("{}: {} → {}", disk.state(), disk.message, disk.remedy))
}

fn names(list: &DiskList) -> Vec<&str> {
    list.disks.iter().map(|disk| disk.name.as_str()).collect()
}

/// A folder with all images, in which the disks with a log and with a cache have acknowledged
/// changes.
fn folder() -> TempDir {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = folder.path();
    for (_, name, _) in DISKS {
        image(path, name, SIZE);
    }
    succeeds(path, &["create", "cache", "--size", "12M", "--log", "2M", "--logs", "1"]);
    let mut text = String::from("[[nbd]]\naddress = \"unix:nbd.sock\"\n");
    for (name, image, lines) in &DISKS[4..6] {
        text.push_str(&table(name, image, lines));
    }
    let daemon = Daemon::start_in(folder, &text);
    for name in ["logged", "cached"] {
        let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), name);
        assert_eq!(nbd.fill_block(3, 7), Some(0));
    }
    daemon.signal(libc::SIGKILL);
    daemon.wait().1
}

fn output(daemon: &Daemon, arguments: &[&str]) -> String {
    let mut command = command(&std::env::temp_dir());
    command.args(arguments).arg("--control").arg(daemon.path("control.sock"));
    let output = command.output().unwrap();
    String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
}

#[test]
#[expect(clippy::too_many_lines, reason = "one scenario")]
fn a_bad_disk_keeps_no_other_from_being_served() {
    let Some(stuck) = Stuck::mount() else { return };
    let folder = folder();
    let path = folder.path().to_owned();
    let at = |name: &str| path.join(name);
    std::fs::remove_file(at("missing.img")).unwrap();
    image(&path, "short.img", 1000);
    std::fs::remove_file(at("folder.img")).unwrap();
    std::fs::create_dir(at("folder.img")).unwrap();
    std::fs::rename(at("changes"), at("changes.away")).unwrap();
    std::fs::copy(at("cache"), at("cache.copy")).unwrap();
    image(&path, "cache", 0);
    let held = OpenOptions::new().read(true).write(true).open(at("locked.img")).unwrap();
    fcntl_lock(&held, FlockOperation::NonBlockingLockExclusive).unwrap();
    stuck.hang();

    let mut text = table("hung", &stuck.image().display().to_string(), "");
    for (name, image, lines) in DISKS {
        text.push_str(&table(name, image, lines));
    }
    text.push_str("[[nbd]]\naddress = \"unix:nbd.sock\"\n");
    let (daemon, notified) = Daemon::begin_in(folder, &text);
    let client = daemon.client();
    daemon.until("the good disk", || {
        client.disks().is_ok_and(|list| names(&list) == ["good"])
            && UnixStream::connect(at("nbd.sock")).is_ok()
    });
    assert_eq!(Nbd::connect(&at("nbd.sock"), "good").capacity(), SIZE);
    // The control socket answers although the daemon is not ready yet.
    let info = client.daemon().unwrap();
    assert_eq!((info.disks, info.disks_unserved), (1, 7));
    assert!(reason(&client.disks().unwrap(), "hung").unwrap().starts_with("opening: "));

    let expected = [
        ("missing", "there is no image", "fathom disk create"),
        ("short", "not a multiple of 512", "fathom disk resize"),
        ("locked", "in use by another process", "lslocks"),
        ("folder", "neither a file nor a block device", "raw image"),
        ("logged", "may be out of date", "serve it with the layer `wal`"),
        ("cached", "cache", ""),
    ];
    let is_known = |name: &str, words: [&str; 2]| {
        let reason = reason(&client.disks().unwrap(), name).unwrap_or_default();
        reason.starts_with("not served: ") && words.iter().all(|word| reason.contains(word))
    };
    for (name, message, remedy) in expected {
        daemon.until(name, || is_known(name, [message, remedy]));
    }
    // A disk that is opened for long is a problem as well.
    daemon.until("the problem of the hung disk", || {
        let problems = client.daemon().unwrap().problems;
        let hung = problems.iter().find(|problem| problem.disk.as_deref() == Some("hung"));
        hung.is_some_and(|problem| {
            problem.kind == ProblemKind::NotServed && problem.message.contains("does not answer")
        })
    });
    let metrics = client.metrics().unwrap();
    for line in [
        "fathom_disks 1",
        "fathom_disks_unserved 7",
        "fathom_disk_problem{disk=\"missing\",vm=\"\",kind=\"not-served\"} 1",
        "fathom_disk_problem{disk=\"hung\",vm=\"\",kind=\"not-served\"} 1",
    ] {
        assert!(metrics.contains(line), "{line}: {metrics}");
    }
    let listed = output(&daemon, &["disk", "list"]);
    assert!(listed.contains("not served") && listed.contains("opening"), "{listed}");
    assert!(listed.contains("! missing: not-served: there is no image"), "{listed}");
    let info = output(&daemon, &["disk", "info", "missing"]);
    assert!(info.contains("is not served: there is no image"), "{info}");
    let retried = output(&daemon, &["disk", "retry", "missing"]);
    assert!(retried.contains("there is no image") && retried.contains("disk create"), "{retried}");
    assert!(output(&daemon, &["disk", "retry", "good"]).contains("is served already"));
    assert!(output(&daemon, &["doctor"]).contains("1 of 8 disks"));

    // The daemon is ready although a disk hangs.
    notified.set_read_timeout(Some(crate::process::PATIENCE)).unwrap();
    let mut message = [0; 64];
    let length = notified.recv(&mut message).unwrap();
    assert_eq!(&message[..length], b"READY=1\n");
    daemon.until("the line", || daemon.log().contains(" ready in "));
    assert!(daemon.log().contains("ms: 1 of 8 disks, "), "{}", daemon.log());

    // Each is served after its repair, by itself, by `retry` and by a reload.
    image(&path, "missing.img", SIZE);
    assert!(output(&daemon, &["disk", "retry", "missing"]).contains("1 MiB"));
    drop(held);
    stuck.resume();
    daemon.until("the disks to be served", || {
        let list = client.disks().unwrap();
        names(&list) == ["good", "hung", "locked", "missing"]
    });
    image(&path, "short.img", SIZE);
    std::fs::remove_dir(at("folder.img")).unwrap();
    image(&path, "folder.img", SIZE);
    std::fs::rename(at("changes.away"), at("changes")).unwrap();
    std::fs::rename(at("cache.copy"), at("cache")).unwrap();
    let report = client.reload().unwrap();
    assert!(report.refused.is_empty(), "{report:?}\n{}", daemon.log());
    let list = client.disks().unwrap();
    assert_eq!((list.disks.len(), list.unserved), (8, Vec::new()));
    for name in ["logged", "cached"] {
        assert_eq!(Nbd::connect(&at("nbd.sock"), name).read_block(3), 7, "{name}");
    }
    daemon.until("the end of all problems", || client.daemon().unwrap().problems.is_empty());
    assert!(daemon.log().contains(" locked: is served"), "{}", daemon.log());
    daemon.end();
}

#[test]
fn a_disk_that_hangs_at_a_reload_delays_no_other() {
    let Some(stuck) = Stuck::mount() else { return };
    let daemon = Daemon::start("[[disk]]\nname = \"a\"\nmemory = \"1M\"\n");
    let (client, reloading) = (daemon.client(), daemon.client());
    stuck.hang();
    let others = "[[disk]]\nname = \"a\"\nmemory = \"1M\"\n\
                  layers = [{ kind = \"delay\", time = \"1us\" }]\n\
                  [[disk]]\nname = \"late\"\nmemory = \"1M\"\n";
    let hung = table("hung", &stuck.image().display().to_string(), "");
    std::fs::write(daemon.path("f.toml"), format!("{hung}{others}")).unwrap();
    let reload = std::thread::spawn(move || reloading.reload().unwrap());
    daemon.until("the other disks", || {
        let has_delay = |client: &Client| {
            let layers = client.disk("a").unwrap().layers;
            layers.iter().any(|layer| layer.name == "delay")
        };
        client.disk("late").is_ok() && has_delay(&client)
    });
    assert!(!reload.is_finished(), "the reload waits for the disk that hangs");
    let report = reload.join().unwrap();
    assert_eq!(report.refused.len(), 1, "{report:?}");
    assert!(report.refused[0].contains("\"hung\" is still being opened"), "{report:?}");

    // Its name is free although the attempt to open it hangs.
    let memory = "[[disk]]\nname = \"hung\"\nmemory = \"2M\"\n";
    std::fs::write(daemon.path("f.toml"), format!("{memory}{others}")).unwrap();
    assert_eq!(client.reload().unwrap().changed, ["the disk \"hung\" was added"]);
    stuck.resume();
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(client.disk("hung").unwrap().capacity_bytes, 2 << 20);
    assert_eq!(client.daemon().unwrap().disks_unserved, 0);
    daemon.end();
}

#[test]
fn a_listener_that_cannot_listen_is_tried_again() {
    let folder = tempfile::tempdir().unwrap();
    let taken = UnixListener::bind(folder.path().join("nbd.sock")).unwrap();
    let text = "[[disk]]\nname = \"a\"\nmemory = \"1M\"\n\
                [[nbd]]\naddress = \"unix:nbd.sock\"\n[[nbd]]\naddress = \"unix:other.sock\"\n";
    let daemon = Daemon::start_in(folder, text);
    let client = daemon.client();
    assert_eq!(Nbd::connect(&daemon.path("other.sock"), "a").capacity(), SIZE);
    let info = client.daemon().unwrap();
    assert_eq!(info.problems[0].kind, ProblemKind::ListenerClosed);
    assert!(info.problems[0].message.contains("another process listens"), "{info:?}");
    drop(taken);
    daemon.until("the listener", || client.daemon().unwrap().problems.is_empty());
    assert_eq!(Nbd::connect(&daemon.path("nbd.sock"), "a").capacity(), SIZE);
    daemon.end();
}

#[test]
fn a_strict_start_ends_at_any_disk_that_cannot_be_served() {
    let folder = tempfile::tempdir().unwrap();
    let serve = |arguments: &[&str]| {
        let mut command = command(folder.path());
        command.arg("serve").args(arguments).args(["--control", "c.sock"]);
        let output = command.output().unwrap();
        (output.status.code().unwrap(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let text = "[[disk]]\nname = \"a\"\nmemory = \"1M\"\n";
    std::fs::write(folder.path().join("f.toml"), format!("{text}{}", table("b", "b.img", "")))
        .unwrap();
    let (code, log) = serve(&["--config", "f.toml", "--strict"]);
    assert!(code == 2 && log.contains("f.toml:6:9: there is no image"), "{log}");
    // What is only seen when the disk is opened.
    image(folder.path(), "b.img", 1000);
    let (code, log) = serve(&["--config", "f.toml", "--strict"]);
    assert!(code == 1 && log.contains("not a multiple of 512"), "{log}");
    assert!(!folder.path().join("c.sock").exists());
    // One disk by flags.
    for (name, expected, text) in [("c.img", 2, "no image"), ("b.img", 1, "multiple of 512")] {
        let (code, log) = serve(&["--image", name, "--nbd", "unix:nbd.sock"]);
        assert!(code == expected && log.contains(text), "{log}");
    }
}

#[test]
fn a_disk_that_is_not_served_is_removed_by_request() {
    let text = format!("{}[[nbd]]\naddress = \"unix:nbd.sock\"\n", table("a", "a.img", ""));
    let daemon = Daemon::start(&text);
    let client = daemon.client();
    let done = client.remove_disk("a", false).unwrap();
    assert!(done.message.contains("no longer tried"), "{done:?}");
    assert_eq!(client.disks().unwrap().unserved, []);
    let file = File::create(daemon.path("a.img")).unwrap();
    file.set_len(SIZE).unwrap();
    let refused = client.retry_disk("a");
    assert!(matches!(refused, Err(ClientError::Refused(_))), "{refused:?}");
    // The file still has it.
    assert_eq!(
        client.reload().unwrap().changed,
        ["the disk \"a\": undone, its removal", "the disk \"a\" was added"]
    );
    assert!(Path::new(&daemon.path("nbd.sock")).exists());
    daemon.end();
}
