//! The Fathom daemon.
//!
//! - [`Serve`]: `fathom serve`, its flags.
//! - [`configuration`]: what is to be served, read from a file or flags and checked.
//! - `wiring`: definitions made into back ends, layers and front ends.
//! - `daemon`: the disks and listeners that are served, and how they change.
//! - `introspection`: the guests whose memory is read, and the thread that follows them.
//! - `events`: the events of disks, for those who listen.
//! - `queries`: the queries that the daemon keeps, and what is done with their results.
//! - `run`: the life of the process: start, signals, end.
//! - `routes`, `metrics`: the control interface and `/metrics`, on one thread that sleeps.
//! - `group`: sockets for more than the daemon's user.
//! - `log`: bounded lines on standard error, kept for the control interface.

#![warn(missing_docs)]

mod command;
pub mod configuration;
mod daemon;
mod events;
mod group;
mod introspection;
mod log;
mod logs;
mod metrics;
mod notify;
mod queries;
mod routes;
mod run;
mod wiring;

pub use command::{Serve, serve};

/// Has the bytes of a fuzzer read as a configuration. Whatever they are, the answer is a
/// configuration or a list of problems.
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
