//! A QEMU without a disk, and a pager in a process of its own.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use fathom_attach::{PagerStatus, Vmm};
use tempfile::TempDir;

use crate::roles::{DIE_AT, LIMIT, STORE, SWAP};

/// A wait that takes longer has failed. It decides nothing else.
pub const PATIENCE: Duration = Duration::from_secs(60);
const QEMU: &str = "qemu-system-x86_64";

/// Why the tests cannot run here.
pub fn can_run() -> Result<(), String> {
    if Command::new(QEMU).arg("--version").stdout(Stdio::null()).status().is_err() {
        return Err("there is no QEMU".into());
    }
    let device = std::fs::File::options().read(true).write(true).open("/dev/userfaultfd");
    device.map(drop).map_err(|error| format!("/dev/userfaultfd: {error}"))
}

/// Where the pattern is in the guest's memory.
pub const PATTERN_AT: u64 = 16 << 20;

/// Pages of text, of one number, and of noise.
pub fn pattern() -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(12);
    let mut bytes = Vec::with_capacity(PATTERN_BYTES);
    while bytes.len() < PATTERN_BYTES {
        let mut page = vec![random.u8(..); 4096];
        match random.u8(..10) {
            0 => random.fill(&mut page),
            1..4 => {}
            _ => {
                let varied = random.usize(..2500);
                random.fill(&mut page[..varied]);
            }
        }
        bytes.extend(page);
    }
    bytes
}
/// Its length in bytes.
pub const PATTERN_BYTES: usize = 24 << 20;

