//! Tests of the harness itself, with qemu-storage-daemon instead of Fathom.

use std::fs::File;

use fathom_tests::{Assets, Disk, Guest, Qemu, Result, StorageDaemon};
use serde_json::json;

/// A sparse image of `size` bytes in a folder of its own.
fn image(size: u64) -> Result<(tempfile::TempDir, std::path::PathBuf)> {
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("disk.img");
    File::create(&path)?.set_len(size)?;
    Ok((directory, path))
}

#[test]
fn diskless_guest_writes_and_reads_back() -> Result<()> {
    let (_directory, image) = image(512 << 20)?;
    let daemon = StorageDaemon::start(&image, 2)?;
    let guest = Guest::builder().disk(Disk::vhost_user(daemon.socket()).queues(2)).start()?;
    for make in ["mkfs.ext4 -q", "mkfs.xfs -q -f", "mkfs.btrfs -q -f"] {
        let checksum = guest.check(&format!(
            "{make} /dev/vda > /dev/null 2>&1; mount /dev/vda /mnt
            dd if=/dev/urandom of=/mnt/file bs=1M count=8 status=none
            sha256sum /mnt/file; umount /mnt"
        ))?;
        let again = guest.check("mount /dev/vda /mnt; sha256sum /mnt/file; umount /mnt")?;
        assert_eq!(checksum, again);
    }
    guest.check_console()?;
    guest.shutdown()
}

#[test]
fn root_image_boots_and_runs_its_workload() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let image = directory.path().join("root.ext4");
    Assets::get()?.copy_root(&image)?;
    let daemon = StorageDaemon::start(&image, 1)?;
    let guest = Guest::builder()
        .root(Disk::vhost_user(daemon.socket()))
        .append("fathom.run=workload")
        .start()?;
    let orders = "sqlite3 /srv/database/shop.db 'SELECT count(*) FROM orders'";
    guest.check_within(
        &format!("until [ $({orders} 2>/dev/null || echo 0) -gt 100 ]; do sleep 0.5; done"),
        120,
    )?;
    guest.check("until [ -s /srv/web/access.log ]; do sleep 0.5; done")?;
    guest.check_console()?;
    guest.shutdown()
}

#[test]
fn answers_are_exact_and_commands_run_concurrently() -> Result<()> {
    let guest = Guest::builder().memory_mib(384).start()?;
    let slow = guest.spawn("sleep 2; echo slow")?;
    let output = guest.run("printf 'no newline at the end'; exit 7")?;
    assert_eq!((output.status, output.text.as_str()), (7, "no newline at the end"));
    let output = guest.run("echo to standard error >&2; kill -9 $$")?;
    assert_eq!((output.status, output.text.as_str()), (137, "to standard error\n"));
    let output = guest.run("seq 1 20000")?;
    assert_eq!(output.text.lines().count(), 20000);
    assert_eq!(guest.finish(slow)?.text, "slow\n");
    let status = guest.qmp(&json!({"execute": "query-status"}))?;
    assert_eq!(status["status"], "running");
    guest.run("echo 'blk_update_request: I/O error' > /dev/kmsg")?;
    assert!(guest.check_console().is_err());
    guest.reboot()?;
    assert_eq!(guest.check("echo again")?, "again\n");
    guest.shutdown()
}

#[test]
fn qemu_7_2_runs_a_guest_beside_the_newer_one() -> Result<()> {
    let Some(qemu) = Qemu::version_7_2()? else { return Ok(()) };
    assert_eq!(qemu.version(), (7, 2));
    let (_directory, image) = image(64 << 20)?;
    let daemon = StorageDaemon::start(&image, 1)?;
    let guest = Guest::builder().qemu(qemu).disk(Disk::vhost_user(daemon.socket())).start()?;
    guest.check(
        "echo remember | dd of=/dev/vda oflag=direct bs=512 conv=sync status=none
        dd if=/dev/vda iflag=direct bs=512 count=1 status=none | grep -q remember",
    )?;
    guest.check_console()?;
    guest.shutdown()
}

#[test]
fn commands_of_a_guest_continue_after_a_migration() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let address = format!("unix:{}", directory.path().join("migration").display());
    let source = Guest::builder().memory_mib(384).start()?;
    let destination = Guest::builder().memory_mib(384).incoming(&address).start()?;
    source.check("echo kept > /tmp/file")?;
    let ticket = source.spawn("sleep 8; cat /tmp/file")?;
    source.migrate(&destination, &address, 60)?;
    drop(source);
    assert_eq!(destination.finish(ticket)?.text, "kept\n");
    destination.shutdown()
}
