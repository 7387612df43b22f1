//! A layer in which writes wait for space instead of failing.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use fathom_block::{
    Capabilities, Crossing, ErrorKind, Figure, Layer, LayerPart, LayerQueue, LayerReport,
    OpenContext, Outcome, Request,
};

/// The interval at which a waiting request is tried again, in nanoseconds.
const RETRY_NS: u64 = 1_000_000_000;

/// A function that is called when requests begin or cease to wait.
type Watcher = Box<dyn Fn() + Send + Sync>;

/// The state that the queues of one disk share.
#[derive(Default)]
struct Shared {
    /// The number of waiting requests.
    waiting: AtomicU64,
    /// The time when the first of them began to wait, and for how long it had waited at the last
    /// attempt, in nanoseconds.
    since_ns: AtomicU64,
    waited_ns: AtomicU64,
    /// Whether requests fail instead of waiting.
    released: AtomicBool,
    watcher: OnceLock<Watcher>,
}

/// A layer that holds requests for which the storage has no space, and tries them again until there
/// is space. The guest sees a slow disk rather than an error, as under a virtual machine monitor
/// with `werror=enospc`. Requests that need no space are not delayed. When a ring is stopped or a
/// client has gone, its waiting requests are given back.
///
/// The layer belongs directly above the back end, so that the layers above see one request.
#[derive(Clone, Default)]
pub struct WaitForRoom {
    shared: Arc<Shared>,
}

impl WaitForRoom {
    /// A layer without waiting requests.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the function that is called, on a queue's thread, when the first request begins to wait
    /// and when the last one ceases to wait. It must not block. Only the first watcher is kept.
    pub fn watch(&self, watcher: impl Fn() + Send + Sync + 'static) {
        let _ = self.shared.watcher.set(Box::new(watcher));
    }

    /// The number of waiting requests.
    pub fn waiting(&self) -> u64 {
        self.shared.waiting.load(Ordering::Relaxed)
    }

    /// Fails waiting requests and later ones that would wait, because the disk is to be removed.
    pub fn release(&self) {
        self.shared.released.store(true, Ordering::Release);
    }
}

impl Shared {
    fn call(&self) {
        if let Some(watcher) = self.watcher.get() {
            watcher();
        }
    }
}

impl Layer for WaitForRoom {
    fn name(&self) -> &'static str {
        "wait-for-room"
    }

    fn capabilities(&self, below: Capabilities) -> Capabilities {
        below
    }

    fn status(&self) -> LayerReport {
        let waiting = self.waiting();
        let waited_ns = self.shared.waited_ns.load(Ordering::Relaxed);
        let seconds = if waiting > 0 { waited_ns / 1_000_000_000 } else { 0 };
        let figures = vec![
            Figure::gauge("waiting_requests", "Requests that wait for space.", waiting),
            Figure::gauge("waiting_seconds", "How long requests have waited for space.", seconds),
        ];
        // Whoever watches over the disk reports waiting requests with the full file system.
        LayerReport { figures, problems: Vec::new() }
    }

    fn open_queue(&self, _context: &mut OpenContext<'_>) -> io::Result<LayerPart> {
        Ok(LayerPart::queue(RoomQueue { shared: Arc::clone(&self.shared) }))
    }
}

struct RoomQueue {
    shared: Arc<Shared>,
}

/// The word of a request that waits or has waited.
const WAITED: u64 = 1;

impl RoomQueue {
    fn finish(&self, mut request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        if std::mem::take(next.word(&mut request)) == WAITED
            && self.shared.waiting.fetch_sub(1, Ordering::Relaxed) == 1
        {
            self.shared.call();
        }
        next.complete(request, outcome);
    }
}

impl LayerQueue for RoomQueue {
    fn submit(&mut self, request: Box<Request>, next: &mut Crossing<'_>) {
        next.submit(request);
    }

    fn complete(&mut self, mut request: Box<Request>, outcome: Outcome, next: &mut Crossing<'_>) {
        let waits = outcome == Err(ErrorKind::NoSpace)
            && request.operation.modifies()
            && !self.shared.released.load(Ordering::Acquire);
        if !waits {
            return self.finish(request, outcome, next);
        }
        let now_ns = next.now_ns();
        if std::mem::replace(next.word(&mut request), WAITED) != WAITED
            && self.shared.waiting.fetch_add(1, Ordering::Relaxed) == 0
        {
            self.shared.since_ns.store(now_ns, Ordering::Relaxed);
            self.shared.call();
        }
        let waited_ns = now_ns.saturating_sub(self.shared.since_ns.load(Ordering::Relaxed));
        self.shared.waited_ns.store(waited_ns, Ordering::Relaxed);
        let deadline_ns = now_ns.saturating_add(RETRY_NS);
        next.hold(request, Some(outcome), deadline_ns);
    }

    fn withdraw_held(
        &mut self,
        request: Box<Request>,
        outcome: Option<Outcome>,
        next: &mut Crossing<'_>,
    ) -> Option<Box<Request>> {
        if request.flags.is_work_of_layers() {
            return Some(request);
        }
        let is_released = self.shared.released.load(Ordering::Acquire);
        let outcome = outcome.filter(|_| is_released).unwrap_or(Err(ErrorKind::Withdrawn));
        self.finish(request, outcome, next);
        None
    }

    fn resume(&mut self, request: Box<Request>, outcome: Option<Outcome>, next: &mut Crossing<'_>) {
        if self.shared.released.load(Ordering::Acquire) {
            self.finish(request, outcome.unwrap_or(Err(ErrorKind::NoSpace)), next);
        } else {
            next.submit(request);
        }
    }
}
