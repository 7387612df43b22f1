//! The options of the commands that make, check and attach caches.

use std::path::PathBuf;

use clap::{ArgGroup, Args, ValueEnum};
use fathom_control::{Bytes, Nanoseconds};

use crate::connection::ControlOptions;
use crate::output::Format;

/// Options of `fathom cache create`.
#[derive(Debug, Args)]
pub struct CreateCacheOptions {
    /// A new file, or a block device
    pub(super) path: PathBuf,
    /// The size of the file; a block device is used as a whole by default
    #[arg(long, value_name = "SIZE")]
    pub(super) size: Option<Bytes>,
    /// The size of the cache's blocks: a power of two from 4K to 64K
    #[arg(long, value_name = "SIZE", default_value = "16K")]
    pub(super) block_size: Bytes,
    /// How many disks can use the cache
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub(super) disks: u32,
    /// The part of the cache for write-ahead logs, which the mode write-back needs; a part of the
    /// size
    #[arg(long, value_name = "SIZE")]
    pub(super) log: Option<Bytes>,
    /// How many disks can have a log; each gets an equal place
    #[arg(long, value_name = "N", default_value_t = 4, requires = "log")]
    pub(super) logs: u32,
    /// Do not allocate the space of the file now
    #[arg(long)]
    pub(super) sparse: bool,
    /// Replace an existing cache, or other data, which is lost
    #[arg(long)]
    pub(super) force: bool,
    #[command(flatten)]
    pub(super) format: Format,
}

/// Options of `fathom cache check`.
#[derive(Debug, Args)]
pub struct CheckOptions {
    /// The file or block device
    pub(super) path: PathBuf,
    /// Read all blocks, and compare them with their checksums
    #[arg(long)]
    pub(super) data: bool,
    #[command(flatten)]
    pub(super) format: Format,
}

/// Options of `fathom cache clear`.
#[derive(Debug, Args)]
#[command(group(ArgGroup::new("given-up").args(["log", "log_at"])))]
pub struct ClearOptions {
    /// The file or block device
    pub(super) path: PathBuf,
    /// Instead of the blocks, give up the log of this disk, whose place another disk can use then
    #[arg(long, value_name = "DISK")]
    pub(super) log: Option<String>,
    /// Instead of the blocks, give up the log that begins at this byte
    #[arg(long, value_name = "BYTE")]
    pub(super) log_at: Option<u64>,
    /// Give the log up although it has changes, or cannot be read: they are lost
    #[arg(long, requires = "given-up")]
    pub(super) force: bool,
    #[command(flatten)]
    pub(super) control: ControlOptions,
    #[command(flatten)]
    pub(super) format: Format,
}

/// What goes into a cache.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum Mode {
    /// Reads and writes
    WriteThrough,
    /// Reads
    WriteAround,
    /// Nothing: the cache serves what it has
    ReadOnly,
    /// Reads and writes; changes become durable in the cache's log first
    WriteBack,
}

/// Which blocks are kept.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(super) enum Policy {
    /// What saves disk time, as far as that is known
    Auto,
    /// Metadata and small files first
    Sky,
    /// All blocks alike
    None,
}

/// Options of `fathom cache attach`.
#[derive(Debug, Args)]
pub struct AttachOptions {
    /// The disk's name
    pub(super) disk: String,
    /// A file or block device with a cache; without it, the cache is in memory
    #[arg(long, value_name = "PATH", conflicts_with_all = ["size", "name", "block_size"])]
    pub(super) store: Option<PathBuf>,
    /// Nothing but Fathom changes the disk's image
    #[arg(long, requires = "store")]
    pub(super) exclusive: bool,
    /// The size of a cache in memory
    #[arg(long, value_name = "SIZE")]
    pub(super) size: Option<Bytes>,
    /// The size of the blocks of a cache in memory
    #[arg(long, value_name = "SIZE")]
    pub(super) block_size: Option<Bytes>,
    /// The name of a cache in memory that disks share
    #[arg(long, value_name = "NAME")]
    pub(super) name: Option<String>,
    /// Replace another cache of the disk; what only its log has is written back first
    #[arg(long)]
    pub(super) replace: bool,
    /// What goes into the cache
    #[arg(long, value_enum, default_value_t = Mode::WriteThrough)]
    pub(super) mode: Mode,
    /// With the mode write-back: how long a change may be only in the log, for example 5s
    #[arg(long, value_name = "TIME")]
    pub(super) age: Option<Nanoseconds>,
    /// Which blocks are kept
    #[arg(long, value_enum, default_value_t = Policy::Auto)]
    pub(super) policy: Policy,
    /// What the disk keeps of a shared cache: a size, or a percentage such as 25%
    #[arg(long, value_name = "SIZE")]
    pub(super) share: Option<String>,
    /// How far files that the guest reads in order are read ahead; 0 turns it off
    #[arg(long, value_name = "SIZE")]
    pub(super) read_ahead: Option<Bytes>,
    #[command(flatten)]
    pub(super) control: ControlOptions,
    #[command(flatten)]
    pub(super) format: Format,
}

/// Options of `fathom cache detach`.
#[derive(Debug, Args)]
pub struct DetachOptions {
    /// The disk's name
    pub(super) disk: String,
    #[command(flatten)]
    pub(super) control: ControlOptions,
    #[command(flatten)]
    pub(super) format: Format,
}
