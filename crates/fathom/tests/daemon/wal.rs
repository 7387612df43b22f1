//! The layer `wal` on real files: after a kill at any time, acknowledged writes exist.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fathom_control::{Bytes, DiskChange, DiskStatus, LayerDefinition, ProblemKind};
use serde_json::json;

use crate::live::records;
use crate::nbd::Nbd;
use crate::overwrite::overwrite;
use crate::process::{Daemon, command};

const SIZE: u64 = 8 << 20;
const BLOCK: u64 = 4096;

fn configuration(age: &str) -> String {
    format!(
        "[[disk]]\nname = \"a\"\nimage = \"a.img\"\n\
         layers = [{{ kind = \"wal\", log = \"logs\", size = \"1M\", age = \"{age}\" }}]\n\
         [[disk]]\nname = \"b\"\nimage = \"b.img\"\n\
         layers = [{{ kind = \"wal\", log = \"logs\", offset = \"1M\", size = \"1M\", age = \"{age}\" }}]\n\
         [[nbd]]\naddress = \"unix:nbd.sock\"\n"
    )
}

/// The log of the disk "a", with another age than in the configuration.
fn wal(daemon: &Daemon, log: &str) -> LayerDefinition {
    let options = json!({ "log": daemon.path(log), "size": "1M", "age": "1ms" });
    LayerDefinition::new("wal", options)
}

fn rounds(status: &DiskStatus) -> Option<u64> {
    status.figure("wal", "rounds_total")
}

fn layers(layers: Vec<LayerDefinition>) -> DiskChange {
    DiskChange { layers: Some(layers), ..DiskChange::default() }
}

#[test]
fn acknowledged_writes_survive_a_kill() {
    let mut folder = tempfile::tempdir().unwrap();
    for image in ["a.img", "b.img"] {
        File::create(folder.path().join(image)).unwrap().set_len(SIZE).unwrap();
    }
    let mut expected = [[0; 64], [0; 64]];
    for life in 0..6_u8 {
        // In some lives all changes stay in the log, in others most are written home: the log has 1
        // MiB.
        let daemon = Daemon::start_in(folder, &configuration(["60s", "1ms"][life as usize % 2]));
        for (disk, name) in ["a", "b"].into_iter().enumerate() {
            let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), name);
            for (block, content) in expected[disk].iter().enumerate() {
                assert_eq!(nbd.read_block(block as u64), *content, "life {life}, {name} {block}");
            }
        }
        let write = |nbd: &mut Nbd, block, content| {
            assert_eq!(nbd.fill_block(block, content), Some(0));
        };
        overwrite(&daemon, life, Duration::from_millis(300), BLOCK, write, &mut expected);
        daemon.signal(libc::SIGKILL);
        folder = daemon.wait().1;
    }
    // The changes of the last life are only in the log, and the image is out of date; an orderly
    // stop writes all changes back.
    let daemon = Daemon::start_in(folder, &configuration("60s"));
    folder = daemon.end();
    for (disk, image) in ["a.img", "b.img"].into_iter().enumerate() {
        let file = File::open(folder.path().join(image)).unwrap();
        for (block, content) in expected[disk].iter().enumerate() {
            let mut bytes = [0; BLOCK as usize];
            file.read_exact_at(&mut bytes, block as u64 * BLOCK).unwrap();
            assert!(bytes.iter().all(|byte| byte == content), "{image}, block {block}");
        }
    }
}

