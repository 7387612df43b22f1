//! `fathom cache`: caches that outlive the daemon, and the caches of its disks.

mod attach;
mod check;
mod clear;
mod create;
mod volume;

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use fathom_control::Bytes;

use crate::{connection::ControlOptions, failure::Outcome, output::Format};

/// Caches of slow disks.
#[derive(Debug, Subcommand)]
pub enum CacheCommand {
    /// Make a cache on a file or a block device, which outlives the daemon
    #[command(after_help = "\
The space of a file is allocated now, so that the cache never fills its file system.

Examples:
  fathom cache create /nvme/cache --size 100G
  fathom cache create /dev/nvme0n1p3                  all of a partition
  fathom cache create /nvme/cache --size 1T --block-size 64K --disks 200")]
    Create(CreateOptions),
    /// Examine a cache that is not in use
    #[command(after_help = "\
Pages that a crash has torn are no problem: their blocks are dropped at the next start.

Exit status: 0 no problem, 1 a problem was found, 2 invalid command line.

Examples:
  fathom cache check /nvme/cache          the superblock and all pages
  fathom cache check /nvme/cache --data   the content of all blocks too")]
    Check(CheckOptions),
    /// Empty a cache that is not in use
    #[command(after_help = "\
No data is lost: all blocks are on their disks.

Example:
  fathom cache clear /nvme/cache")]
    Clear(ClearOptions),
    /// Give a disk a cache while a guest uses it
    #[command(after_help = "\
The change lasts until the daemon ends; the configuration keeps its own layers.

Examples:
  fathom cache attach db --store /nvme/cache
  fathom cache attach db --size 8G --name hosts       in memory, shared by disks with this name
  fathom cache attach db --store /nvme/cache --mode write-around")]
    Attach(AttachOptions),
    /// Take a disk's cache away while a guest uses it
    #[command(after_help = "\
The disk stays in use. No data is lost: all blocks are on the disk.

Example:
  fathom cache detach db")]
    Detach(DetachOptions),
}

/// Options of `fathom cache create`.
#[derive(Debug, Args)]
pub struct CreateOptions {
    /// A new file, or a block device
    path: PathBuf,
    /// The size of the file; a block device is used as a whole by default
    #[arg(long, value_name = "SIZE")]
    size: Option<Bytes>,
    /// The size of the cache's blocks: a power of two from 4K to 64K
    #[arg(long, value_name = "SIZE", default_value = "16K")]
    block_size: Bytes,
    /// How many disks can use the cache
    #[arg(long, value_name = "N", default_value_t = 64)]
    disks: u32,
    /// Do not allocate the space of the file now
    #[arg(long)]
    sparse: bool,
    /// Replace an existing cache, or other data, which is lost
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    format: Format,
}

/// Options of `fathom cache check`.
#[derive(Debug, Args)]
pub struct CheckOptions {
    /// The file or block device
    path: PathBuf,
    /// Read all blocks, and compare them with their checksums
    #[arg(long)]
    data: bool,
    #[command(flatten)]
    format: Format,
}

/// Options of `fathom cache clear`.
#[derive(Debug, Args)]
pub struct ClearOptions {
    /// The file or block device
    path: PathBuf,
    #[command(flatten)]
    format: Format,
}

/// What goes into a cache.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Mode {
    /// Reads and writes
    WriteThrough,
    /// Reads
    WriteAround,
    /// Nothing: the cache serves what it has
    ReadOnly,
}

/// Which blocks are kept.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Policy {
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
    disk: String,
    /// A file or block device with a cache; without it, the cache is in memory
    #[arg(long, value_name = "PATH", conflicts_with_all = ["size", "name", "block_size"])]
    store: Option<PathBuf>,
    /// Nothing but Fathom changes the disk's image
    #[arg(long, requires = "store")]
    exclusive: bool,
    /// The size of a cache in memory
    #[arg(long, value_name = "SIZE")]
    size: Option<Bytes>,
    /// The size of the blocks of a cache in memory
    #[arg(long, value_name = "SIZE")]
    block_size: Option<Bytes>,
    /// The name of a cache in memory that disks share
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// What goes into the cache
    #[arg(long, value_enum, default_value_t = Mode::WriteThrough)]
    mode: Mode,
    /// Which blocks are kept
    #[arg(long, value_enum, default_value_t = Policy::Auto)]
    policy: Policy,
    #[command(flatten)]
    control: ControlOptions,
    #[command(flatten)]
    format: Format,
}

/// Options of `fathom cache detach`.
#[derive(Debug, Args)]
pub struct DetachOptions {
    /// The disk's name
    disk: String,
    #[command(flatten)]
    control: ControlOptions,
    #[command(flatten)]
    format: Format,
}

/// Carries out a command.
pub fn run(command: &CacheCommand) -> Outcome {
    match command {
        CacheCommand::Create(options) => create::run(options),
        CacheCommand::Check(options) => check::run(options),
        CacheCommand::Clear(options) => clear::run(options),
        CacheCommand::Attach(options) => attach::attach(options),
        CacheCommand::Detach(options) => attach::detach(options),
    }
}
