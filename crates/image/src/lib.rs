//! Image files: what both the back end that serves them and the commands that make and resize them
//! need.
//!
//! - `format`: which formats are not raw, by their magic numbers.
//! - `mark`: whether an image's last changes are in a log elsewhere.
//! - `record`: what a later daemon has to know about lost writes.
//! - `lock`: the lock that excludes a second user, and what the kernel reports about other writers.

mod format;
mod lock;
mod mark;
mod record;

pub use format::{FOREIGN_HEAD_LENGTH, ForeignFormat};
pub use lock::{Access, LockError, Writers, is_locked, lock, try_lock, writers};
pub use mark::{LogMark, MarkedLog};
pub use record::{Loss, LossRecord};
