//! A running guest.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::channel::{Channel, Output, Ticket};
use crate::process::{Process, tail};
use crate::{Error, Qmp, Result, accelerator, patience, until};

pub use crate::builder::{Builder, Disk};

/// For how long a kernel that boots is silent at most, in seconds: more than the time after which
/// it reports a hung task, with the patience of a slow host.
const SILENCE_MAX: u64 = 60;

/// Kernel messages about failures of a disk, a file system or the kernel itself.
const COMPLAINTS: &[&str] = &[
    "I/O error",
    "Buffer I/O",
    "critical medium error",
    "critical target error",
    "EXT4-fs error",
    "EXT4-fs warning",
    "JBD2: Error",
    "Aborting journal",
    "XFS (vd",
    "BTRFS error",
    "BTRFS warning",
    "blocked for more than",
    "Kernel panic",
    "Call Trace",
    "Out of memory",
];

/// A virtual machine. QEMU ends when the value is dropped.
pub struct Guest {
    // The order of dropping: first the connections, then QEMU, and last the folder.
    channel: Channel,
    qmp: Mutex<Option<Qmp>>,
    process: Process,
    directory: TempDir,
}

impl Guest {
    /// A builder for a guest with 512 MiB and no disk.
    pub fn builder() -> Builder {
        Builder::default()
    }

    pub(crate) fn new(process: Process, directory: TempDir) -> Result<Self> {
        let socket = directory.path().join("channel");
        let channel = until("QEMU's sockets", patience(20), || {
            process.expect_running()?;
            Ok(Channel::connect(&socket).ok())
        })?;
        Ok(Self { channel, qmp: Mutex::new(None), process, directory })
    }

    /// Waits until the guest has booted `times` times in total. A kernel whose processor has lost
    /// its timer prints nothing more; one whose disk does not answer reports its hung tasks.
    pub(crate) fn wait_until_ready(&self, times: usize, limit: Duration) -> Result<()> {
        let silence_max = patience(SILENCE_MAX);
        let mut printed = (0, Instant::now());
        until("the guest to boot", limit, || {
            self.process.expect_running()?;
            let console = self.console();
            if console.contains("Kernel panic") {
                return Err(Error::new("the guest's kernel panicked"));
            }
            if times == 1 && lost_a_timer(&console) {
                return Err(Error::new("a processor of the guest has lost its timer"));
            }
            if console.len() != printed.0 {
                printed = (console.len(), Instant::now());
            }
            let is_ready = self.boots() >= times;
            if !is_ready && is_emulated()? && printed.1.elapsed() > silence_max {
                let text = format!("the guest's console is silent for {silence_max:.0?} of a boot");
                return Err(Error::new(text).of_emulation());
            }
            Ok(is_ready.then_some(()))
        })
        .map_err(|error| self.explained(&error))
    }

    /// As [`wait_until_ready`](Self::wait_until_ready) after a reboot or a reset; a guest that
    /// hangs as it boots is reset once.
    fn wait_until_ready_again(&self, times: usize) -> Result<()> {
        match self.wait_until_ready(times, patience(90)) {
            Err(error) if error.is_of_emulation() && self.process.expect_running().is_ok() => {
                println!("the guest is reset: {error}");
                self.qmp(&json!({"execute": "system_reset"}))?;
                self.wait_until_ready(times, patience(90))
            }
            ready => ready,
        }
    }

    /// Whether a processor of the guest waits for a timer interrupt that was lost. QEMU's emulation
    /// loses one now and then.
    pub(crate) fn has_lost_a_timer(&self) -> bool {
        lost_a_timer(&self.console())
    }

    /// Whether the guest carries out a command within `limit`.
    pub(crate) fn answers(&self, limit: Duration) -> bool {
        let answer = self.spawn("true").and_then(|ticket| self.channel.wait(ticket, limit));
        answer.is_ok_and(|output| output.is_some())
    }

    /// Runs a shell script in the guest, for at most a minute. Any exit status is a valid answer.
    ///
    /// # Errors
    /// When the script does not end in time, or QEMU ends.
    pub fn run(&self, script: &str) -> Result<Output> {
        self.run_within(script, 60)
    }

    /// As [`run`](Self::run), with a time limit of `seconds`.
    ///
    /// # Errors
    /// When the script does not end in `seconds`, or QEMU ends.
    pub fn run_within(&self, script: &str, seconds: u64) -> Result<Output> {
        let ticket = self.spawn(script)?;
        self.finish_within(ticket, seconds)
            .map_err(|error| Error::new(format!("in the guest: {script}\n{error}")))
    }

    /// Runs a shell script (under `set -e`) that must succeed, for at most a minute, and returns
    /// its output.
    ///
    /// # Errors
    /// When it fails.
    pub fn check(&self, script: &str) -> Result<String> {
        self.check_within(script, 60)
    }

    /// As [`check`](Self::check), with a time limit of `seconds`.
    ///
    /// # Errors
    /// When it fails.
    pub fn check_within(&self, script: &str, seconds: u64) -> Result<String> {
        let output = self.run_within(&format!("set -e\n{script}"), seconds)?;
        if output.status == 0 {
            return Ok(output.text);
        }
        let text = format!("in the guest: {script}\nstatus {}: {}", output.status, output.text);
        Err(self.explained(&Error::new(text)))
    }

