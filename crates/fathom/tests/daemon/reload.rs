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
            "the disk \"a\" has other layers",
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
    assert_eq!(report.changed, ["the disk \"a\" was added"]);
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
