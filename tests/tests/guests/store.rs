//! Guests on volumes of a pool: snapshots under load, clones, roll-backs, and kills of the daemon.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use fathom_control::{InsightState, PoolChange, WrittenFiles};
use fathom_tests::{Daemon, Disk, Guest, Records, Result, Served, check_ext4, patience, until};

/// An incremental backup with libnbd.
const INCREMENTAL: &str = include_str!("../../../crates/fathom/tests/daemon/incremental.py");
/// How often the daemon is killed.
const KILLS: usize = 6;

/// Runs a command of Fathom beside the daemon.
pub fn fathom(daemon: &Daemon, words: &[&str]) -> Result<String> {
    let folder = daemon.path("");
    let control = daemon.path("control.sock");
    let done = Command::new(Daemon::binary()?)
        .current_dir(folder)
        .env("FATHOM_CONTROL", control)
        .args(words)
        .output()?;
    assert!(done.status.success(), "{words:?}: {}", String::from_utf8_lossy(&done.stderr));
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}

/// The file system in a raw image is sound after its journal is replayed.
pub fn check_exported(image: &Path) -> Result<()> {
    // Debian installs e2fsck in a folder that is only on root's path.
    let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
    let replayed = Command::new("e2fsck").args(["-p"]).arg(image).env("PATH", path).output()?;
    let is_sound = replayed.status.code().is_some_and(|code| code <= 1);
    assert!(is_sound, "{}", String::from_utf8_lossy(&replayed.stdout));
    check_ext4(image)
}

#[test]
fn a_guest_survives_killed_daemons_over_volumes_of_a_pool() -> Result<()> {
    let mut daemon = Daemon::serve(&[Served::volume("raw", 96), Served::volume("files", 128)])?;
    let disk = |name: &str| Disk::vhost_user(daemon.path(&format!("{name}.sock"))).queues(2);
    let guest = Guest::builder().disk(disk("raw")).disk(disk("files")).start()?;
    guest.check("mkfs.ext4 -q /dev/vdb; mkdir -p /files; mount /dev/vdb /files")?;
    let mut records = Records::new("/files/records");
    let writer = records.write(&guest)?;
    let load = guest.spawn(
        "fio --name=load --filename=/dev/vda --direct=1 --ioengine=libaio --iodepth=16 --rw=randwrite \
            --bsrange=4k-64k --size=80M --rate=3M --verify=crc32c --verify_fatal=1 --do_verify=1",
    )?;
    let mut random = fastrand::Rng::with_seed(4);
    for round in 0..KILLS {
        records.wait_for(&guest, 3)?;
        fathom(&daemon, &["snapshot", "create", "raw", "files", "--name", &format!("s{round}")])?;
        std::thread::sleep(Duration::from_millis(random.u64(0..800)));
        if round % 2 == 1 {
            fathom(&daemon, &["snapshot", "delete", "files", &format!("s{}", round - 1)])?;
        }
        daemon.kill9();
        records.note(&guest);
        daemon.restart()?;
        for name in ["raw", "files"] {
            daemon.wait_for_guest(name)?;
            daemon.check(name)?;
        }
    }
    let output = guest.finish_within(load, 240)?;
    assert_eq!(output.status, 0, "{}", output.text);
    records.stop(&guest, writer)?;
    records.check(&guest)?;
    guest.check("umount /files; echo 3 > /proc/sys/vm/drop_caches; e2fsck -f -n /dev/vdb")?;
    guest.check_console()?;
    guest.shutdown()?;
    assert!(daemon.stop()?.success());
    fathom(&daemon, &["store", "check", "pool"])?;
    // Each snapshot is what a power loss would have left.
    for round in [1, 3, 5] {
        let image = format!("s{round}.img");
        fathom(&daemon, &["store", "export", "pool", &format!("files@s{round}"), &image])?;
        check_exported(&daemon.path(&image))?;
    }
    Ok(())
}

