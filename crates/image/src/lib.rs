//! Image files, as the back end that serves them and the commands that make and resize them both
//! need to know them.
//!
//! - `format`: which formats are not raw, by their magic numbers.
//! - `lock`: the lock that keeps a second user away, and what the kernel says of other writers.

mod format;
mod lock;

pub use format::{FOREIGN_HEAD_LENGTH, ForeignFormat};
pub use lock::{Access, LockError, Writers, is_locked, lock, try_lock, writers};
