//! Logs that are damaged, and logs and images that do not belong together, on real files.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::nbd::Nbd;
use crate::process::{Daemon, command, image};

const CONFIGURATION: &str = "[[disk]]\nname = \"a\"\nimage = \"a.img\"\n\
                             layers = [{ kind = \"wal\", log = \"logs\", size = \"1M\", age = \"60s\" }]\n\
                             [[nbd]]\naddress = \"unix:nbd.sock\"\n";

/// Writes these blocks of the disk in one life of a daemon, with the number of the life, and kills
/// it.
fn live(folder: TempDir, life: u8, blocks: std::ops::Range<u64>) -> TempDir {
    let daemon = Daemon::start_in(folder, CONFIGURATION);
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    for block in blocks {
        assert_eq!(nbd.fill_block(block, life), Some(0));
    }
    daemon.signal(libc::SIGKILL);
    daemon.wait().1
}

/// The log of a daemon that does not serve the disk.
fn refusal(folder: &Path) -> String {
    refusal_of(folder, CONFIGURATION)
}

fn refusal_of(folder: &Path, configuration: &str) -> String {
    std::fs::write(folder.join("r.toml"), configuration).unwrap();
    let mut command = command(folder);
    command.args(["serve", "--config", "r.toml", "--control", "r.sock"]);
    let mut child = command.stderr(std::process::Stdio::piped()).spawn().unwrap();
    let begun = Instant::now();
    // A daemon keeps running with the disks that it can serve.
    while begun.elapsed() < Duration::from_secs(2) && child.try_wait().unwrap().is_none() {
        std::thread::sleep(Duration::from_millis(20));
    }
    let _ = child.kill();
    let output = child.wait_with_output().unwrap();
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn read(folder: TempDir, block: u64) -> (u8, TempDir) {
    let daemon = Daemon::start_in(folder, CONFIGURATION);
    let content = Nbd::connect(&daemon.path("nbd.sock"), "a").read_block(block);
    daemon.signal(libc::SIGKILL);
    (content, daemon.wait().1)
}

/// A bit rots in the tenth of fifty acknowledged changes.
#[test]
fn a_damaged_log_is_not_served() {
    let folder = tempfile::tempdir().unwrap();
    image(folder.path(), "a.img", 8 << 20);
    let folder = live(folder, 1, 0..50);
    let log = OpenOptions::new().read(true).write(true).open(folder.path().join("logs")).unwrap();
    let whole = std::fs::read(folder.path().join("logs")).unwrap();
    let headers: Vec<usize> =
        (8192..whole.len()).step_by(512).filter(|at| &whole[*at..*at + 4] == b"WRC2").collect();
    assert_eq!(headers.len(), 50);
    let at = headers[9] + 4100;
    log.write_all_at(&[whole[at] ^ 1], at as u64).unwrap();
    let text = refusal(folder.path());
    let place = format!("the log is damaged at byte {}", headers[9]);
    assert!(text.contains(&place) && text.contains("at least 40 records"), "{text}");
    assert_eq!(File::open(folder.path().join("logs")).unwrap().metadata().unwrap().len(), 1 << 20);
    // Nothing was changed, so that the repaired log is used.
    log.write_all_at(&whole[at..=at], at as u64).unwrap();
    let (content, _folder) = read(folder, 40);
    assert_eq!(content, 1);
}

/// Copies a file with its attributes.
fn copy(folder: &Path, from: &str, to: &str) {
    let status =
        std::process::Command::new("cp").args(["-a", from, to]).current_dir(folder).status();
    assert!(status.unwrap().success());
}

/// A log is copied back that an earlier life of the daemon has left, then an image with its mark.
#[test]
fn an_older_copy_of_a_log_or_an_image_is_not_served() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    image(folder.path(), "a.img", 8 << 20);
    let folder = live(folder, 1, 0..4);
    for name in ["logs", "a.img"] {
        copy(folder.path(), name, &format!("{name}.old"));
    }
    let folder = live(folder, 2, 1..3);
    for name in ["logs", "a.img"] {
        copy(folder.path(), name, &format!("{name}.new"));
    }
    copy(folder.path(), "logs.old", "logs");
    let text = refusal(folder.path());
    assert!(text.contains("the log is an older copy (opened on 2"), "{text}");
    assert!(text.contains("with 4 records of changes") && text.contains("UTC"), "{text}");
    copy(folder.path(), "logs.new", "logs");
    copy(folder.path(), "a.img.old", "a.img");
    let text = refusal(folder.path());
    assert!(text.contains("the image is an older copy"), "{text}");
    // The first life's changes may be at home by now.
    assert!(text.contains("records of changes"), "{text}");
    // Both are of the same time, so they fit.
    copy(folder.path(), "logs.old", "logs");
    let (content, folder) = read(folder, 2);
    assert_eq!(content, 1);
    for name in ["logs", "a.img"] {
        copy(folder.path(), &format!("{name}.new"), name);
    }
    let (content, folder) = read(folder, 2);
    assert_eq!(content, 2);
    // A mark of an earlier version has no age, and is accepted once.
    let path = folder.path().join("a.img");
    let mut mark = vec![0; 1024];
    let length = rustix::fs::getxattr(&path, c"user.fathom.log", &mut mark[..]).unwrap();
    mark.truncate(length);
    let text = String::from_utf8(mark.clone()).unwrap();
    let parts: Vec<&str> = text.splitn(4, ' ').collect();
    assert_eq!((parts[1], parts[2]), ("3", "0"), "{text}");
    let without = format!("{} {}", parts[0], parts[3]);
    let create = rustix::fs::XattrFlags::empty();
    rustix::fs::setxattr(&path, c"user.fathom.log", without.as_bytes(), create).unwrap();
    let (content, folder) = read(folder, 0);
    assert_eq!(content, 1);
    rustix::fs::setxattr(&path, c"user.fathom.log", &mark, create).unwrap();
    assert!(refusal(folder.path()).contains("the image is an older copy"));
}

