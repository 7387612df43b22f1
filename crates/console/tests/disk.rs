//! `fathom disk` on images, beside qemu-img.
mod common;

use std::{
    fs,
    os::unix::fs::{FileExt, MetadataExt},
    path::Path,
    process::Command,
};

use common::{has, run};
use serde_json::Value;

fn json(directory: &Path, arguments: &[&str]) -> Value {
    let (status, stdout, stderr) = run(directory, arguments);
    assert_eq!(status, 0, "{arguments:?}: {stderr}");
    serde_json::from_str(&stdout).unwrap_or_else(|error| panic!("{arguments:?}: {error}: {stdout}"))
}

#[test]
fn images_are_made_and_never_replaced_unasked() {
    let directory = tempfile::tempdir().expect("a directory");
    let directory = directory.path();
    let (status, stdout, _) = run(directory, &["disk", "create", "a.img", "10M"]);
    assert_eq!((status, stdout.trim()), (0, "a.img: 10 MiB (10485760 bytes)"));
    let metadata = fs::metadata(directory.join("a.img")).expect("the image is there");
    assert_eq!((metadata.len(), metadata.blocks()), (10 << 20, 0));

    let (status, _, stderr) = run(directory, &["disk", "create", "a.img", "20M"]);
    assert_eq!(status, 1);
    assert!(stderr.contains("a.img exists") && stderr.contains("--force"), "{stderr}");
    assert_eq!(fs::metadata(directory.join("a.img")).expect("still there").len(), 10 << 20);

    let created =
        json(directory, &["disk", "create", "a.img", "1M", "--force", "--preallocate", "--json"]);
    assert_eq!(created["size_bytes"], 1 << 20);
    let metadata = fs::metadata(directory.join("a.img")).expect("the image is there");
    assert_eq!((metadata.len(), metadata.blocks() * 512), (1 << 20, 1 << 20));

    for size in ["0", "1000", "ten", "99999999P"] {
        let (status, _, stderr) = run(directory, &["disk", "create", "b.img", size]);
        assert_eq!(status, 2, "{size}: {stderr}");
        assert!(!directory.join("b.img").exists());
    }
}

#[test]
fn an_image_in_use_is_left_alone() {
    let directory = tempfile::tempdir().expect("a directory");
    let directory = directory.path();
    run(directory, &["disk", "create", "a.img", "1M"]);
    let output = fs::File::options().append(true).open(directory.join("a.img")).expect("it opens");
    let mut child = Command::new("sleep").arg("60").stdout(output).spawn().expect("sleep is there");
    let results = [
        run(directory, &["disk", "create", "a.img", "2M", "--force"]),
        run(directory, &["disk", "resize", "a.img", "2M"]),
    ];
    let info = json(directory, &["disk", "info", "a.img", "--json"]);
    child.kill().expect("the child is killed");
    child.wait().expect("the child has ended");
    for (status, _, stderr) in results {
        assert_eq!(status, 1);
        assert!(stderr.contains("in use by sleep"), "{stderr}");
    }
    assert_eq!(info["holders"][0]["process_id"], child.id());
    assert_eq!(fs::metadata(directory.join("a.img")).expect("it is there").len(), 1 << 20);
}

#[test]
fn sizes_change_and_shrink_only_when_told() {
    let directory = tempfile::tempdir().expect("a directory");
    let directory = directory.path();
    let size = || fs::metadata(directory.join("a.img")).expect("it is there").len();
    run(directory, &["disk", "create", "a.img", "4M"]);
    assert_eq!(run(directory, &["disk", "resize", "a.img", "+4M"]).0, 0);
    assert_eq!(size(), 8 << 20);
    let (status, _, stderr) = run(directory, &["disk", "resize", "a.img", "1M"]);
    assert!(status == 1 && stderr.contains("--shrink"), "{stderr}");
    assert_eq!(size(), 8 << 20);
    let resized = json(directory, &["disk", "resize", "a.img", "-7M", "--shrink", "--json"]);
    assert_eq!((size(), &resized["online"]), (1 << 20, &Value::Bool(false)));
    assert_eq!(run(directory, &["disk", "resize", "a.img", "1001"]).0, 2);
}

