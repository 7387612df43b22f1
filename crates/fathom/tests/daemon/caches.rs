//! What caches do, as operators see it: the report, the metrics and the commands.

use std::fs;

use fathom_control::{CacheReport, DiskChange, LayerDefinition};
use serde_json::{Value, json};

use crate::nbd::{Nbd, TRIM, WRITE};
use crate::process::{Daemon, command, image};

const BLOCK: u64 = 16 << 10;
/// The blocks that are read, of the 64 of the cache.
const COUNT: u64 = 40;

/// The command `fathom cache …`: its exit status, and what it prints.
fn cache(daemon: &Daemon, arguments: &[&str]) -> (bool, String) {
    let mut command = command(&daemon.path(""));
    command.arg("cache").args(arguments).arg("--control").arg(daemon.path("control.sock"));
    let output = command.output().unwrap();
    let text = [&output.stdout[..], &output.stderr[..]].concat();
    (output.status.success(), String::from_utf8(text).unwrap())
}

fn start() -> Daemon {
    let folder = tempfile::tempdir().unwrap();
    image(folder.path(), "a.img", 8 << 20);
    image(folder.path(), "b.img", 8 << 20);
    let layers = "layers = [{ kind = \"cache\", size = \"1M\" }, { kind = \"delay\", time = \"1ms\", \
                  operations = [\"read\"] }]";
    let configuration = format!(
        "[[nbd]]\naddress = \"unix:nbd.sock\"\n\
         [[disk]]\nname = \"a\"\nvm = \"shop\"\nimage = \"a.img\"\n{layers}\n\
         [[disk]]\nname = \"b\"\nimage = \"b.img\"\n"
    );
    Daemon::start_in(folder, &configuration)
}

fn read_all(nbd: &mut Nbd) {
    for block in 0..COUNT {
        nbd.read(block * BLOCK, BLOCK as u32);
    }
}

fn report(daemon: &Daemon) -> CacheReport {
    daemon.client().caches(None, 500, 10).unwrap()
}

#[test]
fn the_report_on_a_cache_is_a_plain_count() {
    let daemon = start();
    let mut a = Nbd::connect(&daemon.path("nbd.sock"), "a");
    read_all(&mut a);
    let blocks = || report(&daemon).caches[0].used_bytes / BLOCK;
    daemon.until("the blocks to be in the cache", || blocks() == COUNT);
    (0..4).for_each(|_| read_all(&mut a));
    let report = report(&daemon);
    assert_eq!(report.caches.len(), 1);
    let (cache, disk) = report.of_disk("a").unwrap();
    assert_eq!((&*cache.name, cache.is_shared, &*cache.policy), ("a", false, "auto"));
    assert_eq!((cache.size_bytes, cache.used_bytes), (1 << 20, COUNT * BLOCK));
    assert_eq!((cache.insertions, disk.used_bytes), (COUNT, COUNT * BLOCK));
    let counts = &disk.counts;
    assert_eq!((counts.reads, counts.hits), (5 * COUNT, 4 * COUNT));
    assert_eq!((counts.read_bytes, counts.hit_bytes), (5 * COUNT * BLOCK, 4 * COUNT * BLOCK));
    assert!(counts.miss_ns >= COUNT * 1_000_000, "{counts:?}");
    assert!(counts.avoided_ns >= 4 * COUNT * 900_000 && counts.hit_ns < counts.avoided_ns);
    assert_eq!((disk.classes.len(), &*disk.classes[0].class), (1, "unknown"));
    assert_eq!(disk.classes[0].counts, *counts);
    // A round of reads misses every LRU cache of fewer blocks.
    let curve = &disk.curve;
    assert_eq!((curve.accesses, curve.size_bytes, disk.dropped), (5 * COUNT, 1 << 20, 0));
    assert!((curve.sampled - 1.0).abs() < 1e-9 && curve.window_ns < 600_000_000_000);
    let ratios: Vec<f64> = curve.estimates.iter().map(|estimate| estimate.miss_ratio).collect();
    assert!(
        ratios.iter().zip([1.0, 0.2, 0.2, 0.2]).all(|(a, b)| (a - b).abs() < 1e-9),
        "{ratios:?}"
    );
    assert!((curve.miss_ratio - 0.2).abs() < 1e-9 && curve.points.len() >= 2);

    // Why blocks leave.
    let data = [7; BLOCK as usize];
    for block in 0..3 {
        assert!(a.send(WRITE, 1, block * BLOCK, BLOCK as u32, &data));
        assert_eq!(a.reply(), Some((1, 0)));
    }
    assert!(a.send(TRIM, 2, 10 * BLOCK, 5 * BLOCK as u32, &[]));
    assert_eq!(a.reply(), Some((2, 0)));
    let removals = self::report(&daemon).caches[0].removals.clone();
    assert_eq!((removals.written, removals.discarded, removals.capacity), (3, 5, 0));
    // The insight of an NBD client's reads is unknown, but a cache has been asked.
    let usage = daemon.client().usage(Some("a"), None).unwrap();
    let read = &usage.disks[0].total.read;
    assert_eq!((read.cache_requests, read.cache_hits), (5 * COUNT, 4 * COUNT));
    let slow = daemon.client().slow(Some("a"), 128).unwrap();
    assert!(slow.disks[0].requests.iter().any(|request| request.cache_hit == "miss"));

    let metrics = daemon.client().metrics().unwrap();
    for line in [
        "fathom_cache_reads_total{disk=\"a\",vm=\"shop\",class=\"unknown\"} 200".to_owned(),
        "fathom_cache_hits_total{disk=\"a\",vm=\"shop\",class=\"unknown\"} 160".to_owned(),
        "fathom_cache_miss_ratio_estimate{disk=\"a\",vm=\"shop\",size=\"50\"} 1".to_owned(),
        "fathom_layer_cache_discarded_total{disk=\"a\",vm=\"shop\"} 5".to_owned(),
    ] {
        assert!(metrics.contains(&line), "{line} is missing:\n{metrics}");
    }
    assert!(daemon.client().caches(Some("c"), 0, 0).is_err());
    assert!(daemon.client().caches(Some("b"), 0, 0).unwrap().caches.is_empty());
}