/// Runs `fathom log` for the disk of the configuration that was refused last.
fn settle(folder: &Path, how: &str, disk: &str) -> String {
    let mut command = command(folder);
    command.args(["log", how, disk, "--config", "r.toml"]);
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{text}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The operator keeps what a refused log has: of a damaged one, of a pair that does not fit, and of
/// a disk and an image that were renamed, without an attribute.
#[test]
fn the_changes_of_a_refused_log_are_kept() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    image(folder.path(), "a.img", 8 << 20);
    let folder = live(folder, 1, 0..10);
    let path = folder.path().join("logs");
    let mut log = std::fs::read(&path).unwrap();
    let headers: Vec<usize> =
        (8192..log.len()).step_by(512).filter(|at| &log[*at..*at + 4] == b"WRC2").collect();
    log[headers[6] + 40] ^= 1;
    std::fs::write(&path, log).unwrap();
    let text = refusal(folder.path());
    assert!(text.contains("`fathom log keep a` keeps the changes in front"), "{text}");
    let text = settle(folder.path(), "keep", "a");
    assert!(text.starts_with("kept: 6 records of changes"), "{text}");
    // What was behind the damage is given up, and does not come back.
    let (content, folder) = read(folder, 5);
    assert_eq!(content, 1);
    let (content, folder) = read(folder, 6);
    assert_eq!(content, 0);
    let folder = live(folder, 2, 6..7);
    let (content, folder) = read(folder, 7);
    assert_eq!(content, 0);

    // The image and the disk get other names, and the image loses its attributes.
    std::fs::write(
        folder.path().join("z.img"),
        std::fs::read(folder.path().join("a.img")).unwrap(),
    )
    .unwrap();
    let renamed = CONFIGURATION.replace("\"a\"", "\"z\"").replace("a.img", "z.img");
    let text = refusal_of(folder.path(), &renamed);
    assert!(text.contains("`fathom log keep z` keeps its changes"), "{text}");
    assert!(settle(folder.path(), "keep", "z").starts_with("kept: "));
    let daemon = Daemon::start_in(folder, &renamed);
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "z");
    assert_eq!([5, 6, 7].map(|block| nbd.read_block(block)), [1, 2, 0]);
    drop(nbd);
    daemon.end();
}

/// The operator discards what a refused log has, and the image is used as it is, with the log and
/// without it.
#[test]
fn the_changes_of_a_refused_log_are_discarded() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    image(folder.path(), "a.img", 8 << 20);
    let folder = live(folder, 1, 0..4);
    copy(folder.path(), "a.img", "a.img.old");
    let folder = live(folder, 2, 0..2);
    copy(folder.path(), "a.img.old", "a.img");
    assert!(refusal(folder.path()).contains("`fathom log discard a` drops them"));
    let text = settle(folder.path(), "discard", "a");
    assert!(text.starts_with("discarded: ") && text.contains("records of changes"), "{text}");
    let (content, folder) = read(folder, 0);
    assert_eq!(content, 0);
    let folder = live(folder, 3, 1..2);
    // The log is gone, and its changes are given up.
    std::fs::remove_file(folder.path().join("logs")).unwrap();
    assert!(refusal(folder.path()).contains("run `fathom log discard a`"));
    settle(folder.path(), "discard", "a");
    let path = folder.path().join("a.img");
    assert!(rustix::fs::getxattr(&path, c"user.fathom.log", &mut [0; 64][..]).is_err());
    let (content, _folder) = read(folder, 1);
    assert_eq!(content, 0);
}

/// A backup is copied into the image right after the daemon was killed: it has the same inode and
/// mark, and is newer than the daemon. A daemon that lives in between, with another disk, changes
/// nothing.
#[test]
fn a_backup_that_was_copied_into_the_image_is_not_overwritten() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    image(folder.path(), "a.img", 8 << 20);
    image(folder.path(), "b.img", 8 << 20);
    let folder = live(folder, 1, 0..4);
    // The clock of a file system has steps.
    std::thread::sleep(Duration::from_millis(50));
    let image = OpenOptions::new().write(true).open(folder.path().join("a.img")).unwrap();
    image.write_all_at(&[9; 4096], 0).unwrap();
    let lives = |folder: &Path| std::fs::read_to_string(folder.join("control.life")).unwrap();
    assert!(lives(folder.path()).trim_end().ends_with("ended"), "{}", lives(folder.path()));
    let daemon = Daemon::start_in(
        folder,
        &CONFIGURATION
            .replace("a.img", "b.img")
            .replace("\"a\"", "\"b\"")
            .replace("logs", "logs-b"),
    );
    Nbd::connect(&daemon.path("nbd.sock"), "b").fill_block(0, 1);
    daemon.signal(libc::SIGKILL);
    let (_, folder) = daemon.wait();
    assert_eq!(lives(folder.path()).lines().count(), 3, "{}", lives(folder.path()));
    std::fs::copy(folder.path().join("control.life"), folder.path().join("r.life")).unwrap();
    let text = refusal(folder.path());
    assert!(text.contains("was changed on 2") && text.contains("by another program"), "{text}");
    assert!(
        text.contains("4 records of changes") && text.contains("`fathom log discard a`"),
        "{text}"
    );
    settle(folder.path(), "discard", "a");
    let (content, _folder) = read(folder, 0);
    assert_eq!(content, 9);
}
