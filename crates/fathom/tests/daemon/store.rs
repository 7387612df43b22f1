//! Disks with volumes of a pool, beside the commands for pools.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use fathom_control::{Bytes, DeletionEntry, Freeze, PoolChange, PoolEntry};

use crate::nbd::Nbd;
use crate::problems::Small;
use crate::process::Daemon;

pub const CONFIGURATION: &str = "[[nbd]]\naddress = \"unix:nbd.sock\"\n\
    [[disk]]\nname = \"a\"\nstore = \"pool\"\nvolume = \"one\"\n\
    [[disk]]\nname = \"b\"\nstore = \"./pool\"\nvolume = \"two\"\n";

pub fn run(folder: &Path, words: &[&str]) -> Result<String, String> {
    let done = Command::new(env!("CARGO_BIN_EXE_fathom"))
        .current_dir(folder)
        .env("FATHOM_CONTROL", folder.join("control.sock"))
        .args(words)
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if done.status.success() { Ok(text(&done.stdout)) } else { Err(text(&done.stderr)) }
}

/// A folder with a pool of two volumes.
pub fn prepared() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    run(folder.path(), &["store", "create", "pool", "64M"]).unwrap();
    for volume in ["one", "two"] {
        run(folder.path(), &["store", "new", "pool", volume, "16M"]).unwrap();
    }
    folder
}

pub fn entry(daemon: &Daemon) -> PoolEntry {
    let mut pools = daemon.client().pools().unwrap().pools;
    assert_eq!(pools.len(), 1);
    pools.remove(0)
}

#[test]
fn flushed_writes_survive_a_kill_and_snapshots_have_one_instant() {
    let mut folder = prepared();
    for round in 0..4_u8 {
        let daemon = Daemon::start_in(folder, CONFIGURATION);
        let mut one = Nbd::connect(&daemon.path("nbd.sock"), "a");
        let mut two = Nbd::connect(&daemon.path("nbd.sock"), "b");
        if round > 0 {
            assert_eq!(one.read(0, 4096), [round; 4096]);
            assert_eq!(two.read(512, 512), [round; 512]);
            assert_eq!(two.read(0, 512), [0; 512]);
        }
        one.write(0, &[round + 1; 4096]);
        two.write(512, &[round + 1; 512]);
        let name = format!("s{round}");
        let volumes = vec!["one".to_owned(), "two".to_owned()];
        let taken = daemon
            .client()
            .change_pool(
                &daemon.path("pool"),
                PoolChange::Snapshot { volumes, name, freeze: Freeze::Off },
            )
            .unwrap();
        assert_eq!(taken.volumes[0].snapshots.len(), usize::from(round) + 1);
        // The change of the pool made what was written before it durable.
        daemon.signal(libc::SIGKILL);
        folder = daemon.wait().1;
    }
    let path = folder.path();
    run(path, &["store", "export", "pool", "one@s1", "one.img"]).unwrap();
    assert_eq!(std::fs::read(path.join("one.img")).unwrap()[..4096], [2; 4096]);
    run(path, &["snapshot", "rollback", "two", "s0", "--store", "pool"]).unwrap();
    run(path, &["store", "export", "pool", "two", "two.img"]).unwrap();
    assert_eq!(std::fs::read(path.join("two.img")).unwrap()[512..1024], [1; 512]);
    let checked = run(path, &["store", "check", "pool", "--json"]).unwrap();
    assert!(checked.contains("\"problem_count\": 0"), "{checked}");
}

