//! `fathom snapshot`: snapshots of disks in pools of the block store.

mod diff;
mod transfer;

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use clap::{Args, Subcommand, ValueEnum};
use fathom_control::{Freeze, PoolChange, PoolEntry};

use crate::connection::ControlOptions;
use crate::failure::{CommandResult, Failure};
use crate::output::Format;
use crate::store::{change, show};

/// Snapshots of disks in pools, their clones, and roll-backs.
#[derive(Debug, Subcommand)]
pub enum SnapshotCommand {
    /// Take a snapshot of a disk, or of several at one instant, while they are used
    #[command(after_help = "\
A snapshot has what a power loss at this instant would have left: the guest's file systems recover from
it as they do after one. With --freeze, the QEMU guest agent freezes them meanwhile, so that nothing has to
recover. Disks that are named together, of one pool, have the same instant.

Examples:
  fathom snapshot create web                      named by the time
  fathom snapshot create web db --freeze          both guests are frozen for a moment
  fathom snapshot create web db --name before-upgrade
  fathom snapshot create web --store /var/lib/fathom/pool    a volume that no disk uses")]
    Create(CreateOptions),
    /// Delete a snapshot. What only it had becomes free soon after
    Delete(OneOptions),
    /// Hold a snapshot: neither it nor its volume can be deleted until it is released
    #[command(after_help = "\
Examples:
  fathom snapshot hold web before-upgrade --reason 'until the audit'
  fathom snapshot release web before-upgrade")]
    Hold(HoldOptions),
    /// Release a snapshot that is held
    Release(OneOptions),
    /// Make a volume with the content of a snapshot, at once
    #[command(after_help = "\
Examples:
  fathom snapshot clone web before-upgrade web-test
  fathom disk add web-test --store /var/lib/fathom/pool --volume web-test --socket /run/fathom/web-test.sock")]
    Clone(CloneOptions),
    /// Give a volume that no disk uses the content of one of its snapshots
    Rollback(OneOptions),
    /// Show what has changed between two snapshots, or since a snapshot
    #[command(after_help = "\
Examples:
  fathom snapshot diff web monday                  since monday, while the disk is used
  fathom snapshot diff web monday tuesday --list   each extent
  fathom snapshot diff web monday --files          the guest's files that were written
  fathom snapshot diff web monday --store /var/lib/fathom/pool --json")]
    Diff(diff::DiffOptions),
    /// Write a snapshot, or what has changed since another one, as a stream to standard output
    #[command(after_help = "\
Examples:
  fathom snapshot send web monday --store /srv/pool > monday.fathom
  fathom snapshot send web tuesday --from monday --store /srv/pool | ssh host fathom snapshot receive /srv/copy web")]
    Send(transfer::SnapshotSendOptions),
    /// Make a snapshot of a stream from standard input
    #[command(after_help = "\
Nothing of a stream is left that is cut off, damaged, or based on another snapshot than the volume has.

Examples:
  fathom snapshot receive /srv/copy web < monday.fathom
  fathom snapshot receive /srv/copy web --rollback < tuesday.fathom    the volume was used meanwhile")]
    Receive(transfer::SnapshotReceiveOptions),
}

/// Where the volumes are.
#[derive(Debug, Args)]
struct Place {
    /// The pool of the volumes. Without it, disks of the daemon are named
    #[arg(long, value_name = "POOL")]
    store: Option<PathBuf>,
    #[command(flatten)]
    control: ControlOptions,
    #[command(flatten)]
    format: Format,
}

/// Options of `fathom snapshot create`.
#[derive(Debug, Args)]
pub struct CreateOptions {
    /// The disks, or, with --store, the volumes
    #[arg(value_name = "DISK", required = true)]
    disks: Vec<String>,
    /// The name [default: the time, as 20261129T120000Z]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Freeze the guests' file systems meanwhile. `try` takes the snapshot even if a guest's agent
    /// does not answer
    #[arg(
        long, value_name = "HOW", num_args = 0..=1, require_equals = true,
        default_missing_value = "require"
    )]
    freeze: Option<FreezeChoice>,
    #[command(flatten)]
    place: Place,
}

/// Whether guests that cannot be frozen prevent a snapshot.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum FreezeChoice {
    /// No snapshot without all of them
    Require,
    /// The others have what a power loss would have left
    Try,
}

/// Options of `fathom snapshot hold`.
#[derive(Debug, Args)]
pub struct HoldOptions {
    #[command(flatten)]
    snapshot: OneOptions,
    /// Why it is held
    #[arg(long, value_name = "TEXT", default_value = "by the operator")]
    reason: String,
}

/// A snapshot.
#[derive(Debug, Args)]
pub struct OneOptions {
    /// The disk, or, with --store, the volume
    disk: String,
    /// The snapshot
    name: String,
    #[command(flatten)]
    place: Place,
}

