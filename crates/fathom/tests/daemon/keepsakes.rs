//! What outlives a daemon that is killed, and tells the next one of writes that were lost: a
//! process, or the service manager.

use std::fs::File;
use std::io::{IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use fathom_sim::FaultyDevice;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, SocketAddrUnix,
    SocketType, recvmsg,
};
use tempfile::TempDir;

use crate::nbd::{FLUSH, Nbd};
use crate::process::{Daemon, PATIENCE, disk_over_nbd};

const IO_ERROR: u32 = 5;
const BAD: u64 = 17;
const SOCKET: &str = "control.sock.keep";

fn flush(nbd: &mut Nbd) -> u32 {
    assert!(nbd.send(FLUSH, 7, 0, 0, &[]));
    nbd.reply().expect("an answer").1
}

/// Writes the block that cannot be written back.
fn acknowledge(nbd: &mut Nbd) {
    assert_eq!(nbd.fill_block(BAD, 3), Some(0));
}

fn connect(folder: &Path) -> Nbd {
    Nbd::connect(&folder.join("nbd.sock"), "a")
}

fn kill(daemon: Daemon) -> TempDir {
    daemon.signal(libc::SIGKILL);
    daemon.wait().1
}

/// Whether a process holds keepsakes for the daemon in `folder`.
fn is_held(folder: &Path) -> bool {
    let socket = folder.join(SOCKET);
    let socket = socket.to_str().unwrap();
    std::fs::read_dir("/proc").unwrap().flatten().any(|entry| {
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let line = String::from_utf8_lossy(&line).into_owned();
        line.starts_with("fathom\0keep\0") && line.contains(socket)
    })
}

