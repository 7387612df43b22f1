//! Caches that outlive the daemon: what the next daemon finds, and what it must not find.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fathom_control::{DiskChange, ProblemKind};
use fathom_failure::Failing as _;
use tempfile::TempDir;

use crate::cache::{BLOCK, cache, fails, read, succeeds, text, write};
use crate::nbd::Nbd;
use crate::process::Daemon;

const SIZE: u64 = 16 << 20;
const BLOCKS: u64 = 64;
/// The time after which the modification time of a quiet disk has been noted.
const NOTED: Duration = Duration::from_millis(3500);

/// A folder with two images and a cache. Its file system has extended attributes.
fn folder() -> TempDir {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    for image in ["a.img", "b.img"] {
        File::create(folder.path().join(image)).unwrap().set_len(SIZE).unwrap();
    }
    succeeds(folder.path(), &["create", "cache", "--size", "8M"]);
    folder
}

/// The disks "a" and "b" with the layers `layers`.
fn configuration(layers: &str) -> String {
    format!(
        "[[nbd]]\naddress = \"unix:nbd.sock\"\n\
         [[disk]]\nname = \"a\"\nimage = \"a.img\"\n{layers}\n\
         [[disk]]\nname = \"b\"\nimage = \"b.img\"\n{layers}\n"
    )
}

fn with_cache() -> String {
    configuration("layers = [{ kind = \"cache\", store = \"cache\" }]")
}

fn content(block: u64) -> u8 {
    1 + (block % 250) as u8
}

fn figure(daemon: &Daemon, disk: &str, name: &str) -> u64 {
    daemon.client().disk(disk).unwrap().figure("cache", name).unwrap()
}

fn connect(daemon: &Daemon, disk: &str) -> Nbd {
    Nbd::connect(&daemon.path("nbd.sock"), disk)
}

/// Writes all blocks of a disk, and waits until they are in the cache.
fn fill(daemon: &Daemon, disk: &str) {
    let mut nbd = connect(daemon, disk);
    let before = figure(daemon, disk, "insertions_total");
    for block in 0..BLOCKS {
        write(&mut nbd, block, content(block));
    }
    daemon.until("the blocks to be in the cache", || {
        figure(daemon, disk, "insertions_total") >= before + BLOCKS
    });
}

/// Reads all blocks. Returns how many of them the cache had.
fn hits(daemon: &Daemon, disk: &str) -> u64 {
    let mut nbd = connect(daemon, disk);
    let before = figure(daemon, disk, "hits_total");
    for block in 0..BLOCKS {
        assert_eq!(read(&mut nbd, block), content(block), "block {block} of {disk}");
    }
    figure(daemon, disk, "hits_total") - before
}

/// Ends a load, also if the test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Waits until the tables have been loaded.
fn loaded(daemon: &Daemon, blocks: u64) {
    let _nbd = connect(daemon, "a");
    daemon.until("the tables to be loaded", || figure(daemon, "a", "blocks") >= blocks);
}

/// Changes a block of an image as another program does.
fn change_image(path: &Path, block: u64, content: u8) {
    let image = OpenOptions::new().write(true).open(path).unwrap();
    image.write_all_at(&[content; BLOCK as usize], block * BLOCK).unwrap();
}

