//! The end of the daemon, under load and idle.

use std::collections::HashMap;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use fathom_control::DaemonState;

use crate::nbd::Nbd;
use crate::process::{Daemon, command, image};

/// The content of the block at `index` after its write number `round`.
fn block(index: u64, round: u64) -> [u8; 4096] {
    let mut block = [0; 4096];
    for (word, place) in block.chunks_exact_mut(8).enumerate() {
        place.copy_from_slice(&(index << 32 ^ round << 12 ^ word as u64).to_le_bytes());
    }
    block
}

#[test]
fn sigterm_under_load_loses_nothing() {
    const BLOCKS: u64 = 256;
    const DEPTH: u64 = 16;
    let folder = tempfile::tempdir().unwrap();
    image(folder.path(), "a.img", BLOCKS * 4096);
    // The delay keeps requests in flight when the signal arrives.
    let text = "[[disk]]\nname = \"a\"\nimage = \"a.img\"\n\
                layers = [{ kind = \"delay\", time = \"2ms\", jitter = \"3ms\" }]\n\
                [[nbd]]\naddress = \"unix:nbd.sock\"\n";
    let daemon = Daemon::start_in(folder, text);
    let socket = daemon.path("nbd.sock");
    let writer = std::thread::spawn(move || {
        let mut nbd = Nbd::connect(&socket, "a");
        // The last acknowledged round of each block, and the last round sent.
        let mut acknowledged: HashMap<u64, u64> = HashMap::new();
        let mut sent: HashMap<u64, u64> = HashMap::new();
        let mut next = 0;
        let mut in_flight = 0;
        loop {
            while in_flight < DEPTH {
                let (index, round) = (next % BLOCKS, next / BLOCKS + 1);
                if !nbd.send(1, next, index * 4096, 4096, &block(index, round)) {
                    break;
                }
                sent.insert(index, round);
                next += 1;
                in_flight += 1;
            }
            match nbd.reply() {
                Some((cookie, 0)) => {
                    acknowledged.insert(cookie % BLOCKS, cookie / BLOCKS + 1);
                    in_flight -= 1;
                }
                // Refused because the daemon ends: the write is not carried out, and its error
                // reports that.
                Some((_, error)) => {
                    assert_eq!(error, 108, "ESHUTDOWN is the only error");
                    in_flight -= 1;
                }
                None => return (acknowledged, sent),
            }
        }
    });
    std::thread::sleep(Duration::from_millis(300));
    let begun = Instant::now();
    let folder = daemon.end();
    println!("ended under load in {:?}", begun.elapsed());
    assert!(begun.elapsed() < Duration::from_secs(30));
    let (acknowledged, sent) = writer.join().unwrap();
    assert!(acknowledged.len() > 16, "{} blocks", acknowledged.len());
    let file = std::fs::File::open(folder.path().join("a.img")).unwrap();
    for (index, round) in &acknowledged {
        let mut found = [0; 4096];
        file.read_exact_at(&mut found, index * 4096).unwrap();
        let later = sent[index];
        let whole = (*round..=later).any(|round| found == block(*index, round));
        assert!(whole, "round {round} of block {index} is lost");
    }
}

#[test]
fn a_client_can_end_the_daemon_over_the_control_socket() {
    let text = "[[disk]]\nname = \"a\"\nmemory = \"1M\"\nvhost_user.socket = \"a.sock\"\n";
    let daemon = Daemon::start(text);
    let info = daemon.client().daemon().unwrap();
    assert_eq!((info.state, info.disks), (DaemonState::Running, 1));
    daemon.client().shutdown().unwrap();
    let (status, folder) = daemon.wait();
    assert_eq!(status.code(), Some(0));
    for socket in ["control.sock", "a.sock"] {
        assert!(!folder.path().join(socket).exists(), "{socket}");
    }
    let log = std::fs::read_to_string(folder.path().join("log")).unwrap();
    assert!(log.ends_with("info    ended\n"), "{log}");
    assert!(!log.contains('\x1b'), "colours belong on terminals");
}

#[test]
fn a_slow_disk_ends_within_the_bound() {
    let text = "[daemon]\nshutdown_time_max = \"300ms\"\n\
                [[disk]]\nname = \"a\"\nmemory = \"1M\"\n\
                layers = [{ kind = \"delay\", time = \"5min\" }]\n";
    let daemon = Daemon::start(text);
    let begun = Instant::now();
    daemon.signal(libc::SIGTERM);
    let (status, folder) = daemon.wait();
    assert_eq!(status.code(), Some(1));
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
    let log = std::fs::read_to_string(folder.path().join("log")).unwrap();
    assert!(log.contains("the last flush of \"a\""), "{log}");
}

#[test]
fn the_check_starts_nothing_and_reports_errors() {
    let folder = tempfile::tempdir().unwrap();
    let check = |text: &str| {
        std::fs::write(folder.path().join("f.toml"), text).unwrap();
        let arguments = ["serve", "--config", "f.toml", "--check", "--control", "c.sock"];
        let output = command(folder.path()).args(arguments).output().unwrap();
        let output_text = [output.stdout, output.stderr].concat();
        (output.status.code().unwrap(), String::from_utf8(output_text).unwrap())
    };
    let sound = check("[[disk]]\nname = \"a\"\nmemory = \"1M\"\n");
    assert_eq!(sound, (0, "sound: 1 disk, 0 NBD listeners\n".into()));
    let wrong = check("[[disk]]\nname = \"a\"\nmemroy = \"1M\"\n");
    assert_eq!(wrong.0, 2);
    assert!(wrong.1.starts_with("f.toml:3:1: there is no key `memroy` in [[disk]]\n"), "{wrong:?}");
    assert!(!folder.path().join("c.sock").exists());
    let nothing = command(folder.path()).arg("serve").output().unwrap();
    assert_eq!(nothing.status.code(), Some(2));
}

#[test]
fn flags_serve_one_disk() {
    let folder = tempfile::tempdir().unwrap();
    image(folder.path(), "root.img", 1 << 20);
    let arguments = ["serve", "--image", "root.img", "--nbd", "unix:nbd.sock", "--read-only"];
    let mut child = command(folder.path())
        .args(arguments)
        .args(["--control", "control.sock", "--log", "error"])
        .spawn()
        .unwrap();
    let client = fathom_control::Client::new(folder.path().join("control.sock"));
    let begun = Instant::now();
    let status = loop {
        match client.disk("root") {
            Ok(status) => break status,
            Err(error) => assert!(begun.elapsed() < Duration::from_secs(20), "{error}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    assert!(status.read_only && !status.capabilities.write);
    // The daemon listens a moment after the disk is served.
    let mut nbd = loop {
        match Nbd::try_connect(&folder.path().join("nbd.sock"), "") {
            Ok(nbd) => break nbd,
            Err(error) => assert!(begun.elapsed() < Duration::from_secs(20), "{error}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    assert_eq!(nbd.capacity(), 1 << 20);
    assert!(nbd.send(1, 9, 0, 512, &[1; 512]));
    assert_eq!(nbd.reply(), Some((9, 1)), "EPERM");
    client.shutdown().unwrap();
    assert!(child.wait().unwrap().success());
}
