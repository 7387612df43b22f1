//! Disks that move while they are used: killed at any instant, refused, cancelled, full.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use fathom_control::{
    Bytes, ClientError, DiskChange, ErrorBody, LayerDefinition, MovePhase, MoveRequest, MoveStatus,
    ProblemKind, RevertRequest,
};
use serde_json::json;

use crate::live::records;
use crate::nbd::Nbd;
use crate::problems::Small;
use crate::process::{Daemon, image};
use crate::store::run;

const SIZE: u64 = 8 << 20;
const BLOCK: u64 = 4096;
pub const CONFIGURATION: &str = "[[nbd]]\naddress = \"unix:nbd.sock\"\n\
    [[disk]]\nname = \"a\"\nimage = \"a.img\"\n";
const WRITE: u16 = 1;
const FLUSH: u16 = 3;

/// A folder with an image and a pool.
pub fn prepared() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    image(folder.path(), "a.img", SIZE);
    run(folder.path(), &["store", "create", "pool", "256M"]).unwrap();
    folder
}

pub fn refused<T: std::fmt::Debug>(result: Result<T, ClientError>) -> ErrorBody {
    match result {
        Err(ClientError::Refused(body)) => body,
        other => panic!("expected a refusal: {other:?}"),
    }
}

pub fn to_image(daemon: &Daemon, name: &str) -> MoveRequest {
    MoveRequest { image: Some(daemon.path(name)), urgent: true, ..MoveRequest::default() }
}

pub fn to_volume(daemon: &Daemon, name: &str) -> MoveRequest {
    MoveRequest {
        store: Some(daemon.path("pool")),
        volume: Some(name.into()),
        urgent: true,
        ..MoveRequest::default()
    }
}

pub fn status(daemon: &Daemon) -> Option<MoveStatus> {
    daemon.client().disk("a").unwrap().moving
}

/// Moves the disk, and waits until it has moved.
pub fn moved(daemon: &Daemon, request: &MoveRequest) -> MoveStatus {
    daemon.client().move_disk("a", request).unwrap();
    daemon.until("the disk to move", || status(daemon).unwrap().phase.has_ended());
    let status = status(daemon).unwrap();
    assert_eq!(status.phase, MovePhase::Moved, "{status:?}");
    status
}

/// What a client knows of the disk: for each block the content that is durable for certain, and the
/// last one that it has sent. Contents of a block only grow.
#[derive(Clone, Default)]
pub struct Known(BTreeMap<u64, (u64, u64)>);

impl Known {
    pub fn check(&self, nbd: &mut Nbd) {
        for (block, (durable, sent)) in &self.0 {
            let bytes = nbd.read(block * BLOCK, BLOCK as u32);
            let first = u64::from_le_bytes(bytes[..8].try_into().unwrap());
            assert!(bytes.chunks(8).all(|word| word == &bytes[..8]), "block {block} is torn");
            assert!(
                (*durable..=*sent).contains(&first),
                "block {block} has {first}, and {durable} was flushed, {sent} sent"
            );
        }
    }

    /// After a crash, what is there is durable.
    pub fn settle(&mut self, nbd: &mut Nbd) {
        for (block, (durable, sent)) in &mut self.0 {
            let bytes = nbd.read(*block * BLOCK, 8);
            *durable = u64::from_le_bytes(bytes[..8].try_into().unwrap());
            *sent = *durable;
        }
    }
}