#[test]
fn a_volume_has_one_disk_and_the_daemon_changes_the_pools_that_it_has() {
    let daemon = Daemon::start_in(prepared(), CONFIGURATION);
    let pool = entry(&daemon);
    let disks: Vec<_> = pool.volumes.iter().map(|volume| volume.disk.as_deref()).collect();
    assert_eq!(disks, [Some("a"), Some("b")]);
    let folder = daemon.path("");
    let add = |name: &str, volume: &str| {
        run(&folder, &["disk", "add", name, "--store", "pool", "--volume", volume])
    };
    let refused = add("c", "one").unwrap_err();
    assert!(refused.contains("uses the volume"), "{refused}");
    assert!(add("c", "three").unwrap_err().contains("no such volume"));
    let deleted = run(&folder, &["store", "delete", "pool", "one"]).unwrap_err();
    assert!(deleted.contains("uses the volume"), "{deleted}");
    run(&folder, &["store", "new", "pool", "three", "4M"]).unwrap();
    add("c", "three").unwrap();
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "c");
    assert_eq!(nbd.capacity(), 4 << 20);
    nbd.write(0, &[7; 8192]);
    run(&folder, &["snapshot", "create", "c", "--name", "s"]).unwrap();
    nbd.write(0, &[8; 8192]);
    add("d", "three@s").unwrap();
    let mut snapshot = Nbd::connect(&daemon.path("nbd.sock"), "d");
    assert_eq!((snapshot.read(0, 8192), nbd.read(0, 8192)), (vec![7; 8192], vec![8; 8192]));
    let held = run(&folder, &["snapshot", "delete", "c", "s"]).unwrap_err();
    assert!(held.contains("uses the volume"), "{held}");
    drop((nbd, snapshot));
    run(&folder, &["disk", "resize", "c", "8M"]).unwrap();
    assert_eq!(Nbd::connect(&daemon.path("nbd.sock"), "c").capacity(), 8 << 20);
    let listed = run(&folder, &["store", "list", "--json"]).unwrap();
    assert!(listed.contains("\"three\"") && listed.contains("\"disk\": \"c\""), "{listed}");
    run(&folder, &["store", "check", "pool"]).unwrap();
    daemon.end();
}

#[test]
fn a_full_pool_fails_writes_and_goes_on_when_something_is_deleted() {
    let folder = tempfile::tempdir().unwrap();
    run(folder.path(), &["store", "create", "pool", "64M"]).unwrap();
    for volume in ["one", "two"] {
        run(folder.path(), &["store", "new", "pool", volume, "100M"]).unwrap();
    }
    let daemon = Daemon::start_in(folder, CONFIGURATION);
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    let mut block = vec![0; 1 << 20];
    let mut written = 0;
    // The content differs from block to block, and is no zeroes.
    for index in 0..100_u64 {
        block.chunks_mut(8).zip(index << 20..).for_each(|(bytes, value)| {
            bytes.copy_from_slice(&(value + 1).to_le_bytes());
        });
        nbd.send(1, index, index << 20, 1 << 20, &block);
        let Some((_, error)) = nbd.reply() else { panic!("no reply") };
        if error != 0 {
            assert_eq!(error, 28, "ENOSPC");
            break;
        }
        written = index + 1;
    }
    assert!((30..64).contains(&written), "{written} MiB were written");
    assert_eq!(nbd.read(0, 8), 1_u64.to_le_bytes());
    // NBD_CMD_TRIM
    nbd.send(4, 1000, 0, (written as u32 / 2) << 20, &[]);
    assert_eq!(nbd.reply(), Some((1000, 0)));
    let mut is_written = false;
    for _ in 0..500 {
        nbd.send(1, 2000, 0, 1 << 20, &block);
        is_written = nbd.reply() == Some((2000, 0));
        if is_written {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(is_written, "there is space again");
    let last = (written - 1) << 20;
    assert_eq!(nbd.read(last, 8), (last + 1).to_le_bytes());
    drop(nbd);
    daemon.end();
}

#[test]
fn a_full_file_system_beneath_a_pool_fails_writes_until_there_is_space() {
    let Some(small) = Small::mount("24M") else { return };
    let folder = tempfile::tempdir().unwrap();
    let pool = small.path("pool").to_str().unwrap().to_owned();
    run(folder.path(), &["store", "create", &pool, "256M"]).unwrap();
    run(folder.path(), &["store", "new", &pool, "one", "128M"]).unwrap();
    let configuration = format!(
        "[[nbd]]\naddress = \"unix:nbd.sock\"\n\
         [[disk]]\nname = \"a\"\nstore = {pool:?}\nvolume = \"one\"\n"
    );
    let daemon = Daemon::start_in(folder, &configuration);
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    let write = |nbd: &mut Nbd, index: u64| {
        nbd.send(1, index, index << 20, 1 << 20, &vec![index as u8 + 1; 1 << 20]);
        let (_, error) = nbd.reply().expect("a reply");
        assert!(matches!(error, 0 | 28), "{error}");
        error == 0
    };
    let written = (0..100).take_while(|index| write(&mut nbd, *index)).count() as u64;
    assert!((8..24).contains(&written), "{written} MiB were written");
    for index in written..written + 20 {
        write(&mut nbd, index);
    }
    small.grow("200M");
    let is_written = (0..300).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        write(&mut nbd, 90)
    });
    assert!(is_written, "there is space again");
    // NBD_CMD_FLUSH
    nbd.send(3, 7, 0, 0, &[]);
    assert_eq!(nbd.reply(), Some((7, 0)));
    daemon.signal(libc::SIGKILL);
    let folder = daemon.wait().1;
    let daemon = Daemon::start_in(folder, &configuration);
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    for index in (0..written).chain([90]) {
        assert_eq!(nbd.read(index << 20, 4096), [index as u8 + 1; 4096], "{index}");
    }
    drop(nbd);
    let folder = daemon.end();
    run(folder.path(), &["store", "check", &pool]).unwrap();
}

