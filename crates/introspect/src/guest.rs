//! The introspection of one guest: its memory, its kernel if one has been found, and its state.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fathom_guest_memory::GuestMemory;
use fathom_insight::Names;
use fathom_intercept::Writers;
use parking_lot::{Mutex, MutexGuard};

use crate::dirty::DiskObject;
use crate::kernel::{AttachError, Kernel};
use crate::paging::addressable;
use crate::resolver::Resolver;

/// The state of a guest's introspection.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum GuestState {
    /// No request has arrived yet, so no search has begun.
    #[default]
    Waiting,
    /// The search for a kernel has begun, and none has been found yet.
    Searching {
        /// Why the last search found no kernel.
        reason: String,
    },
    /// A Linux kernel was found, and the meaning of requests can be determined.
    Attached,
    /// The meaning of requests cannot be determined. The disk works without insight.
    Blind {
        /// The reason, as a message for an operator.
        reason: String,
    },
}

/// The state and the counts of a guest's introspection.
#[derive(Clone, Debug, Default)]
pub struct GuestStatus {
    /// The state.
    pub state: GuestState,
    /// The kernel's release, such as `6.1.0-48-cloud-amd64`; empty if no kernel was found.
    pub release: String,
    /// The duration of the last search, in nanoseconds.
    pub search_ns: u64,
    /// The number of kernels found since the guest was connected: a reboot or a kexec starts
    /// another.
    pub kernels: u64,
    /// The number of requests examined.
    pub requests: u64,
    /// The number of examined requests that did not match the kernel's structures.
    pub mismatches: u64,
    /// The number of modules that were loaded when the kernel was read.
    pub modules: usize,
}

/// An event for [`Guest::step`]: a request arrived and there is no kernel.
pub(crate) const EVENT_REQUEST: u8 = 1;
/// Requests do not match the kernel's structures.
pub(crate) const EVENT_MISMATCH: u8 = 2;
/// A bio had a completion function that belongs to no known module.
pub(crate) const EVENT_UNKNOWN_FUNCTION: u8 = 4;
/// The guest has set up its device again.
const EVENT_RESTART: u8 = 8;

/// The shortest time between two searches.
const PAUSE_MIN: Duration = Duration::from_millis(50);
/// The longest time for which a request has to wait for a search to begin.
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// The time to the next search after one that found an unusable kernel.
const PAUSE_BLIND: Duration = Duration::from_secs(10);
/// The longest part of a search. The next part continues it, after the searches of other guests.
const SEARCH_PART_MAX: Duration = Duration::from_millis(500);
/// The number of unconfirmed doubts about one kernel after which it is dropped.
const DOUBTS_MAX: u32 = 8;

/// The reason of a guest whose requests never match its kernel's structures.
pub const COPIED_REQUESTS: &str = "its requests do not match its kernel's structures: the guest \
                                   copies its I/O (swiotlb, encrypted memory)";

/// One guest, shared by the queues of all its disks and the thread that calls [`step`](Self::step).
pub struct Guest {
    memory: GuestMemory,
    names: Arc<Names>,
    wake: Box<dyn Fn() + Send + Sync>,
    /// Changes with each kernel that is found or lost. Resolvers check only this number.
    generation: AtomicU64,
    /// The `EVENT_…` bits that `step` has not processed yet.
    events: AtomicU8,
    /// The header of a recent request. It distinguishes the running kernel from the remains of
    /// another.
    header: AtomicU64,
    inner: Mutex<Inner>,
}

/// The counts of one resolver. Only the resolver's thread writes them.
#[derive(Debug, Default)]
pub(crate) struct ResolverCounts {
    requests: AtomicU64,
    mismatches: AtomicU64,
}

impl ResolverCounts {
    fn add(cell: &AtomicU64, value: u64) {
        cell.store(cell.load(Ordering::Relaxed) + value, Ordering::Relaxed);
    }

    pub fn request(&self) {
        Self::add(&self.requests, 1);
    }

