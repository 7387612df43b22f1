//! What happens to the requests of a client that leaves.
//!
//! - A client that **has gone** gets no answers: what layers hold of its requests is taken back, so
//!   that it neither lands on newer data nor escapes a limit. What is in the kernel completes.
//! - A client that has sent a **disconnect** request gets its answers. What layers hold of its
//!   requests waits for its time, for up to [`LINGER_NS`], and then fails.
//! - When the **daemon** ends a connection, the layers pass on what they hold.
//!
//! In each case, changes in flight are among the disk's leftovers until they have completed: newer
//! requests for their ranges wait.

use std::io;

use fathom_block::ErrorKind;
use fathom_reactor::Reactor;

use super::super::wire::command;
use super::{Ending, LINGER_NS, Phase, Transmission};

impl Transmission {
    /// The connection takes no more requests. Adds its changes in flight to the disk's leftovers.
    pub(super) fn leave_behind(&mut self) {
        let leftovers = self.export.disk().leftovers();
        let mut is_free = vec![false; self.slots.len()];
        for index in &self.free {
            is_free[*index as usize] = true;
        }
        for (index, slot) in self.slots.iter().enumerate().filter(|(index, _)| !is_free[*index]) {
            let header = &slot.header;
            if matches!(header.command, command::WRITE | command::TRIM | command::WRITE_ZEROES) {
                // The range was checked when the request came.
                let range = header.offset..header.offset.saturating_add(header.length);
                leftovers.add(self.client, index as u64, range);
            }
        }
    }

    /// Takes back the requests of a client that leaves, or has the layers pass them on.
    pub(super) fn take_back(&mut self, reactor: &mut Reactor) {
        if self.hung_up && self.phase == Phase::Open && !self.accepts_input() {
            // Its requests in flight fill what it may have, so that the end of its bytes is not
            // reached.
            self.lose(Ending::Lost(io::ErrorKind::ConnectionReset.into()));
        }
        match self.phase {
            Phase::Open | Phase::Parting { .. } => return,
            Phase::Lost => self.stack.withdraw(reactor),
            Phase::Closing { .. } if self.control.is_stopping() => self.stack.drain(reactor),
            Phase::Closing { since_ns } => {
                if self.stack.now_ns().saturating_sub(since_ns) > LINGER_NS {
                    self.stack.withdraw(reactor);
                }
            }
        }
        // New connections wait for that.
        self.control.set_leaving();
    }

    /// Takes back what layers hold while these change. Returns whether there was anything.
    pub(super) fn defer(&mut self, reactor: &mut Reactor) -> bool {
        if self.phase != Phase::Open || !self.stack.is_closing() {
            return false;
        }
        self.stack.withdraw(reactor);
        self.stack.has_completed()
    }

    /// Submits the requests again that were taken back, after the change. Those of a client that
    /// leaves fail. Returns whether there was anything to do.
    pub(super) fn repeat_deferred(&mut self, reactor: &mut Reactor) -> bool {
        if self.phase == Phase::Open && self.stack.is_closing() {
            return false;
        }
        for request in std::mem::take(&mut self.deferred) {
            if self.phase == Phase::Open {
                self.stack.repeat(request, reactor);
            } else {
                self.finish(request, Err(ErrorKind::Withdrawn), reactor);
            }
        }
        true
    }

    /// The connection ends. What a failed thread has left in the kernel may still change the disk.
    pub(super) fn end_leftovers(&self) {
        let leftovers = self.export.disk().leftovers();
        if !self.stack.holds_memory() {
            return leftovers.end_all(self.client);
        }
        tracing::error!(
            export = self.export.name(),
            "changes of a failed thread are still in flight: requests for their places fail until the disk is \
             served again"
        );
        leftovers.give_up(self.client);
    }
}
