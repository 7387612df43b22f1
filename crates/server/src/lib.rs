//! The Fathom daemon.
//!
//! - [`Serve`]: the flags of `fathom serve`.
//! - [`configuration`]: the configuration, read from a file or flags and checked.
//! - `wiring`: makes back ends, layers and front ends from definitions.
//! - `daemon`: the served disks and listeners, and their changes.
//! - `introspection`: the guests whose memory is read, and the thread that follows them.
//! - `flush`: makes guests write their dirty data.
//! - `keep`: what tells the next daemon of lost writes whose report this one does not get.
//! - `events`: the events of disks, for listeners.
//! - `queries`: the kept queries, and the actions on their results.
//! - `run`: the life of the process: start, signals, shutdown.
//! - `routes`, `scrape`, `metrics`: the control interface and `/metrics`, on one thread.
//! - `group`: access of a group to the daemon's sockets.
//! - `log`: rate-limited lines on standard error, kept for the control interface.

#![warn(missing_docs)]

mod background;
mod caches;
mod clusters;
mod command;
pub mod configuration;
mod daemon;
mod events;
mod flush;
mod group;
mod introspection;
mod keep;
mod log;
mod logs;
mod metrics;
mod models;
mod notify;
mod overlay;
mod queries;
mod routes;
mod run;
mod scrape;
mod wiring;

use std::sync::{Mutex, MutexGuard, PoisonError};

pub use command::{Serve, serve};
#[doc(hidden)]
pub use flush::fuzz_flush;
pub use keep::{Keep, keep};
pub use logs::{LogCommand, settle_log};

/// Locks a mutex, also after a thread has panicked with it.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reads the bytes of a fuzzer as a configuration. Any bytes must give a configuration or a list of
/// problems.
#[doc(hidden)]
pub fn fuzz_configuration(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let path = std::path::Path::new("/fuzz/fathom.toml");
    match configuration::parse(text, path) {
        Ok(configuration) => {
            if let Err(problems) = configuration.check() {
                assert!(!problems.0.is_empty());
                assert!(!problems.to_string().is_empty());
            }
        }
        Err(problems) => {
            assert!(!problems.0.is_empty());
            for problem in problems.0 {
                assert!(matches!(problem.place, configuration::Place::File { line: 1.., .. }));
                assert!(!problem.message.contains('\n') && !problem.remedy.contains('\n'));
            }
        }
    }
}
