//! Many hosts: daemons that answer a `fathom monitor`, over TLS.

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::nbd::Nbd;
use crate::process::{Daemon, PATIENCE, command};

/// Runs openssl in a folder.
fn openssl(folder: &Path, line: &str) {
    let output = Command::new("openssl")
        .current_dir(folder)
        .args(line.split_whitespace())
        .output()
        .expect("openssl makes certificates");
    assert!(output.status.success(), "{line}: {output:?}");
}

/// An authority, and certificates for some names.
fn certificates(folder: &Path, names: &[&str]) {
    let key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";
    openssl(folder, &format!("req -x509 {key} -keyout ca.key -out ca.pem -days 2 -subj /CN=ca"));
    for name in names {
        openssl(folder, &format!("req {key} -keyout {name}.key -out {name}.csr -subj /CN={name}"));
        let sign = format!("x509 -req -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial");
        openssl(folder, &format!("{sign} -out {name}.pem -days 2"));
    }
}

/// A `fathom monitor` that writes into files.
struct Monitor {
    child: Child,
    folder: TempDir,
}

impl Monitor {
    fn start(folder: TempDir, query: &str) -> Self {
        let child = command(folder.path())
            .args(["monitor", "--listen", "127.0.0.1:0", "--certificate", "centre.pem"])
            .args(["--key", "centre.key", "--authority", "ca.pem", "--patience", "20s"])
            .args(["--status", "50ms", "--json", query])
            .stdout(File::create(folder.path().join("rows")).unwrap())
            .stderr(File::create(folder.path().join("status")).unwrap())
            .spawn()
            .unwrap();
        Self { child, folder }
    }

    fn text(&self, name: &str) -> String {
        std::fs::read_to_string(self.folder.path().join(name)).unwrap()
    }

    fn address(&self) -> String {
        let begun = Instant::now();
        loop {
            let text = self.text("status");
            if let Some(line) = text.lines().find(|line| line.starts_with("hosts are served at ")) {
                if text.contains('\n') {
                    return line.rsplit(' ').next().unwrap().to_owned();
                }
            }
            assert!(begun.elapsed() < PATIENCE, "{text}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The rows that hold a text.
    fn rows(&self, part: &str) -> usize {
        self.text("rows").lines().filter(|line| line.contains(part)).count()
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A daemon with a disk of its own that has a centre.
fn daemon(name: &str, address: &str, files: &Path) -> Daemon {
    let files = files.display();
    Daemon::start(&format!(
        "[[disk]]\nname = \"of-{name}\"\nmemory = \"1M\"\n[[nbd]]\naddress = \"unix:nbd.sock\"\n\
         [monitor]\naddress = \"{address}\"\ncentre_name = \"centre\"\n\
         certificate = \"{files}/{name}.pem\"\nkey = \"{files}/{name}.key\"\n\
         authority = \"{files}/ca.pem\"\n"
    ))
}

fn write(daemon: &Daemon, disk: &str, count: u64) {
    let mut disk = Nbd::connect(&daemon.path("nbd.sock"), disk);
    for number in 0..count {
        disk.write(number % 256 * 4096, &[1; 4096]);
    }
}

#[test]
fn daemons_answer_a_centre() {
    let folder = tempfile::tempdir().unwrap();
    certificates(folder.path(), &["centre", "alpha", "beta"]);
    let files = folder.path().to_owned();
    let query = "select VDisk, Type, ReqId from IOstream where IOOp = 'w'";
    let monitor = Monitor::start(folder, query);
    let address = monitor.address();
    let (alpha, beta) = (daemon("alpha", &address, &files), daemon("beta", &address, &files));
    for (daemon, name) in [(&alpha, "alpha"), (&beta, "beta")] {
        daemon.until("it runs", || daemon.client().monitor().unwrap().state == "running");
        let status = daemon.client().monitor().unwrap();
        assert_eq!((status.name.as_str(), status.tls, status.problem), (name, true, None));
    }
    write(&alpha, "of-alpha", 100);
    write(&beta, "of-beta", 150);
    // A row for each request and for each response, and none twice.
    alpha.until("alpha's rows", || monitor.rows("\"of-alpha\"") == 200);
    alpha.until("beta's rows", || monitor.rows("\"of-beta\"") == 300);
    let metrics = alpha.client().metrics().unwrap();
    assert!(metrics.contains("fathom_monitor_running 1\n"), "{metrics}");
    assert!(metrics.contains("fathom_monitor_dropped_rows_total 0\n"), "{metrics}");
    // What happens last is told before the daemon ends.
    write(&beta, "of-beta", 50);
    beta.end();
    alpha.until("beta's last rows", || monitor.rows("\"of-beta\"") == 400);
    assert_eq!(monitor.rows(""), 600);
    let state = |text: &str| monitor.text("status").lines().last().unwrap().contains(text);
    alpha.until("beta has left", || {
        let status = monitor.text("status");
        status.contains("\"problem\":\"the host ends\"") && status.contains("\"name\":\"alpha\"")
    });
    assert!(state("\"late\":0") && !state("turned away"));
    // A centre that is gone harms nobody.
    drop(monitor);
    alpha.until("it is away", || alpha.client().monitor().unwrap().state == "away");
    write(&alpha, "of-alpha", 100);
    assert!(alpha.client().monitor().unwrap().problem.is_some());
    alpha.end();
}

#[test]
fn a_link_that_cannot_be_is_named() {
    let folder = tempfile::tempdir().unwrap();
    certificates(folder.path(), &["centre", "alpha"]);
    std::fs::copy(folder.path().join("centre.key"), folder.path().join("alpha.key")).unwrap();
    let text = "[monitor]\naddress = \"localhost:1\"\ncertificate = \"alpha.pem\"\n\
                key = \"alpha.key\"\nauthority = \"ca.pem\"\n";
    std::fs::write(folder.path().join("f.toml"), text).unwrap();
    let serve = ["serve", "--config", "f.toml", "--control", "control.sock"];
    let output = command(folder.path()).args(serve).output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && told.contains("alpha.key is no usable"), "{told}");
    let monitor = ["monitor", "--listen", "127.0.0.1:0", "select * from IOstream"];
    let output = command(folder.path()).args(monitor).output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && told.contains("--certificate"), "{told}");
}
