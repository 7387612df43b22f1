//! The kept queries, as a feature of the daemon.

use std::sync::Arc;
use std::time::Duration;

use fathom_control::{ErrorBody, ReloadReport, endpoints};

use super::Queries;
use super::definition::QueryDefinition;
use super::metrics::{QueryMetrics, of_queries};
use crate::configuration::{Configuration, SectionKind};
use crate::daemon::Daemon;
use crate::daemon::feature::{Beginning, Ending, Feature, Start};
use crate::daemon::http::routes::Routes;
use crate::daemon::metrics::{MetricsText, Scrape};
use crate::daemon::parts::Parts;
use crate::daemon::stop::Task;

/// How long queries may take to write their last results.
const END_TIME_MAX: Duration = Duration::from_secs(1);

/// The queries of the configuration.
pub(crate) struct KeptQueries;

impl Feature for KeptQueries {
    fn sections(&self) -> Vec<SectionKind> {
        vec![SectionKind::of::<QueryDefinition>()]
    }

    fn keep(&self, _configuration: Option<&Configuration>, parts: &mut Parts) {
        parts.add(Queries::default());
    }

    fn begin(
        &self,
        daemon: &Arc<Daemon>,
        start: &Start<'_>,
        stage: Beginning,
    ) -> Result<Vec<ErrorBody>, ErrorBody> {
        if stage == Beginning::Observers {
            daemon.keep_queries(start.configuration.all())?;
        }
        Ok(Vec::new())
    }

    fn reload(&self, daemon: &Arc<Daemon>, new: &Configuration, report: &mut ReloadReport) {
        daemon.part::<Queries>().set(daemon, new.all(), report);
    }

    fn end(&self, daemon: &Arc<Daemon>, stage: Ending) -> Vec<Task> {
        let queries = daemon.part::<Queries>();
        match stage {
            Ending::Work => {}
            Ending::Observers => queries.begin_end(),
            Ending::Results => queries.end(END_TIME_MAX),
        }
        Vec::new()
    }

    fn metrics(&self, scrape: &Scrape<'_>, page: &mut MetricsText) {
        let queries = QueryMetrics {
            list: scrape.daemon.part::<Queries>().list(),
            series: scrape.daemon.query_series(),
        };
        of_queries(page, &queries);
    }

    fn routes(&self, routes: &mut Routes) {
        routes.at_once(&endpoints::QUERIES, |view, (), (), ()| Ok(view.part::<Queries>().list()));
    }
}
