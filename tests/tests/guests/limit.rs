//! Limits under the load of a real guest, by fio's own figures.

use fathom_tests::{Daemon, Disk, Guest, Result, Served, patience, until};

/// The limits of a disk and of a container, in requests per second.
const OF_DISK: f64 = 500.0;
const OF_CONTAINER: f64 = 300.0;
/// The measured time, in seconds.
const SECONDS: f64 = 10.0;

/// Random reads of a disk in a control group: KiB, KiB/s, requests/s and ms as fio measures them.
/// The first two seconds, in which the limit admits its slack, are not measured.
fn load(group: &str, disk: &str) -> String {
    format!(
        "mkdir -p /sys/fs/cgroup/{group}; sh -c 'echo $$ > /sys/fs/cgroup/{group}/cgroup.procs
        exec fio --name={group} --filename=/dev/{disk} --direct=1 --ioengine=libaio --iodepth=16 \
        --rw=randread --bs=4k --ramp_time=2 --time_based --runtime={SECONDS} --minimal' | cut -d ';' -f 6-9"
    )
}

/// The rate that fio printed, from the bytes and the time: its own rate is a whole number.
fn rate(what: &str, printed: &str) -> f64 {
    let fields: Vec<f64> = printed.trim().split(';').filter_map(|it| it.parse().ok()).collect();
    let [kib, _, _, ms] = fields[..] else { panic!("{what}: {printed:?}") };
    kib / 4.0 / (ms / 1e3)
}

/// Checks that a rate does not exceed a limit: in the measured time the limit admits its rate, at
/// most the slack of a tenth of a second, and the requests in flight.
fn is_within(what: &str, printed: &str, limit: f64) {
    let rate = rate(what, printed);
    println!("{what}: {rate:.1} of {limit} reads/s, {:+.2} %", (rate / limit - 1.0) * 100.0);
    let most = (limit * (SECONDS + 0.1) + 16.0) / SECONDS;
    assert!(rate > 0.0 && rate <= most, "{what}: {rate} of {limit} reads/s");
}

#[test]
fn a_guest_under_load_gets_the_limits_of_its_disk_and_of_its_container() -> Result<()> {
    let daemon = Daemon::serve(&[
        Served::sparse("whole", 64)
            .with(&format!("layers = [{{ kind = 'limit', total_iops_sec = {OF_DISK} }}]")),
        Served::sparse("part", 64).with(&format!(
            "layers = [{{ kind = 'limit', total_iops_sec = {OF_CONTAINER}, containers = ['/batch*'] }}]"
        )),
    ])?;
    let disk = |name: &str| Disk::vhost_user(daemon.path(&format!("{name}.sock")));
    let guest = Guest::builder().disk(disk("whole")).disk(disk("part")).start()?;
    // The first requests of a guest are those in which its kernel is found.
    until("the guest to be understood", patience(60), || {
        guest.check("dd if=/dev/vdb of=/dev/null bs=4k count=8 iflag=direct status=none")?;
        Ok((daemon.status("part")?.insight.kernels > 0).then_some(()))
    })?;
    let printed = guest.check_within(&load("web", "vda"), 60)?;
    is_within("disk", &printed, OF_DISK);
    let in_container = guest.spawn(&load("batch", "vdb"))?;
    let beside = guest.check_within(&load("web", "vdb"), 60)?;
    let printed = guest.finish_within(in_container, 60)?;
    assert_eq!(printed.status, 0, "{}", printed.text);
    is_within("container", &printed.text, OF_CONTAINER);
    println!("beside the container: {:.0} reads/s", rate("beside the container", &beside));
    for name in ["whole", "part"] {
        let held = daemon.status(name)?.figure("limit", "held_total").unwrap_or_default();
        assert!(held > 0, "{name}: the limit has held requests back");
        daemon.check(name)?;
    }
    guest.shutdown()
}
