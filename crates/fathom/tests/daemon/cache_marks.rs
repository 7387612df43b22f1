//! Marks of caches on file systems that are full: the disks are served, and no block is ever out of
//! date.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use fathom_control::ProblemKind;
use fathom_sim::FaultyDevice;

use crate::cache::{BLOCK, read, succeeds, write};
use crate::nbd::Nbd;
use crate::process::{Daemon, disk_over_nbd, image};

/// The blocks of an image.
const BLOCKS: u64 = 64;
/// The size of a file system of the kind XFS, in bytes: the least that it can have.
const XFS_SIZE: u64 = 320 << 20;

/// A small XFS on a loop device.
struct Xfs {
    folder: tempfile::TempDir,
}

impl Xfs {
    /// Mounts it; `None`, with a message, if this host cannot.
    fn mount() -> Option<Self> {
        let folder = tempfile::tempdir_in("/var/tmp").unwrap();
        let (file, point) = (folder.path().join("xfs"), folder.path().join("point"));
        File::create(&file).unwrap().set_len(XFS_SIZE).unwrap();
        std::fs::create_dir(&point).unwrap();
        let run = |program: &str, arguments: &[&str], last: &Path| {
            let mut command = Command::new(program);
            command.args(arguments).arg(&file).args([last].iter().filter(|last| **last != file));
            command
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .status()
                .is_ok_and(|it| it.success())
        };
        if run("mkfs.xfs", &["-q"], &file) && run("mount", &["-o", "loop"], &point) {
            return Some(Self { folder });
        }
        eprintln!("SKIPPED: this needs XFS and the right to mount it");
        None
    }

    fn point(&self) -> PathBuf {
        self.folder.path().join("point")
    }
}

impl Drop for Xfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.point()).status();
    }
}

/// Fills a file system to its last block. Returns the file that does it.
fn fill(folder: &Path) -> PathBuf {
    let path = folder.join("filler");
    let mut file = File::create(&path).unwrap();
    for length in [1 << 20, 64 << 10, 4096, 512] {
        for _ in 0..2 {
            while file.write_all(&vec![1; length]).is_ok() {}
            // What was written may need less space than was reserved for it.
            let _ = file.sync_all();
        }
    }
    path
}

/// The cache "cache", and the text of a disk with it.
fn cached(folder: &Path, image: &Path) -> String {
    succeeds(folder, &["create", "cache", "--size", "8M", "--sparse"]);
    with_cache(image)
}

fn with_cache(image: &Path) -> String {
    disk_over_nbd(image, "layers = [{ kind = \"cache\", store = \"cache\", exclusive = true }]\n")
}

fn connect(daemon: &Daemon) -> Nbd {
    Nbd::connect(&daemon.path("nbd.sock"), "a")
}

fn figure(daemon: &Daemon, name: &str) -> u64 {
    daemon.client().disk("a").unwrap().figure("cache", name).unwrap()
}

/// The messages and remedies of the layers' problems.
fn problems(daemon: &Daemon) -> String {
    let problems = daemon.client().disk("a").unwrap().problems.into_iter();
    let problems = problems.filter(|problem| problem.kind == ProblemKind::LayerFailed);
    let lines: Vec<_> =
        problems.map(|problem| format!("{}: {}", problem.message, problem.remedy)).collect();
    lines.join("\n")
}

/// Reads the blocks until the cache has all of them.
fn load(daemon: &Daemon) {
    let mut nbd = connect(daemon);
    daemon.until("all blocks to be in the cache", || {
        (0..BLOCKS).for_each(|block| _ = read(&mut nbd, block));
        figure(daemon, "blocks") == BLOCKS
    });
}

#[test]
fn a_disk_whose_mark_finds_no_space_is_served_and_marked_when_there_is_some() {
    let Some(device) = FaultyDevice::new() else { return };
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = device.mount().join("a.img");
    image(&device.mount(), "a.img", BLOCKS * BLOCK);
    let text = cached(folder.path(), &path);
    let filler = fill(&device.mount());
    // The cache is used, but the next start does not find its blocks, whether the daemon ends or is
    // killed.
    let mut folder = folder;
    for is_killed in [false, true, false] {
        let daemon = Daemon::start_in(folder, &text);
        daemon.until("the problem", || problems(&daemon).contains("cannot be marked"));
        assert!(problems(&daemon).contains("make space"), "{}", problems(&daemon));
        assert_eq!(figure(&daemon, "blocks"), 0);
        load(&daemon);
        folder = if is_killed {
            daemon.signal(libc::SIGKILL);
            daemon.wait().1
        } else {
            daemon.end()
        };
    }
    let daemon = Daemon::start_in(folder, &text);
    load(&daemon);
    // A disk without a queue is not marked before its orderly end.
    let nbd = connect(&daemon);
    std::fs::remove_file(filler).unwrap();
    daemon.until("the mark to be written", || problems(&daemon).is_empty());
    drop(nbd);
    let folder = daemon.end();
    let daemon = Daemon::start_in(folder, &text);
    // A queue loads the tables.
    let _nbd = connect(&daemon);
    daemon.until("the blocks of before", || figure(&daemon, "blocks") == BLOCKS);
    assert_eq!(problems(&daemon), "");
}

/// On a full XFS, an attribute cannot even be removed. The disk is served without its cache, which
/// forgets it.
#[test]
fn a_cache_forgets_a_disk_whose_mark_cannot_be_removed() {
    let Some(xfs) = Xfs::mount() else { return };
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let path = xfs.point().join("a.img");
    std::fs::write(&path, vec![0; (BLOCKS * BLOCK) as usize]).unwrap();
    let text = cached(folder.path(), &path);
    let daemon = Daemon::start_in(folder, &text);
    write(&mut connect(&daemon), 5, 1);
    load(&daemon);
    let folder = daemon.end();
    let filler = fill(&xfs.point());
    let daemon = Daemon::start_in(folder, &disk_over_nbd(&path, ""));
    let mut nbd = connect(&daemon);
    write(&mut nbd, 5, 2);
    drop(nbd);
    let folder = daemon.end();
    std::fs::remove_file(filler).unwrap();
    let daemon = Daemon::start_in(folder, &text);
    assert_eq!(read(&mut connect(&daemon), 5), 2, "a block of before");
    load(&daemon);
    assert_eq!(read(&mut connect(&daemon), 5), 2);
}
