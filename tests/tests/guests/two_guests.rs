//! Two guests on two disks of one daemon: the death of one QEMU during its I/O does not affect the
//! other guest, and its disk serves the next QEMU.

use fathom_tests::{Daemon, Disk, Guest, Result, Served, patience, until};

/// Random writes, which fio reads back and verifies while it writes.
const LOAD: &str = "fio --name=load --filename=/dev/vda --direct=1 --ioengine=libaio --iodepth=16 \
    --rw=randwrite --bsrange=4k-64k --size=96M --rate=12M --verify=crc32c --verify_fatal=1 \
    --verify_backlog=64";

#[test]
fn a_killed_qemu_does_not_disturb_its_neighbour() -> Result<()> {
    let daemon = Daemon::serve(&[Served::sparse("left", 128), Served::sparse("right", 128)])?;
    let start = |name: &str| {
        let disk = Disk::vhost_user(daemon.path(&format!("{name}.sock"))).queues(2);
        Guest::builder().memory_mib(384).disk(disk).start()
    };
    let (left, right) = (start("left")?, start("right")?);
    left.check("yes left | head -c 1048576 | dd of=/dev/vda bs=64k seek=2032 oflag=direct iflag=fullblock conv=fsync status=none")?;
    let on_left = left.spawn(LOAD)?;
    let on_right = right.spawn(LOAD)?;
    for name in ["left", "right"] {
        until(&format!("writes on {name}"), patience(60), || {
            Ok((daemon.count(name, "write")? > 300).then_some(()))
        })?;
    }
    left.process().kill();
    until("the daemon to disconnect the dead guest", patience(10), || {
        Ok((!daemon.guest("left")?.connected).then_some(()))
    })?;
    assert!(left.finish_within(on_left, 10).is_err(), "a dead guest does not answer");

    let next = start("left")?;
    next.check(
        "yes left | head -c 1048576 > /run/expected
        dd if=/dev/vda bs=64k skip=2032 count=16 iflag=direct status=none | cmp - /run/expected",
    )?;
    let again = next.spawn(LOAD)?;
    for (guest, ticket) in [(&right, on_right), (&next, again)] {
        let output = guest.finish_within(ticket, 120)?;
        assert_eq!(output.status, 0, "{}", output.text);
        guest.check_console()?;
    }
    assert_eq!(daemon.guest("left")?.connections, 2);
    assert_eq!(daemon.guest("right")?.connections, 1);
    for name in ["left", "right"] {
        daemon.check(name)?;
    }
    next.shutdown()?;
    right.shutdown()
}