#[test]
fn a_log_of_another_disk_is_refused_with_a_remedy() {
    let folder = tempfile::tempdir().unwrap();
    for image in ["a.img", "b.img", "c.img"] {
        File::create(folder.path().join(image)).unwrap().set_len(SIZE).unwrap();
    }
    let daemon = Daemon::start_in(folder, &configuration("60s"));
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    assert_eq!(nbd.fill_block(3, 7), Some(0));
    // A served disk cannot change from one log to another, and cannot shrink.
    let client = daemon.client();
    let refused = client.change_disk("a", &layers(vec![wal(&daemon, "other")])).unwrap_err();
    assert!(refused.to_string().contains("from one log to another"), "{refused}");
    let change = fathom_control::DiskChange {
        capacity: Some(Bytes(SIZE / 2)),
        shrink: true,
        ..Default::default()
    };
    assert!(client.change_disk("a", &change).is_err());
    daemon.signal(libc::SIGKILL);
    let folder = daemon.wait().1;
    let refusal = |text: &str| {
        std::fs::write(folder.path().join("g.toml"), text).unwrap();
        let mut command = command(folder.path());
        command.args(["serve", "--strict", "--config", "g.toml", "--control", "c.sock"]);
        let mut child = command.stderr(std::process::Stdio::piped()).spawn().unwrap();
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(2) && child.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_millis(20));
        }
        let _ = child.kill();
        let output = child.wait_with_output().unwrap();
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let renamed = configuration("60s").replace("name = \"a\"", "name = \"other\"");
    let stderr = refusal(&renamed);
    assert!(
        stderr.contains("belongs to the disk \"a\"") && stderr.contains("`fathom log keep other`"),
        "{stderr}"
    );
    let moved = configuration("60s").replace("a.img", "c.img");
    let stderr = refusal(&moved);
    assert!(
        stderr.contains("holds changes of this disk for") && stderr.contains("a.img"),
        "{stderr}"
    );
    // The image alone lacks acknowledged writes: it is served neither without its log nor with
    // another.
    let behind = |stderr: &str| {
        let log = folder.path().join("logs").display().to_string();
        stderr.contains("a.img alone may be out of date") && stderr.contains(&log)
    };
    let alone = configuration("60s").replacen("layers", "# layers", 1);
    let stderr = refusal(&alone);
    assert!(behind(&stderr) && stderr.contains("its changes may be lost"), "{stderr}");
    let elsewhere = configuration("60s").replacen("\"logs\"", "\"other\"", 1);
    let stderr = refusal(&elsewhere);
    assert!(behind(&stderr) && !folder.path().join("other").exists(), "{stderr}");
    let place = configuration("60s").replacen("size = \"1M\"", "offset = \"2M\", size = \"1M\"", 1);
    let stderr = refusal(&place);
    assert!(behind(&stderr), "{stderr}");
    // Another disk's image is not used as a log.
    let image = OpenOptions::new().write(true).open(folder.path().join("c.img")).unwrap();
    image.write_all_at(b"an image", 0).unwrap();
    let image = configuration("60s").replace("\"logs\"", "\"c.img\"").replace("\"1M\"", "\"16M\"");
    let stderr = refusal(&image);
    assert!(stderr.contains("it holds other data"), "{stderr}");
    assert_eq!(std::fs::metadata(folder.path().join("c.img")).unwrap().len(), SIZE);
    // Both superblocks damaged.
    let log = OpenOptions::new().write(true).open(folder.path().join("logs")).unwrap();
    log.write_all_at(&[0xff; 64], 64).unwrap();
    log.write_all_at(&[0xff; 64], 4096 + 64).unwrap();
    let stderr = refusal(&configuration("60s"));
    assert!(stderr.contains("both superblocks of the log are damaged"), "{stderr}");
}

/// An earlier daemon has recorded that the log volume lost writes. The valid part of the log is
/// written again, and the disk is served.
#[test]
fn a_log_volume_that_failed_once_is_used_again() {
    let folder = tempfile::tempdir().unwrap();
    for image in ["a.img", "b.img"] {
        File::create(folder.path().join(image)).unwrap().set_len(SIZE).unwrap();
    }
    let daemon = Daemon::start_in(folder, &configuration("60s"));
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    assert_eq!(nbd.fill_block(3, 7), Some(0));
    daemon.signal(libc::SIGKILL);
    let folder = daemon.wait().1;
    let log = folder.path().join("logs");
    let flags = rustix::fs::XattrFlags::empty();
    rustix::fs::setxattr(&log, c"user.fathom.writes-lost", b"5 lost", flags).unwrap();
    let daemon = Daemon::start_in(folder, &configuration("60s"));
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    assert_eq!(nbd.read_block(3), 7);
    assert_eq!(nbd.fill_block(4, 8), Some(0));
    drop(nbd);
    let folder = daemon.end();
    // All changes have been written home: the image is served without the layer.
    let alone = configuration("60s").replace("layers", "# layers");
    let daemon = Daemon::start_in(folder, &alone);
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    assert_eq!((nbd.read_block(3), nbd.read_block(4)), (7, 8));
}

