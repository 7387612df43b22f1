//! A Linux guest's memory, read from outside.
//!
//! Given the memory of a virtual machine, and nothing else, this finds the guest's kernel and says
//! for a block request which file, control group and process it belongs to. Nothing is installed
//! in the guest, nothing traps, no symbol file is needed, and how the guest's instructions are
//! executed does not matter. `docs/introspection.md` draws the way from the kernel's own note to a
//! file's name.
//!
//! Every byte that is read is hostile and may change at any moment: all walks are bounded, all
//! addresses are checked, and what does not hold together is unknown rather than guessed.

#![allow(unsafe_code)]
#![warn(missing_docs)]

mod bios;
mod btf;
mod completion;
mod counters;
mod files;
mod groups;
mod guest;
mod image;
mod kallsyms;
mod kernel;
mod layout;
mod memory;
mod modules;
mod pages;
mod paging;
mod pieces;
mod resolver;
mod survey;
#[cfg(any(test, feature = "synthetic"))]
pub mod synthetic;
mod systems;
mod tasks;
#[cfg(test)]
mod tests;
mod vmcoreinfo;

pub use counters::Counters;
pub use guest::{Guest, GuestState, GuestStatus};
pub use kernel::{AttachError, Kernel};
pub use memory::{GuestMemory, Region};
pub use resolver::{RequestView, Resolver};
pub use survey::CachedFile;
pub use tasks::Task;