#[test]
fn a_cache_is_warm_after_an_orderly_end_and_after_a_kill() {
    let daemon = Daemon::start_in(folder(), &with_cache());
    fill(&daemon, "a");
    fill(&daemon, "b");
    let folder = daemon.end();
    succeeds(folder.path(), &["check", "cache", "--data"]);
    let daemon = Daemon::start_in(folder, &with_cache());
    loaded(&daemon, 2 * BLOCKS);
    assert_eq!((hits(&daemon, "a"), hits(&daemon, "b")), (BLOCKS, BLOCKS), "{}", daemon.log());
    // A disk that is removed and added again keeps its blocks, too.
    daemon.until("the clients to be gone", || daemon.client().remove_disk("b", false).is_ok());
    assert!(daemon.client().reload().unwrap().refused.is_empty());
    assert_eq!(hits(&daemon, "b"), BLOCKS, "{}", daemon.log());

    // Killed twice: when the disks have been quiet, and immediately after that.
    let mut nbd = connect(&daemon, "a");
    write(&mut nbd, 0, content(0));
    std::thread::sleep(NOTED);
    daemon.signal(libc::SIGKILL);
    let daemon = Daemon::start_in(daemon.wait().1, &with_cache());
    daemon.signal(libc::SIGKILL);
    let folder = daemon.wait().1;
    let check = succeeds(folder.path(), &["check", "cache", "--data"]);
    assert!(check.contains("a.img") && check.contains("b.img"), "{check}");
    let daemon = Daemon::start_in(folder, &with_cache());
    // The regions with recent changes are dropped: the first 1 MiB of "a" has all its blocks.
    loaded(&daemon, BLOCKS);
    assert_eq!(hits(&daemon, "b"), BLOCKS, "{}", daemon.log());
    assert_eq!(hits(&daemon, "a"), 0, "the region of the last change");
    assert!(!daemon.log().contains("begins empty"), "{}", daemon.log());
}

/// What has been written without the cache is read, whoever wrote it and however the daemon ended.
#[test]
fn an_image_that_changed_without_the_cache_is_recognised() {
    // How the first daemon ends, what happens then, and what the log says.
    let kill = |daemon: Daemon| {
        daemon.signal(libc::SIGKILL);
        daemon.wait().1
    };
    let end = Daemon::end;
    let foreign = |folder: TempDir| {
        change_image(&folder.path().join("a.img"), 3, 99);
        folder
    };
    let fathom = |folder: TempDir| {
        let daemon = Daemon::start_in(folder, &configuration(""));
        write(&mut connect(&daemon, "a"), 3, 99);
        daemon.end()
    };
    // A backup has the modification time of its original.
    let backup = |folder: TempDir| {
        let path = folder.path().join("a.img");
        change_image(&path, 3, 99);
        let old = std::time::SystemTime::now() - Duration::from_secs(3600);
        File::options().write(true).open(&path).unwrap().set_modified(old).unwrap();
        folder
    };
    let replaced = |folder: TempDir| {
        let path = |name| folder.path().join(name);
        std::fs::copy(path("a.img"), path("new.img")).unwrap();
        change_image(&path("new.img"), 3, 99);
        std::fs::rename(path("new.img"), path("a.img")).unwrap();
        folder
    };
    let changes: [(&str, &dyn Fn(TempDir) -> TempDir); 4] = [
        ("changed without the cache", &foreign),
        ("served without the cache", &fathom),
        ("changed without the cache", &backup),
        ("replaced", &replaced),
    ];
    for (number, (reason, change)) in changes.into_iter().enumerate() {
        for is_killed in [false, true] {
            let daemon = Daemon::start_in(folder(), &with_cache());
            fill(&daemon, "a");
            fill(&daemon, "b");
            let folder = if is_killed {
                if number == 0 {
                    // Immediately after the last change, and long after it.
                    std::thread::sleep(NOTED);
                }
                kill(daemon)
            } else {
                end(daemon)
            };
            let folder = change(folder);
            let daemon = Daemon::start_in(folder, &with_cache());
            let mut nbd = connect(&daemon, "a");
            for _ in 0..3 {
                assert_eq!(read(&mut nbd, 3), 99, "case {number}, {is_killed}");
            }
            let log = daemon.log();
            let line =
                log.lines().find(|line| line.contains(" a: ") && line.contains("begins empty"));
            assert!(line.is_some_and(|line| line.contains(reason)), "{number}: {reason}\n{log}");
            if !is_killed && number != 1 {
                loaded(&daemon, BLOCKS);
                assert_eq!(hits(&daemon, "b"), BLOCKS, "the other disk keeps its blocks");
            }
        }
    }
}

