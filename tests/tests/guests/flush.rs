//! Guests are made to write their dirty data. Nothing is installed in them, and their settings are
//! as before, also after the daemon was killed in between.

use std::path::Path;
use std::time::Duration;

use fathom_control::{ClientError, ErrorCode, FlushWay, InsightState};
use fathom_tests::{Assets, Daemon, Disk, Guest, Kernel, Process, Result, patience, until};
use serde_json::json;

/// The size of the file that is dirty before a flush, in MiB.
const DIRTY_MIB: u64 = 24;
/// The memory that the balloon leaves to the guest, in MiB; its system is in memory too.
const FLOOR_MIB: u64 = 224;
/// The guest's own `vm.dirty_expire_centisecs`: so long that nothing is written without a flush.
const EXPIRE: u64 = 60_000;

/// A daemon with a disk of the virtual machine `web`, and its guest. `disk` and `guest` are lines
/// of their tables.
fn start(disk: &str, guest: &str) -> Result<(Daemon, Guest)> {
    start_with(None, disk, guest)
}

/// The same for a guest with another kernel, which has a root disk.
fn start_with(kernel: Option<Kernel>, disk: &str, guest: &str) -> Result<(Daemon, Guest)> {
    let daemon = Daemon::start(|folder| {
        let path = |name: &str| folder.join(name).display().to_string();
        let image = std::fs::File::create(folder.join("disk.img")).unwrap();
        image.set_len(256 << 20).unwrap();
        format!(
            "[[disk]]\nname = 'disk'\nvm = 'web'\nimage = '{}'\nvhost_user.socket = '{}'\n{disk}\n\
             [[disk]]\nname = 'other'\nmemory = '16M'\n\
             model = {{ kind = 'ssd', device = 'shared', offset = '256M' }}\n\
             layers = [{{ kind = 'delay', time = '15s' }}]\n\
             [[nbd]]\naddress = 'unix:{}'\n\
             [[guest]]\nvm = 'web'\nqmp = '{}'\nagent = '{}'\nballoon_floor = '{FLOOR_MIB}M'\n{guest}\n",
            path("disk.img"),
            path("disk.sock"),
            path("nbd.sock"),
            path("keys"),
            path("agent")
        )
    })?;
    let keys = format!("unix:{},server=on,wait=off", daemon.path("keys").display());
    let agent =
        format!("socket,id=agent,path={},server=on,wait=off", daemon.path("agent").display());
    let arguments = ["-qmp", &keys, "-device", "virtio-serial-pci", "-chardev", &agent];
    let devices = [
        "-device",
        "virtserialport,chardev=agent,name=org.qemu.guest_agent.0",
        "-device",
        "virtio-balloon-pci",
    ];
    let assets = Assets::get()?;
    let (builder, names) = match kernel {
        None => (Guest::builder(), ["vda", "vdb"]),
        Some(kernel) => {
            let root = Disk::snapshot_of(&assets.root);
            (Guest::builder().kernel(kernel).root(root), ["vdb", "vdc"])
        }
    };
    let guest = arguments.iter().chain(&devices).fold(
        builder
            .disk(Disk::vhost_user(daemon.path("disk.sock")))
            .disk(Disk::snapshot_of(assets.tools()?)),
        |builder, argument| builder.argument(*argument),
    );
    let guest = guest.start()?;
    let [disk, tools] = names;
    guest.check(&format!(
        "mkdir -p /tools /mnt; mount -o ro /dev/{tools} /tools
        modprobe virtio_balloon || insmod /tools/virtio_balloon.ko
        modprobe virtio_console
        mkfs.ext4 -q /dev/{disk}; mount /dev/{disk} /mnt
        echo {EXPIRE} > /proc/sys/vm/dirty_expire_centisecs
        # The guest does not begin to write by itself either.
        echo 99 > /sys/block/{disk}/bdi/min_ratio
        echo 400000000 > /proc/sys/vm/dirty_bytes
        echo 300000000 > /proc/sys/vm/dirty_background_bytes"
    ))?;
    wait_for_kernel(&daemon, &guest)?;
    Ok((daemon, guest))
}

