//! The commands of `docs/operating.md`, run literally one after the other: disks move in, are
//! backed up and restored, and move out; certificates are made and used. Only the folders are
//! others. What needs systemd or a package manager (install, rights, upgrade) is not run here.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::nbd::{FLUSH, Nbd};
use crate::process::Daemon;

/// The texts of the blocks of commands in a section.
fn blocks(section: &str) -> Vec<String> {
    let page = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/operating.md");
    let page = std::fs::read_to_string(page).unwrap();
    let (_, rest) = page.split_once(&format!("\n## {section}\n")).expect("the section");
    let text = rest.split("\n## ").next().unwrap_or(rest);
    text.split("```sh\n").skip(1).map(|rest| rest.split("```").next().unwrap().into()).collect()
}

/// A host's folders below a folder of the test.
struct Host {
    root: PathBuf,
}

impl Host {
    /// Runs commands as a shell does, and stops at the first that fails.
    fn run(&self, commands: &str) -> String {
        let root = self.root.display();
        let mut script = commands.to_owned();
        for folder in ["/etc/fathom", "/var/lib/fathom", "/run/", "/srv/"] {
            script = script.replace(folder, &format!("{root}{folder}"));
        }
        // The service's user is not on this machine.
        script = script.replace("chown fathom:", "chown \"$(id -u):$(id -g)\"");
        let binary = Path::new(env!("CARGO_BIN_EXE_fathom"));
        let path = std::env::var("PATH").unwrap();
        let done = Command::new("bash")
            .args(["-euo", "pipefail", "-c", &script])
            .env("PATH", format!("{}:{path}", binary.parent().unwrap().display()))
            .env("FATHOM_CONTROL", self.root.join("run/fathom/control.sock"))
            .current_dir(&self.root)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let said = [&done.stdout[..], &done.stderr].concat();
        let said = String::from_utf8_lossy(&said).into_owned();
        assert!(done.status.success(), "{script}\n{said}");
        said
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }
}

/// A program that ends with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn available(program: &str) -> bool {
    let found = Command::new(program).arg("--version").output().is_ok();
    if !found {
        eprintln!("skipped: {program} is not installed");
    }
    found
}

/// Content that is not that of another seed: a few blocks in much emptiness.
fn fill(path: &Path, seed: u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    let file = std::fs::File::create(path).unwrap();
    file.set_len(16 << 20).unwrap();
    for _ in 0..20 {
        let mut block = [0; 4096];
        random.fill(&mut block);
        let place = random.u64(0..4096) * 4096;
        std::os::unix::fs::FileExt::write_all_at(&file, &block, place).unwrap();
    }
}

#[test]
fn disks_move_in_are_backed_up_and_move_out_as_the_page_says() {
    if !["qemu-img", "qemu-nbd", "nbdcopy"].into_iter().all(available) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().to_owned();
    for name in ["etc/fathom", "var/lib/fathom", "run/fathom", "srv/backup"] {
        std::fs::create_dir_all(root.join(name)).unwrap();
    }
    let nbd = format!("unix:{}", root.join("run/fathom/nbd.sock").display());
    let daemon = Daemon::start_in(folder, &format!("[[nbd]]\naddress = \"{nbd}\"\n"));
    let host = Host { root };
    std::os::unix::fs::symlink(daemon.path("control.sock"), host.path("run/fathom/control.sock"))
        .unwrap();
    let home = |name: &str| host.path("var/lib/fathom").join(name);
    for (seed, name) in ["web", "db", "mail"].into_iter().enumerate() {
        fill(&host.path(name), seed as u64);
    }
    std::fs::copy(host.path("mail"), home("mail.img")).unwrap();
    host.run("qemu-img convert -O qcow2 web /var/lib/fathom/web.qcow2");
    let server = Command::new("qemu-nbd")
        .args(["-f", "raw", "-r", "-t", "-k"])
        .args([host.path("run/qemu-nbd.sock"), host.path("db")])
        .spawn()
        .unwrap();
    let server = Running(server);
    daemon.until("qemu-nbd listens", || host.path("run/qemu-nbd.sock").exists());

    let [move_in] = &blocks("Move in")[..] else { panic!("one block") };
    let said = host.run(move_in);
    drop(server);
    assert!(said.contains("vhost-user-blk"), "{said}");
    let read = |disk: &str| Nbd::connect(&host.path("run/fathom/nbd.sock"), disk).read(0, 16 << 20);
    for name in ["web", "db", "mail"] {
        assert!(read(name) == std::fs::read(host.path(name)).unwrap(), "{name} has moved in");
    }

    // The disks are used.
    let mut expected = Vec::new();
    for name in ["web", "db", "mail"] {
        let mut client = Nbd::connect(&host.path("run/fathom/nbd.sock"), name);
        client.write(8 << 20, &[7; 8192]);
        assert!(client.send(FLUSH, 3, 0, 0, &[]));
        assert_eq!(client.reply(), Some((3, 0)));
        expected.push(read(name));
    }

    let backup = blocks("Back up and restore");
    let [volume, image] = &backup[..] else { panic!("two blocks") };
    host.run(volume);
    assert!(std::fs::read(home("mail-monday.img")).unwrap() == expected[2], "mail is backed up");
    host.run(image);
    let copy = std::fs::read(host.path("srv/backup/web.img")).unwrap();
    assert!(copy == expected[0], "the image is backed up with what its log has");

    let [move_out] = &blocks("Move out")[..] else { panic!("one block") };
    host.run(move_out);
    host.run("qemu-img convert -O raw /var/lib/fathom/web-out.qcow2 /var/lib/fathom/web-out.img");
    for (name, expected) in ["web-out.img", "db.img", "mail-out.img"].iter().zip(&expected) {
        assert!(std::fs::read(home(name)).unwrap() == *expected, "{name} has moved out");
    }
    daemon.end();
}

#[test]
fn certificates_are_made_and_used_as_the_page_says() {
    if !["openssl", "hostname"].into_iter().all(available) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let host = Host { root: folder.path().to_owned() };
    std::fs::create_dir_all(host.path("etc/fathom")).unwrap();
    let [commands] = &blocks("TLS")[..] else { panic!("one block") };
    host.run(commands);
    host.run(
        "cd /etc/fathom && openssl verify -verify_hostname \"$(hostname -f)\" -CAfile ca-cert.pem server-cert.pem",
    );
    let keys = ["ca-key.pem", "server-key.pem"];
    for key in keys {
        let file = std::fs::metadata(host.path("etc/fathom").join(key)).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::mode(&file.permissions());
        assert_eq!(mode & 0o077, 0, "{key} is readable for others");
    }
    // The daemon takes them, and refuses a client without TLS.
    let tls = "[nbd.tls]\ncertificate = \"etc/fathom/server-cert.pem\"\nkey = \"etc/fathom/server-key.pem\"\n";
    let configuration = format!(
        "[[disk]]\nname = \"m\"\nmemory = \"1M\"\n[[nbd]]\naddress = \"unix:nbd.sock\"\n{tls}"
    );
    let daemon = Daemon::start_in(folder, &configuration);
    if available("nbdinfo") {
        let address = format!("nbd+unix:///m?socket={}", daemon.path("nbd.sock").display());
        let plain = Command::new("nbdinfo").arg(address).output().unwrap();
        assert!(!plain.status.success(), "a client without TLS was served");
    }
    daemon.end();
}
