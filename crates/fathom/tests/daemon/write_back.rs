//! The mode `write-back` of the layer `cache`: what was acknowledged is there after a kill, and the
//! image gets it before the cache leaves.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fathom_control::{DiskChange, LayerDefinition};
use fathom_failure::Failing as _;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::cache::{BLOCK, cache, fails, read, succeeds, text, write};
use crate::nbd::Nbd;
use crate::overwrite::overwrite;
use crate::process::{Daemon, command};

const SIZE: u64 = 16 << 20;
const BLOCKS: u64 = 64;

/// A folder with two images and a cache with two logs. Its file system has extended attributes.
fn folder() -> TempDir {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    for image in ["a.img", "b.img", "c.img"] {
        File::create(folder.path().join(image)).unwrap().set_len(SIZE).unwrap();
    }
    let made = succeeds(
        folder.path(),
        &["create", "cache", "--size", "12M", "--log", "4M", "--logs", "2"],
    );
    assert!(made.contains("and 2 logs of 2 MiB each"), "{made}");
    folder
}

fn layer(options: &str) -> String {
    format!("layers = [{{ kind = \"cache\", store = \"cache\", exclusive = true{options} }}]")
}

/// The disks "a" and "b" with these options of their caches.
fn configuration(a: &str, b: &str) -> String {
    format!(
        "[[nbd]]\naddress = \"unix:nbd.sock\"\n\
         [[disk]]\nname = \"a\"\nimage = \"a.img\"\n{a}\n\
         [[disk]]\nname = \"b\"\nimage = \"b.img\"\n{b}\n"
    )
}

/// Both disks in the mode `write-back`, with this age.
fn write_back(age: &str) -> String {
    let layer = layer(&format!(", mode = \"write-back\", age = \"{age}\""));
    configuration(&layer, &layer)
}

fn connect(daemon: &Daemon, disk: &str) -> Nbd {
    Nbd::connect(&daemon.path("nbd.sock"), disk)
}

fn figure(daemon: &Daemon, disk: &str, layer: &str, name: &str) -> Option<u64> {
    daemon.client().disk(disk).unwrap().figure(layer, name)
}

/// The byte that fills a block of an image.
fn of_image(folder: &Path, image: &str, block: u64) -> u8 {
    let mut bytes = [0; BLOCK as usize];
    let image = File::open(folder.join(image)).unwrap();
    image.read_exact_at(&mut bytes, block * BLOCK).unwrap();
    assert!(bytes.iter().all(|byte| *byte == bytes[0]), "a block is torn");
    bytes[0]
}

fn kill(daemon: Daemon) -> TempDir {
    daemon.signal(libc::SIGKILL);
    daemon.wait().1
}

/// What a daemon logs that cannot serve all disks.
fn refusal(folder: &Path, configuration: &str) -> String {
    std::fs::write(folder.join("g.toml"), configuration).unwrap();
    let mut command = command(folder);
    command.args(["serve", "--strict", "--config", "g.toml", "--control", "control.sock"]);
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(2) && child.try_wait().unwrap().is_none() {
        std::thread::sleep(Duration::from_millis(20));
    }
    let _ = child.kill();
    String::from_utf8_lossy(&child.wait_with_output().unwrap().stderr).into_owned()
}

