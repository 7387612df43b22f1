//! The layer `limit` of served disks.

use std::time::{Duration, Instant};

use fathom_control::{DiskChange, LayerDefinition};
use serde_json::{Value, json};

use crate::nbd::{DISCONNECT, FLUSH, Nbd, READ, WRITE};
use crate::process::{Daemon, command, image};

/// The NBD error for requests of a client that has left.
const SHUTDOWN: u32 = 108;

fn change(options: Value) -> DiskChange {
    let layers = vec![LayerDefinition::new("limit", options)];
    DiskChange { layers: Some(layers), ..DiskChange::default() }
}

/// A daemon with a disk that has a limit with these options.
fn start(options: &str) -> Daemon {
    Daemon::start(&format!(
        "[[nbd]]\naddress = \"unix:nbd.sock\"\n\
         [[disk]]\nname = \"a\"\nmemory = \"1M\"\n\
         layers = [{{ kind = \"limit\", {options} }}]\n"
    ))
}

/// Sends `count` reads.
fn send_reads(nbd: &mut Nbd, count: u64) {
    for cookie in 0..count {
        nbd.send(READ, cookie, 0, 4096, &[]);
    }
}

/// Reads 4 KiB at a time, with 16 requests in flight, for `time`. The limit of `rate` requests per
/// second admits a tenth of a second's requests at once, and one more.
fn check_rate(nbd: &mut Nbd, rate: f64, time: Duration) {
    let begun = Instant::now();
    send_reads(nbd, 16);
    let mut count = 0;
    while begun.elapsed() < time {
        nbd.read_reply(4096);
        nbd.send(READ, 0, 0, 4096, &[]);
        count += 1;
    }
    let most = rate * (0.1 + begun.elapsed().as_secs_f64()) + 1.0;
    assert!(f64::from(count) <= most, "{count} reads, at most {most}");
    (0..16).for_each(|_| nbd.read_reply(4096));
}

#[test]
fn a_limit_applies_is_changed_and_is_reported() {
    let daemon = start("iops-total = 500, iops-size = \"64K\"");
    let client = daemon.client();
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    check_rate(&mut nbd, 500.0, Duration::from_secs(2));
    let held = client.disk("a").unwrap().figure("limit", "held_total").unwrap();
    assert!(held > 0);
    // The report on slow requests shows the wait for the limit.
    let slow = client.slow(Some("a"), 1).unwrap();
    let slowest = &slow.disks[0].requests[0];
    assert_eq!(slowest.held_by, "limit");
    let down_ns = slowest.layers_down_ns.unwrap();
    assert!(slowest.held_ns > 0 && slowest.held_ns <= down_ns, "{slowest:?}");
    let metrics = client.metrics().unwrap();
    assert!(metrics.contains("fathom_layer_limit_held_total{disk=\"a\""), "{metrics}");

    // The new rate also applies to requests that would wait for longer than the test. The layer
    // stays and keeps its counts.
    client.change_disk("a", &change(json!({ "total_iops_sec": 1 }))).unwrap();
    send_reads(&mut nbd, 300);
    daemon.until("requests to wait", || {
        client.disk("a").unwrap().figure("limit", "waiting") >= Some(250)
    });
    client.change_disk("a", &change(json!({ "total-iops-sec": 2000 }))).unwrap();
    let begun = Instant::now();
    (0..300).for_each(|_| nbd.read_reply(4096));
    assert!(begun.elapsed() < Duration::from_secs(60));
    assert!(client.disk("a").unwrap().figure("limit", "held_total") >= Some(held + 250));
    check_rate(&mut nbd, 2000.0, Duration::from_secs(1));
}

#[test]
fn clients_that_leave_again_and_again_do_not_pass_a_limit() {
    let daemon = start("write-bytes-sec = \"4K\"");
    let waiting = || daemon.client().disk("a").unwrap().figure("limit", "waiting").unwrap();
    let begun = Instant::now();
    for _ in 0..8 {
        let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
        for block in 0..32 {
            assert!(nbd.send(WRITE, block, block << 12, 4096, &[1; 4096]));
        }
        daemon.until("requests to wait", || waiting() >= 31);
        drop(nbd);
        daemon.until("the client's requests to end", || waiting() == 0);
    }
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    let written = (0..32).filter(|block| nbd.read_block(*block) == 1).count() as u64;
    assert!(written <= 2 + begun.elapsed().as_secs(), "{written} blocks");
}

