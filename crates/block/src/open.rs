//! Opening a disk for one queue.

use std::io;
use std::sync::Arc;

use fathom_reactor::{Pending, Reactor};

use crate::aside::{Aside, StoreId};
use crate::backend::Backend;
use crate::clock::Clock;
use crate::geometry::{Capabilities, Geometry};
use crate::waker::{Alarm, Waker};
use crate::work::{Urgency, Work};

/// What a part of a disk offers to the part above it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// What it can do.
    pub capabilities: Capabilities,
    /// Its sizes.
    pub geometry: Geometry,
    /// How large it is, in bytes, now.
    pub capacity: u64,
}

/// What a layer's part gets when its queue is opened.
pub struct OpenContext<'a> {
    pub(crate) queue: u64,
    pub(crate) level: usize,
    pub(crate) below: Offer,
    pub(crate) clock: &'a Clock,
    pub(crate) reactor: &'a mut Reactor,
    pub(crate) aside: &'a mut Aside,
}

impl OpenContext<'_> {
    /// Counts up from 0 for each queue of the disk that is opened while the daemon runs, so it can
    /// seed a generator or pick a shard.
    pub fn queue(&self) -> u64 {
        self.queue
    }

    /// What the part below offers. Its capacity may change later.
    pub fn below(&self) -> Offer {
        self.below
    }

    /// The time, in nanoseconds of the queue's clock.
    pub fn now_ns(&self) -> u64 {
        self.clock.now_ns()
    }

    /// Opens a further store for this part: a cache's device, a log's volume. The part submits
    /// requests of its own to it ([`Crossing::submit_to`](crate::Crossing::submit_to)), and nobody
    /// else sees them.
    ///
    /// # Errors
    /// When the store cannot open a queue.
    pub fn open_store(&mut self, backend: &Arc<dyn Backend>) -> io::Result<StoreId> {
        self.aside.open(self.level, backend, self.reactor)
    }

    /// What the kernel has of this queue's memory. Where it still has some when the part is dropped,
    /// a request of the part may be carried out later.
    pub fn pending(&self) -> Pending {
        self.reactor.pending()
    }

    /// A waker of this part, which another thread may use.
    ///
    /// # Errors
    /// When there is no descriptor left.
    pub fn waker(&mut self) -> io::Result<Waker> {
        if self.aside.alarm.is_none() {
            self.aside.alarm = Some(Alarm::open(self.reactor)?);
        }
        let alarm = self.aside.alarm.as_ref().ok_or(io::ErrorKind::Other)?;
        Ok(alarm.waker(self.level))
    }

    /// What has the computations of this part done by other threads. A queue is drained only once
    /// the answers to all of them have been fetched.
    ///
    /// # Errors
    /// When there is no descriptor left.
    pub fn work<T: Send + 'static>(&mut self, urgency: Urgency) -> io::Result<Work<T>> {
        let waker = self.waker()?;
        let simulated = matches!(self.clock, Clock::Simulated(_));
        Ok(Work::new(urgency, waker, &self.aside.computing, simulated))
    }
}
