//! What a later daemon knows of changes that an NBD server, or the storage daemon of an image, has
//! acknowledged and taken with it.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use fathom_control::ProblemKind;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::exports::{SIZE, Server, connect, flush, wait_until_served};
use crate::images::{create, kill_storage_daemon, storage_daemons};
use crate::process::{Daemon, image};

const IO_ERROR: u32 = 5;

fn has_lost(daemon: &Daemon) -> bool {
    let problems = daemon.client().disk("a").unwrap().problems;
    problems.iter().any(|problem| problem.kind == ProblemKind::WritesLost)
}

/// The disk "a" of a text, and "b" in memory.
fn configuration(disk: &str) -> String {
    format!(
        "[[disk]]\nname = \"a\"\n{disk}\n[[disk]]\nname = \"b\"\nmemory = \"8M\"\n[[nbd]]\naddress = \
         \"unix:nbd.sock\"\n"
    )
}

fn at_socket(folder: &Path) -> String {
    let socket = folder.join("server.sock");
    configuration(&format!("nbd = \"nbd+unix:///?socket={}\"", socket.display()))
}

/// The daemon is killed, and what it leaves is not asked meanwhile.
fn killed(daemon: Daemon) -> TempDir {
    daemon.signal(libc::SIGKILL);
    daemon.wait().1
}

fn started(folder: TempDir, text: &str) -> Daemon {
    let daemon = Daemon::start_in(folder, text);
    wait_until_served(&daemon);
    daemon
}

/// A disk that has lost writes rejects changes until it is recovered, and the next daemon knows
/// that it was.
fn is_poisoned_until_it_is_recovered(daemon: Daemon, text: &str) -> Daemon {
    assert!(has_lost(&daemon), "{}", daemon.log());
    let (mut a, mut b) = (connect(&daemon, "a"), connect(&daemon, "b"));
    assert_eq!((a.fill_block(1, 9), flush(&mut a)), (Some(IO_ERROR), IO_ERROR));
    assert_eq!((b.fill_block(1, 9), flush(&mut b)), (Some(0), 0), "the other disk");
    a.read(0, 4096);
    drop((a, b));
    // It is recorded.
    let daemon = started(killed(daemon), text);
    assert!(has_lost(&daemon), "{}", daemon.log());
    daemon.client().recover_disk("a").unwrap();
    assert!(!has_lost(&daemon));
    let mut a = connect(&daemon, "a");
    assert_eq!((a.fill_block(1, 9), flush(&mut a)), (Some(0), 0));
    drop(a);
    let daemon = started(killed(daemon), text);
    assert!(!has_lost(&daemon), "{}", daemon.log());
    daemon
}

/// No note says that something is not flushed.
fn nothing_is_unflushed(folder: &Path) {
    for note in std::fs::read_dir(folder.join("control.unflushed")).into_iter().flatten() {
        let text = std::fs::read_to_string(note.unwrap().path()).unwrap();
        assert!(text.starts_with('F'), "{text}");
    }
}

#[test]
fn a_flush_that_has_failed_is_known_to_a_later_daemon() {
    let folder = tempfile::tempdir().unwrap();
    image(folder.path(), "a.img", SIZE);
    let words = [
        "nbdkit",
        "-f",
        "-U",
        "SOCKET",
        "eval",
        "get_size=echo 8M",
        "pread=dd if=FOLDER/a.img bs=64k iflag=skip_bytes,count_bytes skip=$4 count=$3 status=none",
        "pwrite=dd of=FOLDER/a.img bs=64k oflag=seek_bytes seek=$4 conv=notrunc status=none",
        "can_write=exit 0",
        "can_flush=exit 0",
        "flush=if [ -e FOLDER/fails ]; then echo EIO it fails >&2; exit 1; fi",
    ];
    let Some(_server) = Server::start(folder.path(), &words) else { return };
    let text = at_socket(folder.path());
    let daemon = started(folder, &text);
    let mut a = connect(&daemon, "a");
    assert_eq!((a.fill_block(1, 1), flush(&mut a)), (Some(0), 0));
    File::create(daemon.path("fails")).unwrap();
    assert_eq!((a.fill_block(2, 1), flush(&mut a)), (Some(0), IO_ERROR));
    std::fs::remove_file(daemon.path("fails")).unwrap();
    assert!(has_lost(&daemon));
    drop(a);
    // The guest has seen an error; its next flush must not succeed.
    let daemon = started(killed(daemon), &text);
    is_poisoned_until_it_is_recovered(daemon, &text).end();
}

