//! Held requests, and what releases them before their time.
//!
//! A process can wait for a request that no process waited for when it came: `fsync` waits for
//! pages that are already being written. So a disk keeps an index of the held requests of all its
//! queues. A request that comes to any of its queues marks the held ones that it may wait for, and
//! their queues release them.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};

use fathom_block::{Operation, Request, Waker};
use fathom_insight::Name;
use parking_lot::{Mutex, MutexGuard};

use super::need::Need;
use super::state::cost;

/// The most files of a request that are compared. A request with more files matches all files.
const FILES_MAX: usize = 16;

/// Why a held request was passed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Release {
    /// No process waited for the device.
    Quiet = 0,
    /// It was held for the longest time.
    Due = 1,
    /// The disk held more than it may, and its share of the device allowed it.
    Surplus = 2,
    /// A flush of the disk came.
    Flush = 3,
    /// A request for the same bytes came.
    Overlap = 4,
    /// A process writes the same file and waits.
    File = 5,
    /// A process waits for its pages.
    Waiter = 6,
    /// The queue was drained.
    Drain = 7,
}

impl Release {
    pub(super) const COUNT: usize = 8;

    /// Whether a process waits for the request by now.
    pub(super) fn is_waited(self) -> bool {
        match self {
            Self::Flush | Self::Overlap | Self::File | Self::Waiter => true,
            Self::Quiet | Self::Due | Self::Surplus | Self::Drain => false,
        }
    }
}

/// A held request.
pub(super) struct Held {
    pub request: Box<Request>,
    pub since_ns: u64,
}

/// The held requests of a queue.
#[derive(Default)]
pub(super) struct HeldList {
    /// In the order of arrival.
    list: VecDeque<Held>,
    /// The end of the last released request, in bytes from the start of the disk.
    position: u64,
    /// The cost of all requests.
    cost: f64,
}

impl HeldList {
    pub(super) fn push(&mut self, request: Box<Request>, since_ns: u64) {
        self.cost += cost(length(&request));
        self.list.push_back(Held { request, since_ns });
    }

    pub(super) fn len(&self) -> usize {
        self.list.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Held> {
        self.list.iter()
    }

    /// The request that came last.
    pub(super) fn last(&self) -> Option<&Held> {
        self.list.back()
    }

    /// The time of the oldest request, in nanoseconds.
    pub(super) fn oldest_ns(&self) -> Option<u64> {
        self.list.front().map(|held| held.since_ns)
    }

    pub(super) fn pop_oldest(&mut self) -> Option<Held> {
        self.take(0)
    }

    /// The next of the requests that came by `until_ns`, in the order of the disk, which is the
    /// order in which a hard disk reaches them soonest: the first behind the last released one, or
    /// else the first of all. Requests at the same place keep their order.
    pub(super) fn next(&self, until_ns: u64) -> Option<usize> {
        let place = |held: &Held| {
            let offset = held.request.offset;
            (offset < self.position, offset)
        };
        let came = self.list.iter().enumerate().filter(|(_, held)| held.since_ns <= until_ns);
        came.map(|(index, held)| (place(held), index)).min().map(|(_, index)| index)
    }

    /// The request that begins where the last released one ends.
    pub(super) fn adjoining(&self) -> Option<usize> {
        self.list.iter().position(|held| held.request.offset == self.position)
    }

    /// The cost of all requests.
    pub(super) fn cost(&self) -> f64 {
        self.cost
    }

    /// The length of the request at `index`, in bytes.
    pub(super) fn length(&self, index: usize) -> u64 {
        self.list.get(index).map_or(0, |held| length(&held.request))
    }

    pub(super) fn take(&mut self, index: usize) -> Option<Held> {
        let held = self.remove(index)?;
        self.position = held.request.end().unwrap_or(0);
        Some(held)
    }

    /// Takes the request with a number. Does not change the place in the order of the disk.
    pub(super) fn take_numbered(&mut self, id: u64) -> Option<Held> {
        let index = self.list.iter().position(|held| held.request.id == id)?;
        self.remove(index)
    }

    fn remove(&mut self, index: usize) -> Option<Held> {
        let held = self.list.remove(index)?;
        self.cost -= cost(length(&held.request));
        Some(held)
    }
}

/// The number of bytes that a request transfers.
pub(super) fn length(request: &Request) -> u64 {
    if request.operation.carries_data() { request.length } else { 0 }
}

/// A file of the guest: the device of its file system, and its number.
type File = (Name, u64);

/// The files of a request.
#[derive(Clone, Default)]
pub(super) struct Files {
    list: Vec<File>,
    /// Whether there are more than are compared.
    is_cut: bool,
}

impl Files {
    pub(super) fn of(request: &Request) -> Self {
        let mut files = Self::default();
        for part in request.insight.parts(request.length) {
            let file = (part.facts.device, part.facts.inode);
            if file.1 == 0 || files.list.contains(&file) {
                continue;
            }
            if files.list.len() == FILES_MAX {
                files.is_cut = true;
                break;
            }
            files.list.push(file);
        }
        files
    }

