//! A running guest migrates between two QEMUs and back, on one disk and one socket. None of its
//! writes is lost, and all data that its disk writes into its memory meanwhile arrives at the
//! destination.
//!
//! The second condition tests the dirty log. QEMU tracks the writes of the guest's processor
//! itself, but it learns of the disk's writes, the data of reads, only from the log. So files are
//! read into the page cache after the whole memory has been sent, and their checksums are compared
//! at the destination without another read.

use fathom_tests::{Builder, Daemon, Disk, Error, Guest, Records, Result, Served, patience, until};
use serde_json::json;

/// The number of files that are read during the migration, of 4 MiB each.
const FILES: u32 = 16;
/// The number of migrations: there, back, and there again.
const ROUNDS: usize = 3;
/// The same with a cache, whose hits also write into the guest's memory.
const ROUNDS_CACHED: usize = 2;

fn builder(daemon: &Daemon) -> Builder {
    let disk = Disk::vhost_user(daemon.path("disk.sock")).queues(2);
    Guest::builder().memory_mib(384).disk(disk)
}

/// Sets the bandwidth of a migration, in bytes a second, and the downtime at its end, in
/// milliseconds.
fn allow(guest: &Guest, bandwidth: u64, downtime: u64) -> Result<()> {
    guest
        .qmp(&json!({
            "execute": "migrate-set-parameters",
            "arguments": {"max-bandwidth": bandwidth, "downtime-limit": downtime}
        }))
        .map(drop)
}

/// The amount that the guest has read from its disk since its start, in MiB.
fn read_mib(guest: &Guest) -> Result<String> {
    let text = guest.check("awk '{ print int($3 / 2048) }' /sys/block/vda/stat")?;
    Ok(text.trim().to_owned())
}

#[test]
fn back_and_forth_under_verified_load() -> Result<()> {
    back_and_forth(Served::sparse("disk", 512), ROUNDS)
}

#[test]
fn back_and_forth_with_a_cache_in_write_back() -> Result<()> {
    let folder = tempfile::tempdir_in("/var/tmp")?;
    let layer = crate::cache::write_back(folder.path(), "128M", "32M", 1)?;
    back_and_forth(Served::sparse("disk", 512).with(&layer), ROUNDS_CACHED)
}

fn back_and_forth(disk: Served, rounds: usize) -> Result<()> {
    let daemon = Daemon::serve(&[disk])?;
    let mut guest = builder(&daemon).start()?;
    guest.check(&format!(
        "mkfs.ext4 -q /dev/vda; mount /dev/vda /mnt; mkdir /mnt/files
        for file in $(seq {FILES}); do
            dd if=/dev/urandom of=/mnt/files/$file bs=1M count=4 status=none
        done
        dd if=/dev/urandom of=/run/memory bs=1M count=16 status=none
        sha256sum /mnt/files/* > /run/files; sha256sum /run/memory > /run/memory.sum"
    ))?;
    let mut records = Records::new("/mnt/records");
    records.write(&guest)?;
    // A command that ends before the migration does answers to the source, so the results are kept
    // in files.
    guest.spawn(
        "fio --name=load --filename=/mnt/load --size=32M --direct=1 --ioengine=libaio --iodepth=8 \
            --rw=randwrite --bsrange=4k-32k --rate=3M --verify=crc32c --verify_fatal=1 \
            --verify_backlog=32 --loops=1000000 > /run/load 2>&1 &
        echo $! > /run/load.pid; wait $!; echo $? > /run/load.status",
    )?;
    for round in 0..rounds {
        let address = format!("unix:{}", daemon.path(&format!("migration{round}")).display());
        let destination = builder(&daemon).incoming(&address).start()?;
        guest.check("sync; echo 3 > /proc/sys/vm/drop_caches")?;
        allow(&guest, 64 << 20, 1)?;
        guest.migrate_begin(&address)?;
        until("all memory to be sent once", patience(60), || {
            let state = guest.qmp(&json!({"execute": "query-migrate"}))?;
            Ok(state["ram"]["dirty-sync-count"].as_u64().filter(|passes| *passes > 1))
        })?;
        // The guest changes memory faster than this bandwidth, so the migration cannot end before
        // the limits are raised.
        allow(&guest, 1 << 20, 1)?;
        guest.check("cat /mnt/files/* > /dev/null")?;
        assert!(daemon.guest("disk")?.migrating, "the daemon reports no migration");
        allow(&guest, 1 << 30, 2000)?;
        guest.migrate_end(&destination, 60)?;
        guest = destination;
        let before = read_mib(&guest)?;
        guest
            .check(
                "sha256sum -c /run/files /run/memory.sum > /run/checked 2>&1 ||
                { grep -v ': OK$' /run/checked; exit 1; }",
            )
            .map_err(|error| Error::new(format!("the memory differs, round {round}: {error}")))?;
        eprintln!("round {round}: {before} MiB read, {} after the sums", read_mib(&guest)?);
        records.wait_for(&guest, 2)?;
        guest.check("! [ -e /run/load.status ] || { cat /run/load; exit 1; }")?;
        guest.check_console()?;
        daemon.check("disk")?;
    }
    // The signal goes only to the first process, which ends the other without a signal: fio 3.33
    // hangs after a signal has interrupted its wait for several requests.
    guest.check(
        "touch /run/stop; kill -INT $(cat /run/load.pid)
        until [ -e /run/load.status ]; do usleep 100000; done
        ! grep -E 'verify|err= *[1-9]' /run/load",
    )?;
    records.note(&guest);
    let count = records.check(&guest)?;
    assert!(count > 2 * rounds, "only {count} records");
    guest.check("umount /mnt; e2fsck -f -n /dev/vda")?;
    guest.check_console()?;
    daemon.check("disk")?;
    guest.shutdown()
}
