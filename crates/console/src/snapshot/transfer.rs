//! `fathom snapshot send`, and `receive` into pools that no daemon uses.

use std::io::{self, BufReader, BufWriter, IsTerminal, Read, Write};
use std::time::{Duration, Instant};

use clap::Args;
use fathom_control::{AnswerStream, Bytes, PoolEntry, SnapshotStreamQuery};
use fathom_store::{SendOptions, TransferError, receive, send};

use super::{Place, find_one};
use crate::failure::{CommandResult, Failure};
use crate::output;
use crate::output::progress::Progress;
use crate::store::{PoolArguments, of_daemon, open_pool, refuse_served, save, show};

/// The bytes of a stream that are written, or read, at once.
const BUFFER: usize = 1 << 20;
/// The time between two lines about a stream of the daemon, whose length is not known.
const NOTE_INTERVAL: Duration = Duration::from_secs(5);

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

/// Copies a stream of the daemon.
fn copy(mut stream: AnswerStream, out: &mut impl Write, name: &str) -> CommandResult {
    let mut bytes = vec![0; BUFFER];
    let (begun, mut noted, mut copied) = (Instant::now(), Instant::now(), 0);
    loop {
        let count = stream.read(&mut bytes).map_err(|error| {
            Failure::new(format!("the daemon has not sent all of {name}: {error}"))
                .advise("its log says why; send it again")
        })?;
        let written = out
            .write_all(&bytes[..count])
            .and_then(|()| if count == 0 { out.flush() } else { Ok(()) });
        written.map_err(|error| Failure::new(format!("the stream cannot be written: {error}")))?;
        if count == 0 {
            return Ok(());
        }
        copied += count as u64;
        if noted.elapsed() >= NOTE_INTERVAL {
            noted = Instant::now();
            let rate = output::rate(copied as f64 / begun.elapsed().as_secs_f64());
            note!("{name}: {} sent, {rate}", Bytes(copied));
        }
    }
}

pub(super) fn run_send(options: &SnapshotSendOptions) -> CommandResult {
    let place = &options.place;
    let (path, volume) = find_one(place, &options.volume)?;
    if io::stdout().is_terminal() {
        return Err(Failure::usage("a snapshot is not sent to a terminal")
            .advise("add > FILE, or | ssh HOST fathom snapshot receive POOL VOLUME"));
    }
    let mut out = BufWriter::with_capacity(BUFFER, io::stdout().lock());
    let client = place.control.client();
    if of_daemon(&client, &path).is_some() {
        let (snapshot, from) = (options.name.clone(), options.from.clone());
        let query = SnapshotStreamQuery { path, volume, snapshot, from };
        return copy(client.snapshot_stream(&query)?, &mut out, &options.name);
    }
    let pool = open_pool(&path)?;
    let (snapshot, from) = (&options.name[..], options.from.as_deref());
    let wanted = SendOptions { volume: &volume, snapshot, from };
    let label = format!("{volume}@{snapshot}");
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
