//! The guests whose memory is read, and the one thread that follows them.
//!
//! A guest is its memory: disks of one virtual machine come over sockets of their own, but with
//! the same files mapped at the same places, and share one [`Guest`]. It is kept as long as a VMM
//! is connected that ran with this memory, so that it is not looked at anew at each reboot.

mod disk;
mod memory;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::Thread;
use std::time::Instant;

use fathom_frontend::vhost_user::Memory;
use fathom_insight::Names;
use fathom_introspect::{Guest, GuestState, GuestStatus, Kernel};

pub(crate) use disk::DiskGuest;

use memory::{Identity, identity, is_changed, to_guest_memory};

/// Whoever uses a guest: a connection of a disk's VMM.
#[derive(Clone, Debug, PartialEq, Eq)]
struct User {
    disk: Arc<str>,
    session: u64,
}

/// All guests of the daemon.
pub(crate) struct Introspection {
    names: Arc<Names>,
    groups_max: usize,
    shared: Arc<Shared>,
}

/// What the thread and everybody else share.
#[derive(Default)]
struct Shared {
    guests: Mutex<Vec<Arc<Followed>>>,
    /// The thread, once there has been a guest.
    thread: OnceLock<Thread>,
    ending: AtomicBool,
    /// Guests that there have been.
    count: AtomicU64,
}

/// One guest, and what is due.
struct Followed {
    number: u64,
    identity: Identity,
    guest: Arc<Guest>,
    /// Whether the guest has something to do.
    due: Arc<AtomicBool>,
    /// When it has something to do even if nobody says so.
    again: Mutex<Option<Instant>>,
    /// A step of it failed by a bug: it is left alone.
    failed: AtomicBool,
    users: Mutex<Vec<User>>,
    /// The state that was logged last, and of which kernel.
    told: Mutex<(GuestState, u64)>,
}

/// A guest as others see it.
pub(crate) struct GuestView {
    /// Counts guests up.
    pub number: u64,
    /// The disks that its VMM is connected to.
    pub disks: Vec<String>,
    /// How it stands.
    pub status: GuestStatus,
    /// How much memory it has, in bytes.
    pub memory_bytes: u64,
    /// Its kernel, where that is known.
    pub kernel: Option<Arc<Kernel>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Introspection {
    /// No guests yet, and no thread. Metrics are to tell `groups_max` control groups of a disk
    /// apart.
    pub(crate) fn new(groups_max: usize) -> Arc<Self> {
        Arc::new(Self { names: Arc::default(), groups_max, shared: Arc::default() })
    }

    /// How many control groups of a disk are told apart in metrics.
    fn groups_max(&self) -> usize {
        self.groups_max
    }

    /// The one table of texts: of all guests, because requests of all disks are logged alike.
    pub(crate) fn names(&self) -> &Arc<Names> {
        &self.names
    }

    /// The guest of this memory, which `user` uses from now on in place of what it used before.
    fn attach(&self, user: &User, memory: &Arc<Memory>) -> Option<Arc<Guest>> {
        if !self.has_thread() {
            return None;
        }
        let identity = identity(memory);
        let mut guests = lock(&self.shared.guests);
        let found = guests.iter().find(|followed| followed.identity == identity).cloned();
        let followed = found.unwrap_or_else(|| {
            let followed = self.follow(identity, memory);
            // Memory was plugged in or out: the guest's kernel goes on.
            let before = guests.iter().find(|before| lock(&before.users).contains(user));
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
            let mut users = lock(&followed.users);
            if !users.contains(user) {
                users.push(user.clone());
            }
        }
        let gone =
            release(&mut guests, |other, used| other == user && !Arc::ptr_eq(&used.guest, &guest));
        drop(guests);
        // Outside the lock: with the last holder its mappings go.
        drop(gone);
        Some(guest)
    }

    /// Ends what the users for whom `leaves` holds use.
    fn detach(&self, leaves: impl Fn(&User) -> bool) {
        let gone = release(&mut lock(&self.shared.guests), |user, _| leaves(user));
        drop(gone);
    }

    /// A guest that nobody has seen before.
    fn follow(&self, identity: Identity, memory: &Arc<Memory>) -> Arc<Followed> {
        let due = Arc::new(AtomicBool::new(true));
        let (marked, shared) = (Arc::clone(&due), Arc::downgrade(&self.shared));
        let wake = move || {
            // From queues' threads: no lock, and a system call only where the thread sleeps.
            if !marked.swap(true, Ordering::AcqRel) {
                if let Some(thread) = shared.upgrade().as_ref().and_then(|all| all.thread.get()) {
                    thread.unpark();
                }
            }
        };
        let guest = Guest::new(to_guest_memory(memory), Arc::clone(&self.names), Box::new(wake));
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
            told: Mutex::default(),
        })
    }

