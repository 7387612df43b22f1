//! Memory is plugged into a running guest, and unplugged: the guest's kernel puts pages and
//! structures there, and introspection still understands its requests.

use std::io::{Read, Seek, SeekFrom};

use fathom_control::InsightState;
use fathom_tests::{
    Assets, Classified, Comparison, Daemon, Disk, Guest, Result, Served, Truth, patience, until,
};
use serde_json::json;

/// Runs a script in the guest and parses the number that it prints.
fn number(guest: &Guest, script: &str) -> Result<u64> {
    Ok(guest.check(script)?.trim().parse().expect("a number"))
}

/// The memory that the guest's kernel manages, in MiB.
fn total(guest: &Guest) -> Result<u64> {
    Ok(number(guest, "awk '/^MemTotal:/ { print $2 }' /proc/meminfo")? / 1024)
}

/// The size of cached files in a zone of the guest's memory, or in all other zones, in MiB. `zones`
/// is a condition such as `== "Normal"`.
fn cached(guest: &Guest, zones: &str) -> Result<u64> {
    let script = format!(
        "awk '/^Node/ {{ zone = $4 }} zone {zones} && /nr_zone_(in)?active_file/ {{ n += $2 }}
        END {{ print n + 0 }}' /proc/zoneinfo"
    );
    Ok(number(guest, &script)? * 4096 / (1 << 20))
}

/// Plugs in a DIMM of `mib` MiB and waits until the guest's kernel uses it with the policy
/// `policy`.
fn plug(guest: &Guest, id: &str, mib: u64, policy: &str) -> Result<()> {
    guest.check(&format!("echo {policy} > /sys/devices/system/memory/auto_online_blocks"))?;
    let before = total(guest)?;
    let memory = format!("memory-{id}");
    let backend = json!({
        "qom-type": "memory-backend-memfd", "id": memory, "size": mib << 20, "share": true
    });
    guest.qmp(&json!({"execute": "object-add", "arguments": backend}))?;
    let dimm = json!({"driver": "pc-dimm", "id": id, "memdev": memory});
    guest.qmp(&json!({"execute": "device_add", "arguments": dimm}))?;
    until("the guest to use its new memory", patience(30), || {
        Ok((total(guest)? >= before + mib * 9 / 10).then_some(()))
    })
}

/// Makes the guest release a DIMM, and waits until it has.
fn unplug(guest: &Guest, id: &str) -> Result<()> {
    guest.qmp(&json!({"execute": "device_del", "arguments": {"id": id}}))?;
    guest.qmp_event("DEVICE_DELETED", 60).map(drop)
}

/// Changes the guest's memory while files are written. Then writes and reads more than fits into
/// its initial memory, and compares all reports with the truth.
fn phase(
    (daemon, guest): (&Daemon, &Guest),
    name: &str,
    change: impl FnOnce() -> Result<()>,
    check: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let log = daemon.path("requests");
    let before = Truth::of(guest, "/mnt")?;
    let start = std::fs::metadata(&log)?.len();
    let busy = guest.spawn(
        "n=0; rm -f /run/stop
        while [ ! -e /run/stop ]; do
            n=$((n + 1)); file=/mnt/busy/$((n % 10))
            head -c 2000000 /dev/urandom > $file; sync $file
        done; echo $n",
    )?;
    guest.check("sleep 2")?;
    change()?;
    let script = format!(
        "dd if=/dev/zero of=/mnt/large-{name} bs=1M count=300 2> /dev/null; sync
        for i in $(seq 100); do head -c 300000 /dev/zero > /mnt/many/{name}-$i; done; sync
        echo 3 > /proc/sys/vm/drop_caches
        cat /mnt/large-{name} /mnt/many/{name}-* > /dev/null"
    );
    guest.check_within(&script, 240)?;
    check()?;
    guest.check("touch /run/stop")?;
    let rounds = guest.finish(busy)?.text;
    guest.check("sync")?;
    let after = Truth::of(guest, "/mnt")?;
    let mut file = std::fs::File::open(&log)?;
    file.seek(SeekFrom::Start(start))?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    let requests = Classified::parse_log(&String::from_utf8_lossy(&bytes))?;
    let comparison = Comparison::of(&requests, &before, &after, &[]);
    println!("{name}: {} rounds, {} requests\n{comparison}", rounds.trim(), requests.len());
    comparison.check()?;
    assert_eq!(daemon.status("disk")?.insight.state, InsightState::Attached);
    guest.check_console()
}

#[test]
fn introspection_understands_requests_of_hotplugged_memory() -> Result<()> {
    let assets = Assets::get()?;
    let Some(kernel) = assets.kernel("default")? else { return Ok(()) };
    let daemon = Daemon::serve(&[Served::sparse("disk", 1200)
        .with("classify = true")
        .with("layers = [{ kind = 'log', file = 'requests', lines_per_second_max = 0 }]")])?;
    let guest = Guest::builder()
        .kernel(kernel)
        .argument("-m")
        .argument("512M,slots=2,maxmem=2G")
        .root(Disk::snapshot_of(&assets.root))
        .disk(Disk::vhost_user(daemon.path("disk.sock")).queues(2))
        .start()?;
    guest.check("mkfs.ext4 -q /dev/vdb; mount /dev/vdb /mnt; mkdir /mnt/busy /mnt/many; sync")?;
    let is_used = |zone: &str| -> Result<()> {
        let new = cached(&guest, &format!("== \"{zone}\""))?;
        let old = cached(&guest, &format!("!= \"{zone}\""))?;
        println!("{new} MiB of files in the zone {zone}, {old} MiB elsewhere");
        assert!(new > 80 && old > 20, "{new} and {old} MiB");
        Ok(())
    };
    let scene = (&daemon, &guest);
    // The zone `Normal` also contains the kernel's own structures, the zone `Movable` only pages.
    phase(scene, "first", || plug(&guest, "first", 256, "online"), || is_used("Normal"))?;
    let second = || plug(&guest, "second", 256, "online_movable");
    phase(scene, "second", second, || is_used("Movable"))?;
    let whole = total(&guest)?;
    phase(scene, "without", || unplug(&guest, "second"), || is_used("Normal"))?;
    assert!(total(&guest)? + 200 < whole);
    daemon.check("disk")?;
    guest.shutdown()
}