/// An older copy of the cache, a cache of other images, and a cache of another daemon.
#[test]
fn a_cache_of_another_state_is_recognised() {
    let daemon = Daemon::start_in(folder(), &with_cache());
    fill(&daemon, "a");
    let folder = daemon.end();
    let path = |name: &str| folder.path().join(name);
    std::fs::copy(path("cache"), path("old")).unwrap();
    let daemon = Daemon::start_in(folder, &with_cache());
    write(&mut connect(&daemon, "a"), 3, 99);
    let folder = daemon.end();
    let path = |name: &str| folder.path().join(name);
    std::fs::rename(path("old"), path("cache")).unwrap();
    let daemon = Daemon::start_in(folder, &with_cache());
    assert_eq!(read(&mut connect(&daemon, "a"), 3), 99);
    assert!(daemon.log().contains("an older copy"), "{}", daemon.log());

    // The names of the disks are exchanged.
    let folder = daemon.end();
    let path = |name: &str| folder.path().join(name);
    for (from, to) in [("a.img", "c.img"), ("b.img", "a.img"), ("c.img", "b.img")] {
        std::fs::rename(path(from), path(to)).unwrap();
    }
    let daemon = Daemon::start_in(folder, &with_cache());
    assert_eq!(read(&mut connect(&daemon, "a"), 3), 0);
    assert_eq!(read(&mut connect(&daemon, "b"), 3), 99);
    let folder = daemon.end();
    // The same image by another name.
    std::fs::rename(folder.path().join("b.img"), folder.path().join("d.img")).unwrap();
    change_image(&folder.path().join("d.img"), 5, 77);
    File::create(folder.path().join("b.img")).unwrap().set_len(SIZE).unwrap();
    let moved = with_cache().replacen("a.img", "d.img", 1);
    let daemon = Daemon::start_in(folder, &moved);
    let mut nbd = connect(&daemon, "a");
    assert_eq!((read(&mut nbd, 3), read(&mut nbd, 5)), (99, 77));
    assert!(daemon.log().contains("those of another image"), "{}", daemon.log());
}

/// What happens to the file of a cache.
type Spoil<'a> = &'a dyn Fn(&Path);

