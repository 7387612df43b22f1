//! What the host has swapped out of guests' memory, and pagers have taken away, as a feature of the
//! daemon.

use std::sync::Arc;

use fathom_control::endpoints;

use super::leases::{self, LeaseRenewer};
use super::{Checker, metrics, of, problems};
use crate::configuration::Configuration;
use crate::daemon::feature::{Ending, Feature};
use crate::daemon::http::routes::Routes;
use crate::daemon::metrics::{MetricsText, Scrape};
use crate::daemon::parts::Parts;
use crate::daemon::problems::FoundProblem;
use crate::daemon::stop::Task;
use crate::daemon::{Daemon, Served};

/// The memory of guests that the host's kernel swaps, and pagers take away.
pub(crate) struct SwappedMemory;

impl Feature for SwappedMemory {
    fn keep(&self, _configuration: Option<&Configuration>, parts: &mut Parts) {
        parts.add(Checker::default());
        parts.add(LeaseRenewer::default());
    }

    fn prepare(&self, daemon: &Arc<Daemon>, _configuration: &Configuration) {
        let _ = daemon.part::<Checker>().daemon.set(Arc::downgrade(daemon));
    }

    fn stacked(&self, daemon: &Daemon, served: &Served) {
        let Some(layer) = of(served) else { return };
        let checker = daemon.part::<Checker>();
        checker.begin();
        if let Some(thread) = checker.thread() {
            layer.on_use(move || thread.unpark());
        }
    }

    fn end(&self, daemon: &Arc<Daemon>, stage: Ending) -> Vec<Task> {
        if stage == Ending::Work {
            daemon.part::<Checker>().wake();
        }
        Vec::new()
    }

    fn metrics(&self, scrape: &Scrape<'_>, page: &mut MetricsText) {
        metrics::of_memory(page, &scrape.daemon.watched());
        metrics::of_pagers(page, &scrape.daemon.paged_machines());
    }

    fn problems(&self, daemon: &Daemon, found: &mut Vec<FoundProblem>) {
        found.extend(daemon.paged_machines().iter().flat_map(problems::of_machine));
    }

    fn routes(&self, routes: &mut Routes) {
        routes.blocking(&endpoints::PAGER, |daemon, (), query, ()| {
            daemon.pager(query.guest.as_deref(), query.pagers)
        });
        routes.blocking(&endpoints::RENEW_LEASES, |daemon, (), (), ()| leases::renew(daemon));
    }
}
