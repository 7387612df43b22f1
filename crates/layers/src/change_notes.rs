//! What a layer above a write-ahead log notes durably of the changes that it passes on to the log.

use fathom_block::Waker;

/// Notes of changes, which must be durable before a change reaches home. If a log beneath has the
/// changes first, they need not wait for their notes: the log brings a change home only when its
/// notes are durable. Until then, a start finds the change in the log.
pub trait ChangeNotes: Send + Sync {
    /// The number of the last note. It belongs to a change that has been passed on, or to an
    /// earlier one.
    fn number(&self) -> u64;

    /// Whether the notes up to `number` are durable. If they are not, they are written, `waker` is
    /// woken, and the caller asks again.
    fn are_durable(&self, number: u64, waker: &Waker) -> bool;
}
