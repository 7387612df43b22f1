//! Live events: listeners over the control socket, and `fathom record`.

use std::io::Read;
use std::time::{Duration, Instant};

use fathom_control::{Bytes, Client, ClientError, DiskDefinition, ErrorCode};

use crate::nbd::Nbd;
use crate::process::{Daemon, PATIENCE, command, kill};

const TWO: &str = "[[disk]]\nname = \"a\"\nvm = \"web\"\nmemory = \"1M\"\n\
                   [[disk]]\nname = \"b\"\nmemory = \"1M\"\n\
                   [[nbd]]\naddress = \"unix:nbd.sock\"\n";

/// Reads a stream to its end, in a thread.
fn listen(client: &Client, disks: &[&str]) -> std::thread::JoinHandle<Vec<u8>> {
    let disks: Vec<String> = disks.iter().map(|&disk| disk.to_owned()).collect();
    let mut stream = client.recording(&disks, &[], None).unwrap();
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).unwrap();
        bytes
    })
}

/// The rows of a recording in the form of `fathom record --export`, without the line of names and
/// without the times as people read them.
fn exported(daemon: &Daemon, bytes: &[u8]) -> Vec<String> {
    std::fs::write(daemon.path("x.rec"), bytes).unwrap();
    let output = command(&daemon.path(""))
        .args(["record", "--export", "x.rec", "-o", "-"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(output.stderr.is_empty(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let mut lines = text.lines().map(str::to_owned);
    let names = lines.next().unwrap();
    assert!(names.starts_with("@time,BlktapTS,Type,IOOp,ReqId,Sector,Size,VMName"), "{names}");
    lines.map(|line| line.split_once(',').unwrap().1.to_owned()).collect()
}

fn field(line: &str, number: usize) -> &str {
    line.split(',').nth(number).unwrap()
}

#[test]
fn two_listeners_get_the_events_that_they_requested() {
    let daemon = Daemon::start(TWO);
    let client = daemon.client();
    let all = listen(&client, &[]);
    let one = listen(&client, &["a"]);
    let mut a = Nbd::connect(&daemon.path("nbd.sock"), "a");
    let mut b = Nbd::connect(&daemon.path("nbd.sock"), "b");
    for number in 0..100 {
        a.write(number * 4096, &[1; 4096]);
        b.read(number * 512, 512);
    }
    // Streams end with the daemon, and have all events.
    daemon.signal(libc::SIGTERM);
    let (all, one) = (all.join().unwrap(), one.join().unwrap());
    let mut all = exported(&daemon, &all);
    all.retain(|line| "rw".contains(field(line, 2)));
    assert_eq!(all.len(), 400);
    let mut one = exported(&daemon, &one);
    one.retain(|line| "rw".contains(field(line, 2)));
    assert_eq!(one.len(), 200);
    for (number, pair) in one.chunks(2).enumerate() {
        assert_eq!((field(&pair[0], 1), field(&pair[1], 1)), ("Q", "R"));
        assert_eq!(field(&pair[0], 3), field(&pair[1], 3));
        assert_eq!(field(&pair[0], 4), (number * 8).to_string());
        assert_eq!(
            (field(&pair[0], 6), field(&pair[0], 7), field(&pair[0], 8)),
            ("web", "a", "memory")
        );
        let times: Vec<u64> = [0, 9].map(|n| field(&pair[0], n).parse().unwrap()).into();
        assert!(times[0] <= times[1] && times[1] - times[0] < 5_000_000_000, "{times:?}");
    }
    assert_eq!(daemon.wait().0.code(), Some(0));
}

#[test]
fn a_listener_that_does_not_read_blocks_no_other() {
    let daemon = Daemon::start(TWO);
    let client = daemon.client();
    let idle = client.recording(&[], &[], None).unwrap();
    let active = listen(&client, &["b"]);
    let mut b = Nbd::connect(&daemon.path("nbd.sock"), "b");
    for number in 0..2000 {
        b.write(number % 256 * 4096, &[1; 4096]);
    }
    client.remove_disk("b", true).unwrap();
    let mut lines = exported(&daemon, &active.join().unwrap());
    lines.retain(|line| field(line, 2) == "w");
    assert_eq!(lines.len(), 4000);
    drop(idle);
    daemon.end();
}

#[test]
fn disks_are_added_and_removed_while_listeners_exist() {
    let daemon = Daemon::start(TWO);
    let client = daemon.client();
    match client.recording(&["c".to_owned()], &[], None) {
        Err(ClientError::Refused(body)) => assert_eq!(body.code, ErrorCode::NotFound),
        other => panic!("{other:?}"),
    }
    let all = listen(&client, &[]);
    let one = listen(&client, &["a"]);
    Nbd::connect(&daemon.path("nbd.sock"), "a").write(0, &[1; 512]);
    client.remove_disk("a", true).unwrap();
    // The listener's only disk has been removed.
    let mut one = exported(&daemon, &one.join().unwrap());
    one.retain(|line| field(line, 2) == "w");
    assert_eq!(one.len(), 2);
    let added =
        DiskDefinition { name: "c".into(), memory: Some(Bytes(1 << 20)), ..Default::default() };
    client.add_disk(&added).unwrap();
    std::thread::sleep(Duration::from_millis(400));
    Nbd::connect(&daemon.path("nbd.sock"), "c").write(0, &[1; 512]);
    daemon.signal(libc::SIGTERM);
    let mut all = exported(&daemon, &all.join().unwrap());
    all.retain(|line| field(line, 2) == "w");
    let disks: Vec<&str> = all.iter().map(|line| field(line, 7)).collect();
    assert_eq!(disks, ["a", "a", "c", "c"]);
    assert_eq!(daemon.wait().0.code(), Some(0));
}

#[test]
fn events_arrive_soon_and_moments_are_reported() {
    let daemon = Daemon::start(TWO);
    let pulse = Some(Duration::from_millis(20));
    let mut stream = daemon.client().recording(&[], &[], pulse).unwrap();
    let mut buffer = [0; 4096];
    let mut until = |mark: u8| {
        // The kind of a block follows its mark; each block arrives in a read of its own.
        let begun = Instant::now();
        loop {
            assert!(begun.elapsed() < PATIENCE);
            let length = stream.read(&mut buffer).unwrap();
            if buffer[..length].starts_with(b"FBLK") && buffer[4] == mark {
                return begun.elapsed();
            }
        }
    };
    until(3);
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    nbd.write(0, &[1; 512]);
    let waited = until(1);
    assert!(waited < Duration::from_secs(15), "{waited:?}");
    daemon.end();
}

#[test]
fn record_ends_in_order_on_a_signal() {
    let daemon = Daemon::start(TWO);
    let mut child = command(&daemon.path(""))
        .args(["record", "a", "-o", "a.rec", "--control", "control.sock"])
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    daemon.until("the recording begins", || daemon.path("a.rec").exists());
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    for _ in 0..50 {
        nbd.write(0, &[1; 512]);
    }
    // The daemon has not sent the last events yet.
    kill(&child, libc::SIGINT);
    assert!(child.wait().unwrap().success());
    let mut stderr = String::new();
    child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    assert!(stderr.contains(" events, ") && stderr.contains("0 dropped"), "{stderr}");
    let mut lines = exported(&daemon, &std::fs::read(daemon.path("a.rec")).unwrap());
    lines.retain(|line| field(line, 2) == "w");
    assert_eq!(lines.len(), 100);
    let output = command(&daemon.path(""))
        .args(["record", "-o", "b.rec", "--for", "200ms", "--control", "control.sock"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(exported(&daemon, &std::fs::read(daemon.path("b.rec")).unwrap()).is_empty());
    daemon.end();
}

#[test]
fn a_recording_cut_off_by_the_death_of_the_daemon_is_reported() {
    let daemon = Daemon::start(TWO);
    let child = command(&daemon.path(""))
        .args(["record", "a", "-o", "a.rec", "--control", "control.sock"])
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    daemon.until("something is recorded", || {
        nbd.write(0, &[1; 512]);
        std::fs::metadata(daemon.path("a.rec")).is_ok_and(|file| file.len() > 0)
    });
    daemon.signal(libc::SIGKILL);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.contains("error: the events are cut off"), "{stderr}");
    // The events written before are complete and in order.
    let lines = exported(&daemon, &std::fs::read(daemon.path("a.rec")).unwrap());
    assert!(lines.iter().any(|line| field(line, 2) == "w"), "{lines:?}");
}
