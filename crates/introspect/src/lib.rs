//! A Linux guest's memory, read from outside.
//!
//! Read [`Guest`] first. The crate must not know disks and front ends.
//!
//! Given only the memory of a virtual machine, this crate finds the guest's kernel, and the file,
//! the control group and the process of each block request. Nothing is installed in the guest, no
//! instruction of the guest traps, and no symbol file is necessary. It does not matter whether the
//! guest's instructions are executed by the hardware or emulated. `docs/introspection.md` describes
//! the steps from the kernel's own note to a file's name.
//!
//! Guest memory is untrusted and may change at any moment. All walks are bounded, all addresses are
//! checked, and inconsistent data is reported as unknown, never guessed.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod bios;
mod btf;
mod calls;
mod completion;
mod counters;
mod dirty;
mod files;
mod flushes;
mod groups;
mod guest;
mod image;
mod interception;
mod kallsyms;
mod kernel;
mod layout;
mod lives;
mod modules;
mod pages;
mod paging;
mod pieces;
mod processes;
mod resolver;
mod submitters;
mod survey;
#[cfg(any(test, feature = "synthetic"))]
pub mod synthetic;
mod systems;
mod tasks;
#[cfg(test)]
mod tests;
mod tunables;
mod vmcoreinfo;

pub use calls::CallResolver;
pub use counters::Counters;
pub use dirty::{
    ChangedPages, Dirty, DirtyDevice, DirtyFile, DirtyFiles, DiskObject, MappedDirty, PageSample,
    WrittenPages,
};
pub use guest::{COPIED_REQUESTS, Guest, GuestState, GuestStatus};
pub use image::open_image;
pub use kernel::{AttachError, Kernel};
pub use lives::{FileState, PresentFile};
pub use processes::{Process, Processes, WaitingCall};
pub use resolver::{RequestView, Resolver};
pub use survey::CachedFile;
pub use tasks::Task;
pub use tunables::{TunableError, Tunables};
