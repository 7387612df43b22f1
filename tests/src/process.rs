//! Child processes that end with the test.

use std::fs::File;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use parking_lot::Mutex;

use crate::{Error, Result, until};

/// The signal of a failed assertion.
const SIGABRT: i32 = 6;
/// An assertion of QEMU that sometimes fails when a guest with several emulated processors is
/// reset: one still has addresses of the memory before.
const EMULATION_FAILURE: &str = "iotlb_to_section: Assertion";

/// A running program. It is killed when the value is dropped or the test process ends.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Mutex<Child>,
    log: PathBuf,
}

impl Process {
    /// Starts `program`. Its output is appended to the file `log`.
    ///
    /// # Errors
    /// When the program cannot be started.
    pub fn start(program: &Path, arguments: &[String], log: &Path) -> Result<Self> {
        let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let output = File::options().create(true).append(true).open(log)?;
        let mut command = Command::new("setpriv");
        command
            .args(["--pdeathsig", "KILL", "--"])
            .arg(program)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output);
        let child = spawn(command)
            .map_err(|error| Error::new(format!("cannot start {}: {error}", program.display())))?;
        Ok(Self { name, child: Mutex::new(child), log: log.to_owned() })
    }

    /// The process id.
    pub fn id(&self) -> u32 {
        self.child.lock().id()
    }

    /// Its exit status, or `None` while it runs.
    ///
    /// # Errors
    /// When the system call fails.
    pub fn status(&self) -> Result<Option<ExitStatus>> {
        Ok(self.child.lock().try_wait()?)
    }

    /// Whether the program is a QEMU whose emulation of a processor has failed.
    pub fn has_failed_to_emulate(&self) -> bool {
        self.has_aborted() && self.output().contains(EMULATION_FAILURE)
    }

    /// Whether the program has ended by a failed assertion of its own (SIGABRT).
    pub fn has_aborted(&self) -> bool {
        matches!(self.status(), Ok(Some(status)) if status.signal() == Some(SIGABRT))
    }

    /// Fails if the process has ended. For use while waiting for one of its effects.
    ///
    /// # Errors
    /// With the last lines of the program's output.
    pub fn expect_running(&self) -> Result<()> {
        match self.status()? {
            None => Ok(()),
            Some(status) => {
                let name = &self.name;
                Err(Error::new(format!(
                    "{name} ended with {status}; its output:\n{}",
                    self.last_output()
                )))
            }
        }
    }

    /// Waits for the program to end.
    ///
    /// # Errors
    /// After `limit`.
    pub fn wait(&self, limit: Duration) -> Result<ExitStatus> {
        until(&format!("{} to end; its output:\n{}", self.name, self.last_output()), limit, || {
            self.status()
        })
    }

    /// Sends SIGTERM to the program and waits for its end.
    ///
    /// # Errors
    /// After `limit`.
    pub fn terminate(&self, limit: Duration) -> Result<ExitStatus> {
        self.signal("TERM")?;
        self.wait(limit)
    }

    /// Sends a signal, by its name without `SIG`.
    ///
    /// # Errors
    /// When there is no such signal or process.
    pub fn signal(&self, name: &str) -> Result<()> {
        let status =
            Command::new("/bin/kill").args(["-s", name, &self.id().to_string()]).status()?;
        if status.success() { Ok(()) } else { Err(Error::new(format!("kill -s {name} failed"))) }
    }

    /// Kills the program, as `kill -9` does, and waits for its end.
    pub fn kill(&self) {
        let mut child = self.child.lock();
        // The program may have ended in the meantime.
        let _ = child.kill();
        let _ = child.wait();
    }

    /// The program's output so far.
    pub fn output(&self) -> String {
        std::fs::read(&self.log)
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .unwrap_or_default()
    }

    fn last_output(&self) -> String {
        tail(&self.output(), 20)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let failed = {
            let mut child = self.child.lock();
            // A crash during a test is a failure even if the test does not wait for the program.
            let crashed = match child.try_wait() {
                Ok(Some(status)) => status.signal().is_some_and(|signal| signal != 9),
                _ => false,
            };
            crashed || std::thread::panicking()
        };
        self.kill();
        let output = self.last_output();
        if failed && !output.is_empty() {
            eprintln!("--- output of {} ---\n{output}\n---", self.name);
        }
    }
}

/// The last lines of a text.
pub(crate) fn tail(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

/// Starts the command from a thread that runs as long as this process. The kernel sends the
/// parent-death signal when the thread that started the child ends, and the threads of tests end
/// early.
fn spawn(command: Command) -> std::io::Result<Child> {
    type Request = (Command, Sender<std::io::Result<Child>>);
    static SPAWNER: OnceLock<Mutex<Sender<Request>>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (sender, receiver) = channel::<Request>();
        std::thread::spawn(move || {
            for (mut command, answer) in receiver {
                // The caller waits for the answer.
                let _ = answer.send(command.spawn());
            }
        });
        Mutex::new(sender)
    });
    let (sender, receiver) = channel();
    spawner.lock().send((command, sender)).map_err(std::io::Error::other)?;
    receiver.recv().map_err(std::io::Error::other)?
}
