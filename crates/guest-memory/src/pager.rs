//! Who may access a page now.

use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;

thread_local! {
    /// The leases of this thread that were refused because a page was away.
    static ABSENCES: Cell<u64> = const { Cell::new(0) };
    /// Those of them for which the pager was bringing a page in.
    static ARRIVALS: Cell<u64> = const { Cell::new(0) };
}

/// How often this thread was refused an access, other than a look, because its page is away. If the
/// number changes during an access, the same access may succeed later: the pager knows that the
/// page is wanted.
pub fn absences() -> u64 {
    ABSENCES.get()
}

/// How many of the [absences] were of an access to a page that the pager was bringing in at that
/// moment, perhaps from a slow disk.
pub fn arrivals() -> u64 {
    ARRIVALS.get()
}

/// Counts an access that was refused because its page is away; the pager brings a page in for it.
pub(crate) fn note_absence(is_arriving: bool) {
    ABSENCES.set(ABSENCES.get() + 1);
    ARRIVALS.set(ARRIVALS.get() + u64::from(is_arriving));
}

/// The purpose for which memory is accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// A read that brings no page in: a page that is absent cannot be looked at.
    Look,
    /// A read of what the guest has given to the device: an absent page is brought in.
    Read,
    /// A write, or a read and a write: an absent page is brought in.
    Write,
    /// A write of every byte, as of a device that fills a buffer: an absent page of which all bytes
    /// are written is made anew, and may be zeroes until then.
    Overwrite,
}

impl Purpose {
    /// Whether memory is written.
    pub fn is_write(self) -> bool {
        matches!(self, Self::Write | Self::Overwrite)
    }
}

/// What takes pages of a guest's memory away and brings them in. Every access to a memory that
/// [has a pager](crate::GuestMemory::with_pager) takes a lease from it first.
///
/// Any thread calls it: those of rings and those of introspection.
pub trait Pager: Send + Sync {
    /// Keeps the pages of a range of guest-physical addresses present until
    /// [`release`](Self::release). The range lies within one region and is not empty, but it need
    /// not begin or end at a page. Leases may overlap. Returns false if the access must not take
    /// place: the caller then does as if there were no such memory.
    fn lease(&self, range: &Range<u64>, purpose: Purpose) -> bool;

    /// Asks for the absent pages of a range, as a refused [`lease`](Self::lease) does, when there
    /// is no use in a lease yet.
    fn want(&self, _range: &Range<u64>, _purpose: Purpose) {}

    /// Ends a lease, with the values with which it was taken.
    fn release(&self, range: &Range<u64>, purpose: Purpose);

    /// A number that other pagers do not have. 0 is that of a memory without a pager.
    fn identity(&self) -> u64;
}

/// Pages that stay present as long as this lives.
pub struct Lease {
    pager: Arc<dyn Pager>,
    range: Range<u64>,
    purpose: Purpose,
}

impl Lease {
    /// Takes a lease on a range; `None` if the pager refuses it.
    pub(crate) fn take(
        pager: &Arc<dyn Pager>,
        range: Range<u64>,
        purpose: Purpose,
    ) -> Option<Self> {
        let is_granted = range.is_empty() || pager.lease(&range, purpose);
        is_granted.then(|| Self { pager: Arc::clone(pager), range, purpose })
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if !self.range.is_empty() {
            self.pager.release(&self.range, self.purpose);
        }
    }
}

/// The lease of a look, which ends with the call that takes it.
pub(crate) struct ShortLease<'p> {
    pager: &'p dyn Pager,
    range: Range<u64>,
}

impl<'p> ShortLease<'p> {
    /// Takes a lease for a look at a range; `None` if the pager refuses it.
    pub(crate) fn take(pager: &'p dyn Pager, range: Range<u64>) -> Option<Self> {
        let is_granted = range.is_empty() || pager.lease(&range, Purpose::Look);
        // Not `then_some`: a refused lease must not be dropped.
        is_granted.then(|| Self { pager, range })
    }
}

impl Drop for ShortLease<'_> {
    fn drop(&mut self) {
        if !self.range.is_empty() {
            self.pager.release(&self.range, Purpose::Look);
        }
    }
}

impl std::fmt::Debug for Lease {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{:?} of {:x?}", self.purpose, self.range)
    }
}
