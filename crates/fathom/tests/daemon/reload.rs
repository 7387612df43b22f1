//! Reloads of the configuration.

use fathom_control::{Bytes, DiskDefinition};

use crate::nbd::Nbd;
use crate::process::Daemon;

const BEFORE: &str = r#"
[[disk]]
name = "a"
memory = "1M"
[[disk]]
name = "b"
memory = "1M"
[[nbd]]
address = "unix:nbd.sock"
exports = ["a", "b"]
"#;

const AFTER: &str = r#"
[daemon]
idle_time = "3s"
shutdown_time_max = "1s"
[[disk]]
name = "a"
memory = "2M"
layers = [{ kind = "delay", time = "1us" }]
[[disk]]
name = "c"
memory = "1M"
[[nbd]]
address = "unix:nbd.sock"
exports = ["a", "c"]
[[nbd]]
address = "unix:second.sock"
"#;

#[test]
fn differences_are_applied_or_reported() {
    let daemon = Daemon::start(BEFORE);
    let client = daemon.client();
    let by_request = DiskDefinition {
        name: "x".into(),
        memory: Some(Bytes(1 << 20)),
        ..DiskDefinition::default()
    };
    client.add_disk(&by_request).unwrap();
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    nbd.write(0, &[5; 512]);
    std::fs::write(daemon.path("f.toml"), AFTER).unwrap();
    let report = client.reload().unwrap();
    assert_eq!(
        report.changed,
        [
            "the disk \"b\" was removed",
            "the layers of the disk \"a\" were changed",
            "the disk \"c\" was added",
            "the listener at unix:nbd.sock has other exports",
            "a listener at unix:second.sock was added",
        ]
        .map(|line| line
            .replace("unix:", &format!("unix:{}/", daemon.path("").display()))
            .replace("//", "/"))
    );
    assert_eq!(
        report.refused,
        [
            "`idle_time` of [daemon] cannot change while the daemon runs: restart it",
            "`shutdown_time_max` of [daemon] cannot change while the daemon runs: restart it",
            "the disk \"a\" cannot change its memory while it is served: remove it with \
             `fathom disk remove a`, then reload",
        ]
    );
    let names: Vec<String> =
        client.disks().unwrap().disks.into_iter().map(|disk| disk.name).collect();
    assert_eq!(names, ["a", "c", "x"]);
    assert_eq!(nbd.read(0, 512), [5; 512], "a client of a changed disk stays connected");
    Nbd::connect(&daemon.path("second.sock"), "x");
    Nbd::connect(&daemon.path("nbd.sock"), "c");

    client.remove_disk("a", true).unwrap();
    let report = client.reload().unwrap();
    assert_eq!(report.changed, ["the disk \"a\": undone, its removal", "the disk \"a\" was added"]);
    assert_eq!(client.disk("a").unwrap().capacity_bytes, 2 << 20);
    daemon.end();
}

#[test]
fn sighup_reloads_and_a_wrong_file_changes_nothing() {
    let daemon = Daemon::start(BEFORE);
    std::fs::write(daemon.path("f.toml"), "[[disk]]\nname = 1\n").unwrap();
    daemon.signal(libc::SIGHUP);
    daemon.until("the refusal", || daemon.log().contains("f.toml:2:8: `name` of [[disk]]"));
    assert_eq!(daemon.client().disks().unwrap().disks.len(), 2);
    std::fs::write(daemon.path("f.toml"), BEFORE.replace("\"b\"", "\"d\"")).unwrap();
    daemon.signal(libc::SIGHUP);
    daemon.until("the new disk", || daemon.client().disk("d").is_ok());
    assert!(daemon.client().disk("b").is_err());
    daemon.end();
}

