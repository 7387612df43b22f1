//! A disk grows while a guest uses it: the guest sees the new size without a reboot, its file
//! system grows, old data stays intact, and a writer is not disturbed.

use fathom_tests::{Daemon, Disk, Guest, Records, Result, Served, patience, until};

/// Waits until the guest's kernel reports the size, in MiB.
fn wait_for_size(guest: &Guest, device: &str, mib: u64) -> Result<()> {
    until(&format!("{device} of {mib} MiB"), patience(20), || {
        let size = guest.check(&format!("blockdev --getsize64 {device}"))?;
        Ok((size.trim() == (mib << 20).to_string()).then_some(()))
    })
    .map_err(|error| guest.explained(&error))
}

#[test]
fn file_systems_grow_online() -> Result<()> {
    let daemon = Daemon::serve(&[
        Served::root("root"),
        Served::sparse("first", 256),
        Served::sparse("second", 320).with("direct = true"),
    ])?;
    let disk = |name: &str| Disk::vhost_user(daemon.path(&format!("{name}.sock"))).queues(2);
    let guest =
        Guest::builder().root(disk("root")).disk(disk("first")).disk(disk("second")).start()?;
    guest.check(
        "mkdir -p /first /second; mkfs.ext4 -q /dev/vdb; mkfs.xfs -q -f /dev/vdc
        mount /dev/vdb /first; mount /dev/vdc /second
        for folder in /first /second; do
            dd if=/dev/urandom of=$folder/before bs=1M count=24 conv=fsync status=none
        done
        sha256sum /first/before /second/before > /run/before",
    )?;
    let mut records = Records::new("/first/records");
    let writer = records.write(&guest)?;
    records.wait_for(&guest, 3)?;

    let resized = daemon.command(&["disk", "resize", "first", "512M"])?;
    assert!(resized.status.success(), "{}", String::from_utf8_lossy(&resized.stderr));
    let resized = daemon.client().resize_disk("second", 640 << 20, false);
    assert_eq!(
        resized.map(|status| status.capacity_bytes).map_err(|e| e.to_string()),
        Ok(640 << 20)
    );
    wait_for_size(&guest, "/dev/vdb", 512)?;
    wait_for_size(&guest, "/dev/vdc", 640)?;
    guest.check("dmesg | grep -q 'vdb.*new size'; dmesg | grep -q 'vdc.*new size'")?;
    for name in ["first", "second"] {
        let shrunk = daemon.command(&["disk", "resize", name, "64M"])?;
        assert!(!shrunk.status.success(), "a smaller size needs an option of its own");
    }
    assert_eq!(std::fs::metadata(daemon.path("first.img"))?.len(), 512 << 20);

    guest.check("resize2fs /dev/vdb 2>&1; xfs_growfs /second > /run/grown")?;
    // A file as large as the old file system leaves space only beyond the old end.
    guest.check(
        "fallocate -l 256M /first/filling; fallocate -l 320M /second/filling
        for folder in /first /second; do
            dd if=/dev/urandom of=$folder/after bs=1M count=24 conv=fsync status=none
        done
        sha256sum /first/after /second/after > /run/after",
    )?;
    records.wait_for(&guest, 3)?;
    records.stop(&guest, writer)?;
    guest.check(
        "umount /first /second; echo 3 > /proc/sys/vm/drop_caches
        e2fsck -f -n /dev/vdb; xfs_repair -n /dev/vdc
        mount /dev/vdb /first; mount /dev/vdc /second
        sha256sum -c /run/before /run/after",
    )?;
    records.check(&guest)?;
    for name in ["root", "first", "second"] {
        daemon.check(name)?;
    }
    guest.check_console()?;
    guest.shutdown()
}
