//! Backups of volumes by the clients that people use: full and incremental ones over NBD, with the
//! bitmaps of snapshots.

use std::path::Path;
use std::process::Command;

use fathom_control::{DiskChange, LayerDefinition};
use serde_json::{Value, json};

use crate::nbd::{Nbd, TRIM};
use crate::process::Daemon;
use crate::store::{CONFIGURATION, diff, prepared, run};

/// Copies what has changed since a snapshot. Its words are the URI, the snapshot and the image with
/// the earlier content.
const INCREMENTAL: &str = include_str!("incremental.py");

/// Whether client programs are installed; prints a message if not.
fn have(programs: &[&str]) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let is_there =
        |program: &&&str| std::env::split_paths(&path).any(|at| at.join(program).exists());
    let missing = programs.iter().find(|program| !is_there(program));
    if let Some(program) = missing {
        eprintln!("SKIPPED: {program} is not installed; run: scripts/install test");
    }
    missing.is_none()
}

fn client(program: &str, words: &[&str]) -> Result<String, String> {
    let path = std::env::var("PATH").unwrap_or_default();
    let done = Command::new("timeout")
        .args(["60", program])
        .args(words)
        // Python's libnbd belongs to the distribution's interpreter, so that one comes first.
        .env("PATH", format!("/usr/bin:{path}"))
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if done.status.success() { Ok(text(&done.stdout)) } else { Err(text(&done.stderr)) }
}

/// Runs a script of Python with libnbd, which has `words`.
fn nbdsh(script: &str, words: &[&str]) -> Result<String, String> {
    client("nbdsh", &["-c", &format!("words = {words:?}"), "-c", script])
}

struct Clients<'d> {
    daemon: &'d Daemon,
}

impl Clients<'_> {
    fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.daemon.path("nbd.sock").display())
    }

    fn path(&self, name: &str) -> String {
        self.daemon.path(name).display().to_string()
    }

    fn snapshot(&self, name: &str) {
        run(&self.daemon.path(""), &["snapshot", "create", "a", "--name", name]).unwrap();
    }

    /// Serves a snapshot of the first disk, read-only.
    fn serve(&self, name: &str) {
        let volume = format!("one@{name}");
        let words = ["disk", "add", name, "--store", "pool", "--volume", &volume];
        run(&self.daemon.path(""), &words).unwrap();
    }

    /// The dirty extents of an export, as `nbdinfo` and as QEMU see them.
    fn dirty(&self, export: &str, name: &str) -> [Vec<(u64, u64)>; 2] {
        let context = format!("qemu:dirty-bitmap:{name}");
        let map = format!("--map={context}");
        let text = client("nbdinfo", &["--json", &map, &self.uri(export)]).unwrap();
        let of_nbdinfo: Vec<Value> = serde_json::from_str(&text).unwrap();
        let options = format!(
            "driver=nbd,server.type=unix,server.path={},export={export},x-dirty-bitmap={context}",
            self.path("nbd.sock")
        );
        let words = ["map", "--output=json", "--image-opts", &options];
        let text = client("qemu-img", &words).unwrap();
        let of_qemu: Vec<Value> = serde_json::from_str(&text).unwrap();
        let extent = |found: &Value, key: &str| {
            (found[key].as_u64().unwrap(), found["length"].as_u64().unwrap())
        };
        let is_dirty = |found: &&Value| found["type"] == 1;
        let changed = |found: &&Value| found["data"] == false;
        [
            of_nbdinfo.iter().filter(is_dirty).map(|found| extent(found, "offset")).collect(),
            of_qemu.iter().filter(changed).map(|found| extent(found, "start")).collect(),
        ]
    }
}

fn compare(one: &Path, other: &Path) {
    assert!(
        std::fs::read(one).unwrap() == std::fs::read(other).unwrap(),
        "{} differs",
        other.display()
    );
}

