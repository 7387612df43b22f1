//! Opening a disk for one queue.

use std::io;
use std::sync::Arc;

use fathom_reactor::{Pending, Reactor};

use crate::aside::{Aside, StoreId};
use crate::backend::{Backend, BackendOpenContext};
use crate::background::Background;
use crate::clock::Clock;
use crate::disk::Disk;
use crate::geometry::{Capabilities, Geometry};
use crate::waker::Waker;
use crate::work::{Urgency, Work};

/// The offer of one level of a disk to the level above.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Its capabilities.
    pub capabilities: Capabilities,
    /// Its sizes.
    pub geometry: Geometry,
    /// Its current capacity, in bytes.
    pub capacity: u64,
}

/// The context in which a layer's part is opened in a queue.
pub struct OpenContext<'a> {
    pub(crate) disk: &'a Disk,
    pub(crate) home: &'a Arc<dyn Backend>,
    pub(crate) queue: u64,
    pub(crate) level: usize,
    pub(crate) below: Offer,
    pub(crate) clock: &'a Clock,
    pub(crate) reactor: &'a mut Reactor,
    pub(crate) aside: &'a mut Aside,
}

impl OpenContext<'_> {
    /// The number of the queue. It counts from 0 all queues of the disk opened while the daemon
    /// runs, so it can seed a generator or select a shard.
    pub fn queue(&self) -> u64 {
        self.queue
    }

    /// The offer of the level below. Its capacity may change later.
    pub fn below(&self) -> Offer {
        self.below
    }

    /// The disk's own store. A part asks it for its state only: requests go the way down.
    pub fn home(&self) -> &Arc<dyn Backend> {
        self.home
    }

    /// The time, in nanoseconds of the queue's clock.
    pub fn now_ns(&self) -> u64 {
        self.clock.now_ns()
    }

    /// Opens a further store for this part: a cache's device, a log's volume. The part submits its
    /// own requests to it ([`Crossing::submit_to`](crate::Crossing::submit_to)). No other level
    /// sees them.
    ///
    /// # Errors
    /// When the store cannot open a queue.
    pub fn open_store(&mut self, backend: &Arc<dyn Backend>) -> io::Result<StoreId> {
        let mut context = BackendOpenContext {
            disk: self.disk,
            queue: self.queue,
            clock: self.clock,
            reactor: self.reactor,
            aside: self.aside,
        };
        let queue = backend.open_queue(&mut context)?;
        self.aside.add(self.level, backend, queue)
    }

    /// The count of kernel operations that use this queue's memory. If it is not 0 when the part is
    /// dropped, a request of the part may still be carried out later.
    pub fn pending(&self) -> Pending {
        self.reactor.pending()
    }

    /// A waker for this part, which other threads may use.
    ///
    /// # Errors
    /// When no descriptor is available.
    pub fn waker(&mut self) -> io::Result<Waker> {
        self.aside.waker(self.level, self.reactor)
    }

    /// The background work of this part of the layer `layer`: the scheduler of the disk, if it has
    /// one, decides when a step begins.
    ///
    /// # Errors
    /// When no descriptor is available.
    pub fn background(&mut self, layer: &'static str) -> io::Result<Background> {
        let waker = self.waker()?;
        Ok(Background::new(self.disk.scheduler(), self.disk.name(), layer, waker))
    }

    /// A handle to run computations of this part on other threads. A queue is drained only when the
    /// answers to all of them have been fetched.
    ///
    /// # Errors
    /// When no descriptor is available.
    pub fn work<T: Send + 'static>(&mut self, urgency: Urgency) -> io::Result<Work<T>> {
        let waker = self.waker()?;
        Ok(Work::new(urgency, waker, &self.aside.computing, self.clock.is_simulated()))
    }
}