    /// Whether the thread is there; begins it where it was not needed before.
    fn has_thread(&self) -> bool {
        if self.shared.thread.get().is_some() {
            return true;
        }
        let _alone = lock(&self.shared.guests);
        if self.shared.thread.get().is_some() {
            return true;
        }
        let shared = Arc::clone(&self.shared);
        let begun =
            std::thread::Builder::new().name("introspection".into()).spawn(move || shared.run());
        match begun {
            Ok(handle) => self.shared.thread.set(handle.thread().clone()).is_ok(),
            Err(error) => {
                tracing::error!(%error, "guests are not looked into: there is no thread for it");
                false
            }
        }
    }

    /// All guests.
    pub(crate) fn guests(&self) -> Vec<GuestView> {
        let guests = lock(&self.shared.guests).clone();
        guests.iter().map(|followed| followed.view()).collect()
    }

    /// How a guest stands.
    pub(crate) fn status(&self, guest: &Arc<Guest>) -> GuestStatus {
        let guests = lock(&self.shared.guests).clone();
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

/// Takes the users out for whom `leaves` holds, and the guests that nobody uses then.
fn release(
    guests: &mut Vec<Arc<Followed>>,
    leaves: impl Fn(&User, &Followed) -> bool,
) -> Vec<Arc<Followed>> {
    let (kept, gone) = std::mem::take(guests).into_iter().partition(|followed| {
        let mut users = lock(&followed.users);
        users.retain(|user| !leaves(user, followed));
        !users.is_empty()
    });
    *guests = kept;
    gone
}

impl Followed {
    fn status(&self) -> GuestStatus {
        let mut status = self.guest.status();
        if self.failed.load(Ordering::Relaxed) {
            let reason = "it failed by a bug of the daemon's: see its log".to_owned();
            status.state = GuestState::Blind { reason };
        }
        status
    }

    fn view(&self) -> GuestView {
        let mut disks: Vec<String> =
            lock(&self.users).iter().map(|user| user.disk.to_string()).collect();
        disks.sort_unstable();
        disks.dedup();
        GuestView {
            number: self.number,
            disks,
            status: self.status(),
            memory_bytes: self.guest.memory().length(),
            kernel: self.guest.kernel(),
        }
    }

    /// Does what is due. Says when to look again.
    fn step(&self) -> Option<Instant> {
        let mut again = lock(&self.again);
        let late = again.is_some_and(|again| again <= Instant::now());
        if self.due.swap(false, Ordering::AcqRel) || late {
            // Whatever a guest's memory does to the reader, the other guests are followed on.
            let step = catch_unwind(AssertUnwindSafe(|| self.guest.step()));
            let failed = step.is_err();
            *again = step.ok().flatten().map(|wait| Instant::now() + wait);
            if failed {
                self.failed.store(true, Ordering::Relaxed);
            }
            self.tell();
        }
        *again
    }

    /// Logs how the guest stands, where that has changed.
    fn tell(&self) {
        let status = self.status();
        let mut told = lock(&self.told);
        if (&told.0, told.1) == (&status.state, status.kernels) {
            return;
        }
        *told = (status.state.clone(), status.kernels);
        let disk = lock(&self.users).first().map(|user| user.disk.to_string()).unwrap_or_default();
        let disk = disk.as_str();
        match &status.state {
            GuestState::Waiting => {}
            GuestState::Searching { reason } => {
                tracing::debug!(disk, "no kernel is found in the guest yet: {reason}");
            }
            GuestState::Attached => tracing::info!(
                disk,
                "the guest's kernel is found: {} (in {} ms)",
                status.release,
                status.search_ns / 1_000_000
            ),
            GuestState::Blind { reason } => {
                tracing::warn!(disk, "the guest's requests are not understood: {reason}");
            }
        }
    }
}

impl Shared {
    /// The thread: steps what is due, then sleeps until something is.
    fn run(&self) {
        while !self.ending.load(Ordering::Acquire) {
            let guests = lock(&self.guests).clone();
            let sound = guests.iter().filter(|guest| !guest.failed.load(Ordering::Relaxed));
            let next = sound.filter_map(|guest| guest.step()).min();
            // Asleep, the thread holds no guest.
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
