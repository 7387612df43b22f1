//! Image files, as the back end that serves them and the commands that make and resize them both
//! need to know them.
//!
//! - `format`: which formats are not raw, by their magic numbers.
//! - `mark`: whether an image's last changes are in a log elsewhere.
//! - `record`: what a later daemon has to know of writes that were lost.
//! - `lock`: the lock that keeps a second user away, and what the kernel says of other writers.

mod format;
mod lock;
mod mark;
mod record;

pub use format::{FOREIGN_HEAD_LENGTH, ForeignFormat};
pub use lock::{Access, LockError, Writers, is_locked, lock, try_lock, writers};
pub use mark::{LogMark, MarkedLog};
pub use record::{Loss, LossRecord};
