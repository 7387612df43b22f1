//! What waits or hangs keeps no other request waiting, and no signal.

use std::fs;
use std::process::{Child, Command};
use std::thread::JoinHandle;
use std::time::Duration;

use fathom_control::{
    Bytes, Client, ClientError, DirtyRequest, DiskDefinition, ErrorCode, OffloadAction,
    OffloadRequest,
};

use crate::nbd::Nbd;
use crate::offload::{failing_server, folder, wait_until_served};
use crate::process::{Daemon, kill};

/// More requests than any kind may have in progress.
const CLIENTS: usize = 64;

fn is_busy<T>(answer: &Result<T, ClientError>) -> bool {
    matches!(answer, Err(ClientError::Refused(body)) if body.code == ErrorCode::Busy)
}

/// Everything else that a daemon of disks in memory does.
fn ask_everything_else(client: &Client, name: &str) {
    client.disks().unwrap();
    client.daemon().unwrap();
    client.dirty(None, DirtyRequest::default()).unwrap();
    client.devices().unwrap();
    assert!(client.metrics().unwrap().contains("fathom_disks"));
    let name = name.to_owned();
    let memory = Some(Bytes(1 << 20));
    client.add_disk(&DiskDefinition { name, memory, ..DiskDefinition::default() }).unwrap();
}

/// The number of threads that the daemon has for requests.
fn request_threads(daemon: &Daemon) -> usize {
    let tasks = fs::read_dir(format!("/proc/{}/task", daemon.id())).unwrap();
    let names = tasks.flatten().map(|task| fs::read_to_string(task.path().join("comm")));
    names.filter(|name| name.as_ref().is_ok_and(|name| name.starts_with("tokio"))).count()
}

/// Each asks in a thread of its own.
fn ask_all<T: Send + 'static>(
    daemon: &Daemon,
    ask: impl Fn(&Client) -> Result<T, ClientError> + Clone + Send + 'static,
) -> Vec<JoinHandle<Result<T, ClientError>>> {
    let ask = |_| {
        let (client, ask) = (daemon.client(), ask.clone());
        std::thread::spawn(move || ask(&client))
    };
    (0..CLIENTS).map(ask).collect()
}

#[test]
fn requests_that_wait_use_no_threads() {
    let daemon = Daemon::start("[[disk]]\nname = \"a\"\nmemory = \"1M\"\n");
    let request = DirtyRequest { written_ms: Some(60_000), ..DirtyRequest::default() };
    let counts = ask_all(&daemon, move |client| client.dirty(None, request));
    let waiting = || counts.iter().filter(|count| !count.is_finished()).count();
    daemon.until("only so many counts wait", || waiting() == 8);
    // Threads end when they are idle.
    daemon.until("no thread waits", || request_threads(&daemon) == 0);
    assert_eq!(waiting(), 8);
    // Readers of the log wait as well.
    let last = daemon.client().events(0, Duration::ZERO).unwrap().last;
    let readers = ask_all(&daemon, move |client| client.events(last, Duration::from_secs(500)));
    ask_everything_else(&daemon.client(), "b");
    assert_eq!(waiting(), 8);
    daemon.end();
    let counts: Vec<_> = counts.into_iter().map(|count| count.join().unwrap()).collect();
    assert_eq!(counts.iter().filter(|count| is_busy(count)).count(), CLIENTS - 8, "{counts:?}");
    for reader in readers {
        drop(reader.join());
    }
}

/// What one endpoint reads hangs.
#[test]
fn an_endpoint_that_hangs_takes_no_threads_of_others() {
    let daemon = Daemon::start("[[disk]]\nname = \"a\"\nmemory = \"1M\"\n");
    let file = daemon.path("f.toml");
    fs::remove_file(&file).unwrap();
    // Nobody writes to it: to open it takes for ever.
    assert!(Command::new("mkfifo").arg(&file).status().unwrap().success());
    let reports = ask_all(&daemon, |client| {
        client.clone().with_limit(Duration::from_secs(600)).configuration()
    });
    daemon.until("the others are refused", || {
        reports.iter().filter(|report| !report.is_finished()).count() == 4
    });
    ask_everything_else(&daemon.client(), "b");
    daemon.signal(libc::SIGTERM);
    let (status, _folder) = daemon.wait();
    assert_eq!(status.code(), Some(0));
    let reports: Vec<_> = reports.into_iter().map(|report| report.join().unwrap()).collect();
    assert_eq!(reports.iter().filter(|report| is_busy(report)).count(), CLIENTS - 4, "{reports:?}");
}

/// A server that ends with the test.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A start of the offload tries its log out, and waits for that.
#[test]
fn a_log_that_hangs_stops_only_the_start_of_its_offload() {
    let folder = folder();
    let socket = folder.path().join("log.sock");
    let Some(server) = failing_server(folder.path()) else { return };
    let server = Server(server);
    let text = format!(
        "[[disk]]\nname = \"a\"\nimage = \"a.img\"\n\
         layers = [{{ kind = \"offload\", log = \"nbd+unix:///?socket={}\", size = \"1M\" }}]\n\
         [[nbd]]\naddress = \"unix:nbd.sock\"\n",
        socket.display()
    );
    let daemon = Daemon::start_in(folder, &text);
    wait_until_served(&daemon);
    // A log is only tried out while a queue is open.
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    assert_eq!(nbd.fill_block(1, 1), Some(0));
    kill(&server.0, libc::SIGSTOP);
    let client = daemon.client();
    let request = OffloadRequest { action: OffloadAction::Start, dry_run: false };
    let start = std::thread::spawn(move || client.change_offload("a", request));
    daemon.until("the log is being tried out", || {
        daemon.client().offload(Some("a")).unwrap().disks[0].by == "hand"
    });
    // The answers come while it waits.
    daemon.client().disks().unwrap();
    daemon.client().metrics().unwrap();
    assert!(!start.is_finished(), "{:?}", start.join().unwrap());
    daemon.signal(libc::SIGTERM);
    daemon.until("the signal is seen", || daemon.log().contains("shutting down: SIGTERM"));
    assert!(!start.is_finished(), "the end waited for the start");
    kill(&server.0, libc::SIGCONT);
    let (status, _folder) = daemon.wait();
    assert_eq!(status.code(), Some(0));
    let _ = start.join();
}
