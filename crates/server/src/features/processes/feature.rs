//! The processes of guests, as a feature of the daemon.

use fathom_control::endpoints;

use crate::daemon::feature::Feature;
use crate::daemon::http::routes::Routes;

/// The processes of guests.
pub(crate) struct GuestsProcesses;

impl Feature for GuestsProcesses {
    fn routes(&self, routes: &mut Routes) {
        routes.blocking(&endpoints::PROCESSES, |daemon, (), query, ()| {
            daemon.processes(query.guest.as_deref())
        });
    }
}
