//! Receives a snapshot.
//!
//! The content of a full stream goes to a volume with a name of its own, which gets the name of the
//! stream at the end. An incremental stream changes the volume, which has the content of the base
//! before, and gets it again if the stream turns out to be none. Only what has the digest of the
//! sender's snapshot gets its name.

use std::io::Read;
use std::sync::Arc;

use fathom_block::{Backend, Operation, StoreAccess};

use super::TransferError;
use super::digest::digest;
use super::format::{Beginning, RecordReader, StreamBase, StreamRecord};
use super::send::find;
use crate::difference::ChangeCursor;
use crate::error::PoolError;
use crate::pool::Pool;
use crate::refusal::PoolRefusal;

/// The volume of a full stream until its end. One is left there if the host loses its power.
const UNFINISHED: &str = "+receiving";

/// What was received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// What the stream says of the snapshot.
    pub beginning: Beginning,
    /// The bytes of content in the stream.
    pub data_bytes: u64,
}

/// Receives a snapshot as one of `volume`: a new volume, or, if the stream is based on a snapshot,
/// one that has it. With `rolls_back`, what has changed in the volume since that snapshot is given
/// up. `progress` is called with the byte up to which this is done, and the size.
///
/// # Errors
/// If the stream is no sound one, does not fit to the pool, or the pool fails. The pool is as it
/// was then.
pub fn receive(
    pool: &Pool,
    volume: &str,
    input: impl Read,
    rolls_back: bool,
    mut progress: impl FnMut(u64, u64),
) -> Result<Received, TransferError> {
    let mut reader = RecordReader::new(input)?;
    let StreamRecord::Begin(beginning) = reader.next()? else {
        return Err(TransferError::Unsound("it does not begin"));
    };
    let received = match &beginning.base {
        None => {
            check_new(pool, volume)?;
            pool.create_volume(UNFINISHED, beginning.size)?;
            let received = fill(pool, UNFINISHED, &beginning, &mut reader, &mut progress).and_then(
                |data_bytes| {
                    finish(pool, UNFINISHED, &beginning)?;
                    pool.rename_volume(UNFINISHED, volume)?;
                    Ok(data_bytes)
                },
            );
            if received.is_err() {
                let _ = pool.delete_snapshot(UNFINISHED, &beginning.snapshot);
                pool.delete_volume(UNFINISHED)?;
            }
            received?
        }
        Some(base) => {
            check_base(pool, volume, base, &beginning, rolls_back)?;
            let received =
                fill(pool, volume, &beginning, &mut reader, &mut progress).and_then(|data_bytes| {
                    finish(pool, volume, &beginning)?;
                    Ok(data_bytes)
                });
            if received.is_err() {
                pool.roll_back(volume, &base.name)?;
            }
            received?
        }
    };
    Ok(Received { beginning, data_bytes: received })
}

/// Checks whether a new volume can have the name.
fn check_new(pool: &Pool, volume: &str) -> Result<(), TransferError> {
    pool.inner.shared.access(|state| {
        state.catalogue.check_name(volume).map_err(PoolError::from)?;
        let is_left = state.catalogue.volume(UNFINISHED).is_ok();
        if is_left { Err(TransferError::Unfinished(UNFINISHED)) } else { Ok(()) }
    })
}

/// Checks that the volume is, or becomes, what the stream is based on.
fn check_base(
    pool: &Pool,
    volume: &str,
    base: &StreamBase,
    beginning: &Beginning,
    rolls_back: bool,
) -> Result<(), TransferError> {
    let id = pool.number_of(volume, None)?;
    if pool.snapshot_of(id, &base.name).is_none() {
        return Err(TransferError::WrongBase(format!("{volume} has no snapshot {}", base.name)));
    }
    let found = find(pool, volume, &base.name)?;
    let is_same = (found.time_s, found.size) == (base.time_s, base.size)
        && digest(pool, found.id)? == base.digest;
    if !is_same {
        let name = &base.name;
        let what = format!("the snapshot {name} of {volume} has another time, size or content");
        return Err(TransferError::WrongBase(what));
    }
    if find(pool, volume, &beginning.snapshot).is_ok() {
        return Err(PoolError::from(PoolRefusal::NameTaken).into());
    }
    if rolls_back {
        pool.roll_back(volume, &base.name)?;
        return Ok(());
    }
    let since = pool.difference(Some(found.id), id)?;
    let mut cursor = ChangeCursor::open(&since, 0)?;
    let mut changes = Vec::new();
    while !cursor.is_done() && changes.is_empty() {
        cursor.step(&mut changes)?;
    }
    if !changes.is_empty() || since.capacity() != found.size {
        return Err(TransferError::Changed(base.name.clone()));
    }
    Ok(())
}

/// Carries out the records of a stream. Returns the bytes of content.
fn fill(
    pool: &Pool,
    volume: &str,
    beginning: &Beginning,
    reader: &mut RecordReader<impl Read>,
    progress: &mut impl FnMut(u64, u64),
) -> Result<u64, TransferError> {
    let target: Arc<dyn Backend> = pool.volume(volume)?;
    let size = beginning.size;
    if target.capacity() != size {
        let refused = |kind| PoolError::Device(std::io::Error::other(kind));
        target.resize(size).map_err(refused)?;
    }
    let mut access = StoreAccess::open(&target).map_err(PoolError::from)?;
    let (mut bytes, mut data_bytes) = (Vec::new(), 0);
    let expected = loop {
        let end = match reader.next()? {
            StreamRecord::Data(offset, data) => {
                bytes.clear();
                bytes.extend_from_slice(data);
                access.carry_out(Operation::Write, offset, &mut bytes).map_err(PoolError::from)?;
                data_bytes += bytes.len() as u64;
                offset + bytes.len() as u64
            }
            StreamRecord::Hole(offset, length) => {
                access
                    .carry_out_long(Operation::WriteZeroes, offset, length, &mut [])
                    .map_err(PoolError::from)?;
                offset + length
            }
            StreamRecord::End(digest) => break digest,
            StreamRecord::Begin(_) => return Err(TransferError::Unsound("it begins twice")),
        };
        progress(end, size);
    };
    access.carry_out(Operation::Flush, 0, &mut []).map_err(PoolError::from)?;
    drop(access);
    if digest(pool, pool.number_of(volume, None)?)? != expected {
        return Err(TransferError::Unsound("its content is not that of the snapshot"));
    }
    Ok(data_bytes)
}

fn finish(pool: &Pool, volume: &str, beginning: &Beginning) -> Result<(), PoolError> {
    pool.take_snapshot(&[volume], &beginning.snapshot, beginning.time_s)
}