/// Each way to a server, and each order of ends.
#[test]
fn a_server_that_ends_with_the_daemon_has_lost_what_it_had_not_flushed() {
    let port = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap().port().to_string()
    };
    let tcp = configuration(&format!("nbd = \"nbd://127.0.0.1:{port}/\""));
    let commands: [(&[&str], Option<&str>); 3] = [
        (&["nbdkit", "-f", "-U", "SOCKET", "file", "FOLDER/a.img"], None),
        // It serves one client: that of the daemon that was killed.
        (&["qemu-nbd", "-t", "-e", "1", "-k", "SOCKET", "-f", "raw", "FOLDER/a.img"], None),
        (&["nbdkit", "-f", "-p", &port, "-i", "127.0.0.1", "file", "FOLDER/a.img"], Some(&tcp)),
    ];
    for (words, text) in commands {
        let folder = tempfile::tempdir().unwrap();
        image(folder.path(), "a.img", SIZE);
        let server = match text {
            None => Server::start(folder.path(), words),
            Some(_) => Server::start_at_port(folder.path(), words, port.parse().unwrap()),
        };
        let Some(mut server) = server else { return };
        let text = text.map_or_else(|| at_socket(folder.path()), str::to_owned);
        let daemon = started(folder, &text);
        let mut a = connect(&daemon, "a");
        assert_eq!(a.fill_block(1, 1), Some(0));
        drop(a);
        // The server lives: nothing is lost, and a flush of the next daemon covers it.
        let daemon = started(killed(daemon), &text);
        assert!(!has_lost(&daemon), "{words:?}: {}", daemon.log());
        let folder = killed(daemon);
        server.kill();
        server.run();
        let daemon = started(folder, &text);
        assert!(!has_lost(&daemon), "{words:?}: {}", daemon.log());

        // A flush covers what was written.
        let mut a = connect(&daemon, "a");
        assert_eq!((a.fill_block(1, 2), flush(&mut a)), (Some(0), 0));
        drop(a);
        let folder = killed(daemon);
        server.kill();
        server.run();
        let daemon = started(folder, &text);
        assert!(!has_lost(&daemon), "{words:?}: {}", daemon.log());

        // The daemon first, and no flush.
        let mut a = connect(&daemon, "a");
        assert_eq!(a.fill_block(1, 3), Some(0));
        drop(a);
        let folder = killed(daemon);
        server.kill();
        server.run();
        let daemon = is_poisoned_until_it_is_recovered(started(folder, &text), &text);

        // The server first.
        let mut a = connect(&daemon, "a");
        assert_eq!(a.fill_block(1, 3), Some(0));
        drop(a);
        daemon.signal(libc::SIGSTOP);
        server.kill();
        let folder = killed(daemon);
        server.run();
        let daemon = is_poisoned_until_it_is_recovered(started(folder, &text), &text);

        // What the daemon has sent again is not lost when it ends afterwards.
        let mut a = connect(&daemon, "a");
        assert_eq!(a.fill_block(2, 4), Some(0));
        server.kill();
        server.run();
        assert_eq!(a.fill_block(3, 4), Some(0));
        drop(a);
        let daemon = started(killed(daemon), &text);
        assert!(!has_lost(&daemon), "{words:?}: {}", daemon.log());

        // An orderly end flushes, and leaves nothing behind.
        let mut a = connect(&daemon, "a");
        assert_eq!(a.fill_block(1, 5), Some(0));
        drop(a);
        let folder = daemon.end();
        nothing_is_unflushed(folder.path());
        let mut byte = [0];
        let file = File::open(folder.path().join("a.img")).unwrap();
        file.read_exact_at(&mut byte, 4096).unwrap();
        assert_eq!(byte, [5]);
    }
}

