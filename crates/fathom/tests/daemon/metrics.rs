//! The metrics by Prometheus' rules for names: by `promtool check metrics` where it is available.

use crate::alerts;
use crate::nbd::Nbd;
use crate::process::{Daemon, image};

#[test]
fn metrics_have_the_names_that_prometheus_expects() {
    let folder = tempfile::tempdir().unwrap();
    image(folder.path(), "a.img", 8 << 20);
    let layers = "layers = [{ kind = \"limit\", total_iops_sec = 100000 }, { kind = \"schedule\" }, \
                  { kind = \"cache\", size = \"4M\" }, { kind = \"wal\", log = \"a.log\", size = \"1M\" }]\n";
    let disk = format!("[[disk]]\nname = \"a\"\nimage = \"a.img\"\n{layers}");
    let listener = "[[nbd]]\naddress = \"unix:nbd.sock\"\n";
    let memory = "[[disk]]\nname = \"m\"\nmemory = \"1M\"\n";
    let daemon = Daemon::start_in(folder, &format!("{disk}{memory}{listener}"));
    let client = daemon.client();
    daemon.until("the disks are served", || client.disk("a").is_ok() && client.disk("m").is_ok());
    Nbd::connect(&daemon.path("nbd.sock"), "m").write(0, &[1; 512]);
    let text = client.metrics().unwrap();
    let mut families = 0;
    for line in text.lines() {
        let Some((family, kind)) =
            line.strip_prefix("# TYPE ").and_then(|line| line.split_once(' '))
        else {
            continue;
        };
        families += 1;
        // Prometheus has base units, and counters have a suffix.
        let units = ["ns", "us", "ms", "nanoseconds", "microseconds", "milliseconds", "kilobytes"];
        let is_base = !family.split('_').any(|word| units.contains(&word));
        let has_suffix = (kind == "counter") == family.ends_with("_total");
        assert!(is_base && has_suffix, "{family} is a {kind}");
    }
    assert!(families > 50, "{families}");
    for family in ["limit_held", "schedule_waited", "cache_hit"] {
        let sample = format!("fathom_layer_{family}_seconds_total{{disk=\"a\"");
        assert!(text.contains(&sample), "{sample}\n{text}");
    }
    let used = text.lines().find_map(|line| {
        line.strip_prefix("fathom_store_memory_used_bytes{disk=\"m\",vm=\"\",layer=\"\"} ")
    });
    assert!(used.is_some_and(|used| (512..=1 << 20).contains(&used.parse().unwrap())), "{text}");
    alerts::check_metrics(&text);
}
