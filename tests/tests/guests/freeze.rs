//! Snapshots with file systems that the real guest agent freezes, of a guest that writes all the
//! time; and files of a snapshot that are read back without the guest.

use std::path::Path;
use std::process::Command;

use fathom_tests::{Assets, Daemon, Disk, Guest, Result, Served, check_ext4, patience, until};

/// Writes, renames and deletes files until the guest ends, and counts.
const WRITER: &str = "
    i=0
    while :; do
        i=$((i + 1))
        head -c 65536 /dev/urandom > /web/new
        mv /web/new /web/f$((i % 50)); mkdir -p /web/d$i; rmdir /web/d$((i - 20)) || true
        echo $i > /web/count; cp /web/count /tmp/count
    done > /dev/null 2>&1 &";

/// Runs a program of the host. Debian installs those of e2fsprogs in a folder that is only on
/// root's path.
fn host(folder: &Path, program: &str, words: &[&str]) -> Result<String> {
    let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
    let mut command = Command::new(program);
    command.current_dir(folder).env("PATH", path).args(words);
    let done = command.env("FATHOM_CONTROL", folder.join("control.sock")).output()?;
    assert!(done.status.success(), "{program} {words:?}: {done:?}");
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}

/// A daemon, and a guest with an agent that writes to its volume.
fn start() -> Result<(Daemon, Guest)> {
    let daemon = Daemon::serve_with(
        &[Served::volume("web", 96).with("vm = \"web\"")],
        "[[nbd]]\naddress = \"unix:nbd.sock\"\n[[guest]]\nvm = \"web\"\nagent = \"agent\"",
    )?;
    let agent =
        format!("socket,id=agent,path={},server=on,wait=off", daemon.path("agent").display());
    let arguments = [
        ["-device", "virtio-serial-pci"],
        ["-chardev", &agent],
        ["-device", "virtserialport,chardev=agent,name=org.qemu.guest_agent.0"],
    ];
    let builder = Guest::builder()
        .disk(Disk::vhost_user(daemon.path("web.sock")))
        .disk(Disk::snapshot_of(Assets::get()?.tools()?));
    let guest = arguments
        .iter()
        .flatten()
        .fold(builder, |builder, argument| builder.argument(*argument))
        .start()?;
    guest.check(&format!(
        "mkdir -p /tools /web; mount -o ro /dev/vdb /tools; modprobe virtio_console
        mkfs.ext4 -q /dev/vda; mount /dev/vda /web
        seq 100000 > /web/report.txt; sync
        /tools/qemu-ga -m virtio-serial -p /dev/vport*p1 -t /tmp > /dev/null 2>&1 &
        {WRITER}"
    ))?;
    wait_for_progress(&guest)?;
    Ok((daemon, guest))
}

/// Waits until the guest's program has written 3 more files.
fn wait_for_progress(guest: &Guest) -> Result<()> {
    let count = || -> Result<u64> {
        let text = guest.check("cat /tmp/count 2> /dev/null || true")?;
        Ok(text.trim().parse().unwrap_or_default())
    };
    let first = count()?;
    until("the guest to write", patience(60), || Ok((count()? >= first + 3).then_some(())))
}

/// Takes a snapshot, and copies it into an image while the guest goes on.
fn image_of(daemon: &Daemon, name: &str, more: &[&str]) -> Result<String> {
    let folder = &daemon.path("");
    let fathom = Daemon::binary()?.display().to_string();
    let create = ["snapshot", "create", "web", "--name", name];
    let taken = host(folder, &fathom, &[&create, more].concat())?;
    assert!(!taken.contains("warning"), "{taken}");
    let volume = format!("web@{name}");
    host(folder, &fathom, &["disk", "add", name, "--store", "pool", "--volume", &volume])?;
    let image = format!("{name}.img");
    host(folder, "nbdcopy", &[&format!("nbd+unix:///{name}?socket=nbd.sock"), &image])?;
    host(folder, &fathom, &["disk", "remove", name])?;
    Ok(image)
}

