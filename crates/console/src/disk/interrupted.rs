//! What a command leaves behind when a signal ends it: nothing.
//!
//! The signals that ask for an end are blocked, and a thread waits for them. It removes the file that
//! is being made and ends the process by the same signal, so that a shell sees what happened.

use std::{
    fs, io,
    mem::MaybeUninit,
    path::PathBuf,
    ptr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
};

/// What asks for the end.
const SIGNALS: [libc::c_int; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];

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
        let signals = awaited();
        // SAFETY: the set is one, and nobody asks for the old one.
        unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const signals, ptr::null_mut()) };
        let watcher = this.clone();
        thread::Builder::new().name("signals".into()).spawn(move || watcher.wait(&signals))?;
        Ok(this)
    }

    /// What is removed. As long as it is held, no signal ends the process.
    pub fn part(&self) -> MutexGuard<'_, Option<PathBuf>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait(&self, signals: &libc::sigset_t) {
        let mut signal = 0;
        // SAFETY: the set is one and the number lives through the call.
        if unsafe { libc::sigwait(signals, &raw mut signal) } != 0 {
            return;
        }
        // Kept to the end: nothing gets the target's name any more.
        let part = self.part();
        if let Some(path) = part.as_ref() {
            // The name is one of chance in a folder of the caller's: nobody else's file has it.
            let _ = fs::remove_file(path);
        }
        // SAFETY: system calls on this process; the signal has its default action then, and this
        // thread lets it through.
        unsafe {
            libc::signal(signal, libc::SIG_DFL);
            libc::pthread_sigmask(libc::SIG_UNBLOCK, signals, ptr::null_mut());
            libc::kill(libc::getpid(), signal);
        }
    }
}

/// The signals that end this process: not those that it was told to ignore, as by `nohup`.
fn awaited() -> libc::sigset_t {
    let mut set = MaybeUninit::uninit();
    // SAFETY: the call makes the set an empty one.
    let mut set = unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        set.assume_init()
    };
    for signal in SIGNALS {
        let mut action = MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: the structures live through the calls; one of zeroes is a valid action.
        unsafe {
            libc::sigaction(signal, ptr::null(), action.as_mut_ptr());
            if action.assume_init().sa_sigaction != libc::SIG_IGN {
                libc::sigaddset(&raw mut set, signal);
            }
        }
    }
    set
}
