//! Whether the record of a checkpoint has room for a change of the catalogue. Without this, a pool
//! with many snapshots could write no checkpoint any more.

use crate::catalogue::{Change, NAME_LENGTH_MAX};
use crate::layout::BLOCK;
use crate::state::State;
use crate::words::WordWriter;

/// What the record has besides the catalogue at most, in bytes: batches in flight, and segments.
const LISTS_LENGTH_MAX: usize = 16 << 10;
/// What a volume or a snapshot takes at most besides its name and its domain, in bytes.
const ENTRY_LENGTH_MAX: usize = 64;
/// What a guarantee takes, in bytes.
const GUARANTEE_LENGTH: usize = 20;

impl Change {
    /// How much longer the catalogue becomes at most, in bytes.
    fn growth_max(&self) -> usize {
        let entry = ENTRY_LENGTH_MAX + 2 * NAME_LENGTH_MAX;
        match self {
            Self::Snapshot { members, .. } => members.len() * entry,
            Self::Create { .. } | Self::Clone { .. } => entry,
            Self::Guarantee { .. } => GUARANTEE_LENGTH,
            Self::Rename { .. } | Self::Domain { .. } | Self::Hold { .. } => NAME_LENGTH_MAX,
            Self::Delete { .. }
            | Self::Resize { .. }
            | Self::DeleteSnapshot { .. }
            | Self::Rollback { .. }
            | Self::Release { .. } => 0,
        }
    }
}

impl State {
    /// Whether checkpoints have room for the catalogue after a change.
    pub(crate) fn has_room_for(&self, change: &Change) -> bool {
        let growth = change.growth_max();
        if growth == 0 {
            return true;
        }
        let mut catalogue = WordWriter::default();
        self.catalogue.encode(&mut catalogue);
        let length = catalogue.0.len() + growth + LISTS_LENGTH_MAX;
        length as u64 <= u64::from(self.layout().record_blocks) * BLOCK
    }
}
