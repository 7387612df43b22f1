//! The start: disks are opened side by side, each in a thread of its own, and a disk that cannot be
//! served keeps no other from it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fathom_control::ErrorBody;

use super::Daemon;
use super::unserved::{ServingOutcome, Ticket};
use crate::configuration::Configuration;
use crate::daemon::feature::{Beginning, Start};
use crate::features::FEATURES;

/// How long NBD listeners wait for the disks, so that their first clients find them.
const LISTEN_TIME_MAX: Duration = Duration::from_secs(1);
/// How long the announcement that the daemon is ready waits for the disks.
const READY_TIME_MAX: Duration = Duration::from_secs(10);

impl Daemon {
    /// Serves the disks and listeners of the configuration. Returns when each disk is served or has
    /// the reason why not, or after some time, although a disk is still being opened. With
    /// `is_strict`, waits for all of them.
    ///
    /// # Errors
    /// If a kept query cannot be begun. With `is_strict`, the reasons of all disks and listeners
    /// that cannot be served. The caller stops the daemon.
    pub(crate) fn begin(
        self: &Arc<Self>,
        configuration: &Configuration,
        is_strict: bool,
    ) -> Result<(), Vec<ErrorBody>> {
        // A reload waits until the listeners are there.
        let change = self.change_configuration().map_err(|refused| vec![refused])?;
        let begun = Instant::now();
        let (listen_by, mut tickets) = (begun + LISTEN_TIME_MAX, Vec::<Ticket>::new());
        for definition in self.planned(configuration) {
            let ticket = self.begin_serving(&definition);
            if definition.model.is_some() {
                // Disks on one modelled device lie behind each other in the order of the file.
                self.unserved.wait(&ticket, Some(listen_by));
            }
            tickets.push(ticket);
        }
        let mut refusals = self.wait_for(&tickets, (!is_strict).then_some(listen_by));
        if is_strict && !refusals.is_empty() {
            return Err(refusals);
        }
        let start = Start { configuration, is_strict };
        for stage in [Beginning::Observers, Beginning::Clients] {
            refusals.extend(self.begin_features(&start, stage)?);
            if is_strict && !refusals.is_empty() {
                return Err(refusals);
            }
        }
        self.begin_features(&start, Beginning::Work)?;
        drop(change);
        self.wait_for(&tickets, Some(begun + READY_TIME_MAX));
        self.warn_of_unreachable_disks();
        Ok(())
    }

    /// Begins the features' work at a stage. Returns what they cannot do yet.
    fn begin_features(
        self: &Arc<Self>,
        start: &Start<'_>,
        stage: Beginning,
    ) -> Result<Vec<ErrorBody>, Vec<ErrorBody>> {
        let mut refusals = Vec::new();
        for feature in FEATURES {
            let refused = feature.begin(self, start, stage).map_err(|refused| vec![refused])?;
            refusals.extend(refused);
        }
        Ok(refusals)
    }

    /// Waits until each disk is served or refused, until `end` if there is one. Returns the reasons
    /// of those that are refused.
    fn wait_for(&self, tickets: &[Ticket], end: Option<Instant>) -> Vec<ErrorBody> {
        let outcomes = tickets.iter().map(|ticket| self.unserved.wait(ticket, end));
        let refused = outcomes.filter_map(|outcome| match outcome {
            ServingOutcome::Refused(refused) => Some(refused),
            ServingOutcome::Gone | ServingOutcome::Opening => None,
        });
        refused.collect()
    }

    /// Warns of disks that no client can reach, which is rarely intended.
    fn warn_of_unreachable_disks(&self) {
        let listening = self.listening();
        for served in self.served() {
            let name = served.disk.name();
            let exported = listening
                .iter()
                .any(|listening| listening.exports.list().iter().any(|(other, _)| other == name));
            if !exported && served.live().server.is_none() {
                tracing::warn!(
                    disk = name,
                    "no client can reach it: it has no [disk.vhost_user], and no [[nbd]] exports it"
                );
            }
        }
    }

    /// Marks the daemon as ready. Returns the time that the start took, in microseconds.
    pub(crate) fn ready(&self) -> u64 {
        *self.ready_us.get_or_init(|| self.begun.elapsed().as_micros() as u64)
    }
}