#[test]
fn incremental_backups_over_nbd_are_what_the_snapshots_are() {
    if !have(&["nbdinfo", "nbdcopy", "nbdsh", "qemu-img"]) {
        return;
    }
    let daemon = Daemon::start_in(prepared(), CONFIGURATION);
    let clients = Clients { daemon: &daemon };
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    nbd.write(0, &vec![1; 1 << 20]);
    nbd.write(8 << 20, &vec![2; 1 << 20]);
    clients.snapshot("s.1");
    clients.serve("s.1");
    client("nbdcopy", &[&clients.uri("s.1"), &clients.path("copy.img")]).unwrap();
    let mut before = "s.1".to_owned();
    for round in 2..5_u64 {
        nbd.write((round << 16) + 512, &[round as u8; 1000]);
        nbd.write((4 << 20) + (round << 12), &[round as u8; 4096]);
        nbd.send(TRIM, round, (8 << 20) + (round << 16), 1 << 16, &[]);
        assert_eq!(nbd.reply(), Some((round, 0)));
        let name = format!("s.{round}");
        clients.snapshot(&name);
        // The guest goes on during the backup.
        nbd.write(round << 16, &[99; 8192]);
        clients.serve(&name);
        let dirty = clients.dirty(&name, &before);
        let expected = diff(&daemon.path(""), &["a", &before, &name]);
        assert_eq!(dirty[0], dirty[1]);
        let bytes = |extents: &[(u64, u64)]| extents.iter().map(|(_, length)| length).sum::<u64>();
        assert_eq!(bytes(&dirty[0]), expected.iter().map(|(_, length, _)| length).sum::<u64>());
        let words = [&clients.uri(&name)[..], &before, &clients.path("copy.img")];
        let copied: u64 = nbdsh(INCREMENTAL, &words).unwrap().trim().parse().unwrap();
        assert!(copied > 0 && copied < 1 << 18, "{copied} bytes were copied");
        client("nbdcopy", &[&clients.uri(&name), &clients.path("full.img")]).unwrap();
        compare(&daemon.path("full.img"), &daemon.path("copy.img"));
        let (qcow2, uri) = (clients.path("full.qcow2"), clients.uri(&name));
        client("qemu-img", &["convert", "-O", "qcow2", &uri, &qcow2]).unwrap();
        client(
            "qemu-img",
            &["compare", "-f", "qcow2", "-F", "raw", &qcow2, &clients.path("copy.img")],
        )
        .unwrap();
        before = name;
    }
    // The volume itself, while it is used, and against all of them at once.
    let text = client("nbdinfo", &["--list", &clients.uri("")]).unwrap();
    assert!(text.contains("qemu:dirty-bitmap:s.1"), "{text}");
    let [dirty, _] = clients.dirty("a", "s.4");
    assert_eq!(dirty, [(4 << 16, 8192)]);
    drop(nbd);
    daemon.end();
}

/// Runs a command with files as its input and output.
fn piped(folder: &Path, words: &[&str], input: &str, output: &str) -> Result<(), String> {
    let open = |name: &str| std::fs::File::open(folder.join(name)).unwrap();
    let done = Command::new(env!("CARGO_BIN_EXE_fathom"))
        .current_dir(folder)
        .env("FATHOM_CONTROL", folder.join("control.sock"))
        .args(words)
        .stdin(open(input))
        .stdout(std::fs::File::create(folder.join(output)).unwrap())
        .output()
        .unwrap();
    if done.status.success() { Ok(()) } else { Err(String::from_utf8(done.stderr).unwrap()) }
}

#[test]
fn snapshots_are_sent_to_another_pool() {
    let daemon = Daemon::start_in(prepared(), CONFIGURATION);
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    for (name, byte) in [("x", 1), ("y", 2)] {
        nbd.write(0, &[byte; 4096]);
        nbd.write(u64::from(byte) << 20, &vec![byte; 100_000]);
        run(&daemon.path(""), &["snapshot", "create", "a", "--name", name]).unwrap();
    }
    let folder = daemon.path("");
    for (name, more) in [("x", &[][..]), ("y", &["--from", "x"])] {
        let output = format!("{name}.of-daemon");
        let words = [&["snapshot", "send", "a", name], more].concat();
        piped(&folder, &words, "f.toml", &output).unwrap();
    }
    let refused = piped(&folder, &["snapshot", "send", "a", "z"], "f.toml", "out");
    assert!(refused.unwrap_err().contains("no such snapshot"));
    let receive = ["snapshot", "receive", "pool", "three"];
    assert!(piped(&folder, &receive, "f.toml", "out").unwrap_err().contains("the daemon uses"));
    drop(nbd);
    let folder = daemon.end();
    let folder = folder.path();
    run(folder, &["store", "create", "other", "64M"]).unwrap();
    let send = |name: &str, more: &[&str], output: &str| {
        let words = ["snapshot", "send", "one", name, "--store", "pool"];
        piped(folder, &[&words, more].concat(), "f.toml", output).unwrap();
    };
    send("x", &[], "x.stream");
    send("y", &["--from", "x"], "y.stream");
    for name in ["x", "y"] {
        compare(&folder.join(format!("{name}.of-daemon")), &folder.join(format!("{name}.stream")));
    }
    let receive =
        |input: &str| piped(folder, &["snapshot", "receive", "other", "copy"], input, "out");
    let bytes = std::fs::read(folder.join("x.stream")).unwrap();
    std::fs::write(folder.join("cut"), &bytes[..bytes.len() - 10]).unwrap();
    assert!(receive("cut").unwrap_err().contains("cut off"));
    assert!(receive("f.toml").unwrap_err().contains("no snapshot of Fathom"));
    assert!(receive("y.stream").unwrap_err().contains("no such volume"));
    let listed = run(folder, &["store", "list", "other", "--json"]).unwrap();
    assert!(listed.contains("\"volumes\": []"), "{listed}");
    receive("x.stream").unwrap();
    receive("y.stream").unwrap();
    assert!(std::fs::metadata(folder.join("y.stream")).unwrap().len() < 110_000);
    for name in ["x", "y"] {
        for (pool, volume) in [("pool", "one"), ("other", "copy")] {
            let image = format!("{pool}-{name}.img");
            run(folder, &["store", "export", pool, &format!("{volume}@{name}"), &image]).unwrap();
        }
        let image = |pool: &str| folder.join(format!("{pool}-{name}.img"));
        compare(&image("pool"), &image("other"));
    }
    run(folder, &["store", "check", "other"]).unwrap();
}

