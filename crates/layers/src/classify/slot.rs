//! The place that says whose memory a disk's requests lie in.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use fathom_introspect::Guest;

/// The guest of a disk at this moment. Whoever knows the front end puts it here; the disk's queues
/// notice a change by one load for each request.
#[derive(Default)]
pub struct GuestSlot {
    /// Changes with each change of the guest.
    generation: AtomicU64,
    guest: Mutex<Option<Arc<Guest>>>,
}

impl GuestSlot {
    /// A slot without a guest.
    pub fn new() -> Self {
        Self::default()
    }

    /// Puts another guest, or none, in place of what is there.
    pub fn set(&self, guest: Option<Arc<Guest>>) {
        let mut place = self.guest.lock().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::replace(&mut *place, guest);
        self.generation.fetch_add(1, Ordering::Release);
        drop(place);
        // Outside the lock: the last holder of a guest unmaps its memory.
        drop(before);
    }

    /// The guest.
    pub fn guest(&self) -> Option<Arc<Guest>> {
        self.guest.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// A number that is another after each change.
    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// The guest and the generation that it belongs to, unless somebody is changing it right now.
    pub(super) fn try_guest(&self) -> Option<(u64, Option<Arc<Guest>>)> {
        let place = self.guest.try_lock().ok()?;
        Some((self.generation(), place.clone()))
    }
}
