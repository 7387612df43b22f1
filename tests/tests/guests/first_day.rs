//! An operator's first day with a guest that works throughout: its disk moves in, is limited, gets
//! a cache, is snapshotted and watched; its device breaks and is mended; the daemon is killed and
//! upgraded; a cache in write-back comes and goes; and the disk moves out again.
//!
//! The operator types commands, as in `docs/operating.md`. After each stage the guest's data is
//! compared, and neither `fathom doctor` nor `fathom disk list` knows of a problem. At the end the
//! raw image has the bytes that the guest has seen.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use fathom_control::{InsightState, ProblemKind};
use fathom_tests::{Daemon, Disk, Guest, Records, Result, Ticket, check_ext4, patience, until};
use serde_json::Value;

use crate::store::{check_exported, client, fathom};

/// The size of the guest's disk, and of the file system with the pool.
const DISK: &str = "96M";
const DEVICE: &str = "320m";

/// A file system of its own for the pool: it can become full.
struct Device {
    folder: tempfile::TempDir,
}

impl Device {
    /// Mounts it; `None`, with a message, if this host cannot.
    fn mount() -> Result<Option<Self>> {
        let folder = tempfile::tempdir()?;
        let option = format!("size={DEVICE}");
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &option, "tmpfs"])
            .arg(folder.path())
            .status();
        if mounted.is_ok_and(|status| status.success()) {
            return Ok(Some(Self { folder }));
        }
        eprintln!("SKIPPED: this needs the right to mount a file system");
        Ok(None)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    /// Takes all of its space.
    fn fill(&self) {
        let mut file = std::fs::File::create(self.path("ballast")).expect("a file");
        let bytes = vec![1; 1 << 20];
        while std::io::Write::write_all(&mut file, &bytes).is_ok() {}
    }

    fn mend(&self) -> Result<()> {
        Ok(std::fs::remove_file(self.path("ballast"))?)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.folder.path()).status();
    }
}

/// The host, the guest, and what the guest writes.
struct Day {
    daemon: Daemon,
    guest: Guest,
    records: Records,
    writer: Ticket,
    load: Ticket,
}

impl Day {
    /// A daemon with an NBD listener, a qcow2 image as people have it, and a guest on it that
    /// writes records and verifies a file of fio's again and again.
    fn begin() -> Result<Self> {
        let daemon = Daemon::serve_with(&[], "[[nbd]]\naddress = \"unix:nbd.sock\"\n")?;
        let image = daemon.path("web.qcow2").display().to_string();
        client(&["qemu-img", "create", "-q", "-f", "qcow2", &image, DISK])?;
        let add = ["disk", "add", "web", "--image", "web.qcow2", "--format", "qcow2"];
        let socket = ["--socket", "web.sock", "--queues", "2", "--wait-when-full"];
        fathom(&daemon, &[&add[..], &socket].concat())?;
        let disk = Disk::vhost_user(daemon.path("web.sock")).queues(2);
        let guest = Guest::builder().disk(disk).start()?;
        guest.check("mkfs.ext4 -q /dev/vda; mkdir -p /web; mount /dev/vda /web")?;
        let load = guest.spawn(
            "until [ -e /tmp/stop ]; do
                fio --name=load --filename=/web/load --direct=1 --ioengine=libaio --iodepth=8 \
                    --rw=randwrite --bsrange=4k-64k --size=12M --rate=2M --verify=crc32c \
                    --verify_fatal=1 --do_verify=1 --randrepeat=0 > /tmp/load.out 2>&1 ||
                    { cat /tmp/load.out; exit 1; }
                echo verified >> /tmp/verified
            done",
        )?;
        let mut records = Records::new("/web/records");
        let writer = records.write(&guest)?;
        records.wait_for(&guest, 3)?;
        Ok(Self { daemon, guest, records, writer, load })
    }

    fn fathom(&self, words: &[&str]) -> Result<String> {
        println!("$ fathom {}", words.join(" "));
        fathom(&self.daemon, words)
    }

    fn json(&self, words: &[&str]) -> Result<Value> {
        let text = self.fathom(&[words, &["--json"]].concat())?;
        let line = text.lines().next().filter(|_| words[0] == "top").unwrap_or(&text);
        Ok(serde_json::from_str(line)?)
    }

