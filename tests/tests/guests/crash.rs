//! QEMU, the daemon, or both are killed at random moments while a guest writes durable records.
//! Another guest finds every acknowledged record, and the file system only has to replay its
//! journal.
//!
//! The writes of killed processes stay in the host's page cache, so this tests the order of
//! operations in guest, QEMU and daemon. The crates' own tests simulate a power loss of the host
//! with a faulty back end.

use std::time::Duration;

use fathom_tests::{Daemon, Disk, Guest, Records, Result, Served, check_ext4};

#[test]
fn acknowledged_records_survive_every_crash() -> Result<()> {
    let mut random = fastrand::Rng::with_seed(2);
    let mut daemon = Daemon::serve(&[Served::sparse("disk", 192)])?;
    let mut records = Records::new("/mnt/records");
    let rounds = ["QEMU", "the daemon, then QEMU", "QEMU, then the daemon"];
    for round in 0..=rounds.len() {
        let disk = Disk::vhost_user(daemon.path("disk.sock")).queues(2);
        let guest = Guest::builder().memory_mib(384).disk(disk).start()?;
        if round == 0 {
            guest.check("mkfs.ext4 -q /dev/vda; mount /dev/vda /mnt")?;
        } else {
            guest.check("mount /dev/vda /mnt; dmesg | grep -q 'recovery complete'")?;
            let count = records.check(&guest)?;
            assert!(count > 8 * round, "only {count} records");
            guest.check("umount /mnt; e2fsck -f -n /dev/vda; mount /dev/vda /mnt")?;
            guest.check_console()?;
        }
        daemon.check("disk")?;
        let Some(victims) = rounds.get(round) else {
            guest.shutdown()?;
            break;
        };
        records.write(&guest)?;
        guest.spawn("cd /mnt; while :; do busybox dd if=/dev/zero of=noise bs=64k count=60; rm noise; sleep 0.3; done")?;
        records.wait_for(&guest, 9)?;
        let pause = Duration::from_millis(random.u64(0..700));
        eprintln!("{victims} after another {} ms", pause.as_millis());
        std::thread::sleep(pause);
        let between = Duration::from_millis(random.u64(1..60));
        match round {
            0 => guest.process().kill(),
            1 => {
                daemon.kill9();
                std::thread::sleep(between);
                guest.process().kill();
                daemon.restart()?;
            }
            _ => {
                guest.process().kill();
                std::thread::sleep(between);
                daemon.kill9();
                daemon.restart()?;
            }
        }
        records.note(&guest);
    }
    check_ext4(&daemon.path("disk.img"))
}