fn wait_for_kernel(daemon: &Daemon, guest: &Guest) -> Result<()> {
    until("the guest's kernel to be found", patience(60), || {
        guest.check("sync")?;
        Ok((daemon.status("disk")?.insight.state == InsightState::Attached).then_some(()))
    })
}

fn number(guest: &Guest, script: &str) -> Result<u64> {
    Ok(guest.check(script)?.trim().parse().expect("a number"))
}

/// The guest's dirty data, in KiB.
fn dirty_kib(guest: &Guest) -> Result<u64> {
    number(guest, "awk '/^(Dirty|Writeback):/ { n += $2 } END { print n }' /proc/meminfo")
}

/// The guest's memory, in KiB, without what the balloon has.
fn memory_kib(guest: &Guest) -> Result<u64> {
    number(guest, "awk '/^MemTotal:/ { print $2 }' /proc/meminfo")
}

/// Starts the guest agent in the guest.
fn start_agent(guest: &Guest) -> Result<()> {
    guest
        .check("/tools/qemu-ga -m virtio-serial -p /dev/vport*p1 -t /tmp > /dev/null 2>&1 &")
        .map(drop)
}

fn expire(guest: &Guest) -> Result<u64> {
    number(guest, "cat /proc/sys/vm/dirty_expire_centisecs")
}

/// Writes a file without a sync. Returns the hash of its content.
fn make_dirty(guest: &Guest, name: &str) -> Result<String> {
    guest.check(&format!(
        "dd if=/dev/urandom of=/mnt/{name} bs=1M count={DIRTY_MIB} 2> /dev/null
        sha256sum < /mnt/{name}"
    ))
}

/// The balloon makes the guest write until it is below its limits of dirty data, which fall with
/// its memory. Then it has its memory again.
fn by_balloon(daemon: &Daemon, guest: &Guest) -> Result<()> {
    const LIMITS: &str =
        "echo 25 > /proc/sys/vm/dirty_ratio; echo 9 > /proc/sys/vm/dirty_background_ratio";
    const NO_LIMITS: &str = "echo 400000000 > /proc/sys/vm/dirty_bytes
        echo 300000000 > /proc/sys/vm/dirty_background_bytes";
    let memory = memory_kib(guest)?;
    guest.check(&format!("rm /mnt/sysrq /mnt/tunables /mnt/agent; sync; {LIMITS}"))?;
    make_dirty(guest, "balloon")?;
    let before_kib = dirty_kib(guest)?;
    assert!(before_kib > (DIRTY_MIB << 10) * 9 / 10, "{before_kib} KiB were dirty");
    let report = daemon.client().flush_guest("web", Some(FlushWay::Balloon)).unwrap();
    println!("{report:?}");
    assert!(report.written_bytes > (DIRTY_MIB << 20) / 2, "{report:?}");
    let after_kib = dirty_kib(guest)?;
    assert!(after_kib < before_kib / 2, "{after_kib} KiB are dirty");
    until("the guest to have its memory", patience(30), || {
        Ok((memory_kib(guest)? == memory).then_some(()))
    })?;
    assert_eq!(records(daemon, "balloon-"), 0);
    guest.check(&format!("sync; {NO_LIMITS}")).map(drop)
}

/// Flushes a guest in one way. Its dirty data is on the disk then, and its setting is as before.
fn flush_by(daemon: &Daemon, guest: &Guest, by: FlushWay) -> Result<()> {
    let name = by.name();
    let hash = make_dirty(guest, name)?;
    let before_kib = dirty_kib(guest)?;
    assert!(before_kib > (DIRTY_MIB << 10) * 9 / 10, "{name}: {before_kib} KiB were dirty");
    let report = daemon.client().flush_guest("web", Some(by)).unwrap();
    println!("{report:?}");
    assert!(report.is_complete && report.by == by, "{report:?}");
    assert!(report.dirty_before_bytes > Some((DIRTY_MIB << 20) * 9 / 10), "{report:?}");
    assert!(report.written_bytes > (DIRTY_MIB << 20) * 9 / 10, "{report:?}");
    assert!(report.first_write_ns <= report.last_write_ns, "{report:?}");
    let after_kib = dirty_kib(guest)?;
    assert!(after_kib < before_kib / 20, "{name}: {after_kib} KiB are dirty");
    // The data is on the disk, not only in the guest's memory.
    let read = format!(
        "echo 3 > /proc/sys/vm/drop_caches
        dd if=/mnt/{name} bs=1M iflag=direct 2> /dev/null | sha256sum"
    );
    assert_eq!(guest.check(&read)?, hash, "{name}");
    assert_eq!(expire(guest)?, EXPIRE, "{name}: the guest's setting is as before");
    Ok(())
}