    pub fn mismatch(&self) {
        Self::add(&self.mismatches, 1);
    }
}

#[derive(Default)]
struct Inner {
    /// The counts of the existing resolvers.
    counts: Vec<Arc<ResolverCounts>>,
    /// The sum of the counts of the dropped resolvers.
    past: ResolverCounts,
    kernel: Option<Arc<Kernel>>,
    /// The table of the writers of its pages, if it is intercepted.
    writers: Option<Arc<Writers>>,
    /// The objects of the guest's disks, for as long as another owner has them too.
    disks: Vec<Arc<DiskObject>>,
    status: GuestStatus,
    last_search: Option<Instant>,
    pause: Duration,
    doubts: u32,
    /// The guest-physical address at which the next search continues, and the most informative
    /// error so far.
    rest: Option<(u64, AttachError)>,
}

impl Guest {
    /// A guest with this memory. `wake` is called, from any thread, when [`step`](Self::step) has
    /// something to do. It must not block.
    pub fn new(
        memory: &GuestMemory,
        names: Arc<Names>,
        wake: Box<dyn Fn() + Send + Sync>,
    ) -> Arc<Self> {
        Arc::new(Self {
            memory: addressable(memory),
            names,
            wake,
            generation: AtomicU64::new(1),
            events: AtomicU8::new(0),
            header: AtomicU64::new(0),
            inner: Mutex::default(),
        })
    }

    /// Takes the kernel of `before`, if it has one: the same guest before memory was plugged in or
    /// out. For a guest that has had no requests yet. Does not search; changed structures are found
    /// as usual.
    pub fn inherit_kernel(&self, before: &Self) {
        if let Some(kernel) = before.kernel().and_then(|kernel| kernel.in_memory(&self.memory)) {
            self.set(Some(kernel), GuestState::Attached);
        }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }

    /// The guest's state and counts.
    pub fn status(&self) -> GuestStatus {
        let inner = self.inner();
        let mut status = inner.status.clone();
        for counts in inner.counts.iter().map(Arc::as_ref).chain([&inner.past]) {
            status.requests += counts.requests.load(Ordering::Relaxed);
            status.mismatches += counts.mismatches.load(Ordering::Relaxed);
        }
        if let Some(kernel) = &inner.kernel {
            status.modules = kernel.modules().len();
        }
        status
    }

    /// The guest's memory.
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// The guest's kernel; `None` if none is attached.
    pub fn kernel(&self) -> Option<Arc<Kernel>> {
        self.inner().kernel.clone()
    }

    /// Uses a table of the writers of pages for the kernel with this number
    /// ([`GuestStatus::kernels`]). Returns whether that is the guest's kernel.
    pub fn set_writers(&self, kernel: u64, writers: Arc<Writers>) -> bool {
        let mut inner = self.inner();
        if inner.kernel.is_none() || inner.status.kernels != kernel {
            return false;
        }
        inner.writers = Some(writers);
        drop(inner);
        self.generation.fetch_add(1, Ordering::Release);
        true
    }

    /// Uses this table no longer.
    pub fn remove_writers(&self, writers: &Arc<Writers>) {
        let mut inner = self.inner();
        if inner.writers.as_ref().is_some_and(|used| Arc::ptr_eq(used, writers)) {
            inner.writers = None;
            drop(inner);
            self.generation.fetch_add(1, Ordering::Release);
        }
    }

    /// The table of the writers of pages.
    pub fn writers(&self) -> Option<Arc<Writers>> {
        self.inner().writers.clone()
    }

    /// Whether a process waits until one of the pages with these guest-physical addresses has been
    /// written back. False without a kernel.
    pub fn is_awaited(&self, pages: &mut dyn Iterator<Item = u64>) -> bool {
        let Some(kernel) = self.kernel() else { return false };
        for page in pages {
            if kernel.is_awaited(page) {
                return true;
            }
        }
        false
    }

    /// The table of the texts in the guest's insights.
    pub fn names(&self) -> &Arc<Names> {
        &self.names
    }

