//! The verification of pools in use, as a feature of the daemon.

use std::sync::Arc;

use fathom_control::{ErrorBody, ReloadReport, ScrubEntry, ScrubPhase};

use super::Scrubs;
use super::options::ScrubRule;
use crate::configuration::{Configuration, SectionKind};
use crate::daemon::feature::{Beginning, Ending, Feature, Start};
use crate::daemon::metrics::{Family, MetricsText, Scrape};
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

    fn metrics(&self, scrape: &Scrape<'_>, page: &mut MetricsText) {
        let found = scrape.daemon.scrubs_of_pools();
        let families: [Family<'_, ScrubEntry, f64>; 5] = [
            (
                "fathom_pool_scrub_running",
                "gauge",
                "1 while the pool is being verified.",
                |scrub| f64::from(u8::from(scrub.phase == ScrubPhase::Running)),
            ),
            (
                "fathom_pool_scrub_progress_ratio",
                "gauge",
                "The part that the verification of the pool has visited, from 0 to 1.",
                |scrub| {
                    let (done, total) = scrub.progress();
                    (done as f64 / total.max(1) as f64).min(1.0)
                },
            ),
            (
                "fathom_pool_scrub_ended_time_seconds",
                "gauge",
                "When the last verification of the pool ended, since 1970; 0 while it is in progress.",
                |scrub| scrub.ended_s.unwrap_or(0) as f64,
            ),
            (
                "fathom_pool_scrub_damaged_blocks",
                "gauge",
                "The damaged blocks that the verification of the pool has found.",
                |scrub| scrub.damaged_blocks as f64,
            ),
            (
                "fathom_pool_scrub_damaged_pages",
                "gauge",
                "The damaged pages of maps that the verification of the pool has found.",
                |scrub| scrub.damaged_pages as f64,
            ),
        ];
        for (name, kind, help, value) in families {
            page.family(name, kind, help);
            for (path, scrub) in &found {
                page.sample(name, &[("pool", &path.display().to_string())], value(scrub));
            }
        }
    }

    fn problems(&self, daemon: &Daemon, found: &mut Vec<FoundProblem>) {
        found.extend(daemon.scrub_problems());
    }
}