/// The kernels of Debian's backports, the last of the versions 6 and the newest: all ways, and a
/// daemon that is killed in between.
#[test]
fn guests_with_other_kernels_are_flushed() -> Result<()> {
    for name in ["backports", "newest"] {
        let Some(kernel) = Assets::get()?.kernel(name)? else { continue };
        println!("Linux {}", kernel.release);
        let ways = "flush = ['tunables', 'sysrq', 'agent', 'balloon']";
        let (mut daemon, guest) = start_with(Some(kernel), "", ways)?;
        start_agent(&guest)?;
        for by in [FlushWay::Sysrq, FlushWay::Tunables, FlushWay::Agent] {
            flush_by(&daemon, &guest, by)?;
        }
        by_balloon(&daemon, &guest)?;
        // The periodic write-back does not come before the daemon is killed.
        guest.check("echo 3000 > /proc/sys/vm/dirty_writeback_centisecs")?;
        let hash = make_dirty(&guest, "killed")?;
        let client = daemon.client();
        let flush = std::thread::spawn(move || client.flush_guest("web", Some(FlushWay::Tunables)));
        until("the tunable to be lowered", patience(30), || {
            Ok((expire(&guest)? == 1).then_some(()))
        })?;
        daemon.kill9();
        assert!(flush.join().unwrap().is_err());
        daemon.restart()?;
        daemon.wait_for_guest("disk")?;
        until("the tunable to be put back", patience(60), || {
            Ok((expire(&guest)? == EXPIRE).then_some(()))
        })?;
        assert_eq!(guest.check("sync; sha256sum < /mnt/killed")?, hash);
        guest.shutdown()?;
    }
    Ok(())
}

#[test]
fn a_guest_is_flushed_in_each_way() -> Result<()> {
    let (daemon, guest) = start("", "flush = ['tunables', 'sysrq', 'agent', 'balloon']")?;
    let client = daemon.client();
    // The guest's agent does not run yet.
    let output = daemon.command(&["flush", "web", "--by", "agent"])?;
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        text.contains("does not answer") && text.contains("start the QEMU guest agent"),
        "{text}"
    );
    start_agent(&guest)?;
    for by in [FlushWay::Sysrq, FlushWay::Tunables, FlushWay::Agent] {
        flush_by(&daemon, &guest, by)?;
    }
    by_balloon(&daemon, &guest)?;
    // Without a way, the first of the configuration.
    make_dirty(&guest, "again")?;
    let output = daemon.command(&["flush", "web"])?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    print!("{text}");
    assert!(output.status.success() && text.contains(" dirty before, "), "{text}");
    assert!(text.contains("(by tunables)"), "{text}");

    // A guest whose kernel does not allow the keys.
    guest.check("echo 0 > /proc/sys/kernel/sysrq")?;
    make_dirty(&guest, "refused")?;
    let output = daemon.command(&["flush", "web", "--by", "sysrq"])?;
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("does not react") && text.contains("kernel.sysrq"), "{text}");
    // A guest without periodic write-back.
    guest.check("echo 0 > /proc/sys/vm/dirty_writeback_centisecs")?;
    let output = daemon.command(&["flush", "web"])?;
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains("dirty_writeback_centisecs = 0"), "{text}");
    assert_eq!(expire(&guest)?, EXPIRE);
    let other = client.flush_guest("other", None).unwrap_err();
    let text = "there is no disk of the virtual machine \"other\"";
    assert!(other.to_string().contains(text), "{other}");
    guest.check_console()?;
    guest.shutdown()
}

/// The disk is so slow that a flush lasts until the daemon is killed.
const SLOW: &str = "layers = [{ kind = 'limit', write_bytes_sec = '1M' }]";

