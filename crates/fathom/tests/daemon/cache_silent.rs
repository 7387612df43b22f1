//! Caches whose stores hang: the disks are served, the problem names the store, and the cache can
//! be taken away.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;
use std::process::Output;
use std::time::{Duration, Instant};

use fathom_control::{DiskChange, LayerDefinition, ProblemKind};
use serde_json::json;

use crate::cache::{BLOCK, cache, read, succeeds, text, write};
use crate::nbd::Nbd;
use crate::process::{Daemon, disk_over_nbd, image};
use crate::stuck::Stuck;

/// The blocks of an image.
const BLOCKS: u64 = 64;
/// How long a request may take on a busy host, whose cache may wait 2 s for its store.
const REQUEST_TIME_MAX: Duration = Duration::from_secs(15);
/// How long the removal of a cache may take on a busy host.
const DETACH_TIME_MAX: Duration = Duration::from_secs(30);

/// Makes a cache in the file of `stuck`.
fn make_cache(stuck: &Stuck, folder: &Path, more: &[&str]) {
    let size = std::fs::metadata(stuck.image()).unwrap().len().to_string();
    let arguments = [&["create", "made", "--size", &size, "--sparse"], more].concat();
    succeeds(folder, &arguments);
    let made = std::fs::read(folder.join("made")).unwrap();
    std::fs::remove_file(folder.join("made")).unwrap();
    let mut store = OpenOptions::new().write(true).open(stuck.image()).unwrap();
    store.write_all(&made).unwrap();
    store.sync_all().unwrap();
}

/// A disk over a cache with a log in the file of `stuck`, and a client that has written block 0. A
/// change stays in the log for `age`. The store no longer hangs before the daemon ends.
fn start_write_back(stuck: Stuck, age: &str) -> (Daemon, Stuck, Nbd) {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    image(folder.path(), "a.img", BLOCKS * BLOCK);
    make_cache(&stuck, folder.path(), &["--log", "2M", "--logs", "1"]);
    let layer = format!(
        "layers = [{{ kind = \"cache\", store = \"{}\", mode = \"write-back\", age = \"{age}\" }}]\n",
        stuck.image().display()
    );
    let daemon = Daemon::start_in(folder, &disk_over_nbd(Path::new("a.img"), &layer));
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    write(&mut nbd, 0, 1);
    (daemon, stuck, nbd)
}

