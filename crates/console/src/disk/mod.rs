//! `fathom disk`: images, and the disks of the running daemon.
//!
//! `qemu-img` does what it does well. These commands for images exist because it cannot do the
//! following:
//! - `create` and `resize` take the image's lock first, find writers that take no lock, and refuse.
//!   `resize` goes through the daemon if the daemon serves the image, so that the guest sees the
//!   size.
//! - `info` shows partitions, the processes that have the image open, and the record of lost
//!   writes.
//! - `check` reads a raw image; `qemu-img check` does not support raw images.
//! - `import` runs `qemu-img convert` into a file that is renamed to the target when it is
//!   complete. Before that, it looks for other files that `qemu-img` would open.

mod check;
mod claim;
mod create;
mod daemon;
mod holders;
mod image;
mod import;
mod info;
mod interrupted;
mod moving;
mod partitions;
mod recover;
mod references;
mod resize;
mod signatures;
mod template;

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use fathom_control::{Bytes, Client, ImageFormat, LayerDefinition, Nanoseconds};

use crate::{connection::ControlOptions, failure::CommandResult, output::Format};

pub use create::sync_directory;
pub use image::read_up_to;
pub use image::{FileSystem, Image, file_system};
pub use info::folders_of_daemons;

/// Virtual disks: images, and the disks of the running daemon.
#[derive(Debug, Subcommand)]
pub enum DiskCommand {
    /// Create an image: empty, or with the content of a template
    #[command(after_help = "\
Examples:
  fathom disk create root.img 10G                 a sparse image, which grows with writes
  fathom disk create fast.img 10G --preallocate   all of its space allocated now
  fathom disk create web.img --from debian.img    shares its blocks: Btrfs, XFS
  fathom disk create web.qcow2 20G --from debian.qcow2 --from-format qcow2 --format qcow2
                                                  an overlay, larger than its template")]
    Create(CreateDiskOptions),
    /// Show an image, or a disk of the running daemon
    #[command(after_help = "\
Examples:
  fathom disk info root.img     an image: size, holes, partitions, who has it open
  fathom disk info root         a disk that the daemon serves, by name")]
    Info(InfoOptions),
    /// Read all data of an image and report problems
    #[command(after_help = "\
Exit status: 0 no problem, 1 a problem was found, 2 invalid command line.

Example:
  fathom disk check root.img")]
    Check(CheckOptions),
    /// Change the size of an image, or of a disk while a guest uses it
    #[command(after_help = "\
An image that the daemon serves is resized through the daemon; the guest sees the new size at once.

Examples:
  fathom disk resize root.img 20G           to 20 GiB
  fathom disk resize root +5G               5 GiB larger, by the disk's name
  fathom disk resize root.img 5G --shrink   data beyond 5 GiB is lost")]
    Resize(ResizeOptions),
    /// Convert an image of any format that qemu-img reads to a raw one
    #[command(after_help = "\
Examples:
  fathom disk import debian-12.qcow2 root.img
  fathom disk import --follow-backing snapshot.qcow2 root.img
  fathom disk import --source-format vpc old.vhd new.img")]
    Import(ImportOptions),
    /// Add a disk to the running daemon
    #[command(after_help = "\
Examples:
  fathom disk add data --image data.img --socket /run/fathom/data.sock
  fathom disk add scratch --memory 1G --socket /run/fathom/scratch.sock --queues 2")]
    Add(Box<AddOptions>),
    /// Let a disk accept writes again after writes were lost
    #[command(after_help = "\
A disk is read-only after its store has lost acknowledged writes. Repair the store first: make room,
replace the cable. Data written since the guest's last successful flush may be lost. Stop the guest,
or unmount the file systems, then recover the disk. Check the file systems at the next start: a
guest that keeps running assumes that the lost writes are on the disk.

Examples:
  fathom disk recover data          a disk that the daemon serves
  fathom disk recover data.img      an image that is not served: its record of lost writes is removed

An image that a disk has left, or an incomplete copy of a disk, is not served either
(`fathom disk move`). `fathom disk recover IMAGE` lets it be served as it is.")]
    Recover(RecoverOptions),
    /// Try at once to serve a disk that is not served
    #[command(after_help = "\
A disk of the configuration that cannot be served is tried again every few seconds. `fathom disk list`
shows why it is not served. This command tries at once, also while somebody still writes the image.

Example:
  fathom disk retry data")]
    Retry(RetryOptions),
    /// Show, set or remove a layer of a disk while a guest uses it
    #[command(after_help = "\
All options of the layer are replaced; those not given get their defaults. A limit keeps its state.
A new layer gets the place of its kind in the order of layers. docs/configuration.md has that order,
the kinds of layers and their options.

Examples:
  fathom disk layer root                            the layers and their options
  fathom disk layer root limit,total_iops_sec=500   at most 500 requests a second
  fathom disk layer root limit,write_bytes_sec=10M,containers=[/docker/backup*]
  fathom disk layer root delay,time=5ms --below wal   the device beneath the log is slow
  fathom disk layer root limit --remove             without limits")]
    Layer(LayerArguments),
    /// Move a disk to another image or volume while it is used
    #[command(after_help = "\
The disk is copied while its guest works. Then it changes over, which takes some milliseconds, and
the target lasts like any change. What the disk leaves keeps the content of that instant. The copy
waits for idle time of the devices; the daemon begins it again after a restart. Without a target, the
command shows how far the move is. A log, or a cache that outlives the daemon, is taken off the disk
meanwhile, which writes its changes home, and set again at the end; a volume has none.

Examples:
  fathom disk move root --to /fast/root.img            a new raw image, or a block device
  fathom disk move root --store /dev/vg/pool --wait    a new volume `root` of a pool; shows progress
  fathom disk move root --store pool --volume r --speed 50M
  fathom disk move root                                how far it is
  fathom disk move root --cancel                       it stays where it is")]
    Move(MoveDiskOptions),
    /// Remove a disk from the running daemon; its image is kept
    #[command(after_help = "\
A disk that a virtual machine or an NBD client uses is removed only after a confirmation on the
terminal, or with --force. After that, its users' requests fail or hang.

Example:
  fathom disk remove data")]
    Remove(RemoveOptions),
    /// List the disks of the running daemon
    #[command(after_help = "Examples:\n  fathom disk list\n  fathom disk list --json")]
    List(ListOptions),
}