/// Waits until `work` has a value.
pub fn until<T>(what: &str, mut work: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(value) = work() {
            return value;
        }
        assert!(begun.elapsed() < PATIENCE, "no {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A QEMU that runs its firmware.
pub struct Machine {
    child: Child,
    pub folder: TempDir,
}

impl Machine {
    /// With 64 MiB of memory in a memfd.
    pub fn start() -> Self {
        Self::with(&[], "memory-backend-memfd,id=m,size=64M,share=on", &[])
    }

    /// Started by `before`, with another memory and further arguments.
    pub fn with(before: &[&str], memory: &str, arguments: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let set = std::process::Command::new("chmod").arg("777").arg(folder.path()).status();
        assert!(set.unwrap().success());
        let words: Vec<&str> = before.iter().copied().chain([QEMU]).collect();
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--"]).args(words);
        command.args(["-nodefaults", "-display", "none", "-accel", "tcg", "-object", memory]);
        command.args(["-machine", "q35,memory-backend=m", "-m", "64M"]).args(arguments);
        for name in ["qmp", "own"] {
            let socket = folder.path().join(name);
            command.arg("-qmp").arg(format!("unix:{},server=on,wait=off", socket.display()));
        }
        let child = command.stdin(Stdio::null()).spawn().unwrap();
        let mut machine = Self { child, folder };
        until("answer of QEMU", || {
            if let Some(status) = machine.child.try_wait().unwrap() {
                panic!("QEMU has ended: {status}");
            }
            machine.try_answer()
        });
        machine
    }

    pub fn process(&self) -> i32 {
        self.child.id() as i32
    }

    pub fn vmm(&self) -> Vmm {
        Vmm::open(self.process()).unwrap()
    }

    fn try_answer(&self) -> Option<()> {
        self.ask(&["", "{\"execute\": \"qmp_capabilities\"}", "{\"execute\": \"query-status\"}"])
    }

    fn ask(&self, commands: &[&str]) -> Option<()> {
        let stream = UnixStream::connect(self.folder.path().join("qmp")).ok()?;
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut reader = BufReader::new(stream);
        for command in commands {
            if !command.is_empty() {
                reader.get_mut().write_all(format!("{command}\n").as_bytes()).ok()?;
            }
            let mut line = String::new();
            while !(line.contains("\"QMP\"") || line.contains("\"return\"")) {
                line.clear();
                if reader.read_line(&mut line).ok()? == 0 {
                    return None;
                }
            }
        }
        Some(())
    }

    /// QEMU lives, and its main loop works: it carries out commands.
    pub fn check(&mut self) {
        assert_eq!(self.child.try_wait().unwrap(), None, "QEMU has ended");
        let begun = Instant::now();
        self.try_answer().expect("QEMU does not answer");
        let took = begun.elapsed();
        if took > Duration::from_secs(1) {
            println!("QEMU answers after {took:?}");
        }
        // Of two tries, one is after any call that was interrupted has been made again.
        self.try_answer().expect("QEMU does not answer");
    }

    /// With `MEMORY` bytes of a pattern in its memory.
    pub fn with_pattern() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pattern");
        std::fs::write(&path, pattern()).unwrap();
        let loader = format!("loader,file={},addr={PATTERN_AT:#x},force-raw=on", path.display());
        let memory = "memory-backend-memfd,id=m,size=64M,share=on";
        let mut machine = Self::with(&[], memory, &["-device", &loader]);
        machine.check_pattern();
        machine
    }

    /// How QEMU has ended, if it has.
    pub fn ended(&mut self) -> Option<std::process::ExitStatus> {
        self.child.try_wait().unwrap()
    }

    /// QEMU reads the pattern in its memory, as a device does.
    pub fn check_pattern(&mut self) {
        self.read_pattern().expect("QEMU does not answer");
        let saved = std::fs::read(self.folder.path().join("saved")).unwrap();
        let differs = saved.iter().zip(pattern()).position(|(one, other)| *one != other);
        assert_eq!((saved.len(), differs), (pattern().len(), None), "the guest's memory is wrong");
    }

    /// Has QEMU read the pattern. `None` if it ends instead.
    pub fn read_pattern(&self) -> Option<()> {
        let path = self.folder.path().join("saved");
        let line = format!(
            "{{\"execute\": \"pmemsave\", \"arguments\": {{\"val\": {PATTERN_AT}, \"size\": {}, \
             \"filename\": \"{}\"}}}}",
            pattern().len(),
            path.display()
        );
        self.ask(&["", "{\"execute\": \"qmp_capabilities\"}", &line])
    }

    /// How many userfaultfds QEMU has.
    pub fn userfaults(&self) -> usize {
        userfaults(self.process())
    }

    /// The bytes whose faults are reported, by the kernel's account.
    pub fn registered(&self) -> u64 {
        self.vmm().registered_bytes().unwrap()
    }

    pub fn folder(&self) -> PathBuf {
        self.folder.path().join("records")
    }

    /// Forgets the descriptor: the next pager injects again.
    pub fn forget(&self) {
        let _ = std::fs::remove_file(self.folder().join(format!("{}.json", self.process())));
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(store(self));
    }
}

/// The folder of the store of a machine's pages.
pub fn store(machine: &Machine) -> PathBuf {
    Path::new("/dev/shm").join(format!("fathom-test-pager-{}", machine.process()))
}

/// A pager in a process of its own.
pub struct PagerProcess {
    pub child: Child,
    output: BufReader<ChildStdout>,
}

impl PagerProcess {
    /// Starts one by `before`, which may be empty. `die_at` is a step.
    pub fn start(machine: &Machine, before: &[&str], mode: &str, die_at: &str) -> Self {
        let socket = machine.folder.path().join("own");
        Self::start_with(machine, before, &socket, mode, die_at)
    }

    /// Starts one that takes pages away, with a limit in bytes or none.
    pub fn start_evicting(machine: &Machine, mode: &str, die_at: &str, limit: Option<u64>) -> Self {
        Self::start_evicting_with(machine, mode, die_at, limit, None)
    }

    /// The same, with a swap file in a folder.
    pub fn start_evicting_with(
        machine: &Machine,
        mode: &str,
        die_at: &str,
        limit: Option<u64>,
        swap: Option<&Path>,
    ) -> Self {
        let socket = machine.folder.path().join("own");
        let mut words = vec!["env".to_owned(), format!("{STORE}={}", store(machine).display())];
        words.extend(swap.map(|folder| format!("{SWAP}={}", folder.display())));
        words.extend(limit.map(|limit| format!("{LIMIT}={limit}")));
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        Self::start_with(machine, &words, &socket, mode, die_at)
    }

    pub fn start_with(
        machine: &Machine,
        before: &[&str],
        socket: &Path,
        mode: &str,
        die_at: &str,
    ) -> Self {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--"]).args(before);
        command.arg(std::env::current_exe().unwrap()).arg("role-pager");
        command.arg(machine.process().to_string()).arg(machine.folder());
        command.arg(socket).arg(mode).env(DIE_AT, die_at);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, output }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    fn status(&mut self, word: &str) -> PagerStatus {
        let line = self.line();
        let text = line.strip_prefix(word).unwrap_or_else(|| panic!("not {word}: {line}"));
        serde_json::from_str(text).unwrap()
    }

    /// Waits until it is attached.
    pub fn attached(&mut self) -> PagerStatus {
        self.status("attached: ")
    }

    /// Has it detach, and waits for its end.
    pub fn detach(mut self) -> PagerStatus {
        drop(self.child.stdin.take());
        let status = self.status("detached: ");
        assert!(self.child.wait().unwrap().success());
        status
    }

    /// Waits until it refuses, and returns what it says.
    pub fn refused(mut self) -> String {
        let line = self.line();
        let text = line.strip_prefix("refused: ").unwrap_or_else(|| panic!("not refused: {line}"));
        assert!(!self.child.wait().unwrap().success());
        text.to_owned()
    }

    /// Waits until it has ended by a signal.
    pub fn died(mut self) {
        use std::os::unix::process::ExitStatusExt;
        let status = self.child.wait().unwrap();
        assert_eq!(status.signal(), Some(libc::SIGKILL), "{}", self.line());
    }

    /// Kills it.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.died();
    }
}

impl PagerProcess {
    /// Waits until it is attached or refuses: its line.
    pub fn outcome(&mut self) -> String {
        self.line()
    }
}

/// How many userfaultfds a process has.
fn userfaults(process: i32) -> usize {
    let files = std::fs::read_dir(format!("/proc/{process}/fd")).unwrap();
    let links = files.flatten().filter_map(|file| std::fs::read_link(file.path()).ok());
    links.filter(|link| link.to_string_lossy().contains("[userfaultfd]")).count()
}

/// How many guards of this program there are, which is that of one test at a time.
pub fn guards() -> usize {
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    numbers.filter(|process| is_guard(*process)).count()
}

/// Whether a process is a guard that has its userfaultfd. Before it runs its program, it has copies
/// of its parent's descriptors.
pub fn is_guard(process: i32) -> bool {
    let command = std::fs::read_to_string(format!("/proc/{process}/cmdline")).unwrap_or_default();
    command.contains("role-guard") && userfaults(process) > 0
}
