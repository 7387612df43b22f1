//! Image files: the parts that are common to the back end that serves images and to the commands
//! that create and resize them.
//!
//! - `format`: which formats are not raw, by their magic numbers.
//! - `mark`: the mark of an image whose last changes are in a log elsewhere.
//! - `cached`: the mark of an image that names the state which a cache has blocks of.
//! - `place`: where these marks are; `identity`: whether a mark in a file belongs to the image.
//! - `record`: the record of lost writes, for later daemons.
//! - `lock`: the lock that excludes a second user, and the kernel's report on other writers.

mod cached;
mod format;
mod identity;
mod lock;
mod mark;
mod place;
mod record;

pub use cached::{CacheMark, MarkedCache};
pub use format::{FOREIGN_HEAD_LENGTH, ForeignFormat};
pub use lock::{Access, LockError, Writers, is_locked, lock, try_lock, writers};
pub use mark::{LogMark, MarkedLog};
pub use record::{Loss, LossRecord, is_same_file};
