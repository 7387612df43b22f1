//! Dirty bitmaps: metadata contexts that say what has changed in a disk since an earlier state.

use std::sync::Arc;

use fathom_block::Disk;

/// The most bitmaps of one connection.
pub const BITMAPS_MAX: usize = 8;

/// Why a disk has no bitmap of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BitmapRefusal {
    /// There is no such earlier state.
    Unknown,
    /// There is one, but what has changed cannot be said now; the text is for people.
    Unavailable(String),
}

/// The earlier states of a disk with which it can be compared.
pub trait Bitmaps: Send + Sync {
    /// The names of at most `count` of them.
    fn names(&self, count: usize) -> Vec<String>;

    /// Whether there is a bitmap of this name.
    ///
    /// # Errors
    /// Why there is none.
    fn find(&self, name: &str) -> Result<(), BitmapRefusal>;

    /// A disk whose extents say what has changed: holes have not, all else has. The earlier state
    /// is kept as long as this disk exists.
    ///
    /// # Errors
    /// Why there is none.
    fn open(&self, name: &str) -> Result<Arc<Disk>, BitmapRefusal>;

    /// Whether the extents have all changes that clients know to be complete. It is asked before
    /// each request.
    fn is_complete(&self) -> bool;
}
