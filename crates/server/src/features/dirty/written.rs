//! The pages of guests that are written in an interval, and what their disks transfer meanwhile.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fathom_block::{Clock, Operation};
use fathom_control::WrittenDirty;
use fathom_guest_memory::GuestMemory;
use fathom_introspect::PageSample;
use fathom_layers::Tap;

use crate::daemon::Served;

/// The longest time in which the memory of all guests is sampled at the beginning, and at the end.
const SAMPLE_TIME_MAX: Duration = Duration::from_secs(2);
/// The longest interval.
pub(crate) const INTERVAL_MAX: Duration = Duration::from_secs(60);

/// The state of a guest at the beginning of an interval.
struct Beginning {
    memory: GuestMemory,
    disks: Vec<Arc<Served>>,
    begun: Instant,
    transferred: Option<(u64, u64)>,
    sample: Option<PageSample>,
    took: Duration,
}

impl Beginning {
    fn new(memory: GuestMemory, disks: Vec<Arc<Served>>, first: u64, deadline: Instant) -> Self {
        let begun = Instant::now();
        let transferred = transferred(&disks);
        // A failure while one guest's memory is read must not affect the answer about other guests.
        let sample = || PageSample::take(&memory, first, &mut || Instant::now() < deadline);
        let sample = catch_unwind(AssertUnwindSafe(sample)).ok();
        Self { memory, disks, begun, transferred, sample, took: begun.elapsed() }
    }

    /// What has been written since.
    fn end(self, deadline: Instant) -> Option<WrittenDirty> {
        let before = self.sample?;
        let interval_ns = self.begun.elapsed().as_nanos() as u64;
        let begun = Instant::now();
        let change = || before.changed(&self.memory, &mut || Instant::now() < deadline);
        let found = catch_unwind(AssertUnwindSafe(change)).ok()?;
        let took = self.took + begun.elapsed();
        // Counters that have begun again, after a change of the disk, say nothing.
        let of_disks = transferred(&self.disks).zip(self.transferred);
        let of_disks = of_disks.and_then(|(after, before)| {
            Some((after.0.checked_sub(before.0)?, after.1.checked_sub(before.1)?))
        });
        Some(WrittenDirty {
            interval_ns,
            changed_bytes: found.changed,
            error_bytes: found.error,
            read_bytes: of_disks.map(|(read, _)| read),
            written_bytes: of_disks.map(|(_, written)| written),
            left_bytes: of_disks
                .map(|(read, written)| found.changed.saturating_sub(read).saturating_sub(written)),
            stride: found.stride,
            examined: found.examined,
            is_whole: found.is_whole,
            count_ns: took.as_nanos() as u64,
        })
    }
}

/// The bytes that disks have read and written; `None` if one of them has no tap.
fn transferred(disks: &[Arc<Served>]) -> Option<(u64, u64)> {
    disks.iter().try_fold((0, 0), |(read, written), served| {
        let bytes = served.part::<Tap>()?.counts().bytes;
        Some((read + bytes[Operation::Read as usize], written + bytes[Operation::Write as usize]))
    })
}

/// A count of the pages that guests write in an interval. Nothing waits between its beginning and
/// its end.
pub(crate) struct WrittenCount(Vec<(u64, Beginning)>);

impl WrittenCount {
    /// Samples the memory of guests, each with its number and its disks.
    pub(super) fn begin(guests: Vec<(u64, GuestMemory, Vec<Arc<Served>>)>) -> Self {
        let first = Clock::System.now_ns();
        let mut shares = Shares::new(SAMPLE_TIME_MAX, guests.len());
        let begin =
            |(number, memory, disks)| (number, Beginning::new(memory, disks, first, shares.next()));
        Self(guests.into_iter().map(begin).collect())
    }

    /// What each guest, by its number, has written since. A guest whose memory cannot be read is
    /// missing.
    pub(super) fn end(self) -> BTreeMap<u64, WrittenDirty> {
        let mut shares = Shares::new(SAMPLE_TIME_MAX, self.0.len());
        let ended = self
            .0
            .into_iter()
            .filter_map(|(number, beginning)| Some((number, beginning.end(shares.next())?)));
        ended.collect()
    }
}

/// The time for several guests, one after the other. Each gets an equal share of what the ones
/// before have left.
pub(crate) struct Shares {
    end: Instant,
    guests: usize,
}

impl Shares {
    /// The shares of so many guests, from now on.
    pub(crate) fn new(time: Duration, guests: usize) -> Self {
        Self { end: Instant::now() + time, guests }
    }

    /// The end of the next guest's share, which begins now.
    pub(crate) fn next(&mut self) -> Instant {
        self.next_at(Instant::now())
    }

    fn next_at(&mut self, now: Instant) -> Instant {
        let left = self.end.saturating_duration_since(now);
        let guests = u32::try_from(self.guests).unwrap_or(u32::MAX).max(1);
        self.guests = self.guests.saturating_sub(1);
        now + left / guests
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_guest_has_a_share_of_the_time() {
        const SECOND: Duration = Duration::from_secs(1);
        let begun = Instant::now();
        let mut shares = Shares { end: begun + 4 * SECOND, guests: 4 };
        assert_eq!(shares.next_at(begun), begun + SECOND);
        // The first guest needed little of its share, the second all of it.
        assert_eq!(shares.next_at(begun + SECOND / 4), begun + SECOND / 4 + SECOND * 5 / 4);
        assert_eq!(shares.next_at(begun + 2 * SECOND), begun + 3 * SECOND);
        assert_eq!(shares.next_at(begun + 3 * SECOND), begun + 4 * SECOND);
        // Nothing is left.
        assert_eq!(shares.next_at(begun + 5 * SECOND), begun + 5 * SECOND);
    }
}
