//! Images that are not raw, served by a real `qemu-storage-daemon`, and examined by `qemu-img`.

use std::fs::File;
use std::net::TcpListener;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use fathom_control::{
    Bytes, DiskChange, DiskDefinition, ImageFormat, LayerDefinition, MoveRequest,
};
use rustix::process::{Pid, Signal, kill_process};

use crate::exports::{Content, SIZE, connect, flush, problems, remove, wait_until_served};
use crate::process::{Daemon, PATIENCE, command};

/// Runs a program of QEMU; `None` if this host does not have it.
fn qemu(folder: &Path, words: &[&str]) -> Option<Output> {
    match Command::new(words[0]).args(&words[1..]).current_dir(folder).output() {
        Ok(output) => Some(output),
        Err(error) => {
            eprintln!("SKIPPED: {} cannot be started: {error}", words[0]);
            None
        }
    }
}

pub fn create(folder: &Path, name: &str, format: &str, options: &[&str]) -> Option<()> {
    let words = [&["qemu-img", "create", "-q", "-f", format], options, &[name]].concat();
    // A backing file that is opened gives the size.
    let has_size = options.contains(&"-b") && !options.contains(&"-u");
    let words: Vec<&str> = words.into_iter().chain(Some("8M").filter(|_| !has_size)).collect();
    let output = qemu(folder, &words)?;
    assert!(output.status.success(), "{output:?}");
    Some(())
}

/// An image that has no errors but clusters that nothing uses, which a kill may leave.
pub fn check(folder: &Path, name: &str) {
    let output = qemu(folder, &["qemu-img", "check", name]).unwrap();
    assert!(matches!(output.status.code(), Some(0 | 3)), "{output:?}");
}

/// Compares an image with what was written.
pub fn compare(folder: &Path, name: &str, content: &Content) {
    let expected = File::create(folder.join("expected")).unwrap();
    for (block, byte) in (0..).zip(&content.0) {
        expected.write_all_at(&[*byte; 4096], block * 4096).unwrap();
    }
    let output = qemu(folder, &["qemu-img", "compare", "-F", "raw", name, "expected"]).unwrap();
    assert!(output.status.success(), "{output:?}");
}

fn configuration(image: &str, format: &str, more: &str) -> String {
    format!(
        "[[disk]]\nname = \"a\"\nimage = \"{image}\"\nformat = \"{format}\"\n{more}\n\
         [[disk]]\nname = \"b\"\nmemory = \"8M\"\n[[nbd]]\naddress = \"unix:nbd.sock\"\n"
    )
}

/// The storage daemons that a daemon has started.
pub fn storage_daemons(daemon: &Daemon) -> Vec<i32> {
    let mut found = Vec::new();
    for task in std::fs::read_dir(format!("/proc/{}/task", daemon.id())).unwrap().flatten() {
        let children = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
        found.extend(children.split_whitespace().filter_map(|it| it.parse::<i32>().ok()));
    }
    found.retain(|id| {
        let name = std::fs::read_to_string(format!("/proc/{id}/comm")).unwrap_or_default();
        name.starts_with("qemu-storage")
    });
    found
}

pub fn kill_storage_daemon(daemon: &Daemon) {
    daemon.until("the storage daemon", || !storage_daemons(daemon).is_empty());
    for id in storage_daemons(daemon) {
        kill_process(Pid::from_raw(id).unwrap(), Signal::KILL).unwrap();
    }
}

/// A chain of ten images over a raw one in the folder, the last one `9.qcow2`.
fn chain(folder: &Path) -> Option<()> {
    let base: Vec<u8> = (0..SIZE / 4096).flat_map(|block| [block as u8; 4096]).collect();
    std::fs::write(folder.join("base.img"), base).unwrap();
    create(folder, "0.qcow2", "qcow2", &["-b", "base.img", "-F", "raw"])?;
    for number in 1..10 {
        let below = format!("{}.qcow2", number - 1);
        create(folder, &format!("{number}.qcow2"), "qcow2", &["-b", &below, "-F", "qcow2"])?;
    }
    Some(())
}

fn base_content() -> Content {
    Content((0..SIZE / 4096).map(|block| block as u8).collect())
}