/// A disk is served without a cache that is missing, damaged or foreign. The cache does not come
/// back with old blocks.
#[test]
fn a_disk_is_served_without_a_cache_that_cannot_be_used() {
    let damage = |path: &Path| {
        let file = OpenOptions::new().write(true).open(path).unwrap();
        file.write_all_at(&[0xff; 100], 64).unwrap();
        file.write_all_at(&[0xff; 100], 4096 + 64).unwrap();
    };
    let foreign = |path: &Path| std::fs::write(path, vec![7; 1 << 20]).unwrap();
    let blank = |path: &Path| std::fs::write(path, vec![0; 1 << 20]).unwrap();
    let short = |path: &Path| {
        OpenOptions::new().write(true).open(path).unwrap().set_len(4 << 20).unwrap();
    };
    let missing = |path: &Path| std::fs::remove_file(path).unwrap();
    let cases: [(&str, Spoil<'_>); 5] = [
        ("are damaged", &damage),
        ("other data than a cache", &foreign),
        ("there is no cache", &blank),
        ("make the volume as large", &short),
        ("does not exist", &missing),
    ];
    for (reason, spoil) in cases {
        let daemon = Daemon::start_in(folder(), &with_cache());
        fill(&daemon, "a");
        let folder = daemon.end();
        let path = |name: &str| folder.path().join(name);
        std::fs::copy(path("cache"), path("saved")).unwrap();
        spoil(&path("cache"));
        let spoilt = std::fs::read(path("cache")).ok();
        let daemon = Daemon::start_in(folder, &with_cache());
        let mut nbd = connect(&daemon, "a");
        assert_eq!(read(&mut nbd, 3), content(3));
        write(&mut nbd, 3, 99);
        daemon.until("the problem to be shown", || {
            let problems = daemon.client().disk("a").unwrap().problems;
            problems.iter().any(|problem| {
                let is_of_layer = problem.kind == ProblemKind::LayerFailed;
                let all = format!("{} {}", problem.message, problem.remedy);
                is_of_layer && all.contains(reason)
            })
        });
        let folder = daemon.end();
        let path = |name: &str| folder.path().join(name);
        assert!(std::fs::read(path("cache")).ok() == spoilt, "{reason}: the file is not changed");
        let _ = std::fs::remove_file(path("cache"));
        std::fs::rename(path("saved"), path("cache")).unwrap();
        let daemon = Daemon::start_in(folder, &with_cache());
        assert_eq!(read(&mut connect(&daemon, "a"), 3), 99, "{reason}");
        assert!(daemon.log().contains("begins empty"), "{}", daemon.log());
    }
}

/// The layer is added and removed while clients write and read; nothing old is ever read.
#[test]
fn a_cache_is_attached_and_detached_under_load() {
    let daemon = Daemon::start_in(folder(), &configuration(""));
    let run = |arguments: &[&str]| {
        let arguments = [arguments, &["--control", "control.sock"]].concat();
        cache(&daemon.path(""), &arguments)
    };
    let refused = run(&["attach", "a", "--store", "missing"]);
    assert!(!refused.status.success() && text(&refused).contains("does not exist"));
    let refused = run(&["detach", "a"]);
    assert!(!refused.status.success() && text(&refused).contains("has no cache"));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let load = |disk: &'static str, first: u64| {
            let (daemon, stop) = (&daemon, &stop);
            move || {
                let mut nbd = connect(daemon, disk);
                let (mut written, mut count) = ([0_u8; 32], 0_u64);
                while !stop.load(Ordering::Relaxed) {
                    let at = count % 32;
                    assert_eq!(read(&mut nbd, first + at), written[at as usize], "{disk} {at}");
                    if count % 3 == 0 {
                        written[at as usize] = content(count / 32);
                        write(&mut nbd, first + at, written[at as usize]);
                    }
                    count += 1;
                }
                count
            }
        };
        let loads: Vec<_> = [("a", 0), ("a", 100), ("b", 0), ("b", 200)]
            .map(|(disk, first)| scope.spawn(load(disk, first)))
            .into();
        let stopping = Stop(&stop);
        for round in 0..6 {
            for disk in ["a", "b"] {
                let attached = run(&["attach", disk, "--store", "cache"]);
                assert!(attached.status.success(), "{round}: {}", text(&attached));
            }
            std::thread::sleep(Duration::from_millis(300));
            for disk in ["a", "b"] {
                let detached = run(&["detach", disk]);
                assert!(detached.status.success(), "{round}: {}", text(&detached));
            }
        }
        let attached = run(&["attach", "a", "--store", "cache"]);
        assert!(attached.status.success(), "{}", text(&attached));
        std::thread::sleep(Duration::from_millis(500));
        assert!(figure(&daemon, "a", "hits_total") > 0);
        drop(stopping);
        for load in loads {
            assert!(load.join().unwrap() > 50);
        }
    });
    for command in ["check", "clear"] {
        let busy = cache(&daemon.path(""), &[command, "cache"]);
        assert!(!busy.status.success() && text(&busy).contains("is in use"), "{}", text(&busy));
    }
    // A disk with such a cache does not shrink.
    let smaller = DiskChange {
        capacity: Some(fathom_control::Bytes(SIZE / 2)),
        shrink: true,
        ..DiskChange::default()
    };
    let refused = daemon.client().change_disk("a", &smaller).unwrap_err().to_string();
    assert!(refused.contains("outlives the daemon"), "{refused}");
    let folder = daemon.end();
    succeeds(folder.path(), &["check", "cache", "--data"]);
}

