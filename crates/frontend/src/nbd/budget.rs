//! The budget for the memory of clients' requests: bounded for each client, each export, and all.
//!
//! Memory is taken when a request begins and given back when its reply has been sent. So a client
//! that sends requests and reads no replies keeps its memory. Each connection has an uncounted
//! allowance ([`ALLOWANCE`]), so that small requests, which are most, access no shared counter and
//! depend on no other connection. Memory beyond the allowance comes from one budget:
//!
//! - A client takes at most its share, and an export at most half of the whole. If the storage of a
//!   disk hangs and its requests hold memory, the other half remains for other exports.
//! - If the budget is spent, further requests wait in their sockets.
//! - A client that holds memory while others wait for it, and neither takes its replies nor sends
//!   an announced payload, is disconnected after some seconds.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use fathom_block::REQUEST_LENGTH_MAX;
use parking_lot::Mutex;

use super::control::Control;

/// The memory that each connection may have in flight outside the budget, in bytes.
pub(super) const ALLOWANCE: u64 = 256 << 10;
/// The smallest budget, in bytes: the longest request fits in an export's half.
pub const BUDGET_MIN: u64 = 2 * REQUEST_LENGTH_MAX;
/// The default budget of all clients, in bytes.
const ALL_BYTES: u64 = 256 << 20;
/// The default share of one client, in bytes.
const CLIENT_BYTES: u64 = 64 << 20;

/// The memory that the requests of NBD clients may take together. Listeners may share it.
#[derive(Debug)]
pub struct RequestBudget {
    all: u64,
    client: u64,
    used: AtomicU64,
    /// Whether `waiting` has any entries.
    has_waiting: AtomicBool,
    waiting: Mutex<Vec<Arc<Control>>>,
}

impl Default for RequestBudget {
    fn default() -> Self {
        Self::new(ALL_BYTES, CLIENT_BYTES)
    }
}

impl RequestBudget {
    /// A budget of `all` bytes for all clients, at least [`BUDGET_MIN`], and of `client` bytes for
    /// each connection. A connection may always have one request of any length in flight.
    pub fn new(all: u64, client: u64) -> Self {
        Self {
            all: all.max(BUDGET_MIN),
            client,
            used: AtomicU64::new(0),
            has_waiting: AtomicBool::new(false),
            waiting: Mutex::default(),
        }
    }

    /// The most bytes that one connection may have in flight.
    pub(super) fn client(&self) -> u64 {
        self.client
    }

    /// The number of bytes taken now.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Takes `bytes` for an export that has already taken `of_export`. Returns whether they were
    /// available.
    fn try_take(&self, bytes: u64, of_export: &AtomicU64) -> bool {
        if !try_add(of_export, bytes, self.all / 2) {
            return false;
        }
        if try_add(&self.used, bytes, self.all) {
            return true;
        }
        of_export.fetch_sub(bytes, Ordering::SeqCst);
        false
    }

    /// Takes `bytes`. If they are not available, returns false; `control` is woken when they may
    /// be.
    pub(super) fn take(&self, bytes: u64, of_export: &AtomicU64, control: &Arc<Control>) -> bool {
        if self.try_take(bytes, of_export) {
            return true;
        }
        {
            let mut waiting = self.waiting.lock();
            if !waiting.iter().any(|other| Arc::ptr_eq(other, control)) {
                waiting.push(Arc::clone(control));
            }
            self.has_waiting.store(true, Ordering::SeqCst);
        }
        // Memory may have been given back before the entry was visible.
        self.try_take(bytes, of_export)
    }

    /// Gives `bytes` back.
    pub(super) fn give(&self, bytes: u64, of_export: &AtomicU64) {
        of_export.fetch_sub(bytes, Ordering::SeqCst);
        self.used.fetch_sub(bytes, Ordering::SeqCst);
        if self.has_waiting.load(Ordering::SeqCst) {
            let mut waiting = self.waiting.lock();
            self.has_waiting.store(false, Ordering::SeqCst);
            for control in waiting.drain(..) {
                control.wake();
            }
        }
    }

    /// Whether a connection waits for memory.
    pub(super) fn has_waiters(&self) -> bool {
        self.has_waiting.load(Ordering::Relaxed)
    }

    /// Removes a connection that ends.
    pub(super) fn leave(&self, control: &Arc<Control>) {
        if self.has_waiters() {
            let mut waiting = self.waiting.lock();
            waiting.retain(|other| !Arc::ptr_eq(other, control));
            self.has_waiting.store(!waiting.is_empty(), Ordering::SeqCst);
        }
    }
}

/// Adds `bytes` if the sum is at most `limit`. Returns whether it did.
fn try_add(counter: &AtomicU64, bytes: u64, limit: u64) -> bool {
    let add = |used: u64| used.checked_add(bytes).filter(|sum| *sum <= limit);
    counter.fetch_update(Ordering::SeqCst, Ordering::SeqCst, add).is_ok()
}

#[cfg(test)]
mod tests {
    use super::super::control::Peer;
    use super::*;

    #[test]
    fn an_export_takes_half_and_waiting_connections_are_woken() {
        let budget = RequestBudget::new(BUDGET_MIN, 0);
        let (hung, other) = (AtomicU64::new(0), AtomicU64::new(0));
        let peer = || Peer { text: "a test".into(), address: None };
        let control = |id| Arc::new(Control::new(id, peer()).unwrap());
        let (first, second) = (control(1), control(2));
        let half = BUDGET_MIN / 2;
        assert!(budget.take(half, &hung, &first));
        assert!(!budget.take(1, &hung, &first), "the other half is not this export's");
        assert!(budget.take(half, &other, &second));
        assert_eq!(budget.used(), BUDGET_MIN);
        budget.leave(&first);
        assert!(!budget.take(1, &other, &second) && budget.has_waiters());
        budget.give(half, &hung);
        assert!(!budget.has_waiters(), "the waiting connection has been woken");
        assert_eq!((hung.into_inner(), other.into_inner()), (0, half));
        assert_eq!(budget.used(), half);
    }
}