/// Makes the store hang. The kernel has none of its content.
fn hang(stuck: &Stuck) {
    let store = OpenOptions::new().read(true).write(true).open(stuck.image()).unwrap();
    store.sync_all().unwrap();
    rustix::fs::fadvise(&store, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    stuck.hang();
}

fn figure(daemon: &Daemon, name: &str) -> u64 {
    daemon.client().disk("a").unwrap().figure("cache", name).unwrap()
}

/// The problems of the disk, each with its kind.
fn problems(daemon: &Daemon) -> Vec<(ProblemKind, String)> {
    let problems = daemon.client().disk("a").unwrap().problems.into_iter();
    problems.map(|problem| (problem.kind, problem.message)).collect()
}

fn is_reported(daemon: &Daemon, text: &str) -> bool {
    problems(daemon).iter().any(|(kind, it)| *kind == ProblemKind::LayerFailed && it.contains(text))
}

/// Reads the blocks until the cache has all of them, and no region has recent changes.
fn load(daemon: &Daemon, nbd: &mut Nbd) {
    daemon.until("all blocks to be in the cache", || {
        (0..BLOCKS).for_each(|block| _ = read(nbd, block));
        figure(daemon, "blocks") == BLOCKS && figure(daemon, "regions") == 0
    });
}

/// Takes the cache away with the command. Returns its answer, and how long it took.
fn detach(daemon: &Daemon) -> (Output, Duration) {
    let begun = Instant::now();
    let folder = daemon.path("x");
    (
        cache(folder.parent().unwrap(), &["detach", "a", "--control", "control.sock"]),
        begun.elapsed(),
    )
}

/// A disk with a cache in a store that hangs: reads and changes go on, the cache is taken away, the
/// daemon ends, and nothing old comes back.
#[test]
fn a_disk_is_served_while_the_store_of_its_cache_hangs() {
    let Some(stuck) = Stuck::mount() else { return };
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    image(folder.path(), "a.img", BLOCKS * BLOCK);
    make_cache(&stuck, folder.path(), &[]);
    let layer = format!(
        "layers = [{{ kind = \"cache\", store = {:?}, exclusive = true }}]\n",
        stuck.image()
    );
    let with_cache = disk_over_nbd(&folder.path().join("a.img"), &layer);
    let daemon = Daemon::start_in(folder, &with_cache);
    // Dropped before the daemon, which the kernel does not let end while the file system hangs.
    let stuck = stuck;
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    (0..BLOCKS).for_each(|block| write(&mut nbd, block, 1));
    load(&daemon, &mut nbd);

    hang(&stuck);
    for block in 0..BLOCKS {
        let begun = Instant::now();
        assert_eq!(read(&mut nbd, block), 1);
        assert!(begun.elapsed() < REQUEST_TIME_MAX, "{:?}", begun.elapsed());
    }
    let store = stuck.image().display().to_string();
    assert!(is_reported(&daemon, &format!("{store}, does not answer")), "{:?}", problems(&daemon));
    for block in 0..BLOCKS / 2 {
        let begun = Instant::now();
        write(&mut nbd, block, 2);
        assert!(begun.elapsed() < REQUEST_TIME_MAX, "{:?}", begun.elapsed());
    }
    assert_eq!([read(&mut nbd, 0), read(&mut nbd, BLOCKS - 1)], [2, 1]);
    let blamed = |text: &str| problems(&daemon).iter().any(|(_, message)| message.contains(text));
    assert!(!blamed("a.img"), "{:?}", problems(&daemon));

    // It comes back: the blocks that have not changed are read from it.
    stuck.resume();
    daemon.until("the end of the problem", || problems(&daemon).is_empty());
    let hits = figure(&daemon, "hits_total");
    let found = |nbd: &mut Nbd| (0..BLOCKS).map(|block| read(nbd, block)).collect::<Vec<_>>();
    let expected: Vec<u8> =
        (0..BLOCKS).map(|block| if block < BLOCKS / 2 { 2 } else { 1 }).collect();
    assert_eq!(found(&mut nbd), expected);
    assert!(figure(&daemon, "hits_total") >= hits + BLOCKS / 2);
    load(&daemon, &mut nbd);

    // The cache is taken away, whether it is known that its store hangs or not.
    hang(&stuck);
    let (output, time) = detach(&daemon);
    assert!(output.status.success() && time < DETACH_TIME_MAX, "{time:?}: {}", text(&output));
    println!("the cache was taken away within {time:?}");
    write(&mut nbd, 0, 3);
    assert_eq!((read(&mut nbd, 0), read(&mut nbd, 1)), (3, 2));
    let layers = daemon.client().disk("a").unwrap().layers;
    assert!(!layers.iter().any(|layer| layer.name == "cache"), "{layers:?}");
    stuck.resume();
    let options = json!({ "store": stuck.image(), "exclusive": true });
    let layer = LayerDefinition::new("cache", options);
    let again = DiskChange { set_layer: Some(layer), ..DiskChange::default() };
    // The queue of before has yet to get its answers.
    daemon
        .until("the cache to be there again", || daemon.client().change_disk("a", &again).is_ok());
    assert_eq!((read(&mut nbd, 0), read(&mut nbd, 1)), (3, 2));
    load(&daemon, &mut nbd);
    assert_eq!((read(&mut nbd, 0), read(&mut nbd, 1)), (3, 2));

    // A change that the store does not note, and the end of the daemon.
    hang(&stuck);
    write(&mut nbd, 5, 4);
    daemon.signal(libc::SIGTERM);
    let begun = Instant::now();
    let is_end = |line: &str| line.ends_with(" ended") || line.contains("ended, but not cleanly");
    daemon.until("the end", || daemon.log().lines().any(is_end));
    println!("ended {:?} after SIGTERM", begun.elapsed());
    assert!(!daemon.log().contains("abandoned"), "{}", daemon.log());
    // The kernel sends another request to the file system when the last descriptor is closed.
    stuck.resume();
    let (_, folder) = daemon.wait();
    let daemon = Daemon::start_in(folder, &with_cache);
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    assert_eq!((read(&mut nbd, 5), read(&mut nbd, 1)), (4, 2));
    load(&daemon, &mut nbd);
    assert_eq!((read(&mut nbd, 5), read(&mut nbd, 1)), (4, 2));
}

/// What only the log of a cache has cannot be written home while the store hangs: the cache stays,
/// and the answer says why.
#[test]
fn a_log_in_a_store_that_hangs_keeps_its_cache() {
    let Some(stuck) = Stuck::mount() else { return };
    let (daemon, stuck, mut nbd) = start_write_back(stuck, "1h");
    hang(&stuck);
    let (output, time) = detach(&daemon);
    let store = stuck.image().display().to_string();
    assert!(!output.status.success() && time < DETACH_TIME_MAX, "{time:?}: {}", text(&output));
    assert!(
        text(&output).contains(&format!("{store}, which does not answer")),
        "{}",
        text(&output)
    );
    stuck.resume();
    assert_eq!(read(&mut nbd, 0), 1);
    // The thread that has asked the store gets its answer.
    daemon.until("the removal of the cache", || detach(&daemon).0.status.success());
    assert_eq!(read(&mut nbd, 0), 1);
}

/// The log of a cache is empty, so that nothing has to be written home: the removal has an end
/// although the store hangs, and the disk goes on.
#[test]
fn an_empty_log_in_a_store_that_hangs_delays_no_removal() {
    let Some(stuck) = Stuck::mount() else { return };
    let (daemon, stuck, mut nbd) = start_write_back(stuck, "100ms");
    daemon.until("the log to be home", || {
        daemon.client().disk("a").unwrap().figure("wal", "used_bytes") == Some(0)
    });
    hang(&stuck);
    let (output, time) = detach(&daemon);
    println!("{time:?}: {}", text(&output));
    assert!(time < DETACH_TIME_MAX, "{time:?}: {}", text(&output));
    let begun = Instant::now();
    assert_eq!(read(&mut nbd, 0), 1);
    assert!(begun.elapsed() < REQUEST_TIME_MAX, "{:?}", begun.elapsed());
    stuck.resume();
    let has_cache = || {
        let layers = daemon.client().disk("a").unwrap().layers;
        layers.iter().any(|layer| layer.name == "cache")
    };
    daemon.until("the removal of the cache", || !has_cache() || detach(&daemon).0.status.success());
    write(&mut nbd, 0, 2);
    assert_eq!(read(&mut nbd, 0), 2);
}
