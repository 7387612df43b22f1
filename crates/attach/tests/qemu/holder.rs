//! A daemon for tests: a process, of any user, that maps the guest's memory and takes leases, or
//! one that means harm.

use std::fs::{File, Permissions};
use std::io::{self, BufRead, BufReader, ErrorKind};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fathom_guest_memory::userfault::{UserFault, open_device};
use fathom_guest_memory::{GuestLeases, GuestMemory, MemoryFile, Purpose};

use crate::machine::{Machine, PATTERN_AT, pattern};

/// The guest's memory, in bytes.
const MEMORY: u64 = 64 << 20;
const PAGE: u64 = 4096;
/// A page comes within this time.
const PAGE_TIME_MAX: Duration = Duration::from_secs(30);

/// Where the tables of leases of a machine's pager are.
pub fn leases(machine: &Machine) -> PathBuf {
    machine.folder().with_extension("leases")
}

/// The table of a machine, in its folder.
pub fn table(machine: &Machine) -> PathBuf {
    let entries = std::fs::read_dir(leases(machine)).unwrap().flatten();
    let mut tables = entries.map(|entry| entry.path().join("table"));
    tables.find(|path| path.exists()).expect("a table")
}

/// This program, by another name, owner and mode.
pub struct Program(PathBuf);

impl Program {
    pub fn new(machine: &Machine, name: &str, owner: u32, mode: u32) -> Self {
        let folder = machine.folder.path().join(format!("{name}-{owner}-{mode:o}"));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::set_permissions(&folder, Permissions::from_mode(0o755)).unwrap();
        let path = folder.join(name);
        std::fs::copy(std::env::current_exe().unwrap(), &path).unwrap();
        chown(&path, Some(owner), Some(owner)).unwrap();
        std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        Self(path)
    }