/// After a kill the image is marked although all changes were written back: a daemon without the
/// records of the last one does not know the log any more. The message says how to remove the layer
/// then, and that works.
#[test]
fn a_mark_that_a_kill_has_left_goes_with_the_layer() {
    let folder = tempfile::tempdir().unwrap();
    for image in ["a.img", "b.img"] {
        File::create(folder.path().join(image)).unwrap().set_len(SIZE).unwrap();
    }
    let with_log = configuration("1ms");
    let without = with_log.replacen("layers", "# layers", 1);
    let info = |folder: &std::path::Path| {
        let output = command(folder).args(["disk", "info", "a.img"]).output().unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let daemon = Daemon::start_in(folder, &with_log);
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    assert_eq!(nbd.fill_block(3, 7), Some(0));
    let used = || daemon.client().disk("a").unwrap().figure("wal", "used_bytes");
    daemon.until("the write-back", || used() == Some(0));
    daemon.signal(libc::SIGKILL);
    let folder = daemon.wait().1;
    let marked = format!("may be in the log at {}", folder.path().join("logs").display());
    assert!(info(folder.path()).contains(&marked), "{}", info(folder.path()));

    std::fs::remove_dir_all(records(folder.path())).unwrap();
    std::fs::write(folder.path().join("f.toml"), &without).unwrap();
    let mut serve = command(folder.path());
    serve.args(["serve", "--strict", "--config", "f.toml", "--control", "control.sock"]);
    let output = serve.output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(log.contains("a.img alone may be out of date") && log.contains(&marked), "{log}");
    assert!(log.contains("first serve the disk with it, then reload without it"), "{log}");

    let daemon = Daemon::start_in(folder, &with_log);
    std::fs::write(daemon.path("f.toml"), &without).unwrap();
    let report = daemon.client().reload().unwrap();
    assert!(report.refused.is_empty(), "{report:?}");
    daemon.signal(libc::SIGKILL);
    let folder = daemon.wait().1;
    assert!(!info(folder.path()).contains(&marked), "{}", info(folder.path()));
    let daemon = Daemon::start_in(folder, &without);
    assert_eq!(Nbd::connect(&daemon.path("nbd.sock"), "a").read_block(3), 7);
}

/// A mark in a file belongs to one image. Another one with the same name does not get the changes
/// in the log.
#[test]
fn a_successor_of_an_image_does_not_get_the_changes_in_the_log() {
    let folder = tempfile::tempdir().unwrap();
    for image in ["a.img", "b.img"] {
        File::create(folder.path().join(image)).unwrap().set_len(SIZE).unwrap();
    }
    let daemon = Daemon::start_in(folder, &configuration("60s"));
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    assert_eq!(nbd.fill_block(3, 7), Some(0));
    daemon.signal(libc::SIGKILL);
    let folder = daemon.wait().1;
    // As on a file system without extended attributes.
    let [image, beside] = ["a.img", "a.img.fathom-log"].map(|name| folder.path().join(name));
    let mut mark = vec![0; 1024];
    let length = rustix::fs::getxattr(&image, c"user.fathom.log", &mut mark[..]).unwrap();
    mark.truncate(length);
    rustix::fs::removexattr(&image, c"user.fathom.log").unwrap();
    std::fs::write(&beside, [&mark[..], b"\nimage: born=1 number=1"].concat()).unwrap();
    std::fs::write(folder.path().join("f.toml"), configuration("60s")).unwrap();
    let mut serve = command(folder.path());
    serve.args(["serve", "--strict", "--config", "f.toml", "--control", "control.sock"]);
    let output = serve.output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(log.contains("written for another image or device at this path"), "{log}");
    assert!(log.contains("`fathom log keep a`") && log.contains("`fathom log discard a`"), "{log}");
    // It is the same image after all.
    std::fs::write(&beside, &mark).unwrap();
    let daemon = Daemon::start_in(folder, &configuration("60s"));
    assert_eq!(Nbd::connect(&daemon.path("nbd.sock"), "a").read_block(3), 7);
}

/// A disk that is removed can be added again immediately: its log is free.
#[test]
fn a_disk_that_was_removed_is_added_again_with_its_log() {
    let folder = tempfile::tempdir().unwrap();
    for image in ["a.img", "b.img"] {
        File::create(folder.path().join(image)).unwrap().set_len(SIZE).unwrap();
    }
    let daemon = Daemon::start_in(folder, &configuration("60s"));
    let client = daemon.client();
    for round in 0..5 {
        let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "b");
        assert_eq!(nbd.fill_block(1, round + 1), Some(0));
        drop(nbd);
        daemon.until("the client to disconnect", || client.remove_disk("b", false).is_ok());
        let report = client.reload().unwrap();
        assert!(report.refused.iter().all(|line| !line.contains("\"b\"")), "{report:?}");
        let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "b");
        assert_eq!(nbd.read_block(1), round + 1);
    }
}

