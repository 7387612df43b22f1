//! Held write-back that a process of the guest begins to wait for.

use fathom_tests::{Daemon, Disk, Guest, Result, Served, patience, until};

/// A figure of the layer `schedule` of the disk `data`.
fn figure(daemon: &Daemon, name: &str) -> Result<u64> {
    Ok(daemon.status("data")?.figure("schedule", name).unwrap_or_default())
}

/// The neighbour keeps the device busy with reads, and the guest's write-back is held for as long
/// as the layer may hold it. No request reports that `fsync` waits for this write-back.
#[test]
fn fsync_releases_the_write_back_that_it_waits_for() -> Result<()> {
    let layers = |time: &str| {
        format!(
            "layers = [{{ kind = 'schedule', device = 'd', hold_max = '30s', held_requests = 100000, \
             held_bytes = '1G' }}, {{ kind = 'delay', time = '{time}', jitter = '{time}' }}]"
        )
    };
    // The neighbour always has requests in flight, even if its guest pauses for a moment.
    let daemon = Daemon::serve(&[
        Served::sparse("data", 400).with(&layers("2ms")),
        Served::sparse("busy", 64).with(&layers("200ms")),
    ])?;
    let disk = |name: &str| Disk::vhost_user(daemon.path(&format!("{name}.sock")));
    let guest = Guest::builder().disk(disk("data")).disk(disk("busy")).start()?;
    // The first requests of a guest are those in which its kernel is found. A periodic commit of
    // the journal, and the initialisation of inode tables, would flush the disk, and so release the
    // held requests.
    guest.check(
        "mkfs.ext4 -q -E lazy_itable_init=0,lazy_journal_init=0 /dev/vda; mkdir -p /mnt; mount -o commit=3600 /dev/vda /mnt
        echo 1 > /mnt/warm; sync
        for file in one two; do head -c 4194304 /dev/zero > /mnt/$file; done; sync; sleep 2
        echo 0 > /proc/sys/vm/dirty_writeback_centisecs",
    )?;
    let reads = guest.spawn(
        "fio --name=busy --filename=/dev/vdb --direct=1 --ioengine=libaio --iodepth=16 --rw=randread \
        --bs=4k --time_based --runtime=3600",
    )?;
    let _ = reads;
    until("reads of the neighbour", patience(60), || {
        Ok((daemon.count("busy", "read")? > 60).then_some(()))
    })?;
    let before = figure(&daemon, "waiter_total")?;
    // Write-back begins soon after this, in the background.
    guest.check(
        "for file in one two; do
            yes $file | head -c 2097152 | dd of=/mnt/$file bs=64k conv=notrunc iflag=fullblock status=none
        done
        echo 10 > /proc/sys/vm/dirty_expire_centisecs
        echo 10 > /proc/sys/vm/dirty_writeback_centisecs",
    )?;
    // Then no dirty page is left: all are being written, and nothing remains for `fsync` to submit.
    until("write-back to be held", patience(60), || {
        let dirty = guest.check("awk '/^Dirty:/ { print $2 }' /proc/meminfo")?;
        let is_clean = dirty.trim().parse::<u64>().is_ok_and(|dirty| dirty < 64);
        Ok((is_clean && figure(&daemon, "held_bytes")? > 0).then_some(()))
    })
    .inspect_err(|_| println!("{:?}", daemon.status("data").map(|it| (it.insight, it.layers))))?;
    let due = figure(&daemon, "due_total")?;
    guest.check("dd if=/dev/null of=/mnt/one conv=fsync,notrunc status=none")?;
    let waited = figure(&daemon, "waiter_total")? - before;
    assert!(waited > 0, "no request was released because a process waits: {:?}", {
        daemon.status("data")?.layers
    });
    assert_eq!(figure(&daemon, "due_total")?, due, "requests were held until the bound");
    guest.check("yes one | head -c 2097152 | cmp -n 2097152 - /mnt/one; umount /mnt")?;
    assert_eq!(figure(&daemon, "held")?, 0);
    daemon.check("data")?;
    drop(guest);
    Ok(())
}
