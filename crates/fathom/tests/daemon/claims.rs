//! A file or device has one writer, whichever path or node names it.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use fathom_control::{ClientError, DiskDefinition, LayerDefinition};
use fathom_sim::LoopDevice;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::json;

use crate::process::{Daemon, image};

const SIZE: u64 = 16 << 20;

/// Makes another node of the device.
fn node(device: &LoopDevice, path: PathBuf) -> PathBuf {
    let number = std::fs::metadata(&device.0).unwrap().rdev();
    mknodat(CWD, &path, FileType::BlockDevice, Mode::RUSR | Mode::WUSR, number).unwrap();
    path
}

fn disk(name: &str, image: &Path) -> DiskDefinition {
    let image = Some(image.to_owned());
    DiskDefinition { name: name.into(), image, ..DiskDefinition::default() }
}

fn with_log(disk: DiskDefinition, log: &Path, offset: &str) -> DiskDefinition {
    let options = json!({ "log": log, "offset": offset, "size": "1M", "age": "60s" });
    DiskDefinition { layers: vec![LayerDefinition::new("wal", options)], ..disk }
}

fn daemon() -> Daemon {
    Daemon::start("[[nbd]]\naddress = \"unix:nbd.sock\"\n")
}

/// Runs `fathom log create`.
fn prepare(device: &Path, options: &[&str]) -> Result<(), String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fathom"));
    let output = command.args(["log", "create"]).arg(device).args(options).output().unwrap();
    if output.status.success() {
        return Ok(());
    }
    Err(String::from_utf8_lossy(&output.stderr).into_owned())
}

#[track_caller]
fn refused<T>(result: Result<T, ClientError>, text: &str) {
    let error = result.err().expect("it is refused");
    // The remedy is only in the second form.
    let error = format!("{error} {error:?}");
    assert!(error.contains(text), "{error}");
}

#[test]
fn a_device_has_one_writer_by_any_of_its_nodes() {
    let (one, other) = (daemon(), daemon());
    image(one.path("").as_path(), "device", SIZE);
    let Some(device) = LoopDevice::attach(&one.path("device")) else { return };
    let node = node(&device, one.path("node"));
    prepare(&node, &["--offset", "1M"]).unwrap();
    let (first, second) = (one.client(), other.client());
    first.add_disk_for_now(&disk("a", &device.0)).unwrap();
    for path in [&device.0, &node] {
        refused(second.add_disk_for_now(&disk("b", path)), "in use by another process");
        let reader = DiskDefinition { read_only: true, ..disk("b", path) };
        refused(second.add_disk_for_now(&reader), "in use by another process");
    }
    refused(first.add_disk_for_now(&disk("c", &node)), "has this image");
    // Neither is it a log, nor the store of a cache.
    image(&other.path(""), "i.img", SIZE);
    let logged = with_log(disk("b", &other.path("i.img")), &node, "1M");
    refused(second.add_disk_for_now(&logged), "in use by another process");
    let output = Command::new(env!("CARGO_BIN_EXE_fathom"))
        .args(["cache", "create", "--force"])
        .arg(&node)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && text.contains("in use by another process"), "{text}");
    first.remove_disk("a", false).unwrap();
    // Readers share it, and exclude a writer.
    for (client, path) in [(&first, &device.0), (&second, &node)] {
        client.add_disk_for_now(&DiskDefinition { read_only: true, ..disk("a", path) }).unwrap();
    }
    first.remove_disk("a", false).unwrap();
    refused(first.add_disk_for_now(&disk("a", &device.0)), "in use by another process");
    second.remove_disk("a", false).unwrap();
    first.add_disk_for_now(&disk("a", &node)).unwrap();
}