/// A file that is empty or cut off takes no disk from those who use it.
#[test]
fn a_reload_removes_no_disk_in_use() {
    let daemon = Daemon::start(BEFORE);
    let client = daemon.client();
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    nbd.write(0, &[5; 512]);
    std::fs::write(daemon.path("f.toml"), "").unwrap();
    let report = client.reload().unwrap();
    assert_eq!(report.changed, ["the disk \"b\" was removed"], "{report:?}");
    assert_eq!(report.refused.len(), 2, "{report:?}");
    assert!(report.refused[0].contains("\"a\" is in use by an NBD client"), "{report:?}");
    assert!(report.refused[0].contains("fathom disk remove a --force"), "{report:?}");
    assert!(report.refused[1].contains("has 1 client"), "{report:?}");
    assert_eq!(nbd.read(0, 512), [5; 512]);
    // It is the same after the next reload, until nobody uses it.
    assert_eq!(client.reload().unwrap().refused.len(), 2);
    drop(nbd);
    daemon.until("the removal", || client.reload().unwrap().refused.is_empty());
    assert_eq!(client.disks().unwrap().disks, []);
    assert!(!daemon.path("nbd.sock").exists());
    daemon.end();
}

/// What was deleted or renamed beneath the daemon is there again after a reload, and the report
/// says so.
#[test]
fn a_reload_makes_sockets_and_log_files_again() {
    let text = "[[disk]]\nname = \"a\"\nmemory = \"1M\"\nvhost_user.socket = \"a.sock\"\n\
                layers = [{ kind = \"log\", file = \"lines\", lines_per_second_max = 0 }]\n\
                [[nbd]]\naddress = \"unix:nbd.sock\"\n";
    let daemon = Daemon::start(text);
    let client = daemon.client();
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    nbd.write(0, &[5; 512]);
    assert_eq!(client.reload().unwrap().changed, [""; 0], "nothing differs");
    for socket in ["a.sock", "nbd.sock"] {
        std::fs::remove_file(daemon.path(socket)).unwrap();
    }
    std::fs::rename(daemon.path("lines"), daemon.path("lines.1")).unwrap();
    let report = client.reload().unwrap();
    assert_eq!((report.changed.len(), report.refused.len()), (3, 0), "{report:?}");
    assert!(report.changed[0].contains("nbd.sock was made again"), "{report:?}");
    assert!(report.changed[1].contains("another file"), "{report:?}");
    assert!(report.changed[2].contains("a.sock of the disk \"a\" was made again"), "{report:?}");
    // Connections stay, and new ones are made.
    assert_eq!(nbd.read(0, 512), [5; 512]);
    assert!(std::fs::read_to_string(daemon.path("lines")).unwrap().contains(" read "));
    assert_eq!(Nbd::connect(&daemon.path("nbd.sock"), "a").capacity(), 1 << 20);
    drop(std::os::unix::net::UnixStream::connect(daemon.path("a.sock")).unwrap());
    // Nobody can ask for a reload over a control socket that was deleted.
    std::fs::remove_file(daemon.path("control.sock")).unwrap();
    daemon.signal(libc::SIGHUP);
    daemon.until("the control socket", || client.daemon().is_ok());
    daemon.end();
}

/// Certificates that were renewed are used for new connections. Those that cannot be used change
/// nothing.
#[test]
fn a_reload_reads_keys_again() {
    let folder = tempfile::tempdir().unwrap();
    let psk = |name: &str, key: &str| {
        std::fs::write(folder.path().join("psk"), format!("{name}:{key}\n")).unwrap();
    };
    psk("alice", &"1".repeat(64));
    let text = "[[disk]]\nname = \"a\"\nmemory = \"1M\"\n\
                [[nbd]]\naddress = \"127.0.0.1:0\"\ntls = { psk = \"psk\" }\n";
    let path = folder.path().join("psk");
    let daemon = Daemon::start_in(folder, text);
    let client = daemon.client();
    assert_eq!(client.reload().unwrap().changed, [""; 0]);
    std::fs::write(&path, format!("bob:{}\n", "2".repeat(64))).unwrap();
    let report = client.reload().unwrap();
    assert_eq!((report.changed.len(), report.refused.len()), (1, 0), "{report:?}");
    assert!(report.changed[0].ends_with("has other keys"), "{report:?}");
    std::fs::write(&path, "no key\n").unwrap();
    let report = client.reload().unwrap();
    assert_eq!((report.changed.len(), report.refused.len()), (0, 1), "{report:?}");
    assert!(report.refused[0].contains("keeps the keys that it has"), "{report:?}");
    daemon.end();
}
