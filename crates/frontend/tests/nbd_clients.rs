//! Common NBD clients against a server with a disk in memory and one in a file.

mod nbd_common;

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fathom_backend::{FileBackend, FileOptions};
use fathom_block::{Disk, DiskOptions};
use nbd_common::*;

fn file_disk(name: &str, path: &Path, capacity: u64) -> Arc<Disk> {
    fs::File::create(path).unwrap().set_len(capacity).unwrap();
    let file = FileOptions { path: path.to_owned(), ..FileOptions::default() };
    let backend = FileBackend::open(&file).unwrap();
    let options = DiskOptions { name: name.to_owned(), ..DiskOptions::default() };
    Disk::new(options, Vec::new(), Arc::new(backend)).unwrap()
}

/// An image with data, holes and zeroes.
fn image(server: &Server, name: &str, capacity: u64) -> String {
    let path = server.path(name);
    let file = fs::File::create(&path).unwrap();
    file.set_len(capacity).unwrap();
    let mut random = Random(7);
    for index in 0..40 {
        let length = 1 + random.below(200_000);
        let offset = random.below(capacity - length);
        let data = pattern(index, length as usize);
        std::os::unix::fs::FileExt::write_all_at(&file, &data, offset).unwrap();
    }
    path
}

#[test]
fn nbdinfo_shows_the_properties_of_exports() {
    if !have(&["nbdinfo"]) {
        return;
    }
    let read_only = disk_of("locked", 3 * MIB, true, Vec::new());
    let disk = disk("disk", 64 * MIB);
    let server = Server::new(&[&disk, &read_only]);
    assert_eq!(run("nbdinfo", &["--size", &server.uri("disk")]).trim(), "67108864");
    let text = run("nbdinfo", &[&server.uri("disk")]);
    for line in [
        "is_read_only: false",
        "can_flush: true",
        "can_fua: true",
        "can_multi_conn: true",
        "can_trim: true",
        "can_zero: true",
        "can_fast_zero: true",
        "can_df: true",
        "block_size_minimum: 1",
        "base:allocation",
    ] {
        assert!(text.contains(line), "{line} in {text}");
    }
    // libnbd before 1.18 does not support extended headers.
    let packets = ["using structured packets", "using extended packets"];
    assert!(packets.iter().any(|line| text.contains(line)), "{text}");
    assert!(run("nbdinfo", &[&server.uri("locked")]).contains("is_read_only: true"));
    let list = run("nbdinfo", &["--list", &server.uri("")]);
    assert!(list.contains("export=\"disk\"") && list.contains("export=\"locked\""), "{list}");
    assert!(list.contains("description: a disk"), "{list}");
    server.client("disk", Mode::Simple).write(MIB, &pattern(1, 1 << 20));
    let map = run("nbdinfo", &["--map", &server.uri("disk")]);
    let rows: Vec<Vec<&str>> = map.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[0], ["0", "1048576", "3", "hole,zero"], "{map}");
    assert_eq!(rows[1], ["1048576", "1048576", "0", "data"], "{map}");
    assert_eq!(rows[2][3], "hole,zero", "{map}");
    assert!(!attempt("nbdinfo", &[&server.uri("nothing")]).status.success());
}

#[test]
fn nbdcopy_copies_both_ways() {
    if !have(&["nbdcopy", "cmp"]) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let memory = disk("memory", 64 * MIB);
    let file = file_disk("file", &directory.path().join("disk.img"), 64 * MIB);
    let server = Server::new(&[&memory, &file]);
    let source = image(&server, "source.img", 64 * MIB);
    let target = server.path("target.img");
    // Over several connections, and from one of the server's disks to the other.
    run("nbdcopy", &["--flush", &source, &server.uri("memory")]);
    run("nbdcopy", &[&server.uri("memory"), &server.uri("file")]);
    run("nbdcopy", &[&server.uri("file"), &target]);
    run("cmp", &[&source, &target]);
    run("cmp", &[&source, &directory.path().join("disk.img").display().to_string()]);
    assert_eq!(server.listener.counters().protocol_errors, 0);
}

#[test]
fn every_command_works_with_nbdsh() {
    if !have(&["nbdsh"]) {
        return;
    }
    let server = Server::new(&[&disk("disk", 16 * MIB)]);
    for structured in ["True", "False"] {
        let script = format!(
            r"
h.set_request_structured_replies({structured})
h.add_meta_context('base:allocation')
h.connect_uri('{}')
assert h.get_structured_replies_negotiated() == {structured}
assert h.get_size() == 16 << 20
data = bytes(range(256)) * 41
h.pwrite(data, 12345, nbd.CMD_FLAG_FUA)
assert h.pread(len(data) + 2, 12344) == b'\0' + data + b'\0'
h.zero(1000, 13000, nbd.CMD_FLAG_NO_HOLE)
h.zero(11, 14000, nbd.CMD_FLAG_FAST_ZERO | nbd.CMD_FLAG_FUA)
assert h.pread(1011, 13000) == bytes(1011)
h.flush()
h.cache(1 << 20, 0)
h.trim(16 << 20, 0)
assert h.pread(16 << 20, 0) == bytes(16 << 20)
h.pwrite(b'x' * 65536, 1 << 20)
if {structured}:
    seen = []
    h.block_status(16 << 20, 0, lambda name, offset, entries, error: seen.append((name, entries)))
    assert seen == [('base:allocation', [1 << 20, 3, 65536, 0, (15 << 20) - 65536, 3])], seen
    seen.clear()
    h.block_status(16 << 20, 0, lambda *a: seen.append(a[2]), nbd.CMD_FLAG_REQ_ONE)
    assert seen == [[1 << 20, 3]], seen
h.set_strict_mode(0)
for bad in (lambda: h.pread(2, (16 << 20) - 1), lambda: h.pwrite(b'xy', (16 << 20) - 1),
            lambda: h.trim(2, 1 << 60)):
    try:
        bad()
    except nbd.Error:
        pass
    else:
        assert False
assert h.pread(1, 0) == b'\0'
h.shutdown()
",
            server.uri("disk")
        );
        run("nbdsh", &["-c", &script]);
    }
    assert_eq!(server.listener.counters().protocol_errors, 0);
}