    /// The guest goes on writing, what it has written is there, and the host knows of no problem.
    fn check(&mut self, stage: &str) -> Result<()> {
        self.records.wait_for(&self.guest, 2)?;
        self.records.stop(&self.guest, self.writer)?;
        let count = self.records.check(&self.guest)?;
        println!("{stage}: {count} records are there");
        self.writer = self.records.write(&self.guest)?;
        self.guest.check_console()?;
        self.daemon.check("web")?;
        let list = self.fathom(&["disk", "list"])?;
        assert!(list.contains("guest") && !list.contains("problem"), "{stage}: {list}");
        Ok(())
    }

    /// What `fathom doctor` says of the daemon and its disks, other than that all is well.
    fn complaints(&self) -> Result<Vec<String>> {
        // Its exit status is 1 if there is something wrong with the host.
        let doctor = self.daemon.command(&["doctor", "--json"])?;
        let report: Value = serde_json::from_slice(&doctor.stdout)?;
        let findings = report["findings"].as_array().cloned().unwrap_or_default();
        assert!(findings.iter().any(|it| it["subject"] == "disk web"), "{report}");
        let of_daemon = |it: &&Value| {
            let subject = it["subject"].as_str().unwrap_or_default();
            subject == "daemon" || subject.starts_with("disk ")
        };
        let bad = findings.iter().filter(of_daemon).filter(|it| it["state"] != "ok");
        Ok(bad.map(Value::to_string).collect())
    }

    fn kinds(&self) -> Result<Vec<ProblemKind>> {
        Ok(self.daemon.status("web")?.problems.iter().map(|problem| problem.kind).collect())
    }

    fn begin_move(&self, words: &[&str]) -> Result<Child> {
        println!("$ fathom disk move web {} &", words.join(" "));
        let child = Command::new(Daemon::binary()?)
            .current_dir(self.daemon.path(""))
            .env("FATHOM_CONTROL", self.daemon.control_socket())
            .args(["disk", "move", "web"])
            .args(words)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        Ok(child)
    }

    /// Kills the daemon while the guest works, and starts it again.
    fn kill(&mut self) -> Result<()> {
        self.daemon.kill9();
        self.records.note(&self.guest);
        self.daemon.restart()?;
        self.daemon.wait_for_guest("web").map(drop)
    }
}

#[test]
fn a_disk_moves_in_lives_through_a_day_and_moves_out() -> Result<()> {
    let Some(device) = Device::mount()? else { return Ok(()) };
    let mut day = Day::begin()?;
    day.check("served")?;
    let pool = device.text("pool");
    move_in(&mut day, &pool)?;
    let sums = snapshot(&mut day, &pool)?;
    watch(&day)?;
    break_and_mend(&mut day, &device)?;
    upgrade(&mut day)?;
    move_out(&mut day)?;
    write_back(&mut day)?;
    evening(day, &sums)?;
    fathom_check(&pool)
}

/// From the qcow2 image to a pool; a limit and a cache.
fn move_in(day: &mut Day, pool: &str) -> Result<()> {
    day.fathom(&["store", "create", pool, "256M"])?;
    let moved = day.fathom(&["disk", "move", "web", "--store", pool, "--wait"])?;
    assert!(moved.contains("moved to volume web of"), "{moved}");
    let list = day.fathom(&["disk", "list"])?;
    assert!(list.contains(&format!("volume web of {pool}")), "{list}");
    day.check("moved in")?;
    day.fathom(&["disk", "layer", "web", "limit,total_iops_sec=400"])?;
    day.fathom(&["cache", "attach", "web", "--size", "16M"])?;
    let layers = day.fathom(&["disk", "layer", "web"])?;
    assert!(layers.contains("limit") && layers.contains("total_iops_sec=400"), "{layers}");
    day.check("limited and cached")?;
    assert_eq!(day.complaints()?, Vec::<String>::new());
    let cache = day.json(&["cache", "list"])?;
    assert!(cache.to_string().contains("web"), "{cache}");
    Ok(())
}