#[test]
fn a_mounted_device_is_not_served_for_writing() {
    let daemon = daemon();
    image(&daemon.path(""), "device", SIZE);
    let Some(device) = LoopDevice::attach(&daemon.path("device")) else { return };
    let point = daemon.path("point");
    std::fs::create_dir(&point).unwrap();
    let run = |program: &str, arguments: &[&Path]| {
        Command::new(program).args(arguments).output().unwrap().status.success()
    };
    assert!(run("mkfs.ext4", &[&device.0]));
    if !run("mount", &[&device.0, &point]) {
        return;
    }
    let node = node(&device, daemon.path("node"));
    let client = daemon.client();
    let results = [&device.0, &node].map(|path| client.add_disk_for_now(&disk("a", path)));
    let reader = DiskDefinition { read_only: true, ..disk("a", &device.0) };
    let reader = client.add_disk_for_now(&reader);
    assert!(run("umount", &[&point]));
    for result in results {
        refused(result, &format!("mounted at {}", point.display()));
    }
    reader.unwrap();
    client.remove_disk("a", false).unwrap();
    client.add_disk_for_now(&disk("a", &device.0)).unwrap();
}

#[test]
fn logs_on_one_volume_do_not_overlap_by_any_of_its_nodes() {
    let daemon = daemon();
    image(&daemon.path(""), "device", SIZE);
    for name in ["i.img", "j.img"] {
        image(&daemon.path(""), name, SIZE);
    }
    let Some(device) = LoopDevice::attach(&daemon.path("device")) else { return };
    let node = node(&device, daemon.path("node"));
    for offset in ["0", "1M"] {
        prepare(&device.0, &["--offset", offset]).unwrap();
    }
    let client = daemon.client();
    let logged = |name: &str, image: &str, log: &Path, offset: &str| {
        with_log(disk(name, &daemon.path(image)), log, offset)
    };
    client.add_disk_for_now(&logged("i", "i.img", &device.0, "0")).unwrap();
    refused(
        client.add_disk_for_now(&logged("j", "j.img", &node, "0")),
        "overlaps another disk's log",
    );
    client.add_disk_for_now(&logged("j", "j.img", &node, "1M")).unwrap();
    // The same for a file with two names.
    client.remove_disk("i", false).unwrap();
    client.remove_disk("j", false).unwrap();
    image(&daemon.path(""), "volume", SIZE);
    std::fs::hard_link(daemon.path("volume"), daemon.path("link")).unwrap();
    client.add_disk_for_now(&logged("i", "i.img", &daemon.path("volume"), "0")).unwrap();
    let link = daemon.path("link");
    refused(
        client.add_disk_for_now(&logged("j", "j.img", &link, "0")),
        "overlaps another disk's log",
    );
    client.add_disk_for_now(&logged("j", "j.img", &link, "1M")).unwrap();
}

/// A file system may leave the first 64 KiB empty, as btrfs does.
#[test]
fn other_data_is_not_taken_for_an_empty_log() {
    let daemon = daemon();
    image(&daemon.path(""), "i.img", SIZE);
    image(&daemon.path(""), "volume", SIZE);
    let log = OpenOptions::new().read(true).write(true).open(daemon.path("volume")).unwrap();
    log.write_all_at(b"_BHRfS_M", 0x10040).unwrap();
    let client = daemon.client();
    let logged = with_log(disk("i", &daemon.path("i.img")), &daemon.path("volume"), "0");
    refused(client.add_disk_for_now(&logged), "other data than a log");
    let content = |file: &File| {
        let mut bytes = vec![0; 1 << 20];
        file.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    };
    assert_eq!(content(&log).iter().filter(|byte| **byte != 0).count(), 8);
    log.write_all_at(&[0; 8], 0x10040).unwrap();
    client.add_disk_for_now(&logged).unwrap();
    client.remove_disk("i", false).unwrap();
    // What is left of a log that was given up is no other data.
    daemon.signal(libc::SIGTERM);
    let (_, folder) = daemon.wait();
    log.write_all_at(&[0; 8192], 0).unwrap();
    log.write_all_at(b"WREC", 8192).unwrap();
    let daemon = Daemon::start_in(folder, "[[nbd]]\naddress = \"unix:nbd.sock\"\n");
    let logged = with_log(disk("i", &daemon.path("i.img")), &daemon.path("volume"), "0");
    daemon.client().add_disk_for_now(&logged).unwrap();
}

