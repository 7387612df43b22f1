//! The guests that a request names.

use std::sync::Arc;

use fathom_control::{ErrorBody, ErrorCode};

use super::usage::vm_of;
use super::{GuestView, Introspection};
use crate::daemon::stack::refusal;
use crate::daemon::{Daemon, Served};

/// A guest, with the name of its machine and its disks.
pub(crate) struct SelectedGuest {
    pub view: GuestView,
    pub vm: String,
    pub disks: Vec<Arc<Served>>,
}

impl Daemon {
    /// All guests, or those with a name, a number or a disk `selected`.
    ///
    /// # Errors
    /// When there is no such guest.
    pub(crate) fn selected_guests(
        &self,
        selected: Option<&str>,
    ) -> Result<Vec<SelectedGuest>, ErrorBody> {
        let served = self.served();
        let guests = self.part::<Arc<Introspection>>().guests().into_iter().filter_map(|view| {
            let disks: Vec<Arc<Served>> = view
                .disks
                .iter()
                .filter_map(|name| served.iter().find(|served| served.disk.name() == name))
                .cloned()
                .collect();
            let vm = vm_of(&served, &view.disks).to_owned();
            let is_selected = selected.is_none_or(|name| {
                vm == name
                    || view.disks.iter().any(|disk| disk == name)
                    || view.number.to_string() == name
            });
            is_selected.then_some(SelectedGuest { view, vm, disks })
        });
        let guests: Vec<SelectedGuest> = guests.collect();
        if let Some(name) = selected.filter(|_| guests.is_empty()) {
            return Err(refusal(
                ErrorCode::NotFound,
                format!("no guest is called {name}, and none whose memory is read has this disk"),
                "`fathom dirty` lists the guests; the disk needs `classify = true` and a running \
                 guest",
            ));
        }
        Ok(guests)
    }
}
