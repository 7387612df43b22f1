//! Images and block devices that were set back to an earlier state while a log has changes of them.
//! A device has no modification time, and its mark is elsewhere: its content tells.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use fathom_sim::LoopDevice;
use tempfile::TempDir;

use crate::nbd::Nbd;
use crate::process::{Daemon, command, image};

const SIZE: u64 = 4 << 20;

fn configuration(image: &Path, age: &str) -> String {
    format!(
        "[[disk]]\nname = \"a\"\nimage = \"{}\"\nlayers = [{{ kind = \"wal\", log = \"logs\", size = \"1M\", age = \
         \"{age}\" }}]\n[[nbd]]\naddress = \"unix:nbd.sock\"\n",
        image.display()
    )
}

fn connect(daemon: &Daemon) -> Nbd {
    Nbd::connect(&daemon.path("nbd.sock"), "a")
}

fn content(image: &Path) -> Vec<u8> {
    let mut content = Vec::new();
    File::open(image).unwrap().read_to_end(&mut content).unwrap();
    content
}

/// Gives an image other content. Its modification time stays, as that of a backup that `cp -a`
/// restores.
fn set(image: &Path, content: &[u8]) {
    let mut file = OpenOptions::new().write(true).open(image).unwrap();
    let modified = file.metadata().unwrap().modified().unwrap();
    file.write_all(content).unwrap();
    file.set_modified(modified).unwrap();
    file.sync_all().unwrap();
}

/// The first block is at home, the second one in the log, which was empty at the last start.
/// Returns the folder, and the image's content before the first block and after it.
fn killed(folder: TempDir, image: &Path) -> (TempDir, [Vec<u8>; 2]) {
    let older = content(image);
    let daemon = Daemon::start_in(folder, &configuration(image, "50ms"));
    assert_eq!(connect(&daemon).fill_block(3, 7), Some(0));
    let daemon = Daemon::start_in(daemon.end(), &configuration(image, "1h"));
    assert_eq!(connect(&daemon).fill_block(5, 8), Some(0));
    daemon.signal(libc::SIGKILL);
    let folder = daemon.wait().1;
    let newer = content(image);
    assert!(older != newer);
    (folder, [older, newer])
}

/// Requires that the disk is refused, and decides.
fn decide(daemon: &Daemon, decision: &str) {
    let unserved = daemon.client().disks().unwrap().unserved;
    assert_eq!(unserved.len(), 1, "an image that was set back is served:\n{}", daemon.log());
    let text = format!("{} → {}", unserved[0].message, unserved[0].remedy);
    assert!(text.contains("is not what it was: at byte 12288"), "{text}");
    assert!(text.contains("1 record") && text.contains("`fathom log keep a`"), "{text}");
    let mut command = command(&daemon.path(""));
    command.args(["log", decision, "a", "--config", "f.toml", "--control", "control.sock"]);
    assert!(command.output().unwrap().status.success());
}

/// Starts the daemon, requires that it refuses the disk, and kills it.
fn refused(folder: TempDir, image: &Path) -> TempDir {
    let daemon = Daemon::start_in(folder, &configuration(image, "1h"));
    assert_eq!(daemon.client().disks().unwrap().unserved.len(), 1, "{}", daemon.log());
    daemon.signal(libc::SIGKILL);
    daemon.wait().1
}

fn check(mut folder: TempDir, image: &Path) {
    let configuration = configuration(image, "1h");
    for (decision, expected) in [("keep", [0, 8]), ("discard", [0, 0])] {
        let older;
        (folder, [older, _]) = killed(folder, image);
        set(image, &older);
        let daemon = Daemon::start_in(refused(folder, image), &configuration);
        decide(&daemon, decision);
        let mut nbd = connect(&daemon);
        assert_eq!([3, 5].map(|block| nbd.read_block(block)), expected, "{decision}");
        // What was decided lasts.
        assert_eq!(nbd.fill_block(6, 9), Some(0));
        drop(nbd);
        daemon.signal(libc::SIGKILL);
        let daemon = Daemon::start_in(daemon.wait().1, &configuration);
        let mut nbd = connect(&daemon);
        assert_eq!([3, 5, 6].map(|block| nbd.read_block(block)), [expected[0], expected[1], 9]);
        drop(nbd);
        folder = daemon.end();
        // With an empty log, an earlier state is what its operator wants.
        set(image, &older);
    }
    // The last state is the right one.
    let (folder, [older, newer]) = killed(folder, image);
    set(image, &older);
    let folder = refused(folder, image);
    set(image, &newer);
    let daemon = Daemon::start_in(folder, &configuration);
    let mut nbd = connect(&daemon);
    assert_eq!([3, 5].map(|block| nbd.read_block(block)), [7, 8]);
    drop(nbd);
    daemon.end();
}

#[test]
fn a_block_device_that_was_set_back_is_refused() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    image(folder.path(), "back", SIZE);
    let Some(device) = LoopDevice::attach(&folder.path().join("back")) else { return };
    check(folder, &device.0);
}

#[test]
fn an_image_that_was_set_back_with_its_time_is_refused() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    image(folder.path(), "a.img", SIZE);
    let path: PathBuf = folder.path().join("a.img");
    check(folder, &path);
}
