//! What other threads have done for a thread with a reactor.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsFd as _;

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};

use crate::{OperationOwner, Reactor};

/// Items that other threads put in, and one thread takes out. The first item wakes that thread's
/// reactor.
pub struct Inbox<T> {
    items: Mutex<Vec<T>>,
    wake: File,
}

impl<T> Inbox<T> {
    /// An empty inbox.
    ///
    /// # Errors
    /// If there is no descriptor left.
    pub fn new() -> io::Result<Self> {
        let wake = File::from(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        Ok(Self { items: Mutex::default(), wake })
    }

    /// Puts an item in.
    pub fn put(&self, item: T) {
        let mut items = self.items.lock();
        items.push(item);
        if items.len() == 1 {
            // The only possible error is a full counter, which also wakes the thread.
            let _ = (&self.wake).write(&1_u64.to_ne_bytes());
        }
    }

    /// Takes all items out, in the order in which they came.
    pub fn take(&self) -> Vec<T> {
        // Read first: an item that is put in in between wakes the thread again.
        let _ = (&self.wake).read(&mut [0; 8]);
        std::mem::take(&mut *self.items.lock())
    }

    /// Watches the inbox: `reactor` has an event with `owner` and `token` when there are items. If
    /// an event has no [`more`](crate::Event::more), the inbox has to be watched again.
    pub fn watch(&self, reactor: &mut Reactor, owner: OperationOwner, token: u64) {
        reactor.watch_always(owner, token, self.wake.as_fd());
    }
}
