//! The guests whose memory is read, and the one thread that follows them.
//!
//! A guest is identified by its memory: disks of one virtual machine have separate sockets, but map
//! the same files at the same places, and share one [`Guest`]. The guest is kept as long as a VMM
//! that ran with this memory is connected, so that a reboot does not require a new search.

pub(crate) mod classify;
mod disk;
pub(crate) mod feature;
pub(crate) mod hooks;
mod memory;
pub(crate) mod metrics;
pub(crate) mod select;
pub(crate) mod usage;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::Thread;
use std::time::Instant;

use fathom_guest_memory::GuestMemory;
use fathom_insight::Names;
use fathom_intercept::{MemoryFile, Writers};
use fathom_introspect::{Guest, GuestState, GuestStatus, Kernel};
use parking_lot::Mutex;

pub(crate) use disk::DiskGuest;

use memory::{Identity, PagesOfGuests, identity, is_changed};

/// A user of a guest: a connection of a disk's VMM.
#[derive(Clone, Debug, PartialEq, Eq)]
struct User {
    disk: Arc<str>,
    session: u64,
}

/// All guests of the daemon.
pub(crate) struct Introspection {
    names: Arc<Names>,
    pages: PagesOfGuests,
    groups_max: usize,
    shared: Arc<Shared>,
}

/// The state that the thread shares with other threads.
#[derive(Default)]
struct Shared {
    guests: Mutex<Vec<Arc<Followed>>>,
    /// The thread, once there has been a guest.
    thread: OnceLock<Thread>,
    ending: AtomicBool,
    /// Called by the thread when a guest's kernel has been found.
    attached: OnceLock<Box<dyn Fn() + Send + Sync>>,
    /// Called by the thread when a guest's kernel has been found or lost.
    changed: Mutex<Vec<Box<dyn Fn() + Send + Sync>>>,
    /// The number of guests so far.
    count: AtomicU64,
}

/// A guest, and its pending work.
struct Followed {
    number: u64,
    identity: Identity,
    guest: Arc<Guest>,
    /// Whether the guest has work to do.
    due: Arc<AtomicBool>,
    /// When the guest has work to do even without a wake-up.
    again: Mutex<Option<Instant>>,
    /// Whether a step panicked because of a bug. The guest is not followed any more.
    failed: AtomicBool,
    users: Mutex<Vec<User>>,
    /// The state that was logged last, and the number of kernels then.
    logged: Mutex<(GuestState, u64)>,
}

/// The state of a guest for reports.
pub(crate) struct GuestView {
    /// The number of the guest, in order of appearance.
    pub number: u64,
    /// The disks to which its VMM is connected.
    pub disks: Vec<String>,
    /// The guest's status.
    pub status: GuestStatus,
    /// The size of its memory, in bytes.
    pub memory_bytes: u64,
    /// Its memory.
    pub memory: GuestMemory,
    /// Its kernel, if known.
    pub kernel: Option<Arc<Kernel>>,
    /// The table of the writers of its pages, if it is intercepted.
    pub writers: Option<Arc<Writers>>,
}

impl Introspection {
    /// No guests and no thread yet. Metrics distinguish up to `groups_max` control groups of a
    /// disk.
    pub(crate) fn new(groups_max: usize) -> Arc<Self> {
        Arc::new(Self {
            names: Arc::default(),
            pages: PagesOfGuests::default(),
            groups_max,
            shared: Arc::default(),
        })
    }

    /// Sets the function that is called when a guest's kernel has been found. Only the first call
    /// has an effect.
    pub(crate) fn on_attached(&self, call: impl Fn() + Send + Sync + 'static) {
        let _ = self.shared.attached.set(Box::new(call));
    }

    /// Adds a function that is called when a guest's kernel has been found or lost. It must not
    /// block.
    pub(crate) fn on_change(&self, call: impl Fn() + Send + Sync + 'static) {
        self.shared.changed.lock().push(Box::new(call));
    }

    /// The guest with memory in one of these files.
    pub(crate) fn guest_in(&self, files: &[MemoryFile]) -> Option<Arc<Guest>> {
        let guests = self.shared.guests.lock().clone();
        guests.iter().rev().find_map(|followed| {
            let has_it = followed.identity.iter().any(|region| files.contains(&region.file()));
            has_it.then(|| Arc::clone(&followed.guest))
        })
    }

