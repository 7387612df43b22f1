//! A guest that boots from a Fathom disk is rebooted, and reset during its writes. Its durable data
//! persists, the file system recovers by its journal alone, and the daemon has refused no request.

use fathom_tests::{Daemon, Disk, Guest, Records, Result, Served, check_ext4, despite_emulation};

#[test]
fn reboots_and_resets_lose_nothing() -> Result<()> {
    despite_emulation(reboots_and_resets)
}

fn reboots_and_resets() -> Result<()> {
    let daemon = Daemon::serve(&[Served::root("root")])?;
    let disk = Disk::vhost_user(daemon.path("root.sock")).queues(2);
    let guest = Guest::builder().root(disk).start()?;
    guest.check("dd if=/dev/urandom of=/srv/kept bs=1M count=16 status=none; sha256sum /srv/kept > /srv/sum")?;
    guest.reboot()?;
    guest.check("sha256sum -c /srv/sum; echo second >> /srv/sum.log; sync")?;

    let mut records = Records::new("/srv/records");
    records.write(&guest)?;
    // Besides the durable writes, many writes that are not flushed.
    guest.spawn("fio --name=noise --filename=/srv/noise --size=64M --rw=randwrite --bs=16k --ioengine=libaio --iodepth=16 --direct=1 --time_based --runtime=600 > /dev/null")?;
    records.wait_for(&guest, 12)?;
    guest.reset()?;
    records.note(&guest);
    guest.check("dmesg | grep -q 'recovery complete'; sha256sum -c /srv/sum")?;
    let count = records.check(&guest)?;
    assert!(count >= 12, "{count} records");
    let writer = records.write(&guest)?;
    records.wait_for(&guest, 3)?;
    records.stop(&guest, writer)?;

    guest.reboot()?;
    guest.check("sha256sum -c /srv/sum; grep -q second /srv/sum.log; rm -f /srv/noise")?;
    records.check(&guest)?;
    guest.check_console()?;
    daemon.check("root")?;
    let status = daemon.guest("root")?;
    assert_eq!(status.connections, 1, "QEMU stays connected over reboots");
    guest.shutdown()?;
    check_ext4(&daemon.path("root.img"))
}
