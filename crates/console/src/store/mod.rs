//! `fathom store`: pools of the block store, and their volumes.
//!
//! A pool that a disk of the daemon uses is changed through the daemon; another one is opened by
//! the command itself.

mod check;
mod copy;
mod estimate;
mod make;
mod reclaimable;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::{Args, Subcommand};
use fathom_backend::{FileBackend, FileOptions};
use fathom_control::{
    Bytes, Client, DeletionEntry, PoolChange, PoolEntry, ReclaimEntry, ScrubEntry, ScrubPhase,
};
use fathom_store::{Backend, Pool, PoolOptions};
use serde::Serialize;

use crate::connection::ControlOptions;
use crate::failure::{CommandResult, Failure};
use crate::output::style::Style;
use crate::output::table::{Table, TableColumn};
use crate::output::text::clean;
use crate::output::{self, Format};

/// How long the end of a change may take.
const SAVE_TIME_MAX: Duration = Duration::from_secs(30);

/// Pools of the block store, and their volumes.
#[derive(Debug, Subcommand)]
pub enum StoreCommand {
    /// Make a pool in a new file, or on an empty block device
    #[command(after_help = "\
Examples:
  fathom store create /var/lib/fathom/pool 100G     a file, which grows with its content
  fathom store create /dev/vg/pool                  a block device
  fathom store new /var/lib/fathom/pool web 20G     a volume in it")]
    Create(make::CreateOptions),
    /// List the volumes and snapshots of a pool, or of all pools that disks use
    List(PoolListOptions),
    /// Make an empty volume
    New(NewOptions),
    /// Delete a volume that no disk uses; its snapshots stay
    Delete(VolumeArguments),
    /// Give a volume another name
    Rename(RenameOptions),
    /// Give a volume another domain, in which equal blocks are kept once
    Domain(DomainOptions),
    /// Guarantee a volume some space of its own, whatever others write to the pool
    #[command(after_help = "\
Examples:
  fathom store guarantee /srv/pool db 40G     it can always have 40 GiB of its own
  fathom store guarantee /srv/pool db none    it has what others leave")]
    Guarantee(GuaranteeOptions),
    /// Look for equal blocks that were written several times, and free all but one of each
    Merge(PoolArguments),
    /// Copy a raw image, or a block device, into a new volume
    Import(copy::ImportOptions),
    /// Copy a volume, or a snapshot (VOLUME@SNAPSHOT), into a new raw image
    Export(copy::ExportOptions),
    /// Read images, and say what a pool would save of them
    Estimate(estimate::EstimateOptions),
    /// Find what deleting each volume and each snapshot would free
    Reclaimable(reclaimable::ReclaimableOptions),
    /// Check a pool: its maps, and the content of each block; also while it is used
    Check(check::PoolCheckOptions),
}

/// A pool, and how to reach the daemon that may have it.
#[derive(Debug, Args)]
pub struct PoolArguments {
    /// The pool: a file or block device
    #[arg(value_name = "POOL")]
    pub(crate) pool: PathBuf,
    #[command(flatten)]
    pub(crate) control: ControlOptions,
    #[command(flatten)]
    pub(crate) format: Format,
}

/// Options of `fathom store list`.
#[derive(Debug, Args)]
pub struct PoolListOptions {
    /// The pool; by default all that disks of the daemon use
    #[arg(value_name = "POOL")]
    pool: Option<PathBuf>,
    #[command(flatten)]
    control: ControlOptions,
    #[command(flatten)]
    format: Format,
}

/// Options of `fathom store new`.
#[derive(Debug, Args)]
pub struct NewOptions {
    #[command(flatten)]
    at: PoolArguments,
    /// The name of the volume
    volume: String,
    /// Its size, for example 20G
    size: Bytes,
    /// Equal blocks of volumes with the same domain are kept once
    #[arg(long, value_name = "NAME", default_value = fathom_store::DOMAIN)]
    domain: String,
    /// Share no blocks with other volumes
    #[arg(long, conflicts_with = "domain")]
    unshared: bool,
}