    /// Starts a shell script in the guest without waiting for it.
    ///
    /// # Errors
    /// When QEMU has ended.
    pub fn spawn(&self, script: &str) -> Result<Ticket> {
        self.channel.send(script)
    }

    /// Waits for a script that [`spawn`](Self::spawn) has started, for at most a minute. After a
    /// migration, call it for the guest at the destination.
    ///
    /// # Errors
    /// When the script does not end in time, or QEMU ends.
    pub fn finish(&self, ticket: Ticket) -> Result<Output> {
        self.finish_within(ticket, 60)
    }

    /// As [`finish`](Self::finish), with a time limit of `seconds`.
    ///
    /// # Errors
    /// When the script does not end in `seconds`, or QEMU ends.
    pub fn finish_within(&self, ticket: Ticket, seconds: u64) -> Result<Output> {
        let limit = patience(seconds);
        match self.channel.wait(ticket, limit) {
            Ok(Some(output)) => Ok(output),
            Ok(None) => {
                let text = format!("no answer from the guest in {limit:.0?}; {}", self.processes());
                Err(self.explained(&Error::new(text)))
            }
            Err(error) => Err(self.explained(&error)),
        }
    }

    /// A text with the requests in flight on the guest's disks and the stacks of its programs.
    fn processes(&self) -> String {
        let script = "for disk in /sys/block/vd*; do
            echo \"  ${disk##*/}: $(cat $disk/inflight) reads and writes in flight; $(cat $disk/stat)\"
        done
        for process in /proc/[0-9]*; do
            command=$(tr '\\0' ' ' < $process/cmdline)
            [ \"$command\" ] || continue
            echo \"  $(sed -n 's/^State:.//p' $process/status) $command\"
            sed -n '1,4s/^/      /p' $process/stack
        done 2> /dev/null";
        let answer = self.channel.send(script).and_then(|probe| {
            self.channel.wait(probe, patience(10)).map(|output| output.map(|output| output.text))
        });
        match answer {
            Ok(Some(text)) => format!("its programs:\n{text}"),
            Ok(None) => "the guest runs no further scripts either".to_owned(),
            Err(error) => error.to_string(),
        }
    }

    /// The guest's console output so far.
    pub fn console(&self) -> String {
        std::fs::read(self.path("console"))
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .unwrap_or_default()
    }

    /// Fails if the guest's kernel has reported a failure of a disk, a file system or itself.
    ///
    /// # Errors
    /// With the message and its surroundings.
    pub fn check_console(&self) -> Result<()> {
        match complaint(&self.console()) {
            None => Ok(()),
            Some(line) => Err(self
                .explained(&Error::new(format!("the guest's kernel reported a failure: {line}")))),
        }
    }

    /// Sends a command of QEMU's machine protocol: `{"execute": …}`.
    ///
    /// # Errors
    /// QEMU's error.
    pub fn qmp(&self, command: &Value) -> Result<Value> {
        self.with_qmp(|qmp| qmp.command(command))
    }

    /// Waits for an event of QEMU's machine protocol.
    ///
    /// # Errors
    /// When there is no such event in `seconds`.
    pub fn qmp_event(&self, name: &str, seconds: u64) -> Result<Value> {
        self.with_qmp(|qmp| qmp.event(name, patience(seconds)))
    }

    fn with_qmp<T>(&self, work: impl FnOnce(&Qmp) -> Result<T>) -> Result<T> {
        let mut connection = self.qmp.lock();
        if connection.is_none() {
            *connection = Some(Qmp::connect(&self.path("qmp"))?);
        }
        work(connection.as_ref().expect("just connected"))
    }

    /// Migrates this guest to `destination`, which waits for it at `address`. Returns when the
    /// guest runs there.
    ///
    /// # Errors
    /// When the migration fails or takes longer than `seconds`.
    pub fn migrate(&self, destination: &Guest, address: &str, seconds: u64) -> Result<()> {
        self.migrate_begin(address)?;
        self.migrate_end(destination, seconds)
    }

    /// Begins a migration to a QEMU that waits at `address`.
    ///
    /// # Errors
    /// QEMU's error.
    pub fn migrate_begin(&self, address: &str) -> Result<()> {
        self.qmp(&json!({"execute": "migrate", "arguments": {"uri": address}})).map(drop)
    }

    /// Waits until a migration has completed and the guest runs at its destination.
    ///
    /// # Errors
    /// When the migration fails or takes longer than `seconds`.
    pub fn migrate_end(&self, destination: &Guest, seconds: u64) -> Result<()> {
        until("the migration", patience(seconds), || {
            destination.process.expect_running()?;
            let state = self.qmp(&json!({"execute": "query-migrate"}))?;
            match state["status"].as_str() {
                Some("completed") => Ok(Some(())),
                Some("failed" | "cancelled") => Err(Error::new(format!("migration: {state}"))),
                _ => Ok(None),
            }
        })?;
        until("the guest to run at its destination", patience(20), || {
            let state = destination.qmp(&json!({"execute": "query-status"}))?;
            Ok((state["status"] == "running").then_some(()))
        })
    }

    /// Reboots the guest and waits until it accepts commands again.
    ///
    /// # Errors
    /// When it does not boot.
    pub fn reboot(&self) -> Result<()> {
        let boots = self.boots();
        self.spawn("reboot")?;
        self.wait_until_ready_again(boots + 1)
    }

    /// Reboots the guest by a script, such as `kexec -e`, and waits until it accepts commands
    /// again.
    ///
    /// # Errors
    /// When it does not boot.
    pub fn reboot_by(&self, script: &str) -> Result<()> {
        let boots = self.boots();
        self.spawn(script)?;
        self.wait_until_ready(boots + 1, patience(90))
    }

    /// Resets the guest, perhaps with requests in flight, and waits until it accepts commands
    /// again.
    ///
    /// # Errors
    /// When it does not boot.
    pub fn reset(&self) -> Result<()> {
        let boots = self.boots();
        self.qmp(&json!({"execute": "system_reset"}))?;
        self.wait_until_ready_again(boots + 1)
    }

    /// How often the guest has booted.
    fn boots(&self) -> usize {
        self.console().matches("fathom-guest ready").count()
    }

    /// Shuts the guest down regularly: programs end, file systems are unmounted, and QEMU ends.
    ///
    /// # Errors
    /// When QEMU does not end, or fails.
    pub fn shutdown(self) -> Result<()> {
        self.spawn("poweroff")?;
        let status = self.process.wait(patience(60)).map_err(|error| self.explained(&error))?;
        if status.success() {
            return Ok(());
        }
        Err(Error::new(format!("QEMU ended with {status}: {}", self.process.output())))
    }

    /// QEMU's process.
    pub fn process(&self) -> &Process {
        &self.process
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The error, extended by the ends of the console and of QEMU's output.
    pub fn explained(&self, error: &Error) -> Error {
        let is_of_emulation = error.is_of_emulation()
            || self.process.has_failed_to_emulate()
            || self.has_lost_a_timer();
        let error = Error::new(format!(
            "{error}\n--- the guest's console ---\n{}\n--- QEMU's output ---\n{}",
            tail(&self.console(), 40),
            tail(&self.process.output(), 20)
        ));
        if is_of_emulation { error.of_emulation() } else { error }
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- the guest's console ---\n{}\n---", tail(&self.console(), 40));
        }
    }
}

/// Whether guests' processors are emulated.
fn is_emulated() -> Result<bool> {
    Ok(!accelerator()?.starts_with("kvm"))
}

/// Whether a kernel has reported twice, 21 s apart, that a timer it waits for does not fire. A slow
/// host can cause one report.
fn lost_a_timer(console: &str) -> bool {
    console.matches("timer wakeup didn't happen").count() >= 2
}

/// The time of a line of the kernel, in seconds since its start.
fn seconds(line: &str) -> Option<f64> {
    line.trim_start().strip_prefix('[')?.split(']').next()?.trim().parse().ok()
}

/// The first line of a console with which the kernel reports a failure.
fn complaint(console: &str) -> Option<&str> {
    let complains = |line: &&str| {
        COMPLAINTS.iter().any(|complaint| line.contains(complaint))
            // Messages of XFS about mounts are not failures.
            && !(line.contains("XFS (vd")
                && ["ounting", "nding clean mount"].iter().any(|news| line.contains(news)))
    };
    // A kernel that restarts ends its devices first, so that requests of programs that still run
    // fail in the guest, for a moment also after its last message.
    let restarts: Vec<f64> =
        console.lines().filter(|line| line.contains("reboot: ")).filter_map(seconds).collect();
    let is_at_end = |line: &str| {
        seconds(line).is_some_and(|at| restarts.iter().any(|end| (-1.0..5.0).contains(&(end - at))))
    };
    console.lines().filter(complains).find(|line| !is_at_end(line))
}

#[test]
fn a_lost_timer_is_one_that_is_reported_again() {
    let report =
        "[   43.4] rcu: rcu_preempt kthread timer wakeup didn't happen for 5251 jiffies!\n";
    assert!(!lost_a_timer(report));
    assert!(lost_a_timer(&report.repeat(2)));
}

#[test]
fn requests_that_fail_while_a_kernel_restarts_are_no_complaint() {
    let failed = "[  265.686763] I/O error, dev vda, sector 533184 op 0x0:(READ)";
    let restart = "[  265.696882] reboot: Restarting system";
    assert_eq!(complaint(&format!("{failed}\n{restart}\n[    1.4] mtrr\n")), None);
    assert_eq!(complaint(&format!("{failed}\n[  272.0] reboot: Restarting system")), Some(failed));
    assert_eq!(
        complaint(&format!("{restart}\n[    3.1] I/O error, dev vdb")),
        Some("[    3.1] I/O error, dev vdb")
    );
    assert_eq!(complaint(failed), Some(failed));
}
