//! The guests whose memory is read, as a feature of the daemon.

use super::Introspection;
use super::metrics::{of_groups, of_insight};
use crate::configuration::Configuration;
use crate::daemon::Daemon;
use crate::daemon::Served;
use crate::daemon::feature::{Feature, Parts};
use crate::daemon::metrics::Page;
use crate::daemon::stack::Equipment;
use fathom_block::Disk;
use fathom_control::DiskStatus;
use fathom_control::ErrorBody;
use std::sync::Arc;

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

    fn metrics(&self, daemon: &Daemon, page: &mut Page) {
        of_insight(page, &daemon.disk_list());
        of_groups(page, &daemon.groups());
    }
}
