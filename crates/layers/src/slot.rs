//! The slot with the guest of a disk, in whose memory the disk's requests are.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fathom_insight::Waiters;
use fathom_introspect::{DiskObject, Guest};
use parking_lot::Mutex;

use crate::guest_pages::GuestPages;

/// The current guest of a disk. The owner of the front end sets it. The disk's queues notice a
/// change with one load for each request.
#[derive(Default)]
pub struct GuestSlot {
    /// Increases with each change of the guest.
    generation: AtomicU64,
    guest: Mutex<Option<Arc<Guest>>>,
    object: Arc<DiskObject>,
    /// Increases with each change of the pages.
    pages_generation: AtomicU64,
    pages: Mutex<Option<Arc<GuestPages>>>,
}

impl GuestSlot {
    /// A slot without a guest.
    pub fn new() -> Self {
        Self::default()
    }

    /// Replaces the guest.
    pub fn set(&self, guest: Option<Arc<Guest>>) {
        let mut place = self.guest.lock();
        let before = std::mem::replace(&mut *place, guest);
        self.object.clear();
        self.generation.fetch_add(1, Ordering::Release);
        drop(place);
        // The last holder of a guest unmaps its memory, which should not happen under the lock.
        drop(before);
    }

    /// The guest kernel's object for the disk, once a request has led to it.
    pub fn object(&self) -> &Arc<DiskObject> {
        &self.object
    }

    /// The guest.
    pub fn guest(&self) -> Option<Arc<Guest>> {
        self.guest.lock().clone()
    }

    /// Replaces the pages of the guest's memory, which a disk has also while the memory is not
    /// examined.
    pub fn set_pages(&self, pages: Option<Arc<GuestPages>>) {
        let mut place = self.pages.lock();
        let before = std::mem::replace(&mut *place, pages);
        self.pages_generation.fetch_add(1, Ordering::Release);
        drop(place);
        // As above.
        drop(before);
    }

    /// The pages of the guest's memory; `None` if no guest is connected.
    pub fn pages(&self) -> Option<Arc<GuestPages>> {
        self.pages.lock().clone()
    }

    /// A number that differs after each change of the pages.
    pub(crate) fn pages_generation(&self) -> u64 {
        self.pages_generation.load(Ordering::Acquire)
    }

    /// The pages and their generation; `None` while another thread is changing them.
    pub(crate) fn try_pages(&self) -> Option<(u64, Option<Arc<GuestPages>>)> {
        let place = self.pages.try_lock()?;
        Some((self.pages_generation(), place.clone()))
    }

    /// A number that differs after each change.
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// The guest and its generation; `None` while another thread is changing the slot.
    pub(crate) fn try_guest(&self) -> Option<(u64, Option<Arc<Guest>>)> {
        let place = self.guest.try_lock()?;
        Some((self.generation(), place.clone()))
    }
}

impl Waiters for GuestSlot {
    /// Without a guest, or while it changes, no process is known to wait.
    fn is_awaited(&self, pages: &mut dyn Iterator<Item = u64>) -> bool {
        let Some((_, Some(guest))) = self.try_guest() else { return false };
        catch_unwind(AssertUnwindSafe(|| guest.is_awaited(pages))).unwrap_or(false)
    }
}
