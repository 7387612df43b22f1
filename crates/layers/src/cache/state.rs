//! The state of a disk's store that a cache has blocks of, and what the layer needs of the daemon
//! for a cache that outlives it.

use std::fmt;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use fathom_block::Backend;
use fathom_failure::Failure;
use fathom_persistence::{Identity, Stamp};

/// The mark of a disk's store that names the state of the store that a cache belongs to.
pub trait CacheMark: Send + Sync {
    /// The state; `None` if no cache fits the store. Blocks.
    ///
    /// # Errors
    /// If the mark cannot be read.
    fn read(&self) -> io::Result<Option<Stamp>>;

    /// Durably changes the state. Blocks.
    ///
    /// # Errors
    /// If the mark cannot be changed.
    fn write(&self, state: &Stamp) -> io::Result<()>;

    /// Durably removes the mark, so that no cache fits the store. Blocks.
    ///
    /// # Errors
    /// If the mark cannot be removed.
    fn reject(&self) -> io::Result<()>;

    /// The modification time of the store, in nanoseconds since 1970: another one after any later
    /// change. 0 if it is not known. Blocks.
    ///
    /// # Errors
    /// If the store cannot be examined.
    fn modified_ns(&self) -> io::Result<u64>;
}

/// A disk's store, as a cache that outlives the daemon sees it.
pub struct CacheHome {
    /// The name of the store, such as the image's path.
    pub name: String,
    /// Its mark.
    pub mark: Arc<dyn CacheMark>,
    /// The identity of the disk's write-ahead log, or [`Identity::NONE`].
    pub log: Identity,
    /// The ranges of the disk that this log has changes of, in bytes.
    pub changes: Vec<Range<u64>>,
}

/// What the daemon provides for caches that outlive it.
pub trait CacheHost {
    /// Opens the store of a cache, exclusively. The path is canonical.
    ///
    /// # Errors
    /// If it cannot be opened.
    fn open(&self, path: &Path) -> Result<Arc<dyn Backend>, Failure>;

    /// The disk's store. `cache` is the path of the cache.
    ///
    /// # Errors
    /// If the disk has no store that outlives the daemon, or if it cannot be examined.
    fn home(&self, cache: &Path) -> Result<CacheHome, Failure>;

    /// Draws an identity, at random.
    ///
    /// # Errors
    /// If the host has none.
    fn draw(&self) -> io::Result<Identity>;

    /// Writes a line about the disk to the daemon's log.
    fn report(&self, text: &str);
}

/// Why the blocks of a disk are not used any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dropped {
    /// The image does not have the mark that the cache expects.
    Mark,
    /// The blocks are those of another store.
    Home,
    /// The image has been changed since.
    Modified,
    /// It is not known whether the image has been changed.
    Unknown,
    /// They are newer than the image, and the log that had the changes is gone.
    Log,
}

impl fmt::Display for Dropped {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Mark => {
                "its image was served without the cache or replaced, or the cache is an older copy"
            }
            Self::Home => "its blocks are those of another image",
            Self::Modified => {
                "its image was changed without the cache, or by the last daemon just before a crash"
            }
            Self::Log => "it has changes of a log that the disk does not have any more",
            Self::Unknown => {
                "it is not known whether another program has changed its image; if nothing but Fathom \
                 writes to it, set `exclusive` of the layer"
            }
        })
    }
}
