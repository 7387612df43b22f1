//! A queue's part of the layer: it chooses the way of each request.

use std::ops::Range;
use std::sync::Arc;

use fathom_block::{Crossing, ErrorKind, HeldBy, LayerQueue, Operation, Outcome, Request};

use super::serve::{HotQueue, Returned};
use crate::wal::queue::{WalQueue, purpose};
use crate::wal::switch::{Carry, Conditions, Gate, View, Way};

pub(super) struct OffloadQueue {
    /// The log's part, through which all requests go that may concern the log.
    wal: WalQueue,
    gate: Arc<Gate>,
    /// The state that the queue has seen.
    view: View,
    /// The changes in flight that went home at rest.
    at_rest: u64,
    /// The other changes in flight past the log, by the number of their round.
    past: Vec<(u64, u64)>,
    /// Changes that wait for the end of write-back, oldest first, and since when they wait, in
    /// nanoseconds.
    held: Vec<(u64, Box<Request>)>,
    /// The work on copies, if there are any.
    hot: Option<HotQueue>,
}

impl OffloadQueue {
    pub(super) fn new(wal: WalQueue, gate: Arc<Gate>, hot: Option<HotQueue>) -> Self {
        // A new queue is woken, and looks.
        let (past, held) = (Vec::new(), Vec::new());
        Self { wal, gate, view: View::UNSEEN, at_rest: 0, past, held, hot }
    }

    /// Looks at the state of the switch.
    #[cold]
    fn look(&mut self, next: &Crossing<'_>) {
        let (number, is_clear) = (self.wal.number, self.at_rest == 0);
        let now_ns = next.round_ns();
        let (view, is_awaited) = self.wal.inner.shared.access(|state| {
            let Some(carry) = &mut state.carry else { return (self.view, false) };
            if carry.take_restamp() {
                state.since_ns = now_ns;
            }
            (carry.view(), carry.see(number, is_clear))
        });
        self.view = view;
        if is_awaited {
            self.wal.inner.shared.wake();
        }
    }

    fn has_changed(&self) -> bool {
        self.gate.view() != self.view
    }

    /// Sends a change on its way, while the log may not be empty, or holds it.
    fn change(
        &mut self,
        mut request: Box<Request>,
        may_wait: bool,
        has_waited: bool,
        next: &mut Crossing<'_>,
    ) {
        let range = request.range();
        let may_wait = may_wait && !next.is_draining();
        let now_ns = next.round_ns();
        let way = self.wal.inner.shared.access(|state| {
            let conditions = Conditions {
                log_works: state.refuses().is_none(),
                has_space: !state.is_space_awaited,
                may_wait,
                has_waited,
                now_ns,
            };
            state.carry.as_mut().map(|carry| carry.choose(&range, conditions))
        });
        match way {
            Some(Way::Home(round)) => {
                match self.past.iter_mut().find(|(other, _)| *other == round) {
                    Some((_, count)) => *count += 1,
                    None => self.past.push((round, 1)),
                }
                *next.word(&mut request) = round;
                self.send_home(request, next);
            }
            Some(Way::Wait(until_ns)) => {
                next.wake_at(until_ns);
                self.held.push((now_ns, request));
            }
            Some(Way::Log) | None => {
                if let Some(hot) = &self.hot {
                    hot.copies().begin_change(&range, false);
                }
                self.wal.submit(request, next);
            }
        }
    }

    /// Sends a change past the log.
    fn send_home(&mut self, mut request: Box<Request>, next: &mut Crossing<'_>) {
        if let Some(hot) = &mut self.hot {
            hot.copies().begin_change(&request.range(), true);
            if request.operation == Operation::Write {
                let is_home = |range: &Range<u64>| self.wal.inner.is_home(range);
                if let Some(fill) = hot.begin_pass(&request, &is_home, next.round_ns()) {
                    let Some(lost) = hot.pass(request, fill, next) else { return };
                    request = lost;
                    self.changed(&mut request, next);
                    return next.complete(request, Err(ErrorKind::Memory));
                }
            }
        }
        next.submit(request);
    }