fn until(what: &str, mut found: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !found() {
        assert!(begun.elapsed() < PATIENCE, "never: {what}");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

/// Breaks a block of the image for the write of `write`, and lets its write-back fail. Another
/// description takes the report, as the sync of a daemon does that is killed meanwhile. After that,
/// a new description does not see it.
fn lose(device: &FaultyDevice, image: &Path, write: impl FnOnce()) {
    device.break_block(image, BAD);
    let other = File::open(image).unwrap();
    write();
    assert!(other.sync_data().is_err(), "the write-back has failed");
    device.mend();
    assert!(File::open(image).unwrap().sync_data().is_ok(), "the kernel has forgotten it");
}

#[test]
fn a_loss_is_seen_whose_report_a_killed_daemon_has_taken() {
    let Some(mut device) = FaultyDevice::new() else { return };
    let image = device.image("a.img", 64);
    let text = disk_over_nbd(&image, "");
    let mut folder = tempfile::tempdir().unwrap();
    for recovers in [true, false] {
        let daemon = Daemon::start_in(folder, &text);
        until("a process has the keepsake", || is_held(&daemon.path("")));
        let mut nbd = connect(&daemon.path(""));
        assert_eq!((nbd.fill_block(3, 7), flush(&mut nbd)), (Some(0), 0));
        let mut lost = None;
        lose(&device, &image, || {
            acknowledge(&mut nbd);
            lost = Some(kill(daemon));
        });
        let daemon = Daemon::start_in(lost.unwrap(), &text);
        let mut nbd = connect(&daemon.path(""));
        assert_eq!(flush(&mut nbd), IO_ERROR, "{}", daemon.log());
        let problems = daemon.client().disk("a").unwrap().problems;
        assert!(problems[0].message.contains("an earlier daemon"), "{problems:?}");
        if recovers {
            daemon.client().recover_disk("a").unwrap();
            assert_eq!(flush(&mut nbd), 0);
        }
        folder = kill(daemon);
        let daemon = Daemon::start_in(folder, &text);
        let expected = if recovers { 0 } else { IO_ERROR };
        assert_eq!(flush(&mut connect(&daemon.path(""))), expected, "{}", daemon.log());
        if !recovers {
            daemon.client().recover_disk("a").unwrap();
        }
        // An orderly end leaves nothing.
        folder = daemon.end();
        until("its end", || !is_held(folder.path()));
        assert!(!folder.path().join(SOCKET).exists());
    }
    device.unmount();
}

#[test]
fn nothing_is_alarmed_by_kills_of_a_sound_disk() {
    let mut folder = tempfile::tempdir_in("/var/tmp").unwrap();
    let image = folder.path().join("a.img");
    std::fs::write(&image, vec![1; 1 << 20]).unwrap();
    let text = disk_over_nbd(&image, "");
    for life in 0..30_u64 {
        let daemon = Daemon::start_in(folder, &text);
        assert_eq!(daemon.client().disk("a").unwrap().problems, [], "{life}");
        let mut nbd = connect(&daemon.path(""));
        assert_eq!((nbd.fill_block(life, 7), flush(&mut nbd)), (Some(0), 0), "{life}");
        // Some are killed with a flush in flight.
        assert!(
            nbd.fill_block(life, 8) == Some(0) && (life % 2 == 0 || nbd.send(FLUSH, 7, 0, 0, &[]))
        );
        folder = kill(daemon);
    }
    // The process is of no use without the folder, and ends.
    let path = folder.path().to_owned();
    until("a process has the keepsake", || is_held(&path));
    drop(folder);
    until("the end of the process", || !is_held(&path));
}

#[test]
fn the_process_bears_garbage_and_its_own_end() {
    let Some(device) = FaultyDevice::new() else { return };
    let image = device.image("a.img", 64);
    let text = disk_over_nbd(&image, "");
    let daemon = Daemon::start(&text);
    let socket = daemon.path(SOCKET);
    let metadata = std::fs::metadata(&socket).unwrap();
    assert!(metadata.file_type().is_socket() && metadata.permissions().mode() & 0o777 == 0o600);
    let address = SocketAddrUnix::new(&socket).unwrap();
    let long = [b'x'; 5000];
    for garbage in [&b"\xff\xfe"[..], b"keep", b"keep keep-1", b"release ../x", b"nonsense", &long]
    {
        let own = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        rustix::net::connect(&own, &address).unwrap();
        rustix::net::send(&own, garbage, SendFlags::NOSIGNAL).unwrap();
    }
    until("the daemon to connect again", || daemon.log().contains("there is another"));
    let mut nbd = connect(&daemon.path(""));
    let mut folder = None;
    lose(&device, &image, || {
        acknowledge(&mut nbd);
        folder = Some(kill(daemon));
    });
    let daemon = Daemon::start_in(folder.unwrap(), &text);
    assert_eq!(flush(&mut connect(&daemon.path(""))), IO_ERROR, "{}", daemon.log());
    // What the keepsake would report is recorded: an end that is not clean leaves nothing, either.
    daemon.signal(libc::SIGTERM);
    let (status, folder) = daemon.wait();
    assert_eq!(status.code(), Some(1));
    until("the end of the process", || !is_held(folder.path()));
}

/// A disk is taken from the configuration while the daemon is dead: the next one records what the
/// keepsake of its image tells, and releases it, so that the file system can be unmounted.
#[test]
fn nothing_is_kept_of_a_file_that_no_disk_has_any_more() {
    let Some(device) = FaultyDevice::new() else { return };
    let image = device.image("a.img", 64);
    let daemon = Daemon::start(&disk_over_nbd(&image, ""));
    let mut nbd = connect(&daemon.path(""));
    let mut folder = None;
    lose(&device, &image, || {
        acknowledge(&mut nbd);
        folder = Some(kill(daemon));
    });
    let has_record =
        || rustix::fs::getxattr(&image, c"user.fathom.writes-lost", &mut [0; 256][..]).is_ok();
    assert!(!has_record());
    let daemon = Daemon::start_in(
        folder.unwrap(),
        "[[disk]]\nname = \"b\"\nmemory = \"1M\"\n[[nbd]]\naddress = \"unix:nbd.sock\"\n",
    );
    until("the record of the loss", has_record);
    until("the end of the keepsake", || {
        let mut unmount = Command::new("umount");
        unmount.arg(device.mount()).stderr(Stdio::null()).status().unwrap().success()
    });
    daemon.end();
}

/// Without a keepsake, nothing tells of the loss.
#[test]
fn nothing_outlives_a_daemon_that_is_told_so() {
    let Some(device) = FaultyDevice::new() else { return };
    let image = device.image("a.img", 64);
    let text = format!("[daemon]\nkeepsakes = \"off\"\n{}", disk_over_nbd(&image, ""));
    let daemon = Daemon::start(&text);
    assert!(!is_held(&daemon.path("")) && !daemon.path(SOCKET).exists());
    let mut nbd = connect(&daemon.path(""));
    let mut folder = None;
    lose(&device, &image, || {
        acknowledge(&mut nbd);
        folder = Some(kill(daemon));
    });
    let daemon = Daemon::start_in(folder.unwrap(), &text);
    assert_eq!(flush(&mut connect(&daemon.path(""))), 0);
    daemon.end();
}

/// Without a keepsake, but with a sync in flight at the kill, the whole file system is asked. That
/// a sync was in flight is no loss by itself.
#[test]
fn the_file_system_is_asked_if_a_sync_was_in_flight() {
    let Some(device) = FaultyDevice::new() else { return };
    let image = device.image("a.img", 64);
    let text = format!("[daemon]\nkeepsakes = \"off\"\n{}", disk_over_nbd(&image, ""));
    let count = |folder: &Path| std::fs::read(folder.join("control.sock.syncs")).unwrap()[0];
    let set = |folder: &Path| {
        use std::os::unix::fs::FileExt;
        let mut options = std::fs::OpenOptions::new();
        let file = options.write(true).open(folder.join("control.sock.syncs")).unwrap();
        file.write_all_at(&[1], 0).unwrap();
    };
    let daemon = Daemon::start(&text);
    let mut nbd = connect(&daemon.path(""));
    assert_eq!((nbd.fill_block(3, 7), flush(&mut nbd), count(&daemon.path(""))), (Some(0), 0, 0));
    let folder = kill(daemon);
    set(folder.path());
    let daemon = Daemon::start_in(folder, &text);
    let mut nbd = connect(&daemon.path(""));
    assert_eq!((flush(&mut nbd), count(&daemon.path(""))), (0, 0));
    assert!(daemon.log().contains("reports no loss"), "{}", daemon.log());
    let mut folder = None;
    lose(&device, &image, || {
        acknowledge(&mut nbd);
        folder = Some(kill(daemon));
    });
    let folder = folder.unwrap();
    set(folder.path());
    let daemon = Daemon::start_in(folder, &text);
    assert_eq!(flush(&mut connect(&daemon.path(""))), IO_ERROR, "{}", daemon.log());
    daemon.client().recover_disk("a").unwrap();
    assert_eq!(flush(&mut connect(&daemon.path(""))), 0);
    let folder = daemon.end();
    assert!(!folder.path().join("control.sock.syncs").exists());
}

/// A service manager that keeps descriptors, by name.
struct Manager {
    socket: UnixDatagram,
    held: Vec<(String, OwnedFd)>,
}

impl Manager {
    fn new(folder: &Path) -> Self {
        let socket = UnixDatagram::bind(folder.join("notify")).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        Self { socket, held: Vec::new() }
    }

    /// Handles the next message. Returns whether it is `text`.
    fn handle(&mut self, text: &str) -> bool {
        let mut bytes = [0; 512];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let parts = &mut [IoSliceMut::new(&mut bytes)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let length = recvmsg(&self.socket, parts, &mut control, flags).unwrap().bytes;
        let file = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut files) => files.next(),
            _ => None,
        });
        let message = std::str::from_utf8(&bytes[..length]).unwrap();
        let name = message.lines().find_map(|line| line.strip_prefix("FDNAME="));
        match (name, file) {
            (Some(name), Some(file)) => self.held.push((name.to_owned(), file)),
            (Some(name), None) => {
                assert!(message.contains("FDSTOREREMOVE=1"), "{message}");
                self.held.retain(|(held, _)| held != name);
            }
            _ => {}
        }
        message.contains(text)
    }

    /// Starts a daemon with what is held.
    fn start(&mut self, folder: &Path) -> Child {
        let names: Vec<&str> = self.held.iter().map(|(name, _)| name.as_str()).collect();
        assert!(names.len() <= 1, "{names:?}");
        let passed = self.held.first().map(|(_, file)| file.try_clone().unwrap());
        let listen = if passed.is_some() { "export LISTEN_PID=$$; exec 3<&0;" } else { "" };
        let script = format!("{listen} exec \"$0\" serve --config f.toml --control control.sock");
        let child = Command::new("sh")
            .args(["-c", &script, env!("CARGO_BIN_EXE_fathom")])
            .current_dir(folder)
            .env("NOTIFY_SOCKET", folder.join("notify"))
            .env("FDSTORE", "8")
            .envs([("LISTEN_FDS", names.len().to_string()), ("LISTEN_FDNAMES", names.join(":"))])
            .stdin(passed.map_or_else(Stdio::null, Stdio::from))
            .stderr(File::create(folder.join("log")).unwrap())
            .spawn()
            .unwrap();
        while !self.handle("READY=1") {}
        child
    }
}

