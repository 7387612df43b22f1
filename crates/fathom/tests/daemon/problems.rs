//! Problems: shown everywhere, and logged once when they begin and once when they end.

use std::fs::File;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use fathom_control::{DiskChange, LayerDefinition, ProblemKind};
use fathom_sim::FaultyDevice;
use vhost::VhostBackend;

use crate::cache::succeeds;
use crate::nbd::Nbd;
use crate::offload::{failing_server, wait_until_served};
use crate::process::{Daemon, command, disk_over_nbd, image};
use crate::vmm::{Client, RING_SIZE};

/// A write's length, in bytes.
const LENGTH: usize = 64 << 10;
/// The NBD error for a full store.
const NO_SPACE: u32 = 28;

/// A small file system in memory.
pub struct Small {
    folder: tempfile::TempDir,
}

impl Small {
    /// Mounts it; `None`, with a message, if this host cannot.
    pub fn mount(size: &str) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let option = format!("size={size}");
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &option, "tmpfs"])
            .arg(folder.path())
            .status();
        if mounted.is_ok_and(|status| status.success()) {
            return Some(Self { folder });
        }
        eprintln!("SKIPPED: this needs the right to mount a file system");
        None
    }

    /// Makes it larger.
    pub fn grow(&self, size: &str) {
        let option = format!("remount,size={size}");
        let mount = Command::new("mount").args(["-o", &option]).arg(self.folder.path()).status();
        assert!(mount.is_ok_and(|status| status.success()), "{option}");
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.folder.path()).status();
    }
}

pub fn kinds(daemon: &Daemon, disk: &str) -> Vec<ProblemKind> {
    daemon.client().disk(disk).unwrap().problems.iter().map(|problem| problem.kind).collect()
}

/// The lines of the log that contain both texts.
fn lines(daemon: &Daemon, disk: &str, text: &str) -> usize {
    let log = daemon.log();
    log.lines().filter(|line| line.contains(&format!(" {disk}: ")) && line.contains(text)).count()
}

fn serve(path: &Path, more: &str) -> Daemon {
    Daemon::start(&disk_over_nbd(path, more))
}

