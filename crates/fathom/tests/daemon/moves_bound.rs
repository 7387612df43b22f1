//! Disks with a log, or with a cache that outlives the daemon, that move while they are used: what
//! only these have is home before the copy begins, and they are there again at the end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use fathom_control::{Bytes, DiskChange, LayerDefinition, MovePhase, MoveRequest, ProblemKind};
use serde_json::json;

use crate::live::records;
use crate::moves::{
    CONFIGURATION, Known, connect, has_record, moved, prepared, refused, status, to_image,
    to_volume, write_on,
};
use crate::process::Daemon;
use crate::store::run;

/// The layers of the disk that a definition lists.
fn listed(daemon: &Daemon) -> Vec<String> {
    let layers = daemon.client().disk("a").unwrap().layers;
    let names = layers.into_iter().map(|layer| layer.name);
    names.filter(|name| !["classify", "tap", "activity"].contains(&name.as_str())).collect()
}

/// Sets a layer that lasts, or one that ends with the daemon.
fn set(daemon: &Daemon, layer: LayerDefinition, temporary: bool) {
    let change = DiskChange { set_layer: Some(layer), temporary, ..DiskChange::default() };
    daemon.client().change_disk("a", &change).unwrap();
}

fn wal(daemon: &Daemon) -> LayerDefinition {
    LayerDefinition::new("wal", json!({ "log": daemon.path("w.log"), "size": "2M" }))
}

fn write_back(daemon: &Daemon) -> LayerDefinition {
    let options = json!({ "store": daemon.path("cache"), "mode": "write-back", "exclusive": true });
    LayerDefinition::new("cache", options)
}

/// Writes while `work` goes on, and returns what is known then.
fn under_load(daemon: &Daemon, seed: u64, work: impl FnOnce()) -> Known {
    let stop = Arc::new(AtomicBool::new(false));
    let (nbd, for_thread) = (connect(daemon), Arc::clone(&stop));
    let writer = thread::spawn(move || write_on(nbd, Known::default(), seed, &for_thread));
    work();
    stop.store(true, Ordering::Release);
    writer.join().unwrap()
}

#[test]
fn a_disk_with_a_log_moves_and_has_the_log_again() {
    let daemon = Daemon::start_in(prepared(), CONFIGURATION);
    set(&daemon, wal(&daemon), false);
    let known = under_load(&daemon, 1, || {
        let status = moved(&daemon, &to_image(&daemon, "b.img"));
        assert!(!has_record(&daemon.path("")), "{status:?}");
    });
    assert_eq!(listed(&daemon), ["wal"]);
    known.check(&mut connect(&daemon));
    daemon.signal(libc::SIGKILL);
    let daemon = Daemon::start_in(daemon.wait().1, CONFIGURATION);
    assert_eq!(listed(&daemon), ["wal"]);
    known.check(&mut connect(&daemon));
    // Once more, and the image alone has all of it at the end.
    let known = under_load(&daemon, 2, || drop(moved(&daemon, &to_image(&daemon, "c.img"))));
    let remove = DiskChange { remove_layer: Some("wal".into()), ..DiskChange::default() };
    daemon.client().change_disk("a", &remove).unwrap();
    known.check(&mut connect(&daemon));
    let folder = daemon.end();
    let more = CONFIGURATION.replace("a.img", "c.img");
    std::fs::remove_dir_all(records(folder.path())).unwrap();
    let daemon = Daemon::start_in(folder, &more);
    known.check(&mut connect(&daemon));
    daemon.end();
}

#[test]
fn a_disk_with_a_cache_in_write_back_moves_and_has_the_cache_again() {
    let folder = prepared();
    let create = ["cache", "create", "cache", "--size", "12M", "--log", "4M", "--logs", "1"];
    run(folder.path(), &create).unwrap();
    let daemon = Daemon::start_in(folder, CONFIGURATION);
    set(&daemon, LayerDefinition::new("limit", json!({ "total_iops_sec": 100_000 })), false);
    set(&daemon, write_back(&daemon), false);
    let known = under_load(&daemon, 3, || drop(moved(&daemon, &to_image(&daemon, "b.img"))));
    assert_eq!(listed(&daemon), ["limit", "cache", "wal"]);
    known.check(&mut connect(&daemon));
    daemon.signal(libc::SIGKILL);
    let daemon = Daemon::start_in(daemon.wait().1, CONFIGURATION);
    assert_eq!(listed(&daemon), ["limit", "cache", "wal"]);
    known.check(&mut connect(&daemon));
    let folder = daemon.end();
    run(folder.path(), &["cache", "check", "cache", "--data"]).unwrap();
}

#[test]
fn a_kill_at_any_instant_of_a_move_loses_neither_data_nor_the_log() {
    let mut daemon = Daemon::start_in(prepared(), CONFIGURATION);
    set(&daemon, wal(&daemon), false);
    let mut random = fastrand::Rng::with_seed(11);
    let mut known = Known::default();
    for round in 0..12 {
        let stop = Arc::new(AtomicBool::new(false));
        let (nbd, before) = (connect(&daemon), known.clone());
        let writer = thread::spawn(move || write_on(nbd, before, round, &stop));
        let request = to_image(&daemon, &format!("m{round}.img"));
        let record = records(&daemon.path("")).join("a.change");
        let (client, begun) = (daemon.client(), request.clone());
        let mover = thread::spawn(move || client.move_disk("a", &begun).is_ok());
        // The log is taken off, the disk changes over, and the log is set again: each of these
        // changes the record of the disk. Any instant will do.
        for _ in 0..round % 4 {
            let before = std::fs::read(&record).ok();
            daemon.until("the change", || {
                std::fs::read(&record).ok() != before || has_ended(&daemon)
            });
        }
        thread::sleep(Duration::from_micros(random.u64(0..30_000)));
        daemon.signal(libc::SIGKILL);
        let (_, folder) = daemon.wait();
        let was_begun = mover.join().unwrap();
        known = writer.join().unwrap();
        daemon = Daemon::start_in(folder, CONFIGURATION);
        let mut nbd = connect(&daemon);
        known.check(&mut nbd);
        known.settle(&mut nbd);
        daemon.until("the move to end", || {
            has_ended(&daemon) && !has_record(&daemon.path("")) && listed(&daemon) == ["wal"]
        });
        known.check(&mut nbd);
        let image = daemon.client().disk("a").unwrap().backend.image;
        let is_at_target =
            image.as_deref().is_some_and(|it| request.image.as_deref() == Some(it.as_ref()));
        assert!(is_at_target || !was_begun, "round {round}: {image:?}, {:?}", status(&daemon));
        let problems = daemon.client().disk("a").unwrap().problems;
        assert!(problems.is_empty(), "round {round}: {problems:?}");
    }
    daemon.end();
}

