//! The devices beneath disks, as a feature of the daemon.

use super::metrics::of_devices;
use crate::daemon::Daemon;
use crate::daemon::feature::Feature;
use crate::daemon::metrics::Page;

/// The devices on which disks lie.
pub(crate) struct Devices;

impl Feature for Devices {
    fn metrics(&self, daemon: &Daemon, page: &mut Page) {
        of_devices(page, &daemon.devices());
    }
}