    /// The most control groups of a disk with separate metrics.
    fn groups_max(&self) -> usize {
        self.groups_max
    }

    /// The table of texts. All guests share it, because requests of all disks are logged alike.
    pub(crate) fn names(&self) -> &Arc<Names> {
        &self.names
    }

    /// The guest with this memory. `user` now uses this guest instead of its earlier one.
    fn attach(&self, user: &User, memory: &GuestMemory) -> Option<Arc<Guest>> {
        if !self.has_thread() {
            return None;
        }
        let identity = identity(memory);
        let mut guests = self.shared.guests.lock();
        let found = guests.iter().find(|followed| followed.identity == identity).cloned();
        let followed = found.unwrap_or_else(|| {
            let followed = self.follow(identity, memory);
            // Memory was added or removed: the guest's kernel continues.
            let before = guests.iter().find(|before| before.users.lock().contains(user));
            if let Some(before) = before {
                if is_changed(&before.identity, &followed.identity) {
                    followed.guest.inherit_kernel(&before.guest);
                }
            }
            guests.push(Arc::clone(&followed));
            followed
        });
        let guest = Arc::clone(&followed.guest);
        {
            let mut users = followed.users.lock();
            if !users.contains(user) {
                users.push(user.clone());
            }
        }
        let released =
            release(&mut guests, |other, used| other == user && !Arc::ptr_eq(&used.guest, &guest));
        drop(guests);
        // Outside the lock, because dropping the last holder unmaps the guest's memory.
        drop(released);
        Some(guest)
    }

    /// Removes the users for which `leaves` holds.
    fn detach(&self, leaves: impl Fn(&User) -> bool) {
        let released = release(&mut self.shared.guests.lock(), |user, _| leaves(user));
        drop(released);
    }

    /// Begins to follow a new guest.
    fn follow(&self, identity: Identity, memory: &GuestMemory) -> Arc<Followed> {
        let due = Arc::new(AtomicBool::new(true));
        let (marked, shared) = (Arc::clone(&due), Arc::downgrade(&self.shared));
        let wake = move || {
            // Called by queues' threads: takes no lock, and makes a system call only if the thread
            // may sleep.
            if !marked.swap(true, Ordering::AcqRel) {
                if let Some(thread) = shared.upgrade().as_ref().and_then(|all| all.thread.get()) {
                    thread.unpark();
                }
            }
        };
        // With files of its own: a search does not move the positions of the VMM's descriptors.
        let memory = memory.reopened();
        let guest = Guest::new(&memory, Arc::clone(&self.names), Box::new(wake));
        if let Some(thread) = self.shared.thread.get() {
            thread.unpark();
        }
        Arc::new(Followed {
            number: self.shared.count.fetch_add(1, Ordering::Relaxed) + 1,
            identity,
            guest,
            due,
            again: Mutex::default(),
            failed: AtomicBool::new(false),
            users: Mutex::default(),
            logged: Mutex::default(),
        })
    }

    /// Whether the thread runs; starts it if it did not.
    fn has_thread(&self) -> bool {
        if self.shared.thread.get().is_some() {
            return true;
        }
        let _alone = self.shared.guests.lock();
        if self.shared.thread.get().is_some() {
            return true;
        }
        let shared = Arc::clone(&self.shared);
        let begun =
            std::thread::Builder::new().name("introspection".into()).spawn(move || shared.run());
        match begun {
            Ok(handle) => self.shared.thread.set(handle.thread().clone()).is_ok(),
            Err(error) => {
                tracing::error!(%error, "guests are not introspected: the thread cannot be started");
                false
            }
        }
    }

    /// The state of all guests.
    pub(crate) fn guests(&self) -> Vec<GuestView> {
        let guests = self.shared.guests.lock().clone();
        guests.iter().map(|followed| followed.view()).collect()
    }

    /// The disks to which a guest's VMM is connected.
    pub(crate) fn disks_of(&self, guest: &Arc<Guest>) -> Vec<String> {
        let guests = self.shared.guests.lock().clone();
        let followed = guests.iter().find(|followed| Arc::ptr_eq(&followed.guest, guest));
        followed.map_or_else(Vec::new, |followed| followed.view().disks)
    }

    /// The status of a guest.
    pub(crate) fn status(&self, guest: &Arc<Guest>) -> GuestStatus {
        let guests = self.shared.guests.lock().clone();
        let followed = guests.iter().find(|followed| Arc::ptr_eq(&followed.guest, guest));
        followed.map_or_else(|| guest.status(), |followed| followed.status())
    }
}