#[test]
fn a_pool_gives_space_back_to_its_file_system_and_goes_on_when_others_have_taken_it() {
    let Some(small) = Small::mount("160M") else { return };
    let folder = tempfile::tempdir().unwrap();
    let pool = small.path("pool").to_str().unwrap().to_owned();
    run(folder.path(), &["store", "create", &pool, "240M"]).unwrap();
    run(folder.path(), &["store", "new", &pool, "one", "100M"]).unwrap();
    let configuration = format!(
        "[[nbd]]\naddress = \"unix:nbd.sock\"\n\
         [[disk]]\nname = \"a\"\nstore = {pool:?}\nvolume = \"one\"\n"
    );
    let daemon = Daemon::start_in(folder, &configuration);
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    for index in 0..80 {
        nbd.write(index << 20, &data(index, 256));
    }
    let allocated = || std::fs::metadata(&pool).unwrap().blocks() * 512;
    let before = allocated();
    assert!(before > 80 << 20, "{before}");
    // NBD_CMD_TRIM of all but the first MiB, and NBD_CMD_FLUSH
    nbd.send(4, 1, 1 << 20, 79 << 20, &[]);
    assert_eq!(nbd.reply(), Some((1, 0)));
    let end = Instant::now() + Duration::from_secs(120);
    while allocated() > before - (16 << 20) {
        assert!(Instant::now() < end, "{} of {before} bytes", allocated());
        std::thread::sleep(Duration::from_millis(50));
    }
    // The others leave less than the pool had.
    std::fs::write(small.path("other"), vec![1; 90 << 20]).unwrap();
    let write = |nbd: &mut Nbd, index: u64| {
        nbd.send(1, index, index << 20, 1 << 20, &data(index, 256));
        let (_, error) = nbd.reply().expect("a reply");
        assert!(matches!(error, 0 | 28), "{error}");
        error == 0
    };
    let written = (1..80).take_while(|index| write(&mut nbd, *index)).count() as u64;
    assert!(written < 79, "the file system is full");
    std::fs::remove_file(small.path("other")).unwrap();
    let is_written = (0..300).any(|_| {
        std::thread::sleep(Duration::from_millis(10));
        write(&mut nbd, 90)
    });
    assert!(is_written, "there is space again");
    for index in (0..=written).chain([90]) {
        assert!(nbd.read(index << 20, 1 << 20) == data(index, 256), "{index}");
    }
    drop(nbd);
    let folder = daemon.end();
    run(folder.path(), &["store", "check", &pool]).unwrap();
}

/// Different blocks, by a seed.
fn data(seed: u64, blocks: usize) -> Vec<u8> {
    let mut bytes = vec![0; blocks * 4096];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}