#[test]
fn acknowledged_writes_survive_kills() {
    let mut folder = folder();
    let mut expected = [[0_u8; BLOCKS as usize], [0; BLOCKS as usize]];
    for life in 0..5_u8 {
        // In some lives all changes stay in the log until it is full, in others they are written
        // home soon.
        let daemon = Daemon::start_in(folder, &write_back(["60s", "1ms"][life as usize % 2]));
        for (disk, name) in ["a", "b"].into_iter().enumerate() {
            let mut nbd = connect(&daemon, name);
            for round in 0..2 {
                for (block, content) in expected[disk].iter().enumerate() {
                    let found = read(&mut nbd, block as u64);
                    assert_eq!(found, *content, "life {life}, {name} {block}, {round}");
                }
            }
        }
        let write = |nbd: &mut Nbd, block, content| {
            write(nbd, block, content);
            assert_eq!(read(nbd, block), content);
        };
        overwrite(&daemon, life, Duration::from_millis(400), BLOCK, write, &mut expected);
        folder = kill(daemon);
        let check = succeeds(folder.path(), &["check", "cache", "--data"]);
        assert!(check.contains("2 of 2") && check.contains("LOG OF"), "{check}");
    }
    // The orderly end writes all changes home, and frees the places of the logs.
    let daemon = Daemon::start_in(folder, &write_back("60s"));
    let mut nbd = connect(&daemon, "a");
    // Blocks that are read before the tables are loaded are not inserted.
    let hits = || figure(&daemon, "a", "cache", "hits_total").unwrap();
    daemon.until("the blocks to be in the cache", || {
        let before = hits();
        for (block, content) in expected[0].iter().enumerate() {
            assert_eq!(read(&mut nbd, block as u64), *content);
        }
        hits() == before + BLOCKS
    });
    drop(nbd);
    folder = daemon.end();
    for (disk, image) in ["a.img", "b.img"].into_iter().enumerate() {
        for (block, content) in expected[disk].iter().enumerate() {
            assert_eq!(of_image(folder.path(), image, block as u64), *content, "{image} {block}");
        }
    }
    let check = succeeds(folder.path(), &["check", "cache", "--data", "--json"]);
    let check: Value = serde_json::from_str(&check).unwrap();
    assert_eq!((&check["logs"], &check["logs_max"]), (&json!([]), &json!(2)));
    // Without the log, the cache still fits the image.
    let daemon = Daemon::start_in(folder, &configuration(&layer(""), ""));
    daemon.until("the tables to be loaded", || {
        let _nbd = connect(&daemon, "a");
        figure(&daemon, "a", "cache", "blocks") >= Some(BLOCKS)
    });
    let mut nbd = connect(&daemon, "a");
    for (block, content) in expected[0].iter().enumerate() {
        assert_eq!(read(&mut nbd, block as u64), *content);
    }
    assert_eq!(figure(&daemon, "a", "cache", "hits_total"), Some(BLOCKS), "{}", daemon.log());
}

/// An image is served neither without its cache nor with another one, and a cache with changes is
/// not replaced.
#[test]
fn an_image_whose_changes_are_in_a_cache_needs_it() {
    let daemon = Daemon::start_in(folder(), &write_back("60s"));
    write(&mut connect(&daemon, "a"), 3, 7);
    let report = daemon.client().caches(Some("a"), 0, 0).unwrap();
    let (_, disk) = report.of_disk("a").unwrap();
    assert!(disk.mode == "write-back" && disk.dirty_bytes >= BLOCK, "{disk:?}");
    assert!(disk.log_bytes > (1 << 20) && disk.log_bytes < (2 << 20), "{disk:?}");
    let info = succeeds(&daemon.path(""), &["info", "a", "--control", "control.sock"]);
    assert!(info.contains("may not be on the disk yet") && info.contains("write-back"), "{info}");
    let list = succeeds(&daemon.path(""), &["list", "--control", "control.sock"]);
    assert!(list.contains("DIRTY"), "{list}");
    let folder = kill(daemon);
    let path = folder.path();
    assert_eq!(of_image(path, "a.img", 3), 0, "the change is only in the log");
    let check = succeeds(path, &["check", "cache"]);
    assert!(check.contains("LOG OF") && check.contains("a.img"), "{check}");

    let behind = |configuration: &str| {
        let log = refusal(path, configuration);
        let place = format!("in the log of the cache at {}", path.join("cache").display());
        assert!(log.contains("a.img alone may be out of date") && log.contains(&place), "{log}");
        assert!(log.contains("in the mode `write-back` and that `store`"), "{log}");
    };
    behind(&configuration("", ""));
    behind(&configuration(&layer(""), ""));
    succeeds(path, &["create", "other", "--size", "8M", "--log", "2M", "--logs", "1"]);
    behind(&write_back("60s").replace("\"cache\", exc", "\"other\", exc"));
    fails(path, &["create", "cache", "--size", "8M", "--force"], "changes of the disk a");
    // Emptying it keeps its logs.
    succeeds(path, &["clear", "cache"]);
    // A disk of another name or image does not get the changes.
    let other = refusal(path, &write_back("60s").replacen("name = \"a\"", "name = \"x\"", 1));
    assert!(other.contains("belongs to the disk \"a\""), "{other}");
    let other = refusal(path, &write_back("60s").replacen("a.img", "c.img", 1));
    assert!(other.contains("holds changes of this disk for"), "{other}");

    // The cache is missing at the start, and comes back.
    std::fs::rename(path.join("cache"), path.join("away")).unwrap();
    behind(&write_back("60s"));
    let missing = refusal(path, &write_back("60s").replace("a.img", "c.img"));
    assert!(missing.contains("is its device mounted?"), "{missing}");
    std::fs::rename(path.join("away"), path.join("cache")).unwrap();
    // An earlier daemon has recorded that the store of the cache lost writes: the log is written
    // again, and nothing is acknowledged before the operator has confirmed that.
    let flags = rustix::fs::XattrFlags::empty();
    let name = c"user.fathom.writes-lost";
    rustix::fs::setxattr(path.join("cache"), name, b"5 lost", flags).unwrap();
    let daemon = Daemon::start_in(folder, &write_back("60s"));
    let mut nbd = connect(&daemon, "a");
    assert_eq!(read(&mut nbd, 3), 7);
    assert_ne!(nbd.fill_block(4, 8), Some(0));
    // The disk "b" had no log then.
    assert_eq!(connect(&daemon, "b").fill_block(4, 8), Some(0));
    daemon.client().recover_disk("a").unwrap();
    write(&mut nbd, 4, 8);
    drop(nbd);
    let folder = daemon.end();
    assert_eq!([3, 4].map(|block| of_image(folder.path(), "a.img", block)), [7, 8]);
    // All is home: the image needs nothing.
    let daemon = Daemon::start_in(folder, &configuration("", ""));
    assert_eq!(read(&mut connect(&daemon, "a"), 3), 7);
}

