//! The actions of one disk, client or guest disturb neither the others nor control, signals and
//! memory.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use fathom_control::{Bytes, Client, ClientError, DiskChange, DiskDefinition, ErrorCode};

use crate::nbd::Nbd;
use crate::process::{Daemon, image};
use crate::stuck::Stuck;

/// The longest time for an answer of the control interface on a busy host. Without hung storage an
/// answer takes milliseconds.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(8);
/// The number of measured requests.
const ROUNDS: u64 = 400;

/// A named request to the control interface.
type Question<'a> = (&'a str, Box<dyn Fn() -> Result<(), ClientError> + 'a>);

/// Writes and reads blocks. Returns the median time of a request.
fn work(nbd: &mut Nbd) -> Duration {
    let mut times = Vec::new();
    for round in 0..ROUNDS {
        let block = [round as u8; 4096];
        let begun = Instant::now();
        nbd.write(round % 64 * 4096, &block);
        assert_eq!(nbd.read(round % 64 * 4096, 4096), block);
        times.push(begun.elapsed() / 2);
    }
    times.sort_unstable();
    times[times.len() / 2]
}

/// The number of requests in flight of `disk`.
fn in_flight(client: &Client, disk: &str) -> u64 {
    let statistics = client.statistics().unwrap();
    statistics.disks.iter().find(|each| each.name == disk).unwrap().in_flight
}

fn disk(text: &mut String, name: &str, image: &str) {
    let _ = write!(
        text,
        "[[disk]]\nname = \"{name}\"\nimage = \"{image}\"\nvhost_user.socket = \"{name}.sock\"\n"
    );
}

#[test]
fn a_hung_disk_blocks_neither_its_neighbours_nor_control_nor_the_end() {
    let Some(stuck) = Stuck::mount() else { return };
    let folder = tempfile::tempdir().unwrap();
    image(folder.path(), "good.img", 1 << 20);
    let mut text = "[daemon]\nshutdown_time_max = \"3s\"\n\
                    [[nbd]]\naddress = \"unix:nbd.sock\"\n"
        .to_owned();
    disk(&mut text, "good", "good.img");
    disk(&mut text, "hung", &stuck.image().display().to_string());
    let daemon = Daemon::start_in(folder, &text);
    // Dropped before the daemon: the kernel does not let the daemon end while the file system
    // hangs.
    let stuck = stuck;
    let client = daemon.client();
    let mut good = Nbd::connect(&daemon.path("nbd.sock"), "good");
    let mut hung = Nbd::connect(&daemon.path("nbd.sock"), "hung");
    hung.write(0, &[1; 4096]);
    let before = work(&mut good);

    stuck.hang();
    assert!(hung.send(1, 7, 4096, 4096, &[2; 4096]));
    assert!(hung.send(0, 8, 1 << 20, 4096, &[]));
    // The write does not hold up the queue's thread.
    daemon.until("both requests to be in flight", || in_flight(&client, "hung") == 2);
    // More removals than a small pool has threads, and the other changes.
    let removals: Vec<_> = (0..8)
        .map(|_| {
            let client = daemon.client();
            std::thread::spawn(move || client.remove_disk("hung", true))
        })
        .collect();
    std::thread::sleep(Duration::from_millis(300));

    let during = work(&mut good);
    println!("a request takes {before:?}, next to a hung disk {during:?}");
    let memory = DiskDefinition {
        name: "new".into(),
        memory: Some(Bytes(1 << 20)),
        ..DiskDefinition::default()
    };
    let questions: [Question<'_>; 12] = [
        ("the daemon", Box::new(|| client.daemon().map(drop))),
        ("the disks", Box::new(|| client.disks().map(drop))),
        ("the hung disk", Box::new(|| client.disk("hung").map(drop))),
        ("statistics", Box::new(|| client.statistics().map(drop))),
        ("devices", Box::new(|| client.devices().map(drop))),
        ("usage", Box::new(|| client.usage(None, None).map(drop))),
        ("slow requests", Box::new(|| client.slow(None, 10).map(drop))),
        ("guests", Box::new(|| client.guests().map(drop))),
        ("metrics", Box::new(|| client.metrics().map(drop))),
        ("adding a disk", Box::new(|| client.add_disk(&memory).map(drop))),
        ("resizing a disk", Box::new(|| client.resize_disk("new", 2 << 20, false).map(drop))),
        ("removing a disk", Box::new(|| client.remove_disk("new", false).map(drop))),
    ];
    for (what, question) in &questions {
        let begun = Instant::now();
        question().unwrap_or_else(|error| panic!("{what}: {error}"));
        assert!(begun.elapsed() < ANSWER_TIME_MAX, "{what}: {:?}", begun.elapsed());
    }

    daemon.signal(libc::SIGTERM);
    let begun = Instant::now();
    daemon.until("the end", || daemon.log().contains("ended, but not cleanly"));
    println!("ended {:?} after SIGTERM", begun.elapsed());
    assert!(!daemon.path("control.sock").exists() && !daemon.path("nbd.sock").exists());
    // The kernel sends another request to the file system when the last descriptor is closed.
    stuck.resume();
    let (status, folder) = daemon.wait();
    let log = std::fs::read_to_string(folder.path().join("log")).unwrap();
    assert_eq!(status.code(), Some(1), "{log}");
    assert!(log.contains("the disk \"hung\" was abandoned"), "{log}");
    assert!(!log.contains("\"good\""), "the other disk ended cleanly: {log}");
    for removal in removals {
        assert!(removal.join().unwrap().is_err(), "it could not be removed");
    }
    let found = std::fs::read(folder.path().join("good.img")).unwrap();
    let last = (ROUNDS - 1) as u8;
    let place = ((ROUNDS - 1) % 64 * 4096) as usize;
    assert_eq!(found[place..place + 4096], [last; 4096], "acknowledged data exists");
}

