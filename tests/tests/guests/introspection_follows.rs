//! The daemon follows a guest that boots another kernel in the same memory, which still contains
//! the data of the previous kernel: over a reboot, a reset, and a kexec to another release.

use fathom_control::InsightState;
use fathom_tests::{
    Assets, Classified, Daemon, Disk, Guest, Kind, Result, Served, despite_emulation, patience,
    until,
};

/// Writes files until the name of one is found in the reports about the disk's requests: the daemon
/// needs a moment to notice the guest's next kernel.
fn is_understood(daemon: &Daemon, guest: &Guest, name: &str, release: &str) -> Result<()> {
    // The file system's module has not been loaded by this kernel before.
    guest.check(&format!("mkdir -p /mnt; mount /dev/vdb /mnt; echo {name} > /mnt/warm; sync"))?;
    let mut number = 0;
    until("a kernel to be understood", patience(20), || {
        number += 1;
        let path = format!("/{name}-{number}");
        guest.check(&format!("sleep 1.5; head -c 300000 /dev/urandom > /mnt{path}; sync"))?;
        let log = std::fs::read_to_string(daemon.path("requests"))?;
        let bytes: u64 = Classified::parse_log(&log)?
            .iter()
            .filter(|request| request.operation == "write")
            .flat_map(|request| &request.parts)
            .filter(|part| part.kind == Kind::Data && part.path.as_deref() == Some(path.as_str()))
            .map(|part| part.length)
            .sum();
        println!("{bytes} bytes of {path} under Linux {release}");
        Ok((300_000..310_000).contains(&bytes).then_some(()))
    })?;
    guest.check("umount /mnt")?;
    let insight = daemon.status("disk")?.insight;
    assert_eq!((insight.state, insight.release.as_str()), (InsightState::Attached, release));
    Ok(())
}

#[test]
fn introspection_follows_a_guest_to_its_next_kernel() -> Result<()> {
    despite_emulation(follow)
}

fn follow() -> Result<()> {
    let assets = Assets::get()?;
    let Some(kernel) = assets.kernel("default")? else { return Ok(()) };
    let release = kernel.release.clone();
    let next = assets.kernel("backports")?;
    let daemon = Daemon::serve(&[Served::sparse("disk", 400)
        .with("layers = [{ kind = 'log', file = 'requests', lines_per_second_max = 0 }]")])?;
    let mut builder = Guest::builder()
        .kernel(kernel)
        .root(Disk::snapshot_of(&assets.root))
        .disk(Disk::vhost_user(daemon.path("disk.sock")).queues(2));
    if let Some(next) = &next {
        builder = builder
            .disk(Disk::snapshot_of(&next.image))
            .disk(Disk::snapshot_of(&next.initrd))
            .memory_mib(768);
    }
    let guest = builder.start()?;
    guest.check("mkfs.xfs -q /dev/vdb")?;
    is_understood(&daemon, &guest, "first", &release)?;
    guest.reboot()?;
    is_understood(&daemon, &guest, "rebooted", &release)?;
    guest.reset()?;
    is_understood(&daemon, &guest, "reset", &release)?;
    if let Some(next) = next {
        guest.check(
            "cat /dev/vdc > /run/kernel; cat /dev/vdd > /run/initrd
            kexec --load /run/kernel --initrd=/run/initrd --reuse-cmdline; rm /run/kernel /run/initrd",
        )?;
        guest.reboot_by("sync; kexec --exec")?;
        is_understood(&daemon, &guest, "kexec", &next.release)?;
    }
    // Each boot counts as a new kernel, although all were found in the same memory.
    let kernels = daemon.status("disk")?.insight.kernels;
    assert!(kernels >= 3, "{kernels} kernels");
    daemon.check("disk")?;
    drop(guest);
    Ok(())
}
