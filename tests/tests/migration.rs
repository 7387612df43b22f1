//! A running guest migrates between two QEMUs and back, on one disk that is offered on two sockets:
//! nothing that it wrote is lost, and nothing that its disk put into its memory in the meantime is
//! missing at the destination.
//!
//! The second is the dirty log's part. What the guest's processor writes QEMU sees by itself; of
//! what the disk writes, the data of reads, it knows only by the log. So files are read into the
//! page cache while the migration runs, which is slowed down so that most of their pages have been
//! sent before, and their checksums are compared at the destination without another read.

use std::path::Path;

use fathom_tests::{Daemon, Disk, Error, Guest, Records, Result, Served};
use serde_json::json;

/// Files that are read while the guest migrates, of 4 MiB each.
const FILES: u32 = 20;

fn builder(socket: &Path) -> fathom_tests::Builder {
    Guest::builder().memory_mib(384).disk(Disk::vhost_user(socket).queues(2))
}

/// Waits in `destination` and lets `source` migrate there; `source` ends.
fn migrate(source: Guest, destination: &Guest, address: &str) -> Result<()> {
    source.qmp(&json!({
        "execute": "migrate-set-parameters",
        "arguments": {"max-bandwidth": 48 << 20, "downtime-limit": 500}
    }))?;
    source.migrate(destination, address, 90)?;
    drop(source);
    Ok(())
}

#[test]
fn back_and_forth_under_verified_load() -> Result<()> {
    let daemon = Daemon::serve(&[Served::sparse("disk", 512).sockets(&["a.sock", "b.sock"])])?;
    let mut guest = builder(&daemon.path("a.sock")).start()?;
    guest.check(&format!(
        "mkfs.ext4 -q /dev/vda; mount /dev/vda /mnt; mkdir /mnt/files
        for file in $(seq {FILES}); do
            dd if=/dev/urandom of=/mnt/files/$file bs=1M count=4 status=none
        done
        dd if=/dev/urandom of=/run/memory bs=1M count=16 status=none
        sha256sum /mnt/files/* > /run/files; sha256sum /run/memory > /run/memory.sum
        fallocate -l 48M /mnt/load || dd if=/dev/zero of=/mnt/load bs=1M count=48; sync"
    ))?;
    let mut records = Records::new("/mnt/records");
    let writer = records.write(&guest)?;
    let load = guest.spawn(
        "fio --name=load --filename=/mnt/load --size=48M --direct=1 --ioengine=libaio --iodepth=8 \
            --rw=randwrite --bsrange=4k-32k --rate=3M --verify=crc32c --verify_fatal=1 \
            --verify_backlog=32 --time_based --runtime=50",
    )?;
    for (round, socket) in ["b.sock", "a.sock", "b.sock"].iter().enumerate() {
        let address = format!("unix:{}", daemon.path(&format!("migration{round}")).display());
        let destination = builder(&daemon.path(socket)).incoming(&address).start()?;
        guest.check("echo 3 > /proc/sys/vm/drop_caches")?;
        let reader = guest
            .spawn("for file in /mnt/files/*; do cat $file > /dev/null; usleep 250000; done")?;
        migrate(guest, &destination, &address)?;
        guest = destination;
        let output = guest.finish(reader)?;
        assert_eq!(output.status, 0, "{}", output.text);
        let read = guest.check("awk '{ print int($3 / 2048) }' /sys/block/vda/stat")?;
        guest.check("sha256sum -c /run/files /run/memory.sum > /run/checked 2>&1 || { grep -v ': OK$' /run/checked; exit 1; }").map_err(|error| {
            Error::new(format!("round {round}: the guest's memory is not what it was: {error}"))
        })?;
        let again = guest.check("awk '{ print int($3 / 2048) }' /sys/block/vda/stat")?;
        eprintln!("round {round}: {} MiB read, {} after the checksums", read.trim(), again.trim());
        records.wait_for(&guest, 2)?;
        guest.check_console()?;
    }
    let output = guest.finish_within(load, 120)?;
    assert_eq!(output.status, 0, "{}", output.text);
    guest.check("touch /run/stop")?;
    let output = guest.finish(writer)?;
    assert_eq!(output.status, 0, "{}", output.text);
    records.check(&guest)?;
    guest.check("umount /mnt; e2fsck -f -n /dev/vda")?;
    guest.check_console()?;
    daemon.check("disk")?;
    guest.shutdown()
}
