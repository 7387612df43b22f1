//! The verification of pools in use, as a feature of the daemon.

use std::sync::Arc;

use fathom_control::{ErrorBody, ReloadReport};

use super::Scrubs;
use super::options::ScrubRule;
use crate::configuration::{Configuration, SectionKind};
use crate::daemon::feature::{Beginning, Ending, Feature, Start};
use crate::daemon::parts::Parts;
use crate::daemon::problems::FoundProblem;
use crate::daemon::stop::Task;
use crate::daemon::{Daemon, Served};

/// Scrubs of pools, by rule and on demand.
pub(crate) struct PoolScrubs;

impl Feature for PoolScrubs {
    fn sections(&self) -> Vec<SectionKind> {
        vec![SectionKind::of::<ScrubRule>()]
    }

    fn keep(&self, _configuration: Option<&Configuration>, parts: &mut Parts) {
        parts.add(Scrubs::default());
    }

    fn begin(
        &self,
        daemon: &Arc<Daemon>,
        start: &Start<'_>,
        stage: Beginning,
    ) -> Result<Vec<ErrorBody>, ErrorBody> {
        if stage == Beginning::Work {
            daemon.set_scrub_rules(start.configuration.all());
        }
        Ok(Vec::new())
    }

    fn opened(&self, daemon: &Daemon, served: &Served) {
        let store = served.live().definition.store.clone();
        if let Some(path) = store {
            daemon.load_scrubs(&path);
            daemon.wake_scrub_rules();
        }
    }

    fn reload(&self, daemon: &Arc<Daemon>, new: &Configuration, report: &mut ReloadReport) {
        if daemon.set_scrub_rules(new.all()) {
            report.changed.push("other rules for scrubs".into());
        }
    }

    fn end(&self, daemon: &Arc<Daemon>, stage: Ending) -> Vec<Task> {
        if stage == Ending::Work {
            daemon.save_scrubs();
        }
        Vec::new()
    }

    fn problems(&self, daemon: &Daemon, found: &mut Vec<FoundProblem>) {
        found.extend(daemon.scrub_problems());
    }
}
