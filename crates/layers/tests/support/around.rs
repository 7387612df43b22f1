//! A simulated store whose queues a test makes, around those of the store.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use fathom_block::{
    Backend, BackendOpenContext, BackendProblem, BackendQueue, Capabilities, ErrorKind, Geometry,
};
use fathom_reactor::Reactor;
use fathom_sim::SimBackend;

/// Makes a queue around one of the store.
type Open = dyn Fn(&mut Reactor, Box<dyn BackendQueue>) -> Box<dyn BackendQueue> + Send + Sync;

/// See the module.
pub struct Around {
    store: Arc<SimBackend>,
    capabilities: Capabilities,
    open: Box<Open>,
    losses: Arc<AtomicU64>,
    acts_late: Arc<AtomicBool>,
}

impl Around {
    /// A store with these capabilities. `open` makes a queue around one of `store`.
    pub fn new(
        store: &Arc<SimBackend>,
        capabilities: Capabilities,
        open: impl Fn(&mut Reactor, Box<dyn BackendQueue>) -> Box<dyn BackendQueue>
        + Send
        + Sync
        + 'static,
    ) -> Self {
        let (losses, acts_late) = (Arc::default(), Arc::default());
        Self { store: Arc::clone(store), capabilities, open: Box::new(open), losses, acts_late }
    }

    /// What the store [counts](Backend::losses); the test changes it.
    #[allow(dead_code, reason = "some tests use it")]
    pub fn losses_counted(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.losses)
    }

    /// Whether a change that was given up [may act late](Backend::may_act_late); the test changes
    /// it.
    #[allow(dead_code, reason = "some tests use it")]
    pub fn acts_late(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.acts_late)
    }
}

impl Backend for Around {
    fn name(&self) -> &'static str {
        self.store.name()
    }

    fn capacity(&self) -> u64 {
        self.store.capacity()
    }

    fn geometry(&self) -> Geometry {
        self.store.geometry()
    }

    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn open_queue(
        &self,
        context: &mut BackendOpenContext<'_>,
    ) -> io::Result<Box<dyn BackendQueue>> {
        let inner = self.store.open_queue(context)?;
        Ok((self.open)(context.reactor(), inner))
    }

    fn resize(&self, _capacity: u64) -> Result<(), ErrorKind> {
        Err(ErrorKind::Unsupported)
    }

    fn problems(&self) -> Vec<BackendProblem> {
        Vec::new()
    }

    fn losses(&self) -> u64 {
        self.losses.load(Ordering::Relaxed)
    }

    fn may_act_late(&self) -> bool {
        self.acts_late.load(Ordering::Relaxed)
    }

    fn inspect(&self) {}

    fn recover(&self) -> io::Result<()> {
        Ok(())
    }
}
