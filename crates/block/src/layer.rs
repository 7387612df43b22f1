//! The contract of a layer.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::Backend;
use crate::crossing::Crossing;
use crate::disk::Disk;
use crate::geometry::{Capabilities, Geometry};
use crate::observer::Observer;
use crate::open::OpenContext;
use crate::report::LayerReport;
use crate::request::{ErrorKind, Outcome, Request};

/// The most layers that a disk can have.
pub const LAYERS_MAX: usize = 9;

/// A layer of one disk: what all its queues share.
///
/// The do-nothing version is `fathom_layers::Passthrough`.
pub trait Layer: Send + Sync {
    /// One word for status, logs and the configuration, for example `tap`.
    fn name(&self) -> &'static str;

    /// What a disk can do through this layer, given what it can do `below`. Never more than the
    /// layer honours: an operation that is passed on unchanged stays as it is below.
    fn capabilities(&self, below: Capabilities) -> Capabilities;

    /// The sizes of the disk as the layer shows it to the part above, given those `below`. They
    /// hold as long as the layer does.
    fn geometry(&self, below: Geometry) -> Geometry {
        below
    }

    /// The size of the disk as the layer shows it to the part above, in bytes, given the size
    /// `below`. A function of `below` and of what is fixed while the layer lives.
    fn capacity(&self, below: u64) -> u64 {
        below
    }

    /// How the layer is: figures of its own, and what does not work. Never blocks.
    fn status(&self) -> LayerReport {
        LayerReport::default()
    }

    /// The further stores that the layer keeps something in. Whoever watches over the disk looks
    /// whether they are sound.
    fn stores(&self) -> Vec<Arc<dyn Backend>> {
        Vec::new()
    }

    /// The part below is about to have `to` bytes instead of `from`. The layer may have to refuse,
    /// for what it keeps itself.
    ///
    /// # Errors
    /// When the size must not change like this now. It stays then.
    fn resizing(&self, from: u64, to: u64) -> Result<(), ErrorKind> {
        let _ = (from, to);
        Ok(())
    }

    /// The layer is about to be taken out of `disk`, which still serves. What can be done beforehand
    /// shortens the time for which [`leave`](Self::leave) has the disk stand still. Blocks within
    /// `limit`.
    fn retire(&self, disk: &Arc<Disk>, limit: Duration) {
        let _ = (disk, limit);
    }

    /// The layer is taken out of `disk`: no queue has a request in flight, and none takes one before
    /// this returns. A layer that keeps a state of its own writes it out here, through a queue of its
    /// own ([`Disk::open_aside`]). Blocks within `limit`.
    ///
    /// # Errors
    /// When the layer cannot leave. The disk keeps it then, and goes on with it.
    fn leave(&self, disk: &Arc<Disk>, limit: Duration) -> io::Result<()> {
        let _ = (disk, limit);
        Ok(())
    }

    /// The layer's part in one queue, which a thread opens for itself. What the part needs besides
    /// the requests (further stores, a waker) comes from `context`.
    ///
    /// # Errors
    /// When the part cannot be had. The queue is then not opened, and those that are open go on.
    fn open_queue(&self, context: &mut OpenContext<'_>) -> io::Result<LayerPart>;
}

/// What a layer does in one queue.
pub enum LayerPart {
    /// It takes requests and hands them on.
    Queue(Box<dyn LayerQueue>),
    /// It looks on. Its [`Layer::capabilities`] must be those below.
    Observer(Box<dyn Observer>),
}

impl LayerPart {
    /// The part of a layer that takes requests.
    pub fn queue(queue: impl LayerQueue + 'static) -> Self {
        Self::Queue(Box::new(queue))
    }

    /// The part of a layer that looks on.
    pub fn observer(observer: impl Observer + 'static) -> Self {
        Self::Observer(Box::new(observer))
    }
}

/// A layer's part in one queue, called by that queue's thread alone.
///
/// **Callers** guarantee what [`Crossing::submit`] checks: the range lies within the disk and is
/// aligned, the buffers add up, the operation is among the layer's capabilities.
///
/// **Implementors** see each request once on its way down ([`submit`](Self::submit)) and once on
/// its way up ([`complete`](Self::complete)), unless they answer it themselves, and they hand on
/// every box that they get exactly once. They spawn no threads, read no ambient clock and no
/// ambient randomness, and do not block.
///
/// A layer that answers with less than it promised (a write that it only remembers) must stand in
/// for [`Operation::Flush`](crate::Operation::Flush) too, or what a guest was told is on disk is
/// not.
pub trait LayerQueue {
    /// A request from above: pass it on ([`Crossing::submit`]), answer it
    /// ([`Crossing::complete`]) or keep it for a while ([`Crossing::hold`]).
    fn submit(&mut self, request: Box<Request>, next: &mut Crossing<'_>);

    /// A request that this layer passed on has been carried out: hand its outcome on
    /// ([`Crossing::complete`]), or keep it for a while ([`Crossing::hold`]).
    fn complete(&mut self, request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>);

    /// A request that this layer made itself ([`Crossing::request`], [`Crossing::piece`]) has been
    /// carried out, below or by a side store ([`Request::store`]). It ends here: give the box back
    /// with [`Crossing::recycle`].
    fn returned(&mut self, request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        debug_assert!(false, "a layer that makes requests of its own receives them");
        let _ = outcome;
        next.recycle(request);
    }

    /// All pieces of `parent`, which this layer [split](Crossing::split), have been carried out and
    /// given back. `outcome` is the first error among them.
    fn gathered(&mut self, parent: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        next.complete(parent, outcome);
    }

    /// The layer's own round: the time that it asked for ([`Crossing::wake_at`]) has come, or a
    /// [`Waker`](crate::Waker) of it was used. It may also be called without either.
    fn advance(&mut self, next: &mut Crossing<'_>) {
        let _ = next;
    }

    /// The queue is about to be closed, because its front end has ended or because other layers take
    /// its place: the layer begins no requests of its own any more, but those that what it has begun
    /// needs. The queue is closed once all have come back, within 10 s where its front end has
    /// ended.
    fn close(&mut self, next: &mut Crossing<'_>) {
        let _ = next;
    }

    /// A request that this layer held is due. `outcome` is what it was held with.
    fn resume(&mut self, request: Box<Request>, outcome: Option<Outcome>, next: &mut Crossing<'_>) {
        match outcome {
            None => next.submit(request),
            Some(outcome) => next.complete(request, outcome),
        }
    }
}
