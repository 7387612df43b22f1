//! The NBD listeners, as a feature of the daemon.

use std::sync::Arc;

use fathom_control::{ErrorBody, ProblemKind, ReloadReport};
use fathom_frontend::nbd;

use super::Closed;
use super::metrics::of_listeners;
use crate::configuration::Configuration;
use crate::daemon::feature::{Beginning, Ending, Feature, Start};
use crate::daemon::metrics::{MetricsText, Scrape};
use crate::daemon::parts::Parts;
use crate::daemon::problems::FoundProblem;
use crate::daemon::stop::Task;
use crate::daemon::{Daemon, Served};

/// The listeners to NBD clients.
pub(crate) struct Nbd;

impl Feature for Nbd {
    fn keep(&self, configuration: Option<&Configuration>, parts: &mut Parts) {
        let Some(configuration) = configuration else { return };
        let options = &configuration.daemon.definition;
        let budget = nbd::RequestBudget::new(options.nbd_memory.0, options.nbd_client_memory.0);
        parts.add(Arc::new(budget));
        parts.add(Arc::new(Closed::default()));
    }

    fn begin(
        &self,
        daemon: &Arc<Daemon>,
        start: &Start<'_>,
        stage: Beginning,
    ) -> Result<Vec<ErrorBody>, ErrorBody> {
        match stage {
            Beginning::Clients => {}
            Beginning::Work => {
                daemon.retry_listeners();
                return Ok(Vec::new());
            }
            Beginning::Observers => return Ok(Vec::new()),
        }
        let listeners = start.configuration.listeners.iter();
        let refused = listeners.filter_map(|it| daemon.serve_listener(&it.definition).err());
        Ok(refused.collect())
    }

    fn opened(&self, daemon: &Daemon, served: &Served) {
        daemon.export_disk(served);
    }

    fn reload(&self, daemon: &Arc<Daemon>, new: &Configuration, report: &mut ReloadReport) {
        daemon.reload_listeners(new, report);
        daemon.refresh_listeners(report);
    }

    fn end(&self, daemon: &Arc<Daemon>, stage: Ending) -> Vec<Task> {
        if stage != Ending::Work {
            return Vec::new();
        }
        daemon.part::<Arc<Closed>>().stop();
        let mut tasks = Vec::new();
        for listening in daemon.listening() {
            let address = listening.definition().address;
            if let Some(listener) = listening.take_listener() {
                tasks.push(Task::new(format!("the listener at {address}"), move || {
                    listener.shutdown();
                    Ok(())
                }));
            }
        }
        tasks
    }

    fn problems(&self, daemon: &Daemon, found: &mut Vec<FoundProblem>) {
        let closed = if daemon.is_stopping() { Vec::new() } else { daemon.closed_listeners() };
        found.extend(closed.into_iter().map(|(address, reason)| {
            let closed =
                FoundProblem::new(ProblemKind::ListenerClosed, reason.message, reason.remedy);
            FoundProblem { cause: address, ..closed }
        }));
    }

    fn metrics(&self, scrape: &Scrape<'_>, page: &mut MetricsText) {
        of_listeners(page, &scrape.info.listeners);
    }
}