/// Writes and flushes until the daemon has gone or `stop` is set. Returns what it knows.
pub fn write_on(mut nbd: Nbd, mut known: Known, seed: u64, stop: &AtomicBool) -> Known {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut content = known.0.values().map(|(_, sent)| *sent).max().unwrap_or(0);
    loop {
        for _ in 0..random.u32(1..12) {
            content += 1;
            let block = random.u64(0..SIZE / BLOCK);
            let bytes = content.to_le_bytes().repeat(BLOCK as usize / 8);
            known.0.entry(block).or_insert((0, 0)).1 = content;
            let is_sent = nbd.send(WRITE, content, block * BLOCK, BLOCK as u32, &bytes);
            match nbd.reply().filter(|_| is_sent) {
                Some((_, error)) => assert_eq!(error, 0),
                None => return known,
            }
        }
        let is_sent = nbd.send(FLUSH, 0, 0, 0, &[]);
        match nbd.reply().filter(|_| is_sent) {
            Some((_, error)) => assert_eq!(error, 0),
            None => return known,
        }
        known.0.values_mut().for_each(|(durable, sent)| *durable = *sent);
        if stop.load(Ordering::Acquire) {
            return known;
        }
    }
}

pub fn connect(daemon: &Daemon) -> Nbd {
    Nbd::connect(&daemon.path("nbd.sock"), "a")
}

/// The records of moves that have begun and not ended.
pub fn has_record(folder: &Path) -> bool {
    let entries = std::fs::read_dir(records(folder)).unwrap();
    entries.into_iter().any(|entry| entry.unwrap().file_name() == "a.move")
}

#[test]
fn a_disk_moves_there_and_back_under_load() {
    let daemon = Daemon::start_in(prepared(), CONFIGURATION);
    let stop = Arc::new(AtomicBool::new(false));
    let (nbd, for_thread) = (connect(&daemon), Arc::clone(&stop));
    let writer = thread::spawn(move || write_on(nbd, Known::default(), 1, &for_thread));
    for number in 0..3 {
        moved(&daemon, &to_volume(&daemon, &format!("v{number}")));
        moved(&daemon, &to_image(&daemon, &format!("m{number}.img")));
    }
    stop.store(true, Ordering::Release);
    let known = writer.join().unwrap();
    assert!(known.0.len() > 10);
    known.check(&mut connect(&daemon));
    assert!(!has_record(&daemon.path("")));
    daemon.signal(libc::SIGKILL);
    let (_, folder) = daemon.wait();
    // The file names the first image further on.
    let daemon = Daemon::start_in(folder, CONFIGURATION);
    known.check(&mut connect(&daemon));
    let image = daemon.client().disk("a").unwrap().backend.image.unwrap();
    assert!(image.ends_with("/m2.img"), "{image}");
    // A reload takes the disk back neither now nor later, and so does no request.
    let reloaded = daemon.client().reload().unwrap();
    assert!(reloaded.changed.iter().any(|line| line.contains("moved")), "{reloaded:?}");
    assert!(reloaded.refused.is_empty(), "{reloaded:?}");
    let revert = RevertRequest { disk: Some("a".into()), ..RevertRequest::default() };
    let reverted = refused(daemon.client().revert(&revert));
    assert!(reverted.message.contains("has moved"), "{reverted:?}");
    let folder = daemon.end();
    let edited = format!("{CONFIGURATION}tap = false\n");
    let daemon = Daemon::start_in(folder, &edited);
    known.check(&mut connect(&daemon));
    assert!(daemon.client().disk("a").unwrap().layers.iter().all(|layer| layer.name != "tap"));
    let folder = daemon.end();
    // Without the records, the image that the disk has left is not served by mistake.
    std::fs::remove_dir_all(records(folder.path())).unwrap();
    let daemon = Daemon::start_in(folder, CONFIGURATION);
    daemon.until("the disk to be refused", || {
        let unserved = daemon.client().disks().unwrap().unserved;
        unserved.iter().any(|disk| disk.message.contains("has moved to"))
    });
    run(&daemon.path(""), &["disk", "recover", "a.img"]).unwrap();
    daemon.client().retry_disk("a").unwrap();
    daemon.end();
}

