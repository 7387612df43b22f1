//! Sends a snapshot.

use std::io::Write;

use fathom_block::{Operation, StoreAccess};

use super::TransferError;
use super::digest::digest;
use super::format::{Beginning, DATA_MAX, RecordWriter, StreamBase, StreamRecord};
use crate::catalogue::Snapshot;
use crate::difference::ChangeCursor;
use crate::error::PoolError;
use crate::pool::Pool;

/// What is sent.
#[derive(Clone, Copy, Debug)]
pub struct SendOptions<'a> {
    /// The volume.
    pub volume: &'a str,
    /// Its snapshot.
    pub snapshot: &'a str,
    /// Another snapshot of it, since which changes are sent.
    pub from: Option<&'a str>,
}

/// What was sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// The size of the snapshot, in bytes.
    pub size: u64,
    /// The bytes of content in the stream.
    pub data_bytes: u64,
    /// The bytes of holes in the stream.
    pub hole_bytes: u64,
}

/// Sends a snapshot. `progress` is called with the byte up to which this is done, and the size.
///
/// # Errors
/// If there is no such snapshot, or the pool or `out` fails. The stream is not complete then, and
/// no pool receives it.
pub fn send(
    pool: &Pool,
    options: &SendOptions<'_>,
    out: impl Write,
    mut progress: impl FnMut(u64, u64),
) -> Result<Sent, TransferError> {
    let snapshot = find(pool, options.volume, options.snapshot)?;
    let from = options.from.map(|name| find(pool, options.volume, name)).transpose()?;
    // Neither is deleted meanwhile.
    let content = pool.difference(from.as_ref().map(|from| from.id), snapshot.id)?;
    let base = match from {
        Some(Snapshot { id, name, size, time_s, .. }) => {
            Some(StreamBase { name, time_s, size, digest: digest(pool, id)? })
        }
        None => None,
    };
    let mut out = RecordWriter::new(out).map_err(TransferError::Stream)?;
    let (volume, time_s, size) = (options.volume.to_owned(), snapshot.time_s, snapshot.size);
    let beginning = Beginning { volume, snapshot: snapshot.name, time_s, size, base };
    out.write(&StreamRecord::Begin(beginning)).map_err(TransferError::Stream)?;
    let mut cursor = ChangeCursor::open(&content, 0)?;
    let mut access = StoreAccess::open(&content).map_err(PoolError::from)?;
    let (mut changes, mut bytes) = (Vec::new(), Vec::new());
    let mut sent = Sent { size, ..Sent::default() };
    while !cursor.is_done() {
        cursor.step(&mut changes)?;
        for change in changes.drain(..) {
            if change.is_hole {
                sent.hole_bytes += change.length;
                out.write(&StreamRecord::Hole(change.offset, change.length))
                    .map_err(TransferError::Stream)?;
                continue;
            }
            let (mut at, end) = (change.offset, change.offset + change.length);
            while at < end {
                bytes.resize((end - at).min(DATA_MAX as u64) as usize, 0);
                access.carry_out(Operation::Read, at, &mut bytes).map_err(PoolError::from)?;
                out.write(&StreamRecord::Data(at, &bytes)).map_err(TransferError::Stream)?;
                at += bytes.len() as u64;
                sent.data_bytes += bytes.len() as u64;
                progress(at, size);
            }
        }
        progress(cursor.at(), size);
    }
    out.write(&StreamRecord::End(digest(pool, snapshot.id)?)).map_err(TransferError::Stream)?;
    out.flush().map_err(TransferError::Stream)?;
    Ok(sent)
}

/// A snapshot by its names.
pub(super) fn find(pool: &Pool, volume: &str, name: &str) -> Result<Snapshot, PoolError> {
    pool.inner.shared.access(|state| {
        let volume = state.catalogue.volume(volume)?.id;
        Ok(state.catalogue.snapshot(volume, name)?.clone())
    })
}