fn has_ended(daemon: &Daemon) -> bool {
    status(daemon).is_none_or(|status| status.phase.has_ended())
}

#[test]
fn a_disk_whose_move_ends_early_has_its_log_again() {
    let daemon = Daemon::start_in(prepared(), CONFIGURATION);
    let client = daemon.client();
    set(&daemon, wal(&daemon), false);
    let mut nbd = connect(&daemon);
    (0..3).for_each(|part| nbd.write(part << 20, &vec![7; 1 << 20]));
    let slow = MoveRequest { speed: Some(Bytes(1)), ..to_image(&daemon, "slow.img") };
    client.move_disk("a", &slow).unwrap();
    assert_eq!(listed(&daemon), ["move"]);
    // Neither a request nor the file gives it another log meanwhile.
    let change = DiskChange { set_layer: Some(wal(&daemon)), ..DiskChange::default() };
    let body = refused(client.change_disk("a", &change));
    assert!(body.message.contains("while it moves"), "{body:?}");
    let layers =
        format!("{CONFIGURATION}layers = [{{ kind = \"wal\", log = \"w.log\", size = \"2M\" }}]\n");
    std::fs::write(daemon.path("f.toml"), &layers).unwrap();
    let reloaded = client.reload().unwrap();
    assert!(reloaded.refused.iter().any(|it| it.contains("while it moves")), "{reloaded:?}");
    // Other layers can be changed.
    set(&daemon, LayerDefinition::new("limit", json!({ "total_iops_sec": 100_000 })), false);
    assert_eq!(client.cancel_move("a").unwrap().phase, MovePhase::Cancelled);
    assert_eq!(listed(&daemon), ["limit", "wal"]);
    assert!(!has_record(&daemon.path("")) && !daemon.path("slow.img").exists());
    // The file has the log, and not the limit.
    assert!(client.reload().unwrap().refused.is_empty());
    assert_eq!(listed(&daemon), ["wal"]);
    assert_eq!(nbd.read(4096, 4096), [7; 4096]);
    drop(nbd);
    daemon.end();
}

#[test]
fn layers_that_cannot_follow_are_named_with_the_command_that_removes_them() {
    let daemon = Daemon::start_in(prepared(), CONFIGURATION);
    let client = daemon.client();
    set(&daemon, wal(&daemon), true);
    let body = refused(client.move_disk("a", &to_image(&daemon, "b.img")));
    assert!(body.message.contains("ends with the daemon"), "{body:?}");
    let body = refused(client.move_disk("a", &to_volume(&daemon, "v")));
    assert!(body.remedy.contains("`fathom disk layer a wal --remove`"), "{body:?}");
    assert!(!daemon.path("b.img").exists() && !has_record(&daemon.path("")));
    let remove = DiskChange { remove_layer: Some("wal".into()), ..DiskChange::default() };
    client.change_disk("a", &remove).unwrap();
    moved(&daemon, &to_volume(&daemon, "v"));
    daemon.end();
}

#[test]
fn a_log_that_cannot_be_set_again_is_a_problem_until_somebody_sets_it() {
    let daemon = Daemon::start_in(prepared(), CONFIGURATION);
    let client = daemon.client();
    std::fs::create_dir(daemon.path("logs")).unwrap();
    let layer =
        LayerDefinition::new("wal", json!({ "log": daemon.path("logs/w.log"), "size": "2M" }));
    set(&daemon, layer.clone(), false);
    let mut nbd = connect(&daemon);
    nbd.write(0, &[9; 8192]);
    let slow = MoveRequest { speed: Some(Bytes(1)), ..to_image(&daemon, "slow.img") };
    client.move_disk("a", &slow).unwrap();
    std::fs::rename(daemon.path("logs"), daemon.path("away")).unwrap();
    let ended = client.cancel_move("a").unwrap();
    assert_eq!(ended.phase, MovePhase::Failed, "{ended:?}");
    assert!(ended.message.contains("without its `wal`"), "{ended:?}");
    assert!(ended.remedy.contains("fathom disk layer a"), "{ended:?}");
    let problems = || client.disk("a").unwrap().problems;
    daemon.until("the problem", || {
        problems().iter().any(|problem| problem.kind == ProblemKind::MoveFailed)
    });
    assert_eq!(nbd.read(0, 8192), [9; 8192]);
    std::fs::rename(daemon.path("away"), daemon.path("logs")).unwrap();
    set(&daemon, layer, false);
    client.cancel_move("a").unwrap();
    daemon.until("the problem to end", || problems().is_empty());
    assert_eq!(listed(&daemon), ["wal"]);
    drop(nbd);
    daemon.end();
}