/// Another cache takes the place of one with changes in its log only on request, and these changes
/// are home then.
#[test]
fn a_cache_is_replaced_on_request_and_its_log_is_written_home_first() {
    let daemon = Daemon::start_in(folder(), &write_back("60s"));
    let client = daemon.client();
    let root = daemon.path("");
    let folder = root.as_path();
    succeeds(folder, &["create", "other", "--size", "8M", "--log", "2M", "--logs", "1"]);
    let attach = |options: &[&str], replaces: bool| {
        let mut arguments = vec!["attach", "a", "--control", "control.sock"];
        arguments.extend_from_slice(options);
        arguments.extend(replaces.then_some("--replace"));
        text(&cache(folder, &arguments))
    };
    let mut nbd = connect(&daemon, "a");
    let other = ["--store", "other", "--mode", "write-back", "--age", "60s"];
    let small = ["--size", "2M"];
    for (step, options) in [&other[..], &small, &other].into_iter().enumerate() {
        let (block, content) = (step as u64 + 3, step as u8 + 7);
        write(&mut nbd, block, content);
        let layers = || client.disk("a").unwrap().layers;
        let before = layers();
        let refused = attach(options, false);
        assert!(refused.contains("has another cache already"), "{refused}");
        assert!(refused.contains("detach a") && refused.contains("--replace"), "{refused}");
        assert_eq!(layers(), before);
        assert!(attach(options, true).contains("uses the cache"));
        assert_eq!(of_image(folder, "a.img", block), content, "it was only in the log");
        assert_eq!(read(&mut nbd, block), content);
        // The same cache with other options is no other cache.
        let mut again = vec!["attach", "a", "--control", "control.sock", "--read-ahead", "1M"];
        again.extend_from_slice(options);
        succeeds(folder, &again);
    }
}

