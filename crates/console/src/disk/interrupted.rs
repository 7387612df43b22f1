//! Removes an incomplete file when a signal ends the process.
//!
//! A thread waits for the signals that end a process. It removes the incomplete file and ends the
//! process by the same signal, so that a shell sees the cause.

use std::{fs, io, path::PathBuf, sync::Arc, thread};

use parking_lot::{Mutex, MutexGuard};
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    iterator::Signals,
    low_level::emulate_default_handler,
};

/// The signals that end the process.
const SIGNALS: [i32; 3] = [SIGINT, SIGTERM, SIGHUP];

/// The file to remove when a signal ends the process. While the lock is held, no signal ends it.
#[derive(Clone, Default)]
pub struct Interrupted(Arc<Mutex<Option<PathBuf>>>);

impl Interrupted {
    /// Handles the signals for the rest of the process's life.
    ///
    /// # Errors
    /// If the signals or a thread cannot be set up.
    pub fn watch() -> io::Result<Self> {
        let this = Self::default();
        let signals = Signals::new(awaited())?;
        let watcher = this.clone();
        thread::Builder::new().name("signals".into()).spawn(move || watcher.wait(signals))?;
        Ok(this)
    }

    /// The file to remove. While the guard is held, no signal ends the process.
    pub fn part(&self) -> MutexGuard<'_, Option<PathBuf>> {
        self.0.lock()
    }

    fn wait(&self, mut signals: Signals) {
        let Some(signal) = signals.forever().next() else { return };
        // Held until the process ends, so that the file is not renamed to the target.
        let part = self.part();
        if let Some(path) = part.as_ref() {
            // The name is random, so it is not another process's file.
            let _ = fs::remove_file(path);
        }
        // Does not return: the default action of each of these signals ends the process.
        let _ = emulate_default_handler(signal);
    }
}

/// The signals to handle: not those that the process inherited as ignored, as under `nohup`.
fn awaited() -> Vec<i32> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    SIGNALS.into_iter().filter(|signal| ignored >> (signal - 1) & 1 == 0).collect()
}