#[test]
fn equal_blocks_of_two_disks_are_kept_once_over_kills_and_merges() {
    let mut folder = prepared();
    let path = folder.path();
    run(path, &["store", "new", "pool", "apart", "16M", "--unshared"]).unwrap();
    let merged = run(path, &["store", "merge", "pool"]).unwrap_err();
    assert!(merged.contains("serve one of its volumes"), "{merged}");
    let configuration =
        format!("{CONFIGURATION}[[disk]]\nname = \"c\"\nstore = \"pool\"\nvolume = \"apart\"\n");
    let content = data(1, 200);
    for round in 0..3_u64 {
        let daemon = Daemon::start_in(folder, &configuration);
        let connect = |name: &str| Nbd::connect(&daemon.path("nbd.sock"), name);
        let (mut one, mut two, mut three) = (connect("a"), connect("b"), connect("c"));
        if round == 0 {
            one.write(0, &content);
            two.write(1 << 20, &content);
            three.write(0, &content);
            let pool = entry(&daemon);
            assert_eq!((pool.shared_bytes, pool.saved_bytes), (200 << 12, 200 << 12));
            assert_eq!(pool.volumes[2].domain, None);
            assert_eq!(pool.volumes[0].domain.as_deref(), Some("default"));
        }
        // The disk for which it was written gets other blocks: the other disk keeps them.
        one.write(round << 18, &data(100 + round, 64));
        // Equal blocks of one write are not found at once.
        let repeated: Vec<Vec<u8>> =
            (0..5).map(|part| data(200 + 5 * round + part, 1).repeat(8)).collect();
        for (at, bytes) in (0..).zip(&repeated) {
            one.write((8 << 20) + (round << 18) + (at << 15), bytes);
        }
        for (disk, offset) in [(&mut two, 1 << 20), (&mut three, 0)] {
            assert!(disk.read(offset, 200 << 12) == content, "round {round}");
        }
        assert!(one.read((8 << 20) + (round << 18), 40 << 12) == repeated.concat());
        if round == 1 {
            // Nobody uses a disk.
            drop((one, two, three));
        }
        run(&daemon.path(""), &["store", "merge", "pool"]).unwrap();
        let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
        let shared = (200 + 5 * (round + 1)) << 12;
        while round < 2 && entry(&daemon).shared_bytes < shared || entry(&daemon).has_garbage {
            assert!(std::time::Instant::now() < end, "{:?}", entry(&daemon));
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        let found = connect("a").read((8 << 20) + (round << 18), 40 << 12);
        assert!(found == repeated.concat());
        // In the last round, the merge is interrupted.
        daemon.signal(libc::SIGKILL);
        folder = daemon.wait().1;
    }
    let path = folder.path();
    let checked = run(path, &["store", "check", "pool", "--json"]).unwrap();
    assert!(checked.contains("\"problem_count\": 0"), "{checked}");
    std::fs::write(path.join("x.img"), [data(1, 300), data(1, 100)].concat()).unwrap();
    let found = run(path, &["store", "estimate", "x.img", "x.img", "--json"]).unwrap();
    assert!(found.contains(&format!("\"different_bytes\": {}", 300 << 12)), "{found}");
    run(path, &["store", "domain", "pool", "two", "--none"]).unwrap();
    run(path, &["store", "export", "pool", "two", "two.img"]).unwrap();
    assert!(std::fs::read(path.join("two.img")).unwrap()[1 << 20..][..200 << 12] == content);
}

/// The extents of a difference: first byte, length, whether it is a hole.
pub fn diff(folder: &Path, words: &[&str]) -> Vec<(u64, u64, bool)> {
    let text = run(folder, &[&["snapshot", "diff", "--json", "--holes"], words].concat()).unwrap();
    let report: serde_json::Value = serde_json::from_str(&text).unwrap();
    let extents = report["extents"].as_array().unwrap().iter();
    let number = |value: &serde_json::Value| value.as_u64().unwrap();
    extents
        .map(|it| (number(&it["offset"]), number(&it["length"]), it["hole"].as_bool().unwrap()))
        .collect()
}

#[test]
fn the_daemon_and_the_command_find_what_has_changed() {
    let daemon = Daemon::start_in(prepared(), CONFIGURATION);
    let folder = daemon.path("");
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    nbd.write(0, &[1; 16384]);
    run(&folder, &["snapshot", "create", "a", "--name", "x"]).unwrap();
    nbd.write(4096, &[2; 512]);
    // NBD_CMD_TRIM
    nbd.send(4, 1, 8192, 4096, &[]);
    assert_eq!(nbd.reply(), Some((1, 0)));
    let expected = [(4096, 4096, false), (8192, 4096, true)];
    assert_eq!(diff(&folder, &["a", "x"]), expected);
    run(&folder, &["snapshot", "create", "a", "--name", "y"]).unwrap();
    nbd.write(1 << 20, &[3; 4096]);
    assert_eq!(diff(&folder, &["a", "x", "y"]), expected);
    // Back again: what was a hole is data.
    assert_eq!(diff(&folder, &["a", "y", "x"]), [(4096, 8192, false)]);
    assert_eq!(diff(&folder, &["a", "y"]), [(1 << 20, 4096, false)]);
    let text = run(&folder, &["snapshot", "diff", "a", "x", "--list", "--holes"]).unwrap();
    assert!(text.contains("FIRST BYTE") && text.contains("hole"), "{text}");
    let text = run(&folder, &["snapshot", "diff", "a", "x", "--json"]).unwrap();
    assert!(text.contains("\"length\": 8192") && !text.contains("hole_bytes"), "{text}");
    let refused = run(&folder, &["snapshot", "diff", "a", "z"]).unwrap_err();
    assert!(refused.contains("no such snapshot"), "{refused}");
    drop(nbd);
    let folder = daemon.end();
    let offline = diff(folder.path(), &["one", "x", "y", "--store", "pool"]);
    assert_eq!(offline, expected);
}

/// What deleting something would free, in blocks, by volume and snapshot.
fn reclaimable(folder: &Path, together: &[&str]) -> (Vec<(String, u64)>, Option<u64>) {
    let words = [&["store", "reclaimable", "pool", "--json"], together].concat();
    let found: serde_json::Value = serde_json::from_str(&run(folder, &words).unwrap()).unwrap();
    assert_eq!((&found["running"], &found["unread_pages"]), (&false.into(), &0.into()));
    let deletions = found["deletions"].as_array().unwrap().iter();
    let deletions = deletions.map(|it| {
        let name = |key: &str| it[key].as_str().unwrap_or_default().to_owned();
        (format!("{}@{}", name("volume"), name("snapshot")), it["bytes"].as_u64().unwrap() / 4096)
    });
    (deletions.collect(), found["together"]["bytes"].as_u64().map(|bytes| bytes / 4096))
}

#[test]
fn it_is_known_what_a_deletion_would_free() {
    const UNIT: usize = 64 * 4096;
    let daemon = Daemon::start_in(prepared(), CONFIGURATION);
    let folder = daemon.path("");
    let mut one = Nbd::connect(&daemon.path("nbd.sock"), "a");
    let mut two = Nbd::connect(&daemon.path("nbd.sock"), "b");
    let drawn = |length: usize| -> Vec<u8> { (0..length).map(|_| fastrand::u8(..)).collect() };
    // A unit is 64 blocks. The same four in two volumes: neither has them alone.
    let content = drawn(4 * UNIT);
    one.write(0, &content);
    two.write(0, &content);
    run(&folder, &["snapshot", "create", "a", "--name", "s"]).unwrap();
    one.write(0, &drawn(UNIT));
    two.write(0, &drawn(2 * UNIT));
    run(&folder, &["snapshot", "create", "a", "--name", "t"]).unwrap();
    let check = |(found, together): (Vec<(String, u64)>, Option<u64>), all: u64| {
        let blocks = |name: &str| found.iter().find(|(other, _)| other == name).unwrap().1;
        // Maps are a few pages, each in two copies.
        let is_about = |found: u64, units: u64| (0..48).contains(&(found - 64 * units));
        // What was overwritten in both is in the snapshot alone.
        assert!(is_about(blocks("one@s"), 1), "{found:?}");
        assert!(is_about(blocks("two@"), 2), "{found:?}");
        assert!(is_about(blocks("one@"), 0) && is_about(blocks("one@t"), 0), "{found:?}");
        assert!(is_about(together.unwrap(), all), "{together:?} instead of {all}");
    };
    check(reclaimable(&folder, &["one", "one@*"]), 3);
    check(reclaimable(&folder, &["one", "one@*", "two"]), 7);
    let reclaim = entry(&daemon).reclaim.unwrap();
    assert!(reclaim.ended_s >= Some(reclaim.begun_s) && reclaim.error.is_none());
    // The list has what was found.
    let frees = |it: &DeletionEntry| {
        it.volume.as_deref() == Some("one") && it.snapshot.as_deref() == Some("s")
    };
    let bytes = reclaim.deletions.iter().find(|it| frees(it)).unwrap().bytes;
    let list = run(&folder, &["store", "list"]).unwrap();
    let line = list.lines().find(|line| line.starts_with("one ") && line.contains(" s ")).unwrap();
    assert!(list.contains("DELETING FREES"), "{list}");
    assert!(line.contains(&Bytes(bytes).to_string()), "{list}");
    let text = run(&folder, &["store", "reclaimable", "pool", "one@s", "two"]).unwrap();
    assert!(text.contains("together, one@s, two free "), "{text}");
    let refused = run(&folder, &["store", "reclaimable", "pool", "one@none"]).unwrap_err();
    assert!(refused.contains("no such snapshot"), "{refused}");
    // The last disks leave while a search may be in progress: the pool is closed all the same.
    drop((one, two));
    let pool = daemon.path("pool");
    let find = PoolChange::FindReclaimable { together: Vec::new() };
    daemon.client().change_pool(&pool, find).unwrap();
    for disk in ["a", "b"] {
        // The daemon notices a moment later that its client has left.
        daemon.until("the disk leaves", || run(&folder, &["disk", "remove", disk]).is_ok());
    }
    daemon.until("the pool is closed", || run(&folder, &["store", "reclaimable", "pool"]).is_ok());
    check(reclaimable(&folder, &["one", "one@*", "two"]), 7);
    daemon.end();
}