/// The mode changes under load, by a reload and by a change of the disk; nothing old is ever read.
#[test]
fn the_mode_changes_while_the_disk_is_in_use() {
    let daemon = Daemon::start_in(folder(), &configuration(&layer(""), ""));
    let client = daemon.client();
    let store = daemon.path("cache").display().to_string();
    let set = |mode: &str| {
        let options = json!({ "store": store, "exclusive": true, "mode": mode, "age": "20ms" });
        let layer = LayerDefinition::new("cache", options);
        DiskChange { set_layer: Some(layer), ..DiskChange::default() }
    };
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let writers: Vec<_> = [0, 64]
            .into_iter()
            .map(|first| {
                let (daemon, stop) = (&daemon, &stop);
                scope.spawn(move || {
                    let mut nbd = connect(daemon, "a");
                    let (mut written, mut count) = ([0_u8; 32], 0_u64);
                    while !stop.load(Ordering::Relaxed) {
                        let at = count % 32;
                        assert_eq!(read(&mut nbd, first + at), written[at as usize], "{at}");
                        if count % 2 == 0 || count < 32 {
                            written[at as usize] = (count % 250) as u8 + 1;
                            write(&mut nbd, first + at, written[at as usize]);
                        }
                        count += 1;
                    }
                    (first, written, count)
                })
            })
            .collect();
        for round in 0..5 {
            for mode in ["write-back", "write-through", "write-back", "write-around"] {
                client.change_disk("a", &set(mode)).unwrap();
                let is_logged = figure(&daemon, "a", "wal", "used_bytes").is_some();
                assert_eq!(is_logged, mode == "write-back", "{round} {mode}");
                std::thread::sleep(Duration::from_millis(60));
            }
            std::fs::write(daemon.path("f.toml"), write_back("10ms")).unwrap();
            let report = client.reload().unwrap();
            assert!(report.refused.is_empty(), "{report:?}");
            std::thread::sleep(Duration::from_millis(60));
            std::fs::write(daemon.path("f.toml"), configuration(&layer(""), "")).unwrap();
            let report = client.reload().unwrap();
            assert!(report.refused.is_empty(), "{report:?}");
            assert_eq!(figure(&daemon, "a", "wal", "used_bytes"), None);
        }
        client.change_disk("a", &set("write-back")).unwrap();
        std::thread::sleep(Duration::from_millis(100));
        stop.store(true, Ordering::Relaxed);
        let written: Vec<_> = writers.into_iter().map(|writer| writer.join().unwrap()).collect();
        let detached = succeeds(&daemon.path(""), &["detach", "a", "--control", "control.sock"]);
        assert!(detached.contains("write-back of what its log had"), "{detached}");
        for (first, written, count) in written {
            assert!(count > 100, "{count} rounds");
            for (at, content) in written.into_iter().enumerate() {
                let block = first + at as u64;
                assert_eq!(of_image(&daemon.path(""), "a.img", block), content, "{block}");
            }
        }
        let attach = ["attach", "a", "--store", "cache", "--mode", "write-back", "--age", "1s"];
        succeeds(&daemon.path(""), &[&attach[..], &["--control", "control.sock"]].concat());
        assert_eq!(figure(&daemon, "a", "wal", "used_bytes"), Some(0));
    });
}

/// The log of a disk that is never served again is seen, and given up only on request.
#[test]
fn a_log_that_nobody_needs_is_given_up() {
    let daemon = Daemon::start_in(folder(), &write_back("60s"));
    write(&mut connect(&daemon, "a"), 3, 7);
    let used = ["clear", "cache", "--log", "a", "--force"];
    fails(&daemon.path(""), &used, "in use by another process");
    // The disk "b" has no changes in its log.
    let folder = kill(daemon);
    let path = folder.path();
    let check = succeeds(path, &["check", "cache"]);
    assert!(check.contains("2 of 2"), "{check}");
    fails(path, &["clear", "cache", "--log", "c"], "no log of the disk c");
    fails(path, &["clear", "cache", "--log-at", "4096"], "no log at byte 4096");
    fails(path, &["clear", "cache", "--force"], "required");
    fails(path, &["clear", "cache", "--log", "a", "--log-at", "1"], "cannot be used with");
    fails(path, &["clear", "cache", "--log", "a"], "changes that may not be in its image");
    // Without changes, the image does not need the log any more.
    let freed = succeeds(path, &["clear", "cache", "--log", "b"]);
    assert!(freed.contains("the disk b is free") && freed.contains("does not need it"), "{freed}");
    let check = succeeds(path, &["check", "cache"]);
    assert!(check.contains("1 of 2"), "{check}");
    let lost = succeeds(path, &["clear", "cache", "--log", "a", "--force", "--json"]);
    let lost: Value = serde_json::from_str(&lost).unwrap();
    assert_eq!((&lost["log"]["disk"], &lost["log"]["records"]), (&json!("a"), &json!(1)));
    let removal = lost["mark"]["kept"].as_str().unwrap();
    assert_eq!(removal, format!("fathom log discard --image {}", path.join("a.img").display()));
    // The image may be torn: it is served only when somebody has removed its mark. Other disks get
    // the places.
    let other = write_back("60s").replace("name = \"b\"", "name = \"d\"");
    let refused = refusal(path, &other);
    assert!(refused.contains("a.img alone may be out of date"), "{refused}");
    let discard = || command(path).args(removal.split(' ').skip(1)).output().unwrap();
    let output = discard();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && text.contains("is not marked any more"), "{text}");
    let text = String::from_utf8_lossy(&discard().stderr).into_owned();
    assert!(text.contains("has no mark of a log"), "{text}");
    // What the cache has of it is newer than the image.
    let daemon = Daemon::start_in(folder, &other);
    let found: Vec<u8> = (0..3).map(|_| read(&mut connect(&daemon, "a"), 3)).collect();
    assert_eq!(found, [0; 3], "{}", daemon.log());
    assert!(daemon.log().contains("changes of a log that the disk does not have any more"));
    write(&mut connect(&daemon, "d"), 3, 9);
    assert_eq!(read(&mut connect(&daemon, "d"), 3), 9);
}