    /// Reports that the guest has set up its device again (started rings): it may have rebooted.
    /// Cheap; may call `wake`.
    pub fn restarted(&self) {
        self.notify(EVENT_RESTART, 0);
    }

    /// Reports an event to `step`. Calls `wake` if the event was not pending yet.
    pub(crate) fn notify(&self, event: u8, header: u64) {
        if header != 0 {
            self.header.store(header, Ordering::Relaxed);
        }
        // The load avoids a write: while a search is postponed, every request calls this function.
        if self.events.load(Ordering::Relaxed) & event == 0
            && self.events.fetch_or(event, Ordering::Release) & event == 0
        {
            (self.wake)();
        }
    }

    /// A number that changes with each kernel that is found or lost.
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Processes the pending events: searches for a kernel, checks the attached one, reads modules
    /// that were loaded late. Called by one thread at a time, never a queue's: it can take a
    /// second. Returns the time after which it has to be called again even without `wake`; `None`
    /// if that is not necessary.
    pub fn step(&self) -> Option<Duration> {
        let events = self.events.swap(0, Ordering::Acquire);
        if events == 0 {
            return None;
        }
        let header = Some(self.header.load(Ordering::Relaxed)).filter(|header| *header != 0);
        let kernel = self.kernel();
        let Some(kernel) = kernel else {
            if events & EVENT_RESTART != 0 {
                // Another system drives the device now, not the firmware that was searched without
                // success.
                let mut inner = self.inner();
                let took = Duration::from_nanos(inner.status.search_ns);
                inner.pause = inner.pause.min(PAUSE_MIN.max(took * 3));
            }
            // The event of a restart alone arrives before the first request, which starts the
            // search.
            return if events & EVENT_REQUEST != 0 { self.search(header) } else { None };
        };
        let suspect = events & EVENT_MISMATCH != 0;
        if events & EVENT_RESTART != 0 && !kernel.is_there()
            || suspect && header.is_some_and(|header| !kernel.owns_request(header))
        {
            self.set(None, GuestState::Searching { reason: "the guest has rebooted".into() });
            // This begins immediately, unless a search has just ended.
            return self.search(header);
        }
        if suspect {
            let mut inner = self.inner();
            inner.doubts += 1;
            if inner.doubts >= DOUBTS_MAX {
                drop(inner);
                self.set(None, GuestState::Blind { reason: COPIED_REQUESTS.into() });
                self.inner().pause = PAUSE_BLIND;
                return None;
            }
        }
        if events & (EVENT_UNKNOWN_FUNCTION | EVENT_RESTART) != 0 {
            return self.modules(&kernel);
        }
        None
    }

    /// Reads the kernel's modules again if they have changed. Postpones this if the pause has not
    /// ended.
    fn modules(&self, kernel: &Kernel) -> Option<Duration> {
        if let Some(left) = self.pause_left() {
            self.events.fetch_or(EVENT_UNKNOWN_FUNCTION, Ordering::Relaxed);
            return Some(left);
        }
        let start = Instant::now();
        if kernel.modules_changed() {
            match kernel.read_again() {
                Ok(kernel) => self.set(Some(kernel), GuestState::Attached),
                Err(error) => {
                    let reason = error.to_string();
                    self.set(None, GuestState::Searching { reason });
                }
            }
        }
        self.begin_pause(start.elapsed(), PAUSE_MIN);
        None
    }

    /// The time until the memory may be searched again; `None` if it may be searched now.
    fn pause_left(&self) -> Option<Duration> {
        let inner = self.inner();
        let left = inner.pause.checked_sub(inner.last_search?.elapsed())?;
        (!left.is_zero()).then_some(left)
    }

    /// Begins the pause after a search that took `took`. The pause is at least `pause`, and so long
    /// that searches use a quarter of a processor at most, whatever the guest does.
    fn begin_pause(&self, took: Duration, pause: Duration) {
        let mut inner = self.inner();
        inner.last_search = Some(Instant::now());
        inner.pause = (took * 3).max(pause.clamp(PAUSE_MIN, PAUSE_MAX));
    }

