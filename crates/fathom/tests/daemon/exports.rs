//! Disks whose blocks a real NBD server has: `nbdkit`, `qemu-nbd` and `qemu-storage-daemon`.

use std::fs::File;
use std::net::TcpStream;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fathom_control::{Bytes, DiskChange, DiskDefinition, LayerDefinition, Nanoseconds, Problem};

use crate::nbd::{FLUSH, Nbd, TRIM, WRITE};
use crate::process::{Daemon, PATIENCE, image, kill};

pub const SIZE: u64 = 8 << 20;
const BLOCK: u64 = 4096;
const BLOCKS: u64 = SIZE / BLOCK;

/// A server that can be killed and started again.
pub struct Server {
    words: Vec<String>,
    socket: PathBuf,
    /// Its port, if it is at one.
    port: Option<u16>,
    child: Option<Child>,
}

impl Server {
    /// `None` if this host does not have the program. The words `SOCKET` and `FOLDER` are replaced.
    pub fn start(folder: &Path, words: &[&str]) -> Option<Self> {
        Self::start_at(folder, words, None)
    }

    /// The same for one at a port of this host.
    pub fn start_at_port(folder: &Path, words: &[&str], port: u16) -> Option<Self> {
        Self::start_at(folder, words, Some(port))
    }

    fn start_at(folder: &Path, words: &[&str], port: Option<u16>) -> Option<Self> {
        let socket = folder.join("server.sock");
        let shown = (socket.display().to_string(), folder.display().to_string());
        let replace = |word: &&str| word.replace("SOCKET", &shown.0).replace("FOLDER", &shown.1);
        let words = words.iter().map(replace).collect();
        let mut server = Self { words, socket, port, child: None };
        server.run().then_some(server)
    }

    /// Starts it again. Returns whether this host has it.
    pub fn run(&mut self) -> bool {
        let _ = std::fs::remove_file(&self.socket);
        let mut command = Command::new(&self.words[0]);
        match command.args(&self.words[1..]).stdin(Stdio::null()).spawn() {
            Ok(child) => self.child = Some(child),
            Err(error) => {
                eprintln!("SKIPPED: {} cannot be started: {error}", self.words[0]);
                return false;
            }
        }
        let begun = Instant::now();
        let is_there = || match self.port {
            Some(port) => TcpStream::connect(("127.0.0.1", port)).is_ok(),
            None => UnixStream::connect(&self.socket).is_ok(),
        };
        while !is_there() {
            assert!(begun.elapsed() < PATIENCE, "{:?} does not listen", self.words);
            std::thread::sleep(Duration::from_millis(5));
        }
        true
    }