#[test]
fn checks_find_what_is_wrong() {
    let directory = tempfile::tempdir().expect("a directory");
    let directory = directory.path();
    run(directory, &["disk", "create", "good.img", "4M"]);
    let (status, stdout, _) = run(directory, &["disk", "check", "good.img"]);
    assert!(status == 0 && stdout.contains("can be read"), "{stdout}");

    fs::write(directory.join("odd.img"), [0; 1000]).expect("it is written");
    let (status, stdout, _) = run(directory, &["disk", "check", "odd.img"]);
    assert!(status == 1 && stdout.contains("no multiple of 512"), "{stdout}");

    let mut sector = [0u8; 512];
    sector[450] = 0x83;
    sector[454..458].copy_from_slice(&2048u32.to_le_bytes());
    sector[458..462].copy_from_slice(&(1u32 << 20).to_le_bytes());
    sector[510..].copy_from_slice(&[0x55, 0xaa]);
    let file = fs::File::options().write(true).open(directory.join("good.img")).expect("it opens");
    file.write_all_at(&sector, 0).expect("it is written");
    let (status, stdout, stderr) = run(directory, &["disk", "check", "good.img"]);
    assert!(status == 1 && stdout.contains("partition 1 ends"), "{stdout}");
    assert!(stderr.contains("1 problem(s)"), "{stderr}");
    let (status, _, stderr) = run(directory, &["disk", "check", "nowhere.img"]);
    assert!(status == 1 && stderr.contains("fathom disk create"), "{stderr}");
}

#[test]
fn what_qemu_img_reads_is_imported() {
    if !has("qemu-img") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let directory = directory.path();
    let raw = fs::File::create(directory.join("raw.img")).expect("it is made");
    raw.set_len(16 << 20).expect("it grows");
    raw.write_all_at(&[7; 10_000], 5 << 20).expect("it is written");
    for format in ["qcow2", "vmdk", "vdi"] {
        let source = format!("a.{format}");
        let target = format!("{format}.img");
        let made = Command::new("qemu-img")
            .current_dir(directory)
            .args(["convert", "-f", "raw", "-O", format, "raw.img", &source])
            .status();
        assert!(made.expect("qemu-img starts").success());
        let imported = json(directory, &["disk", "import", &source, &target, "--json"]);
        assert_eq!(imported["source_format"], format);
        let expected = fs::read(directory.join("raw.img")).expect("it reads");
        assert!(fs::read(directory.join(&target)).expect("it reads") == expected, "{format}");
        assert!(imported["allocated_bytes"].as_u64() < Some(1 << 20), "{imported}");
        assert!(!directory.join(format!("{target}.part")).exists());
    }
    let info = json(directory, &["disk", "info", "a.qcow2", "--json"]);
    assert_eq!(info["content"], "qcow2 image");
    let (status, _, stderr) = run(directory, &["disk", "import", "a.qcow2", "vdi.img"]);
    assert!(status == 1 && stderr.contains("exists"), "{stderr}");

    fs::write(directory.join("bad.qcow2"), b"QFI\xfbrubbish").expect("it is written");
    let (status, _, stderr) = run(directory, &["disk", "import", "bad.qcow2", "bad.img"]);
    assert!(status == 1 && stderr.contains("qemu-img cannot read bad.qcow2"), "{stderr}");
    assert!(!directory.join("bad.img").exists() && !directory.join("bad.img.part").exists());
}

#[test]
fn a_missing_qemu_img_is_named_with_its_package() {
    let directory = tempfile::tempdir().expect("a directory");
    let output = common::console()
        .env("PATH", "/nowhere")
        .args(["disk", "import", "a.qcow2", "b.img"])
        .current_dir(directory.path())
        .output()
        .expect("it starts");
    let (status, _, stderr) = common::texts(&output);
    assert!(status == 1 && stderr.contains("apt install qemu-utils"), "{stderr}");
}

#[test]
fn partitions_and_file_systems_are_recognised() {
    if !has("/usr/sbin/mke2fs") && !has("/sbin/mke2fs") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let directory = directory.path();
    run(directory, &["disk", "create", "a.img", "16M"]);
    let made = Command::new("mke2fs")
        .env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin")
        .current_dir(directory)
        .args(["-q", "-t", "ext4", "a.img"])
        .status();
    assert!(made.expect("mke2fs starts").success());
    assert_eq!(json(directory, &["disk", "info", "a.img", "--json"])["content"], "ext4");
}