#[test]
fn a_hung_disk_is_removed_when_its_storage_answers_again() {
    let Some(stuck) = Stuck::mount() else { return };
    let mut text = "[[nbd]]\naddress = \"unix:nbd.sock\"\n".to_owned();
    disk(&mut text, "hung", &stuck.image().display().to_string());
    let daemon = Daemon::start(&text);
    let stuck = stuck;
    let client = daemon.client();
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "hung");
    nbd.write(0, &[1; 4096]);
    stuck.hang();
    assert!(nbd.send(1, 7, 4096, 4096, &[2; 4096]));
    // A removal does not wait for a request that the daemon has not yet read.
    daemon.until("the request to be in flight", || in_flight(&client, "hung") == 1);
    let removal = {
        let client = daemon.client();
        std::thread::spawn(move || client.remove_disk("hung", true))
    };
    daemon.until("the removal to be in progress", || {
        match client.change_disk("hung", &DiskChange::default()) {
            Ok(_) => false,
            Err(ClientError::Refused(body)) => body.code == ErrorCode::Conflict,
            other => panic!("{other:?}"),
        }
    });
    assert_eq!(client.disks().unwrap().disks.len(), 1, "it exists until its requests complete");
    stuck.resume();
    removal.join().unwrap().unwrap();
    assert_eq!(nbd.reply(), Some((7, 0)), "the hung request was carried out");
    assert_eq!(client.disks().unwrap().disks, []);
    daemon.end();
}

/// The number of clients that send large requests and read nothing.
const FLOODERS: usize = 20;
/// The longest request of NBD, in bytes.
const LONGEST: u32 = 32 << 20;
/// The most memory of the daemon besides that of requests, in kB. It includes twenty threads with
/// their rings and inputs, in a build without optimisation.
const BESIDES_KB: u64 = 100 << 10;

#[test]
fn clients_that_do_not_read_are_bounded_in_memory_and_disconnected_for_others() {
    let text = "[daemon]\nnbd_memory = \"64M\"\n\
                [[disk]]\nname = \"a\"\nnull = \"1G\"\n\
                [[disk]]\nname = \"b\"\nnull = \"1G\"\n\
                [[nbd]]\naddress = \"unix:nbd.sock\"\n";
    let daemon = Daemon::start(text);
    let resident_kb = || {
        let status = daemon.proc("status");
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
    };
    let mut small = Nbd::connect(&daemon.path("nbd.sock"), "a");
    let mut large = Nbd::connect(&daemon.path("nbd.sock"), "b");
    let mut rival = Nbd::connect(&daemon.path("nbd.sock"), "a");
    let flooders: Vec<Nbd> = (0..FLOODERS)
        .map(|_| {
            let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
            for cookie in 0..2 {
                assert!(nbd.send(0, cookie, 0, LONGEST, &[]));
            }
            nbd
        })
        .collect();
    let begun = Instant::now();
    let mut most_kb = 0;
    while begun.elapsed() < Duration::from_secs(2) {
        let at = Instant::now();
        assert_eq!(small.read(4096, 4096).len(), 4096);
        assert_eq!(large.read(1 << 20, 1 << 20).len(), 1 << 20);
        assert!(at.elapsed() < ANSWER_TIME_MAX, "{:?}", at.elapsed());
        most_kb = most_kb.max(resident_kb());
    }
    println!("{FLOODERS} clients that do not read: at most {most_kb} kB resident");
    assert!(most_kb < (64 << 10) + BESIDES_KB, "{most_kb} kB");
    // A client that reads waits for memory of the same export, and gets it.
    assert!(rival.send(0, 7, 0, 1 << 20, &[]));
    daemon.until("a client to be cut off", || daemon.log().contains("NBD client cut off"));
    drop(flooders);
    assert_eq!(rival.reply(), Some((7, 0)));
    daemon.client().daemon().unwrap();
    drop((small, large, rival));
    daemon.end();
}
