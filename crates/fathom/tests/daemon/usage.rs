//! Accounts by the source of the I/O, for a client that is no guest.

use fathom_control::{ClientError, DiskChange, ErrorCode, InsightState};

use crate::nbd::Nbd;
use crate::process::Daemon;

#[test]
fn requests_without_a_guest_are_counted_as_unknown() {
    let daemon = Daemon::start(
        "[[nbd]]\naddress = \"unix:nbd.sock\"\n\
         [[disk]]\nname = \"a\"\nvm = \"web\"\nmemory = \"1M\"\n\
         layers = [{ kind = \"log\", lines_per_second_max = 0, file = \"lines\" }]\n\
         [[disk]]\nname = \"b\"\nmemory = \"1M\"\nclassify = false\n",
    );
    let client = daemon.client();
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    nbd.write(4096, &[7; 4096]);
    assert_eq!(nbd.read(4096, 512), [7; 512]);
    let before = client.usage(None, None).unwrap();
    assert_eq!(before.disks.len(), 2);
    let usage = before.disk("a").unwrap();
    assert!(usage.counted && usage.rows.is_empty());
    assert_eq!((usage.total.write.bytes, usage.total.read.bytes), (4096, 512));
    assert_eq!(usage.unknown, usage.total);
    assert_eq!(usage.total.sum().latency.count(), usage.total.sum().requests);
    assert!(!before.disk("b").unwrap().counted);
    assert_eq!(client.usage(None, Some("web")).unwrap().disks.len(), 1);
    assert_eq!(client.usage(Some("b"), Some("web")).unwrap().disks.len(), 0);

    nbd.write(0, &[1; 1024]);
    let interval = client.usage(Some("a"), None).unwrap().since(&before);
    assert_eq!(interval.disks[0].total.write.bytes, 1024);
    assert!(interval.disks[0].total.read.is_empty());

    let slow = client.slow(Some("a"), 2).unwrap();
    assert_eq!(slow.disks[0].requests.len(), 2);
    let slowest = &slow.disks[0].requests[0];
    assert!(slowest.latency_ns >= slow.disks[0].requests[1].latency_ns);
    assert_eq!((slowest.facts.kind.as_str(), slowest.error.as_str()), ("unknown", ""));
    let parts = [slowest.layers_down_ns, slowest.backend_ns, slowest.layers_up_ns];
    assert_eq!(parts.into_iter().flatten().sum::<u64>(), slowest.latency_ns);
    for result in [client.slow(Some("c"), 1).err(), client.usage(Some("c"), None).err()] {
        let Some(ClientError::Refused(body)) = result else { panic!("{result:?}") };
        assert_eq!(body.code, ErrorCode::NotFound);
    }
    assert!(client.guests().unwrap().guests.is_empty());
    assert_eq!(client.disk("a").unwrap().insight.state, InsightState::NoGuest);
    assert_eq!(client.disk("b").unwrap().insight.state, InsightState::Off);

    let metrics = client.metrics().unwrap();
    for line in [
        "fathom_usage_bytes_total{disk=\"a\",vm=\"web\",cgroup=\"\",kind=\"unknown\",operation=\"write\"} 5120",
        "fathom_insight_state{disk=\"b\",vm=\"\",state=\"off\"} 1",
    ] {
        assert!(metrics.contains(line), "{line}\n{metrics}");
    }
    let lines = std::fs::read_to_string(daemon.path("lines")).unwrap();
    assert_eq!(lines.lines().filter(|line| line.contains(" write ")).count(), 4, "{lines}");
    assert!(lines.starts_with("a #"), "{lines}");

    // Counters that stop and start again belong to a new instance.
    let change = |classify| DiskChange { classify: Some(classify), ..DiskChange::default() };
    client.change_disk("a", &change(false)).unwrap();
    assert_eq!(client.disk("a").unwrap().insight.state, InsightState::Off);
    let instance = usage.instance;
    client.change_disk("a", &change(true)).unwrap();
    nbd.write(0, &[1; 512]);
    let after = client.usage(Some("a"), None).unwrap();
    assert_ne!(after.disks[0].instance, instance);
    assert_eq!(after.disks[0].total.write.bytes, 512);
    daemon.end();
}