#[test]
fn a_clone_and_a_roll_back_have_what_the_snapshot_had() -> Result<()> {
    let mut daemon = Daemon::serve(&[Served::volume("web", 256)])?;
    let disk = |name: &str| Disk::vhost_user(daemon.path(&format!("{name}.sock"))).queues(2);
    let guest = Guest::builder().disk(disk("web")).start()?;
    guest.check(
        "mkfs.ext4 -q /dev/vda; mkdir -p /web; mount /dev/vda /web
        for i in $(seq 40); do head -c 1048576 /dev/urandom > /web/$i; done; sync
        cd /web; sha256sum [0-9]* > /tmp/sums; cp /tmp/sums /web/sums; sync; cd /",
    )?;
    let sums = guest.check("cat /tmp/sums")?;
    fathom(&daemon, &["snapshot", "create", "web", "--name", "before"])?;
    // A program that overwrites every file, and deletes some.
    guest.check(
        "cd /web; for i in $(seq 40); do head -c 1048576 /dev/urandom | dd of=$i conv=notrunc status=none
        done; rm 1[0-9]; sync; fstrim /web; cd /",
    )?;
    fathom(&daemon, &["snapshot", "clone", "web", "before", "again"])?;
    let socket = daemon.path("again.sock");
    let socket = socket.to_str().unwrap_or_default();
    let add = ["disk", "add", "again", "--store", "pool", "--volume", "again", "--socket", socket];
    fathom(&daemon, &add)?;
    let beside = Guest::builder().disk(Disk::vhost_user(daemon.path("again.sock"))).start()?;
    beside.check("mkdir -p /web; mount /dev/vda /web; cd /web; sha256sum -c sums >/dev/null")?;
    beside.check("cd /web; rm 2*; head -c 1048576 /dev/urandom > 30; sync; cd /; umount /web")?;
    beside.shutdown()?;
    guest.check("umount /web; e2fsck -f -n /dev/vda")?;
    guest.shutdown()?;
    let client = daemon.client();
    let roll_back = PoolChange::RollBack { volume: "web".into(), name: "before".into() };
    let refused = client.change_pool(&daemon.path("pool"), roll_back).unwrap_err().to_string();
    assert!(refused.contains("uses the volume"), "{refused}");
    assert!(daemon.stop()?.success());
    fathom(&daemon, &["snapshot", "rollback", "web", "before", "--store", "pool"])?;
    daemon.restart()?;
    let guest = Guest::builder().disk(Disk::vhost_user(daemon.path("web.sock"))).start()?;
    guest.check("mkdir -p /web; mount /dev/vda /web; cd /web; sha256sum -c sums >/dev/null")?;
    assert_eq!(guest.check("cat /web/sums")?, sums);
    guest.shutdown()?;
    assert!(daemon.stop()?.success());
    fathom(&daemon, &["store", "check", "pool"])?;
    Ok(())
}

/// The paths of the files that were written between two snapshots, or until now, and whether all of
/// the time is accounted for.
fn written(daemon: &Daemon, from: &str, to: Option<&str>) -> Result<(Vec<String>, bool)> {
    let words = ["snapshot", "diff", "web", from].into_iter().chain(to);
    let words: Vec<&str> = words.chain(["--files", "--json"]).collect();
    let found: WrittenFiles = serde_json::from_str(&fathom(daemon, &words)?)?;
    let large = found.files.iter().filter(|file| file.kind == "data" && file.bytes >= 1 << 20);
    let mut paths: Vec<String> = large.map(|file| file.path.clone()).collect();
    paths.sort();
    paths.dedup();
    Ok((paths, found.complete))
}

#[test]
fn snapshots_know_which_files_were_written_between_them() -> Result<()> {
    let mut daemon = Daemon::serve(&[Served::volume("web", 256)])?;
    let disk = || Disk::vhost_user(daemon.path("web.sock")).queues(2);
    let guest = Guest::builder().disk(disk()).start()?;
    guest.check("mkfs.ext4 -q /dev/vda; mkdir -p /web; mount /dev/vda /web; sync")?;
    until("the guest's kernel to be found", patience(60), || {
        guest.check("touch /web/x; sync")?;
        Ok((daemon.status("web")?.insight.state == InsightState::Attached).then_some(()))
    })?;
    let snapshot = |name: &str| fathom(&daemon, &["snapshot", "create", "web", "--name", name]);
    let write =
        |file: &str| guest.check(&format!("head -c 2097152 /dev/urandom > /web/{file}; sync"));
    write("before")?;
    snapshot("a")?;
    write("one")?;
    snapshot("b")?;
    write("two")?;
    snapshot("c")?;
    write("three")?;
    let paths = |names: &[&str]| names.iter().map(|name| format!("/{name}")).collect::<Vec<_>>();
    assert_eq!(written(&daemon, "a", Some("b"))?, (paths(&["one"]), true));
    assert_eq!(written(&daemon, "b", Some("c"))?, (paths(&["two"]), true));
    assert_eq!(written(&daemon, "a", None)?, (paths(&["one", "three", "two"]), true));
    // One in between is deleted; the next one has its account then.
    fathom(&daemon, &["snapshot", "delete", "web", "b"])?;
    snapshot("d")?;
    assert_eq!(written(&daemon, "a", Some("c"))?, (paths(&["one", "two"]), true));
    assert_eq!(written(&daemon, "c", Some("d"))?, (paths(&["three"]), true));
    let text = fathom(&daemon, &["snapshot", "diff", "web", "a", "c", "--files"])?;
    assert!(text.contains("/one") && text.contains("WRITTEN"), "{text}");
    guest.shutdown()?;
    // What another daemon counted is known; the time in between is not.
    assert!(daemon.stop()?.success());
    daemon.restart()?;
    assert_eq!(written(&daemon, "a", Some("c"))?, (paths(&["one", "two"]), true));
    assert_eq!(written(&daemon, "a", None)?, (paths(&["one", "three", "two"]), false));
    assert!(daemon.stop()?.success());
    Ok(())
}

