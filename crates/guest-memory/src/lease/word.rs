//! The word of a page.

use crate::pager::Purpose;

use super::table::HOLDERS;

/// Where a page is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PageState {
    /// In the guest's memory.
    Resident,
    /// In the guest's memory, and a pager copies it.
    Leaving,
    /// Only in what the pager has.
    Evicted,
    /// The pager puts it back.
    Coming,
}

impl PageState {
    /// Whether the page is not in the guest's memory.
    pub fn is_away(self) -> bool {
        matches!(self, Self::Evicted | Self::Coming)
    }
}

const STATE: u64 = 0b11;
const COPIED: u64 = 1 << 2;
const WANTED: u64 = 1 << 3;
const OVERWRITTEN: u64 = 1 << 4;
/// The bits of the first holder begin here.
const FIRST: u32 = 8;
const READER_BITS: u32 = 16;
const WRITER_BITS: u32 = 12;

/// The state of a page and the leases on it: 64 bits.
///
/// | bits | |
/// |---|---|
/// | 0, 1 | the state |
/// | 2 | the pager has a copy, and nobody but the guest's processors can have changed the page since |
/// | 3 | a holder wants the page, which is not resident |
/// | 4 | it is going to overwrite the whole page, so zeroes are enough |
/// | 8 to 35 | the first holder: 16 bits of reads (and looks), 12 bits of writes |
/// | 36 to 63 | the second one |
///
/// A count that has reached its maximum stays there: such a page never leaves. So a guest that has
/// a page in more requests than a count can have, as when it writes zeroes, loses nothing.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct PageWord(pub u64);

/// The place of a count in the word.
#[derive(Clone, Copy)]
struct Count {
    shift: u32,
    max: u64,
}

impl Count {
    fn of(holder: usize, purpose: Purpose) -> Self {
        let first = FIRST + (READER_BITS + WRITER_BITS) * (holder % HOLDERS) as u32;
        match purpose {
            Purpose::Look | Purpose::Read => Self { shift: first, max: (1 << READER_BITS) - 1 },
            Purpose::Write | Purpose::Overwrite => {
                Self { shift: first + READER_BITS, max: (1 << WRITER_BITS) - 1 }
            }
        }
    }

    fn mask(self) -> u64 {
        self.max << self.shift
    }
}

impl PageWord {
    fn with_state(self, state: PageState) -> Self {
        Self(self.0 & !STATE | state as u64)
    }

    fn count(self, count: Count) -> u64 {
        (self.0 & count.mask()) >> count.shift
    }

    /// Where the page is.
    pub fn state(self) -> PageState {
        match self.0 & STATE {
            0 => PageState::Resident,
            1 => PageState::Leaving,
            2 => PageState::Evicted,
            _ => PageState::Coming,
        }
    }

    /// Whether the pager's copy is valid, but for what the guest's processors have written.
    pub fn is_copied(self) -> bool {
        self.0 & COPIED != 0
    }

    /// Whether a holder has asked for the page while it was not there.
    pub fn is_wanted(self) -> bool {
        self.0 & WANTED != 0
    }

    /// Whether nobody needs what the page contained when it left.
    pub fn is_overwritten(self) -> bool {
        self.0 & OVERWRITTEN != 0
    }

    /// Whether any holder, living or dead, has a lease.
    pub fn is_leased(self) -> bool {
        self.0 >> FIRST != 0
    }

    /// With a lease of a holder. `None` if the page is not there.
    #[must_use]
    pub fn lease(self, holder: usize, purpose: Purpose) -> Option<Self> {
        if self.state().is_away() {
            return None;
        }
        let count = Count::of(holder, purpose);
        let one = if self.count(count) < count.max { 1 << count.shift } else { 0 };
        let copied = if purpose.is_write() { 0 } else { self.0 & COPIED };
        let leased = Self(self.0 & !COPIED | copied).with_state(PageState::Resident);
        Some(Self(leased.0 + one))
    }

    /// Without one of a holder's leases.
    #[must_use]
    pub fn release(self, holder: usize, purpose: Purpose) -> Self {
        let count = Count::of(holder, purpose);
        match self.count(count) {
            // None: a mistake, which must not reach other counts.
            0 => self,
            // It may have been more.
            found if found == count.max => self,
            _ => Self(self.0 - (1 << count.shift)),
        }
    }

    /// Asks for a page that is not there.
    #[must_use]
    pub fn want(self) -> Self {
        if self.state().is_away() { Self(self.0 | WANTED) } else { self }
    }

    /// Asks for a page that is not there, to overwrite all of it: what it contained is not needed.
    #[must_use]
    pub fn want_overwritten(self) -> Self {
        let wanted = self.want();
        if wanted.is_wanted() { Self(wanted.0 | OVERWRITTEN) } else { wanted }
    }

    /// Begins to leave: resident and without a lease. A copy that the pager has is dropped, and so
    /// is what somebody has said of a page that is away.
    #[must_use]
    pub fn leave(self) -> Option<Self> {
        let can = self.state() == PageState::Resident && !self.is_leased();
        let word = Self(self.0 & !(COPIED | WANTED | OVERWRITTEN));
        can.then(|| word.with_state(PageState::Leaving))
    }

