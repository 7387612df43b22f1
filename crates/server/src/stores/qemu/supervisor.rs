//! The thread that starts a storage daemon, waits for its end, and starts it again.
//!
//! | state | left by |
//! |---|---|
//! | starting | the answer to the first command: running; its end or silence: paused |
//! | running | its end: paused |
//! | paused | the end of the pause, which doubles while it ends soon: starting |
//! | ended | nothing: from any state by [`StorageDaemon::end`] |
//!
//! The thread lives as long as the program, because the program ends with it
//! (`set_parent_process_death_signal`).

use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, ChildStderr};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use fathom_failure::Failure;
use fathom_failure::text::foreign;
use parking_lot::{Condvar, Mutex};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde_json::{Value, json};

use super::spawn::{EXPORT, Spawning};
use crate::process::line::PeerError;
use crate::process::packets;
use crate::process::qmp::Qmp;

/// How long it may take until it answers: QEMU repairs some images when it opens them.
const START_TIME_MAX: Duration = Duration::from_secs(30);
/// How long a first start waits for another program to give up its lock: a daemon that was killed.
const LOCK_TIME_MAX: Duration = Duration::from_secs(3);
/// The pause before another start, at first and at most.
const PAUSE: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(10);
/// One that has run so long has started well: the next pause is the first again.
const SOUND_TIME: Duration = Duration::from_secs(30);
/// How long a command may take, such as that which gives the image another size.
const COMMAND_TIME_MAX: Duration = Duration::from_secs(30);
/// The most bytes of its last messages that are kept.
const MESSAGES_LENGTH_MAX: usize = 2048;

/// How long it may take to end after `SIGKILL`. A system call that hangs may keep it for longer.
const KILL_TIME_MAX: Duration = Duration::from_secs(1);

/// Why it does not serve.
struct Refusal {
    failure: Failure,
    /// Whether another program has the image.
    is_locked: bool,
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        Self { failure: error.into(), is_locked: false }
    }
}

/// A storage daemon.
pub(super) struct StorageDaemon {
    shared: Arc<Shared>,
}

struct Shared {
    spawning: Spawning,
    listener: OwnedFd,
    state: Mutex<State>,
    changed: Condvar,
    /// The connection for commands. Locked while one is carried out, which may take long.
    commands: Mutex<Option<Qmp>>,
}

#[derive(Default)]
struct State {
    /// The running program.
    process: Option<OwnedFd>,
    /// Why it does not run.
    problem: Option<String>,
    starts: u64,
    is_ending: bool,
    has_ended: bool,
}

impl StorageDaemon {
    /// Starts it, and waits until it serves.
    pub(super) fn start(spawning: Spawning) -> Result<Self, Failure> {
        let listener = packets::listen_stream(&spawning.socket)
            .map_err(|error| Failure::from(error).about(spawning.socket.display()))?;
        let (state, changed) = (Mutex::default(), Condvar::new());
        let commands = Mutex::default();
        let shared = Arc::new(Shared { spawning, listener, state, changed, commands });
        let (sender, started) = mpsc::channel();
        let its = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("qemu".into());
        thread.stack_size(256 << 10).spawn(move || {
            its.run(sender);
            let _ = std::fs::remove_file(&its.spawning.socket);
            // It stays if one has not ended in good order.
            let _ = std::fs::remove_dir(its.spawning.files.folder());
            its.state.lock().has_ended = true;
            its.changed.notify_all();
        })?;
        let ended = || Err(Failure::new("the thread of the storage daemon ended"));
        started.recv().unwrap_or_else(|_| ended())?;
        Ok(Self { shared })
    }

    /// Why it does not run.
    pub(super) fn problem(&self) -> Option<String> {
        self.shared.state.lock().problem.clone()
    }

    /// How often it was started.
    pub(super) fn starts(&self) -> u64 {
        self.shared.state.lock().starts
    }

    pub(super) fn spawning(&self) -> &Spawning {
        &self.shared.spawning
    }

