//! The contract of a layer.

use std::any::Any;
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

/// A layer of one disk, shared by all its queues.
///
/// The do-nothing version is `fathom_layers::Passthrough`.
pub trait Layer: Send + Sync {
    /// One word for status, logs and the configuration, for example `tap`.
    fn name(&self) -> &'static str;

    /// The capabilities of the disk above this layer, given those `below`. They must not exceed
    /// what the layer honours. The capability of an operation that the layer passes on unchanged is
    /// that of the level below.
    fn capabilities(&self, below: Capabilities) -> Capabilities;

    /// The sizes of the disk that the layer shows to the level above, given those `below`. They are
    /// fixed while the layer exists.
    fn geometry(&self, below: Geometry) -> Geometry {
        below
    }

    /// The capacity that the layer shows to the level above, given the capacity `below`, both in
    /// bytes. It must depend only on `below` and on values that are fixed while the layer exists.
    fn capacity(&self, below: u64) -> u64 {
        below
    }

    /// The layer's own figures and its current problems. Never blocks.
    fn status(&self) -> LayerReport {
        LayerReport::default()
    }

    /// The layer's own type, for the component that makes such layers; `None` if it does not need
    /// the type.
    fn as_any(&self) -> Option<&dyn Any> {
        None
    }

    /// The further stores that the layer uses. The daemon monitors them as it monitors the disk's
    /// image.
    fn stores(&self) -> Vec<Arc<dyn Backend>> {
        Vec::new()
    }

    /// Called before the capacity of the level below changes from `from` to `to` bytes. The layer
    /// may refuse because of its own state.
    ///
    /// # Errors
    /// When the layer refuses the change. The size then stays as it is.
    fn resizing(&self, from: u64, to: u64) -> Result<(), ErrorKind> {
        let _ = (from, to);
        Ok(())
    }

    /// Called before the layer is removed from `disk`, which still serves requests. Work done here
    /// shortens [`leave`](Self::leave), during which the disk serves no requests. Blocks for at
    /// most `limit`.
    fn retire(&self, disk: &Arc<Disk>, limit: Duration) {
        let _ = (disk, limit);
    }

    /// Called when the layer is removed from `disk`: no queue has a request in flight, and no queue
    /// takes a request before this call returns. A layer with a state of its own writes it out
    /// here, through a queue of its own ([`Disk::open_aside`]). Blocks for at most `limit`.
    ///
    /// # Errors
    /// When the layer cannot be removed. The disk then keeps it and continues with it.
    fn leave(&self, disk: &Arc<Disk>, limit: Duration) -> io::Result<()> {
        let _ = (disk, limit);
        Ok(())
    }

    /// Called when `disk` is not served any more: all its requests have completed, and its last
    /// flush has ended. A layer with a state that outlives the daemon makes it durable here,
    /// through a queue of its own ([`Disk::open_aside`]). Blocks for about `limit` at most.
    ///
    /// # Errors
    /// When the state is not complete. That costs time later, but no data.
    fn save_state(&self, disk: &Arc<Disk>, limit: Duration) -> io::Result<()> {
        let _ = (disk, limit);
        Ok(())
    }

    /// Opens the layer's part in one queue, in that queue's thread. `context` provides what the
    /// part needs besides the requests, for example further stores or a waker.
    ///
    /// # Errors
    /// When the part cannot be opened. The queue is then not opened; open queues continue.
    fn open_queue(&self, context: &mut OpenContext<'_>) -> io::Result<LayerPart>;
}

/// A layer's part in one queue.
pub enum LayerPart {
    /// It takes requests and passes them on.
    Queue(Box<dyn LayerQueue>),
    /// It observes requests. Its [`Layer::capabilities`] must be those of the level below.
    Observer(Box<dyn Observer>),
}

impl LayerPart {
    /// The part of a layer that takes requests.
    pub fn queue(queue: impl LayerQueue + 'static) -> Self {
        Self::Queue(Box::new(queue))
    }