#[test]
fn a_server_that_is_away_at_the_end_of_the_daemon_has_lost_what_it_had_not_flushed() {
    let folder = tempfile::tempdir().unwrap();
    image(folder.path(), "a.img", SIZE);
    let words = ["nbdkit", "-f", "-U", "SOCKET", "file", "FOLDER/a.img"];
    let Some(mut server) = Server::start(folder.path(), &words) else { return };
    let text =
        at_socket(folder.path()).replace("/server.sock\"", "/server.sock\"\ntimeout = \"1s\"");
    let text = format!("{text}[daemon]\nshutdown_time_max = \"3s\"\n");
    let daemon = started(folder, &text);
    let mut a = connect(&daemon, "a");
    assert_eq!(a.fill_block(1, 1), Some(0));
    drop(a);
    server.kill();
    daemon.signal(libc::SIGTERM);
    let (status, folder) = daemon.wait();
    assert_ne!(status.code(), Some(0), "the last flush is missing");
    // While the server is away, the disk is not served, and nothing is forgotten.
    let daemon = Daemon::start_in(folder, &text);
    daemon.until("the reason", || {
        let unserved = daemon.client().disks().unwrap().unserved;
        unserved.iter().any(|disk| disk.name == "a")
    });
    assert_eq!(connect(&daemon, "b").fill_block(1, 1), Some(0));
    let folder = killed(daemon);
    server.run();
    is_poisoned_until_it_is_recovered(started(folder, &text), &text).end();
}

#[test]
fn an_image_whose_storage_daemon_is_killed_with_the_daemon_has_lost_writes() {
    let folder = tempfile::tempdir().unwrap();
    if create(folder.path(), "a.qcow2", "qcow2", &[]).is_none() {
        return;
    }
    let text = configuration("image = \"a.qcow2\"\nformat = \"qcow2\"");
    let daemon = started(folder, &text);
    let mut a = connect(&daemon, "a");
    assert_eq!(a.fill_block(1, 1), Some(0));
    // What is sent again is not lost when the daemon ends afterwards: its storage daemon closes the
    // image.
    kill_storage_daemon(&daemon);
    assert_eq!(a.fill_block(2, 1), Some(0));
    drop(a);
    let daemon = started(killed(daemon), &text);
    assert!(!has_lost(&daemon), "{}", daemon.log());
    let mut a = connect(&daemon, "a");
    assert_eq!((a.read_block(1), a.read_block(2)), (1, 1));
    for is_flushed in [true, false] {
        assert_eq!(a.fill_block(3, 2), Some(0));
        assert!(!is_flushed || flush(&mut a) == 0);
    }
    drop(a);
    // Both at once.
    daemon.signal(libc::SIGSTOP);
    for id in storage_daemons(&daemon) {
        kill_process(Pid::from_raw(id).unwrap(), Signal::KILL).unwrap();
    }
    let daemon = is_poisoned_until_it_is_recovered(started(killed(daemon), &text), &text);
    // A flush covers what was written.
    let mut a = connect(&daemon, "a");
    assert_eq!((a.fill_block(3, 2), flush(&mut a)), (Some(0), 0));
    drop(a);
    daemon.signal(libc::SIGSTOP);
    for id in storage_daemons(&daemon) {
        kill_process(Pid::from_raw(id).unwrap(), Signal::KILL).unwrap();
    }
    let daemon = started(killed(daemon), &text);
    assert!(!has_lost(&daemon), "{}", daemon.log());
    let folder = daemon.end();
    nothing_is_unflushed(folder.path());
    assert_eq!(std::fs::read_dir(folder.path().join("qemu")).unwrap().count(), 0);
}
