//! The daemon under test.

use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Output};
use std::time::SystemTime;

use fathom_control::{Client, DiskStatus, FrontendStatus, VhostUserStatus};
use tempfile::TempDir;

use crate::process::{Process, tail};
use crate::{Error, Result, Served, patience, repository, until};

/// The program of a daemon of another user, in its folder.
const OWN_PROGRAM: &str = "program/fathom";

/// A running `fathom serve` with a configuration and a folder of its own.
///
/// Its control socket is always `control.sock` in that folder, regardless of the configuration.
#[derive(Debug)]
pub struct Daemon {
    process: Option<Process>,
    directory: TempDir,
    /// The user that it runs as; that of the test if there is none.
    user: Option<u32>,
}

/// The configuration's text for these disks, whose images are made.
fn text_of(directory: &Path, disks: &[Served], tables: &str) -> Result<String> {
    let tables_of_disks = disks.iter().map(|disk| disk.table(directory));
    let parts = tables_of_disks.collect::<Result<Vec<String>>>()?;
    Ok(format!("{tables}\n{}", parts.concat()))
}

impl Daemon {
    /// Starts the daemon and waits until it is ready. `configuration` receives the daemon's folder,
    /// for sockets and images, and returns the text of the configuration file.
    ///
    /// # Errors
    /// When it does not start; with its output.
    pub fn start(configuration: impl FnOnce(&Path) -> String) -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let text = configuration(directory.path());
        std::fs::write(directory.path().join("fathom.toml"), text)?;
        let mut daemon = Self { process: None, directory, user: None };
        daemon.restart()?;
        Ok(daemon)
    }

    /// Starts the daemon with these disks, as another user without any right, by a program of root,
    /// as the package's unit does. `None` if this user may not become another.
    ///
    /// # Errors
    /// As for [`serve`](Self::serve).
    pub fn serve_as(user: u32, disks: &[Served]) -> Result<Option<Self>> {
        let directory = tempfile::tempdir()?;
        let text = text_of(directory.path(), disks, "")?;
        std::fs::write(directory.path().join("fathom.toml"), text)?;
        let program = directory.path().join(OWN_PROGRAM);
        std::fs::create_dir_all(program.parent().unwrap_or(directory.path()))?;
        std::fs::copy(Self::binary()?, &program)?;
        std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755))?;
        for entry in std::fs::read_dir(directory.path())? {
            let path = entry?.path();
            if path.is_file() && chown(&path, Some(user), Some(user)).is_err() {
                println!("Skipped: this user may not become another");
                return Ok(None);
            }
        }
        chown(directory.path(), Some(user), Some(user))?;
        let mut daemon = Self { process: None, directory, user: Some(user) };
        daemon.restart()?;
        Ok(Some(daemon))
    }

    /// Has the next start be that of another user.
    ///
    /// # Errors
    /// When its files cannot be given to that user.
    pub fn set_user(&mut self, user: u32) -> Result<()> {
        let folder = self.directory.path().display().to_string();
        let owner = format!("{user}:{user}");
        Command::new("chown").args(["-R", &owner, &folder]).status()?;
        chown(self.path(OWN_PROGRAM), Some(0), Some(0))?;
        self.user = Some(user);
        Ok(())
    }

    /// Starts the daemon with these disks, each on a socket `NAME.sock`.
    ///
    /// # Errors
    /// When an image cannot be made, or the daemon does not start.
    pub fn serve(disks: &[Served]) -> Result<Self> {
        Self::serve_with(disks, "")
    }

    /// The same, with further tables of the configuration.
    ///
    /// # Errors
    /// As for [`serve`](Self::serve).
    pub fn serve_with(disks: &[Served], tables: &str) -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let text = text_of(directory.path(), disks, tables)?;
        std::fs::write(directory.path().join("fathom.toml"), text)?;
        let mut daemon = Self { process: None, directory, user: None };
        daemon.restart()?;
        Ok(daemon)
    }

    /// A path in the daemon's folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The control socket.
    pub fn control_socket(&self) -> PathBuf {
        self.path("control.sock")
    }

    /// Starts the daemon again with the same configuration file and waits until it is ready.
    ///
    /// # Errors
    /// When it does not start.
    pub fn restart(&mut self) -> Result<()> {
        if let Some(process) = self.process.take() {
            process.kill();
        }
        let configuration = self.path("fathom.toml").display().to_string();
        let socket = self.control_socket();
        let control = socket.display().to_string();
        let arguments = ["serve", "--config", &configuration, "--control", &control];
        let (program, arguments) = self.command_line(&arguments)?;
        let process = Process::start(&program, &arguments, &self.path("log"))?;
        until("the daemon to be ready", patience(20), || {
            process.expect_running()?;
            Ok(Client::new(&socket).daemon().ok().filter(|daemon| daemon.ready_us > 0).map(drop))
        })?;
        self.process = Some(process);
        Ok(())
    }

    /// The program with these arguments, as the daemon's user.
    fn command_line(&self, arguments: &[&str]) -> Result<(PathBuf, Vec<String>)> {
        let own = arguments.iter().map(|argument| (*argument).to_owned());
        let Some(user) = self.user else { return Ok((Self::binary()?, own.collect())) };
        let user = user.to_string();
        let program = self.path(OWN_PROGRAM).display().to_string();
        let words = ["--reuid", &user, "--regid", &user, "--clear-groups", "--no-new-privs"];
        let rights = ["--bounding-set", "-all", "--inh-caps", "-all", "--"];
        // Another user is a new process for the signal at the parent's death.
        let inner = ["setpriv", "--pdeathsig", "KILL", "--", &program];
        let words = words.iter().chain(&rights).chain(&inner).map(|word| (*word).to_owned());
        Ok(("setpriv".into(), words.chain(own).collect()))
    }

    /// Kills the daemon as `kill -9` does.
    pub fn kill9(&mut self) {
        if let Some(process) = self.process.take() {
            process.kill();
        }
    }

    /// Ends the daemon by SIGTERM and returns its exit status.
    ///
    /// # Errors
    /// When it does not run or does not end.
    pub fn stop(&mut self) -> Result<ExitStatus> {
        let process = self.process.take().ok_or_else(|| Error::new("the daemon does not run"))?;
        process.terminate(patience(30))
    }

    /// The process.
    ///
    /// # Panics
    /// When the daemon was killed or stopped.
    pub fn process(&self) -> &Process {
        self.process.as_ref().expect("the daemon runs")
    }

    /// The daemon's log, since its first start.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    /// Runs a `fathom` command for this daemon: `--control SOCKET` is appended to its arguments.
    ///
    /// # Errors
    /// When the program does not run.
    pub fn command(&self, arguments: &[&str]) -> Result<Output> {
        let mut command = Command::new(Self::binary()?);
        Ok(command.args(arguments).arg("--control").arg(self.control_socket()).output()?)
    }

    /// The daemon's control interface.
    pub fn client(&self) -> Client {
        Client::new(self.control_socket())
    }

    /// The daemon's status of a disk.
    ///
    /// # Errors
    /// When the daemon does not answer.
    pub fn status(&self, name: &str) -> Result<DiskStatus> {
        self.client().disk(name).map_err(|error| self.explained(&error.to_string()))
    }

    /// The daemon's status of the guest on a disk.
    ///
    /// # Errors
    /// When it does not answer, or the disk has no vhost-user socket.
    pub fn guest(&self, name: &str) -> Result<VhostUserStatus> {
        self.status(name)?
            .frontends
            .into_iter()
            .find_map(|frontend| match frontend {
                FrontendStatus::VhostUser(status) => Some(status),
                FrontendStatus::Nbd(_) => None,
            })
            .ok_or_else(|| Error::new(format!("the disk {name} is on no vhost-user socket")))
    }

    /// The number of operations of the name `operation` that a disk has completed.
    ///
    /// # Errors
    /// When the daemon does not answer.
    pub fn count(&self, name: &str, operation: &str) -> Result<u64> {
        let statistics =
            self.client().statistics().map_err(|error| self.explained(&error.to_string()))?;
        let disk = statistics.disk(name).and_then(|disk| disk.operation(operation));
        Ok(disk.map_or(0, |operation| operation.count))
    }

    /// Waits until the guest on a disk has started its queues, and returns the guest's status.
    ///
    /// # Errors
    /// When it has not started them after half a minute.
    pub fn wait_for_guest(&self, name: &str) -> Result<VhostUserStatus> {
        until(&format!("the queues of {name}"), patience(30), || {
            self.process().expect_running()?;
            Ok(Some(self.guest(name)?).filter(|guest| guest.queues_active > 0))
        })
    }

    /// Checks that the daemon has refused no request on a disk, that the disk has no problems, and
    /// that no thread of the daemon has panicked.
    ///
    /// # Errors
    /// With the status and the end of the log.
    pub fn check(&self, name: &str) -> Result<()> {
        let (status, guest) = (self.status(name)?, self.guest(name)?);
        let wrong = status.refused + guest.refused + guest.broken_queues + guest.protocol_errors;
        if wrong == 0 && status.problems.is_empty() && !self.log().contains("panicked") {
            return Ok(());
        }
        Err(self.explained(&format!("the disk {name} has a problem: {status:?}")))
    }

    fn explained(&self, what: &str) -> Error {
        Error::new(format!("{what}\n--- the daemon's log ---\n{}", tail(&self.log(), 20)))
    }

    /// The `fathom` binary: that of the environment variables, or the newest below `target`.
    ///
    /// # Errors
    /// When there is none.
    pub fn binary() -> Result<PathBuf> {
        for name in ["FATHOM_BINARY", "CARGO_BIN_EXE_fathom"] {
            if let Some(path) = std::env::var_os(name) {
                return Ok(path.into());
            }
        }
        let modified =
            |path: &PathBuf| -> Option<SystemTime> { path.metadata().ok()?.modified().ok() };
        ["release", "debug"]
            .iter()
            .map(|profile| repository().join("target").join(profile).join("fathom"))
            .filter(|path| path.exists())
            .max_by_key(modified)
            .ok_or_else(|| Error::new("no fathom binary; run: make build"))
    }
}