/// A file is changed after a snapshot, and read back from it. Returns the sums of files that stay.
fn snapshot(day: &mut Day, pool: &str) -> Result<String> {
    day.guest.check("echo monday > /web/notes; head -c 3000000 /dev/urandom > /web/keep; sync")?;
    day.fathom(&["snapshot", "create", "web", "--name", "monday"])?;
    day.guest.check("echo tuesday > /web/notes; sync")?;
    let volume = ["--store", pool, "--volume", "web@monday"];
    day.fathom(&[&["disk", "add", "monday"], &volume[..]].concat())?;
    let uri = format!("nbd+unix:///monday?socket={}", day.daemon.path("nbd.sock").display());
    let copy = day.daemon.path("monday.img");
    client(&["nbdcopy", &uri, &copy.display().to_string()])?;
    day.fathom(&["disk", "remove", "monday"])?;
    check_exported(&copy)?;
    assert_eq!(read_from(&copy, "/notes")?, "monday\n");
    assert_eq!(day.guest.check("cat /web/notes")?, "tuesday\n");
    // What it costs to keep it.
    day.fathom(&["store", "reclaimable", pool])?;
    let list = day.fathom(&["store", "list"])?;
    assert!(list.contains("DELETING FREES") && list.contains("monday"), "{list}");
    day.check("snapshotted")?;
    day.guest.check("cd /web; sha256sum keep notes")
}

/// The content of a file in an image of ext4.
fn read_from(image: &Path, path: &str) -> Result<String> {
    let search = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
    let command = format!("cat {path}");
    let done =
        Command::new("debugfs").args(["-R", &command]).arg(image).env("PATH", search).output()?;
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}

/// The guest's files are known on the host.
fn watch(day: &Day) -> Result<()> {
    until("the guest to be understood", patience(60), || {
        Ok((day.daemon.status("web")?.insight.state == InsightState::Attached).then_some(()))
    })?;
    let load = until("the file of the load", patience(60), || {
        let files = day.json(&["files", "web"])?;
        let files = files["files"].as_array().cloned().unwrap_or_default();
        Ok(files.into_iter().find(|file| file["path"] == "/load"))
    });
    let load = load.map_err(|error| day.guest.explained(&error))?;
    assert!(load["bytes"].as_u64().is_some_and(|bytes| bytes > 0), "{load}");
    let top = day.json(&["top", "--by", "file", "--count", "1"])?;
    assert!(top["usage"].to_string().contains("/load"), "{top}");
    let slow = day.json(&["explain-io", "web"])?;
    let requests = slow["requests"].as_array().cloned().unwrap_or_default();
    assert!(requests.iter().any(|it| it["facts"]["path"] == "/load"), "{slow}");
    let slowest = day.json(&["explain-io", "web", "slowest"])?;
    assert!(slowest["text"].as_str().is_some_and(|text| !text.is_empty()), "{slowest}");
    Ok(())
}

/// The file system with the pool becomes full: the guest waits, the host knows, and when there is
/// space again, all goes on by itself.
fn break_and_mend(day: &mut Day, device: &Device) -> Result<()> {
    device.fill();
    until("the problem", patience(120), || {
        Ok((day.kinds()? == [ProblemKind::WaitingForRoom]).then_some(()))
    })?;
    let list = day.fathom(&["disk", "list"])?;
    assert!(list.contains("problem"), "{list}");
    let complaints = day.complaints()?;
    assert!(complaints.iter().any(|it| it.contains("space")), "{complaints:?}");
    // A disk whose requests wait does not change over: the command says what to do.
    let refused = day.daemon.command(&["cache", "detach", "web"])?;
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("free some space"), "{said}");
    device.mend()?;
    until("the problem to end", patience(60), || Ok(day.kinds()?.is_empty().then_some(())))?;
    day.check("broken and mended")?;
    assert_eq!(day.complaints()?, Vec::<String>::new());
    Ok(())
}

/// The daemon is killed once, and ends in order once, as with an upgrade.
fn upgrade(day: &mut Day) -> Result<()> {
    day.kill()?;
    day.check("killed")?;
    assert!(day.daemon.stop()?.success());
    std::thread::sleep(Duration::from_millis(300));
    day.daemon.restart()?;
    day.daemon.wait_for_guest("web")?;
    day.check("upgraded")?;
    let layers = day.fathom(&["disk", "layer", "web"])?;
    assert!(layers.contains("limit") && layers.contains("cache"), "{layers}");
    assert_eq!(day.complaints()?, Vec::<String>::new());
    Ok(())
}

