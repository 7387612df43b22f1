//! The reported state of a vhost-user front end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::refusal::Refusal;

/// Counts of one front end since its start, over all its connections.
#[derive(Debug, Default)]
pub(super) struct Counters {
    /// Requests that were invalid and were refused.
    pub refused: AtomicU64,
    /// Rings that were stopped because their contents were invalid.
    pub broken_rings: AtomicU64,
    /// Those of them that the guest has not reset yet.
    pub broken_now: AtomicU64,
    /// Connections that ended with a protocol error.
    pub protocol_errors: AtomicU64,
    /// Connections accepted.
    pub connections: AtomicU64,
    /// Requests of an earlier daemon that were repeated.
    pub recovered: AtomicU64,
    /// Threads that failed.
    pub panics: AtomicU64,
    /// Connections that ended because memory of the guest was lost.
    pub lost: AtomicU64,
    /// Whether the current connection's misbehaviour has been logged.
    pub warned: AtomicBool,
}

/// A ring that is out of use, until it is dropped.
pub(super) struct BrokenRing(Option<Arc<Counters>>);

impl BrokenRing {
    /// A ring whose contents were invalid.
    pub(super) fn counted(counters: &Arc<Counters>) -> Self {
        counters.broken_rings.fetch_add(1, Ordering::Relaxed);
        counters.broken_now.fetch_add(1, Ordering::Relaxed);
        Self(Some(Arc::clone(counters)))
    }

    /// A ring whose memory was lost, which is no fault of the guest.
    pub(super) fn uncounted() -> Self {
        Self(None)
    }
}

impl Drop for BrokenRing {
    fn drop(&mut self) {
        if let Some(counters) = &self.0 {
            counters.broken_now.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// The state of a vhost-user front end at one instant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VhostUserStatus {
    /// Whether a VMM is connected.
    pub connected: bool,
    /// The number of rings that are being served.
    pub running_queues: u16,
    /// The virtio and vhost features that the guest accepted.
    pub features: u64,
    /// The vhost-user protocol features that the VMM accepted.
    pub protocol_features: u64,
    /// The amount of mapped guest memory, in bytes.
    pub memory: u64,
    /// Whether the VMM keeps the in-flight requests across a restart of the daemon.
    pub inflight: bool,
    /// Whether the VMM can be told of a new size.
    pub announces_sizes: bool,
    /// Whether a live migration is being logged.
    pub logging: bool,
    /// Connections accepted since the start.
    pub connections: u64,
    /// Requests that were invalid and were refused.
    pub refused: u64,
    /// Rings that were stopped because their contents were invalid.
    pub broken_rings: u64,
    /// Those of them that the guest has not reset yet: they carry out no requests.
    pub broken_now: u64,
    /// Connections that ended with a protocol error.
    pub protocol_errors: u64,
    /// Requests of an earlier daemon that were repeated.
    pub recovered: u64,
    /// Threads that failed.
    pub panics: u64,
    /// Connections that ended because shared memory became inaccessible: its file was truncated,
    /// there was no room for a page, or the hardware lost one.
    pub lost: u64,
    /// Whether the guest kicks its queues, but none of its writes to memory reach the daemon: the
    /// VMM has mapped its memory privately.
    pub blind: bool,
    /// Why the last VMM could not be served; `None` once a VMM is served.
    pub refusal: Option<Refusal>,
}