/// The connections to a disk wait in one line.
#[test]
fn eight_clients_of_a_disk_share_its_limit() {
    let daemon = start("iops-total = 400");
    let time = Duration::from_secs(4);
    let begun = Instant::now();
    let work = || {
        let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
        let mut sent = [Instant::now(); 16];
        send_reads(&mut nbd, 16);
        let (mut count, mut longest) = (0_u32, Duration::ZERO);
        while begun.elapsed() < time {
            let (cookie, error) = nbd.reply().unwrap();
            assert_eq!((error, nbd.data(4096).map(|data| data.len())), (0, Some(4096)));
            let place = &mut sent[cookie as usize];
            longest = longest.max(place.elapsed());
            *place = Instant::now();
            nbd.send(READ, cookie, 0, 4096, &[]);
            count += 1;
        }
        (count, longest)
    };
    let found: Vec<(u32, Duration)> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(work)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    // Each has 200 requests, and 128 requests wait for 320 ms; threads of a busy machine wait for
    // their processors besides.
    for (count, longest) in &found {
        assert!((80..=400).contains(count) && longest.as_millis() < 3000, "{found:?}");
    }
}

#[test]
fn drained_queues_and_flushes_do_not_wait_for_a_limit() {
    let daemon = start("total_bytes_sec = 1");
    let client = daemon.client();
    let waiting = || client.disk("a").unwrap().figure("limit", "waiting").unwrap();
    let mut first = Nbd::connect(&daemon.path("nbd.sock"), "a");
    send_reads(&mut first, 50);
    daemon.until("requests to wait", || waiting() == 49);
    first.read_reply(4096);
    // A flush of another client does not wait.
    let mut second = Nbd::connect(&daemon.path("nbd.sock"), "a");
    assert!(second.send(FLUSH, 7, 0, 0, &[]));
    assert_eq!(second.reply(), Some((7, 0)));
    // A change of the layers passes on the waiting requests.
    let delay = LayerDefinition::new("delay", json!({ "time": "1us" }));
    let limit = LayerDefinition::new("limit", json!({ "total_bytes_sec": 1 }));
    let layers = |layers| DiskChange { layers: Some(layers), ..DiskChange::default() };
    let begun = Instant::now();
    client.change_disk("a", &layers(vec![limit.clone(), delay])).unwrap();
    (0..49).for_each(|_| first.read_reply(4096));
    assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
    assert_eq!(waiting(), 0);
    // A client that closes its connection, and one that disconnects in order: no request stays.
    send_reads(&mut first, 50);
    daemon.until("requests to wait", || waiting() >= 49);
    drop(first);
    daemon.until("the client's requests to end", || waiting() == 0);
    send_reads(&mut second, 50);
    daemon.until("requests to wait", || waiting() >= 49);
    second.send(DISCONNECT, 0, 0, 0, &[]);
    // They wait for their time, for 5 s: leaving is no way past a limit.
    let begun = Instant::now();
    (0..50).for_each(|_| assert_eq!(second.reply().map(|reply| reply.1), Some(SHUTDOWN)));
    assert!(begun.elapsed() > Duration::from_secs(4), "{:?}", begun.elapsed());
    assert_eq!(waiting(), 0);
    // The end of the daemon does not wait for a limit.
    let mut third = Nbd::connect(&daemon.path("nbd.sock"), "a");
    send_reads(&mut third, 50);
    daemon.until("requests to wait", || waiting() >= 49);
    let begun = Instant::now();
    daemon.signal(libc::SIGTERM);
    assert!(daemon.wait().0.success());
    assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
}

#[test]
fn an_inconsistent_limit_is_refused_with_a_remedy() {
    let daemon = Daemon::start(
        "[[nbd]]\naddress = \"unix:nbd.sock\"\n[[disk]]\nname = \"a\"\nmemory = \"1M\"\n",
    );
    let client = daemon.client();
    for (options, expected) in [
        (json!({ "total_iops_sec": 5, "read_iops_sec": 5 }), "exclude each other"),
        (json!({ "total_iops_sec_max": 5 }), "needs `total_iops_sec`"),
        (json!({ "bps-read": "1M", "bps-read-max": "1K" }), "is less than `read_bytes_sec`"),
        (json!({ "iops_read": 5, "iops_read_max_length": 5 }), "needs `read_iops_sec_max`"),
        (json!({ "iops_read": 5, "iops_read_max_length": 0 }), "at least 1 second"),
        (json!({ "iops_size": 4096 }), "needs a limit of requests"),
        (json!({ "total_iops_sec": u64::MAX / 4 }), "at most the value"),
        (json!({ "total_iops_sec": 5, "each": true }), "needs `containers`"),
        (json!({ "total_iops_sec": 5, "kinds": ["jornal"] }), "did you mean `journal`"),
        (json!({ "total_iop_sec": 5 }), "did you mean `total_iops_sec`"),
    ] {
        let refused = client.change_disk("a", &change(options.clone())).unwrap_err();
        let refused = format!("{refused:?}").replace("\\\"", "\"");
        assert!(refused.contains(expected), "{options}: {refused}");
    }
    assert!(client.disk("a").unwrap().figure("limit", "waiting").is_none());
}