/// The number of records whose names begin with `prefix`.
fn records(daemon: &Daemon, prefix: &str) -> usize {
    let names = std::fs::read_dir(daemon.path(".")).unwrap();
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.starts_with(prefix)).count()
}

#[test]
fn a_killed_daemon_leaves_no_balloon() -> Result<()> {
    let (mut daemon, guest) = start(SLOW, "flush = ['balloon']")?;
    let memory = memory_kib(&guest)?;
    make_dirty(&guest, "file")?;
    let client = daemon.client();
    let flush = std::thread::spawn(move || client.flush_guest("web", None));
    until("memory to be taken", patience(30), || {
        assert!(!flush.is_finished(), "the flush ended early");
        Ok((memory_kib(&guest)? < memory - (DIRTY_MIB << 10) / 2).then_some(()))
    })?;
    assert_eq!(records(&daemon, "balloon-"), 1);
    daemon.kill9();
    assert!(flush.join().unwrap().is_err());
    assert!(memory_kib(&guest)? < memory, "nobody could give it back");
    daemon.restart()?;
    daemon.wait_for_guest("disk")?;
    until("the memory to be given back", patience(60), || {
        Ok((memory_kib(&guest)? == memory).then_some(()))
    })?;
    until("the record to be removed", patience(10), || {
        Ok((records(&daemon, "balloon-") == 0).then_some(()))
    })?;
    // SIGTERM ends a flush, and the guest gets its memory before the end.
    wait_for_kernel(&daemon, &guest)?;
    make_dirty(&guest, "second")?;
    let client = daemon.client();
    let flush = std::thread::spawn(move || client.flush_guest("web", None));
    until("memory to be taken again", patience(30), || {
        assert!(!flush.is_finished(), "the flush ended early");
        Ok((memory_kib(&guest)? < memory).then_some(()))
    })?;
    let status = daemon.stop()?;
    assert!(status.success(), "the daemon ended with {status}");
    assert!(flush.join().unwrap().is_err());
    assert_eq!(records(&daemon, "balloon-"), 0);
    until("the memory to be given back again", patience(60), || {
        Ok((memory_kib(&guest)? == memory).then_some(()))
    })?;
    daemon.restart()?;
    daemon.wait_for_guest("disk")?;
    guest.check_console()
}

#[test]
fn a_killed_daemon_leaves_no_changed_tunable() -> Result<()> {
    let (mut daemon, guest) = start(SLOW, "flush = ['tunables']")?;
    let records = |daemon: &Daemon| records(daemon, "tunables-");
    make_dirty(&guest, "file")?;
    let client = daemon.client();
    let flush = std::thread::spawn(move || client.flush_guest("web", None));
    until("the tunable to be lowered", patience(30), || Ok((expire(&guest)? == 1).then_some(())))?;
    let refused = daemon.client().flush_guest("web", None).unwrap_err();
    assert!(
        matches!(&refused, ClientError::Refused(body) if body.code == ErrorCode::Conflict),
        "{refused}"
    );
    assert_eq!(records(&daemon), 1);
    daemon.kill9();
    assert!(flush.join().unwrap().is_err());
    assert_eq!(expire(&guest)?, 1, "nothing could put it back");
    daemon.restart()?;
    daemon.wait_for_guest("disk")?;
    until("the tunable to be put back", patience(60), || {
        Ok((expire(&guest)? == EXPIRE).then_some(()))
    })?;
    until("the record to be removed", patience(10), || Ok((records(&daemon) == 0).then_some(())))?;

    // SIGTERM ends a flush, and the value is put back before the end.
    let client = daemon.client();
    let flush = std::thread::spawn(move || client.flush_guest("web", None));
    until("the tunable to be lowered again", patience(30), || {
        Ok((expire(&guest)? == 1).then_some(()))
    })?;
    let status = daemon.stop()?;
    assert!(status.success(), "the daemon ended with {status}");
    assert!(flush.join().unwrap().is_err());
    assert_eq!((expire(&guest)?, records(&daemon)), (EXPIRE, 0));
    daemon.restart()?;
    daemon.wait_for_guest("disk")?;
    std::thread::sleep(Duration::from_millis(100));
    guest.check_console()
}