    /// As a package installs it.
    pub fn installed(machine: &Machine) -> Self {
        Self::new(machine, "fathom", 0, 0o755)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

/// A process that maps a machine's memory. It is killed when this value is dropped.
pub struct Holder {
    child: Child,
    output: BufReader<ChildStdout>,
}

/// A command of another user, without any right.
pub fn as_user(user: u32) -> Command {
    let user = user.to_string();
    let mut command = Command::new("setpriv");
    command.args(["--reuid", &user, "--regid", &user, "--clear-groups", "--no-new-privs"]);
    command.args(["--bounding-set", "-all", "--inh-caps", "-all", "--"]);
    command
}

impl Holder {
    /// Starts `program` as a user. `mode` is `honest`, `hidden` or a harm.
    pub fn start(machine: &Machine, program: &Program, user: u32, mode: &str) -> Self {
        let folder = format!("/proc/{}/fd", machine.process());
        let is_memory = |path: &PathBuf| {
            let link = std::fs::read_link(path);
            link.is_ok_and(|link| link.to_string_lossy().contains("memfd:memory"))
        };
        let mut files = std::fs::read_dir(folder).unwrap().flatten().map(|entry| entry.path());
        let path = files.find(is_memory).unwrap();
        let memory = File::options().read(true).write(true).open(path).unwrap();
        let mut command = as_user(user);
        command.args(["setpriv", "--pdeathsig", "KILL", "--"]).arg(program.path());
        command.arg("role-holder").arg(leases(machine)).arg(mode);
        if mode == "holds" {
            command.stderr(open_device().unwrap());
        }
        let mut child = command.stdin(memory).stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, output }
    }

    /// Waits until it says `word`.
    pub fn says(&mut self, word: &str) {
        let mut line = String::new();
        while !line.contains(word) {
            line.clear();
            assert_ne!(self.output.read_line(&mut line).unwrap(), 0, "it has not said {word}");
            assert!(!line.contains("wrong"), "{line}");
        }
    }

    pub fn process(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The life of such a process. Its standard input is the guest's memory.
pub fn play(folder: &Path, mode: &str) {
    if mode == "hidden" {
        // Root owns its folder in /proc from now on.
        // SAFETY: no memory is involved.
        assert_eq!(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0) }, 0);
    }
    let file = File::from(io::stdin().as_fd().try_clone_to_owned().unwrap());
    let identity = MemoryFile::of(&file).unwrap();
    let mut plain = GuestMemory::default();
    plain.add(0, MEMORY, file, 0, &Arc::default()).unwrap();
    println!("maps");
    let (memory, leases) = loop {
        match GuestLeases::renew(folder, &plain, None) {
            Ok(Some(renewed)) => break renewed,
            Ok(None) => {}
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {}
            Err(error) => panic!("{error}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    // The accesses without leases are over.
    drop(plain);
    leases.set_ready();
    while let Some(obstacle) = GuestLeases::set_ready_for_eviction(&[Arc::clone(&leases)]) {
        println!("{obstacle}");
        std::thread::sleep(Duration::from_millis(20));
    }
    println!("ready");
    match mode {
        "honest" => check(&memory),
        "holds" => hold_locks(folder, identity),
        harm => do_harm(folder, identity, harm),
    }
}

/// Compares pages of the pattern for ever.
fn check(memory: &GuestMemory) {
    let pattern = pattern();
    let mut random = fastrand::Rng::new();
    for count in 1.. {
        let at = random.u64(..pattern.len() as u64 / PAGE) * PAGE;
        let begun = Instant::now();
        let access = loop {
            match memory.access(PATTERN_AT + at, PAGE, Purpose::Read) {
                Some(access) => break access,
                None if begun.elapsed() > PAGE_TIME_MAX => {
                    println!("wrong: the page at {at:#x} does not come");
                    return;
                }
                None => std::thread::sleep(Duration::from_micros(200)),
            }
        };
        let mut bytes = [0; PAGE as usize];
        access.read(0, &mut bytes);
        if bytes[..] != pattern[at as usize..(at + PAGE) as usize] {
            println!("wrong: the page at {at:#x}");
            return;
        }
        if count % 500 == 0 {
            println!("checked");
        }
    }
}

/// Holds the lock of the table's inode in the kernel for ever: it writes from a page that never
/// comes. Its standard error is `/dev/userfaultfd`; whoever may mount a file system of their own
/// does not need that.
fn hold_locks(folder: &Path, memory: MemoryFile) {
    let place = folder.join(format!("{:x}-{:x}", memory.device, memory.inode));
    let table = File::options().read(true).write(true).open(place.join("table")).unwrap();
    let faults = UserFault::own(io::stderr().as_fd(), 0).unwrap();
    // SAFETY: a new mapping.
    let page = unsafe {
        let (rights, kind) = (libc::PROT_READ, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        libc::mmap(std::ptr::null_mut(), PAGE as usize, rights | libc::PROT_WRITE, kind, -1, 0)
    };
    let address = page.addr() as u64;
    faults.register(&(address..address + PAGE)).unwrap();
    std::thread::spawn(move || {
        let page = std::ptr::with_exposed_provenance::<libc::c_void>(address as usize);
        // SAFETY: the page stays mapped.
        unsafe { libc::pwrite(table.as_raw_fd(), page, 8, 0) };
        println!("wrong: the write has ended");
    });
    while !faults.has_faults() {
        std::thread::sleep(Duration::from_millis(1));
    }
    println!("holds");
    std::thread::park();
}

/// Does what a process can do that may write to the table and wake the pager.
fn do_harm(folder: &Path, memory: MemoryFile, harm: &str) {
    let place = folder.join(format!("{:x}-{:x}", memory.device, memory.inode));
    let path = place.join("table");
    let table = File::options().read(true).write(true).open(&path).unwrap();
    // It may use what is in the folder, and change nothing of it.
    assert!(std::fs::read_dir(&place).is_err(), "it may list the folder");
    assert!(
        std::fs::remove_file(&path).is_err() && std::fs::rename(&path, place.join("x")).is_err()
    );
    assert!(File::create(place.join("owner")).is_err(), "it may say whose table it is");
    assert!(File::create(place.join("y")).is_err(), "it may make files");
    // SAFETY: no memory is involved.
    let leased = unsafe { libc::fcntl(table.as_raw_fd(), libc::F_SETLEASE, libc::F_WRLCK) };
    assert_eq!(leased, -1, "it may hold up who opens the table");
    assert!(table.set_permissions(Permissions::from_mode(0o666)).is_err());
    let mut random = fastrand::Rng::with_seed(39);
    let begun = Instant::now();
    for count in 0_u64.. {
        let page = random.u64(..MEMORY / PAGE);
        let number = match harm {
            // A state, and nothing else.
            "states" => random.u64(..4),
            _ => random.u64(..),
        };
        if harm != "states" && count % 64 == 0 {
            let _ = table.write_all_at(&number.to_ne_bytes(), random.u64(..512) * 8);
        }
        let _ = table.write_all_at(&number.to_ne_bytes(), (512 + page) * 8);
        if count % 16 == 0 {
            // Pages that nobody wants, and a wake.
            let _ = table.write_all_at(&number.to_ne_bytes(), (128 + count % 256) * 8);
            table.write_all_at(&count.to_ne_bytes(), 40 * 8).unwrap();
            let mut word = [0; 8];
            table.read_exact_at(&mut word, 40 * 8).unwrap();
        }
        if count % 4096 == 0 {
            println!("harms");
        }
        if harm == "truncates" && begun.elapsed() > Duration::from_millis(500) {
            let length = random.u64(..3) * 4096;
            let _ = table.set_len(length);
            let _ = table.set_len(length << 24);
        }
    }
}
