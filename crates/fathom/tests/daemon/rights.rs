//! Who may look, who may change something, and who has.

use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Output};

use fathom_control::{
    AuditEntry, AuditQuery, AuditReport, DiskChange, LayerDefinition, ProblemKind,
};
use rustix::process::geteuid;
use serde_json::json;

use crate::process::{self, Daemon};

/// Groups that each Debian has, and a user that is in none of them.
const ADMIN: (&str, u32) = ("games", 60);
const VIEW: (&str, u32) = ("users", 100);
const NOBODY: &str = "65534";
/// The most connections of a user who only looks.
const VIEWS_OF_USER_MAX: usize = 64;

const DISK: &str =
    "[[disk]]\nname = \"a\"\nmemory = \"4M\"\n[[nbd]]\naddress = \"unix:nbd.sock\"\n";

/// A daemon that other users of the host can reach, with a copy of the program for them. `None`
/// without the rights for that.
fn shared(more: &str) -> Option<Daemon> {
    if !geteuid().is_root() {
        eprintln!("skipped: only root can act for other users");
        return None;
    }
    let folder = tempfile::tempdir().unwrap();
    let open = |path: &Path| std::fs::set_permissions(path, PermissionsExt::from_mode(0o755));
    open(folder.path()).unwrap();
    let program = folder.path().join("fathom");
    // By another process: a child of another test would have the file open for writing, and a
    // program that somebody may write does not start.
    let copied = Command::new("cp").arg(env!("CARGO_BIN_EXE_fathom")).arg(&program).status();
    assert!(copied.unwrap().success());
    open(&program).unwrap();
    let groups = format!("control_group = \"{}\"\nview_group = \"{}\"\n", ADMIN.0, VIEW.0);
    Some(Daemon::start_in(folder, &format!("[daemon]\n{groups}{more}{DISK}")))
}

/// Runs a command as a user in a group, or in none.
fn run_as(daemon: &Daemon, group: Option<u32>, arguments: &[&str]) -> Output {
    let mut command = Command::new("setpriv");
    command.args(["--reuid", NOBODY, "--regid", "65534"]);
    match group {
        Some(group) => command.arg("--groups").arg(group.to_string()),
        None => command.arg("--clear-groups"),
    };
    command.arg(daemon.path("fathom")).args(arguments);
    command.arg("--control").arg(daemon.path("control.sock")).output().unwrap()
}

