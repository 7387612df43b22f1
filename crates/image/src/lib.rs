//! Image files: the parts that are common to the back end that serves images and to the commands
//! that create and resize them.
//!
//! Read [`MarkKind`] first. The crate must not know who reads the images.
//!
//! - `chain`: images of other formats and the files beneath them, read before QEMU opens them.
//! - `format`: which formats are not raw, by their magic numbers.
//! - `mark`: the mark of an image whose last changes are in a log elsewhere.
//! - `moved`: the mark of an image that is not the current content of a disk that moves or moved.
//! - `cached`: the mark of an image that names the state which a cache has blocks of.
//! - `place`: where these marks are, `marks`: those of block devices; `facts`: whether a mark in a
//!   file belongs to the image.
//! - `signature`: what else may be on a volume: file systems, partition tables, arrays.
//! - `kinds`: all kinds of marks as one table, and what they ask of commands that change an image.
//! - `record`: the record of lost writes, for later daemons.
//! - `lock`: the lock that excludes a second user, and the kernel's report on other writers;
//!   `device`: the same for block devices, which may have several nodes.

mod cached;
mod chain;
mod device;
mod facts;
mod format;
mod kinds;
mod lock;
mod mark;
mod marks;
mod moved;
mod place;
mod record;
mod signature;
mod state;

pub use cached::{CacheMark, MarkedCache};
pub use chain::{
    BackingName, CHAIN_LENGTH_MAX, ChainFormat, ChainLink, HeaderError, fuzz_image_header,
    read_chain,
};
pub use device::{Holder, lock_device, open};
pub use format::{FOREIGN_HEAD_LENGTH, ForeignFormat};
pub use kinds::{Demand, ImageChange, Mark, MarkKind, MarkedImage};
pub use lock::{LockError, LockPurpose, Writers, is_locked, lock, try_lock, writers};
pub use mark::{LogMark, MarkedLog};
pub use marks::marks_folder;
pub use moved::{MarkedMove, MoveMark, MoveSide};
pub use place::replace_file;
pub use record::{Loss, LossRecord, is_same_file};
pub use signature::Signature;
pub use state::{NotedState, StateNote};
