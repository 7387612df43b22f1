//! The disks whose load is carried elsewhere, as a feature of the daemon.

use std::sync::Arc;

use fathom_control::{ErrorBody, endpoints};

use super::Offloads;
use super::metrics::of_offload;
use crate::configuration::Configuration;
use crate::daemon::feature::{Beginning, Feature, Start};
use crate::daemon::http::routes::Routes;
use crate::daemon::metrics::{MetricsText, Scrape};
use crate::daemon::parts::Parts;
use crate::daemon::{Daemon, Served};

/// The load that is carried elsewhere.
pub(crate) struct Offload;

impl Feature for Offload {
    fn keep(&self, _configuration: Option<&Configuration>, parts: &mut Parts) {
        parts.add(Offloads::default());
    }

    fn begin(
        &self,
        daemon: &Arc<Daemon>,
        _start: &Start<'_>,
        stage: Beginning,
    ) -> Result<Vec<ErrorBody>, ErrorBody> {
        if stage == Beginning::Work {
            daemon.allow_offloads();
        }
        Ok(Vec::new())
    }

    fn stacked(&self, daemon: &Daemon, _served: &Served) {
        daemon.begin_offloads();
    }

    fn metrics(&self, scrape: &Scrape<'_>, page: &mut MetricsText) {
        of_offload(page, &scrape.daemon.view().offload_report(None).unwrap_or_default());
    }

    fn routes(&self, routes: &mut Routes) {
        routes.at_once(&endpoints::OFFLOAD, |view, (), query, ()| {
            view.offload_report(query.disk.as_deref())
        });
        routes
            .at_once(&endpoints::OFFLOAD_HISTORY, |view, name, (), ()| view.offload_history(&name));
        // A start waits until the log has been tried out.
        routes.change(&endpoints::CHANGE_OFFLOAD, |daemon, name, (), request| {
            daemon.change_offload(&name, request)
        });
        routes.change(&endpoints::FORGET_VOLUME, |daemon, (cluster, volume), (), ()| {
            daemon.forget_volume(cluster, volume)
        });
    }
}