#[test]
fn a_storage_daemon_that_is_killed_amid_writes_loses_none() {
    let folder = tempfile::tempdir().unwrap();
    if chain(folder.path()).is_none() {
        return;
    }
    let below = std::fs::read(folder.path().join("8.qcow2")).unwrap();
    let layers = "layers = [{ kind = \"cache\", size = \"1M\" }]";
    let daemon = Daemon::start_in(folder, &configuration("9.qcow2", "qcow2", layers));
    wait_until_served(&daemon);
    let status = daemon.client().disk("a").unwrap();
    assert_eq!((status.capacity_bytes, &*status.backend.name), (SIZE, "qcow2"));
    let files: Vec<&str> = status.backend.chain.iter().map(|it| &*it.format).collect();
    assert_eq!(files, [&["qcow2"; 10][..], &["raw"]].concat());
    assert!(status.backend.chain[10].path.ends_with("base.img"));
    // No other program of QEMU can write to it.
    let place = daemon.path("");
    let words = ["qemu-io", "-f", "qcow2", "-c", "write 0 4k", "9.qcow2"];
    let refused = qemu(&place, &words).unwrap();
    assert!(String::from_utf8_lossy(&refused.stderr).contains("lock"), "{refused:?}");
    let (mut nbd, mut content) = (connect(&daemon, "a"), base_content());
    let mut chance = fastrand::Rng::with_seed(43);
    for _ in 0..8 {
        let count = content.send(&mut nbd, &mut chance);
        kill_storage_daemon(&daemon);
        Content::finish(&mut nbd, count);
    }
    daemon.until("the end of the problem", || problems(&daemon).is_empty());
    content.verify(|offset, bytes| {
        bytes.copy_from_slice(&nbd.read(offset, bytes.len() as u32));
    });
    assert_eq!(flush(&mut nbd), 0);
    drop(nbd);
    let folder = daemon.end();
    check(folder.path(), "9.qcow2");
    compare(folder.path(), "9.qcow2", &content);
    assert!(
        below == std::fs::read(folder.path().join("8.qcow2")).unwrap(),
        "a lower image changed"
    );
    assert_eq!(
        std::fs::read_dir(folder.path().join("qemu")).unwrap().count(),
        0,
        "no socket stays"
    );
}

