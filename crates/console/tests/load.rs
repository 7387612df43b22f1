//! The load generator against qemu-storage-daemon.
mod common;

use std::{
    fs,
    path::PathBuf,
    process::{Child, Command},
    thread,
    time::{Duration, Instant},
};

use common::has;
use fathom_console::load::{BlockOrder, LoadError, LoadOptions, Waiting, load};

struct Server {
    child: Child,
    socket: PathBuf,
    _directory: tempfile::TempDir,
}

impl Server {
    /// Serves an image of 16 MiB; `None` if the program is not installed.
    fn start(writable: bool, queues: u16) -> Option<Self> {
        if !has("qemu-storage-daemon") {
            return None;
        }
        let directory = tempfile::tempdir().expect("a directory");
        let image = directory.path().join("a.img");
        fs::File::create(&image).and_then(|file| file.set_len(16 << 20)).expect("an image");
        let socket = directory.path().join("a.sock");
        let writable = if writable { "on" } else { "off" };
        let child = Command::new("qemu-storage-daemon")
            .arg("--blockdev")
            .arg(format!("driver=file,filename={},node-name=d", image.display()))
            .arg("--export")
            .arg(format!(
                "type=vhost-user-blk,id=e,node-name=d,addr.type=unix,addr.path={},\
                 writable={writable},num-queues={queues}",
                socket.display()
            ))
            .spawn()
            .expect("it starts");
        let server = Self { child, socket, _directory: directory };
        let started = Instant::now();
        while !server.listens() {
            assert!(started.elapsed() < Duration::from_secs(20), "the peer did not start");
            thread::sleep(Duration::from_millis(10));
        }
        Some(server)
    }

    /// Whether the server listens, which it does a moment after its socket has got its name.
    fn listens(&self) -> bool {
        const LISTENS: &str = "00010000";
        let sockets = fs::read_to_string("/proc/net/unix").expect("the sockets of the system");
        let path = self.socket.to_string_lossy();
        let mut fields = sockets.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        fields.any(|fields| fields.get(3) == Some(&LISTENS) && fields.last() == Some(&&*path))
    }

    fn options(&self) -> LoadOptions {
        LoadOptions {
            duration: Duration::from_millis(300),
            warmup: Duration::from_millis(50),
            ..LoadOptions::new(&self.socket)
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The test may already have killed it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_server_is_driven_without_memory_slots() {
    let Some(server) = Server::start(true, 2) else { return };
    let report = load(&LoadOptions {
        memory_table: true,
        verify: true,
        read_percent: 50,
        depth: 8,
        queues: 2,
        ..server.options()
    })
    .expect("it runs");
    assert!(report.reads.requests > 0 && report.writes.requests > 0, "{report:?}");
    assert!(report.blocks_verified > 0 && report.blocks_wrong == 0, "{report:?}");
    assert_eq!((report.errors, report.server_process_id), (0, Some(server.child.id() as i32)));
}

#[test]
fn reads_are_measured_and_attributed() {
    let Some(server) = Server::start(false, 1) else { return };
    for waiting in [Waiting::Event, Waiting::Poll] {
        let report = load(&LoadOptions { waiting, depth: 4, ..server.options() }).expect("it runs");
        assert!(report.reads.requests > 0 && report.writes.requests == 0);
        assert!(report.reads.latency_us_p50 > 0.0);
        assert!(report.reads.latency_us_p50 <= report.reads.latency_us_p99);
        assert_eq!((report.errors, report.server_process_id), (0, Some(server.child.id() as i32)));
        assert!(report.server_cpu_us_per_request.expect("CPU") > 0.0);
        if waiting == Waiting::Event {
            // Each sleep ends with at least one completion: the client does not spin.
            assert!(report.client_wakeups < 4 * report.reads.requests + 1000, "{report:?}");
        }
    }
    let writes = LoadOptions { read_percent: 50, ..server.options() };
    let error = load(&writes).expect_err("the disk is read-only");
    assert!(matches!(error, LoadError::Option(_)), "{error}");
}

#[test]
fn written_data_is_read_back() {
    let Some(server) = Server::start(true, 2) else { return };
    for (order, read_percent) in [(BlockOrder::Random, 30), (BlockOrder::Sequential, 0)] {
        let report = load(&LoadOptions {
            order,
            read_percent,
            depth: 16,
            queues: 2,
            verify: true,
            ..server.options()
        })
        .expect("it runs");
        assert!(report.writes.requests > 0, "{report:?}");
        assert!(report.blocks_verified > 0 && report.blocks_wrong == 0, "{report:?}");
        assert_eq!(report.errors, 0);
    }
    let many = LoadOptions { queues: 3, ..server.options() };
    assert!(load(&many).expect_err("two queues").to_string().contains("offers 2 queues"));
    for options in [
        LoadOptions { depth: 0, ..server.options() },
        LoadOptions { block_size: 1000, ..server.options() },
        LoadOptions { range: Some(0..1 << 40), ..server.options() },
        LoadOptions { range: Some(4096..8192), depth: 2, ..server.options() },
    ] {
        assert!(matches!(load(&options), Err(LoadError::Option(_))), "{options:?}");
    }
}

#[test]
fn the_death_of_a_server_is_reported() {
    let Some(mut server) = Server::start(false, 1) else { return };
    let options = LoadOptions { duration: Duration::from_secs(60), ..server.options() };
    let thread = thread::spawn(move || load(&options));
    thread::sleep(Duration::from_millis(500));
    server.child.kill().expect("it is killed");
    let error = thread.join().expect("no panic").expect_err("the server is dead");
    assert!(matches!(error, LoadError::Closed), "{error}");
    let again = load(&server.options()).expect_err("no server listens");
    assert!(matches!(again, LoadError::Connect(..)), "{again}");
}
