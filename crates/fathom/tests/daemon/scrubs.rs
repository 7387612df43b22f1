//! The verification of pools in use.

use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use fathom_control::{DamageOf, PoolChange, Problem, ProblemKind, ScrubEntry, ScrubPhase};

use crate::nbd::Nbd;
use crate::process::{Daemon, kill};
use crate::store::{CONFIGURATION, entry, prepared, run};

/// Different blocks, by a seed.
fn data(seed: u64, blocks: usize) -> Vec<u8> {
    let mut bytes = vec![0; blocks * 4096];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}

/// Changes a byte of the block with this content, beneath the daemon.
fn damage(pool: &Path, content: &[u8]) {
    let mut file = std::fs::OpenOptions::new().read(true).write(true).open(pool).unwrap();
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).unwrap();
    let found = bytes.chunks(4096).position(|block| block == content).expect("the block");
    file.seek(SeekFrom::Start(found as u64 * 4096 + 77)).unwrap();
    file.write_all(&[content[77] ^ 1]).unwrap();
}

fn problem(daemon: &Daemon) -> Option<Problem> {
    let problems = daemon.client().daemon().unwrap().problems;
    problems.into_iter().find(|it| it.kind == ProblemKind::PoolDamaged)
}

fn scrub(daemon: &Daemon) -> ScrubEntry {
    entry(daemon).scrub.unwrap_or_default()
}

#[test]
fn damage_beneath_a_served_pool_is_found_named_and_ends_when_it_is_written_anew() {
    let daemon = Daemon::start_in(prepared(), CONFIGURATION);
    let folder = daemon.path("");
    let check =
        |more: &[&str]| run(&folder, &[&["store", "check", "pool", "--json"], more].concat());
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    let content = data(1, 300);
    nbd.write(1 << 20, &content);
    run(&folder, &["snapshot", "create", "a", "--name", "s"]).unwrap();
    nbd.write((1 << 20) + 4096, &data(2, 1));
    let sound = check(&[]).unwrap();
    for part in ["\"problem_count\": 0", "\"verified_blocks\": 301", "\"snapshots\": 1"] {
        assert!(sound.contains(part), "{part} is not in {sound}");
    }
    let maps = check(&["--maps-only"]).unwrap();
    assert!(maps.contains("\"verified_blocks\": 0"), "{maps}");
    assert_eq!(problem(&daemon).map(|it| it.message), None);
    let listed = run(&folder, &["store", "list", "pool"]).unwrap();
    assert!(listed.contains("verified") && listed.contains("nothing is damaged"), "{listed}");

    damage(&daemon.path("pool"), &content[10 * 4096..11 * 4096]);
    // One that only the snapshot has.
    damage(&daemon.path("pool"), &content[4096..8192]);
    let refused = run(&folder, &["store", "check", "pool"]).unwrap_err();
    assert!(refused.contains("2 problems") && refused.contains("backup"), "{refused}");
    let found: Vec<_> = scrub(&daemon)
        .damages
        .into_iter()
        .map(|it| (it.disk, it.volume, it.snapshot, it.offset, it.length, it.kind))
        .collect();
    let (disk, volume) = (Some("a".to_owned()), Some("one".to_owned()));
    let of = |snapshot: Option<&str>, offset: u64| {
        let snapshot = snapshot.map(str::to_owned);
        (disk.clone(), volume.clone(), snapshot, (1 << 20) + offset, 4096, DamageOf::Content)
    };
    assert_eq!(found, [of(None, 40960), of(Some("s"), 4096)]);
    daemon.until("a problem", || problem(&daemon).is_some());
    let Problem { message, remedy, .. } = problem(&daemon).unwrap();
    assert!(message.contains("2 damaged blocks: disk a, one:"), "{message}");
    assert!(message.contains("bytes 1089536 to 1093632") && message.contains("one@s"), "{message}");
    assert!(remedy.contains("store check") && remedy.contains("backup"), "{remedy}");

    // A later daemon knows it, and so does the guest.
    drop(nbd);
    daemon.signal(libc::SIGKILL);
    let daemon = Daemon::start_in(daemon.wait().1, CONFIGURATION);
    let folder = daemon.path("");
    daemon.until("the problem", || problem(&daemon).is_some());
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    nbd.write((1 << 20) + 40960, &content[40960..45056]);
    run(&folder, &["snapshot", "delete", "a", "s"]).unwrap();
    run(&folder, &["store", "check", "pool"]).unwrap();
    daemon.until("no problem", || problem(&daemon).is_none());
    assert!(nbd.read((1 << 20) + 40960, 4096) == content[40960..45056]);
    drop(nbd);
    let folder = daemon.end();
    run(folder.path(), &["store", "check", "pool"]).unwrap();
}