/// The same without a copy of the whole snapshot.
fn by_mount(daemon: &Daemon, sum: &str) -> Result<()> {
    let folder = daemon.path("");
    let fathom = Daemon::binary()?.display().to_string();
    let add = ["disk", "add", "rescue", "--store", "pool", "--volume", "web@frozen1"];
    host(&folder, &fathom, &add)?;
    std::fs::create_dir(folder.join("mount"))?;
    let mut mount = Command::new("setpriv")
        .current_dir(&folder)
        .args(["--pdeathsig", "KILL", "--", "nbdfuse", "mount/web.img"])
        .arg("nbd+unix:///rescue?socket=nbd.sock")
        .spawn()?;
    let image = folder.join("mount/web.img");
    let has_begun = until("the mount", patience(20), || {
        let has_failed = mount.try_wait()?.is_some();
        Ok((has_failed || image.exists()).then_some(!has_failed))
    })?;
    if has_begun {
        host(&folder, "debugfs", &["-R", "dump /report.txt mounted.txt", "mount/web.img"])?;
        assert_eq!(host(&folder, "sh", &["-c", "sha256sum < mounted.txt"])?, sum);
        host(&folder, "fusermount3", &["-u", "mount"])?;
        mount.wait()?;
    } else {
        println!("SKIPPED: nbdfuse cannot mount here");
    }
    host(&folder, &fathom, &["disk", "remove", "rescue"]).map(drop)
}

#[test]
fn a_frozen_snapshot_needs_no_recovery_and_has_its_files() -> Result<()> {
    let (daemon, guest) = start()?;
    let folder = daemon.path("");
    let sum = guest.check("sha256sum < /web/report.txt")?;
    let features = |image: &str| host(&folder, "dumpe2fs", &["-h", image]);
    for round in 0..3 {
        let frozen = image_of(&daemon, &format!("frozen{round}"), &["--freeze"])?;
        wait_for_progress(&guest)?;
        let found = features(&frozen)?;
        assert!(found.contains("has_journal") && !found.contains("needs_recovery"), "{found}");
        check_ext4(&folder.join(&frozen))?;
    }
    // What a freeze is for.
    let running = image_of(&daemon, "running", &[])?;
    assert!(features(&running)?.contains("needs_recovery"));
    // One file, without the guest and without root's rights.
    host(&folder, "debugfs", &["-R", "dump /report.txt back.txt", "frozen1.img"])?;
    let back = host(&folder, "sh", &["-c", "sha256sum < back.txt"])?;
    assert_eq!(back, sum);
    by_mount(&daemon, &sum)?;
    let listed = host(&folder, "debugfs", &["-R", "ls -p /", "frozen1.img"])?;
    assert!(listed.contains("/report.txt/"), "{listed}");
    guest.check_console()?;
    Ok(())
}

#[test]
fn a_guest_writes_again_after_the_daemon_that_froze_it_was_killed() -> Result<()> {
    let (mut daemon, guest) = start()?;
    let folder = daemon.path("");
    let fathom = Daemon::binary()?;
    let record = || -> Result<bool> {
        let mut names = std::fs::read_dir(&folder)?.flatten().map(|entry| entry.file_name());
        Ok(names.any(|name| {
            let name = name.to_string_lossy();
            name.starts_with("frozen-") && name.ends_with(".json")
        }))
    };
    let mut left = 0;
    for round in 0..8 {
        let mut taking = Command::new(&fathom)
            .current_dir(&folder)
            .env("FATHOM_CONTROL", folder.join("control.sock"))
            .args(["snapshot", "create", "web", "--freeze", "--name", &format!("s{round}")])
            .spawn()?;
        while taking.try_wait()?.is_none() && !record()? {}
        daemon.kill9();
        taking.wait()?;
        left += u32::from(record()?);
        daemon.restart()?;
        daemon.wait_for_guest("web")?;
        until("the guest to be thawed", patience(60), || Ok((!record()?).then_some(())))?;
        wait_for_progress(&guest)?;
        if left >= 2 {
            break;
        }
    }
    assert!(left > 0, "no daemon was killed while the guest was frozen");
    guest.check_console()?;
    Ok(())
}