/// Options of `fathom store domain`.
#[derive(Debug, Args)]
pub struct DomainOptions {
    #[command(flatten)]
    at: PoolArguments,
    /// The volume
    volume: String,
    /// The domain
    #[arg(required_unless_present = "none")]
    domain: Option<String>,
    /// Share no blocks with other volumes
    #[arg(long, conflicts_with = "domain")]
    none: bool,
}

/// Options of `fathom store guarantee`.
#[derive(Debug, Args)]
pub struct GuaranteeOptions {
    #[command(flatten)]
    at: PoolArguments,
    /// The volume
    volume: String,
    /// How much, for example 40G, or `none`
    #[arg(value_name = "SIZE|none", value_parser = guarantee)]
    size: Bytes,
}

/// A size, or `none` for 0.
fn guarantee(text: &str) -> Result<Bytes, String> {
    if text == "none" { Ok(Bytes(0)) } else { text.parse().map_err(|error| format!("{error}")) }
}

/// A volume of a pool.
#[derive(Debug, Args)]
pub struct VolumeArguments {
    #[command(flatten)]
    at: PoolArguments,
    /// The volume
    volume: String,
}

/// Options of `fathom store rename`.
#[derive(Debug, Args)]
pub struct RenameOptions {
    #[command(flatten)]
    at: PoolArguments,
    /// The volume
    volume: String,
    /// Its new name
    name: String,
}

/// Carries out a command.
pub fn run(command: &StoreCommand) -> CommandResult {
    match command {
        StoreCommand::Create(options) => make::run(options),
        StoreCommand::List(options) => list(options),
        StoreCommand::New(options) => {
            let domain = if options.unshared { String::new() } else { options.domain.clone() };
            let (volume, size_bytes) = (options.volume.clone(), options.size.0);
            let change = PoolChange::Create { volume, size_bytes, domain: Some(domain) };
            changed(&options.at, &change)
        }
        StoreCommand::Domain(options) => {
            let domain = options.domain.clone().unwrap_or_default();
            changed(&options.at, &PoolChange::Domain { volume: options.volume.clone(), domain })
        }
        StoreCommand::Guarantee(options) => {
            let (volume, bytes) = (options.volume.clone(), options.size.0);
            changed(&options.at, &PoolChange::Guarantee { volume, bytes })
        }
        StoreCommand::Merge(at) => {
            if of_daemon(&at.control.client(), &at.pool).is_none() {
                return Err(Failure::new("no disk of the daemon uses the pool")
                    .advise("serve one of its volumes: blocks are merged meanwhile"));
            }
            changed(at, &PoolChange::Merge)
        }
        StoreCommand::Delete(options) => {
            changed(&options.at, &PoolChange::Delete { volume: options.volume.clone() })
        }
        StoreCommand::Rename(options) => {
            let (volume, to) = (options.volume.clone(), options.name.clone());
            changed(&options.at, &PoolChange::Rename { volume, to })
        }
        StoreCommand::Import(options) => copy::import(options),
        StoreCommand::Export(options) => copy::export(options),
        StoreCommand::Estimate(options) => estimate::run(options),
        StoreCommand::Reclaimable(options) => reclaimable::run(options),
        StoreCommand::Check(options) => check::run(options),
    }
}

/// The file or device of a pool.
fn open_device(path: &Path, read_only: bool) -> CommandResult<Arc<dyn Backend>> {
    let options = FileOptions {
        path: path.to_owned(),
        direct: false,
        read_only,
        block_size: None,
        disk: String::new(),
        records: None,
        foreign_allowed: true,
    };
    let device = FileBackend::open(&options).map_err(fathom_failure::Failure::from)?;
    Ok(Arc::new(device))
}

/// Opens a pool that the daemon does not have.
pub(crate) fn open_pool(path: &Path) -> CommandResult<Pool> {
    let device = open_device(path, false)?;
    let opened = Pool::open(device, PoolOptions::default());
    Ok(opened.map_err(|error| about(path, error))?)
}