/// Options of `fathom disk create`.
#[derive(Debug, Args)]
pub struct CreateDiskOptions {
    /// The image's path
    path: PathBuf,
    /// The disk's size: 512, 64K, 10G, 1.5TiB; with --from, the template's by default
    #[arg(required_unless_present = "from")]
    size: Option<Bytes>,
    /// Allocate all space on the file system now
    #[arg(long, conflicts_with = "from")]
    preallocate: bool,
    /// Replace an existing image; its data is lost
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    template: TemplateOptions,
    #[command(flatten)]
    format: Format,
}

/// The options of `fathom disk create` for an image with the content of another one.
#[derive(Debug, Args)]
pub struct TemplateOptions {
    /// An image whose content the new one has at once: its template, which stays as it is
    #[arg(long, value_name = "TEMPLATE")]
    from: Option<PathBuf>,
    /// The template's format: raw, also of bytes that look like another one, or qcow2, vmdk, vhdx,
    /// vdi
    #[arg(long, value_name = "FORMAT", requires = "from")]
    from_format: Option<ImageFormat>,
    /// A folder, besides that of the template, in which its backing files may be
    #[arg(long, value_name = "PATH", requires = "from")]
    backing_folder: Vec<PathBuf>,
    /// The format: raw shares the template's blocks, if the file system can; qcow2 refers to it
    /// [default: raw]
    #[arg(long, value_name = "FORMAT", requires = "from", value_parser = raw_or_qcow2)]
    format: Option<ImageFormat>,
}

