//! The memory that clients' requests take: bounded for each client, each export, and all.
//!
//! Memory is taken when a request begins and given back when its reply has left, so a client that
//! sends requests and reads no replies holds what it has taken. Each connection has an allowance
//! that is counted nowhere ([`ALLOWANCE`]), so that small requests, which are most, touch nothing
//! that connections share and depend on nobody. What exceeds it comes from one budget:
//!
//! - A client takes at most its share, an export at most half of the whole: a disk whose storage
//!   hangs, and holds the memory of its requests, leaves the other half to the others.
//! - Where the budget is spent, further requests wait in their sockets.
//! - A client that holds memory while others wait for it, and neither takes its replies nor sends
//!   what it has announced, is cut off after some seconds.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use fathom_block::REQUEST_LENGTH_MAX;

use super::control::Control;

/// What a connection may have in flight besides, in bytes.
pub(super) const ALLOWANCE: u64 = 256 << 10;
/// The smallest budget, in bytes: the longest request fits in an export's half.
pub const BUDGET_MIN: u64 = 2 * REQUEST_LENGTH_MAX;
/// The budget of all clients unless something else is said, in bytes.
const ALL_BYTES: u64 = 256 << 20;
/// The same of one client.
const CLIENT_BYTES: u64 = 64 << 20;

/// The memory that the requests of NBD clients may take together; shared by listeners.
#[derive(Debug)]
pub struct Budget {
    all: u64,
    client: u64,
    used: AtomicU64,
    /// Whether anybody is in `waiting`.
    has_waiting: AtomicBool,
    waiting: Mutex<Vec<Arc<Control>>>,
}

impl Default for Budget {
    fn default() -> Self {
        Self::new(ALL_BYTES, CLIENT_BYTES)
    }
}

impl Budget {
    /// A budget of `all` bytes for all clients, at least [`BUDGET_MIN`], and of `client` bytes for
    /// each connection. A connection may always have one request in flight, however long.
    pub fn new(all: u64, client: u64) -> Self {
        Self {
            all: all.max(BUDGET_MIN),
            client,
            used: AtomicU64::new(0),
            has_waiting: AtomicBool::new(false),
            waiting: Mutex::default(),
        }
    }

    /// The bytes that one connection may have in flight.
    pub(super) fn client(&self) -> u64 {
        self.client
    }

    /// The bytes that are taken now.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Takes `bytes` for an export that has taken `of_export`. Returns whether there were so many.
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

    /// Takes `bytes`. Where there are not so many, `control` is woken once there may be.
    pub(super) fn take(&self, bytes: u64, of_export: &AtomicU64, control: &Arc<Control>) -> bool {
        if self.try_take(bytes, of_export) {
            return true;
        }
        {
            let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
            if !waiting.iter().any(|other| Arc::ptr_eq(other, control)) {
                waiting.push(Arc::clone(control));
            }
            self.has_waiting.store(true, Ordering::SeqCst);
        }
        // Somebody may have given back before the entry was there to be seen.
        self.try_take(bytes, of_export)
    }

    /// Gives `bytes` back.
    pub(super) fn give(&self, bytes: u64, of_export: &AtomicU64) {
        of_export.fetch_sub(bytes, Ordering::SeqCst);
        self.used.fetch_sub(bytes, Ordering::SeqCst);
        if self.has_waiting.load(Ordering::SeqCst) {
            let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
            self.has_waiting.store(false, Ordering::SeqCst);
            for control in waiting.drain(..) {
                control.wake();
            }
        }
    }

    /// Whether anybody waits for memory.
    pub(super) fn is_wanted(&self) -> bool {
        self.has_waiting.load(Ordering::Relaxed)
    }

    /// Strikes out a connection that ends.
    pub(super) fn leave(&self, control: &Arc<Control>) {
        if self.is_wanted() {
            let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
            waiting.retain(|other| !Arc::ptr_eq(other, control));
            self.has_waiting.store(!waiting.is_empty(), Ordering::SeqCst);
        }
    }
}

/// Adds `bytes` where the sum is at most `limit`. Returns whether it did.
fn try_add(counter: &AtomicU64, bytes: u64, limit: u64) -> bool {
    let add = |used: u64| used.checked_add(bytes).filter(|sum| *sum <= limit);
    counter.fetch_update(Ordering::SeqCst, Ordering::SeqCst, add).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_export_takes_half_and_who_waits_is_woken() {
        let budget = Budget::new(BUDGET_MIN, 0);
        let (hung, other) = (AtomicU64::new(0), AtomicU64::new(0));
        let control = |id| Arc::new(Control::new(id, "a test".into()).unwrap());
        let (first, second) = (control(1), control(2));
        let half = BUDGET_MIN / 2;
        assert!(budget.take(half, &hung, &first));
        assert!(!budget.take(1, &hung, &first), "the other half is not this export's");
        assert!(budget.take(half, &other, &second));
        assert_eq!(budget.used(), BUDGET_MIN);
        budget.leave(&first);
        assert!(!budget.take(1, &other, &second) && budget.is_wanted());
        budget.give(half, &hung);
        assert!(!budget.is_wanted(), "whoever waited has been woken");
        assert_eq!((hung.into_inner(), other.into_inner()), (0, half));
        assert_eq!(budget.used(), half);
    }
}