/// What QEMU has acknowledged and not flushed is in its memory. It writes that when the daemon is
/// killed.
#[test]
fn a_daemon_that_is_killed_amid_writes_to_an_image_loses_none() {
    let mut folder = tempfile::tempdir().unwrap();
    if create(folder.path(), "a.qcow2", "qcow2", &[]).is_none() {
        return;
    }
    let (mut content, mut chance) = (Content::new(), fastrand::Rng::with_seed(44));
    for _ in 0..4 {
        let daemon = Daemon::start_in(folder, &configuration("a.qcow2", "qcow2", ""));
        wait_until_served(&daemon);
        let mut nbd = connect(&daemon, "a");
        content.verify(|offset, bytes| {
            bytes.copy_from_slice(&nbd.read(offset, bytes.len() as u32));
        });
        let count = content.send(&mut nbd, &mut chance);
        Content::finish(&mut nbd, count);
        let children = storage_daemons(&daemon);
        assert_eq!(children.len(), 1);
        daemon.signal(libc::SIGKILL);
        folder = daemon.wait().1;
        let begun = Instant::now();
        while children.iter().any(|id| Path::new(&format!("/proc/{id}")).exists()) {
            assert!(begun.elapsed() < PATIENCE, "the storage daemon does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
        check(folder.path(), "a.qcow2");
        compare(folder.path(), "a.qcow2", &content);
    }
}

#[test]
fn other_formats_are_served_and_sizes_change() {
    let folder = tempfile::tempdir().unwrap();
    for format in ["vmdk", "vdi", "vhdx", "qcow2"] {
        if create(folder.path(), &format!("a.{format}"), format, &[]).is_none() {
            return;
        }
    }
    let daemon = Daemon::start_in(
        folder,
        "[[disk]]\nname = \"b\"\nmemory = \"8M\"\n[[nbd]]\naddress = \"unix:nbd.sock\"\n",
    );
    let mut contents = Vec::new();
    for format in ["vmdk", "vdi", "vhdx", "qcow2"] {
        let definition = DiskDefinition {
            name: "a".into(),
            image: Some(daemon.path(&format!("a.{format}"))),
            format: Some(format.parse::<ImageFormat>().unwrap()),
            ..DiskDefinition::default()
        };
        daemon.client().add_disk(&definition).unwrap();
        let (mut nbd, mut content) = (connect(&daemon, "a"), Content::new());
        let mut chance = fastrand::Rng::with_seed(45);
        let count = content.send(&mut nbd, &mut chance);
        Content::finish(&mut nbd, count);
        assert_eq!(flush(&mut nbd), 0);
        if format == "qcow2" {
            let capacity = Some(Bytes(2 * SIZE));
            let change = DiskChange { capacity, ..DiskChange::default() };
            let status = daemon.client().change_disk("a", &change).unwrap();
            assert_eq!(status.capacity_bytes, 2 * SIZE);
            assert_eq!(nbd.fill_block(3, 7), Some(0), "the connection goes on");
            content.0[3] = 7;
            let mut wider = connect(&daemon, "a");
            assert_eq!(wider.fill_block(2 * SIZE / 4096 - 1, 9), Some(0));
            content.0.resize((2 * SIZE / 4096) as usize, 0);
            *content.0.last_mut().unwrap() = 9;
            drop(wider);
        }
        drop(nbd);
        remove(&daemon, "a");
        assert!(storage_daemons(&daemon).is_empty(), "it ends with its disk");
        contents.push((format, content));
    }
    let folder = daemon.end();
    for (format, content) in contents {
        check(folder.path(), &format!("a.{format}"));
        compare(folder.path(), &format!("a.{format}"), &content);
    }
}

#[test]
fn a_disk_moves_away_from_an_image_that_is_not_raw() {
    let folder = tempfile::tempdir().unwrap();
    if chain(folder.path()).is_none() {
        return;
    }
    let daemon = Daemon::start_in(folder, &configuration("9.qcow2", "qcow2", ""));
    wait_until_served(&daemon);
    let (mut nbd, mut content) = (connect(&daemon, "a"), base_content());
    let mut chance = fastrand::Rng::with_seed(46);
    let count = content.send(&mut nbd, &mut chance);
    Content::finish(&mut nbd, count);
    let request = MoveRequest { image: Some(daemon.path("raw.img")), ..MoveRequest::default() };
    daemon.client().move_disk("a", &request).unwrap();
    daemon.until("the end of the move", || {
        let count = content.send(&mut nbd, &mut chance);
        Content::finish(&mut nbd, count);
        daemon.client().disk("a").unwrap().backend.name == "file"
    });
    let status = daemon.client().disk("a").unwrap();
    assert!(status.backend.chain.is_empty() && problems(&daemon).is_empty(), "{status:?}");
    daemon.until("the end of the storage daemon", || storage_daemons(&daemon).is_empty());
    assert_eq!(flush(&mut nbd), 0);
    content.verify_file(&daemon.path("raw.img"));
    check(&daemon.path(""), "9.qcow2");
    drop(nbd);
    daemon.end();
}

/// What is different in a definition.
type Change<'c> = &'c dyn Fn(&mut DiskDefinition);

#[test]
fn what_an_image_may_not_name_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let other = tempfile::tempdir().unwrap();
    let place = folder.path();
    if create(place, "a.qcow2", "qcow2", &[]).is_none() {
        return;
    }
    let outside = other.path().join("outside.qcow2");
    create(other.path(), "outside.qcow2", "qcow2", &[]);
    create(place, "far.qcow2", "qcow2", &["-b", outside.to_str().unwrap(), "-F", "qcow2"]);
    create(place, "circle.qcow2", "qcow2", &["-u", "-b", "back.qcow2", "-F", "qcow2"]);
    create(place, "back.qcow2", "qcow2", &["-u", "-b", "circle.qcow2", "-F", "qcow2"]);
    create(place, "web.qcow2", "qcow2", &["-u", "-b", "nbd://127.0.0.1/x", "-F", "raw"]);
    let daemon = Daemon::start_in(folder, &configuration("a.qcow2", "qcow2", ""));
    wait_until_served(&daemon);
    let add = |image: &str, more: &dyn Fn(&mut DiskDefinition)| {
        let (name, image) = ("c".to_owned(), Some(daemon.path(image)));
        let format = Some(ImageFormat::Qcow2);
        let mut disk = DiskDefinition { name, image, format, ..DiskDefinition::default() };
        more(&mut disk);
        let added = daemon.client().add_disk(&disk).map(drop);
        added.map_err(|error| error.to_string())
    };
    let wal = |disk: &mut DiskDefinition| {
        disk.format = Some(ImageFormat::Vdi);
        disk.layers = vec![LayerDefinition::from_flag("wal,log=/tmp/x").unwrap()];
    };
    let more: [(&str, Change<'_>, &str); 7] = [
        ("far.qcow2", &|_| {}, "outside the folders"),
        ("circle.qcow2", &|_| {}, "leads back"),
        ("web.qcow2", &|_| {}, "is no path"),
        ("far.qcow2", &|disk| disk.format = None, "looks like a qcow2 image"),
        ("far.qcow2", &|disk| disk.format = Some(ImageFormat::Vdi), "no vdi image"),
        ("far.qcow2", &wal, "no writable image that can be marked"),
        ("a.qcow2", &|_| {}, "a writer cannot share it"),
    ];
    for (image, change, part) in more {
        let error = add(image, change).unwrap_err();
        assert!(error.contains(part), "{image}, {part}: {error}");
    }
    let folders = vec![other.path().to_owned()];
    add("far.qcow2", &|disk| disk.backing_folders.clone_from(&folders)).unwrap();
    // An image that another program has is refused after some seconds.
    remove(&daemon, "c");
    let words = ["-f", "qcow2", "-c", "sleep 20000", "far.qcow2"];
    let mut user =
        Command::new("qemu-io").args(words).current_dir(daemon.path("")).spawn().unwrap();
    let mut error = String::new();
    daemon.until("the refusal", || {
        match add("far.qcow2", &|disk| disk.backing_folders.clone_from(&folders)) {
            // It has not begun yet.
            Ok(()) => drop(daemon.client().remove_disk("c", false).unwrap()),
            Err(refused) => error = refused,
        }
        !error.is_empty()
    });
    assert!(error.contains("another program uses the image"), "{error}");
    let _ = user.kill();
    let _ = user.wait();
}

#[test]
fn a_host_without_the_program_says_what_to_install() {
    let folder = tempfile::tempdir().unwrap();
    if create(folder.path(), "a.qcow2", "qcow2", &[]).is_none() {
        return;
    }
    std::fs::write(folder.path().join("f.toml"), configuration("a.qcow2", "qcow2", "")).unwrap();
    let output = command(folder.path())
        .args(["serve", "--config", "f.toml", "--control", "control.sock", "--strict"])
        .env("PATH", "/nonexistent")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("qemu-utils") && !output.status.success(), "{text}");
}

/// Runs a program as the storage daemon is run.
fn confined(folder: &Path, files: &[&Path], words: &[&str]) -> Output {
    let mut command = command(folder);
    command.arg("confine").arg("--parent").arg(std::process::id().to_string());
    for file in files {
        command.arg("--read").arg(file);
    }
    command.arg(words[0]).arg("--").args(&words[1..]).output().unwrap()
}

#[test]
fn a_storage_daemon_has_its_image_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path();
    std::fs::write(place.join("own"), "own content").unwrap();
    std::fs::write(place.join("other"), "other content").unwrap();
    let own = place.join("own");
    let read = |path: PathBuf| confined(place, &[&own], &["/bin/cat", path.to_str().unwrap()]);
    let found = read(own.clone());
    assert_eq!(found.stdout, b"own content", "{found:?}");
    let found = read(place.join("other"));
    assert!(found.stdout.is_empty() && !found.status.success(), "{found:?}");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let script = format!("exec 3<>/dev/tcp/127.0.0.1/{port}");
    let found = confined(place, &[], &["/bin/bash", "-c", &script]);
    assert!(!found.status.success(), "{found:?}");
    // The script connects where it may.
    assert!(Command::new("/bin/bash").args(["-c", &script]).status().unwrap().success());

    if create(place, "a.qcow2", "qcow2", &[]).is_none() {
        return;
    }
    let daemon = Daemon::start_in(folder, &configuration("a.qcow2", "qcow2", ""));
    wait_until_served(&daemon);
    let id = storage_daemons(&daemon)[0];
    let status = std::fs::read_to_string(format!("/proc/{id}/status")).unwrap();
    for line in ["NoNewPrivs:\t1", "Seccomp:\t2"] {
        assert!(status.contains(line), "{line}: {status}");
    }
    for descriptor in std::fs::read_dir(format!("/proc/{id}/fd")).unwrap().flatten() {
        let target = std::fs::read_link(descriptor.path()).unwrap().display().to_string();
        let is_own = ["socket:", "pipe:", "anon_inode:"].iter().any(|it| target.starts_with(it));
        let is_its = target.ends_with("/a.qcow2") || target.contains(".running/");
        assert!(is_own || is_its, "{target}");
    }
    let environment = std::fs::read(format!("/proc/{id}/environ")).unwrap();
    assert!(environment.is_empty(), "{environment:?}");
}
