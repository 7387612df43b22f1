//! Disks of a guest that move while it works.

use std::thread;
use std::time::{Duration, Instant};

use fathom_control::{MovePhase, MoveRequest};
use fathom_tests::{Daemon, Disk, Error, Guest, Records, Result, Served};

use crate::store::fathom;

/// The longest move.
const MOVE_TIME_MAX: Duration = Duration::from_secs(240);

fn begin(daemon: &Daemon, disk: &str, pool: Option<&str>, name: &str, urgent: bool) -> Result<()> {
    let (store, path) = (pool.map(|pool| daemon.path(pool)), daemon.path(name));
    let volume = pool.map(|_| name.to_owned());
    let image = pool.is_none().then_some(path);
    let request = MoveRequest { image, store, volume, urgent, ..MoveRequest::default() };
    let begun = daemon.client().move_disk(disk, &request);
    begun.map(drop).map_err(|error| Error::new(error.to_string()))
}

fn finish(daemon: &Daemon, disk: &str) -> Result<()> {
    let begun = Instant::now();
    loop {
        let moving = daemon.status(disk)?.moving.expect("a move");
        if moving.phase.has_ended() {
            assert_eq!(moving.phase, MovePhase::Moved, "{moving:?}");
            let (copied, took, pause) = (moving.copied_bytes, moving.took_ns, moving.pause_ns);
            println!("{disk} to {}: {copied} bytes in {took} ns, pause {pause} ns", moving.to);
            return Ok(());
        }
        assert!(begun.elapsed() < MOVE_TIME_MAX, "{moving:?}");
        thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_guest_works_while_its_disks_move_through_pools_and_images() -> Result<()> {
    let disks = [Served::sparse("raw", 96), Served::sparse("files", 128)];
    let mut daemon = Daemon::serve(&disks)?;
    for pool in ["pool", "other"] {
        fathom(&daemon, &["store", "create", pool, "1G"])?;
    }
    let disk = |name: &str| Disk::vhost_user(daemon.path(&format!("{name}.sock"))).queues(2);
    let guest = Guest::builder().disk(disk("raw")).disk(disk("files")).start()?;
    guest.check("mkfs.ext4 -q /dev/vdb; mkdir -p /files; mount /dev/vdb /files")?;
    let mut records = Records::new("/files/records");
    let writer = records.write(&guest)?;
    let load = guest.spawn(
        "fio --name=load --filename=/dev/vda --direct=1 --ioengine=libaio --iodepth=16 --rw=randwrite \
            --bsrange=4k-64k --size=80M --rate=3M --verify=crc32c --verify_fatal=1 --do_verify=1",
    )?;
    records.wait_for(&guest, 3)?;
    // From image to pool, to another pool, and back to an image, both disks at once.
    for (pool, number, urgent) in [(Some("pool"), 1, false), (Some("other"), 2, true)] {
        for name in ["raw", "files"] {
            begin(&daemon, name, pool, &format!("{name}{number}"), urgent)?;
        }
        for name in ["raw", "files"] {
            finish(&daemon, name)?;
        }
        records.wait_for(&guest, 3)?;
    }
    for name in ["raw", "files"] {
        begin(&daemon, name, None, &format!("{name}3.img"), false)?;
    }
    // The next daemon begins the copies again.
    daemon.kill9();
    records.note(&guest);
    daemon.restart()?;
    for name in ["raw", "files"] {
        daemon.wait_for_guest(name)?;
        let begun = Instant::now();
        // A move that was over at the kill is not repeated.
        let is_at_target = || Ok::<_, Error>(daemon.status(name)?.backend.name != "store");
        while daemon.status(name)?.moving.is_none() && !is_at_target()? {
            assert!(begun.elapsed() < MOVE_TIME_MAX, "no move of {name}");
            thread::sleep(Duration::from_millis(50));
        }
        if daemon.status(name)?.moving.is_some() {
            finish(&daemon, name)?;
        }
        daemon.check(name)?;
    }
    let output = guest.finish_within(load, 240)?;
    assert_eq!(output.status, 0, "{}", output.text);
    records.stop(&guest, writer)?;
    records.check(&guest)?;
    guest.check("umount /files; echo 3 > /proc/sys/vm/drop_caches; e2fsck -f -n /dev/vdb")?;
    guest.check_console()?;
    guest.shutdown()?;
    // Once more, without a guest: what the disk has left and what it has now are equal.
    begin(&daemon, "files", Some("pool"), "last", true)?;
    finish(&daemon, "files")?;
    assert!(daemon.stop()?.success());
    fathom(&daemon, &["store", "export", "pool", "last", "last.img"])?;
    let (left, now) = (daemon.path("files3.img"), daemon.path("last.img"));
    assert!(std::fs::read(left)? == std::fs::read(now)?, "the copy differs");
    for pool in ["pool", "other"] {
        fathom(&daemon, &["store", "check", pool])?;
    }
    Ok(())
}