    /// Gives the image another size. Clients are disconnected for a moment.
    pub(super) fn resize(&self, capacity: u64) -> Result<(), String> {
        let mut commands = self.shared.commands.lock();
        let commands = commands.as_mut().ok_or("it does not run")?;
        let mut command = |name: &str, arguments: &Value| {
            commands.command(name, arguments, COMMAND_TIME_MAX).map_err(|error| error.to_string())
        };
        // An export does not share its node with what resizes it.
        command("block-export-del", &json!({ "id": EXPORT, "mode": "hard" }))?;
        let end = Instant::now() + COMMAND_TIME_MAX;
        while command("query-block-exports", &json!({}))?
            .as_array()
            .is_some_and(|it| !it.is_empty())
        {
            if Instant::now() > end {
                return Err("its requests do not complete".into());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let resized = command("block_resize", &json!({ "node-name": "image0", "size": capacity }));
        command("block-export-add", &self.shared.spawning.export())?;
        resized.map(drop)
    }

    /// Ends it, with `SIGTERM`, and after `limit` with `SIGKILL`.
    pub(super) fn end(&self, limit: Duration) {
        let mut state = self.shared.state.lock();
        state.is_ending = true;
        self.shared.changed.notify_all();
        for (signal, limit) in [(Signal::TERM, limit), (Signal::KILL, KILL_TIME_MAX)] {
            if let Some(process) = &state.process {
                let _ = pidfd_send_signal(process, signal);
            }
            let is_running = |state: &mut State| !state.has_ended;
            if !self.shared.changed.wait_while_for(&mut state, is_running, limit).timed_out() {
                return;
            }
        }
    }
}

impl Drop for StorageDaemon {
    fn drop(&mut self) {
        self.end(Duration::from_secs(2));
    }
}

impl Shared {
    fn run(&self, first: mpsc::Sender<Result<(), Failure>>) {
        let (mut first, mut pause) = (Some(first), PAUSE);
        let patience = Instant::now() + LOCK_TIME_MAX;
        loop {
            let begun = Instant::now();
            let reason = match self.start() {
                Ok((mut child, messages)) => {
                    if let Some(first) = first.take() {
                        let _ = first.send(Ok(()));
                    }
                    let text = last_messages(messages);
                    let status = child.wait().map_or_else(|it| it.to_string(), |it| it.to_string());
                    if text.is_empty() { status } else { format!("{status}: {text}") }
                }
                Err(Refusal { failure, is_locked }) => {
                    if first.is_some() && is_locked && Instant::now() < patience {
                        std::thread::sleep(PAUSE);
                        continue;
                    }
                    if let Some(first) = first.take() {
                        let _ = first.send(Err(failure));
                        return;
                    }
                    failure.message
                }
            };
            *self.commands.lock() = None;
            let mut state = self.state.lock();
            state.process = None;
            if state.is_ending {
                return;
            }
            let image = self.spawning.chain[0].path.display();
            tracing::warn!(image = %image, "the storage daemon of an image has ended: {reason}");
            state.problem = Some(format!("qemu-storage-daemon has ended: {reason}"));
            if begun.elapsed() > SOUND_TIME {
                pause = PAUSE;
            }
            let is_running = |state: &mut State| !state.is_ending;
            self.changed.wait_while_for(&mut state, is_running, pause);
            if state.is_ending {
                return;
            }
            pause = (2 * pause).min(PAUSE_MAX);
        }
    }

    /// Starts the program, and waits until it serves.
    fn start(&self) -> Result<(Child, ChildStderr), Refusal> {
        let (ours, theirs) = UnixStream::pair()?;
        let mut child = self.spawning.spawn(self.listener.try_clone()?, theirs)?;
        let messages =
            child.stderr.take().ok_or_else(|| io::Error::from(io::ErrorKind::BrokenPipe))?;
        let id = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let process = id.and_then(|id| pidfd_open(id, PidfdFlags::empty()).ok());
        let greeted = Qmp::on(ours, START_TIME_MAX).and_then(|mut commands| {
            // It is answered when all arguments have been carried out.
            commands.command("query-block-exports", &json!({}), START_TIME_MAX)?;
            Ok(commands)
        });
        let mut state = self.state.lock();
        let commands = match (greeted, state.is_ending) {
            (Ok(commands), false) => commands,
            (greeted, _) => {
                drop(state);
                let _ = child.kill();
                let text = last_messages(messages);
                let _ = child.wait();
                return Err(refusal(&text, greeted.err().as_ref()));
            }
        };
        state.process = process;
        state.problem = None;
        state.starts += 1;
        drop(state);
        *self.commands.lock() = Some(commands);
        Ok((child, messages))
    }
}

/// The last messages of the program, until it ends.
fn last_messages(mut messages: ChildStderr) -> String {
    let (mut last, mut piece) = (Vec::new(), [0; 1024]);
    while let Ok(count @ 1..) = messages.read(&mut piece) {
        last.extend_from_slice(&piece[..count]);
        let excess = last.len().saturating_sub(MESSAGES_LENGTH_MAX);
        last.drain(..excess);
    }
    String::from_utf8_lossy(&last).trim().to_owned()
}

/// Why it does not serve.
fn refusal(text: &str, error: Option<&PeerError>) -> Refusal {
    // The arguments, which QEMU repeats, say nothing to the operator.
    let text = text.rsplit("}: ").next().unwrap_or(text);
    let text = text.lines().next().unwrap_or_default();
    if text.contains("Failed to get ") && text.ends_with(" lock") {
        let failure = Failure::new(format!("another program uses the image ({})", foreign(text)));
        let failure = failure.advise("end that program: an image has one user");
        return Refusal { failure, is_locked: true };
    }
    let reason = match error {
        _ if !text.is_empty() => foreign(text),
        Some(error) => error.to_string(),
        None => "it was ended".into(),
    };
    let failure = Failure::new(format!("qemu-storage-daemon does not serve it: {reason}"));
    let failure = failure.advise("see its message; `qemu-img check` examines an image");
    Refusal { failure, is_locked: false }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_told_from_other_reasons() {
        let program = "qemu-storage-daemon: --blockdev {\"driver\":\"qcow2\"}: ";
        let locked = "Failed to get \"write\" lock\nIs another process using the image [x]?\n";
        let Refusal { failure, is_locked } = refusal(&format!("{program}{locked}"), None);
        assert!(is_locked && failure.message.starts_with("another program uses"), "{failure:?}");
        let other = "Could not open the block device";
        let Refusal { failure, is_locked } = refusal(&format!("{program}{other}\n"), None);
        assert!(!is_locked && failure.message.ends_with(other), "{failure:?}");
        let silent = refusal("", Some(&PeerError::Busy));
        assert!(silent.failure.message.contains("does not answer"));
    }
}