/// The cache goes, and the disk moves to a raw image. The daemon is killed meanwhile, and the
/// command that waits does not give up.
fn move_out(day: &mut Day) -> Result<()> {
    day.fathom(&["cache", "detach", "web"])?;
    let mover = day.begin_move(&["--to", "web.img", "--wait", "--speed", "10M"])?;
    until("a part of the copy", patience(60), || {
        let moving = day.daemon.status("web")?.moving;
        Ok(moving.is_some_and(|it| it.copied_bytes > 4 << 20).then_some(()))
    })?;
    day.kill()?;
    let moved = mover.wait_with_output()?;
    let said = String::from_utf8_lossy(&[moved.stdout, moved.stderr].concat()).into_owned();
    assert!(moved.status.success() && said.contains("moved to"), "{said}\n{}", day.daemon.log());
    let list = day.fathom(&["disk", "list"])?;
    assert!(list.contains("web.img"), "{list}");
    day.check("moved out")?;
    assert_eq!(day.complaints()?, Vec::<String>::new());
    Ok(())
}

/// A cache in write-back comes, survives a kill, follows the disk to another image, and goes.
fn write_back(day: &mut Day) -> Result<()> {
    day.fathom(&["cache", "create", "cache", "--size", "48M", "--log", "16M", "--logs", "1"])?;
    let store = ["--store", "cache", "--mode", "write-back"];
    day.fathom(&[&["cache", "attach", "web"], &store[..]].concat())?;
    day.check("in write-back")?;
    day.kill()?;
    day.check("killed in write-back")?;
    let moved = day.fathom(&["disk", "move", "web", "--to", "other.img", "--wait"])?;
    assert!(moved.contains("moved to"), "{moved}");
    let layers = day.fathom(&["disk", "layer", "web"])?;
    assert!(layers.contains("write-back"), "{layers}");
    day.check("moved with its cache")?;
    day.fathom(&["cache", "detach", "web"])?;
    day.fathom(&["disk", "layer", "web", "limit", "--remove"])?;
    day.check("without layers")?;
    assert_eq!(day.complaints()?, Vec::<String>::new());
    Ok(())
}

/// The guest is shut down, and the image has what it has seen.
fn evening(day: Day, sums: &str) -> Result<()> {
    let Day { mut daemon, guest, mut records, writer, load } = day;
    guest.check("touch /tmp/stop")?;
    let output = guest.finish_within(load, 120)?;
    assert_eq!(output.status, 0, "{}", output.text);
    records.stop(&guest, writer)?;
    println!("at the end: {} records", records.check(&guest)?);
    let verified = guest.check("wc -l < /tmp/verified")?;
    println!("fio has verified its file {} times", verified.trim());
    assert_eq!(guest.check("cd /web; sha256sum keep notes")?, sums);
    guest.check("umount /web; echo 3 > /proc/sys/vm/drop_caches; e2fsck -f -n /dev/vda")?;
    let seen = guest.check_within("sha256sum < /dev/vda", 120)?;
    guest.check_console()?;
    guest.shutdown()?;
    until("the guest to leave", patience(30), || {
        Ok(daemon.command(&["disk", "remove", "web"])?.status.success().then_some(()))
    })?;
    let list = fathom(&daemon, &["disk", "list"])?;
    assert!(!list.contains("problem") && !list.contains("not-served"), "{list}");
    assert!(!daemon.log().contains("panicked"), "{}", daemon.log());
    assert!(daemon.stop()?.success());
    let image = daemon.path("other.img");
    let stored = Command::new("sha256sum").stdin(std::fs::File::open(&image)?).output()?;
    assert_eq!(String::from_utf8_lossy(&stored.stdout), seen);
    check_ext4(&image)
}

/// The pool that the disk has left is sound.
fn fathom_check(pool: &str) -> Result<()> {
    client(&[&Daemon::binary()?.display().to_string(), "store", "check", pool]).map(drop)
}
