//! The beginning and the end of scrubs.

use std::sync::atomic::Ordering;

use super::report::{DamageKind, ScrubOptions, ScrubReport, ScrubState};
use super::{PageRead, Scrub, ScrubLot, ScrubStep, TableRead, UNREADABLE_MAX};
use crate::pages::Page;
use crate::pool::Pool;
use crate::state::State;

/// The scrub in progress, and the report of the last one.
#[derive(Default)]
pub(crate) struct Scrubs {
    current: Option<Scrub>,
    last: Option<ScrubReport>,
    begun: u64,
}

impl Pool {
    /// Begins a scrub, unless one is in progress. With the report of an `earlier` one that had not
    /// ended, it goes on from there. The queues of open volumes carry it out. Returns the number of
    /// the scrub in progress, and whether it has begun now.
    ///
    /// All is visited that is the same from the beginning to the end. What is written meanwhile may
    /// be visited or not.
    pub fn begin_scrub(&self, options: ScrubOptions, earlier: Option<ScrubReport>) -> (u64, bool) {
        let begun = self.inner.shared.access(|state| {
            if let Some(scrub) = &state.scrubs.current {
                return (scrub.report.number, false);
            }
            state.scrubs.begun += 1;
            let number = state.scrubs.begun;
            state.pages.mark_scrubbed(true);
            let scrub = Scrub::new(options, earlier.unwrap_or_default(), number, state);
            state.scrubs.current = Some(scrub);
            (number, true)
        });
        self.inner.has_scrub.store(true, Ordering::Release);
        self.inner.wake_all();
        begun
    }

    /// Ends a scrub, unless it has ended already.
    pub fn end_scrub(&self, number: u64) {
        self.inner.shared.access(|state| {
            if state.scrubs.current.as_ref().is_some_and(|scrub| scrub.report.number == number) {
                state.end_scrub(ScrubState::Ended);
            }
        });
        self.inner.wake_all();
    }

    /// The scrub in progress, or the last one since the opening.
    pub fn scrub(&self) -> Option<ScrubReport> {
        self.inner.shared.access(|state| {
            let current = state
                .scrubs
                .current
                .as_ref()
                .map(|scrub| ScrubReport { position: scrub.position, ..scrub.report.clone() });
            current.or_else(|| state.scrubs.last.clone())
        })
    }
}

impl State {
    /// Whether a scrub is in progress.
    pub(crate) fn is_scrubbing(&self) -> bool {
        self.scrubs.current.is_some()
    }

    /// For how long it pauses after a step while the pool is used, in durations of that step.
    pub(crate) fn scrub_pause(&self) -> u32 {
        self.scrubs.current.as_ref().map_or(0, |scrub| scrub.pause)
    }

    /// The bytes of memory that a scrub takes.
    pub(crate) fn scrub_memory(&self) -> u64 {
        self.scrubs.current.as_ref().map_or(0, |scrub| scrub.visited.len() as u64 * 8)
    }

    /// What the scrub does next. A lot has up to `count` blocks.
    pub(crate) fn step_scrub(&mut self, count: usize) -> ScrubStep {
        if self.failed.is_some() {
            self.end_scrub(ScrubState::Failed);
        }
        let number = self.scrubs.begun;
        let step = self.with_scrub(number, |scrub, state| scrub.step(state, count));
        if matches!(step, Some(ScrubStep::Done)) {
            self.end_scrub(ScrubState::Complete);
        }
        step.unwrap_or(ScrubStep::Done)
    }

    /// Calls `call` with the scrub of this number, unless it was ended.
    fn with_scrub<T>(
        &mut self,
        number: u64,
        call: impl FnOnce(&mut Scrub, &mut Self) -> T,
    ) -> Option<T> {
        let mut scrub = self.scrubs.current.take_if(|scrub| scrub.report.number == number)?;
        let done = call(&mut scrub, self);
        let has_failed = scrub.unreadable > UNREADABLE_MAX;
        self.scrubs.current = Some(scrub);
        if has_failed {
            self.end_scrub(ScrubState::Failed);
        }
        Some(done)
    }

    fn end_scrub(&mut self, how: ScrubState) {
        let Some(scrub) = self.scrubs.current.take() else { return };
        self.pages.mark_scrubbed(false);
        let position = scrub.position;
        self.scrubs.last = Some(ScrubReport { state: how, position, ..scrub.report });
    }

    /// A page of a map has been read: its content, if that is right, or what is wrong.
    pub(crate) fn scrub_page(&mut self, read: &PageRead, page: Result<Box<Page>, DamageKind>) {
        self.with_scrub(read.scrub, |scrub, state| scrub.page_read(state, read, page));
    }

    /// The blocks of a lot have been read, and this is what is wrong with each.
    pub(crate) fn end_lot_of_scrub(&mut self, lot: &ScrubLot, damaged: &[Option<DamageKind>]) {
        self.with_scrub(lot.scrub, |scrub, state| scrub.lot_read(state, lot, damaged));
    }

    /// The blocks of a lot have not been read.
    pub(crate) fn give_up_lot_of_scrub(&mut self, lot: &ScrubLot) {
        self.with_scrub(lot.scrub, |scrub, state| scrub.lot_undone(state, lot));
    }

    /// Pages of a table have not been read.
    pub(crate) fn give_up_tables_of_scrub(&mut self, read: &TableRead) {
        self.with_scrub(read.scrub, |scrub, state| scrub.tables_undone(state, read));
    }

    /// Pages of a table have been read, if they could be. Returns whether they have to be read once
    /// more, which happens unless this `is_last`.
    pub(crate) fn scrub_tables(
        &mut self,
        read: &TableRead,
        bytes: Option<&[u8]>,
        is_last: bool,
    ) -> bool {
        let again = self
            .with_scrub(read.scrub, |scrub, state| scrub.tables_read(state, read, bytes, is_last));
        again.unwrap_or(false)
    }
}
