//! NBD listeners and their exports.

use std::sync::{Arc, Mutex, PoisonError};

use fathom_block::Disk;
use fathom_control::{ErrorBody, ErrorCode, ExportsDefinition, ListenerDefinition};
use fathom_frontend::nbd;

use super::{Daemon, Listening};
use crate::wiring::{self, refusal};

impl Daemon {
    /// Listens for NBD clients.
    pub(super) fn serve_listener(&self, definition: &ListenerDefinition) -> Result<(), ErrorBody> {
        let exports = Arc::new(nbd::Exports::new());
        for served in self.served() {
            if is_exported(definition, served.disk.name()) {
                offer(&exports, &served.disk)?;
            }
        }
        let listener = wiring::start_listener(definition, &exports)?;
        let listening = Arc::new(Listening {
            exports,
            definition: Mutex::new(definition.clone()),
            listener: Mutex::new(Some(listener)),
        });
        self.with_state(|state| state.listeners.push(listening));
        Ok(())
    }

    /// Offers a new disk wherever it belongs.
    pub(super) fn export_disk(&self, disk: &Arc<Disk>) {
        for listening in self.listening() {
            if is_exported(&listening.definition(), disk.name()) {
                if let Err(refused) = offer(&listening.exports, disk) {
                    tracing::error!(disk = disk.name(), "{}", refused.message);
                }
            }
        }
    }

    /// Gives a listener other exports.
    pub(super) fn change_exports(&self, listening: &Listening, exports: ExportsDefinition) {
        let mut definition = listening.definition();
        definition.exports = exports;
        *listening.definition.lock().unwrap_or_else(PoisonError::into_inner) = definition.clone();
        let offered = listening.exports.list();
        for (name, _) in &offered {
            if !is_exported(&definition, name) {
                listening.exports.remove(name);
            }
        }
        for served in self.served() {
            let name = served.disk.name();
            let is_offered = offered.iter().any(|(other, _)| other == name);
            if is_exported(&definition, name) && !is_offered {
                if let Err(refused) = offer(&listening.exports, &served.disk) {
                    tracing::error!(disk = name, "{}", refused.message);
                }
            }
        }
    }
}

fn is_exported(definition: &ListenerDefinition, name: &str) -> bool {
    match &definition.exports {
        ExportsDefinition::All => true,
        ExportsDefinition::Named(names) => names.iter().any(|other| other == name),
    }
}

fn offer(exports: &nbd::Exports, disk: &Arc<Disk>) -> Result<(), ErrorBody> {
    let text = if disk.vm().is_empty() { String::new() } else { format!("of {}", disk.vm()) };
    exports.add(disk.name(), &text, Arc::clone(disk)).map_err(|error| {
        let message = format!("the disk {:?} cannot be exported: {error}", disk.name());
        refusal(ErrorCode::Conflict, message, "choose another name")
    })
}