/// Runs a client of NBD.
pub fn client(words: &[&str]) -> Result<String> {
    // Python's libnbd belongs to the distribution's interpreter.
    let path = format!("/usr/bin:{}", std::env::var("PATH").unwrap_or_default());
    let done = Command::new(words[0]).args(&words[1..]).env("PATH", path).output()?;
    assert!(done.status.success(), "{words:?}: {}", String::from_utf8_lossy(&done.stderr));
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}

#[test]
fn an_incremental_backup_over_nbd_has_what_the_guest_wrote() -> Result<()> {
    let tables = "[[nbd]]\naddress = \"unix:nbd.sock\"\n";
    let mut daemon = Daemon::serve_with(&[Served::volume("files", 256)], tables)?;
    let guest = Guest::builder().disk(Disk::vhost_user(daemon.path("files.sock"))).start()?;
    guest.check(
        "mkfs.ext4 -q /dev/vda; mkdir -p /files; mount /dev/vda /files
        for i in $(seq 30); do head -c 1048576 /dev/urandom > /files/$i; done; sync",
    )?;
    let path = |name: &str| daemon.path(name).display().to_string();
    let uri = |name: &str| format!("nbd+unix:///{name}?socket={}", path("nbd.sock"));
    let serve = |name: &str| -> Result<()> {
        fathom(&daemon, &["snapshot", "create", "files", "--name", name])?;
        let volume = format!("files@{name}");
        let add = ["disk", "add", name, "--store", "pool", "--volume", &volume];
        fathom(&daemon, &add).map(drop)
    };
    serve("a")?;
    client(&["nbdcopy", &uri("a"), &path("copy.img")])?;
    // What the guest changes, deletes and gives back, before and during each backup.
    for (round, (before, name)) in [("a", "b"), ("b", "c")].into_iter().enumerate() {
        guest.check(&format!(
            "cd /files; dd if=/dev/urandom of=7 bs=4096 count=20 seek=9 conv=notrunc status=none
            head -c 1048576 /dev/urandom > new{round}; rm 1{round} 2{round}; sync; fstrim /files; cd /"
        ))?;
        serve(name)?;
        let load = guest.spawn(
            "for i in $(seq 40); do dd if=/dev/urandom of=/files/load bs=4096 count=64 status=none; sync; done",
        )?;
        let words = format!("words = {:?}", [&uri(name), before, &path("copy.img")]);
        let copied = client(&["nbdsh", "-c", &words, "-c", INCREMENTAL])?;
        let copied: u64 = copied.trim().parse().unwrap();
        assert!(copied > 1 << 20 && copied < 16 << 20, "{copied} bytes were copied");
        assert_eq!(guest.finish_within(load, 120)?.status, 0);
        client(&["nbdcopy", &uri(name), &path(&format!("{name}.img"))])?;
        let (copy, whole) = (daemon.path("copy.img"), daemon.path(&format!("{name}.img")));
        assert!(std::fs::read(copy)? == std::fs::read(whole)?, "the copy differs from {name}");
    }
    guest.check("umount /files; e2fsck -f -n /dev/vda")?;
    guest.shutdown()?;
    assert!(daemon.stop()?.success());
    fathom(&daemon, &["store", "export", "pool", "files@c", "export.img"])?;
    let (copy, export) = (daemon.path("copy.img"), daemon.path("export.img"));
    assert!(std::fs::read(&copy)? == std::fs::read(export)?, "the copy differs from the export");
    check_exported(&copy)
}
