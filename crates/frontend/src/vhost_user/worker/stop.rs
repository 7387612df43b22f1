//! Requests that are taken back from the disk's layers, and the stop of a ring.
//!
//! A command that waits until nothing is in flight does not wait for requests that layers hold: for
//! space, for their turn, for the time of a limit. They are taken back, and are carried out again
//! after the command; a guest that resets its device gains nothing by it. When a ring stops, they
//! are given back:
//!
//! - Those that were taken last, untouched: the index at which the VMM continues is that of the
//!   first of them.
//! - The others stay recorded as in flight, if the VMM keeps in-flight memory: the ring's next
//!   start repeats them. A guest that resets its device has no use for them, and its VMM drops the
//!   memory.
//! - Without such memory, or while the guest is migrated to another host, which does not get that
//!   memory, they are carried out before the stop, for up to [`FINISH_TIME_NS`], and then fail.

use std::cmp::Reverse;

use fathom_block::Mail;
use fathom_reactor::Reactor;

use super::super::mailbox::Due;
use super::absent::ReportedFailure;
use super::{BATCH, Worker};

/// How long a stop waits for requests that cannot be given back.
const FINISH_TIME_NS: u64 = 5_000_000_000;

impl Worker {
    /// Makes the changes that the session has requested. Returns whether there was anything to do.
    pub(super) fn take_commands(&mut self, reactor: &mut Reactor) -> bool {
        loop {
            let is_idle = self.stack.in_flight() == 0;
            let (mut waiting, mut is_due) = (Due::AtOnce, false);
            let are_left = is_idle && !self.unreturnable().is_empty();
            let command = self.mailbox.next(|command| {
                waiting = command.due;
                is_due = match command.due {
                    Due::AtOnce => true,
                    Due::Idle => is_idle,
                    Due::Stopped { is_gone } => is_idle && (is_gone || !are_left),
                };
                is_due
            });
            match command {
                Mail::Due(command) => (command.change)(self),
                Mail::None => {
                    self.draining = false;
                    return true;
                }
                Mail::Waiting => {
                    self.draining = true;
                    return self.wait(waiting, are_left, reactor);
                }
            }
        }
    }

    /// Brings a command closer that waits. Returns whether there was anything to do.
    fn wait(&mut self, due: Due, are_left: bool, reactor: &mut Reactor) -> bool {
        let now_ns = self.stack.now_ns();
        let is_stop = due == Due::Stopped { is_gone: false };
        match self.finish_ns {
            _ if !is_stop => {}
            None if are_left => {
                self.finish_ns = Some(now_ns.saturating_add(FINISH_TIME_NS));
                for head in self.take_unreturnable() {
                    self.begin(head, reactor);
                }
                // An error recurs at the end of the thread's round, where it is handled.
                let _ = self.stack.run_round(reactor);
                return true;
            }
            Some(end_ns) if now_ns < end_ns => {
                let is_due = self.is_absent_due();
                if is_due {
                    self.repeat_absent(reactor);
                    let _ = self.stack.run_round(reactor);
                }
                return is_due;
            }
            Some(_) if are_left => {
                self.fail_unreturnable();
                return true;
            }
            _ => {}
        }
        self.stack.withdraw(reactor);
        self.stack.has_completed()
    }

    /// How long ago a request was taken, in requests: the greater, the earlier.
    fn age(&self, head: u16) -> Option<u16> {
        let position = self.positions[usize::from(head)]?;
        Some(self.ring.next_available().wrapping_sub(position))
    }

    /// Begins requests again that were taken back, in their order.
    pub(super) fn repeat_deferred(&mut self, reactor: &Reactor) {
        let mut heads = std::mem::take(&mut self.deferred);
        // Those of an earlier daemon are the oldest.
        heads.sort_by_key(|head| self.age(*head).map(Reverse));
        self.deferred = heads.split_off(heads.len().min(if self.careful { 1 } else { BATCH }));
        for head in heads {
            self.begin(head, reactor);
        }
    }

    /// The number of requests that were taken last and are taken back.
    fn last_deferred(&self) -> u16 {
        let mut ages: Vec<u16> = self.put_aside().filter_map(|head| self.age(head)).collect();
        ages.sort_unstable();
        ages.iter().zip(1..).take_while(|(age, expected)| *age == expected).count() as u16
    }

    /// The requests that a stopped ring cannot give back, while nothing is in flight.
    fn unreturnable(&self) -> Vec<u16> {
        let is_kept = self.inflight.is_some() && self.log.is_none();
        if is_kept || self.broken.is_some() || self.memory_owner.is_lost() {
            return Vec::new();
        }
        let last = self.last_deferred();
        let is_last = |head: u16| self.age(head).is_some_and(|age| age <= last);
        let aside = self.put_aside().filter(|head| !is_last(*head));
        aside.chain(self.recovered.iter().copied()).collect()
    }

    fn take_unreturnable(&mut self) -> Vec<u16> {
        let heads = self.unreturnable();
        self.deferred.retain(|head| !heads.contains(head));
        self.forget_absent(&heads);
        self.recovered.clear();
        heads
    }

    fn fail_unreturnable(&mut self) {
        let heads = self.take_unreturnable();
        tracing::error!(
            disk = self.disk.name(),
            vm = self.disk.vm(),
            requests = heads.len(),
            "requests fail: the ring stops while the disk holds them, and its VMM cannot keep them"
        );
        for head in heads {
            // Without a status byte, the guest would take what it finds there for the result.
            if self.report_failure(head) == ReportedFailure::NoStatus {
                self.return_head(head, 0);
                self.publish();
            }
        }
    }

    /// Gives the requests back that were taken last, ends the ring after this round, and returns
    /// the count of requests taken from it.
    pub(in super::super) fn stop(&mut self) -> u16 {
        self.ended = true;
        if self.broken.is_some() || self.memory_owner.is_lost() {
            return self.ring.next_available();
        }
        let last = self.last_deferred();
        let mut aside = std::mem::take(&mut self.deferred);
        aside.extend(self.take_absent());
        for head in aside {
            let is_last = self.age(head).is_some_and(|age| age <= last);
            if let Some(inflight) = self.inflight.as_mut().filter(|_| is_last) {
                inflight.put_back(head);
            }
        }
        let base = self.ring.next_available().wrapping_sub(last);
        self.ring.set_next_available(base);
        base
    }
}
