//! Real file systems on Fathom disks: written data is intact when it is read from the disk again,
//! freed space is returned to the host, zeroed ranges read as zeroes, and each file system's own
//! check finds no errors.
//!
//! The disks differ in block size and in the use of the host's page cache. The tests also check the
//! properties that a guest sees (serial, queues, block size, read-only).

use std::os::unix::fs::MetadataExt;

use fathom_tests::{Daemon, Disk, Guest, Qemu, Result, Served};

const MIB: u64 = 1 << 20;

/// The space that an image takes on the host, in bytes.
fn allocated(daemon: &Daemon, name: &str) -> Result<u64> {
    Ok(std::fs::metadata(daemon.path(&format!("{name}.img")))?.blocks() * 512)
}

/// One file system on one disk, from mkfs to its own check.
fn exercise(
    guest: &Guest,
    daemon: &Daemon,
    name: &str,
    device: &str,
    commands: [&str; 2],
) -> Result<()> {
    let [make, check] = commands;
    guest.check(&format!(
        "{make} {device} > /run/made 2>&1 || {{ cat /run/made; exit 1; }}
        mount {device} /mnt; mkdir /mnt/small
        dd if=/dev/urandom of=/mnt/large bs=1M count=40 conv=fsync status=none
        dd if=/dev/urandom bs=1M count=1 status=none | od -An -v -tx1 | awk '
            {{ name = \"/mnt/small/\" int(NR / 200); print > name }} NR % 200 == 199 {{ close(name) }}'
        cd /mnt; find . -type f -print0 | xargs -0 md5sum > /run/sums
        cd /; umount /mnt"
    ))?;
    guest.check(&format!(
        "echo 3 > /proc/sys/vm/drop_caches; mount {device} /mnt; cd /mnt
        [ $(wc -l < /run/sums) -gt 300 ]
        md5sum -c /run/sums > /run/checked || {{ grep -v ': OK$' /run/checked; exit 1; }}"
    ))?;
    let before = allocated(daemon, name)?;
    guest.check("rm /mnt/large; sync; sync; fstrim /mnt")?;
    let after = allocated(daemon, name)?;
    assert!(after + 36 * MIB < before, "{name}: fstrim left {after} of {before} bytes");
    guest.check(&format!(
        "echo 3 > /proc/sys/vm/drop_caches; cd /mnt; grep -v /large /run/sums > /run/small
        md5sum -c /run/small > /run/checked || {{ grep -v ': OK$' /run/checked; exit 1; }}
        cd /; umount /mnt
        {check} {device} > /run/checked 2>&1 || {{ cat /run/checked; exit 1; }}"
    ))?;
    // Without a file system: zeroes over data, and a discard of the whole device.
    guest.check(&format!(
        "pattern() {{ yes fathom | head -c 16777216; }}
        pattern | dd of={device} bs=1M seek=8 oflag=direct iflag=fullblock status=none
        blkdiscard -z -o $((9 << 20)) -l $((6 << 20)) {device}
        pattern > /run/expected; dd if=/dev/zero of=/run/expected bs=1M seek=1 count=6 conv=notrunc status=none
        dd if={device} bs=1M skip=8 count=16 iflag=direct status=none | cmp - /run/expected
        rm /run/expected; blkdiscard {device}"
    ))?;
    let left = allocated(daemon, name)?;
    assert!(left < MIB, "{name}: blkdiscard of the whole device left {left} bytes");
    daemon.check(name)
}

/// An attribute of a guest's disk in sysfs.
fn attribute(guest: &Guest, path: &str) -> Result<String> {
    Ok(guest.check(&format!("cat /sys/block/{path}"))?.trim().to_owned())
}

#[test]
fn three_file_systems_write_verify_discard_and_check() -> Result<()> {
    let daemon = Daemon::serve(&[
        Served::sparse("ext4", 512).with("serial = \"FATHOM\""),
        Served::sparse("xfs", 512).with("direct = true"),
        Served::sparse("btrfs", 512).with("block_size = \"4K\""),
    ])?;
    let disk = |name: &str| Disk::vhost_user(daemon.path(&format!("{name}.sock"))).queues(2);
    let guest =
        Guest::builder().disk(disk("ext4")).disk(disk("xfs")).disk(disk("btrfs")).start()?;
    assert_eq!(attribute(&guest, "vda/serial")?, "FATHOM");
    assert_eq!(attribute(&guest, "vdb/serial")?, "xfs");
    assert_eq!(attribute(&guest, "vda/queue/logical_block_size")?, "512");
    assert_eq!(attribute(&guest, "vdc/queue/logical_block_size")?, "4096");
    assert_eq!(guest.check("ls /sys/block/vda/mq | wc -l")?, "2\n");
    exercise(&guest, &daemon, "ext4", "/dev/vda", ["mkfs.ext4", "e2fsck -f -n"])?;
    exercise(&guest, &daemon, "xfs", "/dev/vdb", ["mkfs.xfs -f", "xfs_repair -n"])?;
    exercise(&guest, &daemon, "btrfs", "/dev/vdc", ["mkfs.btrfs -f", "btrfs check"])?;
    guest.check_console()?;
    guest.shutdown()
}

#[test]
fn qemu_7_2_with_large_blocks_past_the_page_cache_and_a_read_only_disk() -> Result<()> {
    let qemu = match Qemu::version_7_2()? {
        Some(qemu) => qemu,
        None => Qemu::current()?,
    };
    let daemon = Daemon::serve(&[
        Served::sparse("disk", 256).with("direct = true").with("block_size = 4096"),
        Served::sparse("frozen", 8).with("read_only = true"),
    ])?;
    let disk = |name: &str| Disk::vhost_user(daemon.path(&format!("{name}.sock"))).queues(2);
    let guest = Guest::builder().qemu(qemu).disk(disk("disk")).disk(disk("frozen")).start()?;
    exercise(&guest, &daemon, "disk", "/dev/vda", ["mkfs.ext4", "e2fsck -f -n"])?;
    // The kernel itself refuses writes to a read-only disk.
    assert_eq!(guest.check("blockdev --getro /dev/vdb; blockdev --getro /dev/vda")?, "1\n0\n");
    for write in ["dd if=/dev/urandom of=/dev/vdb count=8 oflag=direct", "blkdiscard /dev/vdb"] {
        let output = guest.run(write)?;
        assert_ne!(output.status, 0, "{write}: {}", output.text);
    }
    guest.check("blockdev --setrw /dev/vdb || true")?;
    guest.run("dd if=/dev/urandom of=/dev/vdb count=8 oflag=direct")?;
    guest.check("cmp -n 8388608 /dev/vdb /dev/zero")?;
    assert_eq!(allocated(&daemon, "frozen")?, 0, "the read-only image has changed");
    guest.shutdown()
}
