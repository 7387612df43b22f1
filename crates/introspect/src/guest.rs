//! A guest that is followed: its memory, its kernel once it was found, and how it stands.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fathom_insight::Names;

use crate::kernel::{AttachError, Kernel};
use crate::memory::GuestMemory;
use crate::resolver::Resolver;

/// How far introspection of a guest has come.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum GuestState {
    /// No request has come yet, so nobody has looked.
    #[default]
    Waiting,
    /// A kernel is being looked for: `reason` says why there is none yet.
    Searching {
        /// What was missing when it was last tried.
        reason: String,
    },
    /// A Linux kernel was found and its requests are understood.
    Attached,
    /// The guest's requests cannot be understood; the disk goes on without insight.
    Blind {
        /// Why, in words for an operator.
        reason: String,
    },
}

/// How a guest stands.
#[derive(Clone, Debug, Default)]
pub struct GuestStatus {
    /// How far it has come.
    pub state: GuestState,
    /// The kernel's release, `6.1.0-48-cloud-amd64`; empty where none was found.
    pub release: String,
    /// How long the last search took, in nanoseconds.
    pub search_ns: u64,
    /// Kernels found since the guest was connected: a reboot or a kexec brings another.
    pub kernels: u64,
    /// Requests that were looked at.
    pub requests: u64,
    /// Requests of those that did not lie in the kernel's structures as they should.
    pub mismatches: u64,
    /// Kernel modules that were read.
    pub modules: usize,
}

/// Something that [`Guest::step`] should look at: a request came and there is no kernel.
pub(crate) const NEWS_WANTED: u8 = 1;
/// Requests do not lie where the kernel's should.
pub(crate) const NEWS_SUSPECT: u8 = 2;
/// A function was met that no known module has.
pub(crate) const NEWS_MODULES: u8 = 4;
/// The device was set up anew.
const NEWS_RESTARTED: u8 = 8;

/// The least time between two searches.
const PAUSE_MIN: Duration = Duration::from_millis(50);
/// The longest time that a request has to wait for a search to begin.
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// The same where a search found something that it could not use.
const PAUSE_BLIND: Duration = Duration::from_secs(10);
/// How long a search goes on before others have their turn; it is continued where it ended.
const SEARCH_PART_MAX: Duration = Duration::from_millis(500);
/// How often doubts about one kernel may be groundless before it is given up.
const DOUBTS_MAX: u32 = 8;

/// One guest, shared by the queues of all its disks and the thread that follows it.
pub struct Guest {
    memory: GuestMemory,
    names: Arc<Names>,
    wake: Box<dyn Fn() + Send + Sync>,
    /// Changes with each kernel that is found or lost: resolvers look at this alone.
    generation: AtomicU64,
    /// `NEWS_…` that `step` has not seen yet.
    news: AtomicU8,
    /// The header of a late request: it tells the kernel that runs from what another left behind.
    header: AtomicU64,
    inner: Mutex<Inner>,
}

/// What one resolver counts. Only its own thread writes here.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    requests: AtomicU64,
    mismatches: AtomicU64,
}

impl Counts {
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
    /// Those of the resolvers that there are.
    counts: Vec<Arc<Counts>>,
    /// The sum of those that are gone.
    past: Counts,
    kernel: Option<Arc<Kernel>>,
    status: GuestStatus,
    last_search: Option<Instant>,
    pause: Duration,
    doubts: u32,
    /// The guest-physical address at which the next search goes on, and the best of the reasons
    /// why there was no kernel before it.
    rest: Option<(u64, AttachError)>,
}

impl Guest {
    /// A guest of this memory. `wake` is called, from any thread, when [`step`](Self::step) has
    /// something to do; it must not block.
    pub fn new(
        memory: GuestMemory,
        names: Arc<Names>,
        wake: Box<dyn Fn() + Send + Sync>,
    ) -> Arc<Self> {
        Arc::new(Self {
            memory,
            names,
            wake,
            generation: AtomicU64::new(1),
            news: AtomicU8::new(0),
            header: AtomicU64::new(0),
            inner: Mutex::default(),
        })
    }