#[test]
fn on_a_full_file_system_writes_wait_for_space() {
    let Some(small) = Small::mount("1200K") else { return };
    image(small.folder.path(), "a.img", 8 << 20);
    std::fs::write(small.path("ballast"), vec![1; 512 << 10]).unwrap();
    let keys = "when_full = \"wait\"\nmodel = { kind = \"ssd\" }\n";
    let daemon = serve(&small.path("a.img"), keys);
    let layers = daemon.client().disk("a").unwrap().layers;
    let names: Vec<&str> = layers.iter().map(|layer| layer.name.as_str()).collect();
    assert_eq!(names, ["classify", "tap", "model", "wait-for-room"]);
    assert_eq!(layers[2].definition.options["model"]["kind"], "ssd");
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    for cookie in 0..16 {
        let block = vec![cookie as u8; LENGTH];
        assert!(nbd.send(1, cookie, cookie * LENGTH as u64, LENGTH as u32, &block));
    }
    daemon.until("writes to wait", || kinds(&daemon, "a") == [ProblemKind::WaitingForRoom]);
    let metrics = daemon.client().metrics().unwrap();
    let line = "fathom_disk_problem{disk=\"a\",vm=\"\",kind=\"waiting-for-room\"} 1";
    assert!(metrics.contains(line), "{metrics}");
    assert!(metrics.contains("fathom_disk_problems{disk=\"a\",vm=\"\"} 1"), "{metrics}");
    let statistics = daemon.client().statistics().unwrap();
    assert_eq!(statistics.disks[0].problems[0].kind, ProblemKind::WaitingForRoom);
    let control = daemon.path("control.sock");
    let output = |arguments: &[&str]| {
        let mut command = command(small.folder.path());
        let output = command.args(arguments).arg("--control").arg(&control).output().unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    assert!(output(&["disk", "info", "a"]).contains("waiting-for-room"));
    assert!(output(&["doctor"]).contains("wait for space"));
    let top = output(&["top", "--plain", "--count", "1", "--interval", "100ms"]);
    assert!(top.contains("! waiting-for-room"), "{top}");
    let figure = |name| daemon.client().disk("a").unwrap().figure("wait-for-room", name).unwrap();
    daemon.until("a write to be tried again", || figure("waiting_seconds") > 0);
    assert!((1..=16).contains(&figure("waiting_requests")));
    let queued = daemon.client().disk("a").unwrap().figure("model", "queued_requests");
    assert_eq!(queued, Some(figure("waiting_requests")));
    assert!(top.contains("wait-for-room: "), "{top}");
    // Requests that need no space continue.
    let mut other = Nbd::connect(&daemon.path("nbd.sock"), "a");
    assert_eq!(other.read(0, 512).len(), 512);
    std::fs::remove_file(small.path("ballast")).unwrap();
    let mut answered = Vec::new();
    for _ in 0..16 {
        let (cookie, error) = nbd.reply().unwrap();
        assert_eq!(error, 0, "write {cookie}");
        answered.push(cookie);
    }
    answered.sort_unstable();
    assert_eq!(answered, (0..16).collect::<Vec<u64>>());
    for cookie in 0..16 {
        let found = other.read(cookie * LENGTH as u64, LENGTH as u32);
        assert!(found.iter().all(|byte| *byte == cookie as u8), "write {cookie} is not there");
    }
    daemon.until("the problem to end", || kinds(&daemon, "a").is_empty());
    assert_eq!((figure("waiting_requests"), figure("waiting_seconds")), (0, 0));
    assert_eq!(lines(&daemon, "a", "problem waiting-for-room"), 1, "{}", daemon.log());
    assert_eq!(lines(&daemon, "a", "problem ended: waiting-for-room"), 1, "{}", daemon.log());
    drop((nbd, other));
    daemon.end();
}

#[test]
fn a_full_disk_is_shown_and_can_be_removed() {
    let Some(small) = Small::mount("256K") else { return };
    image(small.folder.path(), "a.img", 8 << 20);
    let daemon = serve(&small.path("a.img"), "");
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    for cookie in 0..8 {
        let block = vec![1; LENGTH];
        assert!(nbd.send(1, cookie, cookie * LENGTH as u64, LENGTH as u32, &block));
    }
    let errors: Vec<u32> = (0..8).map(|_| nbd.reply().unwrap().1).collect();
    assert!(errors.contains(&NO_SPACE) && errors.iter().all(|e| [0, NO_SPACE].contains(e)));
    // No client has asked for problems: the failure itself triggers the report.
    daemon.until("the problem to be logged", || lines(&daemon, "a", "problem full") == 1);
    let problem = daemon.client().disk("a").unwrap().problems.remove(0);
    assert_eq!(problem.kind, ProblemKind::Full);
    assert!(problem.remedy.contains("when_full"), "{problem:?}");
    daemon.client().remove_disk("a", true).unwrap();
    drop(nbd);
    daemon.end();

    // The same with waiting writes: they fail when the disk is removed.
    let daemon = serve(&small.path("a.img"), "when_full = \"wait\"\n");
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    assert!(nbd.send(1, 9, 4 << 20, LENGTH as u32, &vec![1; LENGTH]));
    daemon.until("writes to wait", || kinds(&daemon, "a") == [ProblemKind::WaitingForRoom]);
    // Its queues cannot get other layers meanwhile, and whoever wants that hears so at once.
    let limit = LayerDefinition::new("limit", serde_json::json!({ "total_bytes_sec": 1 << 20 }));
    let change = DiskChange { set_layer: Some(limit), ..DiskChange::default() };
    let begin = Instant::now();
    let refused = daemon.client().change_disk("a", &change).unwrap_err().to_string();
    assert!(refused.contains("wait for space"), "{refused}");
    assert!(begin.elapsed() < Duration::from_secs(15), "{:?}", begin.elapsed());
    daemon.client().remove_disk("a", true).unwrap();
    assert_eq!(nbd.reply(), Some((9, NO_SPACE)));
    daemon.end();
}

#[test]
fn a_queue_that_is_out_of_use_is_a_problem_until_the_guest_resets_it() {
    let text = "[[disk]]\nname = \"a\"\nmemory = \"1M\"\n[disk.vhost_user]\nsocket = \"a.sock\"\n";
    let daemon = Daemon::start(text);
    let mut client = Client::start(&daemon.path("a.sock"), 2, 0);
    client.set_available(0, RING_SIZE + 1);
    client.kick(0);
    daemon.until("the problem", || kinds(&daemon, "a") == [ProblemKind::QueueInvalid]);
    let control = daemon.path("control.sock");
    let mut info = command(control.parent().unwrap());
    let output = info.args(["disk", "info", "a", "--control"]).arg(&control).output().unwrap();
    let shown = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(shown.contains("queue-invalid: 1 queue of its guest"), "{shown}");
    client.frontend.get_vring_base(0).unwrap();
    daemon.until("the problem to end", || kinds(&daemon, "a").is_empty());
    drop(client);
    daemon.end();
}

#[test]
fn a_write_that_waits_for_space_goes_with_its_client() {
    let Some(small) = Small::mount("1M") else { return };
    image(small.folder.path(), "a.img", 8 << 20);
    std::fs::write(small.path("ballast"), vec![1; 960 << 10]).unwrap();
    let daemon = serve(&small.path("a.img"), "when_full = \"wait\"\n");
    let mut first = Nbd::connect(&daemon.path("nbd.sock"), "a");
    let place = 4 << 20;
    for cookie in 0..4 {
        let offset = place + cookie * LENGTH as u64;
        assert!(first.send(1, cookie, offset, LENGTH as u32, &vec![b'o'; LENGTH]));
    }
    daemon.until("writes to wait", || kinds(&daemon, "a") == [ProblemKind::WaitingForRoom]);
    drop(first);
    daemon.until("the problem to end", || kinds(&daemon, "a").is_empty());
    let mut second = Nbd::connect(&daemon.path("nbd.sock"), "a");
    std::fs::remove_file(small.path("ballast")).unwrap();
    second.write(place, &vec![b'n'; LENGTH]);
    // Longer than a waiting write waits before it is tried again.
    std::thread::sleep(Duration::from_millis(1500));
    let read = second.read(place, 4 * LENGTH as u32);
    assert!(read[..LENGTH].iter().all(|byte| *byte == b'n'), "an older write has landed");
    assert!(
        read[3 * LENGTH..].iter().all(|byte| *byte == 0),
        "a write without a client has landed"
    );
    drop(second);
    daemon.end();
}

#[test]
fn a_truncated_or_deleted_image_is_a_problem() {
    let folder = tempfile::tempdir().unwrap();
    image(folder.path(), "a.img", 1 << 20);
    let path = folder.path().join("a.img");
    let daemon = serve(&path, "");
    assert_eq!(kinds(&daemon, "a"), []);
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.set_len(1 << 19).unwrap();
    let is = |kind: ProblemKind| kinds(&daemon, "a").contains(&kind);
    daemon.until("the truncation to be found", || is(ProblemKind::CutShort));
    // The truncated data is lost: only the operator can declare the image complete again.
    assert!(daemon.client().recover_disk("a").is_err());
    file.set_len(1 << 20).unwrap();
    assert!(is(ProblemKind::CutShort));
    daemon.client().recover_disk("a").unwrap();
    daemon.until("the problem to end", || kinds(&daemon, "a").is_empty());
    assert_eq!(lines(&daemon, "a", "problem cut-short"), 1, "{}", daemon.log());
    assert_eq!(lines(&daemon, "a", "problem ended: cut-short"), 1, "{}", daemon.log());
    std::fs::remove_file(&path).unwrap();
    daemon.until("the deletion to be found", || is(ProblemKind::Deleted));
    // While there is a problem, the watch checks periodically; it reports the problem once.
    std::thread::sleep(Duration::from_secs(6));
    assert_eq!(lines(&daemon, "a", "problem deleted"), 1, "{}", daemon.log());
}

/// Waits longer than the time limit of other tests: some problems end only after a while.
fn until_at_last(daemon: &Daemon, what: &str, mut found: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !found() {
        assert!(begun.elapsed() < Duration::from_secs(90), "never: {what}\n{}", daemon.log());
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn a_device_that_cannot_be_read_is_a_problem_until_it_can() {
    const IO_ERROR: u32 = 5;
    let Some(mut device) = FaultyDevice::new() else { return };
    device.unmount();
    let daemon = serve(&device.path(), "direct = true\n");
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    let offset = (20 << 20) + 4096;
    assert_eq!(nbd.read(offset, 4096).len(), 4096);
    device.cut();
    let mut read = |cookie| {
        assert!(nbd.send(0, cookie, offset, 4096, &[]));
        nbd.reply()
    };
    assert_eq!(read(1), Some((1, IO_ERROR)));
    // No client has asked for problems: the failure itself triggers the report.
    daemon.until("the problem to be logged", || lines(&daemon, "a", "problem io-errors") == 1);
    let problem = daemon.client().disk("a").unwrap().problems.remove(0);
    assert_eq!(problem.kind, ProblemKind::IoErrors);
    assert!(problem.message.contains(&device.path().display().to_string()), "{problem:?}");
    let metrics = daemon.client().metrics().unwrap();
    let line = "fathom_disk_problem{disk=\"a\",vm=\"\",kind=\"io-errors\"} 1";
    assert!(metrics.contains(line), "{metrics}");
    assert_eq!(read(2), Some((2, IO_ERROR)));
    device.restore();
    drop(nbd);
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    assert_eq!(nbd.read(offset, 4096).len(), 4096);
    until_at_last(&daemon, "the problem to end", || kinds(&daemon, "a").is_empty());
    assert_eq!(lines(&daemon, "a", "problem io-errors"), 1, "{}", daemon.log());
    assert_eq!(lines(&daemon, "a", "problem ended: io-errors"), 1, "{}", daemon.log());
    drop(nbd);
    daemon.end();
}

#[test]
fn hung_storage_is_a_problem_until_it_answers() {
    let Some(device) = FaultyDevice::new() else { return };
    let path = device.image("a.img", 64);
    let daemon = serve(&path, "");
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    nbd.write(0, &[1; 4096]);
    device.freeze();
    assert!(nbd.send(1, 7, 8192, 4096, &[2; 4096]));
    let begun = Instant::now();
    let hangs = || kinds(&daemon, "a") == [ProblemKind::NotAnswering];
    daemon.until("the hung storage to be found", hangs);
    // A slow disk is not reported as hung.
    assert!(begun.elapsed() > Duration::from_secs(9), "{:?}", begun.elapsed());
    let problem = daemon.client().disk("a").unwrap().problems.remove(0);
    assert!(problem.message.contains(&path.display().to_string()), "{problem:?}");
    device.thaw();
    assert_eq!(nbd.reply(), Some((7, 0)));
    daemon.until("the problem to end", || kinds(&daemon, "a").is_empty());
    assert_eq!(lines(&daemon, "a", "problem not-answering"), 1, "{}", daemon.log());
    assert_eq!(lines(&daemon, "a", "problem ended: not-answering"), 1, "{}", daemon.log());
    drop(nbd);
    daemon.end();
}

#[test]
fn a_link_without_a_centre_is_a_problem_of_the_daemon() {
    // A port chosen by the host, on which no process listens after it is closed.
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let daemon = Daemon::start(&format!(
        "[[disk]]\nname = \"a\"\nmemory = \"1M\"\n[[nbd]]\naddress = \"unix:nbd.sock\"\n\
         [monitor]\naddress = \"{address}\"\nplain_allowed = true\n"
    ));
    let problems = || daemon.client().daemon().unwrap().problems;
    let begun = Instant::now();
    daemon.until("the missing link to be found", || !problems().is_empty());
    assert!(begun.elapsed() > Duration::from_secs(9), "{:?}", begun.elapsed());
    let problem = problems().remove(0);
    assert_eq!((problem.kind, problem.disk), (ProblemKind::MonitorLink, None));
    assert!(problem.message.contains(&address), "{}", problem.message);
    let metrics = daemon.client().metrics().unwrap();
    assert!(metrics.contains("fathom_problem{kind=\"monitor-link\"} 1"), "{metrics}");
    assert_eq!(kinds(&daemon, "a"), [], "it is a problem of no disk");
    let logged = |text: &str| daemon.log().lines().filter(|line| line.contains(text)).count();
    assert_eq!(logged("problem monitor-link"), 1, "{}", daemon.log());

    let mut centre = command(&std::env::temp_dir())
        .args(["monitor", "--listen", &address, "--plain", "select VDisk from IOstream"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    until_at_last(&daemon, "the link to run", || problems().is_empty());
    assert_eq!(logged("problem ended: monitor-link"), 1, "{}", daemon.log());
    centre.kill().unwrap();
    centre.wait().unwrap();
    daemon.end();
}

/// Two layers of one disk fail at once: each is a problem of its own, which begins and ends.
#[test]
fn each_layer_has_its_own_problems() {
    let folder = tempfile::tempdir_in("/var/tmp").unwrap();
    image(folder.path(), "a.img", 8 << 20);
    succeeds(folder.path(), &["create", "cache", "--size", "8M"]);
    let broken = folder.path().join("broken");
    let Some(server) = failing_server(folder.path()) else { return };
    let _server = Server(server);
    let layers = format!(
        "layers = [{{ kind = \"cache\", store = \"cache\" }}, {{ kind = \"wal\", \
         log = \"nbd+unix:///?socket={}\", size = \"1M\", age = \"1h\" }}]\n",
        folder.path().join("log.sock").display()
    );
    let text = disk_over_nbd(&folder.path().join("a.img"), &layers);
    let daemon = Daemon::start_in(folder, &text);
    wait_until_served(&daemon);
    let mut nbd = Nbd::connect(&daemon.path("nbd.sock"), "a");
    assert_eq!(nbd.fill_block(0, 1), Some(0));
    assert_eq!(kinds(&daemon, "a"), []);
    // The layers with a problem of this cause: the cache's store is truncated, the log's fails.
    let failing = || {
        let problems = daemon.client().disk("a").unwrap().problems.into_iter();
        let all: Vec<(String, String)> = problems.map(|it| (it.layer, it.cause)).collect();
        [("cache", "cut-short"), ("wal", "volume-failed")]
            .map(|(layer, cause)| all.contains(&(layer.into(), cause.into())))
    };
    let begun = || {
        ["the store of `cache`: its file was truncated", "its log volume failed"]
            .map(|text| lines(&daemon, "a", &format!("problem layer-failed: {text}")))
    };
    let ended = || {
        ["(cache, cut-short)", "(wal, volume-failed)"]
            .map(|which| lines(&daemon, "a", &format!("problem ended: layer-failed {which}")))
    };
    let shown = || {
        let metrics = daemon.client().metrics().unwrap();
        ["layer=\"cache\",cause=\"cut-short\"} 1", "layer=\"wal\",cause=\"volume-failed\"} 1"].map(
            |labels| {
                let before = "fathom_disk_problem{disk=\"a\",vm=\"\",kind=\"layer-failed\",";
                metrics.contains(&format!("{before}{labels}"))
            },
        )
    };
    File::options().write(true).open(daemon.path("cache")).unwrap().set_len(4096).unwrap();
    daemon.until("the cache's problem", || failing() == [true, false]);
    assert_eq!(begun(), [1, 0], "{}", daemon.log());
    File::create(&broken).unwrap();
    let mut block = 1;
    daemon.until("both problems", || {
        let _ = nbd.fill_block(block, 2);
        block += 1;
        failing() == [true, true]
    });
    assert_eq!((begun(), ended()), ([1, 1], [0, 0]), "{}", daemon.log());
    assert_eq!(shown(), [true, true]);
    let mut info = command(&daemon.path(""));
    let info = info.args(["disk", "info", "a", "--control", "control.sock"]).output().unwrap();
    let info = String::from_utf8_lossy(&info.stdout).into_owned();
    assert!(info.contains("its file was truncated") && info.contains("its log volume"), "{info}");
    // Each ends by itself.
    std::fs::remove_file(&broken).unwrap();
    daemon.until("the log's problem to end", || failing() == [true, false]);
    assert_eq!((begun()[0], ended()), (1, [0, 1]), "{}", daemon.log());
    let change = DiskChange { remove_layer: Some("cache".into()), ..DiskChange::default() };
    daemon.client().change_disk("a", &change).unwrap();
    daemon.until("the cache's problem to end", || failing() == [false, false]);
    assert_eq!((begun()[0], ended()), (1, [1, 1]), "{}", daemon.log());
    assert_eq!(shown(), [false, false]);
}

/// A server that ends with the test.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
