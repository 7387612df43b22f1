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

/// Writes these blocks of the disk in one life of a daemon, with the number of the life, and kills it.
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
    std::fs::write(folder.join("r.toml"), CONFIGURATION).unwrap();
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
    assert!(text.contains("6 records of changes"), "{text}");
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
