//! Daemons whose events a `fathom monitor` queries, over TLS.

use std::fs::File;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use fathom_control::DiskChange;
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

/// A `fathom monitor` with its output in files.
struct Monitor {
    child: Child,
    folder: TempDir,
}

impl Monitor {
    fn start(folder: TempDir, query: &str) -> Self {
        let files = folder.path().to_owned();
        Self::start_as("centre", folder, &files, &["--patience", "20s", query])
    }

    /// A monitor with the certificate `name` from the folder `files`.
    fn start_as(name: &str, folder: TempDir, files: &Path, arguments: &[&str]) -> Self {
        let file = |name: &str| files.join(name);
        let child = command(folder.path())
            .args(["monitor", "--listen", "127.0.0.1:0", "--status", "50ms", "--json"])
            .arg("--certificate")
            .arg(file(&format!("{name}.pem")))
            .arg("--key")
            .arg(file(&format!("{name}.key")))
            .arg("--authority")
            .arg(file("ca.pem"))
            .args(arguments)
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
            let whole = text.rfind('\n').map_or("", |end| &text[..end]);
            let line = whole.lines().find_map(|line| line.strip_prefix("listening for hosts at "));
            if let Some(address) = line {
                return address.to_owned();
            }
            assert!(begun.elapsed() < PATIENCE, "{text}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits for its end. Returns its exit status and its messages.
    fn end(&mut self) -> (ExitStatus, String) {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return (status, self.text("status"));
            }
            assert!(begun.elapsed() < PATIENCE, "{}", self.text("status"));
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The number of rows that contain a text.
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

/// A daemon with a disk and a link to a centre.
fn daemon(name: &str, address: &str, files: &Path) -> Daemon {
    daemon_of(name, address, "centre", files)
}

/// The same; the certificate of the centre has another name.
fn daemon_of(name: &str, address: &str, centre: &str, files: &Path) -> Daemon {
    daemon_with(name, address, centre, files, "")
}

/// The same, with further keys of `[monitor]`.
fn daemon_with(name: &str, address: &str, centre: &str, files: &Path, keys: &str) -> Daemon {
    let files = files.display();
    Daemon::start(&format!(
        "[[disk]]\nname = \"of-{name}\"\nmemory = \"1M\"\n[[nbd]]\naddress = \"unix:nbd.sock\"\n\
         [monitor]\naddress = \"{address}\"\ncentre_name = \"{centre}\"\n\
         certificate = \"{files}/{name}.pem\"\nkey = \"{files}/{name}.key\"\n\
         authority = \"{files}/ca.pem\"\n{keys}"
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
        daemon.until("the link runs", || daemon.client().monitor().unwrap().state == "running");
        let status = daemon.client().monitor().unwrap();
        assert_eq!((status.name.as_str(), status.tls, status.problem), (name, true, None));
    }
    write(&alpha, "of-alpha", 100);
    write(&beta, "of-beta", 150);
    // One row for each request and one for each response.
    alpha.until("alpha's rows", || monitor.rows("\"of-alpha\"") == 200);
    alpha.until("beta's rows", || monitor.rows("\"of-beta\"") == 300);
    let metrics = alpha.client().metrics().unwrap();
    assert!(metrics.contains("fathom_monitor_running 1\n"), "{metrics}");
    assert!(metrics.contains("fathom_monitor_dropped_rows_total 0\n"), "{metrics}");
    // The last events arrive before the daemon ends.
    write(&beta, "of-beta", 50);
    beta.end();
    alpha.until("beta's last rows", || monitor.rows("\"of-beta\"") == 400);
    assert_eq!(monitor.rows(""), 600);
    let state = |text: &str| monitor.text("status").lines().last().unwrap().contains(text);
    alpha.until("beta has left", || {
        let status = monitor.text("status");
        status.contains("\"problem\":\"the host ends\"") && status.contains("\"name\":\"alpha\"")
    });
    assert!(state("\"late\":0") && state("\"refused\":0"));
    // The loss of a centre does not disturb the host.
    drop(monitor);
    alpha.until("the centre to be away", || alpha.client().monitor().unwrap().state == "away");
    write(&alpha, "of-alpha", 100);
    assert!(alpha.client().monitor().unwrap().problem.is_some());
    alpha.end();
}

#[test]
fn a_centre_for_a_time_waits_for_the_events_of_its_time() {
    let folder = tempfile::tempdir().unwrap();
    certificates(folder.path(), &["centre", "alpha"]);
    let files = folder.path().to_owned();
    let query = "select Sector from IOstream where IOOp = 'w' and Type = 'R'";
    let arguments = ["--patience", "20s", "--for", "6s", query];
    let mut monitor = Monitor::start_as("centre", folder, &files, &arguments);
    let alpha = daemon("alpha", &monitor.address(), &files);
    let begun = Instant::now();
    alpha.until("the link runs", || alpha.client().monitor().unwrap().state == "running");
    let mut disk = Nbd::connect(&alpha.path("nbd.sock"), "of-alpha");
    alpha.until("the first row", || {
        disk.write(0, &[1; 512]);
        monitor.rows("\"Sector\":0}") > 0
    });
    // The daemon sends its last event after the end of the time.
    disk.write(8 * 512, &[1; 512]);
    alpha.signal(libc::SIGSTOP);
    std::thread::sleep(Duration::from_millis(6500).saturating_sub(begun.elapsed()));
    assert_eq!((monitor.child.try_wait().unwrap(), monitor.rows("\"Sector\":8}")), (None, 0));
    alpha.signal(libc::SIGCONT);
    let (status, messages) = monitor.end();
    assert!(status.success() && !messages.contains("have not sent"), "{messages}");
    assert_eq!(monitor.rows("\"Sector\":8}"), 1);
    alpha.end();
}

/// Changes of each host are joined with its requests at the centre.
#[test]
fn a_centre_joins_changes_with_requests() {
    let folder = tempfile::tempdir().unwrap();
    certificates(folder.path(), &["centre", "alpha", "beta"]);
    let files = folder.path().to_owned();
    let query = "Istream(select c.VDisk, c.Change, c.Layer, count(*) as n \
                 from Changes [now] as c, IOstream [range 1 hour] as i \
                 where c.VDisk = i.VDisk and i.Type = 'Q' and i.IOOp = 'w' \
                 group by c.ChangeTS, c.VDisk, c.Change, c.Layer)";
    let monitor = Monitor::start(folder, query);
    let address = monitor.address();
    let (alpha, beta) = (daemon("alpha", &address, &files), daemon("beta", &address, &files));
    for (daemon, disk, count) in [(&alpha, "of-alpha", 30), (&beta, "of-beta", 20)] {
        daemon.until("the link runs", || daemon.client().monitor().unwrap().state == "running");
        write(daemon, disk, count);
        let change = DiskChange { classify: Some(false), ..DiskChange::default() };
        daemon.client().change_disk(disk, &change).unwrap();
    }
    let row = |disk: &str, count: u64| {
        let of = format!(
            "\"VDisk\":\"{disk}\",\"Change\":\"layer-removed\",\"Layer\":\"classify\",\"n\":{count}"
        );
        monitor.rows(&of)
    };
    alpha.until("alpha's change", || row("of-alpha", 30) == 1);
    beta.until("beta's change", || row("of-beta", 20) == 1);
    beta.end();
    alpha.end();
}

/// Two processes are one centre. Each has a host; the first prints the results of both. When the
/// second is killed, the first ends.
#[test]
fn processes_are_a_centre_together() {
    let files = tempfile::tempdir().unwrap();
    let files = files.path();
    certificates(files, &["localhost", "alpha", "beta"]);
    let listeners = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    let ports = listeners.map(|listener| listener.local_addr().unwrap().port());
    let cluster = ports.map(|port| format!("localhost:{port}")).join(",");
    let query = "select IOOp, count(*) as n, count(distinct VDisk) as disks
        from IOstream [range 1 hour slide 100 milliseconds] where Type = 'Q' group by IOOp";
    let start = |name: &str, process: &str| {
        let arguments = ["--cluster", &cluster, "--process", process, query];
        Monitor::start_as(name, tempfile::tempdir().unwrap(), files, &arguments)
    };
    let mut first = start("localhost", "0");
    // A process whose certificate has another name is not accepted.
    let refused = start("alpha", "1");
    let begun = Instant::now();
    while !first.text("status").contains("certificate of process 1 is not for localhost") {
        assert!(begun.elapsed() < PATIENCE, "{}", first.text("status"));
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(refused);
    let second = start("localhost", "1");
    let alpha = daemon_of("alpha", &first.address(), "localhost", files);
    let beta = daemon_of("beta", &second.address(), "localhost", files);
    for daemon in [&alpha, &beta] {
        daemon.until("the link runs", || daemon.client().monitor().unwrap().state == "running");
    }
    write(&alpha, "of-alpha", 100);
    write(&beta, "of-beta", 50);
    alpha.until("the results of both", || first.rows("\"n\":150,\"disks\":2") > 0);
    assert_eq!(second.rows(""), 0, "the first process prints the results");
    drop(second);
    let (status, messages) = first.end();
    assert!(status.code() == Some(1) && messages.contains("is lost: "), "{status}: {messages}");
    assert!(!messages.contains("panicked"), "{messages}");
}

#[test]
fn an_invalid_link_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    certificates(folder.path(), &["centre", "alpha"]);
    std::fs::copy(folder.path().join("centre.key"), folder.path().join("alpha.key")).unwrap();
    let text = "[monitor]\naddress = \"localhost:1\"\ncertificate = \"alpha.pem\"\n\
                key = \"alpha.key\"\nauthority = \"ca.pem\"\n";
    std::fs::write(folder.path().join("f.toml"), text).unwrap();
    let serve = ["serve", "--strict", "--config", "f.toml", "--control", "control.sock"];
    let output = command(folder.path()).args(serve).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.code() == Some(1) && stderr.contains("alpha.key is not a usable"),
        "{stderr}"
    );
    let monitor = ["monitor", "--listen", "127.0.0.1:0", "select * from IOstream"];
    let output = command(folder.path()).args(monitor).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && stderr.contains("--certificate"), "{stderr}");
}

#[test]
fn a_daemon_refuses_a_fragment_over_its_limit_and_a_centre_ends_over_its_limit() {
    let folder = tempfile::tempdir().unwrap();
    certificates(folder.path(), &["centre", "alpha", "beta"]);
    let files = folder.path().to_owned();
    // Each host keeps the numbers that it has sent, and the centre keeps all of them.
    let query = "select distinct ReqId, VDisk from IOstream";
    let arguments = ["--patience", "20s", "--limit-held", "200", query];
    let mut monitor = Monitor::start_as("centre", folder, &files, &arguments);
    let address = monitor.address();
    let alpha = daemon_with("alpha", &address, "centre", &files, "held_max = 20\n");
    let beta = daemon("beta", &address, &files);
    for daemon in [&alpha, &beta] {
        daemon.until("the link runs", || daemon.client().monitor().unwrap().state == "running");
    }
    write(&alpha, "of-alpha", 50);
    alpha.until("the refusal", || daemon_problem(&alpha).contains("more than 20: ask for"));
    assert_eq!(alpha.client().monitor().unwrap().fragments, 0);
    alpha.until("the centre's status", || monitor.text("status").contains("raise `held_max`"));
    write(&beta, "of-beta", 50);
    beta.until("the rows of the other host", || monitor.rows("\"of-beta\"") == 50);
    assert_eq!(beta.client().monitor().unwrap().problem, None);
    // This exceeds the limit of the centre.
    write(&beta, "of-beta", 400);
    let (status, messages) = monitor.end();
    assert!(
        status.code() == Some(1) && messages.contains(": more than 200\n"),
        "{status}: {messages}"
    );
}

/// The problem of a daemon's link.
fn daemon_problem(daemon: &Daemon) -> String {
    daemon.client().monitor().unwrap().problem.unwrap_or_default()
}
