//! Background requests at the device, for which a process may wait.
//!
//! `fsync` waits for the pages of a file one after another. If it waits for a request that was
//! passed on in a quiet time, the held requests of the file are next: a process waits for them,
//! too.

use std::sync::atomic::{AtomicUsize, Ordering};

use fathom_block::Request;
use fathom_insight::Waiters;
use parking_lot::{Mutex, MutexGuard};

use super::held::Files;

/// The most pages of a request that are examined.
const PAGES_MAX: usize = 4;
/// The most requests that are examined.
const SENT_MAX: usize = 64;

/// A background request at the device.
struct Entry {
    queue: u64,
    id: u64,
    /// The guest-physical addresses of some pages, in bytes, with the first page before all others.
    pages: Vec<u64>,
    files: Files,
}

/// The background requests of a disk that are at the device.
#[derive(Default)]
pub(super) struct Sent {
    count: AtomicUsize,
    entries: Mutex<Vec<Entry>>,
}

/// The addresses of a request's first page and of some others, in equal distances.
fn pages(request: &Request) -> Vec<u64> {
    let addresses = request.buffers.addresses();
    let step = addresses.len().div_ceil(PAGES_MAX).max(1);
    addresses.iter().step_by(step).flatten().map(|address| address.0).collect()
}

impl Sent {
    fn entries(&self) -> MutexGuard<'_, Vec<Entry>> {
        self.entries.lock()
    }

    fn update(&self, change: impl FnOnce(&mut Vec<Entry>)) {
        let mut entries = self.entries();
        change(&mut entries);
        self.count.store(entries.len(), Ordering::Release);
    }

    /// Adds a request that a queue passes on, if its files are known. Further requests than can be
    /// examined are left out.
    pub(super) fn add(&self, queue: u64, request: &Request) {
        if self.count.load(Ordering::Acquire) >= SENT_MAX {
            return;
        }
        let (pages, files) = (pages(request), Files::of(request));
        if !pages.is_empty() && !files.is_empty() {
            self.update(|entries| entries.push(Entry { queue, id: request.id, pages, files }));
        }
    }

    /// Removes a completed request.
    pub(super) fn remove(&self, id: u64) {
        if self.count.load(Ordering::Acquire) > 0 {
            self.update(|entries| entries.retain(|entry| entry.id != id));
        }
    }

    /// Removes the requests of a queue.
    pub(super) fn remove_queue(&self, queue: u64) {
        self.update(|entries| entries.retain(|entry| entry.queue != queue));
    }

    /// The files of each request for which a process waits.
    pub(super) fn awaited(&self, waiters: &dyn Waiters) -> Vec<Files> {
        if self.count.load(Ordering::Acquire) == 0 {
            return Vec::new();
        }
        let entries = self.entries();
        let is_awaited = |entry: &&Entry| waiters.is_awaited(&mut entry.pages.iter().copied());
        entries.iter().filter(is_awaited).map(|entry| entry.files.clone()).collect()
    }
}