/// Options of `fathom snapshot clone`.
#[derive(Debug, Args)]
pub struct CloneOptions {
    /// The disk, or, with --store, the volume
    disk: String,
    /// The snapshot
    name: String,
    /// The name of the new volume
    volume: String,
    #[command(flatten)]
    place: Place,
}

/// Carries out a command.
pub fn run(command: &SnapshotCommand) -> CommandResult {
    match command {
        SnapshotCommand::Create(options) => {
            let name = options.name.clone().unwrap_or_else(now);
            let freeze = match options.freeze {
                None => Freeze::Off,
                Some(FreezeChoice::Try) => Freeze::Try,
                Some(FreezeChoice::Require) => Freeze::Require,
            };
            let snapshot = |volumes| PoolChange::Snapshot { volumes, name, freeze };
            change_disks(&options.place, options.disks.clone(), snapshot)
        }
        SnapshotCommand::Delete(OneOptions { disk, name, place }) => {
            let name = name.clone();
            change_disk(place, disk, |volume| PoolChange::DeleteSnapshot { volume, name })
        }
        SnapshotCommand::Hold(HoldOptions { snapshot, reason }) => {
            let OneOptions { disk, name, place } = snapshot;
            let (name, reason) = (name.clone(), reason.clone());
            change_disk(place, disk, |volume| PoolChange::Hold { volume, name, reason })
        }
        SnapshotCommand::Release(OneOptions { disk, name, place }) => {
            let name = name.clone();
            change_disk(place, disk, |volume| PoolChange::Release { volume, name })
        }
        SnapshotCommand::Rollback(OneOptions { disk, name, place }) => {
            let name = name.clone();
            change_disk(place, disk, |volume| PoolChange::RollBack { volume, name })
        }
        SnapshotCommand::Clone(CloneOptions { disk, name, volume: to, place }) => {
            let (name, to) = (name.clone(), to.clone());
            change_disk(place, disk, |volume| PoolChange::Clone { volume, name, to })
        }
        SnapshotCommand::Diff(options) => diff::run(options),
        SnapshotCommand::Send(options) => transfer::run_send(options),
        SnapshotCommand::Receive(options) => transfer::run_receive(options),
    }
}

/// Changes the pool of some disks.
fn change_disks(
    place: &Place,
    disks: Vec<String>,
    wanted: impl FnOnce(Vec<String>) -> PoolChange,
) -> CommandResult {
    let (path, volumes) = find(place, disks)?;
    let entry = change(&path, &place.control, &wanted(volumes))?;
    show(&[entry], &place.format)
}

/// Changes the pool of a disk.
fn change_disk(
    place: &Place,
    disk: &str,
    wanted: impl FnOnce(String) -> PoolChange,
) -> CommandResult {
    let (path, volume) = find_one(place, disk)?;
    let entry = change(&path, &place.control, &wanted(volume))?;
    show(&[entry], &place.format)
}

/// The time now, as a name.
fn now() -> String {
    let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    crate::output::instant(time).replace(['-', ':'], "").replace(' ', "T")
}

/// The pool and the volume of a disk.
fn find_one(place: &Place, disk: &str) -> CommandResult<(PathBuf, String)> {
    let (path, mut volumes) = find(place, vec![disk.to_owned()])?;
    Ok((path, volumes.swap_remove(0)))
}

/// The pool and the volumes of disks.
fn find(place: &Place, disks: Vec<String>) -> CommandResult<(PathBuf, Vec<String>)> {
    if let Some(store) = &place.store {
        return Ok((store.clone(), disks));
    }
    let pools = place.control.client().pools()?.pools;
    let mut path: Option<&Path> = None;
    let mut volumes = Vec::new();
    for disk in &disks {
        let Some((pool, volume)) = pools.iter().find_map(|pool| volume_of(pool, disk)) else {
            let failure = Failure::new(format!("the disk {disk:?} is in no pool"));
            return Err(failure.advise(
                "`fathom store list` shows the disks with volumes; name a volume of another pool \
                 with --store",
            ));
        };
        if path.is_some_and(|path| path != pool) {
            return Err(Failure::new("the disks are in several pools")
                .advise("take the snapshots one after the other"));
        }
        path = Some(pool);
        volumes.push(volume.to_owned());
    }
    let path = path.ok_or_else(|| Failure::usage("no disk is named"))?;
    Ok((path.to_owned(), volumes))
}

fn volume_of<'p>(pool: &'p PoolEntry, disk: &str) -> Option<(&'p Path, &'p str)> {
    let volume = pool.volumes.iter().find(|volume| volume.disk.as_deref() == Some(disk))?;
    Some((&pool.path, volume.name.as_deref()?))
}