/// What cannot have the mode is refused with a remedy.
#[test]
fn a_cache_without_a_log_is_refused() {
    let folder = folder();
    succeeds(folder.path(), &["create", "plain", "--size", "4M"]);
    fails(folder.path(), &["create", "x", "--size", "8M", "--log", "8M"], "too few for a cache");
    fails(folder.path(), &["create", "x", "--size", "8M", "--log", "1M"], "into 4 logs");
    let daemon = Daemon::start_in(folder, &configuration("", ""));
    let client = daemon.client();
    let refused = |disk: &str, layers: &[(&str, Value)]| {
        let layers =
            layers.iter().map(|(kind, options)| LayerDefinition::new(kind, options.clone()));
        let change = DiskChange { layers: Some(layers.collect()), ..DiskChange::default() };
        let error = client.change_disk(disk, &change).unwrap_err();
        format!("{error} {}", error.remedy())
    };
    let path = |name: &str| daemon.path(name).display().to_string();
    let options = |store: &str| json!({ "store": path(store), "mode": "write-back" });
    let memory = refused("a", &[("cache", json!({ "mode": "write-back" }))]);
    assert!(memory.contains("in memory cannot keep changes"), "{memory}");
    let plain = refused("a", &[("cache", options("plain"))]);
    assert!(plain.contains("has no place for logs") && plain.contains("--log SIZE"), "{plain}");
    let missing = refused("a", &[("cache", options("missing"))]);
    assert!(missing.contains("does not exist") && !daemon.path("missing").exists(), "{missing}");
    let wal = json!({ "log": path("log"), "size": "1M" });
    let both = refused("a", &[("cache", options("cache")), ("wal", wal)]);
    assert!(both.contains("durable in one log"), "{both}");
    // Both places are in use.
    for disk in ["a", "b"] {
        let layer = LayerDefinition::new("cache", options("cache"));
        let change = DiskChange { set_layer: Some(layer), ..DiskChange::default() };
        client.change_disk(disk, &change).unwrap();
    }
    let third = fathom_control::DiskDefinition {
        name: "c".into(),
        image: Some(daemon.path("c.img")),
        layers: vec![LayerDefinition::new("cache", options("cache"))],
        ..fathom_control::DiskDefinition::default()
    };
    let refused = client.add_disk(&third).unwrap_err();
    assert!(refused.to_string().contains("all its 2 places for logs are in use"), "{refused}");
    // The store of a cache is no log of another disk's layer `wal`.
    let layer = LayerDefinition::new("wal", json!({ "log": path("cache"), "size": "1M" }));
    let third = fathom_control::DiskDefinition { layers: vec![layer], ..third };
    let refused = client.add_disk(&third).unwrap_err();
    assert!(refused.to_string().contains("store of a cache"), "{refused}");
    // A disk that is removed frees its place.
    client.remove_disk("b", false).unwrap();
    let layers = vec![LayerDefinition::new("cache", options("cache"))];
    let third = fathom_control::DiskDefinition { layers, ..third };
    client.add_disk(&third).unwrap();
    // The data of a damaged log is not given up.
    write(&mut connect(&daemon, "a"), 1, 1);
    let folder = kill(daemon);
    let check = succeeds(folder.path(), &["check", "cache", "--json"]);
    let check: Value = serde_json::from_str(&check).unwrap();
    let offset = check["logs"][0]["offset"].as_u64().unwrap();
    let file = OpenOptions::new().write(true).open(folder.path().join("cache")).unwrap();
    for copy in [64, 4096 + 64] {
        file.write_all_at(&[0xff; 64], offset + copy).unwrap();
    }
    fails(folder.path(), &["check", "cache"], "changes that are nowhere else");
    fails(folder.path(), &["create", "cache", "--size", "8M", "--force"], "cannot be read");
    let at = offset.to_string();
    fails(folder.path(), &["clear", "cache", "--log-at", &at], "restore cache");
    let log = refusal(folder.path(), &write_back("1s").replace("name = \"b\"", "name = \"d\""));
    assert!(log.contains("a.img alone may be out of date"), "{log}");
}