fn end(mut child: Child, signal: i32) {
    crate::process::kill(&child, signal);
    child.wait().unwrap();
}

#[test]
fn a_service_manager_keeps_what_tells_of_a_loss() {
    let Some(mut device) = FaultyDevice::new() else { return };
    let image = device.image("a.img", 64);
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("f.toml"), disk_over_nbd(&image, "")).unwrap();
    let mut manager = Manager::new(folder.path());
    let mut daemon = manager.start(folder.path());
    assert!(manager.held[0].0.starts_with("keep-") && !is_held(folder.path()));
    let mut nbd = connect(folder.path());
    lose(&device, &image, || {
        acknowledge(&mut nbd);
        end(daemon, libc::SIGKILL);
    });
    let first = manager.held[0].0.clone();
    daemon = manager.start(folder.path());
    let mut log = String::new();
    File::open(folder.path().join("log")).unwrap().read_to_string(&mut log).unwrap();
    assert_eq!(flush(&mut connect(folder.path())), IO_ERROR, "{log}");
    assert!(manager.held.len() == 1 && manager.held[0].0 != first, "it has a new one only");
    let client = fathom_control::Client::new(folder.path().join("control.sock"));
    client.recover_disk("a").unwrap();
    while !manager.handle("FDSTOREREMOVE") {}
    end(daemon, libc::SIGKILL);
    daemon = manager.start(folder.path());
    assert_eq!(flush(&mut connect(folder.path())), 0);
    end(daemon, libc::SIGTERM);
    while !manager.held.is_empty() {
        manager.handle("");
    }
    device.unmount();
}