/// What a command prints that has to succeed.
fn text_of(output: &Output) -> String {
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn error_of(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Gives the disk a limit.
fn change(daemon: &Daemon) {
    let layer = LayerDefinition::new("limit", json!({ "total_iops_sec": 100 }));
    let change = DiskChange { set_layer: Some(layer), ..DiskChange::default() };
    daemon.client().change_disk("a", &change).unwrap();
}

/// The entries of the audit log, when there is one that fits.
fn entries(daemon: &Daemon, fits: impl Fn(&AuditEntry) -> bool) -> AuditReport {
    let mut report = AuditReport::default();
    daemon.until("there is an entry", || {
        report = daemon.client().audit(AuditQuery::default()).unwrap();
        report.entries.iter().any(&fits)
    });
    report
}

#[test]
fn a_group_looks_and_another_changes() {
    let Some(daemon) = shared("") else { return };
    for (socket, group) in [("control.sock", ADMIN.1), ("control.view.sock", VIEW.1)] {
        let found = daemon.path(socket).metadata().unwrap();
        assert_eq!((found.mode() & 0o777, found.gid()), (0o660, group), "{socket}");
    }
    // Somebody else.
    let error = error_of(&run_as(&daemon, None, &["disk", "list"]));
    assert!(error.contains("Permission denied") && error.contains("view_group"), "{error}");
    // Somebody who may look.
    let look = |arguments: &[&str]| run_as(&daemon, Some(VIEW.1), arguments);
    assert!(text_of(&look(&["disk", "list"])).contains('a'));
    for command in
        [&["files", "a"][..], &["devices"], &["disk", "info", "a"], &["audit"], &["dirty"]]
    {
        text_of(&look(command));
    }
    text_of(&look(&["query", "--for", "1s", "select VDisk from IOstream"]));
    for command in [
        &["disk", "remove", "a"][..],
        &["disk", "layer", "a", "limit,total_iops_sec=100"],
        &["disk", "add", "b", "--memory", "1M", "--socket", "b.sock"],
        &["config", "revert", "a"],
    ] {
        let error = error_of(&look(command));
        assert!(error.contains("you may look") && error.contains("control_group"), "{error}");
    }
    // Each request that is not one to look is refused, as is what is on disks.
    let view = daemon.path("control.view.sock");
    let ask = |method: &str, path: &str| {
        let mut stream = UnixStream::connect(&view).unwrap();
        write!(stream, "{method} {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer);
        answer.get(9..12).unwrap_or_default().to_owned()
    };
    for endpoint in fathom_control::ENDPOINTS.iter().flat_map(|list| list.iter()) {
        let row = endpoint.row();
        if !row.is_view() {
            let path = row.path.replace(['{', '}'], "");
            assert_eq!(ask(row.method.name(), &path), "403", "{} {path}", row.method);
        }
    }
    assert_eq!(ask("GET", "/v1/stores/stream?path=p&volume=v&snapshot=s"), "403");
    assert_eq!(ask("HEAD", "/v1/shutdown"), "405");
    assert_eq!(daemon.client().disks().unwrap().disks.len(), 1);
    // Somebody who may change something.
    let change = |arguments: &[&str]| run_as(&daemon, Some(ADMIN.1), arguments);
    text_of(&change(&["disk", "layer", "a", "limit,total_iops_sec=100"]));
    assert!(error_of(&change(&["disk", "remove", "none"])).contains("none"));
    let report = entries(&daemon, |entry| entry.request.starts_with("DELETE"));
    let by_nobody: Vec<_> = report.entries.iter().filter(|it| it.user_id == Some(65534)).collect();
    assert_eq!(by_nobody.len(), 2, "refused requests to change are none: {report:?}");
    let [set, removed] = by_nobody[..] else { unreachable!() };
    assert_eq!((&*set.user, &*set.command, set.status), ("nobody", "fathom", Some(200)));
    assert!(set.request == "PATCH /v1/disks/a" && set.body.contains("total_iops_sec"), "{set:?}");
    assert_eq!((removed.status, removed.error.contains("none")), (Some(404), true), "{removed:?}");
    assert!(text_of(&look(&["audit"])).contains("404: "));
    daemon.end();
}

#[test]
fn somebody_who_looks_delays_no_change() {
    let Some(daemon) = shared("") else { return };
    let view = daemon.path("control.view.sock");
    // All of a user: some send half a request, some wait for events for minutes.
    let half = b"GET /v1/disks HTTP/1.1\r\nHost";
    let wait = b"GET /v1/events?after=1000000&wait_ms=600000 HTTP/1.1\r\nHost: a\r\n\r\n";
    let mut held: Vec<UnixStream> = Vec::new();
    for number in 0..2 * VIEWS_OF_USER_MAX {
        let mut stream = UnixStream::connect(&view).unwrap();
        let text: &[u8] = if number % 2 == 0 { half } else { wait };
        // One without a place is closed.
        let _ = stream.write_all(text);
        held.push(stream);
    }
    daemon.until("those beyond the limit are closed", || {
        let is_open = |stream: &UnixStream| {
            stream.set_nonblocking(true).unwrap();
            let mut stream = stream;
            let read = stream.read(&mut [0; 4096]);
            read.is_ok_and(|length| length > 0)
                || stream
                    .read(&mut [0])
                    .is_err_and(|it| it.kind() == std::io::ErrorKind::WouldBlock)
        };
        held.iter().filter(|stream| is_open(stream)).count() <= VIEWS_OF_USER_MAX
    });
    // Another user may still look, and operators change what they want.
    assert!(text_of(&run_as(&daemon, Some(VIEW.1), &["disk", "list"])).contains('a'));
    text_of(&run_as(&daemon, Some(ADMIN.1), &["disk", "layer", "a", "limit,total_iops_sec=100"]));
    assert!(daemon.client().events(0, std::time::Duration::ZERO).is_ok());
    drop(held);
    daemon.until("there are places again", || {
        let mut stream = UnixStream::connect(&view).unwrap();
        let request = b"GET /v1/disks HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n";
        let mut answer = String::new();
        let _ = stream.write_all(request).and_then(|()| stream.read_to_string(&mut answer));
        answer.starts_with("HTTP/1.1 200")
    });
    daemon.end();
}

#[test]
fn who_has_changed_what_is_known_after_kills() {
    let daemon = Daemon::start(DISK);
    change(&daemon);
    let body = "{\"force\": tr";
    let mut gone = UnixStream::connect(daemon.path("control.sock")).unwrap();
    let length = body.len() + 1;
    write!(gone, "POST /v1/reload HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n\r\n{body}")
        .unwrap();
    drop(gone);
    let report = entries(&daemon, |entry| entry.request == "POST /v1/reload");
    let file = std::fs::metadata(daemon.path(&report.path)).unwrap();
    assert_eq!(file.mode() & 0o777, 0o600);
    let requests = |report: &AuditReport| {
        report.entries.iter().map(|it| it.request.clone()).collect::<Vec<_>>()
    };
    assert_eq!(requests(&report), ["start", "PATCH /v1/disks/a", "POST /v1/reload"]);
    let own = std::process::id();
    assert_eq!(report.entries[1].process_id, Some(own));
    assert_eq!(report.entries[1].user_id, Some(geteuid().as_raw()));
    assert!(report.entries[2].status.is_none_or(|status| status >= 400), "{report:?}");
    daemon.signal(libc::SIGKILL);
    let (_, folder) = daemon.wait();
    // A line was being written.
    let path = folder.path().join(&report.path);
    let mut lines = std::fs::OpenOptions::new().append(true).open(&path).unwrap();
    lines.write_all(b"{\"unix_time_ns\": 17").unwrap();
    let daemon = Daemon::start_in(folder, DISK);
    daemon.signal(libc::SIGHUP);
    let report = entries(&daemon, |entry| entry.request == "SIGHUP");
    assert_eq!(report.unreadable, 1);
    assert_eq!(requests(&report)[2..], ["POST /v1/reload", "start", "SIGHUP"]);
    let after = report.entries[3].unix_time_ns;
    let last = daemon.client().audit(AuditQuery { after: Some(after), ..AuditQuery::default() });
    assert_eq!(requests(&last.unwrap()), ["SIGHUP"]);
    let one = daemon.client().audit(AuditQuery { count: 1, after: None }).unwrap();
    assert_eq!(requests(&one), ["SIGHUP"]);
    daemon.signal(libc::SIGTERM);
    let (_, folder) = daemon.wait();
    let daemon = Daemon::start_in(folder, DISK);
    let report = entries(&daemon, |entry| entry.request == "stop");
    assert_eq!(requests(&report)[5..], ["SIGTERM", "stop", "start"]);
    let shown = process::command(daemon.path("").as_path())
        .args(["audit", "--json", "--control", "control.sock"])
        .output()
        .unwrap();
    let shown: AuditReport = serde_json::from_slice(&shown.stdout).unwrap();
    assert_eq!(shown.entries, report.entries);
    daemon.end();
}

#[test]
fn a_log_that_cannot_be_written_is_a_problem_and_stops_no_change() {
    let daemon = Daemon::start(DISK);
    let path = daemon.path(&entries(&daemon, |entry| entry.request == "start").path);
    daemon.signal(libc::SIGKILL);
    let (_, folder) = daemon.wait();
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    let daemon = Daemon::start_in(folder, DISK);
    let has_problem = |daemon: &Daemon| {
        let info = daemon.client().daemon().unwrap();
        info.problems.iter().any(|problem| problem.kind == ProblemKind::AuditLost)
    };
    daemon.until("it is a problem", || has_problem(&daemon));
    change(&daemon);
    let error = daemon.client().audit(AuditQuery::default()).unwrap_err();
    assert!(error.to_string().contains("no file"), "{error}");
    std::fs::remove_dir(&path).unwrap();
    change(&daemon);
    daemon.until("the problem ends", || !has_problem(&daemon));
    let report = entries(&daemon, |entry| entry.request == "PATCH /v1/disks/a");
    assert!(report.lost >= 2 && report.problem.is_empty(), "{report:?}");
    daemon.end();
}