#[test]
fn a_rule_goes_on_after_a_kill_and_begins_again_when_it_is_due() {
    let rule =
        |every: &str| format!("{CONFIGURATION}[[scrub]]\nstore = \"pool\"\nevery = \"{every}\"\n");
    let daemon = Daemon::start_in(prepared(), &rule("1s"));
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "b");
    let content = data(7, 200);
    nbd.write(0, &content);
    daemon.until("two scrubs", || scrub(&daemon).number >= 2);
    assert_eq!(problem(&daemon).map(|it| it.message), None);
    damage(&daemon.path("pool"), &content[4096..8192]);
    // Nobody has asked for that.
    daemon.until("a problem", || problem(&daemon).is_some());
    nbd.write(4096, &content[4096..8192]);
    daemon.until("no problem", || problem(&daemon).is_none());
    drop(nbd);
    let folder = daemon.end();

    // One that was interrupted goes on, and its counts with it.
    let record = std::fs::read_dir(folder.path())
        .unwrap()
        .flatten()
        .map(|file| file.path())
        .find(|path| path.file_name().unwrap().to_string_lossy().starts_with("scrub-"))
        .expect("a record");
    let text = std::fs::read_to_string(&record).unwrap();
    let mut value: serde_json::Value = serde_json::from_str(&text).unwrap();
    let mut latest = value["complete"].clone();
    latest["phase"] = "running".into();
    latest["verified_blocks"] = 1_000_000.into();
    (latest["position_branch"], latest["position_block"]) = (2.into(), 0.into());
    value["latest"] = latest;
    std::fs::write(&record, value.to_string()).unwrap();
    let daemon = Daemon::start_in(folder, &rule("300d"));
    let record = daemon.path(record.file_name().unwrap().to_str().unwrap());
    daemon.until("its end, on record", || {
        let text = std::fs::read_to_string(&record).unwrap();
        let value: serde_json::Value = serde_json::from_str(&text).unwrap();
        value["complete"]["verified_blocks"].as_u64() >= Some(1_000_200)
    });
    // It is not due again.
    daemon.signal(libc::SIGKILL);
    let daemon = Daemon::start_in(daemon.wait().1, &rule("300d"));
    let last = scrub(&daemon);
    assert!(last.phase == ScrubPhase::Complete && last.verified_blocks >= 1_000_200, "{last:?}");
    daemon.end();
}

#[test]
fn a_check_ends_with_ctrl_c_and_with_the_last_disk_of_its_pool() {
    // The reads of the check are those of a hard disk, on which the blocks lie apart.
    let disks = "[[nbd]]\naddress = \"unix:nbd.sock\"\n\
        [[disk]]\nname = \"a\"\nstore = \"pool\"\nvolume = \"one\"\nmodel = { kind = \"hdd\" }\n";
    let daemon = Daemon::start_in(prepared(), disks);
    let folder = daemon.path("");
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    for at in 0..1000 {
        nbd.write((at * 1663 % 4096) << 12, &data(at, 1));
    }
    let begin = || {
        let begun = Command::new(env!("CARGO_BIN_EXE_fathom"))
            .current_dir(&folder)
            .env("FATHOM_CONTROL", folder.join("control.sock"))
            .args(["store", "check", "pool"])
            .stderr(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let number = scrub(&daemon).number;
        daemon.until("a check", || scrub(&daemon).number > number);
        begun.unwrap()
    };
    let end = |child: std::process::Child| {
        let done = child.wait_with_output().unwrap();
        assert!(!done.status.success());
        String::from_utf8(done.stderr).unwrap()
    };
    let child = begin();
    kill(&child, libc::SIGINT);
    let text = end(child);
    assert!(text.contains("the check has been ended"), "{text}");
    daemon.until("the end of the check", || scrub(&daemon).phase != ScrubPhase::Running);

    drop(nbd);
    daemon.until("the client to leave", || {
        let listeners = daemon.client().daemon().unwrap().listeners;
        listeners.iter().all(|listener| listener.connections == 0)
    });
    let child = begin();
    daemon.client().remove_disk("a", false).unwrap();
    let text = end(child);
    assert!(text.contains("no disk uses the pool"), "{text}");
    run(&folder, &["store", "check", "pool"]).unwrap();
    // A disk again, and an end of the daemon in the middle.
    run(&folder, &["disk", "add", "a", "--store", "pool", "--volume", "one"]).unwrap();
    let change = PoolChange::Check { maps_only: false };
    daemon.client().change_pool(&daemon.path("pool"), change).unwrap();
    let folder = daemon.end();
    run(folder.path(), &["store", "check", "pool"]).unwrap();
}