    /// The part of a layer that observes requests.
    pub fn observer(observer: impl Observer + 'static) -> Self {
        Self::Observer(Box::new(observer))
    }
}

/// A layer's part in one queue, called by that queue's thread alone.
///
/// **Callers** guarantee the conditions that [`Crossing::submit`] checks: the range lies within the
/// disk and is aligned, the lengths of the buffers add up to the request's, and the operation is
/// among the layer's capabilities.
///
/// **Implementors** see each request once on its way down ([`submit`](Self::submit)) and once on
/// its way up ([`complete`](Self::complete)), unless they answer it themselves. They pass on every
/// box that they get exactly once. They spawn no threads, read no ambient clock and no ambient
/// randomness, and do not block.
///
/// A layer that acknowledges a write before the level below has it must also handle
/// [`Operation::Flush`](crate::Operation::Flush). Otherwise a flush would succeed although
/// acknowledged data is not durable.
pub trait LayerQueue {
    /// Takes a request from above: passes it on ([`Crossing::submit`]), answers it
    /// ([`Crossing::complete`]) or keeps it for some time ([`Crossing::hold`]).
    fn submit(&mut self, request: Box<Request>, next: &mut Crossing<'_>);

    /// Called with the requests of a batch before the first of them is submitted to the highest
    /// layer. The layer may fetch what it needs for them into the processor's caches. It changes
    /// nothing and passes nothing on: a layer above may still hold, change or answer them.
    fn expect(&mut self, requests: &[Box<Request>], next: &mut Crossing<'_>) {
        let _ = (requests, next);
    }

    /// Takes a completed request that this layer had passed on: passes its outcome on
    /// ([`Crossing::complete`]) or keeps it for some time ([`Crossing::hold`]).
    fn complete(&mut self, request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>);

    /// Takes a completed request that this layer had made ([`Crossing::request`],
    /// [`Crossing::piece`]) and submitted below or to a further store ([`Request::store`]). The
    /// request ends here: the layer gives the box back with [`Crossing::recycle`].
    fn returned(&mut self, request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        debug_assert!(false, "a layer that makes requests of its own receives them");
        let _ = outcome;
        next.recycle(request);
    }

    /// Takes back `parent`, which this layer had [split](Crossing::split), after all pieces have
    /// completed and been given back. `outcome` is the first error among them.
    fn gathered(&mut self, parent: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        next.complete(parent, outcome);
    }

    /// The layer's own round. Called when the time set with [`Crossing::wake_at`] has come, or when
    /// one of the layer's [`Waker`](crate::Waker)s was used. It may also be called without a
    /// reason.
    fn advance(&mut self, next: &mut Crossing<'_>) {
        let _ = next;
    }

    /// Called when the front end waits for all requests in flight, because the disk gets other
    /// layers or the daemon ends. The layer passes on the requests that it holds back by its own
    /// rule, and holds no request back while [`Crossing::is_draining`].
    fn drain(&mut self, next: &mut Crossing<'_>) {
        let _ = next;
    }

    /// Called, perhaps repeatedly, when the front end has gone or its ring is stopped: the layer
    /// completes the requests that it holds back by its own rule, and of which nothing is in
    /// flight, with [`ErrorKind::Withdrawn`]. It passes none of them on: their maker may do without
    /// them, or repeats them later. Background work ([`Flags`](crate::Flags)) goes on.
    fn withdraw(&mut self, next: &mut Crossing<'_>) {
        let _ = next;
    }

    /// The same for a request that the layer [holds](Crossing::hold) until a deadline. It completes
    /// the request, or returns it, so that it is held further.
    fn withdraw_held(
        &mut self,
        request: Box<Request>,
        outcome: Option<Outcome>,
        next: &mut Crossing<'_>,
    ) -> Option<Box<Request>> {
        let _ = (outcome, next);
        Some(request)
    }

    /// Called before the queue is closed, because its front end has ended or because the disk gets
    /// other layers. From now on the layer makes only the requests that it needs to finish work
    /// already started. The queue is closed when all of them have completed; after the end of its
    /// front end, at the latest after 10 s.
    fn close(&mut self, next: &mut Crossing<'_>) {
        let _ = next;
    }

    /// The queue serves requests again, although it was [closed](Self::close): the change of layers
    /// for which it was has failed. Work that the layer has begun may still be in flight.
    fn reopen(&mut self, next: &mut Crossing<'_>) {
        let _ = next;
    }

    /// Whether the layer's own requests in flight need not be awaited when the queue closes,
    /// because a store of the layer does not answer. None of them may change the disk or use memory
    /// that is not the layer's. The part stays until they have returned, beside the part that
    /// follows it in the queue. Asked only while the queue closes.
    fn may_be_left(&self) -> bool {
        false
    }

    /// Takes back a held request at its deadline. `outcome` is the outcome with which it was held.
    fn resume(&mut self, request: Box<Request>, outcome: Option<Outcome>, next: &mut Crossing<'_>) {
        match outcome {
            None => next.submit(request),
            Some(outcome) => next.complete(request, outcome),
        }
    }
}