/// A failure of a pool.
pub(crate) fn about(path: &Path, error: fathom_store::PoolError) -> fathom_failure::Failure {
    fathom_failure::Failure::from(error).about(format!("the pool {}", path.display()))
}

/// The daemon's entry of a pool; `None` if there is no daemon, or no disk of it uses the pool.
pub(crate) fn of_daemon(client: &Client, path: &Path) -> Option<PoolEntry> {
    let path = path.canonicalize().ok()?;
    client.pools().ok()?.pools.into_iter().find(|pool| pool.path == path)
}

/// Refuses what is not done with a pool that the daemon has.
pub(crate) fn refuse_served(path: &Path, control: &ControlOptions, instead: &str) -> CommandResult {
    if of_daemon(&control.client(), path).is_none() {
        return Ok(());
    }
    let failure = Failure::new(format!("the daemon uses the pool {}", path.display()));
    Err(failure.advise(instead.to_owned()))
}

/// Makes the next opening of a pool short.
pub(crate) fn save(path: &Path, pool: &Pool) -> CommandResult {
    pool.save(SAVE_TIME_MAX).map_err(|error| Failure::io("write", path, &error))
}

/// Carries out a change, through the daemon if it has the pool.
pub(crate) fn change(
    path: &Path,
    control: &ControlOptions,
    change: &PoolChange,
) -> CommandResult<PoolEntry> {
    let client = control.client();
    if of_daemon(&client, path).is_some() {
        let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        return Ok(client.change_pool(&path, change.clone())?);
    }
    let pool = open_pool(path)?;
    let time_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    change.carry_out(&pool, time_s).map_err(|error| about(path, error))?;
    save(path, &pool)?;
    Ok(PoolEntry::of(path, &pool, |_| None))
}

fn changed(at: &PoolArguments, change: &PoolChange) -> CommandResult {
    let entry = self::change(&at.pool, &at.control, change)?;
    show(&[entry], &at.format)
}

/// Shows pools.
pub(crate) fn show(pools: &[PoolEntry], format: &Format) -> CommandResult {
    if format.json {
        return output::json(&Pools { pools });
    }
    let style = Style::stdout();
    let texts = pools.iter().map(|pool| table(pool, style)).collect::<Vec<_>>();
    output::text_line(texts.join("\n").trim_end())
}

#[derive(Serialize)]
struct Pools<'a> {
    pools: &'a [PoolEntry],
}

fn table(pool: &PoolEntry, style: Style) -> String {
    let share = pool.used_bytes as f64 / pool.bytes.max(1) as f64 * 100.0;
    let path = clean(&pool.path.display().to_string());
    let (used, all) = (Bytes(pool.used_bytes), Bytes(pool.bytes));
    let mut text = format!("{path}: {used} of {all} in use ({share:.0} %)");
    if pool.has_garbage {
        text += ", some of it until the next walk";
    }
    if pool.guaranteed_bytes > 0 {
        text += &format!("; {} are kept for guarantees", Bytes(pool.guaranteed_bytes));
    }
    if pool.shared_bytes > 0 {
        text += &format!("; {} are kept once for equal blocks", Bytes(pool.shared_bytes));
    }
    text.push('\n');
    if let Some(damage) = &pool.damage {
        text += &format!("problem: {}\n", clean(damage));
    }
    if let Some(scrub) = &pool.scrub {
        text += &verified(scrub);
    }
    if let Some(found) = &pool.reclaim {
        text += &reclaimable_found(found);
    }
    if let Some(warning) = &pool.warning {
        text += &format!("warning: {}\n", clean(warning));
    }
    let mut table = Table::new(vec![
        TableColumn::text("VOLUME").flexible(),
        TableColumn::text("SNAPSHOT").flexible(),
        TableColumn::number("SIZE"),
        TableColumn::number("GUARANTEED").optional(),
        TableColumn::number("DELETING FREES").optional(),
        TableColumn::text("DISK").flexible().optional(),
        TableColumn::text("TAKEN").optional(),
        TableColumn::text("HELD").flexible().optional(),
    ]);
    for volume in &pool.volumes {
        let name = volume.name.as_deref().map_or("(deleted)".into(), clean);
        if volume.name.is_some() {
            let disk = volume.disk.as_deref().map(clean).unwrap_or_default();
            let size = Bytes(volume.size_bytes).to_string();
            let kept = volume.guarantee_bytes.map(|bytes| Bytes(bytes).to_string());
            let (kept, none) = (kept.unwrap_or_default(), String::new());
            let frees = frees(pool, volume.name.as_deref(), None);
            table.row(vec![
                name.clone(),
                none.clone(),
                size,
                kept,
                frees,
                disk,
                none.clone(),
                none,
            ]);
        }
        for snapshot in &volume.snapshots {
            let size = Bytes(snapshot.size_bytes).to_string();
            let taken = output::instant(snapshot.time_s);
            let held = snapshot.hold.as_deref().map(clean).unwrap_or_default();
            let frees = frees(pool, volume.name.as_deref(), Some(&snapshot.name));
            let (name, snapshot, none) = (name.clone(), clean(&snapshot.name), String::new());
            table.row(vec![name, snapshot, size, none.clone(), frees, none, taken, held]);
        }
    }
    if pool.volumes.is_empty() {
        return text + "no volumes: make one with `fathom store new`\n";
    }
    text + &table.render(output::width(), style)
}