#[test]
fn qemu_converts_compares_and_maps() {
    if !have(&["qemu-img", "qemu-io"]) {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let memory = disk("memory", 64 * MIB);
    let file = file_disk("file", &directory.path().join("disk.img"), 64 * MIB);
    let server = Server::new(&[&memory, &file]);
    let source = image(&server, "source.img", 64 * MIB);
    for export in ["memory", "file"] {
        let uri = server.uri(export);
        let info = run("qemu-img", &["info", "--output=json", &uri]);
        assert!(info.contains("\"virtual-size\": 67108864"), "{info}");
        run("qemu-img", &["convert", "-n", "-W", "-f", "raw", "-O", "raw", &source, &uri]);
        run("qemu-img", &["compare", "-f", "raw", "-F", "raw", &source, &uri]);
        let copy = server.path("copy.qcow2");
        run("qemu-img", &["convert", "-f", "raw", "-O", "qcow2", &uri, &copy]);
        run("qemu-img", &["compare", "-f", "raw", "-F", "qcow2", &source, &copy]);
        let map = run("qemu-img", &["map", "--output=json", "-f", "raw", &uri]);
        assert!(map.contains("\"zero\": true") && map.contains("\"data\": true"), "{map}");
        run(
            "qemu-io",
            &[
                "-f",
                "raw",
                "-c",
                "write -P 0xa5 512 3584",
                "-c",
                "read -P 0xa5 512 3584",
                "-c",
                "write -z -u 0 1M",
                "-c",
                "read -P 0 0 1M",
                "-c",
                "write -f -P 7 12345 777",
                "-c",
                "read -P 7 12345 777",
                "-c",
                "discard 2M 4M",
                "-c",
                "read -P 0 2M 4M",
                "-c",
                "flush",
                "-c",
                "aio_write -P 9 8M 2M",
                "-c",
                "aio_flush",
                "-c",
                "read -P 9 8M 2M",
                &uri,
            ],
        );
    }
    assert_eq!(server.listener.counters().protocol_errors, 0);
}

#[test]
fn fio_verifies_its_writes() {
    if !have(&["fio"]) || !run("fio", &["--enghelp"]).contains("nbd") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let memory = disk("memory", 32 * MIB);
    let file = file_disk("file", &directory.path().join("disk.img"), 32 * MIB);
    let server = Server::new(&[&memory, &file]);
    for (export, sizes) in [("memory", "4k"), ("file", "512-256k")] {
        let text = run(
            "fio",
            &[
                "--name=verify",
                "--ioengine=nbd",
                &format!("--uri={}", server.uri(export)),
                "--rw=randrw",
                &format!("--bsrange={}", if sizes == "4k" { "4k-4k" } else { sizes }),
                "--iodepth=32",
                "--size=32m",
                "--verify=crc32c",
                "--randseed=5",
                "--verify_fatal=1",
                "--verify_state_save=0",
                "--bs_unaligned=1",
            ],
        );
        assert!(text.contains("err= 0"), "{text}");
    }
}

#[test]
fn nbdfuse_mounts_an_export_as_a_file() {
    if !have(&["nbdfuse", "fusermount3"]) || !Path::new("/dev/fuse").exists() {
        return;
    }
    let server = Server::new(&[&disk("disk", 16 * MIB)]);
    let point = server.directory.path().join("point");
    fs::create_dir(&point).unwrap();
    let mut fuse = Command::new("nbdfuse")
        .arg(&point)
        .arg(server.uri("disk"))
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let path = point.join("nbd");
    let end = Instant::now() + Duration::from_secs(10);
    while !path.exists() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(20));
    }
    if path.exists() {
        let file = fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let data = pattern(4, 3_000_000);
        std::os::unix::fs::FileExt::write_all_at(&file, &data, 4321).unwrap();
        file.sync_all().unwrap();
        let mut back = vec![0; data.len()];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut back, 4321).unwrap();
        assert!(back == data);
        drop(file);
        assert!(server.client("disk", Mode::Simple).read(4321, 3_000_000) == data);
        run("fusermount3", &["-u", &point.display().to_string()]);
        assert!(fuse.wait().unwrap().success());
    } else {
        eprintln!("SKIPPED: nbdfuse cannot mount here");
        let _ = fuse.kill();
        let _ = fuse.wait();
    }
}
