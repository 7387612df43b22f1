//! The stores that disks share, as a feature of the daemon.

use std::sync::Arc;

use fathom_control::ReloadReport;
use fathom_layers::{LimitGroups, ScheduleDevices};

use super::clusters::Clusters;
use super::models::ModelDevices;
use crate::configuration::Configuration;
use crate::daemon::Daemon;
use crate::daemon::feature::{Feature, Parts};

/// The clusters, modelled devices, and what layers of several disks share.
pub(crate) struct Stores;

impl Feature for Stores {
    fn keep(&self, configuration: Option<&Configuration>, parts: &mut Parts) {
        let clusters = Clusters::default();
        clusters.set(configuration.map_or(&[], |configuration| &configuration.clusters));
        parts.add(clusters);
        parts.add(LimitGroups::default());
        parts.add(ScheduleDevices::default());
        parts.add(ModelDevices::default());
    }

    fn reread(&self, daemon: &Arc<Daemon>, new: &Configuration, report: &mut ReloadReport) {
        if daemon.part::<Clusters>().set(&new.clusters) {
            report.changed.push("other clusters, for logs that are opened from now on".into());
        }
    }
}
