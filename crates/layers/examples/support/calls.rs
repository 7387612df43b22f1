//! The calls of queues that run in one thread.

use fathom_block::Stack;
use fathom_reactor::Reactor;

/// Handles what other queues have called this one for. Returns whether there was a call.
///
/// The ring has such calls only. Without one there is no system call, which would take long for
/// each instant of the simulated time.
pub fn take(stack: &mut Stack, reactor: &mut Reactor) -> bool {
    let mut events = Vec::new();
    reactor.submit().expect("an io_uring");
    if reactor.is_ready() {
        reactor.collect(&mut events).expect("an io_uring");
    }
    for event in &events {
        stack.event(event, reactor);
    }
    !events.is_empty()
}