/// Options of `fathom disk info`.
#[derive(Debug, Args)]
pub struct InfoOptions {
    /// An image's path, or the name of a disk of the running daemon
    #[arg(value_name = "PATH|NAME")]
    disk: String,
    #[command(flatten)]
    control: ControlOptions,
    #[command(flatten)]
    format: Format,
}

/// Options of `fathom disk check`.
#[derive(Debug, Args)]
pub struct CheckOptions {
    /// The image's path
    path: PathBuf,
    #[command(flatten)]
    format: Format,
}

/// Options of `fathom disk resize`.
#[derive(Debug, Args)]
pub struct ResizeOptions {
    /// An image's path, or the name of a disk of the running daemon
    #[arg(value_name = "PATH|NAME")]
    disk: String,
    /// The new size; with + or - the change
    #[arg(allow_hyphen_values = true)]
    size: String,
    /// Allow a smaller size: data beyond the new end is lost
    #[arg(long)]
    shrink: bool,
    /// Resize the image as a raw one, even if its content looks like another format
    #[arg(long = "format", value_name = "FORMAT", value_parser = raw_only)]
    image_format: Option<ImageFormat>,
    #[command(flatten)]
    control: ControlOptions,
    #[command(flatten)]
    format: Format,
}

/// Options of `fathom disk import`.
#[derive(Debug, Args)]
pub struct ImportOptions {
    /// The image to read: qcow2, vmdk, vdi, vhdx, raw, an NBD URI, …
    source: String,
    /// The raw image to create
    target: PathBuf,
    /// The source's format, if its content does not show it
    #[arg(long, value_name = "FORMAT")]
    source_format: Option<String>,
    /// Read the files that the source names as well: backing files, data files, extents
    #[arg(long)]
    follow_backing: bool,
    /// Replace an existing image; its data is lost
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    format: Format,
}

/// Options of `fathom disk add`.
#[derive(Debug, Args)]
pub struct AddOptions {
    /// The disk's name, unique within the daemon
    name: String,
    /// An image or block device
    #[arg(long, value_name = "PATH", group = "backend")]
    image: Option<PathBuf>,
    /// The format: raw, also of bytes that look like another one, or qcow2, vmdk, vhdx, vdi
    #[arg(long = "format", value_name = "FORMAT", requires = "image")]
    image_format: Option<ImageFormat>,
    /// A folder, besides that of the image, in which its backing files may be
    #[arg(long = "backing-folder", value_name = "PATH", requires = "image_format")]
    backing_folders: Vec<PathBuf>,
    /// A name for a block device that has no lasting one of its own
    #[arg(long, value_name = "NAME", requires = "image")]
    key: Option<String>,
    /// A pool of the block store: a file or block device
    #[arg(long, value_name = "POOL", group = "backend", requires = "volume")]
    store: Option<PathBuf>,
    /// The volume of the pool, or VOLUME@SNAPSHOT
    #[arg(long, value_name = "NAME", requires = "store")]
    volume: Option<String>,
    /// The URI of an NBD export, for example `nbds://host/export?tls-certificates=/etc/fathom/tls`
    #[arg(long, value_name = "URI", group = "backend")]
    nbd: Option<String>,
    /// How long a request to the NBD server, or to QEMU, is tried before it fails [default: 30s]
    #[arg(long, value_name = "TIME")]
    timeout: Option<Nanoseconds>,
    /// A disk in memory; its data is lost when it is removed
    #[arg(long, value_name = "SIZE", group = "backend")]
    memory: Option<Bytes>,
    /// A disk that reads as zeroes and discards writes, for measurements
    #[arg(long, value_name = "SIZE", group = "backend")]
    null: Option<Bytes>,
    /// A vhost-user socket for a guest
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// The most queues that the guest can use [default: 4]
    #[arg(long, value_name = "N", requires = "socket")]
    queues: Option<u16>,
    /// The number of threads that serve the queues [default: one for each processor]
    #[arg(long, value_name = "N", requires = "socket")]
    threads: Option<u16>,
    /// The longest to watch a ring before its thread sleeps, for example 32us; 0 never watches
    #[arg(long, value_name = "TIME", requires = "socket")]
    spin: Option<Nanoseconds>,
    /// A group whose members may also connect to the socket
    #[arg(long, value_name = "NAME", requires = "socket")]
    group: Option<String>,
    /// Bypass the host's page cache
    #[arg(long)]
    direct: bool,
    /// Refuse writes
    #[arg(long)]
    read_only: bool,
    /// Make writes wait while the image's file system, or the pool, is full, instead of failing
    #[arg(long)]
    wait_when_full: bool,
    /// Add a layer, for example wal,log=/nvme/logs,size=1G; the uppermost first
    #[arg(long = "layer", value_name = "KIND[,KEY=VALUE…]", value_parser = LayerDefinition::from_flag)]
    layers: Vec<LayerDefinition>,
    /// The block size that guests see
    #[arg(long, value_name = "SIZE")]
    block_size: Option<Bytes>,
    /// The virtual machine that the disk belongs to
    #[arg(long, value_name = "NAME", default_value = "")]
    vm: String,
    /// The serial that guests see; the name by default
    #[arg(long, value_name = "TEXT", default_value = "")]
    serial: String,
    /// Neither count nor measure the disk's requests
    #[arg(long)]
    no_tap: bool,
    /// Do not determine what requests mean: which file, which container
    #[arg(long)]
    no_classify: bool,
    /// Undo it when the daemon ends; otherwise it is also there after a restart
    #[arg(long)]
    temporary: bool,
    #[command(flatten)]
    control: ControlOptions,
    #[command(flatten)]
    format: Format,
}

