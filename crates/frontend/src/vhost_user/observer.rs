//! Observers of the guests that run on a disk.

use fathom_guest_memory::GuestMemory;

/// Learns when guests run on a disk, and with which memory. Several VMMs may be connected to one
/// disk, but only one has running rings: its `stopped` precedes the next one's `started`.
///
/// The thread that reads the VMM's messages, or the one that ends the server, makes the calls; for
/// one session they are sequential. The VMM waits while a call runs.
pub trait GuestObserver: Send + Sync {
    /// The first ring of `session` is about to start: the guest has set up its device.
    fn started(&self, session: u64, memory: &GuestMemory);

    /// The memory changed while rings were running.
    fn moved(&self, session: u64, memory: &GuestMemory);

    /// The last ring has stopped: the guest has reset its device, or is being stopped.
    fn stopped(&self, session: u64);

    /// The VMM has disconnected. Its rings have already stopped.
    fn ended(&self, session: u64);
}

/// Observes nothing.
pub(super) struct NoObserver;

impl GuestObserver for NoObserver {
    fn started(&self, _session: u64, _memory: &GuestMemory) {}

    fn moved(&self, _session: u64, _memory: &GuestMemory) {}

    fn stopped(&self, _session: u64) {}

    fn ended(&self, _session: u64) {}
}
