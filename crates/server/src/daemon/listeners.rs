//! NBD listeners and their exports.

use std::sync::{Arc, Mutex, PoisonError};

use fathom_control::{ErrorBody, ErrorCode, ExportsDefinition, ListenerDefinition};
use fathom_frontend::nbd;

use super::changes::stopping;
use super::{Daemon, Listening, Served};
use crate::wiring::{self, refusal};

impl Daemon {
    /// Listens for NBD clients.
    pub(super) fn serve_listener(&self, definition: &ListenerDefinition) -> Result<(), ErrorBody> {
        let exports = Arc::new(nbd::Exports::new());
        for served in self.served() {
            if is_exported(definition, served.disk.name()) {
                offer(&exports, &served)?;
            }
        }
        let listener = wiring::start_listener(definition, &exports, &self.nbd_budget)?;
        let listening = Arc::new(Listening {
            exports,
            definition: Mutex::new(definition.clone()),
            listener: Mutex::new(Some(listener)),
        });
        let refused = self.with_state(|state| {
            if self.is_stopping() {
                return true;
            }
            state.listeners.push(Arc::clone(&listening));
            false
        });
        if refused {
            let listener = listening.listener().take();
            drop(listener);
            return Err(stopping());
        }
        // Offer disks that were added before the listener was in the list.
        for served in self.served() {
            export_to(&listening, &served);
        }
        Ok(())
    }

    /// Offers a new disk on all listeners that export it.
    pub(super) fn export_disk(&self, served: &Served) {
        for listening in self.listening() {
            export_to(&listening, served);
        }
    }

    /// Changes the exports of a listener.
    pub(super) fn change_exports(&self, listening: &Listening, exports: ExportsDefinition) {
        let mut definition = listening.definition();
        definition.exports = exports;
        *listening.definition.lock().unwrap_or_else(PoisonError::into_inner) = definition.clone();
        let offered = listening.exports.list();
        for (name, _) in &offered {
            if !is_exported(&definition, name) {
                // Its clients are disconnected after their requests in flight; there is no need to
                // wait for that.
                listening.exports.withdraw(name);
            }
        }
        for served in self.served() {
            export_to(listening, &served);
        }
    }
}

/// Offers a disk on a listener, if the listener exports it and does not offer it yet.
fn export_to(listening: &Listening, served: &Served) {
    let name = served.disk.name();
    if !is_exported(&listening.definition(), name)
        || listening.exports.list().iter().any(|(other, _)| other == name)
    {
        return;
    }
    if let Err(refused) = offer(&listening.exports, served) {
        tracing::error!(disk = name, "{}", refused.message);
    }
}

fn is_exported(definition: &ListenerDefinition, name: &str) -> bool {
    match &definition.exports {
        ExportsDefinition::All => true,
        ExportsDefinition::Named(names) => names.iter().any(|other| other == name),
    }
}

fn offer(exports: &nbd::Exports, served: &Served) -> Result<(), ErrorBody> {
    let disk = &served.disk;
    let text = if disk.vm().is_empty() { String::new() } else { format!("of {}", disk.vm()) };
    match exports.add(disk.name(), &text, Arc::clone(disk)) {
        Ok(()) => {}
        Err(nbd::NameError::Taken) if exports.list().iter().any(|(_, d)| Arc::ptr_eq(d, disk)) => {}
        Err(error) => {
            let message = format!("the disk {:?} cannot be exported: {error}", disk.name());
            return Err(refusal(ErrorCode::Conflict, message, "choose another name"));
        }
    }
    // A withdrawal that began earlier has not seen this export.
    if served.withdrawal().is_some() {
        exports.withdraw(disk.name());
    }
    Ok(())
}
