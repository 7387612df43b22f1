//! The guest of one disk: sets the slot that the disk's queues use, as the front end reports
//! changes.

use std::sync::Arc;

use fathom_frontend::vhost_user::GuestObserver;
use fathom_guest_memory::GuestMemory;
use fathom_insight::Names;
use fathom_intercept::Writers;
use fathom_introspect::GuestStatus;
use fathom_layers::GuestSlot;
use parking_lot::Mutex;

use super::{Introspection, User};

/// The guest of one disk, for as long as the disk is served.
pub(crate) struct DiskGuest {
    introspection: Arc<Introspection>,
    disk: Arc<str>,
    slot: Arc<GuestSlot>,
    state: Mutex<State>,
}

struct State {
    /// Whether requests are to be resolved in the guest's memory.
    wanted: bool,
    /// The connection whose rings run, and its memory.
    running: Option<(u64, GuestMemory)>,
    /// The connection whose memory's pages are in the slot: also while its rings do not run.
    connected: Option<u64>,
}

impl DiskGuest {
    /// A disk without a guest yet. `wanted` states whether its guest's memory is to be read.
    pub(crate) fn new(introspection: &Arc<Introspection>, disk: &str, wanted: bool) -> Arc<Self> {
        Arc::new(Self {
            introspection: Arc::clone(introspection),
            disk: disk.into(),
            slot: Arc::default(),
            state: Mutex::new(State { wanted, running: None, connected: None }),
        })
    }

    /// The slot in which the disk's queues find the guest.
    pub(crate) fn slot(&self) -> &Arc<GuestSlot> {
        &self.slot
    }

    /// The texts of the insights.
    pub(crate) fn names(&self) -> &Arc<Names> {
        self.introspection.names()
    }

    /// The most control groups of a disk with separate metrics.
    pub(crate) fn groups_max(&self) -> usize {
        self.introspection.groups_max()
    }

    /// The status of the guest; `None` if no guest runs, or if its memory is not read.
    pub(crate) fn status(&self) -> Option<GuestStatus> {
        self.slot.guest().map(|guest| self.introspection.status(&guest))
    }

    /// The table of the writers of the guest's pages, if it is intercepted.
    pub(crate) fn writers(&self) -> Option<Arc<Writers>> {
        self.slot.guest()?.writers()
    }

    /// Begins or ends reading the guest's memory.
    pub(crate) fn set_wanted(&self, wanted: bool) {
        let mut state = self.state.lock();
        if state.wanted == wanted {
            return;
        }
        state.wanted = wanted;
        if wanted {
            self.update_slot(&state);
        } else {
            self.slot.set(None);
            self.introspection.detach(|user| user.disk == self.disk);
        }
    }

    /// The rings run with this memory.
    fn run_with(&self, session: u64, memory: &GuestMemory) {
        let mut state = self.state.lock();
        state.running = Some((session, memory.clone()));
        state.connected = Some(session);
        self.slot.set_pages(Some(self.introspection.pages.of(memory)));
        self.update_slot(&state);
    }

    fn user(&self, session: u64) -> User {
        User { disk: Arc::clone(&self.disk), session }
    }

    /// Puts the running guest into the slot.
    fn update_slot(&self, state: &State) {
        let guest = match (&state.running, state.wanted) {
            (Some((session, memory)), true) => {
                self.introspection.attach(&self.user(*session), memory)
            }
            _ => None,
        };
        self.slot.set(guest);
    }
}

impl GuestObserver for DiskGuest {
    fn started(&self, session: u64, memory: &GuestMemory) {
        self.run_with(session, memory);
        if let Some(guest) = self.slot.guest() {
            guest.restarted();
        }
    }

    fn moved(&self, session: u64, memory: &GuestMemory) {
        self.run_with(session, memory);
    }

    fn stopped(&self, _session: u64) {
        let mut state = self.state.lock();
        state.running = None;
        // The guest itself, and its pages, are kept for its next start.
        self.slot.set(None);
    }

    fn ended(&self, session: u64) {
        let mut state = self.state.lock();
        if state.connected == Some(session) {
            state.connected = None;
            self.slot.set_pages(None);
        }
        drop(state);
        self.introspection.detach(|user| *user == self.user(session));
    }
}

impl Drop for DiskGuest {
    fn drop(&mut self) {
        self.introspection.detach(|user| user.disk == self.disk);
    }
}