    /// The copy is complete, and the page stays: `None` if anybody has had a lease meanwhile.
    #[must_use]
    pub fn copied(self) -> Option<Self> {
        let is_undisturbed = self.state() == PageState::Leaving && !self.is_leased();
        is_undisturbed.then(|| Self(self.0 | COPIED).with_state(PageState::Resident))
    }

    /// The copy is complete, and the page may be taken away: `None` if anybody has had a lease
    /// meanwhile.
    #[must_use]
    pub fn evict(self) -> Option<Self> {
        let is_undisturbed = self.state() == PageState::Leaving && !self.is_leased();
        is_undisturbed.then(|| self.with_state(PageState::Evicted))
    }

    /// The page stays after all, and the pager's copy is dropped.
    #[must_use]
    pub fn stay(self) -> Self {
        let word = Self(self.0 & !COPIED);
        if self.state() == PageState::Leaving { word.with_state(PageState::Resident) } else { word }
    }

    /// The pager begins to put the page back; `None` if it is not away.
    #[must_use]
    pub fn come(self) -> Option<Self> {
        (self.state() == PageState::Evicted).then(|| self.with_state(PageState::Coming))
    }

    /// The page is back; `None` if it was not coming.
    #[must_use]
    pub fn arrive(self) -> Option<Self> {
        let is_coming = self.state() == PageState::Coming;
        is_coming.then(|| Self(self.0 & !(WANTED | OVERWRITTEN)).with_state(PageState::Resident))
    }

    /// Gives back what a dead holder had only to read. What it had to write stays.
    #[must_use]
    pub fn give_back(self, holder: usize) -> Self {
        Self(self.0 & !Count::of(holder, Purpose::Read).mask())
    }

    /// Whether a holder has a lease for writing.
    pub fn has_writers(self, holder: usize) -> bool {
        self.count(Count::of(holder, Purpose::Write)) > 0
    }
}

impl std::fmt::Debug for PageWord {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let flags = [
            (self.is_copied(), " copied"),
            (self.is_wanted(), " wanted"),
            (self.is_overwritten(), " overwritten"),
        ];
        let flags = flags.map(|(is, name)| if is { name } else { "" }).concat();
        let counts: Vec<_> = (0..HOLDERS)
            .map(|holder| {
                [Purpose::Read, Purpose::Write].map(|kind| self.count(Count::of(holder, kind)))
            })
            .collect();
        write!(formatter, "{:?}{flags} {counts:?}", self.state())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_holders_and_kinds_are_apart_and_stay_at_their_maximum() {
        for holder in 0..HOLDERS {
            for purpose in [Purpose::Read, Purpose::Write] {
                let count = Count::of(holder, purpose);
                let mut word = PageWord::default();
                for _ in 0..count.max + 3 {
                    word = word.lease(holder, purpose).unwrap();
                }
                assert_eq!(word.0, count.mask(), "{word:?}");
                assert_eq!(word.has_writers(holder), purpose == Purpose::Write);
                assert_eq!(word.release(holder, purpose), word, "a full count is not known");
                assert_eq!(word.leave(), None);
                assert_eq!(word.give_back(1 - holder), word);
                let below = PageWord(word.0 - (1 << count.shift));
                assert_eq!(below.release(holder, purpose).0, below.0 - (1 << count.shift));
                let other = PageWord(0).lease(1 - holder, purpose).unwrap();
                assert_eq!(other.release(holder, purpose), other, "a release too many");
            }
        }
        assert_eq!(PageWord(0).lease(0, Purpose::Look), PageWord(0).lease(0, Purpose::Read));
    }

    #[test]
    fn a_page_that_is_away_has_no_lease_and_can_be_wanted() {
        let away = PageWord(0).leave().and_then(PageWord::evict).unwrap();
        for word in [away, away.come().unwrap()] {
            assert_eq!(word.lease(0, Purpose::Write), None);
            assert!(word.want().is_wanted() && !word.want().is_overwritten());
            assert!(
                word.want_overwritten().is_wanted() && word.want_overwritten().is_overwritten()
            );
            assert_eq!(word.want_overwritten().want(), word.want_overwritten());
            assert_eq!((word.leave(), word.evict(), word.copied()), (None, None, None));
        }
        let back = away.want_overwritten().come().and_then(PageWord::arrive).unwrap();
        assert_eq!((back, back.want()), (PageWord(0), PageWord(0)));
        assert_eq!(back.want_overwritten(), back, "what is there has to be kept");
        let stale = PageWord(back.0 | WANTED | OVERWRITTEN);
        assert_eq!(stale.leave(), back.leave(), "a mark of before says nothing of what leaves now");
        let leaving = back.leave().unwrap();
        assert_eq!(leaving.want_overwritten(), leaving);
        assert_eq!((back.come(), back.arrive()), (None, None));
    }
}
