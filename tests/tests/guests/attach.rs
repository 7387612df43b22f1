//! A pager of the real `fathom` at a real guest that checks its memory: attached, killed, adopted,
//! detached, while the guest reboots, and while QEMU's balloon takes memory away.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use fathom_tests::{
    Assets, Builder, Daemon, Disk, Error, Guest, Result, Served, despite_emulation, patience, until,
};
use serde_json::{Value, json};

use super::attach_evict::count;

/// The memory of the guests.
pub(crate) const MEMORY_MIB: u64 = 384;
/// How often the pager is killed.
const KILLS: u64 = 12;

/// Checks files in memory, and makes new ones, until it is stopped. Prints the number of its
/// rounds.
pub(crate) const CHECKER: &str = "set -e; mkdir -p /t; mount -t tmpfs -o size=160m none /t; cd /t
    for i in 1 2 3; do dd if=/dev/urandom of=f$i bs=1M count=16 2> /dev/null; done
    md5sum f? > sums; n=0; touch /t/begun
    while [ ! -e /t/stop ]; do
        md5sum -c sums > /dev/null
        dd if=/dev/urandom of=w bs=1M count=12 2> /dev/null
        a=$(md5sum < w); cp w w2; b=$(md5sum < w2); [ \"$a\" = \"$b\" ]
        rm w w2; n=$((n + 1))
    done
    echo $n";

/// A guest on a vhost-user disk, whose pager is started by tests.
pub(crate) struct Scene {
    pub guest: Guest,
    pub daemon: Daemon,
}

impl Scene {
    fn start(devices: &[&str]) -> Result<Option<Self>> {
        Self::start_with(devices, "")
    }

    /// The same with further words on the kernel's command line.
    pub fn start_with(devices: &[&str], append: &str) -> Result<Option<Self>> {
        if std::fs::File::options().write(true).read(true).open("/dev/userfaultfd").is_err() {
            println!("Skipped: /dev/userfaultfd may not be opened");
            return Ok(None);
        }
        let daemon = Daemon::serve(&[Served::sparse("disk", 64)])?;
        Self::start_at(daemon, devices, append).map(Some)
    }

    /// A guest on the disk `disk` of a daemon.
    pub fn start_at(daemon: Daemon, devices: &[&str], append: &str) -> Result<Self> {
        let socket = format!("unix:{},server=on,wait=off", daemon.path("pager.qmp").display());
        let assets = Assets::get()?;
        let builder = Guest::builder()
            .memory_mib(MEMORY_MIB as u32)
            .append(append)
            .disk(Disk::vhost_user(daemon.path("disk.sock")).queues(2))
            .disk(Disk::snapshot_of(assets.tools()?));
        let arguments = ["-qmp", &socket].into_iter().chain(devices.iter().copied());
        let guest = arguments.fold(builder, Builder::argument).start()?;
        Ok(Self { guest, daemon })
    }

    fn folder(&self) -> PathBuf {
        self.daemon.path("pagers")
    }

    /// `fathom pager` with these words.
    pub fn command(&self, words: &[&str]) -> Result<Command> {
        let mut command = Command::new(Daemon::binary()?);
        command.arg("pager").args(words).arg("--json").arg("--folder").arg(self.folder());
        Ok(command)
    }

    /// Starts a pager in the background.
    fn start_pager(&self, verb: &str) -> Result<Pager> {
        self.start_pager_with(verb, &[])
    }

    /// The same with further arguments.
    pub fn start_pager_with(&self, verb: &str, further: &[&str]) -> Result<Pager> {
        let process = self.guest.process().id().to_string();
        let mut command = self.command(&[verb, &process])?;
        if verb == "attach" {
            command.arg("--qmp").arg(self.daemon.path("pager.qmp"));
        }
        command.args(further);
        let log = std::fs::File::create(self.daemon.path("pager.log"))?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        Ok(Pager { child: command.spawn()? })
    }

    /// Starts a pager, and waits until it is attached.
    fn pager(&self, verb: &str) -> Result<(Pager, Value)> {
        self.pager_with(verb, &[])
    }

    /// The same with further arguments.
    pub fn pager_with(&self, verb: &str, further: &[&str]) -> Result<(Pager, Value)> {
        let mut pager = self.start_pager_with(verb, further)?;
        let status = until("the pager to be attached", patience(30), || {
            if let Some(status) = pager.child.try_wait()? {
                let log = std::fs::read_to_string(self.daemon.path("pager.log"))?;
                return Err(Error::new(format!("the pager has ended ({status}): {log}")));
            }
            let status = self.status()?;
            Ok((status["state"] == "attached").then_some(status))
        })?;
        assert_eq!(status["memory_bytes"], MEMORY_MIB << 20, "{status}");
        assert_eq!(status["registered_bytes"], MEMORY_MIB << 20, "{status}");
        Ok((pager, status))
    }

    /// Options for a swap file to which most of what leaves goes; none where the folder would be in
    /// memory.
    pub fn swap_options(&self) -> Result<Vec<String>> {
        let folder = self.daemon.path("swap");
        let above = self.daemon.path("");
        let output = Command::new("stat").args(["-fc", "%T"]).arg(above).output()?;
        if output.stdout.starts_with(b"tmpfs") {
            println!("Without a swap file: temporary files are in memory");
            return Ok(Vec::new());
        }
        let folder = folder.display().to_string();
        Ok(["--swap", &folder, "--pages-limit", "4M"].map(str::to_owned).into())
    }

    /// The state of the guest's pager; `null` if there never was one.
    pub fn status(&self) -> Result<Value> {
        let output = self.command(&["list"])?.output()?;
        let list: Value = serde_json::from_slice(&output.stdout)
            .map_err(|error| Error::new(format!("fathom pager list: {error}: {output:?}")))?;
        Ok(list[0].clone())
    }

    pub fn detach(&self) -> Result<Value> {
        let process = self.guest.process().id().to_string();
        let output = self.command(&["detach", &process])?.output()?;
        if !output.status.success() {
            return Err(Error::new(format!("fathom pager detach: {output:?}")));
        }
        serde_json::from_slice(&output.stdout).map_err(|error| Error::new(error.to_string()))
    }

    /// Has the checker make a few more rounds, and end.
    pub fn finish(&self, checker: fathom_tests::Ticket) -> Result<u64> {
        self.guest.check("touch /t/stop")?;
        let output = self.guest.finish_within(checker, 120)?;
        assert_eq!(output.status, 0, "the guest's memory is wrong: {}", output.text);
        Ok(output.text.trim().parse().expect("a number"))
    }
}

/// A pager in the background. It is killed when this value is dropped.
pub(crate) struct Pager {
    child: Child,
}

impl Pager {
    /// How it has ended, if it has.
    pub fn ended(&mut self) -> Result<Option<std::process::ExitStatus>> {
        Ok(self.child.try_wait()?)
    }
}

impl Drop for Pager {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn wait_for_checker(guest: &Guest) -> Result<()> {
    // The guest itself waits: a command every few milliseconds would keep it from its work.
    guest.check_within("while [ ! -e /t/begun ]; do sleep 0.2; done", 240).map(drop)
}

#[test]
fn pagers_are_killed_at_any_time_and_the_guest_goes_on() -> Result<()> {
    despite_emulation(kills)
}

fn kills() -> Result<()> {
    let Some(scene) = Scene::start(&[])? else { return Ok(()) };
    let checker = scene.guest.spawn(CHECKER)?;
    wait_for_checker(&scene.guest)?;
    let (pager, status) = scene.pager("attach")?;
    println!("pause of the main thread: {} µs", status["pause_ns"].as_u64().unwrap_or(0) / 1000);
    assert_eq!(status["is_adopted"], false);
    // Memory that the guest has not used comes into being through the pager.
    scene.guest.check_within(
        "mkdir -p /g; mount -t tmpfs -o size=90m none /g; head -c 80000000 /dev/zero > /g/x
        [ $(tr -d '\\0' < /g/x | wc -c) = 0 ]; umount /g",
        120,
    )?;
    let counts = scene.status()?["counts"].clone();
    println!("while it grew: {} faults, {} bytes", counts["faults"], counts["zeroed_bytes"]);
    assert!(counts["faults"].as_u64() > Some(0), "{counts}");
    drop(pager);

    let seed = std::env::var("FATHOM_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(39);
    let mut random = fastrand::Rng::with_seed(seed);
    for kill in 0..KILLS {
        let mut pager = scene.start_pager("attach")?;
        // Some die while they attach, some while they serve.
        std::thread::sleep(Duration::from_millis(random.u64(0..300)));
        let ended = pager.child.try_wait()?;
        assert!(ended.is_none(), "kill {kill} of seed {seed}: {ended:?}");
        drop(pager);
        scene.guest.check("head -c 4000000 /dev/zero > /t/z; rm /t/z")?;
        scene.guest.qmp(&json!({"execute": "query-status"}))?;
    }
    let (pager, status) = scene.pager("adopt")?;
    assert_eq!((&status["is_adopted"], &status["pause_ns"]), (&json!(true), &json!(0)));
    let last = scene.detach()?;
    assert_eq!(last["state"], "detached", "{last}");
    drop(pager);
    // Both the pager and its guard die: only then somebody has to do something.
    let (pager, status) = scene.pager("attach")?;
    for process in [&status["guard"], &status["pager"]] {
        Command::new("kill").args(["-9", &process.to_string()]).status()?;
    }
    drop(pager);
    let state = scene.status()?;
    println!(
        "after the death of both: {} with {} bytes",
        state["state"], state["registered_bytes"]
    );
    scene.detach()?;
    let rounds = scene.finish(checker)?;
    println!("the guest has checked its memory {rounds} times");
    assert!(rounds > 0);
    assert_eq!(scene.status()?["state"], "detached");
    scene.guest.check_console()?;
    scene.daemon.check("disk")?;
    scene.guest.shutdown()
}

#[test]
fn a_guest_reboots_and_its_balloon_works_while_a_pager_is_attached() -> Result<()> {
    despite_emulation(reboot_and_balloon)
}

fn reboot_and_balloon() -> Result<()> {
    let balloon = ["-device", "virtio-balloon-pci,free-page-reporting=on"];
    let Some(scene) = Scene::start(&balloon)? else { return Ok(()) };
    let guest = &scene.guest;
    let control = scene.daemon.control_socket().display().to_string();
    // Pages are away meanwhile.
    let (pager, _) = scene.pager_with("attach", &["--limit", "180M", "--control", &control])?;
    until("pages to leave", patience(60), || {
        Ok((count(&scene.status()?, "evicted") > 2000).then_some(()))
    })?;
    guest.reboot()?;
    assert_eq!(scene.status()?["registered_bytes"], MEMORY_MIB << 20);
    guest.check(
        "mkdir -p /tools; mount -o ro /dev/vdb /tools
        modprobe virtio_balloon || insmod /tools/virtio_balloon.ko",
    )?;
    let checker = guest.spawn(CHECKER)?;
    wait_for_checker(guest)?;
    let size = |mib: u64| json!({"execute": "balloon", "arguments": {"value": mib << 20}});
    let actual = || -> Result<u64> {
        let found = guest.qmp(&json!({"execute": "query-balloon"}))?;
        Ok(found["actual"].as_u64().unwrap_or_default() >> 20)
    };
    for _ in 0..2 {
        guest.qmp(&size(320))?;
        until("the balloon to grow", patience(60), || Ok((actual()? <= 321).then_some(())))?;
        let before = scene.status()?["counts"]["faults"].as_u64();
        guest.qmp(&size(MEMORY_MIB))?;
        until("the balloon to shrink", patience(60), || {
            Ok((actual()? == MEMORY_MIB).then_some(()))
        })?;
        // What it gave back is zeroes, and comes into being by the pager.
        guest.check_within(
            "head -c 60000000 /dev/urandom > /t/z; cat /t/z > /dev/null; rm /t/z",
            120,
        )?;
        let after = scene.status()?["counts"]["faults"].as_u64();
        assert!(after > before, "no fault: {before:?}, {after:?}");
    }
    assert_eq!(scene.status()?["registered_bytes"], MEMORY_MIB << 20);
    let rounds = scene.finish(checker)?;
    assert!(count(&scene.status()?, "away_bytes") > 0);
    guest.reset()?;
    guest.check("head -c 30000000 /dev/urandom | md5sum")?;
    let last = scene.detach()?;
    assert_eq!((count(&last, "damaged"), count(&last, "away_bytes")), (0, 0), "{last}");
    println!("evicted {}, brought {}", count(&last, "evicted"), count(&last, "brought"));
    let counts = &last["counts"];
    println!("{rounds} checks, {} faults, {} bytes", counts["faults"], counts["zeroed_bytes"]);
    assert_eq!(last["counts"]["released"], 0, "{last}");
    guest.check("head -c 30000000 /dev/urandom | md5sum")?;
    guest.check_console()?;
    drop(pager);
    scene.guest.shutdown()
}
