//! The block store: volumes, snapshots and clones in one log on one device.
//!
//! Read [`Pool`] first. The crate must not know disks, layers and front ends. `docs/store.md` has
//! the format and the rules by which nothing is lost.
//!
//! - [`make`]: makes a pool; [`Pool::open`]: opens one, and recovers it after a crash.
//! - `state`: what the queues share, without I/O: `catalogue`, `space`, `pages` and `tree`;
//!   `apply` brings batches into the maps.
//! - `queue`: carries out the requests of one queue of a volume.
//! - `batch`: the log; `checkpoint`: what makes the log short; `walk`: finds what is not used.
//! - `fingerprint`, `index`, `sharing`: equal blocks are kept once; `recent`, `contents`: those
//!   that were read before they were written; `merge`: those that were written several times.
//! - `relocation`: blocks that adjoin are put together.
//! - `change_set`: which blocks have changed since a snapshot; `bitmap`: sets of blocks.
//! - `difference`: what has changed between two snapshots, by their maps; `compare`: by their
//!   change sets; [`ChangeCursor`] walks over it.
//! - `transfer`: sends snapshots from pool to pool.
//! - `scrub`: verifies a pool in use.
//! - `reclaim`: what deletions would free.
//! - `guarantee`: places that stay free for volumes.
//! - [`check`]: checks a pool that nobody uses; [`Estimator`]: what images have in common.
//! - `layout`, `superblock`, `record`, `paged`, `entry`: the format.

// A new operation, kind of error or state does not compile until each match decides about it.
#![warn(clippy::wildcard_enum_match_arm)]
#![forbid(unsafe_code)]

mod apply;
mod batch;
mod bitmap;
mod catalogue;
mod change_set;
mod check;
mod checkpoint;
mod compare;
mod contents;
mod copy;
mod difference;
mod entry;
mod error;
mod estimate;
mod figures;
mod fingerprint;
mod fuzz;
mod guarantee;
mod hold;
mod index;
mod layout;
mod locks;
mod make;
mod merge;
mod options;
mod paged;
mod pages;
mod place_bits;
mod pool;
mod queue;
mod recent;
mod reclaim;
mod record;
mod recover;
mod refusal;
mod relocation;
mod reserve;
mod room;
mod rules;
mod scrub;
mod seal;
mod sharing;
mod space;
mod state;
mod superblock;
mod transfer;
mod tree;
mod volume;
mod walk;
mod words;

pub use catalogue::{NAME_LENGTH_MAX, Snapshot, VOLUME_SIZE_MAX, Volume, is_name, is_size};
pub use check::{CheckReport, check};
pub use copy::copy;
pub use difference::{ChangeCursor, ChangedExtent};
pub use error::PoolError;
pub use estimate::{Estimate, Estimator};
pub use fathom_block::Backend;
#[doc(hidden)]
pub use fuzz::fuzz_store;
pub use index::INDEX_PAGE_MEMORY;
pub use layout::{BLOCK, Layout, SEGMENT_BLOCKS, SEGMENT_BLOCKS_MIN};
pub use make::{MakeOptions, make};
pub use options::PoolOptions;
pub use pool::{DOMAIN, Pool, PoolStatus, SNAPSHOT_VOLUMES_MAX, WeakPool};
pub use reclaim::{ReclaimReport, Reclaimable};
pub use recover::Recovered;
pub use refusal::PoolRefusal;
#[doc(hidden)]
pub use rules::Rules;
pub use scrub::{
    DAMAGES_MAX, DamageKind, FoundDamage, ScrubOptions, ScrubPosition, ScrubReport, ScrubState,
};
pub use state::PoolCounts;
pub use superblock::PoolSuperblock;
pub use transfer::{Beginning, Received, SendOptions, Sent, TransferError, receive, send};