#[test]
fn caches_are_made_examined_and_emptied() {
    let folder = folder();
    let path = folder.path();
    let fails = |arguments: &[&str], expected: &str| fails(path, arguments, expected);
    fails(&["create", "cache", "--size", "8M"], "exists");
    fails(&["create", "other"], "add --size");
    fails(&["create", "other", "--size", "8M", "--block-size", "20K"], "power of two");
    fails(&["create", "other", "--size", "100K"], "at least 1 MiB");
    fails(&["create", "missing/other", "--size", "8M"], "cannot create");
    fails(&["check", "a.img"], "there is no cache");
    fails(&["clear", "a.img"], "there is no cache");
    assert!(std::fs::read(path.join("a.img")).unwrap().iter().all(|byte| *byte == 0));
    let check = succeeds(path, &["check", "cache"]);
    assert!(check.contains("0 of "), "{check}");

    let daemon = Daemon::start_in(folder, &with_cache());
    fill(&daemon, "a");
    let folder = daemon.end();
    let path = folder.path();
    let check = succeeds(path, &["check", "cache", "--data", "--json"]);
    let check: serde_json::Value = serde_json::from_str(&check).unwrap();
    assert_eq!(check["blocks"], BLOCKS);
    assert_eq!(
        (&check["data_bytes"], &check["wrong_granules"]),
        (&(BLOCKS * BLOCK).into(), &0.into())
    );
    // A block that is not what was written.
    let bytes = std::fs::read(path.join("cache")).unwrap();
    let place = bytes.chunks(4096).rposition(|part| part[0] == content(5) && part[4095] == part[0]);
    let file = OpenOptions::new().write(true).open(path.join("cache")).unwrap();
    file.write_all_at(b"x", place.unwrap() as u64 * 4096).unwrap();
    succeeds(path, &["check", "cache"]);
    let wrong = cache(path, &["check", "cache", "--data"]);
    assert_eq!(wrong.status.code(), Some(1));
    assert!(text(&wrong).contains("is not what was written"), "{}", text(&wrong));
    // The daemon finds it, too, and reads the disk instead.
    let daemon = Daemon::start_in(folder, &with_cache());
    loaded(&daemon, BLOCKS);
    hits(&daemon, "a");
    daemon.until("the cache to be out of service", || {
        let problems = daemon.client().disk("a").unwrap().problems;
        problems.iter().any(|problem| problem.message.contains("other data than it was given"))
    });
    write(&mut connect(&daemon, "a"), 5, 88);
    let folder = daemon.end();
    succeeds(folder.path(), &["clear", "cache"]);
    let daemon = Daemon::start_in(folder, &with_cache());
    assert_eq!(read(&mut connect(&daemon, "a"), 5), 88);
    let folder = daemon.end();
    succeeds(folder.path(), &["create", "cache", "--size", "4M", "--force", "--sparse"]);
    succeeds(folder.path(), &["check", "cache", "--data"]);
}

/// Disks of a cache agree on its policy; a cache on a store needs an image.
#[test]
fn settings_that_do_not_fit_are_refused() {
    let daemon = Daemon::start_in(folder(), &with_cache());
    let client = daemon.client();
    let refused = |disk: &str, options: serde_json::Value| {
        let layer = fathom_control::LayerDefinition::new("cache", options);
        let change = DiskChange { set_layer: Some(layer), ..DiskChange::default() };
        let error = client.change_disk(disk, &change).unwrap_err();
        format!("{error} {}", error.remedy())
    };
    let store = daemon.path("cache").display().to_string();
    let other = refused("a", serde_json::json!({ "store": store, "policy": "none" }));
    assert!(other.contains("another `policy`") || other.contains("already uses"), "{other}");
    let both = refused("a", serde_json::json!({ "store": store, "name": "x" }));
    assert!(both.contains("`store` and a `name`"), "{both}");
    let relative = refused("a", serde_json::json!({ "store": "cache" }));
    assert!(relative.contains("absolute"), "{relative}");
    let alone = refused("a", serde_json::json!({ "exclusive": true }));
    assert!(alone.contains("no `store`"), "{alone}");
    let size = refused("a", serde_json::json!({ "store": store, "size": "1G" }));
    assert!(size.contains("which the store determines"), "{size}");
    let memory = fathom_control::DiskDefinition {
        name: "m".into(),
        memory: Some(fathom_control::Bytes(SIZE)),
        layers: vec![fathom_control::LayerDefinition::new(
            "cache",
            serde_json::json!({ "store": store }),
        )],
        ..fathom_control::DiskDefinition::default()
    };
    let refused = client.add_disk(&memory).unwrap_err().to_string();
    assert!(refused.contains("and the disk has none"), "{refused}");
}
