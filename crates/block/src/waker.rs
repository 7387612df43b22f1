//! Waking a layer's part from another thread.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use fathom_reactor::{Event, OperationOwner, Reactor};

use crate::drive::Wake;

/// The token of the alarm's watch.
const TOKEN: u64 = 0;

#[derive(Debug)]
struct Shared {
    /// Wakes the thread.
    wake: Wake,
    /// The levels to wake, as bits.
    levels: AtomicU32,
}

/// Wakes a layer's part in one queue, from any thread: the queue's thread soon calls
/// [`advance`](crate::LayerQueue::advance), even if it sleeps. Several uses before that call have
/// the effect of one. A waker whose queue is closed does nothing.
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

    /// Whether the queue is closed and this is its last waker.
    pub(crate) fn is_orphan(&self) -> bool {
        Arc::strong_count(&self.shared) == 1
    }

    /// Wakes the layer's part. Never blocks.
    pub fn wake(&self) {
        // Only the first use has to wake the thread.
        if self.shared.levels.fetch_or(1 << self.level, Ordering::AcqRel) == 0 {
            self.shared.wake.wake();
        }
    }
}

/// The receiving end of a queue's wakers, in the queue's thread.
pub(crate) struct Alarm {
    owner: OperationOwner,
    shared: Arc<Shared>,
}

impl Alarm {
    /// Opens an alarm that the reactor watches.
    pub(crate) fn open(reactor: &mut Reactor) -> io::Result<Self> {
        let shared = Arc::new(Shared { wake: Wake::new()?, levels: AtomicU32::new(0) });
        let owner = reactor.register();
        reactor.watch_always(owner, TOKEN, shared.wake.descriptor());
        Ok(Self { owner, shared })
    }

    /// A waker for the layer at `level`.
    pub(crate) fn waker(&self, level: usize) -> Waker {
        Waker { shared: Arc::clone(&self.shared), level: level as u32 }
    }

    /// The woken levels, as bits, if `event` belongs to this alarm; otherwise 0.
    pub(crate) fn take(&self, event: &Event, reactor: &mut Reactor) -> u32 {
        if event.owner != self.owner {
            return 0;
        }
        // The descriptor is read before the levels: a use between the two is either seen now or
        // wakes the thread again.
        self.shared.wake.take();
        if !event.more {
            reactor.watch_always(self.owner, TOKEN, self.shared.wake.descriptor());
        }
        self.shared.levels.swap(0, Ordering::AcqRel)
    }
}
