//! Why a change of a pool is refused.

use std::fmt;

#[cfg(doc)]
use crate::catalogue::{NAME_LENGTH_MAX, VOLUME_SIZE_MAX};

/// Why a change of the catalogue is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolRefusal {
    /// No volume has this name.
    NoVolume,
    /// The volume has no snapshot with this name.
    NoSnapshot,
    /// The name is in use.
    NameTaken,
    /// The name is empty, longer than [`NAME_LENGTH_MAX`] bytes, or has unusual characters.
    BadName,
    /// The size is 0, larger than [`VOLUME_SIZE_MAX`], or no multiple of 512 bytes.
    BadSize,
    /// The pool has as many volumes and snapshots as it can have.
    TooMany,
    /// A disk uses the volume.
    InUse,
    /// The snapshot, or one of the volume, is held.
    Held,
    /// The snapshot is not held.
    NotHeld,
    /// Only rules give snapshots such a name.
    Reserved,
    /// The reason of a hold is empty, longer than [`NAME_LENGTH_MAX`] bytes, or has control
    /// characters.
    BadReason,
    /// A guarantee is larger than the volume.
    BadGuarantee,
    /// The free space does not suffice for the guarantees of volumes.
    Guaranteed,
}

impl fmt::Display for PoolRefusal {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::NoVolume => "the pool has no such volume",
            Self::NoSnapshot => "the volume has no such snapshot",
            Self::NameTaken => "the name is in use",
            Self::BadName => {
                "a name has 1 to 128 bytes: letters, digits and the characters . _ : + -"
            }
            Self::BadSize => "a size is a multiple of 512 bytes, at most 256 TiB",
            Self::TooMany => "the pool has as many volumes and snapshots as it can have",
            Self::InUse => "a disk uses the volume",
            Self::Held => "the snapshot, or one of the volume, is held",
            Self::NotHeld => "the snapshot is not held",
            Self::Reserved => "names that begin with `auto.` are those of rules",
            Self::BadReason => "a reason has 1 to 128 bytes, without control characters",
            Self::BadGuarantee => "a guarantee is at most the size of the volume",
            Self::Guaranteed => "the pool has too little free space for what it guarantees",
        })
    }
}

impl std::error::Error for PoolRefusal {}