impl Drop for Introspection {
    fn drop(&mut self) {
        self.shared.ending.store(true, Ordering::Release);
        if let Some(thread) = self.shared.thread.get() {
            thread.unpark();
        }
    }
}

/// Removes the users for which `leaves` holds. Returns the guests that have no users then.
fn release(
    guests: &mut Vec<Arc<Followed>>,
    leaves: impl Fn(&User, &Followed) -> bool,
) -> Vec<Arc<Followed>> {
    let (kept, released) = std::mem::take(guests).into_iter().partition(|followed| {
        let mut users = followed.users.lock();
        users.retain(|user| !leaves(user, followed));
        !users.is_empty()
    });
    *guests = kept;
    released
}

impl Followed {
    fn status(&self) -> GuestStatus {
        let mut status = self.guest.status();
        if self.failed.load(Ordering::Relaxed) {
            let reason = "it failed because of a bug in the daemon: see its log".to_owned();
            status.state = GuestState::Blind { reason };
        }
        status
    }

    fn view(&self) -> GuestView {
        let mut disks: Vec<String> =
            self.users.lock().iter().map(|user| user.disk.to_string()).collect();
        disks.sort_unstable();
        disks.dedup();
        GuestView {
            number: self.number,
            disks,
            status: self.status(),
            memory_bytes: self.guest.memory().length(),
            memory: self.guest.memory().clone(),
            kernel: self.guest.kernel(),
            writers: self.guest.writers(),
        }
    }

    /// Does the pending work. Adds what has become of its state to `news`. Returns the time of the
    /// next step.
    fn step(&self, news: &mut News) -> Option<Instant> {
        let mut again = self.again.lock();
        let late = again.is_some_and(|again| again <= Instant::now());
        if self.due.swap(false, Ordering::AcqRel) || late {
            // A panic while one guest's memory is read must not affect the other guests.
            let step = catch_unwind(AssertUnwindSafe(|| self.guest.step()));
            let failed = step.is_err();
            *again = step.ok().flatten().map(|wait| Instant::now() + wait);
            if failed {
                self.failed.store(true, Ordering::Relaxed);
            }
            self.log_change(news);
        }
        *again
    }

    /// Logs the state of the guest if it has changed.
    fn log_change(&self, news: &mut News) {
        let status = self.status();
        let mut logged = self.logged.lock();
        if (&logged.0, logged.1) == (&status.state, status.kernels) {
            return;
        }
        *logged = (status.state.clone(), status.kernels);
        let disk = self.users.lock().first().map(|user| user.disk.to_string()).unwrap_or_default();
        let disk = disk.as_str();
        match &status.state {
            GuestState::Waiting => {}
            GuestState::Searching { reason } => {
                tracing::debug!(disk, "no kernel has been found in the guest yet: {reason}");
            }
            GuestState::Attached => tracing::info!(
                disk,
                "the guest's kernel was found: {} (in {} ms)",
                status.release,
                status.search_ns / 1_000_000
            ),
            GuestState::Blind { reason } => {
                tracing::warn!(disk, "the guest's requests are not understood: {reason}");
            }
        }
        news.has_changed = true;
        news.has_attached |= status.state == GuestState::Attached;
    }
}

/// What has become of guests' states.
#[derive(Default)]
struct News {
    /// Whether a kernel has been found.
    has_attached: bool,
    /// Whether a kernel has been found or lost.
    has_changed: bool,
}

impl Shared {
    /// The thread: does the pending work of all guests, then sleeps until there is more.
    fn run(&self) {
        while !self.ending.load(Ordering::Acquire) {
            let guests = self.guests.lock().clone();
            let sound = guests.iter().filter(|guest| !guest.failed.load(Ordering::Relaxed));
            let mut news = News::default();
            let next = sound.filter_map(|guest| guest.step(&mut news)).min();
            if let Some(call) = self.attached.get().filter(|_| news.has_attached) {
                call();
            }
            if news.has_changed {
                self.changed.lock().iter().for_each(|call| call());
            }
            // The thread must not keep guests alive while it sleeps.
            drop(guests);
            match next {
                Some(next) => {
                    std::thread::park_timeout(next.saturating_duration_since(Instant::now()));
                }
                None => std::thread::park(),
            }
        }
    }
}

#[cfg(test)]
mod tests;