#[test]
fn a_log_on_a_device_is_made_by_a_command() {
    let daemon = daemon();
    image(&daemon.path(""), "device", SIZE);
    image(&daemon.path(""), "i.img", SIZE);
    let Some(device) = LoopDevice::attach(&daemon.path("device")) else { return };
    let client = daemon.client();
    let logged = |offset: &str| with_log(disk("i", &daemon.path("i.img")), &device.0, offset);
    refused(client.add_disk_for_now(&logged("1M")), "`fathom log create");
    // Signatures at the beginning, amid zeroes, and at the end.
    let at = |offset: u64, bytes: &[u8]| {
        let file = OpenOptions::new().write(true).open(&device.0).unwrap();
        file.write_all_at(bytes, offset).unwrap();
        file.sync_all().unwrap();
    };
    for (offset, magic, name) in [
        (0, &b"XFSB"[..], "XFS"),
        (0x10040, b"_BHRfS_M", "Btrfs"),
        (SIZE - 0x10000, b"\xfc\x4e\x2b\xa9", "Linux RAID member"),
    ] {
        at(offset, magic);
        let error = prepare(&device.0, &["--offset", "1M"]).unwrap_err();
        assert!(error.contains(name), "{error}");
        at(offset, &vec![0; magic.len()]);
    }
    at((1 << 20) + 500_000, b"x");
    let error = prepare(&device.0, &["--offset", "1M"]).unwrap_err();
    assert!(error.contains("other data"), "{error}");
    prepare(&device.0, &["--offset", "1M", "--force"]).unwrap();
    prepare(&device.0, &["--offset", "1M"]).unwrap();
    // One cannot begin so close before another.
    let error = prepare(&device.0, &["--offset", "512K", "--force"]).unwrap_err();
    assert!(error.contains("another log"), "{error}");
    client.add_disk_for_now(&logged("1M")).unwrap();
    let error = prepare(&device.0, &["--offset", "4M"]).unwrap_err();
    assert!(error.contains("in use by another process"), "{error}");
    client.remove_disk("i", false).unwrap();
    // A log stays, whatever is asked.
    let error = prepare(&device.0, &["--offset", "1M", "--force"]).unwrap_err();
    assert!(error.contains("the log of the disk \"i\""), "{error}");
    client.add_disk_for_now(&logged("1M")).unwrap();
}

/// QEMU's programs read an image that is served, if they say so, and write none.
#[test]
fn qemu_shares_an_image_as_its_options_say() {
    let daemon = daemon();
    image(&daemon.path(""), "i.img", SIZE);
    daemon.client().add_disk_for_now(&disk("i", &daemon.path("i.img"))).unwrap();
    let qemu_io = |options: &[&str], command: &str| {
        let output = Command::new("qemu-io")
            .args(["-f", "raw"])
            .args(options)
            .args(["-c", command])
            .arg(daemon.path("i.img"))
            .output();
        output.map(|output| output.status.success()).ok()
    };
    let Some(shared) = qemu_io(&["-U", "-r"], "read 0 4096") else { return };
    assert!(shared);
    assert_eq!(qemu_io(&[], "write 0 4096"), Some(false));
    daemon.client().remove_disk("i", false).unwrap();
    let reader = DiskDefinition { read_only: true, ..disk("i", &daemon.path("i.img")) };
    daemon.client().add_disk_for_now(&reader).unwrap();
    assert_eq!(qemu_io(&["-r"], "read 0 4096"), Some(true));
    assert_eq!(qemu_io(&[], "write 0 4096"), Some(false));
}
