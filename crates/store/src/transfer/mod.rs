//! Snapshots as streams, from pool to pool.
//!
//! - `format`: the records of a stream; - `send`, `receive`: its ends; - `digest`: what shows that
//!   two snapshots in different pools have the same content. `docs/store.md` has the format.

mod digest;
mod format;
mod fuzz;
mod receive;
mod send;

use std::fmt;
use std::io;

use fathom_failure::Failing;

use crate::error::PoolError;

pub use format::Beginning;
pub(crate) use fuzz::fuzz_stream;
pub use receive::{Received, receive};
pub use send::{SendOptions, Sent, send};

/// Why a snapshot cannot be sent or received. Nothing of it is left in the pool then.
#[derive(Debug)]
pub enum TransferError {
    /// The pool refuses, or fails.
    Pool(PoolError),
    /// The stream cannot be read or written.
    Stream(io::Error),
    /// The stream is no sound one; a sentence says why.
    Unsound(&'static str),
    /// A later version of Fathom wrote the stream.
    Newer(u32),
    /// The stream ends before its end record.
    CutOff,
    /// The pool has not the snapshot on which the stream is based; a sentence says what it has.
    WrongBase(String),
    /// An earlier receipt was interrupted by the end of its process, and has left this volume.
    Unfinished(&'static str),
    /// The volume has changed since the snapshot on which the stream is based.
    Changed(String),
}

impl fmt::Display for TransferError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pool(error) => error.fmt(formatter),
            Self::Stream(error) => write!(formatter, "the stream fails: {error}"),
            Self::Unsound(why) => write!(formatter, "the stream is damaged: {why}"),
            Self::Newer(version) => {
                write!(formatter, "a later version of Fathom wrote the stream ({version})")
            }
            Self::CutOff => formatter.write_str("the stream is cut off"),
            Self::WrongBase(what) => {
                write!(formatter, "the stream is based on another snapshot: {what}")
            }
            Self::Unfinished(volume) => {
                write!(formatter, "an interrupted receipt has left the volume {volume}")
            }
            Self::Changed(base) => {
                write!(formatter, "the volume has changed since its snapshot {base}")
            }
        }
    }
}

impl std::error::Error for TransferError {}

impl Failing for TransferError {
    fn remedy(&self) -> String {
        match self {
            Self::Pool(error) => error.remedy(),
            Self::Stream(_) => String::new(),
            Self::Unsound(_) | Self::CutOff => "send it again".into(),
            Self::Newer(_) => "use a later version of Fathom".into(),
            Self::WrongBase(_) => {
                "receive the snapshots in the order in which they were sent, or send a full one"
                    .into()
            }
            Self::Unfinished(_) => "delete it with `fathom store delete`".into(),
            Self::Changed(base) => {
                format!("give up the changes with --rollback, or clone the snapshot {base} before")
            }
        }
    }
}

impl From<PoolError> for TransferError {
    fn from(error: PoolError) -> Self {
        Self::Pool(error)
    }
}