#[test]
fn a_kill_at_any_instant_of_a_move_loses_nothing_that_was_flushed() {
    let mut daemon = Daemon::start_in(prepared(), CONFIGURATION);
    let mut random = fastrand::Rng::with_seed(7);
    let mut known = Known::default();
    for round in 0..16 {
        let stop = Arc::new(AtomicBool::new(false));
        let (nbd, before) = (connect(&daemon), known.clone());
        let writer = thread::spawn(move || write_on(nbd, before, round, &stop));
        let request = match round % 3 {
            0 => to_volume(&daemon, &format!("v{round}")),
            _ => to_image(&daemon, &format!("m{round}.img")),
        };
        daemon.client().move_disk("a", &request).unwrap();
        // Any instant will do. Every second one is while the disk changes over, or just after.
        if round % 2 == 0 {
            thread::sleep(Duration::from_micros(random.u64(0..400_000)));
        } else {
            let record = records(&daemon.path("")).join("a.change");
            let before = std::fs::read(&record).ok();
            daemon.until("the change", || std::fs::read(&record).ok() != before);
            thread::sleep(Duration::from_micros(random.u64(0..40_000)));
        }
        daemon.signal(libc::SIGKILL);
        let (_, folder) = daemon.wait();
        known = writer.join().unwrap();
        daemon = Daemon::start_in(folder, CONFIGURATION);
        let mut nbd = connect(&daemon);
        known.check(&mut nbd);
        known.settle(&mut nbd);
        // The next daemon ends what was begun.
        daemon.until("the move to end", || {
            let has_ended = status(&daemon).is_none_or(|status| status.phase.has_ended());
            has_ended && !has_record(&daemon.path(""))
        });
        known.check(&mut nbd);
        let target = request.image.is_none();
        let is_volume = daemon.client().disk("a").unwrap().backend.name == "store";
        assert_eq!(is_volume, target, "round {round}: {:?}", status(&daemon));
    }
    let folder = daemon.end();
    let checked = run(folder.path(), &["store", "check", "pool", "--json"]).unwrap();
    assert!(checked.contains("\"problem_count\": 0"), "{checked}");
    let left = run(folder.path(), &["store", "list", "pool", "--json"]).unwrap();
    assert!(!left.contains(".incomplete"), "{left}");
}

#[test]
fn what_cannot_move_is_refused_and_a_move_that_ends_early_leaves_nothing() {
    let folder = prepared();
    image(folder.path(), "b.img", SIZE);
    let more = format!("{CONFIGURATION}[[disk]]\nname = \"b\"\nimage = \"b.img\"\n");
    let daemon = Daemon::start_in(folder, &more);
    let client = daemon.client();
    let refuse = |request: &MoveRequest| refused(client.move_disk("a", request));
    for name in ["b.img", "pool"] {
        let body = refuse(&to_image(&daemon, name));
        assert!(body.message.contains(&daemon.path(name).display().to_string()), "{body:?}");
    }
    assert!(refuse(&to_image(&daemon, "a.img")).message.contains("there already"));
    assert!(refuse(&MoveRequest::default()).message.contains("one store"));
    let relative = MoveRequest { image: Some("x.img".into()), ..MoveRequest::default() };
    assert!(refuse(&relative).message.contains("not absolute"));
    let log = LayerDefinition::new("wal", json!({ "log": daemon.path("w.log"), "size": "1M" }));
    let set = DiskChange { set_layer: Some(log), ..DiskChange::default() };
    client.change_disk("a", &set).unwrap();
    // A volume cannot have a log.
    let body = refuse(&to_volume(&daemon, "x"));
    assert!(
        body.message.contains("`wal`") && body.remedy.contains("layer a wal --remove"),
        "{body:?}"
    );
    let remove = DiskChange { remove_layer: Some("wal".into()), ..DiskChange::default() };
    client.change_disk("a", &remove).unwrap();

    // A move that takes for ever, because it is so slow: the second request never begins.
    let mut nbd = connect(&daemon);
    (0..3).for_each(|part| nbd.write(part << 20, &vec![7; 1 << 20]));
    let slow = MoveRequest { speed: Some(Bytes(1)), ..to_volume(&daemon, "slow") };
    client.move_disk("a", &slow).unwrap();
    assert!(refuse(&slow).message.contains("moves already"));
    let same = refused(client.move_disk("b", &slow));
    assert!(same.message.contains("moves to"), "{same:?}");
    let grow = DiskChange { capacity: Some(Bytes(SIZE * 2)), ..DiskChange::default() };
    let grown = refused(client.change_disk("a", &grow));
    assert!(grown.message.contains("while it moves"), "{grown:?}");
    nbd.write(4096, &[8; 4096]);
    assert_eq!(client.cancel_move("a").unwrap().phase, MovePhase::Cancelled);
    let listed = run(&daemon.path(""), &["store", "list", "pool", "--json"]).unwrap();
    assert!(!listed.contains("slow"), "{listed}");
    assert!(!has_record(&daemon.path("")));
    assert!(client.disk("a").unwrap().layers.iter().all(|layer| layer.name != "move"));
    assert_eq!(nbd.read(4096, 4096), [8; 4096]);
    client.change_disk("a", &grow).unwrap();
    drop(nbd);

    // A disk that is removed takes its move with it.
    let slow = MoveRequest { speed: Some(Bytes(1)), ..to_image(&daemon, "slow.img") };
    client.move_disk("a", &slow).unwrap();
    // The daemon may not have noticed yet that the client has left.
    daemon.until("the client to leave", || client.remove_disk("a", false).is_ok());
    daemon.until("the target to be removed", || {
        !daemon.path("slow.img").exists() && !has_record(&daemon.path(""))
    });
    daemon.end();
}