/// The layer is added and removed under load: over NBD, and over two queues of a VMM. Earlier
/// writes are read afterwards. The layer stays if changes cannot be written home.
#[test]
#[expect(clippy::too_many_lines, reason = "one scenario")]
fn the_log_is_added_and_removed_while_the_disk_is_in_use() {
    let folder = tempfile::tempdir().unwrap();
    for image in ["a.img", "b.img"] {
        File::create(folder.path().join(image)).unwrap().set_len(SIZE).unwrap();
    }
    let text = configuration("60s").replacen(
        "[[disk]]\nname = \"a\"\n",
        "[[disk]]\nname = \"a\"\nvhost_user = { socket = \"a.sock\", queues = 2 }\n",
        1,
    );
    let daemon = Daemon::start_in(folder, &text);
    let client = daemon.client();
    let log = || wal(&daemon, "logs");
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // A VMM's driver that compares the data read with the data written.
        let mut bench = command(daemon.path("").as_path());
        bench.args(["bench", "a", "--write", "--verify", "--queues", "2", "--depth", "4"]);
        bench.args(["--range", "4M", "--duration", "2s", "--control", "control.sock"]);
        let bench = bench.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let writers: Vec<_> = (0..3)
            .map(|number| {
                let (daemon, stop) = (&daemon, &stop);
                scope.spawn(move || {
                    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
                    let first = 1024 + number * 64;
                    let mut written = [0_u8; 64];
                    let mut count = 0_u64;
                    while !stop.load(Ordering::Relaxed) {
                        let at = count % 64;
                        assert_eq!(nbd.read_block(first + at), written[at as usize]);
                        let content = (count / 64 % 250) as u8 + 1;
                        assert_eq!(nbd.fill_block(first + at, content), Some(0));
                        written[at as usize] = content;
                        count += 1;
                    }
                    (first, written, count)
                })
            })
            .collect();
        let fails = json!({ "effect": "refused", "operations": ["write"] });
        let fails = LayerDefinition::new("fault", fails);
        for round in 0..8 {
            std::thread::sleep(Duration::from_millis(200));
            let status = client.change_disk("a", &layers(vec![])).unwrap();
            assert!(rounds(&status).is_none(), "round {round}");
            std::thread::sleep(Duration::from_millis(50));
            let status = client.change_disk("a", &layers(vec![log()])).unwrap();
            assert!(rounds(&status).is_some(), "round {round}");
        }
        let output = bench.wait_with_output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{stderr}");
        // Before write-back fails, because the log would soon be full.
        stop.store(true, Ordering::Relaxed);
        let written: Vec<_> = writers.into_iter().map(|writer| writer.join().unwrap()).collect();
        // Write-back fails: the layer stays, and the disk continues to use its log.
        let failing = vec![log(), fails];
        let before = client.change_disk("a", &layers(failing)).unwrap();
        let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
        assert_eq!(nbd.fill_block(2000, 9), Some(0));
        let refused = client.change_disk("a", &layers(vec![])).unwrap_err().to_string();
        assert!(refused.contains("the layer `wal` cannot be removed"), "{refused}");
        daemon.until("the layer's problem is shown", || {
            let problems = client.disk("a").unwrap().problems;
            let mut of_layer =
                problems.iter().filter(|problem| problem.kind == ProblemKind::LayerFailed);
            of_layer.any(|problem| problem.message.contains("is not written back"))
        });
        let metrics = client.metrics().unwrap();
        let line = "fathom_layer_wal_size_bytes{disk=\"a\",vm=\"\"}";
        assert!(metrics.contains(line) && metrics.contains("fathom_layer_wal_rounds_total{"));
        let mut info = command(daemon.path("").as_path());
        let info = info.args(["disk", "info", "a", "--control", "control.sock"]).output().unwrap();
        let info = String::from_utf8_lossy(&info.stdout).into_owned();
        assert!(info.contains(" used, ") && info.contains(" volume flushes"), "{info}");
        let after = client.change_disk("a", &layers(vec![log()])).unwrap();
        assert!(
            rounds(&after) >= rounds(&before) && rounds(&before) > Some(0),
            "it is the same log"
        );
        assert_eq!(nbd.read_block(2000), 9);
        std::fs::remove_file(daemon.path("logs")).unwrap();
        daemon.until("a log that was deleted is shown", || {
            let problems = client.disk("a").unwrap().problems;
            problems.iter().any(|problem| problem.message.contains("the store of `wal`"))
        });
        client.change_disk("a", &layers(vec![])).unwrap();
        for (first, written, count) in written {
            assert!(count > 100, "{count} writes");
            for (at, content) in written.into_iter().enumerate() {
                assert_eq!(nbd.read_block(first + at as u64), content, "{first} {at}");
            }
        }
    });
    // The image has all changes.
    let mut bytes = [0; 1];
    let image = File::open(daemon.path("a.img")).unwrap();
    image.read_exact_at(&mut bytes, 2000 * BLOCK).unwrap();
    assert_eq!(bytes, [9]);
}
