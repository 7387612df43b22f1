//! The caches of disks, as a feature of the daemon.

use std::path::Path;

use fathom_control::{DiskDefinition, ErrorBody};
use fathom_layers::cache::Caches;

use super::metrics::of_caches;
use crate::configuration::Configuration;
use crate::daemon::Daemon;
use crate::daemon::feature::{Feature, Parts};
use crate::daemon::metrics::Page;

/// The caches above disks.
pub(crate) struct CachesOfDisks;

impl Feature for CachesOfDisks {
    fn keep(&self, _configuration: Option<&Configuration>, parts: &mut Parts) {
        parts.add(Caches::default());
    }

    fn forget_home(
        &self,
        definition: &DiskDefinition,
        records: &Path,
        parts: &Parts,
    ) -> Result<(), ErrorBody> {
        super::forget(definition, records, parts)
    }

    fn metrics(&self, daemon: &Daemon, page: &mut Page) {
        of_caches(page, &daemon.caches(None, 0, 0).unwrap_or_default());
    }
}
