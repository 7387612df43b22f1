//! The daemon is killed under load and restarted, and the guest sees only a delay: no I/O errors,
//! no loss of data for which an fsync returned, no mismatch found by a verifying reader.
//!
//! The guest boots from one Fathom disk, writes durable records to a file system on a second, and
//! runs fio on a third. A `delay` layer keeps many requests in flight at any time. The number of
//! requests that the next daemon repeats shows that there were requests in flight.

use std::time::Duration;

use fathom_tests::{Daemon, Disk, Guest, Records, Result, Served};

/// Makes a disk slow.
const DELAY: &str = "layers = [{ kind = \"delay\", time = \"20ms\", jitter = \"20ms\", seed = 1 }]";

#[test]
fn a_guest_survives_killed_and_stopped_daemons() -> Result<()> {
    let mut daemon = Daemon::serve(&[
        Served::root("root"),
        Served::sparse("files", 256).with(DELAY),
        Served::sparse("raw", 128).with(DELAY),
    ])?;
    let disk = |name: &str| Disk::vhost_user(daemon.path(&format!("{name}.sock"))).queues(2);
    let guest =
        Guest::builder().root(disk("root")).disk(disk("files")).disk(disk("raw")).start()?;
    guest.check("mkfs.ext4 -q /dev/vdb; mkdir -p /files; mount /dev/vdb /files")?;
    let mut records = [Records::new("/files/records"), Records::new("/srv/records")];
    let writers = [records[0].write(&guest)?, records[1].write(&guest)?];
    let load = guest.spawn(
        "fio --name=load --filename=/dev/vdc --direct=1 --ioengine=libaio --iodepth=32 \
            --rw=randwrite --bsrange=4k-64k --size=112M --rate=6M --verify=crc32c \
            --verify_fatal=1 --do_verify=1",
    )?;
    let mut recovered = [0; 3];
    for round in 0..5 {
        for records in &mut records {
            records.wait_for(&guest, 3)?;
        }
        std::thread::sleep(Duration::from_millis(200 + 130 * round));
        if round == 2 {
            // A regular end: all requests complete first that no layer holds.
            let status = daemon.stop()?;
            assert!(status.success(), "the daemon ended with {status}");
        } else {
            daemon.kill9();
        }
        for records in &mut records {
            records.note(&guest);
        }
        daemon.restart()?;
        for (name, recovered) in ["root", "files", "raw"].iter().zip(&mut recovered) {
            let status = daemon.wait_for_guest(name)?;
            assert!(status.restart_safe, "{name}: QEMU keeps the requests in flight");
            // At a regular end, what the layer `delay` holds of the other disks is given back: the
            // next daemon carries out what a later request has overtaken.
            assert!(round != 2 || *name != "root" || status.recovered == 0, "{name}: {status:?}");
            *recovered += status.recovered;
            daemon.check(name)?;
        }
    }
    assert!(recovered[2] > 0, "no request was in flight at any kill: {recovered:?}");
    for (records, writer) in records.iter_mut().zip(writers) {
        records.stop(&guest, writer)?;
    }
    let output = guest.finish_within(load, 180)?;
    assert_eq!(output.status, 0, "{}", output.text);
    for records in &records {
        records.check(&guest)?;
    }
    guest.check("umount /files; e2fsck -f -n /dev/vdb")?;
    // The kicks that the VMM sends to idle queues after a restart cause no problem report either,
    // in shared memory.
    daemon.kill9();
    daemon.restart()?;
    for name in ["root", "files", "raw"] {
        daemon.wait_for_guest(name)?;
    }
    std::thread::sleep(Duration::from_secs(3));
    for name in ["root", "files", "raw"] {
        let problems = daemon.status(name)?.problems;
        assert!(problems.is_empty(), "{name}: {problems:?}");
    }
    guest.check_console()?;
    guest.shutdown()?;
    fathom_tests::check_ext4(&daemon.path("root.img"))
}
