//! Telling others whose memory a disk's requests lie in.

use std::sync::Arc;

use super::memory::Memory;

/// Is told when guests run on a disk, and with which memory. Several VMMs may be connected to one
/// disk, but only one has rings that run: its `stopped` comes before the next one's `started`.
///
/// The calls come from the thread that reads the VMM's messages, or from the one that ends the
/// server; for one session they come one after another. They may take a moment, during which that
/// VMM waits.
pub trait GuestObserver: Send + Sync {
    /// The first ring of `session` is about to start: the guest has set up its device.
    fn started(&self, session: u64, memory: &Arc<Memory>);

    /// The memory changed while rings run.
    fn moved(&self, session: u64, memory: &Arc<Memory>);

    /// The last ring has stopped: the guest has reset its device, or is being stopped.
    fn stopped(&self, session: u64);

    /// The VMM has gone. The rings have stopped by then.
    fn ended(&self, session: u64);
}

/// Whom nothing interests.
pub(super) struct Nobody;

impl GuestObserver for Nobody {
    fn started(&self, _session: u64, _memory: &Arc<Memory>) {}

    fn moved(&self, _session: u64, _memory: &Arc<Memory>) {}

    fn stopped(&self, _session: u64) {}

    fn ended(&self, _session: u64) {}
}