#[test]
fn a_target_that_is_full_ends_the_move_and_not_the_disk() {
    let Some(small) = Small::mount("2M") else { return };
    let daemon = Daemon::start_in(prepared(), CONFIGURATION);
    let mut nbd = connect(&daemon);
    (0..4).for_each(|part| nbd.write(part << 20, &vec![9; 1 << 20]));
    let request = MoveRequest { image: Some(small.path("t.img")), ..to_image(&daemon, "") };
    daemon.client().move_disk("a", &request).unwrap();
    daemon.until("the move to fail", || status(&daemon).unwrap().phase == MovePhase::Failed);
    let failed = status(&daemon).unwrap();
    assert!(failed.message.contains("no space"), "{failed:?}");
    assert!(!small.path("t.img").exists() && !has_record(&daemon.path("")));
    let problems = || daemon.client().disk("a").unwrap().problems;
    daemon.until("the problem", || {
        problems().iter().any(|problem| problem.kind == ProblemKind::MoveFailed)
    });
    nbd.write(0, &[10; 4096]);
    assert_eq!(nbd.read(0, 8192), [[10; 4096], [9; 4096]].concat());
    moved(&daemon, &to_volume(&daemon, "v"));
    assert_eq!(nbd.read(0, 8192), [[10; 4096], [9; 4096]].concat());
    daemon.until("the problem to end", || problems().is_empty());
    daemon.end();
}

#[test]
fn a_command_that_waits_does_not_give_up_while_the_daemon_starts_again() {
    let daemon = Daemon::start_in(prepared(), CONFIGURATION);
    let mut nbd = connect(&daemon);
    (0..3).for_each(|part| nbd.write(part << 20, &vec![5; 1 << 20]));
    drop(nbd);
    let folder = daemon.path("");
    let waiting = |words: &[&str]| {
        let mut command = crate::process::command(&folder);
        command.args(["disk", "move", "a", "--wait", "--control", "control.sock"]).args(words);
        command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
        command.spawn().unwrap()
    };
    let moving = waiting(&["--store", "pool", "--volume", "v", "--speed", "1"]);
    daemon.until("the move to begin", || status(&daemon).is_some());
    daemon.signal(libc::SIGKILL);
    let (_, folder) = daemon.wait();
    // The next daemon begins the copy again, without the limit.
    let daemon = Daemon::start_in(folder, CONFIGURATION);
    let done = moving.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&[done.stdout, done.stderr].concat()).into_owned();
    assert!(done.status.success() && said.contains("moved to volume v of"), "{said}");
    assert_eq!(connect(&daemon).read(0, 4096), [5; 4096]);
    daemon.end();
}