    /// Searches for a kernel. Postpones the search if the pause has not ended.
    fn search(&self, header: Option<u64>) -> Option<Duration> {
        if let Some(left) = self.pause_left() {
            // The event stays pending, so that further requests do not call `wake`.
            self.events.fetch_or(EVENT_REQUEST, Ordering::Relaxed);
            return Some(left);
        }
        let (pause, before) = {
            let mut inner = self.inner();
            (inner.pause, inner.rest.take())
        };
        let start = Instant::now();
        let from = before.as_ref().map_or(0, |(from, _)| *from);
        let found = Kernel::attach_part(&self.memory, header, from, SEARCH_PART_MAX);
        let took = start.elapsed();
        let found = found.map_err(|(error, rest)| {
            let error = match before {
                Some((_, before)) if !error.is_more_specific_than(&before) => before,
                _ => error,
            };
            if let Some(rest) = rest {
                self.inner().rest = Some((rest, error.clone()));
            }
            error
        });
        let is_part = self.inner().rest.is_some();
        let state = match &found {
            Ok(_) => GuestState::Attached,
            Err(
                error @ (AttachError::NoKernel | AttachError::Torn { .. } | AttachError::Stale(_)),
            ) => GuestState::Searching { reason: error.to_string() },
            Err(error) => GuestState::Blind { reason: error.to_string() },
        };
        // The pause grows with each search that fails.
        self.begin_pause(took, if found.is_ok() || is_part { PAUSE_MIN } else { pause * 2 });
        if is_part {
            // The rest of the memory is searched even if no further request arrives.
            self.set(None, GuestState::Searching { reason: "its memory is being searched".into() });
            self.inner().status.search_ns = took.as_nanos() as u64;
            self.events.fetch_or(EVENT_REQUEST, Ordering::Relaxed);
            return self.pause_left();
        }
        if matches!(state, GuestState::Blind { .. }) {
            self.inner().pause = PAUSE_BLIND;
        }
        self.set(found.ok(), state);
        self.inner().status.search_ns = took.as_nanos() as u64;
        None
    }

    fn set(&self, kernel: Option<Kernel>, state: GuestState) {
        let mut inner = self.inner();
        if let Some(kernel) = &kernel {
            kernel.release().clone_into(&mut inner.status.release);
            inner.doubts = 0;
            if inner.kernel.is_none() {
                inner.status.kernels += 1;
            }
        }
        if kernel.is_none() {
            // The next kernel has other objects.
            inner.disks.iter().for_each(|disk| disk.clear());
            inner.writers = None;
        }
        inner.status.state = state;
        inner.kernel = kernel.map(Arc::new);
        drop(inner);
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// A resolver of requests for one queue's thread.
    pub fn resolver(self: &Arc<Self>) -> Resolver {
        self.resolver_of(Arc::default())
    }

    /// A resolver of the requests of one of a disk's queues. It sets the disk's `object`.
    pub fn resolver_of(self: &Arc<Self>, object: Arc<DiskObject>) -> Resolver {
        let counts = Arc::new(ResolverCounts::default());
        let mut inner = self.inner();
        inner.disks.retain(|disk| Arc::strong_count(disk) > 1);
        if !inner.disks.iter().any(|disk| Arc::ptr_eq(disk, &object)) {
            inner.disks.push(Arc::clone(&object));
        }
        let Inner { counts: all, past, .. } = &mut *inner;
        all.retain(|counts| {
            // The resolver has been dropped, so the counts no longer change.
            let is_dropped = Arc::strong_count(counts) == 1;
            if is_dropped {
                ResolverCounts::add(&past.requests, counts.requests.load(Ordering::Relaxed));
                ResolverCounts::add(&past.mismatches, counts.mismatches.load(Ordering::Relaxed));
            }
            !is_dropped
        });
        all.push(Arc::clone(&counts));
        drop(inner);
        Resolver::new(Arc::clone(self), counts, object)
    }
}