#[test]
fn a_guest_is_flushed_while_its_device_is_idle_and_not_before() -> Result<()> {
    // A modelled device, because programs of the host use the host's devices.
    let model = "model = { kind = 'ssd', device = 'shared' }";
    let options = "flush = ['tunables']\nflush_when_idle = true\nflush_min = '8M'\n\
                   flush_interval = '1s'";
    let (daemon, guest) = start(model, options)?;
    let in_flight = || -> Result<u64> {
        let statistics = daemon.client().statistics().unwrap();
        Ok(statistics.disks.iter().find(|disk| disk.name == "other").unwrap().in_flight)
    };
    // The other disk of the device has a request in flight.
    let socket = daemon.path("nbd.sock");
    let url = format!("nbd+unix:///other?socket={}", socket.display());
    let arguments = ["-r", "-f", "raw", &url, "-c", "read 0 4k"].map(str::to_owned);
    let _reader = Process::start(Path::new("qemu-io"), &arguments, &daemon.path("reader.log"))?;
    until("the read to be in flight", patience(30), || Ok((in_flight()? > 0).then_some(())))?;
    let flushes = || {
        let metrics = daemon.client().metrics().unwrap();
        let line = metrics
            .lines()
            .find_map(|line| line.strip_prefix("fathom_guest_flushes_total{vm=\"web\"} "));
        line.map_or(0.0, |count| count.parse::<f64>().unwrap())
    };
    make_dirty(&guest, "file")?;
    let before_kib = dirty_kib(&guest)?;
    let mut samples = 0;
    loop {
        let count = flushes();
        // Read later: the device was busy until then.
        if in_flight()? == 0 {
            break;
        }
        assert!(count == 0.0, "a flush while the device is busy");
        samples += 1;
        std::thread::sleep(Duration::from_millis(500));
    }
    println!("the device was seen busy {samples} times");
    until("the guest to write its data", patience(60), || {
        Ok((dirty_kib(&guest)? < before_kib / 10).then_some(()))
    })?;
    until("the tunable to be put back", patience(30), || {
        Ok((expire(&guest)? == EXPIRE).then_some(()))
    })?;
    until("the flush to be counted", patience(30), || Ok((flushes() > 0.0).then_some(())))?;
    guest.check_console()?;
    guest.shutdown()
}

/// The setting would be changed at the destination for ever.
#[test]
fn a_guest_that_is_being_migrated_is_not_changed() -> Result<()> {
    let (daemon, guest) = start("", "flush = ['tunables', 'sysrq']")?;
    // The periodic write-back does not come during the test.
    guest.check("echo 30000 > /proc/sys/vm/dirty_writeback_centisecs")?;
    make_dirty(&guest, "file")?;
    let client = daemon.client();
    let flush = std::thread::spawn(move || client.flush_guest("web", None));
    until("the tunable to be lowered", patience(30), || Ok((expire(&guest)? == 1).then_some(())))?;
    // So slow that it does not end.
    guest.qmp(&json!({
        "execute": "migrate-set-parameters",
        "arguments": { "max-bandwidth": 1 << 16, "downtime-limit": 1 }
    }))?;
    guest.migrate_begin("exec:cat > /dev/null")?;
    let report = flush.join().unwrap().unwrap();
    assert!(!report.is_complete, "{report:?}");
    assert_eq!(expire(&guest)?, EXPIRE);
    assert_eq!(records(&daemon, "tunables-"), 0);
    let refused = daemon.client().flush_guest("web", None).unwrap_err();
    assert!(
        matches!(&refused, ClientError::Refused(body) if body.code == ErrorCode::Conflict),
        "{refused}"
    );
    assert!(refused.to_string().contains("is being migrated"), "{refused}");
    let report = daemon.client().flush_guest("web", Some(FlushWay::Sysrq)).unwrap();
    assert!(report.is_complete, "{report:?}");
    guest.qmp(&json!({ "execute": "migrate_cancel" }))?;
    until("the migration to end", patience(30), || {
        Ok((!daemon.guest("disk")?.migrating).then_some(()))
    })?;
    guest.check("echo 500 > /proc/sys/vm/dirty_writeback_centisecs")?;
    make_dirty(&guest, "second")?;
    let report = daemon.client().flush_guest("web", None).unwrap();
    assert!(report.is_complete, "{report:?}");
    guest.check_console()
}
