//! The guests whose memory is read, as a feature of the daemon.

use std::sync::Arc;

use fathom_block::Disk;
use fathom_control::{DiskStatus, ErrorBody, endpoints};

use super::Introspection;
use super::metrics::{of_groups, of_insight};
use crate::configuration::Configuration;
use crate::daemon::Served;
use crate::daemon::feature::Feature;
use crate::daemon::http::routes::Routes;
use crate::daemon::metrics::{MetricsText, Scrape};
use crate::daemon::parts::Parts;
use crate::daemon::stack::Equipment;

/// What is known of guests.
pub(crate) struct Guests;

impl Feature for Guests {
    fn keep(&self, configuration: Option<&Configuration>, parts: &mut Parts) {
        let Some(configuration) = configuration else { return };
        let groups_max = configuration.daemon.definition.metrics_cgroups_max;
        parts.add(Introspection::new(groups_max));
    }

    fn equip(&self, disk: &mut Equipment<'_>) -> Result<(), ErrorBody> {
        super::classify::equip(disk)
    }

    fn equipped(&self, equipment: &Equipment<'_>, _disk: &Arc<Disk>) {
        super::classify::equipped(equipment);
    }

    fn status(&self, served: &Served, status: &mut DiskStatus) {
        status.insight = super::usage::insight(served);
    }

    fn metrics(&self, scrape: &Scrape<'_>, page: &mut MetricsText) {
        of_insight(page, &scrape.disks);
        of_groups(page, &scrape.daemon.groups());
    }

    fn routes(&self, routes: &mut Routes) {
        routes.blocking(&endpoints::GUESTS, |daemon, (), (), ()| Ok(daemon.guests()));
        routes.blocking(&endpoints::USAGE, |daemon, (), query, ()| {
            daemon.usage(query.disk.as_deref(), query.vm.as_deref())
        });
        routes.blocking(&endpoints::SLOW, |daemon, (), query, ()| {
            daemon.slow(query.disk.as_deref(), query.count.unwrap_or(usize::MAX))
        });
    }
}