#[test]
fn commands_show_what_caches_do() {
    let daemon = start();
    let shown = |arguments: &[&str], parts: &[&str]| {
        let (succeeds, text) = cache(&daemon, arguments);
        assert!(succeeds, "{arguments:?}: {text}");
        for part in parts {
            assert!(text.contains(part), "{arguments:?}: {part} is missing:\n{text}");
        }
        text
    };
    shown(&["curve", "a"], &["a has not been read yet"]);
    let (succeeds, text) = cache(&daemon, &["curve", "a", "--picture", "x.svg"]);
    assert!(!succeeds && text.contains("no curve of a yet"), "{text}");
    let mut a = Nbd::connect(&daemon.path("nbd.sock"), "a");
    read_all(&mut a);
    daemon.until("the blocks to be in the cache", || {
        report(&daemon).caches[0].used_bytes == COUNT * BLOCK
    });
    (0..4).for_each(|_| read_all(&mut a));
    shown(&["list"], &["CACHE", "1 MiB", "62.5 %", "80.0 %", "2.50M", "auto"]);
    shown(&["top", "--once"], &["READS", "200", "80.0 %", "-80.0", "  0.0", "unknown 100 %"]);
    shown(&["top", "-n", "1", "--interval", "100ms"], &["READ/S", "SAVED B/S"]);
    shown(&["info", "a"], &["160 of 200 reads: 80.0 %", "data of unknown meaning", "40"]);
    shown(&["curve", "a", "--picture", "a.svg"], &["now", "80.0 %", "The picture is in a.svg"]);
    let picture = fs::read_to_string(daemon.path("a.svg")).unwrap();
    assert!(picture.starts_with("<svg") && picture.contains("now 1 MiB: 80.0 %"), "{picture}");
    let json =
        |arguments: &[&str]| -> Value { serde_json::from_str(&shown(arguments, &[])).unwrap() };
    let top = json(&["top", "--once", "--json"]);
    assert_eq!(top["caches"][0]["disks"][0]["hit_ratio"], 0.8);
    assert_eq!(json(&["list", "--json"])["caches"][0]["name"], "a");
    assert_eq!(json(&["info", "a", "--json"])["disk"]["counts"]["hits"], 160);
    assert_eq!(json(&["curve", "a", "--json"])["curve"]["accesses"], 200);
    for arguments in [["info", "b"], ["curve", "b"]] {
        let (succeeds, text) = cache(&daemon, &arguments);
        assert!(!succeeds && text.contains("the disk b has no cache"), "{text}");
    }
    // The counts of a layer end with it.
    let change =
        |layers: Vec<LayerDefinition>| DiskChange { layers: Some(layers), ..DiskChange::default() };
    daemon.client().change_disk("a", &change(Vec::new())).unwrap();
    assert_eq!(cache(&daemon, &["list"]).1, "No disk has the layer `cache`.\n");
    let (succeeds, text) = cache(&daemon, &["top", "--once"]);
    assert!(!succeeds && text.contains("no disk has a cache"), "{text}");
    let again = LayerDefinition::new("cache", json!({ "size": "1M" }));
    daemon.client().change_disk("a", &change(vec![again])).unwrap();
    assert_eq!(report(&daemon).of_disk("a").unwrap().1.counts.reads, 0);
}

#[test]
fn the_curve_of_a_shared_cache_is_that_of_each_disks_part() {
    let daemon = start();
    let shared = || {
        let options = json!({ "name": "both", "size": "1M" });
        DiskChange {
            layers: Some(vec![LayerDefinition::new("cache", options)]),
            ..DiskChange::default()
        }
    };
    for disk in ["a", "b"] {
        daemon.client().change_disk(disk, &shared()).unwrap();
    }
    let [mut a, mut b] = ["a", "b"].map(|disk| Nbd::connect(&daemon.path("nbd.sock"), disk));
    (0..30).for_each(|block| drop(a.read(block * BLOCK, BLOCK as u32)));
    (0..10).for_each(|block| drop(b.read(block * BLOCK, BLOCK as u32)));
    daemon.until("the blocks to be in the cache", || {
        report(&daemon).caches[0].used_bytes == 40 * BLOCK
    });
    let report = report(&daemon);
    let cache = &report.caches[0];
    assert_eq!((report.caches.len(), &*cache.name, cache.is_shared), (1, "both", true));
    let parts: Vec<(&str, u64, u64)> = cache
        .disks
        .iter()
        .map(|disk| (&*disk.name, disk.used_bytes / BLOCK, disk.curve.size_bytes / BLOCK))
        .collect();
    assert_eq!(parts, [("a", 30, 48), ("b", 10, 16)]);
}
