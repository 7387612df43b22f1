//! The daemon under test.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Output};
use std::time::SystemTime;

use tempfile::TempDir;

use crate::process::Process;
use crate::{Error, Result, patience, repository, until};

/// A running `fathom serve` with a configuration and a folder of its own.
///
/// Its control socket is `control.sock` in that folder, whatever the configuration says.
#[derive(Debug)]
pub struct Daemon {
    process: Option<Process>,
    directory: TempDir,
}

impl Daemon {
    /// Starts the daemon and waits until it is ready. `configuration` gets the daemon's folder, for
    /// sockets and images, and gives the text of the configuration file.
    ///
    /// # Errors
    /// When it does not come up; with what it said.
    pub fn start(configuration: impl FnOnce(&Path) -> String) -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let text = configuration(directory.path());
        std::fs::write(directory.path().join("fathom.toml"), text)?;
        let mut daemon = Self { process: None, directory };
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
    /// When it does not come up.
    pub fn restart(&mut self) -> Result<()> {
        if let Some(process) = self.process.take() {
            process.kill();
        }
        let configuration = self.path("fathom.toml").display().to_string();
        let socket = self.control_socket();
        let control = socket.display().to_string();
        let arguments =
            ["serve", "--config", &configuration, "--control", &control].map(str::to_owned);
        let process = Process::start(&Self::binary()?, &arguments, &self.path("log"))?;
        until("the daemon's control socket", patience(20), || {
            process.expect_running()?;
            Ok(UnixStream::connect(&socket).ok().map(drop))
        })?;
        self.process = Some(process);
        Ok(())
    }

    /// Kills the daemon as `kill -9` does.
    pub fn kill9(&mut self) {
        if let Some(process) = self.process.take() {
            process.kill();
        }
    }

    /// Ends the daemon in order (SIGTERM) and gives how it ended.
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

    /// What the daemon has logged, over all its starts.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    /// Runs a `fathom` command against this daemon: `--control SOCKET` comes after its arguments.
    ///
    /// # Errors
    /// When the program does not run.
    pub fn command(&self, arguments: &[&str]) -> Result<Output> {
        let mut command = Command::new(Self::binary()?);
        Ok(command.args(arguments).arg("--control").arg(self.control_socket()).output()?)
    }

    /// The `fathom` binary: the environment's, or the newest below `target`.
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
