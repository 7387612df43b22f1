//! Waking a layer's part from another thread.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use fathom_reactor::{Event, Owner, Reactor};

use crate::drive::Wake;

/// The token of the alarm's watch.
const TOKEN: u64 = 0;

#[derive(Debug)]
struct Shared {
    /// Wakes the thread.
    wake: Wake,
    /// The levels that are to be woken, as bits.
    levels: AtomicU32,
}

/// Wakes a layer's part in one queue, from any thread: its thread calls
/// [`advance`](crate::LayerQueue::advance) soon, also where it sleeps. Several uses before that are
/// one. A waker whose queue is closed does nothing.
#[derive(Clone, Debug)]
pub struct Waker {
    shared: Arc<Shared>,
    level: u32,
}

impl Waker {
    /// Whether `other` wakes the same part.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.level == other.level && Arc::ptr_eq(&self.shared, &other.shared)
    }

    /// Wakes the layer's part. Never blocks.
    pub fn wake(&self) {
        // Only who wakes first has to disturb the thread.
        if self.shared.levels.fetch_or(1 << self.level, Ordering::AcqRel) == 0 {
            self.shared.wake.wake();
        }
    }
}

/// The wakers' end in one queue's thread.
pub(crate) struct Alarm {
    owner: Owner,
    shared: Arc<Shared>,
}

impl Alarm {
    /// Opens one and has the reactor watch it.
    pub(crate) fn open(reactor: &mut Reactor) -> io::Result<Self> {
        let shared = Arc::new(Shared { wake: Wake::new()?, levels: AtomicU32::new(0) });
        let owner = reactor.register();
        reactor.watch_always(owner, TOKEN, shared.wake.descriptor());
        Ok(Self { owner, shared })
    }

    /// A waker of the layer at `level`.
    pub(crate) fn waker(&self, level: usize) -> Waker {
        Waker { shared: Arc::clone(&self.shared), level: level as u32 }
    }

    /// The levels that were woken, as bits, where `event` is of this alarm.
    pub(crate) fn take(&self, event: &Event, reactor: &mut Reactor) -> u32 {
        if event.owner != self.owner {
            return 0;
        }
        // First the descriptor, then the levels: who wakes in between is seen now or disturbs again.
        self.shared.wake.take();
        if !event.more {
            reactor.watch_always(self.owner, TOKEN, self.shared.wake.descriptor());
        }
        self.shared.levels.swap(0, Ordering::AcqRel)
    }
}