    pub(super) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    fn meets(&self, other: &Self) -> bool {
        self.is_cut && !other.list.is_empty()
            || other.is_cut && !self.list.is_empty()
            || self.list.iter().any(|file| other.list.contains(file))
    }
}

/// A held request in the index.
struct Entry {
    queue: u64,
    id: u64,
    offset: u64,
    end: u64,
    operation: Operation,
    files: Files,
    mark: Option<Release>,
    waker: Waker,
}

/// The held requests of a disk.
#[derive(Default)]
pub(super) struct Index {
    /// The number of entries, and the number of those that are marked.
    count: AtomicUsize,
    marked: AtomicUsize,
    entries: Mutex<Vec<Entry>>,
}

impl Index {
    fn entries(&self) -> MutexGuard<'_, Vec<Entry>> {
        self.entries.lock()
    }

    /// Updates the counts, while the lock is held.
    fn update(&self, entries: &[Entry]) {
        self.count.store(entries.len(), Ordering::Release);
        let marked = entries.iter().filter(|entry| entry.mark.is_some()).count();
        self.marked.store(marked, Ordering::Release);
    }

    pub(super) fn add(&self, queue: u64, request: &Request, waker: &Waker) {
        let mut entries = self.entries();
        entries.push(Entry {
            queue,
            id: request.id,
            offset: request.offset,
            end: request.end().unwrap_or(u64::MAX),
            operation: request.operation,
            files: Files::of(request),
            mark: None,
            waker: waker.clone(),
        });
        self.update(&entries);
    }

    /// Removes requests by their numbers, and empties the list of numbers.
    pub(super) fn remove(&self, ids: &mut Vec<u64>) {
        if !ids.is_empty() && self.count.load(Ordering::Acquire) > 0 {
            let mut entries = self.entries();
            entries.retain(|entry| !ids.contains(&entry.id));
            self.update(&entries);
        }
        ids.clear();
    }

    /// Removes all requests of a queue.
    pub(super) fn remove_queue(&self, queue: u64) {
        let mut entries = self.entries();
        entries.retain(|entry| entry.queue != queue);
        self.update(&entries);
    }

    /// Marks the held requests that `request`, which has come to `queue`, may wait for. Wakes the
    /// other queues that hold them.
    pub(super) fn meet(&self, queue: u64, request: &Request, need: Need) {
        if self.count.load(Ordering::Acquire) == 0 {
            return;
        }
        let is_waited = need == Need::Waited;
        let is_write = is_waited && request.operation.modifies();
        let files = if is_write { Files::of(request) } else { Files::default() };
        let end = request.end().unwrap_or(u64::MAX);
        let release = |entry: &Entry| {
            if need == Need::Flush {
                Some(Release::Flush)
            } else if request.offset < entry.end && entry.offset < end {
                Some(Release::Overlap)
            } else if is_write
                && (entry.files.meets(&files)
                    || request.operation == Operation::Discard
                        && entry.operation == Operation::Discard)
            {
                Some(Release::File)
            } else {
                None
            }
        };
        self.mark(queue, release);
    }

    /// Marks the held requests of the files of the held request `id`, for which a process waits. If
    /// its files are not known, marks all held requests of the disk.
    pub(super) fn meet_waiter(&self, queue: u64, id: u64) {
        let entries = self.entries();
        let files = entries.iter().find(|entry| entry.id == id).map(|entry| entry.files.clone());
        drop(entries);
        self.meet_files(queue, &files.unwrap_or_default());
    }

    /// Marks the held requests of the files of a request for which a process waits. If its files
    /// are not known, marks all held requests of the disk. Returns whether there are any that were
    /// not marked.
    pub(super) fn meet_files(&self, queue: u64, files: &Files) -> bool {
        let is_unknown = files.is_empty();
        self.mark(queue, |entry| {
            (is_unknown || entry.files.meets(files)).then_some(Release::Waiter)
        })
    }

    fn mark(&self, queue: u64, release: impl Fn(&Entry) -> Option<Release>) -> bool {
        let mut has_marked = false;
        let mut wakers: Vec<Waker> = Vec::new();
        let mut entries = self.entries();
        let mut last = queue;
        for entry in entries.iter_mut().filter(|entry| entry.mark.is_none()) {
            entry.mark = release(entry);
            has_marked |= entry.mark.is_some();
            if entry.mark.is_some() && entry.queue != last {
                last = entry.queue;
                wakers.push(entry.waker.clone());
            }
        }
        self.update(&entries);
        drop(entries);
        wakers.iter().for_each(Waker::wake);
        has_marked
    }

    /// Takes the marked requests of a queue, the oldest first.
    pub(super) fn take_marked(&self, queue: u64, taken: &mut Vec<(u64, Release)>) {
        if self.marked.load(Ordering::Acquire) == 0 {
            return;
        }
        let mut entries = self.entries();
        entries.retain(|entry| match entry.mark {
            Some(mark) if entry.queue == queue => {
                taken.push((entry.id, mark));
                false
            }
            _ => true,
        });
        self.update(&entries);
    }
}
