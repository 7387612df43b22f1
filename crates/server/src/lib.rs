//! The Fathom daemon.
//!
//! Read [`Serve`] first. The crate must not know wire formats.
//!
//! - [`Serve`]: the flags of `fathom serve`.
//! - [`configuration`]: the configuration, read from a file or flags and checked.
//! - `daemon`: the served disks and their changes, the stack of a disk, reload, problems, the
//!   control interface and metrics.
//! - `features`: what the daemon does beyond that, a folder each.
//! - `stores`: clusters and modelled devices.
//! - `process`: the life of the process, and its log.

#![warn(missing_docs)]

pub mod configuration;
mod daemon;
mod features;
mod process;
mod stores;

#[doc(hidden)]
pub use features::flush::fuzz_flush;
pub use features::keep::{Keep, keep};
pub use features::log::{LogCommand, settle_log};
pub use process::command::{Serve, serve};
pub use process::confine::{Confine, confine};

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
                assert!(matches!(problem.origin, configuration::Origin::File { line: 1.., .. }));
                assert!(!problem.message.contains('\n') && !problem.remedy.contains('\n'));
            }
        }
    }
}
