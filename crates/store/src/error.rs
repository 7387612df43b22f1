//! Why a pool cannot be made, opened or changed.

use std::fmt;
use std::io;

use fathom_failure::{Failing, Failure};
use fathom_persistence::Verdict;

use crate::refusal::PoolRefusal;
use crate::superblock::PoolSuperblock;

/// See the module.
#[derive(Debug)]
pub enum PoolError {
    /// The device has no pool that this program can use.
    NoPool(Verdict),
    /// The device has something already.
    NotBlank,
    /// The device is smaller than the pool on it, which needs so many bytes.
    TooShort(u64),
    /// A pool cannot have the size of the device, in bytes.
    BadSize(u64),
    /// The pool is damaged; a sentence says where.
    Damaged(String),
    /// The pool takes no changes because of an earlier failure.
    Failed(String),
    /// The change is refused.
    Refused(PoolRefusal),
    /// The pool has no place left.
    Full,
    /// The device fails.
    Device(io::Error),
}

impl fmt::Display for PoolError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoPool(verdict) => formatter.write_str(&verdict.describe::<PoolSuperblock>()),
            Self::NotBlank => formatter.write_str("it has other content"),
            Self::TooShort(needed) => {
                write!(formatter, "it is shorter than the pool on it, which needs {needed} bytes")
            }
            Self::BadSize(bytes) => {
                write!(
                    formatter,
                    "a pool cannot have {bytes} bytes: 64 MiB to 256 TiB are possible"
                )
            }
            Self::Damaged(what) => write!(formatter, "the pool is damaged: {what}"),
            Self::Failed(what) => write!(formatter, "the pool takes no changes: {what}"),
            Self::Refused(refusal) => refusal.fmt(formatter),
            Self::Full => formatter.write_str("the pool is full"),
            Self::Device(error) => write!(formatter, "its device fails: {error}"),
        }
    }
}

impl std::error::Error for PoolError {}

impl Failing for PoolError {
    fn remedy(&self) -> String {
        match self {
            Self::NoPool(Verdict::Blank) => "make one with `fathom store create`".into(),
            Self::NoPool(Verdict::Newer(_)) => "use a later version of Fathom".into(),
            Self::NoPool(Verdict::Foreign) | Self::NotBlank => {
                "check the path; `fathom store create` needs an empty file or device".into()
            }
            Self::NoPool(Verdict::Damaged) | Self::Damaged(_) => {
                "keep a copy of the device, then use `fathom store check`".into()
            }
            Self::TooShort(_) => "restore the device's former size".into(),
            Self::Refused(PoolRefusal::Guaranteed) => {
                "delete snapshots or volumes, lower a guarantee with `fathom store guarantee`, or make \
                 the pool's device larger"
                    .into()
            }
            Self::BadSize(_) | Self::Refused(_) => String::new(),
            Self::Failed(_) => {
                "repair its device, stop serving all disks of the pool, then serve them again"
                    .into()
            }
            Self::Full => "delete snapshots or volumes, or make its device larger".into(),
            Self::Device(_) => "check the device".into(),
        }
    }
}

impl From<io::Error> for PoolError {
    fn from(error: io::Error) -> Self {
        Self::Device(error)
    }
}

impl From<PoolRefusal> for PoolError {
    fn from(refusal: PoolRefusal) -> Self {
        Self::Refused(refusal)
    }
}

impl From<PoolError> for io::Error {
    fn from(error: PoolError) -> Self {
        io::Error::other(Failure::from(error))
    }
}
