//! Whether processes of a guest wait for requests.

/// Reports whether a process waits for a request by now. A process can begin to wait for a request
/// that no process waited for when it came, without another request: `fsync` waits for pages that
/// are already being written.
pub trait Waiters: Send + Sync {
    /// Whether a process waits for one of the pages of memory at these guest-physical addresses,
    /// which are those of a request in flight, in order. Examines only some of them. Never blocks.
    /// A wrong answer may cost time, never data.
    fn is_awaited(&self, pages: &mut dyn Iterator<Item = u64>) -> bool;
}
