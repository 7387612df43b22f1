//! The harness of the end-to-end tests: real QEMU guests on disks that Fathom serves.
//!
//! ```no_run
//! use fathom_tests::{Daemon, Disk, Guest};
//!
//! let daemon = Daemon::start(|directory| {
//!     let socket = directory.join("disk.sock");
//!     format!("[[disk]]\nname = 'disk'\nmemory = '64M'\nvhost_user.socket = {socket:?}\n")
//! })?;
//! let guest = Guest::builder().disk(Disk::vhost_user(daemon.path("disk.sock"))).start()?;
//! guest.check("mkfs.ext4 -q /dev/vda && mount /dev/vda /mnt && echo hello > /mnt/file")?;
//! guest.check_console()?;
//! guest.shutdown()?;
//! # Ok::<(), fathom_tests::Error>(())
//! ```
//!
//! Every guest, daemon and peer has a folder of its own, and ends when its value is dropped or the
//! test is killed. The folder is removed with the value. `scripts/guest` makes the guest's kernel
//! and images.
//!
//! | environment | |
//! |---|---|
//! | `FATHOM_ACCEL` | QEMU's `-accel`, instead of a trial |
//! | `FATHOM_GUEST` | the folder with kernel and images, instead of `target/guest` |
//! | `FATHOM_QEMU` | the QEMU binary, instead of `qemu-system-x86_64` |
//! | `FATHOM_BINARY` | the `fathom` binary, instead of the newest below `target` |
//! | `FATHOM_PATIENCE` | multiplies every time limit, for slow machines |

#![forbid(unsafe_code)]

mod accelerator;
mod assets;
mod builder;
mod channel;
mod classified;
mod comparison;
mod daemon;
mod error;
mod guest;
mod process;
mod qemu;
mod qmp;
mod ranges;
mod records;
mod served;
mod storage_daemon;
mod truth;
mod wait;

pub use accelerator::accelerator;
pub use assets::{Assets, Kernel, repository};
pub use channel::{Output, Ticket};
pub use classified::{Classified, Kind, Part};
pub use comparison::{Comparison, Row};
pub use daemon::Daemon;
pub use error::{Error, Result, despite_emulation};
pub use guest::{Builder, Disk, Guest};
pub use process::Process;
pub use qemu::Qemu;
pub use qmp::Qmp;
pub use records::{Records, check_ext4};
pub use served::Served;
pub use storage_daemon::StorageDaemon;
pub use truth::{Moved, Object, ObjectKind, Owner, Truth};
pub use wait::{patience, until};