    /// Takes over the kernel of `before`, if there is one: the same guest, whose memory is another
    /// now because some was plugged in, or out. For a guest that nobody has asked anything yet.
    /// Does not search; what is not as it was is looked for as usual.
    pub fn succeed(&self, before: &Self) {
        if let Some(kernel) = before.kernel().and_then(|kernel| kernel.in_memory(&self.memory)) {
            self.set(Some(kernel), GuestState::Attached);
        }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How it stands.
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

    /// Its memory.
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// Its kernel, where one is attached.
    pub fn kernel(&self) -> Option<Arc<Kernel>> {
        self.inner().kernel.clone()
    }

    /// The table of the texts that its insights name.
    pub fn names(&self) -> &Arc<Names> {
        &self.names
    }

    /// The guest's device was set up anew (rings started): it may have rebooted. Cheap; may wake.
    pub fn restarted(&self) {
        self.news(NEWS_RESTARTED, 0);
    }

    /// Tells `step` something. Wakes its thread if that does not know it yet.
    pub(crate) fn news(&self, news: u8, header: u64) {
        if header != 0 {
            self.header.store(header, Ordering::Relaxed);
        }
        // A look first: while a search waits for its time, every request comes by here.
        if self.news.load(Ordering::Relaxed) & news == 0
            && self.news.fetch_or(news, Ordering::Release) & news == 0
        {
            (self.wake)();
        }
    }

    /// Changes whenever the kernel does.
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Does what there is to do: looks for a kernel, checks the one that is attached, reads
    /// modules that were loaded late. Called by one thread at a time, not a queue's: it can take
    /// a second. Returns when to call again even if nobody wakes; `None` for never.
    pub fn step(&self) -> Option<Duration> {
        let news = self.news.swap(0, Ordering::Acquire);
        if news == 0 {
            return None;
        }
        let header = Some(self.header.load(Ordering::Relaxed)).filter(|header| *header != 0);
        let kernel = self.kernel();
        let Some(kernel) = kernel else {
            if news & NEWS_RESTARTED != 0 {
                // Another system drives the device than the firmware that was searched in vain.
                let mut inner = self.inner();
                let took = Duration::from_nanos(inner.status.search_ns);
                inner.pause = inner.pause.min(PAUSE_MIN.max(took * 3));
            }
            // What only says that the device was set up comes before the first request.
            return if news & NEWS_WANTED != 0 { self.search(header) } else { None };
        };
        let suspect = news & NEWS_SUSPECT != 0;
        if news & NEWS_RESTARTED != 0 && !kernel.is_there()
            || suspect && header.is_some_and(|header| !kernel.owns_request(header))
        {
            self.set(None, GuestState::Searching { reason: "the guest has booted anew".into() });
            // Now, unless a search has just been.
            return self.search(header);
        }
        if suspect {
            let mut inner = self.inner();
            inner.doubts += 1;
            if inner.doubts >= DOUBTS_MAX {
                drop(inner);
                let reason = "its requests do not lie in its kernel's structures: it copies its \
                              I/O (swiotlb, encrypted memory)";
                self.set(None, GuestState::Blind { reason: reason.into() });
                self.inner().pause = PAUSE_BLIND;
                return None;
            }
        }
        if news & (NEWS_MODULES | NEWS_RESTARTED) != 0 {
            return self.modules(&kernel);
        }
        None
    }

    /// Reads the kernel's modules again where they have changed, if it is time for that.
    fn modules(&self, kernel: &Kernel) -> Option<Duration> {
        if let Some(left) = self.left() {
            self.news.fetch_or(NEWS_MODULES, Ordering::Relaxed);
            return Some(left);
        }
        let start = Instant::now();
        if kernel.modules_changed() {
            match kernel.again() {
                Ok(kernel) => self.set(Some(kernel), GuestState::Attached),
                Err(error) => {
                    let reason = error.to_string();
                    self.set(None, GuestState::Searching { reason });
                }
            }
        }
        self.rest(start.elapsed(), PAUSE_MIN);
        None
    }

    /// How long it is until the memory may be searched again.
    fn left(&self) -> Option<Duration> {
        let inner = self.inner();
        let left = inner.pause.checked_sub(inner.last_search?.elapsed())?;
        (!left.is_zero()).then_some(left)
    }

    /// The memory has been searched, which took so long, and is not to be searched again for a
    /// while: searches take a quarter of a processor at most, whatever the guest does.
    fn rest(&self, took: Duration, pause: Duration) {
        let mut inner = self.inner();
        inner.last_search = Some(Instant::now());
        inner.pause = (took * 3).max(pause.clamp(PAUSE_MIN, PAUSE_MAX));
    }

    /// Looks for a kernel, if its time has come.
    fn search(&self, header: Option<u64>) -> Option<Duration> {
        if let Some(left) = self.left() {
            // Kept, so that a request that comes meanwhile wakes nobody.
            self.news.fetch_or(NEWS_WANTED, Ordering::Relaxed);
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
                Some((_, before)) if !error.says_more_than(&before) => before,
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
        // The longer it goes on in vain, the rarer.
        self.rest(took, if found.is_ok() || is_part { PAUSE_MIN } else { pause * 2 });
        if is_part {
            // The rest of the memory is searched although no further request may come.
            self.set(None, GuestState::Searching { reason: "its memory is being searched".into() });
            self.inner().status.search_ns = took.as_nanos() as u64;
            self.news.fetch_or(NEWS_WANTED, Ordering::Relaxed);
            return self.left();
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
        inner.status.state = state;
        inner.kernel = kernel.map(Arc::new);
        drop(inner);
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// A resolver of requests for one queue's thread.
    pub fn resolver(self: &Arc<Self>) -> Resolver {
        let counts = Arc::new(Counts::default());
        let mut inner = self.inner();
        let Inner { counts: all, past, .. } = &mut *inner;
        all.retain(|counts| {
            // Its resolver is gone, so nobody writes there any more.
            let gone = Arc::strong_count(counts) == 1;
            if gone {
                Counts::add(&past.requests, counts.requests.load(Ordering::Relaxed));
                Counts::add(&past.mismatches, counts.mismatches.load(Ordering::Relaxed));
            }
            !gone
        });
        all.push(Arc::clone(&counts));
        drop(inner);
        Resolver::new(Arc::clone(self), counts)
    }
}