    /// A change has completed at home.
    fn changed(&mut self, request: &mut Request, next: &Crossing<'_>) {
        let round = std::mem::take(next.word(request));
        if let Some(hot) = &self.hot {
            hot.copies().end_change(&request.range());
        }
        if round == Carry::AT_REST {
            self.at_rest -= 1;
            if self.at_rest > 0 {
                return;
            }
            if self.wal.is_closed {
                self.leave();
            } else if self.has_changed() || !self.view.is_resting() {
                self.look(next);
            }
            return;
        }
        if let Some(at) = self.past.iter().position(|(other, _)| *other == round) {
            self.past[at].1 -= 1;
            if self.past[at].1 == 0 {
                self.past.swap_remove(at);
            }
        }
        let is_awaited = self
            .wal
            .inner
            .shared
            .access(|state| state.carry.as_mut().is_some_and(|carry| carry.end_past(round)));
        if is_awaited {
            self.wal.inner.shared.wake();
        }
    }

    /// Tries the held changes again, in their order.
    fn release(&mut self, may_wait: bool, next: &mut Crossing<'_>) {
        if self.held.is_empty() {
            return;
        }
        let now_ns = next.round_ns();
        for (since_ns, mut request) in std::mem::take(&mut self.held) {
            request.course.hold(HeldBy::Offload, now_ns.saturating_sub(since_ns));
            self.change(request, may_wait, true, next);
        }
        self.park(next);
    }

    /// While changes are held, the queue is woken when the log has advanced.
    fn park(&mut self, next: &mut Crossing<'_>) {
        if self.held.is_empty() {
            return;
        }
        let now_ns = next.round_ns();
        let is_over = self.wal.inner.shared.attempt(&self.wal.waker, |state| {
            let holds = state.carry.as_ref().is_some_and(|carry| carry.holds(now_ns));
            (!holds).then_some(())
        });
        if is_over.is_some() {
            self.release(false, next);
        }
    }

    fn read(&mut self, request: Box<Request>, next: &mut Crossing<'_>) {
        let Some(hot) = &mut self.hot else { return self.pass_read(request, next) };
        hot.count(&request);
        if !self.view.carries_reads() {
            return self.pass_read(request, next);
        }
        if let Some(request) = hot.read(request, next) {
            self.pass_read(request, next);
        }
    }

    /// Sends a read on its way that no copy has. Its content may become one.
    fn pass_read(&mut self, request: Box<Request>, next: &mut Crossing<'_>) {
        if let Some(hot) = &mut self.hot {
            let is_home = |range: &Range<u64>| self.wal.inner.is_home(range);
            if let Some(fill) = hot.begin_pass(&request, &is_home, next.round_ns()) {
                // Only a write uses the memory now.
                let lost = hot.pass(request, fill, next);
                debug_assert!(lost.is_none(), "a read uses the guest's memory later");
                return;
            }
        }
        if self.view.is_resting() {
            next.submit(request);
        } else {
            self.wal.submit(request, next);
        }
    }

    /// Makes copies.
    fn fill(&mut self, next: &mut Crossing<'_>) {
        let Some(hot) = &mut self.hot else { return };
        if self.wal.is_closed || hot.has_failed() {
            return hot.end_work();
        }
        let is_home = |range: &Range<u64>| self.wal.inner.is_home(range);
        hot.work(self.view.is_idle(), &is_home, next);
    }

    /// Makes copies of content of the log that has gone home.
    fn keep_returned(&mut self, request: &Request, outcome: Outcome, next: &mut Crossing<'_>) {
        let is_copy = request.token & ((1 << purpose::BITS) - 1) == purpose::COPY;
        let is_written = is_copy && outcome.is_ok() && request.operation == Operation::Write;
        if let (true, Some(hot), Some(last)) = (is_written, &mut self.hot, self.wal.round_end()) {
            let is_newest = |range: &Range<u64>| self.wal.inner.is_logged(range, last);
            hot.returned_home(request, &is_newest, next);
        }
    }

