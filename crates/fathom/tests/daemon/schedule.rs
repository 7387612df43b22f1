//! The layer `schedule` of served disks.

use std::time::{Duration, Instant};

use fathom_control::{DiskChange, LayerDefinition};
use serde_json::json;

use crate::nbd::{Nbd, READ};
use crate::process::Daemon;

/// Two disks on one device that gets one request at a time. Each request takes a time there.
fn start(time: &str) -> Daemon {
    let disk = |name: &str| {
        format!(
            "[[disk]]\nname = \"{name}\"\nmemory = \"1M\"\n\
             layers = [{{ kind = \"schedule\", device = \"d\", depth = 1 }}, \
             {{ kind = \"delay\", time = \"{time}\" }}]\n"
        )
    };
    Daemon::start(&format!("[[nbd]]\naddress = \"unix:nbd.sock\"\n{}{}", disk("a"), disk("b")))
}

fn send_reads(nbd: &mut Nbd, count: u64) {
    for cookie in 0..count {
        nbd.send(READ, cookie, 0, 4096, &[]);
    }
}

/// Sends `count` reads by each client, and then takes the replies.
fn compete(clients: &mut [Nbd; 2], count: u64) {
    for nbd in &mut *clients {
        send_reads(nbd, count);
    }
    for nbd in clients {
        (0..count).for_each(|_| nbd.read_reply(4096));
    }
}

#[test]
fn disks_of_a_device_wait_for_each_other_and_it_is_reported() {
    let daemon = start("1ms");
    let client = daemon.client();
    let figure =
        |disk: &str, name: &str| client.disk(disk).unwrap().figure("schedule", name).unwrap();
    let mut clients = ["a", "b"].map(|disk| Nbd::connect(&daemon.path("nbd.sock"), disk));
    for _ in 0..20 {
        compete(&mut clients, 20);
    }
    for disk in ["a", "b"] {
        let waited = figure(disk, "waited_total");
        assert!(waited > 100, "{waited} of 400 reads of {disk} have waited");
        assert!(figure(disk, "waited_nanoseconds_total") > waited * 100_000);
        assert_eq!((figure(disk, "waiting"), figure(disk, "held")), (0, 0));
        // Without insight, no request is held back.
        assert_eq!(figure(disk, "held_nanoseconds_total"), 0);
    }
    let slow = client.slow(Some("a"), 1).unwrap();
    let slowest = &slow.disks[0].requests[0];
    assert_eq!(slowest.held_by, "schedule");
    assert!(slowest.held_ns > 0, "{slowest:?}");
    let metrics = client.metrics().unwrap();
    assert!(metrics.contains("fathom_layer_schedule_waited_total{disk=\"a\""), "{metrics}");

    // Other options are taken over in place: the layer keeps its counts.
    let waited = figure("a", "waited_total");
    let delay = LayerDefinition::new("delay", json!({ "time": "1ms" }));
    let layers = |schedule: serde_json::Value| {
        let layers = vec![LayerDefinition::new("schedule", schedule), delay.clone()];
        DiskChange { layers: Some(layers), ..DiskChange::default() }
    };
    let options = json!({ "device": "d", "weight": 300, "depth": 2, "hold_max": "3s" });
    client.change_disk("a", &layers(options)).unwrap();
    assert_eq!(figure("a", "waited_total"), waited);
    for (options, expected) in [
        (json!({ "weight": 0 }), "a weight is 1 to"),
        (json!({ "weights": { "/docker/*": 100_000 } }), "a weight is 1 to"),
        (json!({ "depth": 0 }), "`depth` is 1 to"),
        (json!({ "hold_max": "1min" }), "at most 30 s"),
        (json!({ "hold_maxx": "1s" }), "did you mean `hold_max`"),
    ] {
        let refused = client.change_disk("a", &layers(options.clone())).unwrap_err();
        let refused = format!("{refused:?}").replace("\\\"", "\"");
        assert!(refused.contains(expected), "{options}: {refused}");
    }
}

#[test]
fn drained_queues_do_not_wait_for_their_share() {
    let daemon = start("50ms");
    let client = daemon.client();
    let waiting = |disk: &str| client.disk(disk).unwrap().figure("schedule", "waiting").unwrap();
    let connect = |disk| Nbd::connect(&daemon.path("nbd.sock"), disk);
    let mut clients = ["a", "b"].map(connect);
    // They compete after some requests of each; the requests before are passed on at once.
    for _ in 0..3 {
        compete(&mut clients, 2);
    }
    let [mut first, mut second] = clients;
    for _ in 0..20 {
        send_reads(&mut first, 10);
        send_reads(&mut second, 10);
        std::thread::sleep(Duration::from_millis(5));
    }
    daemon.until("requests to wait", || waiting("a") > 100 && waiting("b") > 100);
    // A change of the layers passes on the waiting requests, which would take 20 s in turn.
    let layers = vec![LayerDefinition::new("delay", json!({ "time": "1us" }))];
    let change = DiskChange { layers: Some(layers), ..DiskChange::default() };
    let begun = Instant::now();
    client.change_disk("a", &change).unwrap();
    (0..200).for_each(|_| first.read_reply(4096));
    assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
    // So does the end of the daemon.
    let begun = Instant::now();
    daemon.signal(libc::SIGTERM);
    assert!(daemon.wait().0.success());
    assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
}
