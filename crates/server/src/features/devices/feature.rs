//! The devices beneath disks, as a feature of the daemon.

use std::sync::Arc;

use fathom_control::{ErrorBody, endpoints};

use super::Beneath;
use super::metrics::of_devices;
use crate::daemon::feature::Feature;
use crate::daemon::http::routes::Routes;
use crate::daemon::metrics::{MetricsText, Scrape};
use crate::daemon::stack::Equipment;

/// The devices on which disks lie.
pub(crate) struct Devices;

impl Feature for Devices {
    fn equip(&self, disk: &mut Equipment<'_>) -> Result<(), ErrorBody> {
        let beneath = disk.had::<Arc<Beneath>>().unwrap_or_default();
        disk.parts.add(beneath);
        Ok(())
    }

    fn metrics(&self, scrape: &Scrape<'_>, page: &mut MetricsText) {
        of_devices(page, &scrape.daemon.devices());
    }

    fn routes(&self, routes: &mut Routes) {
        routes.blocking(&endpoints::DEVICES, |daemon, (), (), ()| Ok(daemon.devices()));
    }
}