/// What deleting a volume or a snapshot would free, as the last search has found; empty if none has
/// ended, or if it did not know of it yet.
fn frees(pool: &PoolEntry, volume: Option<&str>, snapshot: Option<&str>) -> String {
    let found = pool.reclaim.as_ref().filter(|it| !it.running && it.error.is_none());
    let of =
        |it: &&DeletionEntry| it.volume.as_deref() == volume && it.snapshot.as_deref() == snapshot;
    let deletion = found.and_then(|found| found.deletions.iter().find(of));
    deletion.map(|it| Bytes(it.bytes).to_string()).unwrap_or_default()
}

/// A line about the search for what deletions would free.
fn reclaimable_found(found: &ReclaimEntry) -> String {
    if found.running {
        return "looking for what deletions would free\n".into();
    }
    match (&found.error, found.ended_s) {
        (Some(error), _) => format!("what deletions would free is not known: {}\n", clean(error)),
        (None, Some(ended_s)) => {
            let at = output::instant(ended_s);
            format!("what deletions would free, each alone, was found {at}\n")
        }
        (None, None) => String::new(),
    }
}

/// A line about the verification of a pool.
fn verified(scrub: &ScrubEntry) -> String {
    let found = match scrub.damage_count() {
        0 => "nothing is damaged".to_owned(),
        1 => "a block or page is damaged".to_owned(),
        damaged => format!("{damaged} blocks and pages are damaged"),
    };
    let (done, total) = scrub.progress();
    let share = (done as f64 / total.max(1) as f64 * 100.0).min(100.0);
    match (scrub.phase, scrub.ended_s) {
        (ScrubPhase::Running, _) => format!("being verified, {share:.0} %: {found}\n"),
        (ScrubPhase::Complete, Some(ended_s)) => {
            format!("verified {}: {found}\n", output::instant(ended_s))
        }
        (ScrubPhase::Complete, None) => format!("verified: {found}\n"),
        _ => format!("not verified to the end, {share:.0} %: {found}\n"),
    }
}

fn list(options: &PoolListOptions) -> CommandResult {
    let client = options.control.client();
    let Some(path) = &options.pool else {
        let pools = client.pools()?.pools;
        if pools.is_empty() && !options.format.json {
            return output::text_line("no disk of the daemon uses a pool: name one");
        }
        return show(&pools, &options.format);
    };
    let entry = match of_daemon(&client, path) {
        Some(entry) => entry,
        None => PoolEntry::of(path, &open_pool(path)?, |_| None),
    };
    show(&[entry], &options.format)
}
