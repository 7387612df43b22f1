//! Work of the daemon's own accord on the devices of disks, as a feature.

use std::sync::Arc;

use fathom_block::Disk;
use fathom_control::{ErrorBody, endpoints};

use super::BackgroundWork;
use super::equip::Beginnings;
use super::metrics::of_background;
use crate::configuration::Configuration;
use crate::daemon::feature::Feature;
use crate::daemon::http::routes::Routes;
use crate::daemon::metrics::{MetricsText, Scrape};
use crate::daemon::parts::Parts;
use crate::daemon::stack::Equipment;
use crate::daemon::{Daemon, Served};

/// The work that waits for idle devices.
pub(crate) struct Background;

impl Feature for Background {
    fn keep(&self, _configuration: Option<&Configuration>, parts: &mut Parts) {
        parts.add(BackgroundWork::default());
    }

    fn equip(&self, disk: &mut Equipment<'_>) -> Result<(), ErrorBody> {
        super::equip::equip(disk);
        Ok(())
    }

    fn equipped(&self, equipment: &Equipment<'_>, disk: &Arc<Disk>) {
        super::equip::equipped(equipment, disk);
    }

    fn prepare(&self, daemon: &Arc<Daemon>, _configuration: &Configuration) {
        let work = daemon.part::<BackgroundWork>();
        work.set_options(daemon.options.idle());
        let observing = Arc::downgrade(daemon);
        work.on_begin(move || {
            let observing = observing.clone();
            let observe = move || observing.upgrade().iter().for_each(|it| it.observe_disks());
            if let Err(error) = std::thread::Builder::new().name("observe".into()).spawn(observe) {
                tracing::warn!(%error, "disks beside background work are not observed");
            }
        });
    }

    fn opened(&self, daemon: &Daemon, served: &Served) {
        let work = daemon.part::<BackgroundWork>();
        if served.part::<Beginnings>().is_some_and(|Beginnings(count)| work.beginnings() != count) {
            // The disk may have been opened before work began on its devices, and listed after.
            work.announce();
        }
    }

    fn metrics(&self, scrape: &Scrape<'_>, page: &mut MetricsText) {
        of_background(page, &scrape.daemon.part::<BackgroundWork>().list());
    }

    fn routes(&self, routes: &mut Routes) {
        routes.at_once(&endpoints::BACKGROUND, |view, (), (), ()| {
            Ok(view.part::<BackgroundWork>().list())
        });
    }
}