#[test]
fn layers_are_set_and_removed_by_a_command() {
    let daemon = Daemon::start(
        "[[nbd]]\naddress = \"unix:nbd.sock\"\n[[disk]]\nname = \"a\"\nmemory = \"1M\"\n\
         layers = [{ kind = \"delay\", time = \"1us\" }]\n",
    );
    let run = |arguments: &[&str]| {
        let mut command = command(&daemon.path(""));
        command.env("FATHOM_CONTROL", daemon.path("control.sock"));
        let output = command.args(["disk", "layer", "a"]).args(arguments).output().unwrap();
        let text = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8(text).unwrap())
    };
    let layers = || {
        let layers = daemon.client().disk("a").unwrap().layers;
        layers.into_iter().map(|layer| layer.name).collect::<Vec<_>>()
    };
    let (is_set, text) = run(&["limit,total-iops-sec=500"]);
    assert!(is_set && text.contains("total_iops_sec=500"), "{text}");
    assert_eq!(layers(), ["classify", "tap", "delay", "limit"]);
    // Other options of the same limit replace its options. A limit for other requests is a new one.
    assert!(run(&["limit,total-bytes-sec=10M"]).0);
    assert!(run(&["limit,read-iops-sec=5,containers=[/docker/*]"]).0);
    assert!(run(&["delay,time=2us"]).0);
    assert_eq!(layers(), ["classify", "tap", "delay", "limit", "limit"]);
    let (_, text) = run(&[]);
    for expected in ["total_bytes_sec=10485760", "containers=[\"/docker/*\"]", "time=\"2us\""] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    assert!(!text.contains("total_iops_sec="), "{text}");
    assert!(run(&["limit", "--remove"]).0);
    assert_eq!(layers(), ["classify", "tap", "delay"]);
    let (is_removed, text) = run(&["limit", "--remove"]);
    assert!(!is_removed && text.contains("no layer \"limit\""), "{text}");
    let (is_set, text) = run(&["limit,total_iop_sec=5"]);
    assert!(!is_set && text.contains("did you mean `total_iops_sec`"), "{text}");
    assert!(run(&["tap", "--remove"]).0);
    assert_eq!(layers(), ["classify", "delay"]);
}

/// Writes 4 KiB at a time for `time`, and checks the rate as [`check_rate`] does.
fn check_write_rate(nbd: &mut Nbd, rate: f64, time: Duration) {
    let begun = Instant::now();
    let mut count = 0;
    while begun.elapsed() < time {
        nbd.write(count % 256 * 4096, &[7; 4096]);
        count += 1;
    }
    let most = rate * (0.1 + begun.elapsed().as_secs_f64()) + 1.0;
    assert!(count as f64 <= most, "{count} writes, at most {most}");
}

#[test]
fn a_limit_that_is_added_in_use_is_above_logs_and_caches() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    image(folder.path(), "a.img", 1 << 20);
    let daemon = Daemon::start_in(
        folder,
        "[[nbd]]\naddress = \"unix:nbd.sock\"\n[[disk]]\nname = \"a\"\nimage = \"a.img\"\n\
         layers = [{ kind = \"wal\", log = \"logs\", size = \"1M\", age = \"50ms\" }, { kind = \"limit\" }]\n",
    );
    let log = daemon.log();
    assert!(log.contains("has the layer `limit` beneath `wal`"), "{log}");
    let run = |arguments: &[&str]| {
        let mut command = command(&daemon.path(""));
        command.env("FATHOM_CONTROL", daemon.path("control.sock"));
        let output = command.args(["disk", "layer", "a"]).args(arguments).output().unwrap();
        let text = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8(text).unwrap())
    };
    let layers = || {
        let layers = daemon.client().disk("a").unwrap().layers;
        layers.into_iter().map(|layer| layer.name).collect::<Vec<_>>()
    };
    assert!(run(&["limit", "--remove"]).0);
    assert!(run(&["cache,size=1M"]).0);
    assert!(run(&["limit,total_iops_sec=50"]).0);
    assert_eq!(layers(), ["classify", "tap", "limit", "cache", "wal"]);
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    check_write_rate(&mut nbd, 50.0, Duration::from_secs(2));
    // Write-back is not limited, and neither is the end of the daemon.
    daemon.until("the changes to be home", || {
        daemon.client().disk("a").unwrap().figure("wal", "used_bytes") == Some(0)
    });
    // A place by name, for new layers and for those that hold no data.
    assert!(run(&["delay,time=1us", "--below", "wal"]).0);
    assert_eq!(layers(), ["classify", "tap", "limit", "cache", "wal", "delay"]);
    assert!(run(&["delay,time=2us", "--above", "tap"]).0);
    assert_eq!(layers(), ["classify", "delay", "tap", "limit", "cache", "wal"]);
    let (moved, text) = run(&["cache,size=1M", "--below", "wal"]);
    assert!(!moved && text.contains("cannot move"), "{text}");
    let (put, text) = run(&["log", "--above", "schedule"]);
    assert!(!put && text.contains("no layer \"schedule\""), "{text}");
    assert_eq!(nbd.read(0, 512), [7; 512]);
    daemon.end();
}
