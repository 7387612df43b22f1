//! One disk's guest: from what the front end tells to the slot that the disk's queues look at.

use std::sync::{Arc, Mutex};

use fathom_frontend::vhost_user::{GuestObserver, Memory};
use fathom_insight::Names;
use fathom_introspect::GuestStatus;
use fathom_layers::GuestSlot;

use super::{Introspection, User, lock};

/// The guest of one disk, for as long as the disk is served.
pub(crate) struct DiskGuest {
    introspection: Arc<Introspection>,
    disk: Arc<str>,
    slot: Arc<GuestSlot>,
    state: Mutex<State>,
}

struct State {
    /// Whether anybody wants to know what requests mean.
    wanted: bool,
    /// The connection whose rings run, and its memory.
    running: Option<(u64, Arc<Memory>)>,
}

impl DiskGuest {
    /// No guest yet for the disk called `disk`; `wanted` says whether there is to be one.
    pub(crate) fn new(introspection: &Arc<Introspection>, disk: &str, wanted: bool) -> Arc<Self> {
        Arc::new(Self {
            introspection: Arc::clone(introspection),
            disk: disk.into(),
            slot: Arc::default(),
            state: Mutex::new(State { wanted, running: None }),
        })
    }

    /// Where the disk's queues find the guest.
    pub(crate) fn slot(&self) -> &Arc<GuestSlot> {
        &self.slot
    }

    /// The texts of what its requests mean.
    pub(crate) fn names(&self) -> &Arc<Names> {
        self.introspection.names()
    }

    /// How many control groups are told apart in metrics.
    pub(crate) fn groups_max(&self) -> usize {
        self.introspection.groups_max()
    }

    /// How the guest stands; `None` where none runs, or nobody wants to know.
    pub(crate) fn status(&self) -> Option<GuestStatus> {
        self.slot.guest().map(|guest| self.introspection.status(&guest))
    }

    /// Begins or ends to look into the guest.
    pub(crate) fn set_wanted(&self, wanted: bool) {
        let mut state = lock(&self.state);
        if state.wanted == wanted {
            return;
        }
        state.wanted = wanted;
        if wanted {
            self.show(&state);
        } else {
            self.slot.set(None);
            self.introspection.detach(|user| user.disk == self.disk);
        }
    }

    fn user(&self, session: u64) -> User {
        User { disk: Arc::clone(&self.disk), session }
    }

    /// Puts the guest that runs into the slot.
    fn show(&self, state: &State) {
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
    fn started(&self, session: u64, memory: &Arc<Memory>) {
        let mut state = lock(&self.state);
        state.running = Some((session, Arc::clone(memory)));
        self.show(&state);
        drop(state);
        if let Some(guest) = self.slot.guest() {
            guest.restarted();
        }
    }

    fn moved(&self, session: u64, memory: &Arc<Memory>) {
        let mut state = lock(&self.state);
        state.running = Some((session, Arc::clone(memory)));
        self.show(&state);
    }

    fn stopped(&self, _session: u64) {
        let mut state = lock(&self.state);
        state.running = None;
        // The guest itself is kept for its next start.
        self.slot.set(None);
    }

    fn ended(&self, session: u64) {
        self.introspection.detach(|user| *user == self.user(session));
    }
}

impl Drop for DiskGuest {
    fn drop(&mut self) {
        self.introspection.detach(|user| user.disk == self.disk);
    }
}
