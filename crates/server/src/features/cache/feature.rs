//! The caches of disks, as a feature of the daemon.

use std::path::Path;

use fathom_control::{DiskDefinition, ErrorBody};
use fathom_layers::cache::Caches;

use super::Host;
use super::changes::check_answers;
use super::metrics::of_caches;
use crate::configuration::Configuration;
use crate::daemon::Daemon;
use crate::daemon::feature::{Feature, Parts};
use crate::daemon::metrics::Page;
use crate::daemon::stack::Equipment;
use crate::features::log::{CacheStores, DiskLog};
use fathom_block::Disk;
use std::sync::Arc;

/// The caches above disks.
pub(crate) struct CachesOfDisks;

impl Feature for CachesOfDisks {
    fn keep(&self, _configuration: Option<&Configuration>, parts: &mut Parts) {
        parts.add(Caches::default());
    }

    fn equip(&self, disk: &mut Equipment<'_>) -> Result<(), ErrorBody> {
        let log = disk.parts.get::<DiskLog>();
        match &disk.before {
            Some(before) if log.is_none() => {
                check_answers(&before.layers, &disk.definition.name, before.parts.get().as_ref())?;
            }
            Some(_) => {}
            None => super::reject(disk.definition, disk.records, disk.shared)?,
        }
        disk.cache_host = Some(Box::new(Host {
            definition: disk.definition,
            records: disk.records,
            stores: disk.shared.of::<CacheStores>(),
            log,
        }));
        Ok(())
    }

    fn exchanging(&self, disk: &Equipment<'_>) {
        if let Some(before) = disk.before.as_ref().filter(|_| !disk.parts.has::<DiskLog>()) {
            super::leave_log(&before.disk.layers());
        }
    }

    fn abandon(&self, disk: &Equipment<'_>) {
        if let Some(before) = &disk.before {
            super::note_log(&before.disk.layers(), before.parts.get().as_ref());
        }
    }

    fn equipped(&self, equipment: &Equipment<'_>, disk: &Arc<Disk>) {
        super::note_log(&disk.layers(), equipment.parts.get().as_ref());
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