/// Options of `fathom disk remove`.
#[derive(Debug, Args)]
pub struct RemoveOptions {
    /// The disk's name
    name: String,
    /// Remove it even if a virtual machine or an NBD client uses it
    #[arg(long)]
    force: bool,
    /// Undo it when the daemon ends; otherwise it is also there after a restart
    #[arg(long)]
    temporary: bool,
    #[command(flatten)]
    control: ControlOptions,
    #[command(flatten)]
    format: Format,
}

/// Options of `fathom disk layer`.
#[derive(Debug, Args)]
pub struct LayerArguments {
    /// The disk's name
    name: String,
    /// The layer's kind, and the options to set
    #[arg(value_name = "KIND[,KEY=VALUE…]", value_parser = LayerDefinition::from_flag)]
    layer: Option<LayerDefinition>,
    /// Remove all layers of this kind
    #[arg(long, requires = "layer")]
    remove: bool,
    /// Put the layer above the first one of this kind
    #[arg(long, value_name = "KIND", requires = "layer", conflicts_with = "remove")]
    above: Option<String>,
    /// Put the layer below the last one of this kind
    #[arg(long, value_name = "KIND", requires = "layer", conflicts_with = "remove")]
    below: Option<String>,
    /// Undo it when the daemon ends; otherwise it is also there after a restart
    #[arg(long, requires = "layer")]
    temporary: bool,
    #[command(flatten)]
    control: ControlOptions,
    #[command(flatten)]
    format: Format,
}

