//! What a command leaves behind when a signal ends it: nothing.
//!
//! A thread waits for the signals that ask for an end. It removes the file that is being made and
//! ends the process by the same signal, so that a shell sees what happened.

use std::{
    fs, io,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
};

use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    iterator::Signals,
    low_level::emulate_default_handler,
};

/// What asks for the end.
const SIGNALS: [i32; 3] = [SIGINT, SIGTERM, SIGHUP];

/// The file to be removed when a signal ends the process; whoever holds the lock is not ended.
#[derive(Clone, Default)]
pub struct Interrupted(Arc<Mutex<Option<PathBuf>>>);

impl Interrupted {
    /// Takes the signals over, for the rest of the process's life.
    ///
    /// # Errors
    /// When there is no thread for it.
    pub fn watch() -> io::Result<Self> {
        let this = Self::default();
        let signals = Signals::new(awaited())?;
        let watcher = this.clone();
        thread::Builder::new().name("signals".into()).spawn(move || watcher.wait(signals))?;
        Ok(this)
    }

    /// What is removed. As long as it is held, no signal ends the process.
    pub fn part(&self) -> MutexGuard<'_, Option<PathBuf>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait(&self, mut signals: Signals) {
        let Some(signal) = signals.forever().next() else { return };
        // Kept to the end: nothing gets the target's name any more.
        let part = self.part();
        if let Some(path) = part.as_ref() {
            // The name is one of chance in a folder of the caller's: nobody else's file has it.
            let _ = fs::remove_file(path);
        }
        // Does not return: the default of each of them is the end.
        let _ = emulate_default_handler(signal);
    }
}

/// The signals that end this process: not those that it was told to ignore, as by `nohup`.
fn awaited() -> Vec<i32> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    SIGNALS.into_iter().filter(|signal| ignored >> (signal - 1) & 1 == 0).collect()
}
