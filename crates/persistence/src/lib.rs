//! What all stores with lasting state have in common, such as logs, caches and volumes in clusters:
//! a store that outlives the daemon has an identity and an owner, says in a superblock what it is,
//! knows whether an image belongs to it, and goes from one phase to the next.
//!
//! Read [`Superblock`] first. The crate must not know what a store keeps.
//!
//! - [`Identity`]: which store it is.
//! - [`Superblock`]: the beginning of a store, in two copies, and what their bytes may be instead.
//! - [`Owner`]: the disk that a store belongs to.
//! - [`Ages`]: whether a store and an image belong together, or one of them is an older copy.
//!   [`Stamp`]: what the image's mark says of that.
//! - [`Phase`]: what a store does, and the asserted steps from one phase to the next.
//! - [`bytes`]: numbers in blocks.
//!
//! There is no I/O but for the drawing of identities. The marks of images are in the crate `image`.
//! ARCHITECTURE.md, "How to add a store with lasting state", has the rules, and which of them this
//! crate keeps.

#![forbid(unsafe_code)]

mod age;
pub mod bytes;
mod identity;
mod owner;
mod phase;
mod superblock;

pub use age::{Ages, Mismatch, Stamp};
pub use identity::Identity;
pub use owner::{NAME_LENGTH_MAX, NameTooLong, Owner, end_of};
pub use phase::Phase;
pub use superblock::{
    CopyOrder, SECTOR, SUPERBLOCK_LENGTH, Superblock, SuperblockBytes, Verdict, erasure, seal,
};