/// Options of `fathom disk move`.
#[derive(Debug, Args)]
pub struct MoveDiskOptions {
    /// The disk's name
    name: String,
    /// A raw image that is made, or a block device
    #[arg(long, value_name = "PATH", group = "target")]
    to: Option<PathBuf>,
    /// A name for a block device that has no lasting one of its own
    #[arg(long, value_name = "NAME", requires = "to")]
    key: Option<String>,
    /// A pool of the block store, in which the volume is made
    #[arg(long, value_name = "POOL", group = "target")]
    store: Option<PathBuf>,
    /// The name of the new volume [default: the disk's name]
    #[arg(long, value_name = "NAME", requires = "store")]
    volume: Option<String>,
    /// Bypass the host's page cache at the target
    #[arg(long, requires = "target")]
    direct: bool,
    /// Use the host's page cache at the target
    #[arg(long, requires = "target", conflicts_with = "direct")]
    buffered: bool,
    /// The most bytes per second that are copied
    #[arg(long, value_name = "SIZE", requires = "target")]
    speed: Option<Bytes>,
    /// Do not wait for idle time of the devices
    #[arg(long, requires = "target")]
    urgent: bool,
    /// Lose what a block device has that Fathom has not written
    #[arg(long, requires = "to")]
    overwrite: bool,
    /// Wait until the disk has moved
    #[arg(long)]
    wait: bool,
    /// End the move: the disk stays where it is
    #[arg(long, conflicts_with_all = ["target", "wait"])]
    cancel: bool,
    #[command(flatten)]
    control: ControlOptions,
    #[command(flatten)]
    format: Format,
}

/// Options of `fathom disk recover`.
#[derive(Debug, Args)]
pub struct RecoverOptions {
    /// The disk's name, or the path of an image that is not served
    name: String,
    #[command(flatten)]
    control: ControlOptions,
    #[command(flatten)]
    format: Format,
}

/// Options of `fathom disk retry`.
#[derive(Debug, Args)]
pub struct RetryOptions {
    /// The disk's name
    name: String,
    #[command(flatten)]
    control: ControlOptions,
    #[command(flatten)]
    format: Format,
}

/// Options of `fathom disk list`.
#[derive(Debug, Args)]
pub struct ListOptions {
    #[command(flatten)]
    control: ControlOptions,
    #[command(flatten)]
    format: Format,
}

/// Carries out a command.
pub fn run(command: &DiskCommand) -> CommandResult {
    match command {
        DiskCommand::Create(options) => create::run(options),
        DiskCommand::Info(options) => info::run(options),
        DiskCommand::Check(options) => check::run(options),
        DiskCommand::Resize(options) => resize::run(options),
        DiskCommand::Import(options) => import::run(options),
        DiskCommand::Add(options) => daemon::add(options),
        DiskCommand::Layer(options) => daemon::layer(options),
        DiskCommand::Recover(options) => recover::run(options),
        DiskCommand::Retry(options) => daemon::retry(options),
        DiskCommand::Move(options) => moving::run(options),
        DiskCommand::Remove(options) => daemon::remove(options),
        DiskCommand::List(options) => daemon::list(options),
    }
}

/// Whether a word that may be a path or a disk's name is a path. A disk of the daemon, served or
/// not, is meant even if the working directory has an entry of its name: that is `./NAME`.
fn is_path(word: &str, client: &Client) -> bool {
    let is_disk = || {
        client.disks().is_ok_and(|list| {
            let mut names = list.disks.iter().map(|disk| &disk.name);
            let mut unserved = list.unserved.iter().map(|disk| &disk.name);
            names.any(|name| name == word) || unserved.any(|name| name == word)
        })
    };
    word.contains('/') || (Path::new(word).exists() && !is_disk())
}

/// An absolute path, for another process that may have another working directory.
pub fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// A size as text, with the exact number of bytes from 1 KiB on.
fn exact(bytes: u64) -> String {
    let short = Bytes(bytes).to_string();
    if bytes < 1024 { short } else { format!("{short} ({bytes} bytes)") }
}

/// Reads the format of an image whose size is the size of its disk.
fn raw_or_qcow2(text: &str) -> Result<ImageFormat, String> {
    match text.parse() {
        Ok(format @ (ImageFormat::Raw | ImageFormat::Qcow2)) => Ok(format),
        _ => Err("new images are raw or qcow2".into()),
    }
}

fn raw_only(text: &str) -> Result<ImageFormat, String> {
    match text.parse() {
        Ok(ImageFormat::Raw) => Ok(ImageFormat::Raw),
        _ => Err("only raw images are resized here; others while they are served".into()),
    }
}
