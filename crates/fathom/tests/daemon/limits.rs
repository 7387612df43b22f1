//! What the host does not take, a log line or the end of a large file, stops nothing else.

use std::process::Stdio;
use std::time::Instant;

use fathom_control::{Bytes, Client, DiskDefinition};

use crate::nbd::Nbd;
use crate::process::{PATIENCE, command, image};

const LOGGED: &str = "[[nbd]]\naddress = \"unix:nbd.sock\"\n[[disk]]\nname = \"a\"\nmemory = \"1M\"\n\
                      layers = [{ kind = \"log\", lines_per_second_max = 1000000 }]\n";

/// Waits until a daemon is ready.
fn wait_for(client: &Client) {
    let begun = Instant::now();
    while !client.daemon().is_ok_and(|daemon| daemon.ready_us > 0) {
        assert!(begun.elapsed() < PATIENCE, "not ready");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
}

#[test]
fn a_standard_error_that_nobody_reads_stops_nothing() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("f.toml"), LOGGED).unwrap();
    let mut serve = command(folder.path());
    serve.args(["serve", "--config", "f.toml", "--control", "control.sock"]);
    let mut child = serve.stderr(Stdio::piped()).spawn().unwrap();
    let client = Client::new(folder.path().join("control.sock"));
    wait_for(&client);
    let mut nbd = Nbd::connect(&folder.path().join("nbd.sock"), "a");
    // More than a pipe holds: each request has two lines.
    for _ in 0..2000 {
        assert_eq!(nbd.fill_block(0, 1), Some(0));
    }
    let definition = DiskDefinition {
        name: "m".into(),
        memory: Some(Bytes(1 << 20)),
        ..DiskDefinition::default()
    };
    client.add_disk(&definition).unwrap();
    assert_eq!(Nbd::connect(&folder.path().join("nbd.sock"), "m").capacity(), 1 << 20);
    let events = client.events(0, std::time::Duration::ZERO).unwrap().events;
    assert!(events.iter().any(|event| event.message == "added"), "{events:?}");
    drop(nbd);
    client.shutdown().unwrap();
    let begun = Instant::now();
    while child.try_wait().unwrap().is_none() {
        assert!(begun.elapsed() < PATIENCE, "it does not end");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_limit_of_the_sizes_of_files_is_an_error_and_ends_nothing() {
    let folder = tempfile::tempdir().unwrap();
    image(folder.path(), "small.img", 8 << 20);
    image(folder.path(), "large.img", 64 << 20);
    let disk = |name: &str| format!("[[disk]]\nname = \"{name}\"\nimage = \"{name}.img\"\n");
    let text = disk("small") + &disk("large") + "[[nbd]]\naddress = \"unix:nbd.sock\"\n";
    std::fs::write(folder.path().join("f.toml"), text).unwrap();
    // In units of 512 bytes: 16 MiB.
    let words = "ulimit -f 32768; exec \"$0\" serve --config f.toml --control control.sock";
    let program = command(folder.path()).get_program().to_owned();
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", words]).arg(program).current_dir(folder.path());
    let mut child = shell.stdin(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let client = Client::new(folder.path().join("control.sock"));
    wait_for(&client);
    let list = client.disks().unwrap();
    assert_eq!(list.unserved.len(), 1, "{list:?}");
    let large = &list.unserved[0];
    assert!(large.message.contains("RLIMIT_FSIZE"), "{large:?}");
    assert!(large.remedy.contains("LimitFSIZE"), "{large:?}");
    let mut nbd = Nbd::connect(&folder.path().join("nbd.sock"), "small");
    assert_eq!(nbd.fill_block(0, 1), Some(0));
    // The kernel sends SIGXFSZ, which ends a process without a handler.
    client.resize_disk("small", 32 << 20, false).unwrap_err();
    assert_eq!(nbd.fill_block(1, 2), Some(0));
    drop(nbd);
    client.shutdown().unwrap();
    assert!(child.wait().unwrap().success());
}