    /// The queue takes no more requests.
    fn leave(&self) {
        let (number, is_clear) = (self.wal.number, self.at_rest == 0);
        let is_awaited = self.wal.inner.shared.access(|state| {
            state.carry.as_mut().is_some_and(|carry| carry.close(number, is_clear))
        });
        if is_awaited {
            self.wal.inner.shared.wake();
        }
    }
}

impl LayerQueue for OffloadQueue {
    fn submit(&mut self, mut request: Box<Request>, next: &mut Crossing<'_>) {
        if self.has_changed() {
            self.look(next);
        }
        if request.operation == Operation::Read {
            return self.read(request, next);
        }
        if self.view.is_resting() {
            if request.operation.modifies() {
                self.at_rest += 1;
                *next.word(&mut request) = Carry::AT_REST;
                return self.send_home(request, next);
            }
            return next.submit(request);
        }
        match request.operation {
            Operation::Write | Operation::WriteZeroes | Operation::Discard => {
                self.change(request, true, false, next);
                self.park(next);
            }
            Operation::Read | Operation::Flush | Operation::Extents | Operation::GetId => {
                self.wal.submit(request, next);
            }
        }
    }

    fn complete(&mut self, mut request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        if request.operation.modifies() {
            self.changed(&mut request, next);
            return next.complete(request, outcome);
        }
        self.wal.complete(request, outcome, next);
    }

    fn returned(&mut self, request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        let is_hot = request.token & ((1 << purpose::BITS) - 1) == purpose::OUTER;
        match &mut self.hot {
            Some(hot) if is_hot => {
                match hot.returned(request, outcome, next) {
                    Returned::Nothing => {}
                    Returned::Read(read) => self.pass_read(read, next),
                    Returned::Change(mut change, outcome) => {
                        self.changed(&mut change, next);
                        next.complete(change, outcome);
                    }
                }
                self.fill(next);
            }
            _ => {
                self.keep_returned(&request, outcome, next);
                self.wal.returned(request, outcome, next);
            }
        }
    }

    fn gathered(&mut self, parent: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        self.wal.gathered(parent, outcome, next);
    }

    fn advance(&mut self, next: &mut Crossing<'_>) {
        if self.has_changed() {
            self.look(next);
        }
        self.wal.advance(next);
        self.release(true, next);
        self.fill(next);
    }

    fn withdraw(&mut self, next: &mut Crossing<'_>) {
        for (_, request) in std::mem::take(&mut self.held) {
            next.complete(request, Err(ErrorKind::Withdrawn));
        }
        self.wal.withdraw(next);
    }

    fn drain(&mut self, next: &mut Crossing<'_>) {
        self.release(false, next);
    }

    fn close(&mut self, next: &mut Crossing<'_>) {
        self.release(false, next);
        self.leave();
        self.wal.close(next);
        self.fill(next);
    }

    fn reopen(&mut self, next: &mut Crossing<'_>) {
        let number = self.wal.number;
        let view = self.wal.inner.shared.access(|state| {
            let carry = state.carry.as_mut()?;
            carry.open(number);
            Some(carry.view())
        });
        self.view = view.unwrap_or(self.view);
        self.wal.reopen(next);
    }
}

impl Drop for OffloadQueue {
    /// What is in flight never completes for the guest, so that write-back does not wait for it.
    fn drop(&mut self) {
        self.wal.inner.shared.access(|state| {
            if let Some(carry) = &mut state.carry {
                for (round, count) in self.past.drain(..) {
                    carry.leave_past(round, count);
                }
            }
        });
        // The log's part wakes the others.
    }
}
