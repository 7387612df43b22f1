//! `fathom disk` on images, compared with qemu-img.

#![allow(unsafe_code)]

mod common;

use std::{
    fs,
    os::fd::AsRawFd,
    os::unix::fs::{FileExt, MetadataExt},
    os::unix::process::ExitStatusExt,
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use common::{console, has, run};
use fathom_image::{CacheMark, LogMark, LossRecord, MarkedCache, MarkedLog};
use fathom_persistence::{Identity, Stamp};
use serde_json::Value;

/// The time limit of each step of a test.
const PATIENCE: Duration = Duration::from_secs(30);

fn json(directory: &Path, arguments: &[&str]) -> Value {
    let (status, stdout, stderr) = run(directory, arguments);
    assert_eq!(status, 0, "{arguments:?}: {stderr}");
    serde_json::from_str(&stdout).unwrap_or_else(|error| panic!("{arguments:?}: {error}: {stdout}"))
}

#[test]
fn images_are_created_and_replaced_only_by_force() {
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
fn an_image_that_is_not_served_is_recovered_after_lost_writes() {
    let directory = tempfile::tempdir_in("/var/tmp").expect("a directory");
    let directory = directory.path();
    let path = directory.join("a.img");
    fs::write(&path, vec![7; 1 << 20]).expect("it is written");
    let (status, _, stderr) = run(directory, &["disk", "recover", "a.img"]);
    assert!(status == 1 && stderr.contains("no record of lost writes"), "{stderr}");
    let open = || fs::OpenOptions::new().read(true).write(true).open(&path).expect("it opens");
    let file = open();
    let record = LossRecord::new(&file, &path, &[]).expect("the places");
    record.write(&file, libc::EIO).expect("it is recorded");
    let mark = CacheMark::open(&path, directory).expect("it opens");
    let cache = MarkedCache {
        stamp: Stamp { identity: Identity([1; 16]), age: 7 },
        path: "/fast/cache".into(),
    };
    mark.write(&cache).expect("it is marked");
    // Whoever has it open for writing may lose more.
    let (status, _, stderr) = run(directory, &["disk", "recover", "a.img"]);
    assert!(status == 1 && record.read(&file).is_some(), "{stderr}");
    drop(file);
    let recovered = json(directory, &["disk", "recover", "a.img", "--json"]);
    assert_eq!(recovered["errno"], libc::EIO);
    assert_eq!(record.read(&open()), None);
    assert!(mark.read().expect("it is read").is_none(), "the cache may have lost content");
}

#[test]
fn an_image_with_changes_in_a_log_is_not_replaced_or_shrunk() {
    let directory = tempfile::tempdir().expect("a directory");
    let directory = directory.path();
    let path = directory.join("a.img");
    fs::write(&path, vec![7; 1 << 20]).expect("it is written");
    fs::write(directory.join("raw.img"), [1; 512]).expect("it is written");
    let log = MarkedLog {
        identity: Identity(*b"0123456789abcdef"),
        age: Some(7),
        offset: 0,
        path: "/fast/logs".into(),
    };
    let mark = LogMark::open(&path, directory).expect("it opens");
    let commands = [
        &["disk", "create", "a.img", "2M", "--force"][..],
        &["disk", "import", "raw.img", "a.img", "--force"],
        &["disk", "resize", "a.img", "512K", "--shrink"],
    ];
    // In an attribute if there are any, and in a file.
    for beside in [false, true] {
        let file = directory.join("a.img.fathom-log");
        if beside {
            fs::write(&file, "damaged").expect("it is written");
        } else {
            mark.write(&log).expect("it is marked");
        }
        for command in commands {
            let (status, _, stderr) = run(directory, command);
            let reason = if beside { "unknown whether a.img" } else { "in the log /fast/logs" };
            assert!(status == 1 && stderr.contains(reason), "{command:?}: {stderr}");
            assert!(stderr.contains("serve it once more"), "{stderr}");
            assert!(fs::read(&path).expect("it reads") == vec![7; 1 << 20], "{command:?}");
        }
        mark.clear().expect("it is cleared");
        assert!(!file.exists());
    }
    mark.write(&log).expect("it is marked");
    // A copy would lack what is in the log.
    let (status, _, stderr) = run(directory, &["disk", "import", "a.img", "copy.img"]);
    assert!(status == 1 && stderr.contains("has changes in a log"), "{stderr}");
    assert!(!directory.join("copy.img").exists());
    // Nothing is lost or reappears.
    assert_eq!(run(directory, &["disk", "resize", "a.img", "2M"]).0, 0);
    mark.clear().expect("it is cleared");
    assert_eq!(run(directory, &["disk", "resize", "a.img", "512K", "--shrink"]).0, 0);
    assert_eq!(run(directory, commands[0]).0, 0);
}

/// A cache with the option `exclusive` would return what the commands have removed.
#[test]
fn the_mark_of_a_cache_ends_with_the_content() {
    let directory = tempfile::tempdir().expect("a directory");
    let directory = directory.path();
    let path = directory.join("a.img");
    fs::write(directory.join("raw.img"), [1; 512]).expect("it is written");
    let cache = MarkedCache {
        stamp: Stamp { identity: Identity([1; 16]), age: 7 },
        path: "/fast/cache".into(),
    };
    for (command, stays) in [
        (&["disk", "create", "a.img", "1M", "--force"][..], false),
        (&["disk", "resize", "a.img", "2M"], true),
        (&["disk", "resize", "a.img", "1M", "--shrink"], false),
        (&["disk", "import", "raw.img", "a.img", "--force"], false),
    ] {
        if !path.exists() {
            fs::write(&path, vec![7; 1 << 20]).expect("it is written");
        }
        let mark = || CacheMark::open(&path, directory).expect("it opens");
        mark().write(&cache).expect("it is marked");
        let (status, _, stderr) = run(directory, command);
        assert_eq!(status, 0, "{command:?}: {stderr}");
        assert_eq!(mark().exists().expect("it is read"), stays, "{command:?}");
    }
}

#[test]
fn a_new_image_lacks_no_writes() {
    let directory = tempfile::tempdir().expect("a directory");
    let directory = directory.path();
    let path = directory.join("a.img");
    let file = fs::File::create(&path).expect("it is made");
    file.set_len(1 << 20).expect("it grows");
    // A writer would be a user of the image.
    drop(file);
    let file = fs::File::open(&path).expect("it opens");
    let record = LossRecord::new(&file, &path, &[]).expect("it opens");
    record.write(&file, 5).expect("it is recorded");
    assert_eq!(run(directory, &["disk", "resize", "a.img", "512K", "--shrink"]).0, 0);
    assert!(record.read(&file).is_some());
    assert_eq!(run(directory, &["disk", "create", "a.img", "1M", "--force"]).0, 0);
    assert!(record.read(&file).is_none());
}

#[test]
fn an_image_in_use_is_not_changed() {
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

/// Takes a lock as the daemon and QEMU do: `length` bytes from `start` on; a length of 0 is all.
fn take_lock(file: &fs::File, kind: i32, start: i64, length: i64) {
    let lock = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: start,
        l_len: length,
        l_pid: 0,
    };
    let begun = Instant::now();
    // SAFETY: the structure lives through the call.
    while unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) } != 0 {
        // A child of another test has copies of all descriptors until it executes its program,
        // including a descriptor that held the lock and is closed here.
        let error = std::io::Error::last_os_error();
        let passes = error.kind() == std::io::ErrorKind::WouldBlock && begun.elapsed() < PATIENCE;
        assert!(passes, "{error}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Hides the lock's holder: the descriptor is in flight between sockets and in no process's table,
/// as with another user's daemon, a container or an NFS client.
fn hidden(file: &fs::File) -> [std::os::unix::net::UnixStream; 2] {
    let (sender, receiver) = std::os::unix::net::UnixStream::pair().expect("a pair");
    let mut byte = [0u8];
    let mut part = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
    let mut control = [0u64; 8];
    // SAFETY: an all-zero header is a valid value; its pointers are valid during the call, and the
    // control buffer has room for one descriptor and is aligned for its header.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = libc::CMSG_SPACE(4) as _;
        let header = libc::CMSG_FIRSTHDR(&raw const message);
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        (*header).cmsg_len = libc::CMSG_LEN(4) as _;
        libc::CMSG_DATA(header).cast::<i32>().write_unaligned(file.as_raw_fd());
        assert_eq!(libc::sendmsg(sender.as_raw_fd(), &raw const message, 0), 1);
    }
    [sender, receiver]
}

#[test]
fn a_locked_image_is_not_changed_even_if_its_holder_is_hidden() {
    let directory = tempfile::tempdir().expect("a directory");
    let directory = directory.path();
    let path = directory.join("a.img");
    run(directory, &["disk", "create", "a.img", "1M"]);
    fs::write(&path, vec![7; 1 << 20]).expect("it is written");
    // A lock of the whole file as the daemon's; of one byte for reading as QEMU's; a writer without
    // a lock.
    let locks = [Some((libc::F_WRLCK, 0, 0)), Some((libc::F_RDLCK, 100, 1)), None];
    for lock in locks {
        let write = lock.is_none_or(|(kind, ..)| kind == libc::F_WRLCK);
        let file = fs::File::options().read(true).write(write).open(&path).expect("it opens");
        if let Some((kind, start, length)) = lock {
            take_lock(&file, kind, start, length);
        }
        let held = hidden(&file);
        drop(file);
        let raw = directory.join("raw.img");
        fs::write(&raw, [1; 512]).expect("it is written");
        let commands = [
            &["disk", "create", "a.img", "2M", "--force"][..],
            &["disk", "resize", "a.img", "512K", "--shrink"],
            &["disk", "import", "raw.img", "a.img", "--force"],
        ];
        // Each command waits some seconds for a holder that is about to end.
        let results = thread::scope(|scope| {
            let running = commands.map(|command| scope.spawn(|| run(directory, command)));
            running.map(|command| command.join().expect("it ends"))
        });
        for (status, _, stderr) in results {
            assert!(status == 1 && stderr.contains("a.img is in use by"), "{lock:?}: {stderr}");
        }
        assert!(fs::read(&path).expect("it reads") == vec![7; 1 << 20], "{lock:?}");
        if lock.is_some() {
            let (_, stdout, _) = run(directory, &["disk", "info", "a.img"]);
            assert!(stdout.contains("is not visible from here"), "{stdout}");
        }
        drop(held);
    }
    assert_eq!(run(directory, &["disk", "create", "a.img", "2M", "--force"]).0, 0);
}

#[test]
fn images_of_other_formats_are_resized_only_as_raw_ones() {
    let directory = tempfile::tempdir().expect("a directory");
    let directory = directory.path();
    let mut image = vec![0; 1 << 20];
    image[..8].copy_from_slice(b"QFI\xfb\0\0\0\x03");
    fs::write(directory.join("a.img"), image).expect("it is written");
    let (status, _, stderr) = run(directory, &["disk", "resize", "a.img", "2M"]);
    assert!(status == 1 && stderr.contains("qcow2") && stderr.contains("--format raw"), "{stderr}");
    assert_eq!(fs::metadata(directory.join("a.img")).expect("it is there").len(), 1 << 20);
    let (status, _, stderr) = run(directory, &["disk", "resize", "a.img", "2M", "--format=raw"]);
    assert_eq!((status, stderr.as_str()), (0, ""));
    let (status, _, stderr) = run(directory, &["disk", "resize", "a.img", "3M", "--format=vmdk"]);
    assert!(status == 2 && stderr.contains("only raw images"), "{stderr}");
}

#[test]
fn an_import_reads_no_file_that_the_image_names() {
    if !has("qemu-img") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let directory = directory.path();
    let qemu_img = |arguments: &[&str]| {
        let done = Command::new("qemu-img").current_dir(directory).args(arguments).output();
        let done = done.expect("qemu-img starts");
        assert!(done.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&done.stderr));
    };
    fs::write(directory.join("secret"), [b's'; 4096]).expect("it is written");
    qemu_img(&["create", "-q", "-f", "qcow2", "-b", "secret", "-F", "raw", "backed.qcow2"]);
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", "data_file=data.raw", "split.qcow2", "1M"]);
    fs::write(directory.join("data.raw"), vec![b's'; 1 << 20]).expect("it is written");
    // A guest's raw disk, and a VMDK descriptor that QEMU recognises.
    fs::copy(directory.join("backed.qcow2"), directory.join("guest.img")).expect("it is copied");
    let text = "version=1\nCID=fffffffe\nparentCID=ffffffff\ncreateType=\"monolithicFlat\"\nRW 8 FLAT \"secret\" 0\n";
    fs::write(directory.join("text.img"), text).expect("it is written");
    for source in ["backed.qcow2", "split.qcow2", "guest.img", "text.img"] {
        let (status, _, stderr) = run(directory, &["disk", "import", source, "new.img"]);
        assert!(status == 1 && stderr.contains("in another file"), "{source}: {stderr}");
        assert!(stderr.contains("--follow-backing"), "{source}: {stderr}");
        assert!(!directory.join("new.img").exists(), "{source}");
    }
    // A source is a path: what precedes a colon selects no protocol.
    let (status, _, stderr) = run(directory, &["disk", "import", "file:text.img", "new.img"]);
    assert!(status == 1 && stderr.contains("there is no image file:text.img"), "{stderr}");
    fs::copy(directory.join("text.img"), directory.join("a:b.img")).expect("it is copied");
    let (status, _, stderr) = run(directory, &["disk", "import", "a:b.img", "new.img"]);
    assert!(status == 1 && stderr.contains("in another file"), "{stderr}");
    // With the format given, the guest's disk is imported.
    let arguments = ["disk", "import", "--source-format", "raw", "guest.img", "raw.img"];
    assert_eq!(run(directory, &arguments).0, 0);
    let (raw, guest) = (directory.join("raw.img"), directory.join("guest.img"));
    assert!(fs::read(raw).expect("it reads").starts_with(&fs::read(guest).expect("it reads")));
    let arguments = ["disk", "import", "--follow-backing", "backed.qcow2", "whole.img"];
    let (status, _, stderr) = run(directory, &arguments);
    assert_eq!(status, 0, "{stderr}");
    assert_eq!(fs::read(directory.join("whole.img")).expect("it reads"), [b's'; 4096]);
    let metadata = fs::metadata(directory.join("whole.img")).expect("it is there");
    assert_eq!(metadata.mode() & 0o777, 0o600);
}

#[test]
fn an_import_ended_by_a_signal_leaves_nothing_behind() {
    if !has("qemu-img") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let directory = directory.path();
    fs::write(directory.join("new.img.other.part"), "of another user").expect("it is written");
    // A source that takes minutes to read.
    let source = "json:{\"driver\":\"raw\",\"file\":{\"driver\":\"null-co\",\"size\":1073741824,\
                  \"latency-ns\":200000000}}";
    let names = || {
        let entries = fs::read_dir(directory).expect("it reads");
        let name = |entry: std::io::Result<fs::DirEntry>| entry.expect("an entry").file_name();
        entries.map(name).collect::<Vec<_>>()
    };
    for signal in [libc::SIGTERM, libc::SIGINT] {
        let mut child = console()
            .current_dir(directory)
            .args(["disk", "import", source, "new.img"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("it starts");
        let begun = Instant::now();
        while names().len() < 2 || children(child.id()).is_empty() {
            assert!(begun.elapsed() < PATIENCE, "qemu-img does not begin");
            assert_eq!(child.try_wait().expect("a child"), None, "it ended early");
            std::thread::sleep(Duration::from_millis(2));
        }
        let readers = children(child.id());
        // SAFETY: the child has not been waited for.
        assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
        let status = child.wait().expect("it ends");
        assert_eq!(status.signal(), Some(signal));
        assert_eq!(names(), ["new.img.other.part"]);
        let begun = Instant::now();
        while readers.iter().any(|id| Path::new(&format!("/proc/{id}/exe")).exists()) {
            assert!(begun.elapsed() < PATIENCE, "qemu-img keeps running");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// The processes that a process has started.
fn children(id: u32) -> Vec<String> {
    let path = format!("/proc/{id}/task/{id}/children");
    let text = fs::read_to_string(path).unwrap_or_default();
    text.split_whitespace().map(str::to_owned).collect()
}

#[test]
fn an_import_touches_no_file_of_others() {
    if !has("qemu-img") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let directory = directory.path();
    fs::write(directory.join("raw.img"), [1; 4096]).expect("it is written");
    // Earlier versions of the import wrote to files of these names.
    fs::write(directory.join("a.img.part"), "of another user").expect("it is written");
    std::os::unix::fs::symlink("precious", directory.join("b.img.part")).expect("a link");
    fs::write(directory.join("precious"), "precious").expect("it is written");
    for target in ["a.img", "b.img"] {
        let (status, _, stderr) = run(directory, &["disk", "import", "raw.img", target]);
        assert_eq!(status, 0, "{stderr}");
        assert_eq!(fs::read(directory.join(target)).expect("it reads"), [1; 4096]);
    }
    assert_eq!(fs::read(directory.join("a.img.part")).expect("it reads"), b"of another user");
    assert_eq!(fs::read(directory.join("precious")).expect("it reads"), b"precious");
    // A fixed VHD image has only a footer, and qemu-img takes it for a raw one.
    let mut fixed = vec![0; 4096 + 512];
    fixed[4096..4104].copy_from_slice(b"conectix");
    fs::write(directory.join("fixed.vhd"), fixed).expect("it is written");
    let (status, _, stderr) = run(directory, &["disk", "import", "fixed.vhd", "c.img"]);
    assert!(status == 1 && stderr.contains("--source-format vpc"), "{stderr}");
    // Nothing else is left behind.
    assert_eq!(fs::read_dir(directory).expect("it reads").count(), 7);
}

#[test]
fn sizes_change_and_shrink_only_with_the_option() {
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
fn checks_find_problems() {
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
    assert!(stderr.contains("1 problem found"), "{stderr}");
    let (status, _, stderr) = run(directory, &["disk", "check", "nowhere.img"]);
    assert!(status == 1 && stderr.contains("fathom disk create"), "{stderr}");
}

/// Makes the image `raw.img`, of 16 MiB with some data.
fn make_raw(directory: &Path) {
    let raw = fs::File::create(directory.join("raw.img")).expect("it is made");
    raw.set_len(16 << 20).expect("it grows");
    raw.write_all_at(&[7; 10_000], 5 << 20).expect("it is written");
}

#[test]
fn formats_of_qemu_img_are_imported() {
    if !has("qemu-img") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let directory = directory.path();
    make_raw(directory);
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

/// The arguments that make `new` of the template `from`.
fn from<'a>(new: &'a str, from: &'a str, others: &[&'a str]) -> Vec<&'a str> {
    [&["disk", "create", new, "--from", from], others].concat()
}

fn qemu_img(directory: &Path, arguments: &[&str]) -> bool {
    let done = Command::new("qemu-img").current_dir(directory).args(arguments).status();
    done.expect("qemu-img starts").success()
}

#[test]
fn an_overlay_has_the_content_of_its_template() {
    if !has("qemu-img") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let directory = directory.path();
    make_raw(directory);
    let made = from("a.qcow2", "raw.img", &["--format=qcow2", "--json"]);
    let made = json(directory, &made);
    assert_eq!((&made["format"], &made["template_format"]), (&"qcow2".into(), &"raw".into()));
    assert_eq!(made["size_bytes"], 16 << 20);
    assert!(qemu_img(directory, &["check", "-q", "a.qcow2"]));
    let compare = ["compare", "-q", "-f", "qcow2", "-F", "raw", "a.qcow2", "raw.img"];
    assert!(qemu_img(directory, &compare));
    let metadata = fs::metadata(directory.join("a.qcow2")).expect("it is there");
    assert_eq!(metadata.mode() & 0o777, 0o600);

    // An overlay of an overlay, larger than its template, in place of another image.
    let whole = ["--from-format=qcow2", "--format=qcow2", "--force"];
    let larger = ["disk", "create", "b.qcow2", "20M", "--from", "a.qcow2"];
    let (status, stdout, stderr) = run(directory, &[&larger[..], &whole[..]].concat());
    assert_eq!(status, 0, "{stderr}");
    assert!(stdout.contains("20 MiB") && stdout.contains("has to stay as it is"), "{stdout}");
    let (status, _, stderr) = run(directory, &[&larger[..], &whole[..2]].concat());
    assert!(status == 1 && stderr.contains("exists"), "{stderr}");
    let (status, _, stderr) = run(directory, &[&larger[..], &whole[..]].concat());
    assert_eq!(status, 0, "{stderr}");
    let write = ["-f", "qcow2", "-c", "write -P 9 5M 4k", "b.qcow2"];
    let written = Command::new("qemu-io").current_dir(directory).args(write).output();
    assert!(written.expect("qemu-io starts").status.success());
    assert!(qemu_img(directory, &compare), "the template is as it was");
    let info = json(directory, &["disk", "info", "b.qcow2", "--json"]);
    assert_eq!(info["content"], "qcow2 image");

    // What is refused leaves nothing behind.
    let refused = |arguments: &[&str], text: &str| {
        let (status, _, stderr) = run(directory, arguments);
        assert!(status != 0 && stderr.contains(text), "{arguments:?}: {stderr}");
        assert!(!directory.join("new").exists());
    };
    refused(&from("new", "a.qcow2", &["--format=qcow2"]), "--from-format");
    refused(&from("new", "a.qcow2", &["--from-format=qcow2"]), "--format=qcow2");
    refused(&from("new", "raw.img", &["--format=vdi"]), "raw or qcow2");
    refused(&["disk", "create", "new", "1M", "--from", "raw.img"], "at least as large");
    refused(&from("new", "absent", &[]), "absent");
    refused(&from("new", ".", &[]), "no regular file");
    refused(&["disk", "create", "new", "1M", "--format=qcow2"], "--from");
    fs::create_dir(directory.join("inner")).expect("a folder");
    let out = ["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "../raw.img", "inner/c.qcow2"];
    assert!(qemu_img(directory, &out));
    let inner = ["--from-format=qcow2", "--format=qcow2"];
    refused(&from("new", "inner/c.qcow2", &inner), "raw.img");
    let inner = ["--from-format=qcow2", "--format=qcow2", "--backing-folder", "."];
    json(directory, &[from("d.qcow2", "inner/c.qcow2", &inner), vec!["--json"]].concat());
    let writer = fs::OpenOptions::new().write(true).open(directory.join("raw.img"));
    refused(&from("new", "raw.img", &["--format=qcow2"]), "in use");
    drop(writer);
    let mark = LogMark::open(&directory.join("raw.img"), directory).expect("a place");
    let log = MarkedLog { identity: Identity([1; 16]), age: None, offset: 0, path: "l".into() };
    mark.write(&log).expect("it is written");
    refused(&from("new", "raw.img", &["--format=qcow2"]), "changes in a log");
}

#[test]
fn a_raw_image_shares_the_blocks_of_its_template() {
    // A file system that cannot.
    let directory = tempfile::tempdir_in("/dev/shm").expect("a directory");
    fs::write(directory.path().join("t.img"), [7; 8192]).expect("it is written");
    let (status, _, stderr) = run(directory.path(), &from("new", "t.img", &[]));
    assert!(status == 1 && stderr.contains("--format=qcow2"), "{stderr}");
    assert_eq!(fs::read_dir(directory.path()).expect("it is read").count(), 1);

    let directory = tempfile::tempdir().expect("a directory");
    let (store, point) = (directory.path().join("store"), directory.path().join("point"));
    fs::create_dir(&point).expect("a folder");
    fs::File::create(&store).and_then(|file| file.set_len(320 << 20)).expect("it is made");
    let done = |program: &str, arguments: &[&str], paths: &[&Path]| {
        let mut command = Command::new(program);
        let output = command.args(arguments).args(paths).output();
        output.is_ok_and(|output| output.status.success())
    };
    if !done("mkfs.xfs", &["-q"], &[&store]) || !done("mount", &["-o", "loop"], &[&store, &point]) {
        println!("skipped: XFS cannot be made or mounted here");
        return;
    }
    let checked = std::panic::catch_unwind(|| {
        let random: Vec<u8> =
            (0..8 << 20).map(|at: u32| (at.wrapping_mul(at) >> 7) as u8).collect();
        let template = point.join("t.img");
        fs::write(&template, &random).expect("it is written");
        fs::File::open(&template).and_then(|file| file.sync_all()).expect("it is durable");
        let made = ["disk", "create", "new.img", "9M", "--from", "t.img", "--json"];
        assert_eq!(json(&point, &made)["size_bytes"], 9 << 20);
        let new = fs::OpenOptions::new().read(true).write(true).open(point.join("new.img"));
        let new = new.expect("it is there");
        let read = fs::read(point.join("new.img")).expect("it is read");
        assert!(read[..random.len()] == random && read[random.len()..].iter().all(|it| *it == 0));
        let map = Command::new("filefrag").arg("-v").arg(point.join("new.img")).output();
        if let Ok(map) = map {
            assert!(String::from_utf8_lossy(&map.stdout).contains("shared"), "{map:?}");
        }
        new.write_all_at(&[1; 4096], 0).expect("it is written");
        assert!(fs::read(&template).expect("it is read") == random);
    });
    assert!(done("umount", &[], &[&point]));
    checked.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

#[test]
fn a_missing_qemu_img_is_named_with_its_package() {
    let directory = tempfile::tempdir().expect("a directory");
    fs::write(directory.path().join("a.qcow2"), "QFI").expect("it is written");
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