#[test]
fn a_snapshot_is_kept_while_a_client_compares_with_it() {
    if !have(&["nbdsh"]) {
        return;
    }
    let daemon = Daemon::start_in(prepared(), CONFIGURATION);
    let clients = Clients { daemon: &daemon };
    clients.snapshot("kept");
    let fathom = env!("CARGO_BIN_EXE_fathom");
    let script = format!(
        r"
import subprocess
def delete():
    command = ['{fathom}', 'snapshot', 'delete', 'a', 'kept', '--control', words[1]]
    return subprocess.run(command, capture_output=True, text=True)
h.add_meta_context('qemu:dirty-bitmap:kept')
h.connect_uri(words[0])
assert h.can_meta_context('qemu:dirty-bitmap:kept')
seen = []
h.block_status(1 << 20, 0, lambda name, offset, entries, error: seen.append(entries))
assert seen == [[16 << 20, 0]] or seen == [[1 << 20, 0]], seen
refused = delete()
assert refused.returncode != 0 and 'uses' in refused.stderr, refused
h.shutdown()
import time
for _ in range(200):
    if delete().returncode == 0:
        break
    time.sleep(0.05)
else:
    assert False, 'it is kept for ever'
"
    );
    nbdsh(&script, &[&clients.uri("a"), &clients.path("control.sock")]).unwrap();
    daemon.end();
}

#[test]
fn a_layer_that_holds_changes_back_makes_no_wrong_bitmaps() {
    if !have(&["nbdsh", "nbdinfo"]) {
        return;
    }
    let daemon = Daemon::start_in(prepared(), CONFIGURATION);
    let clients = Clients { daemon: &daemon };
    clients.snapshot("s");
    // It is not known of this layer that it passes all changes on. Layers that certainly hold some
    // back are not made over volumes.
    let fault = LayerDefinition::new("fault", json!({ "operations": ["get-id"] }));
    let layers = DiskChange { layers: Some(vec![fault]), ..DiskChange::default() };
    let none = DiskChange { layers: Some(Vec::new()), ..DiskChange::default() };
    daemon.client().change_disk("a", &layers).unwrap();
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    nbd.write(0, &[5; 4096]);
    let map = |export: &str, name: &str| {
        let map = format!("--map=qemu:dirty-bitmap:{name}");
        client("nbdinfo", &[&map, &clients.uri(export)])
    };
    assert!(map("a", "s").is_err(), "the layer may have the change");
    let text = client("nbdinfo", &["--list", &clients.uri("")]).unwrap();
    assert!(!text.contains("qemu:dirty-bitmap:s"), "{text}");
    // A snapshot has no layer with changes of its own.
    clients.snapshot("t");
    clients.serve("t");
    assert!(map("t", "s").is_ok());
    daemon.client().change_disk("a", &none).unwrap();
    let text = map("a", "s").unwrap();
    assert!(text.lines().next().unwrap().contains("4096    1"), "{text}");
    // The layer comes while a client is connected.
    let script = r"
h.add_meta_context('qemu:dirty-bitmap:s')
h.connect_uri(words[0])
ask = lambda: h.block_status(1 << 20, 0, lambda *answer: 0)
ask()
open(words[1], 'w').close()
import os, time
while os.path.exists(words[1]):
    time.sleep(0.01)
try:
    ask()
except nbd.Error:
    pass
else:
    assert False, 'the answer may lack what the layer has'
assert len(h.pread(512, 0)) == 512
h.shutdown()
";
    let flag = daemon.path("flag");
    let words = [clients.uri("a"), flag.display().to_string()];
    let waiter = std::thread::spawn(move || nbdsh(script, &[&words[0], &words[1]]));
    daemon.until("the client asks", || flag.exists() || waiter.is_finished());
    daemon.client().change_disk("a", &layers).unwrap();
    let removed = std::fs::remove_file(&flag);
    waiter.join().unwrap().unwrap();
    removed.unwrap();
    drop(nbd);
    daemon.end();
}