    pub fn signal(&self, signal: i32) {
        let child = self.child.as_ref().unwrap();
        kill(child, signal);
        // Each thread stops by itself.
        let is_running = || {
            let tasks = std::fs::read_dir(format!("/proc/{}/task", child.id())).unwrap().flatten();
            tasks.into_iter().any(|task| {
                let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
                !stat.rsplit(") ").next().unwrap_or_default().starts_with('T')
            })
        };
        while signal == libc::SIGSTOP && is_running() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

/// `nbdkit` with the file `a.img` of the folder.
fn file_server(folder: &Path) -> Option<Server> {
    image(folder, "a.img", SIZE);
    Server::start(folder, &["nbdkit", "-f", "-U", "SOCKET", "file", "FOLDER/a.img"])
}

fn uri(folder: &Path) -> String {
    format!("nbd+unix:///?socket={}", folder.join("server.sock").display())
}

/// The disk "a" at the server, and "b" in memory.
fn configuration(folder: &Path, more: &str) -> String {
    format!(
        "[[disk]]\nname = \"a\"\nnbd = \"{}\"\n{more}\n[[disk]]\nname = \"b\"\nmemory = \"8M\"\n\
         [[nbd]]\naddress = \"unix:nbd.sock\"\n",
        uri(folder)
    )
}

pub fn problems(daemon: &Daemon) -> Vec<Problem> {
    daemon.client().disk("a").unwrap().problems
}

pub fn connect(daemon: &Daemon, disk: &str) -> Nbd {
    Nbd::connect(&daemon.path("nbd.sock"), disk)
}

/// Removes a disk, as soon as its last client has gone.
pub fn remove(daemon: &Daemon, disk: &str) {
    daemon.until("the removal", || daemon.client().remove_disk(disk, false).is_ok());
}

/// Waits until the disk "a" is served.
pub fn wait_until_served(daemon: &Daemon) {
    daemon.until("the disk to be served", || daemon.client().disk("a").is_ok());
}

/// What each block of a disk has to be.
pub struct Content(pub Vec<u8>);

impl Content {
    pub fn new() -> Self {
        Self(vec![0; BLOCKS as usize])
    }

    /// Sends a batch of writes without waiting for the replies.
    pub fn send(&mut self, nbd: &mut Nbd, chance: &mut fastrand::Rng) -> usize {
        for cookie in 0..32 {
            let (block, byte) = (chance.u64(..BLOCKS), chance.u8(1..));
            // Two writes of a block in flight have no order.
            if self.0[block as usize] == byte {
                continue;
            }
            let data = [byte; BLOCK as usize];
            assert!(nbd.send(WRITE, cookie, block * BLOCK, BLOCK as u32, &data));
            assert_eq!(nbd.reply(), Some((cookie, 0)));
            self.0[block as usize] = byte;
        }
        // These are in flight when something happens.
        let first = chance.u64(..BLOCKS - 16);
        for block in first..first + 16 {
            let byte = chance.u8(1..);
            let data = [byte; BLOCK as usize];
            assert!(nbd.send(WRITE, block, block * BLOCK, BLOCK as u32, &data));
            self.0[block as usize] = byte;
        }
        16
    }

    pub fn finish(nbd: &mut Nbd, count: usize) {
        for _ in 0..count {
            assert_eq!(nbd.reply().map(|(_, error)| error), Some(0));
        }
    }

    pub fn verify(&self, mut read: impl FnMut(u64, &mut [u8])) {
        let mut bytes = [0; BLOCK as usize];
        for (block, expected) in (0..).zip(&self.0) {
            read(block * BLOCK, &mut bytes);
            assert!(bytes.iter().all(|byte| byte == expected), "block {block}: {expected}");
        }
    }

    pub fn verify_file(&self, path: &Path) {
        let file = File::open(path).unwrap();
        self.verify(|offset, bytes| file.read_exact_at(bytes, offset).unwrap());
    }
}

pub fn flush(nbd: &mut Nbd) -> u32 {
    assert!(nbd.send(FLUSH, 77, 0, 0, &[]));
    nbd.reply().unwrap().1
}

#[test]
fn a_server_that_is_killed_amid_writes_loses_none() {
    let folder = tempfile::tempdir().unwrap();
    let Some(mut server) = file_server(folder.path()) else { return };
    let layers = "layers = [{ kind = \"cache\", size = \"1M\" }, \
                  { kind = \"limit\", total_iops_sec = 100000 }]";
    let text = configuration(folder.path(), layers);
    let daemon = Daemon::start_in(folder, &text);
    wait_until_served(&daemon);
    let status = daemon.client().disk("a").unwrap();
    assert_eq!((status.capacity_bytes, &*status.backend.name), (SIZE, "nbd"));
    assert!(status.backend.server.unwrap().starts_with("nbd+unix:///?socket="));
    let (mut nbd, mut content) = (connect(&daemon, "a"), Content::new());
    let mut chance = fastrand::Rng::with_seed(40);
    for _ in 0..10 {
        let count = content.send(&mut nbd, &mut chance);
        server.kill();
        server.run();
        Content::finish(&mut nbd, count);
    }
    // What is away for longer is a problem, which ends with it.
    server.kill();
    daemon.until("the problem", || {
        problems(&daemon).iter().any(|problem| {
            problem.cause == "unreachable" && problem.message.contains("server.sock")
        })
    });
    assert!(problems(&daemon).iter().all(|problem| !problem.remedy.is_empty()));
    server.run();
    daemon.until("the end of the problem", || problems(&daemon).is_empty());
    assert_eq!(flush(&mut nbd), 0);
    content.verify_file(&daemon.path("a.img"));
    let figures = daemon.client().disk("a").unwrap().backend.figures;
    assert!(figures.iter().any(|it| it.name == "connections_total" && it.value > 10));
    drop(nbd);
    daemon.end();
}

#[test]
fn a_daemon_that_is_killed_amid_writes_loses_none() {
    let mut folder = tempfile::tempdir().unwrap();
    let Some(_server) = file_server(folder.path()) else { return };
    let text = configuration(folder.path(), "");
    let (mut content, mut chance) = (Content::new(), fastrand::Rng::with_seed(41));
    for _ in 0..3 {
        let daemon = Daemon::start_in(folder, &text);
        wait_until_served(&daemon);
        let mut nbd = connect(&daemon, "a");
        let count = content.send(&mut nbd, &mut chance);
        Content::finish(&mut nbd, count);
        daemon.signal(libc::SIGKILL);
        folder = daemon.wait().1;
        content.verify_file(&folder.path().join("a.img"));
    }
}

#[test]
fn a_server_that_hangs_delays_no_other_disk_and_no_end() {
    let folder = tempfile::tempdir().unwrap();
    let Some(server) = file_server(folder.path()) else { return };
    let text = configuration(folder.path(), "timeout = \"1s\"");
    let daemon = Daemon::start_in(folder, &format!("{text}[daemon]\nshutdown_time_max = \"3s\"\n"));
    wait_until_served(&daemon);
    let (mut a, mut b) = (connect(&daemon, "a"), connect(&daemon, "b"));
    assert_eq!(a.fill_block(0, 1), Some(0));
    server.signal(libc::SIGSTOP);
    let begun = Instant::now();
    assert_eq!(a.fill_block(0, 2), Some(5), "an I/O error");
    assert!(begun.elapsed() >= Duration::from_secs(1), "{:?}", begun.elapsed());
    assert_eq!(b.fill_block(0, 3), Some(0));
    daemon.until("the problem", || !problems(&daemon).is_empty());
    server.signal(libc::SIGCONT);
    daemon.until("the end of the problem", || problems(&daemon).is_empty());
    assert_eq!(a.fill_block(0, 4), Some(0));
    server.signal(libc::SIGSTOP);
    assert_eq!(b.fill_block(1, 3), Some(0));
    // It ends within its time limits, and reports the flush that is missing.
    daemon.signal(libc::SIGTERM);
    let (_, _folder) = daemon.wait();
}

/// Listens, and says nothing.
#[test]
fn a_server_that_never_answers_keeps_only_its_own_disk_from_being_served() {
    let folder = tempfile::tempdir().unwrap();
    let silent = UnixListener::bind(folder.path().join("server.sock")).unwrap();
    let text = configuration(folder.path(), "");
    let daemon = Daemon::start_in(folder, &text);
    assert_eq!(connect(&daemon, "b").fill_block(0, 1), Some(0));
    daemon.until("the reason", || {
        let unserved = daemon.client().disks().unwrap().unserved;
        unserved.iter().any(|disk| disk.message.contains("does not answer"))
    });
    drop(silent);
    if let Some(_server) = file_server(daemon.path("a.img").parent().unwrap()) {
        wait_until_served(&daemon);
        assert_eq!(connect(&daemon, "a").fill_block(0, 1), Some(0));
    }
}

#[test]
fn the_export_determines_the_size_and_what_can_be_done() {
    let folder = tempfile::tempdir().unwrap();
    let Some(mut server) = file_server(folder.path()) else { return };
    let text = configuration(folder.path(), "");
    let daemon = Daemon::start_in(folder, &text);
    wait_until_served(&daemon);
    let mut nbd = connect(&daemon, "a");
    assert_eq!(nbd.fill_block(1, 1), Some(0));
    assert!(nbd.send(TRIM, 1, 0, BLOCK as u32, &[]));
    assert_eq!(nbd.reply(), Some((1, 0)));
    let capabilities = daemon.client().disk("a").unwrap().capabilities;
    assert!(capabilities.write && capabilities.discard && capabilities.write_zeroes);
    // Two disks cannot write to one export.
    let again = DiskDefinition {
        name: "c".into(),
        nbd: Some(uri(daemon.path("a.img").parent().unwrap())),
        ..DiskDefinition::default()
    };
    let error = daemon.client().add_disk(&again).unwrap_err().to_string();
    assert!(error.contains("a writer cannot share it"), "{error}");
    let resize = |size: u64, shrink| {
        let capacity = Some(Bytes(size));
        let change = DiskChange { capacity, shrink, ..DiskChange::default() };
        daemon.client().change_disk("a", &change).map(|status| status.capacity_bytes)
    };
    let error = resize(2 * SIZE, false).unwrap_err().to_string();
    assert!(error.contains("does not have this size"), "{error}");
    // The server has to learn it first.
    let file = File::options().write(true).open(daemon.path("a.img")).unwrap();
    file.set_len(2 * SIZE).unwrap();
    assert_eq!(resize(2 * SIZE, false).unwrap(), 2 * SIZE);
    assert_eq!(nbd.fill_block(1, 2), Some(0), "the connection goes on");
    let mut wider = connect(&daemon, "a");
    assert_eq!(wider.capacity(), 2 * SIZE);
    assert_eq!(wider.fill_block(BLOCKS + 1, 3), Some(0));
    assert_eq!(wider.read_block(BLOCKS + 1), 3);
    // One that has shrunk by itself is not the same.
    server.kill();
    file.set_len(SIZE).unwrap();
    server.run();
    daemon.until("the refusal", || {
        problems(&daemon).iter().any(|it| it.message.contains("it has 8388608 bytes, and had"))
    });
    server.kill();
    file.set_len(2 * SIZE).unwrap();
    server.run();
    daemon.until("the end of the refusal", || problems(&daemon).is_empty());
    assert_eq!(wider.fill_block(1, 4), Some(0));
    file.set_len(SIZE).unwrap();
    assert_eq!(resize(SIZE, true).unwrap(), SIZE);
    assert_eq!(nbd.read_block(1), 4);
    assert_eq!(wider.fill_block(BLOCKS + 1, 3), Some(28), "beyond the end");
}

/// What is different in a definition.
type Change = fn(&mut DiskDefinition);

#[test]
fn what_cannot_be_served_says_why() {
    let folder = tempfile::tempdir().unwrap();
    image(folder.path(), "a.img", SIZE);
    let words = ["qemu-nbd", "-t", "-e", "8", "-r", "-x", "there", "-k", "SOCKET", "-f", "raw"];
    let words = [&words[..], &["FOLDER/a.img"]].concat();
    let Some(_server) = Server::start(folder.path(), &words) else { return };
    let text = "[[disk]]\nname = \"b\"\nmemory = \"8M\"\n[[nbd]]\naddress = \"unix:nbd.sock\"\n";
    let socket = folder.path().join("server.sock").display().to_string();
    let daemon = Daemon::start_in(folder, text);
    let add = |nbd: &str, more: fn(&mut DiskDefinition)| {
        let mut disk = DiskDefinition {
            name: "a".into(),
            nbd: Some(nbd.replace("SOCKET", &socket)),
            ..DiskDefinition::default()
        };
        more(&mut disk);
        daemon.client().add_disk(&disk).map(drop).map_err(|error| error.to_string())
    };
    for (uri, part) in [
        ("nbd+unix:///other?socket=SOCKET", "no such export"),
        ("nbd+unix:///there?socket=SOCKET", "read-only"),
        ("nbd+unix:///there?socket=SOCKET.not", "No such file"),
        ("nbds+unix:///there?socket=SOCKET&tls-certificates=/nowhere", "ca-cert.pem"),
        ("nbd+unix:///there?socket=relative.sock", "not absolute"),
        ("nbd://10.0.0.1/there", "plain text"),
        ("http://localhost/there", "not a way"),
    ] {
        let error = add(uri, |_| {}).unwrap_err();
        assert!(error.contains(part), "{uri}: {error}");
    }
    let there = "nbd+unix:///there?socket=SOCKET";
    let wrong: [(Change, &str); 4] = [
        (|disk| disk.image = Some("/a.img".into()), "has `image` and `nbd`"),
        (|disk| disk.timeout = Some(Nanoseconds(1)), "time limit"),
        (|disk| disk.direct = true, "`direct`"),
        (
            |disk| disk.layers = vec![LayerDefinition::from_flag("wal,log=/tmp/x").unwrap()],
            "no writable image that can be marked",
        ),
    ];
    for (more, part) in wrong {
        let error = add(there, more).unwrap_err();
        assert!(error.contains(part), "{part}: {error}");
    }
    add(there, |disk| disk.read_only = true).unwrap();
    let mut nbd = connect(&daemon, "a");
    assert_eq!(nbd.read_block(1), 0);
    assert_eq!(nbd.fill_block(1, 1), Some(1), "not permitted");
    drop(nbd);
    remove(&daemon, "a");
}

/// The layers of a disk at a server change in use, and so does the list of disks.
#[test]
fn a_disk_at_a_server_changes_in_use() {
    let folder = tempfile::tempdir().unwrap();
    image(folder.path(), "a.img", SIZE);
    let words = [
        "qemu-storage-daemon",
        "--blockdev",
        "file,node-name=f,filename=FOLDER/a.img,discard=unmap",
        "--nbd-server",
        "addr.type=unix,addr.path=SOCKET,max-connections=0",
        "--export",
        "nbd,id=e,node-name=f,name=,writable=on",
    ];
    let Some(_server) = Server::start(folder.path(), &words) else { return };
    let text = configuration(folder.path(), "");
    let daemon = Daemon::start_in(folder, &text);
    wait_until_served(&daemon);
    let (mut nbd, mut content) = (connect(&daemon, "a"), Content::new());
    let mut chance = fastrand::Rng::with_seed(42);
    for layer in ["cache,size=1M", "limit,total_iops_sec=100000", "schedule", "delay,time=1ms"] {
        let count = content.send(&mut nbd, &mut chance);
        let set_layer = Some(LayerDefinition::from_flag(layer).unwrap());
        let change = DiskChange { set_layer, ..DiskChange::default() };
        daemon.client().change_disk("a", &change).unwrap();
        Content::finish(&mut nbd, count);
    }
    assert_eq!(flush(&mut nbd), 0);
    content.verify_file(&daemon.path("a.img"));
    let moved = daemon.client().disk("a").unwrap();
    assert!(moved.layers.iter().any(|layer| layer.name == "schedule"), "{moved:?}");
    drop(nbd);
    remove(&daemon, "a");
    let mut disk = DiskDefinition { name: "a".into(), ..DiskDefinition::default() };
    disk.nbd = Some(uri(daemon.path("a.img").parent().unwrap()));
    daemon.client().add_disk(&disk).unwrap();
    assert_eq!(connect(&daemon, "a").read_block(7), content.0[7]);
    // It is there after a restart, too.
    let folder = daemon.end();
    let daemon = Daemon::start_in(folder, text.split("[[disk]]\nname = \"b\"").next().unwrap());
    wait_until_served(&daemon);
}
