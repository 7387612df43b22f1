//! `fathom snapshot send` and `receive`: pools that no daemon uses.

use std::io::{self, BufReader, BufWriter, IsTerminal};

use clap::Args;
use fathom_control::PoolEntry;
use fathom_store::{SendOptions, TransferError, receive, send};

use super::{Place, find_one};
use crate::failure::{CommandResult, Failure};
use crate::output::progress::Progress;
use crate::store::{PoolArguments, open_pool, refuse_served, save, show};

/// The bytes of a stream that are written, or read, at once.
const BUFFER: usize = 1 << 20;

/// Options of `fathom snapshot send`.
#[derive(Debug, Args)]
pub struct SnapshotSendOptions {
    /// The volume
    volume: String,
    /// The snapshot
    name: String,
    /// An earlier snapshot that the receiver has: only what has changed since is sent
    #[arg(long, value_name = "SNAPSHOT")]
    from: Option<String>,
    #[command(flatten)]
    place: Place,
}

/// Options of `fathom snapshot receive`.
#[derive(Debug, Args)]
pub struct SnapshotReceiveOptions {
    #[command(flatten)]
    at: PoolArguments,
    /// The volume: a new one, or, for the changes since a snapshot, one that has this snapshot
    volume: String,
    /// Give up what has changed in the volume since that snapshot
    #[arg(long)]
    rollback: bool,
}

/// Reports progress of which the size becomes known with the first report.
fn report(label: &str, is_silent: bool) -> impl FnMut(u64, u64) {
    let (label, mut progress) = (label.to_owned(), None);
    move |done, size| {
        let progress: &mut Progress =
            progress.get_or_insert_with(|| Progress::new(label.clone(), size).silent(is_silent));
        progress.update(done);
    }
}

fn failed(what: &str, error: TransferError) -> Failure {
    fathom_failure::Failure::from(error).about(what.to_owned()).into()
}

pub(super) fn run_send(options: &SnapshotSendOptions) -> CommandResult {
    let place = &options.place;
    let (path, volume) = find_one(place, &options.volume)?;
    refuse_served(
        &path,
        &place.control,
        "serve the snapshot read-only over NBD, and copy it with `nbdcopy` or by its bitmaps; or \
         stop serving the disks of the pool",
    )?;
    if io::stdout().is_terminal() {
        return Err(Failure::usage("a snapshot is not sent to a terminal")
            .advise("add > FILE, or | ssh HOST fathom snapshot receive POOL VOLUME"));
    }
    let pool = open_pool(&path)?;
    let (snapshot, from) = (&options.name[..], options.from.as_deref());
    let wanted = SendOptions { volume: &volume, snapshot, from };
    let label = format!("{volume}@{snapshot}");
    let out = BufWriter::with_capacity(BUFFER, io::stdout().lock());
    let sent = send(&pool, &wanted, out, report(&label, place.format.json));
    sent.map(drop).map_err(|error| failed(&label, error))
}

pub(super) fn run_receive(options: &SnapshotReceiveOptions) -> CommandResult {
    let (at, volume) = (&options.at, &options.volume);
    refuse_served(
        &at.pool,
        &at.control,
        "stop serving the disks of the pool, or receive into another one",
    )?;
    let pool = open_pool(&at.pool)?;
    let input = BufReader::with_capacity(BUFFER, io::stdin().lock());
    let progress = report(volume, at.format.json);
    let received = receive(&pool, volume, input, options.rollback, progress);
    // What a failed receipt has given back is kept as well.
    save(&at.pool, &pool)?;
    received.map_err(|error| failed(volume, error))?;
    show(&[PoolEntry::of(&at.pool, &pool, |_| None)], &at.format)
}
