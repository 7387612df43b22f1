//! Gives guests back what flushes have changed: their memory and their tunables.
//!
//! A flush does this itself at its end. What it could not give back, or what an earlier daemon has
//! left, is tried again: the memory, and file systems that are frozen, by a few threads for all
//! guests, until QEMU or the agent accepts it; the tunables whenever the guest's kernel has been
//! found, and at the beginning and the end of each flush.

use std::sync::Arc;

use fathom_control::FlushWay;
use fathom_frontend::vhost_user;
use fathom_introspect::Kernel;

use super::record::Kind;
use super::restorers::Restoration;
use crate::daemon::{Daemon, Served};
use crate::features::flush::Flusher;
use crate::features::guests::usage::vm_of;
use crate::features::guests::{GuestView, Introspection};

impl Daemon {
    /// Gives guests their memory again that an earlier daemon has taken by the balloon, and thaws
    /// those that it has frozen.
    pub(crate) fn begin_restorations(self: &Arc<Self>) {
        for vm in self.part::<Flusher>().balloons() {
            self.begin_balloon_restoration(&vm);
        }
        for vm in self.part::<Flusher>().frozen() {
            self.begin_thaw(&vm);
        }
    }

    /// Has the guest of `vm` be given its memory again, if it is not given back.
    pub(crate) fn begin_balloon_restoration(self: &Arc<Self>, vm: &str) {
        self.begin_restoration(Kind::Balloon, vm);
    }

    /// Has the guest of `vm` be thawed, if it may be frozen.
    pub(crate) fn begin_thaw(self: &Arc<Self>, vm: &str) {
        self.begin_restoration(Kind::Frozen, vm);
    }

    /// Has something be given back to the guest of `vm`. It is tried until QEMU or the agent
    /// accepts it: the guest may have ended, or start again later. A few threads try all such
    /// guests in turn.
    fn begin_restoration(self: &Arc<Self>, kind: Kind, vm: &str) {
        if !self.part::<Flusher>().begin_restorer(kind, vm) {
            return;
        }
        let daemon = Arc::downgrade(self);
        let body = move || {
            loop {
                let Some(daemon) = daemon.upgrade().filter(|daemon| !daemon.is_stopping()) else {
                    return;
                };
                let flusher = daemon.part::<Flusher>();
                match flusher.next_restoration(kind) {
                    Restoration::Try(vm) => {
                        if kind == Kind::Frozen {
                            if flusher.thaw_again(&vm) {
                                tracing::info!(vm, "the guest's file systems are thawed");
                                daemon.problem_waker()();
                            }
                        } else if flusher.restore_balloon(&vm) {
                            tracing::info!(vm, "the guest has its own memory again");
                        }
                        flusher.end_restoration(kind, &vm);
                    }
                    Restoration::Wait(time) => {
                        drop(daemon);
                        std::thread::sleep(time);
                    }
                    Restoration::End => return,
                }
            }
        };
        let name = if kind == Kind::Frozen { "thaw" } else { "balloon" };
        if let Err(error) = std::thread::Builder::new().name(name.into()).spawn(body) {
            tracing::error!(
                vm, %error, "the guest gets nothing back: the thread {name} cannot be started"
            );
            self.part::<Flusher>().forget_restorer(kind);
        }
    }

    /// Puts back the tunables that an earlier daemon has replaced. Called when a guest's kernel has
    /// been found.
    pub(crate) fn restore_all_tunables(&self) {
        for vm in self.part::<Flusher>().tunables() {
            self.restore_tunables_of(&vm);
        }
    }

    /// Puts the tunables of the guest of `vm` back, unless it is being flushed: the flush does this
    /// at its beginning, and again at its end.
    pub(crate) fn restore_tunables_of(&self, vm: &str) {
        if !self.part::<Flusher>().has_tunables(vm) {
            return;
        }
        let Ok(_active) = self.part::<Flusher>().begin(vm, FlushWay::Tunables) else { return };
        if self.put_tunables_back(vm) {
            tracing::info!(vm, "the guest has its own vm.dirty_expire_centisecs again");
        }
    }

    /// Puts the tunables of the guest of `vm` back, if they are replaced, through the kernel that
    /// it has now: it may have booted another one since. Without a kernel the record of them stays.
    /// The caller has marked the guest. Returns whether the guest's value was written.
    pub(crate) fn put_tunables_back(&self, vm: &str) -> bool {
        let kernel = self.part::<Flusher>().has_tunables(vm).then(|| self.kernel_of(vm)).flatten();
        let Some(kernel) = kernel.filter(|kernel| self.part::<Flusher>().restore(vm, kernel))
        else {
            return false;
        };
        // If a migration has begun, the value has to reach the destination.
        if let Some(place) = kernel.dirty_expire_place() {
            for served in self.served_of(vm) {
                served.live().server.iter().for_each(|it| it.mark_written(place, 4));
            }
        }
        true
    }

    /// Whether the guest of `vm` is being migrated. What is changed in it then may be changed at
    /// the destination for ever.
    pub(crate) fn is_migrating(&self, vm: &str) -> bool {
        let is_logging = |served: &Arc<Served>| {
            served.live().server.as_ref().is_some_and(vhost_user::Server::is_logging)
        };
        self.served_of(vm).iter().any(is_logging)
    }

    /// The kernels of all guests with their virtual machines, in order of appearance.
    fn kernels(&self) -> Vec<(String, Arc<Kernel>)> {
        let served = self.served();
        let guests = self.part::<Arc<Introspection>>().guests().into_iter();
        let kernel_of = |guest: GuestView| {
            let vm = vm_of(&served, &guest.disks).to_owned();
            Some((vm, guest.kernel?))
        };
        guests.filter_map(kernel_of).collect()
    }

    /// The kernel that the guest of `vm` has now.
    pub(crate) fn kernel_of(&self, vm: &str) -> Option<Arc<Kernel>> {
        self.kernels().into_iter().rev().find(|(other, _)| other == vm).map(|(_, kernel)| kernel)
    }
}

/// The lowered tunable of the guest of a virtual machine. Dropping it puts the guest's value back.
pub(crate) struct Lowered<'a> {
    pub(crate) daemon: &'a Daemon,
    pub(crate) vm: &'a str,
}

impl Drop for Lowered<'_> {
    fn drop(&mut self) {
        self.daemon.put_tunables_back(self.vm);
    }
}
